/*-------------------------------------------------------------------------
 *
 * batch.c
 *	  A batch: the rows of one claim, handled by one call.
 *
 *		row lock	BEGIN, CLAIM n, SAVEPOINT ruststream_claim, HANDLER,
 *					(after an error ROLLBACK TO SAVEPOINT ruststream_claim,) SETTLE .., COMMIT
 *		lease		BEGIN, CLAIM n, COMMIT; HANDLER; for each row BEGIN, SETTLE, COMMIT
 *		advisory	BEGIN, CLAIM n, COMMIT; LOCK ..; BEGIN, TAKE .., COMMIT; HANDLER;
 *					for each row BEGIN, SETTLE, COMMIT, UNLOCK
 *
 * That is the lane of a delivery that is not transactional, gone through once where it is about the
 * handler, and row by row where it is about a row.  In the row lock form all rows have one
 * transaction: nothing of the batch is concluded before its COMMIT, and a settlement that fails
 * takes the batch back.  In the others each row ends by itself, whatever becomes of its
 * neighbours.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"
#include "client/failpoint.h"

/* ---------------------------------------------------------------- its rows */

static rs_form
form_of(const rs_batch *batch)
{
	return rs_table_form(&batch->call.worker->plan.table);
}

/*
 * Decode the rows, each by itself: what is wrong with one concerns no other.  The handler is given
 * the others.
 */
static void
decode_rows(rs_batch *batch)
{
	for (int i = 0; i < batch->count; i++)
	{
		rs_work *row = batch->rows[i];

		if (!rs_decode_payload(row))
		{
			row->answer.undecodable = true;
			continue;
		}
		batch->given[batch->given_count] = row;
		batch->deliveries[batch->given_count++] = &row->delivery;
	}
	if (batch->given_count > 0)
		batch->call.delivery = *batch->deliveries[0];
}

/* ---------------------------------------------------------------- recovery */

/* The rows that are still in work go back, as they are. */
static void
give_rows_back(rs_batch *batch)
{
	for (int i = 0; i < batch->count; i++)
	{
		if (batch->rows[i]->is_over)
			continue;
		batch->rows[i]->is_over = true;
		rs_stop_lease(batch->rows[i]);
		rs_give_back(batch->rows[i]);
	}
}

/* One line for the batch, where its rows have failed together. */
static void
report(const rs_batch *batch)
{
	const ruststream_worker *worker = batch->call.worker;
	const rs_error *error = &batch->call.error;
	const rs_work *first = batch->given_count > 0 ? batch->given[0] : batch->rows[0];

	rs_tell(worker->handle,
			"subscription \"%s\": delivery of a batch of %d rows, from row %s on, failed: %s%s%s",
			worker->name, batch->given_count > 0 ? batch->given_count : batch->count,
			first->delivery.id, error->message, error->hint[0] != '\0' ? ". " : "", error->hint);
}

/* Each row that is still in work is settled by itself; why is told once. */
static void
settle_rows_afresh(rs_batch *batch, rs_cause cause)
{
	report(batch);
	for (int i = 0; i < batch->count; i++)
	{
		rs_work *row = batch->rows[i];

		if (row->is_over)
			continue;
		row->is_over = true;
		if (row->answer.undecodable && row->has_error && !row->is_told)
		{
			rs_settle_by_policy(row, RS_CAUSE_DECODE_ERROR);
			continue;
		}
		row->has_error = true;
		row->is_told = true;
		row->error = batch->call.error;
		rs_settle_by_policy(row, cause);
	}
}

/*
 * Row lock form: a settlement or the COMMIT has failed, and all is as it was before.  A row that is
 * known to be the cause is settled afresh, and so out of the way.  The others come again in
 * smaller batches, so that one that cannot be told is found.
 */
static rs_progress
after_failed_settlement(rs_batch *batch)
{
	ruststream_worker *worker = batch->call.worker;
	int culprit = batch->count == 1 ? 0 : batch->settling;
	rs_work *row = culprit >= 0 ? batch->rows[culprit] : NULL;

	worker->batch_limit = batch->count > 1 ? batch->count / 2 : 1;
	if (row == NULL)
	{
		report(batch);
		return RS_PROGRESS_TRANSIENT;
	}
	row->has_error = true;
	row->is_told = false;
	row->error = batch->call.error;
	rs_settle_by_policy(row, RS_CAUSE_SETTLE_ERROR);
	worker->delivered++;
	return RS_PROGRESS_DELIVERED;
}

