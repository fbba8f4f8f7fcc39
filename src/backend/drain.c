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
#include "backend/compat.h"
#include "backend/delivery.h"
#include "backend/lease.h"

#include "access/xact.h"
#include "catalog/dependency.h"
#include "commands/async.h"
#include "commands/prepare.h"
#include "miscadmin.h"
#include "lib/stringinfo.h"
#include "nodes/parsenodes.h"
#include "storage/latch.h"
#include "storage/lock.h"
#include "tcop/pquery.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/guc_tables.h"
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

/* ------------------------------------------------- what handlers leave behind */

/*
 * What a session keeps beyond a commit.  One query says what was there before
 * the first delivery and what is there after each, so that the difference is
 * what handlers have left.  It runs outside the delivery's transaction, where
 * only session-level advisory locks remain.
 */
#define CURSORS "SELECT 'cursor', c.name, 0, 0, 0, '' FROM pg_catalog.pg_cursors AS c"

static const char cursors_text[] = CURSORS;
static const char session_state_text[] =
	"SELECT 'prepared', p.name, 0, 0, 0, '' FROM pg_catalog.pg_prepared_statements AS p "
	"UNION ALL " CURSORS
	" UNION ALL SELECT 'channel', l, 0, 0, 0, '' FROM pg_catalog.pg_listening_channels() AS l "
	"UNION ALL SELECT 'object', '', d.classid::pg_catalog.int8, d.objid::pg_catalog.int8, 0, '' "
	"FROM pg_catalog.pg_depend AS d "
	"WHERE d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_namespace'::pg_catalog.regclass "
	"AND d.refobjid OPERATOR(pg_catalog.=) pg_catalog.pg_my_temp_schema() "
	"AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_depend AS i "
	"WHERE i.classid OPERATOR(pg_catalog.=) d.classid "
	"AND i.objid OPERATOR(pg_catalog.=) d.objid AND i.objsubid OPERATOR(pg_catalog.=) 0 "
	"AND i.deptype OPERATOR(pg_catalog.=) 'i') "
	"UNION ALL SELECT 'lock', '', k.classid::pg_catalog.int8, k.objid::pg_catalog.int8, "
	"k.objsubid, k.mode FROM pg_catalog.pg_locks AS k "
	"WHERE k.locktype OPERATOR(pg_catalog.=) 'advisory' "
	"AND k.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid() AND k.granted";

#define STATE_COLUMNS 6

/* Of each thing that the caller's session had before: its row, as one text. */
static List *callers_state;

/* The same of what it had after a claim whose deliveries share a commit. */
static List *claims_state;

/* The queries, prepared once a backend: they run with each delivery. */
static SPIPlanPtr cursors_plan;
static SPIPlanPtr session_state_plan;

/* Read the session's state, or part of it; the result is in SPI_tuptable. */
static uint64
read_rows(SPIPlanPtr *plan, const char *text)
{
	MemoryContext save_context = CurrentMemoryContext;
	int rc;

	PushActiveSnapshot(GetTransactionSnapshot());
	if (*plan == NULL)
	{
		SPIPlanPtr prepared = SPI_prepare(text, 0, NULL);

		if (prepared == NULL || SPI_keepplan(prepared) != 0)
			elog(ERROR, "could not prepare the query of the session's state: %s",
				 SPI_result_code_string(SPI_result));
		*plan = prepared;
	}
	rc = SPI_execute_plan(*plan, NULL, NULL, false, 0);
	PopActiveSnapshot();
	/* SPI leaves us in its own memory. */
	MemoryContextSwitchTo(save_context);
	if (rc != SPI_OK_SELECT)
		elog(ERROR, "could not read the session's state: %s", SPI_result_code_string(rc));
	return SPI_processed;
}

/* The columns of a row of the session's state, and all of them as one text. */
static char *
state_row(uint64 row, char **columns)
{
	StringInfoData key;

	initStringInfo(&key);
	for (int i = 0; i < STATE_COLUMNS; i++)
	{
		columns[i] = SPI_getvalue(SPI_tuptable->vals[row], SPI_tuptable->tupdesc, i + 1);
		appendStringInfo(&key, "%s|", columns[i] ? columns[i] : "");
	}
	return key.data;
}

