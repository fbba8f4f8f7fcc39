/*-------------------------------------------------------------------------
 *
 * client_test.c
 *	  The library by its public header, on SQLite: what conformance scenarios
 *	  cannot see from outside.
 *
 *	  client_test DIRECTORY
 *
 *-------------------------------------------------------------------------
 */
#include "client/ruststream.h"
#include "tap.h"

#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ------------------------------------------------------------------ helpers */

static const char *directory;
static char path[512];
static char url[600];

/* SQL on a connection of its own; the answer's first value as text, or "". */
static const char *
sql(const char *text)
{
	static char answer[4096];
	sqlite3 *db;
	sqlite3_stmt *statement = NULL;
	const char *rest = text;

	answer[0] = '\0';
	if (sqlite3_open(path, &db) != SQLITE_OK)
		abort();
	(void) sqlite3_busy_timeout(db, 10000);
	while (*rest != '\0')
	{
		if (sqlite3_prepare_v2(db, rest, -1, &statement, &rest) != SQLITE_OK)
		{
			printf("# %s: %s\n", text, sqlite3_errmsg(db));
			break;
		}
		while (statement != NULL && sqlite3_step(statement) == SQLITE_ROW)
		{
			const char *value = (const char *) sqlite3_column_text(statement, 0);

			(void) snprintf(answer, sizeof(answer), "%s", value != NULL ? value : "NULL");
		}
		(void) sqlite3_finalize(statement);
	}
	(void) sqlite3_close(db);
	return answer;
}

static bool
is(const char *found, const char *expected, const char *name)
{
	bool same = ok(strcmp(found, expected) == 0, name);

	if (!same)
		printf("# expected \"%s\", found \"%s\"\n", expected, found);
	return same;
}

static void
collect(void *arg, const char *text)
{
	char *into = arg;
	size_t length = strlen(into);

	(void) snprintf(into + length, 8192 - length, "%s\n", text);
}

/* A handle that must open. */
static ruststream *
open_db(void)
{
	ruststream *db;

	if (ruststream_open(url, &db) != RUSTSTREAM_OK)
	{
		printf("Bail out! %s\n", db != NULL ? ruststream_message(db) : "out of memory");
		exit(1);
	}
	return db;
}

static void
must(ruststream *db, ruststream_code code)
{
	if (code == RUSTSTREAM_OK)
		return;
	printf("Bail out! %s (%s)\n", ruststream_message(db), ruststream_hint(db));
	exit(1);
}

/* A new file with a lease queue, an advisory queue, and a table for effects. */
static ruststream *
begin(void)
{
	static const char *const suffixes[] = {"", "-wal", "-shm", "-journal", "-ruststream"};
	const ruststream_queue leased = {.table = "leased",
									 .id_column = "id",
									 .retry_after_column = "retry_after",
									 .attempt_column = "attempt",
									 .locked_until_column = "locked_until",
									 .payload_column = "payload",
									 .create_index = true};
	const ruststream_queue keyed = {.table = "keyed",
									.id_column = "id",
									.attempt_column = "attempt",
									.payload_column = "payload",
									.lock_key = "key-{payload}",
									.create_index = true};
	ruststream *db;
	char name[600];

	for (size_t i = 0; i < sizeof(suffixes) / sizeof(suffixes[0]); i++)
	{
		(void) snprintf(name, sizeof(name), "%s%s", path, suffixes[i]);
		(void) unlink(name);
	}
	(void) sql("PRAGMA journal_mode = wal;"
			   "CREATE TABLE leased (id INTEGER PRIMARY KEY, payload TEXT, attempt INTEGER,"
			   " retry_after TEXT, locked_until TEXT);"
			   "CREATE TABLE keyed (id INTEGER PRIMARY KEY, payload TEXT, attempt INTEGER);"
			   "CREATE TABLE effect (number INTEGER PRIMARY KEY, what TEXT)");
	db = open_db();
	must(db, ruststream_install(db, false));
	must(db, ruststream_describe(db, &leased));
	must(db, ruststream_describe(db, &keyed));
	return db;
}

static void
subscribe(ruststream *db, const char *queue, int64_t lease, int64_t timeout)
{
	const ruststream_subscription subscription = {
		.name = "s", .queue = queue, .lease = lease, .timeout = timeout, .retry_delay = 60000};

	must(db, ruststream_subscribe(db, &subscription));
}

static void
wait_ms(int ms)
{
	const struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = (ms % 1000) * 1000000L};

	(void) nanosleep(&time, NULL);
}

static void
write_effect(ruststream_delivery *delivery)
{
	char *text = sqlite3_mprintf("INSERT INTO effect (what) VALUES (%Q)", delivery->payload);

	if (sqlite3_exec(delivery->connection, text, NULL, NULL, NULL) != SQLITE_OK)
		printf("# %s\n", sqlite3_errmsg(delivery->connection));
	sqlite3_free(text);
}

/* ----------------------------------------------------------------- callbacks */

static ruststream_outcome
by_payload(ruststream_delivery *delivery, void *arg)
{
	const char *payload = delivery->payload;

	(void) arg;
	write_effect(delivery);
	if (strcmp(payload, "discard") == 0)
		return RUSTSTREAM_DISCARD;
	if (strcmp(payload, "later") == 0)
	{
		ruststream_delay(delivery, 3600000);
		ruststream_reason(delivery, "not now");
		return RUSTSTREAM_RETRY_AFTER;
	}
	if (strcmp(payload, "fail") == 0)
	{
		ruststream_reason(delivery, "it broke");
		return RUSTSTREAM_FAIL;
	}
	if (strcmp(payload, "publish") == 0)
	{
		const ruststream_task task = {
			.table = "leased", .payload = "published", .payload_length = 9};

		if (ruststream_publish(delivery->handle, &task, NULL, 0) != RUSTSTREAM_OK)
			printf("# %s\n", ruststream_message(delivery->handle));
	}
	if (strcmp(payload, "publish_and_drop") == 0)
	{
		const ruststream_task task = {.table = "leased", .payload = "never", .payload_length = 5};

		(void) ruststream_publish(delivery->handle, &task, NULL, 0);
		return RUSTSTREAM_DISCARD;
	}
	if (strcmp(payload, "commit") == 0)
	{
		char *message = NULL;
		int code = sqlite3_exec(delivery->connection, "COMMIT", NULL, NULL, &message);

		sqlite3_free(message);
		if (code != SQLITE_AUTH)
			printf("# COMMIT gave %d\n", code);
	}
	return RUSTSTREAM_ACK;
}

