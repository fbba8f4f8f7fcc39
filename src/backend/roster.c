/*-------------------------------------------------------------------------
 *
 * roster.c
 *	  The workers of a supervisor: taking over those it finds, starting and
 *	  stopping them, and noticing that they have left.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "utils/memutils.h"

#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/shared.h"
#include "backend/supervisor.h"

RsSupervised *
rs_supervised_find(List *subscriptions, int32 id)
{
	ListCell *cell;

	foreach (cell, subscriptions)
	{
		RsSupervised *subscription = lfirst(cell);

		if (subscription->id == id)
			return subscription;
	}
	return NULL;
}

/*
 * The workers that another supervisor has left behind.  Those it registered and
 * that have not attached yet may not any more: we could not tell if they never
 * come.
 */
void
rs_roster_adopt(List *subscriptions)
{
	MemoryContext save = MemoryContextSwitchTo(TopMemoryContext);

	for (int i = 0; i < rs_shared->worker_slots; i++)
	{
		RsSlot *slot = &rs_shared->slot[i];
		RsSupervised *subscription = NULL;
		RsWorkerProcess *worker = palloc0(sizeof(RsWorkerProcess));

		LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
		if (slot->cookie != 0 && slot->database == MyDatabaseId)
		{
			if (slot->pid == 0)
				rs_slot_free(slot);
			else if ((subscription = rs_supervised_find(subscriptions, slot->subscription)) == NULL)
				kill(slot->pid, SIGTERM);
			else
			{
				worker->slot = slot;
				worker->cookie = slot->cookie;
				worker->owner = slot->owner;
				worker->started_at = slot->attached_at;
				worker->attached = true;
				worker->stopping = (pg_atomic_read_u32(&slot->stop) != 0);
			}
		}
		LWLockRelease(rs_shared->lock);

		if (worker->slot == NULL)
			pfree(worker);
		else
			subscription->workers = lappend(subscription->workers, worker);
	}
	MemoryContextSwitchTo(save);
}

/* Tell a worker to leave, after the delivery that it has in work. */
static void
stop_worker(RsWorkerProcess *worker)
{
	worker->stopping = true;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	if (worker->slot->cookie == worker->cookie)
	{
		if (worker->slot->pid == 0)
			rs_slot_free(worker->slot);
		else
		{
			pg_atomic_write_u32(&worker->slot->stop, 1);
			SetLatch(worker->slot->latch);
		}
	}
	LWLockRelease(rs_shared->lock);
}

/* The extension is gone: nothing that its workers do could be settled. */
void
rs_roster_terminate(void)
{
	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < rs_shared->worker_slots; i++)
	{
		RsSlot *slot = &rs_shared->slot[i];

		if (slot->cookie == 0 || slot->database != MyDatabaseId)
			continue;
		if (slot->pid == 0)
			rs_slot_free(slot);
		else
			kill(slot->pid, SIGTERM);
	}
	LWLockRelease(rs_shared->lock);
}

static bool
is_gone(RsWorkerProcess *worker)
{
	RsSlot *slot = worker->slot;
	pid_t pid;
	bool stopped = !worker->attached && worker->handle != NULL &&
				   GetBackgroundWorkerPid(worker->handle, &pid) == BGWH_STOPPED;
	bool gone;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	gone = (slot->cookie != worker->cookie);
	if (!gone && slot->pid != 0)
		worker->attached = true;
	else if (!gone && stopped)
	{
		/* It was refused or could not be forked, and never attached. */
		rs_slot_free(slot);
		gone = true;
	}
	LWLockRelease(rs_shared->lock);
	return gone;
}

/*
 * Remove the workers that have left, and decide when others may follow.  True
 * if there were any.
 */
