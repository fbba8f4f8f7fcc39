/*-------------------------------------------------------------------------
 *
 * driver_sqlite.c
 *	  The SQLite driver: connections, transactions, statements.
 *
 * One writer at a time has the whole database.  A lock that is held elsewhere is waited for,
 * at random intervals, up to busy_timeout; what could not be had by then is a transient
 * failure, as is SQLITE_BUSY_SNAPSHOT, which comes at once when a transaction that has read wants
 *to write after somebody else has.  Transactions of ours begin with IMMEDIATE, so they never meet
 *the latter.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_sqlite.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "schema_sqlite.h" /* made of schema_sqlite.sql */

#define SCHEMA_VERSION 1
#define DEFAULT_BUSY_TIMEOUT 10000
/* How often an idle worker looks for another connection's commit. */
#define WAIT_SLICE_MS 20

static rs_sqlite_session *
of(rs_session *base)
{
	return (rs_sqlite_session *) base;
}

/* ----------------------------------------------------------------- errors */

static const char *
name_of(int code)
{
	switch (code & 0xFF)
	{
		case SQLITE_BUSY:
			return "SQLITE_BUSY";
		case SQLITE_LOCKED:
			return "SQLITE_LOCKED";
		case SQLITE_CONSTRAINT:
			return "SQLITE_CONSTRAINT";
		case SQLITE_READONLY:
			return "SQLITE_READONLY";
		case SQLITE_INTERRUPT:
			return "SQLITE_INTERRUPT";
		case SQLITE_IOERR:
			return "SQLITE_IOERR";
		case SQLITE_CORRUPT:
			return "SQLITE_CORRUPT";
		case SQLITE_FULL:
			return "SQLITE_FULL";
		case SQLITE_CANTOPEN:
			return "SQLITE_CANTOPEN";
		case SQLITE_NOTADB:
			return "SQLITE_NOTADB";
		case SQLITE_AUTH:
			return "SQLITE_AUTH";
		case SQLITE_NOMEM:
			return "SQLITE_NOMEM";
		case SQLITE_TOOBIG:
			return "SQLITE_TOOBIG";
		case SQLITE_MISMATCH:
			return "SQLITE_MISMATCH";
		case SQLITE_SCHEMA:
			return "SQLITE_SCHEMA";
		default:
			return "SQLITE_ERROR";
	}
}

/* The connection's last error. */
rs_result
rs_sqlite_fail(rs_sqlite_session *session)
{
	int code = sqlite3_extended_errcode(session->db);
	int kind = code & 0xFF;
	rs_error *error = &session->base.error;

	if (kind == SQLITE_BUSY || kind == SQLITE_LOCKED)
	{
		rs_error_set(error, RUSTSTREAM_BUSY, name_of(code),
					 "Another transaction keeps the write lock of the database: that of a delivery "
					 "holds it from its first write to its end.",
					 "the database stayed locked: %s", sqlite3_errmsg(session->db));
		return RS_TRANSIENT;
	}
	if (kind == SQLITE_AUTH)
		rs_error_set(error, RUSTSTREAM_DATABASE, name_of(code),
					 "A handler works inside its delivery's transaction, which is not its to end: "
					 "answer an outcome instead.",
					 "a handler must not begin or end a transaction");
	else
		rs_error_set(error, kind == SQLITE_NOMEM ? RUSTSTREAM_NO_MEMORY : RUSTSTREAM_DATABASE,
					 name_of(code), "", "%s", sqlite3_errmsg(session->db));
	return RS_FAILED;
}

/* ----------------------------------------------------------- waiting for locks */

static void
sleep_for(int64_t microseconds)
{
	struct timespec time = {.tv_sec = (time_t) (microseconds / RS_SECOND),
							.tv_nsec = (long) (microseconds % RS_SECOND) * 1000};

	(void) nanosleep(&time, NULL);
}

/*
 * Wait a little, at random, so that those who wait do not come back together; the longer the more
 * often it was in vain.
 */
