/*-------------------------------------------------------------------------
 *
 * driver_mysql_table.c
 *	  The driver for MySQL and MariaDB: looking at a table.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_mysql.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

/* A question about a table, whose name stands for each of the parameters. */
static rs_result
ask(rs_session *base, const char *text, const char *name, int count, rs_row_callback row, void *arg)
{
	const rs_command command = {.text = text, .slot = -1};
	const rs_value values[3] = {rs_value_of_text(name), rs_value_of_text(name),
								rs_value_of_text(name)};

	return rs_mysql_execute(base, &command, values, count, row, arg, NULL);
}

/* ---------------------------------------------------------------- columns */

typedef struct looking
{
	rs_arena *arena;
	rs_look *look;
	const rs_table *table;
} looking;

/* name, type, may be NULL, is generated */
static bool
keep_column(void *arg, const rs_value *values, int count)
{
	looking *at = arg;
	rs_column *column = rs_look_add(at->look, at->arena, &values[0], &values[1]);

	(void) count;
	if (column == NULL)
		return false;
	column->is_nullable = values[2].integer != 0;
	column->is_generated = values[3].integer != 0;
	return true;
}

/* Types, each with a comma in front and behind. */
#define INTEGERS ",tinyint,smallint,mediumint,int,bigint,"
#define TIMES ",datetime,timestamp,"
#define OBJECTS ",json,text,mediumtext,longtext,"
#define IDS INTEGERS "char,varchar,binary,varbinary,uuid,inet4,inet6,"
#define KEYS INTEGERS "char,varchar,tinytext,text,mediumtext,longtext,uuid,enum,"

static bool
is_of(const char *type, const char *types)
{
	size_t length = strlen(type);

	for (const char *at = strchr(types, ','); at != NULL; at = strchr(at + 1, ','))
	{
		if (strncasecmp(at + 1, type, length) == 0 && at[1 + length] == ',')
			return true;
	}
	return false;
}

/* The types that a role's column may have, and what to say of another. */
static const struct
{
	rs_role role;
	const char *types;
	const char *hint;
} role_types[] = {
	{RS_ROLE_ID, IDS, "An id is an integer, CHAR, VARCHAR, BINARY, VARBINARY or UUID."},
	{RS_ROLE_PRIORITY, INTEGERS, "A priority is an integer."},
	{RS_ROLE_ATTEMPT, INTEGERS, "An attempt is an integer."},
	{RS_ROLE_RETRY_AFTER, TIMES, "Times are DATETIME, or TIMESTAMP, in UTC."},
	{RS_ROLE_PROCESSED_AT, TIMES, "Times are DATETIME, or TIMESTAMP, in UTC."},
	{RS_ROLE_LOCKED_UNTIL, TIMES, "Times are DATETIME, or TIMESTAMP, in UTC."},
	{RS_ROLE_HEADERS, OBJECTS,
	 "Headers are JSON, TEXT, MEDIUMTEXT or LONGTEXT: a dead letter's say why it is one."},
	{RS_ROLE_PARTITION_KEY, KEYS, "A partition key is an integer, text or UUID."},
};

static rs_result
check_types(rs_session *base, const rs_table *table, const rs_look *look)
{
	const char *start;
	size_t length;

	for (size_t i = 0; i < sizeof(role_types) / sizeof(role_types[0]); i++)
	{
		const char *name = table->column[role_types[i].role];
		const rs_column *column = name != NULL ? rs_look_find(look, name, strlen(name)) : NULL;

		if (column != NULL && !is_of(column->type, role_types[i].types))
			return rs_mysql_refuse(rs_mysql_of(base), role_types[i].hint,
								   "column \"%s\" of type %s cannot be the queue's %s", name,
								   column->type, rs_role_word(role_types[i].role));
	}
	for (int n = 0; table->lock_key != NULL && rs_key_column(table->lock_key, n, &start, &length);
		 n++)
	{
		const rs_column *column = rs_look_find(look, start, length);

		if (column != NULL && !is_of(column->type, KEYS))
			return rs_mysql_refuse(
				rs_mysql_of(base),
				"The text of other types than integers, text and UUID depends on "
				"settings.",
				"column \"%s\" of type %s cannot be part of a lock key", column->name,
				column->type);
	}
	return RS_DONE;
}

/* ---------------------------------------------------------------- indexes */

#define MAX_INDEX_COLUMNS 16

/* An index, as its columns come one after the other. */
typedef struct index_list
{
	looking *at;
	const char *id;
	const char
		*wanted[RS_ROLE_COUNT + 1]; /* the claim's columns in order; the last one is the id */
	int wanted_count;

	char name[256];
	bool is_unique;
	bool is_plain; /* whole columns, ascending, in use */
	const char *columns[MAX_INDEX_COLUMNS];
	int count;

	const char *claim_index; /* an index of all that is wanted */
	const char
		*claim_index_and_key; /* one without the id, which is in it if it is the primary key */
	bool id_is_primary_key;
} index_list;

