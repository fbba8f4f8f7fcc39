/*-------------------------------------------------------------------------
 *
 * plan.c
 *	  A description, or a subscription, bound to its table as it is now.
 *
 * The same checks refuse a registration and find, when a worker begins, what has changed since.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <stdio.h>
#include <string.h>

/* ------------------------------------------------------------- statements */

int
rs_plan_count(const rs_plan *plan, rs_operation operation)
{
	return rs_statement_count(plan->dialect, operation, &plan->table);
}

const rs_command *
rs_plan_command(rs_plan *plan, rs_operation operation, int index)
{
	rs_command *command = &plan->commands[RS_SLOT(operation, index)];
	rs_statement statement;
	char *text;

	if (command->text != NULL)
		return command;
	statement = rs_statement_render(plan->dialect, operation, index, &plan->table,
									&plan->destination, NULL, 0);
	text = rs_alloc(plan->arena, statement.length + 1);
	if (text == NULL)
		return NULL;
	(void) rs_statement_render(plan->dialect, operation, index, &plan->table, &plan->destination,
							   text, statement.length + 1);
	command->text = text;
	command->slot = RS_SLOT(operation, index);
	command->parameter_count = statement.parameter_count;
	memcpy(command->parameters, statement.parameters, sizeof(command->parameters));
	return command;
}

bool
rs_plan_takes(rs_plan *plan, rs_operation operation, rs_parameter parameter)
{
	for (int i = 0; i < rs_plan_count(plan, operation); i++)
	{
		const rs_command *command = rs_plan_command(plan, operation, i);

		if (command == NULL)
			return true;
		for (int n = 0; n < command->parameter_count; n++)
		{
			if (command->parameters[n] == parameter)
				return true;
		}
	}
	return false;
}

rs_result
rs_plan_run(rs_session *session, rs_plan *plan, rs_operation operation, int index,
			const rs_value *values, rs_row_callback row, void *arg, int64_t *affected)
{
	const rs_command *command = rs_plan_command(plan, operation, index);
	rs_value bound[RS_MAX_PARAMETERS];

	if (command == NULL)
		return rs_session_no_memory(session);
	for (int i = 0; i < command->parameter_count; i++)
		bound[i] = values[command->parameters[i]];
	return session->driver->execute(session, command, bound, command->parameter_count, row, arg,
									affected);
}

/* ------------------------------------------------------------ descriptions */

static ruststream_code
refuse_missing_column(ruststream *handle, const char *table, const char *name, int length,
					  const char *what)
{
	return rs_fail(
		handle, RUSTSTREAM_REFUSED, "Names are written as the table has them, in case, too.",
		"table \"%s\" has no column \"%.*s\", which %s names", table, length, name, what);
}

/* Each column that the description and its lock key name. */
static ruststream_code
check_columns(ruststream *handle, const rs_table *table, const rs_look *look)
{
	const char *start;
	size_t length;

	for (int role = 0; role < RS_ROLE_COUNT; role++)
	{
		const char *name = table->column[role];

		if (name != NULL && rs_look_find(look, name, strlen(name)) == NULL)
			return refuse_missing_column(handle, table->name, name, (int) strlen(name),
										 "its description");
	}
	for (int n = 0; table->lock_key != NULL && rs_key_column(table->lock_key, n, &start, &length);
		 n++)
	{
		if (rs_look_find(look, start, length) == NULL)
			return refuse_missing_column(handle, table->name, start, (int) length, "the lock key");
	}
	return RUSTSTREAM_OK;
}

static ruststream_code
check_id(ruststream *handle, const rs_table *table, const rs_look *look)
{
	const char *id = table->column[RS_ROLE_ID];
	const rs_column *column = rs_look_find(look, id, strlen(id));

	if (!look->id_is_unique)
		return rs_fail(handle, RUSTSTREAM_REFUSED,
					   "A queue's id is the only column of a primary key, or of a unique index "
					   "without a condition.",
					   "column \"%s\" of table \"%s\" is not unique by itself", id, table->name);
	if (column->is_nullable)
		return rs_fail(handle, RUSTSTREAM_REFUSED,
					   "Declare the column NOT NULL: a row without an id could never be ended.",
					   "column \"%s\" of table \"%s\" may be NULL", id, table->name);
	return RUSTSTREAM_OK;
}

