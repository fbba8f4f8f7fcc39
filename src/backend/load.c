/*-------------------------------------------------------------------------
 *
 * load.c
 *	  A subscription, from its row to what the engine works with.
 *
 * The same checks serve registration, where they refuse, and each later load,
 * where they find what has changed since: a worker that cannot load its
 * subscription stops, says why, and starts again when the cause is mended.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/catalog.h"
#include "backend/compat.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_proc.h"
#include "common/int.h"
#include "datatype/timestamp.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/syscache.h"

#define SECONDS(n) (INT64CONST(n) * USECS_PER_SEC)

/* More rows than this are no batch but a load. */
#define RS_MAX_BATCH 10000

/* ------------------------------------------------------- reading the settings */

static char *
text_setting(const RsRow *row, AttrNumber column)
{
	return rs_row_isnull(row, column) ? NULL : TextDatumGetCString(rs_row_get(row, column));
}

/* An integer setting; NULL counts as absent. */
static int32
integer_setting(const RsRow *row, AttrNumber column, const char *name, int32 min, int32 max,
				int32 absent)
{
	int32 value;

	if (rs_row_isnull(row, column))
		return absent;
	value = DatumGetInt32(rs_row_get(row, column));
	if (value < min || value > max)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("%s cannot be %d", name, value),
				errhint("It is a number from %d to %d.", min, max));
	return value;
}

/* A bound in words, for a hint; in the largest unit that divides it. */
char *
rs_interval_text(int64 microseconds)
{
	static const struct
	{
		int64 size;
		const char *word;
	} units[] = {{USECS_PER_DAY, "d"}, {USECS_PER_SEC, "s"}, {1000, "ms"}};

	for (int i = 0; i < (int) lengthof(units); i++)
	{
		if (microseconds >= units[i].size && microseconds % units[i].size == 0)
			return psprintf(INT64_FORMAT " %s", microseconds / units[i].size, units[i].word);
	}
	return psprintf(INT64_FORMAT " us", microseconds);
}

int64
rs_interval_microseconds(const Interval *interval, const char *what, int64 min, int64 max)
{
	int64 days = (int64) interval->month * DAYS_PER_MONTH + interval->day;
	int64 result;

	/* Infinite intervals, from PostgreSQL 17 on, overflow here as well. */
	if (pg_mul_s64_overflow(days, USECS_PER_DAY, &result) ||
		pg_add_s64_overflow(result, interval->time, &result) || result < min || result > max)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("%s is out of range", what),
				errhint("It is an interval from %s to %s.", rs_interval_text(min),
						rs_interval_text(max)));
	return result;
}

static int64
interval_setting(const RsRow *row, AttrNumber column, const char *name, int64 min, int64 max)
{
	if (rs_row_isnull(row, column))
		return 0;
	return rs_interval_microseconds(DatumGetIntervalP(rs_row_get(row, column)), name, min, max);
}

static rs_outcome
policy_setting(const RsRow *row, AttrNumber column, const char *name, rs_outcome absent,
			   bool has_dead_letter)
{
	char *word = text_setting(row, column);
	rs_outcome outcome;

	if (word == NULL)
		return absent;
	if (!rs_outcome_find(word, &outcome) || outcome == RS_OUTCOME_ACK)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("%s cannot be \"%s\"", name, word),
				errhint("It is \"retry\", \"retry_after\", \"discard\" or \"dead_letter\"."));
	if (outcome == RS_OUTCOME_DEAD_LETTER && !has_dead_letter)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("%s is \"dead_letter\", but the subscription has no dead_letter", name),
				errhint("Say in dead_letter where such rows go."));
	return outcome;
}

/* ------------------------------------------------------------------- the owner */

bool
rs_subscription_is_copied(const RsRow *row)
{
	return DatumGetObjectId(rs_row_get(row, RS_SUBSCRIPTION_DATABASE)) != MyDatabaseId ||
		   (uint64) DatumGetInt64(rs_row_get(row, RS_SUBSCRIPTION_SYSTEM_IDENTIFIER)) !=
			   GetSystemIdentifier();
}

