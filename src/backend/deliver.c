/*-------------------------------------------------------------------------
 *
 * deliver.c
 *	  One delivery, from its claim to its settlement.
 *
 * This is the row lock lane of the contract:
 *
 *		BEGIN, CLAIM, SAVEPOINT ruststream_claim, HANDLER
 *		  ack:              SETTLE, COMMIT
 *		  anything else:    ROLLBACK TO SAVEPOINT ruststream_claim, SETTLE, COMMIT
 *
 * The lock that the claim takes on the row is held by the transaction until
 * its end, so nobody else can have the row between the claim and the commit,
 * and a crash at any point gives it back as it was.  What follows the handler
 * is not decided here: rs_settle says which steps remain and which statements
 * settle, and we walk through them.
 *
 * Errors are told apart by where they surface.  In the handler (or the
 * deferred constraints of its writes, which we fire inside the savepoint) they
 * are the handler's: the savepoint undoes it, the policy settles.  In the
 * settlement or the COMMIT everything is rolled back, and the row is settled as failed
 * in a transaction of its own.  Transient failures (serialization, deadlock)
 * roll back everything wherever they surface, since a savepoint cannot be
 * trusted to rescue such a transaction, and the row is claimed anew.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"

#include "access/xact.h"
#include "catalog/pg_type_d.h"
#include "commands/trigger.h"
#include "common/pg_prng.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

/* So many transient failures in a row make an ordinary one. */
#define RS_TRANSIENT_LIMIT 10

/* What a delivery is doing: decides what an error means. */
typedef enum Stage
{
	STAGE_CLAIM,
	STAGE_DECODE,
	STAGE_HANDLER,
	STAGE_SETTLE
} Stage;

/* One delivery on its way. Lives in the caller's frame across PG_TRY. */
typedef struct Work
{
	RsEngine *engine;
	Stage stage;
	RsDelivery delivery;
	RsAnswer answer;
	ErrorData *error; /* why the delivery failed, in the delivery's context */
} Work;

/* ------------------------------------------------------------------- trace */

static void
trace(const RsEngine *engine, rs_step step, const char *suffix)
{
	if (!rs_trace)
		return;
	ereport(engine->session->trace_level,
			errmsg_internal("%s%s%s", rs_step_word(step), suffix[0] == '\0' ? "" : " ", suffix),
			errhidestmt(true), errhidecontext(true));
}

/* ------------------------------------------------------------------ engine */

void
rs_set_isolation(rs_isolation isolation)
{
	static const int levels[RS_ISOLATION_COUNT] = {
		[RS_ISOLATION_DEFAULT] = -1,
		[RS_ISOLATION_READ_UNCOMMITTED] = XACT_READ_UNCOMMITTED,
		[RS_ISOLATION_READ_COMMITTED] = XACT_READ_COMMITTED,
		[RS_ISOLATION_REPEATABLE_READ] = XACT_REPEATABLE_READ,
		[RS_ISOLATION_SERIALIZABLE] = XACT_SERIALIZABLE,
	};

	/* The level of a transaction is fixed by its first snapshot. */
	Assert(!FirstSnapshotSet);
	if (levels[isolation] >= 0)
		XactIsoLevel = levels[isolation];
}

void
rs_engine_init(RsEngine *engine, const RsSession *session, int32 subscription_id,
			   MemoryContext parent)
{
	memset(engine, 0, sizeof(*engine));
	engine->session = session;
	engine->context = AllocSetContextCreate(parent, "ruststream engine", ALLOCSET_DEFAULT_SIZES);
	engine->delivery_context =
		AllocSetContextCreate(engine->context, "ruststream delivery", ALLOCSET_DEFAULT_SIZES);
	engine->mark_context =
		AllocSetContextCreate(engine->context, "ruststream mark", ALLOCSET_SMALL_SIZES);
	engine->subscription_id = subscription_id;
}

