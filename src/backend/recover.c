/*-------------------------------------------------------------------------
 *
 * recover.c
 *	  When a delivery's transaction is lost: claim anew, or settle afresh.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/delivery.h"

bool
rs_is_transient(const ErrorData *error)
{
	return error->sqlerrcode == ERRCODE_T_R_SERIALIZATION_FAILURE ||
		   error->sqlerrcode == ERRCODE_T_R_DEADLOCK_DETECTED;
}

/* The entry of a row among those that have failed transiently; -1: it has none. */
static int
find_transient(const RsEngine *engine, const char *id)
{
	for (int i = 0; i < engine->transient_count; i++)
	{
		if (strcmp(engine->transient[i].id, id) == 0)
			return i;
	}
	return -1;
}

static void
drop_transient(RsEngine *engine, int index)
{
	pfree(engine->transient[index].id);
	engine->transient_count--;
	memmove(&engine->transient[index], &engine->transient[index + 1],
			sizeof(RsTransient) * (engine->transient_count - index));
}

void
rs_forget_transient_failures(RsEngine *engine, const char *id)
{
	int index = find_transient(engine, id);

	engine->transient_claims = 0;
	if (index >= 0)
		drop_transient(engine, index);
}

/* Count a transient failure of a row.  How many has it had in a row? */
static int
count_transient(RsEngine *engine, const char *id)
{
	int index = find_transient(engine, id);
	RsTransient entry = {0};

	engine->transient_claims = 0;
	if (index >= 0)
	{
		entry.count = engine->transient[index].count;
		drop_transient(engine, index);
	}
	else if (engine->transient_count == RS_MAX_TRANSIENT)
		drop_transient(engine, 0);
	entry.id = MemoryContextStrdup(engine->context, id);
	engine->transient[engine->transient_count++] = entry;
	return ++engine->transient[engine->transient_count - 1].count;
}

/* In the caller's session a cancel is the caller's, and no failure. */
static bool
is_callers_cancel(const RsEngine *engine, const ErrorData *error)
{
	return engine->session->rethrows_cancel && rs_is_session_cancel(error);
}

/* What the handler has left goes all the same. */
static void
rethrow_cancel(RsEngine *engine, ErrorData *error)
{
	engine->session->clean();
	ReThrowError(error);
}

/* How far a settlement in a fresh transaction came. */
typedef enum Afresh
{
	AFRESH_SETTLED,
	AFRESH_TAKEN, /* somebody else has the row: recorded the failure alone */
	AFRESH_FAILED
} Afresh;

/*
 * Settle and record in one fresh transaction at READ COMMITTED.  The row was
 * free in between, or may be free by now, so it is locked again first; where
 * somebody else has it, or has moved it on, its settlement is theirs.
 * settlement may be NULL: record the failure alone; or not even that.
 */
static Afresh
try_afresh(RsWork *work, const rs_settlement *settlement, bool records)
{
	RsEngine *engine = work->engine;
	volatile Afresh result = AFRESH_TAKEN;
	ErrorData *volatile error = NULL;

	PG_TRY();
	{
		RsValues values;

		rs_stop_lease(&work->delivery);
		rs_engine_begin(engine, RS_ISOLATION_READ_COMMITTED);
		rs_delivery_values(engine->subscription, &work->delivery, &values);
		if (settlement != NULL && rs_key_is_held(&work->delivery) &&
			rs_execute(engine->plans, RS_OP_RECLAIM, &values) == 1 &&
			rs_settle_delivery(engine, &work->delivery, settlement, 0))
			result = AFRESH_SETTLED;
		if (records)
			rs_record_failure(work);
		rs_engine_commit(engine);
		if (result == AFRESH_SETTLED)
			rs_forget_lease(&work->delivery);
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(engine->delivery_context);
		error = CopyErrorData();
		FlushErrorState();
		rs_engine_rollback(engine);
		result = AFRESH_FAILED;
	}
	PG_END_TRY();

	/* A lease stays, and ends by itself: a second cancel must not find us here. */
	if (error != NULL && is_callers_cancel(engine, error))
	{
		rs_unlock_key(engine, &work->delivery);
		rethrow_cancel(engine, error);
	}
	return result;
}

/*
 * The row goes back as it is, for anybody to claim: nothing to do in the row
 * lock form, whose rollback was that.
 */
static void
give_back(RsWork *work)
{
	RsEngine *engine = work->engine;

	/* Where there is no row there may be no subscription: it could not be loaded. */
	if (work->delivery.is_leased)
	{
		rs_policy uncapped = engine->subscription->policy;
		rs_settlement settlement;

		uncapped.max_attempts = 0;
		settlement = rs_settle(&engine->subscription->queue.table, &uncapped, RS_CAUSE_ANSWER,
							   RS_OUTCOME_RETRY, false, work->delivery.attempt);
		(void) try_afresh(work, &settlement, false);
		rs_forget_lease(&work->delivery);
	}
	rs_unlock_key(engine, &work->delivery);
}

