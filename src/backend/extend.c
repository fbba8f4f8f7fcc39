/*-------------------------------------------------------------------------
 *
 * extend.c
 *	  One extension of a lease: a short transaction that moves the row's token.
 *
 * The new token is announced in shared memory before it is written, and becomes
 * the one held once the transaction has committed, so that at any moment the
 * row holds one of the two.  A settlement that comes meanwhile takes the lease
 * away and cancels us; what we find out then concerns nobody.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "commands/trigger.h"
#include "datatype/timestamp.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/lmgr.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/snapmgr.h"
#include "utils/timeout.h"

#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/delivery.h"
#include "backend/heartbeat.h"
#include "backend/shared.h"

/* The pause after an attempt that was blocked; after any other failure, the least. */
#define BLOCKED_PAUSE_MSEC 10
#define MIN_FAILED_PAUSE_MSEC 100

/* A queue as it is now, with the statement that extends. */
typedef struct BeatQueue
{
	RsQueue queue;
	RsPlans *plans;
	MemoryContext context;
} BeatQueue;

/* An extension under way. */
typedef struct Extension
{
	RsLease *lease;
	uint64 serial;
	Oid queue;
	TimestampTz token;
	TimestampTz until;
	TimestampTz deadline; /* of the attempt */
	long lock_msec;       /* how long it may wait for a lock */
	char id[RS_LEASE_ID_BYTES];
} Extension;

static RsHeartbeat *me;
static uint64 my_cookie;
static Oid my_owner;

/* In TopMemoryContext. */
static List *queues = NIL;
static uint64 queues_generation;

/* Is an attempt under way, so that a cancel has something to cancel? */
static volatile sig_atomic_t extending = false;

void
rs_extend_init(RsHeartbeat *heartbeat, uint64 cookie, Oid owner)
{
	me = heartbeat;
	my_cookie = cookie;
	my_owner = owner;
}

void
rs_extend_cancel(SIGNAL_ARGS)
{
	if (extending)
		StatementCancelHandler(postgres_signal_arg);
}

void
rs_extend_begin(void)
{
	extending = true;
}

/* ------------------------------------------------------------- what it changes */

/* Announce the new token; false: the lease has ended meanwhile. */
static bool
announce(const RsSeenLease *chosen, Extension *extension)
{
	RsLease *lease = &rs_shared->lease[chosen->number];
	TimestampTz now = GetCurrentTimestamp();
	bool held;

	SpinLockAcquire(&lease->mutex);
	held = lease->held && lease->serial == chosen->serial;
	if (held)
	{
		/* The token moves forward, whatever the clock does. */
		lease->announced = Max(now + lease->length, lease->token + 1);
		lease->announced = Min(lease->announced, END_TIMESTAMP - 1);
		lease->extender = my_cookie;
		extension->lease = lease;
		extension->serial = lease->serial;
		extension->queue = lease->queue;
		extension->token = lease->token;
		extension->until = lease->announced;
		strlcpy(extension->id, lease->id, RS_LEASE_ID_BYTES);
	}
	SpinLockRelease(&lease->mutex);
	return held;
}

/* The transaction has committed: the row holds the new token, or had lost the old one. */
static void
note_committed(const Extension *extension, bool written)
{
	RsLease *lease = extension->lease;

	SpinLockAcquire(&lease->mutex);
	if (lease->held && lease->serial == extension->serial)
	{
		lease->extender = 0;
		lease->lost = !written;
		lease->blocked = false;
		if (written)
			lease->token = extension->until;
		lease->announced = lease->token;
		lease->due = lease->token - lease->length / 2;
	}
	SpinLockRelease(&lease->mutex);
}

/*
 * The transaction was rolled back: the row holds the old token, if any.
 * Returns whether this is the first such failure of a lease that is still held.
 */
static bool
note_failed(const Extension *extension, bool blocked, bool disturbed)
{
	RsLease *lease = extension->lease;
	TimestampTz now = GetCurrentTimestamp();
	bool first = false;

	SpinLockAcquire(&lease->mutex);
	if (lease->held && lease->serial == extension->serial)
	{
		lease->extender = 0;
		lease->announced = lease->token;
		if (!disturbed)
		{
			int64 pause =
				blocked ? BLOCKED_PAUSE_MSEC : Max(lease->length / 8000, MIN_FAILED_PAUSE_MSEC);

			lease->blocked = true;
			lease->due = TimestampTzPlusMilliseconds(now, pause);
			first = !blocked && !lease->reported;
			lease->reported |= first;
		}
	}
	SpinLockRelease(&lease->mutex);
	return first;
}

/* ------------------------------------------------------------------ extending */

static void
forget_queues(void)
{
	ListCell *cell;

	foreach (cell, queues)
	{
		BeatQueue *entry = lfirst(cell);

		rs_plans_free(entry->plans);
		MemoryContextDelete(entry->context);
	}
	list_free(queues);
	queues = NIL;
}

/*
 * The queue, as it is now.  We hold a lock on the table, and have heard of all
 * that was done to it before.
 */
