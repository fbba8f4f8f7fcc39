/*-------------------------------------------------------------------------
 *
 * shared.c
 *	  Our shared memory: its start, what survives a crash, and the entries of
 *	  databases and the slots of workers.  See shared.h for who may touch what.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/shmem.h"

#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/shared.h"

/* Crashes this close together, or this many delays, are one row of crashes. */
#define CRASH_ROW_MSEC (5 * 60 * 1000)
#define CRASH_ROW_DELAYS 60
#define CRASH_MAX_FACTOR 30

#define MAX_RESTART_MSEC 30000

RsShared *rs_shared = NULL;
RsSlot *rs_my_slot = NULL;

static shmem_request_hook_type previous_shmem_request = NULL;
static shmem_startup_hook_type previous_shmem_startup = NULL;

/* The postmaster's copy: outlives the shared memory that a crash throws away. */
static RsCrash last_crash;

static uint64 my_slot_cookie = 0;

/* This process as a supervisor. */
static Oid my_database = InvalidOid;
static uint64 my_database_cookie = 0;
static bool my_database_absent = false;

bool
rs_preloaded(void)
{
	return rs_shared != NULL;
}

int64
rs_restart_delay(int failures)
{
	int64 delay = 1000;

	if (failures <= 0)
		return 0;
	while (--failures > 0 && delay < MAX_RESTART_MSEC)
		delay *= 2;
	return Min(delay, MAX_RESTART_MSEC);
}

/* --------------------------------------------------------- start and crash */

static int
slot_count(void)
{
	return rs_max_workers + RS_SESSION_SLOTS;
}

static int
lease_count(void)
{
	return slot_count() + rs_batch_leases;
}

/* The leases lie behind the slots. */
static Size
lease_offset(void)
{
	return MAXALIGN(add_size(offsetof(RsShared, slot), mul_size(slot_count(), sizeof(RsSlot))));
}

static Size
shared_size(void)
{
	return add_size(lease_offset(), mul_size(lease_count(), sizeof(RsLease)));
}

static void
shmem_request(void)
{
	if (previous_shmem_request != NULL)
		previous_shmem_request();
	RequestAddinShmemSpace(shared_size());
	RequestNamedLWLockTranche("ruststream", 1);
}

/* A C string from memory that nobody vouches for. */
static void
copy_string(char *target, const char *source, Size size)
{
	memcpy(target, source, size);
	target[size - 1] = '\0';
}

/*
 * Runs in the postmaster as it gives up its shared memory, every child being
 * gone: after a crash (code 1), and at shutdown.  Remembers what was in work.
 * Whatever the crash has left in there, this takes no lock, trusts no count
 * and ends.
 */
static void
remember_crash(int code, Datum arg)
{
	TimestampTz now = GetCurrentTimestamp();
	int64 row = Max((int64) CRASH_ROW_MSEC, (int64) rs_crash_restart_delay * CRASH_ROW_DELAYS);

	if (code == 0 || rs_shared == NULL)
		return;

	if (last_crash.in_a_row > 0 && now - last_crash.at > row * 1000)
		last_crash.in_a_row = 0;
	if (last_crash.in_a_row < PG_INT32_MAX)
		last_crash.in_a_row++;
	last_crash.at = now;
	last_crash.deliveries = 0;

	for (int i = 0; i < slot_count(); i++)
	{
		const RsSlot *slot = &rs_shared->slot[i];
		RsCrashed *crashed;

		if (slot->entry.cookie == 0 || !slot->delivering)
			continue;
		if (last_crash.deliveries++ >= RS_MAX_CRASHED)
			continue;
		crashed = &last_crash.delivery[last_crash.deliveries - 1];
		crashed->database = slot->entry.database;
		crashed->pid = slot->entry.pid;
		crashed->attempt = slot->attempt;
		copy_string(crashed->subscription_name, slot->subscription_name, NAMEDATALEN);
		copy_string(crashed->queue_name, slot->queue_name, RS_QUEUE_NAME_BYTES);
		copy_string(crashed->id, slot->id, RS_ID_BYTES);
	}
}