static void
forget_subscription(RsEngine *engine)
{
	if (engine->plans != NULL)
		rs_plans_free(engine->plans);
	if (engine->subscription != NULL)
		MemoryContextDelete(engine->subscription->context);
	engine->plans = NULL;
	engine->subscription = NULL;
	engine->has_mark = false;
}

void
rs_engine_free(RsEngine *engine)
{
	forget_subscription(engine);
	MemoryContextDelete(engine->context);
}

/*
 * The session's transactions.  Outside one we stay in the delivery's memory,
 * so that nothing piles up in a context that is never reset.
 */
static void
begin(RsEngine *engine, rs_isolation isolation)
{
	trace(engine, RS_STEP_BEGIN, "");
	engine->session->begin(isolation);
}

static void
commit(RsEngine *engine)
{
	trace(engine, RS_STEP_COMMIT, "");
	engine->session->commit();
	MemoryContextSwitchTo(engine->delivery_context);
}

static void
rollback(RsEngine *engine)
{
	trace(engine, RS_STEP_ROLLBACK, "");
	engine->session->rollback();
	MemoryContextSwitchTo(engine->delivery_context);
}

/* Load the subscription in a transaction of its own; an error is the caller's. */
static void
load_subscription(RsEngine *engine)
{
	engine->session->begin(RS_ISOLATION_DEFAULT);
	/* Before the load: what changes during it must be seen as a change. */
	engine->generation = rs_catalog_generation();
	PushActiveSnapshot(GetTransactionSnapshot());
	engine->subscription = rs_subscription_load(engine->subscription_id, true, engine->context);
	if (engine->subscription != NULL)
		get_typlenbyval(engine->subscription->queue.type[RS_ROLE_ID], &engine->id_length,
						&engine->id_byval);
	PopActiveSnapshot();
	engine->session->commit();
	MemoryContextSwitchTo(engine->delivery_context);
	if (engine->subscription == NULL)
		return;

	engine->plans = rs_plans_create(&engine->subscription->queue,
									&engine->subscription->destination, engine->context);
	rs_stats_attach(engine->subscription);
	rs_stats_broken(engine->subscription_id, NULL);
	if (engine->session->loaded != NULL)
		engine->session->loaded(engine->subscription);
}

/*
 * Begin the delivery's transaction with a subscription that is up to date.
 * The level must be known before the first snapshot, and whether the catalogs have changed is
 * known only inside a transaction: so look, and begin again where they have.
 * Returns false where there is nothing to deliver for (and no transaction).
 */
static bool
begin_up_to_date(RsEngine *engine)
{
	for (;;)
	{
		if (engine->subscription == NULL)
			load_subscription(engine);
		if (engine->subscription == NULL || engine->subscription->paused ||
			engine->subscription->copied)
			return false;

		engine->session->begin(engine->subscription->queue.table.isolation);
		if (engine->generation == rs_catalog_generation())
			break;
		engine->session->rollback();
		forget_subscription(engine);
	}
	trace(engine, RS_STEP_BEGIN, "");
	return true;
}

/* ------------------------------------------------------------------ claiming */

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

static void
set_delivery_values(const RsSubscription *subscription, const RsDelivery *delivery,
					RsValues *values)
{
	set_common_values(subscription, values);
	rs_value_set(values, RS_PARAM_ID, delivery->id, 0);
	rs_value_set(values, RS_PARAM_ATTEMPT, Int64GetDatum(delivery->attempt), 0);
}

/* Copy a column of the only result row into the current context. */
static Datum
fetch(int column, bool *isnull)
{
	TupleDesc descriptor = SPI_tuptable->tupdesc;
	Form_pg_attribute attribute = TupleDescAttr(descriptor, column - 1);
	Datum value = SPI_getbinval(SPI_tuptable->vals[0], descriptor, column, isnull);

	return *isnull ? (Datum) 0 : datumCopy(value, attribute->attbyval, attribute->attlen);
}

