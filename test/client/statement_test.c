/*-------------------------------------------------------------------------
 *
 * statement_test.c
 *	  Every statement of every kind of table: SQLite takes it, and never sorts
 *	  or scans a queue for it.
 *
 * Claims are asked of tables with every combination of roles.  What SQLite plans to do is read from
 * EXPLAIN QUERY PLAN, with the indexes that we ask for, and without statistics.
 *
 *-------------------------------------------------------------------------
 */
#include "core/core.h"
#include "tap.h"

#include <sqlite3.h>
#include <string.h>

static sqlite3 *db;
static int statements;
static int wrong;

static const char *const columns[RS_ROLE_COUNT] = {
	[RS_ROLE_ID] = "id",
	[RS_ROLE_GROUP] = "grou\"p",
	[RS_ROLE_PRIORITY] = "priority",
	[RS_ROLE_PARTITION_KEY] = "partition",
	[RS_ROLE_RETRY_AFTER] = "retry_after",
	[RS_ROLE_ATTEMPT] = "attempt",
	[RS_ROLE_PROCESSED_AT] = "processed_at",
	[RS_ROLE_LOCKED_UNTIL] = "locked_until",
	[RS_ROLE_HEADERS] = "headers",
	[RS_ROLE_PAYLOAD] = "order",
};

static void
complain(const char *text, const char *what)
{
	wrong++;
	printf("# %s\n# %s\n", text, what);
}

static void
run(const char *text)
{
	char *message = NULL;

	if (sqlite3_exec(db, text, NULL, NULL, &message) != SQLITE_OK)
		complain(text, message);
	sqlite3_free(message);
}

static void
never_held(sqlite3_context *context, int count, sqlite3_value **values)
{
	(void) count;
	(void) values;
	sqlite3_result_int(context, 0);
}

/*
 * The queue is read in the order of an index, or of its rowid where a claim's order is the id
 * alone; a sort would read all of it.
 */
static bool
is_harmless(const char *step, bool by_id_alone)
{
	if (strstr(step, "TEMP B-TREE") != NULL)
		return false;
	return strncmp(step, "SCAN ruststream_row", 19) != 0 || by_id_alone ||
		   strstr(step, "USING") != NULL;
}

static void
check_plan(const char *text, bool by_id_alone)
{
	char explain[16384];
	sqlite3_stmt *statement;

	(void) snprintf(explain, sizeof(explain), "EXPLAIN QUERY PLAN %s", text);
	if (sqlite3_prepare_v2(db, explain, -1, &statement, NULL) != SQLITE_OK)
	{
		complain(text, sqlite3_errmsg(db));
		return;
	}
	while (sqlite3_step(statement) == SQLITE_ROW)
	{
		const char *step = (const char *) sqlite3_column_text(statement, 3);

		if (!is_harmless(step, by_id_alone))
			complain(text, step);
	}
	(void) sqlite3_finalize(statement);
}

static void
check_statement(const char *text, rs_operation operation, const rs_table *table,
				const rs_statement *rendered)
{
	bool by_id_alone = table->column[RS_ROLE_GROUP] == NULL &&
					   table->column[RS_ROLE_PRIORITY] == NULL &&
					   table->column[RS_ROLE_RETRY_AFTER] == NULL;
	sqlite3_stmt *statement;

	statements++;
	if (sqlite3_prepare_v2(db, text, -1, &statement, NULL) != SQLITE_OK)
	{
		complain(text, sqlite3_errmsg(db));
		return;
	}
	if (sqlite3_bind_parameter_count(statement) != rendered->parameter_count)
		complain(text, "another number of parameters");
	(void) sqlite3_finalize(statement);
	/* Counting dead letters reads up to its limit of them, in any order. */
	if (operation != RS_OP_DEPTH_DEAD_GROUP && operation != RS_OP_DEPTH_DEAD_TABLE)
		check_plan(text, by_id_alone);
}

static void
check_table(const rs_table *table)
{
	static const char *const moved[] = {"id", "order", "locked_until"};
	const rs_destination dead = {
		.schema = "main", .name = "dead", .columns = moved, .column_count = 3};
	char text[12288];

	run("DROP TABLE IF EXISTS \"a \"\"queue\"");
	run("CREATE TABLE \"a \"\"queue\" (id INTEGER PRIMARY KEY, \"grou\"\"p\" TEXT, priority "
		"INTEGER,"
		" partition TEXT, retry_after TEXT, attempt INTEGER, processed_at TEXT, locked_until TEXT,"
		" headers TEXT, \"order\" TEXT)");
	for (int index = 0; index < RS_INDEX_COUNT; index++)
	{
		if (!rs_index_is_needed(RS_DIALECT_SQLITE, table, (rs_index) index))
			continue;
		(void) rs_index_render(RS_DIALECT_SQLITE, table, (rs_index) index, text, sizeof(text));
		run(text);
	}
	for (int operation = 0; operation < RS_OPERATION_COUNT; operation++)
	{
		int count = rs_statement_count(RS_DIALECT_SQLITE, (rs_operation) operation, table);

		for (int i = 0; i < count; i++)
		{
			rs_statement rendered = rs_statement_render(RS_DIALECT_SQLITE, (rs_operation) operation,
														i, table, &dead, text, sizeof(text));

			check_statement(text, (rs_operation) operation, table, &rendered);
		}
	}
}

