/*-------------------------------------------------------------------------
 *
 * status.c
 *	  What the views need beyond our tables and shared memory.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "backend/catalog.h"
#include "backend/compat.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_authid.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/timeout.h"

PG_FUNCTION_INFO_V1(rs_sql_is_here);
PG_FUNCTION_INFO_V1(rs_sql_no_workers);
PG_FUNCTION_INFO_V1(rs_sql_depth);
PG_FUNCTION_INFO_V1(rs_sql_transaction_plan);

/* ------------------------------------------------------------------ this server */

/* internal_is_here(database oid, system_identifier bigint) returns boolean */
Datum
rs_sql_is_here(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(PG_GETARG_OID(0) == MyDatabaseId &&
				   (uint64) PG_GETARG_INT64(1) == GetSystemIdentifier());
}

/* internal_no_workers() returns text */
Datum
rs_sql_no_workers(PG_FUNCTION_ARGS)
{
	if (!rs_preloaded())
		PG_RETURN_TEXT_P(
			cstring_to_text("not preloaded: add ruststream to shared_preload_libraries"));
	if (RecoveryInProgress())
		PG_RETURN_TEXT_P(cstring_to_text("quiet: this server is a standby"));
	if (!rs_workers_enabled)
		PG_RETURN_TEXT_P(cstring_to_text("workers are off (ruststream.workers)"));
	PG_RETURN_NULL();
}

/* ------------------------------------------------------------------------ depth */

/*
 * A look at a queue runs what others have written: policies, functions of their
 * indexes.  It counts as the subscription's owner, in a subtransaction that is
 * rolled back in any case, and is bounded three ways:
 *
 * - in rows: counting stops at DEPTH_LIMIT;
 * - in locks: it waits for none longer than LOOK_LOCK_TIMEOUT;
 * - in time: a LIMIT bounds what is found, not what is read.  Rows that are
 *   gone stay in the index until a vacuum, and a cold row is a read from disk.
 *   So a timer cancels what runs too long, as statement_timeout would, and the
 *   figures are those of the portion that was counted last.
 *
 * The first look of a query may take LOOK_USEC; what is left of it goes to the
 * next one, and each gets LOOK_USEC_LEAST: one slow queue does not take the
 * figures from all behind it.
 */
#define DEPTH_LIMIT 10000
#define DEPTH_FIRST_PORTION 100
#define DEPTH_PORTION_GROWTH 10

#define LOOK_USEC 25000
#define LOOK_USEC_LEAST 2000
#define LOOK_LOCK_TIMEOUT "10ms"

/* The view knows it by its first word. */
#define LOCKED "locked: another session holds a lock on the table or one of its indexes"

typedef struct Depth
{
	RsPlans *plans; /* while it counts */

	bool counted;
	bool dead_counted;
	bool capped; /* there may be more than was counted */
	int64 ready;
	int64 waiting;
	int64 dead;
	TimestampTz now;
	TimestampTz oldest; /* when the ready row that is due longest came due; 0: not known */
	char *problem;      /* why it could not be counted, or NULL */
	bool locked;        /* .. because somebody else has locked what it would read */
} Depth;

/* A look is under way: a policy that reads the view does not begin another. */
static bool looking = false;

/* The timer of a look, and whether it has cancelled what ran. */
static TimeoutId look_timeout = MAX_TIMEOUTS;
static volatile sig_atomic_t look_cancelled = false;
static volatile sig_atomic_t look_waited = false; /* .. a wait for a lock, that is */

static int64
count_column(int column)
{
	bool isnull;

	return DatumGetInt64(
		SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, column, &isnull));
}

/* Count up to a limit; returns how many. */
static int64
count_live(rs_operation operation, const RsValues *values, Depth *depth)
{
	Datum oldest;
	bool isnull;

	if (rs_query(depth->plans, operation, values) != 1)
		return 0;
	depth->counted = true;
	depth->ready = count_column(1);
	depth->waiting = count_column(2);
	oldest = SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 3, &isnull);
	depth->oldest = isnull ? 0 : DatumGetTimestampTz(oldest);
	return depth->ready + depth->waiting;
}

