/*-------------------------------------------------------------------------
 *
 * statement_sqlite.c
 *	  The SQL catalogue of SQLite.
 *
 *-------------------------------------------------------------------------
 */
#include "catalogue.h"

/*
 * Rules for the templates (template.h says how they are written)
 * --------------------------------------------------------------
 *
 * SQLite locks the whole database, so there is no row lock form, and a claim is one statement that
 * finds and stamps: whoever runs it is the only writer, which is the guard of FIFO groups and of
 * partition keys, too.  Times are text that compares as the times do (time.c).
 *
 * The functions are registered on the connection by the client's driver:
 *
 *	ruststream_is_held(id)				rows that this worker leaves alone, since they just failed
 *	ruststream_held_id(n)				the id of one of them, from 0 on; NULL: there are no more
 *	ruststream_key_is_held(key)			advisory keys that this process holds, by database file
 *	ruststream_partition_is_held(key)	partition keys, in the advisory lock form
 *
 * Above each template stands the statement it makes of a table with every role
 * it mentions, each column named like its role, parameters by their names.
 */

/* Begins the WHERE clause at the first condition, and continues it at others. */
#define WHERE "{ WHERE| AND}"

#define READ_GROUP "[group:" WHERE " ruststream_row.{group} = :group]"
#define UNPROCESSED "[processed_at:" WHERE " ruststream_row.{processed_at} IS NULL]"
#define THIS_ROW WHERE " ruststream_row.{id} = :id"

/* In the lease form: no live lease; and, for what its holder does, still this one. */
#define UNLEASED                                                                                   \
	"[locked_until:" WHERE " (ruststream_row.{locked_until} IS NULL"                               \
	" OR ruststream_row.{locked_until} <= :now)]"
#define GUARD "[locked_until:" WHERE " ruststream_row.{locked_until} IN (:token, :announced)]"
#define END_LEASE "[locked_until:{locked_until} = NULL]"

/* The headers of a row that becomes a dead letter: where it came from, in those that are an object.
 */
#define HEADERS "ruststream_row.{headers}"
#define WITH_ORIGIN(headers)                                                                       \
	"json_patch([group:json_patch(" headers ", json_object('ruststream-origin-group',"             \
	" CAST(ruststream_row.{group} AS TEXT)))][!group:" headers "], :origin)"
#define HEADERS_WITH_ORIGIN                                                                        \
	"CASE WHEN " HEADERS                                                                           \
	" IS NULL THEN " WITH_ORIGIN("json_object()") " WHEN NOT json_valid(" HEADERS                  \
												  ") THEN " HEADERS " WHEN json_type(" HEADERS     \
												  ") <> 'object' THEN " HEADERS                    \
												  " ELSE " WITH_ORIGIN(HEADERS) " END"

/* The order of the index that rs_index_render makes, group aside; NULL sorts first by itself. */
#define CLAIM_ORDER                                                                                \
	" ORDER BY[priority: ruststream_row.{priority},][retry_after: ruststream_row.{retry_after},]"  \
	" ruststream_row.{id}"

/* A row that was inserted without an attempt is before its first. */
#define COUNT_ATTEMPT "{attempt} = COALESCE({attempt}, 1) + 1"
#define CLAIMED                                                                                    \
	"{id}, [attempt:{attempt} - 1][!attempt:1], [headers:{headers}][!headers:NULL],"               \
	" [payload:{payload}][!payload:NULL]"

/*
 * Not a row whose key is in work.  The leased rows are few, and an index of
 * their own finds them (RS_INDEX_LEASE); the + keeps other indexes out.
 */