/* A session's keys go with it. */
static void
forget_keys(rs_batch *batch)
{
	for (int i = 0; i < batch->count; i++)
		batch->rows[i]->key = NULL;
}

/* The batch's rows are claimed; everything that was open is rolled back, and the call's error says
 * why. */
static rs_progress
recover(rs_batch *batch, rs_result result)
{
	ruststream_worker *worker = batch->call.worker;

	if (result == RS_LOST)
	{
		forget_keys(batch);
		if (!rs_have_new_session(worker))
		{
			for (int i = 0; i < batch->count; i++)
				rs_stop_lease(batch->rows[i]);
			worker->handle->error = batch->call.error;
			return RS_PROGRESS_BROKEN;
		}
	}
	if (result != RS_FAILED)
	{
		/* Which of the rows is why nobody knows: the first stands for all. */
		if (!rs_count_transient(worker, batch->rows[0]->delivery.id))
		{
			give_rows_back(batch);
			return RS_PROGRESS_TRANSIENT;
		}
	}
	else if (form_of(batch) == RS_FORM_ROW_LOCK && batch->call.stage == RS_STAGE_SETTLE)
		return after_failed_settlement(batch);
	settle_rows_afresh(batch, batch->call.stage == RS_STAGE_SETTLE ? RS_CAUSE_SETTLE_ERROR
																   : RS_CAUSE_ERROR);
	worker->delivered += batch->count;
	return RS_PROGRESS_DELIVERED;
}

static rs_progress
fail(rs_batch *batch, rs_result result)
{
	rs_work *call = &batch->call;

	call->error = call->worker->handle->session->error;
	call->has_error = true;
	rs_work_rollback(call);
	/* Without a row it is the claim that has failed. */
	return batch->count > 0 && call->stage != RS_STAGE_CLAIM ? recover(batch, result)
															 : rs_recover(call, result);
}

/* The worker was interrupted: the rows go back. */
static rs_progress
release(rs_batch *batch)
{
	rs_work *call = &batch->call;
	const char *first = batch->rows[0]->delivery.id;

	rs_work_rollback(call);
	give_rows_back(batch);
	rs_tell(call->worker->handle,
			"subscription \"%s\": released a batch of %d rows, from row %s on", call->worker->name,
			batch->count, first);
	return RS_PROGRESS_RELEASED;
}

static rs_progress
nothing_claimed(rs_batch *batch)
{
	rs_result result = rs_work_commit(&batch->call);

	if (result != RS_DONE)
		return fail(batch, result);
	return rs_found_nothing(batch->call.worker);
}

/* ------------------------------------------------------- row lock: together */

/* Settle a row in the claim's transaction. */
static rs_result
settle_row(rs_batch *batch, int number, rs_settlement *settlement)
{
	rs_work *row = batch->rows[number];
	rs_result result = RS_DONE;

	*settlement = rs_decide(row);
	batch->settling = number;
	if (rs_settle_row(row, settlement, &result) == RS_SETTLED)
		result = rs_record_failure(row);
	if (result == RS_DONE)
		batch->settling = -1;
	return result;
}

/* Those rows that did not decode, or (given) those that the handler was given. */
static rs_result
settle_rows(rs_batch *batch, bool given, rs_settlement *settlements)
{
	rs_result result = RS_DONE;
	int next = 0;

	batch->call.stage = RS_STAGE_SETTLE;
	for (int i = 0; i < batch->count && result == RS_DONE; i++)
	{
		bool is_given = next < batch->given_count && batch->given[next] == batch->rows[i];

		next += is_given ? 1 : 0;
		if (is_given == given)
			result = settle_row(batch, i, &settlements[i]);
	}
	if (given && result == RS_DONE)
		RS_FAILPOINT("after_settle");
	return result;
}

/* The handler, and the settlement of the rows that it was given. */
static rs_result
handle_together(rs_batch *batch, rs_settlement *settlements)
{
	rs_work *call = &batch->call;
	ruststream_worker *worker = call->worker;
	rs_session *session = worker->handle->session;
	rs_result result;

	call->stage = RS_STAGE_HANDLER;
	rs_worker_trace(worker, RS_STEP_SAVEPOINT, "");
	result = session->driver->savepoint(session);
	if (result == RS_DONE)
		result = rs_handle_batch(batch);
	if (result != RS_DONE || atomic_load(&worker->interrupts))
		return result;
	if (call->has_error)
	{
		rs_worker_trace(worker, RS_STEP_ROLLBACK_TO, "");
		result = session->driver->rollback_to(session);
	}
	return result == RS_DONE ? settle_rows(batch, true, settlements) : result;
}

