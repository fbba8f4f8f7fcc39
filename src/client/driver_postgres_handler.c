/*-------------------------------------------------------------------------
 *
 * driver_postgres_handler.c
 *	  The PostgreSQL driver: handlers that are SQL, and how they answer.
 *
 * A handler is one or more statements.  :id, :payload, :attempt and :headers are parameters of the
 * types that their columns have.  It answers by the functions that `ruststream install` makes
 * (ruststream_retry_after(30) and its like, schema_postgres.sql), wherever it calls them:
 * they send an INFO message with a state of its own, which comes with the statement's result and
 * needs no further question.  The last answer counts, and none at all is ack.
 *
 * Where the extension is installed, too, a statement that returns one row with a
 * ruststream.outcome answers by that, so that its handlers may be called from here:
 * SELECT app.send_email(:payload).
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_postgres.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The state of the messages that our functions send. */
#define ANSWER_STATE "RS0UT"

void
rs_postgres_forget_handler(rs_postgres_session *session)
{
	if (session->handler == NULL)
		return;
	rs_arena_free(&session->handler->arena);
	free(session->handler->source);
	free(session->handler);
	session->handler = NULL;
}

/* The handler, read already if it was the last one, too. */
static rs_postgres_handler *
handler_of(rs_postgres_session *session, const char *source)
{
	if (session->handler != NULL && strcmp(session->handler->source, source) == 0)
		return session->handler;
	rs_postgres_forget_handler(session);
	session->handler = rs_postgres_read_handler(source);
	return session->handler;
}

bool
rs_postgres_ends_transactions(rs_postgres_session *session, const char *source)
{
	const rs_postgres_handler *handler = handler_of(session, source);

	for (int i = 0; handler != NULL && i < handler->count; i++)
	{
		if (handler->statements[i].ends_transactions)
			return true;
	}
	return false;
}

/*
 * Have the server read the first statement; what a later one needs an earlier may make.  The types
 * of what it is given are known only with a row, so of a statement that is given something only
 * that counts which does not depend on them.
 */
static rs_result
prepare_first(rs_postgres_session *session, const rs_postgres_statement *first)
{
	static const char *const decisive[] = {
		"42601", /* a syntax error */
		"42P01", /* no such table */
		"42703", /* no such column */
		"3F000"  /* no such schema */
	};
	PGresult *prepared = PQprepare(session->connection, "", first->text, 0, NULL);
	const char *state = PQresultErrorField(prepared, PG_DIAG_SQLSTATE);
	bool counts =
		PQresultStatus(prepared) != PGRES_COMMAND_OK && (first->count == 0 || state == NULL);
	rs_result result = RS_DONE;

	for (size_t i = 0; state != NULL && i < sizeof(decisive) / sizeof(decisive[0]); i++)
		counts = counts || strcmp(state, decisive[i]) == 0;
	if (counts)
	{
		result = rs_postgres_fail(session, prepared);
		if (result == RS_FAILED)
			session->base.error.code = RUSTSTREAM_REFUSED;
	}
	PQclear(prepared);
	return result;
}

rs_result
rs_postgres_check_handler(rs_session *base, const char *source)
{
	rs_postgres_session *session = rs_postgres_of(base);
	const rs_postgres_handler *handler = handler_of(session, source);

	if (handler == NULL)
		return rs_postgres_no_memory(session);
	if (handler->count > 0)
		return prepare_first(session, &handler->statements[0]);
	rs_error_set(&base->error, RUSTSTREAM_REFUSED, "", "Write at least one statement.",
				 "the handler is empty");
	return RS_FAILED;
}

/* ---------------------------------------------------------------- answers */

/* "outcome", or "outcome microseconds"; "undecodable" is a word of its own. */
static void
take_answer(rs_answer *answer, const char *words, const char *reason)
{
	const char *space = strchr(words, ' ');
	char word[32];

	*answer = (rs_answer){.outcome = RS_OUTCOME_ACK};
	(void) snprintf(answer->reason, sizeof(answer->reason), "%s", reason);
	(void) snprintf(word, sizeof(word), "%.*s",
					(int) (space != NULL ? (size_t) (space - words) : strlen(words)), words);
	if (strcmp(word, "undecodable") == 0)
		answer->failed = answer->undecodable = true;
	else
		(void) rs_outcome_find(word, &answer->outcome);
	if (space != NULL)
	{
		answer->has_delay = true;
		answer->delay = strtoll(space + 1, NULL, 10);
	}
}

void
rs_postgres_receive(void *arg, const PGresult *message)
{
	rs_postgres_session *session = arg;
	const char *state = PQresultErrorField(message, PG_DIAG_SQLSTATE);
	const char *words = PQresultErrorField(message, PG_DIAG_MESSAGE_DETAIL);
	const char *reason = PQresultErrorField(message, PG_DIAG_MESSAGE_PRIMARY);

	if (session->answer != NULL && state != NULL && strcmp(state, ANSWER_STATE) == 0 &&
		words != NULL)
		take_answer(session->answer, words, reason != NULL ? reason : "");
}

