/*-------------------------------------------------------------------------
 *
 * driver_mysql_statement.c
 *	  The driver for MySQL and MariaDB: statements that are prepared.
 *
 * A result is read from the server as a whole before its first row is handed over, so that a row's
 * callback may execute other statements.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_mysql.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------- preparing */

void
rs_mysql_drop(rs_mysql_statement *statement)
{
	if (statement->prepared != NULL)
		(void) mysql_stmt_close(statement->prepared);
	if (statement->columns != NULL)
	{
		for (int i = 0; i < RS_MYSQL_MAX_COLUMNS; i++)
			free(statement->columns[i].buffer);
	}
	free(statement->columns);
	free(statement->text);
	memset(statement, 0, sizeof(*statement));
}

rs_result
rs_mysql_prepare(rs_mysql_session *session, rs_mysql_statement *statement, const char *text,
				 size_t length)
{
	rs_result result = RS_DONE;

	statement->text = strndup(text, length);
	statement->prepared = mysql_stmt_init(session->db);
	if (statement->text == NULL || statement->prepared == NULL)
		result = rs_mysql_no_memory(session);
	else if (mysql_stmt_prepare(statement->prepared, text, (unsigned long) length) != 0)
		result = rs_mysql_fail_statement(session, statement->prepared);
	if (result != RS_DONE)
		rs_mysql_drop(statement);
	return result;
}

void
rs_mysql_forget_statements(rs_session *base)
{
	rs_mysql_session *session = rs_mysql_of(base);

	rs_mysql_forget_handler(session);
	for (int i = 0; i < RS_SLOT_COUNT; i++)
		rs_mysql_drop(&session->kept[i]);
}

/* ----------------------------------------------------------------- values */

rs_result
rs_mysql_bind(rs_mysql_session *session, rs_mysql_statement *statement, const rs_value *values,
			  int count)
{
	MYSQL_BIND binds[RS_MYSQL_MAX_VALUES];

	if (count == 0)
		return RS_DONE;
	memset(binds, 0, sizeof(MYSQL_BIND) * (size_t) count);
	for (int i = 0; i < count; i++)
	{
		MYSQL_BIND *bind = &binds[i];

		switch (values[i].kind)
		{
			case RS_NULL:
				bind->buffer_type = MYSQL_TYPE_NULL;
				break;
			case RS_INTEGER:
				bind->buffer_type = MYSQL_TYPE_LONGLONG;
				bind->buffer = (void *) &values[i].integer;
				break;
			case RS_REAL:
				bind->buffer_type = MYSQL_TYPE_DOUBLE;
				bind->buffer = (void *) &values[i].real;
				break;
			case RS_TEXT:
			case RS_BYTES:
				/* Text is of the connection's character set, bytes are of none. */
				bind->buffer_type = values[i].kind == RS_TEXT ? MYSQL_TYPE_STRING : MYSQL_TYPE_BLOB;
				bind->buffer = (void *) values[i].text;
				bind->buffer_length = (unsigned long) values[i].length;
				break;
		}
	}
	if (mysql_stmt_bind_param(statement->prepared, binds) != 0)
		return rs_mysql_fail_statement(session, statement->prepared);
	return RS_DONE;
}

static bool
is_integer(enum enum_field_types type)
{
	return type == MYSQL_TYPE_TINY || type == MYSQL_TYPE_SHORT || type == MYSQL_TYPE_INT24 ||
		   type == MYSQL_TYPE_LONG || type == MYSQL_TYPE_LONGLONG || type == MYSQL_TYPE_YEAR;
}

static bool
is_real(enum enum_field_types type)
{
	return type == MYSQL_TYPE_FLOAT || type == MYSQL_TYPE_DOUBLE;
}

/* What is stored without a character set; a JSON's is always the same. */
static bool
is_bytes(const MYSQL_FIELD *field)
{
	const unsigned binary = 63;

	switch (field->type)
	{
		case MYSQL_TYPE_BIT:
			return true;
		case MYSQL_TYPE_STRING:
		case MYSQL_TYPE_VAR_STRING:
		case MYSQL_TYPE_TINY_BLOB:
		case MYSQL_TYPE_BLOB:
		case MYSQL_TYPE_MEDIUM_BLOB:
		case MYSQL_TYPE_LONG_BLOB:
			return field->charsetnr == binary;
		default:
			return false;
	}
}

#define FIRST_SIZE 256

