/*-------------------------------------------------------------------------
 *
 * queue.c
 *	  create_queue, attach_queue, detach_queue.
 *
 * They run with the caller's rights: what they do to a table is what the
 * caller could do by hand.  Only the row in ruststream.queue is written as the
 * owner of our catalogs.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/catalog.h"
#include "backend/compat.h"

#include "access/table.h"
#include "catalog/namespace.h"
#include "catalog/objectaddress.h"
#include "catalog/pg_class.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_type_d.h"
#include "commands/dbcommands.h"
#include "parser/parse_func.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/reltrigger.h"
#include "utils/varlena.h"

PG_FUNCTION_INFO_V1(rs_sql_create_queue);
PG_FUNCTION_INFO_V1(rs_sql_attach_queue);
PG_FUNCTION_INFO_V1(rs_sql_detach_queue);

#define WAKE_TRIGGER "ruststream_wake"

static void
require_argument(FunctionCallInfo fcinfo, int argument, const char *name)
{
	if (PG_ARGISNULL(argument))
		ereport(ERROR, errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("argument \"%s\" must not be null", name));
}

/* Execute a command as the caller. */
static void
execute_as_caller(const char *sql)
{
	int rc;

	SPI_connect();
	rc = SPI_execute(sql, false, 0);
	if (rc < 0)
		elog(ERROR, "could not execute \"%s\": %s", sql, SPI_result_code_string(rc));
	SPI_finish();
}

static void
require_owner(Oid relid)
{
	if (!rs_class_ownercheck(relid, GetUserId()))
		aclcheck_error(ACLCHECK_NOT_OWNER, get_relkind_objtype(get_rel_relkind(relid)),
					   get_rel_name(relid));
}

/* ------------------------------------------------------------- the trigger */

/* Does the table have our trigger?  One of this name that is not ours is an error. */
static bool
has_wake_trigger(Oid relid)
{
	Oid wake =
		LookupFuncName(list_make2(makeString("ruststream"), makeString("wake")), 0, NULL, false);
	Relation relation = table_open(relid, AccessShareLock);
	TriggerDesc *triggers = relation->trigdesc;
	bool result = false;

	for (int i = 0; triggers != NULL && i < triggers->numtriggers; i++)
	{
		if (strcmp(triggers->triggers[i].tgname, WAKE_TRIGGER) == 0)
			result = triggers->triggers[i].tgfoid == wake;
	}
	table_close(relation, NoLock);
	return result;
}

static void
create_wake_trigger(Oid relid)
{
	/* A restored table may have brought it along. */
	if (!has_wake_trigger(relid))
		execute_as_caller(psprintf("CREATE TRIGGER " WAKE_TRIGGER
								   " AFTER INSERT ON %s FOR EACH STATEMENT"
								   " EXECUTE FUNCTION ruststream.wake()",
								   rs_relation_label(relid)));
}

/* ------------------------------------------------------------------- attaching */

/*
 * A plain table is read with ONLY, so that rows of its children would be
 * published and never delivered.
 */
static void
refuse_inheritance(Oid relid)
{
	if (get_rel_relkind(relid) == RELKIND_RELATION && has_subclass(relid) &&
		find_inheritance_children(relid, NoLock) != NIL)
		ereport(ERROR, errcode(ERRCODE_WRONG_OBJECT_TYPE),
				errmsg("table %s has inheritance children", rs_relation_label(relid)),
				errhint("Use a partitioned table, or attach each child."));
}

/* Attach the table that row describes; returns after all checks. */
static void
attach(RsRow *row)
{
	Oid relid = DatumGetObjectId(rs_row_get(row, RS_QUEUE_RELATION));
	bool wake = DatumGetBool(rs_row_get(row, RS_QUEUE_WAKE));
	RsQueue queue;
	List *missing;
	ListCell *cell;

	require_owner(relid);
	/* Two sessions that attach the same table go one after the other. */
	LockRelationOid(relid, wake ? ShareRowExclusiveLock : ShareUpdateExclusiveLock);
	require_owner(relid);

	if (rs_queue_row(relid) != NULL)
		ereport(ERROR, errcode(ERRCODE_DUPLICATE_OBJECT),
				errmsg("table %s is a queue already", rs_relation_label(relid)),
				errhint("To describe it anew, detach it first: that forgets its subscriptions."));

	rs_queue_bind(row, &queue);
	refuse_inheritance(relid);

	/* As the level is written in the core, whatever the caller's spelling. */
	if (queue.table.isolation == RS_ISOLATION_DEFAULT)
		rs_row_set_null(row, RS_QUEUE_ISOLATION);
	else
		rs_row_set(row, RS_QUEUE_ISOLATION,
				   CStringGetTextDatum(rs_isolation_word(queue.table.isolation)));

	if (wake)
		create_wake_trigger(relid);
	rs_catalog_insert(rs_objects(false)->queue, row);

	missing = rs_queue_missing_indexes(&queue);
	foreach (cell, missing)
		ereport(NOTICE,
				errmsg("queue %s has no index that serves its claims", rs_relation_label(relid)),
				errhint("Before anything can subscribe, run %s.", (char *) lfirst(cell)));
}

