/*-------------------------------------------------------------------------
 *
 * stats.c
 *	  What can be seen from outside: counters of subscriptions, what workers
 *	  are doing, the deliveries in work, and the names of our waits.
 *
 * Everything here is kept in shared memory and starts anew with the server.
 * Where there is none, or an array is full, the calls do nothing: nothing that
 * is only there to be looked at may disturb a delivery.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"

#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/shared.h"

#define COUNTERS_COLUMNS (2 + RS_COUNTER_COUNT + 3)
#define WORKERS_COLUMNS 9

/* Reading a slot that is being written again and again: give up after this. */
#define MAX_READS 1000

/* The counters of the subscription that this process works for, or NULL. */
static RsCounters *my_counters = NULL;
static int32 my_subscription = 0;

#define WORKER_STATE_WORD(symbol, word) [symbol] = word,
static const char *const worker_state_words[] = {RS_WORKER_STATES(WORKER_STATE_WORD)};

PG_FUNCTION_INFO_V1(rs_sql_counters);
PG_FUNCTION_INFO_V1(rs_sql_workers);
PG_FUNCTION_INFO_V1(rs_sql_reset_stats);

/* Copy a text into a fixed array, clipped at a character's boundary. */
static void
copy_clipped(char *target, const char *source, int size)
{
	int length = pg_mbcliplen(source, strlen(source), size - 1);

	memcpy(target, source, length);
	target[length] = '\0';
}

/* ---------------------------------------------------------------- counters */

static RsCounters *
find_counters(Oid database, int32 subscription)
{
	Assert(LWLockHeldByMe(rs_shared->lock));

	for (int i = 0; i < RS_MAX_SUBSCRIPTIONS; i++)
	{
		RsCounters *counters = &rs_shared->counters[i];

		if (counters->database == database && counters->subscription == subscription)
			return counters;
	}
	return NULL;
}

static void
set_to_zero(RsCounters *counters)
{
	for (int i = 0; i < RS_COUNTER_COUNT; i++)
		pg_atomic_write_u64(&counters->count[i], 0);
	for (int i = 0; i < RS_RATE_BUCKETS; i++)
		pg_atomic_write_u64(&counters->rate[i], 0);
	counters->reset_at = GetCurrentTimestamp();
}

/* The counters of a subscription of this database; NULL: all are taken. */
static RsCounters *
get_counters(int32 subscription)
{
	RsCounters *counters = find_counters(MyDatabaseId, subscription);

	Assert(LWLockHeldByMeInMode(rs_shared->lock, LW_EXCLUSIVE));

	if (counters != NULL)
		return counters;
	counters = find_counters(InvalidOid, 0);
	if (counters == NULL)
	{
		if (!rs_shared->subscriptions_full_logged)
			ereport(LOG, (errmsg("ruststream counts for no more than %d subscriptions of a server",
								 RS_MAX_SUBSCRIPTIONS),
						  errdetail("Further subscriptions work, but show no counters.")));
		rs_shared->subscriptions_full_logged = true;
		return NULL;
	}

	set_to_zero(counters);
	counters->broken[0] = '\0';
	counters->problem[0] = '\0';
	counters->subscription = subscription;
	counters->database = MyDatabaseId;
	return counters;
}

void
rs_stats_forget(Oid dboid, const int32 *keep, int nkeep)
{
	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < RS_MAX_SUBSCRIPTIONS; i++)
	{
		RsCounters *counters = &rs_shared->counters[i];
		bool kept = false;

		if (counters->database != dboid)
			continue;
		for (int j = 0; j < nkeep && !kept; j++)
			kept = (keep[j] == counters->subscription);
		if (kept)
			continue;
		counters->database = InvalidOid;
		counters->subscription = 0;
	}
	LWLockRelease(rs_shared->lock);
}

/* Count a delivery in the bucket of this moment. */
static void
count_rate(RsCounters *counters)
{
	uint64 number = (uint64) (GetCurrentTimestamp() / RS_RATE_BUCKET_USEC);
	pg_atomic_uint64 *bucket = &counters->rate[number % RS_RATE_BUCKETS];
	uint64 seen = pg_atomic_read_u64(bucket);
	uint64 next;

	number &= PG_UINT32_MAX;
	do
		next = (seen >> 32) == number ? seen + 1 : (number << 32) + 1;
	while (!pg_atomic_compare_exchange_u64(bucket, &seen, next));
}

/*
 * Deliveries a second over the last minute: the buckets that are complete and
 * the one that is filling, divided by the time they cover.
 */
