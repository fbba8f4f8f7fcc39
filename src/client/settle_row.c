/*-------------------------------------------------------------------------
 *
 * settle_row.c
 *	  Carrying a settlement out, and telling of it.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <stdlib.h>
#include <string.h>

void
rs_stop_lease(rs_work *work)
{
	if (!work->holds_lease)
		return;
	rs_watch_stop(&work->worker->watch, work->lease_number, work->token, work->announced);
	work->holds_lease = false;
}

void
rs_values_of(rs_work *work, rs_value values[RS_PARAM_COUNT])
{
	const rs_subscription *subscription = &work->worker->plan.subscription;
	bool counted = rs_table_form(&work->worker->plan.table) != RS_FORM_ROW_LOCK;

	for (int i = 0; i < RS_PARAM_COUNT; i++)
		values[i] = RS_VALUE_NULL;
	values[RS_PARAM_ID] = work->id;
	values[RS_PARAM_GROUP] = rs_value_of_text(subscription->group_name);
	values[RS_PARAM_DEAD_GROUP] = rs_value_of_text(subscription->dead_letter);
	/* What the row holds now. */
	values[RS_PARAM_ATTEMPT] = rs_value_of_integer(work->attempt + (counted ? 1 : 0));
	values[RS_PARAM_KEY] = rs_value_of_text(work->key);
	if (work->token[0] != '\0')
		values[RS_PARAM_TOKEN] = rs_value_of_text(work->token);
	if (work->announced[0] != '\0')
		values[RS_PARAM_ANNOUNCED] = rs_value_of_text(work->announced);
	else
		values[RS_PARAM_ANNOUNCED] = values[RS_PARAM_TOKEN];
}

/* How long the row is to wait, in microseconds. */
static int64_t
delay_of(const rs_work *work, const rs_settlement *settlement)
{
	const rs_policy *policy = &work->worker->plan.policy;

	if (settlement->delay_is_given)
		return work->answer.delay;
	return rs_backoff_delay(policy->backoff, policy->retry_delay, policy->max_retry_delay,
							work->attempt, rs_random());
}

static bool
is_there(void *arg, const rs_value *columns, int count)
{
	(void) columns;
	(void) count;
	*(bool *) arg = true;
	return false;
}

/*
 * Nothing was changed.  May that be: is the row not there any more, or not there for us?  In the
 * lease form "not for us" is the normal case.  In the others a row that its handler has ended is
 * ended, where that is what was to be written, or what the handler wrote is kept.
 */
static rs_settled
judge_nothing(rs_work *work, const rs_settlement *settlement, const rs_value *values,
			  rs_result *result)
{
	ruststream_worker *worker = work->worker;
	rs_session *session = worker->handle->session;
	bool is_lease = rs_table_form(&worker->plan.table) == RS_FORM_LEASE;
	bool may_be_gone =
		settlement->outcome == RS_OUTCOME_ACK || !worker->plan.policy.transactional || is_lease;
	bool found = false;

	*result =
		rs_plan_run(session, &worker->plan, RS_OP_UNSETTLED, 0, values, is_there, &found, NULL);
	if (*result != RS_DONE)
		return RS_SETTLED_FAILED;
	if (found || !may_be_gone)
	{
		*result = RS_FAILED;
		rs_error_set(&session->error, RUSTSTREAM_DATABASE, "55000",
					 "A trigger of the table may keep it from being ended or changed.",
					 "the settlement of row %s changed nothing", work->delivery.id);
		return RS_SETTLED_FAILED;
	}
	return is_lease ? RS_SETTLED_LOST : RS_SETTLED;
}

rs_settled
rs_settle_row(rs_work *work, const rs_settlement *settlement, rs_result *result)
{
	ruststream_worker *worker = work->worker;
	rs_session *session = worker->handle->session;
	rs_value values[RS_PARAM_COUNT];
	char now_text[RS_TIME_SIZE + 8];
	char until[RS_TIME_SIZE + 8];
	bool is_delayed = settlement->outcome == RS_OUTCOME_RETRY_AFTER;
	bool has_origin = settlement->outcome == RS_OUTCOME_DEAD_LETTER &&
					  worker->plan.table.column[RS_ROLE_HEADERS] != NULL;
	int64_t now = 0;
	int64_t found = 1;
	int count = rs_plan_count(&worker->plan, settlement->operation);

	rs_worker_trace(worker, RS_STEP_SETTLE, rs_outcome_word(settlement->outcome));
	rs_stop_lease(work);
	rs_values_of(work, values);
	/* A row that is deleted asks for no time. */
	if (is_delayed || has_origin ||
		rs_plan_takes(&worker->plan, settlement->operation, RS_PARAM_NOW))
	{
		*result = session->driver->now(session, &now);
		if (*result != RS_DONE)
			return RS_SETTLED_FAILED;
		session->driver->format_time(now, false, now_text);
		values[RS_PARAM_NOW] = rs_value_of_text(now_text);
		if (is_delayed)
		{
			int64_t delay = delay_of(work, settlement);

			session->driver->format_time(delay > INT64_MAX - now ? INT64_MAX : now + delay, false,
										 until);
			values[RS_PARAM_UNTIL] = rs_value_of_text(until);
		}
	}
	if (has_origin && !rs_origin(work, now, &values[RS_PARAM_ORIGIN]))
	{
		rs_error_set(&session->error, RUSTSTREAM_NO_MEMORY, "", NULL, "out of memory");
		*result = RS_FAILED;
		return RS_SETTLED_FAILED;
	}
	for (int i = 0; i < count; i++)
	{
		*result = rs_plan_run(session, &worker->plan, settlement->operation, i, values, NULL, NULL,
							  &found);
		if (*result != RS_DONE)
			return RS_SETTLED_FAILED;
	}
	return found == 0 ? judge_nothing(work, settlement, values, result) : RS_SETTLED;
}

