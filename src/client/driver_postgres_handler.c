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

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The state of the messages that our functions send. */
#define ANSWER_STATE "RS0UT"

/* What a handler is given, in the order of parameter_names. */
enum
{
	GIVEN_ID,
	GIVEN_PAYLOAD,
	GIVEN_ATTEMPT,
	GIVEN_HEADERS,
	GIVEN_COUNT
};

static const char *const parameter_names[GIVEN_COUNT] = {"id", "payload", "attempt", "headers"};

typedef struct statement
{
	char *text; /* with $1, $2, .. */
	int given[GIVEN_COUNT];
	int count;
	bool ends_transactions; /* or begins them */
} statement;

typedef struct rs_postgres_handler
{
	char *source;
	rs_arena arena;
	statement *statements;
	int count;
} rs_postgres_handler;

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

/* ---------------------------------------------------------------- reading */

static bool
is_word(char c)
{
	return isalnum((unsigned char) c) || c == '_' || (unsigned char) c >= 0x80;
}

/* Behind a quoted stretch that begins at text; a quote that is doubled goes on. */
static const char *
skip_quoted(const char *text, bool has_escapes)
{
	char quote = *text++;

	while (*text != '\0')
	{
		if (has_escapes && *text == '\\' && text[1] != '\0')
			text += 2;
		else if (*text == quote && text[1] == quote)
			text += 2;
		else if (*text++ == quote)
			break;
	}
	return text;
}

/* Comments within comments count. */
static const char *
skip_comment(const char *text)
{
	int depth = 0;

	if (text[0] == '-')
		return text + strcspn(text, "\n");
	while (*text != '\0')
	{
		if (text[0] == '/' && text[1] == '*')
		{
			depth++;
			text += 2;
		}
		else if (text[0] == '*' && text[1] == '/')
		{
			text += 2;
			if (--depth == 0)
				break;
		}
		else
			text++;
	}
	return text;
}

/* Behind $tag$ .. $tag$, or behind the one character where it is no such. */
static const char *
skip_dollars(const char *text)
{
	size_t tag = 1;
	const char *end;

	if (!isdigit((unsigned char) text[1]))
	{
		while (is_word(text[tag]))
			tag++;
	}
	if (text[tag] != '$')
		return text + 1;
	tag++;
	for (end = text + tag; *end != '\0'; end++)
	{
		if (strncmp(end, text, tag) == 0)
			return end + tag;
	}
	return end;
}

/*
 * Behind whatever begins here and is not to be looked into: strings, names in quotes, comments.
 * text itself where nothing of the kind does.
 */
static const char *
skip_opaque(const char *start, const char *text)
{
	bool in_word = text > start && is_word(text[-1]);

	if (*text == '\'')
	{
		bool has_escapes = text > start && (text[-1] == 'e' || text[-1] == 'E') &&
						   !(text - 1 > start && is_word(text[-2]));

		return skip_quoted(text, has_escapes);
	}
	if (*text == '"')
		return skip_quoted(text, false);
	if ((text[0] == '-' && text[1] == '-') || (text[0] == '/' && text[1] == '*'))
		return skip_comment(text);
	if (*text == '$' && !in_word)
		return skip_dollars(text);
	return text;
}

/* Which of its parameters is named here, behind a colon; -1: none. */
static int
parameter_at(const char *name, size_t *length)
{
	*length = 0;
	while (is_word(name[*length]))
		(*length)++;
	for (int i = 0; i < GIVEN_COUNT; i++)
	{
		if (strlen(parameter_names[i]) == *length && memcmp(name, parameter_names[i], *length) == 0)
			return i;
	}
	return -1;
}

/* The number that the statement gives a parameter, by first use. */
static int
number_of(statement *into, int given)
{
	for (int i = 0; i < into->count; i++)
	{
		if (into->given[i] == given)
			return i + 1;
	}
	into->given[into->count++] = given;
	return into->count;
}

/* The statement's first word is one of those that begin or end a transaction. */
static bool
controls_transactions(const char *text)
{
	static const char *const words[] = {"begin", "start", "commit", "end", "abort", "rollback"};
	size_t length = 0;

	while (is_word(text[length]))
		length++;
	for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
	{
		if (strlen(words[i]) == length && strncasecmp(text, words[i], length) == 0)
			return true;
	}
	return length == 7 && strncasecmp(text, "prepare", 7) == 0 &&
		   strncasecmp(text + 7 + strspn(text + 7, " \t\r\n"), "transaction", 11) == 0;
}

/* Behind space and comments. */
static const char *
skip_blank(const char *text)
{
	for (;;)
	{
		const char *next = text + strspn(text, " \t\r\n\f\v");

		if ((next[0] == '-' && next[1] == '-') || (next[0] == '/' && next[1] == '*'))
			next = skip_comment(next);
		if (next == text)
			return text;
		text = next;
	}
}

