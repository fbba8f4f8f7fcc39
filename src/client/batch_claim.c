/*-------------------------------------------------------------------------
 *
 * batch_claim.c
 *	  The claim of a batch: its rows, and in the advisory lock form their keys.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <stdio.h>
#include <string.h>

/* How many keys one batch of the advisory lock form locks at most, and looks at at least. */
#define MAX_KEYS 100
#define LEAST_CANDIDATES 8

/* ---------------------------------------------------------------- its rows */

/* How many rows a claim may take. */
static int
claim_limit(const ruststream_worker *worker)
{
	int limit = worker->plan.batch_size;

	return worker->batch_limit > 0 && worker->batch_limit < limit ? worker->batch_limit : limit;
}

/* One more row, which may yet not come; NULL: out of memory. */
static rs_work *
add_row(rs_batch *batch)
{
	ruststream_worker *worker = batch->call.worker;
	rs_work *row = rs_alloc(&worker->delivery_arena, sizeof(rs_work));

	if (row == NULL)
		return NULL;
	*row = rs_work_of(worker);
	memcpy(row->token, batch->call.token, sizeof(row->token));
	batch->rows[batch->count++] = row;
	return row;
}

/* Room for so many rows; false: out of memory. */
static bool
make_room(rs_batch *batch, int limit)
{
	rs_arena *arena = &batch->call.worker->delivery_arena;
	size_t size = sizeof(void *) * (size_t) limit;

	batch->rows = rs_alloc(arena, size);
	batch->given = rs_alloc(arena, size);
	batch->deliveries = rs_alloc(arena, size);
	return !arena->is_exhausted;
}

/* ------------------------------------------------------------------ claims */

typedef struct claiming
{
	rs_batch *batch;
	int limit;
} claiming;

static bool
keep_row(void *arg, const rs_value *columns, int count)
{
	claiming *claim = arg;
	rs_work *row = claim->batch->count < claim->limit ? add_row(claim->batch) : NULL;

	return row != NULL && rs_keep_row(row, columns, count) && claim->batch->count < claim->limit;
}

/* One statement a row, where no other gives more: each sees what the ones before have taken. */
static rs_result
claim_one_by_one(claiming *claim, rs_value *values, int64_t now)
{
	rs_batch *batch = claim->batch;
	rs_work *call = &batch->call;
	rs_plan *plan = &call->worker->plan;
	rs_operation operation =
		plan->table.column[RS_ROLE_PAYLOAD] != NULL ? RS_OP_CLAIM_PAYLOAD : RS_OP_CLAIM_ROW;
	rs_result result = RS_DONE;
	int before = -1;

	while (result == RS_DONE && batch->count > before && batch->count < claim->limit)
	{
		before = batch->count;
		if (call->token[0] != '\0' && before > 0)
			result = rs_set_token(call, values, now);
		if (result == RS_DONE)
			result = rs_plan_run(call->worker->handle->session, plan, operation, 0, values,
								 keep_row, claim, NULL);
	}
	return result;
}

rs_result
rs_batch_claim(rs_batch *batch)
{
	rs_work *call = &batch->call;
	ruststream_worker *worker = call->worker;
	rs_session *session = worker->handle->session;
	claiming claim = {.batch = batch, .limit = claim_limit(worker)};
	rs_value values[RS_PARAM_COUNT] = {{RS_NULL, 0, 0, NULL, 0}};
	char now_text[RS_TIME_SIZE + 8];
	char number[16];
	int64_t now;
	rs_result result = session->driver->now(session, &now);

	if (result != RS_DONE)
		return result;
	session->driver->format_time(now, false, now_text);
	values[RS_PARAM_NOW] = rs_value_of_text(now_text);
	values[RS_PARAM_GROUP] = rs_value_of_text(worker->plan.subscription.group_name);
	values[RS_PARAM_LIMIT] = rs_value_of_integer(claim.limit);
	if (rs_table_form(&worker->plan.table) == RS_FORM_LEASE)
		result = rs_set_token(call, values, now);
	if (result == RS_DONE && make_room(batch, claim.limit))
		result = session->driver->claim != NULL
					 ? session->driver->claim(session, &worker->plan, values, keep_row, &claim)
					 : claim_one_by_one(&claim, values, now);
	result = rs_check_row(call, result);
	(void) snprintf(number, sizeof(number), "%d", batch->count);
	if (result == RS_DONE)
		rs_worker_trace(worker, RS_STEP_CLAIM, number);
	return result;
}

/* ----------------------------------------------------------- advisory keys */

typedef struct candidates
{
	rs_batch *batch;
	int limit;
	int count;
	rs_value *ids;
	const char **keys;
} candidates;

