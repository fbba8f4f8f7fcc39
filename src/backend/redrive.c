/*-------------------------------------------------------------------------
 *
 * redrive.c
 *	  redrive: move dead letters back where they came from.
 *
 * Which subscriptions they can come from is in our catalogs; which of these a row
 * comes from, in its headers (origin.c).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/catalog.h"
#include "backend/delivery.h"
#include "backend/sweep.h"

#include "access/relation.h"
#include "catalog/namespace.h"
#include "catalog/pg_type_d.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/varlena.h"

PG_FUNCTION_INFO_V1(rs_sql_redrive);

/* -------------------------------------------------------------- where they go */

/* A queue that dead letters may go back to. */
typedef struct Target
{
	RsQueue queue;
	char *label;
	char *group; /* where its rows go that do not say; NULL: not known */
	bool groups_differ;
	rs_destination dead; /* the dead-letter table, and what both have */
	RsPlans *plans;
} Target;

typedef struct Redrive
{
	char *source;
	char *dead_group; /* or NULL: the dead letters are in dead_table */
	Oid dead_table;
	List *targets;
	Target *fallback; /* of rows that do not say; NULL: not known */
	Target *target;   /* of the sweep that is under way */
} Redrive;

/* The table that this text names on the caller's path; InvalidOid: none. */
static Oid
table_named(const char *source)
{
	List *names;

	if (!SplitIdentifierString(pstrdup(source), '.', &names) || list_length(names) > 2)
		return InvalidOid;
	names = list_length(names) == 1
				? list_make1(makeString(linitial(names)))
				: list_make2(makeString(linitial(names)), makeString(lsecond(names)));
	return RangeVarGetRelid(makeRangeVarFromNameList(names), NoLock, true);
}

static bool
may_redrive(const RsRow *row)
{
	return has_privs_of_role(GetUserId(), rs_subscription_owner(row)) ||
		   rs_owns_table(DatumGetObjectId(rs_row_get(row, RS_SUBSCRIPTION_QUEUE)));
}

/* The subscriptions whose dead letters these are, as far as they are the caller's. */
static List *
subscriptions_of(Redrive *redrive)
{
	Oid catalog = rs_objects(false)->subscription;
	Oid table = table_named(redrive->source);
	List *by_group = rs_catalog_find(catalog, RS_SUBSCRIPTION_DEAD_LETTER_GROUP, F_TEXTEQ,
									 CStringGetTextDatum(redrive->source));
	List *by_table = OidIsValid(table) ? rs_catalog_find(catalog, RS_SUBSCRIPTION_DEAD_LETTER_TABLE,
														 F_OIDEQ, ObjectIdGetDatum(table))
									   : NIL;
	List *all = by_group != NIL ? by_group : by_table;
	List *result = NIL;
	ListCell *cell;

	if (by_group != NIL && by_table != NIL)
		ereport(
			ERROR, errcode(ERRCODE_AMBIGUOUS_PARAMETER),
			errmsg("\"%s\" is both a dead-letter group and a dead-letter table", redrive->source),
			errhint("Write the table with its schema, or rename one of the two."));
	if (by_table != NIL)
		redrive->dead_table = table;
	else if (by_group != NIL)
		redrive->dead_group = redrive->source;

	foreach (cell, all)
	{
		if (may_redrive(lfirst(cell)))
			result = lappend(result, lfirst(cell));
	}
	if (all != NIL && result == NIL)
		ereport(ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("permission denied to redrive \"%s\"", redrive->source),
				errhint("Be a member of the role that owns the queue or the subscription."));
	return result;
}

static char *
group_of(const RsRow *row)
{
	return TextDatumGetCString(rs_row_isnull(row, RS_SUBSCRIPTION_GROUP_NAME)
								   ? rs_row_get(row, RS_SUBSCRIPTION_NAME)
								   : rs_row_get(row, RS_SUBSCRIPTION_GROUP_NAME));
}