/*
 * Settle a delivery whose transaction has been rolled back: by its policy;
 * where that fails too (a dead letter whose id is there already, say), by
 * counting the attempt and letting the row come back; and where not even that
 * can be written, the row stays as it was.  Whatever comes back at once this
 * worker leaves alone for the retry delay.
 */
static void
settle_afresh(RsWork *work, rs_cause cause)
{
	RsEngine *engine = work->engine;
	const rs_table *table = &engine->subscription->queue.table;
	rs_policy uncapped = engine->subscription->policy;
	rs_settlement settlement = rs_settle(table, &engine->subscription->policy, cause,
										 RS_OUTCOME_ACK, false, work->delivery.attempt);
	Afresh result;

	rs_set_reason(work);
	result = try_afresh(work, &settlement, true);
	if (result == AFRESH_FAILED)
	{
		uncapped.max_attempts = 0;
		settlement = rs_settle(table, &uncapped, RS_CAUSE_ANSWER, rs_default_on_error(table), false,
							   work->delivery.attempt);
		result = try_afresh(work, &settlement, true);
	}
	if (result == AFRESH_FAILED)
	{
		(void) try_afresh(work, NULL, true);
		rs_claim_hold(engine, &work->delivery);
	}
	else
		rs_hold_if_hot(engine, &work->delivery, &settlement);

	give_back(work);
	rs_report_failure(work);
	rs_forget_transient_failures(engine, work->delivery.id_text);
	if (result == AFRESH_SETTLED)
		rs_count_settlement(settlement.outcome, true);
	else
	{
		rs_stats_count(RS_COUNT_DELIVERIES);
		rs_stats_count(RS_COUNT_FAILED);
	}
}

/*
 * A transient failure has been rolled back.  The row is claimed anew, unless it
 * has had its share of them.
 */
static RsProgress
after_transient_failure(RsWork *work, RsStage stage)
{
	RsEngine *engine = work->engine;
	const char *id = work->delivery.id_text;
	int count = id == NULL ? ++engine->transient_claims : count_transient(engine, id);

	rs_stats_count(RS_COUNT_TRANSIENT);
	if (count < RS_TRANSIENT_LIMIT)
	{
		give_back(work);
		return RS_PROGRESS_TRANSIENT;
	}

	if (id == NULL)
	{
		/* The claim itself fails, of no row in particular: come back later. */
		give_back(work);
		engine->transient_claims = 0;
		engine->rest_until = GetCurrentTimestamp() + Min(engine->subscription->policy.retry_delay,
														 engine->subscription->poll_interval);
		return RS_PROGRESS_HELD;
	}
	settle_afresh(work, stage == RS_STAGE_SETTLE ? RS_CAUSE_SETTLE_ERROR : RS_CAUSE_ERROR);
	return RS_PROGRESS_DELIVERED;
}

void
rs_lose(RsWork *work)
{
	RsEngine *engine = work->engine;
	ErrorData *error = palloc0(sizeof(ErrorData));

	rs_trace_step(engine, RS_STEP_LEASE_LOST, "");
	error->sqlerrcode = ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE;
	error->message =
		work->delivery.key == NULL
			? pstrdup("the lease was lost before the delivery was settled")
			: psprintf("the lock on key \"%s\" was lost before the delivery was settled",
					   work->delivery.key);
	error->detail =
		engine->subscription->policy.transactional
			? pstrdup("Everything the handler wrote in its delivery's transaction is undone.")
			: pstrdup("What the handler has written is kept.");
	if (work->error != NULL)
		error->detail =
			psprintf("%s It had failed before: %s", error->detail, work->error->message);
	error->hint = work->delivery.key == NULL
					  ? pstrdup("Another claim took the row after its lease had ended, or the "
								"handler has changed it.")
					  : pstrdup("A handler must not release advisory locks that it has not taken, "
								"as pg_advisory_unlock_all() does.");
	work->error = error;

	rs_stats_count(RS_COUNT_LEASE_LOST);
	/*
	 * A key that the handler has released may be free still: then the delivery
	 * counts as a failure, so that the row comes to an end at its cap.
	 */
	if (rs_lock_key_again(engine, &work->delivery))
	{
		settle_afresh(work, RS_CAUSE_SETTLE_ERROR);
		return;
	}
	(void) try_afresh(work, NULL, true);
	/* It may be due at once, and be lost again; where it is ours after all, its lease ends. */
	rs_claim_hold(engine, &work->delivery);
	rs_forget_lease(&work->delivery);
	give_back(work);
	rs_report_failure(work);
	rs_forget_transient_failures(engine, work->delivery.id_text);
	rs_stats_count(RS_COUNT_DELIVERIES);
	rs_stats_count(RS_COUNT_FAILED);
}

/*
 * An error outside the savepoint, or a transient one anywhere: everything is
 * rolled back already, and work->error says why.
 */
