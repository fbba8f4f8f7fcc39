/*-------------------------------------------------------------------------
 *
 * driver_sqlite_handler.c
 *	  The SQLite driver: handlers that are SQL, and the functions that it may use.
 *
 * A handler is one or more statements.  :id, :payload, :attempt and :headers are the
 * delivery's; ruststream_ack(), ruststream_retry(), ruststream_retry_after(seconds),
 * ruststream_discard() and ruststream_dead_letter() answer it, each of them with a reason as its
 * last argument if there is one; the last answer counts, and none at all is ack.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_sqlite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --------------------------------------------------------------- outcomes */

/* An outcome's function: which one, and where its arguments are. */
typedef struct outcome_function
{
	const char *name;
	int arguments;
	rs_outcome outcome;
	int delay_argument;  /* -1: none */
	int reason_argument; /* -1: none */
	bool undecodable;
} outcome_function;

static const outcome_function outcome_functions[] = {
	{"ruststream_ack", 0, RS_OUTCOME_ACK, -1, -1, false},
	{"ruststream_retry", 0, RS_OUTCOME_RETRY, -1, -1, false},
	{"ruststream_retry", 1, RS_OUTCOME_RETRY, -1, 0, false},
	{"ruststream_retry_after", 0, RS_OUTCOME_RETRY_AFTER, -1, -1, false},
	{"ruststream_retry_after", 1, RS_OUTCOME_RETRY_AFTER, 0, -1, false},
	{"ruststream_retry_after", 2, RS_OUTCOME_RETRY_AFTER, 0, 1, false},
	{"ruststream_discard", 0, RS_OUTCOME_DISCARD, -1, -1, false},
	{"ruststream_discard", 1, RS_OUTCOME_DISCARD, -1, 0, false},
	{"ruststream_dead_letter", 0, RS_OUTCOME_DEAD_LETTER, -1, -1, false},
	{"ruststream_dead_letter", 1, RS_OUTCOME_DEAD_LETTER, -1, 0, false},
	{"ruststream_undecodable", 0, RS_OUTCOME_RETRY, -1, -1, true},
	{"ruststream_undecodable", 1, RS_OUTCOME_RETRY, -1, 0, true},
};

/* The functions have the description above for their user data; the session is an auxiliary one. */
typedef struct registered
{
	const outcome_function *function;
	rs_sqlite_session *session;
} registered;

static bool
take_delay(sqlite3_context *context, sqlite3_value *value, rs_answer *answer)
{
	int type = sqlite3_value_numeric_type(value);
	double seconds = sqlite3_value_double(value);

	if (type == SQLITE_NULL)
		return true;
	if ((type != SQLITE_INTEGER && type != SQLITE_FLOAT) || !(seconds >= 0 && seconds < 3.2e9))
	{
		sqlite3_result_error(context, "ruststream_retry_after takes a number of seconds", -1);
		return false;
	}
	answer->has_delay = true;
	answer->delay = (int64_t) (seconds * (double) RS_SECOND);
	return true;
}

static void
answer(sqlite3_context *context, int count, sqlite3_value **values)
{
	const registered *call = sqlite3_user_data(context);
	const outcome_function *function = call->function;
	rs_answer given = {.outcome = function->outcome, .undecodable = function->undecodable};

	(void) count;
	if (call->session->answer == NULL)
	{
		sqlite3_result_error(context, "outcomes are answered inside a handler", -1);
		return;
	}
	if (function->delay_argument >= 0 &&
		!take_delay(context, values[function->delay_argument], &given))
		return;
	if (function->reason_argument >= 0)
	{
		const unsigned char *reason = sqlite3_value_text(values[function->reason_argument]);

		if (reason != NULL)
			(void) snprintf(given.reason, sizeof(given.reason), "%s", (const char *) reason);
	}
	given.failed = given.undecodable;
	*call->session->answer = given;
	sqlite3_result_text(context,
						function->undecodable ? "undecodable" : rs_outcome_word(function->outcome),
						-1, SQLITE_STATIC);
}

/* ------------------------------------------------- what our claims ask for */

static rs_value
value_of(sqlite3_value *value)
{
	rs_value result = RS_VALUE_NULL;

	switch (sqlite3_value_type(value))
	{
		case SQLITE_INTEGER:
			return rs_value_of_integer(sqlite3_value_int64(value));
		case SQLITE_FLOAT:
			result.kind = RS_REAL;
			result.real = sqlite3_value_double(value);
			return result;
		case SQLITE_TEXT:
			result.kind = RS_TEXT;
			result.text = (const char *) sqlite3_value_text(value);
			break;
		case SQLITE_BLOB:
			result.kind = RS_BYTES;
			result.text = sqlite3_value_blob(value);
			break;
		default:
			return result;
	}
	result.length = (size_t) sqlite3_value_bytes(value);
	return result;
}

