/*-------------------------------------------------------------------------
 *
 * bind.c
 *	  A queue's description, bound to its table as it is now.
 *
 * The same checks serve attach_queue, where they refuse a description, and
 * every later load, where they find out what has been done to the table since.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/catalog.h"
#include "backend/compat.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/table.h"
#include "catalog/catalog.h"
#include "catalog/pg_am_d.h"
#include "catalog/pg_attribute.h"
#include "catalog/pg_class.h"
#include "catalog/pg_index.h"
#include "catalog/pg_type.h"
#include "commands/defrem.h"
#include "nodes/primnodes.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

/* --------------------------------------------------- what a role's column is */

/* Which column of ruststream.queue, and of attach_queue, names a role's column. */
static const AttrNumber role_attribute[RS_ROLE_COUNT] = {
	[RS_ROLE_ID] = RS_QUEUE_ID_COLUMN,
	[RS_ROLE_GROUP] = RS_QUEUE_GROUP_COLUMN,
	[RS_ROLE_PRIORITY] = RS_QUEUE_PRIORITY_COLUMN,
	[RS_ROLE_PARTITION_KEY] = RS_QUEUE_PARTITION_KEY_COLUMN,
	[RS_ROLE_RETRY_AFTER] = RS_QUEUE_RETRY_AFTER_COLUMN,
	[RS_ROLE_ATTEMPT] = RS_QUEUE_ATTEMPT_COLUMN,
	[RS_ROLE_PROCESSED_AT] = RS_QUEUE_PROCESSED_AT_COLUMN,
	[RS_ROLE_LOCKED_UNTIL] = RS_QUEUE_LOCKED_UNTIL_COLUMN,
	[RS_ROLE_HEADERS] = RS_QUEUE_HEADERS_COLUMN,
	[RS_ROLE_PAYLOAD] = RS_QUEUE_PAYLOAD_COLUMN,
};

#define MAX_ROLE_TYPES 8

/*
 * The types a role's column may have; none: any.  A domain stands for its base
 * type, except for headers, whose reader looks at the type itself.
 */
typedef struct RoleRule
{
	Oid types[MAX_ROLE_TYPES];
	const char *hint;
	bool settled; /* settlements write it */
	bool cleared; /* NULL means something, so that it must be possible */
} RoleRule;

#define INTEGER_TYPES INT2OID, INT4OID, INT8OID
#define TEXT_TYPES TEXTOID, VARCHAROID

static const RoleRule role_rules[RS_ROLE_COUNT] = {
	[RS_ROLE_ID] = {.types = {INTEGER_TYPES, UUIDOID, TEXT_TYPES},
					.hint = "An id is of type smallint, integer, bigint, uuid, text or varchar."},
	[RS_ROLE_GROUP] = {.types = {TEXT_TYPES},
					   .hint = "A group is of type text or varchar.",
					   .settled = true},
	[RS_ROLE_PRIORITY] = {.types = {INTEGER_TYPES},
						  .hint = "A priority is of type smallint, integer or bigint."},
	[RS_ROLE_PARTITION_KEY] = {.types = {INTEGER_TYPES, UUIDOID, TEXT_TYPES, BOOLOID},
							   .hint = "A partition key is of an integer type, uuid, text, varchar "
									   "or boolean."},
	[RS_ROLE_RETRY_AFTER] = {.types = {TIMESTAMPTZOID},
							 .hint = "This role needs a column of type timestamp with time zone.",
							 .settled = true},
	[RS_ROLE_ATTEMPT] = {.types = {INTEGER_TYPES},
						 .hint = "An attempt is of type smallint, integer or bigint.",
						 .settled = true},
	[RS_ROLE_PROCESSED_AT] = {.types = {TIMESTAMPTZOID},
							  .hint = "This role needs a column of type timestamp with time zone.",
							  .settled = true,
							  .cleared = true},
	[RS_ROLE_LOCKED_UNTIL] = {.types = {TIMESTAMPTZOID},
							  .hint = "This role needs a column of type timestamp with time zone.",
							  .settled = true,
							  .cleared = true},
	[RS_ROLE_HEADERS] = {.types = {JSONBOID, JSONOID},
						 .hint = "Headers are of type jsonb or json."},
};

static const Oid lock_key_types[MAX_ROLE_TYPES] = {INTEGER_TYPES, UUIDOID, TEXT_TYPES, BOOLOID};

static bool
type_is_among(Oid type, const Oid *types)
{
	for (int i = 0; i < MAX_ROLE_TYPES && OidIsValid(types[i]); i++)
	{
		if (types[i] == type)
			return true;
	}
	return false;
}