bool
rs_roster_reap(RsSupervised *subscription)
{
	TimestampTz now = GetCurrentTimestamp();
	bool left = false;
	ListCell *cell;

	foreach (cell, subscription->workers)
	{
		RsWorkerProcess *worker = lfirst(cell);
		bool explained;
		bool failed;

		if (!is_gone(worker))
			continue;

		/*
		 * A worker that gave a reason, or did not even live a second, has
		 * failed; several that fail together count once.  Any other one was
		 * terminated, and is replaced at once.
		 */
		explained = rs_stats_is_broken(subscription->id);
		failed = !worker->stopping && (explained || now - worker->started_at < USECS_PER_SEC);
		if (failed && !explained && subscription->wanted > 0)
			rs_stats_broken(subscription->id,
							"its worker ended as soon as it had started: see the server's log");
		if (failed && now >= subscription->next_start)
		{
			/* One that had worked for a while begins a row of failures of its own. */
			if (now - worker->started_at > rs_restart_delay(subscription->failures) * 1000)
				subscription->failures = 0;
			subscription->failures++;
			subscription->next_start =
				TimestampTzPlusMilliseconds(now, rs_restart_delay(subscription->failures));
		}
		else if (!failed && !worker->stopping)
			subscription->failures = 0;

		left = true;
		if (worker->handle != NULL)
			pfree(worker->handle);
		pfree(worker);
		subscription->workers = foreach_delete_current(subscription->workers, cell);
	}
	return left;
}

/* The workers that stay. */
int
rs_roster_count(const RsSupervised *subscription)
{
	ListCell *cell;
	int count = 0;

	foreach (cell, subscription->workers)
	{
		if (!((RsWorkerProcess *) lfirst(cell))->stopping)
			count++;
	}
	return count;
}

/* Stop workers that are too many, or connected as somebody who is the owner no more. */
void
rs_roster_stop_surplus(RsSupervised *subscription)
{
	int surplus = rs_roster_count(subscription) - subscription->wanted;
	ListCell *cell;

	foreach (cell, subscription->workers)
	{
		RsWorkerProcess *worker = lfirst(cell);

		if (worker->stopping)
			continue;
		if (surplus > 0 || worker->owner != subscription->owner)
		{
			stop_worker(worker);
			surplus--;
		}
	}
}

/* Start a worker; false: there is no slot. */
bool
rs_roster_start(RsSupervised *subscription)
{
	BackgroundWorker process = {0};
	RsWorkerArgs args = {0};
	RsWorkerProcess *worker;
	RsSlot *slot;
	uint64 cookie;
	MemoryContext save;
	int length;

	slot = rs_slot_allocate(MyDatabaseId, subscription->id, subscription->name, subscription->owner,
							subscription->queue, &cookie);
	if (slot == NULL)
		return false;

	args.database = MyDatabaseId;
	args.owner = subscription->owner;
	args.subscription = subscription->id;
	args.slot = slot - rs_shared->slot;
	args.cookie = cookie;

	length = snprintf(process.bgw_name, BGW_MAXLEN, "ruststream worker: ");
	strlcpy(process.bgw_name + length, subscription->name, BGW_MAXLEN - length);
	strlcpy(process.bgw_type, "ruststream worker", BGW_MAXLEN);
	strlcpy(process.bgw_library_name, "ruststream", BGW_MAXLEN);
	strlcpy(process.bgw_function_name, "rs_worker_main", BGW_MAXLEN);
	process.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	process.bgw_start_time = BgWorkerStart_RecoveryFinished;
	process.bgw_restart_time = BGW_NEVER_RESTART;
	process.bgw_notify_pid = MyProcPid;
	StaticAssertStmt(sizeof(args) <= BGW_EXTRALEN, "arguments must fit");
	memcpy(process.bgw_extra, &args, sizeof(args));

	save = MemoryContextSwitchTo(TopMemoryContext);
	worker = palloc0(sizeof(RsWorkerProcess));
	if (RegisterDynamicBackgroundWorker(&process, &worker->handle))
	{
		worker->slot = slot;
		worker->cookie = cookie;
		worker->owner = subscription->owner;
		worker->started_at = GetCurrentTimestamp();
		subscription->workers = lappend(subscription->workers, worker);
		MemoryContextSwitchTo(save);
		return true;
	}
	MemoryContextSwitchTo(save);
	pfree(worker);

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	if (slot->cookie == cookie)
		rs_slot_free(slot);
	LWLockRelease(rs_shared->lock);
	return false;
}
