/*-------------------------------------------------------------------------
 *
 * catalog.c
 *	  Our objects in this database: where they are, their rows, and how
 *	  a backend learns that something has changed.
 *
 * The catalogs are read directly and not by SPI: a worker runs as a role that
 * may not read them, and what it reads must be the newest there is, whatever
 * the snapshot of its transaction.  They are small, so that their rows are
 * found by looking through them.  They are written by SPI, as their owner, so
 * that constraints and triggers do their part.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/catalog.h"
#include "backend/compat.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/namespace.h"
#include "catalog/pg_attribute.h"
#include "catalog/pg_class.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "commands/trigger.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

PG_FUNCTION_INFO_V1(rs_sql_changed);

/* ------------------------------------------------------------ invalidation */

/*
 * Counts what may concern a loaded subscription.  Starts at 1, so that 0 can
 * mean "never looked".
 */
static uint64 generation = 1;

/* The relations whose changes count; NULL: none so far. */
static HTAB *watched;

uint64
rs_catalog_generation(void)
{
	return generation;
}

void
rs_watch_relation(Oid relid)
{
	if (watched == NULL)
	{
		HASHCTL control = {.keysize = sizeof(Oid), .entrysize = sizeof(Oid)};

		watched = hash_create("ruststream watched relations", 64, &control, HASH_ELEM | HASH_BLOBS);
	}
	(void) hash_search(watched, &relid, HASH_ENTER, NULL);
}

/*
 * Other relations do not count, or a handler that makes a temporary table
 * would have its subscription loaded afresh for each delivery.
 */
static void
relation_changed(Datum arg, Oid relid)
{
	if (!OidIsValid(relid) ||
		(watched != NULL && hash_search(watched, &relid, HASH_FIND, NULL) != NULL))
		generation++;
}

/*
 * Functions, roles and schemas change rarely, and a missing one that appears
 * may mend a subscription: each change counts.
 */
static void
syscache_changed(Datum arg, int cacheid, uint32 hashvalue)
{
	generation++;
}

void
rs_catalog_init(void)
{
	CacheRegisterRelcacheCallback(relation_changed, (Datum) 0);
	CacheRegisterSyscacheCallback(PROCOID, syscache_changed, (Datum) 0);
	CacheRegisterSyscacheCallback(AUTHOID, syscache_changed, (Datum) 0);
	CacheRegisterSyscacheCallback(NAMESPACEOID, syscache_changed, (Datum) 0);
}

/*
 * Statement trigger on both catalogs.  Their rows are in nobody's cache but
 * ours, so that the server sends no invalidation for them: send one for the
 * table.  Only the tables' owner writes them, whatever rights others have, such
 * as members of pg_write_all_data.
 */
Datum
rs_sql_changed(PG_FUNCTION_ARGS)
{
	Relation relation;

	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR, errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				errmsg("function \"%s\" was not called by trigger manager", "internal_changed"));
	relation = ((TriggerData *) fcinfo->context)->tg_relation;
	if (!rs_class_ownercheck(RelationGetRelid(relation), GetUserId()))
		ereport(ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("table %s is written by its owner only",
					   rs_relation_label(RelationGetRelid(relation))),
				errhint("Call the functions of ruststream."));
	CacheInvalidateRelcache(relation);
	rs_wake_supervisor_at_commit();
	PG_RETURN_POINTER(NULL);
}

/* ------------------------------------------------------------- our objects */

static Oid
find_type(const char *name, Oid schema)
{
	return GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid, CStringGetDatum(name),
						   ObjectIdGetDatum(schema));
}

