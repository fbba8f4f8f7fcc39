/*-------------------------------------------------------------------------
 *
 * execute.c
 *	  The only door to SPI for statements of the catalogue: keeps them
 *	  prepared, and has them planned under settings of our own.
 *
 * A queue is now empty, now a million rows long, and a worker lives through
 * both with one plan.  So the plan must not depend on what the statistics said
 * when it was made: our statements are planned with sequential scans, bitmap
 * scans and sorts disabled, which leaves the index that serves the claim order,
 * and without hash and merge joins, which leaves one way to stamp what was
 * found: by its id.  And they are planned as for a large table: in an empty one
 * everything costs the same, be it a step down the index of ids or a walk through all
 * of an index that has the id somewhere.
 * A planner hook does it, and not a SET around each execution, because a cached
 * plan is also remade at times of PostgreSQL's choosing, and because a plan
 * that is already there then costs nothing.  The hook tells our statements by
 * the address of their text: a query of a user's trigger that happens to be
 * planned while a statement of ours runs has another text, and its own
 * settings.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"

#include "access/transam.h"
#include "catalog/pg_type_d.h"
#include "nodes/parsenodes.h"
#include "nodes/pathnodes.h"
#include "optimizer/plancat.h"
#include "optimizer/planner.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/plancache.h"
#include "utils/snapmgr.h"

/* No operation has more statements than a move: copy the row, delete it. */
#define RS_MAX_STATEMENTS 2

typedef struct RsPlan
{
	SPIPlanPtr plan;  /* NULL: not prepared yet */
	const char *text; /* as the plan source holds it, for the planner hook */
	rs_statement statement;
} RsPlan;

struct RsPlans
{
	MemoryContext context;
	const RsQueue *queue;
	const rs_destination *destination;
	int count[RS_OPERATION_COUNT]; /* statements of each operation; -1: not asked yet */
	RsPlan plan[RS_OPERATION_COUNT][RS_MAX_STATEMENTS];
};

static planner_hook_type previous_planner_hook;
static get_relation_info_hook_type previous_relation_info_hook;

/* The text of the statement of ours that is being executed, or NULL. */
static const char *own_text;

/* Is it being planned? */
static bool planning_own = false;

/* What a table and its indexes are taken for, at least. */
#define ASSUMED_TUPLES 1000000
#define ASSUMED_PAGES 20000
#define ASSUMED_INDEX_PAGES 5000

/* What else is planned meanwhile, for a function that the planner calls, is not ours. */
static PlannedStmt *
plan(bool own, Query *parse, const char *query_string, int cursor_options,
	 ParamListInfo bound_params)
{
	bool save_planning_own = planning_own;
	PlannedStmt *result = NULL;

	planning_own = own;
	PG_TRY();
	{
		result = previous_planner_hook != NULL
					 ? previous_planner_hook(parse, query_string, cursor_options, bound_params)
					 : standard_planner(parse, query_string, cursor_options, bound_params);
	}
	PG_FINALLY();
	{
		planning_own = save_planning_own;
	}
	PG_END_TRY();
	return result;
}