static int
on_busy(void *arg, int times)
{
	rs_sqlite_session *session = arg;
	int64_t now = rs_monotonic();
	int64_t most = RS_MILLISECOND << (times < 5 ? times : 5);

	if (times == 0)
		session->busy_until = now + session->busy_limit;
	if (now >= session->busy_until)
		return 0;
	sleep_for(100 + (int64_t) (rs_random() % (uint32_t) most));
	return 1;
}

/* ------------------------------------------------------------ connections */

static rs_result
run(rs_sqlite_session *session, const char *text)
{
	return sqlite3_exec(session->db, text, NULL, NULL, NULL) == SQLITE_OK ? RS_DONE
																		  : rs_sqlite_fail(session);
}

/* The flags that the URL's mode asks for; 0: it is none. */
static int
flags_of(const rs_url *url)
{
	const char *mode = rs_url_parameter(url, "mode");

	if (mode == NULL || strcmp(mode, "rw") == 0)
		return SQLITE_OPEN_READWRITE;
	if (strcmp(mode, "rwc") == 0)
		return SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
	if (strcmp(mode, "ro") == 0)
		return SQLITE_OPEN_READONLY;
	return 0;
}

static bool
parse_ms(const char *text, int64_t *result)
{
	char *end;
	long long number = strtoll(text, &end, 10);

	if (end == text || *end != '\0' || number < 0 || number > INT_MAX)
		return false;
	*result = number;
	return true;
}

static bool
check_parameters(const rs_url *url, int64_t *busy_timeout, bool *foreign_keys, rs_error *error)
{
	*busy_timeout = DEFAULT_BUSY_TIMEOUT;
	*foreign_keys = true;
	for (int i = 0; i < url->parameter_count; i++)
	{
		const char *name = url->parameter_names[i];
		const char *value = url->parameter_values[i];
		bool known = true;
		bool fine = true;

		if (strcmp(name, "mode") == 0)
			fine = flags_of(url) != 0;
		else if (strcmp(name, "busy_timeout") == 0)
			fine = parse_ms(value, busy_timeout);
		else if (strcmp(name, "foreign_keys") == 0)
		{
			*foreign_keys = strcmp(value, "off") != 0;
			fine = strcmp(value, "on") == 0 || strcmp(value, "off") == 0;
		}
		else
			known = false;
		if (known && fine)
			continue;
		rs_error_set(error, RUSTSTREAM_MISUSE, "",
					 "SQLite's parameters are mode=ro|rw|rwc, busy_timeout=MS and "
					 "foreign_keys=on|off.",
					 known ? "the URL's parameter \"%s\" cannot be \"%.100s\""
						   : "the URL has an unknown parameter \"%s\"",
					 name, value);
		return false;
	}
	return true;
}

static int
authorize(void *arg, int action, const char *first, const char *second, const char *database,
		  const char *trigger)
{
	const rs_sqlite_session *session = arg;

	(void) first;
	(void) second;
	(void) database;
	(void) trigger;
	return action == SQLITE_TRANSACTION && session->guards ? SQLITE_DENY : SQLITE_OK;
}

static void
close_session(rs_session *base)
{
	rs_sqlite_session *session = of(base);

	if (session == NULL)
		return;
	rs_sqlite_forget_handler(session);
	for (int i = 0; i < RS_SLOT_COUNT; i++)
		(void) sqlite3_finalize(session->kept[i]);
	/* Not before: whatever a callback has left prepared goes with the connection. */
	(void) sqlite3_close_v2(session->db);
	if (session->keys != NULL)
		rs_keys_close(session->keys, session);
	free(session);
}

static rs_result
set_up(rs_sqlite_session *session, bool foreign_keys)
{
	rs_result result;

	(void) sqlite3_extended_result_codes(session->db, 1);
	(void) sqlite3_busy_handler(session->db, on_busy, session);
	(void) sqlite3_set_authorizer(session->db, authorize, session);
	if (!rs_sqlite_register_functions(session))
		return rs_sqlite_fail(session);
	result = run(session, foreign_keys ? "PRAGMA foreign_keys = on" : "PRAGMA foreign_keys = off");
	/* Reads the file's head, so that what is no database is found here. */
	return result == RS_DONE ? run(session, "SELECT 1 FROM sqlite_schema LIMIT 1") : result;
}

