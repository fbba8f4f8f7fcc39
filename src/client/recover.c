/*-------------------------------------------------------------------------
 *
 * recover.c
 *	  When a delivery's transaction is lost: claim anew, or settle afresh.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <stdlib.h>
#include <string.h>

/* So many transient failures in a row make an ordinary one. */
#define TRANSIENT_LIMIT 10

static bool
is_there(void *arg, const rs_value *columns, int count)
{
	(void) columns;
	(void) count;
	*(bool *) arg = true;
	return false;
}

/*
 * Settle and record in one fresh transaction.  The row was free in between, or may be by now, so
 * it is looked for again first; where somebody else has it its settlement is theirs.
 * settlement may be NULL: record the failure alone; or not even that.
 */
static rs_result
settle_once(rs_work *work, const rs_settlement *settlement, bool records, rs_afresh *came)
{
	ruststream_worker *worker = work->worker;
	rs_session *session = worker->handle->session;
	rs_value values[RS_PARAM_COUNT];
	bool is_ours = false;
	rs_result result = rs_work_begin(work, RS_FOR_US);

	*came = RS_AFRESH_TAKEN;
	if (result == RS_DONE && settlement != NULL &&
		(work->key == NULL || session->driver->key_is_held(session, work->key)))
	{
		rs_values_of(work, values);
		result =
			rs_plan_run(session, &worker->plan, RS_OP_RECLAIM, 0, values, is_there, &is_ours, NULL);
	}
	if (result == RS_DONE && is_ours)
	{
		switch (rs_settle_row(work, settlement, &result))
		{
			case RS_SETTLED:
				*came = RS_AFRESH_SETTLED;
				break;
			case RS_SETTLED_LOST:
			case RS_SETTLED_FAILED:
				break;
		}
	}
	if (result == RS_DONE && records)
		result = rs_record_failure(work);
	if (result == RS_DONE)
		result = rs_work_commit(work);
	if (result != RS_DONE)
		rs_work_rollback(work);
	return result;
}

/* In place of one that is lost. */
bool
rs_have_new_session(ruststream_worker *worker)
{
	worker->is_loaded = false; /* what else the session is to have it gets when it is taken up */
	if (rs_reconnect(worker->handle) != RUSTSTREAM_OK)
		return false;
	worker->handle->session->table = &worker->plan.table;
	worker->handle->session->held = &worker->held;
	return true;
}

/* Its keys went with the old one; a lease is still ours. */
static bool
have_new_session(rs_work *work)
{
	work->key = NULL;
	work->partition = NULL;
	return rs_have_new_session(work->worker);
}

/* Transient failures and a lost connection are waited out, for a while. */
rs_afresh
rs_settle_afresh(rs_work *work, const rs_settlement *settlement, bool records)
{
	ruststream_worker *worker = work->worker;
	rs_afresh came = RS_AFRESH_TAKEN;
	rs_result result = RS_TRANSIENT;

	rs_stop_lease(work);
	for (int i = 0; i < TRANSIENT_LIMIT && result != RS_DONE; i++)
	{
		if ((result == RS_LOST || worker->handle->session == NULL) && !have_new_session(work))
			return RS_AFRESH_FAILED;
		result = settle_once(work, settlement, records, &came);
		if (result == RS_FAILED)
			return RS_AFRESH_FAILED;
	}
	return result == RS_DONE ? came : RS_AFRESH_FAILED;
}

void
rs_give_back(rs_work *work)
{
	ruststream_worker *worker = work->worker;

	if (work->has_row && work->token[0] != '\0')
	{
		rs_policy uncapped = worker->plan.policy;
		rs_settlement settlement;

		uncapped.max_attempts = 0;
		settlement = rs_settle(&worker->plan.table, &uncapped, RS_CAUSE_ANSWER, RS_OUTCOME_RETRY,
							   false, work->attempt);
		(void) rs_settle_afresh(work, &settlement, false);
	}
	rs_unlock_keys(work);
}

/*
 * Settle a delivery whose transaction has been rolled back: by its policy; where that fails too, by
 * letting the row come back; and where not even that can be written, the row stays as it was.
 * Whatever comes back at once this worker leaves alone for the retry delay.
 */
void
rs_settle_by_policy(rs_work *work, rs_cause cause)
{
	ruststream_worker *worker = work->worker;
	rs_policy uncapped = worker->plan.policy;
	rs_settlement settlement = rs_settle(&worker->plan.table, &worker->plan.policy, cause,
										 RS_OUTCOME_ACK, false, work->attempt);
	rs_afresh came = rs_settle_afresh(work, &settlement, true);

	if (came == RS_AFRESH_FAILED)
	{
		uncapped.max_attempts = 0;
		settlement = rs_settle(&worker->plan.table, &uncapped, RS_CAUSE_ANSWER,
							   rs_default_on_error(&worker->plan.table), false, work->attempt);
		came = rs_settle_afresh(work, &settlement, true);
	}
	if (came == RS_AFRESH_FAILED)
		(void) rs_settle_afresh(work, NULL, true);
	if (came == RS_AFRESH_FAILED || settlement.outcome == RS_OUTCOME_RETRY)
		rs_hold(work);
	rs_unlock_keys(work);
	rs_report(work);
	rs_count_settlement(work, came == RS_AFRESH_SETTLED ? &settlement : NULL);
	worker->transient_count = 0;
}

