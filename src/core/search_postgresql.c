/*-------------------------------------------------------------------------
 *
 * search_postgresql.c
 *	  Looking for rows in several ranges of an index, in PostgreSQL's SQL: what
 *	  stands in for an operation's statement where a queue has delays, or
 *	  partition keys.
 *
 *-------------------------------------------------------------------------
 */
#include "fragments_postgresql.h"

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
#define LEVEL(line, first, above)                                                                  \
	"SELECT ruststream_row.{priority} FROM {table} AS ruststream_row{}" READ_GROUP UNPROCESSED     \
		line above " ORDER BY" first " ruststream_row.{priority} NULLS FIRST LIMIT 1"

#define OF_A_PRIORITY WHERE " ruststream_row.{priority} IS NOT NULL"
#define OF_NEXT_PRIORITY                                                                           \
	WHERE " ruststream_row.{priority} OPERATOR(pg_catalog.>) ruststream_level.priority"
#define LEVELS(line, first)                                                                        \
	"WITH RECURSIVE ruststream_level (priority) AS ((" LEVEL(                                      \
		line, first, OF_A_PRIORITY) ")"                                                            \
									" UNION ALL SELECT (" LEVEL(                                   \
										line, first, OF_NEXT_PRIORITY) ")"                         \
																	   " FROM ruststream_level "   \
																	   "WHERE "                    \
																	   "ruststream_level."         \
																	   "priority IS NOT NULL) "
#define OF_EACH_LEVEL                                                                              \
	" UNION ALL SELECT ruststream_found.* FROM ruststream_level CROSS JOIN LATERAL ("
#define END_LEVELS(limit)                                                                          \
	limit ") AS ruststream_found WHERE ruststream_level.priority IS NOT NULL" limit

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
 *
 * Of a table with partition keys these claims find the rows that have none; line
 * is the condition that chooses a key where its rows are looked for.
 */
#define IN_ONE(found, line) FIND(found, line)
#define BY_DELAY(found, line, limit) FIND_BY_DELAY(found, line), limit
#define BY_LEVEL(found, line, levels, limit)                                                       \
	levels, FIND_BY_DELAY(found, line OF_NO_PRIORITY), OF_EACH_LEVEL,                              \
		FIND_BY_DELAY(found, line OF_LEVEL), END_LEVELS(limit)
#define GROUPS_LEVELS LEVELS("", "")
#define LOOSE_LEVELS LEVELS(OF_NO_KEY, KEY_FIRST)

#define LIMIT " LIMIT :limit"

static const char *const claim_row_by_delay[] = {BY_DELAY(CLAIM_ROW, "", LIMIT), NULL};
static const char *const claim_payload_by_delay[] = {BY_DELAY(CLAIM_PAYLOAD, "", LIMIT), NULL};
static const char *const candidates_by_delay[] = {BY_DELAY(OF_CANDIDATES, "", LIMIT), NULL};
static const char *const free_candidates_by_delay[] = {BY_DELAY(OF_FREE_CANDIDATES, "", LIMIT),
													   NULL};
static const char *const claim_row_by_level[] = {BY_LEVEL(CLAIM_ROW, "", GROUPS_LEVELS, LIMIT),
												 NULL};
static const char *const claim_payload_by_level[] = {
	BY_LEVEL(CLAIM_PAYLOAD, "", GROUPS_LEVELS, LIMIT), NULL};
static const char *const candidates_by_level[] = {BY_LEVEL(OF_CANDIDATES, "", GROUPS_LEVELS, LIMIT),
												  NULL};
static const char *const free_candidates_by_level[] = {
	BY_LEVEL(OF_FREE_CANDIDATES, "", GROUPS_LEVELS, LIMIT), NULL};
static const char *const claim_loose_row_by_level[] = {BY_LEVEL(CLAIM_ROW, "", LOOSE_LEVELS, LIMIT),
													   NULL};
static const char *const claim_loose_payload_by_level[] = {
	BY_LEVEL(CLAIM_PAYLOAD, "", LOOSE_LEVELS, LIMIT), NULL};