static rs_result
open_session(const rs_url *url, rs_session **result, rs_error *error)
{
	rs_sqlite_session *session;
	int64_t busy_timeout;
	bool foreign_keys;

	*result = NULL;
	if (sqlite3_libversion_number() < RS_SQLITE_OLDEST)
	{
		rs_error_set(error, RUSTSTREAM_UNAVAILABLE, "", "Use SQLite 3.35 or later.",
					 "SQLite %s is too old", sqlite3_libversion());
		return RS_FAILED;
	}
	if (!check_parameters(url, &busy_timeout, &foreign_keys, error))
		return RS_FAILED;
	if (strcmp(url->database, ":memory:") == 0)
	{
		rs_error_set(error, RUSTSTREAM_MISUSE, "", "Name a file.",
					 "a database in memory is a single connection's own, and cannot be a queue");
		return RS_FAILED;
	}
	session = calloc(1, sizeof(rs_sqlite_session));
	if (session == NULL)
	{
		rs_error_set(error, RUSTSTREAM_NO_MEMORY, "", NULL, "out of memory");
		return RS_FAILED;
	}
	session->base.driver = &rs_sqlite_driver;
	session->busy_limit = busy_timeout * RS_MILLISECOND;
	/* A connection is one thread's at a time; sqlite3_interrupt may come from any other as it is.
	 */
	if (sqlite3_open_v2(url->database, &session->db, flags_of(url) | SQLITE_OPEN_NOMUTEX, NULL) !=
		SQLITE_OK)
	{
		rs_error_set(error, RUSTSTREAM_UNAVAILABLE,
					 session->db != NULL ? name_of(sqlite3_errcode(session->db)) : "",
					 "The file must exist, unless the URL says ?mode=rwc.", "%s: %s", url->display,
					 session->db != NULL ? sqlite3_errmsg(session->db) : "out of memory");
		close_session(&session->base);
		return RS_FAILED;
	}
	if (set_up(session, foreign_keys) != RS_DONE)
	{
		*error = session->base.error;
		error->code = RUSTSTREAM_UNAVAILABLE;
		(void) snprintf(error->message, sizeof(error->message), "%s: %.900s", url->display,
						session->base.error.message);
		close_session(&session->base);
		return RS_FAILED;
	}
	*result = &session->base;
	return RS_DONE;
}

static void *
native(rs_session *base)
{
	return of(base)->db;
}

/* ------------------------------------------------------------- statements */

rs_result
rs_sqlite_bind(rs_sqlite_session *session, sqlite3_stmt *statement, const rs_value *values,
			   int count)
{
	for (int i = 0; i < count; i++)
	{
		const rs_value *value = &values[i];
		int code = SQLITE_OK;

		switch (value->kind)
		{
			case RS_NULL:
				code = sqlite3_bind_null(statement, i + 1);
				break;
			case RS_INTEGER:
				code = sqlite3_bind_int64(statement, i + 1, value->integer);
				break;
			case RS_REAL:
				code = sqlite3_bind_double(statement, i + 1, value->real);
				break;
			case RS_TEXT:
				code = sqlite3_bind_text64(statement, i + 1, value->text, value->length,
										   SQLITE_STATIC, SQLITE_UTF8);
				break;
			case RS_BYTES:
				code = value->length == 0 ? sqlite3_bind_zeroblob(statement, i + 1, 0)
										  : sqlite3_bind_blob64(statement, i + 1, value->text,
																value->length, SQLITE_STATIC);
				break;
		}
		if (code != SQLITE_OK)
			return rs_sqlite_fail(session);
	}
	return RS_DONE;
}

