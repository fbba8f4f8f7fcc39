/*-------------------------------------------------------------------------
 *
 * mysql_statement_test.c
 *	  Every statement of every kind of table: the server takes it, and never sorts
 *	  or scans a queue for it.
 *
 *	  mysql_statement_test SOCKET
 *
 * Tables have every combination of roles that claims ask for, the index that we ask for, and some
 * rows.  What the server plans to do is read from EXPLAIN.
 *
 *-------------------------------------------------------------------------
 */
#include "core/core.h"
#include "tap.h"

#include <mysql.h>
#include <stdlib.h>
#include <string.h>

#define OPTIONAL_COUNT 5

static MYSQL *db;
static int statements;
static int plans;
static int wrong;
static long long id;         /* of the row that statements are about */
static bool reads_something; /* the last plan that was read does */

static const char *const columns[RS_ROLE_COUNT] = {
	[RS_ROLE_ID] = "id",
	[RS_ROLE_GROUP] = "grou`p",
	[RS_ROLE_PRIORITY] = "priority",
	[RS_ROLE_PARTITION_KEY] = "partition",
	[RS_ROLE_RETRY_AFTER] = "retry_after",
	[RS_ROLE_ATTEMPT] = "attempt",
	[RS_ROLE_PROCESSED_AT] = "processed_at",
	[RS_ROLE_LOCKED_UNTIL] = "locked_until",
	[RS_ROLE_PAYLOAD] = "order",
};

static const char create[] =
	"CREATE TABLE queue (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,"
	" `grou``p` VARCHAR(50) NOT NULL DEFAULT 'g', priority INT, `partition` VARCHAR(50),"
	" retry_after DATETIME(6), attempt INT, processed_at DATETIME(6), locked_until DATETIME,"
	" `order` TEXT) ENGINE = InnoDB";

static void
complain(const char *text, const char *what)
{
	wrong++;
	printf("# %s\n# %s\n", text, what);
}

static void
run(const char *text)
{
	if (mysql_real_query(db, text, strlen(text)) != 0)
		complain(text, mysql_error(db));
}

/* A value for a parameter, as the library gives it. */
static void
bind(MYSQL_BIND *bound, rs_parameter parameter)
{
	static long long number = 3;
	static char time[] = "2026-01-01 00:00:00.123456";
	static char text[] = "g";

	memset(bound, 0, sizeof(*bound));
	switch (parameter)
	{
		case RS_PARAM_ID:
			bound->buffer_type = MYSQL_TYPE_LONGLONG;
			bound->buffer = &id;
			return;
		case RS_PARAM_ATTEMPT:
		case RS_PARAM_LIMIT:
		case RS_PARAM_PRIORITY:
			bound->buffer_type = MYSQL_TYPE_LONGLONG;
			bound->buffer = &number;
			return;
		case RS_PARAM_NOW:
		case RS_PARAM_UNTIL:
		case RS_PARAM_TOKEN:
		case RS_PARAM_ANNOUNCED:
			bound->buffer_type = MYSQL_TYPE_STRING;
			bound->buffer = time;
			bound->buffer_length = sizeof(time) - 1;
			return;
		case RS_PARAM_HELD:
			bound->buffer_type = MYSQL_TYPE_NULL;
			return;
		default:
			bound->buffer_type = MYSQL_TYPE_STRING;
			bound->buffer = text;
			bound->buffer_length = sizeof(text) - 1;
	}
}

/* The place of a column of EXPLAIN, of which MySQL has more than MariaDB. */
static unsigned
place_of(MYSQL_STMT *prepared, const char *name)
{
	unsigned count = mysql_stmt_field_count(prepared);

	for (unsigned i = 0; i < count; i++)
	{
		if (strcmp(prepared->fields[i].name, name) == 0)
			return i;
	}
	complain(name, "EXPLAIN has no such column");
	return 0;
}

static void
read_plan(MYSQL_STMT *prepared, const char *text)
{
	unsigned select_type = place_of(prepared, "select_type");
	unsigned table = place_of(prepared, "table");
	unsigned type = place_of(prepared, "type");
	unsigned extra = place_of(prepared, "Extra");
	char values[16][512];
	unsigned long lengths[16];
	my_bool nulls[16];
	MYSQL_BIND bound[16];
	unsigned count = mysql_stmt_field_count(prepared);

	memset(bound, 0, sizeof(bound));
	for (unsigned i = 0; i < count && i < 16; i++)
	{
		bound[i].buffer_type = MYSQL_TYPE_STRING;
		bound[i].buffer = values[i];
		bound[i].buffer_length = sizeof(values[i]) - 1;
		bound[i].length = &lengths[i];
		bound[i].is_null = &nulls[i];
	}
	if (mysql_stmt_bind_result(prepared, bound) != 0 || mysql_stmt_store_result(prepared) != 0)
		complain(text, mysql_stmt_error(prepared));
	reads_something = true;
	while (mysql_stmt_fetch(prepared) == 0)
	{
		plans++;
		for (unsigned i = 0; i < count; i++)
			values[i][nulls[i] ? 0 : lengths[i]] = '\0';
		/* MariaDB's words, and MySQL's. */
		if (strstr(values[extra], "Impossible WHERE") != NULL ||
			strstr(values[extra], "no matching row in const table") != NULL)
			reads_something = false;
		if (strstr(values[extra], "filesort") != NULL)
			complain(text, values[extra]);
		/* What an inner query has found is read as it is; what is inserted into is not read. */
		if (strcmp(values[type], "ALL") == 0 && values[table][0] != '<' &&
			strcmp(values[select_type], "INSERT") != 0)
			complain(text, values[table]);
	}
}