static char *
id_as_text(Datum id, Oid type)
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
 *	 delivery has itself inserted into the queue, the next claim looks from the
 *	 beginning;
 * - a mark lasts ten times as long as the last claim from the beginning took,
 *	 usually a fraction of a millisecond, so that what others insert, delay or
 *	 release before it is seen as late as that and no later, while looking from
 *	 the beginning costs a tenth of the time at most;
 * - nothing is known to be due before a claim from the beginning has said so.
 */
#define RS_MARK_LIFE 10

static void
set_mark(RsEngine *engine, const RsDelivery *delivery)
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
	bool row = engine->subscription->handler.input == RS_INPUT_ROW;

	if (!behind_mark)
		return row ? RS_OP_CLAIM_ROW : RS_OP_CLAIM_PAYLOAD;
	if (engine->mark_priority_isnull)
		return row ? RS_OP_CLAIM_ROW_BEHIND : RS_OP_CLAIM_PAYLOAD_BEHIND;
	return row ? RS_OP_CLAIM_ROW_BEHIND_PRIORITY : RS_OP_CLAIM_PAYLOAD_BEHIND_PRIORITY;
}

/* Find and lock the first row: behind the mark while it lasts, else of all. */
static bool
find_row(RsEngine *engine, RsValues *values)
{
	TimestampTz now = DatumGetTimestampTz(values->value[RS_PARAM_NOW]);
	bool has_mark = engine->has_mark && now < engine->mark_until;
	bool found;

	engine->has_mark = false;
	if (has_mark)
	{
		rs_value_set(values, RS_PARAM_ID, engine->mark_id, 0);
		if (!engine->mark_priority_isnull)
			rs_value_set(values, RS_PARAM_PRIORITY, Int64GetDatum(engine->mark_priority), 0);
		if (rs_execute(engine->plans, claim_operation(engine, true), values) > 0)
			return true;
	}

	found = rs_execute(engine->plans, claim_operation(engine, false), values) > 0;
	engine->mark_until = GetCurrentTimestamp();
	engine->mark_until += (engine->mark_until - now) * RS_MARK_LIFE;
	return found;
}

/* Claim one row.  Returns false where none is due; engine->next_due is set then. */
static bool
claim(RsEngine *engine, RsDelivery *delivery)
{
	const RsSubscription *subscription = engine->subscription;
	RsValues values;
	bool isnull;

	set_common_values(subscription, &values);
	rs_value_set(&values, RS_PARAM_LIMIT, Int64GetDatum(1), 0);
	delivery->claimed_at = DatumGetTimestampTz(values.value[RS_PARAM_NOW]);

	if (!find_row(engine, &values))
	{
		engine->next_due = 0;
		if (rs_execute(engine->plans, RS_OP_NEXT_DUE, &values) == 1)
			engine->next_due = DatumGetTimestampTz(fetch(1, &isnull));
		return false;
	}

	delivery->id = fetch(1, &isnull);
	delivery->id_text = id_as_text(delivery->id, subscription->queue.type[RS_ROLE_ID]);
	delivery->attempt = DatumGetInt64(fetch(2, &isnull));
	delivery->headers = fetch(3, &delivery->headers_isnull);
	delivery->input = fetch(4, &delivery->input_isnull);
	delivery->priority = DatumGetInt64(fetch(5, &delivery->priority_isnull));
	(void) fetch(6, &isnull);
	delivery->was_delayed = !isnull;
	SPI_freetuptable(SPI_tuptable);
	return true;
}

/* Is this the row that this worker must leave alone for a while? */
static bool
is_held(const RsEngine *engine, const RsDelivery *delivery)
{
	return engine->held_id != NULL && strcmp(engine->held_id, delivery->id_text) == 0 &&
		   GetCurrentTimestamp() < engine->held_until;
}

