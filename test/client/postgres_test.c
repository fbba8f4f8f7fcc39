/*-------------------------------------------------------------------------
 *
 * postgres_test.c
 *	  The library on PostgreSQL: callbacks with the PGconn, and what they may not do.
 *
 * postgres.t runs it, with the URL of a database that has a table of each form:
 * locked, leased, keyed (id, attempt, retry_after, locked_until, payload), and effect (id, note).
 *
 *-------------------------------------------------------------------------
 */
#include <libpq-fe.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ruststream.h"
#include "tap.h"

#define MESSAGE_SIZE 4096

/* ok(), whose name says what was found. */
static void __attribute__((format(printf, 2, 3))) check(bool passed, const char *format, ...)
{
	char name[MESSAGE_SIZE];
	va_list arguments;

	va_start(arguments, format);
	(void) vsnprintf(name, sizeof(name), format, arguments);
	va_end(arguments);
	ok(passed, name);
}

typedef struct doing
{
	const char *sql; /* what the callback executes, each result unlooked at */
	ruststream_outcome answer;
	bool publishes;
	int calls;
} doing;

static ruststream_outcome
handle(ruststream_delivery *delivery, void *arg)
{
	doing *what = arg;

	what->calls++;
	if (what->sql != NULL)
		PQclear(PQexec(delivery->connection, what->sql));
	if (what->publishes)
	{
		const ruststream_task task = {
			.table = delivery->queue, .payload = "{}", .payload_length = 2};

		if (ruststream_publish(delivery->handle, &task, NULL, 0) != RUSTSTREAM_OK)
			return RUSTSTREAM_FAIL;
	}
	return what->answer;
}

static char last_notice[2560];

static void
keep_notice(void *arg, const char *text)
{
	(void) arg;
	(void) snprintf(last_notice, sizeof(last_notice), "%s", text);
}

static char answer[256];

/* The first value that a query answers. */
static const char *
ask(PGconn *connection, const char *sql)
{
	PGresult *result = PQexec(connection, sql);

	(void) snprintf(answer, sizeof(answer), "%s",
					PQntuples(result) > 0 ? PQgetvalue(result, 0, 0)
										  : PQresultErrorMessage(result));
	PQclear(result);
	return answer;
}

/* One row of a queue, delivered once; how often the callback was called. */
static int
deliver(ruststream *db, PGconn *look, const char *queue, const char *transactional, doing *what)
{
	const ruststream_subscription subscription = {.name = "c",
												  .queue = queue,
												  .transactional = transactional,
												  .on_error = "retry",
												  .retry_delay = 3600000};
	ruststream_worker *worker;
	char sql[128];

	ask(look, "TRUNCATE effect, locked, leased, keyed");
	(void) snprintf(sql, sizeof(sql), "INSERT INTO %s (payload) VALUES ('{}')", queue);
	ask(look, sql);
	last_notice[0] = '\0';
	what->calls = 0;
	if (ruststream_subscribe(db, &subscription) != RUSTSTREAM_OK ||
		ruststream_worker_open(db, "c", handle, what, &worker) != RUSTSTREAM_OK)
	{
		printf("# %s\n", ruststream_message(db));
		return -1;
	}
	(void) ruststream_worker_step(worker, NULL);
	ruststream_worker_close(worker);
	return what->calls;
}

static const char *
left(PGconn *look, const char *queue)
{
	char sql[256];

	(void) snprintf(
		sql, sizeof(sql),
		"SELECT concat((SELECT count(*) FROM %s), ' rows, ', count(*), ' effects') FROM effect",
		queue);
	return ask(look, sql);
}

#define WRITES "INSERT INTO effect (id) VALUES (1)"

