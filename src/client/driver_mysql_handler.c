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

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/*
 * MySQL prepares no statement that begins a transaction or a savepoint, among others; MariaDB
 * does.  Without parameters it is run as text: none of these returns more than one result.
 */
static bool
is_unpreparable(const rs_mysql_session *session, rs_result result, int argument_count)
{
	return result == RS_FAILED && session->code == RS_MYSQL_UNPREPARABLE && argument_count == 0;
}

/* Read the statements; prepares: and keep them.  What is not the first may need what the first
 * does. */
static rs_result
read_handler(rs_mysql_session *session, const char *handler, bool prepares)
{
	char *called = NULL;
	rs_mysql_reading into = {.text = NULL};
	const char *cursor = handler;
	int count = 0;
	rs_result result = RS_DONE;

	if (rs_mysql_is_procedure_name(handler))
	{
		result = rs_mysql_make_call(session, handler, &called);
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

		result = rs_mysql_read_statement(session, &cursor, &into);
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
			if (is_unpreparable(session, result, into.argument_count))
				result = RS_DONE;
			rs_mysql_drop(&tried);
			continue;
		}
		kept->statement.text = strdup(into.text);
		kept->is_text = false;
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

/* At its first run; nothing for one that is run as text. */
static rs_result
prepare_statement(rs_mysql_session *session, rs_mysql_handler_statement *statement)
{
	char *text = statement->statement.text;
	rs_result result;

	statement->statement.text = NULL;
	result = rs_mysql_prepare(session, &statement->statement, text, strlen(text));
	if (result == RS_DONE)
	{
		free(text);
		return RS_DONE;
	}
	statement->statement.text = text;
	statement->is_text = is_unpreparable(session, result, statement->argument_count);
	return statement->is_text ? RS_DONE : result;
}

static rs_result
run_statement(rs_mysql_session *session, rs_mysql_handler_statement *statement,
			  const rs_value given[RS_ARGUMENT_COUNT])
{
	rs_value values[RS_MYSQL_MAX_ARGUMENTS];
	rs_result result = RS_DONE;

	if (statement->statement.prepared == NULL && !statement->is_text)
		result = prepare_statement(session, statement);
	if (result == RS_DONE && statement->is_text)
		return rs_mysql_run(session, statement->statement.text);
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

/* Nor would they be where it has let go of its partition key, which others may have taken. */
rs_result
rs_mysql_check_writes(rs_session *base)
{
	rs_mysql_session *session = rs_mysql_of(base);
	rs_result result = check_transaction(session);

	if (result != RS_DONE || session->guard == NULL || rs_mysql_key_is_held(base, session->guard))
		return result;
	if (session->is_lost)
		return RS_LOST;
	rs_error_set(&base->error, RUSTSTREAM_DATABASE, "55000",
				 "A handler must not release locks that it has not taken, as RELEASE_ALL_LOCKS() "
				 "does.",
				 "the handler has released the lock of its partition key");
	return RS_FAILED;
}

const char *
rs_mysql_left_open(rs_session *base)
{
	const rs_mysql_session *session = rs_mysql_of(base);

	return !session->in_transaction && (session->db->server_status & SERVER_STATUS_IN_TRANS) != 0
			   ? "25000"
			   : NULL;
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
		/* A batch has no id, and its rows tell their attempts. */
		[RS_ARGUMENT_ATTEMPT] =
			delivery->id != NULL ? rs_value_of_integer(delivery->attempt) : RS_VALUE_NULL,
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
		if (session->in_transaction && !transactional && !answer->failed)
			result = check_transaction(session);
	}
	if (result == RS_FAILED)
	{
		answer->failed = true;
		answer->undecodable = false;
		return RS_DONE;
	}
	return result;
}