/* Note that a subscription's queue is a target; returns it. */
static Target *
add_target(Redrive *redrive, const RsRow *row)
{
	Oid relid = DatumGetObjectId(rs_row_get(row, RS_SUBSCRIPTION_QUEUE));
	char *group = group_of(row);
	Target *target;
	ListCell *cell;

	foreach (cell, redrive->targets)
	{
		target = lfirst(cell);
		if (target->queue.relid != relid)
			continue;
		target->groups_differ |= strcmp(target->group, group) != 0;
		return target;
	}
	target = palloc0(sizeof(Target));
	rs_queue_load(relid, &target->queue);
	target->label = rs_relation_label(relid);
	target->group = group;
	redrive->targets = lappend(redrive->targets, target);
	return target;
}

/*
 * The targets.  The subscription that is named stands for rows that do not say
 * where they came from, and need not have this dead letter any more.
 */
static void
find_targets(Redrive *redrive, const char *subscription)
{
	List *rows = subscriptions_of(redrive);
	RsRow *named = NULL;
	ListCell *cell;

	if (subscription != NULL)
	{
		named = rs_subscription_row(subscription);
		if (named == NULL)
			ereport(ERROR, errcode(ERRCODE_UNDEFINED_OBJECT),
					errmsg("subscription \"%s\" does not exist", subscription),
					errhint("The view ruststream.status lists the subscriptions."));
		if (!may_redrive(named))
			ereport(ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
					errmsg("permission denied for subscription \"%s\"", subscription),
					errhint("Be a member of the role that owns the queue or the subscription."));
		redrive->fallback = add_target(redrive, named);
		if (redrive->dead_group == NULL && !OidIsValid(redrive->dead_table))
		{
			if (redrive->fallback->queue.table.column[RS_ROLE_GROUP] != NULL)
				redrive->dead_group = redrive->source;
			else
				redrive->dead_table = table_named(redrive->source);
		}
	}
	if (redrive->dead_group == NULL && !OidIsValid(redrive->dead_table))
		ereport(ERROR, errcode(ERRCODE_UNDEFINED_OBJECT),
				errmsg("\"%s\" is the dead letter of no subscription", redrive->source),
				errhint("Name the group or the table that is the dead_letter of a subscription, "
						"or say which subscription the rows go to."));

	/* A group's rows stay in their table: that of the one that is named. */
	foreach (cell, rows)
	{
		if (named == NULL || redrive->dead_group == NULL ||
			DatumGetObjectId(rs_row_get(lfirst(cell), RS_SUBSCRIPTION_QUEUE)) ==
				redrive->fallback->queue.relid)
			(void) add_target(redrive, lfirst(cell));
	}
	foreach (cell, redrive->targets)
	{
		Target *target = lfirst(cell);

		if (named != NULL && target == redrive->fallback)
			target->group = group_of(named);
		else if (target->groups_differ)
			target->group = NULL;
		if (target->group != NULL && strcmp(target->group, "*") == 0)
			target->group = NULL;
	}
	if (redrive->fallback == NULL && list_length(redrive->targets) == 1)
		redrive->fallback = linitial(redrive->targets);
}

static void
refuse_row(const Redrive *redrive, const char *origin)
{
	char *place = redrive->dead_group != NULL ? psprintf("group \"%s\"", redrive->dead_group)
											  : rs_relation_label(redrive->dead_table);

	ereport(ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			origin == NULL
				? errmsg("a row of %s does not say where it came from", place)
				: errmsg("a row of %s came from %s, which is no queue with this dead letter", place,
						 origin),
			errhint("Say which subscription such rows go to: subscription => .."));
}

/* ----------------------------------------------------------------- from a group */

static int64
redrive_to_groups(void *arg, RsFound *found, int count)
{
	Redrive *redrive = arg;
	Target *target = redrive->target;
	Datum *groups = palloc(sizeof(Datum) * count);
	RsValues values;
	int64 done;

	for (int i = 0; i < count; i++)
	{
		char *group = found[i].origin != NULL ? found[i].origin : target->group;

		if (group == NULL || strcmp(group, redrive->dead_group) == 0)
			refuse_row(redrive, NULL);
		groups[i] = CStringGetTextDatum(group);
	}

	rs_values_init(&values);
	rs_value_set(&values, RS_PARAM_IDS, rs_found_ids(target->queue.type[RS_ROLE_ID], found, count),
				 0);
	rs_value_set(&values, RS_PARAM_GROUPS, rs_array(TEXTOID, groups, count), 0);
	rs_value_set(&values, RS_PARAM_ORIGIN_HEADERS, rs_origin_headers(), 0);
	done = rs_execute(target->plans, RS_OP_REDRIVE_GROUP, &values);
	rs_check_swept(done, count, "moved", target->queue.relid);
	return done;
}

