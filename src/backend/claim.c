/*-------------------------------------------------------------------------
 *
 * claim.c
 *	  Finding the next row, in each form, and leaving one alone that has just
 *	  failed.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/delivery.h"

#include "catalog/pg_type_d.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/typcache.h"

static void
set_common_values(const RsSubscription *subscription, RsValues *values)
{
	rs_values_init(values);
	if (subscription->group_name != NULL)
		rs_value_set(values, RS_PARAM_GROUP, CStringGetTextDatum(subscription->group_name), 0);
	if (subscription->dead_letter_group != NULL)
		rs_value_set(values, RS_PARAM_DEAD_GROUP,
					 CStringGetTextDatum(subscription->dead_letter_group), 0);
	rs_value_set(values, RS_PARAM_NOW, TimestampTzGetDatum(GetCurrentTimestamp()), 0);
}

void
rs_delivery_values(const RsSubscription *subscription, const RsDelivery *delivery, RsValues *values)
{
	bool counted = rs_table_form(&subscription->queue.table) != RS_FORM_ROW_LOCK;

	set_common_values(subscription, values);
	if (delivery->has_line)
		rs_value_set(values, rs_line_parameter(&subscription->queue.table), delivery->line, 0);
	rs_value_set(values, RS_PARAM_ID, delivery->id, 0);
	/* What the row holds now. */
	rs_value_set(values, RS_PARAM_ATTEMPT, Int64GetDatum(delivery->attempt + counted), 0);
	rs_value_set(values, RS_PARAM_TOKEN, TimestampTzGetDatum(delivery->token), 0);
	rs_value_set(values, RS_PARAM_ANNOUNCED, TimestampTzGetDatum(delivery->announced), 0);
	if (delivery->key != NULL)
		rs_value_set(values, RS_PARAM_KEY, CStringGetTextDatum(delivery->key), 0);
}

/* The table may have been altered since we looked: that is why the type is compared. */
Datum
rs_claim_fetch(int row, int column, Oid type, bool *isnull)
{
	TupleDesc descriptor = SPI_tuptable->tupdesc;
	Form_pg_attribute attribute = TupleDescAttr(descriptor, column - 1);
	Datum value;

	if (attribute->atttypid != type)
		ereport(ERROR, errcode(ERRCODE_DATATYPE_MISMATCH),
				errmsg("column %d of a claim is of type %s, not %s", column,
					   format_type_be(attribute->atttypid), format_type_be(type)));
	value = SPI_getbinval(SPI_tuptable->vals[row], descriptor, column, isnull);
	return *isnull ? (Datum) 0 : datumCopy(value, attribute->attbyval, attribute->attlen);
}

/*
 * The value itself, where it is stored apart from its row: to read it takes a
 * snapshot, and SPI has taken its own away.
 */
static Datum
fetch_stored(Datum value)
{
	bool apart = VARATT_IS_EXTERNAL(DatumGetPointer(value));

	if (apart)
		PushActiveSnapshot(GetTransactionSnapshot());
	value = PointerGetDatum(PG_DETOAST_DATUM(value));
	if (apart)
		PopActiveSnapshot();
	return value;
}

/*
 * The id, in the first column.  It outlives its row: in a mark, or left alone.  A
 * row may keep even its id elsewhere.
 */
static Datum
fetch_id(const RsEngine *engine, int row)
{
	bool isnull;
	Datum id = rs_claim_fetch(row, 1, engine->subscription->queue.type[RS_ROLE_ID], &isnull);

	return engine->id_length == -1 ? fetch_stored(id) : id;
}

char *
rs_datum_text(Datum id, Oid type)
{
	Oid output;
	bool varlena;

	getTypeOutputInfo(type, &output, &varlena);
	return OidOutputFunctionCall(output, id);
}

/*
 * Where the next claim may begin
 * ------------------------------
 *
 * What has been ended stays in the index, dead, until a vacuum, and in front
 * of everything that is alive: a claim that starts at the beginning walks all
 * of it, each time.  So a claim goes on behind the row that was ended last.
 * It must not miss a row that has come to stand before that one, so:
 *
 * - only an ended row is a mark: after any other outcome, and when the
 *	 delivery has itself inserted into the queue (or may have: there is no trigger to
 *	 tell), the next claim looks from the beginning;
 * - a mark lasts ten times as long as the last claim from the beginning took,
 *	 usually a fraction of a millisecond and never more than ten milliseconds,
 *	 so that what others insert, delay or release before it is seen as late as
 *	 that and no later, while looking from the beginning costs little;
 * - nothing is known to be due before a claim from the beginning has said so.
 */