/* The type of the extension's outcomes; 0 where it is not installed. */
static rs_result
find_outcome_type(rs_postgres_session *session)
{
	PGresult *result;
	rs_result code;

	if (session->asked_for_outcome_type)
		return RS_DONE;
	result = rs_postgres_send(
		session,
		"SELECT t.oid FROM pg_catalog.pg_type AS t JOIN pg_catalog.pg_namespace AS n"
		" ON n.oid OPERATOR(pg_catalog.=) t.typnamespace"
		" WHERE n.nspname OPERATOR(pg_catalog.=) 'ruststream'"
		" AND t.typname OPERATOR(pg_catalog.=) 'outcome'",
		-1, 0, NULL, NULL, NULL, NULL, false, &code);
	if (result == NULL)
		return code;
	session->outcome_type =
		PQntuples(result) == 1 ? (Oid) strtoul(PQgetvalue(result, 0, 0), NULL, 10) : 0;
	session->asked_for_outcome_type = true;
	PQclear(result);
	return RS_DONE;
}

/*
 * A field of a composite value's text, which begins behind "(" or ",", into out; *is_null where it
 * is empty.  Returns where it ends.
 */
static const char *
read_field(const char *text, char *out, size_t size, bool *is_null)
{
	size_t length = 0;
	bool quoted = false;

	*is_null = *text == ',' || *text == ')' || *text == '\0';
	for (; *text != '\0' && (quoted || (*text != ',' && *text != ')')); text++)
	{
		char c = *text;

		if (c == '"' && quoted && text[1] == '"')
			text++;
		else if (c == '"')
		{
			quoted = !quoted;
			continue;
		}
		else if (c == '\\' && text[1] != '\0')
			c = *++text;
		if (length + 1 < size)
			out[length++] = c;
	}
	out[length] = '\0';
	return *text == ',' ? text + 1 : text;
}

/* An interval, as the session's settings write it, in microseconds. */
static rs_result
read_interval(rs_postgres_session *session, const char *text, int64_t *microseconds)
{
	rs_result code;
	PGresult *result =
		rs_postgres_send(session,
						 "SELECT (pg_catalog.date_part('epoch', $1::pg_catalog.interval)"
						 " OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8",
						 -1, 1, NULL, &text, NULL, NULL, false, &code);

	if (result == NULL)
		return code;
	*microseconds = strtoll(PQgetvalue(result, 0, 0), NULL, 10);
	if (*microseconds < 0)
		*microseconds = 0;
	PQclear(result);
	return RS_DONE;
}

/* The extension's outcome: (action,delay,reason). */
static rs_result
take_outcome(rs_postgres_session *session, const PGresult *result)
{
	rs_answer *answer = session->answer;
	char action[32] = "";
	char delay[128] = "";
	bool has_none;
	bool has_no_delay;
	bool has_no_reason;
	const char *text = PQgetvalue(result, 0, 0);

	*answer = (rs_answer){.outcome = RS_OUTCOME_ACK};
	if (*text == '(')
		text = read_field(text + 1, action, sizeof(action), &has_none);
	if (PQgetisnull(result, 0, 0) || !rs_outcome_find(action, &answer->outcome))
	{
		answer->failed = true;
		rs_error_set(&session->base.error, RUSTSTREAM_DATABASE, "22004",
					 "Answer an outcome such as ruststream.ack().",
					 "the handler answered NULL instead of an outcome");
		return RS_DONE;
	}
	text = read_field(text, delay, sizeof(delay), &has_no_delay);
	(void) read_field(text, answer->reason, sizeof(answer->reason), &has_no_reason);
	if (has_no_delay)
		return RS_DONE;
	answer->has_delay = true;
	return read_interval(session, delay, &answer->delay);
}

/* ---------------------------------------------------------------- running */

/* A COPY has nobody at the other end. */
static rs_result
refuse_copy(rs_postgres_session *session, PGresult *result)
{
	PGconn *connection = session->connection;
	char *line = NULL;

	if (PQresultStatus(result) == PGRES_COPY_IN)
		(void) PQputCopyEnd(connection, "a handler has no input");
	else
	{
		while (PQgetCopyData(connection, &line, 0) > 0)
			PQfreemem(line);
	}
	PQclear(result);
	while ((result = PQgetResult(connection)) != NULL)
		PQclear(result);
	rs_error_set(&session->base.error, RUSTSTREAM_DATABASE, "0A000",
				 "Let COPY read or write a file of the server, or use INSERT or SELECT.",
				 "a handler cannot COPY from or to its client");
	return PQstatus(connection) == CONNECTION_BAD ? RS_LOST : RS_FAILED;
}