static void
shmem_startup(void)
{
	bool found;

	if (previous_shmem_startup != NULL)
		previous_shmem_startup();

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	rs_shared = ShmemInitStruct("ruststream", shared_size(), &found);
	if (!found)
	{
		memset(rs_shared, 0, shared_size());
		rs_shared->lock = &GetNamedLWLockTranche("ruststream")->lock;
		ConditionVariableInit(&rs_shared->left);
		ConditionVariableInit(&rs_shared->started);
		rs_shared->worker_slots = rs_max_workers;
		rs_shared->slots = slot_count();
		rs_shared->lease = (RsLease *) ((char *) rs_shared + lease_offset());

		for (int i = 0; i < RS_MAX_DATABASES; i++)
			pg_atomic_init_u32(&rs_shared->database[i].failures, 0);
		for (int i = 0; i < RS_MAX_SUBSCRIPTIONS; i++)
		{
			RsCounters *counters = &rs_shared->counters[i];

			for (int j = 0; j < RS_COUNTER_COUNT; j++)
				pg_atomic_init_u64(&counters->count[j], 0);
			for (int j = 0; j < RS_RATE_BUCKETS; j++)
				pg_atomic_init_u64(&counters->rate[j], 0);
		}
		for (int i = 0; i < rs_shared->slots; i++)
		{
			RsSlot *slot = &rs_shared->slot[i];

			pg_atomic_init_u32(&slot->run, 0);
			pg_atomic_init_u32(&slot->idle, 0);
			pg_atomic_init_u32(&slot->entry.stop, 0);
			pg_atomic_init_u32(&slot->changecount, 0);
		}
		rs_shared->leases = lease_count();
		for (int i = 0; i < rs_shared->leases; i++)
		{
			SpinLockInit(&rs_shared->lease[i].mutex);
			rs_shared->lease[i].slot = i < rs_shared->slots ? i : RS_NO_SLOT;
		}
		for (int i = 0; i < RS_MAX_HEARTBEATS; i++)
		{
			RsHeartbeat *heartbeat = &rs_shared->heartbeat[i];

			heartbeat->entry.is_heartbeat = true;
			pg_atomic_init_u32(&heartbeat->entry.stop, 0);
			pg_atomic_init_u32(&heartbeat->holds, 0);
			pg_atomic_init_u32(&heartbeat->busy, 0);
			pg_atomic_init_u64(&heartbeat->looks_at, 0);
		}

		rs_shared->crash = last_crash;
		if (last_crash.in_a_row > 0)
		{
			int64 factor = 1;

			for (int i = 1; i < last_crash.in_a_row && factor < CRASH_MAX_FACTOR; i++)
				factor *= 2;
			factor = Min(factor, CRASH_MAX_FACTOR);
			rs_shared->quiet_until = last_crash.at + factor * rs_crash_restart_delay * 1000;
		}
	}
	LWLockRelease(AddinShmemInitLock);

	/* The callbacks are used up by each rebuild of shared memory. */
	if (!IsUnderPostmaster)
		on_shmem_exit(remember_crash, (Datum) 0);
}

void
rs_shared_init(void)
{
	previous_shmem_request = shmem_request_hook;
	shmem_request_hook = shmem_request;
	previous_shmem_startup = shmem_startup_hook;
	shmem_startup_hook = shmem_startup;
}

/* --------------------------------------------------------------- databases */

RsDatabase *
rs_database_find(Oid dboid)
{
	Assert(LWLockHeldByMe(rs_shared->lock));

	for (int i = 0; i < RS_MAX_DATABASES; i++)
	{
		if (rs_shared->database[i].dboid == dboid)
			return &rs_shared->database[i];
	}
	return NULL;
}

RsDatabase *
rs_database_get(Oid dboid)
{
	RsDatabase *database = rs_database_find(dboid);

	Assert(LWLockHeldByMeInMode(rs_shared->lock, LW_EXCLUSIVE));

	if (database != NULL)
		return database;
	database = rs_database_find(InvalidOid);
	if (database == NULL)
	{
		if (!rs_shared->databases_full_logged)
			ereport(LOG, (errmsg("ruststream serves no more than %d databases of a server",
								 RS_MAX_DATABASES),
						  errdetail("Subscriptions of further databases get no workers.")));
		rs_shared->databases_full_logged = true;
		return NULL;
	}

	database->dboid = dboid;
	database->wanted = false;
	database->closing = 0;
	database->cookie = 0;
	database->pid = 0;
	database->latch = NULL;
	database->settled = false;
	database->restarts = 0;
	database->next_start = 0;
	pg_atomic_write_u32(&database->failures, 0);
	return database;
}