rs_result
rs_record_failure(rs_work *work)
{
	rs_session *session = work->worker->handle->session;
	bool answered = !work->has_error && work->answer.outcome != RS_OUTCOME_ACK &&
					work->answer.reason[0] != '\0';
	char at[RS_TIME_SIZE + 8];
	rs_result result;

	if (!work->has_error && !answered)
		return RS_DONE;
	result = rs_now_text(session, at);
	if (result == RS_DONE)
	{
		const rs_value values[] = {
			rs_value_of_text(at),
			rs_value_of_text(work->worker->name),
			rs_value_of_text(work->worker->plan.subscription.queue),
			rs_value_of_text(work->delivery.id),
			rs_value_of_integer(work->attempt),
			rs_value_of_text(answered ? "00000" : work->error.state),
			rs_value_of_text(answered ? work->answer.reason : work->error.message),
			rs_value_of_text(work->has_error && work->error.hint[0] != '\0' ? work->error.hint
																			: NULL),
		};

		result = rs_catalog(session, RS_CATALOG_FAILURE_INSERT, values,
							(int) (sizeof(values) / sizeof(values[0])), NULL, NULL, NULL);
	}
	return result;
}

void
rs_report(rs_work *work)
{
	if (work->is_told)
		return;
	rs_tell(work->worker->handle,
			"subscription \"%s\": delivery of row %s failed (attempt %lld): %s%s%s",
			work->worker->name, work->delivery.id, (long long) work->attempt, work->error.message,
			work->error.hint[0] != '\0' ? ". " : "", work->error.hint);
}

void
rs_count_settlement(rs_work *work, const rs_settlement *settlement)
{
	static const int counter[RS_OUTCOME_COUNT] = {
		[RS_OUTCOME_ACK] = RS_COUNT_ACKED,
		[RS_OUTCOME_RETRY] = RS_COUNT_RETRIED,
		[RS_OUTCOME_RETRY_AFTER] = RS_COUNT_DELAYED,
		[RS_OUTCOME_DISCARD] = RS_COUNT_DISCARDED,
		[RS_OUTCOME_DEAD_LETTER] = RS_COUNT_DEAD_LETTERED,
	};

	if (settlement != NULL)
		work->worker->counts[counter[settlement->outcome]]++;
	if (work->has_error)
	{
		work->worker->counts[RS_COUNT_FAILED]++;
		work->worker->failed++;
	}
}

/* ------------------------------------------------------- rows left alone */

static void
let_go(rs_held *held, int n)
{
	if (held->ids[n].kind == RS_TEXT || held->ids[n].kind == RS_BYTES)
		free((char *) held->ids[n].text);
	held->count--;
	memmove(&held->ids[n], &held->ids[n + 1], sizeof(rs_value) * (size_t) (held->count - n));
	memmove(&held->until[n], &held->until[n + 1], sizeof(int64_t) * (size_t) (held->count - n));
}

int64_t
rs_let_go(ruststream_worker *worker, int64_t now)
{
	rs_held *held = &worker->held;
	int64_t next = INT64_MAX;

	for (int n = held->count - 1; n >= 0; n--)
	{
		if (held->until[n] <= now)
			let_go(held, n);
		else if (held->until[n] < next)
			next = held->until[n];
	}
	return next;
}

/*
 * A row that failed and comes back at once comes back to others; this worker leaves it alone for
 * the retry delay.  Of too many such rows the one that has waited longest is let go.
 */
void
rs_hold(rs_work *work)
{
	ruststream_worker *worker = work->worker;
	rs_held *held = &worker->held;
	rs_value id = work->id;

	if (id.kind == RS_TEXT || id.kind == RS_BYTES)
	{
		char *text = malloc(id.length + 1);

		if (text == NULL)
			return;
		memcpy(text, id.text, id.length);
		text[id.length] = '\0';
		id.text = text;
	}
	if (held->count == RS_MAX_HELD)
		let_go(held, 0);
	held->ids[held->count] = id;
	held->until[held->count] = rs_monotonic() + worker->plan.policy.retry_delay;
	held->count++;
}