/* The same row as the last transient failure was of?  A claim's failures are of none. */
static bool
is_same_row(ruststream_worker *worker, const char *id)
{
	if (worker->transient_count == 0)
		return false;
	if (id == NULL || worker->transient_id == NULL)
		return id == worker->transient_id;
	return strcmp(id, worker->transient_id) == 0;
}

bool
rs_count_transient(ruststream_worker *worker, const char *id)
{
	worker->counts[RS_COUNT_TRANSIENT]++;
	if (!is_same_row(worker, id))
	{
		free(worker->transient_id);
		worker->transient_id = id != NULL ? strdup(id) : NULL;
		worker->transient_count = 0;
	}
	return ++worker->transient_count >= TRANSIENT_LIMIT;
}

static rs_progress
after_transient_failure(rs_work *work)
{
	ruststream_worker *worker = work->worker;
	const char *id = work->has_row ? work->delivery.id : NULL;

	if (!rs_count_transient(worker, id))
	{
		rs_give_back(work);
		return RS_PROGRESS_TRANSIENT;
	}
	if (id == NULL)
	{
		/* The claim itself, of no row in particular: whoever runs the worker is to know. */
		rs_give_back(work);
		worker->transient_count = 0;
		worker->handle->error = work->error;
		return RS_PROGRESS_BROKEN;
	}
	rs_settle_by_policy(work,
						work->stage == RS_STAGE_SETTLE ? RS_CAUSE_SETTLE_ERROR : RS_CAUSE_ERROR);
	return RS_PROGRESS_DELIVERED;
}

static bool
have_key(rs_session *session, const char *key)
{
	bool locked = false;

	return key == NULL || session->driver->key_is_held(session, key) ||
		   (session->driver->lock_key(session, key, &locked) == RS_DONE && locked);
}

/* Keys that the handler has released may be free still. */
static bool
lock_keys_again(rs_work *work)
{
	rs_session *session = work->worker->handle->session;
	bool locked;

	if (work->key == NULL || session == NULL)
		return false;
	locked = have_key(session, work->partition) && have_key(session, work->key);
	rs_worker_trace(work->worker, RS_STEP_LOCK, locked ? "" : "0");
	return locked;
}

void
rs_lose(rs_work *work)
{
	bool had_failed = work->has_error;
	char before[sizeof(work->error.message)];

	rs_worker_trace(work->worker, RS_STEP_LEASE_LOST, "");
	memcpy(before, work->error.message, sizeof(before));
	if (work->key == NULL)
		rs_work_fail(work, "55000",
					 "Another claim took the row after its lease had ended, or the handler has "
					 "changed it.",
					 "the lease was lost before the delivery was settled%s%.900s",
					 had_failed ? "; it had failed before: " : "", had_failed ? before : "");
	else
		rs_work_fail(work, "55000", "A handler must not release keys that it has not taken.",
					 "the lock on key \"%.200s\" was lost before the delivery was settled",
					 work->key);
	work->worker->counts[RS_COUNT_LEASE_LOST]++;
	if (lock_keys_again(work))
	{
		/* A failure like any other, so that the row comes to an end at its cap. */
		rs_settle_by_policy(work, RS_CAUSE_SETTLE_ERROR);
		return;
	}
	(void) rs_settle_afresh(work, NULL, true);
	/* It may be due at once, and be lost again. */
	rs_hold(work);
	rs_unlock_keys(work);
	rs_report(work);
	rs_count_settlement(work, NULL);
	work->worker->transient_count = 0;
}

rs_progress
rs_recover(rs_work *work, rs_result result)
{
	if (result == RS_LOST)
	{
		rs_stop_lease(work);
		if (have_new_session(work))
			return after_transient_failure(work);
		work->worker->handle->error = work->error;
		return RS_PROGRESS_BROKEN;
	}
	if (result == RS_TRANSIENT)
		return after_transient_failure(work);

	/* Without a row the subscription itself is at fault. */
	if (!work->has_row)
	{
		rs_unlock_keys(work);
		work->worker->handle->error = work->error;
		return RS_PROGRESS_BROKEN;
	}
	rs_settle_by_policy(work,
						work->stage == RS_STAGE_HANDLER ? RS_CAUSE_ERROR : RS_CAUSE_SETTLE_ERROR);
	return RS_PROGRESS_DELIVERED;
}
