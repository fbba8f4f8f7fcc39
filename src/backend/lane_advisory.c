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
#include "backend/delivery.h"

/* ---------------------------------------------------------------------- keys */

static bool
lock_name(const char *name)
{
	RsGuard guard = rs_guard_of_key(name);

	return rs_guard_try(&guard, true);
}

static bool
holds_name(const char *name)
{
	RsGuard guard = rs_guard_of_key(name);

	return rs_guard_is_held(&guard);
}

static void
unlock_name(const char *name)
{
	RsGuard guard = rs_guard_of_key(name);

	rs_guard_release(&guard, true);
}

bool
rs_lock_key(RsEngine *engine, RsDelivery *delivery, const RsCandidate *candidate)
{
	bool locked = candidate->guard == NULL || lock_name(candidate->guard);

	engine->was_blocked |= !locked;
	if (locked && !lock_name(candidate->key))
	{
		if (candidate->guard != NULL)
			unlock_name(candidate->guard);
		locked = false;
	}

	rs_trace_step(engine, RS_STEP_LOCK, locked ? "" : "0");
	if (locked)
	{
		delivery->key = candidate->key;
		delivery->guard = candidate->guard;
	}
	return locked;
}

bool
rs_lock_key_again(const RsEngine *engine, RsDelivery *delivery)
{
	bool locked;

	if (delivery->key == NULL)
		return false;
	locked = delivery->guard == NULL || holds_name(delivery->guard) || lock_name(delivery->guard);
	locked = locked && (holds_name(delivery->key) || lock_name(delivery->key));
	rs_trace_step(engine, RS_STEP_LOCK, locked ? "" : "0");
	return locked;
}

bool
rs_key_is_held(const RsDelivery *delivery)
{
	return delivery->key == NULL ||
		   (holds_name(delivery->key) && (delivery->guard == NULL || holds_name(delivery->guard)));
}

void
rs_unlock_key(const RsEngine *engine, RsDelivery *delivery)
{
	if (delivery->key == NULL)
		return;
	rs_trace_step(engine, RS_STEP_UNLOCK, "");
	unlock_name(delivery->key);
	if (delivery->guard != NULL)
		unlock_name(delivery->guard);
	delivery->key = delivery->guard = NULL;
}

/* ------------------------------------------------------------------ the lane */

#define RS_LINE_CANDIDATES 4

static int
find_candidates(RsWork *work, bool free_only, RsCandidate *candidates)
{
	RsEngine *engine = work->engine;
	/* Where the first few are of busy keys, so may be all: the lines are looked at instead. */
	int limit = rs_table_lines(&engine->subscription->queue.table) != RS_LINES_NONE
					? RS_LINE_CANDIDATES
					: RS_MAX_CANDIDATES;
	int count = rs_claim_candidates(engine, free_only, candidates, limit);

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
	work->delivery.has_line = candidate->has_line;
	work->delivery.line = candidate->line;
	taken = rs_claim_take(engine, &work->delivery);
	rs_trace_step(engine, RS_STEP_TAKE, taken ? "" : "0");
	return taken;
}

static bool
is_same(const char *a, const char *b)
{
	return a != NULL && b != NULL && strcmp(a, b) == 0;
}

bool
rs_is_known_candidate(const RsCandidate *candidates, int number)
{
	for (int i = 0; i < number; i++)
	{
		/* Of one partition key only the first may go. */
		if (is_same(candidates[i].key, candidates[number].key) ||
			is_same(candidates[i].guard, candidates[number].guard))
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
		if (rs_is_known_candidate(candidates, i) ||
			!rs_lock_key(engine, &work->delivery, &candidates[i]))
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

bool
rs_find_line_candidate(RsEngine *engine, RsCandidate *candidate)
{
	bool found;

	rs_engine_begin(engine, RS_ISOLATION_READ_COMMITTED);
	found = rs_lines_candidate(engine, candidate);
	rs_trace_step(engine, RS_STEP_CLAIM, found ? "1" : "0");
	rs_engine_commit(engine);
	return found;
}

/*
 * None of the first rows could be had, and of one partition key there may be a
 * million: look at one line after the other.  Bounded, for a line whose guard is
 * free may be one whose key is not.
 */
static RsProgress
take_from_lines(RsWork *work)
{
	RsEngine *engine = work->engine;

	for (int i = 0; i < RS_MAX_CANDIDATES; i++)
	{
		RsCandidate candidate;
		RsProgress progress;

		if (!rs_find_line_candidate(engine, &candidate))
			return RS_PROGRESS_NOTHING;
		progress = take_one(work, &candidate, 1);
		if (progress != RS_PROGRESS_NOTHING)
			return progress;
	}
	engine->was_blocked = true;
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

	if (progress == RS_PROGRESS_NOTHING && count > 0 &&
		rs_table_lines(&engine->subscription->queue.table) != RS_LINES_NONE)
		progress = take_from_lines(work);
	else if (progress == RS_PROGRESS_NOTHING && count > 0)
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