static void
hold(RsEngine *engine, const RsDelivery *delivery)
{
	if (engine->held_id != NULL)
		pfree(engine->held_id);
	engine->held_id = MemoryContextStrdup(engine->context, delivery->id_text);
	engine->held_until = GetCurrentTimestamp() + engine->subscription->policy.retry_delay;
}

/* ------------------------------------------------------------------- handling */

static bool
is_transient(const ErrorData *error)
{
	return error->sqlerrcode == ERRCODE_T_R_SERIALIZATION_FAILURE ||
		   error->sqlerrcode == ERRCODE_T_R_DEADLOCK_DETECTED;
}

/*
 * Fire the deferred triggers and constraints of the handler's writes, where the savepoint
 * can still undo them.  Never AfterTriggerFireDeferred() here: in a
 * subtransaction, with earlier events pending outside it, it loses track of
 * them when a rollback follows.
 */
static void
fire_deferred_constraints(void)
{
	ConstraintsSetStmt *all_immediate = makeNode(ConstraintsSetStmt);

	all_immediate->constraints = NIL;
	all_immediate->deferred = false;
	AfterTriggerSetState(all_immediate);
}

static void
handler_error_context(void *arg)
{
	const Work *work = arg;

	errcontext("delivery of row %s (attempt " INT64_FORMAT ") by subscription \"%s\"",
			   work->delivery.id_text, work->delivery.attempt, work->engine->subscription->name);
}

/*
 * Decode the row and call the handler, below a savepoint.  Ends with the
 * savepoint released after an ack, and open after any other answer and after
 * an error, which is left in work->error.
 */
static void
handle(Work *work)
{
	RsEngine *engine = work->engine;
	MemoryContext save_context = CurrentMemoryContext;
	ResourceOwner save_owner = CurrentResourceOwner;
	ErrorContextCallback callback = {.callback = handler_error_context, .arg = work};

	trace(engine, RS_STEP_SAVEPOINT, "");
	BeginInternalSubTransaction("ruststream_claim");
	MemoryContextSwitchTo(engine->delivery_context);
	RS_FAILPOINT("after_savepoint");

	callback.previous = error_context_stack;
	error_context_stack = &callback;

	PG_TRY();
	{
		/* Whatever the handler sets, role and search_path included, ends with it. */
		int nest_level = NewGUCNestLevel();

		PushActiveSnapshot(GetTransactionSnapshot());
		work->stage = STAGE_DECODE;
		rs_handler_decode(engine->subscription, &work->delivery);
		work->stage = STAGE_HANDLER;
		trace(engine, RS_STEP_HANDLER, "");
		work->answer = rs_handler_call(engine->subscription, &work->delivery);
		PopActiveSnapshot();
		if (work->answer.outcome == RS_OUTCOME_ACK)
			fire_deferred_constraints();
		AtEOXact_GUC(false, nest_level);
		RS_FAILPOINT("after_handler");
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(engine->delivery_context);
		work->error = CopyErrorData();
		FlushErrorState();
	}
	PG_END_TRY();

	error_context_stack = callback.previous;
	if (work->error == NULL && work->answer.outcome == RS_OUTCOME_ACK)
	{
		ReleaseCurrentSubTransaction();
		CurrentResourceOwner = save_owner;
	}
	MemoryContextSwitchTo(save_context);
}

/* ------------------------------------------------------------------- settling */

/* An error that is ours: a settlement that the database let pass without effect. */
static void
report_unsettled(const RsDelivery *delivery)
{
	ereport(ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("the settlement of row %s changed nothing", delivery->id_text),
			errhint("A trigger or a row-level security policy of the table may keep its owner "
					"from ending or changing the row."));
}

/*
 * Execute the statements of a settlement, in the current transaction.
 * given_delay is the handler's own delay, in microseconds.
 */
