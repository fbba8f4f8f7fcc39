/*-------------------------------------------------------------------------
 *
 * driver_postgres_execute.c
 *	  The PostgreSQL driver: statements, what they take and what they return.
 *
 * Values travel as text, whose type the server takes from where they stand, bytes as
 * they are.  Results are text, too, save for those of the operations that return times, whose text
 * would depend on the session's settings: a handler may have changed them.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_postgres.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Seconds from 1970 to 2000, where the server's times begin. */
#define EPOCH_SHIFT (INT64_C(946684800) * RS_SECOND)

rs_result
rs_postgres_no_memory(rs_postgres_session *session)
{
	return rs_session_no_memory(&session->base);
}

/* ------------------------------------------------------------------ times */

/* YYYY-MM-DDTHH:MM:SS.ffffff+00:00, which the server reads under any settings. */
void
rs_postgres_format_time(int64_t time, bool is_token, char buffer[RS_TIME_SIZE + 8])
{
	char whole[RS_TIME_SIZE];
	int64_t fraction = time % RS_SECOND;
	size_t length;

	(void) is_token;
	if (fraction < 0)
		fraction += RS_SECOND;
	rs_time_format(time - fraction, whole);
	/* The last time that there is, in place of one beyond it, has a fraction of its own. */
	if (strchr(whole, '.') != NULL)
	{
		(void) snprintf(buffer, RS_TIME_SIZE + 8, "%s", whole);
		return;
	}
	length = strlen(whole) - strlen("+00:00");
	(void) snprintf(buffer, RS_TIME_SIZE + 8, "%.*s.%06d%s", (int) length, whole, (int) fraction,
					whole + length);
}

/* ---------------------------------------------------------------- results */

static int64_t
read_number(const char *bytes, int length)
{
	uint64_t number = (signed char) bytes[0] < 0 ? UINT64_MAX : 0;

	for (int i = 0; i < length; i++)
		number = number << 8 | (unsigned char) bytes[i];
	return (int64_t) number;
}

/* A column of a binary result: a number, or a time, which becomes text. */
static rs_value
binary_column(rs_postgres_session *session, const PGresult *result, int row, int column)
{
	int64_t number = read_number(PQgetvalue(result, row, column), PQgetlength(result, row, column));
	char *text;

	if (PQftype(result, column) != RS_OID_TIMESTAMPTZ)
		return rs_value_of_integer(number);
	text = rs_alloc(&session->scratch, RS_TIME_SIZE + 8);
	if (text == NULL)
		return RS_VALUE_NULL;
	/* The ends of time are infinities, and stay beyond every other time. */
	rs_postgres_format_time(number > INT64_MAX - EPOCH_SHIFT ? INT64_MAX : number + EPOCH_SHIFT,
							false, text);
	return rs_value_of_text(text);
}

static rs_value
decode_bytes(rs_postgres_session *session, const char *text)
{
	size_t length;
	unsigned char *bytes = PQunescapeBytea((const unsigned char *) text, &length);
	rs_value value = RS_VALUE_NULL;
	const char *copy =
		bytes != NULL ? rs_copy_bytes(&session->scratch, (char *) bytes, length) : NULL;

	if (copy != NULL)
		value = rs_value_of_bytes(copy, length);
	PQfreemem(bytes);
	return value;
}

rs_value
rs_postgres_column(rs_postgres_session *session, const PGresult *result, int row, int column)
{
	const char *text = PQgetvalue(result, row, column);
	rs_value value = RS_VALUE_NULL;

	if (PQgetisnull(result, row, column))
		return value;
	if (PQfformat(result, column) == 1)
		return binary_column(session, result, row, column);
	switch (PQftype(result, column))
	{
		case RS_OID_INT2:
		case RS_OID_INT4:
		case RS_OID_INT8:
			return rs_value_of_integer(strtoll(text, NULL, 10));
		case RS_OID_BOOL:
			return rs_value_of_integer(text[0] == 't');
		case RS_OID_BYTEA:
			return decode_bytes(session, text);
		default:
			value.kind = RS_TEXT;
			value.text = text;
			value.length = (size_t) PQgetlength(result, row, column);
			return value;
	}
}

#define MAX_COLUMNS 32