/* With the delivery's handle a handler may publish; anything else would end its transaction. */
static ruststream_outcome
misuses(ruststream_delivery *delivery, void *arg)
{
	ruststream *db = delivery->handle;
	ruststream_worker *own = *(ruststream_worker **) arg;
	ruststream_worker *another;
	const ruststream_queue queue = {.table = "leased", .id_column = "id"};
	const ruststream_subscription subscription = {.name = "t", .queue = "leased"};
	int misused = 0;

	write_effect(delivery);
	misused += ruststream_install(db, false) == RUSTSTREAM_MISUSE;
	misused += ruststream_describe(db, &queue) == RUSTSTREAM_MISUSE;
	misused += ruststream_forget(db, "leased") == RUSTSTREAM_MISUSE;
	misused += ruststream_subscribe(db, &subscription) == RUSTSTREAM_MISUSE;
	misused += ruststream_unsubscribe(db, "s") == RUSTSTREAM_MISUSE;
	misused += ruststream_pause(db, "s") == RUSTSTREAM_MISUSE;
	misused += ruststream_look(db, NULL, NULL, NULL) == RUSTSTREAM_MISUSE;
	misused += ruststream_each_subscription(db, NULL, NULL) == RUSTSTREAM_MISUSE;
	misused += ruststream_worker_open(db, "s", misuses, NULL, &another) == RUSTSTREAM_MISUSE;
	misused += ruststream_worker_step(own, NULL) == RUSTSTREAM_MISUSE;
	misused += ruststream_worker_run(own, RUSTSTREAM_DRAIN) == RUSTSTREAM_MISUSE;
	ok(misused == 11, "inside a handler everything but publishing is misuse");
	ruststream_worker_close(own);
	ruststream_close(db);
	return RUSTSTREAM_DISCARD;
}

static void
test_misuse(void)
{
	ruststream *db = begin();
	ruststream_worker *worker;

	subscribe(db, "leased", 0, 0);
	(void) sql("INSERT INTO leased (payload) VALUES ('a')");
	must(db, ruststream_worker_open(db, "s", misuses, &worker, &worker));
	must(db, ruststream_worker_run(worker, RUSTSTREAM_DRAIN));
	is(sql("SELECT count(*) || (SELECT count(*) FROM leased) FROM effect"), "00",
	   ".. and harmless");
	ruststream_worker_close(worker);
	ruststream_close(db);
}

static void
test_outcomes(void)
{
	ruststream *db = begin();
	ruststream_worker *worker;
	int64_t delivered;
	int64_t failed;

	subscribe(db, "leased", 0, 0);
	(void) sql("INSERT INTO leased (payload) VALUES ('ack'), ('discard'), ('later'), ('fail'),"
			   " ('publish'), ('publish_and_drop'), ('commit')");
	must(db, ruststream_worker_open(db, "s", by_payload, NULL, &worker));
	must(db, ruststream_worker_run(worker, RUSTSTREAM_DRAIN));
	ruststream_worker_counts(worker, &delivered, &failed);
	ok(delivered == 8 && failed == 1, "a published row is delivered in the same drain");
	ruststream_worker_close(worker);
	is(sql("SELECT group_concat(what) FROM (SELECT what FROM effect ORDER BY number)"),
	   "ack,publish,commit,published", "acked writes are kept, and no others");
	is(sql("SELECT group_concat(payload || attempt) FROM leased"), "later2,fail2",
	   "what comes back is counted, what was published by a dropped delivery is not there");
	is(sql("SELECT group_concat(message || '/' || attempt || '/' || id) FROM"
		   " (SELECT * FROM ruststream_failure ORDER BY number)"),
	   "not now/1/3,it broke/1/4", "failures and reasons are recorded");
	is(sql("SELECT acked || '/' || delayed || '/' || discarded || '/' || failed FROM"
		   " ruststream_counter"),
	   "4/2/2/1", "and counted");
	ruststream_close(db);
}

/* ------------------------------------------------------------------- leases */

static atomic_int calls;

/* Blocks for two and a half leases of two seconds, so for five half ones. */
static ruststream_outcome
slow(ruststream_delivery *delivery, void *arg)
{
	(void) arg;
	atomic_fetch_add(&calls, 1);
	wait_ms(5200);
	write_effect(delivery);
	return RUSTSTREAM_ACK;
}

static void *
drain_in_thread(void *arg)
{
	ruststream *db = open_db();
	ruststream_worker *worker;

	must(db, ruststream_worker_open(db, "s", (ruststream_handler) (uintptr_t) arg, NULL, &worker));
	must(db, ruststream_worker_run(worker, RUSTSTREAM_DRAIN));
	ruststream_worker_close(worker);
	ruststream_close(db);
	return NULL;
}

static void
test_long_handler(void)
{
	ruststream *db = begin();
	pthread_t thread;

	subscribe(db, "leased", 2000, 0);
	(void) sql("INSERT INTO leased (payload) VALUES ('long')");
	atomic_store(&calls, 0);
	(void) pthread_create(&thread, NULL, drain_in_thread, (void *) (uintptr_t) slow);
	while (atomic_load(&calls) == 0)
		wait_ms(5);
	for (int i = 0; i < 60; i++)
	{
		drain_in_thread((void *) (uintptr_t) slow);
		wait_ms(75);
	}
	(void) pthread_join(thread, NULL);
	ok(atomic_load(&calls) == 1, "a handler outlives several leases, and nobody else gets its row");
	is(sql("SELECT count(*) || '/' || (SELECT count(*) FROM leased) FROM effect"), "1/0",
	   "and its ack holds");
	ruststream_close(db);
}

/* The row is stolen while the handler runs, as another process would by a claim. */
static ruststream_outcome
robbed(ruststream_delivery *delivery, void *arg)
{
	(void) delivery;
	(void) arg;
	(void) sql("UPDATE leased SET locked_until = '2999-01-01T00:00:00+00:00'");
	return strcmp(delivery->payload, "ack") == 0 ? RUSTSTREAM_ACK : RUSTSTREAM_RETRY;
}

