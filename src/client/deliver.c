/*-------------------------------------------------------------------------
 *
 * deliver.c
 *	  One delivery, from its claim to its settlement: the lanes of the contract.
 *
 *		row lock	BEGIN, CLAIM, SAVEPOINT ruststream_claim, HANDLER
 *		lease		BEGIN, CLAIM, COMMIT; BEGIN(level), HANDLER
 *		advisory	BEGIN, CLAIM, COMMIT; LOCK; BEGIN, TAKE, COMMIT; BEGIN(level), HANDLER
 *
 * What follows the handler is not decided here: rs_settle says which steps remain and which
 * statements settle, and we walk through them.  What surfaces in the handler is the
 * handler's failure; in the settlement or its COMMIT everything is rolled back, and the row is
 * settled as failed in a transaction of its own (recover.c); what is transient rolls
 * everything back wherever it surfaces, and the row is claimed anew.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"
#include "client/failpoint.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ----------------------------------------------------------- transactions */

rs_result
rs_work_begin(rs_work *work, rs_purpose purpose)
{
	ruststream_worker *worker = work->worker;
	rs_session *session = worker->handle->session;

	rs_worker_trace(worker, RS_STEP_BEGIN, "");
	return session->driver->begin(session, purpose, &worker->plan.table);
}

rs_result
rs_work_commit(rs_work *work)
{
	rs_session *session = work->worker->handle->session;

	rs_worker_trace(work->worker, RS_STEP_COMMIT, "");
	return session->driver->commit(session);
}

/* A session that cannot be rolled back is closed, never reused: the next claim opens another. */
void
rs_work_rollback(rs_work *work)
{
	ruststream *handle = work->worker->handle;
	rs_error kept = handle->session->error;

	rs_worker_trace(work->worker, RS_STEP_ROLLBACK, "");
	if (handle->driver->rollback(handle->session) == RS_LOST)
		work->worker->is_loaded = false;
	handle->session->error = kept;
}

void
rs_work_fail(rs_work *work, const char *state, const char *hint, const char *format, ...)
{
	va_list arguments;
	char message[sizeof(work->error.message)];

	va_start(arguments, format);
	(void) vsnprintf(message, sizeof(message), format, arguments);
	va_end(arguments);
	rs_error_set(&work->error, RUSTSTREAM_DATABASE, state, hint, "%s", message);
	work->has_error = true;
}

/* ----------------------------------------------------------------- claims */

/* A token of our own, later than any before it: no two claims of this process share one. */
rs_result
rs_set_token(rs_work *work, rs_value *values, int64_t now)
{
	ruststream_worker *worker = work->worker;
	const rs_driver *driver = worker->handle->driver;
	int64_t until = now + worker->plan.lease;

	if (until <= worker->last_lease)
		until = worker->last_lease + RS_MILLISECOND;
	worker->last_lease = until;
	driver->format_time(until, true, work->token);
	values[RS_PARAM_TOKEN] = rs_value_of_text(work->token);
	return RS_DONE;
}

/* Bytes as text, as PostgreSQL writes them. */
static const char *
hex_of(rs_arena *arena, const rs_value *bytes)
{
	static const char digits[] = "0123456789abcdef";
	char *text = rs_alloc(arena, 2 * bytes->length + 3);

	if (text == NULL)
		return NULL;
	memcpy(text, "\\x", 2);
	for (size_t i = 0; i < bytes->length; i++)
	{
		text[2 + 2 * i] = digits[(unsigned char) bytes->text[i] >> 4];
		text[3 + 2 * i] = digits[(unsigned char) bytes->text[i] & 15];
	}
	return text;
}

