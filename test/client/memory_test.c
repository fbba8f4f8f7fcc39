/*-------------------------------------------------------------------------
 *
 * memory_test.c
 *	  Every allocation of the library fails once: nothing crashes, nothing leaks (the
 *	  sanitizer says), no task is lost, and none has its effect twice.
 *
 *	  memory_test DIRECTORY
 *
 * The linker sends the library's calls of malloc and its kind here; SQLite's own go where they
 * always went.
 *
 *-------------------------------------------------------------------------
 */
#include "client/ruststream.h"
#include "tap.h"

#include <sqlite3.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *memory, size_t size);
char *__real_strdup(const char *text);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *memory, size_t size);
char *__wrap_strdup(const char *text);

/* The one that fails, counted down to; negative: none.  The watch's thread counts, too. */
static _Atomic long left = -1;

static bool
fails(void)
{
	return left >= 0 && left-- == 0;
}

void *
__wrap_malloc(size_t size)
{
	return fails() ? NULL : __real_malloc(size);
}

void *
__wrap_calloc(size_t count, size_t size)
{
	return fails() ? NULL : __real_calloc(count, size);
}

void *
__wrap_realloc(void *memory, size_t size)
{
	return fails() ? NULL : __real_realloc(memory, size);
}

char *
__wrap_strdup(const char *text)
{
	return fails() ? NULL : __real_strdup(text);
}

/* --------------------------------------------------------------- the work */

static char path[512];
static char url[600];
static long unexplained;

static int
number(const char *text)
{
	sqlite3 *db;
	sqlite3_stmt *statement;
	int result = -1;

	if (sqlite3_open(path, &db) == SQLITE_OK &&
		sqlite3_prepare_v2(db, text, -1, &statement, NULL) == SQLITE_OK)
	{
		if (sqlite3_step(statement) == SQLITE_ROW)
			result = sqlite3_column_int(statement, 0);
		(void) sqlite3_finalize(statement);
	}
	(void) sqlite3_close(db);
	return result;
}

static void
run(const char *text)
{
	sqlite3 *db;

	if (sqlite3_open(path, &db) != SQLITE_OK ||
		sqlite3_exec(db, text, NULL, NULL, NULL) != SQLITE_OK)
		printf("# %s: %s\n", text, sqlite3_errmsg(db));
	(void) sqlite3_close(db);
}

/* What fails for want of memory says so. */
static bool
went_well(ruststream *db, ruststream_code code)
{
	if (code != RUSTSTREAM_OK && code != RUSTSTREAM_NO_MEMORY)
	{
		unexplained++;
		printf("# %d: %s\n", (int) code, db != NULL ? ruststream_message(db) : "");
	}
	return code == RUSTSTREAM_OK;
}

static void
ignore(void *arg, const ruststream_status *status)
{
	(void) arg;
	(void) status;
}

