/*-------------------------------------------------------------------------
 *
 * deliver.c
 *	  One delivery, from its claim to its settlement.
 *
 * This is the row lock lane of the contract:
 *
 *		BEGIN, CLAIM, SAVEPOINT ruststream_claim, HANDLER
 *		  ack:              SETTLE, COMMIT
 *		  anything else:    ROLLBACK TO SAVEPOINT ruststream_claim, SETTLE, COMMIT
 *
 * The lock that the claim takes on the row is held by the transaction until
 * its end, so nobody else can have the row between the claim and the commit,
 * and a crash at any point gives it back as it was.  What follows the handler
 * is not decided here: rs_settle says which steps remain and which statements
 * settle, and we walk through them.
 *
 * Errors are told apart by where they surface.  In the handler (or the
 * deferred constraints of its writes, which we fire inside the savepoint) they
 * are the handler's: the savepoint undoes it, the policy settles.  In the
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
#include "commands/trigger.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

/* ------------------------------------------------------------------- handling */

static void
handler_error_context(void *arg)
{
	const RsWork *work = arg;

	errcontext("delivery of row %s (attempt " INT64_FORMAT ") by subscription \"%s\"",
			   work->delivery.id_text, work->delivery.attempt, work->engine->subscription->name);
}

/*
 * Decode the row and call the handler, below a savepoint.  Ends with the
 * savepoint released after an ack, and open after any other answer and after
 * an error, which is left in work->error.
 */
static void
handle(RsWork *work)
{
	RsEngine *engine = work->engine;
	ResourceOwner save_owner = CurrentResourceOwner;
	ErrorContextCallback callback = {.callback = handler_error_context, .arg = work};

	rs_trace_step(engine, RS_STEP_SAVEPOINT, "");
	BeginInternalSubTransaction("ruststream_claim");
	MemoryContextSwitchTo(engine->delivery_context);
	RS_FAILPOINT("after_savepoint");

	callback.previous = error_context_stack;
	error_context_stack = &callback;

	PG_TRY();
	{
		/* Whatever the handler sets, role and search_path included, ends with it. */
		int nest_level = NewGUCNestLevel();

		PushActiveSnapshot(GetTransactionSnapshot());
		work->stage = RS_STAGE_DECODE;
		rs_handler_decode(engine->subscription, &work->delivery);
		work->stage = RS_STAGE_HANDLER;
		rs_trace_step(engine, RS_STEP_HANDLER, "");
		work->answer = rs_handler_call(engine->subscription, &work->delivery);
		PopActiveSnapshot();
		if (work->answer.outcome == RS_OUTCOME_ACK)
			rs_fire_deferred_constraints();
		AtEOXact_GUC(false, nest_level);
		RS_FAILPOINT("after_handler");
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(engine->delivery_context);
		work->error = CopyErrorData();
		FlushErrorState();
		if (work->error->sqlerrcode == ERRCODE_INVALID_TRANSACTION_TERMINATION &&
			work->error->hint == NULL)
			work->error->hint =
				pstrdup("A handler works inside its delivery's transaction, which is "
						"not its to end: return an outcome instead.");
	}
	PG_END_TRY();

	error_context_stack = callback.previous;
	if (work->error == NULL && work->answer.outcome == RS_OUTCOME_ACK)
	{
		ReleaseCurrentSubTransaction();
		CurrentResourceOwner = save_owner;
	}
	MemoryContextSwitchTo(engine->delivery_context);
}

/*
 * What remains of the lane after the handler, as rs_settle has decided it.
 * Called with the savepoint released (an ack) or open (anything else).
 */
