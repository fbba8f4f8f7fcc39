/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  A worker: one process that serves one subscription, as its owner.
 *
 * It is connected as the subscription's owner, so claim, handler and
 * settlement have that role's rights and no others.  Between deliveries it
 * waits on its latch, outside any transaction, until somebody wakes it, a row
 * is known to come due, or the poll interval has passed.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/delivery.h"

#include "access/xact.h"
#include "catalog/namespace.h"
#include "commands/prepare.h"
#include "commands/sequence.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "storage/ipc.h"
#include "storage/lock.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/snapmgr.h"

/* The name that pg_stat_activity shows. */
static char our_name[NAMEDATALEN];

/* What pg_stat_activity shows while there is work. */
static char activity[NAMEDATALEN * 4];

/* Is a delivery under way, so that a cancel has something to cancel? */
static volatile sig_atomic_t delivering = false;

/* Has it been cancelled by a signal?  Any code can raise 57014. */
static volatile sig_atomic_t cancel_seen = false;

/* --------------------------------------------------- the worker's transactions */

static void
worker_begin(rs_isolation isolation)
{
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	rs_set_isolation(isolation);
	SPI_connect();
}

static void
worker_commit(void)
{
	SPI_finish();
	CommitTransactionCommand();
}

static void
worker_rollback(void)
{
	/* Also unwinds SPI, savepoints and settings, however deep the error was. */
	AbortOutOfAnyTransaction();
}

/* ------------------------------------------------- a procedure's transactions */

/* What a COMMIT has kept is no transaction's to undo: as DISCARD ALL does. */
static void
reset_settings(void)
{
	StartTransactionCommand();
	SetPGVariable("session_authorization", NIL, false);
	ResetAllOptions();
	CommitTransactionCommand();
	SetConfigOption("application_name", our_name, PGC_USERSET, PGC_S_SESSION);
}

static void
worker_begin_procedure(void)
{
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
}

static void
worker_commit_procedure(void)
{
	CommitTransactionCommand();
	reset_settings();
}

static void
worker_rollback_procedure(void)
{
	AbortOutOfAnyTransaction();
	reset_settings();
}

/* The temporary tables that handlers have made, if any. */
static void
drop_temporary_tables(void)
{
	Oid namespace;
	Oid toast_namespace;

	GetTempNamespaceState(&namespace, &toast_namespace);
	if (!OidIsValid(namespace))
		return;
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	ResetTempTableNamespace();
	PopActiveSnapshot();
	CommitTransactionCommand();
}

/*
 * Everything of a session that a commit keeps belongs to the handler that left
 * it, for the worker itself has none.  LISTEN is refused in a background
 * worker, and settings ended with the handler.
 */
void
rs_session_clean(void)
{
	PortalHashTableDeleteAll();
	DropAllPreparedStatements();
	LockReleaseSession(USER_LOCKMETHOD);
	ResetSequenceCaches();
	drop_temporary_tables();
}

/*
 * Of all that, a transaction's own cursors and temporary tables alone need its
 * end.  A cancel that came too late must not hit the next delivery.
 */
static bool
worker_clean_within(void)
{
	QueryCancelPending = false;
	cancel_seen = false;
	DropAllPreparedStatements();
	LockReleaseSession(USER_LOCKMETHOD);
	ResetSequenceCaches();
	return ThereAreNoReadyPortals() && (MyXactFlags & XACT_FLAGS_ACCESSEDTEMPNAMESPACE) == 0;
}

/* pg_stat_activity shows for whom this process works. */
static void
worker_loaded(const RsSubscription *subscription)
{
	/* Somebody else's now: his workers connect as him. */
	if (subscription->owner != GetSessionUserId())
		proc_exit(0);

	snprintf(our_name, sizeof(our_name), "ruststream: %s", subscription->name);
	SetConfigOption("application_name", our_name, PGC_USERSET, PGC_S_SESSION);
	snprintf(activity, sizeof(activity), "deliver from %s.%s to %s",
			 subscription->queue.table.schema, subscription->queue.table.name,
			 subscription->handler.name);
	pgstat_report_activity(STATE_RUNNING, activity);
}

static const RsSession worker_session = {
	.begin = worker_begin,
	.commit = worker_commit,
	.rollback = worker_rollback,
	.clean = rs_session_clean,
	.drop_cursors = PortalHashTableDeleteAll,
	.loaded = worker_loaded,
	.rethrows_cancel = false,
	.is_process = true,
	.clean_within = worker_clean_within,
	.begin_procedure = worker_begin_procedure,
	.commit_procedure = worker_commit_procedure,
	.rollback_procedure = worker_rollback_procedure,
	.trace_level = LOG,
};

/* ------------------------------------------------------------------- signals */

/* pg_cancel_backend: cancels a delivery, and is nothing to an idle worker. */
static void
worker_cancel(SIGNAL_ARGS)
{
	if (!delivering)
		return;
	cancel_seen = true;
	StatementCancelHandler(postgres_signal_arg);
}