/* Somebody shall look: the supervisor if there is one, else the launcher. */
void
rs_database_want(RsDatabase *database)
{
	Latch *latch = database->pid != 0 ? database->latch : rs_shared->launcher;

	Assert(LWLockHeldByMeInMode(rs_shared->lock, LW_EXCLUSIVE));

	database->wanted = true;
	database->next_start = 0;
	database->restarts = 0;
	if (latch != NULL)
		SetLatch(latch);
}

void
rs_database_release(RsDatabase *database)
{
	Assert(LWLockHeldByMeInMode(rs_shared->lock, LW_EXCLUSIVE));

	if (!database->wanted && database->closing == 0 && database->cookie == 0)
		database->dboid = InvalidOid;
}

/* At the exit of a supervisor. */
static void
supervisor_exit(int code, Datum arg)
{
	RsDatabase *database;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	database = rs_database_find(my_database);
	if (database != NULL && database->cookie == my_database_cookie)
	{
		TimestampTz now = GetCurrentTimestamp();

		database->cookie = 0;
		database->pid = 0;
		database->latch = NULL;

		/*
		 * It comes back, unless there is nothing to supervise: at once if it
		 * was up for a while (it was terminated), later if it keeps failing.
		 */
		if (!my_database_absent)
		{
			database->wanted = true;
			if (now - database->started_at > USECS_PER_SEC)
				database->restarts = 0;
			else
				database->restarts++;
			database->next_start = now + rs_restart_delay(database->restarts) * 1000;
		}
		rs_database_release(database);
		if (rs_shared->launcher != NULL)
			SetLatch(rs_shared->launcher);
	}
	LWLockRelease(rs_shared->lock);
	ConditionVariableBroadcast(&rs_shared->left);
}

bool
rs_supervisor_attach(Oid dboid, uint64 cookie)
{
	RsDatabase *database;
	bool attached = false;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	database = rs_database_find(dboid);
	if (database != NULL && database->cookie == cookie && database->closing == 0)
	{
		database->pid = MyProcPid;
		database->latch = MyLatch;
		database->started_at = GetCurrentTimestamp();
		my_database = dboid;
		my_database_cookie = cookie;
		attached = true;
	}
	LWLockRelease(rs_shared->lock);
	if (attached)
		on_shmem_exit(supervisor_exit, (Datum) 0);
	return attached;
}

void
rs_supervisor_absent(void)
{
	my_database_absent = true;
}

void
rs_supervisor_looks(void)
{
	RsDatabase *database;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	database = rs_database_find(my_database);
	if (database != NULL && database->cookie == my_database_cookie)
		database->wanted = false;
	LWLockRelease(rs_shared->lock);
}

bool
rs_supervisor_wanted(void)
{
	RsDatabase *database;
	bool wanted;

	LWLockAcquire(rs_shared->lock, LW_SHARED);
	database = rs_database_find(my_database);
	wanted = (database != NULL && database->cookie == my_database_cookie && database->wanted);
	LWLockRelease(rs_shared->lock);
	return wanted;
}

void
rs_supervisor_settled(void)
{
	RsDatabase *database;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	database = rs_database_find(my_database);
	if (database != NULL && database->cookie == my_database_cookie && !database->settled)
	{
		database->settled = true;
		if (rs_shared->launcher != NULL)
			SetLatch(rs_shared->launcher);
	}
	LWLockRelease(rs_shared->lock);
}

/* ------------------------------------------------------------------- slots */

/*
 * Take a free slot in a range; NULL: there is none.  The owner's fields are
 * reset, and nobody can see a delivery or wake anybody through it yet.
 */
