/*-------------------------------------------------------------------------
 *
 * publish.c
 *	  Inserting a row, and counting those that are there.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

/* Counting stops here, and says so. */
#define COUNT_LIMIT 10000

/* ------------------------------------------------------------- publishing */

typedef struct returned_id
{
	char *text;
	size_t size;
} returned_id;

static bool
read_id(void *arg, const rs_value *columns, int count)
{
	returned_id *id = arg;

	(void) count;
	if (id->size == 0)
		return false;
	switch (columns[0].kind)
	{
		case RS_INTEGER:
			(void) snprintf(id->text, id->size, "%lld", (long long) columns[0].integer);
			break;
		case RS_REAL:
			(void) snprintf(id->text, id->size, "%.17g", columns[0].real);
			break;
		case RS_NULL:
			id->text[0] = '\0';
			break;
		default:
			(void) snprintf(id->text, id->size, "%.*s", (int) columns[0].length, columns[0].text);
	}
	return false;
}

/* Headers are an object of strings. */
static ruststream_code
check_headers(ruststream *handle, const char *headers)
{
	json_error_t problem;
	json_t *parsed = json_loads(headers, JSON_REJECT_DUPLICATES, &problem);
	const char *name;
	json_t *value;
	bool all_strings = json_is_object(parsed);

	json_object_foreach(parsed, name, value) all_strings = all_strings && json_is_string(value);
	json_decref(parsed);
	if (all_strings)
		return RUSTSTREAM_OK;
	return rs_fail(handle, RUSTSTREAM_REFUSED, "Headers are an object of strings in JSON.",
				   "the headers are not: %.200s",
				   parsed == NULL ? problem.text : "not every value is a string");
}

/* What is given needs a column that takes it. */
static ruststream_code
check_roles(ruststream *handle, const rs_table *table, const ruststream_task *task)
{
	const struct
	{
		bool is_given;
		rs_role role;
	} given[] = {
		{task->group_name != NULL, RS_ROLE_GROUP},
		{task->has_priority, RS_ROLE_PRIORITY},
		{task->delay > 0, RS_ROLE_RETRY_AFTER},
		{task->partition_key != NULL, RS_ROLE_PARTITION_KEY},
		{task->headers != NULL, RS_ROLE_HEADERS},
		{task->payload != NULL, RS_ROLE_PAYLOAD},
	};

	for (size_t i = 0; i < sizeof(given) / sizeof(given[0]); i++)
	{
		if (given[i].is_given && table->column[given[i].role] == NULL)
			return rs_fail(handle, RUSTSTREAM_REFUSED,
						   "Describe the queue with a column for it, or leave it out.",
						   "queue \"%s\" has no column for %s", table->name,
						   rs_role_word(given[i].role));
	}
	if (table->column[RS_ROLE_GROUP] != NULL && task->group_name == NULL)
		return rs_fail(handle, RUSTSTREAM_REFUSED, "Say which group the row is for.",
					   "queue \"%s\" has groups, and no group is given", table->name);
	return RUSTSTREAM_OK;
}

static ruststream_code
publish(ruststream *handle, rs_plan *plan, const ruststream_task *task, returned_id *id)
{
	rs_session *session = handle->session;
	rs_value values[RS_PARAM_COUNT] = {{RS_NULL, 0, 0, NULL, 0}};
	char until[RS_TIME_SIZE + 8];
	int64_t now;
	rs_result result;

	values[RS_PARAM_GROUP] = rs_value_of_text(task->group_name);
	values[RS_PARAM_PARTITION_KEY] = rs_value_of_text(task->partition_key);
	values[RS_PARAM_HEADERS] = rs_value_of_text(task->headers != NULL ? task->headers : "{}");
	if (task->has_priority)
		values[RS_PARAM_PRIORITY] = rs_value_of_integer(task->priority);
	if (task->payload != NULL)
	{
		values[RS_PARAM_PAYLOAD] = rs_value_of_bytes(task->payload, task->payload_length);
		if (!plan->look.payload_is_bytes)
			values[RS_PARAM_PAYLOAD].kind = RS_TEXT;
	}
	if (task->delay > 0)
	{
		int64_t delay = task->delay > INT64_MAX / 4 / RS_MILLISECOND ? INT64_MAX / 4
																	 : task->delay * RS_MILLISECOND;

		if (session->driver->now(session, &now) != RS_DONE)
			return rs_take_error(handle);
		session->driver->format_time(now + delay, false, until);
		values[RS_PARAM_UNTIL] = rs_value_of_text(until);
	}
	result = rs_plan_run(session, plan, RS_OP_PUBLISH, 0, values, read_id, id, NULL);
	return result == RS_DONE ? RUSTSTREAM_OK : rs_take_error(handle);
}

ruststream_code
ruststream_publish(ruststream *handle, const ruststream_task *task, char *id, size_t size)
{
	rs_arena arena = {0};
	rs_plan plan = {.arena = &arena};
	returned_id returned = {.text = id, .size = id != NULL ? size : 0};
	rs_table table;
	ruststream_code code = rs_begin_call_in_handler(handle);

	if (code != RUSTSTREAM_OK)
		return code;
	if (task->table == NULL)
		return rs_fail(handle, RUSTSTREAM_MISUSE, NULL, "a task names no table");
	if (returned.size > 0)
		id[0] = '\0';
	code = rs_check_installed(handle);
	if (code == RUSTSTREAM_OK)
		code = rs_load_queue(handle, task->table, &arena, &table);
	if (code == RUSTSTREAM_OK)
		code = rs_bind_queue(handle, &plan, &table, true);
	if (code == RUSTSTREAM_OK)
		code = check_roles(handle, &plan.table, task);
	if (code == RUSTSTREAM_OK && task->headers != NULL)
		code = check_headers(handle, task->headers);
	if (code == RUSTSTREAM_OK)
		code = publish(handle, &plan, task, &returned);
	rs_arena_free(&arena);
	return code;
}

