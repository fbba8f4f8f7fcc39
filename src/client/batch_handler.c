/*-------------------------------------------------------------------------
 *
 * batch_handler.c
 *	  The handler of a batch: what it is given, and what it has answered.
 *
 * A callback gets the deliveries.  A program gets an object in JSON for each row, on a line of its
 * standard input; SQL gets an array of these as :payload, and answers one outcome for all:
 *
 *		{"id":"17","attempt":1,"headers":{"trace":"a"},"payload":"..."}
 *
 * The payload is a string; where the subscription has it decoded as JSON it is that; where it is no
 * UTF-8 text, "payload_base64" is there instead.  With exit status 0 a program answers all rows by
 * printing nothing, or each of them by a line, in the order of the rows:
 *
 *		ack | retry [reason] | retry_after [seconds] [reason] | discard [reason] |
 *		dead_letter [reason] | undecodable [reason] | fail [reason]
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"
#include "client/failpoint.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------- rows as JSON */

static void
write_string(FILE *out, const char *text, size_t length)
{
	fputc('"', out);
	for (size_t i = 0; i < length; i++)
	{
		unsigned char c = (unsigned char) text[i];

		if (c == '"' || c == '\\')
			fprintf(out, "\\%c", c);
		else if (c < 0x20)
			fprintf(out, "\\u%04x", c);
		else
			fputc(c, out);
	}
	fputc('"', out);
}

/* What is JSON already, on one line: within a string there is no end of a line. */
static void
write_json(FILE *out, const char *text, size_t length)
{
	for (size_t i = 0; i < length; i++)
		fputc(text[i] == '\n' || text[i] == '\r' ? ' ' : text[i], out);
}

static void
write_base64(FILE *out, const unsigned char *bytes, size_t length)
{
	static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

	for (size_t i = 0; i < length; i += 3)
	{
		size_t left = length - i;
		unsigned n = (unsigned) bytes[i] << 16 | (left > 1 ? (unsigned) bytes[i + 1] << 8 : 0) |
					 (left > 2 ? bytes[i + 2] : 0);

		fputc(digits[n >> 18], out);
		fputc(digits[n >> 12 & 63], out);
		fputc(left > 1 ? digits[n >> 6 & 63] : '=', out);
		fputc(left > 2 ? digits[n & 63] : '=', out);
	}
}

static bool
is_json(const char *text, size_t length)
{
	json_t *parsed =
		rs_is_utf8(text, length)
			? json_loadb(text, length, JSON_DECODE_ANY | JSON_ALLOW_NUL, &(json_error_t){0})
			: NULL;

	json_decref(parsed);
	return parsed != NULL;
}

static void
write_row(FILE *out, const rs_work *row)
{
	const ruststream_delivery *delivery = &row->delivery;
	const char *headers = delivery->headers;

	fputs("{\"id\":", out);
	write_string(out, delivery->id, strlen(delivery->id));
	fprintf(out, ",\"attempt\":%lld,\"headers\":", (long long) delivery->attempt);
	if (headers != NULL && is_json(headers, strlen(headers)))
		write_json(out, headers, strlen(headers));
	else
		fputs("null", out);
	if (delivery->payload == NULL)
		fputs(",\"payload\":null}", out);
	else if (row->worker->plan.decode == RS_DECODE_JSON)
	{
		fputs(",\"payload\":", out);
		write_json(out, delivery->payload, delivery->payload_length);
		fputc('}', out);
	}
	else if (rs_is_utf8(delivery->payload, delivery->payload_length) &&
			 memchr(delivery->payload, 0, delivery->payload_length) == NULL)
	{
		fputs(",\"payload\":", out);
		write_string(out, delivery->payload, delivery->payload_length);
		fputc('}', out);
	}
	else
	{
		fputs(",\"payload_base64\":\"", out);
		write_base64(out, delivery->payload, delivery->payload_length);
		fputs("\"}", out);
	}
}

/* The rows that the handler is given, to be freed; NULL: out of memory. */
static char *
rows_as_json(const rs_batch *batch, const char *begin, const char *between, const char *end,
			 size_t *length)
{
	char *text = NULL;
	FILE *out = open_memstream(&text, length);
	bool failed;

	if (out == NULL)
		return NULL;
	for (int i = 0; i < batch->given_count; i++)
	{
		fputs(i == 0 ? begin : between, out);
		write_row(out, batch->given[i]);
	}
	fputs(end, out);
	failed = ferror(out) != 0;
	failed |= fclose(out) != 0;
	if (!failed)
		return text;
	free(text);
	return NULL;
}

/* ------------------------------------------------------------- its answers */

void
ruststream_answer(ruststream_delivery *delivery, ruststream_outcome outcome)
{
	rs_work *row = (rs_work *) ((char *) delivery - offsetof(rs_work, delivery));

	(void) rs_take_outcome(&row->answer, outcome);
	row->is_answered = true;
}