static void
finish(RsWork *work, ResourceOwner outer_owner)
{
	RsEngine *engine = work->engine;
	const RsSubscription *subscription = engine->subscription;
	rs_cause cause = work->error == NULL              ? RS_CAUSE_ANSWER
					 : work->stage == RS_STAGE_DECODE ? RS_CAUSE_DECODE_ERROR
													  : RS_CAUSE_ERROR;
	rs_settlement settlement =
		rs_settle(&subscription->queue.table, &subscription->policy, cause, work->answer.outcome,
				  work->answer.has_delay, work->delivery.attempt);
	bool inserted = false;

	work->stage = RS_STAGE_SETTLE;
	if (settlement.lacks_dead_letter)
		work->error = rs_lacking_dead_letter(engine, work->answer.reason);

	for (const rs_step *step = settlement.steps; *step != RS_STEP_END; step++)
	{
		switch (*step)
		{
			case RS_STEP_ROLLBACK_TO:
				rs_trace_step(engine, *step, "");
				RollbackAndReleaseCurrentSubTransaction();
				MemoryContextSwitchTo(engine->delivery_context);
				CurrentResourceOwner = outer_owner;
				RS_FAILPOINT("after_rollback_to");
				break;
			case RS_STEP_SETTLE:
				rs_settle_delivery(engine, &work->delivery, &settlement, work->answer.delay);
				rs_record_failure(work);
				break;
			case RS_STEP_COMMIT:
				RS_FAILPOINT("before_commit");
				inserted = rs_wake_is_marked(subscription->queue.relid);
				rs_engine_commit(engine);
				RS_FAILPOINT("after_commit");
				break;
			default:
				elog(ERROR, "unexpected step after a handler: %s", rs_step_word(*step));
		}
	}

	if (settlement.operation == RS_OP_ACK && subscription->queue.wake && !inserted &&
		!work->delivery.was_delayed)
		rs_claim_mark(engine, &work->delivery);
	rs_forget_transient_failures(engine);
	rs_warn_of_lacks(engine, &settlement, &work->delivery);
	if (work->error != NULL)
	{
		rs_report_failure(work);
		rs_hold_if_hot(engine, &work->delivery, &settlement);
	}
	if (cause == RS_CAUSE_DECODE_ERROR)
		rs_stats_count(RS_COUNT_DECODE_FAILED);
	rs_count_settlement(settlement.outcome, work->error != NULL);
}

/* --------------------------------------------------------------- the lane */

static RsProgress
deliver_one(RsWork *work)
{
	RsEngine *engine = work->engine;
	ResourceOwner outer_owner = CurrentResourceOwner;
	bool claimed;

	MemoryContextSwitchTo(engine->delivery_context);
	RS_FAILPOINT("after_begin");
	claimed = rs_claim(engine, &work->delivery);
	rs_trace_step(engine, RS_STEP_CLAIM, claimed ? "1" : "0");
	if (!claimed)
	{
		rs_engine_commit(engine);
		return rs_claim_held_until(engine) != 0 ? RS_PROGRESS_HELD : RS_PROGRESS_NOTHING;
	}
	RS_FAILPOINT("after_claim");
	/* Only now, with the table locked by the claim, it can change no more. */
	if (engine->generation != rs_catalog_generation())
	{
		rs_engine_rollback(engine);
		return RS_PROGRESS_TRANSIENT;
	}

	/* Where there was one row there may be more: have a neighbour look. */
	rs_wake_idle(false);
	rs_wake_neighbour(engine->subscription->queue.relid);

	rs_stats_delivery_begin(&work->delivery);
	rs_stats_state(RS_WORKER_DELIVERING);
	handle(work);
	/*
	 * What cannot be left to the savepoint: raised again outside it, so that
	 * everything is rolled back.
	 */
	if (work->error != NULL &&
		(rs_is_transient(work->error) ||
		 (work->error->sqlerrcode == ERRCODE_QUERY_CANCELED && engine->session->rethrows_cancel)))
		ReThrowError(work->error);
	finish(work, outer_owner);
	return RS_PROGRESS_DELIVERED;
}

RsProgress
rs_deliver(RsEngine *engine)
{
	RsWork work = {.engine = engine};
	volatile RsProgress progress = RS_PROGRESS_QUIET;
	volatile bool lost = false;
	ErrorData *error;

	MemoryContextReset(engine->delivery_context);
	rs_stats_state(RS_WORKER_CLAIMING);

	PG_TRY();
	{
		if (rs_engine_begin_delivery(engine))
			progress = deliver_one(&work);
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(engine->delivery_context);
		error = CopyErrorData();
		FlushErrorState();
		/* Where a failure could not be settled, both are worth knowing. */
		if (work.error != NULL && work.stage == RS_STAGE_SETTLE && error->detail == NULL)
			error->detail = psprintf("The delivery had failed before: %s", work.error->message);
		work.error = error;
		rs_engine_rollback(engine);
		lost = true;
	}
	PG_END_TRY();

	if (lost)
		progress = rs_recover(&work);
	rs_stats_delivery_end();
	/* Still in the delivery's memory, which the next delivery gives back. */
	if (progress == RS_PROGRESS_DELIVERED || progress == RS_PROGRESS_TRANSIENT)
		engine->session->clean();
	MemoryContextSwitchTo(engine->context);
	return progress;
}