static const char *const loose_by_delay[] = {BY_DELAY(OF_LOOSE_CANDIDATES, "", LIMIT), NULL};
static const char *const loose_by_level[] = {BY_LEVEL(OF_LOOSE_CANDIDATES, "", LOOSE_LEVELS, LIMIT),
											 NULL};

/*
 * The head of a partition key is the first of its rows that are due; it is found
 * without a lock, for if it is locked no other of its key may be taken:
 *
 * SELECT .. as a claim does ..
 * FROM "schema"."table" AS ruststream_row
 * WHERE ruststream_row."id" OPERATOR(pg_catalog.=) (.. the first id of the ranges above ..)
 *     AND .. what a row must be that is claimed ..
 * FOR UPDATE SKIP LOCKED
 */
#define ONE " LIMIT 1"
#define HEAD IN_ONE(OF_HEAD, READ_KEY)
#define HEAD_BY_DELAY BY_DELAY(OF_HEAD, READ_KEY, ONE)
#define HEAD_BY_LEVEL BY_LEVEL(OF_HEAD, READ_KEY, LEVELS(READ_KEY, ""), ONE)

#define CLAIM_HEAD(carried, ...)                                                                   \
	{                                                                                              \
		LINE_HEAD(CLAIMED(carried) PLACE), __VA_ARGS__, LINE_END, NULL                             \
	}
static const char *const claim_key_row[] = CLAIM_HEAD("ruststream_row", HEAD);
static const char *const claim_key_row_by_delay[] = CLAIM_HEAD("ruststream_row", HEAD_BY_DELAY);
static const char *const claim_key_row_by_level[] = CLAIM_HEAD("ruststream_row", HEAD_BY_LEVEL);
static const char *const claim_key_payload[] = CLAIM_HEAD("ruststream_row.{payload}", HEAD);
static const char *const claim_key_payload_by_delay[] =
	CLAIM_HEAD("ruststream_row.{payload}", HEAD_BY_DELAY);
static const char *const claim_key_payload_by_level[] =
	CLAIM_HEAD("ruststream_row.{payload}", HEAD_BY_LEVEL);

/* The same without its lock, as a candidate of the advisory lock form. */
#define HEAD_CANDIDATE(...)                                                                        \
	{                                                                                              \
		LINE_HEAD(CANDIDATE), __VA_ARGS__, ")" NOT_HELD, NULL                                      \
	}
static const char *const key_candidate[] = HEAD_CANDIDATE(HEAD);
static const char *const key_candidate_by_delay[] = HEAD_CANDIDATE(HEAD_BY_DELAY);
static const char *const key_candidate_by_level[] = HEAD_CANDIDATE(HEAD_BY_LEVEL);

/*
 * A take of a row with a partition key, as that of any other and
 *
 *     AND (ruststream_row."partition_key" IS NULL
 *          OR ruststream_row."id" OPERATOR(pg_catalog.=) (.. the head of :partition_key ..))
 *
 * A row that has lost its key since it was found is in no line any more.
 */
#define TAKE_HEAD(carried, ...)                                                                    \
	{                                                                                              \
		TAKE_FOUND(carried)                                                                        \
		WHERE " (ruststream_row.{partition_key} IS NULL OR"                                        \
			  " ruststream_row.{id} OPERATOR(pg_catalog.=) (",                                     \
			__VA_ARGS__, "))" TAKE_END, NULL                                                       \
	}
static const char *const take_key_row[] = TAKE_HEAD("ruststream_row", HEAD);
static const char *const take_key_row_by_delay[] = TAKE_HEAD("ruststream_row", HEAD_BY_DELAY);
static const char *const take_key_row_by_level[] = TAKE_HEAD("ruststream_row", HEAD_BY_LEVEL);
static const char *const take_key_payload[] = TAKE_HEAD("ruststream_row.{payload}", HEAD);
static const char *const take_key_payload_by_delay[] =
	TAKE_HEAD("ruststream_row.{payload}", HEAD_BY_DELAY);
static const char *const take_key_payload_by_level[] =
	TAKE_HEAD("ruststream_row.{payload}", HEAD_BY_LEVEL);