/* ruststream_is_held(id) */
static void
is_held(sqlite3_context *context, int count, sqlite3_value **values)
{
	const rs_sqlite_session *session = sqlite3_user_data(context);
	const rs_held *held = session->base.held;
	int result = 0;

	(void) count;
	if ((held != NULL && held->count > 0) || session->base.passed_count > 0)
	{
		rs_value id = value_of(values[0]);

		for (int i = 0; held != NULL && i < held->count; i++)
			result |= rs_value_equal(&id, &held->ids[i]);
		for (int i = 0; i < session->base.passed_count; i++)
			result |= rs_value_equal(&id, &session->base.passed[i]);
	}
	sqlite3_result_int(context, result);
}

/* ruststream_held_id(n) */
static void
held_id(sqlite3_context *context, int count, sqlite3_value **values)
{
	const rs_sqlite_session *session = sqlite3_user_data(context);
	const rs_held *held = session->base.held;
	int n = sqlite3_value_int(values[0]);

	(void) count;
	if (held == NULL || n >= held->count)
	{
		sqlite3_result_null(context);
		return;
	}
	switch (held->ids[n].kind)
	{
		case RS_INTEGER:
			sqlite3_result_int64(context, held->ids[n].integer);
			break;
		case RS_REAL:
			sqlite3_result_double(context, held->ids[n].real);
			break;
		case RS_TEXT:
			sqlite3_result_text(context, held->ids[n].text, (int) held->ids[n].length,
								SQLITE_TRANSIENT);
			break;
		case RS_BYTES:
			sqlite3_result_blob(context, held->ids[n].text, (int) held->ids[n].length,
								SQLITE_TRANSIENT);
			break;
		case RS_NULL:
			sqlite3_result_null(context);
			break;
	}
}

/* ruststream_key_is_held(key) */
static void
key_is_held(sqlite3_context *context, int count, sqlite3_value **values)
{
	const rs_sqlite_session *session = sqlite3_user_data(context);
	const char *key = (const char *) sqlite3_value_text(values[0]);

	(void) count;
	/* A key ends where C says that text ends, as it does when it is locked. */
	sqlite3_result_int(context, session->keys != NULL && key != NULL &&
									rs_keys_held(session->keys, key, strlen(key), NULL));
}

/* ruststream_partition_is_held(partition_key): see keep_candidate in deliver.c */
static void
partition_is_held(sqlite3_context *context, int count, sqlite3_value **values)
{
	const rs_sqlite_session *session = sqlite3_user_data(context);
	const rs_table *table = session->base.table;
	const char *text = (const char *) sqlite3_value_text(values[0]);
	char *key;

	(void) count;
	if (text == NULL || table == NULL || session->keys == NULL)
	{
		sqlite3_result_int(context, 0);
		return;
	}
	key = sqlite3_mprintf("%s.%s:key:%s", table->schema, table->name, text);
	if (key == NULL)
	{
		sqlite3_result_error_nomem(context);
		return;
	}
	sqlite3_result_int(context, rs_keys_held(session->keys, key, strlen(key), NULL));
	sqlite3_free(key);
}

bool
rs_sqlite_register_functions(rs_sqlite_session *session)
{
	static const struct
	{
		const char *name;
		void (*call)(sqlite3_context *, int, sqlite3_value **);
	} asked[] = {
		{"ruststream_is_held", is_held},
		{"ruststream_held_id", held_id},
		{"ruststream_key_is_held", key_is_held},
		{"ruststream_partition_is_held", partition_is_held},
	};

	for (size_t i = 0; i < sizeof(asked) / sizeof(asked[0]); i++)
	{
		if (sqlite3_create_function_v2(session->db, asked[i].name, 1,
									   SQLITE_UTF8 | SQLITE_DIRECTONLY, session, asked[i].call,
									   NULL, NULL, NULL) != SQLITE_OK)
			return false;
	}
	for (size_t i = 0; i < sizeof(outcome_functions) / sizeof(outcome_functions[0]); i++)
	{
		registered *call = malloc(sizeof(registered));

		if (call == NULL)
			return false;
		call->function = &outcome_functions[i];
		call->session = session;
		/* Freed by SQLite, also where this fails. */
		if (sqlite3_create_function_v2(session->db, outcome_functions[i].name,
									   outcome_functions[i].arguments, SQLITE_UTF8, call, answer,
									   NULL, NULL, free) != SQLITE_OK)
			return false;
	}
	return true;
}

