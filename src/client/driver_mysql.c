/*-------------------------------------------------------------------------
 *
 * driver_mysql.c
 *	  The driver for MySQL and MariaDB: sessions, transactions, keys.
 *
 * A session is at READ COMMITTED, in UTC, and in an SQL mode of ours, whatever the server's
 * defaults say.  A transaction at another level says so before it begins.  Affected rows
 * are those found, not those changed, since the guards of settlements count them.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_mysql.h"

#include <errmsg.h>
#include <limits.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------------- errors */

/* The server or the library says that the connection is over. */
static bool
is_loss(unsigned code)
{
	return (code >= CR_MIN_ERROR && code <= CR_MAX_ERROR && code != CR_OUT_OF_MEMORY) ||
		   (code >= CER_MIN_ERROR && code <= CR_MARIADB_LAST_ERROR) || code == RS_MYSQL_SHUTDOWN ||
		   code == RS_MYSQL_CONNECTION_KILLED || code == RS_MYSQL_SESSION_KILLED ||
		   code == RS_MYSQL_DISCONNECTED;
}

static bool
is_transient(unsigned code)
{
	return code == RS_MYSQL_DEADLOCK || code == RS_MYSQL_LOCK_WAIT_TIMEOUT ||
		   code == RS_MYSQL_RECORD_CHANGED || code == RS_MYSQL_LOCK_NOWAIT;
}

static const char *
hint_of(unsigned code)
{
	switch (code)
	{
		case RS_MYSQL_BINLOG_STATEMENT:
			return "The server's binlog_format is STATEMENT, and statements cannot be logged so at "
				   "READ COMMITTED, which claims and settlements run at. Set it to ROW or MIXED.";
		case RS_MYSQL_LOCK_WAIT_TIMEOUT:
			return "Another transaction kept a lock for longer than innodb_lock_wait_timeout.";
		default:
			return "";
	}
}

static rs_result
fail(rs_mysql_session *session, unsigned code, const char *state, const char *message)
{
	session->code = code;
	session->is_lost = session->is_lost || is_loss(code);
	rs_error_set(&session->base.error,
				 code == CR_OUT_OF_MEMORY ? RUSTSTREAM_NO_MEMORY
				 : session->is_lost       ? RUSTSTREAM_UNAVAILABLE
										  : RUSTSTREAM_DATABASE,
				 state, hint_of(code), code == RS_MYSQL_SIGNAL ? "%.900s" : "%.900s (error %u)",
				 message, code);
	if (session->is_lost)
		return RS_LOST;
	return is_transient(code) ? RS_TRANSIENT : RS_FAILED;
}

rs_result
rs_mysql_fail(rs_mysql_session *session)
{
	return fail(session, mysql_errno(session->db), mysql_sqlstate(session->db),
				mysql_error(session->db));
}

rs_result
rs_mysql_fail_statement(rs_mysql_session *session, MYSQL_STMT *prepared)
{
	/* What comes while rows are read is the connection's error alone. */
	if (mysql_stmt_errno(prepared) == 0)
		return rs_mysql_fail(session);
	return fail(session, mysql_stmt_errno(prepared), mysql_stmt_sqlstate(prepared),
				mysql_stmt_error(prepared));
}

rs_result
rs_mysql_refuse(rs_mysql_session *session, const char *hint, const char *format, ...)
{
	va_list arguments;
	char message[sizeof(session->base.error.message)];

	va_start(arguments, format);
	(void) vsnprintf(message, sizeof(message), format, arguments);
	va_end(arguments);
	rs_error_set(&session->base.error, RUSTSTREAM_REFUSED, "", hint, "%s", message);
	return RS_FAILED;
}

rs_result
rs_mysql_no_memory(rs_mysql_session *session)
{
	return rs_session_no_memory(&session->base);
}

/* ------------------------------------------------------------ connections */

