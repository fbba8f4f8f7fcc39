/*-------------------------------------------------------------------------
 *
 * catalog.c
 *	  Our tables: queues and subscriptions are rows of theirs.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT_OF(array) ((int) (sizeof(array) / sizeof((array)[0])))

rs_result
rs_catalog(rs_session *session, rs_catalog_statement statement, const rs_value *values, int count,
		   rs_row_callback row, void *arg, int64_t *affected)
{
	const char *text = session->driver->catalog[statement];
	const rs_command command = {.text = text != NULL ? text : rs_portable_catalog[statement],
								.slot = -1,
								.parameter_count = count};

	return session->driver->execute(session, &command, values, count, row, arg, affected);
}

rs_result
rs_now_text(rs_session *session, char buffer[RS_TIME_SIZE + 8])
{
	int64_t now;
	rs_result result = session->driver->now(session, &now);

	if (result == RS_DONE)
		session->driver->format_time(now, false, buffer);
	return result;
}

static ruststream_code
begin_with_tables(ruststream *handle)
{
	ruststream_code code = rs_begin_call(handle);

	return code == RUSTSTREAM_OK ? rs_check_installed(handle) : code;
}

/* ----------------------------------------------------- in one transaction */

typedef rs_result (*change)(ruststream *handle, void *arg);

/* Either all of a change is done, or nothing; what is transient is tried again. */
static ruststream_code
change_at_once(ruststream *handle, change apply, void *arg)
{
	rs_result result = RS_TRANSIENT;

	for (int i = 0; i < 3 && result == RS_TRANSIENT; i++)
	{
		result = handle->driver->begin(handle->session, RS_FOR_US, NULL);
		if (result == RS_DONE)
			result = apply(handle, arg);
		result = rs_commit_or_roll_back(handle->session, result);
	}
	return result == RS_DONE ? RUSTSTREAM_OK : rs_take_error(handle);
}

/* ----------------------------------------------------------------- queues */

/* A number, also where an engine returns it as text; NULL is zero. */
static int64_t
number_of(const rs_value *value)
{
	char digits[32];

	if (value->kind == RS_INTEGER)
		return value->integer;
	if (value->kind != RS_TEXT || value->length >= sizeof(digits))
		return 0;
	memcpy(digits, value->text, value->length);
	digits[value->length] = '\0';
	return strtoll(digits, NULL, 10);
}

typedef struct reading
{
	rs_arena *arena;
	void *into;
	const char *isolation;
	const char *mode;
	bool found;
} reading;

static bool
read_queue(void *arg, const rs_value *columns, int count)
{
	reading *from = arg;
	rs_table *table = from->into;

	(void) count;
	from->found = true;
	for (int role = 0; role < RS_ROLE_COUNT; role++)
		table->column[role] = rs_text_of(from->arena, &columns[role]);
	table->fifo = number_of(&columns[RS_ROLE_COUNT]) != 0;
	table->lock_key = rs_text_of(from->arena, &columns[RS_ROLE_COUNT + 1]);
	from->isolation = rs_text_of(from->arena, &columns[RS_ROLE_COUNT + 2]);
	from->mode = rs_text_of(from->arena, &columns[RS_ROLE_COUNT + 3]);
	return false;
}

/* Level and mode, which are words in a description. */
static ruststream_code
declare_isolation(ruststream *handle, rs_table *table, const char *isolation, const char *mode)
{
	rs_dialect dialect = handle->driver->dialect;
	rs_problem problem = rs_isolation_declare(dialect, isolation, &table->isolation);

	if (problem.code == RS_OK)
		problem = rs_mode_declare(dialect, mode, &table->mode);
	return problem.code == RS_OK ? RUSTSTREAM_OK : rs_fail_problem(handle, problem);
}

