/*-------------------------------------------------------------------------
 *
 * deliver.c
 *	  One delivery, from its claim to its settlement: the row lock lane, and
 *	  what all lanes have in common.
 *
 * The row lock lane of the contract:
 *
 *		BEGIN, CLAIM, SAVEPOINT ruststream_claim, HANDLER
 *		  ack:              SETTLE, COMMIT
 *		  anything else:    ROLLBACK TO SAVEPOINT ruststream_claim, SETTLE, COMMIT
 *
 * The lock that the claim takes on the row is held by the transaction until
 * its end, so nobody else can have the row between the claim and the commit,
 * and a crash at any point gives it back as it was.  Several deliveries that
 * share claim and commit are in shared_commit.c, the other lanes in lane_lease.c
 * and lane_advisory.c.  What follows the handler is not decided
 * here: rs_settle says which steps remain and which statements settle, and we
 * walk through them.
 *
 * Errors are told apart by where they surface.  In the handler (or the
 * deferred constraints of its writes, which we fire before the settlement) they
 * are the handler's: its writes are undone, the policy settles.  In the
 * settlement or the COMMIT everything is rolled back, and the row is settled as failed
 * in a transaction of its own.  Transient failures (serialization, deadlock)
 * roll back everything wherever they surface, since a savepoint cannot be
 * trusted to rescue such a transaction, and the row is claimed anew.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/delivery.h"

#include "access/xact.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

/* ------------------------------------------------------------------- handling */

static void
handler_error_context(void *arg)
{
	const RsWork *work = arg;

	if (work->batch != NULL)
		errcontext("delivery of %d rows, from row %s on, by subscription \"%s\"",
				   work->delivery.rows, work->delivery.id_text, work->engine->subscription->name);
	else
		errcontext("delivery of row %s (attempt " INT64_FORMAT ") by subscription \"%s\"",
				   work->delivery.id_text, work->delivery.attempt,
				   work->engine->subscription->name);
}

/* Are the handler's writes kept, now that it has answered? */
static bool
keeps_writes(const RsWork *work)
{
	return work->answer.outcome == RS_OUTCOME_ACK ||
		   !work->engine->subscription->policy.transactional;
}

/* The handler's run: it may be cancelled, here and nowhere else. */
static void
run_handler(void *arg)
{
	RsWork *work = arg;

	work->answer = rs_handler_call(work->engine->subscription, &work->delivery);
	if (keeps_writes(work))
		rs_fire_deferred_constraints();
}

static void
run_procedure(void *arg)
{
	RsWork *work = arg;

	work->answer = rs_procedure_call(work->engine->subscription, &work->delivery);
}

/* Decode the row and call the handler, in the current transaction. */
static void
call_handler(RsWork *work)
{
	RsEngine *engine = work->engine;
	ErrorContextCallback callback = {.callback = handler_error_context, .arg = work};
	int nest_level;

	callback.previous = error_context_stack;
	error_context_stack = &callback;
	/* Whatever the handler sets, role and search_path included, ends with it. */
	nest_level = NewGUCNestLevel();

	PushActiveSnapshot(GetTransactionSnapshot());
	work->stage = RS_STAGE_DECODE;
	rs_handler_decode(engine->subscription, &work->delivery);
	work->stage = RS_STAGE_HANDLER;
	rs_trace_step(engine, RS_STEP_HANDLER, "");
	rs_run_handler(engine->subscription, run_handler, work);
	PopActiveSnapshot();

	AtEOXact_GUC(false, nest_level);
	error_context_stack = callback.previous;
	RS_FAILPOINT("after_handler");
}

void
rs_keep_error(RsWork *work)
{
	MemoryContextSwitchTo(work->engine->delivery_context);
	work->error = CopyErrorData();
	FlushErrorState();
	if (work->error->sqlerrcode == ERRCODE_INVALID_TRANSACTION_TERMINATION &&
		work->error->hint == NULL)
		work->error->hint = pstrdup("A handler works inside its delivery's transaction, which is "
									"not its to end: return an outcome instead.");
}