rs_result
rs_mysql_run(rs_mysql_session *session, const char *text)
{
	MYSQL_RES *rows;

	if (session->is_lost)
		return RS_LOST;
	if (mysql_real_query(session->db, text, (unsigned long) strlen(text)) != 0)
		return rs_mysql_fail(session);
	if (mysql_field_count(session->db) == 0)
		return RS_DONE;
	rows = mysql_store_result(session->db);
	if (rows == NULL)
		return rs_mysql_fail(session);
	mysql_free_result(rows);
	return RS_DONE;
}

/* The server is one that can serve: what it says of itself, and its version. */
static rs_result
check_server(rs_mysql_session *session)
{
	const char *info = mysql_get_server_info(session->db);

	session->is_mariadb = mariadb_connection(session->db) != 0;
	session->version = mysql_get_server_version(session->db);
	if (session->version >= (session->is_mariadb ? RS_MARIADB_OLDEST : RS_MYSQL_OLDEST))
		return RS_DONE;
	return rs_mysql_refuse(session, "Use MariaDB 10.6 or later, or MySQL 8.0.1 or later.",
						   "the server is %s %.60s, which cannot skip locked rows",
						   session->is_mariadb ? "MariaDB" : "MySQL", info);
}

const char *
rs_mysql_settings(const rs_mysql_session *session)
{
#define COMMON_SETTINGS                                                                            \
	"CONCAT_WS(' ', DATABASE(), @@SESSION.autocommit, @@SESSION.time_zone, @@SESSION.sql_mode, "   \
	"@@SESSION.character_set_client, @@SESSION.character_set_results, "                            \
	"@@SESSION.collation_connection, @@SESSION.completion_type, @@SESSION.sql_select_limit, "      \
	"@@SESSION.sql_safe_updates, @@SESSION.foreign_key_checks, "
	/* MariaDB has the variables' newer names from 11.1 on only, MySQL no others. */
	if (session->is_mariadb)
		return COMMON_SETTINGS
			"@@SESSION.tx_isolation, @@SESSION.tx_read_only, @@SESSION.max_statement_time)";
	return COMMON_SETTINGS "@@SESSION.transaction_isolation, @@SESSION.transaction_read_only, "
						   "@@SESSION.max_execution_time)";
}

/* The statement that brings back what we leave as the server and the account have it. */
static const char *
limits_of(const rs_mysql_session *session)
{
#define COMMON_LIMITS                                                                              \
	"CONCAT('SET SESSION sql_select_limit = ', @@SESSION.sql_select_limit, "                       \
	"', sql_safe_updates = ', @@SESSION.sql_safe_updates, "                                        \
	"', foreign_key_checks = ', @@SESSION.foreign_key_checks, "
	if (session->is_mariadb)
		return COMMON_LIMITS "', max_statement_time = ', @@SESSION.max_statement_time)";
	return COMMON_LIMITS "', max_execution_time = ', @@SESSION.max_execution_time)";
}

rs_result
rs_mysql_set_up(rs_mysql_session *session, bool with_autocommit)
{
	rs_result result = RS_DONE;

	if (session->database != NULL && mysql_select_db(session->db, session->database) != 0)
		return rs_mysql_fail(session);
	if (mysql_set_character_set(session->db, "utf8mb4") != 0)
		return rs_mysql_fail(session);
	if (with_autocommit)
		result = rs_mysql_run(session, "SET SESSION autocommit = 1");
	if (result == RS_DONE)
		result =
			rs_mysql_run(session, "SET SESSION time_zone = '+00:00', completion_type = 'NO_CHAIN', "
								  "sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION'");
	if (result == RS_DONE && session->limits != NULL)
		result = rs_mysql_run(session, session->limits);
	if (result == RS_DONE)
		result = rs_mysql_run(session, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, "
									   "READ WRITE");
	return result;
}

typedef struct kept_text
{
	char *text;
} kept_text;

static bool
keep_text(void *arg, const rs_value *columns, int count)
{
	(void) count;
	((kept_text *) arg)->text = columns[0].kind == RS_TEXT || columns[0].kind == RS_BYTES
									? strndup(columns[0].text, columns[0].length)
									: NULL;
	return false;
}