/* --------------------------------------------------------------- handlers */

void
rs_sqlite_forget_handler(rs_sqlite_session *session)
{
	for (int i = 0; i < session->handler_count; i++)
		(void) sqlite3_finalize(session->handler_statements[i].statement);
	session->handler_count = 0;
	free(session->handler);
	session->handler = NULL;
}

void
rs_sqlite_guard(rs_session *base, bool on, bool transactional)
{
	rs_sqlite_session *session = (rs_sqlite_session *) base;

	session->handles = on;
	session->guards = on && transactional;
}

/* What a statement of a handler names and nobody gives; NULL: nothing. */
static const char *
unknown_name(sqlite3_stmt *statement)
{
	static const char *const known[] = {":id", ":payload", ":attempt", ":headers"};

	for (int n = 1; n <= sqlite3_bind_parameter_count(statement); n++)
	{
		const char *name = sqlite3_bind_parameter_name(statement, n);
		bool is_known = false;

		for (size_t i = 0; name != NULL && i < sizeof(known) / sizeof(known[0]); i++)
			is_known = is_known || strcmp(name, known[i]) == 0;
		if (!is_known)
			return name != NULL ? name : "?";
	}
	return NULL;
}

/* As far as it can be, and its beginning must be: what a later statement needs an earlier may make.
 */
rs_result
rs_sqlite_check_handler(rs_session *base, const char *handler)
{
	rs_sqlite_session *session = (rs_sqlite_session *) base;
	bool is_empty = true;

	for (const char *rest = handler; *rest != '\0';)
	{
		sqlite3_stmt *statement = NULL;
		int code = sqlite3_prepare_v2(session->db, rest, -1, &statement, &rest);
		const char *unknown = code == SQLITE_OK ? unknown_name(statement) : NULL;
		bool made;

		if (unknown != NULL)
			rs_error_set(&base->error, RUSTSTREAM_REFUSED, "",
						 "It may name :id, :payload, :attempt and :headers.",
						 "the handler names \"%s\"", unknown);
		made = statement != NULL;
		(void) sqlite3_finalize(statement);
		if (unknown != NULL)
			return RS_FAILED;
		if (code != SQLITE_OK && is_empty)
		{
			rs_result result = rs_sqlite_fail(session);

			base->error.code = RUSTSTREAM_REFUSED;
			return result;
		}
		if (code != SQLITE_OK)
			break;
		is_empty = is_empty && !made;
	}
	if (is_empty)
	{
		rs_error_set(&base->error, RUSTSTREAM_REFUSED, "", "Write at least one statement.",
					 "the handler is empty");
		return RS_FAILED;
	}
	return RS_DONE;
}

/* All its rows: what a statement returns is nobody's business. */
static int
run_statement(const rs_sqlite_handler_statement *run, const ruststream_delivery *delivery,
			  const rs_value *id, const rs_value *payload)
{
	sqlite3_stmt *statement = run->statement;
	int code;

	if (run->id != 0)
		(void) rs_sqlite_bind(statement, run->id, id);
	if (run->payload != 0)
		(void) rs_sqlite_bind(statement, run->payload, payload);
	/* A batch has no id, and its rows tell their attempts. */
	if (run->attempt != 0 && delivery->id != NULL)
		(void) sqlite3_bind_int64(statement, run->attempt, delivery->attempt);
	if (run->headers != 0)
		(void) sqlite3_bind_text(statement, run->headers, delivery->headers, -1, SQLITE_STATIC);
	do
		code = sqlite3_step(statement);
	while (code == SQLITE_ROW);
	return code;
}

/*
 * Number n of the handler's statements, prepared when it is first come to; text is where it begins,
 * and is moved behind it.  Without a statement and with SQLITE_OK: there is none.
 */