static rs_result
return_rows(rs_postgres_session *session, const PGresult *result, rs_row_callback row, void *arg,
			int64_t *affected)
{
	int columns = PQnfields(result) < MAX_COLUMNS ? PQnfields(result) : MAX_COLUMNS;
	int rows = PQntuples(result);

	if (affected != NULL)
		*affected = PQresultStatus(result) == PGRES_TUPLES_OK
						? rows
						: strtoll(PQcmdTuples((PGresult *) result), NULL, 10);
	for (int n = 0; n < rows && row != NULL; n++)
	{
		rs_value values[MAX_COLUMNS];

		for (int i = 0; i < columns; i++)
			values[i] = rs_postgres_column(session, result, n, i);
		if (session->scratch.is_exhausted)
			return rs_postgres_no_memory(session);
		if (!row(arg, values, columns))
			break;
	}
	return RS_DONE;
}

/* ------------------------------------------------------------- parameters */

/* An array of the rows that are left alone for now, as its type reads it. */
static const char *
held_array(rs_postgres_session *session)
{
	const rs_held *held = session->base.held;
	size_t size = 3;
	char *text;
	char *at;

	for (int i = 0; held != NULL && i < held->count; i++)
		size += held->ids[i].kind == RS_INTEGER ? 24 : 2 * held->ids[i].length + 4;
	text = rs_alloc(&session->scratch, size);
	if (text == NULL)
		return NULL;
	at = text;
	*at++ = '{';
	for (int i = 0; held != NULL && i < held->count; i++)
	{
		const rs_value *id = &held->ids[i];

		if (i > 0)
			*at++ = ',';
		if (id->kind == RS_INTEGER)
		{
			at += snprintf(at, 24, "%lld", (long long) id->integer);
			continue;
		}
		*at++ = '"';
		for (size_t n = 0; n < id->length; n++)
		{
			if (id->text[n] == '"' || id->text[n] == '\\')
				*at++ = '\\';
			*at++ = id->text[n];
		}
		*at++ = '"';
	}
	*at++ = '}';
	*at = '\0';
	return text;
}

typedef struct parameters
{
	const char *values[RS_MAX_PARAMETERS];
	int lengths[RS_MAX_PARAMETERS];
	int formats[RS_MAX_PARAMETERS];
} parameters;

static bool
is_of(int slot, rs_operation operation)
{
	return slot >= RS_SLOT(operation, 0) && slot < RS_SLOT(operation, 0) + 4;
}

static void
put_value(rs_postgres_session *session, parameters *into, int n, const rs_value *value)
{
	into->lengths[n] = 0;
	into->formats[n] = 0;
	switch (value->kind)
	{
		case RS_NULL:
			into->values[n] = NULL;
			break;
		case RS_INTEGER:
			into->values[n] = rs_print(&session->scratch, "%lld", (long long) value->integer);
			break;
		case RS_REAL:
			into->values[n] = rs_print(&session->scratch, "%.17g", value->real);
			break;
		case RS_TEXT:
			into->values[n] = rs_copy_bytes(&session->scratch, value->text, value->length);
			break;
		case RS_BYTES:
			into->values[n] = value->length == 0 ? "" : value->text;
			into->lengths[n] = (int) value->length;
			into->formats[n] = 1;
			break;
	}
}

/* ------------------------------------------------------------- statements */

rs_result
rs_postgres_prepare(rs_postgres_session *session, int slot, const char *text, int count,
					const Oid *types, char name[32])
{
	rs_postgres_kept *kept = &session->kept[slot];
	PGresult *result;
	rs_result code = RS_DONE;

	if (kept->text == NULL || strcmp(kept->text, text) != 0 ||
		(types != NULL && memcmp(kept->types, types, sizeof(Oid) * (size_t) count) != 0))
	{
		char *copy = strdup(text);

		if (copy == NULL)
			return rs_postgres_no_memory(session);
		(void) snprintf(name, 32, "ruststream_%u", session->statements + 1);
		result = PQprepare(session->connection, name, text, count, types);
		if (PQresultStatus(result) != PGRES_COMMAND_OK)
			code = rs_postgres_fail(session, result);
		PQclear(result);
		if (code != RS_DONE)
		{
			free(copy);
			return code;
		}
		/* The one before it stays with the server until forget_statements: it is one of few. */
		free(kept->text);
		kept->text = copy;
		kept->number = ++session->statements;
		if (types != NULL)
			memcpy(kept->types, types, sizeof(Oid) * (size_t) count);
	}
	(void) snprintf(name, 32, "ruststream_%u", kept->number);
	return RS_DONE;
}