/*
 * The lines of partition keys, one after the other; a key with no row that is due
 * comes due at infinity.
 *
 * WITH RECURSIVE ruststream_line (line, number) AS (
 *     (SELECT (SELECT ruststream_row."partition_key" FROM "schema"."table" AS ruststream_row
 *              WHERE .. ORDER BY ruststream_row."partition_key" LIMIT 1), 1::pg_catalog.int8)
 *     UNION ALL
 *     SELECT (.. the same AND ruststream_row."partition_key" OPERATOR(pg_catalog.>)
 *                             ruststream_line.line ..),
 *         ruststream_line.number OPERATOR(pg_catalog.+) 1
 *     FROM ruststream_line WHERE ruststream_line.line IS NOT NULL
 *         AND ruststream_line.number OPERATOR(pg_catalog.<) :limit)
 * SELECT ruststream_line.line, CASE WHEN (.. the head of the key ..) IS NULL
 *     THEN 'infinity'::pg_catalog.timestamptz END
 * FROM ruststream_line WHERE ruststream_line.line IS NOT NULL
 */
#define NEXT_KEY(behind)                                                                           \
	"SELECT ruststream_row.{partition_key} FROM {table} AS ruststream_row{}" READ_GROUP            \
		UNPROCESSED behind " ORDER BY ruststream_row.{partition_key} LIMIT 1"
#define KEYS_BEHIND WHERE " ruststream_row.{partition_key} OPERATOR(pg_catalog.>) :partition_key"
#define KEYS_BEHIND_LINE                                                                           \
	WHERE " ruststream_row.{partition_key} OPERATOR(pg_catalog.>) ruststream_line.line"
#define OF_LINE WHERE " ruststream_row.{partition_key} OPERATOR(pg_catalog.=) ruststream_line.line"

#define WALK_KEYS(behind, ...)                                                                     \
	{                                                                                              \
		WALK(NEXT_KEY(behind), NEXT_KEY(KEYS_BEHIND_LINE))                                         \
		"CASE WHEN (", __VA_ARGS__,                                                                \
			") IS NULL THEN 'infinity'::pg_catalog.timestamptz END" END_WALK, NULL                 \
	}
#define LINE_HEAD_BY_DELAY BY_DELAY(OF_HEAD, OF_LINE, ONE)
#define LINE_HEAD_BY_LEVEL BY_LEVEL(OF_HEAD, OF_LINE, LEVELS(OF_LINE, ""), ONE)
static const char *const keys[] = WALK_KEYS("", IN_ONE(OF_HEAD, OF_LINE));
static const char *const keys_by_delay[] = WALK_KEYS("", LINE_HEAD_BY_DELAY);
static const char *const keys_by_level[] = WALK_KEYS("", LINE_HEAD_BY_LEVEL);
static const char *const keys_behind[] = WALK_KEYS(KEYS_BEHIND, IN_ONE(OF_HEAD, OF_LINE));
static const char *const keys_behind_by_delay[] = WALK_KEYS(KEYS_BEHIND, LINE_HEAD_BY_DELAY);
static const char *const keys_behind_by_level[] = WALK_KEYS(KEYS_BEHIND, LINE_HEAD_BY_LEVEL);

/*
 * .. the priorities, as above ..
 * SELECT pg_catalog.min(ruststream_due.due) FROM (
 *     SELECT (.. the first "retry_after" of "priority" IS NULL that is later than now ..) AS due
 *     UNION ALL SELECT (.. the same of the priority ..) FROM ruststream_level
 *     WHERE ruststream_level.priority IS NOT NULL) AS ruststream_due
 */
#define NEXT_DUE(which)                                                                            \
	"(SELECT ruststream_row.{retry_after} FROM {table} AS ruststream_row{}" READ_GROUP UNPROCESSED \
		which WHERE " ruststream_row.{retry_after} OPERATOR(pg_catalog.>) :now" CLAIM_ORDER        \
	" LIMIT 1)"
static const char *const next_due_by_level[] = {
	GROUPS_LEVELS,
	"SELECT pg_catalog.min(ruststream_due.due)::pg_catalog.timestamptz FROM (SELECT " NEXT_DUE(
		OF_NO_PRIORITY) " AS due UNION ALL SELECT " NEXT_DUE(OF_LEVEL) " FROM ruststream_level "
																	   "WHERE "
																	   "ruststream_level.priority "
																	   "IS NOT NULL) AS "
																	   "ruststream_due",
	NULL};

