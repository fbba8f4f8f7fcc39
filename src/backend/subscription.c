/*-------------------------------------------------------------------------
 *
 * subscription.c
 *	  subscribe, alter_subscription, unsubscribe, pause, resume.
 *
 * Each makes the row as it is to be, builds the subscription from it with all
 * the checks of a load, and stores the row.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/catalog.h"
#include "backend/compat.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "access/xlog.h"
#include "catalog/namespace.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_database.h"
#include "catalog/pg_type_d.h"
#include "commands/dbcommands.h"
#include "commands/sequence.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"
#include "utils/varlena.h"

PG_FUNCTION_INFO_V1(rs_sql_subscribe);
PG_FUNCTION_INFO_V1(rs_sql_alter_subscription);
PG_FUNCTION_INFO_V1(rs_sql_unsubscribe);
PG_FUNCTION_INFO_V1(rs_sql_pause);
PG_FUNCTION_INFO_V1(rs_sql_resume);

/* ------------------------------------------------------------------- settings */

/*
 * The settings, in the order of the arguments of subscribe and
 * alter_subscription, with the column each is stored in and its default in
 * text (NULL: null).  dead_letter is stored in one of two columns.
 */
typedef struct Setting
{
	const char *name;
	AttrNumber column;
	const char *initial;
} Setting;

#define DEAD_LETTER InvalidAttrNumber

static const Setting settings[] = {
	{"group_name", RS_SUBSCRIPTION_GROUP_NAME, NULL},
	{"transactional", RS_SUBSCRIPTION_TRANSACTIONAL, NULL},
	{"workers", RS_SUBSCRIPTION_WORKERS, "1"},
	{"batch_size", RS_SUBSCRIPTION_BATCH_SIZE, NULL},
	{"max_attempts", RS_SUBSCRIPTION_MAX_ATTEMPTS, NULL},
	{"dead_letter", DEAD_LETTER, NULL},
	{"on_error", RS_SUBSCRIPTION_ON_ERROR, NULL},
	{"on_decode_error", RS_SUBSCRIPTION_ON_DECODE_ERROR, NULL},
	{"retry_delay", RS_SUBSCRIPTION_RETRY_DELAY, "1 s"},
	{"backoff", RS_SUBSCRIPTION_BACKOFF, "exponential"},
	{"max_retry_delay", RS_SUBSCRIPTION_MAX_RETRY_DELAY, "1 h"},
	{"lease", RS_SUBSCRIPTION_LEASE, "30 s"},
	{"timeout", RS_SUBSCRIPTION_TIMEOUT, NULL},
	{"poll_interval", RS_SUBSCRIPTION_POLL_INTERVAL, "1 s"},
	{"deliveries_per_commit", RS_SUBSCRIPTION_DELIVERIES_PER_COMMIT, "1"},
	{"max_commit_wait", RS_SUBSCRIPTION_MAX_COMMIT_WAIT, "10 ms"},
};

static const Setting *
find_setting(const char *name)
{
	for (int i = 0; i < (int) lengthof(settings); i++)
	{
		if (strcmp(settings[i].name, name) == 0)
			return &settings[i];
	}
	return NULL;
}

/* Give a setting its default. */
static void
reset_setting(const Setting *setting, TupleDesc descriptor, RsRow *row)
{
	Oid input;
	Oid parameter;

	if (setting->column == DEAD_LETTER)
	{
		rs_row_set_null(row, RS_SUBSCRIPTION_DEAD_LETTER_GROUP);
		rs_row_set_null(row, RS_SUBSCRIPTION_DEAD_LETTER_TABLE);
		return;
	}
	if (setting->initial == NULL)
	{
		rs_row_set_null(row, setting->column);
		return;
	}
	getTypeInputInfo(TupleDescAttr(descriptor, setting->column - 1)->atttypid, &input, &parameter);
	rs_row_set(row, setting->column,
			   OidInputFunctionCall(input, unconstify(char *, setting->initial), parameter, -1));
}

/*
 * A dead-letter destination is a group where the queue has groups, else a
 * table, found by the caller's search path.
 */