PGresult *
rs_postgres_send(rs_postgres_session *session, const char *text, int slot, int count,
				 const Oid *types, const char *const *values, const int *lengths,
				 const int *formats, bool binary_result, rs_result *code)
{
	char name[32];
	PGresult *result;
	ExecStatusType status;

	*code = RS_DONE;
	session->has_now = false;
	if (slot >= 0 && !session->loses_statements)
	{
		*code = rs_postgres_prepare(session, slot, text, count, types, name);
		if (*code != RS_DONE)
			return NULL;
		result = PQexecPrepared(session->connection, name, count, values, lengths, formats,
								binary_result ? 1 : 0);
	}
	else
		result = PQexecParams(session->connection, text, count, types, values, lengths, formats,
							  binary_result ? 1 : 0);
	status = PQresultStatus(result);
	if (status == PGRES_TUPLES_OK || status == PGRES_COMMAND_OK || status == PGRES_EMPTY_QUERY ||
		status == PGRES_COPY_IN || status == PGRES_COPY_OUT)
		return result;
	*code = rs_postgres_fail(session, result);
	PQclear(result);
	return NULL;
}

/* --------------------------------------------------- a claim, and what follows it */

#define MARKED_COUNT 3

/* One statement of a pipeline, which is kept prepared unless nothing can be. */
static bool
queue(rs_postgres_session *session, const char *text, const char *name, int count,
	  const parameters *given)
{
	if (session->loses_statements)
		return PQsendQueryParams(session->connection, text, count, NULL, given->values,
								 given->lengths, given->formats, 0) == 1;
	return PQsendQueryPrepared(session->connection, name, count, given->values, given->lengths,
							   given->formats, 0) == 1;
}

/*
 * What a pipeline returns, to its end: the first result, and the one that failed, or NULL.  A
 * connection that is lost returns nothing any more.
 */
static void
read_pipeline(PGconn *connection, PGresult **first, PGresult **failed)
{
	int nothing = 0;

	*first = NULL;
	*failed = NULL;
	while (nothing < 2)
	{
		PGresult *result = PQgetResult(connection);
		ExecStatusType status = PQresultStatus(result);

		nothing = result == NULL ? nothing + 1 : 0;
		if (status == PGRES_FATAL_ERROR && result != NULL && *failed == NULL)
			*failed = result;
		else if (*first == NULL && (status == PGRES_TUPLES_OK || status == PGRES_COMMAND_OK))
			*first = result;
		else
			PQclear(result);
		if (status == PGRES_PIPELINE_SYNC)
			return;
	}
}

/*
 * A claim of the row lock form, and in the same round trip what stands in front of a handler: their
 * settings, and the savepoint.  Nothing of the user's runs in it.
 */
static PGresult *
send_marked(rs_postgres_session *session, const rs_command *command, int count,
			const parameters *given, rs_result *code)
{
	static const parameters none;
	PGconn *connection = session->connection;
	const char *texts[MARKED_COUNT] = {command->text, RS_POSTGRES_THEIR_WAY, RS_POSTGRES_SAVEPOINT};
	const int slots[MARKED_COUNT] = {command->slot, RS_SLOT_THEIR_WAY, RS_SLOT_SAVEPOINT};
	char names[MARKED_COUNT][32];
	PGresult *first;
	PGresult *failed;

	*code = RS_DONE;
	session->has_now = false;
	for (int i = 0; i < MARKED_COUNT && *code == RS_DONE && !session->loses_statements; i++)
		*code =
			rs_postgres_prepare(session, slots[i], texts[i], i == 0 ? count : 0, NULL, names[i]);
	if (*code != RS_DONE)
		return NULL;

	if (PQenterPipelineMode(connection) != 1)
		*code = rs_postgres_fail(session, NULL);
	for (int i = 0; i < MARKED_COUNT && *code == RS_DONE; i++)
	{
		if (!queue(session, texts[i], names[i], i == 0 ? count : 0, i == 0 ? given : &none))
			*code = rs_postgres_fail(session, NULL);
	}
	/* Whoever is left in a pipeline here is closed by the rollback. */
	if (*code == RS_DONE && PQpipelineSync(connection) != 1)
		*code = rs_postgres_fail(session, NULL);
	if (*code != RS_DONE)
		return NULL;
	read_pipeline(connection, &first, &failed);
	if (failed != NULL || first == NULL || PQexitPipelineMode(connection) != 1)
	{
		*code = rs_postgres_fail(session, failed);
		(void) PQexitPipelineMode(connection);
		PQclear(failed);
		PQclear(first);
		return NULL;
	}
	session->plans_our_way = false;
	session->mark = RS_POSTGRES_CLAIM_MARK;
	return first;
}

