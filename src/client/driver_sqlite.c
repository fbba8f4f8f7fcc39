/*-------------------------------------------------------------------------
 *
 * driver_sqlite.c
 *	  The SQLite driver: connections, transactions, and waiting for locks.
 *
 * One writer at a time has the whole database.  A lock that is held elsewhere is waited for,
 * at random intervals, up to busy_timeout; what could not be had by then is a transient
 * failure, as is SQLITE_BUSY_SNAPSHOT, which comes at once when a transaction that has read
 * wants to write after somebody else has.  Transactions of ours begin with IMMEDIATE, so
 * they never meet the latter.
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
	if (kind == SQLITE_AUTH && session->denied_setting)
		rs_error_set(
			error, RUSTSTREAM_DATABASE, name_of(code),
			"The connection is ruststream's: foreign_keys and busy_timeout are part of its "
			"URL, the rest is set through another connection.",
			"a handler must not change the settings of its connection");
	else if (kind == SQLITE_AUTH)
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

rs_result
rs_sqlite_run(rs_sqlite_session *session, const char *text)
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

/* Settings of the connection that our own statements rely on; to read them is no harm. */
static bool
is_setting(const char *name)
{
	static const char *const settings[] = {"busy_timeout", "foreign_keys", "journal_mode",
										   "locking_mode", "query_only",   "synchronous"};

	for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++)
	{
		if (sqlite3_stricmp(name, settings[i]) == 0)
			return true;
	}
	return false;
}

static int
authorize(void *arg, int action, const char *first, const char *second, const char *database,
		  const char *trigger)
{
	rs_sqlite_session *session = arg;

	(void) database;
	(void) trigger;
	session->denied_setting =
		action == SQLITE_PRAGMA && session->handles && second != NULL && is_setting(first);
	return session->denied_setting || (action == SQLITE_TRANSACTION && session->guards)
			   ? SQLITE_DENY
			   : SQLITE_OK;
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
	result = rs_sqlite_run(session,
						   foreign_keys ? "PRAGMA foreign_keys = on" : "PRAGMA foreign_keys = off");
	/* Reads the file's head, so that what is no database is found here. */
	return result == RS_DONE ? rs_sqlite_run(session, "SELECT 1 FROM sqlite_schema LIMIT 1")
							 : result;
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
	/* A connection is one thread's at a time; sqlite3_interrupt may come from any as it is. */
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

/* A slot of these has the same text for ever, and no values. */
static rs_result
run_kept(rs_session *base, int slot, const char *text)
{
	rs_sqlite_session *session = of(base);
	rs_result result = RS_DONE;

	if (session->kept[slot] == NULL &&
		sqlite3_prepare_v3(session->db, text, -1, SQLITE_PREPARE_PERSISTENT, &session->kept[slot],
						   NULL) != SQLITE_OK)
		return rs_sqlite_fail(session);
	if (sqlite3_step(session->kept[slot]) != SQLITE_DONE)
		result = rs_sqlite_fail(session);
	(void) sqlite3_reset(session->kept[slot]);
	return result;
}

/*
 * A file that was renamed or removed while it is open is served no more: whoever publishes
 * finds another one by the name, or none, and the journals of the two would be mixed up.
 */
rs_result
rs_sqlite_check_file(rs_session *base)
{
	int has_moved = 0;

	if (sqlite3_file_control(of(base)->db, "main", SQLITE_FCNTL_HAS_MOVED, &has_moved) !=
			SQLITE_OK ||
		has_moved == 0)
		return RS_DONE;
	rs_error_set(&base->error, RUSTSTREAM_UNAVAILABLE, "SQLITE_READONLY",
				 "Stop what uses a database before its file is replaced.",
				 "the database's file was renamed or removed");
	return RS_LOST;
}

/* The same a few times a second: it is a call of the system, a twentieth of a delivery's time. */
static rs_result
check_file_again(rs_sqlite_session *session)
{
	int64_t now = rs_monotonic();

	if (now < session->next_file_check)
		return RS_DONE;
	session->next_file_check = now + 100 * RS_MILLISECOND;
	return rs_sqlite_check_file(&session->base);
}

static rs_result
begin(rs_session *base, rs_purpose purpose, const rs_table *table)
{
	if (purpose == RS_FOR_US && check_file_again(of(base)) != RS_DONE)
		return RS_LOST;
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
		case RS_KEY_LINKED:
			rs_error_set(
				&base->error, RUSTSTREAM_REFUSED, "",
				"Remove its other hard links: neither SQLite's journal nor our lock file is "
				"found by another name.",
				"the database's file has more than one name");
			return RS_FAILED;
		case RS_KEY_NO_MEMORY:
			return rs_session_no_memory(base);
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
	return rs_session_no_memory(base);
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

/* Changes when another connection has committed; what was so before the first look is new. */
static int64_t
data_version(rs_session *base)
{
	static const rs_command command = {.text = "PRAGMA data_version", .slot = SLOT_ROLLBACK + 1};
	int64_t version = 0;

	(void) rs_sqlite_execute(base, &command, NULL, 0, read_number, &version, NULL);
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
			session->data_version = version;
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

const rs_driver rs_sqlite_driver = {
	.name = "sqlite",
	.dialect = RS_DIALECT_SQLITE,
	.open = open_session,
	.close = close_session,
	.native = native,
	.begin = begin,
	.commit = commit,
	.rollback = rollback,
	.execute = rs_sqlite_execute,
	.forget_statements = rs_sqlite_forget_statements,
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
	.left_open = rs_sqlite_left_open,
	.judge_failure = rs_sqlite_judge_failure,
	.guard_handler = rs_sqlite_guard,
	.check_writes = rs_sqlite_check_writes,
	.interrupt = interrupt,
	.wait = wait_idle,
	.catalog = rs_portable_catalog,
	.install = rs_sqlite_install,
	.find_version = rs_sqlite_find_version,
};