const char *
rs_missing_index(rs_plan *plan, rs_index index)
{
	rs_statement statement;
	char *text;

	if (plan->look.has_index[index] || !rs_index_is_needed(plan->dialect, &plan->table, index))
		return NULL;
	statement = rs_index_render(plan->dialect, &plan->table, index, NULL, 0);
	text = rs_alloc(plan->arena, statement.length + 1);
	if (text != NULL)
		(void) rs_index_render(plan->dialect, &plan->table, index, text, statement.length + 1);
	return text;
}

static ruststream_code
check_index(ruststream *handle, rs_plan *plan)
{
	for (int i = 0; i < RS_INDEX_COUNT; i++)
	{
		const char *index = rs_missing_index(plan, (rs_index) i);
		char hint[sizeof(handle->error.hint)];

		if (plan->arena->is_exhausted)
			return rs_no_memory(handle);
		if (index == NULL)
			continue;
		(void) snprintf(hint, sizeof(hint), "Make it: %s", index);
		return rs_fail(handle, RUSTSTREAM_REFUSED, hint,
					   "table \"%s\" has no index for its claims, which would scan it",
					   plan->table.name);
	}
	return RUSTSTREAM_OK;
}

ruststream_code
rs_bind_queue(ruststream *handle, rs_plan *plan, const rs_table *table, bool describing)
{
	rs_problem problem;
	ruststream_code code;

	plan->table = *table;
	plan->dialect = handle->driver->dialect;
	problem = rs_table_check(table);
	if (problem.code == RS_OK)
		problem = rs_table_check_dialect(plan->dialect, table);
	if (problem.code != RS_OK)
		return rs_fail_problem(handle, problem);

	if (handle->driver->look(handle->session, table, plan->arena, &plan->look) != RS_DONE)
		return rs_take_error(handle);
	plan->table.schema = plan->look.schema;
	plan->table.name = plan->look.name;
	plan->table.claim_index = plan->look.claim_index;
	plan->table.only = plan->look.only;
	plan->table.headers_are_json = plan->look.headers_are_json;
	code = check_columns(handle, &plan->table, &plan->look);
	if (code == RUSTSTREAM_OK)
		code = check_id(handle, &plan->table, &plan->look);
	if (code == RUSTSTREAM_OK && !describing)
		code = check_index(handle, plan);
	if (code != RUSTSTREAM_OK)
		return code;

	plan->commands = rs_alloc(plan->arena, sizeof(rs_command) * RS_SLOT_COUNT);
	return plan->commands != NULL ? RUSTSTREAM_OK : rs_no_memory(handle);
}

/* ----------------------------------------------------------- subscriptions */

/* The dead-letter table: it has every column that a move carries. */
static ruststream_code
bind_dead_table(ruststream *handle, rs_plan *plan)
{
	const rs_table dead = {.name = plan->subscription.dead_letter,
						   .column = {[RS_ROLE_ID] = plan->table.column[RS_ROLE_ID]}};
	rs_look look;
	const char **columns = rs_alloc(plan->arena, sizeof(char *) * (size_t) plan->look.column_count);
	int count = 0;

	if (columns == NULL)
		return rs_no_memory(handle);
	if (handle->driver->look(handle->session, &dead, plan->arena, &look) != RS_DONE)
		return rs_take_error(handle);
	if (strcmp(look.name, plan->table.name) == 0 && strcmp(look.schema, plan->table.schema) == 0)
		return rs_fail(handle, RUSTSTREAM_REFUSED, "Name another table.",
					   "the dead letters of \"%s\" cannot go into the same table",
					   plan->table.name);
	for (int i = 0; i < plan->look.column_count; i++)
	{
		const rs_column *from = &plan->look.columns[i];
		const rs_column *to = rs_look_find(&look, from->name, strlen(from->name));

		if (from->is_generated)
			continue;
		if (to == NULL || to->is_generated)
			return rs_fail(handle, RUSTSTREAM_REFUSED,
						   "A dead-letter table has every column of its queue; it may have more.",
						   "dead-letter table \"%s\" has no column \"%s\" to write", look.name,
						   from->name);
		columns[count++] = from->name;
	}
	plan->destination = (rs_destination){
		.schema = look.schema, .name = look.name, .columns = columns, .column_count = count};
	plan->policy.dead_letter_is_table = true;
	return RUSTSTREAM_OK;
}