/* False where the extension is not installed, or not yet, or not any more. */
static bool
find_objects(RsObjects *objects)
{
	if (!OidIsValid(get_extension_oid("ruststream", true)))
		return false;
	objects->schema = get_namespace_oid("ruststream", true);
	if (!OidIsValid(objects->schema))
		return false;
	objects->queue = get_relname_relid("queue", objects->schema);
	objects->subscription = get_relname_relid("subscription", objects->schema);
	objects->failure_history = get_relname_relid("failure_history", objects->schema);
	objects->outcome_type = find_type("outcome", objects->schema);
	objects->delivery_type = find_type("delivery", objects->schema);
	objects->owner = rs_relation_owner(objects->subscription);
	return OidIsValid(objects->queue) && OidIsValid(objects->subscription) &&
		   OidIsValid(objects->failure_history) && OidIsValid(objects->outcome_type) &&
		   OidIsValid(objects->delivery_type) && OidIsValid(objects->owner);
}

const RsObjects *
rs_objects(bool missing_ok)
{
	static RsObjects objects;
	static uint64 objects_generation = 0;
	uint64 before = generation;
	RsObjects found;

	if (objects_generation == before)
		return &objects;

	if (!find_objects(&found))
	{
		if (missing_ok)
			return NULL;
		ereport(ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("extension \"ruststream\" is not installed in this database"),
				errhint("Run CREATE EXTENSION ruststream."));
	}
	rs_watch_relation(found.queue);
	rs_watch_relation(found.subscription);
	objects = found;
	/* What has changed while we looked has us look again next time. */
	objects_generation = before;
	return &objects;
}

void
rs_become_catalog_owner(Oid *save_userid, int *save_sec_context)
{
	Oid owner = rs_objects(false)->owner;

	GetUserIdAndSecContext(save_userid, save_sec_context);
	SetUserIdAndSecContext(owner, *save_sec_context | SECURITY_LOCAL_USERID_CHANGE |
									  SECURITY_RESTRICTED_OPERATION);
}

/* ------------------------------------------------------- who may write them */

#define WRITING (ACL_INSERT | ACL_UPDATE | ACL_DELETE | ACL_TRUNCATE)

/*
 * What is attached to a table runs, at the latest the triggers of a table that
 * refers to it, as whoever writes.
 */
#define ATTACHING (ACL_TRIGGER | ACL_REFERENCES)

/* Does this list grant one of the rights to somebody who is neither owner nor superuser? */
static void
check_acl(Oid relid, Oid owner, Datum list, AclMode rights)
{
	Acl *acl = DatumGetAclPCopy(list);
	/* ACL_DAT, without its warning: there are no nulls in it. */
	const AclItem *items = (AclItem *) ((char *) acl + ARR_OVERHEAD_NONULLS(ARR_NDIM(acl)));

	for (int i = 0; i < ACL_NUM(acl); i++)
	{
		Oid grantee = items[i].ai_grantee;
		const char *name;

		if ((ACLITEM_GET_PRIVS(items[i]) & rights) == 0 || grantee == owner ||
			superuser_arg(grantee))
			continue;
		name = grantee == ACL_ID_PUBLIC ? "PUBLIC"
										: quote_identifier(GetUserNameFromId(grantee, false));
		ereport(ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("table %s is open to %s", rs_relation_label(relid), name),
				errdetail("Whoever writes the tables of ruststream, or attaches something to "
						  "them, has code run with other people's rights."),
				errhint("REVOKE ALL ON %s FROM %s.", rs_relation_label(relid), name));
	}
	pfree(acl);
}

/* The rights on the table, and on each of its columns. */
static void
check_grants(Oid relid, AclMode rights)
{
	HeapTuple tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));
	Oid owner;
	Datum list;
	bool isnull;
	int natts;

	if (!HeapTupleIsValid(tuple))
		return;
	owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
	natts = ((Form_pg_class) GETSTRUCT(tuple))->relnatts;
	list = SysCacheGetAttr(RELOID, tuple, Anum_pg_class_relacl, &isnull);
	if (!isnull)
		check_acl(relid, owner, list, rights);
	ReleaseSysCache(tuple);

	for (int attnum = 1; attnum <= natts; attnum++)
	{
		tuple = SearchSysCache2(ATTNUM, ObjectIdGetDatum(relid), Int16GetDatum(attnum));
		if (!HeapTupleIsValid(tuple))
			continue;
		list = SysCacheGetAttr(ATTNUM, tuple, Anum_pg_attribute_attacl, &isnull);
		if (!isnull)
			check_acl(relid, owner, list, rights);
		ReleaseSysCache(tuple);
	}
}