Oid
rs_subscription_owner(const RsRow *row)
{
	if (rs_subscription_is_copied(row))
		return get_role_oid(NameStr(*DatumGetName(rs_row_get(row, RS_SUBSCRIPTION_OWNER_NAME))),
							true);
	return DatumGetObjectId(rs_row_get(row, RS_SUBSCRIPTION_OWNER));
}

/*
 * A delivery runs the triggers, defaults and policies of a table and of its
 * partitions as the subscription's owner: they must not be anybody's way to a
 * superuser's rights.
 */
void
rs_check_superuser(Oid owner, Oid relid)
{
	Oid table;
	const char *of_table;

	if (!superuser_arg(owner))
		return;
	table = rs_not_of_superuser(relid);
	if (!OidIsValid(table))
		return;
	of_table = GetUserNameFromId(rs_relation_owner(table), false);
	ereport(
		ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
		errmsg("a superuser can only subscribe to tables owned by superusers"),
		errdetail("Table %s is owned by %s, whose triggers and policies would run as %s.",
				  rs_relation_label(table), of_table, GetUserNameFromId(owner, false)),
		table == relid
			? errhint("Subscribe as the table's owner: SET ROLE %s.", quote_identifier(of_table))
			: errhint("Subscribe as a role without such rights, or give the partition to the "
					  "owner of the table."));
}

/* Nor must the handler be: whoever owns it may replace it. */
static void
check_superuser_handler(const RsSubscription *subscription)
{
	const RsHandler *handler = &subscription->handler;
	HeapTuple tuple;
	Oid of_handler;

	if (!superuser_arg(subscription->owner))
		return;
	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(handler->function));
	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for function %u", handler->function);
	of_handler = ((Form_pg_proc) GETSTRUCT(tuple))->proowner;
	ReleaseSysCache(tuple);
	if (superuser_arg(of_handler))
		return;
	ereport(
		ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
		errmsg("a superuser can only subscribe with handlers owned by superusers"),
		errdetail("Function %s is owned by %s, who may replace it.", handler->name,
				  GetUserNameFromId(of_handler, false)),
		errhint("Subscribe as a role without such rights, or, having read it, ALTER FUNCTION %s "
				"OWNER TO %s.",
				handler->name, quote_identifier(GetUserNameFromId(subscription->owner, false))));
}

void
rs_check_schema_usage(Oid owner, Oid relid)
{
	Oid schema = get_rel_namespace(relid);

	if (rs_namespace_aclcheck(schema, owner, ACL_USAGE) != ACLCHECK_OK)
		ereport(ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("role \"%s\" may not use schema \"%s\"", GetUserNameFromId(owner, false),
					   get_namespace_name(schema)),
				errhint("GRANT USAGE ON SCHEMA %s TO %s.",
						quote_identifier(get_namespace_name(schema)),
						quote_identifier(GetUserNameFromId(owner, false))));
}

void
rs_check_right(Oid owner, Oid relid, AclMode right, const char *word, const char *needed)
{
	if (pg_class_aclcheck(relid, owner, right) != ACLCHECK_OK)
		ereport(ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("role \"%s\" lacks the right to %s on table %s",
					   GetUserNameFromId(owner, false), word, rs_relation_label(relid)),
				errhint("GRANT %s ON %s TO %s.", needed, rs_relation_label(relid),
						quote_identifier(GetUserNameFromId(owner, false))));
}

static void
check_owner(const RsSubscription *subscription)
{
	static const char needed[] = "SELECT, UPDATE, DELETE";
	Oid owner = subscription->owner;
	Oid relid = subscription->queue.relid;

	if (!SearchSysCacheExists1(AUTHOID, ObjectIdGetDatum(owner)))
		ereport(
			ERROR, errcode(ERRCODE_UNDEFINED_OBJECT),
			errmsg("the owner of subscription \"%s\" does not exist any more", subscription->name),
			errhint("Subscribe again as another role, or unsubscribe."));
	rs_check_superuser(owner, relid);
	rs_check_schema_usage(owner, relid);
	rs_check_right(owner, relid, ACL_SELECT, "SELECT", needed);
	rs_check_right(owner, relid, ACL_UPDATE, "UPDATE", needed);
	rs_check_right(owner, relid, ACL_DELETE, "DELETE", needed);
}