static void
test_form(ruststream *db, PGconn *look, const char *queue)
{
	doing acks = {.sql = WRITES, .answer = RUSTSTREAM_ACK};
	doing retries = {.sql = WRITES, .answer = RUSTSTREAM_RETRY};
	doing commits = {.sql = WRITES "; COMMIT", .answer = RUSTSTREAM_ACK};
	doing chains = {.sql = "COMMIT AND CHAIN", .answer = RUSTSTREAM_ACK};
	doing swallows = {.sql = "SELECT 1 / 0", .answer = RUSTSTREAM_ACK};
	doing copies = {.sql = "COPY effect FROM STDIN", .answer = RUSTSTREAM_ACK};
	doing leaves_open = {.sql = "BEGIN; " WRITES, .answer = RUSTSTREAM_ACK};
	doing publishes = {.answer = RUSTSTREAM_ACK, .publishes = true};
	doing publishes_in_vain = {.answer = RUSTSTREAM_DISCARD, .publishes = true};

	check(deliver(db, look, queue, "on", &acks) == 1 &&
			  strcmp(left(look, queue), "0 rows, 1 effects") == 0,
		  "%s: a callback writes in the delivery's transaction (%s)", queue, answer);
	check(deliver(db, look, queue, "on", &retries) == 1 &&
			  strcmp(left(look, queue), "1 rows, 0 effects") == 0,
		  ".. and its writes go with a retry (%s)", answer);
	check(deliver(db, look, queue, "off", &retries) == 1 &&
			  strcmp(left(look, queue), "1 rows, 1 effects") == 0,
		  ".. and stay where it is not transactional (%s)", answer);
	check(deliver(db, look, queue, "on", &commits) == 1 &&
			  strstr(last_notice, "ended its delivery's transaction") != NULL &&
			  strncmp(left(look, queue), "1 rows", 6) == 0,
		  ".. a COMMIT is a failure (%s; %s)", answer, last_notice);
	check(deliver(db, look, queue, "on", &chains) == 1 &&
			  strstr(last_notice, "ended its delivery's transaction") != NULL &&
			  strncmp(left(look, queue), "1 rows", 6) == 0,
		  ".. also one that begins the next (%s; %s)", answer, last_notice);
	check(deliver(db, look, queue, "on", &swallows) == 1 &&
			  strncmp(left(look, queue), "1 rows", 6) == 0 && last_notice[0] != '\0',
		  ".. so is an error that it keeps to itself (%s; %s)", answer, last_notice);
	check(deliver(db, look, queue, "on", &copies) == 1 &&
			  strncmp(left(look, queue), "1 rows", 6) == 0,
		  ".. so is a COPY that it leaves under way (%s; %s)", answer, last_notice);
	if (strcmp(queue, "locked") != 0)
		check(deliver(db, look, queue, "off", &leaves_open) == 1 &&
				  strstr(last_notice, "has left a transaction open") != NULL &&
				  strcmp(left(look, queue), "1 rows, 0 effects") == 0,
			  ".. so is a transaction of its own that it leaves open (%s; %s)", answer,
			  last_notice);
	check(deliver(db, look, queue, "on", &acks) == 1 &&
			  strcmp(left(look, queue), "0 rows, 1 effects") == 0,
		  ".. after which the next delivery is as the first (%s)", answer);
	check(deliver(db, look, queue, "on", &publishes) == 1 &&
			  strcmp(left(look, queue), "1 rows, 0 effects") == 0,
		  ".. what it publishes is there with the ack (%s)", answer);
	check(deliver(db, look, queue, "on", &publishes_in_vain) == 1 &&
			  strcmp(left(look, queue), "0 rows, 0 effects") == 0,
		  ".. and not without (%s)", answer);
}

int
main(int argc, char **argv)
{
	static const char *const queues[] = {"locked", "leased", "keyed"};
	ruststream *db;
	PGconn *look;

	if (argc != 2 || ruststream_open(argv[1], &db) != RUSTSTREAM_OK)
	{
		printf("Bail out! no database: %s\n", argc == 2 ? ruststream_message(db) : "");
		return 1;
	}
	ruststream_on_notice(db, keep_notice, NULL);
	ruststream_close(NULL);
	look = ruststream_connection(db);
	check(PQstatus(look) == CONNECTION_OK, "the connection is a PGconn");
	look = PQconnectdb(getenv("RUSTSTREAM_LOOK"));
	check(PQstatus(look) == CONNECTION_OK, "there is another one to look with: %s",
		  PQerrorMessage(look));
	for (size_t i = 0; i < sizeof(queues) / sizeof(queues[0]); i++)
		test_form(db, look, queues[i]);
	PQfinish(look);
	ruststream_close(db);
	return done_testing();
}
