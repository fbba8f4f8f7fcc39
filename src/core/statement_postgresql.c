/*-------------------------------------------------------------------------
 *
 * statement_postgresql.c
 *	  The SQL catalogue of PostgreSQL.
 *
 *-------------------------------------------------------------------------
 */
#include "catalogue.h"
#include "headers_postgresql.h"

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

/* In the lease form: no live lease; and, for what its holder does, still this one. */
#define UNLEASED                                                                                   \
	"[locked_until:" WHERE " (ruststream_row.{locked_until} IS NULL OR"                            \
	" ruststream_row.{locked_until} OPERATOR(pg_catalog.<=) :now)]"
#define GUARD                                                                                      \
	"[locked_until:" WHERE " (ruststream_row.{locked_until} OPERATOR(pg_catalog.=) :token OR"      \
	" ruststream_row.{locked_until} OPERATOR(pg_catalog.=) :announced)]"
#define END_LEASE "[locked_until:{locked_until} = NULL]"

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
#define CLAIMED(carried)                                                                           \
	"ruststream_row.{id}, [attempt:" ATTEMPT "][!attempt:1]::pg_catalog.int8, "                    \
	"[headers:ruststream_row.{headers}][!headers:NULL::pg_catalog.jsonb], " carried                \
	", [priority:ruststream_row.{priority}][!priority:NULL]::pg_catalog.int8"                      \
	", [retry_after:ruststream_row.{retry_after}][!retry_after:NULL::pg_catalog.timestamptz]"

/* Row lock form: where the row is, to see whether it is changed within its claim's transaction. */
#define PLACE "[!locked_until:, ruststream_row.tableoid, ruststream_row.ctid]"

/* A claim locks what it finds; a candidate's key is what will be locked. */
#define OF_CLAIM(carried) (CLAIMED(carried) PLACE, UNLEASED, " FOR UPDATE SKIP LOCKED")
#define CLAIM_ROW OF_CLAIM("ruststream_row")
#define CLAIM_PAYLOAD OF_CLAIM("ruststream_row.{payload}")
#define OF_CANDIDATES ("ruststream_row.{id}, {key}", "", "")
#define OF_FREE_CANDIDATES ("ruststream_row.{id}, {key}", KEY_IS_FREE, " FOR UPDATE SKIP LOCKED")

/* NOT .. ANY, and not <> ALL, since only the former is hashed: the keys are read once. */
#define KEY_IS_FREE                                                                                \
	WHERE " NOT pg_catalog.hashtextextended({key}, 0) OPERATOR(pg_catalog.=) ANY ("                \
		  "SELECT (k.classid::pg_catalog.int8 OPERATOR(pg_catalog.<<) 32)"                         \
		  " OPERATOR(pg_catalog.|) k.objid::pg_catalog.int8 FROM pg_catalog.pg_locks AS k"         \
		  " WHERE k.locktype OPERATOR(pg_catalog.=) 'advisory' AND k.granted"                      \
		  " AND k.objsubid OPERATOR(pg_catalog.=) 1"                                               \
		  " AND k.database OPERATOR(pg_catalog.=) (SELECT d.oid FROM pg_catalog.pg_database AS d"  \
		  " WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database())"                 \
		  " AND k.pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid())"

/* found: what is selected, a condition on it, and its locking clause. */
#define FIND(found, which) FIND_OPENED(which, OPEN found)
#define OPEN(...) __VA_ARGS__
#define FIND_OPENED(...) FIND_PARTS(__VA_ARGS__)
#define FIND_PARTS(which, selected, condition, locking)                                            \
	"SELECT " selected " FROM {table} AS ruststream_row{}" READ_GROUP UNPROCESSED which condition  \
		NOT_HELD CLAIM_ORDER " LIMIT :limit" locking

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

#define FIND_UNDELAYED(found, which) FIND(found, which UNDELAYED)
#define FIND_COME_DUE(found, which) FIND(found, which COME_DUE)
#define FIND_BY_DELAY(found, which)                                                                \
	"SELECT * FROM (" FIND_UNDELAYED(found, which) ") AS ruststream_undelayed UNION ALL SELECT * " \
												   "FROM (" FIND_COME_DUE(                         \
													   found, which) ") AS ruststream_come_due"

/* The lowest of the priorities that are left, by one step down the index. */
#define LEVEL(above)                                                                               \
	"SELECT ruststream_row.{priority} FROM {table} AS ruststream_row{}" READ_GROUP UNPROCESSED     \
		above " ORDER BY ruststream_row.{priority} NULLS FIRST LIMIT 1"

