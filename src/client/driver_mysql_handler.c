/*-------------------------------------------------------------------------
 *
 * driver_mysql_handler.c
 *	  The driver for MySQL and MariaDB: handlers that are SQL.
 *
 * A handler is the name of a stored procedure, or one or more statements, separated by ";".
 * In statements :id, :payload, :attempt and :headers are the delivery's.  A procedure is called
 * with what its parameters are named after: id, payload, attempt, headers, and, to
 * answer, outcome, delay and reason.
 *
 * It answers in the variables @ruststream_outcome ('ack', 'retry', 'retry_after', 'discard',
 * 'dead_letter' or 'undecodable'; NULL is ack), @ruststream_delay (seconds) and @ruststream_reason,
 * which a procedure's parameters outcome, delay and reason are.  Whatever result sets it
 * returns are read to their end and dropped; an error among them, SIGNAL included, is
 * its failure.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_mysql.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* --------------------------------------------------------------- reading */

static const char *const argument_names[RS_ARGUMENT_COUNT] = {
	[RS_ARGUMENT_ID] = "id",
	[RS_ARGUMENT_PAYLOAD] = "payload",
	[RS_ARGUMENT_ATTEMPT] = "attempt",
	[RS_ARGUMENT_HEADERS] = "headers",
};

/* Part of a name that is not quoted. */
static bool
is_name(char character)
{
	return isalnum((unsigned char) character) || character == '_' || character == '$' ||
		   (unsigned char) character >= 0x80;
}

static bool
find_argument(const char *name, size_t length, rs_mysql_argument *argument)
{
	for (int i = 0; i < RS_ARGUMENT_COUNT; i++)
	{
		if (strlen(argument_names[i]) == length && memcmp(argument_names[i], name, length) == 0)
		{
			*argument = (rs_mysql_argument) i;
			return true;
		}
	}
	return false;
}

/* Behind a quoted text or a comment that begins here; the same place where none does. */
static const char *
skip_quoted(const char *at)
{
	char quote = *at;

	if (quote == '\'' || quote == '"' || quote == '`')
	{
		for (at++; *at != '\0'; at++)
		{
			if (*at == '\\' && quote != '`' && at[1] != '\0')
				at++;
			else if (*at == quote)
				return at + 1;
		}
		return at;
	}
	if (at[0] == '/' && at[1] == '*')
	{
		const char *end = strstr(at + 2, "*/");

		return end != NULL ? end + 2 : at + strlen(at);
	}
	if (at[0] == '#' ||
		(at[0] == '-' && at[1] == '-' && (at[2] == '\0' || isspace((unsigned char) at[2]))))
		return at + strcspn(at, "\n");
	return at;
}

/* A statement as it is prepared, with ? in its arguments' places. */
typedef struct reading
{
	char *text; /* as large as the handler */
	size_t length;
	rs_mysql_argument arguments[RS_MYSQL_MAX_ARGUMENTS];
	int argument_count;
	bool is_empty; /* space and comments */
} reading;

/* Read one statement and move behind it. */
static rs_result
read_statement(rs_mysql_session *session, const char **cursor, reading *into)
{
	const char *at = *cursor;

	into->length = 0;
	into->argument_count = 0;
	into->is_empty = true;
	while (*at != '\0' && *at != ';')
	{
		const char *end = skip_quoted(at);

		if (end == at && at[0] == ':' && is_name(at[1]))
		{
			rs_mysql_argument argument;

			for (end = at + 1; is_name(*end);)
				end++;
			if (!find_argument(at + 1, (size_t) (end - at - 1), &argument))
				return rs_mysql_refuse(session, "It may name :id, :payload, :attempt and :headers.",
									   "the handler names \"%.*s\"", (int) (end - at), at);
			if (into->argument_count == RS_MYSQL_MAX_ARGUMENTS)
				return rs_mysql_refuse(session, "Have a stored procedure do it.",
									   "a statement of the handler names more than %d values",
									   RS_MYSQL_MAX_ARGUMENTS);
			into->arguments[into->argument_count++] = argument;
			into->text[into->length++] = '?';
			at = end;
			continue;
		}
		if (end == at)
		{
			into->is_empty = into->is_empty && isspace((unsigned char) *at);
			end = at + 1;
		}
		else
			into->is_empty = into->is_empty && strchr("/#-", *at) != NULL;
		memcpy(into->text + into->length, at, (size_t) (end - at));
		into->length += (size_t) (end - at);
		at = end;
	}
	*cursor = *at == ';' ? at + 1 : at;
	return RS_DONE;
}

/* ------------------------------------------------------------ procedures */

