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
	char text[8192];

	run("DROP TABLE IF EXISTS \"a \"\"queue\"");
	run("CREATE TABLE \"a \"\"queue\" (id INTEGER PRIMARY KEY, \"grou\"\"p\" TEXT, priority "
		"INTEGER,"
		" partition TEXT, retry_after TEXT, attempt INTEGER, processed_at TEXT, locked_until TEXT,"
		" headers TEXT, \"order\" TEXT)");
	(void) rs_index_render(RS_DIALECT_SQLITE, table, text, sizeof(text));
	run(text);
	if (rs_lease_index_render(RS_DIALECT_SQLITE, table, text, sizeof(text)).length > 0)
		run(text);
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

int
main(void)
{
	static const char *const functions[] = {"ruststream_is_held", "ruststream_key_is_held",
											"ruststream_partition_is_held"};
	static const rs_role optional[] = {RS_ROLE_GROUP,       RS_ROLE_PRIORITY, RS_ROLE_PARTITION_KEY,
									   RS_ROLE_RETRY_AFTER, RS_ROLE_ATTEMPT,  RS_ROLE_PROCESSED_AT,
									   RS_ROLE_HEADERS,     RS_ROLE_PAYLOAD};
	int tables = 0;
	char name[128];

	if (sqlite3_open(":memory:", &db) != SQLITE_OK)
		return 2;
	for (int i = 0; i < 3; i++)
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
	(void) sqlite3_close(db);
	(void) snprintf(name, sizeof(name), "%d statements of %d tables neither sort nor scan a queue",
					statements, tables);
	ok(wrong == 0, name);
	return done_testing();
}
