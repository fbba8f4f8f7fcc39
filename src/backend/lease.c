/*-------------------------------------------------------------------------
 *
 * lease.c
 *	  Leases in shared memory: taking and ending one, from the side of the
 *	  delivery; and the entries of the heartbeats.
 *
 * A lease is taken without any lock but its own: the delivery writes it, and
 * then looks at its owner's heartbeat.  The heartbeat says first when it will
 * look again, and then looks at the leases.  So either it sees the new lease,
 * or the delivery sees that it looks too late, and calls it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "datatype/timestamp.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/memutils.h"

#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/shared.h"

/* How long a heartbeat that should be there may take to be registered. */
#define START_TIMEOUT_MSEC 5000

int rs_batch_leases = 1000;

/* The leases that this process has reserved and does not hold, the next one last. */
static int *reserved = NULL;
static int reserved_count = 0;
static int reserved_size = 0;

/* This process as a heartbeat. */
static RsHeartbeat *my_heartbeat = NULL;
static uint64 my_cookie = 0;

/* -------------------------------------------------------------- heartbeats */

RsHeartbeat *
rs_heartbeat_allocate(Oid database, Oid owner, uint64 *cookie)
{
	RsHeartbeat *found = NULL;
	RsDatabase *entry;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	entry = rs_database_find(database);
	for (int i = 0; i < RS_MAX_HEARTBEATS && entry != NULL && entry->closing == 0; i++)
	{
		RsHeartbeat *heartbeat = &rs_shared->heartbeat[i];

		if (heartbeat->entry.cookie != 0)
			continue;
		rs_entry_take(&heartbeat->entry, database, owner);
		*cookie = heartbeat->entry.cookie;
		pg_atomic_write_u32(&heartbeat->busy, 0);
		pg_atomic_write_u64(&heartbeat->looks_at, (uint64) DT_NOEND);
		found = heartbeat;
		break;
	}
	LWLockRelease(rs_shared->lock);
	if (found != NULL)
		ConditionVariableBroadcast(&rs_shared->started);
	return found;
}

void
rs_heartbeat_free(RsHeartbeat *heartbeat)
{
	rs_entry_clear(&heartbeat->entry);
}

/*
 * What a heartbeat had under way when it was ended has been rolled back: one
 * that has committed is noted before any interrupt.
 */
static void
forget_extensions(uint64 cookie)
{
	for (int i = 0; i < rs_shared->leases; i++)
	{
		RsLease *lease = &rs_shared->lease[i];

		SpinLockAcquire(&lease->mutex);
		if (lease->extender == cookie)
		{
			lease->extender = 0;
			lease->announced = lease->token;
		}
		SpinLockRelease(&lease->mutex);
	}
}

/* Give back this process's entry, and tell the supervisor. */
static void
heartbeat_exit(int code, Datum arg)
{
	forget_extensions(my_cookie);
	rs_entry_leave(&my_heartbeat->entry, my_cookie);
	ConditionVariableBroadcast(&rs_shared->left);
}

RsHeartbeat *
rs_heartbeat_attach(const RsHeartbeatArgs *args)
{
	RsHeartbeat *heartbeat;
	RsDatabase *database;

	if (rs_shared == NULL || args->heartbeat < 0 || args->heartbeat >= RS_MAX_HEARTBEATS)
		return NULL;

	heartbeat = &rs_shared->heartbeat[args->heartbeat];
	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	database = rs_database_find(args->database);
	if (heartbeat->entry.cookie == args->cookie && heartbeat->entry.pid == 0 && database != NULL &&
		database->closing == 0)
	{
		rs_entry_attach(&heartbeat->entry);
		my_heartbeat = heartbeat;
		my_cookie = args->cookie;
	}
	LWLockRelease(rs_shared->lock);
	if (my_heartbeat != NULL)
		on_shmem_exit(heartbeat_exit, (Datum) 0);
	return my_heartbeat;
}

/* The heartbeat for an owner in this database; NULL: there is none. */
static RsHeartbeat *
find_heartbeat(Oid owner)
{
	for (int i = 0; i < RS_MAX_HEARTBEATS; i++)
	{
		RsHeartbeat *heartbeat = &rs_shared->heartbeat[i];

		if (heartbeat->entry.owner == owner && heartbeat->entry.database == MyDatabaseId)
			return heartbeat;
	}
	return NULL;
}

/*
 * Cancel what a heartbeat has under way.  If that has been over for a moment,
 * the signal delays the extension of another lease, or finds it idle and does
 * nothing.
 */
static void
interrupt_heartbeat(uint64 cookie)
{
	Assert(LWLockHeldByMe(rs_shared->lock));

	for (int i = 0; i < RS_MAX_HEARTBEATS; i++)
	{
		RsHeartbeat *heartbeat = &rs_shared->heartbeat[i];

		if (heartbeat->entry.cookie == cookie && heartbeat->entry.pid != 0)
			kill(heartbeat->entry.pid, SIGINT);
	}
}

