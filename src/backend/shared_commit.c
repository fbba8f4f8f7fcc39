/*-------------------------------------------------------------------------
 *
 * shared_commit.c
 *	  Several deliveries in one commit: the row lock lane, for subscriptions with
 *	  deliveries_per_commit.
 *
 *		BEGIN, CLAIM n
 *		  of each row:      SAVEPOINT ruststream_claim, HANDLER,
 *							[ROLLBACK TO SAVEPOINT ruststream_claim,] SETTLE
 *		COMMIT
 *
 * Each delivery goes through the same steps as one that has its commit to
 * itself (deliver.c), so its attempt and its outcome are the same.  A handler that
 * fails undoes its own writes alone, for they are below its savepoint.  Whatever
 * fails outside of one (a settlement, the COMMIT) and whatever is transient
 * rolls back everything, as it does for one row; then as many deliveries go one
 * at a time, and whichever of them is at fault is settled by the rules for one.
 * Its neighbours have lost nothing but time: no attempt of theirs is counted.
 *
 * What a delivery does before its commit is seen by those behind it that share it.
 * So that they notice nothing else of each other, the commit comes early:
 *
 * - where the row that is next has been changed by a handler before it, which
 *	 would otherwise be handled as it was, or although it is gone;
 * - where a handler has left something in the session that only goes after the
 *	 transaction (a cursor, a temporary table);
 * - where something that the subscription was loaded from has changed, since the
 *	 next delivery must know it;
 * - where a constraint would have been deferred (see counts_on_deferral);
 * - where a row comes back at once, for then it is the next in claim order;
 *
 * and so that nobody else waits for, or pays for, what is shared:
 *
 * - after max_commit_wait of work;
 * - before more subtransactions are advertised than the server has room for,
 *	 for from then on every session would have to look them up on disk;
 * - where this process has been told to leave.
 *
 * The rows that were claimed and have not been begun are released by the commit
 * as they were.  A claim takes no more rows than would be delivered within these
 * bounds, going by what handlers have needed of late.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/delivery.h"

#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_constraint.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

/* Commit when so many subtransactions are advertised, the server having room for 64. */
#define RS_MAX_SUBTRANSACTIONS 60

/* A delivery that is settled, until the commit: then it is told of. */
typedef struct RsSettled
{
	RsDelivery *delivery;
	rs_cause cause;
	rs_settlement settlement;
	ErrorData *error; /* what is reported of it; NULL: it has not failed */
} RsSettled;

/* How many rows the next claim takes. */
static int
claim_limit(const RsEngine *engine)
{
	int limit = rs_claim_limit_in_time(engine);

	/* Two are tried in any case, or we would not learn of a handler that needs fewer now. */
	if (engine->subtransactions > 0)
		limit = Min(limit, Max(RS_MAX_SUBTRANSACTIONS / engine->subtransactions, 2));
	return limit;
}

/* --------------------------------------------------- when it must commit early */

/*
 * Is the row still as it was claimed?  It is locked by this transaction, so
 * nobody else can have changed it; what has, is a handler before it, or what
 * its settlement set off.
 */
static bool
is_as_claimed(const RsDelivery *delivery)
{
	ItemPointerData place = delivery->place;
	Relation relation = table_open(delivery->place_table, NoLock);
	TupleTableSlot *slot = table_slot_create(relation, NULL);
	bool found = table_tuple_fetch_row_version(relation, &place, SnapshotSelf, slot);

	ExecDropSingleTupleTableSlot(slot);
	table_close(relation, NoLock);
	return found;
}

/* Is there room for another delivery that has as many subtransactions as any before it? */
static bool
has_room(int most)
{
	int advertised = MyProc->subxidStatus.count;

	return advertised < RS_MAX_SUBTRANSACTIONS && advertised + most <= PGPROC_MAX_CACHED_SUBXIDS &&
		   !MyProc->subxidStatus.overflowed;
}

/*
 * Once deferred constraints have been fired, they are immediate for the rest of
 * the transaction, and nothing but a rollback undoes that.  So a handler that has
 * violated one may have counted on mending it before its end: its delivery
 * begins again, as the first of a transaction.
 */