/* The row, as a claim returns it: id, attempt, headers, payload. */
bool
rs_keep_row(void *arg, const rs_value *columns, int count)
{
	rs_work *work = arg;
	rs_arena *arena = &work->worker->delivery_arena;
	ruststream_delivery *delivery = &work->delivery;
	rs_value headers = rs_copy_value(arena, &columns[2]);
	char number[32];

	(void) count;
	work->has_row = true;
	work->id = rs_copy_value(arena, &columns[0]);
	work->payload = rs_copy_value(arena, &columns[3]);
	work->attempt = columns[1].kind == RS_INTEGER ? columns[1].integer : 1;
	delivery->attempt = work->attempt;
	delivery->headers = headers.kind == RS_NULL ? NULL : headers.text;
	switch (work->id.kind)
	{
		case RS_INTEGER:
			delivery->id = rs_copy_integer(arena, work->id.integer);
			break;
		case RS_REAL:
			delivery->id = rs_print(arena, "%.17g", work->id.real);
			break;
		case RS_BYTES:
			delivery->id = hex_of(arena, &work->id);
			break;
		default:
			delivery->id = work->id.text;
	}
	if (work->payload.kind == RS_INTEGER || work->payload.kind == RS_REAL)
	{
		/* A column of numbers is handed over as their text. */
		int length =
			work->payload.kind == RS_INTEGER
				? snprintf(number, sizeof(number), "%lld", (long long) work->payload.integer)
				: snprintf(number, sizeof(number), "%.17g", work->payload.real);

		delivery->payload = rs_copy_bytes(arena, number, (size_t) length);
		delivery->payload_length = (size_t) length;
	}
	else if (work->payload.kind != RS_NULL)
	{
		delivery->payload = work->payload.text;
		delivery->payload_length = work->payload.length;
	}
	return true;
}

rs_result
rs_check_row(rs_work *work, rs_result result)
{
	if (result == RS_DONE && work->worker->delivery_arena.is_exhausted)
	{
		rs_error_set(&work->worker->handle->session->error, RUSTSTREAM_NO_MEMORY, "", NULL,
					 "out of memory");
		return RS_FAILED;
	}
	return result;
}

static rs_result
claim(rs_work *work)
{
	ruststream_worker *worker = work->worker;
	rs_session *session = worker->handle->session;
	rs_operation operation =
		worker->plan.table.column[RS_ROLE_PAYLOAD] != NULL ? RS_OP_CLAIM_PAYLOAD : RS_OP_CLAIM_ROW;
	rs_value values[RS_PARAM_COUNT] = {{RS_NULL, 0, 0, NULL, 0}};
	char now_text[RS_TIME_SIZE + 8];
	int64_t now;
	rs_result result = session->driver->now(session, &now);

	if (result != RS_DONE)
		return result;
	session->driver->format_time(now, false, now_text);
	values[RS_PARAM_NOW] = rs_value_of_text(now_text);
	values[RS_PARAM_GROUP] = rs_value_of_text(worker->plan.subscription.group_name);
	values[RS_PARAM_LIMIT] = rs_value_of_integer(1);
	if (rs_table_form(&worker->plan.table) == RS_FORM_LEASE)
		result = rs_set_token(work, values, now);
	if (result != RS_DONE)
		return result;

	if (session->driver->claim != NULL)
		result = session->driver->claim(session, &worker->plan, values, rs_keep_row, work);
	else
		result = rs_plan_run(session, &worker->plan, operation, 0, values, rs_keep_row, work, NULL);
	result = rs_check_row(work, result);
	if (result == RS_DONE)
		rs_worker_trace(worker, RS_STEP_CLAIM, work->has_row ? "1" : "0");
	return result;
}

/* ----------------------------------------------------------------- ending */

/* A handler may have released what it is delivered under. */
static bool
holds_keys(rs_work *work)
{
	rs_session *session = work->worker->handle->session;

	return work->key == NULL ||
		   (session->driver->key_is_held(session, work->key) &&
			(work->partition == NULL || session->driver->key_is_held(session, work->partition)));
}

rs_result
rs_take_step(rs_work *work, rs_step step, const rs_settlement *settlement, bool *lost)
{
	ruststream_worker *worker = work->worker;
	rs_session *session = worker->handle->session;
	rs_result result = RS_DONE;

	switch (step)
	{
		case RS_STEP_ROLLBACK_TO:
			rs_worker_trace(worker, step, "");
			return session->driver->rollback_to(session);
		case RS_STEP_ROLLBACK:
			rs_work_rollback(work);
			RS_FAILPOINT("after_rollback");
			return worker->is_loaded ? RS_DONE : RS_LOST;
		case RS_STEP_BEGIN:
			return rs_work_begin(work, RS_FOR_US);
		case RS_STEP_SETTLE:
			switch (rs_settle_row(work, settlement, &result))
			{
				case RS_SETTLED_LOST:
					*lost = true;
					return RS_FAILED;
				case RS_SETTLED_FAILED:
					return result;
				case RS_SETTLED:
					break;
			}
			RS_FAILPOINT("after_settle");
			return rs_record_failure(work);
		case RS_STEP_COMMIT:
			RS_FAILPOINT("before_commit");
			if (!holds_keys(work))
			{
				*lost = true;
				return RS_FAILED;
			}
			result = rs_work_commit(work);
			if (result == RS_DONE)
				RS_FAILPOINT("after_commit");
			return result;
		case RS_STEP_UNLOCK:
			rs_unlock_keys(work);
			RS_FAILPOINT("after_unlock");
			return RS_DONE;
		default:
			return RS_DONE;
	}
}

