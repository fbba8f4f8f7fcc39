/*-------------------------------------------------------------------------
 *
 * entry.c
 *	  The processes that a supervisor starts, workers and heartbeats alike: their
 *	  entries in shared memory, and how the supervisor looks after them.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "utils/memutils.h"

#include "backend/backend.h"
#include "backend/shared.h"
#include "backend/supervisor.h"

/* --------------------------------------------------------- in shared memory */

void
rs_entry_take(RsEntry *entry, Oid database, Oid owner)
{
	Assert(LWLockHeldByMeInMode(rs_shared->lock, LW_EXCLUSIVE));

	entry->cookie = ++rs_shared->last_cookie;
	entry->pid = 0;
	entry->latch = NULL;
	entry->attached_at = 0;
	entry->database = database;
	entry->owner = owner;
	pg_atomic_write_u32(&entry->stop, 0);
}

void
rs_entry_attach(RsEntry *entry)
{
	Assert(LWLockHeldByMeInMode(rs_shared->lock, LW_EXCLUSIVE));

	entry->pid = MyProcPid;
	entry->latch = MyLatch;
	entry->attached_at = GetCurrentTimestamp();
}

void
rs_entry_clear(RsEntry *entry)
{
	Assert(LWLockHeldByMeInMode(rs_shared->lock, LW_EXCLUSIVE));

	entry->cookie = 0;
	entry->pid = 0;
	entry->database = InvalidOid;
	entry->owner = InvalidOid;
}

void
rs_entry_free(RsEntry *entry)
{
	StaticAssertStmt(offsetof(RsSlot, entry) == 0 && offsetof(RsHeartbeat, entry) == 0,
					 "an entry must be the head");
	if (entry->is_heartbeat)
		rs_heartbeat_free((RsHeartbeat *) entry);
	else
		rs_slot_free((RsSlot *) entry);
}

void
rs_entry_leave(RsEntry *entry, uint64 cookie)
{
	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	if (entry->cookie == cookie)
	{
		RsDatabase *database = rs_database_find(entry->database);

		rs_entry_free(entry);
		if (database != NULL && database->pid != 0)
		{
			database->wanted = true;
			SetLatch(database->latch);
		}
	}
	LWLockRelease(rs_shared->lock);
}

/* Returns whether it has a process that is there, and not this one. */
static bool
evict(RsEntry *entry, Oid database, bool signal)
{
	if (entry->cookie == 0 || entry->database != database || entry->pid == MyProcPid)
		return false;
	if (entry->pid == 0)
	{
		rs_entry_free(entry);
		return false;
	}
	if (signal)
		kill(entry->pid, SIGTERM);
	return true;
}

int
rs_entries_evict(Oid database, bool signal)
{
	int present = 0;

	Assert(LWLockHeldByMeInMode(rs_shared->lock, LW_EXCLUSIVE));

	for (int i = 0; i < rs_shared->worker_slots; i++)
		present += evict(&rs_shared->slot[i].entry, database, signal);
	for (int i = 0; i < RS_MAX_HEARTBEATS; i++)
		present += evict(&rs_shared->heartbeat[i].entry, database, signal);
	return present;
}

/* ---------------------------------------------------------- the supervisor's */

bool
rs_child_adopt(RsChild *child, RsEntry *entry)
{
	Assert(LWLockHeldByMeInMode(rs_shared->lock, LW_EXCLUSIVE));

	if (entry->cookie == 0 || entry->database != MyDatabaseId)
		return false;
	/* We could not tell if it never comes. */
	if (entry->pid == 0)
	{
		rs_entry_free(entry);
		return false;
	}
	*child = (RsChild){.entry = entry,
					   .cookie = entry->cookie,
					   .owner = entry->owner,
					   .started_at = entry->attached_at,
					   .attached = true,
					   .stopping = (pg_atomic_read_u32(&entry->stop) != 0)};
	return true;
}

bool
rs_child_register(RsChild *child, RsEntry *entry, uint64 cookie, Oid owner,
				  BackgroundWorker *process)
{
	BackgroundWorkerHandle *handle;
	MemoryContext save;
	bool registered;

	strlcpy(process->bgw_library_name, "ruststream", BGW_MAXLEN);
	process->bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	process->bgw_start_time = BgWorkerStart_RecoveryFinished;
	process->bgw_restart_time = BGW_NEVER_RESTART;
	process->bgw_notify_pid = MyProcPid;

	save = MemoryContextSwitchTo(TopMemoryContext);
	registered = RegisterDynamicBackgroundWorker(process, &handle);
	MemoryContextSwitchTo(save);
	if (registered)
	{
		*child = (RsChild){.entry = entry,
						   .cookie = cookie,
						   .owner = owner,
						   .handle = handle,
						   .started_at = GetCurrentTimestamp()};
		return true;
	}

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	if (entry->cookie == cookie)
		rs_entry_free(entry);
	LWLockRelease(rs_shared->lock);
	return false;
}

bool
rs_child_is_gone(RsChild *child)
{
	RsEntry *entry = child->entry;
	pid_t pid;
	bool stopped = !child->attached && child->handle != NULL &&
				   GetBackgroundWorkerPid(child->handle, &pid) == BGWH_STOPPED;
	bool gone;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	gone = (entry->cookie != child->cookie);
	if (!gone && entry->pid != 0)
		child->attached = true;
	else if (!gone && stopped)
	{
		/* It was refused or could not be forked, and never attached. */
		rs_entry_free(entry);
		gone = true;
	}
	LWLockRelease(rs_shared->lock);
	return gone;
}

void
rs_child_tell(RsChild *child, bool stop)
{
	RsEntry *entry = child->entry;

	child->stopping = stop;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	if (entry->cookie == child->cookie)
	{
		pg_atomic_write_u32(&entry->stop, stop ? 1 : 0);
		if (stop && entry->pid == 0)
			rs_entry_free(entry);
		else if (stop)
			SetLatch(entry->latch);
	}
	LWLockRelease(rs_shared->lock);
}

void
rs_child_terminate(RsChild *child)
{
	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	if (child->entry->cookie == child->cookie)
		kill(child->entry->pid, SIGTERM);
	LWLockRelease(rs_shared->lock);
}

void
rs_child_forget(RsChild *child)
{
	if (child->handle != NULL)
		pfree(child->handle);
	*child = (RsChild){0};
}