/* Where the next row goes. */
static rs_result
bind_columns(rs_mysql_session *session, rs_mysql_statement *statement, unsigned count)
{
	MYSQL_BIND binds[RS_MYSQL_MAX_COLUMNS];
	const MYSQL_FIELD *fields = statement->prepared->fields;

	memset(binds, 0, sizeof(binds));
	for (unsigned i = 0; i < count; i++)
	{
		rs_mysql_column *column = &statement->columns[i];
		MYSQL_BIND *bind = &binds[i];

		bind->is_null = &column->is_null;
		bind->length = &column->length;
		if (is_integer(fields[i].type))
		{
			bind->buffer_type = MYSQL_TYPE_LONGLONG;
			bind->buffer = &column->integer;
			bind->is_unsigned = (fields[i].flags & UNSIGNED_FLAG) != 0;
			continue;
		}
		if (is_real(fields[i].type))
		{
			bind->buffer_type = MYSQL_TYPE_DOUBLE;
			bind->buffer = &column->real;
			continue;
		}
		if (column->buffer == NULL)
		{
			column->buffer = malloc(FIRST_SIZE);
			if (column->buffer == NULL)
				return rs_mysql_no_memory(session);
			column->size = FIRST_SIZE;
		}
		bind->buffer_type = MYSQL_TYPE_STRING;
		bind->buffer = column->buffer;
		bind->buffer_length = column->size;
	}
	if (mysql_stmt_bind_result(statement->prepared, binds) != 0)
		return rs_mysql_fail_statement(session, statement->prepared);
	return RS_DONE;
}

/* Columns of this row that did not fit: make room, and fetch them again. */
static rs_result
fetch_rest(rs_mysql_session *session, rs_mysql_statement *statement, unsigned count)
{
	const MYSQL_FIELD *fields = statement->prepared->fields;

	for (unsigned i = 0; i < count; i++)
	{
		rs_mysql_column *column = &statement->columns[i];
		MYSQL_BIND bind = {.buffer_type = MYSQL_TYPE_STRING,
						   .length = &column->length,
						   .is_null = &column->is_null};
		char *buffer;

		if (is_integer(fields[i].type) || is_real(fields[i].type) || column->is_null ||
			column->length <= column->size)
			continue;
		buffer = realloc(column->buffer, column->length);
		if (buffer == NULL)
			return rs_mysql_no_memory(session);
		column->buffer = buffer;
		column->size = column->length;
		bind.buffer = buffer;
		bind.buffer_length = column->size;
		if (mysql_stmt_fetch_column(statement->prepared, &bind, i, 0) != 0)
			return rs_mysql_fail_statement(session, statement->prepared);
	}
	return bind_columns(session, statement, count);
}

static rs_value
value_of(const rs_mysql_column *column, const MYSQL_FIELD *field)
{
	rs_value value = RS_VALUE_NULL;

	if (column->is_null)
		return value;
	if (is_integer(field->type))
		return rs_value_of_integer(column->integer);
	if (is_real(field->type))
	{
		value.kind = RS_REAL;
		value.real = column->real;
		return value;
	}
	value.kind = is_bytes(field) ? RS_BYTES : RS_TEXT;
	value.text = column->buffer;
	value.length = column->length;
	return value;
}

/* -------------------------------------------------------------- executing */

/* An unsigned integer beyond what rs_value holds is text, which compares as exactly. */
static void
widen(rs_value *value, const MYSQL_FIELD *field, char digits[24])
{
	if (value->kind != RS_INTEGER || value->integer >= 0 || (field->flags & UNSIGNED_FLAG) == 0)
		return;
	(void) snprintf(digits, 24, "%llu", (unsigned long long) value->integer);
	*value = rs_value_of_text(digits);
}

static rs_result
read_rows(rs_mysql_session *session, rs_mysql_statement *statement, rs_row_callback row, void *arg,
		  int64_t *affected)
{
	MYSQL_STMT *prepared = statement->prepared;
	unsigned count = mysql_stmt_field_count(prepared);
	rs_result result;
	int code = 0;

	if (count > RS_MYSQL_MAX_COLUMNS)
		return rs_mysql_refuse(session, NULL, "a statement returns more than %d columns",
							   RS_MYSQL_MAX_COLUMNS);
	if (statement->columns == NULL)
		statement->columns = calloc(RS_MYSQL_MAX_COLUMNS, sizeof(rs_mysql_column));
	if (statement->columns == NULL)
		return rs_mysql_no_memory(session);
	/* Errors can come as late as a row. */
	if (mysql_stmt_store_result(prepared) != 0)
		return rs_mysql_fail_statement(session, prepared);
	if (affected != NULL)
		*affected = (int64_t) mysql_stmt_num_rows(prepared);
	result = bind_columns(session, statement, count);
	while (result == RS_DONE && row != NULL &&
		   ((code = mysql_stmt_fetch(prepared)) == 0 || code == MYSQL_DATA_TRUNCATED))
	{
		rs_value values[RS_MYSQL_MAX_COLUMNS];
		char digits[RS_MYSQL_MAX_COLUMNS][24];

		if (code == MYSQL_DATA_TRUNCATED)
			result = fetch_rest(session, statement, count);
		if (result != RS_DONE)
			break;
		for (unsigned i = 0; i < count; i++)
		{
			values[i] = value_of(&statement->columns[i], &prepared->fields[i]);
			widen(&values[i], &prepared->fields[i], digits[i]);
		}
		if (!row(arg, values, (int) count))
			break;
	}
	if (result == RS_DONE && code == 1)
		result = rs_mysql_fail_statement(session, prepared);
	(void) mysql_stmt_free_result(prepared);
	return result;
}

/*
 * Without rows to return: a row that was inserted tells its generated id, as RETURNING does
 * elsewhere.
 */