static double
read_rate(RsCounters *counters, TimestampTz now)
{
	uint64 number = (uint64) (now / RS_RATE_BUCKET_USEC);
	int64 covered = (RS_RATE_BUCKETS - 1) * RS_RATE_BUCKET_USEC + now % RS_RATE_BUCKET_USEC;
	uint64 sum = 0;

	for (int i = 0; i < RS_RATE_BUCKETS; i++)
	{
		uint64 bucket = pg_atomic_read_u64(&counters->rate[i]);

		if (((number - (bucket >> 32)) & PG_UINT32_MAX) < RS_RATE_BUCKETS)
			sum += bucket & PG_UINT32_MAX;
	}
	covered = Min(covered, Max(now - counters->reset_at, USECS_PER_SEC));
	return (double) sum * USECS_PER_SEC / covered;
}

void
rs_stats_count(RsCounter counter)
{
	if (my_counters == NULL || my_counters->database != MyDatabaseId ||
		my_counters->subscription != my_subscription)
		return;

	pg_atomic_fetch_add_u64(&my_counters->count[counter], 1);
	if (counter == RS_COUNT_DELIVERIES)
		count_rate(my_counters);
}

static void
set_reason(int32 subscription_id, bool problem, const char *reason)
{
	RsCounters *counters;

	if (rs_shared == NULL)
		return;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	counters = reason != NULL ? get_counters(subscription_id)
							  : find_counters(MyDatabaseId, subscription_id);
	if (counters != NULL)
		copy_clipped(problem ? counters->problem : counters->broken, reason != NULL ? reason : "",
					 RS_REASON_BYTES);
	LWLockRelease(rs_shared->lock);
}

void
rs_stats_broken(int32 subscription_id, const char *reason)
{
	set_reason(subscription_id, false, reason);
}

void
rs_stats_problem(int32 subscription_id, const char *reason)
{
	set_reason(subscription_id, true, reason);
}

bool
rs_stats_is_broken(int32 subscription_id)
{
	RsCounters *counters;
	bool broken;

	LWLockAcquire(rs_shared->lock, LW_SHARED);
	counters = find_counters(MyDatabaseId, subscription_id);
	broken = (counters != NULL && counters->broken[0] != '\0');
	LWLockRelease(rs_shared->lock);
	return broken;
}

/* ------------------------------------------------------------------- slots */

void
rs_stats_attach(const RsSubscription *subscription)
{
	char queue_name[RS_QUEUE_NAME_BYTES];

	if (rs_shared == NULL)
		return;

	snprintf(queue_name, sizeof(queue_name), "%s.%s", subscription->queue.table.schema,
			 subscription->queue.table.name);

	rs_slot_attach_session();
	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	my_counters = get_counters(subscription->id);
	my_subscription = subscription->id;
	if (rs_my_slot != NULL)
	{
		rs_my_slot->subscription = subscription->id;
		rs_my_slot->entry.owner = subscription->owner;
		rs_my_slot->queue = subscription->queue.relid;
		copy_clipped(rs_my_slot->subscription_name, subscription->name, NAMEDATALEN);
		strlcpy(rs_my_slot->queue_name, queue_name, RS_QUEUE_NAME_BYTES);
	}
	LWLockRelease(rs_shared->lock);
}

/*
 * A session that has drained gives its slot back.  A worker keeps its own,
 * which says that the process is there, until it exits.
 */
void
rs_stats_detach(void)
{
	my_counters = NULL;
	if (rs_shared != NULL)
		rs_slot_detach_session();
}

static void
begin_change(RsSlot *slot)
{
	pg_atomic_write_u32(&slot->changecount, pg_atomic_read_u32(&slot->changecount) + 1);
	pg_write_barrier();
}

static void
end_change(RsSlot *slot)
{
	pg_write_barrier();
	pg_atomic_write_u32(&slot->changecount, pg_atomic_read_u32(&slot->changecount) + 1);
}

void
rs_stats_state(RsWorkerState state)
{
	TimestampTz now;

	if (rs_my_slot == NULL || rs_my_slot->state == state)
		return;
	now = GetCurrentTimestamp();
	begin_change(rs_my_slot);
	rs_my_slot->state = state;
	rs_my_slot->since = now;
	end_change(rs_my_slot);
}

void
rs_stats_delivery_begin(const RsDelivery *delivery)
{
	if (rs_my_slot == NULL)
		return;
	begin_change(rs_my_slot);
	copy_clipped(rs_my_slot->id, delivery->id_text, RS_ID_BYTES);
	rs_my_slot->id_hash = rs_id_hash(delivery->id_text);
	rs_my_slot->attempt = delivery->attempt;
	rs_my_slot->rows = Max(delivery->rows, 1);
	rs_my_slot->delivery_since = delivery->claimed_at;
	rs_my_slot->lease_until = delivery->token;
	rs_my_slot->lease_number = delivery->lease_number;
	rs_my_slot->delivering = true;
	end_change(rs_my_slot);
}