/* "name" or "schema.name", and nothing else; quoted by backticks or not. */
static bool
is_procedure_name(const char *text)
{
	int parts = 0;

	for (;;)
	{
		const char *end = *text == '`' ? skip_quoted(text) : text;

		while (*text != '`' && is_name(*end))
			end++;
		if (end == text || ++parts > 2)
			return false;
		if (*end == '\0')
			return true;
		if (*end != '.')
			return false;
		text = end + 1;
	}
}

/* One part of such a name, without its quotes; moves behind it. */
static void
unquote(const char **cursor, char *name, size_t size)
{
	const char *at = *cursor;
	const char *end = *at == '`' ? skip_quoted(at) : at + strcspn(at, ".");
	size_t length = 0;

	if (*at == '`')
		at++;
	for (; at < end && *at != '\0' && length + 1 < size; at++)
	{
		if (*at == '`' && (at + 1 == end || at[1] != '`'))
			break;
		if (*at == '`')
			at++;
		name[length++] = *at;
	}
	name[length] = '\0';
	*cursor = *end == '.' ? end + 1 : end;
}

typedef struct call
{
	char text[2048];
	size_t length;
	int count;
	char stranger[128]; /* the first parameter that names nothing */
	bool is_there;
} call;

/* The parameter's name: NULL where the procedure has none. */
static bool
add_parameter(void *arg, const rs_value *columns, int count)
{
	static const char *const answers[] = {"outcome", "delay", "reason"};
	call *into = arg;
	char name[128];
	const char *value = NULL;
	bool is_answer = false;

	(void) count;
	into->is_there = true;
	if (columns[0].kind == RS_NULL)
		return false;
	(void) snprintf(name, sizeof(name), "%.*s", (int) columns[0].length, columns[0].text);
	for (size_t i = 0; i < sizeof(answers) / sizeof(answers[0]); i++)
	{
		if (strcasecmp(name, answers[i]) == 0)
		{
			value = answers[i];
			is_answer = true;
		}
	}
	for (int i = 0; i < RS_ARGUMENT_COUNT; i++)
	{
		if (strcasecmp(name, argument_names[i]) == 0)
			value = argument_names[i];
	}
	if (value == NULL)
	{
		memcpy(into->stranger, name, sizeof(name));
		return false;
	}
	into->length +=
		(size_t) snprintf(into->text + into->length, sizeof(into->text) - into->length, "%s%s%s",
						  into->count++ > 0 ? ", " : "", is_answer ? "@ruststream_" : ":", value);
	return into->length < sizeof(into->text) - 8;
}

/* The CALL of a procedure, by the names of its parameters; *text is to be freed. */
static rs_result
make_call(rs_mysql_session *session, const char *handler, char **text)
{
	static const rs_command command = {
		.text = "SELECT p.PARAMETER_NAME FROM information_schema.ROUTINES AS r"
				" LEFT JOIN information_schema.PARAMETERS AS p"
				" ON p.SPECIFIC_SCHEMA = r.ROUTINE_SCHEMA AND p.SPECIFIC_NAME = r.SPECIFIC_NAME"
				" AND p.ROUTINE_TYPE = 'PROCEDURE'"
				" WHERE r.ROUTINE_SCHEMA = COALESCE(?, DATABASE()) AND r.ROUTINE_NAME = ?"
				" AND r.ROUTINE_TYPE = 'PROCEDURE' ORDER BY p.ORDINAL_POSITION",
		.slot = -1};
	call into = {.count = 0};
	char schema[256];
	char name[256];
	const char *cursor = handler;
	rs_value values[2];
	rs_result result;

	unquote(&cursor, schema, sizeof(schema));
	unquote(&cursor, name, sizeof(name));
	values[0] = name[0] != '\0' ? rs_value_of_text(schema) : RS_VALUE_NULL;
	values[1] = rs_value_of_text(name[0] != '\0' ? name : schema);
	if (strlen(handler) > 600)
		return rs_mysql_refuse(session, NULL, "the name of the procedure is too long");
	into.length = (size_t) snprintf(into.text, sizeof(into.text), "CALL %s(", handler);
	result = rs_mysql_execute(&session->base, &command, values, 2, add_parameter, &into, NULL);
	if (result != RS_DONE)
		return result;
	if (!into.is_there)
	{
		rs_error_set(&session->base.error, RUSTSTREAM_REFUSED, "",
					 "Make it, or grant EXECUTE on it; SQL text is written as statements.",
					 "there is no procedure \"%.200s\"", handler);
		return RS_FAILED;
	}
	if (into.stranger[0] != '\0')
		return rs_mysql_refuse(
			session,
			"Name parameters after what they take (id, payload, attempt, headers) "
			"or answer (outcome, delay, reason), or write the CALL out.",
			"nothing is known for parameter \"%s\" of procedure \"%s\"", into.stranger, handler);
	(void) snprintf(into.text + into.length, sizeof(into.text) - into.length, ")");
	*text = strdup(into.text);
	return *text != NULL ? RS_DONE : rs_mysql_no_memory(session);
}