#define RS_MARK_LIFE 10
#define RS_MARK_MAX_LIFE 10000 /* microseconds */

void
rs_claim_mark(RsEngine *engine, const RsDelivery *delivery)
{
	MemoryContext save;

	MemoryContextReset(engine->mark_context);
	save = MemoryContextSwitchTo(engine->mark_context);
	engine->mark_id = datumCopy(delivery->id, engine->id_byval, engine->id_length);
	engine->mark_priority = delivery->priority;
	engine->mark_priority_isnull = delivery->priority_isnull;
	engine->has_mark = true;
	MemoryContextSwitchTo(save);
}

static rs_operation
claim_operation(const RsEngine *engine, bool behind_mark)
{
	const rs_table *table = &engine->subscription->queue.table;
	bool row = engine->subscription->handler.input != RS_INPUT_PAYLOAD;

	if (rs_table_form(table) == RS_FORM_ADVISORY_LOCK || rs_table_lines(table) != RS_LINES_NONE)
		return !behind_mark                   ? RS_OP_CANDIDATES
			   : engine->mark_priority_isnull ? RS_OP_CANDIDATES_BEHIND
											  : RS_OP_CANDIDATES_BEHIND_PRIORITY;

	if (!behind_mark)
		return row ? RS_OP_CLAIM_ROW : RS_OP_CLAIM_PAYLOAD;
	if (engine->mark_priority_isnull)
		return row ? RS_OP_CLAIM_ROW_BEHIND : RS_OP_CLAIM_PAYLOAD_BEHIND;
	return row ? RS_OP_CLAIM_ROW_BEHIND_PRIORITY : RS_OP_CLAIM_PAYLOAD_BEHIND_PRIORITY;
}

/* ------------------------------------------------------ rows left alone */

static void
drop_held(RsEngine *engine, int index)
{
	if (!engine->id_byval)
		pfree(DatumGetPointer(engine->held[index].id));
	engine->held[index] = engine->held[--engine->held_count];
}

void
rs_claim_hold(RsEngine *engine, const RsDelivery *delivery)
{
	MemoryContext save;
	RsHeld *held;

	/* Claims wait where there are as many already: see find_rows. */
	if (engine->held_count == RS_MAX_HELD)
	{
		engine->rest_until = GetCurrentTimestamp() + engine->subscription->policy.retry_delay;
		return;
	}
	held = &engine->held[engine->held_count++];
	save = MemoryContextSwitchTo(engine->context);
	held->id = datumCopy(delivery->id, engine->id_byval, engine->id_length);
	MemoryContextSwitchTo(save);
	held->until = GetCurrentTimestamp() + engine->subscription->policy.retry_delay;
}

TimestampTz
rs_claim_held_until(RsEngine *engine)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz first = engine->rest_until > now ? engine->rest_until : 0;

	for (int i = engine->held_count - 1; i >= 0; i--)
	{
		if (engine->held[i].until <= now)
			drop_held(engine, i);
		else if (first == 0 || engine->held[i].until < first)
			first = engine->held[i].until;
	}
	return first;
}

/* The rows that are left alone, as an array for the claim. */
static Datum
held_array(RsEngine *engine)
{
	Oid type = engine->subscription->queue.type[RS_ROLE_ID];
	Datum ids[RS_MAX_HELD];

	if (engine->held_count > 0)
		(void) rs_claim_held_until(engine); /* drops those whose time is over */
	for (int i = 0; i < engine->held_count; i++)
		ids[i] = engine->held[i].id;
	return PointerGetDatum(construct_array(ids, engine->held_count, type, engine->id_length,
										   engine->id_byval, engine->id_align));
}

/* -------------------------------------------------------- how many rows */

int
rs_claim_limit(const RsEngine *engine, int limit)
{
	/* One row of each line, whose guard is held, or its lease looked for. */
	if (rs_table_lines(&engine->subscription->queue.table) != RS_LINES_NONE)
		limit = Min(limit, RS_MAX_GUARDS);
	if (engine->delivery_limit > 0)
		limit = (int) Min(limit, engine->delivery_limit);
	return limit;
}