ruststream_code
rs_load_queue(ruststream *handle, const char *name, rs_arena *arena, rs_table *table)
{
	reading from = {.arena = arena, .into = table};
	rs_value value = rs_value_of_text(name);

	memset(table, 0, sizeof(*table));
	if (rs_catalog(handle->session, RS_CATALOG_QUEUE, &value, 1, read_queue, &from, NULL) !=
		RS_DONE)
		return rs_take_error(handle);
	if (!from.found)
		return rs_fail(handle, RUSTSTREAM_NOT_FOUND, "Describe the table first.",
					   "table \"%s\" is not described as a queue", name);
	table->name = rs_copy(arena, name);
	if (arena->is_exhausted)
		return rs_no_memory(handle);
	return declare_isolation(handle, table, from.isolation, from.mode);
}

typedef struct writing
{
	rs_catalog_statement update;
	rs_catalog_statement insert;
	rs_value values[24];
	int count;
	const char *statements[RS_INDEX_COUNT]; /* further ones, to be executed first */
} writing;

/* An update, and where it finds nothing, an insert: the same SQL everywhere. */
static rs_result
write_row(ruststream *handle, void *arg)
{
	writing *row = arg;
	int64_t found = 0;
	rs_result result = RS_DONE;

	for (int i = 0; i < COUNT_OF(row->statements) && result == RS_DONE; i++)
	{
		const rs_command command = {.text = row->statements[i], .slot = -1};

		if (command.text != NULL)
			result = handle->driver->execute(handle->session, &command, NULL, 0, NULL, NULL, NULL);
	}
	if (result == RS_DONE)
		result =
			rs_catalog(handle->session, row->update, row->values, row->count, NULL, NULL, &found);
	if (result == RS_DONE && found == 0)
		result =
			rs_catalog(handle->session, row->insert, row->values, row->count, NULL, NULL, NULL);
	return result;
}

static rs_table
table_of(const ruststream_queue *queue)
{
	return (rs_table){
		.name = queue->table,
		.column = {[RS_ROLE_ID] = queue->id_column,
				   [RS_ROLE_GROUP] = queue->group_column,
				   [RS_ROLE_PRIORITY] = queue->priority_column,
				   [RS_ROLE_PARTITION_KEY] = queue->partition_key_column,
				   [RS_ROLE_RETRY_AFTER] = queue->retry_after_column,
				   [RS_ROLE_ATTEMPT] = queue->attempt_column,
				   [RS_ROLE_PROCESSED_AT] = queue->processed_at_column,
				   [RS_ROLE_LOCKED_UNTIL] = queue->locked_until_column,
				   [RS_ROLE_HEADERS] = queue->headers_column,
				   [RS_ROLE_PAYLOAD] = queue->payload_column},
		.fifo = queue->fifo,
		.lock_key = queue->lock_key,
	};
}

/* The plan is bound; make or name the indexes that are missing, and write the row. */
static ruststream_code
describe_bound(ruststream *handle, rs_plan *plan, const ruststream_queue *queue)
{
	writing row = {.update = RS_CATALOG_QUEUE_UPDATE, .insert = RS_CATALOG_QUEUE_INSERT};
	const char *missing[RS_INDEX_COUNT];
	ruststream_code code;

	for (int i = 0; i < RS_INDEX_COUNT; i++)
		missing[i] = rs_missing_index(plan, (rs_index) i);
	if (plan->arena->is_exhausted)
		return rs_no_memory(handle);
	for (int i = 0; i < RS_INDEX_COUNT && queue->create_index; i++)
		row.statements[i] = missing[i];
	for (int role = 0; role < RS_ROLE_COUNT; role++)
		row.values[row.count++] = rs_value_of_text(plan->table.column[role]);
	row.values[row.count++] = rs_value_of_integer(queue->fifo ? 1 : 0);
	row.values[row.count++] = rs_value_of_text(queue->lock_key);
	row.values[row.count++] = rs_value_of_text(queue->isolation);
	row.values[row.count++] = rs_value_of_text(queue->mode);
	row.values[row.count++] =
		rs_value_of_text(plan->look.full_name != NULL ? plan->look.full_name : plan->table.name);
	code = change_at_once(handle, write_row, &row);
	for (int i = 0; i < RS_INDEX_COUNT && code == RUSTSTREAM_OK; i++)
	{
		if (missing[i] != NULL)
			rs_tell(handle, "%s: %s",
					queue->create_index
						? "made the index that claims need"
						: "claims need an index that is missing; make it before you subscribe",
					missing[i]);
	}
	return code;
}