static void
settle(RsEngine *engine, const RsDelivery *delivery, const rs_settlement *settlement,
	   int64 given_delay)
{
	const RsSubscription *subscription = engine->subscription;
	const rs_policy *policy = &subscription->policy;
	RsValues values;
	int64 rows;
	bool ended_before;

	trace(engine, RS_STEP_SETTLE, rs_outcome_word(settlement->outcome));
	set_delivery_values(subscription, delivery, &values);
	if (settlement->outcome == RS_OUTCOME_RETRY_AFTER)
	{
		int64 delay =
			settlement->delay_is_given
				? given_delay
				: rs_backoff_delay(policy->backoff, policy->retry_delay, policy->max_retry_delay,
								   delivery->attempt, pg_prng_uint32(&pg_global_prng_state));
		TimestampTz now = DatumGetTimestampTz(values.value[RS_PARAM_NOW]);

		/* Further away than the type can say is as far as it can say. */
		delay = Min(delay, END_TIMESTAMP - 1 - now);
		rs_value_set(&values, RS_PARAM_UNTIL, TimestampTzGetDatum(now + delay), 0);
	}

	rows = rs_execute(engine->plans, settlement->operation, &values);
	/* An ack finds nothing where the handler itself has ended the row. */
	ended_before = rows == 0 && settlement->outcome == RS_OUTCOME_ACK &&
				   rs_execute(engine->plans, RS_OP_UNSETTLED, &values) == 0;
	if (rows == 0 && !ended_before)
		report_unsettled(delivery);
	RS_FAILPOINT("after_settle");
}

/* The failure of a delivery whose handler asks for what its subscription lacks. */
static ErrorData *
lacking_dead_letter(const RsEngine *engine)
{
	MemoryContext save = MemoryContextSwitchTo(engine->delivery_context);
	ErrorData *error = palloc0(sizeof(ErrorData));

	error->sqlerrcode = ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE;
	error->message = psprintf("the handler answered dead_letter, but subscription \"%s\" has none",
							  engine->subscription->name);
	error->hint = psprintf("ruststream.alter_subscription(%s, dead_letter => ..) gives it one.",
						   quote_literal_cstr(engine->subscription->name));
	MemoryContextSwitchTo(save);
	return error;
}

/*
 * What goes into the history of failures: the error, or the reason that the
 * handler gave with any answer but ack.  NULL: nothing to record.
 */
static const ErrorData *
recorded_failure(const Work *work, ErrorData *answered)
{
	if (work->error != NULL)
		return work->error;
	if (work->answer.reason == NULL || work->answer.outcome == RS_OUTCOME_ACK)
		return NULL;

	memset(answered, 0, sizeof(*answered));
	answered->sqlerrcode = ERRCODE_SUCCESSFUL_COMPLETION;
	answered->message = work->answer.reason;
	answered->context = psprintf("answered %s", rs_outcome_word(work->answer.outcome));
	return answered;
}

static void
record_failure(Work *work, const ErrorData *failure)
{
	rs_failure_record(work->engine->subscription, &work->delivery, failure);
	work->engine->has_recorded_failures = true;
}

/* Tell the log, or drain's caller. */
static void
report_failure(const Work *work)
{
	const RsEngine *engine = work->engine;

	ereport(engine->session->trace_level == NOTICE ? WARNING : LOG,
			errcode(work->error->sqlerrcode),
			errmsg("subscription \"%s\": delivery of row %s failed (attempt " INT64_FORMAT "): %s",
				   engine->subscription->name, work->delivery.id_text, work->delivery.attempt,
				   work->error->message),
			work->error->detail ? errdetail_internal("%s", work->error->detail) : 0,
			work->error->hint ? errhint("%s", work->error->hint) : 0, errhidestmt(true),
			errhidecontext(true));
}

static void
warn_of_lacks(const RsEngine *engine, const rs_settlement *settlement, const RsDelivery *delivery)
{
	if (settlement->lacks_retry_after)
		ereport(WARNING,
				errmsg("row %s returns at once: queue %s has no retry_after column",
					   delivery->id_text,
					   quote_qualified_identifier(engine->subscription->queue.table.schema,
												  engine->subscription->queue.table.name)),
				errhint("Attach the queue with retry_after_column to delay its rows."),
				errhidestmt(true), errhidecontext(true));
}