static bool
counts_on_deferral(const ErrorData *error)
{
	Oid namespace = get_namespace_oid(error->schema_name, true);
	Oid relation = get_relname_relid(error->table_name, namespace);
	Oid constraint = get_relation_constraint_oid(relation, error->constraint_name, true);
	HeapTuple tuple = SearchSysCache1(CONSTROID, ObjectIdGetDatum(constraint));
	bool deferrable;

	if (!HeapTupleIsValid(tuple))
		return false;
	deferrable = ((Form_pg_constraint) GETSTRUCT(tuple))->condeferrable;
	ReleaseSysCache(tuple);
	return deferrable;
}

static bool
names_constraint(const ErrorData *error)
{
	return error != NULL &&
		   ERRCODE_TO_CATEGORY(error->sqlerrcode) == ERRCODE_INTEGRITY_CONSTRAINT_VIOLATION &&
		   error->schema_name != NULL && error->table_name != NULL &&
		   error->constraint_name != NULL;
}

/* --------------------------------------------------------------- one delivery */

/* What a report will say of an error, in the commit's memory. */
static ErrorData *
keep_for_report(const RsEngine *engine, const ErrorData *error)
{
	MemoryContext save;
	ErrorData *kept;

	if (error == NULL)
		return NULL;
	save = MemoryContextSwitchTo(engine->commit_context);
	kept = palloc0(sizeof(ErrorData));
	kept->sqlerrcode = error->sqlerrcode;
	kept->message = pstrdup(error->message ? error->message : "");
	kept->detail = error->detail ? pstrdup(error->detail) : NULL;
	kept->hint = error->hint ? pstrdup(error->hint) : NULL;
	MemoryContextSwitchTo(save);
	return kept;
}

/*
 * The steps between the handler and the COMMIT.  User code runs here, too
 * (triggers, and deferred ones, which must not be left to the next delivery):
 * what it sets ends here.
 */
static void
settle(RsWork *work, bool rolled_back)
{
	int nest_level = NewGUCNestLevel();

	rs_decide(work);
	for (const rs_step *step = work->settlement.steps; *step != RS_STEP_COMMIT; step++)
	{
		if (*step != RS_STEP_ROLLBACK_TO || !rolled_back)
			(void) rs_take_step(work, *step);
	}
	rs_fire_deferred_constraints();
	AtEOXact_GUC(false, nest_level);
}

/* Handle and settle one row; false: it is to be delivered as the first of a transaction. */
static bool
deliver_next(RsWork *work, RsDelivery *delivery, bool is_first, RsSettled *settled)
{
	RsEngine *engine = work->engine;
	bool rolled_back = false;

	MemoryContextReset(engine->delivery_context);
	MemoryContextSwitchTo(engine->delivery_context);
	work->delivery = *delivery;
	memset(&work->answer, 0, sizeof(work->answer));
	work->error = NULL;
	rs_stats_delivery_begin(&work->delivery);

	rs_handle_below_savepoint(work);
	if (!is_first && names_constraint(work->error))
	{
		(void) rs_take_step(work, RS_STEP_ROLLBACK_TO);
		rolled_back = true;
		if (counts_on_deferral(work->error))
		{
			engine->alone = 1;
			return false;
		}
	}
	settle(work, rolled_back);

	settled->delivery = delivery;
	settled->cause = work->cause;
	settled->settlement = work->settlement;
	settled->error = keep_for_report(engine, work->error);
	return true;
}

/* ----------------------------------------------------------------- the commit */

/* Does the row come back at once? */
static bool
comes_back(const RsSettled *settled)
{
	return settled->settlement.outcome == RS_OUTCOME_RETRY && settled->error == NULL;
}

/* Or is it, having failed, left alone by this worker? */
static bool
is_held(const RsSettled *settled)
{
	return settled->settlement.outcome == RS_OUTCOME_RETRY && settled->error != NULL;
}