static List *
read_session_state(MemoryContext context)
{
	uint64 rows = read_rows(&session_state_plan, session_state_text);
	List *state = NIL;

	for (uint64 i = 0; i < rows; i++)
	{
		char *columns[STATE_COLUMNS];
		char *key = state_row(i, columns);
		MemoryContext save = MemoryContextSwitchTo(context);

		state = lappend(state, pstrdup(key));
		MemoryContextSwitchTo(save);
	}
	return state;
}

static bool
is_in(const List *state, const char *key)
{
	ListCell *cell;

	foreach (cell, state)
	{
		if (strcmp(lfirst(cell), key) == 0)
			return true;
	}
	return false;
}

static bool
is_callers(const char *key)
{
	return is_in(callers_state, key);
}

static void
release_lock(char **columns)
{
	LOCKTAG tag;
	LOCKMODE mode = strcmp(columns[5], "ShareLock") == 0 ? ShareLock : ExclusiveLock;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, (uint32) strtoul(columns[2], NULL, 10),
						 (uint32) strtoul(columns[3], NULL, 10),
						 (uint16) strtoul(columns[4], NULL, 10));
	/* A session may hold a lock several times over. */
	while (rs_lock_held_by_me(&tag, mode))
		LockRelease(&tag, mode, true);
}

static void
drop_cursor(char **columns)
{
	Portal portal = GetPortalByName(columns[1]);

	if (PortalIsValid(portal))
		PortalDrop(portal, false);
}

/* The handler's cursors, before the commit; each transaction asks. */
static void
drain_drop_cursors(void)
{
	uint64 rows = read_rows(&cursors_plan, cursors_text);
	SPITupleTable *cursors = SPI_tuptable;

	for (uint64 i = 0; i < rows; i++)
	{
		char *columns[STATE_COLUMNS];
		char *key;

		SPI_tuptable = cursors;
		key = state_row(i, columns);
		if (!is_callers(key))
			drop_cursor(columns);
	}
	SPI_freetuptable(cursors);
}

/* Remove one thing; what lies in the temporary schema goes in the end, all at once. */
static void
remove_from_session(char **columns, ObjectAddresses *temporary)
{
	if (strcmp(columns[0], "prepared") == 0)
		DropPreparedStatement(columns[1], false);
	else if (strcmp(columns[0], "cursor") == 0)
		drop_cursor(columns);
	else if (strcmp(columns[0], "channel") == 0)
		Async_Unlisten(columns[1]);
	else if (strcmp(columns[0], "object") == 0)
	{
		ObjectAddress address = {(Oid) strtoul(columns[2], NULL, 10),
								 (Oid) strtoul(columns[3], NULL, 10), 0};

		add_exact_object_address(&address, temporary);
	}
	else
		release_lock(columns);
}

/*
 * Whatever a handler has left waits for the end of the transaction: then so does
 * the next delivery.  A lock that ends with the transaction counts, too, since
 * it cannot be told from a session's.
 */
static bool
drain_clean_within(void)
{
	uint64 rows = read_rows(&session_state_plan, session_state_text);
	SPITupleTable *state = SPI_tuptable;
	bool is_clean = true;

	for (uint64 i = 0; i < rows && is_clean; i++)
	{
		char *columns[STATE_COLUMNS];

		SPI_tuptable = state;
		is_clean = is_in(claims_state, state_row(i, columns));
	}
	SPI_freetuptable(state);
	return is_clean;
}

static void
drain_remember_claimed(MemoryContext context)
{
	claims_state = read_session_state(context);
	SPI_freetuptable(SPI_tuptable);
}