rs_settlement
rs_decide(rs_work *work)
{
	ruststream_worker *worker = work->worker;
	rs_plan *plan = &worker->plan;
	rs_cause cause = !work->has_error           ? RS_CAUSE_ANSWER
					 : work->answer.undecodable ? RS_CAUSE_DECODE_ERROR
												: RS_CAUSE_ERROR;
	rs_settlement settlement = rs_settle(&plan->table, &plan->policy, cause, work->answer.outcome,
										 work->answer.has_delay, work->attempt);

	work->stage = RS_STAGE_SETTLE;
	if (settlement.lacks_dead_letter)
		rs_work_fail(work, "55000", "Subscribe again with a dead letter.",
					 "the handler answered dead_letter, but subscription \"%s\" has none%s%s",
					 worker->name, work->answer.reason[0] != '\0' ? "; its reason: " : "",
					 work->answer.reason);
	return settlement;
}

void
rs_conclude(rs_work *work, const rs_settlement *settlement)
{
	ruststream_worker *worker = work->worker;

	worker->transient_count = 0;
	if (settlement->lacks_retry_after)
		rs_tell(worker->handle,
				"row %s returns at once: queue \"%s\" has no column for retry_after",
				work->delivery.id, worker->plan.table.name);
	if (work->has_error)
	{
		rs_report(work);
		if (settlement->outcome == RS_OUTCOME_RETRY)
			rs_hold(work);
	}
	rs_count_settlement(work, settlement);
}

/* Settle the delivery by what came of its handler, and account for it. */
static rs_progress
finish(rs_work *work)
{
	ruststream_worker *worker = work->worker;
	rs_settlement settlement = rs_decide(work);
	bool lost = false;

	for (const rs_step *step = settlement.steps; *step != RS_STEP_END; step++)
	{
		rs_result result = rs_take_step(work, *step, &settlement, &lost);

		if (result == RS_DONE)
			continue;
		if (lost)
		{
			rs_work_rollback(work);
			rs_lose(work);
			return RS_PROGRESS_DELIVERED;
		}
		if (!work->has_error || result != RS_FAILED)
			work->error = worker->handle->session->error;
		work->has_error = true;
		rs_work_rollback(work);
		return rs_recover(work, result);
	}

	rs_conclude(work, &settlement);
	return RS_PROGRESS_DELIVERED;
}

/* What has gone wrong at a claim, or with the transaction of a handler. */
static rs_progress
fail(rs_work *work, rs_result result)
{
	work->error = work->worker->handle->session->error;
	work->has_error = true;
	rs_work_rollback(work);
	return rs_recover(work, result);
}

/* The worker was interrupted: nothing of the handler's remains, and the row goes back. */
static rs_progress
release(rs_work *work)
{
	rs_work_rollback(work);
	rs_give_back(work);
	rs_tell(work->worker->handle, "subscription \"%s\": released row %s (attempt %lld)",
			work->worker->name, work->delivery.id, (long long) work->attempt);
	return RS_PROGRESS_RELEASED;
}

/* --------------------------------------------------------------- the lanes */

/* The handler and its end, where the claim is committed. */
static rs_progress
deliver_claimed(rs_work *work)
{
	rs_result result = RS_DONE;

	work->stage = RS_STAGE_HANDLER;
	if (atomic_load(&work->worker->interrupts))
		return release(work);
	if (work->worker->plan.policy.transactional)
		result = rs_work_begin(work, RS_FOR_DELIVERY);
	if (result == RS_DONE)
	{
		RS_FAILPOINT("after_begin_delivery");
		result = rs_handle(work);
	}
	if (atomic_load(&work->worker->interrupts))
		return release(work);
	return result == RS_DONE ? finish(work) : fail(work, result);
}