static rs_sqlite_handler_statement
next_statement(rs_sqlite_session *session, int n, const char **text, int *code)
{
	rs_sqlite_handler_statement next = {NULL, 0, 0, 0, 0, 0};

	*code = SQLITE_OK;
	if (n < session->handler_count)
	{
		*text = session->handler + session->handler_statements[n].end;
		return session->handler_statements[n];
	}
	while (next.statement == NULL && **text != '\0' && *code == SQLITE_OK)
		*code = sqlite3_prepare_v3(session->db, *text, -1, SQLITE_PREPARE_PERSISTENT,
								   &next.statement, text);
	if (next.statement == NULL)
		return next;
	next.end = (size_t) (*text - session->handler);
	next.id = sqlite3_bind_parameter_index(next.statement, ":id");
	next.payload = sqlite3_bind_parameter_index(next.statement, ":payload");
	next.attempt = sqlite3_bind_parameter_index(next.statement, ":attempt");
	next.headers = sqlite3_bind_parameter_index(next.statement, ":headers");
	return next;
}

static rs_result
run_handler(rs_sqlite_session *session, const ruststream_delivery *delivery, const rs_value *id,
			const rs_value *payload)
{
	const char *text = session->handler;
	int code = SQLITE_OK;
	rs_result result = RS_DONE;

	for (int n = 0; result == RS_DONE; n++)
	{
		rs_sqlite_handler_statement run = next_statement(session, n, &text, &code);
		bool is_kept = n < session->handler_count;

		if (run.statement == NULL && code == SQLITE_OK)
			break;
		if (run.statement != NULL)
			code = run_statement(&run, delivery, id, payload);
		if (code != SQLITE_DONE)
			result = rs_sqlite_fail(session);
		/* Kept in order, so that one that cannot be kept is the end of those that are. */
		if (!is_kept && run.statement != NULL && n == session->handler_count &&
			n < RS_MAX_HANDLER_STATEMENTS)
		{
			session->handler_statements[n] = run;
			session->handler_count++;
			is_kept = true;
		}
		if (is_kept)
		{
			(void) sqlite3_reset(run.statement);
			(void) sqlite3_clear_bindings(run.statement);
		}
		else
			(void) sqlite3_finalize(run.statement);
	}
	return result;
}

const char *
rs_sqlite_left_open(rs_session *base)
{
	return sqlite3_get_autocommit(((rs_sqlite_session *) base)->db) == 0 ? "SQLITE_ERROR" : NULL;
}

rs_result
rs_sqlite_call_handler(rs_session *base, const char *handler, const ruststream_delivery *delivery,
					   const rs_value *id, const rs_value *payload, bool transactional,
					   rs_answer *given)
{
	rs_sqlite_session *session = (rs_sqlite_session *) base;
	rs_result result;

	if (session->handler == NULL || strcmp(session->handler, handler) != 0)
	{
		rs_sqlite_forget_handler(session);
		session->handler = strdup(handler);
	}
	if (session->handler == NULL)
		return rs_session_no_memory(base);

	*given = (rs_answer){.outcome = RS_OUTCOME_ACK};
	session->answer = given;
	rs_sqlite_guard(base, true, transactional);
	result = run_handler(session, delivery, id, payload);
	rs_sqlite_guard(base, false, transactional);
	session->answer = NULL;
	if (result == RS_FAILED)
	{
		given->failed = true;
		given->undecodable = false;
		return RS_DONE;
	}
	if (result == RS_DONE && given->undecodable)
		rs_error_set(&base->error, RUSTSTREAM_DATABASE, "", NULL, "%s",
					 given->reason[0] != '\0' ? given->reason : "the payload does not decode");
	return result;
}

rs_result
rs_sqlite_check_writes(rs_session *base)
{
	rs_sqlite_session *session = (rs_sqlite_session *) base;
	int unresolved = 0;
	int unused = 0;

	if (sqlite3_get_autocommit(session->db) != 0)
	{
		rs_error_set(&base->error, RUSTSTREAM_DATABASE, "SQLITE_AUTH",
					 "A handler works inside its delivery's transaction, which is not its to end.",
					 "the handler has ended its delivery's transaction");
		return RS_FAILED;
	}
	if (sqlite3_db_status(session->db, SQLITE_DBSTATUS_DEFERRED_FKS, &unresolved, &unused, 0) ==
			SQLITE_OK &&
		unresolved != 0)
	{
		rs_error_set(&base->error, RUSTSTREAM_DATABASE, "SQLITE_CONSTRAINT", "",
					 "FOREIGN KEY constraint failed");
		return RS_FAILED;
	}
	return RS_DONE;
}

rs_result
rs_sqlite_judge_failure(rs_session *base)
{
	rs_sqlite_session *session = (rs_sqlite_session *) base;
	int code = sqlite3_errcode(session->db) & 0xFF;

	return code == SQLITE_BUSY || code == SQLITE_LOCKED ? rs_sqlite_fail(session) : RS_FAILED;
}