/* Undo what a handler left in the caller's session, and nothing the caller had. */
static void
drain_clean(void)
{
	uint64 rows = read_rows(&session_state_plan, session_state_text);
	SPITupleTable *state = SPI_tuptable;
	ObjectAddresses *temporary = new_object_addresses();

	for (uint64 i = 0; i < rows; i++)
	{
		char *columns[STATE_COLUMNS];
		char *key;

		SPI_tuptable = state;
		key = state_row(i, columns);
		if (!is_callers(key))
			remove_from_session(columns, temporary);
	}
	PushActiveSnapshot(GetTransactionSnapshot());
	performMultipleDeletions(temporary, DROP_CASCADE,
							 PERFORM_DELETION_INTERNAL | PERFORM_DELETION_QUIETLY);
	PopActiveSnapshot();
	free_object_addresses(temporary);
	SPI_freetuptable(state);
	/* The next transaction must begin without a snapshot. */
	SPI_commit();
}

/* ------------------------------------------------- a procedure's transactions */

/*
 * What the caller's session had set before a procedure that may SET and COMMIT:
 * pairs of a name and a value.
 */
static List *callers_settings;
static Oid callers_session_user;

/*
 * The settings that a session may make and RESET ALL would undo, as such pairs in
 * the current context.  The view pg_settings would do, but for those that belong to
 * nobody ("my.own").
 */
static List *
read_settings(void)
{
	List *settings = NIL;
	struct config_generic **variables;
	int count;

#if PG_VERSION_NUM < 160000
	variables = get_guc_variables();
	count = GetNumConfigOptions();
#else
	variables = get_guc_variables(&count);
#endif
	for (int i = 0; i < count; i++)
	{
		const char *value;

		if (variables[i]->context < PGC_SUSET || (variables[i]->flags & GUC_NO_RESET_ALL) != 0)
			continue;
		/*
		 * Nor what this role may not set, and has not: a handler whose language
		 * is loaded with it defines settings of that kind.
		 */
		if (variables[i]->context == PGC_SUSET && variables[i]->source < PGC_S_SESSION &&
			!superuser())
			continue;
		value = GetConfigOption(variables[i]->name, true, false);
		settings =
			lappend(settings, list_make2(pstrdup(variables[i]->name), pstrdup(value ? value : "")));
	}
	return settings;
}

/* What the caller had set; false where it is a setting that the handler made. */
static bool
callers_setting(const char *name, const char **value)
{
	ListCell *cell;

	foreach (cell, callers_settings)
	{
		if (strcmp(linitial(lfirst(cell)), name) == 0)
		{
			*value = lsecond(lfirst(cell));
			return true;
		}
	}
	*value = NULL;
	return false;
}

/* SET, or RESET where there is no value. */
static void
set_for_session(const char *name, const char *value)
{
	(void) set_config_option(name, value, superuser() ? PGC_SUSET : PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SET, true, 0, false);
}

static void
restore_settings(void)
{
	List *settings;
	ListCell *cell;

	/* The role first: what follows is done with the caller's rights. */
	if (GetSessionUserId() != callers_session_user)
		set_for_session("session_authorization", GetUserNameFromId(callers_session_user, false));
	set_for_session("role", "none");

	settings = read_settings();
	foreach (cell, settings)
	{
		const char *now = lsecond(lfirst(cell));
		const char *before;

		if (!callers_setting(linitial(lfirst(cell)), &before) || strcmp(before, now) != 0)
			set_for_session(linitial(lfirst(cell)), before);
	}
	SPI_commit();
}

/* In the transaction that SPI has begun, without our savepoint. */
static void
drain_begin_procedure(void)
{
	callers_session_user = GetSessionUserId();
	callers_settings = read_settings();
}

static void
drain_commit_procedure(void)
{
	SPI_commit();
	restore_settings();
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
	restore_settings();
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
	.clean = drain_clean,
	.drop_cursors = drain_drop_cursors,
	.loaded = require_owner,
	.rethrows_cancel = true,
	.is_process = false,
	.clean_within = drain_clean_within,
	.remember_claimed = drain_remember_claimed,
	.begin_procedure = drain_begin_procedure,
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
	callers_state = read_session_state(PortalContext);
	claims_state = NIL;
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