static ruststream_code
bind_dead_letter(ruststream *handle, rs_plan *plan)
{
	const rs_subscription *subscription = &plan->subscription;

	plan->policy.has_dead_letter = subscription->dead_letter != NULL;
	if (subscription->max_attempts > 0 && subscription->dead_letter == NULL)
		return rs_fail(handle, RUSTSTREAM_REFUSED, "Give a dead letter as well.",
					   "max_attempts needs a dead letter to move rows to");
	if (subscription->max_attempts > 0 && plan->table.column[RS_ROLE_ATTEMPT] == NULL)
		return rs_fail(handle, RUSTSTREAM_REFUSED,
					   "Describe the queue with a column for the attempt.",
					   "max_attempts needs a queue that counts attempts");
	if (subscription->dead_letter == NULL)
		return RUSTSTREAM_OK;
	if (plan->table.column[RS_ROLE_GROUP] == NULL)
		return bind_dead_table(handle, plan);
	if (strcmp(subscription->dead_letter, subscription->group_name) == 0)
		return rs_fail(handle, RUSTSTREAM_REFUSED, "Name another group.",
					   "the dead letters of group \"%s\" cannot go into the same group",
					   subscription->group_name);
	return RUSTSTREAM_OK;
}

/* One of the policies: its word, or what holds where none is given. */
static ruststream_code
bind_policy(ruststream *handle, const char *word, rs_outcome otherwise, bool has_dead_letter,
			const char *setting, rs_outcome *outcome)
{
	*outcome = otherwise;
	if (word == NULL)
		return RUSTSTREAM_OK;
	if (!rs_outcome_find(word, outcome) || *outcome == RS_OUTCOME_ACK)
		return rs_fail(handle, RUSTSTREAM_REFUSED,
					   "Use retry, retry_after, discard or dead_letter.", "%s cannot be \"%s\"",
					   setting, word);
	if (*outcome == RS_OUTCOME_DEAD_LETTER && !has_dead_letter)
		return rs_fail(handle, RUSTSTREAM_REFUSED, "Give a dead letter as well.",
					   "%s is dead_letter, but there is none", setting);
	return RUSTSTREAM_OK;
}

static bool
find_decode(const char *word, rs_decode *decode)
{
	static const char *const words[] = {
		[RS_DECODE_ANY] = "any", [RS_DECODE_TEXT] = "text", [RS_DECODE_JSON] = "json"};

	for (int i = 0; i < (int) (sizeof(words) / sizeof(words[0])); i++)
	{
		if (strcmp(word, words[i]) == 0)
		{
			*decode = (rs_decode) i;
			return true;
		}
	}
	return false;
}

/* Delays and times, none of which may be negative, or overflow as microseconds. */
static ruststream_code
check_time(ruststream *handle, const char *setting, int64_t milliseconds, int64_t least)
{
	if (milliseconds >= least && milliseconds <= INT64_MAX / (4 * RS_MILLISECOND))
		return RUSTSTREAM_OK;
	return rs_fail(handle, RUSTSTREAM_REFUSED, "Times are in milliseconds.", "%s cannot be %lld ms",
				   setting, (long long) milliseconds);
}

static ruststream_code
bind_times(ruststream *handle, rs_plan *plan)
{
	const rs_subscription *from = &plan->subscription;
	ruststream_code code = check_time(handle, "retry_delay", from->retry_delay, 0);

	if (code == RUSTSTREAM_OK)
		code = check_time(handle, "max_retry_delay", from->max_retry_delay, 0);
	if (code == RUSTSTREAM_OK)
		code = check_time(handle, "lease", from->lease, 1);
	if (code == RUSTSTREAM_OK)
		code = check_time(handle, "timeout", from->timeout, 0);
	if (code == RUSTSTREAM_OK)
		code = check_time(handle, "poll_interval", from->poll_interval, 1);
	if (code != RUSTSTREAM_OK)
		return code;

	plan->policy.retry_delay = from->retry_delay * RS_MILLISECOND;
	plan->policy.max_retry_delay = from->max_retry_delay * RS_MILLISECOND;
	plan->lease = (from->lease + 999) / 1000 * RS_SECOND;
	plan->timeout = from->timeout * RS_MILLISECOND;
	plan->poll_interval = from->poll_interval * RS_MILLISECOND;
	return RUSTSTREAM_OK;
}

static ruststream_code
check_handler(ruststream *handle, rs_plan *plan)
{
	const rs_subscription *from = &plan->subscription;

	if (from->handler != NULL && from->program != NULL)
		return rs_fail(handle, RUSTSTREAM_REFUSED, "Give one of them.",
					   "a subscription has a handler or a program, not both");
	if (from->handler != NULL &&
		handle->driver->check_handler(handle->session, from->handler) != RS_DONE)
		return rs_take_error(handle);
	return RUSTSTREAM_OK;
}

