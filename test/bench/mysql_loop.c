/*-------------------------------------------------------------------------
 *
 * mysql_loop.c
 *	  What a user would write by hand: the statements of a delivery from a lease
 *	  queue, in a loop, for comparison with the client library.
 *
 *	  mysql_loop SOCKET DATABASE
 *
 * The table is test/bench/mysql_schema.sql's.  The statements are those that the library sends
 * for a handler of one SQL statement, prepared once.
 *
 *-------------------------------------------------------------------------
 */
#include <mysql.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static MYSQL *db;

static void
fail(const char *what, const char *message)
{
	fprintf(stderr, "%s: %s\n", what, message);
	exit(1);
}

static void
run(const char *text)
{
	if (mysql_real_query(db, text, strlen(text)) != 0)
		fail(text, mysql_error(db));
}

static MYSQL_STMT *
prepare(const char *text)
{
	MYSQL_STMT *statement = mysql_stmt_init(db);

	if (statement == NULL || mysql_stmt_prepare(statement, text, strlen(text)) != 0)
		fail(text, mysql_error(db));
	return statement;
}

static void
execute(MYSQL_STMT *statement, MYSQL_BIND *values)
{
	if ((values != NULL && mysql_stmt_bind_param(statement, values) != 0) ||
		mysql_stmt_execute(statement) != 0)
		fail("execute", mysql_stmt_error(statement));
}

/* One row into columns; false where there is none. */
static bool
fetch(MYSQL_STMT *statement, MYSQL_BIND *columns)
{
	bool found;

	if (mysql_stmt_store_result(statement) != 0 || mysql_stmt_bind_result(statement, columns) != 0)
		fail("fetch", mysql_stmt_error(statement));
	found = mysql_stmt_fetch(statement) == 0;
	(void) mysql_stmt_free_result(statement);
	return found;
}

static MYSQL_BIND
text_of(char *text, unsigned long size, unsigned long *length)
{
	MYSQL_BIND bind = {
		.buffer_type = MYSQL_TYPE_STRING, .buffer = text, .buffer_length = size, .length = length};

	return bind;
}

int
main(int argc, char **argv)
{
	MYSQL_STMT *now;
	MYSQL_STMT *claim;
	MYSQL_STMT *stamp;
	MYSQL_STMT *handler;
	MYSQL_STMT *answer;
	MYSQL_STMT *ack;
	long long id = 0;
	long long attempt;
	char clock[64];
	char token[64];
	char payload[256];
	char answers[4][256];
	unsigned long clock_length;
	unsigned long token_length;
	unsigned long payload_length;
	unsigned long lengths[4];
	MYSQL_BIND integer = {.buffer_type = MYSQL_TYPE_LONGLONG, .buffer = &id};
	MYSQL_BIND null = {.buffer_type = MYSQL_TYPE_NULL};
	MYSQL_BIND nothing = {.buffer_type = MYSQL_TYPE_NULL};

	if (argc != 3)
		fail("usage", "mysql_loop SOCKET DATABASE");
	db = mysql_init(NULL);
	if (db == NULL ||
		mysql_real_connect(db, NULL, "root", NULL, argv[2], 0, argv[1], CLIENT_FOUND_ROWS) == NULL)
		fail("connect", db != NULL ? mysql_error(db) : "out of memory");
	run("SET SESSION time_zone = '+00:00'");
	run("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED");
	now = prepare("SELECT SYSDATE(6)");
	claim = prepare("SELECT id, COALESCE(attempt, 1), NULL, payload FROM jobs FORCE INDEX (PRIMARY)"
					" WHERE (locked_until IS NULL OR locked_until <= ?) AND NOT (id <=> ?)"
					" ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED");
	stamp = prepare("UPDATE jobs SET locked_until = ?, attempt = COALESCE(attempt, 1) + 1"
					" WHERE id = ?");
	handler = prepare("INSERT INTO effect (job, payload) VALUES (?, ?)");
	answer = prepare("SELECT @outcome, @delay, @reason, CONCAT_WS(' ', DATABASE(),"
					 " @@SESSION.autocommit, @@SESSION.time_zone, @@SESSION.sql_mode,"
					 " @@SESSION.character_set_client, @@SESSION.character_set_results,"
					 " @@SESSION.tx_isolation, @@SESSION.completion_type)");
	ack = prepare("DELETE FROM jobs WHERE id = ? AND (locked_until = ? OR locked_until = ?)");

	for (;;)
	{
		MYSQL_BIND clock_column = text_of(clock, sizeof(clock), &clock_length);
		MYSQL_BIND row[4] = {integer,
							 {.buffer_type = MYSQL_TYPE_LONGLONG, .buffer = &attempt},
							 nothing,
							 text_of(payload, sizeof(payload), &payload_length)};
		MYSQL_BIND columns[4];

		run("START TRANSACTION");
		execute(now, NULL);
		(void) fetch(now, &clock_column);
		/* A lease without end, for short. */
		token_length = 19;
		memcpy(token, clock, token_length);
		memcpy(token, "2999-01-01", 10);
		execute(claim, (MYSQL_BIND[]){text_of(clock, clock_length, &clock_length), null});
		if (!fetch(claim, row))
			break;
		execute(stamp, (MYSQL_BIND[]){text_of(token, token_length, &token_length), integer});
		run("COMMIT");

		run("START TRANSACTION");
		execute(handler,
				(MYSQL_BIND[]){integer, text_of(payload, payload_length, &payload_length)});
		execute(answer, NULL);
		for (int i = 0; i < 4; i++)
			columns[i] = text_of(answers[i], sizeof(answers[i]), &lengths[i]);
		(void) fetch(answer, columns);
		execute(ack, (MYSQL_BIND[]){integer, text_of(token, token_length, &token_length),
									text_of(token, token_length, &token_length)});
		if (mysql_stmt_affected_rows(ack) != 1)
			fail("ack", "the lease is lost");
		run("COMMIT");
	}
	mysql_close(db);
	return 0;
}
