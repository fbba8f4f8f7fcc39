/*-------------------------------------------------------------------------
 *
 * driver_sqlite_install.c
 *	  The SQLite driver: our own tables in a database.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_sqlite.h"

#include <stdio.h>
#include <string.h>

#include "schema_sqlite.h" /* made of schema_sqlite.sql */

#define SCHEMA_VERSION 1

static bool
read_number(void *arg, const rs_value *columns, int count)
{
	(void) count;
	*(int64_t *) arg = columns[0].integer;
	return false;
}

static bool
read_text(void *arg, const rs_value *columns, int count)
{
	(void) count;
	(void) snprintf(arg, 32, "%.*s", (int) columns[0].length, columns[0].text);
	return false;
}

/* The version of our tables in this database; 0: there are none. */
static rs_result
installed_version(rs_session *base, int64_t *version)
{
	static const rs_command exists = {.text =
										  "SELECT count(*) FROM sqlite_schema WHERE type = 'table'"
										  " AND name = 'ruststream_version'",
									  .slot = -1};
	static const rs_command read = {.text = "SELECT max(version) FROM ruststream_version",
									.slot = -1};
	int64_t count = 0;
	rs_result result = base->driver->execute(base, &exists, NULL, 0, read_number, &count, NULL);

	*version = 0;
	if (result == RS_DONE && count > 0)
		result = base->driver->execute(base, &read, NULL, 0, read_number, version, NULL);
	return result;
}

rs_result
rs_sqlite_check_installed(rs_session *base)
{
	int64_t version;
	rs_result result = rs_sqlite_check_file(base);

	if (result == RS_DONE)
		result = installed_version(base, &version);
	if (result != RS_DONE || version == SCHEMA_VERSION)
		return result;
	if (version == 0)
		rs_error_set(&base->error, RUSTSTREAM_NOT_INSTALLED, "", "Run: ruststream install URL",
					 "this database has no tables of ruststream yet");
	else
		rs_error_set(&base->error, RUSTSTREAM_NOT_INSTALLED, "",
					 version > SCHEMA_VERSION ? "Use the ruststream that made them."
											  : "Run: ruststream install URL",
					 "the tables of ruststream in this database are of version %lld, and this is "
					 "for version %d",
					 (long long) version, SCHEMA_VERSION);
	return RS_FAILED;
}

static rs_result
see_to_wal(rs_session *base, bool with_wal, ruststream_notice_callback notice, void *arg)
{
	const rs_command ask = {.text = with_wal ? "PRAGMA journal_mode = wal" : "PRAGMA journal_mode",
							.slot = -1};
	char mode[32] = "";
	rs_result result = base->driver->execute(base, &ask, NULL, 0, read_text, mode, NULL);

	if (result == RS_DONE && strcmp(mode, "wal") != 0 && notice != NULL)
		notice(arg, with_wal
						? "write-ahead logging could not be turned on for this database"
						: "write-ahead logging is off: with it readers and the writer do not wait "
						  "for each other; install --wal turns it on");
	return result;
}

rs_result
rs_sqlite_install(rs_session *base, bool with_wal, ruststream_notice_callback notice, void *arg)
{
	rs_sqlite_session *session = (rs_sqlite_session *) base;
	int64_t version = 0;
	rs_result result = see_to_wal(base, with_wal, notice, arg);

	if (result == RS_DONE)
		result = base->driver->begin(base, RS_FOR_US, NULL);
	if (result == RS_DONE)
		result = installed_version(base, &version);
	if (result == RS_DONE && version == 0)
		result = rs_sqlite_run(session, rs_schema_sqlite);
	if (result == RS_DONE && version > SCHEMA_VERSION)
		result = rs_sqlite_check_installed(base);
	if (result == RS_DONE)
		result = base->driver->commit(base);
	if (result != RS_DONE)
	{
		rs_error kept = base->error;

		(void) base->driver->rollback(base);
		base->error = kept;
	}
	return result;
}