void
rs_keep_settlement_error(RsWork *work)
{
	ErrorData *error;

	MemoryContextSwitchTo(work->engine->delivery_context);
	error = CopyErrorData();
	FlushErrorState();
	/* Where a failure could not be settled, both are worth knowing. */
	if (work->error != NULL && work->stage == RS_STAGE_SETTLE && error->detail == NULL)
		error->detail = psprintf("The delivery had failed before: %s", work->error->message);
	work->error = error;
}

void
rs_raise_what_is_no_failure(const RsWork *work)
{
	if (work->error != NULL &&
		(rs_is_transient(work->error) ||
		 (work->engine->session->rethrows_cancel && rs_is_session_cancel(work->error))))
		ReThrowError(work->error);
}

void
rs_handle_below_savepoint(RsWork *work)
{
	RsEngine *engine = work->engine;
	ResourceOwner save_owner = CurrentResourceOwner;
	TimestampTz start = GetCurrentTimestamp();

	rs_trace_step(engine, RS_STEP_SAVEPOINT, "");
	BeginInternalSubTransaction("ruststream_claim");
	MemoryContextSwitchTo(engine->delivery_context);
	RS_FAILPOINT("after_savepoint");

	PG_TRY();
	{
		call_handler(work);
	}
	PG_CATCH();
	{
		rs_keep_error(work);
	}
	PG_END_TRY();

	if (work->error == NULL && keeps_writes(work))
	{
		ReleaseCurrentSubTransaction();
		CurrentResourceOwner = save_owner;
	}
	MemoryContextSwitchTo(engine->delivery_context);
	rs_note_handling_time(engine, GetCurrentTimestamp() - start);
	rs_raise_what_is_no_failure(work);
}

/*
 * The row was read in another transaction than the one it is handled in.  The
 * table may have been altered in between, and the row would be taken for one
 * of its new shape: then the delivery begins again.  For nothing less, though,
 * since the claim has counted the attempt: somebody's first temporary table, or an
 * ANALYZE of the queue, makes the subscription look outdated, too.
 */
static void
lock_queue(RsEngine *engine)
{
	LockRelationOid(engine->subscription->queue.relid, AccessShareLock);
	if (rs_engine_is_outdated(engine) && !rs_queue_has_its_shape(&engine->subscription->queue))
		ereport(
			ERROR, errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			errmsg("the queue of subscription \"%s\" changed between its claim and its delivery",
				   engine->subscription->name));
}

/*
 * In the delivery's transaction.  After an error it is left to the ROLLBACK
 * that is the next step.
 */