rs_progress
rs_found_nothing(ruststream_worker *worker)
{
	if (worker->transient_id == NULL)
		worker->transient_count = 0;
	return worker->held.count > 0 ? RS_PROGRESS_HELD : RS_PROGRESS_NOTHING;
}

static rs_progress
nothing_claimed(rs_work *work)
{
	rs_result result = rs_work_commit(work);

	if (result != RS_DONE)
		return fail(work, result);
	return rs_found_nothing(work->worker);
}

static rs_progress
deliver_lease(rs_work *work)
{
	rs_result result = rs_work_begin(work, RS_FOR_US);

	if (result == RS_DONE)
		result = claim(work);
	if (result != RS_DONE)
		return fail(work, result);
	if (!work->has_row)
		return nothing_claimed(work);
	RS_FAILPOINT("after_claim");
	result = rs_work_commit(work);
	if (result != RS_DONE)
		return fail(work, result);
	RS_FAILPOINT("after_claim_commit");
	return deliver_claimed(work);
}

static rs_progress
deliver_row_lock(rs_work *work)
{
	ruststream_worker *worker = work->worker;
	rs_session *session = worker->handle->session;
	rs_result result = rs_work_begin(work, RS_FOR_DELIVERY);

	if (result == RS_DONE)
		result = claim(work);
	if (result != RS_DONE)
		return fail(work, result);
	if (!work->has_row)
		return nothing_claimed(work);
	RS_FAILPOINT("after_claim");
	work->stage = RS_STAGE_HANDLER;
	rs_worker_trace(worker, RS_STEP_SAVEPOINT, "");
	result = session->driver->savepoint(session);
	if (result == RS_DONE)
		result = rs_handle(work);
	if (atomic_load(&worker->interrupts))
		return release(work);
	return result == RS_DONE ? finish(work) : fail(work, result);
}

/* ---------------------------------------------------------- advisory keys */

void
rs_unlock_keys(rs_work *work)
{
	rs_session *session = work->worker->handle->session;

	if (work->key == NULL)
		return;
	rs_worker_trace(work->worker, RS_STEP_UNLOCK, "");
	session->driver->unlock_key(session, work->key);
	if (work->partition != NULL)
		session->driver->unlock_key(session, work->partition);
	work->key = NULL;
	work->partition = NULL;
}

#define MAX_CANDIDATES 8

typedef struct candidate
{
	rs_value id;
	const char *key;
	rs_value line;         /* the partition key .. */
	const char *partition; /* .. and what is to be locked for it */
} candidate;

typedef struct candidates
{
	rs_work *work;
	int count;
	candidate found[MAX_CANDIDATES];
	rs_held left_out; /* rows that are not looked for */
	int refused_count;
	candidate refused[RS_MAX_HELD]; /* what they need was locked elsewhere */
} candidates;

/* id, key, and the partition key. */
static bool
keep_candidate(void *arg, const rs_value *columns, int count)
{
	candidates *found = arg;
	const rs_table *table = &found->work->worker->plan.table;
	rs_arena *arena = &found->work->worker->delivery_arena;
	candidate *next = &found->found[found->count];
	rs_value key = rs_copy_value(arena, &columns[1]);

	if (found->count == MAX_CANDIDATES)
		return false;
	next->id = rs_copy_value(arena, &columns[0]);
	next->key = key.kind == RS_NULL ? "" : key.text;
	next->line = count > 2 ? rs_copy_value(arena, &columns[2]) : RS_VALUE_NULL;
	next->partition = NULL;
	if (count > 2 && columns[2].kind == RS_INTEGER)
		next->partition = rs_print(arena, "%s.%s:key:%lld", table->schema, table->name,
								   (long long) columns[2].integer);
	else if (count > 2 && columns[2].kind != RS_NULL)
		next->partition = rs_print(arena, "%s.%s:key:%.*s", table->schema, table->name,
								   (int) columns[2].length, columns[2].text);
	found->count++;
	return true;
}