#define OF_A_PRIORITY WHERE " ruststream_row.{priority} IS NOT NULL"
#define OF_NEXT_PRIORITY                                                                           \
	WHERE " ruststream_row.{priority} OPERATOR(pg_catalog.>) ruststream_level.priority"
#define LEVELS                                                                                     \
	"WITH RECURSIVE ruststream_level (priority) AS ((" LEVEL(                                      \
		OF_A_PRIORITY) ")"                                                                         \
					   " UNION ALL SELECT (" LEVEL(                                                \
						   OF_NEXT_PRIORITY) ")"                                                   \
											 " FROM ruststream_level WHERE "                       \
											 "ruststream_level.priority IS NOT NULL) "
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

/*
 * A row that is found and stamped in one statement is returned as it was before:
 * through what found it.
 */
#define FOUND                                                                                      \
	"WITH ruststream_found (id, attempt, headers, input, priority, retry_after) AS MATERIALIZED ("
#define OF_FOUND                                                                                   \
	" FROM ruststream_found WHERE ruststream_row.{id} OPERATOR(pg_catalog.=) ruststream_found.id"  \
	" RETURNING ruststream_found.*"

#define DUE                                                                                        \
	"[retry_after:" WHERE " (ruststream_row.{retry_after} IS NULL OR"                              \
	" ruststream_row.{retry_after} OPERATOR(pg_catalog.<=) :now)]"
#define TAKE(carried)                                                                              \
	FOUND "SELECT " CLAIMED(                                                                       \
		carried) " FROM {table} AS ruststream_row{}" THIS_ROW READ_GROUP UNPROCESSED DUE WHERE     \
				 " {key} OPERATOR(pg_catalog.=) :key FOR UPDATE SKIP LOCKED) "                     \
				 "[attempt:UPDATE {table} AS ruststream_row SET " COUNT_ATTEMPT OF_FOUND "]"       \
				 "[!attempt:SELECT ruststream_found.* FROM ruststream_found]"

/* Headers for {moved}. */
#define MADE(headers)                                                                              \
	"[headers: CROSS JOIN LATERAL (SELECT " headers ") AS ruststream_headers (ruststream_made)]"

#define OF_THESE WHERE " ruststream_row.{id} OPERATOR(pg_catalog.=) ANY (:ids)"

#define CLAIMING (RS_IN_FORM(RS_FORM_ROW_LOCK) | RS_IN_FORM(RS_FORM_LEASE))
#define KEYED RS_IN_FORM(RS_FORM_ADVISORY_LOCK)