static void
check_statement(const char *text, rs_operation operation, const rs_statement *rendered)
{
	char explain[16384];
	MYSQL_BIND bound[RS_MAX_PARAMETERS];
	MYSQL_STMT *prepared = mysql_stmt_init(db);
	/* Counting dead letters reads up to its limit of them, in any order. */
	bool any_order = operation == RS_OP_DEPTH_DEAD_GROUP || operation == RS_OP_DEPTH_DEAD_TABLE ||
					 operation == RS_OP_PUBLISH;

	statements++;
	(void) snprintf(explain, sizeof(explain), "%s%s", any_order ? "" : "EXPLAIN ", text);
	if (prepared == NULL || mysql_stmt_prepare(prepared, explain, strlen(explain)) != 0)
		complain(text, prepared != NULL ? mysql_stmt_error(prepared) : "out of memory");
	else if (mysql_stmt_param_count(prepared) != (unsigned) rendered->parameter_count)
		complain(text, "another number of parameters");
	else
	{
		for (int i = 0; i < rendered->parameter_count; i++)
			bind(&bound[i], rendered->parameters[i]);
		if ((rendered->parameter_count > 0 && mysql_stmt_bind_param(prepared, bound) != 0) ||
			mysql_stmt_execute(prepared) != 0)
			complain(text, mysql_stmt_error(prepared));
		else if (!any_order)
			read_plan(prepared, text);
	}
	if (prepared != NULL)
		(void) mysql_stmt_close(prepared);
}

static void
check_table(const rs_table *table)
{
	static const char *const moved[] = {"id", "order"};
	static const rs_destination dead = {
		.schema = "app", .name = "dead", .columns = moved, .column_count = 2};
	char text[16000];

	run("DROP TABLE IF EXISTS queue");
	run(create);
	run("INSERT INTO queue (`order`, `partition`) WITH RECURSIVE numbers (n) AS"
		" (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 20) SELECT n, n FROM numbers");
	for (int index = 0; index < RS_INDEX_COUNT; index++)
	{
		if (!rs_index_is_needed(RS_DIALECT_MYSQL, table, (rs_index) index))
			continue;
		(void) rs_index_render(RS_DIALECT_MYSQL, table, (rs_index) index, text, sizeof(text));
		run(text);
	}
	for (int operation = 0; operation < RS_OPERATION_COUNT; operation++)
	{
		for (int i = 0; i < rs_statement_count(RS_DIALECT_MYSQL, (rs_operation) operation, table);
			 i++)
		{
			rs_statement rendered = rs_statement_render(RS_DIALECT_MYSQL, (rs_operation) operation,
														i, table, &dead, text, sizeof(text));

			id = 3;
			check_statement(text, (rs_operation) operation, &rendered);
			if (operation != RS_OP_HEAD && operation != RS_OP_HEAD_UNDELAYED &&
				operation != RS_OP_HEAD_COME_DUE)
				continue;
			/* Of a row that others have ended meanwhile, which is often, no key is looked for. */
			id = 1000;
			check_statement(text, (rs_operation) operation, &rendered);
			if (reads_something)
				complain(text, "reads a queue for a row that has gone");
		}
	}
}

int
main(int argc, char **argv)
{
	static const rs_role optional[OPTIONAL_COUNT] = {RS_ROLE_GROUP, RS_ROLE_PRIORITY,
													 RS_ROLE_PARTITION_KEY, RS_ROLE_RETRY_AFTER,
													 RS_ROLE_PROCESSED_AT};
	int tables = 0;

	db = mysql_init(NULL);
	if (argc != 2 || db == NULL ||
		mysql_real_connect(db, NULL, "root", NULL, "app", 0, argv[1], 0) == NULL)
	{
		printf("Bail out! %s\n",
			   db != NULL ? mysql_error(db) : "usage: mysql_statement_test SOCKET");
		return 1;
	}
	if (!mariadb_connection(db))
		run("SET SESSION explain_format = 'TRADITIONAL'");
	run(create);
	run("CREATE TABLE dead LIKE queue");
	for (unsigned form = 0; form < RS_FORM_COUNT; form++)
	{
		/* One bit a role, and one for whether its groups are FIFO. */
		for (unsigned chosen = 0; chosen < 2u << OPTIONAL_COUNT; chosen++)
		{
			rs_table table = {.schema = "app", .name = "queue", .claim_index = "ruststream_claim"};

			table.fifo = chosen >> OPTIONAL_COUNT == 1;
			for (size_t i = 0; i < OPTIONAL_COUNT; i++)
			{
				if ((chosen >> i & 1) != 0)
					table.column[optional[i]] = columns[optional[i]];
			}
			table.column[RS_ROLE_ID] = columns[RS_ROLE_ID];
			table.column[RS_ROLE_ATTEMPT] = columns[RS_ROLE_ATTEMPT];
			table.column[RS_ROLE_PAYLOAD] = columns[RS_ROLE_PAYLOAD];
			if (form == RS_FORM_LEASE)
				table.column[RS_ROLE_LOCKED_UNTIL] = columns[RS_ROLE_LOCKED_UNTIL];
			if (form == RS_FORM_ADVISORY_LOCK)
				table.lock_key = "it's-{id}-{grou`p}";
			if (rs_table_check(&table).code != RS_OK)
				continue;
			tables++;
			check_table(&table);
		}
	}
	printf("# %d statements of %d tables\n", statements, tables);
	(void) ok(wrong == 0 && tables > 90 && plans > 1000,
			  "every statement is taken, and none sorts or scans a queue");
	mysql_close(db);
	return done_testing();
}