static void
set_dead_letter(text *dead_letter, RsRow *row)
{
	Oid queue = DatumGetObjectId(rs_row_get(row, RS_SUBSCRIPTION_QUEUE));
	RsRow *queue_row = rs_queue_row(queue);

	rs_row_set_null(row, RS_SUBSCRIPTION_DEAD_LETTER_GROUP);
	rs_row_set_null(row, RS_SUBSCRIPTION_DEAD_LETTER_TABLE);
	if (queue_row == NULL)
		return; /* not a queue: building the subscription says so */
	if (!rs_row_isnull(queue_row, RS_QUEUE_GROUP_COLUMN))
		rs_row_set(row, RS_SUBSCRIPTION_DEAD_LETTER_GROUP, PointerGetDatum(dead_letter));
	else
	{
		RangeVar *name = makeRangeVarFromNameList(textToQualifiedNameList(dead_letter));
		Oid table = RangeVarGetRelid(name, NoLock, true);

		if (!OidIsValid(table))
			ereport(ERROR, errcode(ERRCODE_UNDEFINED_TABLE),
					errmsg("dead_letter is not a table: \"%s\" does not exist",
						   text_to_cstring(dead_letter)),
					errhint("The queue has no groups, so dead_letter names a table: make it with "
							"CREATE TABLE .. (LIKE %s).",
							rs_relation_label(queue)));
		rs_row_set(row, RS_SUBSCRIPTION_DEAD_LETTER_TABLE, ObjectIdGetDatum(table));
	}
}

/* Take the settings that are given; first is the number of the first argument. */
static void
take_settings(FunctionCallInfo fcinfo, int first, RsRow *row)
{
	for (int i = 0; i < (int) lengthof(settings); i++)
	{
		if (PG_ARGISNULL(first + i))
			continue;
		if (settings[i].column == DEAD_LETTER)
			set_dead_letter(PG_GETARG_TEXT_PP(first + i), row);
		else
			rs_row_set(row, settings[i].column, PG_GETARG_DATUM(first + i));
	}
}

/* -------------------------------------------------------------------- checks */

/*
 * Where background workers are subject to the role's LOGIN attribute, and
 * everywhere to its right to connect, a worker of this owner would not start.
 */
static void
check_can_connect(Oid owner)
{
	char *name = GetUserNameFromId(owner, false);
	bool can_login = true;

#if PG_VERSION_NUM < 170000
	HeapTuple tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(owner));

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for role %u", owner);
	can_login = ((Form_pg_authid) GETSTRUCT(tuple))->rolcanlogin;
	ReleaseSysCache(tuple);
#endif
	if (!can_login)
		ereport(
			ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			errmsg("role \"%s\" is not permitted to log in, so that no worker can run as it", name),
			errhint("ALTER ROLE %s LOGIN, or subscribe with workers => 0.",
					quote_identifier(name)));
	if (rs_database_aclcheck(MyDatabaseId, owner, ACL_CONNECT) != ACLCHECK_OK)
		ereport(ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("role \"%s\" may not connect to this database, so that no worker can run as "
					   "it",
					   name),
				errhint("GRANT CONNECT ON DATABASE %s TO %s, or subscribe with workers => 0.",
						quote_identifier(get_database_name(MyDatabaseId)), quote_identifier(name)));
}

/* What the subscriber should know, though it is no error. */
static void
warn(const RsSubscription *subscription)
{
	rs_isolation isolation = subscription->queue.table.isolation;

	if (rs_table_form(&subscription->queue.table) != RS_FORM_LEASE &&
		(isolation == RS_ISOLATION_REPEATABLE_READ || isolation == RS_ISOLATION_SERIALIZABLE))
		ereport(WARNING,
				errmsg("deliveries of queue %s at %s get serialization errors where they meet",
					   rs_relation_label(subscription->queue.relid), rs_isolation_word(isolation)),
				errdetail("They are rolled back and tried again; no row is lost."));
	if (subscription->workers > 0 && !rs_preloaded())
		ereport(WARNING,
				errmsg("no worker will deliver for subscription \"%s\" on this server",
					   subscription->name),
				errdetail("ruststream is not in shared_preload_libraries."),
				errhint("Add it there and restart the server, or deliver with "
						"CALL ruststream.drain(%s).",
						quote_literal_cstr(subscription->name)));
}

/* ------------------------------------------------------------- rows and rights */

static bool
role_exists(Oid role)
{
	return SearchSysCacheExists1(AUTHOID, ObjectIdGetDatum(role));
}

/*
 * May the caller change this subscription?  Where its owner does not exist (any
 * more, or here) its queue's owner may, so that somebody can.
 */
static bool
may_change(const RsRow *row)
{
	Oid owner = rs_subscription_owner(row);

	if (role_exists(owner))
		return has_privs_of_role(GetUserId(), owner);
	return rs_owns_table(DatumGetObjectId(rs_row_get(row, RS_SUBSCRIPTION_QUEUE)));
}

/*
 * The row of a subscription that the caller may change, locked against others
 * who do the same.
 */
