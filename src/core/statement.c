/*-------------------------------------------------------------------------
 *
 * statement.c
 *	  The SQL catalogue: what each operation says to the server.
 *
 *-------------------------------------------------------------------------
 */
#include "core.h"
#include "template.h"

/*
 * Rules for the templates (template.h says how they are written)
 * --------------------------------------------------------------
 *
 * Nothing may resolve through a user's search_path: operators, functions and
 * types are written with pg_catalog.  The queue's alias is ruststream_row, a
 * name that a user's column will not have, and its columns are read through it.
 *
 * Above each template stands the statement it makes of a table with every role
 * it mentions, each column named like its role, parameters by their names.
 */

/* Begins the WHERE clause at the first condition, and continues it at others. */
#define WHERE "{ WHERE| AND}"

#define READ_GROUP "[group:" WHERE " ruststream_row.{group} OPERATOR(pg_catalog.=) :group]"
#define UNPROCESSED "[processed_at:" WHERE " ruststream_row.{processed_at} IS NULL]"
#define THIS_ROW WHERE " ruststream_row.{id} OPERATOR(pg_catalog.=) :id"

/* The order of the index that rs_index_render makes, group aside. */
#define CLAIM_ORDER                                                                                \
	" ORDER BY[priority: ruststream_row.{priority} NULLS FIRST,]"                                  \
	"[retry_after: ruststream_row.{retry_after} NULLS FIRST,] ruststream_row.{id}"

/* A row that was inserted without an attempt is before its first. */
#define ATTEMPT "COALESCE(ruststream_row.{attempt}, 1)"
#define COUNT_ATTEMPT "{attempt} = " ATTEMPT " OPERATOR(pg_catalog.+) 1"

/* The rows that this worker leaves alone for now, since they have just failed. */
#define NOT_HELD WHERE " ruststream_row.{id} OPERATOR(pg_catalog.<>) ALL (:held)"

/*
 * Headers are not cast: jsonb refuses what json lets pass, and a row must not
 * be able to break the claim that finds it.
 */
#define FIND(carried, which)                                                                       \
	"SELECT ruststream_row.{id}, [attempt:" ATTEMPT "][!attempt:1]::pg_catalog.int8, "             \
	"[headers:ruststream_row.{headers}][!headers:NULL::pg_catalog.jsonb], " carried                \
	", [priority:ruststream_row.{priority}][!priority:NULL]::pg_catalog.int8"                      \
	", [retry_after:ruststream_row.{retry_after}][!retry_after:NULL::pg_catalog.timestamptz]"      \
	" FROM {table} AS ruststream_row{}" READ_GROUP UNPROCESSED which NOT_HELD CLAIM_ORDER          \
	" LIMIT :limit FOR UPDATE SKIP LOCKED"

/*
 * A claim looks into one range of the index after the other, in claim order:
 * for each priority the rows without a delay, then those whose delay is over.
 * One scan that filters would read every row that waits, on each claim that
 * finds nothing else: a million scheduled tasks would cost a second a poll.
 * The ranges are read one by one, and no further than the limit; each priority
 * that rows have costs a few steps down the index, when nothing is due.
 */
#define UNDELAYED WHERE " ruststream_row.{retry_after} IS NULL"
#define COME_DUE WHERE " ruststream_row.{retry_after} OPERATOR(pg_catalog.<=) :now"
#define OF_LEVEL WHERE " ruststream_row.{priority} OPERATOR(pg_catalog.=) ruststream_level.priority"

#define FIND_BY_DELAY(carried, which)                                                              \
	"SELECT * FROM (" FIND(                                                                        \
		carried, which UNDELAYED) ") AS ruststream_undelayed"                                      \
								  " UNION ALL SELECT * FROM (" FIND(                               \
									  carried, which COME_DUE) ") AS ruststream_come_due"

/* The lowest of the priorities that are left, by one step down the index. */
#define LEVEL(above)                                                                               \
	"SELECT ruststream_row.{priority} FROM {table} AS ruststream_row{}" READ_GROUP UNPROCESSED     \
		above " ORDER BY ruststream_row.{priority} NULLS FIRST LIMIT 1"

