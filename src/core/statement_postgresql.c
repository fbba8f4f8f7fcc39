/*-------------------------------------------------------------------------
 *
 * statement_postgresql.c
 *	  The SQL catalogue of PostgreSQL; what looks for rows in several ranges
 *	  is in search_postgresql.c.
 *
 *-------------------------------------------------------------------------
 */
#include "fragments_postgresql.h"
#include "headers_postgresql.h"

#define TAKE(carried) TAKE_FOUND(carried) TAKE_END

#define LEASED(carried)                                                                            \
	"SELECT " CLAIMED(                                                                             \
		carried) " FROM {table} AS ruststream_row{}" THIS_ROW READ_GROUP UNPROCESSED DUE WHERE     \
				 " ruststream_row.{locked_until} OPERATOR(pg_catalog.>) :now"

/* The head of a FIFO group is the first of its rows, be it due or not. */
#define CLAIM_HEAD(carried)                                                                        \
	LINE_HEAD(CLAIMED(carried) PLACE)                                                              \
	"SELECT ruststream_row.{id} FROM {table} AS ruststream_row{}" READ_GROUP UNPROCESSED           \
		CLAIM_ORDER " LIMIT 1" LINE_END

#define NEXT_GROUP(behind)                                                                         \
	"SELECT ruststream_row.{group} FROM {table} AS ruststream_row{}" UNPROCESSED behind            \
	" ORDER BY ruststream_row.{group} LIMIT 1"
#define GROUPS_BEHIND WHERE " ruststream_row.{group} OPERATOR(pg_catalog.>) :group"
#define GROUPS_BEHIND_LINE                                                                         \
	WHERE " ruststream_row.{group} OPERATOR(pg_catalog.>) ruststream_line.line"
#define WALK_GROUPS(behind)                                                                        \
	WALK(NEXT_GROUP(behind), NEXT_GROUP(GROUPS_BEHIND_LINE))                                       \
	"[retry_after:(SELECT ruststream_row.{retry_after} FROM {table} AS ruststream_row{}" WHERE     \
	" ruststream_row.{group} OPERATOR(pg_catalog.=) ruststream_line.line" UNPROCESSED CLAIM_ORDER  \
	" LIMIT 1)][!retry_after:NULL]::pg_catalog.timestamptz" END_WALK

/* Counts what is selected by the text that follows, a part of "due" each. */
#define COUNT                                                                                      \
	"SELECT pg_catalog.count(*)"                                                                   \
	"[retry_after: FILTER (WHERE ruststream_counted.due IS NULL"                                   \
	" OR ruststream_counted.due OPERATOR(pg_catalog.<=) :now),"                                    \
	" pg_catalog.count(*)"                                                                         \
	" FILTER (WHERE ruststream_counted.due OPERATOR(pg_catalog.>) :now),"                          \
	" pg_catalog.min(ruststream_counted.due)"                                                      \
	" FILTER (WHERE ruststream_counted.due OPERATOR(pg_catalog.<=) :now)]"                         \
	"[!retry_after:, 0::pg_catalog.int8, NULL::pg_catalog.timestamptz] FROM ("
#define COUNTED                                                                                    \
	"SELECT [retry_after:ruststream_row.{retry_after} AS due][!retry_after:1]"                     \
	" FROM {table} AS ruststream_row{}"
#define END_COUNT " LIMIT :limit) AS ruststream_counted"
#define COUNT_GROUPS(which) COUNTED UNPROCESSED which " ORDER BY ruststream_row.{group}"
#define IN_ANY WHERE " ruststream_row.{group} IS NOT NULL"
#define BEFORE_DEAD WHERE " ruststream_row.{group} OPERATOR(pg_catalog.<) :dead_group"
#define BEHIND_DEAD WHERE " ruststream_row.{group} OPERATOR(pg_catalog.>) :dead_group"

#define FIFO RS_WITH_LINES(RS_LINES_GROUP)
#define KEYS RS_WITH_LINES(RS_LINES_PARTITION_KEY)
#define NO_LINES RS_WITH_LINES(RS_LINES_NONE)

/* Headers for {moved}. */
#define MADE(headers)                                                                              \
	"[headers: CROSS JOIN LATERAL (SELECT " headers ") AS ruststream_headers (ruststream_made)]"