static void
test_lost_lease(const char *payload)
{
	ruststream *db = begin();
	ruststream_worker *worker;
	char trace[8192] = "";
	bool delivered;
	char *insert = sqlite3_mprintf("INSERT INTO leased (payload) VALUES (%Q)", payload);

	subscribe(db, "leased", 0, 0);
	(void) sql(insert);
	sqlite3_free(insert);
	ruststream_on_trace(db, collect, trace);
	must(db, ruststream_worker_open(db, "s", robbed, NULL, &worker));
	must(db, ruststream_worker_step(worker, &delivered));
	ruststream_worker_close(worker);
	ok(strstr(trace, "ROLLBACK\nLEASE LOST\n") != NULL, "a lost lease is rolled back and told");
	is(sql("SELECT locked_until || '/' || attempt FROM leased"), "2999-01-01T00:00:00+00:00/2",
	   "its late holder changes nothing");
	is(sql("SELECT sqlstate || message FROM ruststream_failure"),
	   "55000the lease was lost before the delivery was settled", "and it is recorded");
	ruststream_close(db);
}

/* A handler that ends its own row has lost its lease; its writes go. */
static ruststream_outcome
ends_its_row(ruststream_delivery *delivery, void *arg)
{
	(void) arg;
	write_effect(delivery);
	(void) sqlite3_exec(delivery->connection, "DELETE FROM leased", NULL, NULL, NULL);
	return RUSTSTREAM_ACK;
}

static void
test_ended_row(void)
{
	ruststream *db = begin();
	ruststream_worker *worker;
	bool delivered;

	subscribe(db, "leased", 0, 0);
	(void) sql("INSERT INTO leased (payload) VALUES ('x')");
	must(db, ruststream_worker_open(db, "s", ends_its_row, NULL, &worker));
	must(db, ruststream_worker_step(worker, &delivered));
	ruststream_worker_close(worker);
	is(sql("SELECT count(*) || '/' || (SELECT count(*) FROM leased) FROM effect"), "0/1",
	   "a lease handler that ends its own row has lost it");
	ruststream_close(db);
}

/* --------------------------------------------------------- failed settlements */

static void
test_failed_ack(void)
{
	ruststream *db = begin();
	ruststream_worker *worker;
	bool delivered;

	subscribe(db, "leased", 0, 0);
	(void) sql("CREATE TABLE child (row INTEGER REFERENCES leased (id));"
			   "INSERT INTO leased (payload) VALUES ('x'); INSERT INTO child VALUES (1)");
	must(db, ruststream_worker_open(db, "s", by_payload, NULL, &worker));
	must(db, ruststream_worker_step(worker, &delivered));
	ruststream_worker_close(worker);
	ok(delivered, "an ack that a foreign key forbids is a delivery");
	is(sql("SELECT (SELECT count(*) FROM effect) || '/' || attempt || '/' || (locked_until IS NULL)"
		   " || '/' || (retry_after > strftime('%Y-%m-%dT%H:%M:%S+00:00', 'now')) FROM leased"),
	   "0/2/1/1", "everything is rolled back, the row released and delayed");
	is(sql("SELECT message FROM ruststream_failure"), "FOREIGN KEY constraint failed",
	   "and the failure recorded");
	ruststream_close(db);
}

/* The deferred constraint of a handler's own write is the handler's failure. */
static ruststream_outcome
breaks_later(ruststream_delivery *delivery, void *arg)
{
	(void) arg;
	(void) sqlite3_exec(delivery->connection, "INSERT INTO late VALUES (99)", NULL, NULL, NULL);
	return RUSTSTREAM_ACK;
}

static void
test_deferred(void)
{
	ruststream *db = begin();
	ruststream_worker *worker;
	char trace[8192] = "";
	bool delivered;

	subscribe(db, "leased", 0, 0);
	(void) sql("CREATE TABLE late (row INTEGER REFERENCES leased (id) DEFERRABLE INITIALLY"
			   " DEFERRED); INSERT INTO leased (payload) VALUES ('x')");
	ruststream_on_trace(db, collect, trace);
	must(db, ruststream_worker_open(db, "s", breaks_later, NULL, &worker));
	must(db, ruststream_worker_step(worker, &delivered));
	ruststream_worker_close(worker);
	ok(strstr(trace, "HANDLER\nROLLBACK\nBEGIN\nSETTLE retry_after\nCOMMIT\n") != NULL,
	   "a deferred constraint is checked before the settlement");
	is(sql("SELECT count(*) FROM late"), "0", "and undoes the handler's writes");
	ruststream_close(db);
}

/* --------------------------------------------------------------------- busy */

static void *
hold_write_lock(void *arg)
{
	sqlite3 *db;

	(void) sqlite3_open(path, &db);
	(void) sqlite3_exec(db, "BEGIN IMMEDIATE", NULL, NULL, NULL);
	atomic_store((atomic_int *) arg, 1);
	wait_ms(700);
	(void) sqlite3_exec(db, "COMMIT", NULL, NULL, NULL);
	(void) sqlite3_close(db);
	return NULL;
}

static void
test_busy(void)
{
	ruststream *db = begin();
	ruststream_worker *worker;
	pthread_t thread;
	atomic_int held = 0;

	subscribe(db, "leased", 0, 0);
	(void) sql("INSERT INTO leased (payload) VALUES ('a'), ('b')");
	ruststream_close(db);
	/* A tenth of a second each: what is not had by then is transient, and tried again. */
	(void) snprintf(url, sizeof(url), "sqlite:%s?busy_timeout=100", path);
	(void) pthread_create(&thread, NULL, hold_write_lock, &held);
	while (atomic_load(&held) == 0)
		wait_ms(1);
	db = open_db();
	must(db, ruststream_worker_open(db, "s", by_payload, NULL, &worker));
	must(db, ruststream_worker_run(worker, RUSTSTREAM_DRAIN));
	ruststream_worker_close(worker);
	(void) pthread_join(thread, NULL);
	ruststream_close(db);
	is(sql("SELECT count(*) || '/' || (SELECT count(*) FROM leased) || '/' ||"
		   " (SELECT count(*) FROM ruststream_failure) FROM effect"),
	   "2/0/0", "a busy database is waited out, and no task is lost or failed for it");
	ok(atoi(sql("SELECT transient FROM ruststream_counter")) > 0, "which the counters show");
	(void) snprintf(url, sizeof(url), "sqlite:%s", path);
}