#define LEVELS                                                                                     \
	"WITH RECURSIVE ruststream_level (priority) AS ((" LEVEL(                                      \
		WHERE                                                                                      \
		" ruststream_row.{priority} IS NOT NULL") ") UNION ALL SELECT (" LEVEL(WHERE               \
																			   " ruststream_row.{" \
																			   "priority} "        \
																			   "OPERATOR(pg_"      \
																			   "catalog.>) "       \
																			   "ruststream_level." \
																			   "priority") ") "    \
																						   "FROM " \
																						   "rusts" \
																						   "tream" \
																						   "_leve" \
																						   "l "    \
																						   "WHERE" \
																						   " rust" \
																						   "strea" \
																						   "m_"    \
																						   "level" \
																						   ".prio" \
																						   "rity " \
																						   "IS "   \
																						   "NOT "  \
																						   "NULL)" \
																						   " "
#define OF_EACH_LEVEL                                                                              \
	" UNION ALL SELECT ruststream_found.* FROM ruststream_level CROSS JOIN LATERAL ("

/*
 * The rows behind one that was claimed last, of its priority and without a
 * delay: conditions that lead the scan of the claim's index straight there.
 */
#define BEHIND                                                                                     \
	"[retry_after:" WHERE " ruststream_row.{retry_after} IS NULL]" WHERE                           \
	" ruststream_row.{id} OPERATOR(pg_catalog.>) :id"
#define OF_NO_PRIORITY "[priority:" WHERE " ruststream_row.{priority} IS NULL]"
#define OF_PRIORITY WHERE " ruststream_row.{priority} OPERATOR(pg_catalog.=) :priority"

#define MAX_STATEMENTS 2

typedef struct catalogue_entry
{
	const char *statements[MAX_STATEMENTS];
	rs_role needs; /* the role without which there is no such operation */
	bool any_form; /* else the row lock form only */
} catalogue_entry;