rs_value
rs_sqlite_column(sqlite3_stmt *statement, int column)
{
	rs_value value = RS_VALUE_NULL;

	switch (sqlite3_column_type(statement, column))
	{
		case SQLITE_INTEGER:
			return rs_value_of_integer(sqlite3_column_int64(statement, column));
		case SQLITE_FLOAT:
			value.kind = RS_REAL;
			value.real = sqlite3_column_double(statement, column);
			return value;
		case SQLITE_TEXT:
			value.kind = RS_TEXT;
			value.text = (const char *) sqlite3_column_text(statement, column);
			break;
		case SQLITE_BLOB:
			value.kind = RS_BYTES;
			value.text = sqlite3_column_blob(statement, column);
			break;
		default:
			return value;
	}
	value.length = (size_t) sqlite3_column_bytes(statement, column);
	if (value.text == NULL)
		value.text = "";
	return value;
}

/* Prepared, from its slot where it has one. */
static sqlite3_stmt *
prepare(rs_sqlite_session *session, const rs_command *command)
{
	sqlite3_stmt *statement = command->slot >= 0 ? session->kept[command->slot] : NULL;

	if (statement != NULL && strcmp(sqlite3_sql(statement), command->text) == 0)
		return statement;
	if (statement != NULL)
	{
		(void) sqlite3_finalize(statement);
		session->kept[command->slot] = NULL;
		statement = NULL;
	}
	if (sqlite3_prepare_v3(session->db, command->text, -1,
						   command->slot >= 0 ? SQLITE_PREPARE_PERSISTENT : 0, &statement,
						   NULL) != SQLITE_OK)
		return NULL;
	if (command->slot >= 0)
		session->kept[command->slot] = statement;
	return statement;
}

#define MAX_COLUMNS 32

/*
 * Step through all rows, also where the callback has seen enough: an UPDATE .. RETURNING has
 * changed everything before its first row, but a SELECT that is left holds its snapshot.
 */
static rs_result
step_through(rs_sqlite_session *session, sqlite3_stmt *statement, rs_row_callback row, void *arg,
			 int64_t *affected)
{
	int columns = sqlite3_column_count(statement);
	int64_t rows = 0;
	int code;

	if (columns > MAX_COLUMNS)
		columns = MAX_COLUMNS;
	while ((code = sqlite3_step(statement)) == SQLITE_ROW)
	{
		rs_value values[MAX_COLUMNS];

		rows++;
		if (row == NULL)
			continue;
		for (int i = 0; i < columns; i++)
			values[i] = rs_sqlite_column(statement, i);
		if (!row(arg, values, columns))
		{
			code = SQLITE_DONE;
			break;
		}
	}
	if (code != SQLITE_DONE)
		return rs_sqlite_fail(session);
	if (affected != NULL)
		*affected = columns > 0 ? rows : sqlite3_changes(session->db);
	return RS_DONE;
}

static rs_result
execute(rs_session *base, const rs_command *command, const rs_value *values, int count,
		rs_row_callback row, void *arg, int64_t *affected)
{
	rs_sqlite_session *session = of(base);
	sqlite3_stmt *statement = prepare(session, command);
	rs_result result;

	if (statement == NULL)
		return rs_sqlite_fail(session);
	result = rs_sqlite_bind(session, statement, values, count);
	if (result == RS_DONE)
		result = step_through(session, statement, row, arg, affected);
	if (command->slot >= 0)
	{
		/* The values are the caller's, and gone by the next time. */
		(void) sqlite3_reset(statement);
		(void) sqlite3_clear_bindings(statement);
	}
	else
		(void) sqlite3_finalize(statement);
	return result;
}

static void
forget_statements(rs_session *base)
{
	rs_sqlite_session *session = of(base);

	rs_sqlite_forget_handler(session);
	for (int i = 0; i < RS_SLOT_COUNT; i++)
	{
		(void) sqlite3_finalize(session->kept[i]);
		session->kept[i] = NULL;
	}
}

/* ----------------------------------------------------------- transactions */