void
rs_stats_delivery_end(void)
{
	if (rs_my_slot == NULL)
		return;
	begin_change(rs_my_slot);
	rs_my_slot->delivering = false;
	end_change(rs_my_slot);
}

/*
 * Copy a slot of this database whose process is there, with a delivery that is
 * the one it had in work at some moment.
 */
static bool
read_slot(RsSlot *slot, RsSlot *copy)
{
	bool present;
	int reads = 0;

	/* The process cannot leave its slot while we hold the lock. */
	LWLockAcquire(rs_shared->lock, LW_SHARED);
	present =
		(slot->entry.cookie != 0 && slot->entry.pid != 0 && slot->entry.database == MyDatabaseId);
	while (present)
	{
		uint32 before = pg_atomic_read_u32(&slot->changecount);

		pg_read_barrier();
		memcpy(copy, slot, sizeof(RsSlot));
		pg_read_barrier();
		if ((before % 2 == 0 && before == pg_atomic_read_u32(&slot->changecount)) ||
			++reads >= MAX_READS)
			break;
	}
	LWLockRelease(rs_shared->lock);

	/* What is in doubt is not shown; and the array ends, whatever it holds. */
	if (reads >= MAX_READS)
		copy->delivering = false;
	copy->id[RS_ID_BYTES - 1] = '\0';
	return present;
}

/* ------------------------------------------------------------------- waits */

uint32
rs_wait_event_idle(void)
{
#if PG_VERSION_NUM >= 170000
	static uint32 event = 0;

	if (event == 0)
		event = WaitEventExtensionNew("RuststreamIdle");
	return event;
#else
	return PG_WAIT_EXTENSION;
#endif
}

uint32
rs_wait_event_hold(void)
{
#if PG_VERSION_NUM >= 170000
	static uint32 event = 0;

	if (event == 0)
		event = WaitEventExtensionNew("RuststreamHold");
	return event;
#else
	return PG_WAIT_EXTENSION;
#endif
}

uint32
rs_wait_event_autonomous(void)
{
#if PG_VERSION_NUM >= 170000
	static uint32 event = 0;

	if (event == 0)
		event = WaitEventExtensionNew("RuststreamAutonomous");
	return event;
#else
	return PG_WAIT_EXTENSION;
#endif
}

/* ------------------------------------------------------------- SQL functions */

/* ruststream.internal_counters(): the subscriptions of this database */
Datum
rs_sql_counters(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	TimestampTz now = GetCurrentTimestamp();

	InitMaterializedSRF(fcinfo, 0);
	if (rs_shared == NULL)
		PG_RETURN_NULL();
	if (result->setDesc->natts != COUNTERS_COLUMNS)
		elog(ERROR, "internal_counters does not fit this library");

	for (int i = 0; i < RS_MAX_SUBSCRIPTIONS; i++)
	{
		RsCounters *counters = &rs_shared->counters[i];
		Datum values[COUNTERS_COLUMNS];
		bool nulls[COUNTERS_COLUMNS] = {false};
		char reason[RS_REASON_BYTES];
		int column = 0;
		int32 subscription = 0;
		int workers = 0;
		RsVisibility seen;
		bool present;
		bool is_broken = false;

		/* A first look without the lock, for most are free or another database's. */
		if (counters->database != MyDatabaseId)
			continue;

		/* The lock covers no allocation; the tuple is formed without it. */
		LWLockAcquire(rs_shared->lock, LW_SHARED);
		present = (counters->database == MyDatabaseId);
		if (present)
		{
			subscription = counters->subscription;
			is_broken = counters->problem[0] == '\0' && counters->broken[0] != '\0';
			for (int j = 0; j < rs_shared->worker_slots; j++)
			{
				RsSlot *slot = &rs_shared->slot[j];

				if (slot->entry.cookie != 0 && slot->entry.pid != 0 &&
					slot->entry.database == MyDatabaseId &&
					slot->subscription == counters->subscription)
					workers++;
			}
			strlcpy(reason, counters->problem[0] != '\0' ? counters->problem : counters->broken,
					RS_REASON_BYTES);
		}
		LWLockRelease(rs_shared->lock);
		if (!present)
			continue;

		/* Everybody may call us: figures for pg_monitor, texts for members of the owner. */
		seen = rs_subscription_visibility(subscription);
		if (seen == RS_SEES_NOTHING)
			continue;
		if (is_broken && seen != RS_SEES_ALL)
			strlcpy(reason, "not shown", RS_REASON_BYTES);

		values[column++] = Int32GetDatum(subscription);
		values[column++] = Int32GetDatum(workers);
		for (int j = 0; j < RS_COUNTER_COUNT; j++)
			values[column++] = Int64GetDatum((int64) pg_atomic_read_u64(&counters->count[j]));
		values[column++] = Float8GetDatum(read_rate(counters, now));
		nulls[column] = (reason[0] == '\0');
		values[column++] = CStringGetTextDatum(reason);
		values[column++] = TimestampTzGetDatum(counters->reset_at);
		tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
	}
	PG_RETURN_NULL();
}