/*
 * Does a candidate need a key that an earlier one could not have?  It may be free by now, but then
 * the earlier row may have come back, and goes first.
 */
static bool
comes_behind_refused(const candidates *found, const candidate *one)
{
	for (int i = 0; i < found->refused_count; i++)
	{
		const candidate *refused = &found->refused[i];

		if (strcmp(refused->key, one->key) == 0 ||
			(refused->partition != NULL && one->partition != NULL &&
			 strcmp(refused->partition, one->partition) == 0))
			return true;
	}
	return false;
}

/* Lock a candidate's key, and the one of its partition. */
static rs_result
lock_keys(rs_work *work, const char *key, const char *partition, bool *locked)
{
	rs_session *session = work->worker->handle->session;
	rs_result result = session->driver->lock_key(session, key, locked);

	if (result == RS_DONE && *locked && partition != NULL)
	{
		result = session->driver->lock_key(session, partition, locked);
		if (result != RS_DONE || !*locked)
			session->driver->unlock_key(session, key);
	}
	if (result != RS_DONE)
		return result;
	rs_worker_trace(work->worker, RS_STEP_LOCK, *locked ? "" : "0");
	if (*locked)
	{
		work->key = key;
		work->partition = partition;
	}
	return RS_DONE;
}

/*
 * Take the row whose key is locked, unless it has been settled meanwhile, or an earlier one of its
 * partition key has come back.
 */
rs_result
rs_take(rs_work *work, const rs_value *id, const rs_value *line)
{
	ruststream_worker *worker = work->worker;
	rs_session *session = worker->handle->session;
	rs_operation operation =
		worker->plan.table.column[RS_ROLE_PAYLOAD] != NULL ? RS_OP_TAKE_PAYLOAD : RS_OP_TAKE_ROW;
	rs_value values[RS_PARAM_COUNT] = {{RS_NULL, 0, 0, NULL, 0}};
	char now_text[RS_TIME_SIZE + 8];
	bool is_head = true;
	rs_result result = rs_now_text(session, now_text);

	if (result != RS_DONE)
		return result;
	values[RS_PARAM_ID] = *id;
	values[RS_PARAM_NOW] = rs_value_of_text(now_text);
	values[RS_PARAM_GROUP] = rs_value_of_text(worker->plan.subscription.group_name);
	values[RS_PARAM_KEY] = rs_value_of_text(work->key);
	values[RS_PARAM_PARTITION_KEY] = *line;
	if (line->kind != RS_NULL && session->driver->is_head != NULL)
		result = session->driver->is_head(session, &worker->plan, values, &is_head);
	for (int i = 0; is_head && i < rs_plan_count(&worker->plan, operation) && result == RS_DONE;
		 i++)
		result = rs_plan_run(session, &worker->plan, operation, i, values, rs_keep_row, work, NULL);
	/* Where the row is returned by one statement and changed by another. */
	if (work->has_row && rs_plan_count(&worker->plan, RS_OP_COUNT_ATTEMPT) > 0 && result == RS_DONE)
		result =
			rs_plan_run(session, &worker->plan, RS_OP_COUNT_ATTEMPT, 0, values, NULL, NULL, NULL);
	result = rs_check_row(work, result);
	if (result == RS_DONE)
		rs_worker_trace(worker, RS_STEP_TAKE, work->has_row ? "" : "0");
	return result;
}

/* The same, in a transaction of its own. */
static rs_result
take(rs_work *work, const rs_value *id, const rs_value *line)
{
	rs_result result = rs_work_begin(work, RS_FOR_US);

	if (result == RS_DONE)
		result = rs_take(work, id, line);
	return result == RS_DONE ? rs_work_commit(work) : result;
}

rs_result
rs_begin_look(rs_work *work, int limit, rs_value *values, char now_text[RS_TIME_SIZE + 8])
{
	rs_result result = rs_work_begin(work, RS_FOR_US);

	if (result == RS_DONE)
		result = rs_now_text(work->worker->handle->session, now_text);
	if (result != RS_DONE)
		return result;
	values[RS_PARAM_NOW] = rs_value_of_text(now_text);
	values[RS_PARAM_GROUP] = rs_value_of_text(work->worker->plan.subscription.group_name);
	values[RS_PARAM_LIMIT] = rs_value_of_integer(limit);
	return RS_DONE;
}