int
rs_claim_limit_in_time(const RsEngine *engine)
{
	const RsSubscription *subscription = engine->subscription;
	int limit = rs_claim_limit(engine, subscription->deliveries_per_commit);

	if (engine->alone > 0 || subscription->max_commit_wait == 0)
		return 1;
	if (engine->handling_time * limit > (double) subscription->max_commit_wait)
		limit = (int) ((double) subscription->max_commit_wait / engine->handling_time);
	return Max(limit, 1);
}

/* A new time counts an eighth. */
void
rs_note_handling_time(RsEngine *engine, int64 microseconds)
{
	if (engine->handling_time < 0)
		engine->handling_time = (double) microseconds;
	else
		engine->handling_time += ((double) microseconds - engine->handling_time) / 8;
}

/* ------------------------------------------------------------ the claim */

/*
 * Find the first rows, behind the mark while it lasts, else of all: how many?
 * None while as many are left alone as can be: another might fail as well.
 */
static int
find_rows(RsEngine *engine, RsValues *values)
{
	TimestampTz now = DatumGetTimestampTz(values->value[RS_PARAM_NOW]);
	/* A clock that was set back must not keep a mark alive either. */
	bool has_mark = engine->has_mark && now < engine->mark_until &&
					engine->mark_until - now <= RS_MARK_MAX_LIFE;
	int found;

	engine->has_mark = false;
	if (engine->held_count == RS_MAX_HELD)
		return 0;
	if (has_mark)
	{
		rs_value_set(values, RS_PARAM_ID, engine->mark_id, 0);
		if (!engine->mark_priority_isnull)
			rs_value_set(values, RS_PARAM_PRIORITY, Int64GetDatum(engine->mark_priority), 0);
		found = (int) rs_query(engine->plans, claim_operation(engine, true), values);
		if (found > 0)
			return found;
		SPI_freetuptable(SPI_tuptable);
	}

	found = (int) rs_query(engine->plans, claim_operation(engine, false), values);
	if (found == 0)
		SPI_freetuptable(SPI_tuptable);
	engine->mark_until = GetCurrentTimestamp();
	engine->mark_until +=
		Min((engine->mark_until - now) * RS_MARK_LIFE, (TimestampTz) RS_MARK_MAX_LIFE);
	return found;
}

void
rs_claim_look_ahead(RsEngine *engine, const RsValues *values)
{
	bool isnull;

	engine->next_due = 0;
	SPI_tuptable = NULL;
	/* Where there is no delay there is no such statement; NULL is 0. */
	if (rs_query(engine->plans, RS_OP_NEXT_DUE, values) == 1)
		engine->next_due = DatumGetTimestampTz(rs_claim_fetch(0, 1, TIMESTAMPTZOID, &isnull));
	SPI_freetuptable(SPI_tuptable);
}

/*
 * A value that may outlive its row: where the claim's transaction is not the
 * handler's, what is stored elsewhere must be fetched now.
 */
static Datum
fetch_for_later(const RsSubscription *subscription, int row, int column, Oid type, bool *isnull)
{
	bool toasted = TupleDescAttr(SPI_tuptable->tupdesc, column - 1)->attlen == -1;
	Datum value = rs_claim_fetch(row, column, type, isnull);

	if (*isnull || !toasted || rs_table_form(&subscription->queue.table) == RS_FORM_ROW_LOCK)
		return value;
	return fetch_stored(value);
}

/* Fill in what a claim and a take have in common. */
static void
read_delivery(const RsEngine *engine, int row, RsDelivery *delivery)
{
	const RsSubscription *subscription = engine->subscription;
	const RsQueue *queue = &subscription->queue;
	bool isnull;

	delivery->id = fetch_id(engine, row);
	delivery->id_text = rs_datum_text(delivery->id, queue->type[RS_ROLE_ID]);
	delivery->attempt = DatumGetInt64(rs_claim_fetch(row, 2, INT8OID, &isnull));
	delivery->headers = fetch_for_later(
		subscription, row, 3,
		OidIsValid(queue->type[RS_ROLE_HEADERS]) ? queue->type[RS_ROLE_HEADERS] : JSONBOID,
		&delivery->headers_isnull);
	delivery->input = fetch_for_later(subscription, row, 4,
									  subscription->handler.input != RS_INPUT_PAYLOAD
										  ? queue->row_type
										  : queue->type[RS_ROLE_PAYLOAD],
									  &delivery->input_isnull);
	delivery->priority = DatumGetInt64(rs_claim_fetch(row, 5, INT8OID, &delivery->priority_isnull));
	delivery->due = DatumGetTimestampTz(rs_claim_fetch(row, 6, TIMESTAMPTZOID, &isnull));
	delivery->was_delayed = !isnull;
	if (rs_table_form(&queue->table) != RS_FORM_ROW_LOCK)
		return;
	delivery->place_table = DatumGetObjectId(rs_claim_fetch(row, 7, OIDOID, &isnull));
	delivery->place = *(ItemPointer) DatumGetPointer(rs_claim_fetch(row, 8, TIDOID, &isnull));
}