static rs_result
ask_text(rs_mysql_session *session, const char *expression, char **answer)
{
	char text[1024];
	const rs_command command = {.text = text, .slot = -1};
	kept_text kept = {NULL};
	rs_result result;

	(void) snprintf(text, sizeof(text), "SELECT %s", expression);
	result = rs_mysql_execute(&session->base, &command, NULL, 0, keep_text, &kept, NULL);
	*answer = kept.text;
	return result == RS_DONE && kept.text == NULL ? rs_mysql_no_memory(session) : result;
}

static void
close_session(rs_session *base)
{
	rs_mysql_session *session = rs_mysql_of(base);

	if (session == NULL)
		return;
	rs_mysql_forget_statements(base);
	if (session->killer != NULL)
		mysql_close(session->killer);
	if (session->db != NULL)
		mysql_close(session->db);
	free(session->guard);
	free(session->settings);
	free(session->limits);
	free(session->database);
	free(session);
}

static rs_result
open_session(const rs_url *url, rs_session **opened, rs_error *error)
{
	rs_mysql_session *session = calloc(1, sizeof(rs_mysql_session));
	rs_result result;

	*opened = NULL;
	if (session == NULL)
	{
		rs_error_set(error, RUSTSTREAM_NO_MEMORY, "", NULL, "out of memory");
		return RS_FAILED;
	}
	session->base.driver = &rs_mysql_driver;
	session->url = url;
	session->db = rs_mysql_connect(url, error);
	if (session->db == NULL)
	{
		free(session);
		return RS_FAILED;
	}
	session->thread_id = mysql_thread_id(session->db);
	result = check_server(session);
	if (result == RS_DONE)
		result = rs_mysql_set_up(session, true);
	if (result == RS_DONE)
		result = ask_text(session, "DATABASE()", &session->database);
	if (result == RS_DONE)
		result = ask_text(session, limits_of(session), &session->limits);
	if (result == RS_DONE)
		result = ask_text(session, rs_mysql_settings(session), &session->settings);
	if (result != RS_DONE)
	{
		rs_error_set(error, RUSTSTREAM_UNAVAILABLE, session->base.error.state,
					 session->base.error.hint, "%s: %.800s", url->display,
					 session->base.error.message);
		close_session(&session->base);
		return RS_FAILED;
	}
	*opened = &session->base;
	return RS_DONE;
}

static void *
native(rs_session *base)
{
	return rs_mysql_of(base)->db;
}

/* ----------------------------------------------------------- transactions */

static const char *
level_statement(rs_isolation level)
{
	switch (level)
	{
		case RS_ISOLATION_READ_UNCOMMITTED:
			return "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED";
		case RS_ISOLATION_REPEATABLE_READ:
			return "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ";
		case RS_ISOLATION_SERIALIZABLE:
			return "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE";
		default:
			return NULL; /* the session's */
	}
}

rs_result
rs_mysql_begin(rs_session *base, rs_purpose purpose, const rs_table *table)
{
	rs_mysql_session *session = rs_mysql_of(base);
	const char *level = purpose == RS_FOR_DELIVERY ? level_statement(table->isolation) : NULL;
	rs_result result = RS_DONE;

	session->has_savepoint = false;
	if (session->needs_set_up)
		result = rs_mysql_set_up(session, true);
	if (result == RS_DONE)
		session->needs_set_up = false;
	if (result == RS_DONE && level != NULL)
		result = rs_mysql_run(session, level);
	session->may_be_open = true;
	if (result == RS_DONE)
		result = rs_mysql_run(session, "START TRANSACTION READ WRITE");
	session->in_transaction = result == RS_DONE;
	return result;
}

/* A partition key is the transaction's, though its lock is the session's. */
void
rs_mysql_release_guard(rs_mysql_session *session)
{
	if (session->guard == NULL)
		return;
	rs_mysql_unlock_key(&session->base, session->guard);
	free(session->guard);
	session->guard = NULL;
}

rs_result
rs_mysql_commit(rs_session *base)
{
	rs_mysql_session *session = rs_mysql_of(base);
	rs_result result = rs_mysql_run(session, "COMMIT");

	if (result != RS_DONE)
		return result;
	session->may_be_open = false;
	session->in_transaction = false;
	session->has_savepoint = false;
	rs_mysql_release_guard(session);
	return RS_DONE;
}