#define KEY_NOT_IN_WORK                                                                            \
	"[partition_key:[locked_until:" WHERE " (ruststream_row.{partition_key} IS NULL"               \
	" OR ruststream_row.{partition_key} NOT IN (SELECT +ruststream_leased.{partition_key}"         \
	" FROM {table} AS ruststream_leased WHERE ruststream_leased.{locked_until} > :now"             \
	" AND +ruststream_leased.{partition_key} IS NOT NULL))]]"                                      \
	"[advisory_lock:" WHERE " NOT ruststream_key_is_held({key})"                                   \
	"[partition_key:" WHERE " NOT ruststream_partition_is_held(ruststream_row.{partition_key})]]"

/* Nor one of the key of a row that this worker leaves alone, as long as that row is due. */
#define NOT_HELD                                                                                   \
	WHERE " NOT ruststream_is_held(ruststream_row.{id})"                                           \
		  "[partition_key: AND (ruststream_row.{partition_key} IS NULL"                            \
		  " OR ruststream_row.{partition_key} NOT IN ("                                            \
		  "WITH RECURSIVE ruststream_number (n) AS (SELECT 0 UNION ALL"                            \
		  " SELECT n + 1 FROM ruststream_number WHERE ruststream_held_id(n + 1) IS NOT NULL)"      \
		  " SELECT ruststream_held.{partition_key}"                                                \
		  " FROM ruststream_number CROSS JOIN {table} AS ruststream_held"                          \
		  " WHERE ruststream_held.{id} = ruststream_held_id(ruststream_number.n)"                  \
		  "[group: AND ruststream_held.{group} = :group]"                                          \
		  "[processed_at: AND ruststream_held.{processed_at} IS NULL]"                             \
		  "[retry_after: AND (ruststream_held.{retry_after} IS NULL"                               \
		  " OR ruststream_held.{retry_after} <= :now)]"                                            \
		  " AND ruststream_held.{partition_key} IS NOT NULL))]"

/* The first row of a range of the claim's index that can be had. */
#define FIND(range)                                                                                \
	"(SELECT ruststream_row.{id} FROM {table} AS ruststream_row{}" READ_GROUP UNPROCESSED range    \
		UNLEASED KEY_NOT_IN_WORK NOT_HELD CLAIM_ORDER " LIMIT 1)"

/* The first row of a range that has the key :partition_key, whoever holds it. */
#define FIND_OF_KEY(range)                                                                         \
	"(SELECT ruststream_row.{id} FROM {table} AS ruststream_row{}" READ_GROUP UNPROCESSED WHERE    \
	" ruststream_row.{partition_key} = :partition_key" range CLAIM_ORDER " LIMIT 1)"

/*
 * The head of a FIFO group, if it is due and nothing of the group is in work.
 * A head that this worker leaves alone holds back the rows behind it.
 */
#define FIND_HEAD                                                                                  \
	"(SELECT ruststream_head.id FROM (SELECT ruststream_row.{id} AS id,"                           \
	" [retry_after:ruststream_row.{retry_after}][!retry_after:NULL] AS due"                        \
	" FROM {table} AS ruststream_row{}" READ_GROUP UNPROCESSED CLAIM_ORDER                         \
	" LIMIT 1) AS ruststream_head"                                                                 \
	" WHERE (ruststream_head.due IS NULL OR ruststream_head.due <= :now)"                          \
	" AND NOT ruststream_is_held(ruststream_head.id)"                                              \
	" AND NOT EXISTS (SELECT 1 FROM {table} AS ruststream_leased"                                  \
	" WHERE +ruststream_leased.{group} = :group AND ruststream_leased.{locked_until} > :now))"

/*
 * Ranges of the claim's index, read one after the other in claim order, so that
 * a million rows which wait are not read by each claim: of each priority the
 * rows without a delay, then those whose delay is over.
 */
#define UNDELAYED WHERE " ruststream_row.{retry_after} IS NULL"
#define COME_DUE WHERE " ruststream_row.{retry_after} <= :now"
#define OF_NO_PRIORITY WHERE " ruststream_row.{priority} IS NULL"
#define OF_LEVEL WHERE " ruststream_row.{priority} = ruststream_level.priority"