/* ---------------------------------------------------------------- looking */

typedef struct looking
{
	ruststream *handle;
	rs_arena arena;
	ruststream_status *rows;
	int count;
	int room;
} looking;

static bool
keep_status(void *arg, const rs_value *columns, int count)
{
	looking *into = arg;
	ruststream_status *rows;
	ruststream_status *row;

	(void) count;
	rows = rs_grow(&into->arena, into->rows, into->count, &into->room, sizeof(*rows));
	if (rows == NULL)
		return false;
	into->rows = rows;
	row = &rows[into->count++];
	memset(row, 0, sizeof(*row));
	row->subscription = rs_text_of(&into->arena, &columns[0]);
	row->queue = rs_text_of(&into->arena, &columns[1]);
	row->state = rs_text_of(&into->arena, &columns[2]);
	row->workers = columns[3].integer;
	row->workers_wanted = columns[4].integer;
	row->delivered = columns[5].integer;
	row->failed = columns[6].integer;
	row->last_error = rs_text_of(&into->arena, &columns[7]);
	row->last_error_at = rs_text_of(&into->arena, &columns[8]);
	row->in_work = -1;
	row->dead = -1;
	return true;
}

typedef struct depth
{
	looking *into;
	ruststream_status *row;
} depth;

static bool
read_depth(void *arg, const rs_value *columns, int count)
{
	depth *of = arg;

	of->row->ready = columns[0].integer;
	of->row->waiting = columns[1].integer;
	of->row->oldest = rs_text_of(&of->into->arena, &columns[2]);
	if (count > 3 && columns[3].kind == RS_INTEGER)
		of->row->in_work = columns[3].integer;
	return false;
}

static bool
read_dead(void *arg, const rs_value *columns, int count)
{
	(void) count;
	((ruststream_status *) arg)->dead = columns[0].integer;
	return false;
}

/* Count one subscription's rows; what is broken is the row's state, not the call's error. */
static void
count_rows(looking *into, ruststream_status *row)
{
	ruststream *handle = into->handle;
	rs_plan plan = {.arena = &into->arena};
	rs_subscription subscription;
	rs_value values[RS_PARAM_COUNT] = {{RS_NULL, 0, 0, NULL, 0}};
	depth of = {.into = into, .row = row};
	char now_text[RS_TIME_SIZE + 8];
	rs_result result;

	if (rs_load_subscription(handle, row->subscription, &into->arena, &subscription) !=
			RUSTSTREAM_OK ||
		rs_bind_subscription(handle, &plan, &subscription) != RUSTSTREAM_OK)
	{
		row->state = rs_print(&into->arena, "broken: %s", handle->error.message);
		return;
	}
	result = rs_now_text(handle->session, now_text);
	values[RS_PARAM_NOW] = rs_value_of_text(now_text);
	values[RS_PARAM_GROUP] = rs_value_of_text(subscription.group_name);
	values[RS_PARAM_DEAD_GROUP] = rs_value_of_text(subscription.dead_letter);
	values[RS_PARAM_LIMIT] = rs_value_of_integer(COUNT_LIMIT);
	if (result == RS_DONE)
		result = rs_plan_run(handle->session, &plan, RS_OP_DEPTH, 0, values, read_depth, &of, NULL);
	if (result == RS_DONE && subscription.dead_letter != NULL)
		result = rs_plan_run(handle->session, &plan,
							 plan.policy.dead_letter_is_table ? RS_OP_DEPTH_DEAD_TABLE
															  : RS_OP_DEPTH_DEAD_GROUP,
							 0, values, read_dead, row, NULL);
	if (result != RS_DONE)
		row->state = rs_print(&into->arena, "broken: %s", handle->session->error.message);
	if (rs_table_form(&plan.table) != RS_FORM_LEASE)
		row->in_work = -1;
	row->capped =
		row->ready + row->waiting + (row->in_work > 0 ? row->in_work : 0) >= COUNT_LIMIT ||
		row->dead >= COUNT_LIMIT;
}

ruststream_code
ruststream_look(ruststream *handle, const char *name, ruststream_status_callback callback,
				void *arg)
{
	looking into = {.handle = handle};
	ruststream_code code = rs_begin_call(handle);
	bool found = false;

	if (code == RUSTSTREAM_OK)
		code = rs_check_installed(handle);
	if (code == RUSTSTREAM_OK && rs_catalog(handle->session, RS_CATALOG_STATUS, NULL, 0,
											keep_status, &into, NULL) != RS_DONE)
		code = rs_take_error(handle);
	for (int i = 0; i < into.count && code == RUSTSTREAM_OK; i++)
	{
		if (name != NULL && strcmp(name, into.rows[i].subscription) != 0)
			continue;
		found = true;
		count_rows(&into, &into.rows[i]);
		if (into.arena.is_exhausted)
			code = rs_no_memory(handle);
		else
			callback(arg, &into.rows[i]);
	}
	rs_arena_free(&into.arena);
	if (code == RUSTSTREAM_OK)
		memset(&handle->error, 0, sizeof(handle->error));
	if (code == RUSTSTREAM_OK && name != NULL && !found)
		return rs_fail(handle, RUSTSTREAM_NOT_FOUND, NULL, "there is no subscription \"%s\"", name);
	return code;
}