/* How the ids of a queue compare. */
typedef struct IdOrder
{
	FmgrInfo *compare;
	Oid collation;
} IdOrder;

static int
compare_deliveries(const void *a, const void *b, void *arg)
{
	const RsDelivery *left = a;
	const RsDelivery *right = b;
	const IdOrder *order = arg;

	if (left->priority_isnull != right->priority_isnull)
		return left->priority_isnull ? -1 : 1;
	if (left->priority != right->priority)
		return left->priority < right->priority ? -1 : 1;
	if (left->was_delayed != right->was_delayed)
		return right->was_delayed ? -1 : 1;
	if (left->due != right->due)
		return left->due < right->due ? -1 : 1;
	return DatumGetInt32(FunctionCall2Coll(order->compare, order->collation, left->id, right->id));
}

/*
 * The rows of one claim come in claim order, but for a row that was changed
 * between the claim's snapshot and its lock, and where what stamps leases has
 * met them in another order: no statement promises the order of RETURNING.
 */
static void
sort_in_claim_order(const RsQueue *queue, RsDelivery *deliveries, int count)
{
	IdOrder order = {
		.compare =
			&lookup_type_cache(queue->type[RS_ROLE_ID], TYPECACHE_CMP_PROC_FINFO)->cmp_proc_finfo,
		.collation = TupleDescAttr(queue->shape, queue->attnum[RS_ROLE_ID] - 1)->attcollation,
	};

	qsort_arg(deliveries, count, sizeof(RsDelivery), compare_deliveries, &order);
}

void
rs_claim_values(RsEngine *engine, int limit, RsValues *values)
{
	const RsSubscription *subscription = engine->subscription;
	TimestampTz now;

	set_common_values(subscription, values);
	now = DatumGetTimestampTz(values->value[RS_PARAM_NOW]);
	rs_value_set(values, RS_PARAM_LIMIT, Int64GetDatum(limit), 0);
	rs_value_set(values, RS_PARAM_HELD, held_array(engine), 0);
	rs_value_set(values, RS_PARAM_TOKEN, TimestampTzGetDatum(now + subscription->lease), 0);
}

void
rs_claim_read(RsEngine *engine, const RsValues *values, int row, RsDelivery *delivery)
{
	const RsSubscription *subscription = engine->subscription;

	delivery->claimed_at = DatumGetTimestampTz(values->value[RS_PARAM_NOW]);
	if (rs_table_form(&subscription->queue.table) == RS_FORM_LEASE)
		delivery->token = delivery->announced = DatumGetTimestampTz(values->value[RS_PARAM_TOKEN]);
	read_delivery(engine, row, delivery);
}

/* The first rows of the queue, where it has no lines. */
static int
claim_first(RsEngine *engine, RsDelivery *deliveries, int limit)
{
	RsValues values;
	int found;

	rs_claim_values(engine, limit, &values);
	found = find_rows(engine, &values);
	if (found == 0)
	{
		rs_claim_look_ahead(engine, &values);
		return 0;
	}
	for (int i = 0; i < found; i++)
		rs_claim_read(engine, &values, i, &deliveries[i]);
	SPI_freetuptable(SPI_tuptable);
	return found;
}

int
rs_claim(RsEngine *engine, RsDelivery *deliveries, int limit)
{
	const RsQueue *queue = &engine->subscription->queue;
	int found = rs_table_lines(&queue->table) != RS_LINES_NONE
					? rs_claim_lines(engine, deliveries, limit)
					: claim_first(engine, deliveries, limit);

	if (found > 1)
		sort_in_claim_order(queue, deliveries, found);
	return found;
}