#define KEYS RS_WITH_LINES(RS_LINES_PARTITION_KEY)
#define OTHERS RS_WITH_LINES(RS_LINES_NONE)
#define PLAIN RS_SEARCHED(RS_SEARCH_PLAIN)
#define DELAYED RS_SEARCHED(RS_SEARCH_BY_DELAY)
#define LEVELLED RS_SEARCHED(RS_SEARCH_BY_LEVEL)

const rs_catalogue_variant rs_postgresql_variants[] = {
	{RS_OP_CLAIM_ROW, 0, DELAYED, claim_row_by_delay},
	{RS_OP_CLAIM_ROW, OTHERS, LEVELLED, claim_row_by_level},
	{RS_OP_CLAIM_ROW, KEYS, LEVELLED, claim_loose_row_by_level},
	{RS_OP_CLAIM_PAYLOAD, 0, DELAYED, claim_payload_by_delay},
	{RS_OP_CLAIM_PAYLOAD, OTHERS, LEVELLED, claim_payload_by_level},
	{RS_OP_CLAIM_PAYLOAD, KEYS, LEVELLED, claim_loose_payload_by_level},
	{RS_OP_CANDIDATES, 0, DELAYED, candidates_by_delay},
	{RS_OP_CANDIDATES, 0, LEVELLED, candidates_by_level},
	{RS_OP_FREE_CANDIDATES, 0, DELAYED, free_candidates_by_delay},
	{RS_OP_FREE_CANDIDATES, 0, LEVELLED, free_candidates_by_level},
	{RS_OP_CLAIM_LINE_ROW, KEYS, PLAIN, claim_key_row},
	{RS_OP_CLAIM_LINE_ROW, KEYS, DELAYED, claim_key_row_by_delay},
	{RS_OP_CLAIM_LINE_ROW, KEYS, LEVELLED, claim_key_row_by_level},
	{RS_OP_CLAIM_LINE_PAYLOAD, KEYS, PLAIN, claim_key_payload},
	{RS_OP_CLAIM_LINE_PAYLOAD, KEYS, DELAYED, claim_key_payload_by_delay},
	{RS_OP_CLAIM_LINE_PAYLOAD, KEYS, LEVELLED, claim_key_payload_by_level},
	{RS_OP_LINE_CANDIDATE, 0, PLAIN, key_candidate},
	{RS_OP_LINE_CANDIDATE, 0, DELAYED, key_candidate_by_delay},
	{RS_OP_LINE_CANDIDATE, 0, LEVELLED, key_candidate_by_level},
	{RS_OP_LOOSE_CANDIDATE, 0, DELAYED, loose_by_delay},
	{RS_OP_LOOSE_CANDIDATE, 0, LEVELLED, loose_by_level},
	{RS_OP_TAKE_ROW, KEYS, PLAIN, take_key_row},
	{RS_OP_TAKE_ROW, KEYS, DELAYED, take_key_row_by_delay},
	{RS_OP_TAKE_ROW, KEYS, LEVELLED, take_key_row_by_level},
	{RS_OP_TAKE_PAYLOAD, KEYS, PLAIN, take_key_payload},
	{RS_OP_TAKE_PAYLOAD, KEYS, DELAYED, take_key_payload_by_delay},
	{RS_OP_TAKE_PAYLOAD, KEYS, LEVELLED, take_key_payload_by_level},
	{RS_OP_LINES, KEYS, PLAIN, keys},
	{RS_OP_LINES, KEYS, DELAYED, keys_by_delay},
	{RS_OP_LINES, KEYS, LEVELLED, keys_by_level},
	{RS_OP_LINES_BEHIND, KEYS, PLAIN, keys_behind},
	{RS_OP_LINES_BEHIND, KEYS, DELAYED, keys_behind_by_delay},
	{RS_OP_LINES_BEHIND, KEYS, LEVELLED, keys_behind_by_level},
	{RS_OP_NEXT_DUE, 0, LEVELLED, next_due_by_level},
	{.pieces = NULL},
};