/* The call has failed as a whole. */
static void
fail_call(rs_batch *batch, const char *hint, const char *message)
{
	rs_session *session = batch->call.worker->handle->session;

	batch->call.answer.failed = true;
	rs_error_set(&session->error, RUSTSTREAM_DATABASE, "", hint, "%s", message);
}

static rs_result
call_callback(rs_batch *batch)
{
	ruststream_worker *worker = batch->call.worker;
	rs_session *session = worker->handle->session;
	rs_result result = RS_FAILED;
	ruststream_outcome outcome;

	worker->handle->in_handler = true;
	outcome =
		worker->batch_handler(batch->deliveries, (size_t) batch->given_count, worker->handler_arg);
	worker->handle->in_handler = false;
	if (rs_take_outcome(&batch->call.answer, outcome))
		return RS_DONE;
	if (outcome == RUSTSTREAM_UNDECODABLE)
	{
		/* Like any other, it is the answer of those that have none of their own. */
		batch->call.answer.failed = false;
		return RS_DONE;
	}
	if (outcome == RUSTSTREAM_FAIL && session->driver->judge_failure != NULL)
		result = session->driver->judge_failure(session);
	if (result != RS_FAILED)
		return result;
	fail_call(batch, NULL,
			  outcome == RUSTSTREAM_FAIL ? "the handler failed"
										 : "the handler answered no outcome");
	return RS_DONE;
}

/* The next line of a text, without spaces around it, which is cut off and moved behind; NULL: none.
 */
static char *
next_line(char **text)
{
	char *line = *text + strspn(*text, " \t");
	char *end = line + strcspn(line, "\n");

	if (*line == '\0')
		return NULL;
	*text = *end != '\0' ? end + 1 : end;
	while (end > line && strchr(" \t\r\n", end[-1]) != NULL)
		end--;
	*end = '\0';
	return line;
}

/* "word", "word reason", or "retry_after seconds reason"; false: it is no outcome. */
static bool
read_line(char *line, rs_answer *answer)
{
	char *rest = line + strcspn(line, " \t");
	bool is_fail;

	if (*rest != '\0')
		*rest++ = '\0';
	rest += strspn(rest, " \t");
	is_fail = strcmp(line, "fail") == 0;
	answer->undecodable = strcmp(line, "undecodable") == 0;
	answer->failed = is_fail || answer->undecodable;
	if (!answer->failed && !rs_outcome_find(line, &answer->outcome))
		return false;
	if (!answer->failed && answer->outcome == RS_OUTCOME_RETRY_AFTER)
		rest = rs_program_delay(rest, answer);
	(void) snprintf(answer->reason, sizeof(answer->reason), "%s", rest);
	return true;
}

/* What a program has printed: nothing, or an outcome for each row. */
static void
read_lines(rs_batch *batch, char *output)
{
	static const char hint[] = "Print one outcome for each row, in the order of the rows and each "
							   "on a line of its own, or nothing at all.";
	char message[256];
	char *line;
	int count = 0;

	while ((line = next_line(&output)) != NULL)
	{
		if (count < batch->given_count && !read_line(line, &batch->given[count]->answer))
		{
			(void) snprintf(message, sizeof(message),
							"the program's answer to row %.80s is no outcome: \"%.80s\"",
							batch->given[count]->delivery.id, line);
			fail_call(batch, hint, message);
			return;
		}
		if (count < batch->given_count)
			batch->given[count]->is_answered = true;
		count++;
	}
	if (count == 0 || count == batch->given_count)
		return;
	(void) snprintf(message, sizeof(message), "the program answered %d outcomes for %d rows", count,
					batch->given_count);
	fail_call(batch, hint, message);
}

static rs_result
call_program(rs_batch *batch)
{
	rs_work *call = &batch->call;
	ruststream_worker *worker = call->worker;
	rs_program_batch io = {.rows = batch->given_count};
	char *input = rows_as_json(batch, "", "\n", "\n", &io.length);

	if (input == NULL)
	{
		fail_call(batch, NULL, "out of memory");
		return RS_DONE;
	}
	io.input = input;
	rs_program_run(worker->plan.subscription.program, &call->delivery, &io, &worker->watch,
				   &call->answer, &worker->handle->session->error);
	free(input);
	if (io.output != NULL)
		read_lines(batch, io.output);
	free(io.output);
	return RS_DONE;
}

/* The delivery has no id, which says that the payload is an array in JSON, whatever its column is.
 */