static const rs_catalogue_entry postgresql_operations[RS_OPERATION_COUNT] = {
	/*
	 * Without retry_after:
	 *
	 * SELECT ruststream_row."id", COALESCE(ruststream_row."attempt", 1)::pg_catalog.int8,
	 *     ruststream_row."headers", ruststream_row,
	 *     ruststream_row."priority"::pg_catalog.int8, NULL::pg_catalog.timestamptz,
	 *     ruststream_row.tableoid, ruststream_row.ctid
	 * FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."group" OPERATOR(pg_catalog.=) :group
	 *     AND ruststream_row."processed_at" IS NULL
	 * ORDER BY ruststream_row."priority" NULLS FIRST, ruststream_row."id"
	 * LIMIT :limit FOR UPDATE SKIP LOCKED
	 *
	 * With it, see claims below.
	 */
	[RS_OP_CLAIM_ROW] = {.statements = {FIND(CLAIM_ROW, "")}, .forms = CLAIMING},

	/* The same, with ruststream_row."payload" in place of the row. */
	[RS_OP_CLAIM_PAYLOAD] = {.statements = {FIND(CLAIM_PAYLOAD, "")},
							 .needs = RS_ROLE_PAYLOAD,
							 .forms = CLAIMING},

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
	[RS_OP_CLAIM_ROW_BEHIND] = {.statements = {FIND(CLAIM_ROW, OF_NO_PRIORITY BEHIND)},
								.forms = CLAIMING},
	[RS_OP_CLAIM_ROW_BEHIND_PRIORITY] = {.statements = {FIND(CLAIM_ROW, OF_PRIORITY BEHIND)},
										 .needs = RS_ROLE_PRIORITY,
										 .forms = CLAIMING},
	[RS_OP_CLAIM_PAYLOAD_BEHIND] = {.statements = {FIND(CLAIM_PAYLOAD, OF_NO_PRIORITY BEHIND)},
									.needs = RS_ROLE_PAYLOAD,
									.forms = CLAIMING},
	[RS_OP_CLAIM_PAYLOAD_BEHIND_PRIORITY] = {.statements = {FIND(CLAIM_PAYLOAD,
																 OF_PRIORITY BEHIND)},
											 .needs = RS_ROLE_PRIORITY,
											 .forms = CLAIMING},

	/*
	 * SELECT ruststream_row."id", pg_catalog.concat(E'jobs-', ruststream_row."id")
	 * FROM "schema"."table" AS ruststream_row
	 * WHERE .. as above ..
	 * ORDER BY .. LIMIT :limit
	 *
	 * No row is locked: nothing of a candidate outlasts the statement.
	 */
	[RS_OP_CANDIDATES] = {.statements = {FIND(OF_CANDIDATES, "")}, .forms = KEYED},
	[RS_OP_CANDIDATES_BEHIND] = {.statements = {FIND(OF_CANDIDATES, OF_NO_PRIORITY BEHIND)},
								 .forms = KEYED},
	[RS_OP_CANDIDATES_BEHIND_PRIORITY] = {.statements = {FIND(OF_CANDIDATES, OF_PRIORITY BEHIND)},
										  .needs = RS_ROLE_PRIORITY,
										  .forms = KEYED},

	/*
	 * Of those the ones that can be had:
	 *
	 *     AND NOT pg_catalog.hashtextextended(the key, 0) OPERATOR(pg_catalog.=) ANY (
	 *         .. the advisory keys that other sessions hold ..)
	 * ORDER BY .. LIMIT :limit FOR UPDATE SKIP LOCKED
	 *
	 * A row that somebody else has locked could not be taken, and would stand in the
	 * way of those behind it.  The locks end with the look's own transaction.
	 */
	[RS_OP_FREE_CANDIDATES] = {.statements = {FIND(OF_FREE_CANDIDATES, "")}, .forms = KEYED},

	/*
	 * WITH ruststream_found (id, attempt, headers, input, priority, retry_after) AS MATERIALIZED (
	 *     SELECT .. as a claim does ..
	 *     FROM "schema"."table" AS ruststream_row
	 *     WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 *         AND ruststream_row."group" OPERATOR(pg_catalog.=) :group
	 *         AND ruststream_row."processed_at" IS NULL
	 *         AND (ruststream_row."retry_after" IS NULL
	 *              OR ruststream_row."retry_after" OPERATOR(pg_catalog.<=) :now)
	 *         AND the key OPERATOR(pg_catalog.=) :key
	 *     FOR UPDATE SKIP LOCKED)
	 * UPDATE "schema"."table" AS ruststream_row
	 * SET "attempt" = COALESCE(ruststream_row."attempt", 1) OPERATOR(pg_catalog.+) 1
	 * FROM ruststream_found
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) ruststream_found.id
	 * RETURNING ruststream_found.*
	 *
	 * or, without attempt, SELECT ruststream_found.* FROM ruststream_found
	 */
	[RS_OP_TAKE_ROW] = {.statements = {TAKE("ruststream_row")}, .forms = KEYED},
	[RS_OP_TAKE_PAYLOAD] = {.statements = {TAKE("ruststream_row.{payload}")},
							.needs = RS_ROLE_PAYLOAD,
							.forms = KEYED},

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
	 * is asked again, so that one failure is never settled twice.  In the lease
	 * form its token tells:
	 *
	 *     AND (ruststream_row."locked_until" OPERATOR(pg_catalog.=) :token
	 *          OR ruststream_row."locked_until" OPERATOR(pg_catalog.=) :announced)
	 *
	 * which guards every settlement of that form as well.
	 */
	[RS_OP_RECLAIM] = {.statements = {"SELECT 1 FROM {table} AS ruststream_row" THIS_ROW READ_GROUP
										  UNPROCESSED GUARD "[!locked_until:[attempt:" WHERE
									  " " ATTEMPT " OPERATOR(pg_catalog.=) :attempt]]"
									  " FOR UPDATE SKIP LOCKED"}},

	/*
	 * SELECT 1 FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 *     AND ruststream_row."group" OPERATOR(pg_catalog.=) :group
	 *     AND ruststream_row."processed_at" IS NULL
	 */
	[RS_OP_UNSETTLED] = {.statements = {"SELECT 1 FROM {table} AS ruststream_row" THIS_ROW
											READ_GROUP UNPROCESSED GUARD}},

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
		{.statements = {"[processed_at:UPDATE {table} AS ruststream_row SET {processed_at} = :now"
						"[locked_until:, " END_LEASE "]]"
						"[!processed_at:DELETE FROM {table} AS ruststream_row]" THIS_ROW UNPROCESSED
							GUARD}},

	/*
	 * UPDATE "schema"."table" AS ruststream_row
	 * SET "attempt" = COALESCE(ruststream_row."attempt", 1) OPERATOR(pg_catalog.+) 1
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 */
	[RS_OP_RETRY] = {.statements = {"UPDATE {table} AS ruststream_row SET " COUNT_ATTEMPT THIS_ROW},
					 .needs = RS_ROLE_ATTEMPT,
					 .forms = RS_IN_FORM(RS_FORM_ROW_LOCK)},

	/*
	 * UPDATE "schema"."table" AS ruststream_row SET "locked_until" = NULL
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id AND .. the token ..
	 */
	[RS_OP_RELEASE] = {.statements = {"UPDATE {table} AS ruststream_row SET " END_LEASE THIS_ROW
										  GUARD},
					   .needs = RS_ROLE_LOCKED_UNTIL},

	/*
	 * UPDATE "schema"."table" AS ruststream_row
	 * SET "retry_after" = :until,
	 *     "attempt" = COALESCE(ruststream_row."attempt", 1) OPERATOR(pg_catalog.+) 1
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 *
	 * Without the attempt in the other forms, whose claim has counted it.
	 */
	[RS_OP_RETRY_AFTER] =
		{.statements = {"UPDATE {table} AS ruststream_row SET {retry_after} = :until"
						"[row_lock:[attempt:, " COUNT_ATTEMPT "]][locked_until:, " END_LEASE
						"]" THIS_ROW GUARD},
		 .needs = RS_ROLE_RETRY_AFTER},

	/*
	 * UPDATE "schema"."table" AS ruststream_row
	 * SET "group" = :dead_group, "headers" = .. with :origin ..
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 */
	[RS_OP_MOVE_GROUP] =
		{.statements = {"UPDATE {table} AS ruststream_row SET {group} = :dead_group"
						"[headers:, {headers} = " HEADERS_WITH_ORIGIN "]"
						"[locked_until:, " END_LEASE "]" THIS_ROW GUARD},
		 .needs = RS_ROLE_GROUP},

	/*
	 * INSERT INTO "schema"."dest" ("id", "payload") OVERRIDING SYSTEM VALUE
	 * SELECT "id", ruststream_headers.ruststream_made, "payload"
	 * FROM "schema"."table" AS ruststream_row
	 *     CROSS JOIN LATERAL (SELECT .. headers with :origin ..)
	 *         AS ruststream_headers (ruststream_made)
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 *
	 * DELETE FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 *
	 * OVERRIDING keeps the id where the destination's is an identity.  In the
	 * lease form the column of the lease is written as NULL.
	 */
	[RS_OP_MOVE_TABLE] = {.statements = {"INSERT INTO {dest} ({columns}) OVERRIDING SYSTEM VALUE"
										 " SELECT {moved} FROM {table} AS ruststream_row" MADE(
											 HEADERS_WITH_ORIGIN) THIS_ROW GUARD,
										 "DELETE FROM {table} AS ruststream_row" THIS_ROW GUARD}},

	/*
	 * UPDATE "schema"."table" AS ruststream_row SET "locked_until" = :until
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 *     AND ruststream_row."locked_until" OPERATOR(pg_catalog.=) :token
	 */
	[RS_OP_EXTEND] =
		{.statements = {"UPDATE {table} AS ruststream_row SET {locked_until} = :until" THIS_ROW
							WHERE " ruststream_row.{locked_until} OPERATOR(pg_catalog.=) :token"},
		 .needs = RS_ROLE_LOCKED_UNTIL},

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
						") RETURNING ruststream_row.{id}::pg_catalog.text"}},

	/*
	 * SELECT ruststream_row."id",
	 *     ruststream_row."headers" OPERATOR(pg_catalog.->>) 'ruststream-origin-group',
	 *     ruststream_row.ctid, ruststream_row.tableoid
	 * FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."group" OPERATOR(pg_catalog.=) :dead_group
	 *     AND ruststream_row."processed_at" IS NULL
	 * ORDER BY ruststream_row."priority" NULLS FIRST,
	 *     ruststream_row."retry_after" NULLS FIRST, ruststream_row."id"
	 * FOR UPDATE SKIP LOCKED
	 *
	 * Of a table without groups, 'ruststream-origin-queue'.  What is in work is left
	 * out: in the lease form as a claim does, in the advisory lock form by its key.
	 * For a cursor.
	 */
	[RS_OP_FIND_DEAD] =
		{.statements =
			 {"SELECT ruststream_row.{id}, [headers:" HEADERS
			  " OPERATOR(pg_catalog.->>) '[group:ruststream-origin-group]"
			  "[!group:ruststream-origin-queue]'][!headers:NULL::pg_catalog.text]"
			  ", ruststream_row.ctid, ruststream_row.tableoid FROM {table} AS ruststream_row"
			  "[group:" WHERE " ruststream_row.{group} OPERATOR(pg_catalog.=) "
			  ":dead_group]" UNPROCESSED UNLEASED "[advisory_lock:" KEY_IS_FREE "]" CLAIM_ORDER
			  " FOR UPDATE SKIP LOCKED"}},

	/*
	 * UPDATE "schema"."table" AS ruststream_row
	 * SET "group" = ruststream_found.origin, "attempt" = 1, "retry_after" = DEFAULT,
	 *     "headers" = .. without :origin_headers ..
	 * FROM ROWS FROM (pg_catalog.unnest(:ids), pg_catalog.unnest(:groups))
	 *     AS ruststream_found (id, origin)
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) ruststream_found.id
	 */
	[RS_OP_REDRIVE_GROUP] =
		{.statements = {"UPDATE {table} AS ruststream_row SET {group} = ruststream_found.origin"
						"[attempt:, {attempt} = 1][retry_after:, {retry_after} = DEFAULT]"
						"[locked_until:, " END_LEASE "]"
						"[headers:, {headers} = " HEADERS_WITHOUT_ORIGIN "]"
						" FROM ROWS FROM (pg_catalog.unnest(:ids), pg_catalog.unnest(:groups))"
						" AS ruststream_found (id, origin)" WHERE
						" ruststream_row.{id} OPERATOR(pg_catalog.=) ruststream_found.id"},
		 .needs = RS_ROLE_GROUP},

	/*
	 * WITH ruststream_row AS (
	 *     DELETE FROM "schema"."dest" AS ruststream_row
	 *     USING ROWS FROM (pg_catalog.unnest(:tids), pg_catalog.unnest(:tables))
	 *         AS ruststream_found (place, relation)
	 *     WHERE ruststream_row.ctid OPERATOR(pg_catalog.=) ruststream_found.place
	 *         AND ruststream_row.tableoid OPERATOR(pg_catalog.=) ruststream_found.relation
	 *     RETURNING ruststream_row.*)
	 * INSERT INTO "schema"."table" ("id", "headers", "payload", "attempt")
	 *     OVERRIDING SYSTEM VALUE
	 * SELECT "id", ruststream_headers.ruststream_made, "payload", 1 FROM ruststream_row
	 *     CROSS JOIN LATERAL (SELECT .. headers without :origin_headers ..)
	 *     AS ruststream_headers (ruststream_made)
	 *
	 * Two queues may have the same ids there.  The rows are locked, so each
	 * is where it was found.
	 */
	[RS_OP_REDRIVE_TABLE] =
		{.statements = {"WITH ruststream_row AS (DELETE FROM {dest} AS ruststream_row"
						" USING ROWS FROM (pg_catalog.unnest(:tids), pg_catalog.unnest(:tables))"
						" AS ruststream_found (place, relation) WHERE"
						" ruststream_row.ctid OPERATOR(pg_catalog.=) ruststream_found.place AND"
						" ruststream_row.tableoid OPERATOR(pg_catalog.=) ruststream_found.relation"
						" RETURNING ruststream_row.*) INSERT INTO {into} "
						"({columns}[attempt:, {attempt}]) OVERRIDING SYSTEM VALUE"
						" SELECT {moved}[attempt:, 1] FROM ruststream_row" MADE(
							HEADERS_WITHOUT_ORIGIN)}},

	/*
	 * SELECT ruststream_row."id" FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."processed_at" OPERATOR(pg_catalog.<=) :until
	 * FOR UPDATE SKIP LOCKED
	 *
	 * DELETE FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) ANY (:ids)
	 *
	 * The first is for a cursor.  No claim looks at, or locks, a processed row.
	 */
	[RS_OP_FIND_PROCESSED] =
		{.statements = {"SELECT ruststream_row.{id} FROM {table} AS ruststream_row" WHERE
						" ruststream_row.{processed_at} OPERATOR(pg_catalog.<=) :until"
						" FOR UPDATE SKIP LOCKED"},
		 .needs = RS_ROLE_PROCESSED_AT},
	[RS_OP_PURGE] = {.statements = {"DELETE FROM {table} AS ruststream_row" OF_THESE},
					 .needs = RS_ROLE_PROCESSED_AT},

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
						" LIMIT :limit) AS ruststream_counted"}},

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
		 .needs = RS_ROLE_GROUP},

	/*
	 * SELECT pg_catalog.count(*)
	 * FROM (SELECT 1 FROM "schema"."dest" LIMIT :limit) AS ruststream_counted
	 */
	[RS_OP_DEPTH_DEAD_TABLE] = {.statements = {"SELECT pg_catalog.count(*)"
											   " FROM (SELECT 1 FROM {dest} LIMIT :limit)"
											   " AS ruststream_counted"}},
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
#define BY_DELAY(found)                                                                            \
	{                                                                                              \
		FIND_BY_DELAY(found, ""), " LIMIT :limit", NULL                                            \
	}