rs_result
rs_end_look(rs_work *work, rs_result result, int found)
{
	char number[16];

	result = rs_check_row(work, result);
	if (result != RS_DONE)
		return result;
	(void) snprintf(number, sizeof(number), "%d", found);
	rs_worker_trace(work->worker, RS_STEP_CLAIM, number);
	return rs_work_commit(work);
}

static rs_result
find_candidates(rs_work *work, candidates *found)
{
	ruststream_worker *worker = work->worker;
	rs_session *session = worker->handle->session;
	const rs_held *held = session->held;
	rs_value values[RS_PARAM_COUNT] = {{RS_NULL, 0, 0, NULL, 0}};
	char now_text[RS_TIME_SIZE + 8];
	rs_operation operation = RS_OP_CANDIDATES;
	rs_result result = rs_begin_look(work, MAX_CANDIDATES, values, now_text);

	if (result != RS_DONE)
		return result;
	if (rs_plan_count(&worker->plan, RS_OP_FREE_CANDIDATES) > 0)
		operation = RS_OP_FREE_CANDIDATES;
	found->count = 0;
	session->held = &found->left_out;
	if (session->driver->candidates != NULL)
		result = session->driver->candidates(session, &worker->plan, values, keep_candidate, found);
	else
		result =
			rs_plan_run(session, &worker->plan, operation, 0, values, keep_candidate, found, NULL);
	session->held = held;
	return rs_end_look(work, result, found->count);
}

/* Lock what a candidate needs and take its row.  It cannot be had: it is left out from now on. */
static rs_result
try_candidate(rs_work *work, candidates *found, const candidate *one)
{
	bool locked = false;
	rs_result result = RS_DONE;

	if (!comes_behind_refused(found, one))
	{
		result = lock_keys(work, one->key, one->partition, &locked);
		if (result == RS_DONE && !locked && found->refused_count < RS_MAX_HELD)
			found->refused[found->refused_count++] = *one;
	}
	if (result == RS_DONE && locked)
	{
		RS_FAILPOINT("after_lock");
		result = take(work, &one->id, &one->line);
	}
	if (result != RS_DONE || work->has_row)
		return result;
	rs_unlock_keys(work);
	rs_leave_out(&found->left_out, &one->id);
	return RS_DONE;
}

/* Where none of the first can be had, those behind them are looked at. */
static rs_progress
deliver_advisory(rs_work *work)
{
	ruststream_worker *worker = work->worker;
	candidates found = {.work = work, .left_out = worker->held};
	int left_alone = worker->held.count;

	do
	{
		rs_result result = find_candidates(work, &found);

		for (int i = 0; i < found.count && result == RS_DONE && !work->has_row; i++)
			result = try_candidate(work, &found, &found.found[i]);
		if (result != RS_DONE)
			return fail(work, result);
	} while (!work->has_row && found.count > 0 && found.left_out.count < RS_MAX_HELD);

	if (!work->has_row && found.left_out.count > left_alone && ++worker->miss_count < RS_MAX_MISSES)
		return RS_PROGRESS_TRANSIENT;
	worker->miss_count = 0;
	if (work->has_row)
	{
		RS_FAILPOINT("after_take");
		return deliver_claimed(work);
	}
	return rs_found_nothing(worker);
}

rs_work
rs_work_of(ruststream_worker *worker)
{
	return (rs_work){.worker = worker,
					 .delivery = {.handle = worker->handle,
								  .subscription = worker->name,
								  .queue = worker->plan.subscription.queue}};
}

rs_progress
rs_deliver(ruststream_worker *worker)
{
	rs_work work = rs_work_of(worker);
	rs_progress progress;

	if (worker->plan.batch_size > 0)
		return rs_deliver_batch(worker);
	rs_arena_reset(&worker->delivery_arena);
	switch (rs_table_form(&worker->plan.table))
	{
		case RS_FORM_LEASE:
			progress = deliver_lease(&work);
			break;
		case RS_FORM_ADVISORY_LOCK:
			progress = deliver_advisory(&work);
			break;
		default:
			progress = deliver_row_lock(&work);
	}
	if (progress == RS_PROGRESS_DELIVERED)
		worker->delivered++;
	return progress;
}
