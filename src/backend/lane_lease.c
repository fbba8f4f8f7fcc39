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
 * The deliveries whose rows this process has leased, where it is one of ours: when
 * it is told to go before they are settled, be it in the middle of their
 * settlement, the rows need not wait for their leases to end.  NULL once none is left.
 */
static RsWork *leased;
static int leased_count;
static int leased_held; /* so many of them are still leased */

/* Release a row: guarded, as ever, and without waiting for anybody. */
static void
release_row(const RsWork *work)
{
	RsEngine *engine = work->engine;
	RsValues values;

	rs_delivery_values(engine->subscription, &work->delivery, &values);
	if (rs_execute(engine->plans, RS_OP_RECLAIM, &values) == 1)
		(void) rs_execute(engine->plans, RS_OP_RELEASE, &values);
}

/* Of the columns that are written here. */
static bool
updates_run_code(Relation relation, const RsQueue *queue)
{
	const char *attempt = queue->table.column[RS_ROLE_ATTEMPT];

	return rs_update_runs_code(relation, queue->table.column[RS_ROLE_LOCKED_UNTIL]) ||
		   (attempt != NULL && rs_update_runs_code(relation, attempt));
}

/*
 * Release the rows whose leases were held, unless that would run anybody's code, since
 * nothing can interrupt a process that exits.
 */
static void
release_rows(RsWork *works, int count)
{
	const RsQueue *queue = &works[0].engine->subscription->queue;
	Relation relation;
	bool runs_code;

	if (!ConditionalLockRelationOid(queue->relid, RowExclusiveLock))
		return;
	relation = try_relation_open(queue->relid, NoLock);
	if (relation == NULL)
		return;
	runs_code = updates_run_code(relation, queue);
	for (int i = 0; i < count && !runs_code; i++)
	{
		if (works[i].delivery.is_leased && works[i].stage != RS_STAGE_CLAIM)
			release_row(&works[i]);
	}
	if (!runs_code)
		(void) rs_unclaim_rows(works, count);
	relation_close(relation, NoLock);
}

static void
release_at_exit(int code, Datum arg)
{
	RsWork *works = leased;
	int count = leased_count;
	const RsSession *session;

	if (works == NULL)
		return;
	AbortOutOfAnyTransaction();
	session = works[0].engine->session;
	for (int i = 0; i < count; i++)
		rs_stop_lease(&works[i].delivery);
	session->begin(RS_ISOLATION_READ_COMMITTED);
	release_rows(works, count);
	session->commit();
}

void
rs_hold_leases(RsWork *works, int count)
{
	static bool registered = false;
	const RsEngine *engine = works[0].engine;

	if (!registered)
		before_shmem_exit(release_at_exit, (Datum) 0);
	registered = true;

	/* First say so: what follows may fail, and the rows are leased already. */
	for (int i = 0; i < count; i++)
		works[i].delivery.holds_lease = works[i].delivery.is_leased = true;
	leased_held = count;
	leased_count = count;
	leased = engine->session->is_process ? works : NULL;
	for (int i = 0; i < count; i++)
		rs_lease_hold(engine->subscription, &works[i].delivery);
}

void
rs_stop_lease(RsDelivery *delivery)
{
	if (!delivery->holds_lease)
		return;
	rs_lease_stop(delivery);
	delivery->holds_lease = false;
}

void
rs_forget_lease(RsDelivery *delivery)
{
	if (!delivery->is_leased)
		return;
	delivery->is_leased = false;
	if (--leased_held == 0)
		leased = NULL;
}

void
rs_deliver_leased(RsWork *work)
{
	rs_begin_work(work);
	rs_handle_claimed(work);
	rs_finish(work);
}

/* The claim's transaction has begun, at READ COMMITTED. */
RsProgress
rs_deliver_lease(RsWork *work)
{
	RsEngine *engine = work->engine;
	RsProgress progress;

	(void) rs_lease_reserve(1);
	if (!rs_has_claimed(engine, rs_claim(engine, &work->delivery, 1), &progress))
		return progress;
	rs_engine_commit(engine);
	work->stage = RS_STAGE_DECODE;
	rs_hold_leases(work, 1);
	RS_FAILPOINT("after_claim_commit");

	rs_deliver_leased(work);
	rs_note_handling_time(engine, GetCurrentTimestamp() - work->delivery.claimed_at);
	return RS_PROGRESS_DELIVERED;
}