/* ------------------------------------------------------------------- dead letter */

static void
bind_dead_letter(const RsRow *row, RsSubscription *subscription)
{
	rs_policy *policy = &subscription->policy;

	subscription->dead_letter_group = text_setting(row, RS_SUBSCRIPTION_DEAD_LETTER_GROUP);
	if (!rs_row_isnull(row, RS_SUBSCRIPTION_DEAD_LETTER_TABLE))
		subscription->dead_letter_table =
			DatumGetObjectId(rs_row_get(row, RS_SUBSCRIPTION_DEAD_LETTER_TABLE));

	policy->dead_letter_is_table = OidIsValid(subscription->dead_letter_table);
	policy->has_dead_letter =
		policy->dead_letter_is_table || subscription->dead_letter_group != NULL;

	if (subscription->dead_letter_group != NULL &&
		strcmp(subscription->dead_letter_group, "*") == 0)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("dead_letter cannot be \"*\", which is every group"),
				errhint("Name one group."));
	if (subscription->dead_letter_group != NULL && subscription->group_name != NULL &&
		strcmp(subscription->dead_letter_group, subscription->group_name) == 0)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("dead_letter is the group that the subscription reads, \"%s\"",
					   subscription->group_name),
				errhint("Name another group."));
	if (policy->dead_letter_is_table)
		rs_bind_dead_letter_table(subscription);
}

/* --------------------------------------------------------------------- settings */

static void
bind_commit(const RsRow *row, RsSubscription *subscription)
{
	rs_form form = rs_table_form(&subscription->queue.table);

	subscription->deliveries_per_commit = integer_setting(
		row, RS_SUBSCRIPTION_DELIVERIES_PER_COMMIT, "deliveries_per_commit", 1, 10000, 1);
	subscription->max_commit_wait =
		interval_setting(row, RS_SUBSCRIPTION_MAX_COMMIT_WAIT, "max_commit_wait", 0, SECONDS(60));
	if (subscription->deliveries_per_commit == 1)
		return;

	if (!rs_row_isnull(row, RS_SUBSCRIPTION_BATCH_SIZE))
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("batch_size and deliveries_per_commit cannot be combined"),
				errdetail("A batch is one delivery of many rows, and has its commit to itself."),
				errhint("Leave out deliveries_per_commit, or batch_size for a handler that takes "
						"one row at a time."));
	if (form == RS_FORM_ADVISORY_LOCK)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("deliveries_per_commit needs a queue of the row lock or the lease form"),
				errdetail("In the advisory lock form each delivery is claimed by itself, once its "
						  "key is locked."),
				errhint("Leave out deliveries_per_commit."));
	/* Asked of the setting, which is checked and bound later. */
	if (form == RS_FORM_LEASE && !rs_row_isnull(row, RS_SUBSCRIPTION_MAX_ATTEMPTS))
		ereport(
			ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			errmsg("deliveries_per_commit and max_attempts cannot be combined in the lease form"),
			errdetail("A claim counts the attempts of all its rows: a handler that kills its "
					  "process would take the rows behind it along to the dead letter."),
			errhint("Leave out deliveries_per_commit, or max_attempts."));
}

/* How long a claim lasts: whole seconds, a shorter one rounded up. */
static int64
lease_setting(const RsRow *row)
{
	int64 lease = interval_setting(row, RS_SUBSCRIPTION_LEASE, "lease", 1, RS_MAX_INTERVAL);

	return (lease + USECS_PER_SEC - 1) / USECS_PER_SEC * USECS_PER_SEC;
}

/*
 * A transaction at these levels sees its row as its first statement found it,
 * and not the lease that has been extended since: every settlement after the
 * first extension would fail.
 */