Datum
rs_sql_attach_queue(PG_FUNCTION_ARGS)
{
	RsRow row;

	StaticAssertStmt(RS_QUEUE_WAKE == RS_QUEUE_NATTS, "the arguments are the columns");
	require_argument(fcinfo, 0, "queue");
	for (int i = 0; i < RS_QUEUE_NATTS; i++)
	{
		row.values[i] = PG_GETARG_DATUM(i);
		row.nulls[i] = PG_ARGISNULL(i);
	}
	if (rs_row_isnull(&row, RS_QUEUE_FIFO))
		rs_row_set(&row, RS_QUEUE_FIFO, BoolGetDatum(false));
	if (rs_row_isnull(&row, RS_QUEUE_WAKE))
		rs_row_set(&row, RS_QUEUE_WAKE, BoolGetDatum(true));

	attach(&row);
	PG_RETURN_VOID();
}

/* --------------------------------------------------------------------- creating */

/* What create_queue is asked for. */
typedef struct NewQueue
{
	rs_form form;
	bool groups;
	bool fifo;
	bool partition_key;
	bool keep_processed;
	Oid payload_type;
	text *lock_key;  /* or NULL */
	text *isolation; /* or NULL */
} NewQueue;

static void
check_switches(const NewQueue *new_queue)
{
	if (new_queue->fifo && !new_queue->groups)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("fifo needs groups"),
				errhint("Add groups => true: the rows of one group are delivered in order."));
	if (new_queue->form == RS_FORM_ADVISORY_LOCK && new_queue->lock_key == NULL)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("the advisory_lock form needs a lock_key"),
				errhint("Write a template such as 'jobs-{id}'."));
	if (new_queue->form != RS_FORM_ADVISORY_LOCK && new_queue->lock_key != NULL)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("lock_key goes with the advisory_lock form only"),
				errhint("Add form => 'advisory_lock', or leave out lock_key."));
}

/* The table's name, qualified and quoted. */
static char *
qualified_name(text *name)
{
	RangeVar *relation = makeRangeVarFromNameList(textToQualifiedNameList(name));
	Oid schema;

	if (relation->catalogname != NULL &&
		strcmp(relation->catalogname, get_database_name(MyDatabaseId)) != 0)
		ereport(ERROR, errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				errmsg("a queue cannot be made in another database"));
	schema = RangeVarGetCreationNamespace(relation);
	return quote_qualified_identifier(get_namespace_name(schema), relation->relname);
}

static char *
create_table_sql(const char *name, const NewQueue *new_queue)
{
	StringInfoData sql;

	initStringInfo(&sql);
	appendStringInfo(&sql,
					 "CREATE TABLE %s (id pg_catalog.int8 GENERATED BY DEFAULT AS IDENTITY "
					 "PRIMARY KEY",
					 name);
	if (new_queue->groups)
		appendStringInfoString(&sql, ", group_name pg_catalog.text NOT NULL");
	if (new_queue->partition_key)
		appendStringInfoString(&sql, ", partition_key pg_catalog.text");
	appendStringInfoString(&sql, ", priority pg_catalog.int4"
								 ", retry_after pg_catalog.timestamptz"
								 ", attempt pg_catalog.int4 NOT NULL DEFAULT 1");
	if (new_queue->form == RS_FORM_LEASE)
		appendStringInfoString(&sql, ", locked_until pg_catalog.timestamptz");
	if (new_queue->keep_processed)
		appendStringInfoString(&sql, ", processed_at pg_catalog.timestamptz");
	appendStringInfo(&sql,
					 ", headers pg_catalog.jsonb NOT NULL DEFAULT '{}'"
					 ", payload %s)",
					 format_type_be_qualified(new_queue->payload_type));
	return sql.data;
}

static void
set_column(RsRow *row, AttrNumber column, const char *name)
{
	rs_row_set(row, column, DirectFunctionCall1(namein, CStringGetDatum(name)));
}

static void
describe_new_queue(Oid relid, const NewQueue *new_queue, RsRow *row)
{
	for (int i = 1; i <= RS_QUEUE_NATTS; i++)
		rs_row_set_null(row, i);
	rs_row_set(row, RS_QUEUE_RELATION, ObjectIdGetDatum(relid));
	rs_row_set(row, RS_QUEUE_FIFO, BoolGetDatum(new_queue->fifo));
	rs_row_set(row, RS_QUEUE_WAKE, BoolGetDatum(true));
	set_column(row, RS_QUEUE_ID_COLUMN, "id");
	set_column(row, RS_QUEUE_PRIORITY_COLUMN, "priority");
	set_column(row, RS_QUEUE_RETRY_AFTER_COLUMN, "retry_after");
	set_column(row, RS_QUEUE_ATTEMPT_COLUMN, "attempt");
	set_column(row, RS_QUEUE_HEADERS_COLUMN, "headers");
	set_column(row, RS_QUEUE_PAYLOAD_COLUMN, "payload");
	if (new_queue->groups)
		set_column(row, RS_QUEUE_GROUP_COLUMN, "group_name");
	if (new_queue->partition_key)
		set_column(row, RS_QUEUE_PARTITION_KEY_COLUMN, "partition_key");
	if (new_queue->keep_processed)
		set_column(row, RS_QUEUE_PROCESSED_AT_COLUMN, "processed_at");
	if (new_queue->form == RS_FORM_LEASE)
		set_column(row, RS_QUEUE_LOCKED_UNTIL_COLUMN, "locked_until");
	if (new_queue->lock_key != NULL)
		rs_row_set(row, RS_QUEUE_LOCK_KEY, PointerGetDatum(new_queue->lock_key));
	if (new_queue->isolation != NULL)
		rs_row_set(row, RS_QUEUE_ISOLATION, PointerGetDatum(new_queue->isolation));
}