/* ------------------------------------------------------ taking and ending one */

/* Have the heartbeat look at a new lease in time. */
static void
call_heartbeat(Oid owner, TimestampTz due, TimestampTz serve_by)
{
	RsHeartbeat *heartbeat;
	TimestampTz looks_at;
	Latch *latch;

	/* The lease is in shared memory; only now look at the heartbeat. */
	pg_memory_barrier();
	heartbeat = find_heartbeat(owner);
	if (heartbeat == NULL)
		return;
	(void) pg_atomic_fetch_add_u32(&heartbeat->holds, 1);

	looks_at = (TimestampTz) pg_atomic_read_u64(&heartbeat->looks_at);
	latch = heartbeat->entry.latch;
	if (due < looks_at && latch != NULL)
		SetLatch(latch);

	/* A slow extension that may go on longer than we can wait goes on later. */
	if (serve_by < looks_at && pg_atomic_read_u32(&heartbeat->busy) != 0)
	{
		LWLockAcquire(rs_shared->lock, LW_SHARED);
		if (heartbeat->entry.owner == owner && heartbeat->entry.database == MyDatabaseId)
			interrupt_heartbeat(heartbeat->entry.cookie);
		LWLockRelease(rs_shared->lock);
	}
}

/* Once a process: where there is one such id, there are many. */
static void
warn_of_long_id(const RsSubscription *subscription)
{
	static bool warned = false;

	if (!warned)
		ereport(WARNING,
				errmsg("subscription \"%s\" does not extend the leases of rows whose id takes %d "
					   "bytes or more",
					   subscription->name, RS_LEASE_ID_BYTES),
				errhint("Make its lease longer than its handler takes for such a row."),
				errhidestmt(true), errhidecontext(true));
	warned = true;
}

/* Which of the slots is this process's? */
static int
my_slot_number(void)
{
	return (int) (rs_my_slot - rs_shared->slot);
}

/* Take a lease that nobody has for a slot; false: somebody has it. */
static bool
take_lease(RsLease *lease, int slot)
{
	bool taken;

	SpinLockAcquire(&lease->mutex);
	taken = lease->slot == RS_NO_SLOT;
	if (taken)
		lease->slot = slot;
	SpinLockRelease(&lease->mutex);
	return taken;
}

/* Give a batch's lease back, where the slot has it and does not hold it. */
static void
give_lease_back(int number, int slot)
{
	RsLease *lease = &rs_shared->lease[number];

	if (number < rs_shared->slots)
		return; /* a slot's own */
	SpinLockAcquire(&lease->mutex);
	if (lease->slot == slot && !lease->held)
		lease->slot = RS_NO_SLOT;
	SpinLockRelease(&lease->mutex);
}

void
rs_lease_unreserve(void)
{
	while (reserved_count > 0)
		give_lease_back(reserved[--reserved_count], my_slot_number());
}

int
rs_lease_reserve(int rows)
{
	int slot;
	int start;
	int shared_leases;

	if (rs_shared == NULL || rs_my_slot == NULL)
		return 1;
	rs_lease_unreserve();
	slot = my_slot_number();
	if (rows > reserved_size)
	{
		int *larger = MemoryContextAlloc(TopMemoryContext, sizeof(int) * rows);

		if (reserved != NULL)
			pfree(reserved);
		reserved = larger;
		reserved_size = rows;
	}

	/* Each process begins elsewhere, so that they seldom meet. */
	shared_leases = rs_shared->leases - rs_shared->slots;
	start = (int) ((int64) slot * shared_leases / rs_shared->slots);
	for (int i = 0; i < shared_leases && reserved_count < rows - 1; i++)
	{
		int number = rs_shared->slots + (start + i) % shared_leases;

		if (take_lease(&rs_shared->lease[number], slot))
			reserved[reserved_count++] = number;
	}
	reserved[reserved_count++] = slot;
	return reserved_count;
}

void
rs_lease_hold(const RsSubscription *subscription, RsDelivery *delivery)
{
	int64 length = subscription->lease;
	TimestampTz due = delivery->token - length / 2;
	RsLease *mine;

	if (rs_shared == NULL || rs_my_slot == NULL || reserved_count == 0)
		return;
	if (strlen(delivery->id_text) >= RS_LEASE_ID_BYTES)
	{
		warn_of_long_id(subscription);
		return;
	}

	delivery->lease_number = reserved[--reserved_count] + 1;
	mine = &rs_shared->lease[delivery->lease_number - 1];
	SpinLockAcquire(&mine->mutex);
	mine->held = true;
	mine->lost = false;
	mine->blocked = false;
	mine->reported = false;
	mine->serial++;
	mine->extender = 0;
	mine->database = MyDatabaseId;
	mine->owner = subscription->owner;
	mine->queue = subscription->queue.relid;
	mine->token = delivery->token;
	mine->announced = delivery->token;
	mine->length = length;
	mine->due = due;
	strlcpy(mine->id, delivery->id_text, RS_LEASE_ID_BYTES);
	SpinLockRelease(&mine->mutex);

	call_heartbeat(subscription->owner, due, RS_LEASE_SERVE_BY(due, length));
}

