/*-------------------------------------------------------------------------
 *
 * handle.c
 *	  The handler's part of a delivery: decoding what it gets, calling it, and
 *	  telling a failure of its own from what is more than that.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"
#include "client/failpoint.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

bool
rs_decode_payload(rs_work *work)
{
	rs_decode wanted = work->worker->plan.decode;
	const char *payload = work->delivery.payload;
	size_t length = work->delivery.payload_length;
	json_error_t problem;
	json_t *parsed;

	if (wanted == RS_DECODE_ANY)
		return true;
	if (payload == NULL)
	{
		rs_work_fail(work, "", NULL, "the payload is NULL");
		return false;
	}
	if (!rs_is_utf8(payload, length))
	{
		rs_work_fail(work, "", NULL, "the payload is not UTF-8");
		return false;
	}
	if (wanted == RS_DECODE_TEXT)
		return true;
	parsed = json_loadb(payload, length, JSON_DECODE_ANY | JSON_ALLOW_NUL, &problem);
	if (parsed == NULL)
	{
		rs_work_fail(work, "", NULL, "the payload is not JSON: %s", problem.text);
		return false;
	}
	json_decref(parsed);
	return true;
}

void
ruststream_delay(ruststream_delivery *delivery, int64_t delay)
{
	rs_work *work = (rs_work *) ((char *) delivery - offsetof(rs_work, delivery));

	work->answer.has_delay = true;
	work->answer.delay = delay <= 0                           ? 0
						 : delay > INT64_MAX / RS_MILLISECOND ? INT64_MAX
															  : delay * RS_MILLISECOND;
}

void
ruststream_reason(ruststream_delivery *delivery, const char *reason)
{
	rs_work *work = (rs_work *) ((char *) delivery - offsetof(rs_work, delivery));

	(void) snprintf(work->answer.reason, sizeof(work->answer.reason), "%s",
					reason != NULL ? reason : "");
}

bool
ruststream_is_cancelled(const ruststream_delivery *delivery)
{
	const rs_work *work = (const rs_work *) ((const char *) delivery - offsetof(rs_work, delivery));

	return rs_watch_is_cancelled(&work->worker->watch);
}

bool
rs_take_outcome(rs_answer *answer, ruststream_outcome outcome)
{
	static const rs_outcome outcomes[] = {
		[RUSTSTREAM_ACK] = RS_OUTCOME_ACK,
		[RUSTSTREAM_RETRY] = RS_OUTCOME_RETRY,
		[RUSTSTREAM_RETRY_AFTER] = RS_OUTCOME_RETRY_AFTER,
		[RUSTSTREAM_DISCARD] = RS_OUTCOME_DISCARD,
		[RUSTSTREAM_DEAD_LETTER] = RS_OUTCOME_DEAD_LETTER,
	};

	answer->undecodable = outcome == RUSTSTREAM_UNDECODABLE;
	answer->failed = (unsigned) outcome >= sizeof(outcomes) / sizeof(outcomes[0]);
	if (!answer->failed)
		answer->outcome = outcomes[outcome];
	return !answer->failed;
}

static rs_result
call_callback(rs_work *work)
{
	rs_session *session = work->worker->handle->session;
	ruststream_outcome answer;
	const char *reason = work->answer.reason;
	rs_result result = RS_FAILED;

	work->delivery.handle->in_handler = true;
	answer = work->worker->handler(&work->delivery, work->worker->handler_arg);
	work->delivery.handle->in_handler = false;
	if (rs_take_outcome(&work->answer, answer))
		return RS_DONE;
	if (answer == RUSTSTREAM_FAIL && session->driver->judge_failure != NULL)
		result = session->driver->judge_failure(session);
	if (result != RS_FAILED)
		return result;
	if (reason[0] == '\0')
		reason = answer == RUSTSTREAM_UNDECODABLE ? "the handler could not decode the payload"
				 : answer == RUSTSTREAM_FAIL      ? "the handler failed"
												  : "the handler answered no outcome";
	rs_error_set(&session->error, RUSTSTREAM_DATABASE, "", NULL, "%s", reason);
	return RS_DONE;
}

rs_result
rs_check_left(rs_session *session, rs_answer *answer)
{
	const char *state = session->driver->left_open(session);
	rs_error said = session->error;

	if (state == NULL)
		return RS_DONE;
	if (session->driver->rollback(session) == RS_LOST)
		return RS_LOST;
	session->error = said;
	if (answer->failed)
		return RS_DONE;
	answer->failed = true;
	answer->undecodable = false;
	rs_error_set(&session->error, RUSTSTREAM_DATABASE, state,
				 "It is not transactional, so what it begins is its to end.",
				 "the handler has left a transaction open");
	return RS_DONE;
}

/* Whichever handler it is; what it does wrong is in the answer. */
static rs_result
call_handler(rs_work *work)
{
	ruststream_worker *worker = work->worker;
	rs_session *session = worker->handle->session;
	const rs_driver *driver = session->driver;
	bool transactional = worker->plan.policy.transactional;
	rs_result result = RS_DONE;

	work->delivery.connection = driver->native(session);
	if (worker->handler == NULL && worker->plan.subscription.handler != NULL)
		result = driver->call_handler(session, worker->plan.subscription.handler, &work->delivery,
									  &work->id, &work->payload, transactional, &work->answer);
	else
	{
		if (driver->guard_handler != NULL)
			driver->guard_handler(session, true, transactional);
		if (worker->handler != NULL)
			result = call_callback(work);
		else
			rs_program_run(worker->plan.subscription.program, &work->delivery, NULL, &worker->watch,
						   &work->answer, &session->error);
		if (driver->guard_handler != NULL)
			driver->guard_handler(session, false, transactional);
	}
	return transactional || result != RS_DONE ? result : rs_check_left(session, &work->answer);
}