/*
 * May the next row be delivered in the transaction of those before it?  So many
 * rows will be left alone once it is committed, and one of them had so many
 * subtransactions.
 */
static bool
may_go_on(const RsEngine *engine, const RsSettled *last, const RsDelivery *next, int held,
		  int most_subtransactions)
{
	return !comes_back(last) && held < RS_MAX_HELD &&
		   GetCurrentTimestamp() - next->claimed_at < engine->subscription->max_commit_wait &&
		   has_room(most_subtransactions) && !rs_slot_stop_requested() &&
		   engine->session->clean_within() && !rs_engine_is_outdated(engine) && is_as_claimed(next);
}

/* What is true once it is committed. */
static void
conclude(RsWork *work, const RsSettled *settled, int count)
{
	RsEngine *engine = work->engine;
	bool all_ended = true;

	for (int i = 0; i < count; i++)
		all_ended &= settled[i].settlement.operation == RS_OP_ACK;
	if (all_ended && engine->subscription->queue.wake && !work->inserted &&
		!settled[count - 1].delivery->was_delayed)
		rs_claim_mark(engine, settled[count - 1].delivery);

	for (int i = 0; i < count; i++)
	{
		rs_forget_transient_failures(engine, settled[i].delivery->id_text);
		work->delivery = *settled[i].delivery;
		work->cause = settled[i].cause;
		work->settlement = settled[i].settlement;
		work->error = settled[i].error;
		rs_conclude(work);
	}
}

/* So many rows are claimed, and more than one. */
static void
deliver_claimed(RsWork *work, RsDelivery *deliveries, int claimed)
{
	RsEngine *engine = work->engine;
	RsSettled *settled = MemoryContextAlloc(engine->commit_context, sizeof(RsSettled) * claimed);
	int count = 0;
	int held = engine->held_count;
	int most = 0; /* subtransactions of a delivery */
	int before;

	do
	{
		before = MyProc->subxidStatus.count;
		if (!deliver_next(work, &deliveries[count], count == 0, &settled[count]))
			break;
		most = Max(most, MyProc->subxidStatus.count - before);
		engine->subtransactions = most;
		held += is_held(&settled[count]);
		count++;
	} while (count < claimed &&
			 may_go_on(engine, &settled[count - 1], &deliveries[count], held, most));

	work->inserted = false;
	(void) rs_take_step(work, RS_STEP_COMMIT);
	engine->delivered = count;
	conclude(work, settled, count);
}

RsProgress
rs_deliver_sharing(RsWork *work)
{
	RsEngine *engine = work->engine;
	int limit = claim_limit(engine);
	RsDelivery *deliveries;
	RsProgress progress;
	int claimed;

	if (limit == 1)
		return rs_deliver_row_lock(work);

	RS_FAILPOINT("after_begin");
	MemoryContextReset(engine->commit_context);
	MemoryContextSwitchTo(engine->commit_context);
	deliveries = palloc0(sizeof(RsDelivery) * limit);
	claimed = rs_claim(engine, deliveries, limit);
	work->outer_owner = CurrentResourceOwner;
	MemoryContextSwitchTo(engine->delivery_context);
	if (!rs_has_claimed(engine, claimed, &progress))
		return progress;

	work->delivery = deliveries[0];
	rs_begin_work(work);
	if (claimed == 1)
	{
		rs_handle_below_savepoint(work);
		rs_finish(work);
		return RS_PROGRESS_DELIVERED;
	}
	/* The guards of lines are locks of this session. */
	if (engine->session->remember_claimed != NULL &&
		rs_table_lines(&engine->subscription->queue.table) != RS_LINES_NONE)
		engine->session->remember_claimed(engine->commit_context);
	work->sharing = claimed;
	deliver_claimed(work, deliveries, claimed);
	return RS_PROGRESS_DELIVERED;
}

void
rs_deliver_apart(RsWork *work)
{
	if (rs_is_transient(work->error) && work->stage == RS_STAGE_SETTLE)
		rs_stats_count(RS_COUNT_TRANSIENT);
	work->engine->alone = work->sharing;
}