ruststream_code
ruststream_describe(ruststream *handle, const ruststream_queue *queue)
{
	rs_arena arena = {0};
	rs_plan plan = {.arena = &arena};
	rs_table table = table_of(queue);
	ruststream_code code = begin_with_tables(handle);

	if (code == RUSTSTREAM_OK && (queue->table == NULL || queue->table[0] == '\0'))
		code = rs_fail(handle, RUSTSTREAM_MISUSE, NULL, "a description names no table");
	if (code == RUSTSTREAM_OK)
		code = declare_isolation(handle, &table, queue->isolation, queue->mode);
	if (code == RUSTSTREAM_OK)
		code = rs_bind_queue(handle, &plan, &table, true);
	if (code == RUSTSTREAM_OK)
		code = describe_bound(handle, &plan, queue);
	rs_arena_free(&arena);
	return code;
}

static bool
read_name(void *arg, const rs_value *columns, int count)
{
	reading *from = arg;

	(void) count;
	from->found = true;
	(void) snprintf(from->into, 256, "%.*s", (int) columns[0].length, columns[0].text);
	return false;
}

/* Change one row by its name, which must be there. */
static ruststream_code
change_named(ruststream *handle, rs_catalog_statement statement, const rs_value *values, int count,
			 const char *what, const char *name)
{
	int64_t found = 0;

	if (rs_catalog(handle->session, statement, values, count, NULL, NULL, &found) != RS_DONE)
		return rs_take_error(handle);
	if (found == 0)
		return rs_fail(handle, RUSTSTREAM_NOT_FOUND, NULL, "there is no %s \"%s\"", what, name);
	return RUSTSTREAM_OK;
}

ruststream_code
ruststream_forget(ruststream *handle, const char *table)
{
	char reader[256] = "";
	reading from = {.into = reader};
	rs_value value = rs_value_of_text(table);
	ruststream_code code = begin_with_tables(handle);

	if (code != RUSTSTREAM_OK)
		return code;
	if (rs_catalog(handle->session, RS_CATALOG_QUEUE_READERS, &value, 1, read_name, &from, NULL) !=
		RS_DONE)
		return rs_take_error(handle);
	if (from.found)
		return rs_fail(handle, RUSTSTREAM_REFUSED, "Unsubscribe first.",
					   "subscription \"%s\" reads queue \"%s\"", reader, table);
	return change_named(handle, RS_CATALOG_QUEUE_DELETE, &value, 1, "queue", table);
}

/* ---------------------------------------------------------- subscriptions */

/* Number n of the columns, in the order of SUBSCRIPTION_COLUMNS. */
static bool
read_subscription(void *arg, const rs_value *columns, int count)
{
	reading *from = arg;
	rs_subscription *into = from->into;
	rs_arena *arena = from->arena;
	char *fingerprint = rs_copy(arena, "");

	from->found = true;
	into->queue = rs_text_of(arena, &columns[0]);
	into->handler = rs_text_of(arena, &columns[1]);
	into->program = rs_text_of(arena, &columns[2]);
	into->group_name = rs_text_of(arena, &columns[3]);
	into->transactional = rs_text_of(arena, &columns[4]);
	into->workers = number_of(&columns[5]);
	into->max_attempts = number_of(&columns[6]);
	into->dead_letter = rs_text_of(arena, &columns[7]);
	into->on_error = rs_text_of(arena, &columns[8]);
	into->on_decode_error = rs_text_of(arena, &columns[9]);
	into->decode = rs_text_of(arena, &columns[10]);
	into->retry_delay = number_of(&columns[11]);
	into->backoff = rs_text_of(arena, &columns[12]);
	into->max_retry_delay = number_of(&columns[13]);
	into->lease = number_of(&columns[14]);
	into->timeout = number_of(&columns[15]);
	into->poll_interval = number_of(&columns[16]);
	into->batch_size = number_of(&columns[17]);
	into->paused = number_of(&columns[18]) != 0;
	for (int i = 0; i < count && fingerprint != NULL; i++)
	{
		const char *text = rs_text_of(arena, &columns[i]);

		fingerprint = rs_print(arena, "%s|%zu:%s", fingerprint, text != NULL ? strlen(text) : 0,
							   text != NULL ? text : "");
	}
	into->fingerprint = fingerprint;
	return false;
}

