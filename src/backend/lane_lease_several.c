/*-------------------------------------------------------------------------
 *
 * lane_lease_several.c
 *	  Several leases in one claim: the lease lane, for subscriptions with
 *	  deliveries_per_commit.
 *
 *		BEGIN, CLAIM n, COMMIT
 *		of each row, as if it had been claimed alone:
 *			BEGIN(level), HANDLER, SETTLE, COMMIT .. (lane_lease.c)
 *		of those that are not begun in time:
 *			BEGIN, UNCLAIM, COMMIT
 *
 * What is shared is the claim and its commit, and nothing else: each row has a token
 * and an extension of its own from the claim on, each delivery its own transaction, and
 * whatever becomes of one concerns no other.  So rs_deliver still delivers one row a
 * call; the claim is a call of its own, and those behind it take up one row after
 * the other (RsEngine.claimed).  Before its turn a row is read again, since it may
 * have been changed, delayed or ended meanwhile.
 *
 * Rows whose turn does not come are let go, as if they had not been claimed: their
 * leases are ended and their attempts taken back, guarded by their tokens.  So
 *
 * - after max_commit_wait of work since the claim;
 * - where a row comes back at once, for then it is the next in claim order;
 * - where a row could not be settled, or has to be claimed anew, and where the next is
 *	 not to be delivered any more;
 * - where something that the subscription was loaded from has changed;
 * - where this process has been told to leave.
 *
 * A claim takes no more rows than would be delivered in time, going by what deliveries
 * have needed of late, and than leases can be had for.
 *
 * Where it is not safe
 * --------------------
 *
 * A claim counts the attempt of each of its rows, and a process that is killed takes
 * nothing back: then an attempt is counted of rows that no handler has seen.  With a
 * cap on attempts a handler that kills its process could carry its neighbours along
 * to the dead letter.  So a subscription with max_attempts is refused (load.c).
 *
 * Of a line (a FIFO group, a partition key) one row is leased at a time, so that a
 * claim takes one of each.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/delivery.h"
#include "backend/lease.h"

#include "catalog/pg_type_d.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"

/*
 * A row may be locked for a moment by somebody who has no claim to it: by an extension
 * that has been cancelled, or by a claim that took it for free, and has found that it
 * is not.  So those that could not be had are tried again after so many milliseconds.
 */
static const int waits[] = {1, 10, 50};

/* ----------------------------------------------------------------- letting go */

/* Was it claimed, and has its turn not come? */
static bool
is_not_begun(const RsWork *work)
{
	return work->delivery.is_leased && work->stage == RS_STAGE_CLAIM;
}

int
rs_unclaim_rows(RsWork *works, int count)
{
	const RsEngine *engine = works[0].engine;
	Datum *ids = palloc(sizeof(Datum) * count * 2);
	Datum *tokens = palloc(sizeof(Datum) * count * 2);
	int number = 0;
	RsValues values;

	for (int i = 0; i < count; i++)
	{
		const RsDelivery *delivery = &works[i].delivery;

		if (!is_not_begun(&works[i]))
			continue;
		ids[number] = ids[number + 1] = delivery->id;
		tokens[number] = TimestampTzGetDatum(delivery->token);
		tokens[number + 1] = TimestampTzGetDatum(delivery->announced);
		number += 2;
	}
	if (number == 0)
		return 0;

	rs_values_init(&values);
	rs_value_set(
		&values, RS_PARAM_IDS,
		PointerGetDatum(construct_array(ids, number, engine->subscription->queue.type[RS_ROLE_ID],
										engine->id_length, engine->id_byval, engine->id_align)),
		0);
	rs_value_set(
		&values, RS_PARAM_TOKENS,
		PointerGetDatum(construct_array(tokens, number, TIMESTAMPTZOID, sizeof(TimestampTz),
										FLOAT8PASSBYVAL, TYPALIGN_DOUBLE)),
		0);
	return (int) rs_execute(engine->plans, RS_OP_UNCLAIM, &values);
}