/* The column of this name; an error where the table has none. */
static Form_pg_attribute
find_column(Relation relation, const char *name, const char *argument)
{
	TupleDesc descriptor = RelationGetDescr(relation);

	for (int i = 0; i < descriptor->natts; i++)
	{
		Form_pg_attribute attribute = TupleDescAttr(descriptor, i);

		if (!attribute->attisdropped && strcmp(NameStr(attribute->attname), name) == 0)
			return attribute;
	}
	ereport(ERROR, errcode(ERRCODE_UNDEFINED_COLUMN),
			errmsg("column \"%s\" of table %s does not exist", name,
				   rs_relation_label(RelationGetRelid(relation))),
			errhint("Name a column of the table in %s.", argument));
	return NULL;
}

/* How many digits a time's column keeps of a second. */
static int32
precision_of(Form_pg_attribute attribute)
{
	int32 typmod = attribute->atttypmod;

	(void) getBaseTypeAndTypmod(attribute->atttypid, &typmod);
	return typmod < 0 ? MAX_TIMESTAMP_PRECISION : typmod;
}

static void
check_role_column(Relation relation, rs_role role, Form_pg_attribute attribute)
{
	const RoleRule *rule = &role_rules[role];
	const char *name = NameStr(attribute->attname);
	Oid type = role == RS_ROLE_HEADERS ? attribute->atttypid : getBaseType(attribute->atttypid);

	if (OidIsValid(rule->types[0]) && !type_is_among(type, rule->types))
		ereport(ERROR, errcode(ERRCODE_DATATYPE_MISMATCH),
				errmsg("column \"%s\" of table %s cannot be the %s column: it is of type %s", name,
					   rs_relation_label(RelationGetRelid(relation)), rs_role_word(role),
					   format_type_be(attribute->atttypid)),
				type == TIMESTAMPOID ? errdetail("What it says depends on the time zone of whoever "
												 "reads it.")
									 : 0,
				errhint("%s", rule->hint));

	/* A token that the column rounds would never be found again. */
	if (role == RS_ROLE_LOCKED_UNTIL && precision_of(attribute) < MAX_TIMESTAMP_PRECISION)
		ereport(ERROR, errcode(ERRCODE_DATATYPE_MISMATCH),
				errmsg("column \"%s\" of table %s cannot be the %s column: it is of type %s", name,
					   rs_relation_label(RelationGetRelid(relation)), rs_role_word(role),
					   format_type_with_typemod(attribute->atttypid, attribute->atttypmod)),
				errdetail("It rounds what is stored, and a lease is known by its exact time."),
				errhint("This role needs a column of type timestamp with time zone, without a "
						"precision."));

	if (rule->settled && attribute->attgenerated != '\0')
		ereport(ERROR, errcode(ERRCODE_GENERATED_ALWAYS),
				errmsg("column \"%s\" cannot be the %s column: it is a generated column", name,
					   rs_role_word(role)),
				errhint("This role needs a column that can be written."));
	if (rule->settled && attribute->attidentity == ATTRIBUTE_IDENTITY_ALWAYS)
		ereport(ERROR, errcode(ERRCODE_GENERATED_ALWAYS),
				errmsg("column \"%s\" cannot be the %s column: it is an identity column defined as "
					   "GENERATED ALWAYS",
					   name, rs_role_word(role)),
				errhint("This role needs a column that can be written."));
	if (rule->cleared && attribute->attnotnull)
		ereport(ERROR, errcode(ERRCODE_NOT_NULL_VIOLATION),
				errmsg("column \"%s\" cannot be the %s column: it is NOT NULL", name,
					   rs_role_word(role)),
				errhint("Run ALTER TABLE %s ALTER COLUMN %s DROP NOT NULL.",
						rs_relation_label(RelationGetRelid(relation)), quote_identifier(name)));
}

static void
check_lock_key_columns(Relation relation, const char *lock_key)
{
	const char *start;
	size_t length;

	for (int i = 0; rs_key_column(lock_key, i, &start, &length); i++)
	{
		Form_pg_attribute attribute = find_column(relation, pnstrdup(start, length), "lock_key");

		if (!type_is_among(getBaseType(attribute->atttypid), lock_key_types))
			ereport(ERROR, errcode(ERRCODE_DATATYPE_MISMATCH),
					errmsg("column \"%s\" cannot be part of the lock key: it is of type %s",
						   NameStr(attribute->attname), format_type_be(attribute->atttypid)),
					errhint("The columns of a lock key are integers, text, uuid or boolean: the "
							"text of other types depends on settings."));
	}
}