/* A form from its value of the SQL enum. */
static rs_form
form_argument(Datum value)
{
	char *word = DatumGetCString(OidFunctionCall1(F_ENUM_OUT, value));
	rs_form form;

	if (!rs_form_find(word, &form))
		elog(ERROR, "unrecognized form \"%s\"", word);
	return form;
}

Datum
rs_sql_create_queue(PG_FUNCTION_ARGS)
{
	static const char *const names[] = {"name",          "form",           "groups",      "fifo",
										"partition_key", "keep_processed", "payload_type"};
	NewQueue new_queue;
	RsQueue queue;
	RsRow row;
	List *missing;
	ListCell *cell;
	char *name;
	Oid relid;

	for (int i = 0; i < (int) lengthof(names); i++)
		require_argument(fcinfo, i, names[i]);
	new_queue.form = form_argument(PG_GETARG_DATUM(1));
	new_queue.groups = PG_GETARG_BOOL(2);
	new_queue.fifo = PG_GETARG_BOOL(3);
	new_queue.partition_key = PG_GETARG_BOOL(4);
	new_queue.keep_processed = PG_GETARG_BOOL(5);
	new_queue.payload_type = PG_GETARG_OID(6);
	new_queue.lock_key = PG_ARGISNULL(7) ? NULL : PG_GETARG_TEXT_PP(7);
	new_queue.isolation = PG_ARGISNULL(8) ? NULL : PG_GETARG_TEXT_PP(8);
	check_switches(&new_queue);

	name = qualified_name(PG_GETARG_TEXT_PP(0));
	execute_as_caller(create_table_sql(name, &new_queue));
	relid = DatumGetObjectId(DirectFunctionCall1(regclassin, CStringGetDatum(name)));

	describe_new_queue(relid, &new_queue, &row);
	rs_queue_bind(&row, &queue);
	missing = rs_queue_missing_indexes(&queue);
	foreach (cell, missing)
		execute_as_caller(lfirst(cell));
	attach(&row);
	PG_RETURN_OID(relid);
}

/* -------------------------------------------------------------------- detaching */

static void
delete_queue(Oid relid)
{
	static const char *const statements[] = {
		("DELETE FROM ruststream.failure_history WHERE subscription_id IN "
		 "(SELECT id FROM ruststream.subscription WHERE queue = $1)"),
		"DELETE FROM ruststream.subscription WHERE queue = $1",
		"DELETE FROM ruststream.queue WHERE relation = $1",
	};
	Oid type = REGCLASSOID;
	Datum value = ObjectIdGetDatum(relid);

	for (int i = 0; i < (int) lengthof(statements); i++)
		(void) rs_catalog_execute(statements[i], 1, &type, &value, NULL);
}

Datum
rs_sql_detach_queue(PG_FUNCTION_ARGS)
{
	Oid relid;
	bool exists;
	List *subscriptions;
	ListCell *cell;

	require_argument(fcinfo, 0, "queue");
	relid = PG_GETARG_OID(0);

	/* A queue whose table is gone can be forgotten by anybody: nothing is left of it. */
	exists = get_rel_name(relid) != NULL;
	if (exists)
	{
		require_owner(relid);
		/* At once what the drop of the trigger takes: an upgrade deadlocks with a delivery. */
		LockRelationOid(relid,
						has_wake_trigger(relid) ? AccessExclusiveLock : ShareRowExclusiveLock);
	}
	if (rs_queue_row(relid) == NULL)
		ereport(ERROR, errcode(ERRCODE_UNDEFINED_OBJECT),
				errmsg("table %s is not a queue", rs_relation_label(relid)),
				errhint("The view ruststream.stat_queue lists the queues."));

	subscriptions = rs_catalog_find(rs_objects(false)->subscription, RS_SUBSCRIPTION_QUEUE, F_OIDEQ,
									ObjectIdGetDatum(relid));
	delete_queue(relid);
	if (exists && has_wake_trigger(relid))
		execute_as_caller(
			psprintf("DROP TRIGGER " WAKE_TRIGGER " ON %s", rs_relation_label(relid)));

	foreach (cell, subscriptions)
		ereport(NOTICE,
				errmsg("subscription \"%s\" is forgotten with its queue",
					   TextDatumGetCString(rs_row_get(lfirst(cell), RS_SUBSCRIPTION_NAME))));
	PG_RETURN_VOID();
}