static RsRow *
own_subscription(const char *name)
{
	Oid type = TEXTOID;
	Datum value = CStringGetTextDatum(name);
	RsRow *row;

	(void) rs_catalog_execute("SELECT FROM ruststream.subscription WHERE name = $1 FOR UPDATE", 1,
							  &type, &value, NULL);
	row = rs_subscription_row(name);
	if (row != NULL && !may_change(row))
		ereport(ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("must be a member of the owner of subscription \"%s\"", name),
				errhint("It is owned by %s.",
						NameStr(*DatumGetName(rs_row_get(row, RS_SUBSCRIPTION_OWNER_NAME)))));
	return row;
}

static RsRow *
existing_subscription(FunctionCallInfo fcinfo)
{
	char *name;
	RsRow *row;

	if (PG_ARGISNULL(0))
		ereport(ERROR, errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("argument \"%s\" must not be null", "name"));
	name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	row = own_subscription(name);
	if (row == NULL)
		(void) rs_subscription_id(name, false); /* raises the error */
	return row;
}

static void
check_name(const char *name)
{
	if (name[0] == '\0')
		ereport(ERROR, errcode(ERRCODE_INVALID_NAME),
				errmsg("the name of a subscription must not be empty"));
	if (strlen(name) >= NAMEDATALEN)
		ereport(ERROR, errcode(ERRCODE_NAME_TOO_LONG),
				errmsg("the name of a subscription is at most %d bytes long", NAMEDATALEN - 1),
				errdetail("\"%s\" has %zu.", name, strlen(name)));
}

/* Stamp a row as belonging to a role, here. */
static void
set_owner(RsRow *row, Oid owner)
{
	Name name = palloc0(sizeof(NameData));

	namestrcpy(name, GetUserNameFromId(owner, false));
	rs_row_set(row, RS_SUBSCRIPTION_OWNER, ObjectIdGetDatum(owner));
	rs_row_set(row, RS_SUBSCRIPTION_OWNER_NAME, NameGetDatum(name));
	rs_row_set(row, RS_SUBSCRIPTION_DATABASE, ObjectIdGetDatum(MyDatabaseId));
	rs_row_set(row, RS_SUBSCRIPTION_SYSTEM_IDENTIFIER,
			   Int64GetDatum((int64) GetSystemIdentifier()));
}

/* Check a row as it is to be, and write its handler in full. */
static void
check(RsRow *row)
{
	RsSubscription *subscription = rs_subscription_build(row, CurrentMemoryContext);

	if (subscription->copied)
		return;
	rs_subscription_check_level(subscription);
	if (subscription->workers > 0)
		check_can_connect(subscription->owner);
	rs_row_set(row, RS_SUBSCRIPTION_HANDLER, CStringGetTextDatum(subscription->handler.name));
	rs_row_set(row, RS_SUBSCRIPTION_HANDLER_OID, ObjectIdGetDatum(subscription->handler.function));
	warn(subscription);
}

/* ---------------------------------------------------------------- the functions */

Datum
rs_sql_subscribe(PG_FUNCTION_ARGS)
{
	static const char *const required[] = {"name", "queue", "handler"};
	Oid catalog = rs_objects(false)->subscription;
	Relation relation;
	RsRow *existing;
	RsRow row;
	char *name;

	for (int i = 0; i < (int) lengthof(required); i++)
	{
		if (PG_ARGISNULL(i))
			ereport(ERROR, errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					errmsg("argument \"%s\" must not be null", required[i]));
	}
	name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	check_name(name);
	existing = own_subscription(name);

	rs_row_set(&row, RS_SUBSCRIPTION_NAME, PG_GETARG_DATUM(0));
	rs_row_set(&row, RS_SUBSCRIPTION_QUEUE, PG_GETARG_DATUM(1));
	rs_row_set(&row, RS_SUBSCRIPTION_HANDLER, PG_GETARG_DATUM(2));
	rs_row_set(&row, RS_SUBSCRIPTION_HANDLER_OID, ObjectIdGetDatum(InvalidOid));
	rs_row_set(&row, RS_SUBSCRIPTION_PAUSED, BoolGetDatum(false));
	set_owner(&row, GetUserId());

	relation = table_open(catalog, AccessShareLock);
	for (int i = 0; i < (int) lengthof(settings); i++)
		reset_setting(&settings[i], RelationGetDescr(relation), &row);
	table_close(relation, NoLock);
	take_settings(fcinfo, lengthof(required), &row);

	/* The sequence is ours: whoever may subscribe may have a number. */
	rs_row_set(&row, RS_SUBSCRIPTION_ID,
			   existing != NULL
				   ? rs_row_get(existing, RS_SUBSCRIPTION_ID)
				   : Int32GetDatum((int32) nextval_internal(
						 get_relname_relid("subscription_id", rs_objects(false)->schema), false)));
	check(&row);
	if (existing != NULL)
		rs_catalog_update(catalog, &row);
	else
		rs_catalog_insert(catalog, &row);
	PG_RETURN_VOID();
}