/* ------------------------------------------------------------------ indexes */

/* May queries use this index? */
static bool
index_is_usable(Relation index)
{
	return index->rd_index->indisvalid && index->rd_index->indisready &&
		   index->rd_index->indislive && index->rd_rel->relam == BTREE_AM_OID;
}

/*
 * An index's predicate, as it is stored; NULL: none.  Never ask the relation
 * cache for it: that evaluates what it can of it, so that the table owner's
 * functions would run as whoever looks.  An expression instead of a column is
 * column 0 of the key.
 */
static Node *
index_predicate(Relation index)
{
	bool isnull;
	Datum stored =
		SysCacheGetAttr(INDEXRELID, index->rd_indextuple, Anum_pg_index_indpred, &isnull);

	return isnull ? NULL : stringToNode(TextDatumGetCString(stored));
}

/*
 * Does the index tell values of this column apart as our statements do?  They
 * compare by the column's collation and its type's own operators; ids that
 * are two to the index and one to a settlement would end together.
 */
static bool
index_key_compares(Relation index, int i, Relation relation, AttrNumber attnum)
{
	Form_pg_attribute attribute = TupleDescAttr(RelationGetDescr(relation), attnum - 1);
	Oid opclass = GetDefaultOpClass(getBaseType(attribute->atttypid), BTREE_AM_OID);

	return index->rd_index->indkey.values[i] == attnum &&
		   index->rd_indcollation[i] == attribute->attcollation && OidIsValid(opclass) &&
		   index->rd_opfamily[i] == get_opclass_family(opclass);
}

/* Is the id this index's only column, and every id in it at most once, always? */
static bool
index_makes_id_unique(Relation index, Relation relation, AttrNumber id)
{
	Form_pg_index form = index->rd_index;

	return index_is_usable(index) && form->indisunique && form->indimmediate &&
		   form->indnkeyatts == 1 && index_key_compares(index, 0, relation, id) &&
		   index_predicate(index) == NULL;
}

/* Is the index partial exactly where the claims need it to be? */
static bool
index_predicate_fits(Relation index, rs_index which, const RsQueue *queue)
{
	bool of_leases = which == RS_INDEX_LEASE;
	AttrNumber attnum = queue->attnum[of_leases ? RS_ROLE_LOCKED_UNTIL : RS_ROLE_PROCESSED_AT];
	Node *predicate = index_predicate(index);
	NullTest *test;

	if (attnum == InvalidAttrNumber)
		return predicate == NULL;
	if (predicate == NULL || !IsA(predicate, NullTest))
		return false;
	test = castNode(NullTest, predicate);
	return test->nulltesttype == (of_leases ? IS_NOT_NULL : IS_NULL) && IsA(test->arg, Var) &&
		   ((Var *) test->arg)->varattno == attnum;
}

/* Does key number i of the index sort as the claims ask it to? */
static bool
index_key_fits(Relation index, int i, Relation relation, rs_role role, const RsQueue *queue)
{
	int16 order = index->rd_indoption[i];

	if (!index_key_compares(index, i, relation, queue->attnum[role]))
		return false;
	if (role == RS_ROLE_GROUP && !queue->table.fifo)
		return true; /* one group is read: its order does not matter */
	return order ==
		   (role == RS_ROLE_PRIORITY || role == RS_ROLE_RETRY_AFTER ? INDOPTION_NULLS_FIRST : 0);
}

static bool
index_serves_claims(Relation index, rs_index which, Relation relation, const RsQueue *queue)
{
	rs_role roles[RS_ROLE_COUNT];
	int count = rs_index_columns(&queue->table, which, roles);

	if (!index_is_usable(index) || index->rd_index->indnkeyatts != count ||
		!index_predicate_fits(index, which, queue))
		return false;
	for (int i = 0; i < count; i++)
	{
		if (!index_key_fits(index, i, relation, roles[i], queue))
			return false;
	}
	return true;
}

static bool
id_is_unique(Relation relation, AttrNumber id)
{
	ListCell *cell;

	foreach (cell, RelationGetIndexList(relation))
	{
		Relation index = index_open(lfirst_oid(cell), AccessShareLock);
		bool result = index_makes_id_unique(index, relation, id);

		index_close(index, AccessShareLock);
		if (result)
			return true;
	}
	return false;
}

static bool
has_index(Relation relation, rs_index which, const RsQueue *queue)
{
	ListCell *cell;

	foreach (cell, RelationGetIndexList(relation))
	{
		Relation index = index_open(lfirst_oid(cell), AccessShareLock);
		bool result = index_serves_claims(index, which, relation, queue);

		index_close(index, AccessShareLock);
		if (result)
			return true;
	}
	return false;
}

