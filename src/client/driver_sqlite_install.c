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
#include "upgrade_sqlite_2.h"

static const rs_schema schema = {.tables = rs_schema_sqlite, .upgrades = {rs_upgrade_sqlite_2}};

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

rs_result
rs_sqlite_find_version(rs_session *base, int64_t *version)
{
	static const rs_command exists = {.text =
										  "SELECT count(*) FROM sqlite_schema WHERE type = 'table'"
										  " AND name = 'ruststream_version'",
									  .slot = -1};
	static const rs_command read = {.text = "SELECT max(version) FROM ruststream_version",
									.slot = -1};
	int64_t count = 0;
	rs_result result = rs_sqlite_check_file(base);

	*version = 0;
	if (result == RS_DONE)
		result = base->driver->execute(base, &exists, NULL, 0, read_number, &count, NULL);
	if (result == RS_DONE && count > 0)
		result = base->driver->execute(base, &read, NULL, 0, read_number, version, NULL);
	return result;
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

static rs_result
run_text(rs_session *base, const char *text)
{
	return rs_sqlite_run((rs_sqlite_session *) base, text);
}

rs_result
rs_sqlite_install(rs_session *base, bool with_wal, ruststream_notice_callback notice, void *arg)
{
	rs_result result = see_to_wal(base, with_wal, notice, arg);

	if (result == RS_DONE)
		result = base->driver->begin(base, RS_FOR_US, NULL);
	if (result == RS_DONE)
		result = rs_make_tables(base, &schema, run_text);
	return rs_commit_or_roll_back(base, result);
}