/* ------------------------------------------------------------- preparing */

void
rs_mysql_forget_handler(rs_mysql_session *session)
{
	for (int i = 0; i < session->handler_count; i++)
		rs_mysql_drop(&session->handler_statements[i].statement);
	session->handler_count = 0;
	free(session->handler);
	session->handler = NULL;
}

/* Read the statements; prepares: and keep them.  What is not the first may need what the first
 * does. */
static rs_result
read_handler(rs_mysql_session *session, const char *handler, bool prepares)
{
	char *called = NULL;
	reading into = {.text = NULL};
	const char *cursor = handler;
	int count = 0;
	rs_result result = RS_DONE;

	if (is_procedure_name(handler))
	{
		result = make_call(session, handler, &called);
		cursor = called;
	}
	if (result == RS_DONE)
	{
		into.text = malloc(strlen(cursor) + 1);
		if (into.text == NULL)
			result = rs_mysql_no_memory(session);
	}
	while (result == RS_DONE && *cursor != '\0')
	{
		rs_mysql_handler_statement *kept = &session->handler_statements[count];

		result = read_statement(session, &cursor, &into);
		if (result != RS_DONE || into.is_empty)
			continue;
		if (count == RS_MYSQL_MAX_HANDLER_STATEMENTS)
		{
			result = rs_mysql_refuse(session, "Have a stored procedure do it.",
									 "the handler has more than %d statements",
									 RS_MYSQL_MAX_HANDLER_STATEMENTS);
			continue;
		}
		into.text[into.length] = '\0';
		count++;
		if (!prepares)
		{
			rs_mysql_statement tried = {0};

			if (count == 1)
				result = rs_mysql_prepare(session, &tried, into.text, into.length);
			rs_mysql_drop(&tried);
			continue;
		}
		kept->statement.text = strdup(into.text);
		memcpy(kept->arguments, into.arguments, sizeof(kept->arguments));
		kept->argument_count = into.argument_count;
		session->handler_count = count;
		if (kept->statement.text == NULL)
			result = rs_mysql_no_memory(session);
	}
	if (result == RS_DONE && count == 0)
		result = rs_mysql_refuse(session, "Write at least one statement.", "the handler is empty");
	free(into.text);
	free(called);
	return result;
}

rs_result
rs_mysql_check_handler(rs_session *base, const char *handler)
{
	rs_result result = read_handler(rs_mysql_of(base), handler, false);

	if (result == RS_FAILED)
		base->error.code = RUSTSTREAM_REFUSED;
	return result;
}

/* Have its statements, each of which is prepared when it is first come to. */
static rs_result
take_up(rs_mysql_session *session, const char *handler)
{
	rs_result result;

	if (session->handler != NULL && strcmp(session->handler, handler) == 0)
		return RS_DONE;
	rs_mysql_forget_handler(session);
	result = read_handler(session, handler, true);
	if (result == RS_DONE)
	{
		session->handler = strdup(handler);
		if (session->handler == NULL)
			result = rs_mysql_no_memory(session);
	}
	if (result != RS_DONE)
		rs_mysql_forget_handler(session);
	return result;
}

/* --------------------------------------------------------------- running */

/* All its result sets, row by row: none is kept, and no error among them is missed. */
static rs_result
drain(rs_mysql_session *session, MYSQL_STMT *prepared)
{
	int code;

	do
	{
		if (mysql_stmt_field_count(prepared) > 0)
		{
			while ((code = mysql_stmt_fetch(prepared)) == 0 || code == MYSQL_DATA_TRUNCATED)
				continue;
			if (code == 1)
				return rs_mysql_fail_statement(session, prepared);
			(void) mysql_stmt_free_result(prepared);
		}
		code = mysql_stmt_next_result(prepared);
	} while (code == 0);
	return code > 0 ? rs_mysql_fail_statement(session, prepared) : RS_DONE;
}