typedef struct given_values
{
	const char *values[RS_GIVEN_COUNT];
	int lengths[RS_GIVEN_COUNT];
	int formats[RS_GIVEN_COUNT];
	Oid types[RS_GIVEN_COUNT];
} given_values;

static rs_result
run_statement(rs_postgres_session *session, const rs_postgres_statement *run, int n,
			  const given_values *given)
{
	given_values bound;
	PGresult *result;
	rs_result code;

	for (int i = 0; i < run->count; i++)
	{
		bound.values[i] = given->values[run->given[i]];
		bound.lengths[i] = given->lengths[run->given[i]];
		bound.formats[i] = given->formats[run->given[i]];
		bound.types[i] = given->types[run->given[i]];
	}
	if (run->ends_transactions && session->in_transaction)
	{
		rs_error_set(&session->base.error, RUSTSTREAM_DATABASE, "2D000",
					 "A handler works inside its delivery's transaction, which is not its to end: "
					 "answer an outcome instead.",
					 "a handler must not begin or end a transaction");
		return RS_FAILED;
	}
	result = rs_postgres_send(
		session, run->text, n < RS_MAX_HANDLER_STATEMENTS ? RS_SLOT_HANDLER + n : -1, run->count,
		bound.types, bound.values, bound.lengths, bound.formats, false, &code);
	if (result == NULL)
		return code;
	if (PQresultStatus(result) == PGRES_COPY_IN || PQresultStatus(result) == PGRES_COPY_OUT)
		return refuse_copy(session, result);
	if (PQntuples(result) == 1 && PQnfields(result) == 1 && session->outcome_type != 0 &&
		PQftype(result, 0) == session->outcome_type)
		code = take_outcome(session, result);
	PQclear(result);
	return code;
}

/* Each in the type that its column has; numbers as their text.  A batch has no id: it is JSON. */
static void
give(rs_postgres_session *session, const ruststream_delivery *delivery, const rs_value *payload,
	 char attempt[32], given_values *given)
{
	(void) snprintf(attempt, 32, "%lld", (long long) delivery->attempt);
	*given = (given_values){
		.values = {[RS_GIVEN_ID] = delivery->id,
				   [RS_GIVEN_PAYLOAD] = delivery->payload,
				   [RS_GIVEN_ATTEMPT] = delivery->id != NULL ? attempt : NULL,
				   [RS_GIVEN_HEADERS] = delivery->headers},
		.types = {[RS_GIVEN_ID] = session->id_type,
				  [RS_GIVEN_PAYLOAD] =
					  delivery->id != NULL ? session->payload_type : (Oid) RS_OID_JSONB,
				  [RS_GIVEN_ATTEMPT] = RS_OID_INT4,
				  [RS_GIVEN_HEADERS] = session->headers_type},
	};
	if (payload->kind == RS_BYTES)
	{
		given->lengths[RS_GIVEN_PAYLOAD] = (int) delivery->payload_length;
		given->formats[RS_GIVEN_PAYLOAD] = 1;
	}
}

const char *
rs_postgres_left_open(rs_session *base)
{
	const rs_postgres_session *session = rs_postgres_of(base);
	PGTransactionStatusType status = PQtransactionStatus(session->connection);

	return !session->in_transaction && (status == PQTRANS_INTRANS || status == PQTRANS_INERROR)
			   ? "25000"
			   : NULL;
}

rs_result
rs_postgres_call_handler(rs_session *base, const char *source, const ruststream_delivery *delivery,
						 const rs_value *id, const rs_value *payload, bool transactional,
						 rs_answer *answer)
{
	rs_postgres_session *session = rs_postgres_of(base);
	const rs_postgres_handler *handler = handler_of(session, source);
	given_values given;
	char attempt[32];
	rs_result result =
		handler != NULL ? find_outcome_type(session) : rs_postgres_no_memory(session);

	(void) id;
	(void) transactional;
	*answer = (rs_answer){.outcome = RS_OUTCOME_ACK};
	if (result != RS_DONE)
		return result;
	give(session, delivery, payload, attempt, &given);
	session->answer = answer;
	session->needs_reset = true;
	session->was_reset = false;
	for (int i = 0; i < handler->count && result == RS_DONE; i++)
		result = run_statement(session, &handler->statements[i], i, &given);
	session->answer = NULL;
	if (result == RS_FAILED)
	{
		answer->failed = true;
		answer->undecodable = false;
		return RS_DONE;
	}
	if (result == RS_DONE && answer->undecodable)
		rs_error_set(&base->error, RUSTSTREAM_DATABASE, "", NULL, "%s",
					 answer->reason[0] != '\0' ? answer->reason : "the payload does not decode");
	return result;
}