static rs_result
call_sql(rs_batch *batch, bool in_transaction)
{
	rs_work *call = &batch->call;
	rs_session *session = call->worker->handle->session;
	const rs_value none = RS_VALUE_NULL;
	size_t length;
	char *rows = rows_as_json(batch, "[", ",", "]", &length);
	const rs_value payload = rs_value_of_text(rows);
	const ruststream_delivery delivery = {.handle = call->worker->handle,
										  .subscription = call->delivery.subscription,
										  .queue = call->delivery.queue,
										  .payload = rows,
										  .payload_length = length,
										  .connection = session->driver->native(session)};
	rs_result result = RS_DONE;

	if (rows == NULL)
		fail_call(batch, NULL, "out of memory");
	else
		result = session->driver->call_handler(session, call->worker->plan.subscription.handler,
											   &delivery, &none, &payload, in_transaction,
											   &call->answer);
	free(rows);
	return result;
}

/* ----------------------------------------------------------------- calling */

static rs_result
call_handler(rs_batch *batch)
{
	ruststream_worker *worker = batch->call.worker;
	rs_session *session = worker->handle->session;
	const rs_driver *driver = session->driver;
	bool in_transaction = rs_table_form(&worker->plan.table) == RS_FORM_ROW_LOCK;
	rs_result result;

	worker->has_handled = true;
	if (worker->batch_handler == NULL && worker->plan.subscription.handler != NULL)
		result = call_sql(batch, in_transaction);
	else
	{
		for (int i = 0; i < batch->given_count; i++)
			batch->given[i]->delivery.connection = driver->native(session);
		if (driver->guard_handler != NULL)
			driver->guard_handler(session, true, in_transaction);
		result = worker->batch_handler != NULL ? call_callback(batch) : call_program(batch);
		if (driver->guard_handler != NULL)
			driver->guard_handler(session, false, in_transaction);
	}
	return in_transaction || result != RS_DONE ? result
											   : rs_check_left(session, &batch->call.answer);
}

/* Each row's answer: its own, or the one for all; a failure of the whole is each row's. */
static void
hand_out_answers(rs_batch *batch)
{
	const rs_work *call = &batch->call;

	for (int i = 0; i < batch->given_count; i++)
	{
		rs_work *row = batch->given[i];

		if (call->has_error)
		{
			row->answer = call->answer;
			row->error = call->error;
			row->has_error = true;
			row->is_told = true;
			continue;
		}
		if (!row->is_answered)
		{
			/* A callback may have given it a delay, or a reason, all the same. */
			row->answer.outcome = call->answer.outcome;
			row->answer.undecodable = call->answer.undecodable;
			row->answer.failed = call->answer.undecodable;
			if (call->answer.has_delay)
			{
				row->answer.has_delay = true;
				row->answer.delay = call->answer.delay;
			}
			if (row->answer.reason[0] == '\0')
				memcpy(row->answer.reason, call->answer.reason, sizeof(row->answer.reason));
		}
		rs_make_utf8(row->answer.reason);
		if (row->answer.failed)
			rs_work_fail(row, "", NULL, "%s",
						 row->answer.reason[0] != '\0' ? row->answer.reason
						 : row->answer.undecodable     ? "the handler could not decode the payload"
													   : "the handler failed");
	}
}

rs_result
rs_handle_batch(rs_batch *batch)
{
	rs_work *call = &batch->call;
	ruststream_worker *worker = call->worker;
	rs_session *session = worker->handle->session;
	bool timed_out = false;
	rs_result result = RS_DONE;

	rs_worker_trace(worker, RS_STEP_HANDLER, "");
	if (!rs_watch_handler_begins(&worker->watch, session, worker->plan.timeout))
	{
		rs_work_fail(call, "", NULL, "no thread could be started to watch the handler");
		hand_out_answers(batch);
		return RS_DONE;
	}
	result = call_handler(batch);
	rs_watch_handler_ended(&worker->watch, &timed_out);
	RS_FAILPOINT("after_handler");

	if (atomic_load(&worker->interrupts))
		return RS_DONE; /* whatever it came to: the rows are given back */
	if (timed_out)
	{
		call->answer = (rs_answer){.failed = true};
		rs_work_fail(call, "57014", NULL, "the handler was cancelled after its timeout of %lld ms",
					 (long long) (worker->plan.timeout / RS_MILLISECOND));
		hand_out_answers(batch);
		return result == RS_LOST ? RS_LOST : RS_DONE;
	}
	if (result != RS_DONE)
		return result;
	if (!call->answer.failed && rs_table_form(&worker->plan.table) == RS_FORM_ROW_LOCK &&
		session->driver->check_writes != NULL)
	{
		/* What it has written is the handler's to answer for, and not a row's settlement's. */
		result = session->driver->check_writes(session);
		if (result != RS_DONE && result != RS_FAILED)
			return result;
		call->answer.failed = result == RS_FAILED;
		call->answer.undecodable &= result != RS_FAILED;
	}
	if (call->answer.failed)
	{
		call->error = session->error;
		call->has_error = true;
	}
	hand_out_answers(batch);
	return RS_DONE;
}