static const catalogue_entry postgresql_operations[RS_OPERATION_COUNT] = {
	/*
	 * Without retry_after:
	 *
	 * SELECT ruststream_row."id", COALESCE(ruststream_row."attempt", 1)::pg_catalog.int8,
	 *     ruststream_row."headers", ruststream_row,
	 *     ruststream_row."priority"::pg_catalog.int8, NULL::pg_catalog.timestamptz
	 * FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."group" OPERATOR(pg_catalog.=) :group
	 *     AND ruststream_row."processed_at" IS NULL
	 * ORDER BY ruststream_row."priority" NULLS FIRST, ruststream_row."id"
	 * LIMIT :limit FOR UPDATE SKIP LOCKED
	 *
	 * With it, see claims below.
	 */
	[RS_OP_CLAIM_ROW] = {.statements = {FIND("ruststream_row", "")}},

	/* The same, with ruststream_row."payload" in place of the row. */
	[RS_OP_CLAIM_PAYLOAD] = {.statements = {FIND("ruststream_row.{payload}", "")},
							 .needs = RS_ROLE_PAYLOAD},

	/*
	 * The same two, for rows behind the one that was claimed last:
	 *
	 * .. WHERE ruststream_row."group" OPERATOR(pg_catalog.=) :group
	 *     AND ruststream_row."processed_at" IS NULL
	 *     AND ruststream_row."priority" IS NULL
	 *     AND ruststream_row."retry_after" IS NULL
	 *     AND ruststream_row."id" OPERATOR(pg_catalog.>) :id
	 * ORDER BY ..
	 *
	 * or, where that row had a priority,
	 *
	 *     AND ruststream_row."priority" OPERATOR(pg_catalog.=) :priority
	 */
	[RS_OP_CLAIM_ROW_BEHIND] = {.statements = {FIND("ruststream_row", OF_NO_PRIORITY BEHIND)}},
	[RS_OP_CLAIM_ROW_BEHIND_PRIORITY] = {.statements = {FIND("ruststream_row", OF_PRIORITY BEHIND)},
										 .needs = RS_ROLE_PRIORITY},
	[RS_OP_CLAIM_PAYLOAD_BEHIND] = {.statements = {FIND("ruststream_row.{payload}",
														OF_NO_PRIORITY BEHIND)},
									.needs = RS_ROLE_PAYLOAD},
	[RS_OP_CLAIM_PAYLOAD_BEHIND_PRIORITY] = {.statements = {FIND("ruststream_row.{payload}",
																 OF_PRIORITY BEHIND)},
											 .needs = RS_ROLE_PRIORITY},

	/*
	 * SELECT ruststream_row."retry_after"
	 * FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."group" OPERATOR(pg_catalog.=) :group
	 *     AND ruststream_row."processed_at" IS NULL
	 *     AND ruststream_row."retry_after" OPERATOR(pg_catalog.>) :now
	 * ORDER BY ruststream_row."priority" NULLS FIRST,
	 *     ruststream_row."retry_after" NULLS FIRST, ruststream_row."id"
	 * LIMIT 1
	 *
	 * In claim order, so that the claim's index serves it.  With priorities
	 * that is not always the row that comes due first: a hint, beside
	 * polling.
	 */
	[RS_OP_NEXT_DUE] =
		{.statements = {"SELECT ruststream_row.{retry_after}"
						" FROM {table} AS ruststream_row" READ_GROUP UNPROCESSED WHERE
						" ruststream_row.{retry_after} OPERATOR(pg_catalog.>) :now" CLAIM_ORDER
						" LIMIT 1"},
		 .needs = RS_ROLE_RETRY_AFTER},

	/*
	 * SELECT 1 FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 *     AND ruststream_row."group" OPERATOR(pg_catalog.=) :group
	 *     AND ruststream_row."processed_at" IS NULL
	 *     AND COALESCE(ruststream_row."attempt", 1) OPERATOR(pg_catalog.=) :attempt
	 * FOR UPDATE SKIP LOCKED
	 *
	 * Everything that somebody else may have changed since the first claim
	 * is asked again, so that one failure is never settled twice.
	 */
	[RS_OP_RECLAIM] = {.statements = {"SELECT 1 FROM {table} AS ruststream_row" THIS_ROW READ_GROUP
										  UNPROCESSED "[attempt:" WHERE " " ATTEMPT
									  " OPERATOR(pg_catalog.=) :attempt]"
									  " FOR UPDATE SKIP LOCKED"}},

	/*
	 * SELECT 1 FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 *     AND ruststream_row."group" OPERATOR(pg_catalog.=) :group
	 *     AND ruststream_row."processed_at" IS NULL
	 */
	[RS_OP_UNSETTLED] =
		{.statements = {"SELECT 1 FROM {table} AS ruststream_row" THIS_ROW READ_GROUP UNPROCESSED}},

	/*
	 * UPDATE "schema"."table" AS ruststream_row SET "processed_at" = :now
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 *     AND ruststream_row."processed_at" IS NULL
	 *
	 * or, without processed_at,
	 *
	 * DELETE FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 */
	[RS_OP_ACK] =
		{.statements =
			 {"[processed_at:UPDATE {table} AS ruststream_row SET {processed_at} = :now]"
			  "[!processed_at:DELETE FROM {table} AS ruststream_row]" THIS_ROW UNPROCESSED}},

	/*
	 * UPDATE "schema"."table" AS ruststream_row
	 * SET "attempt" = COALESCE(ruststream_row."attempt", 1) OPERATOR(pg_catalog.+) 1
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 */
	[RS_OP_RETRY] = {.statements = {"UPDATE {table} AS ruststream_row SET " COUNT_ATTEMPT THIS_ROW},
					 .needs = RS_ROLE_ATTEMPT},

	/*
	 * UPDATE "schema"."table" AS ruststream_row
	 * SET "retry_after" = :until,
	 *     "attempt" = COALESCE(ruststream_row."attempt", 1) OPERATOR(pg_catalog.+) 1
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 */
	[RS_OP_RETRY_AFTER] =
		{.statements = {"UPDATE {table} AS ruststream_row SET {retry_after} = :until"
						"[attempt:, " COUNT_ATTEMPT "]" THIS_ROW},
		 .needs = RS_ROLE_RETRY_AFTER},

	/*
	 * UPDATE "schema"."table" AS ruststream_row SET "group" = :dead_group
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 */
	[RS_OP_MOVE_GROUP] =
		{.statements = {"UPDATE {table} AS ruststream_row SET {group} = :dead_group" THIS_ROW},
		 .needs = RS_ROLE_GROUP},

	/*
	 * INSERT INTO "schema"."dest" ("id", "payload") OVERRIDING SYSTEM VALUE
	 * SELECT "id", "payload" FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 *
	 * DELETE FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 *
	 * OVERRIDING keeps the id where the destination's is an identity.
	 */
	[RS_OP_MOVE_TABLE] =
		{.statements = {"INSERT INTO {dest} ({columns}) OVERRIDING SYSTEM VALUE"
						" SELECT {columns} FROM {table} AS ruststream_row" THIS_ROW,
						"DELETE FROM {table} AS ruststream_row" THIS_ROW}},

	/*
	 * INSERT INTO "schema"."table" AS ruststream_row
	 *     ("group", "priority", "retry_after", "partition_key", "headers", "payload")
	 * VALUES (:group, :priority, :until, :partition_key, :headers, :payload)
	 * RETURNING ruststream_row."id"::pg_catalog.text
	 *
	 * See publish_defaults for a description with none of these.
	 */
	[RS_OP_PUBLISH] =
		{.statements = {"INSERT INTO {into} AS ruststream_row"
						"[group:{ (|, }{group}][priority:{ (|, }{priority}]"
						"[retry_after:{ (|, }{retry_after}]"
						"[partition_key:{ (|, }{partition_key}]"
						"[headers:{ (|, }{headers}][payload:{ (|, }{payload}]"
						"[group:{) VALUES (|, }:group][priority:{) VALUES (|, }:priority]"
						"[retry_after:{) VALUES (|, }:until]"
						"[partition_key:{) VALUES (|, }:partition_key]"
						"[headers:{) VALUES (|, }:headers][payload:{) VALUES (|, }:payload]"
						") RETURNING ruststream_row.{id}::pg_catalog.text"},
		 .any_form = true},

	/*
	 * SELECT pg_catalog.count(*) FILTER (WHERE ruststream_counted.due IS NULL
	 *         OR ruststream_counted.due OPERATOR(pg_catalog.<=) :now),
	 *     pg_catalog.count(*)
	 *         FILTER (WHERE ruststream_counted.due OPERATOR(pg_catalog.>) :now),
	 *     pg_catalog.min(ruststream_counted.due)
	 *         FILTER (WHERE ruststream_counted.due OPERATOR(pg_catalog.<=) :now)
	 * FROM (SELECT ruststream_row."retry_after" AS due
	 *     FROM "schema"."table" AS ruststream_row
	 *     WHERE ruststream_row."group" OPERATOR(pg_catalog.=) :group
	 *         AND ruststream_row."processed_at" IS NULL
	 *     ORDER BY ruststream_row."priority" NULLS FIRST,
	 *         ruststream_row."retry_after" NULLS FIRST, ruststream_row."id"
	 *     LIMIT :limit) AS ruststream_counted
	 *
	 * or, without retry_after,
	 *
	 * SELECT pg_catalog.count(*), 0::pg_catalog.int8, NULL::pg_catalog.timestamptz
	 * FROM (SELECT 1 FROM .. the same .. LIMIT :limit) AS ruststream_counted
	 */
	[RS_OP_DEPTH] =
		{.statements = {"SELECT pg_catalog.count(*)"
						"[retry_after: FILTER (WHERE ruststream_counted.due IS NULL"
						" OR ruststream_counted.due OPERATOR(pg_catalog.<=) :now),"
						" pg_catalog.count(*)"
						" FILTER (WHERE ruststream_counted.due OPERATOR(pg_catalog.>) :now),"
						" pg_catalog.min(ruststream_counted.due)"
						" FILTER (WHERE ruststream_counted.due OPERATOR(pg_catalog.<=) :now)"
						" FROM (SELECT ruststream_row.{retry_after} AS due]"
						"[!retry_after:, 0::pg_catalog.int8, NULL::pg_catalog.timestamptz"
						" FROM (SELECT 1]"
						" FROM {table} AS ruststream_row" READ_GROUP UNPROCESSED CLAIM_ORDER
						" LIMIT :limit) AS ruststream_counted"},
		 .any_form = true},

	/*
	 * SELECT pg_catalog.count(*)
	 * FROM (SELECT 1 FROM "schema"."table" AS ruststream_row
	 *     WHERE ruststream_row."group" OPERATOR(pg_catalog.=) :dead_group
	 *         AND ruststream_row."processed_at" IS NULL
	 *     LIMIT :limit) AS ruststream_counted
	 */
	[RS_OP_DEPTH_DEAD_GROUP] =
		{.statements = {"SELECT pg_catalog.count(*)"
						" FROM (SELECT 1 FROM {table} AS ruststream_row" WHERE
						" ruststream_row.{group} OPERATOR(pg_catalog.=) :dead_group" UNPROCESSED
						" LIMIT :limit) AS ruststream_counted"},
		 .needs = RS_ROLE_GROUP,
		 .any_form = true},

	/*
	 * SELECT pg_catalog.count(*)
	 * FROM (SELECT 1 FROM "schema"."dest" LIMIT :limit) AS ruststream_counted
	 */
	[RS_OP_DEPTH_DEAD_TABLE] = {.statements = {"SELECT pg_catalog.count(*)"
											   " FROM (SELECT 1 FROM {dest} LIMIT :limit)"
											   " AS ruststream_counted"},
								.any_form = true},
};