void
rs_claim_read_candidate(RsEngine *engine, int row, RsCandidate *candidate)
{
	const RsQueue *queue = &engine->subscription->queue;
	bool isnull;
	Datum key;

	candidate->id = fetch_id(engine, row);
	key = rs_claim_fetch(row, 2, TEXTOID, &isnull);
	candidate->key = isnull ? NULL : TextDatumGetCString(key);
	candidate->has_line = false;
	candidate->guard = NULL;
	if (rs_table_lines(&queue->table) != RS_LINES_PARTITION_KEY)
		return;
	candidate->line = rs_claim_fetch(row, 3, queue->type[RS_ROLE_PARTITION_KEY], &isnull);
	candidate->has_line = !isnull;
	/* Now: the lock is taken outside any transaction, where no type can be asked. */
	if (!isnull)
		candidate->guard = rs_guard_name(
			queue, rs_datum_text(candidate->line, queue->type[RS_ROLE_PARTITION_KEY]));
}

int
rs_claim_candidates(RsEngine *engine, bool free_only, RsCandidate *candidates, int limit)
{
	RsValues values;
	int found;

	rs_claim_values(engine, limit, &values);
	found = free_only ? (int) rs_query(engine->plans, RS_OP_FREE_CANDIDATES, &values)
					  : find_rows(engine, &values);
	if (found == 0)
	{
		if (free_only)
			SPI_freetuptable(SPI_tuptable);
		rs_claim_look_ahead(engine, &values);
		return 0;
	}

	found = Min(found, limit);
	for (int i = 0; i < found; i++)
		rs_claim_read_candidate(engine, i, &candidates[i]);
	SPI_freetuptable(SPI_tuptable);
	return found;
}

bool
rs_claim_take(RsEngine *engine, RsDelivery *delivery)
{
	const RsSubscription *subscription = engine->subscription;
	rs_operation operation =
		subscription->handler.input != RS_INPUT_PAYLOAD ? RS_OP_TAKE_ROW : RS_OP_TAKE_PAYLOAD;
	RsValues values;

	rs_delivery_values(subscription, delivery, &values);
	delivery->claimed_at = DatumGetTimestampTz(values.value[RS_PARAM_NOW]);
	if (rs_query(engine->plans, operation, &values) == 0)
	{
		SPI_freetuptable(SPI_tuptable);
		return false;
	}
	read_delivery(engine, 0, delivery);
	SPI_freetuptable(SPI_tuptable);
	return true;
}

/* A row as a claim would have found it: without what the claim has written into it. */
static Datum
as_before_claim(const RsQueue *queue, Datum row, Datum before)
{
	static const rs_role written[] = {RS_ROLE_ATTEMPT, RS_ROLE_LOCKED_UNTIL};
	TupleDesc shape = queue->shape;
	HeapTupleData tuples[2];
	Datum *values = palloc(sizeof(Datum) * shape->natts * 2);
	bool *isnull = palloc(sizeof(bool) * shape->natts * 2);
	Datum rows[] = {row, before};

	for (int i = 0; i < 2; i++)
	{
		tuples[i].t_data = DatumGetHeapTupleHeader(rows[i]);
		tuples[i].t_len = HeapTupleHeaderGetDatumLength(tuples[i].t_data);
		ItemPointerSetInvalid(&tuples[i].t_self);
		tuples[i].t_tableOid = InvalidOid;
		heap_deform_tuple(&tuples[i], shape, values + i * shape->natts, isnull + i * shape->natts);
	}
	for (int i = 0; i < (int) lengthof(written); i++)
	{
		int column = queue->attnum[written[i]] - 1;

		if (queue->table.column[written[i]] == NULL)
			continue;
		values[column] = values[shape->natts + column];
		isnull[column] = isnull[shape->natts + column];
	}
	return heap_copy_tuple_as_datum(heap_form_tuple(shape, values, isnull), shape);
}

bool
rs_claim_refresh(RsEngine *engine, RsDelivery *delivery)
{
	const RsSubscription *subscription = engine->subscription;
	const RsQueue *queue = &subscription->queue;
	bool takes_row = subscription->handler.input != RS_INPUT_PAYLOAD;
	bool is_leased;
	RsValues values;

	rs_delivery_values(subscription, delivery, &values);
	is_leased = rs_query(engine->plans, takes_row ? RS_OP_LEASED_ROW : RS_OP_LEASED_PAYLOAD,
						 &values) == 1 &&
				!rs_engine_is_outdated(engine);
	if (is_leased)
	{
		RsDelivery claimed = *delivery;

		read_delivery(engine, 0, delivery);
		delivery->attempt = claimed.attempt;
		if (takes_row)
			delivery->input = as_before_claim(queue, delivery->input, claimed.input);
	}
	SPI_freetuptable(SPI_tuptable);
	return is_leased;
}