/* All is committed: what this process makes of it. */
static void
conclude_together(rs_batch *batch, const rs_settlement *settlements)
{
	ruststream_worker *worker = batch->call.worker;

	if (batch->call.has_error)
		report(batch);
	for (int i = 0; i < batch->count; i++)
		rs_conclude(batch->rows[i], &settlements[i]);
	worker->delivered += batch->count;
	worker->batch_limit *= 2;
	if (worker->batch_limit >= worker->plan.batch_size)
		worker->batch_limit = 0;
}

static rs_progress
deliver_row_lock(rs_batch *batch)
{
	rs_work *call = &batch->call;
	ruststream_worker *worker = call->worker;
	rs_settlement *settlements;
	rs_result result = rs_work_begin(call, RS_FOR_DELIVERY);

	if (result == RS_DONE)
		result = rs_batch_claim(batch);
	if (result != RS_DONE)
		return fail(batch, result);
	if (batch->count == 0)
		return nothing_claimed(batch);
	RS_FAILPOINT("after_claim");
	decode_rows(batch);
	settlements = rs_alloc(&worker->delivery_arena, sizeof(rs_settlement) * (size_t) batch->count);
	result = rs_check_row(call, RS_DONE);
	if (result == RS_DONE)
		result = settle_rows(batch, false, settlements);
	if (result == RS_DONE && batch->given_count > 0)
		result = handle_together(batch, settlements);
	if (atomic_load(&worker->interrupts) && call->stage == RS_STAGE_HANDLER)
		return release(batch);
	if (result == RS_DONE)
	{
		RS_FAILPOINT("before_commit");
		call->stage = RS_STAGE_SETTLE;
		result = rs_work_commit(call);
	}
	if (result != RS_DONE)
		return fail(batch, result);
	RS_FAILPOINT("after_commit");
	conclude_together(batch, settlements);
	return RS_PROGRESS_DELIVERED;
}

/* --------------------------------------- lease and advisory lock: row by row */

/*
 * A row's settlement has failed for a moment, or its connection is lost.  The handler has done its
 * part, and what it has written is kept: so the settlement is tried again by itself, if the row
 * is still ours.  With the connection go the keys: RS_LOST, and the row is anybody's.
 */
static rs_result
finish_afresh(rs_batch *batch, rs_work *row, const rs_settlement *settlement, rs_result result)
{
	ruststream_worker *worker = row->worker;

	worker->counts[RS_COUNT_TRANSIENT]++;
	if (result == RS_LOST)
	{
		bool had_key = row->key != NULL;

		forget_keys(batch);
		if (!rs_have_new_session(worker) || had_key)
			return RS_LOST;
	}
	switch (rs_settle_afresh(row, settlement, true))
	{
		case RS_AFRESH_SETTLED:
			rs_unlock_keys(row);
			rs_conclude(row, settlement);
			break;
		case RS_AFRESH_TAKEN:
			/* A COMMIT whose answer was lost may have done it; or the handler, under its key. */
			if (result != RS_LOST && row->key == NULL)
				rs_lose(row);
			rs_unlock_keys(row);
			break;
		case RS_AFRESH_FAILED:
			if (worker->handle->session == NULL)
				return RS_LOST;
			if (!row->has_error)
				row->error = worker->handle->session->error;
			row->has_error = true;
			row->is_told = false;
			rs_settle_by_policy(row, RS_CAUSE_SETTLE_ERROR);
			break;
	}
	return RS_DONE;
}

/* Settle a row in a transaction of its own.  RS_LOST: no more rows can be. */
static rs_result
finish_row(rs_batch *batch, rs_work *row)
{
	rs_session *session = row->worker->handle->session;
	rs_settlement settlement = rs_decide(row);
	bool lost = false;

	row->is_over = true;
	for (const rs_step *step = settlement.steps; *step != RS_STEP_END; step++)
	{
		rs_result result = rs_take_step(row, *step, &settlement, &lost);

		if (result == RS_DONE)
			continue;
		if (!lost && result != RS_FAILED)
		{
			rs_work_rollback(row);
			return finish_afresh(batch, row, &settlement, result);
		}
		row->is_told = false;
		if (!lost && !row->has_error)
			row->error = session->error;
		row->has_error |= !lost;
		rs_work_rollback(row);
		if (lost)
			rs_lose(row);
		else
			rs_settle_by_policy(row, RS_CAUSE_SETTLE_ERROR);
		return RS_DONE;
	}
	rs_conclude(row, &settlement);
	return RS_DONE;
}