#define OF_THESE WHERE " ruststream_row.{id} OPERATOR(pg_catalog.=) ANY (:ids)"

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
	[RS_OP_CLAIM_ROW] = {.statements = {FIND(CLAIM_ROW, "")},
						 .forms = CLAIMING,
						 .lines = NO_LINES | KEYS},

	/* The same, with ruststream_row."payload" in place of the row. */
	[RS_OP_CLAIM_PAYLOAD] = {.statements = {FIND(CLAIM_PAYLOAD, "")},
							 .needs = RS_ROLE_PAYLOAD,
							 .forms = CLAIMING,
							 .lines = NO_LINES | KEYS},

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
								.forms = CLAIMING,
								.lines = NO_LINES},
	[RS_OP_CLAIM_ROW_BEHIND_PRIORITY] = {.statements = {FIND(CLAIM_ROW, OF_PRIORITY BEHIND)},
										 .needs = RS_ROLE_PRIORITY,
										 .forms = CLAIMING,
										 .lines = NO_LINES},
	[RS_OP_CLAIM_PAYLOAD_BEHIND] = {.statements = {FIND(CLAIM_PAYLOAD, OF_NO_PRIORITY BEHIND)},
									.needs = RS_ROLE_PAYLOAD,
									.forms = CLAIMING,
									.lines = NO_LINES},
	[RS_OP_CLAIM_PAYLOAD_BEHIND_PRIORITY] = {.statements = {FIND(CLAIM_PAYLOAD,
																 OF_PRIORITY BEHIND)},
											 .needs = RS_ROLE_PRIORITY,
											 .forms = CLAIMING,
											 .lines = NO_LINES},

	/*
	 * SELECT ruststream_row."id", pg_catalog.concat(E'jobs-', ruststream_row."id")
	 * FROM "schema"."table" AS ruststream_row
	 * WHERE .. as above ..
	 * ORDER BY .. LIMIT :limit
	 *
	 * No row is locked: nothing of a candidate outlasts the statement.
	 */
	[RS_OP_CANDIDATES] = {.statements = {FIND(OF_CANDIDATES, "")},
						  .forms = KEYED,
						  .any_form = KEYS},
	[RS_OP_CANDIDATES_BEHIND] = {.statements = {FIND(OF_CANDIDATES, OF_NO_PRIORITY BEHIND)},
								 .forms = KEYED,
								 .any_form = KEYS},
	[RS_OP_CANDIDATES_BEHIND_PRIORITY] = {.statements = {FIND(OF_CANDIDATES, OF_PRIORITY BEHIND)},
										  .needs = RS_ROLE_PRIORITY,
										  .forms = KEYED,
										  .any_form = KEYS},

	/*
	 * The head of a line, with its guard held.  That of a FIFO group, due or not,
	 * is found without a lock, for if it is locked no other may be taken:
	 *
	 * SELECT .. as a claim does ..
	 * FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) (
	 *         SELECT ruststream_row."id" FROM "schema"."table" AS ruststream_row
	 *         WHERE ruststream_row."group" OPERATOR(pg_catalog.=) :group
	 *             AND ruststream_row."processed_at" IS NULL
	 *         ORDER BY .. LIMIT 1)
	 *     AND ruststream_row."group" OPERATOR(pg_catalog.=) :group
	 *     AND ruststream_row."processed_at" IS NULL
	 *     AND (ruststream_row."retry_after" IS NULL
	 *          OR ruststream_row."retry_after" OPERATOR(pg_catalog.<=) :now)
	 *     AND ruststream_row."id" OPERATOR(pg_catalog.<>) ALL (:held)
	 *     AND (SELECT ruststream_row."locked_until" FROM "schema"."table" AS ruststream_row
	 *          WHERE ruststream_row."group" OPERATOR(pg_catalog.=) :group
	 *              AND ruststream_row."processed_at" IS NULL
	 *              AND ruststream_row."locked_until" OPERATOR(pg_catalog.>) :now
	 *          ORDER BY ruststream_row."locked_until" LIMIT 1) IS NULL
	 * FOR UPDATE SKIP LOCKED
	 *
	 * That of a partition key is in search_postgresql.c.
	 */
	[RS_OP_CLAIM_LINE_ROW] = {.statements = {CLAIM_HEAD("ruststream_row")},
							  .forms = CLAIMING,
							  .lines = FIFO | KEYS},
	[RS_OP_CLAIM_LINE_PAYLOAD] = {.statements = {CLAIM_HEAD("ruststream_row.{payload}")},
								  .needs = RS_ROLE_PAYLOAD,
								  .forms = CLAIMING,
								  .lines = FIFO | KEYS},

	/*
	 * The groups, one after the other, and when the head of each comes due; see
	 * search_postgresql.c for the walk, which is the same.
	 */
	[RS_OP_LINES] = {.statements = {WALK_GROUPS("")}, .lines = FIFO | KEYS},
	[RS_OP_LINES_BEHIND] = {.statements = {WALK_GROUPS(GROUPS_BEHIND)}, .lines = FIFO | KEYS},

	/*
	 * SELECT ruststream_row."retry_after"::pg_catalog.timestamptz,
	 *     (.. the first "locked_until" of the group that is later than now ..)
	 * FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."group" OPERATOR(pg_catalog.=) :group
	 *     AND ruststream_row."processed_at" IS NULL
	 * ORDER BY .. LIMIT 1
	 *
	 * or, of a partition key, SELECT NULL, (..)
	 */
	[RS_OP_LINE_WAITS] = {.statements = {"SELECT [fifo:[retry_after:ruststream_row.{retry_after}]"
										 "[!retry_after:NULL]][!fifo:NULL]::pg_catalog.timestamptz,"
										 " [locked_until:" LINE_LEASE "][!locked_until:NULL]"
										 "::pg_catalog.timestamptz"
										 "[fifo: FROM {table} AS ruststream_row{}" READ_GROUP
											 UNPROCESSED CLAIM_ORDER " LIMIT 1]"},
						  .lines = FIFO | KEYS},

	/* SELECT .. as a candidate .. WHERE ruststream_row."id" OPERATOR(pg_catalog.=) (.. the head ..)
	 */
	[RS_OP_LINE_CANDIDATE] = {.statements = {""}, .forms = KEYED, .lines = KEYS},
	[RS_OP_LOOSE_CANDIDATE] = {.statements = {FIND(OF_LOOSE_CANDIDATES, "")},
							   .forms = KEYED,
							   .lines = KEYS},

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
	 * or, with priorities, the first of what this yields of each.
	 */
	[RS_OP_NEXT_DUE] =
		{.statements = {"SELECT ruststream_row.{retry_after}"
						" FROM {table} AS ruststream_row" READ_GROUP UNPROCESSED WHERE
						" ruststream_row.{retry_after} OPERATOR(pg_catalog.>) :now" CLAIM_ORDER
						" LIMIT 1"},
		 .needs = RS_ROLE_RETRY_AFTER,
		 .lines = NO_LINES | KEYS},

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
	 * WITH ruststream_found (id) AS MATERIALIZED (
	 *     SELECT ruststream_row."id"
	 *     FROM ROWS FROM (pg_catalog.unnest(:ids), pg_catalog.unnest(:tokens))
	 *             AS ruststream_held (id, token)
	 *         CROSS JOIN "schema"."table" AS ruststream_row
	 *     WHERE ruststream_row."id" OPERATOR(pg_catalog.=) ruststream_held.id
	 *         AND ruststream_row."locked_until" OPERATOR(pg_catalog.=) ruststream_held.token
	 *     FOR UPDATE OF ruststream_row SKIP LOCKED)
	 * UPDATE "schema"."table" AS ruststream_row
	 * SET "locked_until" = NULL,
	 *     "attempt" = COALESCE(ruststream_row."attempt", 1) OPERATOR(pg_catalog.-) 1
	 * FROM ruststream_found
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) ruststream_found.id
	 *
	 * A row that may hold one of two tokens is given twice.  Nobody is waited for.
	 */
	[RS_OP_UNCLAIM] =
		{.statements =
			 {"WITH ruststream_found (id) AS MATERIALIZED (SELECT ruststream_row.{id}"
			  " FROM ROWS FROM (pg_catalog.unnest(:ids), pg_catalog.unnest(:tokens))"
			  " AS ruststream_held (id, token) CROSS JOIN {table} AS ruststream_row{}" WHERE
			  " ruststream_row.{id} OPERATOR(pg_catalog.=) ruststream_held.id" WHERE
			  " ruststream_row.{locked_until} OPERATOR(pg_catalog.=) ruststream_held.token"
			  " FOR UPDATE OF ruststream_row SKIP LOCKED)"
			  " UPDATE {table} AS ruststream_row SET " END_LEASE "[attempt:, {attempt} = " ATTEMPT
			  " OPERATOR(pg_catalog.-) 1] FROM ruststream_found"
			  " WHERE ruststream_row.{id} OPERATOR(pg_catalog.=) ruststream_found.id"},
		 .needs = RS_ROLE_LOCKED_UNTIL},

	/*
	 * SELECT .. as a claim does ..
	 * FROM "schema"."table" AS ruststream_row
	 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) :id
	 *     AND ruststream_row."group" OPERATOR(pg_catalog.=) :group
	 *     AND ruststream_row."processed_at" IS NULL
	 *     AND (ruststream_row."retry_after" IS NULL
	 *          OR ruststream_row."retry_after" OPERATOR(pg_catalog.<=) :now)
	 *     AND ruststream_row."locked_until" OPERATOR(pg_catalog.>) :now
	 *
	 * Nothing is locked: whose lease it is the settlement will see.
	 */
	[RS_OP_LEASED_ROW] = {.statements = {LEASED("ruststream_row")}, .needs = RS_ROLE_LOCKED_UNTIL},
	[RS_OP_LEASED_PAYLOAD] = {.statements = {LEASED("ruststream_row.{payload}")},
							  .needs = RS_ROLE_PAYLOAD,
							  .forms = RS_IN_FORM(RS_FORM_LEASE)},

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
	[RS_OP_DEPTH] = {.statements = {COUNT COUNTED READ_GROUP UNPROCESSED CLAIM_ORDER END_COUNT}},

	/*
	 * The same of every group, each in its turn: WHERE ruststream_row."group" IS NOT NULL ..
	 * ORDER BY ruststream_row."group"; and of every other than that of dead letters, which may be
	 * long:
	 *
	 * .. FROM (SELECT * FROM (SELECT .. AND ruststream_row."group" OPERATOR(pg_catalog.<)
	 * :dead_group ORDER BY ruststream_row."group" LIMIT :limit) AS ruststream_before UNION ALL
	 * SELECT * FROM (.. OPERATOR(pg_catalog.>) ..) AS ruststream_behind LIMIT :limit) AS
	 * ruststream_counted
	 */
	[RS_OP_DEPTH_ALL] = {.statements = {COUNT COUNT_GROUPS(IN_ANY) END_COUNT}, .lines = FIFO},
	[RS_OP_DEPTH_ALIVE] = {.statements = {COUNT "SELECT * FROM (" COUNT_GROUPS(
							   BEFORE_DEAD) " LIMIT :limit) AS ruststream_before"
											" UNION ALL SELECT * FROM (" COUNT_GROUPS(
												BEHIND_DEAD) " LIMIT :limit) AS "
															 "ruststream_behind" END_COUNT},
						   .lines = FIFO},

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
 * and, of partition keys, (.. "partition_key", "priority" ..); of leases
 *
 * CREATE INDEX ON "schema"."table" ("group", "locked_until")
 *     WHERE ("locked_until" IS NOT NULL)
 *
 * or ("partition_key", "locked_until").  rs_index_columns says the same in roles.
 */
#define INDEX(first)                                                                               \
	"CREATE INDEX ON {into} ([group:{group}, ]" first "[priority:{priority} NULLS FIRST, ]"        \
	"[retry_after:{retry_after} NULLS FIRST, ]{id})[processed_at: WHERE ({processed_at} IS NULL)]"

const rs_catalogue rs_postgresql_catalogue = {
	.operations = postgresql_operations,
	.variants = rs_postgresql_variants,
	.publish_defaults = postgresql_publish_defaults,
	.before_lease = postgresql_before_lease,
	.after_lease = postgresql_after_lease,
	.indexes = {[RS_INDEX_CLAIM] = INDEX(""),
				[RS_INDEX_LINE] = INDEX("{partition_key}, "),
				[RS_INDEX_LEASE] = "CREATE INDEX ON {into} ([fifo:{group}, ]"
								   "[partition_key:{partition_key}, ]{locked_until})"
								   " WHERE ({locked_until} IS NOT NULL)"},
};
