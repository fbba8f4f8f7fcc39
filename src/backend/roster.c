/*-------------------------------------------------------------------------
 *
 * roster.c
 *	  The workers of a supervisor: taking over those it finds, starting and
 *	  stopping them, and noticing that they have left.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

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

/* The list, and what is in it, live as long as the supervisor. */
static void
add_worker(RsSupervised *subscription, const RsChild *child)
{
	MemoryContext save = MemoryContextSwitchTo(TopMemoryContext);
	RsChild *worker = palloc(sizeof(RsChild));

	*worker = *child;
	subscription->workers = lappend(subscription->workers, worker);
	MemoryContextSwitchTo(save);
}

void
rs_roster_adopt(List *subscriptions)
{
	for (int i = 0; i < rs_shared->worker_slots; i++)
	{
		RsSlot *slot = &rs_shared->slot[i];
		RsSupervised *subscription;
		int32 id;
		RsChild found;
		bool adopted;

		LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
		adopted = rs_child_adopt(&found, &slot->entry);
		id = slot->subscription;
		LWLockRelease(rs_shared->lock);
		if (!adopted)
			continue;

		subscription = rs_supervised_find(subscriptions, id);
		if (subscription != NULL)
			add_worker(subscription, &found);
		else
			rs_child_terminate(&found);
	}
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
		RsChild *worker = lfirst(cell);
		bool explained;
		bool failed;

		if (!rs_child_is_gone(worker))
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
		rs_child_forget(worker);
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
		if (!((RsChild *) lfirst(cell))->stopping)
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
		RsChild *worker = lfirst(cell);

		if (worker->stopping)
			continue;
		if (surplus > 0 || worker->owner != subscription->owner)
		{
			rs_child_tell(worker, true);
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
	RsChild worker;
	RsSlot *slot;
	uint64 cookie;
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
	strlcpy(process.bgw_function_name, "rs_worker_main", BGW_MAXLEN);
	StaticAssertStmt(sizeof(args) <= BGW_EXTRALEN, "arguments must fit");
	memcpy(process.bgw_extra, &args, sizeof(args));

	if (!rs_child_register(&worker, &slot->entry, cookie, subscription->owner, &process))
		return false;
	add_worker(subscription, &worker);
	return true;
}