static int64
count_dead(rs_operation operation, const RsValues *values, Depth *depth)
{
	if (rs_query(depth->plans, operation, values) != 1)
		return 0;
	depth->dead_counted = true;
	depth->dead = count_column(1);
	return depth->dead;
}

/* May the dead letters be counted, and how? */
static bool
can_count_dead(const RsSubscription *subscription, rs_operation *operation)
{
	*operation =
		subscription->policy.dead_letter_is_table ? RS_OP_DEPTH_DEAD_TABLE : RS_OP_DEPTH_DEAD_GROUP;
	/* Moving rows there does not need the right to read them. */
	return subscription->policy.has_dead_letter &&
		   (!subscription->policy.dead_letter_is_table ||
			pg_class_aclcheck(subscription->dead_letter_table, subscription->owner, ACL_SELECT) ==
				ACLCHECK_OK);
}

/* How the rows that are alive are counted: a group's, or those of all. */
static rs_operation
live_operation(const RsSubscription *subscription)
{
	if (!subscription->every_group)
		return RS_OP_DEPTH;
	return subscription->dead_letter_group != NULL ? RS_OP_DEPTH_ALIVE : RS_OP_DEPTH_ALL;
}

/* Count in portions that grow, so that there is a figure when the time is over. */
static void
count_in_portions(const RsSubscription *subscription, RsValues *values, Depth *depth)
{
	rs_operation operation;
	bool dead = can_count_dead(subscription, &operation);
	bool live = true;

	for (int64 limit = DEPTH_FIRST_PORTION; live || dead; limit *= DEPTH_PORTION_GROWTH)
	{
		rs_value_set(values, RS_PARAM_LIMIT, Int64GetDatum(limit), 0);
		live = live && count_live(live_operation(subscription), values, depth) >= limit;
		dead = dead && count_dead(operation, values, depth) >= limit;
		if (limit >= DEPTH_LIMIT)
		{
			depth->capped = live || dead;
			break;
		}
	}
}

static void
count_queue(RsSubscription *subscription, Depth *depth)
{
	RsValues values;

	depth->plans =
		rs_plans_create(&subscription->queue, &subscription->destination, subscription->context);
	rs_values_init(&values);
	if (subscription->group_name != NULL)
		rs_value_set(&values, RS_PARAM_GROUP, CStringGetTextDatum(subscription->group_name), 0);
	if (subscription->dead_letter_group != NULL)
		rs_value_set(&values, RS_PARAM_DEAD_GROUP,
					 CStringGetTextDatum(subscription->dead_letter_group), 0);
	rs_value_set(&values, RS_PARAM_NOW, TimestampTzGetDatum(depth->now), 0);

	SPI_connect();
	count_in_portions(subscription, &values, depth);
	SPI_finish();
}

/* Where the table itself is locked there is no need to wait at all. */
static bool
lock_without_waiting(const RsRow *row)
{
	Oid dead_letter_table = DatumGetObjectId(rs_row_get(row, RS_SUBSCRIPTION_DEAD_LETTER_TABLE));

	if (!ConditionalLockRelationOid(DatumGetObjectId(rs_row_get(row, RS_SUBSCRIPTION_QUEUE)),
									AccessShareLock))
		return false;
	return rs_row_isnull(row, RS_SUBSCRIPTION_DEAD_LETTER_TABLE) ||
		   ConditionalLockRelationOid(dead_letter_table, AccessShareLock);
}

/*
 * As the owner from before the first look at anything of the table: building a
 * subscription may evaluate functions of its indexes already.  User and
 * settings are left to the end of the subtransaction.
 */
