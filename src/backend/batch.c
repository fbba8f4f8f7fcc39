/*-------------------------------------------------------------------------
 *
 * batch.c
 *	  A batch: the rows of one claim, handled by one call.
 *
 * It goes through the lane of a delivery that is not transactional, once where
 * that is about the handler, and row by row where it is about a row:
 *
 *	row lock	BEGIN, CLAIM n, SAVEPOINT ruststream_claim, HANDLER,
 *				(after an error ROLLBACK TO SAVEPOINT ruststream_claim,) SETTLE .., COMMIT
 *	lease		BEGIN, CLAIM n, COMMIT; HANDLER; for each row BEGIN, SETTLE, COMMIT
 *	advisory	BEGIN, CLAIM n, COMMIT; LOCK ..; BEGIN, TAKE .., COMMIT; HANDLER;
 *	lock		for each row BEGIN, SETTLE, COMMIT, UNLOCK
 *
 * So the call of the handler is that of any delivery (deliver.c), whose delivery
 * stands for all rows, and each row's settlement is that of a delivery of its own.
 * In the row lock form all rows have one transaction, and a settlement that fails
 * takes the whole batch back: see rs_recover_batch.  In the others each row ends by
 * itself, whatever becomes of its neighbours.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/delivery.h"
#include "backend/lease.h"

#include "access/xact.h"

/* -------------------------------------------------------------- its rows */

/* How many rows a claim may take. */
static int
claim_limit(const RsEngine *engine)
{
	int limit = engine->subscription->batch_size;

	if (engine->batch_limit > 0)
		limit = Min(limit, engine->batch_limit);
	return rs_claim_limit(engine, limit);
}

/* From now on the work is a batch of so many rows; more may not be added. */
static RsBatch *
make_batch(RsWork *work, int count)
{
	RsBatch *batch = palloc0(sizeof(RsBatch));

	batch->count = count;
	batch->works = palloc0(sizeof(RsWork) * count);
	batch->settling = -1;
	for (int i = 0; i < count; i++)
		batch->works[i].engine = work->engine;
	work->batch = batch;
	return batch;
}