static BeatQueue *
get_queue(Oid relid)
{
	MemoryContext context;
	MemoryContext save;
	BeatQueue *entry;
	ListCell *cell;

	if (queues_generation != rs_catalog_generation())
		forget_queues();
	queues_generation = rs_catalog_generation();
	foreach (cell, queues)
	{
		entry = lfirst(cell);
		if (entry->queue.relid == relid)
			return entry;
	}

	/* Until it is whole it belongs to the transaction. */
	context =
		AllocSetContextCreate(CurTransactionContext, "ruststream queue", ALLOCSET_SMALL_SIZES);
	save = MemoryContextSwitchTo(context);
	entry = palloc0(sizeof(BeatQueue));
	entry->context = context;
	rs_queue_load(relid, &entry->queue);
	rs_check_superuser(my_owner, relid);
	if (entry->queue.table.column[RS_ROLE_LOCKED_UNTIL] == NULL)
		ereport(ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("the queue is not of the lease form any more"));
	entry->plans = rs_plans_create(&entry->queue, NULL, context);
	MemoryContextSwitchTo(TopMemoryContext);
	queues = lappend(queues, entry);
	MemoryContextSetParent(context, TopMemoryContext);
	MemoryContextSwitchTo(save);
	return entry;
}

/* Write the new token, in the current transaction; false: the row has not got the old one. */
static bool
write_token(const Extension *extension)
{
	BeatQueue *entry;
	RsValues values;
	Oid input;
	Oid parameter;
	int64 rows;
	int nest_level;

	/* First the lock, so that what we know of the table holds. */
	LockRelationOid(extension->queue, RowExclusiveLock);

	/* Whatever a trigger sets ends with it. */
	nest_level = NewGUCNestLevel();
	PushActiveSnapshot(GetTransactionSnapshot());
	entry = get_queue(extension->queue);
	getTypeInputInfo(entry->queue.type[RS_ROLE_ID], &input, &parameter);
	rs_values_init(&values);
	rs_value_set(&values, RS_PARAM_ID,
				 OidInputFunctionCall(input, pstrdup(extension->id), parameter, -1), 0);
	PopActiveSnapshot();
	rs_value_set(&values, RS_PARAM_TOKEN, TimestampTzGetDatum(extension->token), 0);
	rs_value_set(&values, RS_PARAM_UNTIL, TimestampTzGetDatum(extension->until), 0);
	rows = rs_execute(entry->plans, RS_OP_EXTEND, &values);
	/* While they can still be cancelled. */
	rs_fire_deferred_constraints();
	PortalHashTableDeleteAll();
	AtEOXact_GUC(false, nest_level);
	return rows > 0;
}

/* A cancel that came too late must not hit what follows. */
void
rs_extend_end(void)
{
	disable_timeout(STATEMENT_TIMEOUT, false);
	extending = false;
	QueryCancelPending = false;
	pg_atomic_write_u32(&me->busy, 0);
}

static void
attempt(const Extension *extension)
{
	char lock_timeout[32];
	bool written;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	rs_set_isolation(RS_ISOLATION_READ_COMMITTED);
	snprintf(lock_timeout, sizeof(lock_timeout), "%ld", extension->lock_msec);
	(void) set_config_option("lock_timeout", lock_timeout, PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_LOCAL, true, 0, false);
	enable_timeout_at(STATEMENT_TIMEOUT, extension->deadline);
	RS_FAILPOINT("extension_announced");

	SPI_connect();
	written = write_token(extension);
	SPI_finish();
	RS_FAILPOINT("extension_written");

	/* No interrupt comes between the commit and its note. */
	HOLD_INTERRUPTS();
	CommitTransactionCommand();
	RS_FAILPOINT("extension_committed");
	note_committed(extension, written);
	RESUME_INTERRUPTS();
}

/* An attempt has failed, and everything is rolled back. */
static void
report_failure(const Extension *extension, const ErrorData *error)
{
	bool cancelled = error->sqlerrcode == ERRCODE_QUERY_CANCELED;
	bool late = GetCurrentTimestamp() >= extension->deadline;
	bool blocked = (cancelled && late) || error->sqlerrcode == ERRCODE_LOCK_NOT_AVAILABLE ||
				   error->sqlerrcode == ERRCODE_T_R_DEADLOCK_DETECTED;

	if (!note_failed(extension, blocked, cancelled && !late))
		return;
	ereport(LOG, errcode(error->sqlerrcode),
			errmsg("ruststream cannot extend the lease of row %s of the queue with OID %u: %s",
				   extension->id, extension->queue, error->message),
			error->detail ? errdetail_internal("%s", error->detail) : 0,
			error->hint ? errhint("%s", error->hint) : 0,
			error->context ? errcontext("%s", error->context) : 0);
}

void
rs_extend(const RsSeenLease *chosen, TimestampTz deadline, long lock_msec)
{
	Extension extension = {.deadline = deadline, .lock_msec = lock_msec};

	RS_FAILPOINT("extension_due");
	if (!announce(chosen, &extension))
	{
		rs_extend_end();
		return;
	}

	pgstat_report_activity(STATE_RUNNING, "extending a lease");
	PG_TRY();
	{
		attempt(&extension);
	}
	PG_CATCH();
	{
		MemoryContext save = MemoryContextSwitchTo(TopMemoryContext);
		ErrorData *error = CopyErrorData();

		rs_extend_end();
		FlushErrorState();
		AbortOutOfAnyTransaction();
		report_failure(&extension, error);
		FreeErrorData(error);
		MemoryContextSwitchTo(save);
	}
	PG_END_TRY();
	rs_extend_end();
	rs_session_clean();
	pgstat_report_stat(false);
}
