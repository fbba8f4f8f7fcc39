/*-------------------------------------------------------------------------
 *
 * drain.c
 *	  CALL ruststream.drain(..): the engine in the caller's session.
 *
 * Transactions are SPI's here, and the session is somebody else's: what a
 * handler leaves in it must go, and what the caller had must stay.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/delivery.h"
#include "backend/drain.h"
#include "backend/lease.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "storage/latch.h"
#include "tcop/pquery.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/snapmgr.h"

/* The history of failures is pruned at least so often. */
#define PRUNE_DELIVERIES 1000

PG_FUNCTION_INFO_V1(rs_sql_drain);

/* ---------------------------------------------------- drain's transactions */

/* SPI's memory for our connection, which an abort would leave to the end of the CALL. */
static MemoryContext spi_context;

/* Called with the memory of the connection that an abort has ended, or NULL. */
static void
connect_spi(MemoryContext ended)
{
	MemoryContext portal_context = PortalContext;

	if (ended != NULL)
		MemoryContextDelete(ended);
	spi_context = AllocSetContextCreate(PortalContext, "ruststream drain", ALLOCSET_SMALL_SIZES);
	PortalContext = spi_context;
	SPI_connect_ext(SPI_OPT_NONATOMIC);
	PortalContext = portal_context;
}

/*
 * SPI_rollback after an error needs a clean stack of snapshots, portals and
 * savepoints, which only the rollback of a subtransaction restores: so each of
 * our transactions works inside one.  It costs a transaction id where the
 * delivery writes; a worker, whose transactions are its own, does without.
 */
static void
drain_begin(rs_isolation isolation)
{
	MemoryContext save_context = CurrentMemoryContext;

	rs_set_isolation(isolation);
	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(save_context);
}

static void
drain_commit(void)
{
	ReleaseCurrentSubTransaction();
	SPI_commit();
}

static void
drain_rollback(void)
{
	/* A failed SPI_commit has rolled back, and begun again, by itself. */
	while (GetCurrentTransactionNestLevel() > 1)
		RollbackAndReleaseCurrentSubTransaction();
	SPI_rollback();
}

/* ------------------------------------------------- a procedure's transactions */

static void
drain_commit_procedure(void)
{
	SPI_commit();
	rs_drain_restore_settings();
}

/*
 * Not SPI_rollback, which would have to find the stack of SPI's connections as it
 * was, and no cursor of the procedure's left: so the transaction's own
 * abort, which drops all of that, our connection included.  There is no other
 * below it: see check_can_deliver.
 */
static void
drain_rollback_procedure(void)
{
	AbortCurrentTransaction();
	StartTransactionCommand();
	if (ActivePortal != NULL)
		ActivePortal->portalSnapshot = NULL;
	connect_spi(spi_context);
	rs_drain_restore_settings();
}

/* -------------------------------------------------------------- who may drain */

static void
refuse_caller(const char *name, const char *owner)
{
	ereport(ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			errmsg("subscription \"%s\" can be drained by its owner only", name),
			owner != NULL
				? errhint("Connect as role \"%s\", without SET ROLE or SET SESSION AUTHORIZATION.",
						  owner)
				: 0);
}

/*
 * Only the owner itself, as who has connected, as session user and as current user:
 * the handler runs with this session's rights, and SET SESSION AUTHORIZATION or SET
 * ROLE inside a superuser's session would leave it those of the superuser to go back
 * to.  Asked at each load: the owner
 * may change meanwhile.
 */
static void
require_owner(const RsSubscription *subscription)
{
	if (GetAuthenticatedUserId() != subscription->owner ||
		GetSessionUserId() != subscription->owner || GetUserId() != subscription->owner)
		refuse_caller(subscription->name, GetUserNameFromId(subscription->owner, true));
}

static const RsSession drain_session = {
	.begin = drain_begin,
	.commit = drain_commit,
	.rollback = drain_rollback,
	.clean = rs_drain_clean,
	.drop_cursors = rs_drain_drop_cursors,
	.loaded = require_owner,
	.rethrows_cancel = true,
	.is_process = false,
	.clean_within = rs_drain_is_clean,
	.remember_claimed = rs_drain_remember_claimed,
	.begin_procedure = rs_drain_remember_settings,
	.commit_procedure = drain_commit_procedure,
	.rollback_procedure = drain_rollback_procedure,
	.trace_level = NOTICE,
};

/* ---------------------------------------------------------------------- drain */

static void
wait_until(TimestampTz until)
{
	long timeout = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), until);

	if (timeout > 0)
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, timeout,
						 rs_wait_event_hold());
	ResetLatch(MyLatch);
}

/*
 * Keep the history of failures bounded where no supervisor does.  Called
 * between two deliveries; each records no more than one failure.
 */
static void
prune_failures(RsEngine *engine)
{
	if (!engine->has_recorded_failures)
		return;
	rs_failure_prune();
	SPI_commit();
	engine->has_recorded_failures = false;
}

/*
 * After an error let go of what is leased still, and prune as well; it is more worth
 * knowing than one from here.
 */
static void
tidy_after_error(RsEngine *engine)
{
	PG_TRY();
	{
		SPI_rollback();
		rs_unclaim(engine);
		prune_failures(engine);
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(PortalContext);
		FlushErrorState();
	}
	PG_END_TRY();
}

