/*-------------------------------------------------------------------------
 *
 * owners.c
 *	  The owners for whom a supervisor keeps a heartbeat: those of lease
 *	  subscriptions that are not quiet, whether workers serve them or sessions
 *	  that drain.
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

#define WAITING_FOR_PROCESS "waiting for a process for its heartbeat: raise max_worker_processes"
#define HEARTBEAT_FAILS "its heartbeat ended as soon as it had started: see the server's log"

typedef struct Owner
{
	Oid role;
	bool wanted;

	RsHeartbeat *heartbeat; /* NULL: there is none */
	uint64 cookie;
	BackgroundWorkerHandle *handle; /* NULL: found in shared memory, attached */
	TimestampTz started_at;
	bool attached;

	int failures; /* starts in a row that came to nothing */
	TimestampTz next_start;
} Owner;

/* In TopMemoryContext. */
static List *owners = NIL;

static Owner *
find_owner(Oid role)
{
	ListCell *cell;

	foreach (cell, owners)
	{
		Owner *owner = lfirst(cell);

		if (owner->role == role)
			return owner;
	}
	return NULL;
}

static Owner *
get_owner(Oid role)
{
	Owner *owner = find_owner(role);
	MemoryContext save;

	if (owner != NULL)
		return owner;
	save = MemoryContextSwitchTo(TopMemoryContext);
	owner = palloc0(sizeof(Owner));
	owner->role = role;
	owners = lappend(owners, owner);
	MemoryContextSwitchTo(save);
	return owner;
}

/* The heartbeats that another supervisor has left behind, as in rs_roster_adopt. */
void
rs_owners_adopt(void)
{
	for (int i = 0; i < RS_MAX_HEARTBEATS; i++)
	{
		RsHeartbeat *heartbeat = &rs_shared->heartbeat[i];
		RsHeartbeat found = {0};
		Owner *owner;

		LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
		if (heartbeat->cookie != 0 && heartbeat->database == MyDatabaseId)
		{
			if (heartbeat->pid == 0)
				rs_heartbeat_free(heartbeat);
			else
			{
				found.cookie = heartbeat->cookie;
				found.owner = heartbeat->owner;
				found.attached_at = heartbeat->attached_at;
			}
		}
		LWLockRelease(rs_shared->lock);

		if (found.cookie == 0)
			continue;
		owner = get_owner(found.owner);
		owner->heartbeat = heartbeat;
		owner->cookie = found.cookie;
		owner->started_at = found.attached_at;
		owner->attached = true;
	}
}

/* The extension is gone: no lease of its queues can be extended. */
void
rs_owners_terminate(void)
{
	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < RS_MAX_HEARTBEATS; i++)
	{
		RsHeartbeat *heartbeat = &rs_shared->heartbeat[i];

		if (heartbeat->cookie == 0 || heartbeat->database != MyDatabaseId)
			continue;
		if (heartbeat->pid == 0)
			rs_heartbeat_free(heartbeat);
		else
			kill(heartbeat->pid, SIGTERM);
	}
	LWLockRelease(rs_shared->lock);
}

static bool
is_gone(Owner *owner)
{
	RsHeartbeat *heartbeat = owner->heartbeat;
	pid_t pid;
	bool stopped = !owner->attached && owner->handle != NULL &&
				   GetBackgroundWorkerPid(owner->handle, &pid) == BGWH_STOPPED;
	bool gone;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	gone = (heartbeat->cookie != owner->cookie);
	if (!gone && heartbeat->pid != 0)
		owner->attached = true;
	else if (!gone && stopped)
	{
		/* It was refused or could not be forked, and never attached. */
		rs_heartbeat_free(heartbeat);
		gone = true;
	}
	LWLockRelease(rs_shared->lock);
	return gone;
}

bool
rs_owners_reap(void)
{
	TimestampTz now = GetCurrentTimestamp();
	bool left = false;
	ListCell *cell;

	foreach (cell, owners)
	{
		Owner *owner = lfirst(cell);

		if (owner->heartbeat == NULL || !is_gone(owner))
			continue;

		/* One that did not even live a second has failed, any other was terminated. */
		if (owner->wanted && now - owner->started_at < USECS_PER_SEC)
		{
			owner->failures++;
			owner->next_start = TimestampTzPlusMilliseconds(now, rs_restart_delay(owner->failures));
		}
		else
			owner->failures = 0;

		if (owner->handle != NULL)
			pfree(owner->handle);
		owner->heartbeat = NULL;
		owner->handle = NULL;
		left = true;
	}
	return left;
}