/* Nothing is said to be done where nothing could be. */
static void
test_busy_for_good(void)
{
	ruststream *db = begin();
	ruststream_worker *worker;
	sqlite3 *other;
	bool delivered = true;

	subscribe(db, "leased", 0, 0);
	(void) sql("INSERT INTO leased (payload) VALUES ('a')");
	ruststream_close(db);
	(void) snprintf(url, sizeof(url), "sqlite:%s?busy_timeout=5", path);
	db = open_db();
	must(db, ruststream_worker_open(db, "s", by_payload, NULL, &worker));
	(void) sqlite3_open(path, &other);
	(void) sqlite3_exec(other, "BEGIN IMMEDIATE", NULL, NULL, NULL);
	ok(ruststream_worker_run(worker, RUSTSTREAM_DRAIN) == RUSTSTREAM_BUSY,
	   "a drain gives up on a database that stays locked");
	ok(ruststream_worker_step(worker, &delivered) == RUSTSTREAM_BUSY && !delivered,
	   "so does a step");
	(void) sqlite3_exec(other, "ROLLBACK", NULL, NULL, NULL);
	ok(ruststream_worker_step(worker, &delivered) == RUSTSTREAM_OK && delivered,
	   "and goes on when it is free");
	(void) sqlite3_close(other);
	ruststream_worker_close(worker);
	ruststream_close(db);
	(void) snprintf(url, sizeof(url), "sqlite:%s", path);
}

/* Somebody commits between the handler's read and its write: SQLITE_BUSY_SNAPSHOT. */
static ruststream_outcome
read_then_write(ruststream_delivery *delivery, void *arg)
{
	char *message = NULL;

	(void) sqlite3_exec(delivery->connection, "SELECT count(*) FROM effect", NULL, NULL, NULL);
	if (atomic_fetch_add((atomic_int *) arg, 1) < 2)
		(void) sql("INSERT INTO effect (what) VALUES ('between')");
	if (sqlite3_exec(delivery->connection, "INSERT INTO effect (what) VALUES ('late')", NULL, NULL,
					 &message) != SQLITE_OK)
	{
		ruststream_reason(delivery, message);
		sqlite3_free(message);
		return RUSTSTREAM_FAIL;
	}
	return RUSTSTREAM_ACK;
}

static void
test_snapshot(void)
{
	ruststream *db = begin();
	ruststream_worker *worker;
	atomic_int times = 0;

	subscribe(db, "leased", 0, 0);
	(void) sql("INSERT INTO leased (payload) VALUES ('a')");
	must(db, ruststream_worker_open(db, "s", read_then_write, &times, &worker));
	must(db, ruststream_worker_run(worker, RUSTSTREAM_DRAIN));
	ruststream_worker_close(worker);
	ruststream_close(db);
	is(sql("SELECT count(*) || '/' || (SELECT count(*) FROM leased) FROM effect WHERE what ="
		   " 'late'"),
	   "1/0", "a snapshot that is too old to write is begun anew, and takes effect once");
	is(sql("SELECT count(*) FROM ruststream_failure"), "0", "without being a failure");
}

static void
test_transient_limit(void)
{
	ruststream *db = begin();
	ruststream_worker *worker;
	atomic_int times = -1000; /* as good as always */
	bool delivered;

	subscribe(db, "leased", 0, 0);
	(void) sql("INSERT INTO leased (payload) VALUES ('a')");
	must(db, ruststream_worker_open(db, "s", read_then_write, &times, &worker));
	must(db, ruststream_worker_step(worker, &delivered));
	ruststream_worker_close(worker);
	ruststream_close(db);
	ok(delivered && atomic_load(&times) == -990,
	   "the tenth transient failure in a row is ordinary");
	is(sql("SELECT count(*) || '/' || (SELECT retry_after IS NOT NULL AND locked_until IS NULL FROM"
		   " leased) || '/' || (SELECT count(*) FROM effect WHERE what = 'late') FROM"
		   " ruststream_failure"),
	   "1/1/0", "it is recorded once, delayed, and has left nothing");
}

static void
test_dead_collision(void)
{
	ruststream *db = begin();
	const ruststream_subscription subscription = {
		.name = "s", .queue = "leased", .dead_letter = "dead", .on_error = "dead_letter"};
	ruststream_worker *worker;
	bool delivered;

	(void) sql("CREATE TABLE dead (id INTEGER PRIMARY KEY, payload TEXT, attempt INTEGER,"
			   " retry_after TEXT, locked_until TEXT, extra TEXT DEFAULT 'none');"
			   "INSERT INTO dead (id) VALUES (1); INSERT INTO leased (payload) VALUES ('fail'), "
			   "('fail')");
	must(db, ruststream_subscribe(db, &subscription));
	must(db, ruststream_worker_open(db, "s", by_payload, NULL, &worker));
	must(db, ruststream_worker_step(worker, &delivered));
	must(db, ruststream_worker_step(worker, &delivered));
	ruststream_worker_close(worker);
	ruststream_close(db);
	is(sql("SELECT group_concat(id || '/' || attempt || '/' || (retry_after IS NOT NULL) || '/' ||"
		   " (locked_until IS NULL)) FROM leased"),
	   "1/2/1/1", "a dead letter whose id is there already comes back, and waits");
	is(sql("SELECT group_concat(id || ifnull(payload, '') || ifnull(attempt, '') || extra) FROM"
		   " (SELECT * FROM dead ORDER BY id)"),
	   "1none,2fail2none", "others are moved with all their columns, and the defaults of more");
}

/* What must survive a rollback goes through another handle, and on SQLite before the first write.
 */