static PlannedStmt *
rs_planner(Query *parse, const char *query_string, int cursor_options, ParamListInfo bound_params)
{
	static const struct
	{
		const char *name;
		const char *value;
	} settings[] = {{"enable_indexscan", "on"},
					{"enable_seqscan", "off"},
					{"enable_bitmapscan", "off"},
					{"enable_sort", "off"},
					{"enable_incremental_sort", "off"},
					{"enable_nestloop", "on"},
					{"enable_hashjoin", "off"},
					{"enable_mergejoin", "off"},
					{"jit", "off"}};
	bool own = own_text != NULL && query_string == own_text;
	int nest_level = 0;
	PlannedStmt *result;

	if (own)
	{
		/* An error leaves the level to the abort of the (sub)transaction. */
		nest_level = NewGUCNestLevel();
		for (size_t i = 0; i < lengthof(settings); i++)
			(void) set_config_option(settings[i].name, settings[i].value, PGC_USERSET,
									 PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
	}

	result = plan(own, parse, query_string, cursor_options, bound_params);

	if (own)
		AtEOXact_GUC(true, nest_level);

	return result;
}

static void
rs_relation_info(PlannerInfo *root, Oid relid, bool inhparent, RelOptInfo *rel)
{
	ListCell *cell;

	if (previous_relation_info_hook)
		previous_relation_info_hook(root, relid, inhparent, rel);
	if (!planning_own || inhparent || relid < FirstNormalObjectId)
		return;

	rel->tuples = Max(rel->tuples, ASSUMED_TUPLES);
	rel->pages = Max(rel->pages, ASSUMED_PAGES);
	foreach (cell, rel->indexlist)
	{
		IndexOptInfo *index = lfirst(cell);

		index->tuples = Max(index->tuples, ASSUMED_TUPLES);
		index->pages = Max(index->pages, ASSUMED_INDEX_PAGES);
	}
}

void
rs_execute_init(void)
{
	previous_planner_hook = planner_hook;
	planner_hook = rs_planner;
	previous_relation_info_hook = get_relation_info_hook;
	get_relation_info_hook = rs_relation_info;
}

RsPlans *
rs_plans_create(const RsQueue *queue, const rs_destination *destination, MemoryContext parent)
{
	MemoryContext context = AllocSetContextCreate(parent, "ruststream plans", ALLOCSET_SMALL_SIZES);
	RsPlans *plans = MemoryContextAllocZero(context, sizeof(RsPlans));

	plans->context = context;
	plans->queue = queue;
	plans->destination = destination;
	for (int i = 0; i < RS_OPERATION_COUNT; i++)
		plans->count[i] = -1;
	return plans;
}

void
rs_plans_free(RsPlans *plans)
{
	for (int i = 0; i < RS_OPERATION_COUNT; i++)
		for (int j = 0; j < RS_MAX_STATEMENTS; j++)
			if (plans->plan[i][j].plan != NULL)
				SPI_freeplan(plans->plan[i][j].plan);
	MemoryContextDelete(plans->context);
}

void
rs_values_init(RsValues *values)
{
	memset(values, 0, sizeof(RsValues));
	for (int i = 0; i < RS_PARAM_COUNT; i++)
		values->isnull[i] = true;
}

void
rs_value_set(RsValues *values, rs_parameter parameter, Datum value, Oid type)
{
	values->value[parameter] = value;
	values->isnull[parameter] = false;
	values->type[parameter] = type;
}

/* The type a parameter is passed as. */
static Oid
parameter_type(const RsQueue *queue, rs_parameter parameter)
{
	switch (parameter)
	{
		case RS_PARAM_ID:
			return queue->type[RS_ROLE_ID];
		case RS_PARAM_HELD:
		case RS_PARAM_IDS:
			return get_array_type(queue->type[RS_ROLE_ID]);
		case RS_PARAM_HEADERS:
			return queue->type[RS_ROLE_HEADERS];
		case RS_PARAM_PAYLOAD:
			return queue->type[RS_ROLE_PAYLOAD];
		case RS_PARAM_PARTITION_KEY:
			return queue->type[RS_ROLE_PARTITION_KEY];
		case RS_PARAM_GROUP:
		case RS_PARAM_DEAD_GROUP:
		case RS_PARAM_KEY:
		case RS_PARAM_ORIGIN:
			return TEXTOID;
		case RS_PARAM_ORIGIN_HEADERS:
		case RS_PARAM_GROUPS:
			return TEXTARRAYOID;
		case RS_PARAM_TIDS:
			return TIDARRAYOID;
		case RS_PARAM_TABLES:
			return OIDARRAYOID;
		case RS_PARAM_NOW:
		case RS_PARAM_UNTIL:
		case RS_PARAM_TOKEN:
		case RS_PARAM_ANNOUNCED:
			return TIMESTAMPTZOID;
		case RS_PARAM_ATTEMPT:
		case RS_PARAM_LIMIT:
		case RS_PARAM_PRIORITY:
			return INT8OID;
		case RS_PARAM_COUNT:
			break;
	}
	elog(ERROR, "unrecognized statement parameter: %d", (int) parameter);
	return InvalidOid;
}

/* Prepare one statement of the catalogue and keep it. */
static void
prepare(RsPlans *plans, rs_operation operation, int index)
{
	RsPlan *plan = &plans->plan[operation][index];
	Oid types[RS_MAX_PARAMETERS];
	size_t size = 1024;
	char *text = MemoryContextAlloc(plans->context, size);
	SPIPlanPtr prepared;
	CachedPlanSource *source;

	plan->statement = rs_statement_render(RS_DIALECT_POSTGRESQL, operation, index,
										  &plans->queue->table, plans->destination, text, size);
	if (plan->statement.length >= size)
	{
		size = plan->statement.length + 1;
		text = repalloc(text, size);
		plan->statement = rs_statement_render(RS_DIALECT_POSTGRESQL, operation, index,
											  &plans->queue->table, plans->destination, text, size);
	}

	for (int i = 0; i < plan->statement.parameter_count; i++)
		types[i] = parameter_type(plans->queue, plan->statement.parameters[i]);

	prepared =
		SPI_prepare_cursor(text, plan->statement.parameter_count, types, CURSOR_OPT_GENERIC_PLAN);
	if (prepared == NULL)
		elog(ERROR, "could not prepare \"%s\": %s", text, SPI_result_code_string(SPI_result));
	if (SPI_keepplan(prepared) != 0)
		elog(ERROR, "could not keep the plan of \"%s\"", text);
	pfree(text);

	source = linitial(SPI_plan_get_plan_sources(prepared));
	plan->text = source->query_string;
	plan->plan = prepared;
}

/* The values of a statement that is prepared, in the order of its parameters. */
static void
list_values(const RsPlan *plan, const RsValues *values, Datum *value, char *nulls)
{
	for (int i = 0; i < plan->statement.parameter_count; i++)
	{
		rs_parameter parameter = plan->statement.parameters[i];

		value[i] = values->value[parameter];
		nulls[i] = values->isnull[parameter] ? 'n' : ' ';
	}
}

int64
rs_query(RsPlans *plans, rs_operation operation, const RsValues *values)
{
	MemoryContext save_context = CurrentMemoryContext;
	int64 processed = -1;

	if (plans->count[operation] < 0)
	{
		plans->count[operation] =
			rs_statement_count(RS_DIALECT_POSTGRESQL, operation, &plans->queue->table);
		Assert(plans->count[operation] <= RS_MAX_STATEMENTS);
	}

	for (int i = 0; i < plans->count[operation]; i++)
	{
		RsPlan *plan = &plans->plan[operation][i];
		Datum value[RS_MAX_PARAMETERS];
		char nulls[RS_MAX_PARAMETERS];
		int rc = 0;

		if (plan->plan == NULL)
			prepare(plans, operation, i);

		list_values(plan, values, value, nulls);

		own_text = plan->text;
		PG_TRY();
		{
			/* A snapshot of its own: there is no portal to lend us one. */
			rc = SPI_execute_snapshot(plan->plan, value, nulls, GetTransactionSnapshot(),
									  InvalidSnapshot, false, true, 0);
		}
		PG_FINALLY();
		{
			own_text = NULL;
		}
		PG_END_TRY();

		if (rc < 0)
			elog(ERROR, "could not execute \"%s\": %s", plan->text, SPI_result_code_string(rc));
		processed = (int64) SPI_processed;

		/* A move that has copied nothing must not delete anything. */
		if (processed == 0)
			break;
	}

	/* SPI leaves us in its own memory. */
	MemoryContextSwitchTo(save_context);
	return processed;
}

int64
rs_execute(RsPlans *plans, rs_operation operation, const RsValues *values)
{
	int64 processed = rs_query(plans, operation, values);

	SPI_freetuptable(SPI_tuptable);
	SPI_tuptable = NULL;
	return processed;
}

Portal
rs_open_cursor(RsPlans *plans, rs_operation operation, const RsValues *values)
{
	MemoryContext save_context = CurrentMemoryContext;
	RsPlan *plan = &plans->plan[operation][0];
	Datum value[RS_MAX_PARAMETERS];
	char nulls[RS_MAX_PARAMETERS];
	Portal portal = NULL;

	if (plan->plan == NULL)
		prepare(plans, operation, 0);
	list_values(plan, values, value, nulls);

	own_text = plan->text;
	PG_TRY();
	{
		portal = SPI_cursor_open(NULL, plan->plan, value, nulls, false);
	}
	PG_FINALLY();
	{
		own_text = NULL;
	}
	PG_END_TRY();
	MemoryContextSwitchTo(save_context);
	return portal;
}
