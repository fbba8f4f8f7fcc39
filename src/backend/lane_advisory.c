/*-------------------------------------------------------------------------
 *
 * lane_advisory.c
 *	  The advisory lock lane.
 *
 *		BEGIN, CLAIM, COMMIT; LOCK; BEGIN, TAKE, COMMIT; BEGIN(level), HANDLER
 *		  ack:              SETTLE, COMMIT; UNLOCK
 *		  anything else:    ROLLBACK; BEGIN, SETTLE, COMMIT; UNLOCK
 *
 * The claim only looks for candidates: rows that are due, with the key each of
 * them asks for.  A key belongs to the session, from before the row is taken
 * until after its settlement has been committed, so of all the rows with one
 * key, in whatever tables, one is in work at a time, and the next holder of a
 * key sees what the one before it has committed.  Between the look and the lock
 * another holder may have settled the row: so it is taken only while it is
 * still claimable, which counts the attempt.
 *
 * When the session ends its keys are free, and the row is due again at once.  A
 * handler that unlocks its own key has lost the row: we look before each COMMIT.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/delivery.h"

#include "catalog/pg_collation.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"

/* ---------------------------------------------------------------------- keys */

/* The lock of pg_advisory_lock(hashtextextended(key, 0)). */
static LOCKTAG
key_tag(const char *key)
{
	LOCKTAG tag;
	uint64 hash = (uint64) DatumGetInt64(DirectFunctionCall2Coll(
		hashtextextended, C_COLLATION_OID, CStringGetTextDatum(key), Int64GetDatum(0)));

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, (uint32) (hash >> 32), (uint32) hash, 1);
	return tag;
}

bool
rs_lock_key(const RsEngine *engine, RsDelivery *delivery, char *key)
{
	LOCKTAG tag = key_tag(key);
	bool locked = LockAcquire(&tag, ExclusiveLock, true, true) != LOCKACQUIRE_NOT_AVAIL;

	rs_trace_step(engine, RS_STEP_LOCK, locked ? "" : "0");
	if (locked)
		delivery->key = key;
	return locked;
}

bool
rs_lock_key_again(const RsEngine *engine, RsDelivery *delivery)
{
	return delivery->key != NULL && rs_lock_key(engine, delivery, delivery->key);
}

bool
rs_key_is_held(const RsDelivery *delivery)
{
	LOCKTAG tag;

	if (delivery->key == NULL)
		return true;
	tag = key_tag(delivery->key);
	return rs_lock_held_by_me(&tag, ExclusiveLock);
}

void
rs_unlock_key(const RsEngine *engine, RsDelivery *delivery)
{
	LOCKTAG tag;

	if (delivery->key == NULL)
		return;
	rs_trace_step(engine, RS_STEP_UNLOCK, "");
	tag = key_tag(delivery->key);
	if (rs_lock_held_by_me(&tag, ExclusiveLock))
		(void) LockRelease(&tag, ExclusiveLock, true);
	delivery->key = NULL;
}

/* ------------------------------------------------------------------ the lane */

static int
find_candidates(RsWork *work, bool free_only, RsCandidate *candidates)
{
	RsEngine *engine = work->engine;
	int count = rs_claim_candidates(engine, free_only, candidates, RS_MAX_CANDIDATES);

	rs_trace_step(engine, RS_STEP_CLAIM, psprintf("%d", count));
	rs_engine_commit(engine);
	return count;
}

/* Take the row whose key is locked, unless it has been settled meanwhile. */
static bool
take(RsWork *work, const RsCandidate *candidate)
{
	RsEngine *engine = work->engine;
	bool taken;

	RS_FAILPOINT("after_lock");
	rs_engine_begin(engine, RS_ISOLATION_READ_COMMITTED);
	work->delivery.id = candidate->id;
	taken = rs_claim_take(engine, &work->delivery);
	rs_trace_step(engine, RS_STEP_TAKE, taken ? "" : "0");
	return taken;
}

/* Was this candidate's key asked for already? */
static bool
is_known(const RsCandidate *candidates, int number)
{
	for (int i = 0; i < number; i++)
	{
		if (strcmp(candidates[i].key, candidates[number].key) == 0)
			return true;
	}
	return false;
}

/* Lock and take the first candidate that can be had. */
static RsProgress
take_one(RsWork *work, const RsCandidate *candidates, int count)
{
	RsEngine *engine = work->engine;

	for (int i = 0; i < count; i++)
	{
		if (is_known(candidates, i) || !rs_lock_key(engine, &work->delivery, candidates[i].key))
			continue;
		if (!take(work, &candidates[i]))
			rs_engine_commit(engine);
		else if (rs_engine_is_outdated(engine))
		{
			rs_engine_rollback(engine);
			rs_unlock_key(engine, &work->delivery);
			return RS_PROGRESS_TRANSIENT;
		}
		else
		{
			rs_engine_commit(engine);
			RS_FAILPOINT("after_take");
			return RS_PROGRESS_DELIVERED;
		}
		rs_unlock_key(engine, &work->delivery);
	}
	return RS_PROGRESS_NOTHING;
}

/*
 * The claim's transaction has begun, at READ COMMITTED.  The first look does
 * not ask who holds which key, which costs a walk through all locks of the
 * server, nor for the rows' own locks: it is the second that leaves out what is
 * held elsewhere, where none of the first rows could be had.
 */
RsProgress
rs_deliver_advisory(RsWork *work)
{
	RsEngine *engine = work->engine;
	RsCandidate candidates[RS_MAX_CANDIDATES];
	int count = find_candidates(work, false, candidates);
	RsProgress progress = take_one(work, candidates, count);

	if (progress == RS_PROGRESS_NOTHING && count > 0)
	{
		rs_engine_begin(engine, RS_ISOLATION_READ_COMMITTED);
		count = find_candidates(work, true, candidates);
		progress = take_one(work, candidates, count);
	}
	if (progress == RS_PROGRESS_NOTHING && rs_claim_held_until(engine) != 0)
		return RS_PROGRESS_HELD;
	if (progress != RS_PROGRESS_DELIVERED)
		return progress;

	work->stage = RS_STAGE_DECODE;
	rs_begin_work(work);
	rs_handle_claimed(work);
	rs_finish(work);
	return RS_PROGRESS_DELIVERED;
}