static ruststream_outcome
publishes_apart(ruststream_delivery *delivery, void *arg)
{
	const ruststream_task task = {.table = "leased", .payload = "apart", .payload_length = 5};
	bool writes_first = strcmp(delivery->payload, "late") == 0;
	ruststream *other;

	if (strcmp(delivery->payload, "apart") == 0)
		return RUSTSTREAM_ACK;
	if (writes_first)
		write_effect(delivery);
	if (ruststream_open(arg, &other) == RUSTSTREAM_OK)
		ok(ruststream_publish(other, &task, NULL, 0) ==
			   (writes_first ? RUSTSTREAM_BUSY : RUSTSTREAM_OK),
		   writes_first ? "a write that is to survive is told when it comes too late"
						: "a write that is to survive goes through another handle");
	if (writes_first)
		ok(strstr(ruststream_message(other), "stayed locked") != NULL &&
			   strstr(ruststream_hint(other), "delivery") != NULL,
		   "and why");
	ruststream_close(other);
	return RUSTSTREAM_DISCARD;
}

static void
test_apart(void)
{
	ruststream *db = begin();
	ruststream_worker *worker;
	char other[700];

	subscribe(db, "leased", 0, 0);
	(void) snprintf(other, sizeof(other), "%s?busy_timeout=50", url);
	(void) sql("INSERT INTO leased (payload) VALUES ('early'), ('late')");
	must(db, ruststream_worker_open(db, "s", publishes_apart, other, &worker));
	must(db, ruststream_worker_run(worker, RUSTSTREAM_DRAIN));
	ruststream_worker_close(worker);
	ruststream_close(db);
	is(sql("SELECT acked || '/' || discarded FROM ruststream_counter"), "1/2",
	   "what was published apart is delivered, though its publisher was discarded");
}

/* ------------------------------------------------------- not transactional */

static ruststream_outcome
leaves_open(ruststream_delivery *delivery, void *arg)
{
	(void) arg;
	(void) sqlite3_exec(delivery->connection, "BEGIN", NULL, NULL, NULL);
	write_effect(delivery);
	return RUSTSTREAM_ACK;
}

/* What is in a transaction that nobody commits would be lost with an ack. */
static void
test_left_open(const char *queue)
{
	ruststream *db = begin();
	const ruststream_subscription subscription = {
		.name = "s", .queue = queue, .transactional = "off", .on_error = "discard"};
	ruststream_worker *worker;
	char insert[100];

	must(db, ruststream_subscribe(db, &subscription));
	(void) snprintf(insert, sizeof(insert), "INSERT INTO %s (payload) VALUES ('a')", queue);
	(void) sql(insert);
	must(db, ruststream_worker_open(db, "s", leaves_open, NULL, &worker));
	must(db, ruststream_worker_run(worker, RUSTSTREAM_DRAIN));
	ruststream_worker_close(worker);
	is(sql("SELECT message FROM ruststream_failure"), "the handler has left a transaction open",
	   "a callback that leaves a transaction of its own open has failed");
	is(sql("SELECT count(*) FROM effect"), "0", "and nothing of it is kept");
	ruststream_close(db);
}

/* --------------------------------------------------------------- stopping */

static ruststream_worker *running;

static ruststream_outcome
wait_to_be_cancelled(ruststream_delivery *delivery, void *arg)
{
	(void) arg;
	write_effect(delivery);
	atomic_fetch_add(&calls, 1);
	while (!ruststream_is_cancelled(delivery))
		wait_ms(5);
	return RUSTSTREAM_ACK;
}

static void *
interrupt_soon(void *arg)
{
	(void) arg;
	while (atomic_load(&calls) == 0)
		wait_ms(5);
	ruststream_worker_interrupt(running);
	return NULL;
}

static void
test_interrupt(const char *queue)
{
	ruststream *db = begin();
	char notices[8192] = "";
	pthread_t thread;
	char *insert = sqlite3_mprintf("INSERT INTO %s (payload) VALUES ('x')", queue);

	subscribe(db, queue, 0, 0);
	(void) sql(insert);
	sqlite3_free(insert);
	ruststream_on_notice(db, collect, notices);
	atomic_store(&calls, 0);
	must(db, ruststream_worker_open(db, "s", wait_to_be_cancelled, NULL, &running));
	(void) pthread_create(&thread, NULL, interrupt_soon, NULL);
	must(db, ruststream_worker_run(running, RUSTSTREAM_FOREVER));
	(void) pthread_join(thread, NULL);
	ruststream_worker_close(running);
	is(notices, "subscription \"s\": released row 1 (attempt 1)\n",
	   "an interrupted worker releases its row, and says so");
	is(sql("SELECT count(*) || '/' || (SELECT count(*) FROM leased WHERE locked_until IS NULL) || "
		   "'/' || (SELECT count(*) FROM ruststream_failure) FROM effect"),
	   strcmp(queue, "leased") == 0 ? "0/1/0" : "0/0/0", "as it was, and as no failure");
	must(db, ruststream_worker_open(db, "s", by_payload, NULL, &running));
	must(db, ruststream_worker_run(running, RUSTSTREAM_DRAIN));
	ruststream_worker_close(running);
	is(sql("SELECT count(*) FROM effect"), "1", "the next worker delivers it");
	ruststream_close(db);
}

static void
test_timeout(void)
{
	ruststream *db = begin();
	ruststream_worker *worker;
	bool delivered;

	subscribe(db, "leased", 0, 100);
	(void) sql("INSERT INTO leased (payload) VALUES ('x')");
	must(db, ruststream_worker_open(db, "s", wait_to_be_cancelled, NULL, &worker));
	must(db, ruststream_worker_step(worker, &delivered));
	ruststream_worker_close(worker);
	is(sql("SELECT message || (SELECT count(*) FROM effect) FROM ruststream_failure"),
	   "the handler was cancelled after its timeout of 100 ms0",
	   "a handler past its timeout fails");
	ruststream_close(db);
}

static void
test_sql_timeout(void)
{
	ruststream *db = begin();
	const ruststream_subscription subscription = {
		.name = "s",
		.queue = "leased",
		.handler = "INSERT INTO effect (what) VALUES ('x');"
				   "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
				   " SELECT count(*) FROM n",
		.timeout = 100,
		.retry_delay = 60000};
	ruststream_worker *worker;
	bool delivered;

	must(db, ruststream_subscribe(db, &subscription));
	(void) sql("INSERT INTO leased (payload) VALUES ('x')");
	must(db, ruststream_worker_open(db, "s", NULL, NULL, &worker));
	must(db, ruststream_worker_step(worker, &delivered));
	ruststream_worker_close(worker);
	is(sql("SELECT message || (SELECT count(*) FROM effect) FROM ruststream_failure"),
	   "the handler was cancelled after its timeout of 100 ms0", "so does SQL that does not end");
	ruststream_close(db);
}