static rs_result
run_statement(rs_mysql_session *session, rs_mysql_handler_statement *statement,
			  const rs_value given[RS_ARGUMENT_COUNT])
{
	rs_value values[RS_MYSQL_MAX_ARGUMENTS];
	rs_result result = RS_DONE;

	if (statement->statement.prepared == NULL)
	{
		char *text = statement->statement.text;

		statement->statement.text = NULL;
		result = rs_mysql_prepare(session, &statement->statement, text, strlen(text));
		if (result != RS_DONE)
			statement->statement.text = text;
		else
			free(text);
	}
	for (int i = 0; i < statement->argument_count; i++)
		values[i] = given[statement->arguments[i]];
	if (result == RS_DONE)
		result = rs_mysql_bind(session, &statement->statement, values, statement->argument_count);
	if (result != RS_DONE)
		return result;
	if (mysql_stmt_execute(statement->statement.prepared) != 0)
		return rs_mysql_fail_statement(session, statement->statement.prepared);
	return drain(session, statement->statement.prepared);
}

static rs_result
run_handler(rs_mysql_session *session, const rs_value given[RS_ARGUMENT_COUNT])
{
	rs_result result = RS_DONE;

	for (int n = 0; n < session->handler_count && result == RS_DONE; n++)
		result = run_statement(session, &session->handler_statements[n], given);
	return result;
}

/* -------------------------------------------------------------- answers */

typedef struct read_answer
{
	rs_mysql_session *session;
	rs_answer *answer;
	bool is_read;
	bool is_set;
	bool needs_set_up;
} read_answer;

/* outcome, delay in microseconds, reason, settings */
static bool
take_answer(void *arg, const rs_value *columns, int count)
{
	read_answer *into = arg;
	rs_answer *answer = into->answer;
	char outcome[32] = "";

	(void) count;
	into->is_read = true;
	into->is_set =
		columns[0].kind != RS_NULL || columns[1].kind != RS_NULL || columns[2].kind != RS_NULL;
	into->needs_set_up = columns[3].kind == RS_NULL ||
						 strlen(into->session->settings) != columns[3].length ||
						 memcmp(into->session->settings, columns[3].text, columns[3].length) != 0;
	if (columns[2].kind != RS_NULL)
		(void) snprintf(answer->reason, sizeof(answer->reason), "%.*s", (int) columns[2].length,
						columns[2].text);
	if (columns[0].kind == RS_NULL)
		return false;
	(void) snprintf(outcome, sizeof(outcome), "%.*s", (int) columns[0].length, columns[0].text);
	if (strcmp(outcome, "undecodable") == 0)
	{
		answer->failed = answer->undecodable = true;
		rs_error_set(&into->session->base.error, RUSTSTREAM_DATABASE, "", NULL, "%s",
					 answer->reason[0] != '\0' ? answer->reason : "the payload does not decode");
		return false;
	}
	if (!rs_outcome_find(outcome, &answer->outcome))
	{
		answer->failed = true;
		rs_error_set(&into->session->base.error, RUSTSTREAM_DATABASE, "22023",
					 "Outcomes are ack, retry, retry_after, discard, dead_letter and undecodable.",
					 "the handler answered \"%s\", which is no outcome", outcome);
		return false;
	}
	if (answer->outcome != RS_OUTCOME_RETRY_AFTER || columns[1].kind == RS_NULL)
		return false;
	answer->has_delay = true;
	answer->delay = columns[1].integer;
	if (columns[1].kind != RS_INTEGER || columns[1].integer < 0)
	{
		answer->failed = true;
		rs_error_set(
			&into->session->base.error, RUSTSTREAM_DATABASE, "22023",
			"The delay is a number of seconds.",
			"the handler answered retry_after with a negative delay, or with what is none");
	}
	return false;
}

#define FORGET_ANSWER                                                                              \
	"SET @ruststream_outcome = NULL, @ruststream_delay = NULL, @ruststream_reason = NULL"

/* One question for the answer and for the session's settings; a text that is no number is 0 in
 * sums. */
static rs_result
ask(rs_mysql_session *session, read_answer *into)
{
	char text[1024];
	const rs_command command = {.text = text, .slot = RS_MYSQL_SLOT_ANSWER};

	(void) snprintf(text, sizeof(text),
					"SELECT @ruststream_outcome, IF(@ruststream_delay IS NULL OR "
					"CAST(@ruststream_delay AS CHAR) REGEXP '^ *[0-9.]+(e[+-]?[0-9]+)? *$', "
					"CAST(@ruststream_delay * 1000000 AS SIGNED), -1), @ruststream_reason, %s",
					rs_mysql_settings(session));
	return rs_mysql_execute(&session->base, &command, NULL, 0, take_answer, into, NULL);
}

/*
 * Settings that our statements rely on are put right at once, and before anything else where they
 * keep even the question from being answered: how long a statement may take, how many rows it
 * returns.
 */