ruststream_code
rs_load_subscription(ruststream *handle, const char *name, rs_arena *arena,
					 rs_subscription *subscription)
{
	reading from = {.arena = arena, .into = subscription};
	rs_value value = rs_value_of_text(name);

	memset(subscription, 0, sizeof(*subscription));
	if (rs_catalog(handle->session, RS_CATALOG_SUBSCRIPTION, &value, 1, read_subscription, &from,
				   NULL) != RS_DONE)
		return rs_take_error(handle);
	if (!from.found)
		return rs_fail(handle, RUSTSTREAM_NOT_FOUND, NULL, "there is no subscription \"%s\"", name);
	subscription->name = rs_copy(arena, name);
	if (subscription->group_name == NULL)
		subscription->group_name = subscription->name;
	return arena->is_exhausted ? rs_no_memory(handle) : RUSTSTREAM_OK;
}

static rs_subscription
subscription_of(const ruststream_subscription *given)
{
	return (rs_subscription){
		.name = given->name,
		.queue = given->queue,
		.handler = given->handler,
		.program = given->program,
		.group_name = given->group_name != NULL ? given->group_name : given->name,
		.transactional = given->transactional,
		.workers = given->workers,
		.max_attempts = given->max_attempts,
		.dead_letter = given->dead_letter,
		.on_error = given->on_error,
		.on_decode_error = given->on_decode_error,
		.decode = given->decode != NULL ? given->decode : "any",
		.retry_delay = given->retry_delay != 0 ? given->retry_delay : 1000,
		.backoff = given->backoff != NULL ? given->backoff : "exponential",
		.max_retry_delay = given->max_retry_delay != 0 ? given->max_retry_delay : 3600000,
		.lease = given->lease != 0 ? given->lease : 30000,
		.timeout = given->timeout,
		.poll_interval = given->poll_interval != 0 ? given->poll_interval : 1000,
		.batch_size = given->batch_size,
	};
}

static rs_value
number_or_null(int64_t number)
{
	return number != 0 ? rs_value_of_integer(number) : RS_VALUE_NULL;
}

/* In the order of SUBSCRIPTION_COLUMNS, and the name. */
static void
put_subscription(writing *row, const rs_subscription *from, const char *group_name)
{
	const rs_value values[] = {
		rs_value_of_text(from->queue),
		rs_value_of_text(from->handler),
		rs_value_of_text(from->program),
		rs_value_of_text(group_name),
		rs_value_of_text(from->transactional),
		rs_value_of_integer(from->workers),
		number_or_null(from->max_attempts),
		rs_value_of_text(from->dead_letter),
		rs_value_of_text(from->on_error),
		rs_value_of_text(from->on_decode_error),
		rs_value_of_text(from->decode),
		rs_value_of_integer(from->retry_delay),
		rs_value_of_text(from->backoff),
		rs_value_of_integer(from->max_retry_delay),
		rs_value_of_integer(from->lease),
		number_or_null(from->timeout),
		rs_value_of_integer(from->poll_interval),
		number_or_null(from->batch_size),
		rs_value_of_text(from->name),
	};

	memcpy(row->values, values, sizeof(values));
	row->count = COUNT_OF(values);
}