void
rs_subscription_check_level(const RsSubscription *subscription)
{
	rs_isolation declared = subscription->queue.table.isolation;
	bool is_default = declared == RS_ISOLATION_DEFAULT;
	int level = is_default                                 ? DefaultXactIsoLevel
				: declared == RS_ISOLATION_SERIALIZABLE    ? XACT_SERIALIZABLE
				: declared == RS_ISOLATION_REPEATABLE_READ ? XACT_REPEATABLE_READ
														   : XACT_READ_COMMITTED;

	if (subscription->copied || !subscription->policy.transactional ||
		rs_table_form(&subscription->queue.table) != RS_FORM_LEASE || level < XACT_REPEATABLE_READ)
		return;
	ereport(
		ERROR, errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
		errmsg("a lease queue cannot be delivered transactionally at %s",
			   level == XACT_SERIALIZABLE ? "serializable" : "repeatable read"),
		errdetail("Such a transaction sees the row as its first statement found it, and would "
				  "not see that its lease has been extended since."),
		is_default
			? errhint("It is this session's default_transaction_isolation: attach the queue with "
					  "isolation => 'read committed', or subscribe with transactional => false.")
			: errhint("Attach the queue with isolation => 'read committed', or subscribe with "
					  "transactional => false."));
}

static void
bind_group(const RsRow *row, RsSubscription *subscription)
{
	const rs_table *table = &subscription->queue.table;
	char *group_name = text_setting(row, RS_SUBSCRIPTION_GROUP_NAME);

	if (table->column[RS_ROLE_GROUP] == NULL)
	{
		if (group_name != NULL)
			ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					errmsg("queue %s has no groups", rs_relation_label(subscription->queue.relid)),
					errhint("Leave out group_name, or attach the queue with group_column."));
		return;
	}
	subscription->group_name = group_name != NULL ? group_name : subscription->name;
	if (strcmp(subscription->group_name, "*") != 0)
		return;
	if (!table->fifo)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("group_name \"*\" reads every group of a fifo queue, which %s is not",
					   rs_relation_label(subscription->queue.relid)),
				errhint("Subscribe once for each group, or attach the queue with fifo => true."));
	subscription->group_name = NULL;
	subscription->every_group = true;
}

/* A batch is one claim, one call of its handler and, in the row lock form, one commit. */
static void
bind_batch(const RsRow *row, RsSubscription *subscription)
{
	subscription->batch_size =
		integer_setting(row, RS_SUBSCRIPTION_BATCH_SIZE, "batch_size", 1, RS_MAX_BATCH, 0);
	if (subscription->batch_size == 0)
		return;
	if (!rs_row_isnull(row, RS_SUBSCRIPTION_TRANSACTIONAL) &&
		DatumGetBool(rs_row_get(row, RS_SUBSCRIPTION_TRANSACTIONAL)))
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("a batch subscription cannot be transactional"),
				errdetail("One call handles rows that end in different ways, so its writes cannot "
						  "be undone for one row and kept for another."),
				errhint("Leave out transactional, or leave out batch_size and take one row at a "
						"time."));
}

static void
bind_policy(const RsRow *row, RsSubscription *subscription)
{
	const rs_table *table = &subscription->queue.table;
	rs_policy *policy = &subscription->policy;
	char *backoff = text_setting(row, RS_SUBSCRIPTION_BACKOFF);

	policy->transactional = rs_row_isnull(row, RS_SUBSCRIPTION_TRANSACTIONAL)
								? subscription->batch_size == 0
								: DatumGetBool(rs_row_get(row, RS_SUBSCRIPTION_TRANSACTIONAL));
	policy->max_attempts =
		integer_setting(row, RS_SUBSCRIPTION_MAX_ATTEMPTS, "max_attempts", 1, PG_INT32_MAX, 0);
	if (policy->max_attempts > 0 && !policy->has_dead_letter)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("max_attempts needs a dead_letter"),
				errhint("Say in dead_letter where a row goes after its last attempt."));
	if (policy->max_attempts > 0 && table->column[RS_ROLE_ATTEMPT] == NULL)
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("max_attempts needs a queue that counts attempts"),
				errhint("Attach the queue with attempt_column."));

	policy->on_error = policy_setting(row, RS_SUBSCRIPTION_ON_ERROR, "on_error",
									  rs_default_on_error(table), policy->has_dead_letter);
	policy->on_decode_error = policy_setting(
		row, RS_SUBSCRIPTION_ON_DECODE_ERROR, "on_decode_error",
		rs_default_on_decode_error(table, policy->has_dead_letter), policy->has_dead_letter);

	if (!rs_backoff_find(backoff, &policy->backoff))
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("backoff cannot be \"%s\"", backoff),
				errhint("It is \"constant\", \"linear\" or \"exponential\"."));
	policy->retry_delay =
		interval_setting(row, RS_SUBSCRIPTION_RETRY_DELAY, "retry_delay", 0, RS_MAX_INTERVAL);
	policy->max_retry_delay = interval_setting(row, RS_SUBSCRIPTION_MAX_RETRY_DELAY,
											   "max_retry_delay", 0, RS_MAX_INTERVAL);
}

