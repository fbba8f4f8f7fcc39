/*-------------------------------------------------------------------------
 *
 * planner.c
 *	  How our statements are planned: the same way, whatever the statistics say.
 *
 * A queue is now empty, now a million rows long, and a worker lives through
 * both with one plan.  So the plan must not depend on what was known of the table
 * when it was made.  Our statements are planned
 *
 * - with sequential scans, bitmap scans and sorts disabled, which leaves the
 *	 indexes that serve the claims, and without hash and merge joins, which leaves one
 *	 way to stamp what was found: by its id, in the order it was found in;
 * - at the usual costs, as if every table were long, and nothing known of its
 *	 columns: of two indexes in the right order the one is taken that has more of the
 *	 conditions in it.  Where all rows are of one partition key, say, statistics would
 *	 have it that the index without the key does as well, up to the day when it does not.
 *
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

#include "nodes/pathnodes.h"
#include "optimizer/plancat.h"
#include "optimizer/planner.h"
#include "utils/guc.h"
#include "utils/selfuncs.h"

/* What a table is taken for: longer than any statistics could mislead about. */
#define ASSUMED_ROWS 10000000.0
#define ASSUMED_PAGES 1000000
#define ASSUMED_INDEX_PAGES 50000
#define ASSUMED_INDEX_HEIGHT 3

const char *rs_planner_own_text;

/* Is it a statement of ours that is being planned right now? */
static bool planning_own;

static planner_hook_type previous_planner_hook;
static get_relation_info_hook_type previous_relation_info_hook;
static get_relation_stats_hook_type previous_relation_stats_hook;
static get_index_stats_hook_type previous_index_stats_hook;

static void
assume_relation(PlannerInfo *root, Oid relation, bool inhparent, RelOptInfo *rel)
{
	ListCell *cell;

	if (previous_relation_info_hook)
		previous_relation_info_hook(root, relation, inhparent, rel);
	if (!planning_own)
		return;
	rel->tuples = ASSUMED_ROWS;
	rel->pages = ASSUMED_PAGES;
	rel->allvisfrac = 0;
	rel->statlist = NIL;
	foreach (cell, rel->indexlist)
	{
		IndexOptInfo *index = lfirst(cell);

		index->tuples = ASSUMED_ROWS;
		index->pages = ASSUMED_INDEX_PAGES;
		index->tree_height = ASSUMED_INDEX_HEIGHT;
	}
}

/* Returning true says that there is nothing else to look for: no statistics. */
static bool
assume_column(PlannerInfo *root, RangeTblEntry *entry, AttrNumber attnum,
			  VariableStatData *statistics)
{
	if (planning_own)
		return true;
	return previous_relation_stats_hook &&
		   previous_relation_stats_hook(root, entry, attnum, statistics);
}

static bool
assume_index_column(PlannerInfo *root, Oid index, AttrNumber attnum, VariableStatData *statistics)
{
	if (planning_own)
		return true;
	return previous_index_stats_hook && previous_index_stats_hook(root, index, attnum, statistics);
}

static PlannedStmt *
plan(Query *parse, const char *query_string, int cursor_options, ParamListInfo bound_params)
{
	if (previous_planner_hook)
		return previous_planner_hook(parse, query_string, cursor_options, bound_params);
	return standard_planner(parse, query_string, cursor_options, bound_params);
}

/* Plan as ours, or, within the planning of one of ours, as not. */
static PlannedStmt *
plan_as(bool own, Query *parse, const char *query_string, int cursor_options,
		ParamListInfo bound_params)
{
	bool save = planning_own;
	PlannedStmt *result;

	planning_own = own;
	PG_TRY();
	{
		result = plan(parse, query_string, cursor_options, bound_params);
	}
	PG_FINALLY();
	{
		planning_own = save;
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
					{"enable_material", "off"},
					{"enable_memoize", "off"},
					{"seq_page_cost", "1"},
					{"random_page_cost", "4"},
					{"cpu_tuple_cost", "0.01"},
					{"cpu_index_tuple_cost", "0.005"},
					{"cpu_operator_cost", "0.0025"},
					{"jit", "off"}};
	int nest_level;
	PlannedStmt *result;

	if (rs_planner_own_text == NULL || query_string != rs_planner_own_text)
	{
		if (!planning_own)
			return plan(parse, query_string, cursor_options, bound_params);
		return plan_as(false, parse, query_string, cursor_options, bound_params);
	}

	/* An error leaves the level to the abort of the (sub)transaction. */
	nest_level = NewGUCNestLevel();
	for (size_t i = 0; i < lengthof(settings); i++)
		(void) set_config_option(settings[i].name, settings[i].value, PGC_USERSET, PGC_S_SESSION,
								 GUC_ACTION_SAVE, true, 0, false);
	result = plan_as(true, parse, query_string, cursor_options, bound_params);
	AtEOXact_GUC(true, nest_level);
	return result;
}

void
rs_planner_init(void)
{
	previous_planner_hook = planner_hook;
	planner_hook = rs_planner;
	previous_relation_info_hook = get_relation_info_hook;
	get_relation_info_hook = assume_relation;
	previous_relation_stats_hook = get_relation_stats_hook;
	get_relation_stats_hook = assume_column;
	previous_index_stats_hook = get_index_stats_hook;
	get_index_stats_hook = assume_index_column;
}