static bool
is_transactional(const rs_subscription *subscription)
{
	if (subscription->transactional != NULL)
		return strcmp(subscription->transactional, "on") == 0;
	/* A program cannot write through the delivery's transaction: none need be open for it. */
	return subscription->program == NULL && subscription->batch_size == 0;
}

/* A batch is one claim, one call of its handler and, in the row lock form, one commit. */
static ruststream_code
bind_batch(ruststream *handle, rs_plan *plan)
{
	const rs_subscription *from = &plan->subscription;

	if (from->batch_size < 0 || from->batch_size > RS_MAX_BATCH)
		return rs_fail(handle, RUSTSTREAM_REFUSED, "Use 1 to 10000, or leave it out.",
					   "batch_size cannot be %lld", (long long) from->batch_size);
	plan->batch_size = (int) from->batch_size;
	if (plan->batch_size == 0)
		return RUSTSTREAM_OK;
	if (plan->policy.transactional)
		return rs_fail(handle, RUSTSTREAM_REFUSED,
					   "Leave out transactional, or leave out batch_size and take one row at a "
					   "time.",
					   "a batch subscription cannot be transactional");
	if (rs_table_lines(&plan->table) != RS_LINES_NONE)
		return rs_fail(handle, RUSTSTREAM_REFUSED,
					   "Leave out batch_size: rows of a line go one at a time.",
					   "the client library takes no batches from %s, which queue \"%s\" has",
					   plan->table.fifo ? "FIFO groups" : "partition keys", plan->table.name);
	return RUSTSTREAM_OK;
}

ruststream_code
rs_bind_subscription(ruststream *handle, rs_plan *plan, const rs_subscription *subscription)
{
	rs_table table;
	rs_policy *policy = &plan->policy;
	ruststream_code code = rs_load_queue(handle, subscription->queue, plan->arena, &table);

	plan->subscription = *subscription;
	if (code == RUSTSTREAM_OK)
		code = rs_bind_queue(handle, plan, &table, false);
	if (code == RUSTSTREAM_OK)
		code = check_handler(handle, plan);
	if (code != RUSTSTREAM_OK)
		return code;

	if (subscription->transactional != NULL && strcmp(subscription->transactional, "on") != 0 &&
		strcmp(subscription->transactional, "off") != 0)
		return rs_fail(handle, RUSTSTREAM_REFUSED, "Use on or off.",
					   "transactional cannot be \"%s\"", subscription->transactional);
	policy->transactional = is_transactional(subscription);
	code = bind_batch(handle, plan);
	if (code != RUSTSTREAM_OK)
		return code;
	if (subscription->group_name != NULL && strcmp(subscription->group_name, "*") == 0 &&
		table.column[RS_ROLE_GROUP] != NULL)
		return rs_fail(handle, RUSTSTREAM_REFUSED, "Make a subscription for each group.",
					   "the client library reads one group a subscription, not \"*\"");
	if (subscription->max_attempts < 0 || subscription->max_attempts > INT32_MAX)
		return rs_fail(handle, RUSTSTREAM_REFUSED, "Use 1 or more, or leave it out.",
					   "max_attempts cannot be %lld", (long long) subscription->max_attempts);
	policy->max_attempts = (int) subscription->max_attempts;
	code = bind_dead_letter(handle, plan);
	if (code == RUSTSTREAM_OK)
		code = bind_policy(handle, subscription->on_error, rs_default_on_error(&plan->table),
						   policy->has_dead_letter, "on_error", &policy->on_error);
	if (code == RUSTSTREAM_OK)
		code = bind_policy(handle, subscription->on_decode_error,
						   rs_default_on_decode_error(&plan->table, policy->has_dead_letter),
						   policy->has_dead_letter, "on_decode_error", &policy->on_decode_error);
	if (code == RUSTSTREAM_OK)
		code = bind_times(handle, plan);
	if (code != RUSTSTREAM_OK)
		return code;
	if (!rs_backoff_find(subscription->backoff, &policy->backoff))
		return rs_fail(handle, RUSTSTREAM_REFUSED, "Use exponential, linear or constant.",
					   "backoff cannot be \"%s\"", subscription->backoff);
	if (!find_decode(subscription->decode, &plan->decode))
		return rs_fail(handle, RUSTSTREAM_REFUSED, "Use any, text or json.",
					   "decode cannot be \"%s\"", subscription->decode);
	if (handle->driver->check_plan != NULL &&
		handle->driver->check_plan(handle->session, plan, &plan->warning) != RS_DONE)
		return rs_take_error(handle);
	return RUSTSTREAM_OK;
}
