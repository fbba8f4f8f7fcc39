/*-------------------------------------------------------------------------
 *
 * publish.c
 *	  publish: add a task to a queue.
 *
 * It is an INSERT with the caller's rights, in the caller's transaction.  Only
 * the columns that are given a value are named, so that others take their
 * defaults; a statement is prepared for each combination of arguments that a
 * session uses, and kept.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/catalog.h"
#include "backend/compat.h"

#include "access/htup_details.h"
#include "catalog/pg_attribute.h"
#include "catalog/pg_type_d.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/hsearch.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/syscache.h"

PG_FUNCTION_INFO_V1(rs_sql_publish);

/* The arguments, by number. */
enum
{
	ARG_QUEUE,
	ARG_PAYLOAD,
	ARG_GROUP_NAME,
	ARG_PRIORITY,
	ARG_DELAY,
	ARG_HEADERS,
	ARG_PARTITION_KEY,
	ARG_COUNT
};

/* Which role each of them fills, and what they are called. */
static const struct
{
	rs_role role;
	const char *name;
} arguments[ARG_COUNT] = {
	[ARG_PAYLOAD] = {RS_ROLE_PAYLOAD, "payload"},
	[ARG_GROUP_NAME] = {RS_ROLE_GROUP, "group_name"},
	[ARG_PRIORITY] = {RS_ROLE_PRIORITY, "priority"},
	[ARG_DELAY] = {RS_ROLE_RETRY_AFTER, "delay"},
	[ARG_HEADERS] = {RS_ROLE_HEADERS, "headers"},
	[ARG_PARTITION_KEY] = {RS_ROLE_PARTITION_KEY, "partition_key"},
};

/* ------------------------------------------------------------ prepared publishes */

typedef struct PublishKey
{
	Oid queue;
	uint32 given; /* bit n: argument n */
} PublishKey;

typedef struct Publisher
{
	MemoryContext context;
	uint64 generation; /* of the catalog when it was made */
	int uses;          /* publishes that are executing it: triggers may publish, too */
	RsQueue queue;     /* with the columns that are filled only */
	bool empty_headers;
	RsPlans *plans;
} Publisher;

typedef struct PublishEntry
{
	PublishKey key;
	Publisher *publisher;
} PublishEntry;

static HTAB *publishers;

/* Would the column be NULL if an INSERT left it out? */
static bool
column_lacks_default(Oid relid, AttrNumber attnum)
{
	HeapTuple tuple = SearchSysCache2(ATTNUM, ObjectIdGetDatum(relid), Int16GetDatum(attnum));
	bool result;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for attribute %d of relation %u", attnum, relid);
	result = !((Form_pg_attribute) GETSTRUCT(tuple))->atthasdef;
	ReleaseSysCache(tuple);
	return result;
}

/* Can this column hold a document? */
static void
check_payload_type(const RsQueue *queue)
{
	switch (queue->type[RS_ROLE_PAYLOAD])
	{
		case JSONBOID:
		case JSONOID:
		case TEXTOID:
		case VARCHAROID:
		case BYTEAOID:
			return;
		default:
			ereport(ERROR, errcode(ERRCODE_DATATYPE_MISMATCH),
					errmsg("payload column \"%s\" of queue %s is of type %s",
						   queue->table.column[RS_ROLE_PAYLOAD], rs_relation_label(queue->relid),
						   format_type_be(queue->type[RS_ROLE_PAYLOAD])),
					errhint("ruststream.publish fills jsonb, json, text, varchar and bytea: write "
							"other types with INSERT."));
	}
}