/* The lowest of the priorities that are left, by one step down the index. */
#define LEVEL(above)                                                                               \
	"(SELECT ruststream_row.{priority} FROM {table} AS ruststream_row{}" READ_GROUP UNPROCESSED    \
		above " ORDER BY ruststream_row.{priority} LIMIT 1)"
#define LEVELS                                                                                     \
	"WITH RECURSIVE ruststream_level (priority) AS (SELECT " LEVEL(                                \
		WHERE                                                                                      \
		" ruststream_row.{priority} IS NOT NULL") " UNION ALL SELECT " LEVEL(WHERE                 \
																			 " ruststream_row.{"   \
																			 "priority} > "        \
																			 "ruststream_level."   \
																			 "priority") " FROM "  \
																						 "ruststr" \
																						 "eam_"    \
																						 "level "  \
																						 "WHERE "  \
																						 "ruststr" \
																						 "eam_"    \
																						 "level."  \
																						 "priorit" \
																						 "y IS "   \
																						 "NOT "    \
																						 "NULL)"

/* A candidate, as a claim; of a partition key only its head. */
#define TAKE                                                                                       \
	"[attempt:UPDATE {table} AS ruststream_row SET " COUNT_ATTEMPT "]"                             \
	"[!attempt:SELECT " CLAIMED " FROM {table} AS ruststream_row]" THIS_ROW READ_GROUP UNPROCESSED \
	"[retry_after:" WHERE " (ruststream_row.{retry_after} IS NULL"                                 \
	" OR ruststream_row.{retry_after} <= :now)]" WHERE " {key} = :key"
#define TAKE_HEAD WHERE " (ruststream_row.{partition_key} IS NULL OR ruststream_row.{id} = "
#define TAKE_END "[attempt: RETURNING " CLAIMED "]"

#define LEASED RS_IN_FORM(RS_FORM_LEASE)
#define KEYED RS_IN_FORM(RS_FORM_ADVISORY_LOCK)