/* In a transaction of its own; returns how many rows are let go. */
static int
unclaim_now(RsEngine *engine)
{
	char suffix[12];
	int released;

	rs_engine_begin(engine, RS_ISOLATION_READ_COMMITTED);
	released = rs_unclaim_rows(engine->claimed, engine->claimed_count);
	pg_ltoa(released, suffix);
	rs_trace_step(engine, RS_STEP_UNCLAIM, suffix);
	RS_FAILPOINT("after_unclaim");
	rs_engine_commit(engine);
	return released;
}

/* What keeps rows from being let go; returned where it is the caller's cancel. */
static ErrorData *
report_unclaim_error(RsEngine *engine, int rows)
{
	ErrorData *error;

	MemoryContextSwitchTo(engine->delivery_context);
	error = CopyErrorData();
	FlushErrorState();
	rs_engine_rollback(engine);
	if (engine->session->rethrows_cancel && rs_is_session_cancel(error))
		return error;
	ereport(engine->session->trace_level == NOTICE ? WARNING : LOG, errcode(error->sqlerrcode),
			errmsg("subscription \"%s\": %d rows that were claimed and not begun could not be let "
				   "go: %s",
				   engine->subscription->name, rows, error->message),
			errdetail("They are due when their leases end, and an attempt is counted."),
			errhidestmt(true), errhidecontext(true));
	return NULL;
}

/* Have them extended no further: how many are they? */
static int
stop_leases(RsEngine *engine)
{
	int rows = 0;

	for (int i = 0; i < engine->claimed_count; i++)
	{
		if (!is_not_begun(&engine->claimed[i]))
			continue;
		rs_stop_lease(&engine->claimed[i].delivery);
		rows++;
	}
	return rows;
}

/*
 * So many of these rows should be there still.  Returns the caller's cancel, if that is
 * what keeps them from being let go.
 */