static bool
begins_as_wanted(const index_list *list, int count)
{
	if (!list->is_plain || list->count < count)
		return false;
	for (int i = 0; i < count; i++)
	{
		if (list->columns[i] == NULL || strcasecmp(list->columns[i], list->wanted[i]) != 0)
			return false;
	}
	return true;
}

/* The columns of an index are complete. */
static void
judge_index(index_list *list)
{
	looking *at = list->at;
	const char *lease = at->table->column[RS_ROLE_LOCKED_UNTIL];

	if (list->count == 0)
		return;
	if (list->is_unique && list->is_plain && list->count == 1 && list->columns[0] != NULL &&
		strcasecmp(list->columns[0], list->id) == 0)
	{
		at->look->id_is_unique = true;
		list->id_is_primary_key |= strcmp(list->name, "PRIMARY") == 0;
	}
	if (list->claim_index == NULL && begins_as_wanted(list, list->wanted_count))
		list->claim_index = rs_copy(at->arena, list->name);
	if (list->claim_index_and_key == NULL && list->count == list->wanted_count - 1 &&
		begins_as_wanted(list, list->count))
		list->claim_index_and_key = rs_copy(at->arena, list->name);
	if (lease != NULL && list->is_plain && list->columns[0] != NULL &&
		strcasecmp(list->columns[0], lease) == 0)
		at->look->has_index[RS_INDEX_LEASE] = true;
}

/* name, is unique, column, is whole, ascending and in use; index by index, in the order of their
 * columns */
static bool
keep_index_column(void *arg, const rs_value *values, int count)
{
	index_list *list = arg;
	char name[sizeof(list->name)];

	(void) count;
	(void) snprintf(name, sizeof(name), "%.*s", (int) values[0].length, values[0].text);
	if (strcmp(name, list->name) != 0)
	{
		judge_index(list);
		memcpy(list->name, name, sizeof(name));
		list->is_unique = values[1].integer != 0;
		list->is_plain = true;
		list->count = 0;
	}
	if (list->count < MAX_INDEX_COLUMNS)
		list->columns[list->count] = rs_text_of(list->at->arena, &values[2]);
	list->is_plain = list->is_plain && list->count < MAX_INDEX_COLUMNS && values[3].integer != 0;
	list->count++;
	return true;
}

static rs_result
look_at_indexes(rs_session *base, looking *at)
{
	static const rs_role order[] = {RS_ROLE_GROUP, RS_ROLE_PROCESSED_AT, RS_ROLE_PRIORITY,
									RS_ROLE_RETRY_AFTER, RS_ROLE_ID};
	const rs_table *table = at->table;
	index_list list = {.at = at, .id = table->column[RS_ROLE_ID]};
	char text[512];
	rs_result result;

	for (size_t i = 0; i < sizeof(order) / sizeof(order[0]); i++)
	{
		if (table->column[order[i]] != NULL)
			list.wanted[list.wanted_count++] = table->column[order[i]];
	}
	/* Only the claims of partition keys ask which rows are leased. */
	at->look->has_index[RS_INDEX_LEASE] = table->column[RS_ROLE_PARTITION_KEY] == NULL;
	/* One that the optimizer is told to overlook cannot be forced upon it. */
	(void) snprintf(text, sizeof(text),
					"SELECT INDEX_NAME, NON_UNIQUE = 0, COLUMN_NAME,"
					" SUB_PART IS NULL AND COLLATION = 'A' AND INDEX_TYPE = 'BTREE' AND %s"
					" FROM information_schema.STATISTICS"
					" WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = ?"
					" ORDER BY INDEX_NAME, SEQ_IN_INDEX",
					rs_mysql_of(base)->is_mariadb ? "IGNORED = 'NO'" : "IS_VISIBLE = 'YES'");
	result = ask(base, text, at->look->name, 1, keep_index_column, &list);
	judge_index(&list);
	at->look->claim_index = list.claim_index;
	if (list.claim_index == NULL && list.id_is_primary_key)
		at->look->claim_index = list.claim_index_and_key;
	at->look->has_index[RS_INDEX_CLAIM] = at->look->claim_index != NULL;
	return result;
}

/* ------------------------------------------------------------- the table */

typedef struct found_table
{
	rs_arena *arena;
	const char *schema;
	const char *name;
	const char *type;
	const char *engine;
} found_table;

static bool
keep_table(void *arg, const rs_value *values, int count)
{
	found_table *found = arg;

	(void) count;
	found->schema = rs_text_of(found->arena, &values[0]);
	found->name = rs_text_of(found->arena, &values[1]);
	found->type = rs_text_of(found->arena, &values[2]);
	found->engine = rs_text_of(found->arena, &values[3]);
	return false;
}