/* End a lease; returns the heartbeat that is extending it, or 0. */
static uint64
end_lease(RsLease *lease, TimestampTz *token, TimestampTz *announced)
{
	uint64 extender = 0;

	SpinLockAcquire(&lease->mutex);
	if (lease->held)
	{
		*token = lease->token;
		*announced = lease->announced;
		extender = lease->extender;
		lease->held = false;
		lease->extender = 0;
	}
	SpinLockRelease(&lease->mutex);
	return extender;
}

void
rs_lease_stop(RsDelivery *delivery)
{
	int number = delivery->lease_number - 1;
	uint64 extender;

	if (number < 0 || rs_shared == NULL || rs_my_slot == NULL)
		return;
	delivery->lease_number = 0;
	extender = end_lease(&rs_shared->lease[number], &delivery->token, &delivery->announced);
	give_lease_back(number, my_slot_number());
	if (extender != 0)
	{
		LWLockAcquire(rs_shared->lock, LW_SHARED);
		interrupt_heartbeat(extender);
		LWLockRelease(rs_shared->lock);
	}
}

void
rs_lease_forget(const RsSlot *slot)
{
	int slot_number = (int) (slot - rs_shared->slot);

	for (int i = 0; i < rs_shared->leases; i++)
	{
		RsLease *lease = &rs_shared->lease[i];
		TimestampTz token;
		TimestampTz announced;
		uint64 extender;

		/* Nobody but the slot's process takes or gives back what is its own. */
		if (lease->slot != slot_number)
			continue;
		extender = end_lease(lease, &token, &announced);
		give_lease_back(i, slot_number);
		if (extender != 0)
			interrupt_heartbeat(extender);
	}
}

TimestampTz
rs_lease_token(const RsSlot *slot, int lease_number)
{
	int slot_number = (int) (slot - rs_shared->slot);
	RsLease *lease = &rs_shared->lease[lease_number > 0 ? lease_number - 1 : slot_number];
	TimestampTz token;

	SpinLockAcquire(&lease->mutex);
	token = lease->held && lease->slot == slot_number ? lease->token : 0;
	SpinLockRelease(&lease->mutex);
	return token;
}

/* --------------------------------------------------------- can it be extended? */

static bool
heartbeat_is_there(Oid owner)
{
	bool there;

	LWLockAcquire(rs_shared->lock, LW_SHARED);
	there = (find_heartbeat(owner) != NULL);
	LWLockRelease(rs_shared->lock);
	return there;
}

/* Wait until the supervisor has registered a heartbeat; false: it does not. */
static bool
await_heartbeat(Oid owner)
{
	TimestampTz deadline = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), START_TIMEOUT_MSEC);
	bool there;

	ConditionVariablePrepareToSleep(&rs_shared->started);
	while (!(there = heartbeat_is_there(owner)))
	{
		long timeout = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), deadline);

		if (timeout <= 0)
			break;
		(void) ConditionVariableTimedSleep(&rs_shared->started, timeout, PG_WAIT_EXTENSION);
	}
	ConditionVariableCancelSleep();
	return there;
}

static bool
has_free_session_slot(void)
{
	bool found = false;

	LWLockAcquire(rs_shared->lock, LW_SHARED);
	for (int i = rs_shared->worker_slots; i < rs_shared->slots && !found; i++)
		found = (rs_shared->slot[i].entry.cookie == 0);
	LWLockRelease(rs_shared->lock);
	return found;
}

const char *
rs_lease_unavailable(Oid owner)
{
	char refusal[RS_REASON_BYTES];

	if (rs_shared == NULL)
		return "ruststream is not in shared_preload_libraries";
	if (rs_owner_refusal(owner, refusal, sizeof(refusal)))
		return pstrdup(refusal);
	if (rs_my_slot == NULL && !has_free_session_slot())
		return psprintf("%d sessions are draining already", RS_SESSION_SLOTS);
	if (!await_heartbeat(owner))
		return psprintf("no heartbeat is running for role \"%s\": see ruststream.status, and raise "
						"max_worker_processes if it says so",
						GetUserNameFromId(owner, true));
	return NULL;
}