static void
count_as_owner(const RsRow *row, Depth *depth)
{
	Oid save_userid;
	int save_sec_context;

	GetUserIdAndSecContext(&save_userid, &save_sec_context);
	SetUserIdAndSecContext(rs_subscription_owner(row), save_sec_context |
														   SECURITY_LOCAL_USERID_CHANGE |
														   SECURITY_RESTRICTED_OPERATION);
	(void) NewGUCNestLevel();
	(void) set_config_option("search_path", "pg_catalog, pg_temp", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	(void) set_config_option("lock_timeout", LOOK_LOCK_TIMEOUT, PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	if (lock_without_waiting(row))
		count_queue(rs_subscription_build(row, CurrentMemoryContext), depth);
	else
		depth->locked = true;
}

/*
 * The timer's handler: cancel what runs, as a signal would.  A cancel that is
 * pending already is somebody else's, and stays that.
 */
static void
cancel_look(void)
{
	if (QueryCancelPending)
		return;
	look_cancelled = true;
	look_waited = MyProc->waitLock != NULL;
	QueryCancelPending = true;
	InterruptPending = true;
}

/* What an error means for the figures.  Rethrows a cancel that was the caller's. */
static void
look_failed(ErrorData *error, bool timed_out, Depth *depth)
{
	bool cancelled = rs_is_interrupt(error);

	if (cancelled && !timed_out)
		ReThrowError(error);
	else if (error->sqlerrcode == ERRCODE_LOCK_NOT_AVAILABLE || (cancelled && look_waited))
		depth->locked = true;
	else if (cancelled)
		depth->capped = true;
	else
		depth->problem = error->message;
}

/*
 * Count in a subtransaction that is rolled back in any case: an error costs
 * one row of a view, and no lock on the table outlasts the look.
 */
static void
count_safely(const RsRow *row, int64 usec, Depth *depth)
{
	MemoryContext save_context = CurrentMemoryContext;
	ResourceOwner save_owner = CurrentResourceOwner;
	bool has_statement_timeout = get_timeout_active(STATEMENT_TIMEOUT);
	ErrorData *volatile error = NULL;
	bool timed_out;

	if (look_timeout == MAX_TIMEOUTS)
		look_timeout = RegisterTimeout(USER_TIMEOUT, cancel_look);

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(save_context);
	looking = true;
	look_cancelled = false;
	enable_timeout_after(look_timeout, (int) (usec / 1000));
	PG_TRY();
	{
		count_as_owner(row, depth);
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(save_context);
		error = CopyErrorData();
		FlushErrorState();
	}
	PG_END_TRY();
	disable_timeout(look_timeout, false);
	looking = false;

	/*
	 * Where statement_timeout has come as well, it is the one that counts.  A
	 * signal that arrives between our timer and its effect is lost with it.
	 */
	timed_out =
		look_cancelled && !(has_statement_timeout && !get_timeout_active(STATEMENT_TIMEOUT));
	if (timed_out)
		QueryCancelPending = false;

	RollbackAndReleaseCurrentSubTransaction();
	MemoryContextSwitchTo(save_context);
	CurrentResourceOwner = save_owner;
	if (depth->plans != NULL)
		rs_plans_free(depth->plans);
	if (error != NULL)
		look_failed(error, timed_out, depth);
}

/* What is left of the time that the looks of this query may take, in microseconds. */
static int64 *
time_left(FmgrInfo *function)
{
	if (function->fn_extra == NULL)
	{
		function->fn_extra = MemoryContextAlloc(function->fn_mcxt, sizeof(int64));
		*(int64 *) function->fn_extra = LOOK_USEC;
	}
	return function->fn_extra;
}

static void
look(const RsRow *row, FmgrInfo *function, Depth *depth)
{
	int64 *left = time_left(function);

	if (rs_subscription_is_copied(row))
		return;
	depth->capped = looking;
	if (looking)
		return;
	count_safely(row, Max(*left, LOOK_USEC_LEAST), depth);
	*left -= Min(*left, GetCurrentTimestamp() - depth->now);
}

/* ------------------------------------------------------------------- visibility */

static RsVisibility
visibility(const RsRow *row)
{
	Oid viewer = GetUserId();

	if (has_privs_of_role(viewer, rs_subscription_owner(row)))
		return RS_SEES_ALL;
	if (has_privs_of_role(viewer, ROLE_PG_MONITOR) ||
		rs_owns_table(DatumGetObjectId(rs_row_get(row, RS_SUBSCRIPTION_QUEUE))))
		return RS_SEES_FIGURES;
	return RS_SEES_NOTHING;
}

static RsRow *
row_by_id(int32 id)
{
	List *rows = rs_catalog_find(rs_objects(false)->subscription, RS_SUBSCRIPTION_ID, F_INT4EQ,
								 Int32GetDatum(id));

	return rows == NIL ? NULL : linitial(rows);
}

RsVisibility
rs_subscription_visibility(int32 id)
{
	RsRow *row = row_by_id(id);

	return row == NULL ? RS_SEES_NOTHING : visibility(row);
}

/*
 * internal_depth(subscription_id) returns (ready, waiting, dead, capped, oldest,
 * problem).  A figure that is not known is NULL; capped says that there may be
 * more than the figures say.
 */
Datum
rs_sql_depth(PG_FUNCTION_ARGS)
{
	enum
	{
		READY,
		WAITING,
		DEAD,
		CAPPED,
		OLDEST,
		PROBLEM,
		COLUMNS
	};
	RsRow *row = row_by_id(PG_GETARG_INT32(0));
	RsVisibility seen = row == NULL ? RS_SEES_NOTHING : visibility(row);
	Depth depth = {.now = GetCurrentTimestamp()};
	TupleDesc descriptor;
	Datum values[COLUMNS] = {0};
	bool nulls[COLUMNS];

	if (get_call_result_type(fcinfo, NULL, &descriptor) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	memset(nulls, true, sizeof(nulls));

	if (seen != RS_SEES_NOTHING)
		look(row, fcinfo->flinfo, &depth);

	if (depth.locked || depth.problem != NULL)
	{
		const char *shown = depth.locked          ? LOCKED
							: seen == RS_SEES_ALL ? depth.problem
												  : "not shown";

		values[PROBLEM] = CStringGetTextDatum(shown);
		nulls[PROBLEM] = false;
	}
	else if (depth.counted || depth.capped)
	{
		values[READY] = Int64GetDatum(depth.ready);
		values[WAITING] = Int64GetDatum(depth.waiting);
		values[DEAD] = Int64GetDatum(depth.dead);
		values[CAPPED] = BoolGetDatum(depth.capped);
		nulls[READY] = nulls[WAITING] = !depth.counted;
		nulls[DEAD] = !depth.dead_counted;
		nulls[CAPPED] = false;
		if (depth.oldest != 0)
		{
			values[OLDEST] = DirectFunctionCall2(timestamp_mi, TimestampTzGetDatum(depth.now),
												 TimestampTzGetDatum(depth.oldest));
			nulls[OLDEST] = false;
		}
	}
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(descriptor), values, nulls)));
}

