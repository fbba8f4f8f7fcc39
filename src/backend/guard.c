/*-------------------------------------------------------------------------
 *
 * guard.c
 *	  Advisory locks: the guards of lines, and the keys of rows.
 *
 * They are the locks that pg_try_advisory_lock(hashtextextended(name, 0)) and
 * pg_try_advisory_xact_lock would take, so that whoever does that shares them
 * with us.  Taken by the lock manager itself, and not by a statement, since a
 * statement would take the transaction's snapshot, which must come after the
 * guard: at repeatable read, what the guard's last holder has committed would else
 * not be seen.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/delivery.h"

#include "common/hashfn.h"
#include "miscadmin.h"

/* hashtextextended, as it is for every deterministic collation. */
static LOCKTAG
tag_of(const char *name)
{
	LOCKTAG tag;
	uint64 hash = hash_bytes_extended((const unsigned char *) name, strlen(name), 0);

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, (uint32) (hash >> 32), (uint32) hash, 1);
	return tag;
}

RsGuard
rs_guard_of_key(const char *key)
{
	return (RsGuard){.count = 1, .tags = {tag_of(key)}};
}

static void
add_name(RsGuard *guard, char *name)
{
	guard->tags[guard->count++] = tag_of(name);
	pfree(name);
}

char *
rs_guard_name(const RsQueue *queue, const char *line)
{
	return psprintf("%s.%s:key:%s", queue->table.schema, queue->table.name, line);
}

RsGuard
rs_guard_of_line(const RsQueue *queue, const char *line)
{
	const rs_table *table = &queue->table;
	RsGuard guard = {0};

	if (rs_table_lines(table) == RS_LINES_GROUP)
	{
		add_name(&guard, psprintf("%s:%s", table->name, line));
		add_name(&guard, psprintf("%s.%s:%s", table->schema, table->name, line));
	}
	else
		add_name(&guard, rs_guard_name(queue, line));
	return guard;
}

bool
rs_guard_try(const RsGuard *guard, bool for_session)
{
	for (int i = 0; i < guard->count; i++)
	{
		if (LockAcquire(&guard->tags[i], ExclusiveLock, for_session, true) != LOCKACQUIRE_NOT_AVAIL)
			continue;
		while (--i >= 0)
			(void) LockRelease(&guard->tags[i], ExclusiveLock, for_session);
		return false;
	}
	return true;
}

bool
rs_guard_is_held(const RsGuard *guard)
{
	for (int i = 0; i < guard->count; i++)
	{
		if (!rs_lock_held_by_me(&guard->tags[i], ExclusiveLock))
			return false;
	}
	return true;
}

void
rs_guard_release(const RsGuard *guard, bool for_session)
{
	for (int i = 0; i < guard->count; i++)
	{
		/* A handler may have released what belongs to the session. */
		if (rs_lock_held_by_me(&guard->tags[i], ExclusiveLock))
			(void) LockRelease(&guard->tags[i], ExclusiveLock, for_session);
	}
}