static bool
keeps_writes(const rs_work *work)
{
	return !work->has_error && !work->answer.failed &&
		   (work->answer.outcome == RS_OUTCOME_ACK || !work->worker->plan.policy.transactional);
}

rs_result
rs_handle(rs_work *work)
{
	ruststream_worker *worker = work->worker;
	rs_session *session = worker->handle->session;
	bool transactional = worker->plan.policy.transactional;
	bool timed_out = false;
	rs_result result;

	if (!rs_decode_payload(work))
	{
		work->answer.undecodable = true;
		return RS_DONE;
	}
	rs_worker_trace(worker, RS_STEP_HANDLER, "");
	if (!rs_watch_begin(&worker->watch, session, &work->id,
						work->token[0] != '\0' ? work->token : NULL, worker->plan.lease,
						worker->plan.timeout))
	{
		rs_work_fail(work, "", NULL, "no thread could be started to watch the handler");
		return RS_DONE;
	}
	work->holds_lease = work->token[0] != '\0';
	worker->has_handled = true;
	result = call_handler(work);
	rs_make_utf8(work->answer.reason);
	rs_watch_handler_ended(&worker->watch, &timed_out);
	RS_FAILPOINT("after_handler");

	if (atomic_load(&worker->interrupts))
		return RS_DONE; /* whatever it came to: the row is given back */
	if (timed_out)
	{
		rs_work_fail(work, "57014", NULL, "the handler was cancelled after its timeout of %lld ms",
					 (long long) (worker->plan.timeout / RS_MILLISECOND));
		return result == RS_LOST ? RS_LOST : RS_DONE;
	}
	if (result != RS_DONE)
		return result;
	if (work->answer.failed)
	{
		work->error = session->error;
		work->has_error = true;
	}
	else if (transactional && keeps_writes(work) && session->driver->check_writes != NULL)
	{
		result = session->driver->check_writes(session);
		if (result != RS_FAILED)
			return result;
		work->error = session->error;
		work->has_error = true;
		result = RS_DONE;
	}
	return result;
}