/*
 * The claims of a table with retry_after; .. is the claim above, with the
 * condition and the rest of its order and limit.
 *
 * SELECT * FROM (.. ruststream_row."retry_after" IS NULL ..) AS ruststream_undelayed
 * UNION ALL SELECT * FROM (.. ruststream_row."retry_after" OPERATOR(pg_catalog.<=) :now ..)
 *     AS ruststream_come_due
 * LIMIT :limit
 *
 * and with priority as well
 *
 * WITH RECURSIVE ruststream_level (priority) AS (
 *     (SELECT ruststream_row."priority" FROM .. WHERE .. AND ruststream_row."priority" IS NOT NULL
 *      ORDER BY ruststream_row."priority" NULLS FIRST LIMIT 1)
 *     UNION ALL SELECT (SELECT .. AND ruststream_row."priority" OPERATOR(pg_catalog.>)
 *                              ruststream_level.priority ..)
 *     FROM ruststream_level WHERE ruststream_level.priority IS NOT NULL)
 * .. the two ranges of "priority" IS NULL, as above ..
 * UNION ALL SELECT ruststream_found.* FROM ruststream_level CROSS JOIN LATERAL (
 *     .. the two ranges of "priority" OPERATOR(pg_catalog.=) ruststream_level.priority ..
 *     LIMIT :limit) AS ruststream_found
 * WHERE ruststream_level.priority IS NOT NULL
 * LIMIT :limit
 */