/* Slots behind those of the catalogue. */
enum
{
	SLOT_BEGIN = RS_OPERATION_COUNT * 4,
	SLOT_BEGIN_IMMEDIATE,
	SLOT_BEGIN_EXCLUSIVE,
	SLOT_COMMIT,
	SLOT_ROLLBACK
};

static rs_result
run_kept(rs_session *base, int slot, const char *text)
{
	const rs_command command = {.text = text, .slot = slot};

	return execute(base, &command, NULL, 0, NULL, NULL, NULL);
}

static rs_result
begin(rs_session *base, rs_purpose purpose, const rs_table *table)
{
	if (purpose == RS_FOR_US || table->mode == RS_MODE_IMMEDIATE)
		return run_kept(base, SLOT_BEGIN_IMMEDIATE, "BEGIN IMMEDIATE");
	if (table->mode == RS_MODE_EXCLUSIVE)
		return run_kept(base, SLOT_BEGIN_EXCLUSIVE, "BEGIN EXCLUSIVE");
	return run_kept(base, SLOT_BEGIN, "BEGIN");
}

static rs_result
commit(rs_session *base)
{
	return run_kept(base, SLOT_COMMIT, "COMMIT");
}

static rs_result
rollback(rs_session *base)
{
	rs_sqlite_session *session = of(base);

	/* Some errors have rolled back by themselves. */
	if (sqlite3_get_autocommit(session->db) == 0)
		(void) run_kept(base, SLOT_ROLLBACK, "ROLLBACK");
	return sqlite3_get_autocommit(session->db) != 0 ? RS_DONE : RS_LOST;
}

/* ------------------------------------------------------------------ times */

static rs_result
now(rs_session *base, int64_t *result)
{
	struct timespec time;

	(void) base;
	(void) clock_gettime(CLOCK_REALTIME, &time);
	*result = (int64_t) time.tv_sec * RS_SECOND + time.tv_nsec / 1000;
	return RS_DONE;
}

static void
format_time(int64_t time, bool is_token, char buffer[RS_TIME_SIZE + 8])
{
	(void) is_token;
	rs_time_format(time, buffer);
}

/* ------------------------------------------------------------------- keys */

static rs_result
prepare_keys(rs_session *base)
{
	rs_sqlite_session *session = of(base);
	const char *path = sqlite3_db_filename(session->db, "main");
	pid_t pid;

	if (session->keys != NULL)
		return RS_DONE;
	switch (rs_keys_open(path, &session->keys, &pid))
	{
		case RS_KEY_DONE:
			return RS_DONE;
		case RS_KEY_OTHER_PROCESS:
			rs_error_set(&base->error, RUSTSTREAM_BUSY, "",
						 "Advisory keys are kept in the process: let one process serve these "
						 "queues with several workers, or use the lease form.",
						 "process %ld serves the advisory lock queues of this file already",
						 (long) pid);
			return RS_FAILED;
		case RS_KEY_NO_MEMORY:
			rs_error_set(&base->error, RUSTSTREAM_NO_MEMORY, "", NULL, "out of memory");
			return RS_FAILED;
		case RS_KEY_SYSTEM:
			break;
	}
	rs_error_set(&base->error, RUSTSTREAM_SYSTEM, "",
				 "The advisory lock form keeps a lock file beside the database.",
				 "the lock file \"%.700s-ruststream\" cannot be had: %s", path, strerror(errno));
	return RS_FAILED;
}

static rs_result
lock_key(rs_session *base, const char *key, bool *locked)
{
	rs_sqlite_session *session = of(base);

	if (rs_keys_lock(session->keys, key, session, locked) == RS_KEY_DONE)
		return RS_DONE;
	rs_error_set(&base->error, RUSTSTREAM_NO_MEMORY, "", NULL, "out of memory");
	return RS_FAILED;
}

static void
unlock_key(rs_session *base, const char *key)
{
	rs_keys_unlock(of(base)->keys, key, of(base));
}

static bool
key_is_held(rs_session *base, const char *key)
{
	return rs_keys_held(of(base)->keys, key, strlen(key), of(base));
}

/* ---------------------------------------------------------------- waiting */