/* All rows that are still in work, or those that did not decode alone. */
static rs_result
finish_rows(rs_batch *batch, bool undecoded_only)
{
	rs_result result = RS_DONE;

	for (int i = 0; i < batch->count && result == RS_DONE; i++)
	{
		rs_work *row = batch->rows[i];

		if (row->is_over || (undecoded_only && !row->has_error))
			continue;
		result = finish_row(batch, row);
		if (result == RS_DONE)
			batch->call.worker->delivered++;
	}
	return result;
}

/* The connection is lost, and with it what was not settled yet: leases run out, keys are gone. */
static rs_progress
give_up(rs_batch *batch)
{
	ruststream_worker *worker = batch->call.worker;

	for (int i = 0; i < batch->count; i++)
		rs_stop_lease(batch->rows[i]);
	if (worker->handle->session != NULL)
	{
		give_rows_back(batch);
		return RS_PROGRESS_TRANSIENT;
	}
	return RS_PROGRESS_BROKEN;
}

/* The rows are this session's, and what took them is committed. */
static rs_progress
handle_apart(rs_batch *batch)
{
	rs_work *call = &batch->call;
	ruststream_worker *worker = call->worker;
	rs_result result;

	call->stage = RS_STAGE_HANDLER;
	decode_rows(batch);
	if (!rs_watch_hold(&worker->watch, batch->rows, batch->count, worker->plan.lease))
	{
		rs_error_set(&worker->handle->session->error, RUSTSTREAM_SYSTEM, "", NULL,
					 "the leases of the batch could not be watched");
		return fail(batch, RS_FAILED);
	}
	if (finish_rows(batch, true) != RS_DONE)
		return give_up(batch);
	if (atomic_load(&worker->interrupts))
		return release(batch);
	if (batch->given_count == 0)
		return RS_PROGRESS_DELIVERED;
	result = rs_handle_batch(batch);
	if (atomic_load(&worker->interrupts))
		return release(batch);
	if (result != RS_DONE)
		return fail(batch, result);
	if (call->has_error)
		report(batch);
	return finish_rows(batch, false) == RS_DONE ? RS_PROGRESS_DELIVERED : give_up(batch);
}

static rs_progress
deliver_lease(rs_batch *batch)
{
	rs_work *call = &batch->call;
	rs_result result = rs_work_begin(call, RS_FOR_US);

	if (result == RS_DONE)
		result = rs_batch_claim(batch);
	if (result != RS_DONE)
		return fail(batch, result);
	if (batch->count == 0)
		return nothing_claimed(batch);
	RS_FAILPOINT("after_claim");
	call->stage = RS_STAGE_SETTLE;
	result = rs_work_commit(call);
	if (result != RS_DONE)
		return fail(batch, result);
	RS_FAILPOINT("after_claim_commit");
	return handle_apart(batch);
}

/* Not all that was locked could be taken: whatever is locked is let go. */
static rs_progress
fail_to_take(rs_batch *batch, rs_result result)
{
	if (result == RS_LOST)
		forget_keys(batch);
	else
	{
		rs_error kept = batch->call.worker->handle->session->error;

		for (int i = 0; i < batch->count; i++)
			rs_unlock_keys(batch->rows[i]);
		batch->call.worker->handle->session->error = kept;
	}
	return fail(batch, result);
}

static rs_progress
deliver_advisory(rs_batch *batch)
{
	ruststream_worker *worker = batch->call.worker;
	int found = 0;
	rs_result result = rs_batch_lock(batch, &found);

	if (result == RS_DONE && batch->count > 0)
	{
		RS_FAILPOINT("after_lock");
		result = rs_batch_take(batch);
	}
	if (result != RS_DONE)
		return fail_to_take(batch, result);
	if (batch->count == 0 && found > 0 && ++worker->miss_count < RS_MAX_MISSES)
		return RS_PROGRESS_TRANSIENT;
	worker->miss_count = 0;
	if (batch->count > 0)
	{
		RS_FAILPOINT("after_take");
		return handle_apart(batch);
	}
	return rs_found_nothing(worker);
}

/* ------------------------------------------------------------------ the forms */

rs_progress
rs_deliver_batch(ruststream_worker *worker)
{
	rs_batch batch = {.settling = -1};

	rs_arena_reset(&worker->delivery_arena);
	batch.call = rs_work_of(worker);
	switch (rs_table_form(&worker->plan.table))
	{
		case RS_FORM_LEASE:
			return deliver_lease(&batch);
		case RS_FORM_ADVISORY_LOCK:
			return deliver_advisory(&batch);
		default:
			return deliver_row_lock(&batch);
	}
}