/* Leave only the columns that are filled, after checking that they exist. */
static void
keep_given_columns(Publisher *publisher, uint32 given)
{
	RsQueue *queue = &publisher->queue;
	const char **column = queue->table.column;

	for (int i = ARG_PAYLOAD; i < ARG_COUNT; i++)
	{
		rs_role role = arguments[i].role;
		bool is_given = (given & (1U << i)) != 0;

		if (is_given && column[role] == NULL)
			ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					errmsg("queue %s has no %s column, but %s is given",
						   rs_relation_label(queue->relid), rs_role_word(role), arguments[i].name),
					errhint("Leave out %s, or attach the queue with %s_column.", arguments[i].name,
							rs_role_word(role)));
		if (is_given || column[role] == NULL)
			continue;
		if (role == RS_ROLE_GROUP)
			ereport(ERROR, errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					errmsg("queue %s has groups, but group_name is not given",
						   rs_relation_label(queue->relid)),
					errhint("Say which subscription's group the task is for: group_name => .."));
		/* A task without headers has none, which is not the same as NULL. */
		if (role == RS_ROLE_HEADERS && column_lacks_default(queue->relid, queue->attnum[role]))
			publisher->empty_headers = true;
		else
			column[role] = NULL;
	}
}

static Publisher *
make_publisher(const PublishKey *key)
{
	/* Until it is whole it belongs to the (sub)transaction, whose abort frees it. */
	MemoryContext context =
		AllocSetContextCreate(CurTransactionContext, "ruststream publish", ALLOCSET_SMALL_SIZES);
	MemoryContext save_context = MemoryContextSwitchTo(context);
	Publisher *publisher = palloc0(sizeof(Publisher));
	RsQueue *queue = &publisher->queue;

	publisher->context = context;
	publisher->generation = rs_catalog_generation();
	rs_queue_load(key->queue, queue);
	keep_given_columns(publisher, key->given);

	/* As values of the base types they are checked by a domain on their way in. */
	for (int i = ARG_PAYLOAD; i < ARG_COUNT; i++)
	{
		Oid *type = &queue->type[arguments[i].role];

		if (OidIsValid(*type))
			*type = getBaseType(*type);
	}
	if (queue->table.column[RS_ROLE_PAYLOAD] != NULL)
		check_payload_type(queue);

	publisher->plans = rs_plans_create(queue, NULL, context);
	MemoryContextSwitchTo(save_context);
	MemoryContextSetParent(context, CacheMemoryContext);
	return publisher;
}

static Publisher *
find_publisher(const PublishKey *key)
{
	PublishEntry *entry;
	Publisher *publisher;
	bool found;

	if (publishers == NULL)
	{
		HASHCTL control = {.keysize = sizeof(PublishKey), .entrysize = sizeof(PublishEntry)};

		publishers = hash_create("ruststream publishers", 16, &control, HASH_ELEM | HASH_BLOBS);
	}

	entry = hash_search(publishers, key, HASH_FIND, NULL);
	/* One that is executing further up cannot be taken away from there. */
	if (entry != NULL &&
		(entry->publisher->generation == rs_catalog_generation() || entry->publisher->uses > 0))
		return entry->publisher;

	publisher = make_publisher(key);
	entry = hash_search(publishers, key, HASH_ENTER, &found);
	if (found)
	{
		rs_plans_free(entry->publisher->plans);
		MemoryContextDelete(entry->publisher->context);
	}
	entry->publisher = publisher;
	return publisher;
}

/* --------------------------------------------------------------------- values */

/* The document as the payload column's type holds it. */
static Datum
payload_value(Jsonb *payload, Oid type)
{
	char *text;
	char *bytes;

	if (type == JSONBOID)
		return JsonbPGetDatum(payload);
	text = JsonbToCString(NULL, &payload->root, VARSIZE(payload));
	if (type != BYTEAOID)
		return CStringGetTextDatum(text);
	bytes = pg_server_to_any(text, strlen(text), PG_UTF8);
	return PointerGetDatum(cstring_to_text(bytes));
}

/* Headers are an object of strings: other clients of the table rely on it. */
static void
check_headers(Jsonb *headers)
{
	JsonbIterator *iterator;
	JsonbIteratorToken token;
	JsonbValue value;
	bool fits = JB_ROOT_IS_OBJECT(headers);

	iterator = JsonbIteratorInit(&headers->root);
	while (fits && (token = JsonbIteratorNext(&iterator, &value, true)) != WJB_DONE)
	{
		if (token == WJB_VALUE)
			fits = value.type == jbvString;
	}
	if (!fits)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("headers must be a JSON object whose values are strings"),
				errhint("For example '{\"trace\": \"4711\"}'."));
}