static bool
read_number(void *arg, const rs_value *columns, int count)
{
	(void) count;
	*(int64_t *) arg = columns[0].integer;
	return false;
}

/* Changes when another connection has committed. */
static int64_t
data_version(rs_session *base)
{
	static const rs_command command = {.text = "PRAGMA data_version", .slot = SLOT_ROLLBACK + 1};
	int64_t version = 0;

	(void) execute(base, &command, NULL, 0, read_number, &version, NULL);
	return version;
}

/*
 * In slices: between two of them we look whether another connection has committed.  What this one
 * commits itself does not show, but it is not idle then.
 */
static rs_result
wait_idle(rs_session *base, int stop_fd, int64_t ms)
{
	rs_sqlite_session *session = of(base);
	struct pollfd stop = {.fd = stop_fd, .events = POLLIN};

	while (ms > 0)
	{
		int slice = ms < WAIT_SLICE_MS ? (int) ms : WAIT_SLICE_MS;
		int64_t version = data_version(base);

		if (version != session->data_version)
		{
			bool first = session->data_version == 0;

			session->data_version = version;
			if (!first)
				return RS_DONE;
		}
		if (poll(&stop, 1, slice) != 0)
			return RS_DONE;
		ms -= slice;
	}
	return RS_DONE;
}

static void
interrupt(rs_session *base)
{
	sqlite3_interrupt(of(base)->db);
}

/* --------------------------------------------------------------- catalogs */

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
	rs_result result = execute(base, &exists, NULL, 0, read_number, &count, NULL);

	*version = 0;
	if (result == RS_DONE && count > 0)
		result = execute(base, &read, NULL, 0, read_number, version, NULL);
	return result;
}

static rs_result
check_installed(rs_session *base)
{
	int64_t version;
	rs_result result = installed_version(base, &version);

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
	rs_result result = execute(base, &ask, NULL, 0, read_text, mode, NULL);

	if (result == RS_DONE && strcmp(mode, "wal") != 0 && notice != NULL)
		notice(arg, with_wal
						? "write-ahead logging could not be turned on for this database"
						: "write-ahead logging is off: with it readers and the writer do not wait "
						  "for each other; install --wal turns it on");
	return result;
}

static rs_result
install(rs_session *base, bool with_wal, ruststream_notice_callback notice, void *arg)
{
	rs_sqlite_session *session = of(base);
	int64_t version = 0;
	rs_result result = see_to_wal(base, with_wal, notice, arg);

	if (result == RS_DONE)
		result = begin(base, RS_FOR_US, NULL);
	if (result == RS_DONE)
		result = installed_version(base, &version);
	if (result == RS_DONE && version == 0)
		result = run(session, rs_schema_sqlite);
	if (result == RS_DONE && version > SCHEMA_VERSION)
		result = check_installed(base);
	if (result == RS_DONE)
		result = commit(base);
	if (result != RS_DONE)
	{
		rs_error kept = base->error;

		(void) rollback(base);
		base->error = kept;
	}
	return result;
}

const rs_driver rs_sqlite_driver = {
	.name = "sqlite",
	.dialect = RS_DIALECT_SQLITE,
	.open = open_session,
	.close = close_session,
	.native = native,
	.begin = begin,
	.commit = commit,
	.rollback = rollback,
	.execute = execute,
	.forget_statements = forget_statements,
	.now = now,
	.format_time = format_time,
	.parse_time = rs_time_parse,
	.lock_key = lock_key,
	.unlock_key = unlock_key,
	.key_is_held = key_is_held,
	.prepare_keys = prepare_keys,
	.look = rs_sqlite_look,
	.check_handler = rs_sqlite_check_handler,
	.call_handler = rs_sqlite_call_handler,
	.judge_failure = rs_sqlite_judge_failure,
	.guard_handler = rs_sqlite_guard,
	.check_writes = rs_sqlite_check_writes,
	.interrupt = interrupt,
	.wait = wait_idle,
	.catalog = rs_portable_catalog,
	.install = install,
	.check_installed = check_installed,
};