/* ------------------------------------------------------------------ keys */

static atomic_int in_work;
static atomic_int most_in_work;

static ruststream_outcome
count_in_work(ruststream_delivery *delivery, void *arg)
{
	int now = atomic_fetch_add(&in_work, 1) + 1;

	(void) arg;
	(void) delivery;
	if (now > atomic_load(&most_in_work))
		atomic_store(&most_in_work, now);
	wait_ms(3);
	atomic_fetch_sub(&in_work, 1);
	atomic_fetch_add(&calls, 1);
	return RUSTSTREAM_ACK;
}

#define THREADS 4

static void
drain_together(ruststream_handler handler)
{
	pthread_t threads[THREADS];

	for (int i = 0; i < THREADS; i++)
		(void) pthread_create(&threads[i], NULL, drain_in_thread, (void *) (uintptr_t) handler);
	for (int i = 0; i < THREADS; i++)
		(void) pthread_join(threads[i], NULL);
}

static void
test_keys(void)
{
	ruststream *db = begin();

	subscribe(db, "keyed", 0, 0);
	(void) sql("WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40)"
			   " INSERT INTO keyed (payload) SELECT 'same' FROM n");
	atomic_store(&calls, 0);
	atomic_store(&most_in_work, 0);
	/* A drain ends where others hold every key, so it may take some more. */
	do
		drain_together(count_in_work);
	while (strcmp(sql("SELECT count(*) FROM keyed"), "0") != 0);
	ok(atomic_load(&calls) == 40, "each row of an advisory queue is delivered once");
	ok(atomic_load(&most_in_work) == 1, "and those of one key one at a time");

	(void) sql("WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40)"
			   " INSERT INTO keyed (payload) SELECT i FROM n");
	atomic_store(&most_in_work, 0);
	drain_together(count_in_work);
	ok(atomic_load(&most_in_work) > 1, "those of different keys side by side");
	ruststream_close(db);
}

static void
test_threads(void)
{
	ruststream *db = begin();

	subscribe(db, "leased", 0, 0);
	(void) sql("WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300)"
			   " INSERT INTO leased (payload) SELECT i FROM n");
	drain_together(by_payload);
	is(sql("SELECT count(*) || '/' || count(DISTINCT what) || '/' || (SELECT count(*) FROM leased)"
		   " FROM effect"),
	   "300/300/0", "four workers deliver each row once");
	ruststream_close(db);
}

/* Rows of one group, or of one key, in order and one at a time, by several workers. */
static ruststream_outcome
in_turn(ruststream_delivery *delivery, void *arg)
{
	int now = atomic_fetch_add(&in_work, 1) + 1;

	(void) arg;
	if (now > atomic_load(&most_in_work))
		atomic_store(&most_in_work, now);
	wait_ms(2);
	write_effect(delivery);
	atomic_fetch_sub(&in_work, 1);
	return strcmp(delivery->payload, "7") == 0 && delivery->attempt == 1 ? RUSTSTREAM_RETRY
																		 : RUSTSTREAM_ACK;
}

static void
test_order(bool fifo)
{
	ruststream *db = begin();
	const ruststream_queue queue = {.table = "ordered",
									.id_column = "id",
									.group_column = fifo ? "k" : NULL,
									.partition_key_column = fifo ? NULL : "k",
									.attempt_column = "attempt",
									.locked_until_column = "locked_until",
									.payload_column = "payload",
									.fifo = fifo,
									.create_index = true};
	char done[512];

	(void) sql("CREATE TABLE ordered (id INTEGER PRIMARY KEY, k TEXT DEFAULT 's', payload TEXT,"
			   " attempt INTEGER, locked_until TEXT);"
			   "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 30)"
			   " INSERT INTO ordered (payload) SELECT i FROM n");
	must(db, ruststream_describe(db, &queue));
	subscribe(db, "ordered", 0, 0);
	atomic_store(&most_in_work, 0);
	do
		drain_together(in_turn);
	while (strcmp(sql("SELECT count(*) FROM ordered"), "0") != 0);
	ok(atomic_load(&most_in_work) == 1,
	   fifo ? "one row of a FIFO group at a time" : "one row of a partition key at a time");
	(void) snprintf(
		done, sizeof(done), "%s",
		sql("SELECT group_concat(what) FROM (SELECT what FROM effect ORDER BY number)"));
	is(done,
	   sql("WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 30)"
		   " SELECT group_concat(i) FROM n"),
	   "in order, a retried one included");
	ruststream_close(db);
}

static ruststream_outcome
only_write(ruststream_delivery *delivery, void *arg)
{
	(void) arg;
	write_effect(delivery);
	return RUSTSTREAM_ACK;
}

/* While this delivery has its key, another worker takes whatever it can. */
static ruststream_outcome
let_other_work(ruststream_delivery *delivery, void *arg)
{
	ruststream *other = open_db();
	ruststream_worker *worker;
	bool delivered;

	(void) arg;
	must(other, ruststream_worker_open(other, "s", only_write, NULL, &worker));
	do
		must(other, ruststream_worker_step(worker, &delivered));
	while (delivered);
	ruststream_worker_close(worker);
	ruststream_close(other);
	write_effect(delivery);
	return RUSTSTREAM_ACK;
}

/* The first row of a partition key cannot be had, since its key is held: nor can those behind it.
 */
static void
test_busy_head(void)
{
	ruststream *db = begin();
	const ruststream_queue queue = {.table = "lines",
									.id_column = "id",
									.partition_key_column = "line",
									.payload_column = "payload",
									.lock_key = "{key}",
									.create_index = true};
	ruststream_worker *worker;
	bool delivered;

	(void) sql("CREATE TABLE lines (id INTEGER PRIMARY KEY, key TEXT, line TEXT, payload TEXT);"
			   "INSERT INTO lines (key, line, payload) VALUES ('busy', NULL, 'first'),"
			   " ('busy', 'a', 'a1'), ('k3', 'a', 'a2'), ('k4', 'a', 'a3'), ('k5', 'b', 'b1')");
	must(db, ruststream_describe(db, &queue));
	subscribe(db, "lines", 0, 0);
	must(db, ruststream_worker_open(db, "s", let_other_work, NULL, &worker));
	must(db, ruststream_worker_step(worker, &delivered));
	ruststream_worker_close(worker);
	is(sql("SELECT group_concat(what) FROM (SELECT what FROM effect ORDER BY number)"), "b1,first",
	   "behind a row whose key is held no other of its partition key is taken, but others are");
	must(db, ruststream_worker_open(db, "s", only_write, NULL, &worker));
	must(db, ruststream_worker_run(worker, RUSTSTREAM_DRAIN));
	ruststream_worker_close(worker);
	is(sql("SELECT group_concat(what) FROM (SELECT what FROM effect ORDER BY number)"),
	   "b1,first,a1,a2,a3", "until the key is free");
	ruststream_close(db);
}