static ErrorData *
try_to_unclaim(RsEngine *engine, int rows, int expected)
{
	ErrorData *volatile cancel = NULL;

	PG_TRY();
	{
		int released = unclaim_now(engine);

		for (int i = 0; i < (int) lengthof(waits) && released < expected; i++)
		{
			(void) WaitLatch(MyLatch, WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, waits[i],
							 rs_wait_event_hold());
			released += unclaim_now(engine);
		}
	}
	PG_CATCH();
	{
		cancel = report_unclaim_error(engine, rows);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(engine->delivery_context);
	return cancel;
}

/* The same as rs_unclaim, where so many of the rows may be gone. */
static void
unclaim(RsEngine *engine, int gone)
{
	ErrorData *cancel = NULL;
	int rows;

	if (engine->claimed == NULL)
		return;
	rows = stop_leases(engine);
	if (rows > 0)
		cancel = try_to_unclaim(engine, rows, rows - gone);
	for (int i = engine->begun; i < engine->claimed_count; i++)
		rs_forget_lease(&engine->claimed[i].delivery);
	engine->claimed = NULL;
	if (cancel != NULL)
		ReThrowError(cancel);
}

void
rs_unclaim(RsEngine *engine)
{
	unclaim(engine, 0);
}

/* ------------------------------------------------------------- one after another */

RsWork *
rs_next_claimed(const RsEngine *engine)
{
	return engine->claimed != NULL ? &engine->claimed[engine->begun] : NULL;
}

/*
 * Is the row to be delivered still, and by what we know of its subscription?  A
 * transaction says, which is no step of the lane.
 */
static bool
is_still_due(RsWork *work)
{
	RsEngine *engine = work->engine;
	bool is_due;

	rs_subscription_check_level(engine->subscription);
	engine->session->begin(RS_ISOLATION_READ_COMMITTED);
	engine->nest_level = NewGUCNestLevel();
	MemoryContextSwitchTo(engine->delivery_context);
	is_due = !rs_engine_is_outdated(engine) && rs_claim_refresh(engine, &work->delivery);
	rs_end_user_code(engine->session);
	AtEOXact_GUC(false, engine->nest_level);
	engine->session->commit();
	MemoryContextSwitchTo(engine->delivery_context);
	return is_due;
}

RsProgress
rs_deliver_claimed(RsWork *work)
{
	RsEngine *engine = work->engine;
	bool leaves_mark = engine->begun == 0 || engine->has_mark;

	MemoryContextSwitchTo(engine->delivery_context);
	engine->has_mark = false;
	if (!is_still_due(work))
		return RS_PROGRESS_TRANSIENT;

	engine->begun++;
	work->stage = RS_STAGE_DECODE;
	rs_deliver_leased(work);
	/* The next claim may go on behind it only where none of those before it came back. */
	engine->has_mark &= leaves_mark;
	return RS_PROGRESS_DELIVERED;
}

/* Does the row come back at once? */
static bool
comes_back(const RsWork *work)
{
	return work->settlement.outcome == RS_OUTCOME_RETRY && work->error == NULL;
}

static bool
may_go_on(const RsEngine *engine)
{
	TimestampTz claimed_at = engine->claimed[0].delivery.claimed_at;

	return engine->held_count < RS_MAX_HELD && engine->rest_until == 0 &&
		   GetCurrentTimestamp() - claimed_at < engine->subscription->max_commit_wait &&
		   !rs_slot_stop_requested();
}

void
rs_go_on(RsWork *work, RsProgress progress, bool failed)
{
	RsEngine *engine = work->engine;
	bool is_delivered = progress == RS_PROGRESS_DELIVERED && !failed;

	if (engine->claimed == NULL || progress == RS_PROGRESS_CLAIMED)
		return;
	/* What a delivery takes is all that is between two of them, commits included. */
	if (is_delivered)
		rs_note_handling_time(engine,
							  (GetCurrentTimestamp() - engine->claimed[0].delivery.claimed_at) /
								  engine->begun);
	/* The row that comes next, and might come back again and again, is claimed alone. */
	if (work->stage != RS_STAGE_CLAIM && (!is_delivered || comes_back(work)))
		engine->alone = 1;
	else if (is_delivered && engine->begun < engine->claimed_count && may_go_on(engine))
		return;
	unclaim(engine, work->stage == RS_STAGE_CLAIM);
}

/* ------------------------------------------------------------------- the claim */

/* They are this session's, and what took them is committed: rs_next_claimed finds them. */
static void
hold(RsEngine *engine, const RsDelivery *deliveries, int count)
{
	RsWork *works = MemoryContextAllocZero(engine->commit_context, sizeof(RsWork) * count);

	for (int i = 0; i < count; i++)
	{
		works[i].engine = engine;
		works[i].delivery = deliveries[i];
	}
	rs_engine_commit(engine);
	engine->claimed = works;
	engine->claimed_count = count;
	engine->begun = 0;
	rs_hold_leases(works, count);
	rs_lease_unreserve();
}

RsProgress
rs_deliver_leases(RsWork *work)
{
	RsEngine *engine = work->engine;
	int limit = rs_claim_limit_in_time(engine);
	RsDelivery *deliveries;
	RsProgress progress;
	int claimed;

	/* No more rows than can be extended. */
	if (limit > 1)
		limit = rs_lease_reserve(limit);
	if (limit == 1)
		return rs_deliver_lease(work);

	MemoryContextReset(engine->commit_context);
	MemoryContextSwitchTo(engine->commit_context);
	deliveries = palloc0(sizeof(RsDelivery) * limit);
	claimed = rs_claim(engine, deliveries, limit);
	MemoryContextSwitchTo(engine->delivery_context);
	if (!rs_has_claimed(engine, claimed, &progress))
	{
		rs_lease_unreserve();
		return progress;
	}
	hold(engine, deliveries, claimed);
	RS_FAILPOINT("after_claim_commit");
	return RS_PROGRESS_CLAIMED;
}