/*
 * Read the statement that begins at text into out, which has room for twice its length; returns
 * where it ends, behind its semicolon.
 */
static const char *
read_statement(const char *text, statement *into, char *out)
{
	const char *start = text;
	int depth = 0;

	into->text = out;
	into->ends_transactions = controls_transactions(text);
	while (*text != '\0' && !(*text == ';' && depth == 0))
	{
		const char *next = skip_opaque(start, text);
		size_t length;
		int given;

		if (next > text)
		{
			memcpy(out, text, (size_t) (next - text));
			out += next - text;
			text = next;
			continue;
		}
		depth += (*text == '(') - (*text == ')');
		if (text[0] == ':' && text[1] == ':')
		{
			*out++ = *text++;
			*out++ = *text++;
			continue;
		}
		given = text[0] == ':' ? parameter_at(text + 1, &length) : -1;
		if (given >= 0)
		{
			out += sprintf(out, "$%d", number_of(into, given));
			text += 1 + length;
			continue;
		}
		*out++ = *text++;
	}
	*out = '\0';
	return *text == ';' ? text + 1 : text;
}

/* Split a handler's text; false: out of memory. */
static bool
read_handler(rs_postgres_handler *handler)
{
	size_t size = strlen(handler->source) + 1;
	const char *text = skip_blank(handler->source);
	char *out = rs_alloc(&handler->arena, size * 2);
	int room = 1;

	for (const char *at = text; *at != '\0'; at++)
		room += *at == ';';
	handler->statements = rs_alloc(&handler->arena, sizeof(statement) * (size_t) room);
	if (out == NULL || handler->statements == NULL)
		return false;
	while (*text != '\0')
	{
		statement *next = &handler->statements[handler->count];

		if (*text == ';')
		{
			text = skip_blank(text + 1);
			continue;
		}
		text = skip_blank(read_statement(text, next, out));
		out += strlen(out) + 1;
		handler->count++;
	}
	return true;
}

static rs_postgres_handler *
new_handler(const char *source)
{
	rs_postgres_handler *handler = calloc(1, sizeof(rs_postgres_handler));

	if (handler == NULL)
		return NULL;
	handler->source = strdup(source);
	if (handler->source != NULL && read_handler(handler))
		return handler;
	rs_arena_free(&handler->arena);
	free(handler->source);
	free(handler);
	return NULL;
}

/* The handler, read already if it was the last one, too. */
static rs_postgres_handler *
handler_of(rs_postgres_session *session, const char *source)
{
	if (session->handler != NULL && strcmp(session->handler->source, source) == 0)
		return session->handler;
	rs_postgres_forget_handler(session);
	session->handler = new_handler(source);
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

/* The server reads a statement when it is prepared; what it is given is known only with a row. */
rs_result
rs_postgres_check_handler(rs_session *base, const char *source)
{
	rs_postgres_session *session = rs_postgres_of(base);
	const rs_postgres_handler *handler = handler_of(session, source);

	if (handler == NULL)
		return rs_postgres_no_memory(session);
	if (handler->count > 0)
		return RS_DONE;
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
	const char *values[GIVEN_COUNT];
	int lengths[GIVEN_COUNT];
	int formats[GIVEN_COUNT];
	Oid types[GIVEN_COUNT];
} given_values;

static rs_result
run_statement(rs_postgres_session *session, const statement *run, int n, const given_values *given)
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

/* Each in the type that its column has; numbers as their text. */
static void
give(rs_postgres_session *session, const ruststream_delivery *delivery, const rs_value *payload,
	 char attempt[32], given_values *given)
{
	(void) snprintf(attempt, 32, "%lld", (long long) delivery->attempt);
	*given = (given_values){
		.values = {[GIVEN_ID] = delivery->id,
				   [GIVEN_PAYLOAD] = delivery->payload,
				   [GIVEN_ATTEMPT] = attempt,
				   [GIVEN_HEADERS] = delivery->headers},
		.types = {[GIVEN_ID] = session->id_type,
				  [GIVEN_PAYLOAD] = session->payload_type,
				  [GIVEN_ATTEMPT] = RS_OID_INT4,
				  [GIVEN_HEADERS] = session->headers_type},
	};
	if (payload->kind == RS_BYTES)
	{
		given->lengths[GIVEN_PAYLOAD] = (int) delivery->payload_length;
		given->formats[GIVEN_PAYLOAD] = 1;
	}
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
		return RS_DONE;
	}
	if (result == RS_DONE && answer->undecodable)
		rs_error_set(&base->error, RUSTSTREAM_DATABASE, "", NULL, "%s",
					 answer->reason[0] != '\0' ? answer->reason : "the payload does not decode");
	return result;
}
