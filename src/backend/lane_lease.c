/*-------------------------------------------------------------------------
 *
 * lane_lease.c
 *	  The lease lane.
 *
 *		BEGIN, CLAIM, COMMIT; BEGIN(level), HANDLER
 *		  ack:              SETTLE, COMMIT
 *		  anything else:    ROLLBACK; BEGIN, SETTLE, COMMIT
 *
 * The claim stamps the row with a time in its column locked_until, until which
 * nobody else claims it, and counts the attempt.  That time is the token of
 * this delivery: every settlement is guarded by it, in the statement itself, so
 * whoever has lost the row changes nothing, however late it comes.  A heartbeat
 * moves the token forward while the handler runs (lease.h); it is stopped before
 * a settlement, which then knows the two tokens that the row may hold.
 *
 * Where the subscription is not transactional the handler runs in a transaction of
 * its own, and every outcome is settled as after a ROLLBACK.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/delivery.h"
#include "backend/lease.h"

#include "access/relation.h"
#include "access/xact.h"
#include "storage/ipc.h"
#include "storage/lmgr.h"
#include "utils/rel.h"

/*
 * The delivery whose row this process has leased, where that is one of ours: when
 * it is told to go before the row is settled, be it in the middle of its
 * settlement, the row need not wait for its lease to end.
 */
static RsWork *leased;

/*
 * Release the row: guarded, as ever, and without waiting for anybody, or running
 * anybody's code, since nothing can interrupt a process that exits.
 */
static void
release_row(RsWork *work)
{
	RsEngine *engine = work->engine;
	Oid relid = engine->subscription->queue.relid;
	Relation relation;
	RsValues values;

	if (!ConditionalLockRelationOid(relid, RowExclusiveLock))
		return;
	relation = try_relation_open(relid, NoLock);
	if (relation == NULL)
		return;
	if (!rs_update_runs_code(relation,
							 engine->subscription->queue.table.column[RS_ROLE_LOCKED_UNTIL]))
	{
		rs_delivery_values(engine->subscription, &work->delivery, &values);
		if (rs_execute(engine->plans, RS_OP_RECLAIM, &values) == 1)
			(void) rs_execute(engine->plans, RS_OP_RELEASE, &values);
	}
	relation_close(relation, NoLock);
}

static void
release_at_exit(int code, Datum arg)
{
	RsWork *work = leased;

	if (work == NULL)
		return;
	AbortOutOfAnyTransaction();
	rs_stop_lease(&work->delivery);
	work->engine->session->begin(RS_ISOLATION_READ_COMMITTED);
	release_row(work);
	work->engine->session->commit();
}

static void
hold_lease(RsWork *work)
{
	static bool registered = false;
	const RsSubscription *subscription = work->engine->subscription;

	if (!registered)
		before_shmem_exit(release_at_exit, (Datum) 0);
	registered = true;

	/* First say so: what follows may fail, and the row is leased already. */
	work->delivery.holds_lease = true;
	work->delivery.is_leased = true;
	if (work->engine->session->is_process)
		leased = work;
	rs_lease_hold(subscription, &work->delivery, work->delivery.token, subscription->lease);
}

void
rs_stop_lease(RsDelivery *delivery)
{
	if (!delivery->holds_lease)
		return;
	rs_lease_stop(&delivery->token, &delivery->announced);
	delivery->holds_lease = false;
}

void
rs_forget_lease(RsDelivery *delivery)
{
	delivery->is_leased = false;
	leased = NULL;
}

/* The claim's transaction has begun, at READ COMMITTED. */
RsProgress
rs_deliver_lease(RsWork *work)
{
	RsEngine *engine = work->engine;
	bool claimed = rs_claim(engine, &work->delivery, 1) == 1;

	rs_trace_step(engine, RS_STEP_CLAIM, claimed ? "1" : "0");
	if (!claimed)
	{
		rs_engine_commit(engine);
		return rs_claim_held_until(engine) != 0 ? RS_PROGRESS_HELD : RS_PROGRESS_NOTHING;
	}
	RS_FAILPOINT("after_claim");
	if (rs_engine_is_outdated(engine))
	{
		rs_engine_rollback(engine);
		return RS_PROGRESS_TRANSIENT;
	}
	rs_engine_commit(engine);
	work->stage = RS_STAGE_DECODE;
	hold_lease(work);
	RS_FAILPOINT("after_claim_commit");

	rs_begin_work(work);
	rs_handle_claimed(work);
	rs_finish(work);
	return RS_PROGRESS_DELIVERED;
}
