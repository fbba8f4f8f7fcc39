/*-------------------------------------------------------------------------
 *
 * settlement.c
 *	  Carrying a settlement out, and telling of it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/delivery.h"

#include "common/pg_prng.h"
#include "utils/builtins.h"

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
 * Nothing was changed.  May that be: is the row not there any more, or not
 * there for us?  In the lease form "not for us" is the normal case, and its
 * lease is lost.  In the others a row that its handler has ended is ended,
 * where that is what was to be written, or what the handler wrote is kept.
 */
static bool
is_gone(RsEngine *engine, const rs_settlement *settlement, const RsValues *values)
{
	bool may_be_gone = settlement->outcome == RS_OUTCOME_ACK ||
					   !engine->subscription->policy.transactional ||
					   rs_table_form(&engine->subscription->queue.table) == RS_FORM_LEASE;

	return may_be_gone && rs_execute(engine->plans, RS_OP_UNSETTLED, values) == 0;
}

void
rs_set_reason(RsWork *work)
{
	work->delivery.reason = work->error != NULL ? work->error->message : work->answer.reason;
	work->delivery.sqlstate = work->error != NULL ? work->error->sqlerrcode : 0;
}

bool
rs_settle_delivery(RsEngine *engine, RsDelivery *delivery, const rs_settlement *settlement,
				   int64 given_delay)
{
	const RsSubscription *subscription = engine->subscription;
	const rs_policy *policy = &subscription->policy;
	RsValues values;
	int64 rows;
	uint64 generation;

	rs_trace_step(engine, RS_STEP_SETTLE, rs_outcome_word(settlement->outcome));
	rs_stop_lease(delivery);
	rs_delivery_values(subscription, delivery, &values);
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

	if (settlement->outcome == RS_OUTCOME_DEAD_LETTER)
		rs_value_set(
			&values, RS_PARAM_ORIGIN,
			rs_origin(subscription, delivery, DatumGetTimestampTz(values.value[RS_PARAM_NOW])), 0);

	generation = rs_catalog_generation();
	rows = rs_execute(engine->plans, settlement->operation, &values);
	/* The queue is locked by the claim, but where a row moves to may have changed. */
	if (settlement->operation == RS_OP_MOVE_TABLE && generation != rs_catalog_generation())
		ereport(ERROR, errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				errmsg("the dead-letter table of subscription \"%s\" changed as row %s moved",
					   subscription->name, delivery->id_text));
	if (rows == 0)
	{
		if (!is_gone(engine, settlement, &values))
			report_unsettled(delivery);
		if (rs_table_form(&subscription->queue.table) == RS_FORM_LEASE)
			return false;
	}
	RS_FAILPOINT("after_settle");
	return true;
}

ErrorData *
rs_lacking_dead_letter(const RsEngine *engine, const char *reason)
{
	MemoryContext save = MemoryContextSwitchTo(engine->delivery_context);
	ErrorData *error = palloc0(sizeof(ErrorData));

	error->sqlerrcode = ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE;
	error->message = psprintf("the handler answered dead_letter, but subscription \"%s\" has none",
							  engine->subscription->name);
	if (reason != NULL)
		error->detail = psprintf("Its reason: %s", reason);
	error->hint = psprintf("ruststream.alter_subscription(%s, dead_letter => ..) gives it one.",
						   quote_literal_cstr(engine->subscription->name));
	MemoryContextSwitchTo(save);
	return error;
}

void
rs_record_failure(RsWork *work)
{
	ErrorData answered = {.sqlerrcode = ERRCODE_SUCCESSFUL_COMPLETION};
	const ErrorData *failure = work->error;

	if (failure == NULL)
	{
		if (work->answer.reason == NULL || work->answer.outcome == RS_OUTCOME_ACK)
			return;
		answered.message = work->answer.reason;
		answered.context = psprintf("answered %s", rs_outcome_word(work->answer.outcome));
		failure = &answered;
	}
	rs_failure_record(work->engine->subscription, &work->delivery, failure);
	work->engine->has_recorded_failures = true;
}

void
rs_report_failure(const RsWork *work)
{
	const RsEngine *engine = work->engine;

	if (work->is_told)
		return;
	ereport(engine->session->trace_level == NOTICE ? WARNING : LOG,
			errcode(work->error->sqlerrcode),
			work->batch != NULL
				? errmsg("subscription \"%s\": delivery of %d rows, from row %s on, failed: %s",
						 engine->subscription->name, work->delivery.rows, work->delivery.id_text,
						 work->error->message)
				: errmsg("subscription \"%s\": delivery of row %s failed (attempt " INT64_FORMAT
						 "): %s",
						 engine->subscription->name, work->delivery.id_text, work->delivery.attempt,
						 work->error->message),
			work->error->detail ? errdetail_internal("%s", work->error->detail) : 0,
			work->error->hint ? errhint("%s", work->error->hint) : 0, errhidestmt(true),
			errhidecontext(true));
}

void
rs_warn_of_lacks(const RsEngine *engine, const rs_settlement *settlement,
				 const RsDelivery *delivery)
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

void
rs_count_settlement(rs_outcome outcome, bool failed)
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
 * A row that failed and comes back at once comes back to others; this worker
 * leaves it alone for a while.
 */
void
rs_hold_if_hot(RsEngine *engine, const RsDelivery *delivery, const rs_settlement *settlement)
{
	if (settlement->outcome == RS_OUTCOME_RETRY)
		rs_claim_hold(engine, delivery);
}