static rs_result
find_table(rs_session *base, const char *name, found_table *found)
{
	rs_mysql_session *session = rs_mysql_of(base);
	rs_result result =
		ask(base,
			"SELECT TABLE_SCHEMA, TABLE_NAME, TABLE_TYPE, ENGINE FROM information_schema.TABLES"
			" WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = ? AND CAST(TABLE_NAME AS BINARY) ="
			" CAST(IF(@@lower_case_table_names = 0, ?, LOWER(?)) AS BINARY)",
			name, 3, keep_table, found);

	if (result != RS_DONE)
		return result;
	if (found->name == NULL || found->type == NULL)
	{
		rs_error_set(&base->error, RUSTSTREAM_NOT_FOUND, "", NULL,
					 "there is no table \"%.200s\" in database \"%.200s\"", name,
					 session->database);
		return RS_FAILED;
	}
	if (strstr(found->type, "VIEW") != NULL)
		return rs_mysql_refuse(session, NULL, "\"%s\" is a view: a queue is a table", found->name);
	if (found->engine == NULL || strcasecmp(found->engine, "InnoDB") != 0)
		return rs_mysql_refuse(session, "ALTER TABLE .. ENGINE = InnoDB makes it one.",
							   "table \"%s\" is of engine %s, which has no transactions with row "
							   "locks: a queue is an InnoDB table",
							   found->name, found->engine != NULL ? found->engine : "none");
	return RS_DONE;
}

rs_result
rs_mysql_look(rs_session *base, const rs_table *table, rs_arena *arena, rs_look *look)
{
	found_table found = {.arena = arena};
	looking at = {.arena = arena, .look = look, .table = table};
	const char *payload = table->column[RS_ROLE_PAYLOAD];
	const rs_column *column;
	rs_result result;

	memset(look, 0, sizeof(*look));
	result = find_table(base, table->name, &found);
	if (result != RS_DONE)
		return result;
	look->schema = found.schema;
	look->name = found.name;
	result = ask(base,
				 "SELECT COLUMN_NAME, DATA_TYPE, IS_NULLABLE = 'YES',"
				 " EXTRA REGEXP '(VIRTUAL|STORED|PERSISTENT) GENERATED'"
				 " FROM information_schema.COLUMNS"
				 " WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = ? ORDER BY ORDINAL_POSITION",
				 look->name, 1, keep_column, &at);
	if (result == RS_DONE)
		result = look_at_indexes(base, &at);
	if (result == RS_DONE && arena->is_exhausted)
		return rs_mysql_no_memory(rs_mysql_of(base));
	if (result != RS_DONE)
		return result;
	column = payload != NULL ? rs_look_find(look, payload, strlen(payload)) : NULL;
	look->payload_is_bytes =
		column != NULL &&
		is_of(column->type, ",binary,varbinary,tinyblob,blob,mediumblob,longblob,");
	return check_types(base, table, look);
}

/* ----------------------------------------------------- what cannot be served */

static bool
read_flag(void *arg, const rs_value *columns, int count)
{
	(void) count;
	*(bool *) arg =
		columns[0].kind == RS_TEXT && columns[0].length > 0 && columns[0].text[0] == '1';
	return false;
}

/*
 * Where InnoDB refuses to write to a row that has changed since the transaction's snapshot
 * (MariaDB, by default from 11.6 on), such a transaction could not settle a lease that was extended
 * since.
 */
rs_result
rs_mysql_check_plan(rs_session *base, const struct rs_plan *plan, const char **warning)
{
	static const rs_command command = {
		.text =
			"SELECT IF(VARIABLE_VALUE = 'ON', '1', '0') FROM information_schema.SESSION_VARIABLES"
			" WHERE VARIABLE_NAME = 'innodb_snapshot_isolation'",
		.slot = -1};
	rs_isolation level = plan->table.isolation;
	bool is_checked = false;
	rs_result result;

	(void) warning;
	if (!rs_mysql_of(base)->is_mariadb || !plan->policy.transactional ||
		rs_table_form(&plan->table) != RS_FORM_LEASE ||
		(level != RS_ISOLATION_REPEATABLE_READ && level != RS_ISOLATION_SERIALIZABLE))
		return RS_DONE;
	result = rs_mysql_execute(base, &command, NULL, 0, read_flag, &is_checked, NULL);
	if (result != RS_DONE || !is_checked)
		return result;
	return rs_mysql_refuse(
		rs_mysql_of(base),
		"Describe the queue at read committed, or subscribe with transactional off.",
		"a lease cannot be served in transactions at %s here: the server's "
		"innodb_snapshot_isolation would not let them end a row whose lease was extended",
		rs_isolation_word(level));
}
