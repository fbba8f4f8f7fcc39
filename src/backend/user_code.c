/*-------------------------------------------------------------------------
 *
 * user_code.c
 *	  Would an update of a table run somebody's code?
 *
 * Asked by a process that is about to exit, which nothing can interrupt any
 * more: a function that waits, or does not end, would keep it for ever.  The
 * server's own functions are trusted, so that foreign keys and ordinary CHECK
 * constraints do not count.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/transam.h"
#include "catalog/pg_index.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_trigger.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "nodes/nodeFuncs.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "backend/backend.h"

static bool
is_users(Oid function, void *context)
{
	return function >= FirstNormalObjectId;
}

static bool
calls_users(Node *node, void *context)
{
	if (node == NULL)
		return false;
	return IsA(node, CoerceToDomain) || check_functions_in_node(node, is_users, context) ||
		   expression_tree_walker(node, calls_users, context);
}

/* An expression as the catalogs keep it; NULL: there is none. */
static bool
expression_runs_code(const char *stored)
{
	return stored != NULL && calls_users(stringToNode(stored), NULL);
}

static bool
triggers_run_code(const TriggerDesc *triggers)
{
	for (int i = 0; triggers != NULL && i < triggers->numtriggers; i++)
	{
		const Trigger *trigger = &triggers->triggers[i];

		if (TRIGGER_FOR_UPDATE(trigger->tgtype) && trigger->tgenabled != TRIGGER_DISABLED &&
			is_users(trigger->tgfoid, NULL))
			return true;
	}
	return false;
}

/* CHECK constraints, and what is computed for the column or from it: domains, generated columns. */
static bool
columns_run_code(TupleDesc descriptor, const char *column)
{
	const TupleConstr *constraints = descriptor->constr;

	for (int i = 0; i < descriptor->natts; i++)
	{
		Form_pg_attribute attribute = TupleDescAttr(descriptor, i);
		bool written =
			attribute->attgenerated != '\0' || strcmp(NameStr(attribute->attname), column) == 0;

		if (!attribute->attisdropped && written &&
			get_typtype(attribute->atttypid) == TYPTYPE_DOMAIN)
			return true;
	}
	for (int i = 0; constraints != NULL && i < constraints->num_check; i++)
	{
		if (expression_runs_code(constraints->check[i].ccbin))
			return true;
	}
	for (int i = 0; constraints != NULL && i < constraints->num_defval; i++)
	{
		const AttrDefault *value = &constraints->defval[i];

		if (TupleDescAttr(descriptor, value->adnum - 1)->attgenerated != '\0' &&
			expression_runs_code(value->adbin))
			return true;
	}
	return false;
}

static bool
index_runs_code(Oid index)
{
	HeapTuple tuple = SearchSysCache1(INDEXRELID, ObjectIdGetDatum(index));
	static const AttrNumber columns[] = {Anum_pg_index_indexprs, Anum_pg_index_indpred};
	bool result = false;

	if (!HeapTupleIsValid(tuple))
		return true;
	for (int i = 0; i < (int) lengthof(columns) && !result; i++)
	{
		bool isnull;
		Datum stored = SysCacheGetAttr(INDEXRELID, tuple, columns[i], &isnull);

		result = !isnull && expression_runs_code(TextDatumGetCString(stored));
	}
	ReleaseSysCache(tuple);
	return result;
}

static bool
relation_runs_code(Relation relation, const char *column)
{
	ListCell *cell;

	if (relation->rd_rel->relrowsecurity || relation->rd_rules != NULL ||
		triggers_run_code(relation->trigdesc) ||
		columns_run_code(RelationGetDescr(relation), column))
		return true;
	foreach (cell, RelationGetIndexList(relation))
	{
		if (index_runs_code(lfirst_oid(cell)))
			return true;
	}
	return false;
}

static bool
partition_runs_code(Oid partition, const char *column)
{
	Relation relation;
	bool result;

	if (!ConditionalLockRelationOid(partition, RowExclusiveLock))
		return true;
	relation = try_relation_open(partition, NoLock);
	if (relation == NULL)
		return true;
	result = relation_runs_code(relation, column);
	relation_close(relation, NoLock);
	return result;
}

bool
rs_update_runs_code(Relation relation, const char *column)
{
	ListCell *cell;

	if (relation->rd_rel->relkind != RELKIND_PARTITIONED_TABLE)
		return relation_runs_code(relation, column);
	foreach (cell, find_all_inheritors(RelationGetRelid(relation), NoLock, NULL))
	{
		if (partition_runs_code(lfirst_oid(cell), column))
			return true;
	}
	return false;
}
