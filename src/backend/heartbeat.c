/*-------------------------------------------------------------------------
 *
 * heartbeat.c
 *	  A heartbeat: one process a database and owner, connected as that owner,
 *	  which extends the leases of that owner's deliveries each half lease.
 *
 * An extension is one short transaction that moves the row's token, where the
 * row still holds the one we know.  It can be held up: by a lock on the row,
 * the delivery's own transaction included, or by a trigger of the table.  There
 * is one process for many leases, so each attempt has a slice of time, cut so
 * that all the others that come due meanwhile are still served in time.  What
 * could not be done in its slice is tried again and again, whenever no other
 * lease needs us.
 *
 * Between extensions it waits on its latch, outside any transaction, for as
 * long as no lease comes due.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "utils/guc.h"
#include "utils/memutils.h"

#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/heartbeat.h"
#include "backend/shared.h"

/* The shortest slice of an attempt; of its waits for locks alone, a millisecond. */
#define MIN_SLICE_MSEC 20

static RsHeartbeat *me;
static Oid my_owner;

/* In TopMemoryContext, with room for all leases. */
static RsSeenLease *seen;
static int nseen;

/* ------------------------------------------------------------------ choosing */

/* Note the leases of our owner's deliveries that are to be extended. */
static void
look_at_leases(void)
{
	nseen = 0;
	for (int i = 0; i < rs_shared->leases; i++)
	{
		RsLease *lease = &rs_shared->lease[i];
		RsSeenLease *next = &seen[nseen];

		SpinLockAcquire(&lease->mutex);
		if (lease->held && !lease->lost && lease->database == MyDatabaseId &&
			lease->owner == my_owner)
		{
			next->number = i;
			next->serial = lease->serial;
			next->due = lease->due;
			next->length = lease->length;
			next->blocked = lease->blocked;
			nseen++;
		}
		SpinLockRelease(&lease->mutex);
	}
}

/* Until when a lease has to be extended; what was blocked has to wait. */
static TimestampTz
serve_by(const RsSeenLease *lease)
{
	return lease->blocked ? DT_NOEND : RS_LEASE_SERVE_BY(lease->due, lease->length);
}

/*
 * The lease to extend now: of those that are due the most urgent, and after
 * them those that were blocked, in turn.  NULL: none is due.
 */
static const RsSeenLease *
choose(TimestampTz now)
{
	const RsSeenLease *best = NULL;

	for (int i = 0; i < nseen; i++)
	{
		const RsSeenLease *lease = &seen[i];

		if (lease->due > now)
			continue;
		if (best == NULL || serve_by(lease) < serve_by(best) ||
			(serve_by(lease) == serve_by(best) && lease->due < best->due))
			best = lease;
	}
	return best;
}

static TimestampTz
next_due(void)
{
	TimestampTz due = DT_NOEND;

	for (int i = 0; i < nseen; i++)
		due = Min(due, seen[i].due);
	return due;
}

/*
 * The slice of an attempt, in milliseconds: whoever else comes due before the
 * first of them has to be extended shares the time until then.  What was
 * blocked has its share only of what the others leave.
 */
static long
slice(const RsSeenLease *chosen, TimestampTz now)
{
	TimestampTz limit = now + chosen->length / 2;
	int shares = 1;

	for (int i = 0; i < nseen; i++)
	{
		if (&seen[i] != chosen)
			limit = Min(limit, serve_by(&seen[i]));
	}
	for (int i = 0; i < nseen; i++)
	{
		if (&seen[i] != chosen && seen[i].due < limit && (chosen->blocked || !seen[i].blocked))
			shares++;
	}
	return TimestampDifferenceMilliseconds(now, limit) / shares;
}

/* --------------------------------------------------------------------- waiting */

static void
wait_until(TimestampTz until)
{
	int events = WL_LATCH_SET | WL_EXIT_ON_PM_DEATH;
	long timeout = -1;

	Assert(!IsTransactionState());

	if (until != DT_NOEND)
	{
		timeout = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), until);
		events |= WL_TIMEOUT;
	}
	if (timeout == 0 || InterruptPending || ConfigReloadPending)
		return;
	pgstat_report_activity(STATE_IDLE, NULL);
	pgstat_report_stat(true);
	(void) WaitLatch(MyLatch, events, timeout, rs_wait_event_idle());
	ResetLatch(MyLatch);
}

/* ------------------------------------------------------------------------ main */

/*
 * Say when we look at the leases again.  False: some have been taken since
 * holds was read, and perhaps not been seen.
 */
static bool
publish(TimestampTz until, bool busy, uint32 holds)
{
	pg_atomic_write_u32(&me->busy, busy ? 1 : 0);
	pg_atomic_write_u64(&me->looks_at, (uint64) until);
	pg_memory_barrier();
	return pg_atomic_read_u32(&me->holds) == holds;
}

static void
beat(void)
{
	uint32 holds = pg_atomic_read_u32(&me->holds);
	TimestampTz now;
	const RsSeenLease *chosen;
	TimestampTz until;
	long lock_msec;

	rs_process_interrupts();
	pg_memory_barrier();
	look_at_leases();
	if (nseen == 0 && pg_atomic_read_u32(&me->entry.stop) != 0)
		proc_exit(0);

	now = GetCurrentTimestamp();
	chosen = choose(now);
	if (chosen == NULL)
	{
		until = next_due();
		if (publish(until, false, holds))
			wait_until(until);
		return;
	}

	lock_msec = Max(slice(chosen, now), 1);
	until = TimestampTzPlusMilliseconds(now, Max(lock_msec, MIN_SLICE_MSEC));

	/* From here on a cancel counts, and nothing answers it before the attempt. */
	rs_extend_begin();
	if (publish(until, true, holds))
		rs_extend(chosen, until, lock_msec);
	else
		rs_extend_end();
}

static void
name_process(void)
{
	char name[NAMEDATALEN * 2];
	const char *role;

	StartTransactionCommand();
	role = GetUserNameFromId(my_owner, true);
	snprintf(name, sizeof(name), "ruststream heartbeat: %s", role != NULL ? role : "?");
	CommitTransactionCommand();
	rs_process_name(name);
}

void
rs_heartbeat_main(Datum arg)
{
	RsHeartbeatArgs args;

	memcpy(&args, MyBgworkerEntry->bgw_extra, sizeof(args));

	rs_process_signals(rs_extend_cancel);

	/* Comes before we connect: see rs_slot_attach. */
	me = rs_heartbeat_attach(&args);
	if (me == NULL)
		proc_exit(0);
	my_owner = args.owner;
	rs_extend_init(me, args.cookie, args.owner);
	rs_connect_as_owner(args.database, args.owner);
	rs_process_settings();
	/* A crash takes the delivery with it: nobody waits for the disk or a standby. */
	SetConfigOption("synchronous_commit", "off", PGC_SUSET, PGC_S_OVERRIDE);
	name_process();

	seen = MemoryContextAlloc(TopMemoryContext, sizeof(RsSeenLease) * rs_shared->leases);
	for (;;)
		beat();
}