static rs_result
rollback(rs_session *base)
{
	rs_mysql_session *session = rs_mysql_of(base);
	bool is_open =
		session->may_be_open || (session->db->server_status & SERVER_STATUS_IN_TRANS) != 0;

	if (is_open && rs_mysql_run(session, "ROLLBACK AND NO CHAIN NO RELEASE") != RS_DONE)
		session->is_lost = true;
	session->may_be_open = false;
	session->in_transaction = false;
	session->has_savepoint = false;
	if (session->is_lost)
		return RS_LOST;
	rs_mysql_release_guard(session);
	return RS_DONE;
}

static rs_result
savepoint(rs_session *base)
{
	rs_result result = rs_mysql_run(rs_mysql_of(base), "SAVEPOINT ruststream_claim");

	rs_mysql_of(base)->has_savepoint = result == RS_DONE;
	return result;
}

static rs_result
rollback_to(rs_session *base)
{
	rs_mysql_session *session = rs_mysql_of(base);
	rs_result result = rs_mysql_run(session, "ROLLBACK TO SAVEPOINT ruststream_claim");

	if (result == RS_FAILED && session->code == RS_MYSQL_NO_SUCH_SAVEPOINT_OR_ROUTINE)
		rs_error_set(&base->error, RUSTSTREAM_DATABASE, "2D000",
					 "A handler works inside its delivery's transaction, which is not its to end: "
					 "no COMMIT or ROLLBACK, and no statement that commits, such as CREATE TABLE.",
					 "the handler has ended its delivery's transaction");
	return result;
}

/* ------------------------------------------------------------------ times */

/* "YYYY-MM-DD HH:MM:SS.ffffff"; a token has no fraction, and is rounded up: no lease is shorter. */
static void
format_time(int64_t time, bool is_token, char buffer[RS_TIME_SIZE + 8])
{
	const size_t length = strlen("YYYY-MM-DD HH:MM:SS");
	int64_t fraction = (time % RS_SECOND + RS_SECOND) % RS_SECOND;

	if (is_token && fraction > 0 && time < INT64_MAX - RS_SECOND)
		time += RS_SECOND - fraction;
	rs_time_format(time, buffer);
	buffer[strlen("YYYY-MM-DD")] = ' ';
	buffer[length] = '\0';
	if (!is_token)
		(void) snprintf(buffer + length, RS_TIME_SIZE + 8 - length, ".%06d", (int) fraction);
}

static bool
read_time(void *arg, const rs_value *columns, int count)
{
	(void) count;
	if (columns[0].kind != RS_TEXT ||
		!rs_time_parse(columns[0].text, columns[0].length, (int64_t *) arg))
		*(int64_t *) arg = INT64_MIN;
	return false;
}

/* SYSDATE, since a handler may have set the session's timestamp, by which NOW goes. */
static rs_result
now(rs_session *base, int64_t *result)
{
	static const rs_command command = {.text = "SELECT SYSDATE(6)", .slot = RS_MYSQL_SLOT_NOW};
	rs_result done;

	*result = INT64_MIN;
	done = rs_mysql_execute(base, &command, NULL, 0, read_time, result, NULL);
	if (done == RS_DONE && *result == INT64_MIN)
		return rs_mysql_refuse(rs_mysql_of(base), NULL, "the server's clock cannot be read");
	return done;
}

/* ------------------------------------------------------------------- keys */

/* The lock's name, of the key that is the parameter: see LOCK_NAME of statement_mysql.c. */
#define FROM_NAME                                                                                  \
	" FROM (SELECT CONCAT(CONVERT(LOWER(DATABASE()) USING utf8mb4), '.', ?) AS name)"              \
	" AS ruststream_name"
#define LOCK_NAME                                                                                  \
	"IF(CHAR_LENGTH(name) BETWEEN 1 AND 64 AND (/*M! TRUE OR */"                                   \
	" LENGTH(CONVERT(name USING utf16)) = 2 * CHAR_LENGTH(name)), name, SHA2(name, 256))"