#define BY_DELAY(carried)                                                                          \
	{                                                                                              \
		FIND_BY_DELAY(carried, ""), " LIMIT :limit", NULL                                          \
	}
#define BY_LEVEL(carried)                                                                          \
	{                                                                                              \
		LEVELS, FIND_BY_DELAY(carried, OF_NO_PRIORITY), OF_EACH_LEVEL,                             \
			FIND_BY_DELAY(carried, OF_LEVEL),                                                      \
			" LIMIT :limit) AS ruststream_found WHERE ruststream_level.priority IS NOT NULL "      \
			"LIMIT :limit",                                                                        \
			NULL                                                                                   \
	}

static const char *const postgresql_claim_row_by_delay[] = BY_DELAY("ruststream_row");
static const char *const postgresql_claim_payload_by_delay[] = BY_DELAY("ruststream_row.{payload}");
static const char *const postgresql_claim_row_by_level[] = BY_LEVEL("ruststream_row");
static const char *const postgresql_claim_payload_by_level[] = BY_LEVEL("ruststream_row.{payload}");

/*
 * INSERT INTO "schema"."table" AS ruststream_row DEFAULT VALUES
 * RETURNING ruststream_row."id"::pg_catalog.text
 *
 * An empty list of columns is not SQL.
 */
static const char *const postgresql_publish_defaults[] = {
	"INSERT INTO {into} AS ruststream_row DEFAULT VALUES",
	" RETURNING ruststream_row.{id}::pg_catalog.text", NULL};

/*
 * CREATE INDEX ON "schema"."table" ("group", "priority" NULLS FIRST,
 *     "retry_after" NULLS FIRST, "id") WHERE ("processed_at" IS NULL)
 *
 * rs_index_columns says the same in roles.
 */
