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

	RsChild heartbeat;

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

void
rs_owners_adopt(void)
{
	for (int i = 0; i < RS_MAX_HEARTBEATS; i++)
	{
		RsChild found;
		bool adopted;

		LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
		adopted = rs_child_adopt(&found, &rs_shared->heartbeat[i].entry);
		LWLockRelease(rs_shared->lock);
		if (adopted)
			get_owner(found.owner)->heartbeat = found;
	}
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

		if (owner->heartbeat.entry == NULL || !rs_child_is_gone(&owner->heartbeat))
			continue;

		/* One that did not even live a second has failed, any other was terminated. */
		if (owner->wanted && now - owner->heartbeat.started_at < USECS_PER_SEC)
		{
			owner->failures++;
			owner->next_start = TimestampTzPlusMilliseconds(now, rs_restart_delay(owner->failures));
		}
		else
			owner->failures = 0;

		rs_child_forget(&owner->heartbeat);
		left = true;
	}
	return left;
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

		if (owner->heartbeat.entry != NULL)
		{
			/* It leaves once no lease is held. */
			if (owner->heartbeat.stopping == owner->wanted)
				rs_child_tell(&owner->heartbeat, !owner->wanted);
		}
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
	RsHeartbeat *heartbeat;
	uint64 cookie;

	heartbeat = rs_heartbeat_allocate(MyDatabaseId, owner->role, &cookie);
	if (heartbeat == NULL)
		return false;

	args.database = MyDatabaseId;
	args.owner = owner->role;
	args.heartbeat = heartbeat - rs_shared->heartbeat;
	args.cookie = cookie;

	snprintf(process.bgw_name, BGW_MAXLEN, "ruststream heartbeat of role %u", owner->role);
	strlcpy(process.bgw_type, "ruststream heartbeat", BGW_MAXLEN);
	strlcpy(process.bgw_function_name, "rs_heartbeat_main", BGW_MAXLEN);
	StaticAssertStmt(sizeof(args) <= BGW_EXTRALEN, "arguments must fit");
	memcpy(process.bgw_extra, &args, sizeof(args));

	return rs_child_register(&owner->heartbeat, &heartbeat->entry, cookie, owner->role, &process);
}

bool
rs_owners_start(TimestampTz now, TimestampTz slot_retry, TimestampTz *until)
{
	ListCell *cell;

	foreach (cell, owners)
	{
		Owner *owner = lfirst(cell);

		if (!owner->wanted || owner->heartbeat.entry != NULL)
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

	return owner != NULL && owner->heartbeat.entry != NULL;
}

const char *
rs_owner_problem(Oid role)
{
	Owner *owner = find_owner(role);

	return owner != NULL && owner->failures > 0 ? HEARTBEAT_FAILS : WAITING_FOR_PROCESS;
}