/* After the commit: how did it end? */
static void
count_settlement(rs_outcome outcome, bool failed)
{
	static const RsCounter counter[RS_OUTCOME_COUNT] = {
		[RS_OUTCOME_ACK] = RS_COUNT_ACKED,
		[RS_OUTCOME_RETRY] = RS_COUNT_RETRIED,
		[RS_OUTCOME_RETRY_AFTER] = RS_COUNT_DELAYED,
		[RS_OUTCOME_DISCARD] = RS_COUNT_DISCARDED,
		[RS_OUTCOME_DEAD_LETTER] = RS_COUNT_DEAD_LETTERED,
	};

	rs_stats_count(RS_COUNT_DELIVERIES);
	rs_stats_count(counter[outcome]);
	if (failed)
		rs_stats_count(RS_COUNT_FAILED);
}

/*
 * A row that failed comes back at once where its table cannot delay it: then
 * it is this worker that waits.
 */
static void
hold_if_hot(RsEngine *engine, const RsDelivery *delivery, const rs_settlement *settlement)
{
	if (settlement->outcome == RS_OUTCOME_RETRY &&
		engine->subscription->queue.table.column[RS_ROLE_RETRY_AFTER] == NULL)
		hold(engine, delivery);
}

static void
forget_transient_failures(RsEngine *engine)
{
	if (engine->transient_id != NULL)
		pfree(engine->transient_id);
	engine->transient_id = NULL;
	engine->transient_count = 0;
}

/*
 * What remains of the lane after the handler, as rs_settle has decided it.
 * Called with the savepoint released (an ack) or open (anything else).
 */
static void
finish(Work *work, MemoryContext outer_context, ResourceOwner outer_owner)
{
	RsEngine *engine = work->engine;
	const RsSubscription *subscription = engine->subscription;
	rs_cause cause = work->error == NULL           ? RS_CAUSE_ANSWER
					 : work->stage == STAGE_DECODE ? RS_CAUSE_DECODE_ERROR
												   : RS_CAUSE_ERROR;
	rs_settlement settlement =
		rs_settle(&subscription->queue.table, &subscription->policy, cause, work->answer.outcome,
				  work->answer.has_delay, work->delivery.attempt);
	const ErrorData *failure;
	ErrorData answered;
	bool inserted = false;

	work->stage = STAGE_SETTLE;
	if (settlement.lacks_dead_letter)
		work->error = lacking_dead_letter(engine);

	for (const rs_step *step = settlement.steps; *step != RS_STEP_END; step++)
	{
		switch (*step)
		{
			case RS_STEP_ROLLBACK_TO:
				trace(engine, *step, "");
				RollbackAndReleaseCurrentSubTransaction();
				MemoryContextSwitchTo(outer_context);
				CurrentResourceOwner = outer_owner;
				RS_FAILPOINT("after_rollback_to");
				break;
			case RS_STEP_SETTLE:
				settle(engine, &work->delivery, &settlement, work->answer.delay);
				failure = recorded_failure(work, &answered);
				if (failure != NULL)
					record_failure(work, failure);
				break;
			case RS_STEP_COMMIT:
				RS_FAILPOINT("before_commit");
				inserted = rs_wake_is_marked(subscription->queue.relid);
				commit(engine);
				RS_FAILPOINT("after_commit");
				break;
			default:
				elog(ERROR, "unexpected step after a handler: %s", rs_step_word(*step));
		}
	}

	if (settlement.operation == RS_OP_ACK && !inserted && !work->delivery.was_delayed)
		set_mark(engine, &work->delivery);
	forget_transient_failures(engine);
	warn_of_lacks(engine, &settlement, &work->delivery);
	if (work->error != NULL)
	{
		report_failure(work);
		hold_if_hot(engine, &work->delivery, &settlement);
	}
	if (cause == RS_CAUSE_DECODE_ERROR)
		rs_stats_count(RS_COUNT_DECODE_FAILED);
	count_settlement(settlement.outcome, work->error != NULL);
}