static char *
index_sql(const rs_table *table, rs_index which)
{
	rs_statement statement = rs_index_render(RS_DIALECT_POSTGRESQL, table, which, NULL, 0);
	char *buffer = palloc(statement.length + 1);

	(void) rs_index_render(RS_DIALECT_POSTGRESQL, table, which, buffer, statement.length + 1);
	return buffer;
}

List *
rs_queue_missing_indexes(const RsQueue *queue)
{
	Relation relation = table_open(queue->relid, AccessShareLock);
	List *missing = NIL;

	for (int i = 0; i < RS_INDEX_COUNT; i++)
	{
		if (rs_index_is_needed(RS_DIALECT_POSTGRESQL, &queue->table, (rs_index) i) &&
			!has_index(relation, (rs_index) i, queue))
			missing = lappend(missing, index_sql(&queue->table, (rs_index) i));
	}
	table_close(relation, NoLock);
	return missing;
}

/* ---------------------------------------------------------- the description */

static void
raise_problem(rs_problem problem)
{
	const char *subject = problem.subject != NULL ? problem.subject : "";

	if (problem.code == RS_OK)
		return;
	ereport(ERROR,
			errcode(problem.code == RS_PROBLEM_ISOLATION_READ_UNCOMMITTED
						? ERRCODE_FEATURE_NOT_SUPPORTED
						: ERRCODE_INVALID_PARAMETER_VALUE),
			errmsg_internal(rs_problem_text(problem.code), subject),
			errhint("%s", rs_problem_hint(problem.code)));
}

static char *
optional_name(const RsRow *row, AttrNumber column)
{
	if (rs_row_isnull(row, column))
		return NULL;
	return pstrdup(NameStr(*DatumGetName(rs_row_get(row, column))));
}

static char *
optional_text(const RsRow *row, AttrNumber column)
{
	return rs_row_isnull(row, column) ? NULL : TextDatumGetCString(rs_row_get(row, column));
}

/* What the row says, before any look at the table. */
static void
describe(const RsRow *row, RsQueue *queue)
{
	memset(queue, 0, sizeof(*queue));
	queue->relid = DatumGetObjectId(rs_row_get(row, RS_QUEUE_RELATION));
	for (int role = 0; role < RS_ROLE_COUNT; role++)
		queue->table.column[role] = optional_name(row, role_attribute[role]);
	queue->table.fifo = DatumGetBool(rs_row_get(row, RS_QUEUE_FIFO));
	queue->table.lock_key = optional_text(row, RS_QUEUE_LOCK_KEY);
	raise_problem(rs_table_check(&queue->table));
	raise_problem(rs_isolation_declare(
		RS_DIALECT_POSTGRESQL, optional_text(row, RS_QUEUE_ISOLATION), &queue->table.isolation));
}

static void
check_relation(Relation relation)
{
	Oid relid = RelationGetRelid(relation);
	const char *label = rs_relation_label(relid);

	if (relation->rd_rel->relkind != RELKIND_RELATION &&
		relation->rd_rel->relkind != RELKIND_PARTITIONED_TABLE)
		ereport(ERROR, errcode(ERRCODE_WRONG_OBJECT_TYPE), errmsg("%s is not a table", label),
				errhint("Only an ordinary or partitioned table can be a queue: its rows are locked "
						"while they are in work."));
	if (relation->rd_rel->relpersistence == RELPERSISTENCE_TEMP)
		ereport(ERROR, errcode(ERRCODE_WRONG_OBJECT_TYPE), errmsg("table %s is temporary", label),
				errhint("Other sessions cannot see it: use a permanent or unlogged table."));
	if (relid < FirstNormalObjectId || IsCatalogRelation(relation))
		ereport(ERROR, errcode(ERRCODE_WRONG_OBJECT_TYPE), errmsg("%s is a system table", label),
				errhint("Use a table of your own."));
	if (RelationGetNamespace(relation) == rs_objects(false)->schema)
		ereport(ERROR, errcode(ERRCODE_WRONG_OBJECT_TYPE),
				errmsg("table %s belongs to the extension", label),
				errhint("Use a table of your own."));
}