/* From an empty database to a delivery in each form, as far as memory lasts. */
static bool
work(void)
{
	const ruststream_queue leased = {.table = "leased",
									 .id_column = "id",
									 .retry_after_column = "retry_after",
									 .attempt_column = "attempt",
									 .locked_until_column = "locked_until",
									 .payload_column = "payload",
									 .create_index = true};
	const ruststream_queue keyed = {.table = "keyed",
									.id_column = "id",
									.partition_key_column = "payload",
									.attempt_column = "attempt",
									.lock_key = "key-{id}"};
	const ruststream_subscription by_sql = {.name = "sql",
											.queue = "leased",
											.handler = "INSERT INTO effect VALUES (:id);"
													   "SELECT ruststream_retry_after(0, 'again')"
													   " WHERE :attempt = 1",
											.dead_letter = "dead"};
	const ruststream_subscription by_program = {
		.name = "program", .queue = "keyed", .program = "exit 12"};
	const ruststream_queue batched = {.table = "batched",
									  .id_column = "id",
									  .attempt_column = "attempt",
									  .processed_at_column = "processed_at",
									  .locked_until_column = "locked_until",
									  .payload_column = "payload",
									  .create_index = true};
	const ruststream_subscription by_batch = {.name = "batch",
											  .queue = "batched",
											  .program = "while read -r row; do echo ack; done",
											  .batch_size = 10};
	const ruststream_task task = {.table = "leased", .payload = "x", .payload_length = 1};
	static const char *const names[] = {"sql", "program", "batch"};
	ruststream *db = NULL;
	ruststream_worker *worker = NULL;
	bool well = went_well(NULL, ruststream_open(url, &db) == RUSTSTREAM_OK ? RUSTSTREAM_OK
																		   : RUSTSTREAM_NO_MEMORY);

	well = well && went_well(db, ruststream_install(db, false)) &&
		   went_well(db, ruststream_describe(db, &leased)) &&
		   went_well(db, ruststream_describe(db, &keyed)) &&
		   went_well(db, ruststream_describe(db, &batched)) &&
		   went_well(db, ruststream_subscribe(db, &by_sql)) &&
		   went_well(db, ruststream_subscribe(db, &by_program)) &&
		   went_well(db, ruststream_subscribe(db, &by_batch)) &&
		   went_well(db, ruststream_publish(db, &task, NULL, 0));
	for (int i = 0; i < 3 && well; i++)
	{
		well = went_well(db, ruststream_worker_open(db, names[i], NULL, NULL, &worker)) &&
			   went_well(db, ruststream_worker_run(worker, RUSTSTREAM_DRAIN));
		ruststream_worker_close(worker);
		worker = NULL;
	}
	well = well && went_well(db, ruststream_look(db, NULL, ignore, NULL));
	ruststream_close(db);
	return well;
}

static void
begin(void)
{
	(void) unlink(path);
	run("CREATE TABLE leased (id INTEGER PRIMARY KEY, payload TEXT, attempt INTEGER,"
		" retry_after TEXT, locked_until TEXT);"
		"CREATE TABLE dead (id INTEGER PRIMARY KEY, payload TEXT, attempt INTEGER,"
		" retry_after TEXT, locked_until TEXT);"
		"CREATE TABLE keyed (id INTEGER PRIMARY KEY, payload TEXT, attempt INTEGER);"
		"CREATE TABLE effect (id INTEGER);"
		"CREATE TABLE batched (id INTEGER PRIMARY KEY, payload TEXT, attempt INTEGER,"
		" processed_at TEXT, locked_until TEXT);"
		"INSERT INTO batched (payload) VALUES ('v'), ('w'), ('x');"
		"INSERT INTO leased (payload) VALUES ('y'); INSERT INTO keyed (payload) VALUES ('z')");
}

int
main(int argc, char **argv)
{
	long rounds = 0;
	long twice = 0;
	long lost = 0;
	bool was_reached = true;
	char name[128];

	if (argc != 2)
		return 2;
	(void) snprintf(path, sizeof(path), "%s/memory.db", argv[1]);
	(void) snprintf(url, sizeof(url), "sqlite:%s", path);
	for (long n = 0; was_reached && n < 2000; n++)
	{
		begin();
		left = n;
		(void) work();
		was_reached = left < 0;
		left = -1;
		rounds++;
		twice += number("SELECT count(*) - count(DISTINCT id) FROM effect");
		lost += number("SELECT (SELECT count(*) FROM leased WHERE id = 1)"
					   " + (SELECT count(*) FROM effect WHERE id = 1)"
					   " + (SELECT count(*) FROM dead WHERE id = 1)") != 1;
		lost += number("SELECT count(*) FROM batched") != 3;
	}
	(void) snprintf(name, sizeof(name), "%ld allocations failed, one a round, and nothing crashed",
					rounds - 1);
	ok(!was_reached && rounds > 50, name);
	ok(twice == 0, "no effect was had twice");
	ok(lost == 0, "no task was lost");
	ok(unexplained == 0, "what fails for want of memory says so");
	begin();
	ok(work(), "with all of its memory it works");
	ok(number("SELECT count(*) FROM batched WHERE processed_at IS NOT NULL") == 3,
	   "and so do its batches");
	return done_testing();
}