static Datum
headers_value(Jsonb *headers, Oid type)
{
	if (type == JSONBOID)
		return JsonbPGetDatum(headers);
	return CStringGetTextDatum(JsonbToCString(NULL, &headers->root, VARSIZE(headers)));
}

static Datum
value_of_type(char *text, Oid type)
{
	Oid input;
	Oid parameter;

	getTypeInputInfo(type, &input, &parameter);
	return OidInputFunctionCall(input, text, parameter, -1);
}

static void
set_values(FunctionCallInfo fcinfo, const Publisher *publisher, RsValues *values)
{
	const RsQueue *queue = &publisher->queue;

	rs_values_init(values);
	if (!PG_ARGISNULL(ARG_PAYLOAD))
		rs_value_set(values, RS_PARAM_PAYLOAD,
					 payload_value(PG_GETARG_JSONB_P(ARG_PAYLOAD), queue->type[RS_ROLE_PAYLOAD]),
					 queue->type[RS_ROLE_PAYLOAD]);
	if (!PG_ARGISNULL(ARG_GROUP_NAME))
		rs_value_set(values, RS_PARAM_GROUP, PG_GETARG_DATUM(ARG_GROUP_NAME), 0);
	if (!PG_ARGISNULL(ARG_PRIORITY))
		rs_value_set(values, RS_PARAM_PRIORITY, Int64GetDatum(PG_GETARG_INT32(ARG_PRIORITY)), 0);
	if (!PG_ARGISNULL(ARG_DELAY))
		rs_value_set(values, RS_PARAM_UNTIL,
					 TimestampTzGetDatum(GetCurrentTimestamp() +
										 rs_interval_microseconds(PG_GETARG_INTERVAL_P(ARG_DELAY),
																  "delay", 0, RS_MAX_INTERVAL)),
					 0);
	if (!PG_ARGISNULL(ARG_PARTITION_KEY))
		rs_value_set(values, RS_PARAM_PARTITION_KEY,
					 value_of_type(text_to_cstring(PG_GETARG_TEXT_PP(ARG_PARTITION_KEY)),
								   queue->type[RS_ROLE_PARTITION_KEY]),
					 0);
	if (!PG_ARGISNULL(ARG_HEADERS))
	{
		Jsonb *headers = PG_GETARG_JSONB_P(ARG_HEADERS);

		check_headers(headers);
		rs_value_set(values, RS_PARAM_HEADERS, headers_value(headers, queue->type[RS_ROLE_HEADERS]),
					 queue->type[RS_ROLE_HEADERS]);
	}
	else if (publisher->empty_headers)
		rs_value_set(values, RS_PARAM_HEADERS, value_of_type("{}", queue->type[RS_ROLE_HEADERS]),
					 queue->type[RS_ROLE_HEADERS]);
}

/* --------------------------------------------------------------------- publish */

/* Insert the row; returns its id in the given context, NULL if a trigger kept it out. */
static char *
insert_row(Publisher *publisher, const RsValues *values, MemoryContext context)
{
	char *volatile id = NULL;

	SPI_connect();
	publisher->uses++;
	PG_TRY();
	{
		if (rs_query(publisher->plans, RS_OP_PUBLISH, values) == 1)
			id = MemoryContextStrdup(context,
									 SPI_getvalue(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 1));
	}
	PG_FINALLY();
	{
		publisher->uses--;
	}
	PG_END_TRY();
	SPI_finish();
	return id;
}

Datum
rs_sql_publish(PG_FUNCTION_ARGS)
{
	PublishKey key = {0};
	Publisher *publisher;
	RsValues values;
	char *id;

	if (PG_ARGISNULL(ARG_QUEUE))
		ereport(ERROR, errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("argument \"%s\" must not be null", "queue"));
	key.queue = PG_GETARG_OID(ARG_QUEUE);
	for (int i = ARG_PAYLOAD; i < ARG_COUNT; i++)
	{
		if (!PG_ARGISNULL(i))
			key.given |= 1U << i;
	}
	publisher = find_publisher(&key);
	set_values(fcinfo, publisher, &values);

	id = insert_row(publisher, &values, CurrentMemoryContext);

	/* Where there is a trigger it has done the same. */
	rs_wake_at_commit(key.queue);
	if (id == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text(id));
}
