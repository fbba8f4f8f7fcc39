/*-------------------------------------------------------------------------
 *
 * sqlite_loop.c
 *	  What a user would write by hand: the statements of a delivery from a lease
 *	  queue, in a loop, for comparison with the client library.
 *
 *	  sqlite_loop DATABASE
 *
 * The table is test/bench/sqlite_schema.sql's.  Prints deliveries a second.
 *
 * The same as the library's: both transactions, the statements in them, the token and its
 * guard, the clock read once a claim, synchronous and foreign_keys.  Not here, since this
 * handler needs none of it: the second thread that would extend the lease, rows that are
 * left alone after a failure, waiting for locks, any other outcome, deferred foreign keys
 * looked at before the end, and counters.
 *
 *-------------------------------------------------------------------------
 */
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static sqlite3 *db;

static sqlite3_stmt *
prepare(const char *text)
{
	sqlite3_stmt *statement;

	if (sqlite3_prepare_v3(db, text, -1, SQLITE_PREPARE_PERSISTENT, &statement, NULL) != SQLITE_OK)
	{
		fprintf(stderr, "%s: %s\n", text, sqlite3_errmsg(db));
		exit(1);
	}
	return statement;
}

static void
finish(sqlite3_stmt *statement)
{
	if (sqlite3_step(statement) != SQLITE_DONE)
	{
		fprintf(stderr, "%s\n", sqlite3_errmsg(db));
		exit(1);
	}
	(void) sqlite3_reset(statement);
}

/* YYYY-MM-DDTHH:MM:SS.fff+00:00 */
static void
format(const struct timespec *when, long ahead, char *text, size_t size)
{
	time_t seconds = when->tv_sec + ahead;
	struct tm parts;

	(void) gmtime_r(&seconds, &parts);
	(void) snprintf(text, size, "%04d-%02d-%02dT%02d:%02d:%02d.%03ld+00:00", parts.tm_year + 1900,
					parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
					when->tv_nsec / 1000000);
}

int
main(int argc, char **argv)
{
	sqlite3_stmt *begin_immediate;
	sqlite3_stmt *begin;
	sqlite3_stmt *commit;
	sqlite3_stmt *claim;
	sqlite3_stmt *handle;
	sqlite3_stmt *ack;
	struct timespec started;
	struct timespec now;
	double seconds;
	long count = 0;

	if (argc != 2 || sqlite3_open(argv[1], &db) != SQLITE_OK)
		return 2;
	(void) sqlite3_exec(db, "PRAGMA foreign_keys = on", NULL, NULL, NULL);
	begin_immediate = prepare("BEGIN IMMEDIATE");
	begin = prepare("BEGIN");
	commit = prepare("COMMIT");
	claim = prepare("UPDATE jobs SET locked_until = ?1, attempt = coalesce(attempt, 1) + 1"
					" WHERE id = (SELECT id FROM jobs WHERE locked_until IS NULL"
					" OR locked_until <= ?2 ORDER BY id LIMIT 1)"
					" RETURNING id, attempt - 1, payload");
	handle = prepare("INSERT INTO effect (job, payload) VALUES (?1, ?2)");
	ack = prepare("DELETE FROM jobs WHERE id = ?1 AND locked_until = ?2");

	(void) clock_gettime(CLOCK_MONOTONIC, &started);
	for (;;)
	{
		char now_text[40];
		char token[40];
		long long id;
		char *payload;

		(void) clock_gettime(CLOCK_REALTIME, &now);
		format(&now, 0, now_text, sizeof(now_text));
		format(&now, 30, token, sizeof(token));
		finish(begin_immediate);
		(void) sqlite3_bind_text(claim, 1, token, -1, SQLITE_STATIC);
		(void) sqlite3_bind_text(claim, 2, now_text, -1, SQLITE_STATIC);
		if (sqlite3_step(claim) != SQLITE_ROW)
		{
			(void) sqlite3_reset(claim);
			finish(commit);
			break;
		}
		id = sqlite3_column_int64(claim, 0);
		payload = sqlite3_mprintf("%s", sqlite3_column_text(claim, 2));
		finish(claim);
		finish(commit);

		finish(begin);
		(void) sqlite3_bind_int64(handle, 1, id);
		(void) sqlite3_bind_text(handle, 2, payload, -1, SQLITE_STATIC);
		finish(handle);
		(void) sqlite3_bind_int64(ack, 1, id);
		(void) sqlite3_bind_text(ack, 2, token, -1, SQLITE_STATIC);
		finish(ack);
		if (sqlite3_changes(db) != 1)
			return 1; /* the lease is lost */
		finish(commit);
		sqlite3_free(payload);
		count++;
	}
	(void) clock_gettime(CLOCK_MONOTONIC, &now);
	seconds =
		(double) (now.tv_sec - started.tv_sec) + (double) (now.tv_nsec - started.tv_nsec) / 1e9;
	printf("%.0f\n", (double) count / seconds);
	(void) sqlite3_finalize(begin_immediate);
	(void) sqlite3_finalize(begin);
	(void) sqlite3_finalize(commit);
	(void) sqlite3_finalize(claim);
	(void) sqlite3_finalize(handle);
	(void) sqlite3_finalize(ack);
	(void) sqlite3_close(db);
	return 0;
}