/* id, key */
static bool
keep_candidate(void *arg, const rs_value *columns, int count)
{
	candidates *found = arg;
	rs_arena *arena = &found->batch->call.worker->delivery_arena;
	rs_value key = rs_copy_value(arena, &columns[1]);

	(void) count;
	if (found->count == found->limit)
		return false;
	found->ids[found->count] = rs_copy_value(arena, &columns[0]);
	found->keys[found->count] = key.kind == RS_NULL ? "" : key.text;
	found->count++;
	return found->count < found->limit;
}

/* One statement a candidate, where no other gives more: the session passes over those it has found.
 */
static rs_result
look_one_by_one(candidates *found, const rs_value *values)
{
	ruststream_worker *worker = found->batch->call.worker;
	rs_session *session = worker->handle->session;
	rs_result result = RS_DONE;
	int before = -1;

	session->passed = found->ids;
	while (result == RS_DONE && found->count > before && found->count < found->limit)
	{
		before = found->count;
		session->passed_count = found->count;
		result = rs_plan_run(session, &worker->plan, RS_OP_CANDIDATES, 0, values, keep_candidate,
							 found, NULL);
	}
	session->passed = NULL;
	session->passed_count = 0;
	return result;
}

static rs_result
find_candidates(candidates *found)
{
	rs_work *call = &found->batch->call;
	ruststream_worker *worker = call->worker;
	rs_session *session = worker->handle->session;
	rs_value values[RS_PARAM_COUNT] = {{RS_NULL, 0, 0, NULL, 0}};
	char now_text[RS_TIME_SIZE + 8];
	rs_result result = rs_begin_look(call, found->limit, values, now_text);

	if (result != RS_DONE)
		return result;
	if (session->driver->candidates != NULL)
		result = session->driver->candidates(session, &worker->plan, values, keep_candidate, found);
	else
		result = look_one_by_one(found, values);
	return rs_end_look(call, result, found->count);
}

/*
 * Was this candidate's key asked for already?  A session may have the same lock twice; and behind
 * one that could not be had no later row of its key may be taken, though it may be free by now.
 */
static bool
is_known(const candidates *found, int number)
{
	for (int i = 0; i < number; i++)
	{
		if (strcmp(found->keys[i], found->keys[number]) == 0)
			return true;
	}
	return false;
}

/* Lock the keys of the first candidates, one row a key. */
static rs_result
lock_keys(const candidates *found, int limit)
{
	rs_batch *batch = found->batch;
	ruststream_worker *worker = batch->call.worker;
	rs_session *session = worker->handle->session;

	for (int i = 0; i < found->count && batch->count < limit; i++)
	{
		bool locked = false;
		rs_result result;
		rs_work *row;

		if (is_known(found, i))
			continue;
		result = session->driver->lock_key(session, found->keys[i], &locked);
		if (result != RS_DONE)
			return result;
		rs_worker_trace(worker, RS_STEP_LOCK, locked ? "" : "0");
		if (!locked)
			continue;
		row = add_row(batch);
		if (row == NULL)
		{
			session->driver->unlock_key(session, found->keys[i]);
			return rs_check_row(&batch->call, RS_DONE);
		}
		row->key = found->keys[i];
		row->id = found->ids[i];
	}
	return RS_DONE;
}

rs_result
rs_batch_lock(rs_batch *batch, int *count)
{
	ruststream_worker *worker = batch->call.worker;
	rs_arena *arena = &worker->delivery_arena;
	int limit = claim_limit(worker) < MAX_KEYS ? claim_limit(worker) : MAX_KEYS;
	candidates found = {.batch = batch,
						.limit = limit > LEAST_CANDIDATES ? limit : LEAST_CANDIDATES};
	rs_result result;

	found.ids = rs_alloc(arena, sizeof(rs_value) * (size_t) found.limit);
	found.keys = rs_alloc(arena, sizeof(char *) * (size_t) found.limit);
	result =
		make_room(batch, limit) ? find_candidates(&found) : rs_check_row(&batch->call, RS_DONE);
	*count = found.count;
	return result == RS_DONE ? lock_keys(&found, limit) : result;
}

rs_result
rs_batch_take(rs_batch *batch)
{
	int taken = 0;
	rs_result result = rs_work_begin(&batch->call, RS_FOR_US);

	for (int i = 0; i < batch->count && result == RS_DONE; i++)
	{
		rs_value id = batch->rows[i]->id;

		result = rs_take(batch->rows[i], &id, &RS_VALUE_NULL);
		if (result == RS_DONE && !batch->rows[i]->has_row)
			rs_unlock_keys(batch->rows[i]);
	}
	if (result == RS_DONE)
		result = rs_work_commit(&batch->call);
	if (result != RS_DONE)
		return result;
	for (int i = 0; i < batch->count; i++)
	{
		if (batch->rows[i]->has_row)
			batch->rows[taken++] = batch->rows[i];
	}
	batch->count = taken;
	return RS_DONE;
}