static void
handle_in_transaction(RsWork *work)
{
	RsEngine *engine = work->engine;

	rs_engine_begin(engine, engine->subscription->queue.table.isolation);
	RS_FAILPOINT("after_begin_delivery");
	PG_TRY();
	{
		lock_queue(engine);
		call_handler(work);
	}
	PG_CATCH();
	{
		rs_keep_error(work);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(engine->delivery_context);
}

/*
 * The same for a procedure, which may end its transaction and begin others: none
 * of ours around it, and no connection to SPI.
 */
static void
call_procedure(RsWork *work)
{
	RsEngine *engine = work->engine;
	ErrorContextCallback callback = {.callback = handler_error_context, .arg = work};

	callback.previous = error_context_stack;
	error_context_stack = &callback;
	work->stage = RS_STAGE_DECODE;
	engine->session->begin_procedure();
	MemoryContextSwitchTo(engine->delivery_context);
	lock_queue(engine);
	rs_handler_decode(engine->subscription, &work->delivery);
	work->stage = RS_STAGE_HANDLER;
	rs_trace_step(engine, RS_STEP_HANDLER, "");
	rs_run_handler(engine->subscription, run_procedure, work);
	engine->session->commit_procedure();
	error_context_stack = callback.previous;
	RS_FAILPOINT("after_handler");
}

/* In a transaction of its own, which is no step of the lane. */
static void
handle_apart(RsWork *work)
{
	const RsSession *session = work->engine->session;
	bool is_procedure = work->engine->subscription->handler.is_procedure;

	PG_TRY();
	{
		if (is_procedure)
			call_procedure(work);
		else
		{
			session->begin(RS_ISOLATION_DEFAULT);
			MemoryContextSwitchTo(work->engine->delivery_context);
			lock_queue(work->engine);
			call_handler(work);
			session->drop_cursors();
			session->commit();
		}
	}
	PG_CATCH();
	{
		rs_keep_error(work);
		if (is_procedure)
			session->rollback_procedure();
		else
			session->rollback();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(work->engine->delivery_context);
}

void
rs_handle_claimed(RsWork *work)
{
	if (work->engine->subscription->policy.transactional)
		handle_in_transaction(work);
	else
		handle_apart(work);
	rs_raise_what_is_no_failure(work);
}

/* ----------------------------------------------------------------- finishing */

/* Can the handler have inserted into the queue without our knowing? */
static bool
was_apart(const RsEngine *engine)
{
	return rs_table_form(&engine->subscription->queue.table) != RS_FORM_ROW_LOCK &&
		   !engine->subscription->policy.transactional;
}

bool
rs_take_step(RsWork *work, rs_step step)
{
	RsEngine *engine = work->engine;

	switch (step)
	{
		case RS_STEP_ROLLBACK_TO:
			rs_trace_step(engine, step, "");
			RollbackAndReleaseCurrentSubTransaction();
			MemoryContextSwitchTo(engine->delivery_context);
			CurrentResourceOwner = work->outer_owner;
			RS_FAILPOINT("after_rollback_to");
			return true;
		case RS_STEP_ROLLBACK:
			rs_engine_rollback(engine);
			RS_FAILPOINT("after_rollback");
			return true;
		case RS_STEP_BEGIN:
			rs_engine_begin(engine, RS_ISOLATION_READ_COMMITTED);
			return true;
		case RS_STEP_SETTLE:
			if (!rs_settle_delivery(engine, &work->delivery, &work->settlement, work->answer.delay))
				return false;
			rs_record_failure(work);
			return true;
		case RS_STEP_COMMIT:
			RS_FAILPOINT("before_commit");
			if (work->delivery.key != NULL)
				rs_end_user_code(engine->session);
			if (!rs_key_is_held(&work->delivery))
				return false;
			work->inserted |= rs_wake_is_marked(engine->subscription->queue.relid);
			rs_engine_commit(engine);
			RS_FAILPOINT("after_commit");
			return true;
		case RS_STEP_UNLOCK:
			rs_unlock_key(engine, &work->delivery);
			RS_FAILPOINT("after_unlock");
			return true;
		default:
			elog(ERROR, "unexpected step after a handler: %s", rs_step_word(step));
			return false;
	}
}

void
rs_decide(RsWork *work)
{
	const RsSubscription *subscription = work->engine->subscription;

	work->cause = work->error == NULL              ? RS_CAUSE_ANSWER
				  : work->stage == RS_STAGE_DECODE ? RS_CAUSE_DECODE_ERROR
												   : RS_CAUSE_ERROR;
	work->settlement =
		rs_settle(&subscription->queue.table, &subscription->policy, work->cause,
				  work->answer.outcome, work->answer.has_delay, work->delivery.attempt);
	work->stage = RS_STAGE_SETTLE;
	work->inserted = was_apart(work->engine);
	if (work->settlement.lacks_dead_letter)
		work->error = rs_lacking_dead_letter(work->engine, work->answer.reason);
	rs_set_reason(work);
}

void
rs_conclude(RsWork *work)
{
	RsEngine *engine = work->engine;

	rs_warn_of_lacks(engine, &work->settlement, &work->delivery);
	if (work->error != NULL)
	{
		rs_report_failure(work);
		rs_hold_if_hot(engine, &work->delivery, &work->settlement);
	}
	if (work->cause == RS_CAUSE_DECODE_ERROR)
		rs_stats_count(RS_COUNT_DECODE_FAILED);
	rs_count_settlement(work->settlement.outcome, work->error != NULL);
}

void
rs_finish(RsWork *work)
{
	RsEngine *engine = work->engine;

	rs_decide(work);
	for (const rs_step *step = work->settlement.steps; *step != RS_STEP_END; step++)
	{
		if (rs_take_step(work, *step))
			continue;
		rs_engine_rollback(engine);
		rs_lose(work);
		return;
	}
	rs_forget_lease(&work->delivery);

	if (work->settlement.operation == RS_OP_ACK && engine->subscription->queue.wake &&
		!work->inserted && !work->delivery.was_delayed)
		rs_claim_mark(engine, &work->delivery);
	rs_forget_transient_failures(engine, work->delivery.id_text);
	rs_conclude(work);
}

/* --------------------------------------------------------------- the lanes */

RsProgress
rs_nothing_claimed(RsEngine *engine)
{
	return rs_claim_held_until(engine) != 0 ? RS_PROGRESS_HELD : RS_PROGRESS_NOTHING;
}

bool
rs_has_claimed(RsEngine *engine, int rows, RsProgress *progress)
{
	char suffix[12];

	pg_ltoa(rows, suffix);
	rs_trace_step(engine, RS_STEP_CLAIM, suffix);
	if (rows == 0)
	{
		rs_engine_commit(engine);
		*progress = rs_nothing_claimed(engine);
		return false;
	}
	RS_FAILPOINT("after_claim");
	/* Only now, with the table locked by the claim, it can change no more. */
	if (rs_engine_is_outdated(engine))
	{
		rs_engine_rollback(engine);
		*progress = RS_PROGRESS_TRANSIENT;
		return false;
	}
	return true;
}

void
rs_begin_work(RsWork *work)
{
	/* Where there was one row there may be more: have a neighbour look. */
	rs_wake_idle(false);
	if (!work->engine->is_alone)
		rs_wake_neighbour(work->engine->subscription->queue.relid);

	rs_stats_delivery_begin(&work->delivery);
	rs_stats_state(RS_WORKER_DELIVERING);
}

RsProgress
rs_deliver_row_lock(RsWork *work)
{
	RsEngine *engine = work->engine;
	RsProgress progress;
	int claimed;

	RS_FAILPOINT("after_begin");
	claimed = rs_claim(engine, &work->delivery, 1);
	work->outer_owner = CurrentResourceOwner;
	if (!rs_has_claimed(engine, claimed, &progress))
		return progress;

	rs_begin_work(work);
	rs_handle_below_savepoint(work);
	rs_finish(work);
	return RS_PROGRESS_DELIVERED;
}

/* Deliver in the form that the queue has; a transaction has begun. */
static RsProgress
deliver_one(RsWork *work)
{
	MemoryContextSwitchTo(work->engine->delivery_context);
	if (work->engine->subscription->batch_size > 0)
		return rs_deliver_batch(work);
	switch (rs_table_form(&work->engine->subscription->queue.table))
	{
		case RS_FORM_LEASE:
			return rs_deliver_leases(work);
		case RS_FORM_ADVISORY_LOCK:
			return rs_deliver_advisory(work);
		default:
			return rs_deliver_sharing(work);
	}
}

RsProgress
rs_deliver(RsEngine *engine)
{
	RsWork unclaimed = {.engine = engine};
	RsWork *claimed = rs_next_claimed(engine);
	RsWork *const work = claimed != NULL ? claimed : &unclaimed;
	volatile RsProgress progress = RS_PROGRESS_QUIET;
	volatile bool lost = false;

	if (engine->rest_until != 0 && engine->rest_until > GetCurrentTimestamp())
		return RS_PROGRESS_HELD;
	engine->rest_until = 0;
	MemoryContextReset(engine->delivery_context);
	engine->delivered = 1;
	engine->next_due = 0;
	engine->was_blocked = false;
	engine->is_alone = false;
	rs_stats_state(RS_WORKER_CLAIMING);

	PG_TRY();
	{
		if (claimed != NULL)
			progress = rs_deliver_claimed(work);
		else if (rs_engine_begin_delivery(engine))
			progress = deliver_one(work);
	}
	PG_CATCH();
	{
		rs_keep_settlement_error(work);
		rs_engine_rollback(engine);
		lost = true;
	}
	PG_END_TRY();

	if (lost)
		progress = work->batch != NULL ? rs_recover_batch(work) : rs_recover(work);
	if (progress == RS_PROGRESS_TRANSIENT)
		rs_lines_again(engine);
	if (progress == RS_PROGRESS_DELIVERED && work->sharing == 0 && engine->alone > 0)
		engine->alone--;
	rs_stats_delivery_end();
	rs_go_on(work, progress, lost);
	/* Still in the delivery's memory, which the next delivery gives back. */
	if (progress == RS_PROGRESS_DELIVERED || progress == RS_PROGRESS_TRANSIENT)
		engine->session->clean();
	MemoryContextSwitchTo(engine->context);
	return progress;
}