static const rs_catalogue_entry sqlite_operations[RS_OPERATION_COUNT] = {
	/*
	 * UPDATE "main"."table" AS ruststream_row
	 * SET "locked_until" = :token, "attempt" = COALESCE("attempt", 1) + 1
	 * WHERE ruststream_row."id" = (SELECT ruststream_row."id" FROM "main"."table" AS ruststream_row
	 *     WHERE ruststream_row."group" = :group AND ruststream_row."processed_at" IS NULL
	 *         AND (ruststream_row."locked_until" IS NULL OR ruststream_row."locked_until" <= :now)
	 *         AND NOT ruststream_is_held(ruststream_row."id")
	 *     ORDER BY ruststream_row."priority", ruststream_row."id" LIMIT 1)
	 * RETURNING "id", "attempt" - 1, "headers", "payload"
	 *
	 * See the claims below for retry_after.  With partition_key also
	 *
	 *         AND (ruststream_row."partition_key" IS NULL OR ruststream_row."partition_key" NOT IN
	 * ( SELECT +ruststream_leased."partition_key" FROM "main"."table" AS ruststream_leased WHERE
	 * ruststream_leased."locked_until" > :now AND +ruststream_leased."partition_key" IS NOT NULL))
	 *         AND (ruststream_row."partition_key" IS NULL
	 *             OR ruststream_row."partition_key" NOT IN (.. those of the rows left alone ..))
	 *
	 * and of a FIFO group
	 *
	 * .. WHERE ruststream_row."id" = (SELECT ruststream_head.id FROM (
	 *         SELECT ruststream_row."id" AS id, ruststream_row."retry_after" AS due
	 *         FROM "main"."table" AS ruststream_row
	 *         WHERE ruststream_row."group" = :group AND ruststream_row."processed_at" IS NULL
	 *         ORDER BY .. LIMIT 1) AS ruststream_head
	 *     WHERE (ruststream_head.due IS NULL OR ruststream_head.due <= :now)
	 *         AND NOT ruststream_is_held(ruststream_head.id)
	 *         AND NOT EXISTS (SELECT 1 FROM "main"."table" AS ruststream_leased
	 *             WHERE +ruststream_leased."group" = :group
	 *                 AND ruststream_leased."locked_until" > :now))
	 */
	[RS_OP_CLAIM_ROW] = {.statements = {"[fifo:" FIND_HEAD "][!fifo:" FIND("") "]"},
						 .forms = LEASED},
	[RS_OP_CLAIM_PAYLOAD] = {.statements = {"[fifo:" FIND_HEAD "][!fifo:" FIND("") "]"},
							 .needs = RS_ROLE_PAYLOAD,
							 .forms = LEASED},

	/*
	 * SELECT ruststream_row."id", the key, ruststream_row."partition_key"
	 * FROM "main"."table" AS ruststream_row
	 * WHERE ruststream_row."id" = (.. as in a claim ..
	 *     AND NOT ruststream_key_is_held(the key)
	 *     AND NOT ruststream_partition_is_held(ruststream_row."partition_key") ..)
	 *
	 * One row: no other process has a say in who holds a key.
	 */
	[RS_OP_CANDIDATES] = {.statements = {FIND("")}, .forms = KEYED},

	/*
	 * UPDATE "main"."table" AS ruststream_row SET "attempt" = COALESCE("attempt", 1) + 1
	 * WHERE ruststream_row."id" = :id AND ruststream_row."group" = :group
	 *     AND ruststream_row."processed_at" IS NULL
	 *     AND (ruststream_row."retry_after" IS NULL OR ruststream_row."retry_after" <= :now)
	 *     AND the key = :key
	 *     AND (ruststream_row."partition_key" IS NULL OR ruststream_row."id" = (
	 *         .. the first id of that key, in the ranges of a claim ..))
	 * RETURNING "id", "attempt" - 1, "headers", "payload"
	 *
	 * or, without attempt, SELECT "id", 1, "headers", "payload" FROM .. the same ..
	 *
	 * Keys are let go while a candidate is looked for, so it may not be the first of its key.
	 */
	[RS_OP_TAKE_ROW] = {.statements = {TAKE
									   "[partition_key:" TAKE_HEAD FIND_OF_KEY("") ")]" TAKE_END},
						.forms = KEYED},
	[RS_OP_TAKE_PAYLOAD] = {.statements = {TAKE "[partition_key:" TAKE_HEAD FIND_OF_KEY(
								"") ")]" TAKE_END},
							.needs = RS_ROLE_PAYLOAD,
							.forms = KEYED},

	/*
	 * SELECT ruststream_row."retry_after" FROM "main"."table" AS ruststream_row
	 * WHERE ruststream_row."group" = :group AND ruststream_row."processed_at" IS NULL
	 *     AND ruststream_row."retry_after" > :now
	 * ORDER BY ruststream_row."priority", ruststream_row."retry_after", ruststream_row."id" LIMIT 1
	 *
	 * In claim order, so that the claim's index serves it: a hint, beside polling.
	 */
	[RS_OP_NEXT_DUE] = {.statements = {"SELECT ruststream_row.{retry_after}"
									   " FROM {table} AS ruststream_row" READ_GROUP UNPROCESSED
										   WHERE " ruststream_row.{retry_after} > :now" CLAIM_ORDER
									   " LIMIT 1"},
						.needs = RS_ROLE_RETRY_AFTER},

	/*
	 * SELECT 1 FROM "main"."table" AS ruststream_row
	 * WHERE ruststream_row."id" = :id AND ruststream_row."group" = :group
	 *     AND ruststream_row."processed_at" IS NULL
	 *     AND ruststream_row."locked_until" IN (:token, :announced)
	 *
	 * The guard of each settlement; in the advisory lock form, in its place,
	 *
	 *     AND COALESCE(ruststream_row."attempt", 1) = :attempt
	 *
	 * so that one failure is never settled twice.
	 */
	[RS_OP_RECLAIM] = {.statements = {"SELECT 1 FROM {table} AS ruststream_row" THIS_ROW READ_GROUP
										  UNPROCESSED GUARD "[!locked_until:[attempt:" WHERE
									  " COALESCE(ruststream_row.{attempt}, 1) = :attempt]]"}},
	[RS_OP_UNSETTLED] = {.statements = {"SELECT 1 FROM {table} AS ruststream_row" THIS_ROW
											READ_GROUP UNPROCESSED GUARD}},

	/*
	 * UPDATE "main"."table" AS ruststream_row SET "processed_at" = :now, "locked_until" = NULL
	 * WHERE ruststream_row."id" = :id AND ruststream_row."processed_at" IS NULL
	 *     AND ruststream_row."locked_until" IN (:token, :announced)
	 *
	 * or, without processed_at, DELETE FROM "main"."table" AS ruststream_row WHERE .. the same ..
	 */
	[RS_OP_ACK] =
		{.statements = {"[processed_at:UPDATE {table} AS ruststream_row SET {processed_at} = :now"
						"[locked_until:, " END_LEASE "]]"
						"[!processed_at:DELETE FROM {table} AS ruststream_row]" THIS_ROW UNPROCESSED
							GUARD}},

	/*
	 * UPDATE "main"."table" AS ruststream_row SET "locked_until" = NULL
	 * WHERE ruststream_row."id" = :id AND ruststream_row."locked_until" IN (:token, :announced)
	 */
	[RS_OP_RELEASE] = {.statements = {"UPDATE {table} AS ruststream_row SET " END_LEASE THIS_ROW
										  GUARD},
					   .needs = RS_ROLE_LOCKED_UNTIL},

	/*
	 * UPDATE "main"."table" AS ruststream_row SET "retry_after" = :until, "locked_until" = NULL
	 * WHERE ruststream_row."id" = :id AND ruststream_row."locked_until" IN (:token, :announced)
	 *
	 * The claim has counted the attempt.
	 */
	[RS_OP_RETRY_AFTER] =
		{.statements = {"UPDATE {table} AS ruststream_row SET {retry_after} = :until"
						"[locked_until:, " END_LEASE "]" THIS_ROW GUARD},
		 .needs = RS_ROLE_RETRY_AFTER},

	/*
	 * UPDATE "main"."table" AS ruststream_row
	 * SET "headers" = .. with :origin .., "group" = :dead_group, "locked_until" = NULL
	 * WHERE ruststream_row."id" = :id AND ruststream_row."locked_until" IN (:token, :announced)
	 */
	[RS_OP_MOVE_GROUP] = {.statements = {"UPDATE {table} AS ruststream_row SET"
										 "[headers: {headers} = " HEADERS_WITH_ORIGIN
										 ",] {group} = :dead_group"
										 "[locked_until:, " END_LEASE "]" THIS_ROW GUARD},
						  .needs = RS_ROLE_GROUP},

	/*
	 * INSERT INTO "main"."dest" ("id", "payload") SELECT "id", "payload"
	 * FROM "main"."table" AS ruststream_row
	 * WHERE ruststream_row."id" = :id AND ruststream_row."locked_until" IN (:token, :announced)
	 *
	 * DELETE FROM "main"."table" AS ruststream_row WHERE .. the same ..
	 *
	 * In the lease form the column of the lease is written as NULL.  Where there are headers, FROM
	 * is
	 *
	 * (SELECT "id", "headers", "payload", .. headers with :origin .. AS ruststream_made
	 *  FROM "main"."table" AS ruststream_row WHERE ..) AS ruststream_headers
	 */
	[RS_OP_MOVE_TABLE] = {.statements = {"INSERT INTO {dest} ({columns}) SELECT {moved} FROM"
										 "[headers: (SELECT {columns}, " HEADERS_WITH_ORIGIN
										 " AS ruststream_made FROM]"
										 " {table} AS ruststream_row" THIS_ROW GUARD
										 "[headers:) AS ruststream_headers]",
										 "DELETE FROM {table} AS ruststream_row" THIS_ROW GUARD}},

	/*
	 * UPDATE "main"."table" AS ruststream_row SET "locked_until" = :until
	 * WHERE ruststream_row."id" = :id AND ruststream_row."locked_until" = :token
	 */
	[RS_OP_EXTEND] =
		{.statements = {"UPDATE {table} AS ruststream_row SET {locked_until} = :until" THIS_ROW
							WHERE " ruststream_row.{locked_until} = :token"},
		 .needs = RS_ROLE_LOCKED_UNTIL},

	/*
	 * INSERT INTO "main"."table"
	 *     ("group", "priority", "retry_after", "partition_key", "headers", "payload")
	 * VALUES (:group, :priority, :until, :partition_key, :headers, :payload) RETURNING "id"
	 */
	[RS_OP_PUBLISH] = {.statements = {"INSERT INTO {into}"
									  "[group:{ (|, }{group}][priority:{ (|, }{priority}]"
									  "[retry_after:{ (|, }{retry_after}]"
									  "[partition_key:{ (|, }{partition_key}]"
									  "[headers:{ (|, }{headers}][payload:{ (|, }{payload}]"
									  "[group:{) VALUES (|, }:group]"
									  "[priority:{) VALUES (|, }:priority]"
									  "[retry_after:{) VALUES (|, }:until]"
									  "[partition_key:{) VALUES (|, }:partition_key]"
									  "[headers:{) VALUES (|, }:headers]"
									  "[payload:{) VALUES (|, }:payload]) RETURNING {id}"}},

	/*
	 * SELECT count(*) FILTER (WHERE NOT ruststream_counted.leased
	 *         AND (ruststream_counted.due IS NULL OR ruststream_counted.due <= :now)),
	 *     count(*) FILTER (WHERE NOT ruststream_counted.leased AND ruststream_counted.due > :now),
	 *     min(ruststream_counted.due) FILTER (WHERE NOT ruststream_counted.leased
	 *         AND ruststream_counted.due <= :now),
	 *     count(*) FILTER (WHERE ruststream_counted.leased)
	 * FROM (SELECT ruststream_row."retry_after" AS due,
	 *         ifnull(ruststream_row."locked_until" > :now, 0) AS leased
	 *     FROM "main"."table" AS ruststream_row
	 *     WHERE ruststream_row."group" = :group AND ruststream_row."processed_at" IS NULL
	 *     ORDER BY .. LIMIT :limit) AS ruststream_counted
	 *
	 * Ready, waiting, since when the oldest is ready, in work.
	 */
	[RS_OP_DEPTH] =
		{.statements =
			 {"SELECT count(*) FILTER (WHERE NOT ruststream_counted.leased"
			  " AND (ruststream_counted.due IS NULL OR ruststream_counted.due <= :now)),"
			  " count(*) FILTER (WHERE NOT ruststream_counted.leased"
			  " AND ruststream_counted.due > :now),"
			  " min(ruststream_counted.due) FILTER (WHERE NOT ruststream_counted.leased"
			  " AND ruststream_counted.due <= :now),"
			  " count(*) FILTER (WHERE ruststream_counted.leased)"
			  " FROM (SELECT [retry_after:ruststream_row.{retry_after}][!retry_after:NULL] AS due,"
			  " [locked_until:ifnull(ruststream_row.{locked_until} > :now, 0)][!locked_until:0]"
			  " AS leased FROM {table} AS ruststream_row" READ_GROUP UNPROCESSED CLAIM_ORDER
			  " LIMIT :limit) AS ruststream_counted"}},

	/*
	 * SELECT count(*) FROM (SELECT 1 FROM "main"."table" AS ruststream_row
	 *     WHERE ruststream_row."group" = :dead_group AND ruststream_row."processed_at" IS NULL
	 *     LIMIT :limit) AS ruststream_counted
	 */
	[RS_OP_DEPTH_DEAD_GROUP] = {.statements = {"SELECT count(*) FROM (SELECT 1"
											   " FROM {table} AS ruststream_row" WHERE
											   " ruststream_row.{group} = :dead_group" UNPROCESSED
											   " LIMIT :limit) AS ruststream_counted"},
								.needs = RS_ROLE_GROUP},

	/* SELECT count(*) FROM (SELECT 1 FROM "main"."dest" LIMIT :limit) AS ruststream_counted */
	[RS_OP_DEPTH_DEAD_TABLE] = {.statements = {"SELECT count(*) FROM (SELECT 1 FROM {dest}"
											   " LIMIT :limit) AS ruststream_counted"}},
};