static void
check_id(Relation relation, Form_pg_attribute attribute)
{
	const char *label = rs_relation_label(RelationGetRelid(relation));
	const char *name = quote_identifier(NameStr(attribute->attname));

	if (!attribute->attnotnull)
		ereport(ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("id column %s of table %s may be null", name, label),
				errhint("Run ALTER TABLE %s ALTER COLUMN %s SET NOT NULL.", label, name));
	if (!id_is_unique(relation, attribute->attnum))
		ereport(
			ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("id column %s of table %s is not unique on its own", name, label),
			errdetail("It must be the only column of a valid unique index, in its own collation, "
					  "that is neither partial nor deferrable."),
			errhint("Run CREATE UNIQUE INDEX ON %s (%s), or name another id_column.", label, name));
}

/* The name of a line is the name of its guard: whoever reads it must read the same. */
static void
check_line_column(Relation relation, const RsQueue *queue)
{
	rs_lines lines = rs_table_lines(&queue->table);
	rs_role role = lines == RS_LINES_GROUP ? RS_ROLE_GROUP : RS_ROLE_PARTITION_KEY;
	Form_pg_attribute attribute;

	if (lines == RS_LINES_NONE)
		return;
	attribute = TupleDescAttr(RelationGetDescr(relation), queue->attnum[role] - 1);
	if (OidIsValid(attribute->attcollation) &&
		!get_collation_isdeterministic(attribute->attcollation))
		ereport(ERROR, errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				errmsg("column \"%s\" cannot be the %s column of rows that go one at a time: its "
					   "collation is not deterministic",
					   NameStr(attribute->attname), rs_role_word(role)),
				errdetail("Values that are equal may be different names of the lock that keeps "
						  "others away."),
				errhint("Give the column a deterministic collation."));
}

void
rs_queue_bind(const RsRow *row, RsQueue *queue)
{
	Relation relation;

	describe(row, queue);
	queue->wake = DatumGetBool(rs_row_get(row, RS_QUEUE_WAKE));

	/* First watch, then look: a change after the look is heard of. */
	rs_watch_relation(queue->relid);
	relation = try_relation_open(queue->relid, AccessShareLock);
	if (relation == NULL)
		ereport(ERROR, errcode(ERRCODE_UNDEFINED_TABLE),
				errmsg("the table of the queue with OID %u does not exist", queue->relid),
				errhint("Detach the queue: SELECT ruststream.detach_queue(%u).", queue->relid));
	check_relation(relation);

	/* Our statements go by this name. */
	if (get_attnum(queue->relid, "ruststream_row") != InvalidAttrNumber)
		ereport(ERROR, errcode(ERRCODE_RESERVED_NAME),
				errmsg("table %s has a column \"ruststream_row\"", rs_relation_label(queue->relid)),
				errhint("That name is reserved: rename the column."));

	queue->table.schema = get_namespace_name(RelationGetNamespace(relation));
	queue->table.name = pstrdup(RelationGetRelationName(relation));
	queue->table.only = relation->rd_rel->relkind == RELKIND_RELATION;
	queue->row_type = relation->rd_rel->reltype;
	queue->shape = CreateTupleDescCopyConstr(RelationGetDescr(relation));

	for (int role = 0; role < RS_ROLE_COUNT; role++)
	{
		const char *name = queue->table.column[role];
		Form_pg_attribute attribute;

		if (name == NULL)
			continue;
		attribute =
			find_column(relation, name, psprintf("%s_column", rs_role_word((rs_role) role)));
		check_role_column(relation, (rs_role) role, attribute);
		if (role == RS_ROLE_ID)
			check_id(relation, attribute);
		queue->attnum[role] = attribute->attnum;
		queue->type[role] = attribute->atttypid;
	}
	queue->table.headers_are_json = queue->type[RS_ROLE_HEADERS] == JSONOID;
	check_line_column(relation, queue);
	if (queue->table.lock_key != NULL)
		check_lock_key_columns(relation, queue->table.lock_key);

	relation_close(relation, NoLock);
}

bool
rs_queue_has_its_shape(const RsQueue *queue)
{
	Relation relation = try_relation_open(queue->relid, NoLock);
	bool result;

	if (relation == NULL)
		return false;
	result = equalTupleDescs(queue->shape, RelationGetDescr(relation));
	relation_close(relation, NoLock);
	return result;
}

RsRow *
rs_queue_row_of(Oid relid)
{
	RsRow *row = rs_queue_row(relid);

	if (row == NULL)
		ereport(ERROR, errcode(ERRCODE_UNDEFINED_OBJECT),
				errmsg("table %s is not a queue", rs_relation_label(relid)),
				errhint("Attach it with ruststream.attach_queue, or make a queue with "
						"ruststream.create_queue."));
	return row;
}

void
rs_queue_load(Oid relid, RsQueue *queue)
{
	rs_queue_bind(rs_queue_row_of(relid), queue);
}