/* Deliver until nothing is due, or the limit (negative: none) is reached. */
static void
deliver_all(RsEngine *engine, int64 limit)
{
	int64 pruned = 0;

	for (int64 delivered = 0; limit < 0 || delivered < limit;)
	{
		CHECK_FOR_INTERRUPTS();
		engine->delivery_limit = limit < 0 ? 0 : limit - delivered;
		switch (rs_deliver(engine))
		{
			case RS_PROGRESS_DELIVERED:
				delivered += engine->delivered;
				if (delivered - pruned < PRUNE_DELIVERIES)
					break;
				prune_failures(engine);
				pruned = delivered;
				break;
			case RS_PROGRESS_CLAIMED:
			case RS_PROGRESS_TRANSIENT:
				break;
			case RS_PROGRESS_HELD:
				wait_until(rs_claim_held_until(engine));
				break;
			case RS_PROGRESS_NOTHING:
			case RS_PROGRESS_QUIET:
				return;
		}
	}
}

static void
check_caller(const RsSubscription *subscription)
{
	require_owner(subscription);
	if (subscription->paused || subscription->copied)
		ereport(ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				subscription->paused ? errmsg("subscription \"%s\" is paused", subscription->name)
									 : errmsg("subscription \"%s\" was made in another database",
											  subscription->name),
				errhint("SELECT ruststream.resume(%s) lets it deliver.",
						quote_literal_cstr(subscription->name)));
}

/* What a session that drains cannot do as a worker can. */
static void
check_can_deliver(const RsSubscription *subscription)
{
	const char *reason;

	/* A procedure that fails takes every connection to SPI with it. */
	if (subscription->handler.is_procedure && SPI_unregister_relation("") != SPI_ERROR_UNCONNECTED)
		ereport(ERROR, errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				errmsg("subscription \"%s\" cannot be drained from a function or procedure: its "
					   "handler is a procedure",
					   subscription->name),
				errhint("CALL ruststream.drain by itself."));
	if (rs_table_form(&subscription->queue.table) != RS_FORM_LEASE)
		return;
	reason = rs_lease_unavailable(subscription->owner);
	if (reason != NULL)
		ereport(ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("subscription \"%s\" cannot be drained: nothing extends its leases",
					   subscription->name),
				errdetail_internal("%s.", reason),
				rs_preloaded()
					? 0
					: errhint("Leases are extended by a background process: add ruststream to "
							  "shared_preload_libraries and restart the server."));
}

static bool
is_atomic(FunctionCallInfo fcinfo)
{
	return fcinfo->context == NULL || !IsA(fcinfo->context, CallContext) ||
		   castNode(CallContext, fcinfo->context)->atomic;
}

/*
 * ruststream.drain(subscription text, max_deliveries bigint): deliver in this
 * session until nothing is due, or so many deliveries are done (NULL: no
 * limit).  Errors: 42704 no such subscription, 42501 not its owner, 25001
 * inside a transaction block, 55000 paused or copied, or a lease queue whose leases
 * nobody extends, 0A000 from within a function where the handler is a procedure.
 */
Datum
rs_sql_drain(PG_FUNCTION_ARGS)
{
	int64 limit = PG_ARGISNULL(1) ? -1 : PG_GETARG_INT64(1);
	ErrorData *volatile error = NULL;
	RsSubscription *subscription;
	RsEngine engine;
	char *name;
	int32 id;

	if (is_atomic(fcinfo))
		ereport(ERROR, errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				errmsg("ruststream.drain cannot be called inside a transaction block"),
				errdetail("Each delivery is a transaction of its own."),
				errhint("CALL it by itself, not within BEGIN .. COMMIT or a function."));
	/* A procedure may CALL what it likes, but there is one delivery in a session at a time. */
	if (rs_subscription_in_handler != NULL)
		ereport(
			ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("ruststream.drain cannot be called by a handler"),
			errhint("Publish to the other queue instead, and let its own subscription deliver."));
	if (PG_ARGISNULL(0))
		ereport(ERROR, errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("the subscription's name must not be null"));
	if (!PG_ARGISNULL(1) && limit < 0)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("max_deliveries must not be negative"));

	name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	id = rs_subscription_id(name, false);
	/* Before the load, whose errors are nobody else's to see. */
	if (rs_subscription_visibility(id) != RS_SEES_ALL)
		refuse_caller(name, NULL);
	subscription = rs_subscription_load(id, false, CurrentMemoryContext);
	check_caller(subscription);
	check_can_deliver(subscription);
	MemoryContextDelete(subscription->context);

	connect_spi(NULL);
	rs_drain_remember_session(PortalContext);
	rs_engine_init(&engine, &drain_session, id, PortalContext);
	/* The caller's transaction has a snapshot; ours begin without one. */
	SPI_commit();

	PG_TRY();
	{
		deliver_all(&engine, limit);
		prune_failures(&engine);
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(PortalContext);
		error = CopyErrorData();
		FlushErrorState();
	}
	PG_END_TRY();
	if (error != NULL)
		tidy_after_error(&engine);
	rs_stats_detach();
	rs_engine_free(&engine);
	if (error != NULL)
		ReThrowError(error);

	SPI_finish();
	PG_RETURN_VOID();
}
