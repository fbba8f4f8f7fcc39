/*-------------------------------------------------------------------------
 *
 * wake.c
 *	  Who is waiting, and the wake-up at commit.
 *
 * A transaction that publishes notes the queue.  Once it has committed and
 * given back its locks it looks through the workers' slots for idle workers of
 * that queue and sets their latches: no lock is taken, so commits do not meet
 * here, and a worker that wakes finds nothing of the publisher in its way.
 *
 * No wake-up is lost: a worker raises its idle flag before it takes the
 * snapshot of its claim.  A row committed before that snapshot is claimed; the
 * publisher of a row committed later finds the flag.  Whoever lowers the flag
 * sets the latch, and only one can: a burst of commits wakes as many workers as
 * there are commits, and a worker that took a row wakes its neighbour, so that
 * many rows of one commit wake as many workers as they need.
 *
 * It is a hint all the same: what does not come by here is found when the
 * poll interval ends.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "commands/trigger.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/resowner.h"

#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/shared.h"

/* More queues than this in one transaction: wake the idle workers of all. */
#define MAX_MARKED 16

/* Distinct subscriptions woken for one queue; beyond, some wake in vain. */
#define MAX_WOKEN 32

/* What this transaction is to wake.  A rolled back savepoint leaves its marks. */
static Oid marked[MAX_MARKED];
static int nmarked = 0;
static bool marked_all = false;
static bool marked_supervisor = false;
static bool marked_pruner = false;
static List *marked_databases = NIL; /* in TopTransactionContext */

PG_FUNCTION_INFO_V1(rs_sql_wake_trigger);
PG_FUNCTION_INFO_V1(rs_sql_announce);

void
rs_wake_at_commit(Oid queue)
{
	if (marked_all)
		return;
	for (int i = 0; i < nmarked; i++)
	{
		if (marked[i] == queue)
			return;
	}
	if (nmarked < MAX_MARKED)
		marked[nmarked++] = queue;
	else
		marked_all = true;
}

bool
rs_wake_is_marked(Oid queue)
{
	for (int i = 0; i < nmarked; i++)
	{
		if (marked[i] == queue)
			return true;
	}
	return marked_all;
}

void
rs_wake_supervisor_at_commit(void)
{
	marked_supervisor = true;
}

void
rs_wake_pruner_at_commit(void)
{
	marked_pruner = true;
}

void
rs_announce_at_commit(Oid dboid)
{
	MemoryContext save = MemoryContextSwitchTo(TopTransactionContext);

	marked_databases = list_append_unique_oid(marked_databases, dboid);
	MemoryContextSwitchTo(save);
}

/*
 * Lower the idle flag of a worker and set its latch; false if somebody else
 * was faster.
 */
static bool
wake_slot(RsSlot *slot)
{
	uint32 idle = 1;

	if (!pg_atomic_compare_exchange_u32(&slot->idle, &idle, 0))
		return false;
	SetLatch(slot->entry.latch);
	return true;
}

/*
 * Wake one idle worker of each subscription that reads this queue: which of
 * its groups got a row is not known here.  InvalidOid: of every queue.
 */
static void
wake_queue(Oid queue)
{
	int32 woken[MAX_WOKEN];
	int nwoken = 0;

	/* The commit is in shared memory; only now look at the idle flags. */
	pg_memory_barrier();

	for (int i = 0; i < rs_shared->worker_slots; i++)
	{
		RsSlot *slot = &rs_shared->slot[i];
		int32 subscription;
		bool again = false;

		if (pg_atomic_read_u32(&slot->idle) == 0)
			continue;
		pg_read_barrier();
		if (slot->entry.database != MyDatabaseId || (OidIsValid(queue) && slot->queue != queue))
			continue;

		subscription = slot->subscription;
		for (int j = 0; j < nwoken && !again; j++)
			again = (woken[j] == subscription);
		if (again || !wake_slot(slot))
			continue;

		/* Did the slot change hands?  Then that wake-up was in vain. */
		if (slot->entry.database == MyDatabaseId && slot->subscription == subscription &&
			nwoken < MAX_WOKEN)
			woken[nwoken++] = subscription;
	}
}