/*
 * With retry_after; (..) is what finds a row above, with the condition.
 *
 * coalesce((.. ruststream_row."retry_after" IS NULL ..),
 *     (.. ruststream_row."retry_after" <= :now ..))
 *
 * and with priority as well
 *
 * coalesce((.. "priority" IS NULL AND "retry_after" IS NULL ..),
 *     (.. "priority" IS NULL AND "retry_after" <= :now ..),
 *     (WITH RECURSIVE ruststream_level (priority) AS (
 *         SELECT (SELECT ruststream_row."priority" FROM .. WHERE .. AND ruststream_row."priority"
 *             IS NOT NULL ORDER BY ruststream_row."priority" LIMIT 1)
 *         UNION ALL SELECT (SELECT .. AND ruststream_row."priority" > ruststream_level.priority ..)
 *         FROM ruststream_level WHERE ruststream_level.priority IS NOT NULL)
 *     SELECT coalesce((.. "priority" = ruststream_level.priority AND "retry_after" IS NULL ..),
 *         (.. "priority" = ruststream_level.priority AND "retry_after" <= :now ..)) AS found
 *     FROM ruststream_level WHERE ruststream_level.priority IS NOT NULL AND found IS NOT NULL
 *     LIMIT 1))
 */
static const char *const sqlite_find_by_delay[] = {
	"[fifo:" FIND_HEAD "]", "[!fifo:coalesce(" FIND(UNDELAYED) ", " FIND(COME_DUE) ")]", NULL};