static void
tell_changes(MYSQL_STMT *prepared, rs_row_callback row, void *arg, int64_t *affected)
{
	my_ulonglong id = mysql_stmt_insert_id(prepared);

	if (affected != NULL)
		*affected = (int64_t) mysql_stmt_affected_rows(prepared);
	if (row != NULL && id != 0)
	{
		rs_value value = rs_value_of_integer((int64_t) id);

		(void) row(arg, &value, 1);
	}
}

static bool
is_stale(const rs_mysql_statement *statement)
{
	unsigned code = mysql_stmt_errno(statement->prepared);

	return code == RS_MYSQL_NEEDS_PREPARING || code == RS_MYSQL_UNKNOWN_STATEMENT;
}

/* Execute; what has to be prepared anew, because a table has changed, is so once. */
static rs_result
execute_in(rs_mysql_session *session, rs_mysql_statement *statement, const char *text,
		   const rs_value *values, int count)
{
	for (int attempt = 0;; attempt++)
	{
		rs_result result = RS_DONE;

		if (statement->prepared == NULL)
			result = rs_mysql_prepare(session, statement, text, strlen(text));
		if (result == RS_DONE)
			result = rs_mysql_bind(session, statement, values, count);
		if (result != RS_DONE || mysql_stmt_execute(statement->prepared) == 0)
			return result;
		if (attempt > 0 || !is_stale(statement))
			return rs_mysql_fail_statement(session, statement->prepared);
		rs_mysql_drop(statement);
	}
}

static rs_result
execute(rs_mysql_session *session, int slot, const char *text, const rs_value *values, int count,
		rs_row_callback row, void *arg, int64_t *affected)
{
	rs_mysql_statement own = {0};
	rs_mysql_statement *statement = slot >= 0 ? &session->kept[slot] : &own;
	rs_result result;

	if (session->is_lost)
		return RS_LOST;
	if (statement->text != NULL && strcmp(statement->text, text) != 0)
		rs_mysql_drop(statement);
	result = execute_in(session, statement, text, values, count);
	if (result == RS_DONE && mysql_stmt_field_count(statement->prepared) > 0)
		result = read_rows(session, statement, row, arg, affected);
	else if (result == RS_DONE)
		tell_changes(statement->prepared, row, arg, affected);
	rs_mysql_drop(&own);
	return result;
}

/* ---------------------------------------------------- rows to leave alone */

/* Around the condition of one such row, in the catalogue's templates. */
#define HELD "/*held*/"

/*
 * The statement with that condition, in which parameters first to last stand, once for each row
 * that is left alone.
 */
static rs_result
execute_without_held(rs_mysql_session *session, const rs_command *command, const rs_value *values,
					 int count, int first, int last, rs_row_callback row, void *arg,
					 int64_t *affected)
{
	const rs_held *held = session->base.held;
	rs_value all[RS_MYSQL_MAX_VALUES];
	const char *begin = strstr(command->text, HELD);
	const char *end = begin != NULL ? strstr(begin + strlen(HELD), HELD) : NULL;
	size_t length;
	size_t at;
	int n = first;
	char *text;
	rs_result result;

	if (end == NULL || last - first >= RS_MYSQL_MAX_HELD_VALUES)
		return rs_mysql_refuse(session, NULL, "a claim has no condition on rows to leave alone");
	begin += strlen(HELD);
	length = (size_t) (end - begin);
	text = malloc(strlen(command->text) + (length + strlen(" OR ")) * (size_t) held->count + 1);
	if (text == NULL)
		return rs_mysql_no_memory(session);

	at = (size_t) (begin - command->text);
	memcpy(text, command->text, at);
	memcpy(all, values, sizeof(rs_value) * (size_t) first);
	for (int i = 0; i < held->count; i++)
	{
		at += (size_t) sprintf(text + at, "%s%.*s", i > 0 ? " OR " : "", (int) length, begin);
		for (int j = first; j <= last; j++)
			all[n++] = command->parameters[j] == RS_PARAM_HELD ? held->ids[i] : values[j];
	}
	memcpy(text + at, end, strlen(end) + 1);
	memcpy(all + n, values + last + 1, sizeof(rs_value) * (size_t) (count - last - 1));
	result = execute(session, -1, text, all, n + count - last - 1, row, arg, affected);
	free(text);
	return result;
}

rs_result
rs_mysql_execute(rs_session *base, const rs_command *command, const rs_value *values, int count,
				 rs_row_callback row, void *arg, int64_t *affected)
{
	rs_mysql_session *session = rs_mysql_of(base);

	int first = -1;
	int last = -1;

	for (int i = 0; i < command->parameter_count && i < RS_MAX_PARAMETERS; i++)
	{
		if (command->parameters[i] != RS_PARAM_HELD)
			continue;
		first = first < 0 ? i : first;
		last = i;
	}
	if (first >= 0 && base->held != NULL && base->held->count > 0)
		return execute_without_held(session, command, values, count, first, last, row, arg,
									affected);
	return execute(session, command->slot, command->text, values, count, row, arg, affected);
}