/* --------------------------------------------- when the transaction is lost */

/* How far a settlement in a fresh transaction came. */
typedef enum Afresh
{
	AFRESH_SETTLED,
	AFRESH_TAKEN, /* somebody else has the row: recorded the failure alone */
	AFRESH_FAILED
} Afresh;

/*
 * Settle and record in one fresh transaction at READ COMMITTED.  The row was
 * free in between, so it is locked again first; where somebody else has it, or
 * has moved it on, its settlement is theirs.  settlement may be NULL: record
 * the failure alone.
 */
static Afresh
try_afresh(Work *work, const rs_settlement *settlement)
{
	RsEngine *engine = work->engine;
	volatile Afresh result = AFRESH_TAKEN;

	PG_TRY();
	{
		RsValues values;

		begin(engine, RS_ISOLATION_READ_COMMITTED);
		MemoryContextSwitchTo(engine->delivery_context);
		set_delivery_values(engine->subscription, &work->delivery, &values);
		if (settlement != NULL && rs_execute(engine->plans, RS_OP_RECLAIM, &values) == 1)
		{
			settle(engine, &work->delivery, settlement, 0);
			result = AFRESH_SETTLED;
		}
		record_failure(work, work->error);
		commit(engine);
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(engine->delivery_context);
		FlushErrorState();
		rollback(engine);
		result = AFRESH_FAILED;
	}
	PG_END_TRY();

	return result;
}

/*
 * Settle a delivery whose transaction has been rolled back: by its policy;
 * where that fails too (a dead letter whose id is there already, say), by
 * counting the attempt and letting the row come back; and where not even that
 * can be written, the row stays as it was.  Whatever comes back at once this
 * worker leaves alone for the retry delay.
 */
static void
settle_afresh(Work *work, rs_cause cause)
{
	RsEngine *engine = work->engine;
	const rs_table *table = &engine->subscription->queue.table;
	rs_policy uncapped = engine->subscription->policy;
	rs_settlement settlement = rs_settle(table, &engine->subscription->policy, cause,
										 RS_OUTCOME_ACK, false, work->delivery.attempt);
	Afresh result = try_afresh(work, &settlement);

	if (result == AFRESH_FAILED)
	{
		uncapped.max_attempts = 0;
		settlement = rs_settle(table, &uncapped, RS_CAUSE_ANSWER, rs_default_on_error(table), false,
							   work->delivery.attempt);
		result = try_afresh(work, &settlement);
	}
	if (result == AFRESH_FAILED)
	{
		(void) try_afresh(work, NULL);
		hold(engine, &work->delivery);
	}
	else if (settlement.outcome == RS_OUTCOME_RETRY)
		hold(engine, &work->delivery);

	report_failure(work);
	forget_transient_failures(engine);
	if (result == AFRESH_SETTLED)
		count_settlement(settlement.outcome, true);
	else
	{
		rs_stats_count(RS_COUNT_DELIVERIES);
		rs_stats_count(RS_COUNT_FAILED);
	}
}

/*
 * A transient failure has been rolled back.  The row is claimed anew, unless it
 * has had its share of them.
 */
static RsProgress
after_transient_failure(Work *work, Stage stage)
{
	RsEngine *engine = work->engine;
	const char *id = work->delivery.id_text;
	bool same_row =
		engine->transient_count > 0 &&
		(id == NULL ? engine->transient_id == NULL
					: engine->transient_id != NULL && strcmp(id, engine->transient_id) == 0);

	rs_stats_count(RS_COUNT_TRANSIENT);
	if (!same_row)
	{
		forget_transient_failures(engine);
		if (id != NULL)
			engine->transient_id = MemoryContextStrdup(engine->context, id);
	}
	if (++engine->transient_count < RS_TRANSIENT_LIMIT)
		return RS_PROGRESS_TRANSIENT;

	if (id == NULL)
	{
		/* The claim itself fails, of no row in particular: come back later. */
		forget_transient_failures(engine);
		return RS_PROGRESS_NOTHING;
	}
	settle_afresh(work, stage == STAGE_SETTLE ? RS_CAUSE_SETTLE_ERROR : RS_CAUSE_ERROR);
	return RS_PROGRESS_DELIVERED;
}