static const char *const sqlite_find_by_level[] = {
	"[fifo:" FIND_HEAD "]",
	"[!fifo:coalesce(" FIND(OF_NO_PRIORITY UNDELAYED) ", " FIND(OF_NO_PRIORITY COME_DUE) ",]",
	"[!fifo: (" LEVELS "]",
	"[!fifo: SELECT coalesce(" FIND(OF_LEVEL UNDELAYED) ", " FIND(OF_LEVEL COME_DUE) ") AS found]",
	"[!fifo: FROM ruststream_level WHERE ruststream_level.priority IS NOT NULL"
	" AND found IS NOT NULL LIMIT 1))]",
	NULL};

static const char *const sqlite_take_by_delay[] = {
	TAKE TAKE_HEAD, "coalesce(" FIND_OF_KEY(UNDELAYED) ", " FIND_OF_KEY(COME_DUE) "))" TAKE_END,
	NULL};

static const char *const sqlite_take_by_level[] = {
	TAKE TAKE_HEAD,
	"coalesce(" FIND_OF_KEY(OF_NO_PRIORITY UNDELAYED) ", " FIND_OF_KEY(OF_NO_PRIORITY COME_DUE) ",",
	" (" LEVELS,
	" SELECT coalesce(" FIND_OF_KEY(OF_LEVEL UNDELAYED) ", " FIND_OF_KEY(
		OF_LEVEL COME_DUE) ") AS found",
	" FROM ruststream_level WHERE ruststream_level.priority IS NOT NULL AND found IS NOT NULL"
	" LIMIT 1)))" TAKE_END,
	NULL};