static void
test_second_process(void)
{
	ruststream *db = begin();
	ruststream_worker *worker;
	int status = 0;
	int ready[2];
	int over[2];
	char byte;
	pid_t child;

	subscribe(db, "keyed", 0, 0);
	ruststream_close(db);
	if (pipe(ready) != 0 || pipe(over) != 0)
		abort();
	fflush(stdout);
	child = fork();
	if (child == 0)
	{
		db = open_db();
		if (ruststream_worker_open(db, "s", by_payload, NULL, &worker) != RUSTSTREAM_OK)
			_exit(1);
		(void) !write(ready[1], "", 1);
		(void) !read(over[0], &byte, 1);
		(void) kill(getpid(), SIGKILL);
	}
	(void) !read(ready[0], &byte, 1);
	db = open_db();
	ok(ruststream_worker_open(db, "s", by_payload, NULL, &worker) == RUSTSTREAM_BUSY &&
		   worker == NULL,
	   "a second process cannot serve the advisory lock queues of a file");
	{
		char expected[64];

		(void) snprintf(expected, sizeof(expected), "process %ld serves", (long) child);
		ok(strncmp(ruststream_message(db), expected, strlen(expected)) == 0,
		   "and is told which one does");
	}
	(void) !write(over[1], "", 1);
	(void) waitpid(child, &status, 0);
	ok(ruststream_worker_open(db, "s", by_payload, NULL, &worker) == RUSTSTREAM_OK,
	   "once that one has been killed it can");
	ruststream_worker_close(worker);
	ruststream_close(db);
	for (int i = 0; i < 2; i++)
	{
		(void) close(ready[i]);
		(void) close(over[i]);
	}
}

/* ------------------------------------------------------------------ errors */

static void
test_errors(void)
{
	ruststream *db;
	ruststream *none;
	ruststream_worker *worker;
	const ruststream_queue nothing = {.table = "nothing", .id_column = "id"};
	const ruststream_queue bad_column = {
		.table = "leased", .id_column = "id", .locked_until_column = "until"};
	const ruststream_queue not_unique = {
		.table = "leased", .id_column = "attempt", .locked_until_column = "locked_until"};
	const ruststream_subscription apart = {
		.name = "s", .queue = "leased", .transactional = "off", .workers = 1};
	const ruststream_task headers = {.table = "leased", .headers = "{}"};
	const ruststream_task nowhere = {.table = "effect", .payload = "x", .payload_length = 1};

	ok(ruststream_open("sqlite:/nonexistent/x.db", &none) == RUSTSTREAM_UNAVAILABLE &&
		   none != NULL && strstr(ruststream_message(none), "/nonexistent/x.db") != NULL,
	   "a file that cannot be opened is named");
	ok(ruststream_pause(none, "s") == RUSTSTREAM_UNAVAILABLE,
	   "and further calls with that handle say so");
	ruststream_close(none);
	ok(ruststream_open("mysql://u:secret@h/d", &none) != RUSTSTREAM_OK &&
		   strstr(ruststream_message(none), "secret") == NULL,
	   "no message has a password in it");
	ruststream_close(none);
	ok(ruststream_open("sqlite::memory:", &none) == RUSTSTREAM_MISUSE,
	   "a database in memory is refused");
	ruststream_close(none);
	ok(ruststream_open("sqlite:x?colour=red", &none) == RUSTSTREAM_MISUSE,
	   "an unknown parameter is refused");
	ruststream_close(none);

	db = begin();
	ok(ruststream_describe(db, &nothing) == RUSTSTREAM_REFUSED, "no form is refused first");
	is(ruststream_hint(db),
	   "Name a column for the lease (locked_until), or a lock key for the advisory lock form.",
	   "with a hint");
	ok(ruststream_describe(db, &bad_column) == RUSTSTREAM_REFUSED &&
		   strstr(ruststream_message(db), "\"until\"") != NULL,
	   "a column that is not there is named");
	ok(ruststream_describe(db, &not_unique) == RUSTSTREAM_REFUSED, "an id must be unique");
	ok(ruststream_worker_open(db, "s", by_payload, NULL, &worker) == RUSTSTREAM_NOT_FOUND &&
		   worker == NULL,
	   "no worker without a subscription");
	must(db, ruststream_subscribe(db, &apart));
	ok(ruststream_worker_open(db, "s", NULL, NULL, &worker) == RUSTSTREAM_REFUSED,
	   "no worker without a handler");
	must(db, ruststream_worker_open(db, "s", by_payload, NULL, &worker));
	ok(ruststream_worker_needs_transaction(worker) == RUSTSTREAM_REFUSED &&
		   strstr(ruststream_hint(db), "transactional") != NULL,
	   "a handler that needs the transaction is refused where there is none");
	ruststream_worker_close(worker);
	ok(ruststream_publish(db, &headers, NULL, 0) == RUSTSTREAM_REFUSED,
	   "headers need a column for them");
	ok(ruststream_publish(db, &nowhere, NULL, 0) == RUSTSTREAM_NOT_FOUND,
	   "publishing needs a queue");
	ok(ruststream_forget(db, "leased") == RUSTSTREAM_REFUSED, "a queue that is read stays");
	must(db, ruststream_unsubscribe(db, "s"));
	ok(ruststream_unsubscribe(db, "s") == RUSTSTREAM_NOT_FOUND, "unsubscribing twice is told");
	must(db, ruststream_forget(db, "leased"));
	must(db, ruststream_install(db, false));
	(void) sql("UPDATE ruststream_version SET version = 99");
	ok(ruststream_pause(db, "s") == RUSTSTREAM_NOT_INSTALLED,
	   "tables of a later version are left alone");
	ok(ruststream_install(db, false) == RUSTSTREAM_NOT_INSTALLED, "by install, too");
	ruststream_close(db);
}

