/*-------------------------------------------------------------------------
 *
 * driver_mysql_install.c
 *	  The driver for MySQL and MariaDB: our own tables.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_mysql.h"

#include <stdlib.h>
#include <string.h>

#include "schema_mysql.h" /* made of schema_mysql.sql */
#include "upgrade_mysql_2.h"

#define INSTALL_KEY "ruststream install"

static const rs_schema schema = {.tables = rs_schema_mysql, .upgrades = {rs_upgrade_mysql_2}};

/*
 * What the portable statements (catalog_text.c) cannot say here: DELAYED and SQLSTATE are reserved
 * words, and a message that is no UTF-8 would be refused.
 */
#define TEXT "COALESCE(CONVERT(CAST(? AS BINARY) USING utf8mb4), '(not UTF-8)')"

const char *const rs_mysql_catalog[RS_CATALOG_COUNT] = {
	[RS_CATALOG_FAILURE_INSERT] = "INSERT INTO ruststream_failure (at, subscription, queue, id, "
								  "attempt, `sqlstate`, message, "
								  "hint) VALUES (?, ?, ?, ?, ?, ?, " TEXT ", ?)",
	[RS_CATALOG_COUNTER_ADD] =
		"UPDATE ruststream_counter SET acked = acked + ?, retried = retried + ?, "
		"`delayed` = `delayed` + ?, discarded = discarded + ?, dead_lettered = dead_lettered + ?, "
		"failed = failed + ?, lease_lost = lease_lost + ?, transient = transient + ? "
		"WHERE subscription = ?",
	[RS_CATALOG_COUNTER_INSERT] =
		"INSERT INTO ruststream_counter (acked, retried, `delayed`, discarded, dead_lettered, "
		"failed, lease_lost, transient, subscription) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
};

static bool
read_number(void *arg, const rs_value *columns, int count)
{
	(void) count;
	*(int64_t *) arg = columns[0].integer;
	return false;
}

rs_result
rs_mysql_find_version(rs_session *base, int64_t *version)
{
	static const rs_command command = {.text = "SELECT MAX(version) FROM ruststream_version",
									   .slot = -1};
	rs_result result;

	*version = 0;
	result = rs_mysql_execute(base, &command, NULL, 0, read_number, version, NULL);
	if (result == RS_FAILED && rs_mysql_of(base)->code == RS_MYSQL_NO_SUCH_TABLE)
		return RS_DONE;
	return result;
}

/* A statement ends with ";" at the end of a line; comments are whole lines. */
static rs_result
run_text(rs_session *base, const char *text)
{
	rs_mysql_session *session = rs_mysql_of(base);
	char *copy = strdup(text);
	char *next = copy;
	rs_result result = copy != NULL ? RS_DONE : rs_mysql_no_memory(session);

	while (result == RS_DONE && next != NULL)
	{
		char *statement = next;
		char *end = strstr(statement, ";\n");

		next = end != NULL ? end + 2 : NULL;
		if (end == NULL)
			break; /* nothing but space behind the last one */
		*end = '\0';
		result = rs_mysql_run(session, statement);
	}
	free(copy);
	return result;
}

/*
 * Each statement of the schema commits by itself and does nothing where it has been run; the
 * version comes last.  So an installation that was broken off is no version, and an upgrade the
 * earlier one, and is completed by the next install.
 */
rs_result
rs_mysql_install(rs_session *base, bool with_wal, ruststream_notice_callback notice, void *arg)
{
	bool locked = false;
	rs_result result = rs_mysql_lock_key(base, INSTALL_KEY, &locked);

	(void) with_wal;
	(void) notice;
	(void) arg;
	if (result == RS_DONE && !locked)
	{
		rs_error_set(&base->error, RUSTSTREAM_BUSY, "", "Wait for it.",
					 "another installation is at work in this database");
		return RS_FAILED;
	}
	if (result == RS_DONE)
		result = rs_make_tables(base, &schema, run_text);
	if (locked)
	{
		rs_error kept = base->error;

		rs_mysql_unlock_key(base, INSTALL_KEY);
		base->error = kept;
	}
	return result;
}
