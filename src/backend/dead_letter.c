/*-------------------------------------------------------------------------
 *
 * dead_letter.c
 *	  The table that a subscription's dead letters go to: can it take whatever a
 *	  move carries?
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/catalog.h"

#include "access/relation.h"
#include "catalog/pg_class.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"

/* The destination's column of this name, or NULL. */
static Form_pg_attribute
column_named(TupleDesc descriptor, const char *name)
{
	for (int i = 0; i < descriptor->natts; i++)
	{
		Form_pg_attribute attribute = TupleDescAttr(descriptor, i);

		if (!attribute->attisdropped && strcmp(NameStr(attribute->attname), name) == 0)
			return attribute;
	}
	return NULL;
}

static bool
is_moved(Form_pg_attribute attribute)
{
	return !attribute->attisdropped && attribute->attgenerated == '\0';
}

/* Can a column of the queue be carried over into the destination? */
static void
check_moved_column(Form_pg_attribute attribute, Relation destination)
{
	const char *name = NameStr(attribute->attname);
	const char *label = rs_relation_label(RelationGetRelid(destination));
	Form_pg_attribute target = column_named(RelationGetDescr(destination), name);

	if (target == NULL)
		ereport(ERROR, errcode(ERRCODE_UNDEFINED_COLUMN),
				errmsg("dead-letter table %s has no column \"%s\"", label, name),
				errhint("A move carries every column: make the table with "
						"CREATE TABLE .. (LIKE the queue)."));
	if (target->attgenerated != '\0')
		ereport(ERROR, errcode(ERRCODE_GENERATED_ALWAYS),
				errmsg("column \"%s\" of dead-letter table %s is a generated column", name, label),
				errhint("A move writes it: make it an ordinary column."));
	if (target->atttypid != attribute->atttypid ||
		(target->atttypmod != -1 && target->atttypmod != attribute->atttypmod))
		ereport(ERROR, errcode(ERRCODE_DATATYPE_MISMATCH),
				errmsg("column \"%s\" of dead-letter table %s is of type %s, but the queue's is of "
					   "type %s",
					   name, label, format_type_with_typemod(target->atttypid, target->atttypmod),
					   format_type_with_typemod(attribute->atttypid, attribute->atttypmod)),
				errhint("Give both the same type."));
}

/* Can a column that only the destination has do without a value of ours? */
static void
check_own_column(Form_pg_attribute attribute, TupleDesc source, Relation destination)
{
	Form_pg_attribute moved;

	if (attribute->attisdropped || !attribute->attnotnull || attribute->atthasdef ||
		attribute->attidentity != '\0')
		return;
	moved = column_named(source, NameStr(attribute->attname));
	if ((moved != NULL && is_moved(moved)) || get_typdefault(attribute->atttypid) != NULL)
		return;
	ereport(ERROR, errcode(ERRCODE_NOT_NULL_VIOLATION),
			errmsg("column \"%s\" of dead-letter table %s is NOT NULL and has no default",
				   NameStr(attribute->attname), rs_relation_label(RelationGetRelid(destination))),
			errhint("The queue has nothing to put there: give it a default."));
}

/* What a move into the destination carries: every column that is not generated. */
static void
list_moved_columns(Relation source, Relation destination, RsSubscription *subscription)
{
	TupleDesc from = RelationGetDescr(source);
	TupleDesc to = RelationGetDescr(destination);
	const char **columns = palloc(sizeof(char *) * from->natts);
	int count = 0;

	for (int i = 0; i < from->natts; i++)
	{
		Form_pg_attribute attribute = TupleDescAttr(from, i);

		if (!is_moved(attribute))
			continue;
		check_moved_column(attribute, destination);
		columns[count++] = pstrdup(NameStr(attribute->attname));
	}
	for (int i = 0; i < to->natts; i++)
		check_own_column(TupleDescAttr(to, i), from, destination);

	subscription->destination = (rs_destination){
		.schema = get_namespace_name(RelationGetNamespace(destination)),
		.name = pstrdup(RelationGetRelationName(destination)),
		.columns = columns,
		.column_count = count,
	};
}

void
rs_bind_dead_letter_table(RsSubscription *subscription)
{
	Oid relid = subscription->dead_letter_table;
	Relation source;
	Relation destination;
	Form_pg_attribute id;

	if (relid == subscription->queue.relid)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("a queue cannot be its own dead-letter table"),
				errhint("Name another table with the same columns."));

	rs_watch_relation(relid);
	destination = try_relation_open(relid, AccessShareLock);
	if (destination == NULL)
		ereport(ERROR, errcode(ERRCODE_UNDEFINED_TABLE),
				errmsg("the dead-letter table of subscription \"%s\" does not exist any more",
					   subscription->name),
				errhint("Name another with ruststream.alter_subscription(.., dead_letter => ..)."));
	source = relation_open(subscription->queue.relid, AccessShareLock);

	if (destination->rd_rel->relkind != RELKIND_RELATION &&
		destination->rd_rel->relkind != RELKIND_PARTITIONED_TABLE)
		ereport(ERROR, errcode(ERRCODE_WRONG_OBJECT_TYPE),
				errmsg("%s is not a table", rs_relation_label(relid)),
				errhint("Dead letters go to an ordinary or partitioned table."));
	if (destination->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT &&
		destination->rd_rel->relpersistence != source->rd_rel->relpersistence)
		ereport(ERROR, errcode(ERRCODE_WRONG_OBJECT_TYPE),
				errmsg("dead-letter table %s is not permanent", rs_relation_label(relid)),
				errhint("What goes there must not be lost: use a permanent table."));
	id = TupleDescAttr(RelationGetDescr(source), subscription->queue.attnum[RS_ROLE_ID] - 1);
	if (!is_moved(id))
		ereport(
			ERROR, errcode(ERRCODE_GENERATED_ALWAYS),
			errmsg("id column \"%s\" is a generated column, which a move to a dead-letter table "
				   "does not carry",
				   NameStr(id->attname)),
			errhint("Subscribe without dead_letter."));

	rs_check_superuser(subscription->owner, relid);
	rs_check_schema_usage(subscription->owner, relid);
	rs_check_right(subscription->owner, relid, ACL_INSERT, "INSERT", "INSERT");
	list_moved_columns(source, destination, subscription);

	relation_close(source, NoLock);
	relation_close(destination, NoLock);
}