void
rs_catalog_check(void)
{
	const RsObjects *objects = rs_objects(false);

	check_grants(objects->queue, WRITING | ATTACHING);
	check_grants(objects->subscription, WRITING | ATTACHING);
	check_grants(objects->failure_history, ATTACHING);
}

/* ------------------------------------------------------------ reading rows */

static RsRow *
read_row(HeapTuple tuple, TupleDesc descriptor)
{
	RsRow *row = palloc0(sizeof(RsRow));

	/* The values point into the copy. */
	heap_deform_tuple(heap_copytuple(tuple), descriptor, row->values, row->nulls);
	return row;
}

List *
rs_catalog_find(Oid catalog, AttrNumber column, RegProcedure equal, Datum key)
{
	List *rows = NIL;
	Relation relation = table_open(catalog, AccessShareLock);
	TupleDesc descriptor = RelationGetDescr(relation);
	ScanKeyData scan_key;
	SysScanDesc scan;
	HeapTuple tuple;

	/* A table of this name whose columns are not ours would be misread. */
	if (descriptor->natts !=
		(catalog == rs_objects(false)->queue ? RS_QUEUE_NATTS : RS_SUBSCRIPTION_NATTS))
		elog(ERROR, "table \"%s\" does not have the columns this library expects",
			 RelationGetRelationName(relation));

	ScanKeyInit(&scan_key, column, BTEqualStrategyNumber, equal, key);
	/* Without a snapshot: the newest committed rows, and our own. */
	scan = systable_beginscan(relation, InvalidOid, false, NULL, 1, &scan_key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
		rows = lappend(rows, read_row(tuple, descriptor));
	systable_endscan(scan);
	table_close(relation, AccessShareLock);
	return rows;
}

static RsRow *
only_row(List *rows)
{
	return rows == NIL ? NULL : linitial(rows);
}

RsRow *
rs_queue_row(Oid relid)
{
	return only_row(rs_catalog_find(rs_objects(false)->queue, RS_QUEUE_RELATION, F_OIDEQ,
									ObjectIdGetDatum(relid)));
}

RsRow *
rs_subscription_row(const char *name)
{
	return only_row(rs_catalog_find(rs_objects(false)->subscription, RS_SUBSCRIPTION_NAME, F_TEXTEQ,
									CStringGetTextDatum(name)));
}

int32
rs_subscription_id(const char *name, bool missing_ok)
{
	RsRow *row = rs_subscription_row(name);

	if (row != NULL)
		return DatumGetInt32(rs_row_get(row, RS_SUBSCRIPTION_ID));
	if (!missing_ok)
		ereport(ERROR, errcode(ERRCODE_UNDEFINED_OBJECT),
				errmsg("subscription \"%s\" does not exist", name),
				errhint("The view ruststream.status lists the subscriptions."));
	return 0;
}

/* ------------------------------------------------------------ writing rows */

uint64
rs_catalog_execute(const char *sql, int nargs, Oid *types, Datum *values, const char *nulls)
{
	Oid save_userid;
	int save_sec_context;
	int nest_level;
	uint64 processed;
	int rc;

	/* An error leaves role and settings to the abort of the (sub)transaction. */
	rs_become_catalog_owner(&save_userid, &save_sec_context);
	nest_level = NewGUCNestLevel();
	(void) set_config_option("search_path", "pg_catalog, pg_temp", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);

	SPI_connect();
	rc = SPI_execute_with_args(sql, nargs, types, values, nulls, false, 0);
	if (rc < 0)
		elog(ERROR, "could not execute \"%s\": %s", sql, SPI_result_code_string(rc));
	processed = SPI_processed;
	SPI_finish();

	AtEOXact_GUC(true, nest_level);
	SetUserIdAndSecContext(save_userid, save_sec_context);
	return processed;
}

/* Write a row by a statement whose text has its columns $1, $2, .. behind it. */
static void
write_row(Oid catalog, const RsRow *row, bool update)
{
	Relation relation = table_open(catalog, RowExclusiveLock);
	TupleDesc descriptor = RelationGetDescr(relation);
	const char *name = RelationGetRelationName(relation);
	StringInfoData sql;
	Oid types[RS_MAX_NATTS];
	Datum values[RS_MAX_NATTS];
	char nulls[RS_MAX_NATTS];

	initStringInfo(&sql);
	if (update)
		appendStringInfo(&sql, "UPDATE ruststream.%s SET", name);
	else
		appendStringInfo(&sql, "INSERT INTO ruststream.%s VALUES (", name);

	for (int i = 0; i < descriptor->natts; i++)
	{
		Form_pg_attribute attribute = TupleDescAttr(descriptor, i);

		types[i] = attribute->atttypid;
		values[i] = row->values[i];
		nulls[i] = row->nulls[i] ? 'n' : ' ';
		if (i > 0)
			appendStringInfoString(&sql, ", ");
		if (update)
			appendStringInfo(&sql, " %s = $%d", quote_identifier(NameStr(attribute->attname)),
							 i + 1);
		else
			appendStringInfo(&sql, "$%d", i + 1);
	}
	if (update)
		appendStringInfo(&sql, " WHERE %s = $1",
						 quote_identifier(NameStr(TupleDescAttr(descriptor, 0)->attname)));
	else
		appendStringInfoChar(&sql, ')');

	(void) rs_catalog_execute(sql.data, descriptor->natts, types, values, nulls);
	table_close(relation, NoLock);
}

void
rs_catalog_insert(Oid catalog, const RsRow *row)
{
	write_row(catalog, row, false);
}

void
rs_catalog_update(Oid catalog, const RsRow *row)
{
	write_row(catalog, row, true);
}

/* ------------------------------------------------------------------ tables */

Oid
rs_relation_owner(Oid relid)
{
	HeapTuple tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));
	Oid owner;

	if (!HeapTupleIsValid(tuple))
		return InvalidOid;
	owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
	ReleaseSysCache(tuple);
	return owner;
}

Oid
rs_not_of_superuser(Oid relid)
{
	Oid owner;
	ListCell *cell;

	/* First watch, then look: a partition may come, and change hands. */
	rs_watch_relation(relid);
	owner = rs_relation_owner(relid);
	if (!OidIsValid(owner))
		return InvalidOid;
	if (!superuser_arg(owner))
		return relid;
	if (get_rel_relkind(relid) != RELKIND_PARTITIONED_TABLE)
		return InvalidOid;
	/* One that is being detached still receives rows. */
	foreach (cell, find_inheritance_children_extended(relid, false, NoLock, NULL, NULL))
	{
		Oid found = rs_not_of_superuser(lfirst_oid(cell));

		if (OidIsValid(found))
			return found;
	}
	return InvalidOid;
}

bool
rs_owns_table(Oid relid)
{
	return SearchSysCacheExists1(RELOID, ObjectIdGetDatum(relid)) &&
		   rs_class_ownercheck(relid, GetUserId());
}

char *
rs_relation_label(Oid relid)
{
	char *name = get_rel_name(relid);

	/* One that has just been dropped by somebody else. */
	if (name == NULL)
		return psprintf("%u", relid);
	return quote_qualified_identifier(get_namespace_name(get_rel_namespace(relid)), name);
}