RsProgress
rs_recover(RsWork *work)
{
	/* A row whose handler has failed transiently is known, and may fail so in every commit. */
	if (work->sharing > 0 && !is_callers_cancel(work->engine, work->error))
	{
		rs_deliver_apart(work);
		if (!rs_is_transient(work->error) || work->stage == RS_STAGE_SETTLE)
			return RS_PROGRESS_TRANSIENT;
	}
	if (rs_is_transient(work->error) && work->engine->subscription != NULL)
		return after_transient_failure(work, work->stage);

	/* Without a row the subscription itself is at fault. */
	if (work->stage == RS_STAGE_CLAIM)
	{
		give_back(work);
		ReThrowError(work->error);
	}
	if (is_callers_cancel(work->engine, work->error))
	{
		give_back(work);
		rethrow_cancel(work->engine, work->error);
	}

	rs_stats_count(RS_COUNT_SETTLE_FAILED);
	settle_afresh(work, RS_CAUSE_SETTLE_ERROR);
	return RS_PROGRESS_DELIVERED;
}

/* ------------------------------------------------------------------ batches */

/* The rows that are still in work go back, as they are. */
static void
give_rows_back(const RsBatch *batch)
{
	for (int i = 0; i < batch->count; i++)
		give_back(&batch->works[i]);
}

/*
 * A batch has failed transiently, and which of its rows is why nobody knows: count it for
 * each that was in work.  Has one of them had its share?
 */
static bool
have_had_their_share(RsEngine *engine, const RsBatch *batch)
{
	int most = 0;
	int counted = 0;

	for (int i = 0; i < batch->count && counted < RS_MAX_TRANSIENT; i++)
	{
		int count;

		if (batch->works[i].is_over)
			continue;
		count = count_transient(engine, batch->works[i].delivery.id_text);
		most = Max(most, count);
		counted++;
	}
	return most >= RS_TRANSIENT_LIMIT;
}

void
rs_recover_row(RsWork *row)
{
	if (rs_is_transient(row->error))
		settle_afresh(row, RS_CAUSE_SETTLE_ERROR);
	else
		(void) rs_recover(row);
}

/* Each row that is still in work is settled by itself; why is told once. */
static void
settle_rows_afresh(RsWork *work, rs_cause cause)
{
	const RsBatch *batch = work->batch;

	rs_report_failure(work);
	for (int i = 0; i < batch->count; i++)
	{
		RsWork *row = &batch->works[i];

		if (row->is_over)
			continue;
		row->is_over = true;
		row->is_told = row->cause != RS_CAUSE_DECODE_ERROR;
		if (row->cause == RS_CAUSE_DECODE_ERROR)
			settle_afresh(row, RS_CAUSE_DECODE_ERROR);
		else
		{
			row->error = work->error;
			settle_afresh(row, cause);
		}
	}
}

/*
 * The settlement of one row of the claim's transaction has failed, or its
 * COMMIT, and all of the batch is as it was before.  A row that is known to be
 * the cause is settled afresh, and so out of the way.  The others come again in
 * smaller batches, so that many such rows cost no more than a few batches, and
 * one that cannot be told is found.
 */
static RsProgress
after_failed_settlement(RsWork *work)
{
	RsEngine *engine = work->engine;
	const RsBatch *batch = work->batch;
	int culprit = batch->count == 1 ? 0 : batch->settling;

	rs_stats_count(RS_COUNT_SETTLE_FAILED);
	engine->batch_limit = Max(batch->count / 2, 1);
	if (culprit < 0)
	{
		rs_report_failure(work);
		return RS_PROGRESS_TRANSIENT;
	}
	engine->delivered = 1;
	batch->works[culprit].error = work->error;
	batch->works[culprit].is_told = false;
	settle_afresh(&batch->works[culprit], RS_CAUSE_SETTLE_ERROR);
	return RS_PROGRESS_DELIVERED;
}

/*
 * Row lock form: nothing has been settled.  The other forms settle row by row, and
 * come here only where not even that could be begun, or goes no further.
 */
RsProgress
rs_recover_batch(RsWork *work)
{
	RsEngine *engine = work->engine;
	const RsBatch *batch = work->batch;

	if (work->stage == RS_STAGE_CLAIM)
	{
		give_rows_back(batch);
		return rs_recover(work);
	}
	if (is_callers_cancel(engine, work->error))
	{
		give_rows_back(batch);
		rethrow_cancel(engine, work->error);
	}
	if (rs_is_transient(work->error))
	{
		rs_stats_count(RS_COUNT_TRANSIENT);
		if (!have_had_their_share(engine, batch))
		{
			give_rows_back(batch);
			return RS_PROGRESS_TRANSIENT;
		}
		settle_rows_afresh(work,
						   work->stage == RS_STAGE_SETTLE ? RS_CAUSE_SETTLE_ERROR : RS_CAUSE_ERROR);
	}
	else if (rs_table_form(&engine->subscription->queue.table) == RS_FORM_ROW_LOCK)
		return after_failed_settlement(work);
	else
	{
		rs_stats_count(RS_COUNT_SETTLE_FAILED);
		settle_rows_afresh(work, RS_CAUSE_SETTLE_ERROR);
	}
	return RS_PROGRESS_DELIVERED;
}
