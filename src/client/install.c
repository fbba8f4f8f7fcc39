/*-------------------------------------------------------------------------
 *
 * install.c
 *	  Our tables in a database: which version they are of, making them, and bringing those of an
 *	  earlier version up to date.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

static rs_result
refuse_version(rs_session *session, int64_t version)
{
	if (version == 0)
		rs_error_set(&session->error, RUSTSTREAM_NOT_INSTALLED, "", "Run: ruststream install URL",
					 "this database has no tables of ruststream yet");
	else
		rs_error_set(&session->error, RUSTSTREAM_NOT_INSTALLED, "",
					 version > RS_SCHEMA_VERSION ? "Use the ruststream that made them."
												 : "Run: ruststream install URL",
					 "the tables of ruststream in this database are of version %lld, and this is "
					 "for version %d",
					 (long long) version, RS_SCHEMA_VERSION);
	return RS_FAILED;
}

ruststream_code
rs_check_installed(ruststream *handle)
{
	int64_t version = 0;
	rs_result result = handle->driver->find_version(handle->session, &version);

	if (result == RS_DONE && version != RS_SCHEMA_VERSION)
		result = refuse_version(handle->session, version);
	return result == RS_DONE ? RUSTSTREAM_OK : rs_take_error(handle);
}

rs_result
rs_make_tables(rs_session *session, const rs_schema *schema,
			   rs_result (*run)(rs_session *session, const char *text))
{
	int64_t version = 0;
	rs_result result = session->driver->find_version(session, &version);

	if (result == RS_DONE && version <= 0)
	{
		result = run(session, schema->tables);
		if (result == RS_DONE)
			result = session->driver->find_version(session, &version);
	}
	for (; result == RS_DONE && version < RS_SCHEMA_VERSION; version++)
		result = run(session, schema->upgrades[version - 1]);
	if (result == RS_DONE && version > RS_SCHEMA_VERSION)
		result = refuse_version(session, version);
	return result;
}

rs_result
rs_commit_or_roll_back(rs_session *session, rs_result result)
{
	if (result == RS_DONE)
		result = session->driver->commit(session);
	if (result != RS_DONE)
	{
		rs_error kept = session->error;

		(void) session->driver->rollback(session);
		session->error = kept;
	}
	return result;
}

ruststream_code
ruststream_install(ruststream *handle, bool with_wal)
{
	ruststream_code code = rs_begin_call(handle);

	if (code == RUSTSTREAM_OK && handle->driver->install(handle->session, with_wal, handle->notice,
														 handle->notice_arg) != RS_DONE)
		code = rs_take_error(handle);
	return code;
}