static bool
read_flag(void *arg, const rs_value *columns, int count)
{
	(void) count;
	*(bool *) arg = columns[0].kind == RS_INTEGER && columns[0].integer == 1;
	return false;
}

static rs_result
ask_of_key(rs_session *base, const char *text, int slot, const char *key, bool *answer)
{
	const rs_command command = {.text = text, .slot = slot};
	const rs_value value = rs_value_of_text(key);

	*answer = false;
	return rs_mysql_execute(base, &command, &value, 1, read_flag, answer, NULL);
}

rs_result
rs_mysql_lock_key(rs_session *base, const char *key, bool *locked)
{
	return ask_of_key(base, "SELECT GET_LOCK(" LOCK_NAME ", 0)" FROM_NAME, RS_MYSQL_SLOT_LOCK, key,
					  locked);
}

void
rs_mysql_unlock_key(rs_session *base, const char *key)
{
	bool released;

	(void) ask_of_key(base, "SELECT RELEASE_LOCK(" LOCK_NAME ")" FROM_NAME, RS_MYSQL_SLOT_UNLOCK,
					  key, &released);
}

bool
rs_mysql_key_is_held(rs_session *base, const char *key)
{
	bool held;

	return ask_of_key(base, "SELECT IS_USED_LOCK(" LOCK_NAME ") = CONNECTION_ID()" FROM_NAME,
					  RS_MYSQL_SLOT_HELD, key, &held) == RS_DONE &&
		   held;
}

/* --------------------------------------------- interrupting and waiting */

/*
 * In a thread of its own, which no other call of this session shares killer with.  The server
 * forgets a KILL QUERY that finds nothing to end.
 */
static void
interrupt(rs_session *base)
{
	rs_mysql_session *session = rs_mysql_of(base);
	char text[64];
	rs_error ignored;

	if (session->killer == NULL)
		session->killer = rs_mysql_connect(session->url, &ignored);
	if (session->killer == NULL)
		return;
	(void) snprintf(text, sizeof(text), "KILL QUERY %lu", session->thread_id);
	if (mysql_real_query(session->killer, text, (unsigned long) strlen(text)) != 0 &&
		is_loss(mysql_errno(session->killer)))
	{
		mysql_close(session->killer);
		session->killer = NULL;
	}
}

/* The server tells nobody of a commit: what is new is found when the poll interval is over. */
static rs_result
wait_idle(rs_session *base, int stop_fd, int64_t ms)
{
	struct pollfd stop = {.fd = stop_fd, .events = POLLIN};

	(void) base;
	(void) poll(&stop, 1, ms > INT_MAX ? INT_MAX : (int) ms);
	return RS_DONE;
}

const rs_driver rs_mysql_driver = {
	.name = "mysql",
	.dialect = RS_DIALECT_MYSQL,
	.open = open_session,
	.close = close_session,
	.native = native,
	.begin = rs_mysql_begin,
	.commit = rs_mysql_commit,
	.rollback = rollback,
	.savepoint = savepoint,
	.rollback_to = rollback_to,
	.execute = rs_mysql_execute,
	.forget_statements = rs_mysql_forget_statements,
	.now = now,
	.format_time = format_time,
	.parse_time = rs_time_parse,
	.claim = rs_mysql_claim,
	.candidates = rs_mysql_candidates,
	.is_head = rs_mysql_is_head,
	.lock_key = rs_mysql_lock_key,
	.unlock_key = rs_mysql_unlock_key,
	.key_is_held = rs_mysql_key_is_held,
	.look = rs_mysql_look,
	.check_plan = rs_mysql_check_plan,
	.check_handler = rs_mysql_check_handler,
	.call_handler = rs_mysql_call_handler,
	.left_open = rs_mysql_left_open,
	.check_writes = rs_mysql_check_writes,
	.interrupt = interrupt,
	.wait = wait_idle,
	.catalog = rs_mysql_catalog,
	.install = rs_mysql_install,
	.find_version = rs_mysql_find_version,
};
