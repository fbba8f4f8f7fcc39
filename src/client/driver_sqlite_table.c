/*-------------------------------------------------------------------------
 *
 * driver_sqlite_table.c
 *	  The SQLite driver: looking at a table.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_sqlite.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* A question about a table: what it asks for is the first parameter. */
static rs_result
ask(rs_session *base, const char *text, const char *name, rs_row_callback row, void *arg)
{
	const rs_command command = {.text = text, .slot = -1, .parameter_count = 1};
	const rs_value value = rs_value_of_text(name);

	return base->driver->execute(base, &command, &value, 1, row, arg, NULL);
}

/* ---------------------------------------------------------------- columns */

typedef struct looking
{
	rs_arena *arena;
	rs_look *look;
	const rs_table *table;
	int key_columns;  /* of the primary key */
	bool id_is_key;   /* the id is one of them */
	bool id_is_rowid; /* an INTEGER PRIMARY KEY cannot be NULL */
} looking;

static bool
is_id(const looking *at, const char *name)
{
	return name != NULL && strcmp(name, at->table->column[RS_ROLE_ID]) == 0;
}

/* name, type, notnull, pk, hidden */
static bool
keep_column(void *arg, const rs_value *values, int count)
{
	looking *at = arg;
	rs_column *column = rs_look_add(at->look, at->arena, &values[0], &values[1]);

	(void) count;
	if (column == NULL)
		return !at->arena->is_exhausted;
	column->is_generated = values[4].integer != 0;
	column->is_nullable = values[2].integer == 0;
	if (values[3].integer != 0)
	{
		at->key_columns++;
		if (is_id(at, column->name))
		{
			at->id_is_key = true;
			at->id_is_rowid = sqlite3_stricmp(column->type, "INTEGER") == 0;
		}
	}
	return true;
}

/* As SQLite stores what has such a declared type, where nothing is converted. */
static bool
stores_bytes(const char *type)
{
	for (; *type != '\0'; type++)
	{
		if (sqlite3_strnicmp(type, "blob", 4) == 0)
			return true;
	}
	return false;
}

/* ---------------------------------------------------------------- indexes */

typedef struct index_list
{
	looking *at;
	rs_session *session;
	rs_result result;
	rs_role wanted[RS_ROLE_COUNT];
	int wanted_count;
} index_list;

#define MAX_INDEX_COLUMNS 8

typedef struct index_columns
{
	rs_arena *arena;
	const char *names[MAX_INDEX_COLUMNS]; /* NULL: an expression, or descending */
	int count;
} index_columns;

/* name, desc, of the key's columns in order */
static bool
keep_index_column(void *arg, const rs_value *values, int count)
{
	index_columns *columns = arg;

	(void) count;
	if (columns->count < MAX_INDEX_COLUMNS)
		columns->names[columns->count] =
			values[1].integer == 0 ? rs_text_of(columns->arena, &values[0]) : NULL;
	columns->count++;
	return true;
}

/*
 * Is an index's condition "column IS NULL", however it is quoted and spaced?  The text
 * behind the last WHERE is its condition.
 */
static bool
has_condition(const char *sql, const char *column)
{
	const char *where = NULL;
	char wanted[512];
	char found[512];
	size_t length = 0;

	if (sql == NULL)
		return false;
	for (const char *at = sql; *at != '\0'; at++)
	{
		if (sqlite3_strnicmp(at, "where", 5) == 0)
			where = at + 5;
	}
	if (where == NULL || strlen(column) > sizeof(wanted) - 16)
		return false;
	(void) snprintf(wanted, sizeof(wanted), "%sisnull", column);
	for (; *where != '\0' && length < sizeof(found) - 1; where++)
	{
		if (strchr("\"`[]() \t\r\n", *where) == NULL)
			found[length++] = *where;
	}
	found[length] = '\0';
	return sqlite3_stricmp(found, wanted) == 0;
}

/* The claim's columns first, in order; more may follow. */
static bool
serves_claims(const index_list *list, const index_columns *columns)
{
	if (columns->count < list->wanted_count || list->wanted_count > MAX_INDEX_COLUMNS)
		return false;
	for (int i = 0; i < list->wanted_count; i++)
	{
		const char *name = list->at->table->column[list->wanted[i]];

		if (columns->names[i] == NULL || sqlite3_stricmp(columns->names[i], name) != 0)
			return false;
	}
	return true;
}

