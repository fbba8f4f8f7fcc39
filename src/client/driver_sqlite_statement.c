/*-------------------------------------------------------------------------
 *
 * driver_sqlite_statement.c
 *	  The SQLite driver: statements, and the values that go in and come out.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_sqlite.h"

#include <string.h>

int
rs_sqlite_bind(sqlite3_stmt *statement, int n, const rs_value *value)
{
	switch (value->kind)
	{
		case RS_INTEGER:
			return sqlite3_bind_int64(statement, n, value->integer);
		case RS_REAL:
			return sqlite3_bind_double(statement, n, value->real);
		case RS_TEXT:
			return sqlite3_bind_text64(statement, n, value->text, value->length, SQLITE_STATIC,
									   SQLITE_UTF8);
		case RS_BYTES:
			return value->length == 0 ? sqlite3_bind_zeroblob(statement, n, 0)
									  : sqlite3_bind_blob64(statement, n, value->text,
															value->length, SQLITE_STATIC);
		default:
			return sqlite3_bind_null(statement, n);
	}
}

static rs_result
bind(rs_sqlite_session *session, sqlite3_stmt *statement, const rs_value *values, int count)
{
	for (int i = 0; i < count; i++)
	{
		if (rs_sqlite_bind(statement, i + 1, &values[i]) != SQLITE_OK)
			return rs_sqlite_fail(session);
	}
	return RS_DONE;
}

static rs_value
column_value(sqlite3_stmt *statement, int column)
{
	rs_value value = RS_VALUE_NULL;

	switch (sqlite3_column_type(statement, column))
	{
		case SQLITE_INTEGER:
			return rs_value_of_integer(sqlite3_column_int64(statement, column));
		case SQLITE_FLOAT:
			value.kind = RS_REAL;
			value.real = sqlite3_column_double(statement, column);
			return value;
		case SQLITE_TEXT:
			value.kind = RS_TEXT;
			value.text = (const char *) sqlite3_column_text(statement, column);
			break;
		case SQLITE_BLOB:
			value.kind = RS_BYTES;
			value.text = sqlite3_column_blob(statement, column);
			break;
		default:
			return value;
	}
	value.length = (size_t) sqlite3_column_bytes(statement, column);
	if (value.text == NULL)
		value.text = "";
	return value;
}

/* Prepared, from its slot where it has one. */
static sqlite3_stmt *
prepare(rs_sqlite_session *session, const rs_command *command)
{
	sqlite3_stmt *statement = command->slot >= 0 ? session->kept[command->slot] : NULL;

	if (statement != NULL && strcmp(sqlite3_sql(statement), command->text) == 0)
		return statement;
	if (statement != NULL)
	{
		(void) sqlite3_finalize(statement);
		session->kept[command->slot] = NULL;
		statement = NULL;
	}
	if (sqlite3_prepare_v3(session->db, command->text, -1,
						   command->slot >= 0 ? SQLITE_PREPARE_PERSISTENT : 0, &statement,
						   NULL) != SQLITE_OK)
		return NULL;
	if (command->slot >= 0)
		session->kept[command->slot] = statement;
	return statement;
}

#define MAX_COLUMNS 32

/*
 * Step through all rows, also where the callback has seen enough: an UPDATE .. RETURNING has
 * changed everything before its first row, but a SELECT that is left holds its snapshot.
 */
static rs_result
step_through(rs_sqlite_session *session, sqlite3_stmt *statement, rs_row_callback row, void *arg,
			 int64_t *affected)
{
	int columns = sqlite3_column_count(statement);
	int64_t rows = 0;
	int code;

	if (columns > MAX_COLUMNS)
		columns = MAX_COLUMNS;
	while ((code = sqlite3_step(statement)) == SQLITE_ROW)
	{
		rs_value values[MAX_COLUMNS];

		rows++;
		if (row == NULL)
			continue;
		for (int i = 0; i < columns; i++)
			values[i] = column_value(statement, i);
		if (!row(arg, values, columns))
		{
			code = SQLITE_DONE;
			break;
		}
	}
	if (code != SQLITE_DONE)
		return rs_sqlite_fail(session);
	if (affected != NULL)
		*affected = columns > 0 ? rows : sqlite3_changes(session->db);
	return RS_DONE;
}

rs_result
rs_sqlite_execute(rs_session *base, const rs_command *command, const rs_value *values, int count,
				  rs_row_callback row, void *arg, int64_t *affected)
{
	rs_sqlite_session *session = (rs_sqlite_session *) base;
	sqlite3_stmt *statement = prepare(session, command);
	rs_result result;

	if (statement == NULL)
		return rs_sqlite_fail(session);
	result = bind(session, statement, values, count);
	if (result == RS_DONE)
		result = step_through(session, statement, row, arg, affected);
	if (command->slot >= 0)
	{
		/* The values are the caller's, and gone by the next time. */
		(void) sqlite3_reset(statement);
		if (count > 0)
			(void) sqlite3_clear_bindings(statement);
	}
	else
		(void) sqlite3_finalize(statement);
	return result;
}

void
rs_sqlite_forget_statements(rs_session *base)
{
	rs_sqlite_session *session = (rs_sqlite_session *) base;

	rs_sqlite_forget_handler(session);
	for (int i = 0; i < RS_SLOT_COUNT; i++)
	{
		(void) sqlite3_finalize(session->kept[i]);
		session->kept[i] = NULL;
	}
}