/* ----------------------------------------------------------------- from a table */

/* The target of a row, by what it says. */
static Target *
target_of(const Redrive *redrive, const char *origin)
{
	ListCell *cell;

	if (origin != NULL)
	{
		foreach (cell, redrive->targets)
		{
			if (strcmp(((Target *) lfirst(cell))->label, origin) == 0)
				return lfirst(cell);
		}
	}
	if (redrive->fallback == NULL)
		refuse_row(redrive, origin);
	return redrive->fallback;
}

static int64
redrive_to_table(void *arg, RsFound *found, int count)
{
	Redrive *redrive = arg;
	Target *target = redrive->target;
	Datum *places = palloc(sizeof(Datum) * count);
	Datum *tables = palloc(sizeof(Datum) * count);
	RsValues values;
	int64 done;
	int taken = 0;

	for (int i = 0; i < count; i++)
	{
		if (target_of(redrive, found[i].origin) != target)
			continue;
		places[taken] = found[i].place;
		tables[taken++] = found[i].table;
	}
	if (taken == 0)
		return 0;

	rs_values_init(&values);
	rs_value_set(&values, RS_PARAM_TIDS, rs_array(TIDOID, places, taken), 0);
	rs_value_set(&values, RS_PARAM_TABLES, rs_array(OIDOID, tables, taken), 0);
	rs_value_set(&values, RS_PARAM_ORIGIN_HEADERS, rs_origin_headers(), 0);
	done = rs_execute(target->plans, RS_OP_REDRIVE_TABLE, &values);
	rs_check_swept(done, taken, "moved", redrive->dead_table);
	return done;
}

/* Does the move carry this column of the queue, which the dead-letter table has, too? */
static bool
is_carried(const RsQueue *queue, Form_pg_attribute attribute)
{
	/* As if it had just been published. */
	static const rs_role anew[] = {RS_ROLE_RETRY_AFTER, RS_ROLE_ATTEMPT, RS_ROLE_PROCESSED_AT,
								   RS_ROLE_LOCKED_UNTIL};

	if (attribute->attisdropped || attribute->attgenerated != '\0')
		return false;
	for (size_t i = 0; i < lengthof(anew); i++)
	{
		if (queue->attnum[anew[i]] == attribute->attnum)
			return false;
	}
	return true;
}

/* Describe the dead-letter table to a target's statements. */
static void
bind_dead_table(Target *target, Relation dead)
{
	TupleDesc columns = target->queue.shape;
	const char **carried = palloc(sizeof(char *) * columns->natts);
	int count = 0;

	for (int i = 0; i < columns->natts; i++)
	{
		Form_pg_attribute attribute = TupleDescAttr(columns, i);
		const char *name = NameStr(attribute->attname);

		if (!is_carried(&target->queue, attribute))
			continue;
		if (get_attnum(RelationGetRelid(dead), name) != InvalidAttrNumber)
			carried[count++] = name;
		else if (attribute->attnum == target->queue.attnum[RS_ROLE_ID])
			ereport(ERROR, errcode(ERRCODE_UNDEFINED_COLUMN),
					errmsg("table %s has no column \"%s\", which is the id of queue %s",
						   rs_relation_label(RelationGetRelid(dead)), name, target->label));
		else if (attribute->attnum == target->queue.attnum[RS_ROLE_HEADERS])
			target->queue.table.column[RS_ROLE_HEADERS] = NULL;
	}
	target->dead = (rs_destination){
		.schema = get_namespace_name(RelationGetNamespace(dead)),
		.name = pstrdup(RelationGetRelationName(dead)),
		.columns = carried,
		.column_count = count,
	};
}