static void
check_claim_index(const RsSubscription *subscription)
{
	List *missing = rs_queue_missing_indexes(&subscription->queue);

	if (missing != NIL)
		ereport(ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("queue %s has no index that serves its claims",
					   rs_relation_label(subscription->queue.relid)),
				errdetail("Without it each claim would read the whole table."),
				errhint("Run %s.", (char *) linitial(missing)));
}

static void
fill(const RsRow *row, RsSubscription *subscription)
{
	char *handler = text_setting(row, RS_SUBSCRIPTION_HANDLER);
	RsHandlerUse use;

	rs_catalog_check();
	subscription->id = DatumGetInt32(rs_row_get(row, RS_SUBSCRIPTION_ID));
	subscription->name = text_setting(row, RS_SUBSCRIPTION_NAME);
	subscription->owner = rs_subscription_owner(row);
	subscription->queue.relid = DatumGetObjectId(rs_row_get(row, RS_SUBSCRIPTION_QUEUE));
	subscription->paused = DatumGetBool(rs_row_get(row, RS_SUBSCRIPTION_PAUSED));
	subscription->copied = rs_subscription_is_copied(row);
	subscription->workers = integer_setting(row, RS_SUBSCRIPTION_WORKERS, "workers", 0, 1000, 1);

	/* What a copy refers to need not be there: it is asked for by resume. */
	if (subscription->copied)
		return;

	rs_queue_load(subscription->queue.relid, &subscription->queue);
	check_owner(subscription);
	bind_group(row, subscription);
	bind_commit(row, subscription);
	bind_batch(row, subscription);
	bind_dead_letter(row, subscription);
	bind_policy(row, subscription);
	subscription->lease = lease_setting(row);
	subscription->timeout =
		interval_setting(row, RS_SUBSCRIPTION_TIMEOUT, "timeout", 1, RS_MAX_INTERVAL);
	subscription->poll_interval =
		interval_setting(row, RS_SUBSCRIPTION_POLL_INTERVAL, "poll_interval", 10000, USECS_PER_DAY);
	check_claim_index(subscription);
	use = (RsHandlerUse){.queue = &subscription->queue,
						 .transactional = subscription->policy.transactional,
						 .batch = subscription->batch_size > 0};
	rs_handler_resolve(handler, DatumGetObjectId(rs_row_get(row, RS_SUBSCRIPTION_HANDLER_OID)),
					   &use, subscription->owner, &subscription->handler);
	check_superuser_handler(subscription);
}

RsSubscription *
rs_subscription_build(const RsRow *row, MemoryContext parent)
{
	/* Until it is whole it belongs to the (sub)transaction, whose abort frees it. */
	MemoryContext context = AllocSetContextCreate(CurTransactionContext, "ruststream subscription",
												  ALLOCSET_SMALL_SIZES);
	MemoryContext save_context = MemoryContextSwitchTo(context);
	RsSubscription *subscription = palloc0(sizeof(RsSubscription));

	subscription->context = context;
	fill(row, subscription);
	MemoryContextSwitchTo(save_context);
	MemoryContextSetParent(context, parent);
	return subscription;
}

RsSubscription *
rs_subscription_load(int32 id, bool missing_ok, MemoryContext parent)
{
	List *rows = rs_catalog_find(rs_objects(false)->subscription, RS_SUBSCRIPTION_ID, F_INT4EQ,
								 Int32GetDatum(id));

	if (rows != NIL)
		return rs_subscription_build(linitial(rows), parent);
	if (!missing_ok)
		ereport(ERROR, errcode(ERRCODE_UNDEFINED_OBJECT),
				errmsg("subscription %d does not exist", id),
				errhint("The view ruststream.status lists the subscriptions."));
	return NULL;
}