void
rs_wake_neighbour(Oid queue)
{
	if (rs_shared == NULL || rs_my_slot == NULL)
		return;

	pg_memory_barrier();
	for (int i = 0; i < rs_shared->worker_slots; i++)
	{
		RsSlot *slot = &rs_shared->slot[i];

		if (slot == rs_my_slot || pg_atomic_read_u32(&slot->idle) == 0)
			continue;
		pg_read_barrier();
		if (slot->entry.database == MyDatabaseId && slot->queue == queue &&
			slot->subscription == rs_my_slot->subscription && wake_slot(slot))
			return;
	}
}

void
rs_wake_idle(bool idle)
{
	/* Sessions that drain do not wait for rows, so they cannot be woken. */
	if (rs_my_slot == NULL || !rs_slot_is_worker(rs_my_slot))
		return;
	if ((pg_atomic_read_u32(&rs_my_slot->idle) != 0) == idle)
		return;
	pg_atomic_write_u32(&rs_my_slot->idle, idle ? 1 : 0);

	/* The claim's snapshot is taken after the flag is up. */
	pg_memory_barrier();
}

/*
 * A latch is not enough to remember a wake-up: a wait for a lock during the
 * claim resets it as well.
 */
bool
rs_wake_pending(void)
{
	if (rs_my_slot == NULL || !rs_slot_is_worker(rs_my_slot))
		return false;
	return pg_atomic_read_u32(&rs_my_slot->idle) == 0 || rs_slot_stop_requested();
}

/* The supervisor of a database looks again, or is started to do so. */
static void
wake_supervisor(Oid dboid)
{
	RsDatabase *database;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	database = rs_database_get(dboid);
	if (database != NULL)
		rs_database_want(database);
	LWLockRelease(rs_shared->lock);
}

/* The first failure since the history was pruned calls the supervisor. */
static void
wake_pruner(void)
{
	RsDatabase *database;

	LWLockAcquire(rs_shared->lock, LW_SHARED);
	database = rs_database_find(MyDatabaseId);
	if (database != NULL && pg_atomic_fetch_add_u32(&database->failures, 1) == 0 &&
		database->pid != 0)
		SetLatch(database->latch);
	LWLockRelease(rs_shared->lock);
}

static void
forget_marks(void)
{
	nmarked = 0;
	marked_all = false;
	marked_supervisor = false;
	marked_pruner = false;
	marked_databases = NIL;
}

/*
 * After the locks of a transaction are released.  Too late for errors: nothing
 * here may raise any.
 */
static void
resource_release(ResourceReleasePhase phase, bool isCommit, bool isTopLevel, void *arg)
{
	ListCell *cell;

	if (phase != RESOURCE_RELEASE_AFTER_LOCKS || !isTopLevel)
		return;

	if (isCommit && rs_shared != NULL)
	{
		if (marked_all)
			wake_queue(InvalidOid);
		else
		{
			for (int i = 0; i < nmarked; i++)
				wake_queue(marked[i]);
		}
		if (marked_supervisor)
			wake_supervisor(MyDatabaseId);
		if (marked_pruner)
			wake_pruner();
		foreach (cell, marked_databases)
			wake_supervisor(lfirst_oid(cell));
	}
	forget_marks();
	rs_database_reopen(isCommit);
}

/*
 * PREPARE TRANSACTION releases its resources as a commit does, but what it
 * wrote cannot be seen yet: wake nobody.
 */
static void
xact_callback(XactEvent event, void *arg)
{
	if (event != XACT_EVENT_PREPARE)
		return;
	forget_marks();
	rs_database_reopen(false);
}

void
rs_wake_init(void)
{
	RegisterResourceReleaseCallback(resource_release, NULL);
	RegisterXactCallback(xact_callback, NULL);
}

/*
 * Statement trigger AFTER INSERT on a queue.  On a partitioned queue it fires
 * for the table that the INSERT names, and that is the queue.
 */
Datum
rs_sql_wake_trigger(PG_FUNCTION_ARGS)
{
	if (CALLED_AS_TRIGGER(fcinfo))
		rs_wake_at_commit(RelationGetRelid(((TriggerData *) fcinfo->context)->tg_relation));
	PG_RETURN_POINTER(NULL);
}

/* The last word of the install script: there is an extension to look after. */
Datum
rs_sql_announce(PG_FUNCTION_ARGS)
{
	rs_wake_supervisor_at_commit();
	PG_RETURN_VOID();
}