/* Give the settings that the array names their defaults. */
static void
reset_settings(ArrayType *names, RsRow *row)
{
	Relation relation = table_open(rs_objects(false)->subscription, AccessShareLock);
	Datum *elements;
	bool *nulls;
	int count;

	deconstruct_array(names, TEXTOID, -1, false, TYPALIGN_INT, &elements, &nulls, &count);
	for (int i = 0; i < count; i++)
	{
		char *name = nulls[i] ? "NULL" : TextDatumGetCString(elements[i]);
		const Setting *setting = nulls[i] ? NULL : find_setting(name);

		if (setting == NULL)
			ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					errmsg("a subscription has no setting \"%s\"", name),
					errhint("reset names arguments of ruststream.subscribe that have a default."));
		reset_setting(setting, RelationGetDescr(relation), row);
	}
	table_close(relation, NoLock);
}

Datum
rs_sql_alter_subscription(PG_FUNCTION_ARGS)
{
	const int handler = 1;
	const int first_setting = 2;
	const int reset = first_setting + (int) lengthof(settings);
	RsRow *row = existing_subscription(fcinfo);

	if (rs_subscription_is_copied(row))
		ereport(ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("subscription \"%s\" was made in another database, of which this is a copy",
					   text_to_cstring(PG_GETARG_TEXT_PP(0))),
				errhint("Resume it here first, with ruststream.resume."));

	if (!PG_ARGISNULL(reset))
		reset_settings(PG_GETARG_ARRAYTYPE_P(reset), row);
	if (!PG_ARGISNULL(handler))
	{
		rs_row_set(row, RS_SUBSCRIPTION_HANDLER, PG_GETARG_DATUM(handler));
		rs_row_set(row, RS_SUBSCRIPTION_HANDLER_OID, ObjectIdGetDatum(InvalidOid));
	}
	take_settings(fcinfo, first_setting, row);

	check(row);
	/* The role may have been renamed meanwhile. */
	set_owner(row, rs_subscription_owner(row));
	rs_catalog_update(rs_objects(false)->subscription, row);
	PG_RETURN_VOID();
}

Datum
rs_sql_unsubscribe(PG_FUNCTION_ARGS)
{
	RsRow *row = existing_subscription(fcinfo);
	Oid type = INT4OID;
	Datum id = rs_row_get(row, RS_SUBSCRIPTION_ID);

	(void) rs_catalog_execute("DELETE FROM ruststream.failure_history WHERE subscription_id = $1",
							  1, &type, &id, NULL);
	(void) rs_catalog_execute("DELETE FROM ruststream.subscription WHERE id = $1", 1, &type, &id,
							  NULL);
	PG_RETURN_VOID();
}

Datum
rs_sql_pause(PG_FUNCTION_ARGS)
{
	RsRow *row = existing_subscription(fcinfo);

	rs_row_set(row, RS_SUBSCRIPTION_PAUSED, BoolGetDatum(true));
	rs_catalog_update(rs_objects(false)->subscription, row);
	PG_RETURN_VOID();
}

Datum
rs_sql_resume(PG_FUNCTION_ARGS)
{
	RsRow *row = existing_subscription(fcinfo);
	Oid owner = rs_subscription_owner(row);

	if (!role_exists(owner))
		ereport(ERROR, errcode(ERRCODE_UNDEFINED_OBJECT),
				errmsg("role \"%s\", the owner of subscription \"%s\", does not exist here",
					   NameStr(*DatumGetName(rs_row_get(row, RS_SUBSCRIPTION_OWNER_NAME))),
					   text_to_cstring(PG_GETARG_TEXT_PP(0))),
				errhint("Subscribe again as the role that is to own it."));

	/* In a copy the number is another function's, or nobody's. */
	if (rs_subscription_is_copied(row))
		rs_row_set(row, RS_SUBSCRIPTION_HANDLER_OID, ObjectIdGetDatum(InvalidOid));
	set_owner(row, owner);
	rs_row_set(row, RS_SUBSCRIPTION_PAUSED, BoolGetDatum(false));
	check(row);
	rs_catalog_update(rs_objects(false)->subscription, row);
	PG_RETURN_VOID();
}