static ruststream_outcome
ack_batch(ruststream_delivery *const *deliveries, size_t count, void *arg)
{
	(void) deliveries;
	(void) arg;
	return count > 0 ? RUSTSTREAM_ACK : RUSTSTREAM_FAIL;
}

static ruststream_outcome
ack_one(ruststream_delivery *delivery, void *arg)
{
	(void) delivery;
	(void) arg;
	return RUSTSTREAM_ACK;
}

/* What batches cannot be is refused where it is asked for; batch.t has the rest of them. */
static void
test_batch_refusals(void)
{
	ruststream *db = begin();
	ruststream_worker *worker = NULL;
	ruststream_subscription subscription = {.name = "b", .queue = "leased", .batch_size = 10};
	bool delivered = false;

	subscription.transactional = "on";
	ok(ruststream_subscribe(db, &subscription) == RUSTSTREAM_REFUSED &&
		   strstr(ruststream_message(db), "cannot be transactional") != NULL &&
		   strstr(ruststream_hint(db), "leave out batch_size") != NULL,
	   "a batch subscription is not transactional, and the hint says what to do");
	subscription.transactional = NULL;
	subscription.batch_size = 10001;
	ok(ruststream_subscribe(db, &subscription) == RUSTSTREAM_REFUSED, "nor of any size");
	subscription.batch_size = 10;
	must(db, ruststream_subscribe(db, &subscription));
	(void) sql("UPDATE ruststream_subscription SET transactional = 'on'");
	is(sql("SELECT transactional FROM ruststream_subscription"), "NULL", "SQL is refused it, too");

	ok(ruststream_worker_open(db, "b", ack_one, NULL, &worker) == RUSTSTREAM_REFUSED &&
		   strstr(ruststream_hint(db), "ruststream_worker_open_batch") != NULL,
	   "a callback of one row takes no batches");
	must(db, ruststream_worker_open_batch(db, "b", ack_batch, NULL, &worker));
	ok(ruststream_worker_needs_transaction(worker) == RUSTSTREAM_REFUSED &&
		   strstr(ruststream_hint(db), "without batch_size") != NULL,
	   "a handler of batches has no transaction to write in");
	(void) sql("INSERT INTO leased (payload) VALUES ('a'), ('b')");
	ok(ruststream_worker_step(worker, &delivered) == RUSTSTREAM_OK && delivered,
	   "a step is a batch");
	is(sql("SELECT count(*) FROM leased"), "0", ".. of all its rows");
	ruststream_worker_close(worker);

	subscription.batch_size = 0;
	must(db, ruststream_subscribe(db, &subscription));
	ok(ruststream_worker_open_batch(db, "b", ack_batch, NULL, &worker) == RUSTSTREAM_REFUSED &&
		   strstr(ruststream_hint(db), "batch_size") != NULL,
	   "and one of batches takes no single rows");
	ruststream_close(db);
}

/* The sanitizer's, which has an allocator of its own; missing where there is none. */
extern size_t __sanitizer_get_current_allocated_bytes(void) __attribute__((weak));

static size_t
allocated(void)
{
	return __sanitizer_get_current_allocated_bytes != NULL
			   ? __sanitizer_get_current_allocated_bytes()
			   : mallinfo2().uordblks;
}

/* Answers each row by what a batch can end in, so that each of these ways is gone often. */
static ruststream_outcome
answer_by_id(ruststream_delivery *const *deliveries, size_t count, void *arg)
{
	int *calls = arg;

	for (size_t i = 0; i < count; i++)
	{
		ruststream_reason(deliveries[i], "why not");
		ruststream_answer(deliveries[i], (ruststream_outcome) ((size_t) *calls % 7));
	}
	return ++*calls % 5 == 0 ? RUSTSTREAM_FAIL : RUSTSTREAM_ACK;
}

static void
test_batch_memory(void)
{
	ruststream *db = begin();
	const ruststream_subscription subscription = {
		.name = "b", .queue = "leased", .batch_size = 20, .retry_delay = 1};
	ruststream_worker *worker;
	size_t before = 0;
	size_t after;
	int calls = 0;

	(void) sql("PRAGMA synchronous = off;"
			   "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000)"
			   " INSERT INTO leased (payload) SELECT 'number ' || i FROM n");
	must(db, ruststream_subscribe(db, &subscription));
	must(db, ruststream_worker_open_batch(db, "b", answer_by_id, &calls, &worker));
	/* So that SQLite's own cache is full soon. */
	(void) sqlite3_exec(ruststream_connection(db), "PRAGMA cache_size = 10", NULL, NULL, NULL);
	for (int i = 0; i < 200; i++)
	{
		must(db, ruststream_worker_step(worker, NULL));
		if (i == 50)
			before = allocated();
	}
	after = allocated();
	ok(calls > 150 && after < before + 65536, "memory does not grow with the number of batches");
	printf("# %zu bytes after 50 batches, %zu after 200\n", before, after);
	ruststream_worker_close(worker);
	ruststream_close(db);
}

int
main(int argc, char **argv)
{
	if (argc != 2)
		return 2;
	directory = argv[1];
	(void) snprintf(path, sizeof(path), "%s/client test.db", directory);
	(void) snprintf(url, sizeof(url), "sqlite:%s", path);

	test_outcomes();
	test_misuse();
	test_long_handler();
	test_lost_lease("ack");
	test_lost_lease("retry");
	test_ended_row();
	test_failed_ack();
	test_deferred();
	test_busy();
	test_busy_for_good();
	test_snapshot();
	test_transient_limit();
	test_dead_collision();
	test_apart();
	test_left_open("leased");
	test_left_open("keyed");
	test_interrupt("leased");
	test_interrupt("keyed");
	test_timeout();
	test_sql_timeout();
	test_threads();
	test_keys();
	test_order(true);
	test_order(false);
	test_busy_head();
	test_second_process();
	test_errors();
	test_batch_refusals();
	test_batch_memory();
	return done_testing();
}