/* ------------------------------------------------------------- transaction plan */

/* Add the steps of one part of a lane; returns the number of the last. */
static int
put_steps(ReturnSetInfo *result, rs_form form, bool transactional, rs_outcome outcome,
		  const rs_step *steps, int number)
{
	for (; *steps != RS_STEP_END; steps++)
	{
		char *action = pstrdup(rs_step_word(*steps));
		Datum values[5];
		bool nulls[5] = {false};

		if (*steps == RS_STEP_SETTLE)
			action = psprintf("%s %s", action, rs_outcome_word(outcome));
		values[0] = CStringGetTextDatum(rs_form_word(form));
		values[1] = BoolGetDatum(transactional);
		values[2] = CStringGetTextDatum(rs_outcome_word(outcome));
		values[3] = Int32GetDatum(++number);
		values[4] = CStringGetTextDatum(action);
		tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
	}
	return number;
}

/* Add the lanes of a form, outcome by outcome. */
static void
put_lanes(ReturnSetInfo *result, rs_form form, bool transactional)
{
	for (int i = 0; i < RS_OUTCOME_COUNT; i++)
	{
		rs_outcome outcome = (rs_outcome) i;
		int number = put_steps(result, form, transactional, outcome,
							   rs_lane_opening(form, transactional), 0);

		(void) put_steps(result, form, transactional, outcome,
						 rs_lane_ending(form, transactional, outcome), number);
	}
}

/* internal_transaction_plan() returns setof (form, transactional, outcome, step, action) */
Datum
rs_sql_transaction_plan(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	for (int form = 0; form < RS_FORM_COUNT; form++)
	{
		put_lanes(result, (rs_form) form, true);
		put_lanes(result, (rs_form) form, false);
	}
	return (Datum) 0;
}