/* Does a take of this row, whose key is "k", return it? */
static bool
takes(const rs_table *table, int id)
{
	char text[12288];
	char key[16];
	rs_statement rendered =
		rs_statement_render(RS_DIALECT_SQLITE, RS_OP_TAKE_ROW, 0, table, NULL, text, sizeof(text));
	sqlite3_stmt *statement;
	bool found;

	(void) snprintf(key, sizeof(key), "key-%d", id);
	if (sqlite3_prepare_v2(db, text, -1, &statement, NULL) != SQLITE_OK)
	{
		complain(text, sqlite3_errmsg(db));
		return false;
	}
	for (int i = 0; i < rendered.parameter_count; i++)
	{
		if (rendered.parameters[i] == RS_PARAM_ID)
			(void) sqlite3_bind_int(statement, i + 1, id);
		else
			(void) sqlite3_bind_text(statement, i + 1,
									 rendered.parameters[i] == RS_PARAM_KEY   ? key
									 : rendered.parameters[i] == RS_PARAM_NOW ? "2026-01-01"
																			  : "k",
									 -1, SQLITE_TRANSIENT);
	}
	found = sqlite3_step(statement) == SQLITE_ROW;
	(void) sqlite3_finalize(statement);
	return found;
}

/*
 * A candidate of the advisory lock form may be there because an earlier row of its partition key
 * has come back while it was looked for: it is not taken.
 */
static void
test_takes(void)
{
	rs_table table = {.schema = "main",
					  .name = "lines",
					  .lock_key = "key-{id}",
					  .column = {[RS_ROLE_ID] = "id", [RS_ROLE_PARTITION_KEY] = "partition"}};

	run("CREATE TABLE lines (id INTEGER PRIMARY KEY, partition TEXT, priority INTEGER,"
		" retry_after TEXT, attempt INTEGER);"
		"INSERT INTO lines (id, partition, priority, retry_after) VALUES (1, 'k', NULL, '2030'),"
		" (2, 'other', NULL, NULL), (3, 'k', 2, '2025'), (4, 'k', 2, NULL), (5, 'k', 1, '2025'),"
		" (6, NULL, 9, NULL), (7, NULL, 9, NULL)");
	ok(takes(&table, 1) && !takes(&table, 3) && !takes(&table, 5), "a take of the first id only");
	ok(takes(&table, 7), "of a row without a partition key any may be taken");
	table.column[RS_ROLE_RETRY_AFTER] = "retry_after";
	ok(takes(&table, 4) && !takes(&table, 3) && !takes(&table, 1) && !takes(&table, 5),
	   "with delays of the first one without");
	table.column[RS_ROLE_PRIORITY] = "priority";
	ok(takes(&table, 5) && !takes(&table, 4) && !takes(&table, 3) && !takes(&table, 1),
	   "with priorities of the lowest that is due");
	run("UPDATE lines SET priority = NULL, retry_after = '2025' WHERE id = 1");
	table.column[RS_ROLE_ATTEMPT] = "attempt";
	ok(takes(&table, 1) && !takes(&table, 5), "or of the row that has come due");
}

int
main(void)
{
	static const char *const functions[] = {"ruststream_is_held", "ruststream_held_id",
											"ruststream_key_is_held",
											"ruststream_partition_is_held"};
	static const rs_role optional[] = {RS_ROLE_GROUP,       RS_ROLE_PRIORITY, RS_ROLE_PARTITION_KEY,
									   RS_ROLE_RETRY_AFTER, RS_ROLE_ATTEMPT,  RS_ROLE_PROCESSED_AT,
									   RS_ROLE_HEADERS,     RS_ROLE_PAYLOAD};
	int tables = 0;
	char name[128];

	if (sqlite3_open(":memory:", &db) != SQLITE_OK)
		return 2;
	for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++)
		(void) sqlite3_create_function(db, functions[i], 1, SQLITE_UTF8, NULL, never_held, NULL,
									   NULL);
	run("CREATE TABLE dead (id INTEGER PRIMARY KEY, \"order\" TEXT, locked_until TEXT)");
	for (int form = 0; form < 3; form++)
	{
		for (unsigned roles = 0; roles < 1u << 8; roles++)
		{
			rs_table table = {.schema = "main", .name = "a \"queue", .column = {columns[0]}};

			for (int i = 0; i < 8; i++)
				table.column[optional[i]] = roles & (1u << i) ? columns[optional[i]] : NULL;
			if (form == 0)
				table.lock_key = "it's {grou\"p}-{{{id}}}";
			else
				table.column[RS_ROLE_LOCKED_UNTIL] = columns[RS_ROLE_LOCKED_UNTIL];
			table.fifo = form == 2;
			if (rs_table_check(&table).code != RS_OK ||
				rs_table_check_dialect(RS_DIALECT_SQLITE, &table).code != RS_OK)
				continue;
			check_table(&table);
			tables++;
		}
	}
	test_takes();
	(void) sqlite3_close(db);
	(void) snprintf(name, sizeof(name), "%d statements of %d tables neither sort nor scan a queue",
					statements, tables);
	ok(wrong == 0, name);
	return done_testing();
}