/* ruststream.internal_workers(): workers and draining sessions of this database */
Datum
rs_sql_workers(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	if (rs_shared == NULL)
		PG_RETURN_NULL();
	if (result->setDesc->natts != WORKERS_COLUMNS)
		elog(ERROR, "internal_workers does not fit this library");

	for (int i = 0; i < rs_shared->slots; i++)
	{
		RsSlot slot;
		RsVisibility seen;
		Datum values[WORKERS_COLUMNS];
		bool nulls[WORKERS_COLUMNS] = {false};

		if (!read_slot(&rs_shared->slot[i], &slot))
			continue;
		seen = rs_subscription_visibility(slot.subscription);
		if (seen == RS_SEES_NOTHING)
			continue;

		values[0] = Int32GetDatum(slot.entry.pid);
		values[1] = Int32GetDatum(slot.subscription);
		values[2] = CStringGetTextDatum(worker_state_words[slot.state]);
		values[3] = TimestampTzGetDatum(slot.since);
		if (slot.delivering)
		{
			values[4] = CStringGetTextDatum(slot.id);
			nulls[4] = seen != RS_SEES_ALL;
			values[5] = Int64GetDatum(slot.attempt);
			values[6] = TimestampTzGetDatum(slot.delivery_since);
			/* Perhaps extended since the claim. */
			values[7] = TimestampTzGetDatum(
				Max(slot.lease_until, rs_lease_token(&rs_shared->slot[i], slot.lease_number)));
			nulls[7] = slot.lease_until == 0;
			values[8] = Int32GetDatum(slot.rows);
		}
		else
			nulls[4] = nulls[5] = nulls[6] = nulls[7] = nulls[8] = true;
		tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
	}
	PG_RETURN_NULL();
}

/* The subscriptions of this database that have counters. */
static List *
counted_subscriptions(void)
{
	int32 *ids = palloc(sizeof(int32) * RS_MAX_SUBSCRIPTIONS);
	int count = 0;
	List *result = NIL;

	LWLockAcquire(rs_shared->lock, LW_SHARED);
	for (int i = 0; i < RS_MAX_SUBSCRIPTIONS; i++)
	{
		if (rs_shared->counters[i].database == MyDatabaseId)
			ids[count++] = rs_shared->counters[i].subscription;
	}
	LWLockRelease(rs_shared->lock);
	for (int i = 0; i < count; i++)
		result = lappend_int(result, ids[i]);
	return result;
}

static void
reset_counters(int32 subscription)
{
	RsCounters *counters;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	counters = find_counters(MyDatabaseId, subscription);
	if (counters != NULL)
		set_to_zero(counters);
	LWLockRelease(rs_shared->lock);
}

/*
 * ruststream.reset_stats(subscription text): count a subscription's deliveries from 0
 * again; NULL: of all whose owner the current user is a member of.  Nothing
 * happens where nothing is counted.  Errors: 42704 no such subscription, 42501.
 */
Datum
rs_sql_reset_stats(PG_FUNCTION_ARGS)
{
	List *subscriptions;
	ListCell *cell;

	if (!PG_ARGISNULL(0))
	{
		char *name = text_to_cstring(PG_GETARG_TEXT_PP(0));
		int32 id = rs_subscription_id(name, false);

		if (rs_subscription_visibility(id) != RS_SEES_ALL)
			ereport(ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
					errmsg("permission denied for subscription \"%s\"", name),
					errhint("Be a member of the role that owns the subscription."));
		subscriptions = list_make1_int(id);
	}
	else
		subscriptions = rs_shared == NULL ? NIL : counted_subscriptions();

	foreach (cell, subscriptions)
	{
		if (rs_shared != NULL && rs_subscription_visibility(lfirst_int(cell)) == RS_SEES_ALL)
			reset_counters(lfirst_int(cell));
	}
	PG_RETURN_VOID();
}