#define BY_LEVEL(found)                                                                            \
	{                                                                                              \
		LEVELS, FIND_BY_DELAY(found, OF_NO_PRIORITY), OF_EACH_LEVEL,                               \
			FIND_BY_DELAY(found, OF_LEVEL),                                                        \
			" LIMIT :limit) AS ruststream_found WHERE ruststream_level.priority IS NOT NULL "      \
			"LIMIT :limit",                                                                        \
			NULL                                                                                   \
	}

static const char *const postgresql_claim_row_by_delay[] = BY_DELAY(CLAIM_ROW);
static const char *const postgresql_claim_payload_by_delay[] = BY_DELAY(CLAIM_PAYLOAD);
static const char *const postgresql_candidates_by_delay[] = BY_DELAY(OF_CANDIDATES);
static const char *const postgresql_claim_row_by_level[] = BY_LEVEL(CLAIM_ROW);
static const char *const postgresql_claim_payload_by_level[] = BY_LEVEL(CLAIM_PAYLOAD);
static const char *const postgresql_candidates_by_level[] = BY_LEVEL(OF_CANDIDATES);
static const char *const postgresql_free_candidates_by_delay[] = BY_DELAY(OF_FREE_CANDIDATES);
static const char *const postgresql_free_candidates_by_level[] = BY_LEVEL(OF_FREE_CANDIDATES);