static RsProgress
deliver(RsEngine *engine)
{
	RsProgress progress;

	delivering = true;
	progress = rs_deliver(engine);
	delivering = false;
	/* A cancel that came too late must not hit the next delivery. */
	QueryCancelPending = false;
	cancel_seen = false;
	return progress;
}

/* ------------------------------------------------------------------- waiting */

static void
answer_interrupts(const RsEngine *engine)
{
	rs_process_interrupts();
	if (!rs_slot_stop_requested())
		return;
	/* Who found a guard held by us looks for what we leave. */
	if (engine->subscription != NULL)
		rs_wake_neighbour(engine->subscription->queue.relid);
	proc_exit(0);
}

/* Wait for a wake-up, at most until a point in time. */
static void
wait_until(TimestampTz until, RsWorkerState state, uint32 wait_event)
{
	long timeout = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), until);

	if (timeout > 0 && !rs_wake_pending())
	{
		rs_stats_state(state);
		pgstat_report_activity(STATE_IDLE, NULL);
		pgstat_report_stat(true);
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, timeout,
						 wait_event);
		pgstat_report_activity(STATE_RUNNING, activity);
	}
	ResetLatch(MyLatch);
}

/*
 * A guard that somebody else holds is given back without a word, and what was
 * published meanwhile has its wake-up behind it: so look again, soon and then less
 * and less often, until the poll interval is reached.
 */
#define FIRST_LOOK_AGAIN INT64CONST(10000) /* microseconds */

static TimestampTz
next_look(RsEngine *engine)
{
	TimestampTz now = GetCurrentTimestamp();
	int64 rest = engine->subscription->poll_interval;
	TimestampTz next;

	if (!engine->was_blocked)
		engine->blocked_claims = 0;
	else if (FIRST_LOOK_AGAIN << engine->blocked_claims < rest)
		rest = FIRST_LOOK_AGAIN << engine->blocked_claims++;
	next = now + rest;
	return engine->next_due != 0 ? Min(next, engine->next_due) : next;
}

/* Nothing is to be had before a point in time. */
static void
rest_until(RsEngine *engine, TimestampTz until, RsWorkerState state, uint32 wait_event)
{
	wait_until(until, state, wait_event);
	if (rs_wake_pending())
		engine->blocked_claims = 0;
}

/* ---------------------------------------------------------------------- main */

/*
 * wait -> claim -> deliver -> settle -> observe, until told to stop.  The
 * order matters: we are known as idle before the claim looks, so that a row
 * committed after the claim's snapshot has somebody to wake.
 */
static void
serve(RsEngine *engine)
{
	for (;;)
	{
		answer_interrupts(engine);
		rs_wake_idle(true);
		switch (deliver(engine))
		{
			case RS_PROGRESS_DELIVERED:
			case RS_PROGRESS_CLAIMED:
			case RS_PROGRESS_TRANSIENT:
				pgstat_report_stat(false);
				break;
			case RS_PROGRESS_NOTHING:
				rest_until(engine, next_look(engine), RS_WORKER_IDLE, rs_wait_event_idle());
				break;
			case RS_PROGRESS_HELD:
				rest_until(engine, Min(next_look(engine), rs_claim_held_until(engine)),
						   RS_WORKER_HOLDING, rs_wait_event_hold());
				break;
			case RS_PROGRESS_QUIET:
				proc_exit(0);
		}
	}
}

void
rs_worker_main(Datum arg)
{
	RsWorkerArgs args;
	RsEngine engine;

	memcpy(&args, MyBgworkerEntry->bgw_extra, sizeof(args));

	rs_process_signals(worker_cancel);

	/*
	 * First the slot: a worker that was told to leave while it was starting
	 * never connects, and one that leaves is gone from the database before it
	 * gives the slot back.
	 */
	if (!rs_slot_attach(&args))
		proc_exit(0);
	rs_connect_as_owner(args.database, args.owner);

	rs_engine_init(
		&engine, &worker_session, args.subscription,
		AllocSetContextCreate(TopMemoryContext, "ruststream worker", ALLOCSET_DEFAULT_SIZES));
	for (;;)
	{
		volatile bool cancelled = false;

		PG_TRY();
		{
			serve(&engine);
		}
		PG_CATCH();
		{
			MemoryContext save = MemoryContextSwitchTo(TopMemoryContext);
			ErrorData *error = CopyErrorData();

			delivering = false;
			cancelled = error->sqlerrcode == ERRCODE_QUERY_CANCELED && cancel_seen;
			cancel_seen = false;
			EmitErrorReport();
			AbortOutOfAnyTransaction();
			if (!cancelled)
				rs_stats_broken(args.subscription, error->message);
			FlushErrorState();
			FreeErrorData(error);
			MemoryContextSwitchTo(save);
		}
		PG_END_TRY();
		/* The supervisor starts another one, later, and shows why until then. */
		if (!cancelled)
			proc_exit(1);
	}
}