static rs_result
ask_answer(rs_mysql_session *session, rs_answer *answer)
{
	read_answer into = {.session = session, .answer = answer};
	rs_result result = ask(session, &into);

	if (result == RS_FAILED || (result == RS_DONE && !into.is_read))
	{
		session->needs_set_up = true;
		result = rs_mysql_set_up(session, false);
		if (result == RS_DONE)
			result = ask(session, &into);
	}
	if (result == RS_DONE && into.is_set)
		result = rs_mysql_run(session, FORGET_ANSWER);
	if (result == RS_DONE && into.needs_set_up)
	{
		session->needs_set_up = true;
		result = rs_mysql_set_up(session, false);
	}
	return result;
}

/* Has the handler ended the transaction that it ran in?  Its writes would not be the delivery's. */
static rs_result
check_transaction(rs_mysql_session *session)
{
	bool is_open = (session->db->server_status & SERVER_STATUS_IN_TRANS) != 0;
	rs_result result = RS_DONE;

	if (is_open && session->has_savepoint)
		result = rs_mysql_run(session, "RELEASE SAVEPOINT ruststream_claim");
	if (is_open && session->has_savepoint && result == RS_DONE)
		session->has_savepoint = false;
	if (is_open && (result != RS_FAILED || session->code != RS_MYSQL_NO_SUCH_SAVEPOINT_OR_ROUTINE))
		return result;
	rs_error_set(&session->base.error, RUSTSTREAM_DATABASE, "2D000",
				 "A handler works inside its delivery's transaction, which is not its to end: no "
				 "COMMIT or ROLLBACK, and no statement that commits, such as CREATE TABLE.",
				 "the handler has ended its delivery's transaction");
	return RS_FAILED;
}

rs_result
rs_mysql_check_writes(rs_session *base)
{
	return check_transaction(rs_mysql_of(base));
}

/* A handler that is in no transaction of ours leaves none of its own open. */
static rs_result
check_after(rs_mysql_session *session, bool transactional, const rs_answer *answer)
{
	rs_result result;

	if (session->in_transaction)
		return transactional || answer->failed ? RS_DONE : check_transaction(session);
	if ((session->db->server_status & SERVER_STATUS_IN_TRANS) == 0)
		return RS_DONE;
	result = rs_mysql_run(session, "ROLLBACK");
	if (result != RS_DONE)
		return result;
	rs_error_set(&session->base.error, RUSTSTREAM_DATABASE, "25000",
				 "It is not transactional, so what it begins is its to end.",
				 "the handler has left a transaction open");
	return RS_FAILED;
}

/* What a failed handler has set is put right all the same; what it has answered is nothing. */
static rs_result
after_failure(rs_mysql_session *session, rs_answer *answer)
{
	rs_error error = session->base.error;
	rs_answer unread = {.failed = false};
	rs_result result;

	/* Its procedure may have other parameters by now, or its statements be stale. */
	rs_mysql_forget_handler(session);
	answer->failed = true;
	result = session->in_transaction ? RS_DONE : rs_mysql_run(session, "ROLLBACK");
	if (result == RS_DONE)
		result = ask_answer(session, &unread);
	session->base.error = error;
	return result == RS_FAILED ? RS_DONE : result;
}

rs_result
rs_mysql_call_handler(rs_session *base, const char *handler, const ruststream_delivery *delivery,
					  const rs_value *id, const rs_value *payload, bool transactional,
					  rs_answer *answer)
{
	rs_mysql_session *session = rs_mysql_of(base);
	const rs_value given[RS_ARGUMENT_COUNT] = {
		[RS_ARGUMENT_ID] = *id,
		[RS_ARGUMENT_PAYLOAD] = *payload,
		[RS_ARGUMENT_ATTEMPT] = rs_value_of_integer(delivery->attempt),
		[RS_ARGUMENT_HEADERS] = rs_value_of_text(delivery->headers),
	};
	rs_result result = take_up(session, handler);

	*answer = (rs_answer){.outcome = RS_OUTCOME_ACK};
	/* What a failed one has left is not the next one's answer. */
	if (result == RS_DONE && session->has_answer)
		result = rs_mysql_run(session, FORGET_ANSWER);
	if (result == RS_DONE)
	{
		session->may_be_open = true;
		session->has_answer = true;
		result = run_handler(session, given);
	}
	if (result == RS_FAILED)
		return after_failure(session, answer);
	if (result == RS_DONE)
		result = ask_answer(session, answer);
	if (result == RS_DONE)
	{
		session->has_answer = false;
		result = check_after(session, transactional, answer);
	}
	if (result == RS_FAILED)
	{
		answer->failed = true;
		answer->undecodable = false;
		return RS_DONE;
	}
	return result;
}