/* name, unique, partial, sql */
static bool
judge_index(void *arg, const rs_value *values, int count)
{
	index_list *list = arg;
	looking *at = list->at;
	const rs_table *table = at->table;
	const char *name = rs_text_of(at->arena, &values[0]);
	const char *sql = rs_text_of(at->arena, &values[3]);
	const char *processed = table->column[RS_ROLE_PROCESSED_AT];
	const char *lease = table->column[RS_ROLE_LOCKED_UNTIL];
	bool is_partial = values[2].integer != 0;
	index_columns columns = {.arena = at->arena};

	(void) count;
	if (name == NULL)
		return false;
	list->result =
		ask(list->session, "SELECT name, desc FROM pragma_index_xinfo(?) WHERE key ORDER BY seqno",
			name, keep_index_column, &columns);
	if (list->result != RS_DONE)
		return false;
	if (values[1].integer != 0 && !is_partial && columns.count == 1 && is_id(at, columns.names[0]))
		at->look->id_is_unique = true;
	/* Rows that are processed have to be left out, or they pile up in front. */
	if (serves_claims(list, &columns) &&
		(processed != NULL ? is_partial && has_condition(sql, processed) : !is_partial))
		at->look->has_index[RS_INDEX_CLAIM] = true;
	if (lease != NULL && columns.names[0] != NULL && sqlite3_stricmp(columns.names[0], lease) == 0)
		at->look->has_index[RS_INDEX_LEASE] = true;
	return true;
}

static rs_result
look_at_indexes(rs_session *base, looking *at)
{
	index_list list = {.at = at, .session = base, .result = RS_DONE};
	const rs_table *table = at->table;
	rs_result result;

	list.wanted_count = rs_index_columns(table, RS_INDEX_CLAIM, list.wanted);
	/* A rowid has no index that is listed: it is the table. */
	at->look->id_is_unique = at->id_is_key && at->key_columns == 1;
	at->look->has_index[RS_INDEX_CLAIM] = list.wanted_count == 1 && at->look->id_is_unique &&
										  table->column[RS_ROLE_PROCESSED_AT] == NULL;
	result = ask(base,
				 "SELECT l.name, l.\"unique\", l.partial, s.sql FROM pragma_index_list(?) AS l"
				 " LEFT JOIN sqlite_schema AS s ON s.type = 'index' AND s.name = l.name",
				 at->look->name, judge_index, &list);
	return result == RS_DONE ? list.result : result;
}

/* ------------------------------------------------------------- the table */

typedef struct found_table
{
	rs_arena *arena;
	const char *name;
	const char *type;
} found_table;

static bool
keep_table(void *arg, const rs_value *values, int count)
{
	found_table *found = arg;

	(void) count;
	found->name = rs_text_of(found->arena, &values[0]);
	found->type = rs_text_of(found->arena, &values[1]);
	return false;
}

rs_result
rs_sqlite_look(rs_session *base, const rs_table *table, rs_arena *arena, rs_look *look)
{
	found_table found = {.arena = arena};
	looking at = {.arena = arena, .look = look, .table = table};
	const char *payload = table->column[RS_ROLE_PAYLOAD];
	rs_result result;

	memset(look, 0, sizeof(*look));
	result = ask(base,
				 "SELECT name, type FROM sqlite_schema WHERE name = ? COLLATE NOCASE"
				 " AND type IN ('table', 'view')",
				 table->name, keep_table, &found);
	if (result != RS_DONE)
		return result;
	if (arena->is_exhausted)
		return rs_session_no_memory(base);
	if (found.name == NULL || found.type == NULL || strcmp(found.type, "table") != 0)
	{
		rs_error_set(&base->error, found.name == NULL ? RUSTSTREAM_NOT_FOUND : RUSTSTREAM_REFUSED,
					 "", NULL,
					 found.name == NULL ? "there is no table \"%s\""
										: "\"%s\" is a view: a queue is a table",
					 table->name);
		return RS_FAILED;
	}
	look->schema = "main";
	look->name = found.name;
	result = ask(base, "SELECT name, type, \"notnull\", pk, hidden FROM pragma_table_xinfo(?)",
				 look->name, keep_column, &at);
	if (result == RS_DONE)
		result = look_at_indexes(base, &at);
	if (result == RS_DONE && arena->is_exhausted)
		return rs_session_no_memory(base);
	for (int i = 0; i < look->column_count && result == RS_DONE; i++)
	{
		rs_column *column = &look->columns[i];

		if (is_id(&at, column->name) && at.id_is_rowid && at.key_columns == 1)
			column->is_nullable = false;
		if (payload != NULL && strcmp(payload, column->name) == 0)
			look->payload_is_bytes = stores_bytes(column->type);
	}
	return result;
}