/*
 * The claims of a lease table; .. is the claim as in the row lock form.
 *
 * WITH ruststream_found (id, attempt, headers, input, priority, retry_after) AS MATERIALIZED (..)
 * UPDATE "schema"."table" AS ruststream_row
 * SET "locked_until" = :token,
 *     "attempt" = COALESCE(ruststream_row."attempt", 1) OPERATOR(pg_catalog.+) 1
 * FROM ruststream_found
 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) ruststream_found.id
 * RETURNING ruststream_found.*
 */
static const char postgresql_before_lease[] = FOUND;
static const char postgresql_after_lease[] =
	") UPDATE {table} AS ruststream_row SET {locked_until} = :token"
	"[attempt:, " COUNT_ATTEMPT "]" OF_FOUND;

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

const rs_catalogue rs_postgresql_catalogue = {
	.operations = postgresql_operations,
	.claim_row_by_delay = postgresql_claim_row_by_delay,
	.claim_payload_by_delay = postgresql_claim_payload_by_delay,
	.candidates_by_delay = postgresql_candidates_by_delay,
	.free_candidates_by_delay = postgresql_free_candidates_by_delay,
	.claim_row_by_level = postgresql_claim_row_by_level,
	.claim_payload_by_level = postgresql_claim_payload_by_level,
	.candidates_by_level = postgresql_candidates_by_level,
	.free_candidates_by_level = postgresql_free_candidates_by_level,
	.before_lease = postgresql_before_lease,
	.after_lease = postgresql_after_lease,
	.publish_defaults = postgresql_publish_defaults,
	.claim_index = postgresql_claim_index,
};