static bool
is_claim(int slot)
{
	return (slot >= RS_SLOT(RS_OP_CLAIM_ROW, 0) && slot < RS_SLOT(RS_OP_NEXT_DUE, 0));
}

static bool
returns_times(int slot)
{
	return is_of(slot, RS_OP_NEXT_DUE) || is_of(slot, RS_OP_DEPTH);
}

/* The types of what the handler will be given: a claim returns id, attempt, headers, payload. */
static void
remember_types(rs_postgres_session *session, const PGresult *result)
{
	if (PQntuples(result) == 0 || PQnfields(result) < 4)
		return;
	session->id_type = PQftype(result, 0);
	session->headers_type = PQftype(result, 2);
	session->payload_type = PQftype(result, 3);
}

rs_result
rs_postgres_execute(rs_session *base, const rs_command *command, const rs_value *values, int count,
					rs_row_callback row, void *arg, int64_t *affected)
{
	rs_postgres_session *session = rs_postgres_of(base);
	bool is_ours = command->slot >= 0 && command->slot < RS_SLOT_HANDLER;
	/* A handler may publish, and goes on planning as it did. */
	bool is_planned = is_ours && !is_of(command->slot, RS_OP_PUBLISH);
	bool wraps = returns_times(command->slot) && !session->in_transaction;
	parameters given;
	PGresult *result = NULL;
	rs_result code = RS_DONE;

	if (rs_postgres_has_ended(session))
		return rs_postgres_refuse_ended(session);
	if (wraps)
		code = base->driver->begin(base, RS_FOR_US, NULL);
	else if (is_planned && session->in_transaction)
		code = rs_postgres_plan_our_way(session);
	if (code != RS_DONE)
		return code;
	rs_arena_reset(&session->scratch);
	for (int i = 0; i < count; i++)
	{
		put_value(session, &given, i, &values[i]);
		if (command->parameters[i] == RS_PARAM_HELD)
			given.values[i] = held_array(session);
	}
	if (session->scratch.is_exhausted)
		code = rs_postgres_no_memory(session);
	else if (session->marks_claim)
		result = send_marked(session, command, count, &given, &code);
	else
		result =
			rs_postgres_send(session, command->text, command->slot, count, NULL, given.values,
							 given.lengths, given.formats, returns_times(command->slot), &code);
	if (result != NULL)
	{
		if (is_claim(command->slot))
			remember_types(session, result);
		code = return_rows(session, result, row, arg, affected);
		PQclear(result);
	}
	if (wraps && code == RS_DONE)
		return base->driver->commit(base);
	if (wraps)
	{
		rs_error kept = base->error;

		(void) base->driver->rollback(base);
		base->error = kept;
	}
	return code;
}

void
rs_postgres_forget_statements(rs_session *base)
{
	rs_postgres_session *session = rs_postgres_of(base);
	char text[64];

	for (int i = 0; i < RS_SLOT_COUNT; i++)
	{
		if (session->kept[i].text == NULL)
			continue;
		free(session->kept[i].text);
		session->kept[i].text = NULL;
	}
	session->listens_for = NULL;
	session->line = RS_VALUE_NULL;
	rs_arena_free(&session->line_arena);
	if (session->statements == session->forgotten || session->loses_statements ||
		PQtransactionStatus(session->connection) != PQTRANS_IDLE)
		return;
	for (; session->forgotten < session->statements; session->forgotten++)
	{
		PGresult *result;

		(void) snprintf(text, sizeof(text), "DEALLOCATE ruststream_%u", session->forgotten + 1);
		result = PQexec(session->connection, text);
		/* What a handler has dropped is gone already. */
		PQclear(result);
	}
}
