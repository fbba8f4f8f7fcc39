/*-------------------------------------------------------------------------
 *
 * status.c
 *	  What the views need beyond our tables and shared memory.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/catalog.h"
#include "backend/compat.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_authid.h"
#include "funcapi.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/resowner.h"

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

/* Counting stops here, so that a queue of millions answers in milliseconds. */
#define DEPTH_LIMIT 10000

typedef struct Depth
{
	bool counted;
	bool dead_counted;
	int64 ready;
	int64 waiting;
	int64 dead;
	TimestampTz now;
	TimestampTz oldest; /* when the ready row that is due longest came due; 0: not known */
	char *problem;      /* why it could not be counted, or NULL */
} Depth;

static int64
count_column(int column)
{
	bool isnull;

	return DatumGetInt64(
		SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, column, &isnull));
}

static void
count_live(RsPlans *plans, const RsValues *values, Depth *depth)
{
	Datum oldest;
	bool isnull;

	if (rs_query(plans, RS_OP_DEPTH, values) != 1)
		return;
	depth->counted = true;
	depth->ready = count_column(1);
	depth->waiting = count_column(2);
	oldest = SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 3, &isnull);
	depth->oldest = isnull ? 0 : DatumGetTimestampTz(oldest);
}

static void
count_dead(const RsSubscription *subscription, RsPlans *plans, const RsValues *values, Depth *depth)
{
	rs_operation operation = RS_OP_DEPTH_DEAD_GROUP;

	if (!subscription->policy.has_dead_letter)
		return;
	if (subscription->policy.dead_letter_is_table)
	{
		/* Moving rows there does not need the right to read them. */
		if (pg_class_aclcheck(subscription->dead_letter_table, subscription->owner, ACL_SELECT) !=
			ACLCHECK_OK)
			return;
		operation = RS_OP_DEPTH_DEAD_TABLE;
	}
	if (rs_query(plans, operation, values) != 1)
		return;
	depth->dead_counted = true;
	depth->dead = count_column(1);
}

/* Count as the owner: whatever policies the table has run with its rights. */
static void
count_as_owner(const RsSubscription *subscription, Depth *depth)
{
	RsPlans *plans =
		rs_plans_create(&subscription->queue, &subscription->destination, subscription->context);
	RsValues values;
	Oid save_userid;
	int save_sec_context;

	rs_values_init(&values);
	if (subscription->group_name != NULL)
		rs_value_set(&values, RS_PARAM_GROUP, CStringGetTextDatum(subscription->group_name), 0);
	if (subscription->dead_letter_group != NULL)
		rs_value_set(&values, RS_PARAM_DEAD_GROUP,
					 CStringGetTextDatum(subscription->dead_letter_group), 0);
	rs_value_set(&values, RS_PARAM_NOW, TimestampTzGetDatum(depth->now), 0);
	rs_value_set(&values, RS_PARAM_LIMIT, Int64GetDatum(DEPTH_LIMIT), 0);

	GetUserIdAndSecContext(&save_userid, &save_sec_context);
	SetUserIdAndSecContext(subscription->owner, save_sec_context | SECURITY_LOCAL_USERID_CHANGE |
													SECURITY_RESTRICTED_OPERATION);
	SPI_connect();
	count_live(plans, &values, depth);
	count_dead(subscription, plans, &values, depth);
	SPI_finish();
	SetUserIdAndSecContext(save_userid, save_sec_context);
	rs_plans_free(plans);
}

/* A look must not wait for whoever holds the table. */
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

static void
count_subscription(const RsRow *row, Depth *depth)
{
	RsSubscription *subscription;

	if (rs_subscription_is_copied(row))
		return;
	if (!lock_without_waiting(row))
	{
		depth->problem = "the table is locked";
		return;
	}
	subscription = rs_subscription_build(row, CurrentMemoryContext);
	count_as_owner(subscription, depth);
}

/*
 * Count in a subtransaction that is rolled back in any case: an error costs
 * one row of a view, and no lock on the table outlasts the look.
 */
static void
count_safely(const RsRow *row, Depth *depth)
{
	MemoryContext save_context = CurrentMemoryContext;
	ResourceOwner save_owner = CurrentResourceOwner;
	ErrorData *volatile error = NULL;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(save_context);
	PG_TRY();
	{
		count_subscription(row, depth);
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(save_context);
		error = CopyErrorData();
		FlushErrorState();
	}
	PG_END_TRY();
	RollbackAndReleaseCurrentSubTransaction();
	MemoryContextSwitchTo(save_context);
	CurrentResourceOwner = save_owner;

	if (error == NULL)
		return;
	if (error->sqlerrcode == ERRCODE_QUERY_CANCELED)
		ReThrowError(error);
	depth->problem = error->message;
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

/* internal_depth(subscription_id) returns (ready, waiting, dead, capped, oldest, problem) */
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
		count_safely(row, &depth);

	if (depth.problem != NULL)
	{
		const char *shown = seen == RS_SEES_ALL ? depth.problem : "not shown";

		values[PROBLEM] = CStringGetTextDatum(shown);
		nulls[PROBLEM] = false;
	}
	else if (depth.counted)
	{
		values[READY] = Int64GetDatum(depth.ready);
		values[WAITING] = Int64GetDatum(depth.waiting);
		values[DEAD] = Int64GetDatum(depth.dead);
		values[CAPPED] =
			BoolGetDatum(depth.ready + depth.waiting >= DEPTH_LIMIT || depth.dead >= DEPTH_LIMIT);
		nulls[READY] = nulls[WAITING] = nulls[CAPPED] = false;
		nulls[DEAD] = !depth.dead_counted;
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