/* Around what finds a row: what a claim and a look for candidates do with it. */
static const char sqlite_before_lease[] =
	"UPDATE {table} AS ruststream_row SET {locked_until} = :token[attempt:, " COUNT_ATTEMPT "]"
	" WHERE ruststream_row.{id} = ";
static const char sqlite_after_lease[] = " RETURNING " CLAIMED;
static const char sqlite_before_candidate[] =
	"SELECT ruststream_row.{id}, {key},"
	" [partition_key:ruststream_row.{partition_key}][!partition_key:NULL]"
	" FROM {table} AS ruststream_row WHERE ruststream_row.{id} = ";

/*
 * INSERT INTO "main"."table" DEFAULT VALUES RETURNING "id"
 *
 * An empty list of columns is not SQL.
 */
static const char *const sqlite_publish_defaults[] = {
	"INSERT INTO {into} DEFAULT VALUES RETURNING {id}", NULL};

/*
 * CREATE INDEX "ruststream_claim_table" ON "table" ("group", "priority", "retry_after", "id")
 *     WHERE "processed_at" IS NULL
 */
static const char sqlite_claim_index[] =
	"CREATE INDEX {claim_index} ON {bare} ([group:{group}, ][priority:{priority}, ]"
	"[retry_after:{retry_after}, ]{id})[processed_at: WHERE {processed_at} IS NULL]";