/*
 * An error outside the savepoint, or a transient one anywhere: everything is
 * rolled back already, and work->error says why.
 */
static RsProgress
recover(Work *work)
{
	if (is_transient(work->error))
		return after_transient_failure(work, work->stage);

	/* Without a row the subscription itself is at fault. */
	if (work->stage == STAGE_CLAIM)
		ReThrowError(work->error);
	/* A cancel is no failure; but what the handler has left goes all the same. */
	if (work->error->sqlerrcode == ERRCODE_QUERY_CANCELED && work->engine->session->rethrows_cancel)
	{
		work->engine->session->clean();
		ReThrowError(work->error);
	}

	rs_stats_count(RS_COUNT_SETTLE_FAILED);
	settle_afresh(work, RS_CAUSE_SETTLE_ERROR);
	return RS_PROGRESS_DELIVERED;
}

/* --------------------------------------------------------------- the lane */

static RsProgress
deliver_one(Work *work)
{
	RsEngine *engine = work->engine;
	MemoryContext outer_context = CurrentMemoryContext;
	ResourceOwner outer_owner = CurrentResourceOwner;
	bool claimed;

	MemoryContextSwitchTo(engine->delivery_context);
	RS_FAILPOINT("after_begin");
	claimed = claim(engine, &work->delivery);
	trace(engine, RS_STEP_CLAIM, claimed ? "1" : "0");
	if (!claimed)
	{
		commit(engine);
		return RS_PROGRESS_NOTHING;
	}
	RS_FAILPOINT("after_claim");
	if (is_held(engine, &work->delivery))
	{
		rollback(engine);
		return RS_PROGRESS_HELD;
	}

	/* Where there was one row there may be more: have a neighbour look. */
	rs_wake_idle(false);
	rs_wake_neighbour(engine->subscription->queue.relid);

	rs_stats_delivery_begin(&work->delivery);
	rs_stats_state(RS_WORKER_DELIVERING);
	MemoryContextSwitchTo(outer_context);
	handle(work);
	/*
	 * What cannot be left to the savepoint: raised again outside it, so that
	 * everything is rolled back.
	 */
	if (work->error != NULL &&
		(is_transient(work->error) ||
		 (work->error->sqlerrcode == ERRCODE_QUERY_CANCELED && engine->session->rethrows_cancel)))
		ReThrowError(work->error);
	MemoryContextSwitchTo(engine->delivery_context);
	finish(work, outer_context, outer_owner);
	return RS_PROGRESS_DELIVERED;
}

RsProgress
rs_deliver(RsEngine *engine)
{
	Work work = {.engine = engine};
	volatile RsProgress progress = RS_PROGRESS_QUIET;
	volatile bool lost = false;

	MemoryContextReset(engine->delivery_context);
	rs_stats_state(RS_WORKER_CLAIMING);

	PG_TRY();
	{
		if (begin_up_to_date(engine))
			progress = deliver_one(&work);
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(engine->delivery_context);
		work.error = CopyErrorData();
		FlushErrorState();
		rollback(engine);
		lost = true;
	}
	PG_END_TRY();

	if (lost)
		progress = recover(&work);
	MemoryContextSwitchTo(engine->context);
	rs_stats_delivery_end();
	if (progress == RS_PROGRESS_DELIVERED || progress == RS_PROGRESS_TRANSIENT)
		engine->session->clean();
	return progress;
}