static const char postgresql_claim_index[] =
	"CREATE INDEX ON {into} ([group:{group}, ][priority:{priority} NULLS FIRST, ]"
	"[retry_after:{retry_after} NULLS FIRST, ]{id})[processed_at: WHERE ({processed_at} IS NULL)]";

typedef struct catalogue
{
	const catalogue_entry *operations;
	/* Instead of the above, for some tables; in pieces, for C limits a string's length. */
	const char *const *claim_row_by_delay;
	const char *const *claim_payload_by_delay;
	const char *const *claim_row_by_level;
	const char *const *claim_payload_by_level;
	const char *const *publish_defaults;
	const char *claim_index;
} catalogue;

static const catalogue catalogues[RS_DIALECT_COUNT] = {
	[RS_DIALECT_POSTGRESQL] = {.operations = postgresql_operations,
							   .claim_row_by_delay = postgresql_claim_row_by_delay,
							   .claim_payload_by_delay = postgresql_claim_payload_by_delay,
							   .claim_row_by_level = postgresql_claim_row_by_level,
							   .claim_payload_by_level = postgresql_claim_payload_by_level,
							   .publish_defaults = postgresql_publish_defaults,
							   .claim_index = postgresql_claim_index},
};

int
rs_statement_count(rs_dialect dialect, rs_operation operation, const rs_table *table)
{
	const catalogue_entry *entry = &catalogues[dialect].operations[operation];
	int count = 0;

	if (table->column[RS_ROLE_ID] == NULL || table->column[entry->needs] == NULL)
		return 0;
	if (!entry->any_form && rs_table_form(table) != RS_FORM_ROW_LOCK)
		return 0;
	while (count < MAX_STATEMENTS && entry->statements[count] != NULL)
		count++;
	return count;
}

/* Whether the description leaves publish any column to fill. */
static bool
publishes_columns(const rs_table *table)
{
	return table->column[RS_ROLE_GROUP] != NULL || table->column[RS_ROLE_PRIORITY] != NULL ||
		   table->column[RS_ROLE_RETRY_AFTER] != NULL ||
		   table->column[RS_ROLE_PARTITION_KEY] != NULL || table->column[RS_ROLE_HEADERS] != NULL ||
		   table->column[RS_ROLE_PAYLOAD] != NULL;
}

/* What stands in for an operation's statement where the table wants another; else NULL. */
static const char *const *
variant_for(const catalogue *from, rs_operation operation, const rs_table *table)
{
	bool has_priority = table->column[RS_ROLE_PRIORITY] != NULL;

	if (operation == RS_OP_PUBLISH && !publishes_columns(table))
		return from->publish_defaults;
	if (table->column[RS_ROLE_RETRY_AFTER] == NULL)
		return NULL;
	if (operation == RS_OP_CLAIM_ROW)
		return has_priority ? from->claim_row_by_level : from->claim_row_by_delay;
	if (operation == RS_OP_CLAIM_PAYLOAD)
		return has_priority ? from->claim_payload_by_level : from->claim_payload_by_delay;
	return NULL;
}

rs_statement
rs_statement_render(rs_dialect dialect, rs_operation operation, int index, const rs_table *table,
					const rs_destination *destination, char *buffer, size_t size)
{
	const char *const *variant;
	const char *pieces[] = {NULL, NULL};

	if (index < 0 || index >= rs_statement_count(dialect, operation, table))
		return rs_template_render(table, destination, pieces, buffer, size);

	variant = variant_for(&catalogues[dialect], operation, table);
	pieces[0] = catalogues[dialect].operations[operation].statements[index];
	return rs_template_render(table, destination, variant != NULL ? variant : pieces, buffer, size);
}

rs_statement
rs_index_render(rs_dialect dialect, const rs_table *table, char *buffer, size_t size)
{
	const char *pieces[] = {catalogues[dialect].claim_index, NULL};

	return rs_template_render(table, NULL, pieces, buffer, size);
}

int
rs_index_columns(const rs_table *table, rs_role *roles)
{
	static const rs_role order[] = {RS_ROLE_GROUP, RS_ROLE_PRIORITY, RS_ROLE_RETRY_AFTER,
									RS_ROLE_ID};
	int count = 0;

	for (size_t i = 0; i < sizeof(order) / sizeof(order[0]); i++)
	{
		if (table->column[order[i]] != NULL)
			roles[count++] = order[i];
	}
	return count;
}