/*
 * CREATE INDEX "ruststream_lease_table" ON "table" ("locked_until")
 *     WHERE "locked_until" IS NOT NULL
 */
static const char sqlite_lease_index[] =
	"CREATE INDEX {lease_index} ON {bare} ({locked_until}) WHERE {locked_until} IS NOT NULL";

#define DELAYED RS_SEARCHED(RS_SEARCH_BY_DELAY)
#define LEVELLED RS_SEARCHED(RS_SEARCH_BY_LEVEL)
#define KEYS RS_WITH_LINES(RS_LINES_PARTITION_KEY)

static const rs_catalogue_variant sqlite_variants[] = {
	{RS_OP_CLAIM_ROW, 0, DELAYED, sqlite_find_by_delay},
	{RS_OP_CLAIM_ROW, 0, LEVELLED, sqlite_find_by_level},
	{RS_OP_CLAIM_PAYLOAD, 0, DELAYED, sqlite_find_by_delay},
	{RS_OP_CLAIM_PAYLOAD, 0, LEVELLED, sqlite_find_by_level},
	{RS_OP_CANDIDATES, 0, DELAYED, sqlite_find_by_delay},
	{RS_OP_CANDIDATES, 0, LEVELLED, sqlite_find_by_level},
	{RS_OP_TAKE_ROW, KEYS, DELAYED, sqlite_take_by_delay},
	{RS_OP_TAKE_ROW, KEYS, LEVELLED, sqlite_take_by_level},
	{RS_OP_TAKE_PAYLOAD, KEYS, DELAYED, sqlite_take_by_delay},
	{RS_OP_TAKE_PAYLOAD, KEYS, LEVELLED, sqlite_take_by_level},
	{.pieces = NULL},
};

const rs_catalogue rs_sqlite_catalogue = {
	.operations = sqlite_operations,
	.variants = sqlite_variants,
	.publish_defaults = sqlite_publish_defaults,
	.before_lease = sqlite_before_lease,
	.after_lease = sqlite_after_lease,
	.before_candidate = sqlite_before_candidate,
	.indexes = {[RS_INDEX_CLAIM] = sqlite_claim_index, [RS_INDEX_LEASE] = sqlite_lease_index},
};