/* Decode a row by itself; what is wrong with it concerns no other. */
static void
decode_row(RsWork *row)
{
	RsEngine *engine = row->engine;
	ResourceOwner owner = CurrentResourceOwner;

	row->stage = RS_STAGE_DECODE;
	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(engine->delivery_context);
	PG_TRY();
	{
		rs_handler_decode(engine->subscription, &row->delivery);
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		rs_keep_error(row);
		RollbackAndReleaseCurrentSubTransaction();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(engine->delivery_context);
	CurrentResourceOwner = owner;
	rs_raise_what_is_no_failure(row);
}

/*
 * The rows are claimed, in the transaction that is open: decode them, and have the
 * work's delivery stand for those that the handler is to take.
 */
static void
decode_batch(RsWork *work)
{
	RsBatch *batch = work->batch;
	RsDelivery **rows = palloc(sizeof(RsDelivery *) * batch->count);
	int count = 0;

	for (int i = 0; i < batch->count; i++)
	{
		RsWork *row = &batch->works[i];

		/* A row is as it is: only what tells of its delivery can be wrong. */
		if (work->engine->subscription->handler.takes_delivery)
			decode_row(row);
		row->stage = RS_STAGE_DECODE;
		if (row->error == NULL)
			rows[count++] = &row->delivery;
	}

	work->delivery = count > 0 ? *rows[0] : batch->works[0].delivery;
	work->delivery.key = NULL;
	work->delivery.rows = count;
	work->delivery.row = rows;
	work->engine->delivered = batch->count;
}

/* The handler has come to its end: what each of its rows is settled by. */
static void
hand_out_answers(RsWork *work)
{
	RsBatch *batch = work->batch;
	int number = 0;

	for (int i = 0; i < batch->count; i++)
	{
		RsWork *row = &batch->works[i];

		if (row->is_over || row->error != NULL)
			continue;
		row->stage = RS_STAGE_HANDLER;
		row->error = work->error;
		row->is_told = work->error != NULL;
		row->answer = work->answer.each != NULL ? work->answer.each[number] : work->answer;
		number++;
	}
}

/* ------------------------------------------------------- row lock: together */

static bool
did_not_decode(const RsWork *row)
{
	return row->cause == RS_CAUSE_DECODE_ERROR;
}

/* Settle a row in the claim's transaction. */
static void
settle_row(RsBatch *batch, int number)
{
	RsWork *row = &batch->works[number];

	batch->settling = number;
	(void) rs_settle_delivery(row->engine, &row->delivery, &row->settlement, row->answer.delay);
	rs_record_failure(row);
	batch->settling = -1;
}

/* Those rows that did not decode, or (handled) those that did. */
static void
settle_rows(RsWork *work, bool handled)
{
	RsBatch *batch = work->batch;

	/* So that each row's settlement shows its own failures. */
	rs_fire_deferred_constraints();
	for (int i = 0; i < batch->count; i++)
	{
		if (did_not_decode(&batch->works[i]) != handled)
			settle_row(batch, i);
	}
}

/*
 * Walk through what remains of the lane; it is the same for all rows, since their
 * writes are kept whatever the handler has answered.
 */
static void
finish_together(RsWork *work)
{
	static const rs_step none[] = {RS_STEP_END};
	RsBatch *batch = work->batch;
	const rs_step *step = none;

	for (int i = 0; i < batch->count; i++)
	{
		if (did_not_decode(&batch->works[i]))
			continue;
		rs_decide(&batch->works[i]);
		step = batch->works[i].settlement.steps;
	}
	work->stage = RS_STAGE_SETTLE;
	for (; *step != RS_STEP_END; step++)
	{
		if (*step == RS_STEP_SETTLE)
			settle_rows(work, true);
		else
			(void) rs_take_step(work, *step);
	}
}

/* Before the handler runs, in its transaction. */
static void
settle_undecoded(RsWork *work)
{
	RsBatch *batch = work->batch;

	if (work->delivery.rows == batch->count)
		return;
	for (int i = 0; i < batch->count; i++)
	{
		if (batch->works[i].error != NULL)
			rs_decide(&batch->works[i]);
	}
	work->stage = RS_STAGE_SETTLE;
	settle_rows(work, false);
}

/* All is committed: what this process makes of it. */
static void
conclude_together(RsWork *work)
{
	RsEngine *engine = work->engine;
	RsBatch *batch = work->batch;
	const RsDelivery *last = &batch->works[batch->count - 1].delivery;
	bool all_ended = true;

	if (work->error != NULL)
		rs_report_failure(work);
	for (int i = 0; i < batch->count; i++)
	{
		rs_forget_transient_failures(engine, batch->works[i].delivery.id_text);
		rs_conclude(&batch->works[i]);
		all_ended &= batch->works[i].settlement.operation == RS_OP_ACK;
	}
	/* The next claim may go on behind the last row, unless one before it comes back. */
	if (all_ended && engine->subscription->queue.wake && !work->inserted && !last->was_delayed)
		rs_claim_mark(engine, last);
	if (engine->batch_limit > 0)
		engine->batch_limit *= 2;
	if (engine->batch_limit >= engine->subscription->batch_size)
		engine->batch_limit = 0;
}

/*
 * Claim, in the transaction that has begun; false: that is over, and *progress
 * says why.
 */
static bool
claim_batch(RsWork *work, int limit, RsProgress *progress)
{
	RsEngine *engine = work->engine;
	RsDelivery *deliveries = palloc0(sizeof(RsDelivery) * limit);
	int count = rs_claim(engine, deliveries, limit);

	if (!rs_has_claimed(engine, count, progress))
		return false;
	make_batch(work, count);
	for (int i = 0; i < count; i++)
		work->batch->works[i].delivery = deliveries[i];
	pfree(deliveries);
	decode_batch(work);
	return true;
}

static RsProgress
deliver_row_lock(RsWork *work)
{
	RsEngine *engine = work->engine;
	RsProgress progress;

	RS_FAILPOINT("after_begin");
	if (!claim_batch(work, claim_limit(engine), &progress))
		return progress;
	work->outer_owner = CurrentResourceOwner;

	rs_begin_work(work);
	settle_undecoded(work);
	if (work->delivery.rows > 0)
	{
		rs_handle_below_savepoint(work);
		hand_out_answers(work);
		finish_together(work);
	}
	else
		(void) rs_take_step(work, RS_STEP_COMMIT);
	conclude_together(work);
	return RS_PROGRESS_DELIVERED;
}

/* --------------------------------------- lease and advisory lock: row by row */

/* Settle a row in a transaction of its own; false: that has failed. */
static bool
try_to_finish(RsWork *row)
{
	volatile bool done = true;

	PG_TRY();
	{
		rs_finish(row);
	}
	PG_CATCH();
	{
		rs_keep_settlement_error(row);
		rs_engine_rollback(row->engine);
		done = false;
	}
	PG_END_TRY();
	return done;
}

/*
 * A failure is no neighbour's.  After a transient one the settlement is tried again by
 * itself: the handler has done its part, and what it has written is kept.
 */
static void
finish_row(RsWork *row)
{
	RsStage stage = row->stage;
	ErrorData *error = row->error;

	row->is_over = true;
	for (int i = 1; !try_to_finish(row); i++)
	{
		if (!rs_is_transient(row->error) || i == RS_TRANSIENT_LIMIT)
		{
			row->is_told = false;
			rs_recover_row(row);
			return;
		}
		rs_stats_count(RS_COUNT_TRANSIENT);
		row->stage = stage;
		row->error = error;
	}
}

/* All rows that are still in work, or those that did not decode alone. */
static void
finish_rows(RsWork *work, bool undecoded_only)
{
	RsBatch *batch = work->batch;

	for (int i = 0; i < batch->count; i++)
	{
		RsWork *row = &batch->works[i];

		if (!row->is_over && (row->error != NULL || !undecoded_only))
			finish_row(row);
	}
}

/* The rows are this session's, and what took them is committed. */
static RsProgress
handle_apart(RsWork *work)
{
	work->stage = RS_STAGE_DECODE;
	rs_begin_work(work);
	finish_rows(work, true);
	if (work->delivery.rows > 0)
	{
		rs_handle_claimed(work);
		hand_out_answers(work);
		finish_rows(work, false);
		if (work->error != NULL)
			rs_report_failure(work);
	}
	return RS_PROGRESS_DELIVERED;
}

static RsProgress
deliver_lease(RsWork *work)
{
	RsEngine *engine = work->engine;
	RsProgress progress;

	/* No more rows than can be extended. */
	if (!claim_batch(work, rs_lease_reserve(claim_limit(engine)), &progress))
	{
		rs_lease_unreserve();
		return progress;
	}
	rs_engine_commit(engine);
	work->stage = RS_STAGE_DECODE;
	rs_hold_leases(work->batch->works, work->batch->count);
	rs_lease_unreserve();
	RS_FAILPOINT("after_claim_commit");
	return handle_apart(work);
}

/* Lock the keys of the first candidates, one row a key; returns how many. */
static int
lock_keys(RsWork *work, const RsCandidate *candidates, int count, int limit)
{
	RsBatch *batch = make_batch(work, Min(count, limit));
	int locked = 0;

	for (int i = 0; i < count && locked < batch->count; i++)
	{
		RsWork *row = &batch->works[locked];

		if (rs_is_known_candidate(candidates, i) ||
			!rs_lock_key(work->engine, &row->delivery, &candidates[i]))
			continue;
		row->delivery.id = candidates[i].id;
		row->delivery.has_line = candidates[i].has_line;
		row->delivery.line = candidates[i].line;
		locked++;
	}
	batch->count = locked;
	return locked;
}

/* Take the rows whose keys are locked, and leave in the batch those that could be. */
static void
take_rows(RsWork *work)
{
	RsEngine *engine = work->engine;
	RsBatch *batch = work->batch;
	int taken = 0;

	RS_FAILPOINT("after_lock");
	rs_engine_begin(engine, RS_ISOLATION_READ_COMMITTED);
	for (int i = 0; i < batch->count; i++)
	{
		bool took = rs_claim_take(engine, &batch->works[i].delivery);

		rs_trace_step(engine, RS_STEP_TAKE, took ? "" : "0");
		if (!took)
			rs_unlock_key(engine, &batch->works[i].delivery);
	}
	for (int i = 0; i < batch->count; i++)
	{
		if (batch->works[i].delivery.key != NULL)
			batch->works[taken++] = batch->works[i];
	}
	batch->count = taken;
}

/* Lock and take what can be had of the candidates. */
static RsProgress
take_candidates(RsWork *work, const RsCandidate *candidates, int count, int limit)
{
	RsEngine *engine = work->engine;

	if (count == 0 || lock_keys(work, candidates, count, limit) == 0)
		return RS_PROGRESS_NOTHING;
	take_rows(work);
	if (work->batch->count == 0)
	{
		rs_engine_commit(engine);
		return RS_PROGRESS_NOTHING;
	}
	if (rs_engine_is_outdated(engine))
	{
		rs_engine_rollback(engine);
		for (int i = 0; i < work->batch->count; i++)
			rs_unlock_key(engine, &work->batch->works[i].delivery);
		return RS_PROGRESS_TRANSIENT;
	}
	decode_batch(work);
	rs_engine_commit(engine);
	RS_FAILPOINT("after_take");
	return RS_PROGRESS_DELIVERED;
}

/* Look for candidates, and take them: how many were there? */
static int
take_batch(RsWork *work, int limit, bool free_only, RsProgress *progress)
{
	RsEngine *engine = work->engine;
	int sought = Max(limit, RS_MAX_CANDIDATES);
	RsCandidate *candidates = palloc(sizeof(RsCandidate) * sought);
	int count = rs_claim_candidates(engine, free_only, candidates, sought);

	rs_trace_step(engine, RS_STEP_CLAIM, psprintf("%d", count));
	rs_engine_commit(engine);
	*progress = take_candidates(work, candidates, count, limit);
	return count;
}

/* The head of some line; the others of these are found by the next claims. */
static RsProgress
take_from_lines(RsWork *work)
{
	RsProgress progress = RS_PROGRESS_NOTHING;
	RsCandidate candidate;

	for (int i = 0; i < RS_MAX_CANDIDATES && progress == RS_PROGRESS_NOTHING; i++)
	{
		if (!rs_find_line_candidate(work->engine, &candidate))
			return RS_PROGRESS_NOTHING;
		progress = take_candidates(work, &candidate, 1, 1);
	}
	work->engine->was_blocked |= progress == RS_PROGRESS_NOTHING;
	return progress;
}

/* As for one row: the second look leaves out what is held elsewhere. */
static RsProgress
deliver_advisory(RsWork *work)
{
	RsEngine *engine = work->engine;
	int limit = Min(claim_limit(engine), RS_MAX_GUARDS);
	RsProgress progress;

	if (take_batch(work, limit, false, &progress) > 0 && progress == RS_PROGRESS_NOTHING)
	{
		if (rs_table_lines(&engine->subscription->queue.table) != RS_LINES_NONE)
			progress = take_from_lines(work);
		else
		{
			rs_engine_begin(engine, RS_ISOLATION_READ_COMMITTED);
			(void) take_batch(work, limit, true, &progress);
		}
	}
	if (progress == RS_PROGRESS_NOTHING)
		return rs_nothing_claimed(engine);
	return progress == RS_PROGRESS_DELIVERED ? handle_apart(work) : progress;
}

/* ------------------------------------------------------------------ the forms */

RsProgress
rs_deliver_batch(RsWork *work)
{
	switch (rs_table_form(&work->engine->subscription->queue.table))
	{
		case RS_FORM_LEASE:
			return deliver_lease(work);
		case RS_FORM_ADVISORY_LOCK:
			return deliver_advisory(work);
		default:
			return deliver_row_lock(work);
	}
}