static RsSlot *
take_slot(int from, int to, Oid database, Oid owner)
{
	Assert(LWLockHeldByMeInMode(rs_shared->lock, LW_EXCLUSIVE));

	for (int i = from; i < to; i++)
	{
		RsSlot *slot = &rs_shared->slot[i];

		if (slot->entry.cookie != 0)
			continue;
		rs_entry_take(&slot->entry, database, owner);
		slot->queue_name[0] = '\0';
		slot->state = RS_WORKER_STARTING;
		slot->since = GetCurrentTimestamp();
		slot->delivering = false;
		pg_atomic_write_u32(&slot->idle, 0);
		return slot;
	}
	return NULL;
}

RsSlot *
rs_slot_allocate(Oid database, int32 subscription, const char *subscription_name, Oid owner,
				 Oid queue, uint64 *cookie)
{
	RsSlot *slot = NULL;
	RsDatabase *entry;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	entry = rs_database_find(database);
	if (entry != NULL && entry->closing == 0)
		slot = take_slot(0, rs_shared->worker_slots, database, owner);
	if (slot != NULL)
	{
		*cookie = slot->entry.cookie;
		slot->subscription = subscription;
		slot->queue = queue;
		strlcpy(slot->subscription_name, subscription_name, NAMEDATALEN);
	}
	LWLockRelease(rs_shared->lock);
	return slot;
}

void
rs_slot_free(RsSlot *slot)
{
	Assert(LWLockHeldByMeInMode(rs_shared->lock, LW_EXCLUSIVE));

	rs_lease_forget(slot);
	/* It may have gone in the middle of a handler. */
	pg_atomic_write_u32(&slot->run, 0);
	pg_atomic_write_u32(&slot->idle, 0);
	rs_entry_clear(&slot->entry);
	slot->queue = InvalidOid;
	slot->delivering = false;
}

/* Give back this process's slot, and tell the supervisor. */
static void
slot_exit(int code, Datum arg)
{
	if (rs_my_slot == NULL)
		return;

	rs_entry_leave(&rs_my_slot->entry, my_slot_cookie);
	rs_my_slot = NULL;
	ConditionVariableBroadcast(&rs_shared->left);
}

/* This process owns the slot from now on.  The caller holds the lock. */
static void
own_slot(RsSlot *slot)
{
	Assert(LWLockHeldByMeInMode(rs_shared->lock, LW_EXCLUSIVE));

	rs_entry_attach(&slot->entry);
	rs_my_slot = slot;
	my_slot_cookie = slot->entry.cookie;
}

/* At exit the slot is given back; once in a process is enough. */
static void
free_slot_at_exit(void)
{
	static bool registered = false;

	if (!registered)
		on_shmem_exit(slot_exit, (Datum) 0);
	registered = true;
}

bool
rs_slot_attach(const RsWorkerArgs *args)
{
	RsSlot *slot;
	RsDatabase *database;
	bool attached = false;

	if (rs_shared == NULL || args->slot < 0 || args->slot >= rs_shared->worker_slots)
		return false;

	free_slot_at_exit();
	slot = &rs_shared->slot[args->slot];
	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	database = rs_database_find(args->database);
	if (slot->entry.cookie == args->cookie && slot->entry.pid == 0 && database != NULL &&
		database->closing == 0)
	{
		own_slot(slot);
		attached = true;
	}
	LWLockRelease(rs_shared->lock);
	return attached;
}

void
rs_slot_attach_session(void)
{
	RsSlot *slot;

	if (rs_my_slot != NULL)
		return;

	free_slot_at_exit();
	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	slot = take_slot(rs_shared->worker_slots, rs_shared->slots, MyDatabaseId, InvalidOid);
	if (slot != NULL)
	{
		slot->subscription = 0;
		slot->queue = InvalidOid;
		own_slot(slot);
	}
	LWLockRelease(rs_shared->lock);
}

void
rs_slot_detach_session(void)
{
	if (rs_my_slot != NULL && !rs_slot_is_worker(rs_my_slot))
		slot_exit(0, (Datum) 0);
}

bool
rs_slot_is_worker(const RsSlot *slot)
{
	return slot < &rs_shared->slot[rs_shared->worker_slots];
}

bool
rs_slot_stop_requested(void)
{
	return rs_my_slot != NULL && pg_atomic_read_u32(&rs_my_slot->entry.stop) != 0;
}