/* Tell a heartbeat to leave once no lease is held, or that it may stay. */
static void
tell_heartbeat(Owner *owner, bool stop)
{
	RsHeartbeat *heartbeat = owner->heartbeat;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	if (heartbeat->cookie == owner->cookie && (pg_atomic_read_u32(&heartbeat->stop) != 0) != stop)
	{
		pg_atomic_write_u32(&heartbeat->stop, stop ? 1 : 0);
		if (stop && heartbeat->pid != 0)
			SetLatch(heartbeat->latch);
		else if (stop)
			rs_heartbeat_free(heartbeat);
	}
	LWLockRelease(rs_shared->lock);
}

void
rs_owners_want(List *subscriptions)
{
	ListCell *cell;

	foreach (cell, owners)
		((Owner *) lfirst(cell))->wanted = false;
	foreach (cell, subscriptions)
	{
		RsSupervised *subscription = lfirst(cell);

		if (subscription->leases)
			get_owner(subscription->owner)->wanted = true;
	}

	foreach (cell, owners)
	{
		Owner *owner = lfirst(cell);

		if (owner->heartbeat != NULL)
			tell_heartbeat(owner, !owner->wanted);
		else if (!owner->wanted)
		{
			pfree(owner);
			owners = foreach_delete_current(owners, cell);
		}
	}
}

/* Start a heartbeat; false: there is no process for it. */
static bool
start_heartbeat(Owner *owner)
{
	BackgroundWorker process = {0};
	RsHeartbeatArgs args = {0};
	BackgroundWorkerHandle *handle;
	RsHeartbeat *heartbeat;
	uint64 cookie;
	MemoryContext save;
	bool registered;

	heartbeat = rs_heartbeat_allocate(MyDatabaseId, owner->role, &cookie);
	if (heartbeat == NULL)
		return false;

	args.database = MyDatabaseId;
	args.owner = owner->role;
	args.heartbeat = heartbeat - rs_shared->heartbeat;
	args.cookie = cookie;

	snprintf(process.bgw_name, BGW_MAXLEN, "ruststream heartbeat of role %u", owner->role);
	strlcpy(process.bgw_type, "ruststream heartbeat", BGW_MAXLEN);
	strlcpy(process.bgw_library_name, "ruststream", BGW_MAXLEN);
	strlcpy(process.bgw_function_name, "rs_heartbeat_main", BGW_MAXLEN);
	process.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	process.bgw_start_time = BgWorkerStart_RecoveryFinished;
	process.bgw_restart_time = BGW_NEVER_RESTART;
	process.bgw_notify_pid = MyProcPid;
	StaticAssertStmt(sizeof(args) <= BGW_EXTRALEN, "arguments must fit");
	memcpy(process.bgw_extra, &args, sizeof(args));

	save = MemoryContextSwitchTo(TopMemoryContext);
	registered = RegisterDynamicBackgroundWorker(&process, &handle);
	MemoryContextSwitchTo(save);
	if (registered)
	{
		owner->heartbeat = heartbeat;
		owner->cookie = cookie;
		owner->handle = handle;
		owner->started_at = GetCurrentTimestamp();
		owner->attached = false;
		return true;
	}

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	if (heartbeat->cookie == cookie)
		rs_heartbeat_free(heartbeat);
	LWLockRelease(rs_shared->lock);
	return false;
}

bool
rs_owners_start(TimestampTz now, TimestampTz slot_retry, TimestampTz *until)
{
	ListCell *cell;

	foreach (cell, owners)
	{
		Owner *owner = lfirst(cell);

		if (!owner->wanted || owner->heartbeat != NULL)
			continue;
		if (owner->next_start > now)
			*until = Min(*until, owner->next_start);
		else if (slot_retry > now)
			*until = Min(*until, slot_retry);
		else if (!start_heartbeat(owner))
			return false;
	}
	return true;
}

bool
rs_owner_is_served(Oid role)
{
	Owner *owner = find_owner(role);

	return owner != NULL && owner->heartbeat != NULL;
}

const char *
rs_owner_problem(Oid role)
{
	Owner *owner = find_owner(role);

	return owner != NULL && owner->failures > 0 ? HEARTBEAT_FAILS : WAITING_FOR_PROCESS;
}