ruststream_code
ruststream_subscribe(ruststream *handle, const ruststream_subscription *given)
{
	rs_arena arena = {0};
	rs_plan plan = {.arena = &arena};
	rs_subscription subscription = subscription_of(given);
	writing row = {.update = RS_CATALOG_SUBSCRIPTION_UPDATE,
				   .insert = RS_CATALOG_SUBSCRIPTION_INSERT};
	ruststream_code code = begin_with_tables(handle);

	if (code != RUSTSTREAM_OK)
		return code;
	if (given->name == NULL || given->name[0] == '\0' || given->queue == NULL)
		return rs_fail(handle, RUSTSTREAM_MISUSE, NULL, "a subscription needs a name and a queue");
	if (given->workers < 0 || given->workers > 64)
		return rs_fail(handle, RUSTSTREAM_REFUSED, "Use 1 to 64.", "workers cannot be %d",
					   given->workers);
	if (subscription.workers == 0)
		subscription.workers = 1;
	code = rs_bind_subscription(handle, &plan, &subscription);
	if (code == RUSTSTREAM_OK)
	{
		put_subscription(&row, &subscription, given->group_name);
		code = change_at_once(handle, write_row, &row);
	}
	if (code == RUSTSTREAM_OK && plan.warning != NULL)
		rs_tell(handle, "subscription \"%s\": %s", given->name, plan.warning);
	rs_arena_free(&arena);
	return code;
}

static rs_result
delete_subscription(ruststream *handle, void *arg)
{
	static const rs_catalog_statement statements[] = {RS_CATALOG_FAILURE_DELETE,
													  RS_CATALOG_COUNTER_DELETE};
	writing *row = arg;
	int64_t found = 0;
	rs_result result = rs_catalog(handle->session, RS_CATALOG_SUBSCRIPTION_DELETE, row->values, 1,
								  NULL, NULL, &found);

	row->count = (int) found;
	for (int i = 0; i < COUNT_OF(statements) && result == RS_DONE; i++)
		result = rs_catalog(handle->session, statements[i], row->values, 1, NULL, NULL, NULL);
	return result;
}

ruststream_code
ruststream_unsubscribe(ruststream *handle, const char *name)
{
	writing row = {.values = {rs_value_of_text(name)}};
	ruststream_code code = begin_with_tables(handle);

	if (code == RUSTSTREAM_OK)
		code = change_at_once(handle, delete_subscription, &row);
	if (code == RUSTSTREAM_OK && row.count == 0)
		return rs_fail(handle, RUSTSTREAM_NOT_FOUND, NULL, "there is no subscription \"%s\"", name);
	return code;
}

static ruststream_code
set_paused(ruststream *handle, const char *name, bool paused)
{
	const rs_value values[] = {rs_value_of_integer(paused ? 1 : 0), rs_value_of_text(name)};
	ruststream_code code = begin_with_tables(handle);

	if (code != RUSTSTREAM_OK)
		return code;
	return change_named(handle, RS_CATALOG_SUBSCRIPTION_PAUSE, values, 2, "subscription", name);
}

ruststream_code
ruststream_pause(ruststream *handle, const char *name)
{
	return set_paused(handle, name, true);
}

ruststream_code
ruststream_resume(ruststream *handle, const char *name)
{
	return set_paused(handle, name, false);
}

typedef struct telling
{
	ruststream_subscription_callback callback;
	void *arg;
	rs_arena arena;
} telling;

static bool
tell_subscription(void *arg, const rs_value *columns, int count)
{
	telling *to = arg;
	const char *name = rs_text_of(&to->arena, &columns[0]);

	(void) count;
	if (name == NULL)
		return false;
	to->callback(to->arg, name, (int) number_of(&columns[1]));
	return true;
}

ruststream_code
ruststream_each_subscription(ruststream *handle, ruststream_subscription_callback callback,
							 void *arg)
{
	telling to = {.callback = callback, .arg = arg};
	ruststream_code code = begin_with_tables(handle);

	if (code != RUSTSTREAM_OK)
		return code;
	if (rs_catalog(handle->session, RS_CATALOG_SUBSCRIPTIONS, NULL, 0, tell_subscription, &to,
				   NULL) != RS_DONE)
		code = rs_take_error(handle);
	else if (to.arena.is_exhausted)
		code = rs_no_memory(handle);
	rs_arena_free(&to.arena);
	return code;
}