/*
 * The dead-letter table as the finder sees it: what it may be as a queue, so that
 * what is in work or processed there stays; by the target's id and headers.
 */
static RsQueue *
dead_table_as_queue(const Target *target, Relation dead)
{
	Oid relid = RelationGetRelid(dead);
	RsQueue *queue = palloc0(sizeof(RsQueue));

	if (rs_queue_row(relid) != NULL)
		rs_queue_load(relid, queue);
	queue->relid = relid;
	queue->table.schema = target->dead.schema;
	queue->table.name = target->dead.name;
	queue->table.column[RS_ROLE_GROUP] = NULL;
	queue->table.column[RS_ROLE_ID] = target->queue.table.column[RS_ROLE_ID];
	queue->table.column[RS_ROLE_HEADERS] = target->queue.table.column[RS_ROLE_HEADERS];
	return queue;
}

/* ------------------------------------------------------------------- redrive */

static void
set_finder_values(RsValues *values, const Redrive *redrive)
{
	rs_values_init(values);
	rs_value_set(values, RS_PARAM_NOW, TimestampTzGetDatum(GetCurrentTimestamp()), 0);
	if (redrive->dead_group != NULL)
		rs_value_set(values, RS_PARAM_DEAD_GROUP, CStringGetTextDatum(redrive->dead_group), 0);
}

/* What goes back to one queue. */
static int64
redrive_to(Redrive *redrive, Target *target, int64 limit)
{
	RsSweep work = {.find = RS_OP_FIND_DEAD, .limit = limit, .arg = redrive};
	int64 done;

	redrive->target = target;
	set_finder_values(&work.values, redrive);
	if (redrive->dead_group != NULL)
	{
		work.work = redrive_to_groups;
		target->plans = rs_plans_create(&target->queue, NULL, CurrentMemoryContext);
		work.finder = target->plans;
		done = rs_sweep(&work);
	}
	else
	{
		Relation dead = relation_open(redrive->dead_table, RowExclusiveLock);

		work.work = redrive_to_table;
		bind_dead_table(target, dead);
		target->plans = rs_plans_create(&target->queue, &target->dead, CurrentMemoryContext);
		work.finder =
			rs_plans_create(dead_table_as_queue(target, dead), NULL, CurrentMemoryContext);
		done = rs_sweep(&work);
		rs_plans_free(work.finder);
		relation_close(dead, NoLock);
	}
	rs_plans_free(target->plans);
	if (done > 0)
		rs_wake_at_commit(target->queue.relid);
	return done;
}

/*
 * ruststream.redrive(source text, max_rows bigint, subscription text) returns
 * bigint: move dead letters back where they came from, as if they had just been
 * published; returns how many.  source is a dead-letter group or table; rows go where
 * their headers say, else to subscription, else to the only queue (and group) of
 * which it is the dead letter.  What somebody else has in work stays.  Errors: 42704
 * no dead letter, no such subscription; 42725 both a group and a table; 42501; 55000
 * a row that can go nowhere; 23505 an id that is there again.
 */
Datum
rs_sql_redrive(PG_FUNCTION_ARGS)
{
	int64 limit = PG_ARGISNULL(1) ? -1 : PG_GETARG_INT64(1);
	Redrive redrive = {0};
	int64 done = 0;
	ListCell *cell;

	if (PG_ARGISNULL(0))
		ereport(ERROR, errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED), errmsg("source must not be null"));
	if (!PG_ARGISNULL(1) && limit < 0)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("max_rows must not be negative"));

	redrive.source = text_to_cstring(PG_GETARG_TEXT_PP(0));
	find_targets(&redrive, PG_ARGISNULL(2) ? NULL : text_to_cstring(PG_GETARG_TEXT_PP(2)));

	SPI_connect();
	foreach (cell, redrive.targets)
		done += redrive_to(&redrive, lfirst(cell), limit < 0 ? -1 : limit - done);
	SPI_finish();
	PG_RETURN_INT64(done);
}
