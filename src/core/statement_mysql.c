/*-------------------------------------------------------------------------
 *
 * statement_mysql.c
 *	  The SQL catalogue of MySQL and MariaDB.
 *
 *-------------------------------------------------------------------------
 */
#include "catalogue.h"

/*
 * Rules for the templates (template.h says how they are written)
 * --------------------------------------------------------------
 *
 * A claim is several statements, since no statement of MySQL's both changes rows and returns them:
 * locking reads, range after range of the claim's index, and then a stamp.  The client's driver
 * puts them together (driver_mysql_claim.c).
 *
 * A locking read locks what it reads, not what it returns.  So that it reads no row but those it
 * may take, it walks the claim's index in the claim's order, which FORCE INDEX sees to: a sort
 * would read, and lock, the whole group first.
 *
 * A transaction's plain reads are of its snapshot at REPEATABLE READ, and they lock at
 * SERIALIZABLE. So whatever decides is a locking read; plain ones find candidates, and are outside
 * such a transaction.
 *
 * UPDATE and DELETE have no alias: MariaDB's DELETE takes none.
 *
 * Above each template stands the statement it makes of a table with every role
 * it mentions, each column named like its role, parameters by their names.
 */

/* Begins the WHERE clause at the first condition, and continues it at others. */
#define WHERE "{ WHERE| AND}"

#define READ_GROUP "[group:" WHERE " ruststream_row.{group} = :group]"
#define UNPROCESSED "[processed_at:" WHERE " ruststream_row.{processed_at} IS NULL]"
#define DUE                                                                                        \
	"[retry_after:" WHERE " (ruststream_row.{retry_after} IS NULL"                                 \
	" OR ruststream_row.{retry_after} <= :now)]"
#define UNLEASED                                                                                   \
	"[locked_until:" WHERE " (ruststream_row.{locked_until} IS NULL"                               \
	" OR ruststream_row.{locked_until} <= :now)]"

/*
 * Not a row that this worker leaves alone, nor one of its key, as long as that row is due: it goes
 * first.  The driver writes what is between the comments, which :held begins and ends, once for
 * each such row.
 */
#define NOT_HELD                                                                                   \
	WHERE " NOT (/*held*/ruststream_row.{id} <=> :held[partition_key: OR"                          \
		  " COALESCE(ruststream_row.{partition_key} = (SELECT ruststream_held.{partition_key}"     \
		  " FROM {table} AS ruststream_held WHERE[group: ruststream_held.{group} = :group AND]"    \
		  "[processed_at: ruststream_held.{processed_at} IS NULL AND]"                             \
		  "[retry_after: (ruststream_held.{retry_after} IS NULL"                                   \
		  " OR ruststream_held.{retry_after} <= :now) AND] ruststream_held.{id} = :held), FALSE)]" \
		  "/*held*/)"
#define ROWS " FROM {table} AS ruststream_row{index}"

/* The row in work; and, in the lease form, while it still holds this delivery's token. */
#define THIS_ROW WHERE " {id} = :id"
#define GUARD "[locked_until:" WHERE " ({locked_until} = :token OR {locked_until} = :announced)]"
#define END_LEASE "[locked_until:{locked_until} = NULL]"

/* The headers of a row that becomes a dead letter: where it came from, in those that are an object.
 */
#define WITH_ORIGIN(headers)                                                                       \
	"JSON_MERGE_PATCH(" headers                                                                    \
	", [group:JSON_OBJECT('ruststream-origin-group', {group}), ]:origin)"
#define HEADERS_WITH_ORIGIN                                                                        \
	"CASE WHEN {headers} IS NULL THEN " WITH_ORIGIN(                                               \
		"JSON_OBJECT()") " WHEN NOT JSON_VALID({headers}) THEN {headers}"                          \
						 " WHEN JSON_TYPE({headers}) <> 'OBJECT' THEN {headers}"                   \
						 " ELSE " WITH_ORIGIN("{headers}") " END"

/* The order of the index that rs_index_render makes; NULL sorts first by itself. */
#define CLAIM_ORDER                                                                                \
	" ORDER BY[priority: ruststream_row.{priority},][retry_after: ruststream_row.{retry_after},]"  \
	" ruststream_row.{id}"

/* Ranges of that index: of one priority the rows without a delay, and those whose delay is over. */
#define OF_LEVEL "[priority:" WHERE " ruststream_row.{priority} <=> :priority]"
#define UNDELAYED OF_LEVEL WHERE " ruststream_row.{retry_after} IS NULL"
#define COME_DUE OF_LEVEL WHERE " ruststream_row.{retry_after} <= :now"
#define BY_ID " ORDER BY ruststream_row.{id}"
#define BY_DELAY " ORDER BY ruststream_row.{retry_after}, ruststream_row.{id}"

/* A row that was inserted without an attempt is before its first. */
#define COUNT_ATTEMPT "{attempt} = COALESCE({attempt}, 1) + 1"
#define CLAIMED                                                                                    \
	"ruststream_row.{id}, [attempt:COALESCE(ruststream_row.{attempt}, 1)][!attempt:1],"            \
	" [headers:ruststream_row.{headers}][!headers:NULL],"                                          \
	" [payload:ruststream_row.{payload}][!payload:NULL]"

/*
 * The name of an advisory lock for a text, as every client of the contract makes it; and hashed,
 * too, where it has characters beyond U+FFFF, which are longer in UTF-16 than others and which
 * MySQL takes in no name.  MariaDB does, and alone reads what is in the special comment.
 */
#define FULL_NAME(text) "CONCAT(CONVERT(LOWER(DATABASE()) USING utf8mb4), '.', " text ")"
#define LOCK_NAME(text)                                                                            \
	"CASE WHEN CHAR_LENGTH(" FULL_NAME(                                                            \
		text) ") BETWEEN 1 AND 64 AND (/*M! TRUE OR */"                                            \
			  " LENGTH(CONVERT(" FULL_NAME(text) " USING utf16)) = 2 * CHAR_LENGTH(" FULL_NAME(    \
				  text) "))"                                                                       \
						" THEN " FULL_NAME(text) " ELSE SHA2(" FULL_NAME(text) ", 256) END"
#define IS_FREE(text) "IS_FREE_LOCK(" LOCK_NAME(text) ") = 1"

#define KEY "CONVERT({key} USING utf8mb4)"

/*
 * Not a row whose key is in work.  Keys in work are locked by name; in the lease form for the
 * length of the claim only, and after that the leased rows tell, which are few: an index of their
 * own finds them (RS_INDEX_LEASE).
 */
#define PARTITION "CONVERT({partition} USING utf8mb4)"
#define KEY_UNLEASED                                                                               \
	"[partition_key:[locked_until:" WHERE " (ruststream_row.{partition_key} IS NULL"               \
	" OR ruststream_row.{partition_key} NOT IN (SELECT ruststream_leased.{partition_key}"          \
	" FROM {table} AS ruststream_leased WHERE ruststream_leased.{locked_until} > :now"             \
	" AND ruststream_leased.{partition_key} IS NOT NULL))]]"
#define KEY_NOT_IN_WORK                                                                            \
	KEY_UNLEASED "[advisory_lock:" WHERE " " IS_FREE(KEY) "]"                                      \
														  "[partition_key:" WHERE                  \
														  " " IS_FREE(PARTITION) "]"

/* Rows to take, one unless they are a batch's; the head of a FIFO group is chosen among rows that
 * the claim has locked. */
#define CLAIM(range, order)                                                                        \
	"SELECT " CLAIMED ROWS READ_GROUP UNPROCESSED range UNLEASED NOT_HELD order                    \
	" LIMIT :limit FOR UPDATE SKIP LOCKED"
#define HEAD                                                                                       \
	"SELECT " CLAIMED ", [retry_after:ruststream_row.{retry_after} IS NULL"                        \
	" OR ruststream_row.{retry_after} <= :now][!retry_after:1]" ROWS READ_GROUP UNPROCESSED        \
		CLAIM_ORDER " LIMIT 1 FOR UPDATE"

/* Rows that may be taken; what is to be locked first: the key, or its line; and the partition key.
 */
#define CANDIDATES(range, order)                                                                   \
	"SELECT ruststream_row.{id}, [advisory_lock:{key}][!advisory_lock:{partition}],"               \
	" [partition_key:CONCAT(ruststream_row.{partition_key})][!partition_key:NULL]" ROWS READ_GROUP \
		UNPROCESSED range UNLEASED NOT_HELD KEY_NOT_IN_WORK order " LIMIT :limit"

/*
 * The first row of a range that has the key of row :id, byte for byte, as locks are named.  Where
 * that row has gone the optimizer sees it, and reads nothing; else the search ends with it at the
 * latest.
 */
#define HEAD_OF_KEY(range, order)                                                                  \
	"SELECT ruststream_row.{id} FROM {table} AS ruststream_chosen"                                 \
	" STRAIGHT_JOIN {table} AS ruststream_row{index}" WHERE                                        \
	" ruststream_chosen.{id} = :id[group:" WHERE " ruststream_chosen.{group} = :group]"            \
	"[processed_at:" WHERE " ruststream_chosen.{processed_at} IS NULL]"                            \
	"[retry_after:" WHERE " (ruststream_chosen.{retry_after} IS NULL"                              \
	" OR ruststream_chosen.{retry_after} <= :now)]" READ_GROUP UNPROCESSED range WHERE             \
	" CAST(CONCAT(ruststream_row.{partition_key}) AS BINARY)"                                      \
	" = CAST(CONCAT(ruststream_chosen.{partition_key}) AS BINARY)" order " LIMIT 1"

#define KEYS RS_WITH_LINES(RS_LINES_PARTITION_KEY)
#define UNKEYED (RS_IN_FORM(RS_FORM_ROW_LOCK) | RS_IN_FORM(RS_FORM_LEASE))
#define KEYED RS_IN_FORM(RS_FORM_ADVISORY_LOCK)

static const rs_catalogue_entry mysql_operations[RS_OPERATION_COUNT] = {
	/*
	 * SELECT ruststream_row.`id`, COALESCE(ruststream_row.`attempt`, 1), ruststream_row.`headers`,
	 *     ruststream_row.`payload`
	 * FROM `db`.`table` AS ruststream_row FORCE INDEX (`ruststream_claim`)
	 * WHERE ruststream_row.`group` = :group AND ruststream_row.`processed_at` IS NULL
	 *     AND (ruststream_row.`retry_after` IS NULL OR ruststream_row.`retry_after` <= :now)
	 *     AND (ruststream_row.`locked_until` IS NULL OR ruststream_row.`locked_until` <= :now)
	 *     AND NOT (ruststream_row.`id` <=> :held)
	 * ORDER BY ruststream_row.`priority`, ruststream_row.`retry_after`, ruststream_row.`id`
	 * LIMIT :limit FOR UPDATE SKIP LOCKED
	 *
	 * The whole order, which reads the rows that wait, too: for tables without retry_after, and
	 * for transactions at SERIALIZABLE, in which RS_OP_LEVEL would lock.
	 *
	 * Of a FIFO group, once RS_OP_COUNT_GROUP has locked its rows:
	 *
	 * SELECT .., ruststream_row.`retry_after` IS NULL OR ruststream_row.`retry_after` <= :now
	 * FROM .. WHERE ruststream_row.`group` = :group AND ruststream_row.`processed_at` IS NULL
	 * ORDER BY .. LIMIT 1 FOR UPDATE
	 */
	[RS_OP_CLAIM_ROW] = {.statements = {"[fifo:" HEAD "][!fifo:" CLAIM(DUE, CLAIM_ORDER) "]"},
						 .forms = UNKEYED},

	/* .. AND ruststream_row.`priority` <=> :priority AND ruststream_row.`retry_after` IS NULL .. */
	[RS_OP_CLAIM_UNDELAYED] = {.statements = {CLAIM(UNDELAYED, BY_ID)},
							   .needs = RS_ROLE_RETRY_AFTER,
							   .forms = UNKEYED},

	/* .. AND ruststream_row.`priority` <=> :priority AND ruststream_row.`retry_after` <= :now .. */
	[RS_OP_CLAIM_COME_DUE] = {.statements = {CLAIM(COME_DUE, BY_DELAY)},
							  .needs = RS_ROLE_RETRY_AFTER,
							  .forms = UNKEYED},

	/*
	 * SELECT ruststream_row.`priority` FROM .. WHERE .. ORDER BY ruststream_row.`priority` LIMIT 1
	 *
	 * and the next one: .. AND ruststream_row.`priority` > :priority ..
	 */
	[RS_OP_LEVEL] = {.statements = {"SELECT ruststream_row.{priority}" ROWS READ_GROUP UNPROCESSED
									" ORDER BY ruststream_row.{priority} LIMIT 1",
									"SELECT ruststream_row.{priority}" ROWS READ_GROUP UNPROCESSED
										WHERE " ruststream_row.{priority} > :priority"
									" ORDER BY ruststream_row.{priority} LIMIT 1"},
					 .needs = RS_ROLE_PRIORITY},

	/*
	 * SELECT COUNT(*), COUNT(CASE WHEN ruststream_row.`locked_until` > :now THEN 1 END) FROM ..
	 * WHERE ruststream_row.`group` = :group AND ruststream_row.`processed_at` IS NULL
	 *
	 * and again with FOR UPDATE SKIP LOCKED: where both count the same, no row of the
	 * group is in work, and each of them is locked now.
	 */
	[RS_OP_COUNT_GROUP] = {.statements = {"SELECT COUNT(*)" ROWS READ_GROUP UNPROCESSED,
										  "SELECT COUNT(*), [locked_until:COUNT(CASE WHEN"
										  " ruststream_row.{locked_until} > :now THEN 1 END)]"
										  "[!locked_until:0]" ROWS READ_GROUP UNPROCESSED
										  " FOR UPDATE SKIP LOCKED"},
						   .needs = RS_ROLE_GROUP,
						   .forms = UNKEYED},

	/*
	 * SELECT ruststream_row.`id`, the key, CONCAT(ruststream_row.`partition_key`) FROM .. WHERE ..
	 *     AND IS_FREE_LOCK(the name of the key's lock) = 1
	 *     AND IS_FREE_LOCK(the name of the partition key's lock) = 1
	 * ORDER BY .. LIMIT :limit
	 *
	 * in the other forms, for tables with partition_key,
	 *
	 * SELECT ruststream_row.`id`, COALESCE(CONCAT('db.table:key:', ruststream_row.`partition_key`),
	 *     CONCAT('db.table:row:', ruststream_row.`id`)), CONCAT(ruststream_row.`partition_key`)
	 * FROM .. WHERE .. AND (ruststream_row.`partition_key` IS NULL
	 *     OR ruststream_row.`partition_key` NOT IN (SELECT ruststream_leased.`partition_key`
	 *         FROM `db`.`table` AS ruststream_leased WHERE ruststream_leased.`locked_until` > :now
	 *             AND ruststream_leased.`partition_key` IS NOT NULL))
	 *     AND IS_FREE_LOCK(..) = 1
	 * ORDER BY .. LIMIT :limit
	 *
	 * A candidate tells of a key, no more: a lock may have been let go while the rows were read,
	 * one after the other and range after range, so that an earlier row of the key is missing.
	 * Which one is next is looked for anew once the key is locked: see RS_OP_HEAD.
	 */
	[RS_OP_CANDIDATES] = {.statements = {CANDIDATES(DUE, CLAIM_ORDER)}},
	[RS_OP_CANDIDATES_UNDELAYED] = {.statements = {CANDIDATES(UNDELAYED, BY_ID)},
									.needs = RS_ROLE_RETRY_AFTER},
	[RS_OP_CANDIDATES_COME_DUE] = {.statements = {CANDIDATES(COME_DUE, BY_DELAY)},
								   .needs = RS_ROLE_RETRY_AFTER},

	/*
	 * SELECT ruststream_row.`id` FROM `db`.`table` AS ruststream_chosen
	 *     STRAIGHT_JOIN `db`.`table` AS ruststream_row FORCE INDEX (`ruststream_claim`)
	 * WHERE ruststream_chosen.`id` = :id AND .. it is there still, and due ..
	 *     AND ruststream_row.`group` = :group AND ruststream_row.`processed_at` IS NULL
	 *     AND .. the range ..
	 *     AND CAST(CONCAT(ruststream_row.`partition_key`) AS BINARY)
	 *         = CAST(CONCAT(ruststream_chosen.`partition_key`) AS BINARY)
	 * ORDER BY .. LIMIT 1
	 *
	 * With the key locked, and of no snapshot older than that.  It locks nothing: where somebody
	 * else has locked the head, no other row of its key may be taken.
	 */
	[RS_OP_HEAD] = {.statements = {HEAD_OF_KEY(DUE, CLAIM_ORDER)}, .lines = KEYS},
	[RS_OP_HEAD_UNDELAYED] = {.statements = {HEAD_OF_KEY(UNDELAYED, BY_ID)},
							  .needs = RS_ROLE_RETRY_AFTER,
							  .lines = KEYS},
	[RS_OP_HEAD_COME_DUE] = {.statements = {HEAD_OF_KEY(COME_DUE, BY_DELAY)},
							 .needs = RS_ROLE_RETRY_AFTER,
							 .lines = KEYS},

	/*
	 * SELECT .. as a claim .. WHERE ruststream_row.`id` = :id AND .. it may be taken still ..
	 *     AND CONVERT(what is to be locked for its key USING utf8mb4) COLLATE utf8mb4_bin = :key
	 * FOR UPDATE SKIP LOCKED
	 *
	 * A row that has another key since it was found is not ours to take.
	 */
	[RS_OP_LOCK_CANDIDATE] = {.statements = {"SELECT " CLAIMED
											 " FROM {table} AS ruststream_row" WHERE
											 " ruststream_row.{id} = :id" READ_GROUP UNPROCESSED DUE
												 UNLEASED KEY_UNLEASED WHERE " " PARTITION
											 " COLLATE utf8mb4_bin = :key FOR UPDATE SKIP LOCKED"},
							  .needs = RS_ROLE_PARTITION_KEY,
							  .forms = UNKEYED},

	/*
	 * UPDATE `db`.`table` SET `locked_until` = :token, `attempt` = COALESCE(`attempt`, 1) + 1
	 * WHERE `id` = :id
	 *
	 * The row is locked by now.
	 */
	[RS_OP_STAMP] = {.statements = {"UPDATE {table} SET {locked_until} = :token"
									"[attempt:, " COUNT_ATTEMPT "]" THIS_ROW},
					 .needs = RS_ROLE_LOCKED_UNTIL},

/*
 * SELECT ruststream_row.`id`, COALESCE(ruststream_row.`attempt`, 1), .. FROM .. AS ruststream_row
 * WHERE ruststream_row.`id` = :id AND ruststream_row.`group` = :group
 *     AND ruststream_row.`processed_at` IS NULL
 *     AND (ruststream_row.`retry_after` IS NULL OR ruststream_row.`retry_after` <= :now)
 *     AND CONVERT(the key USING utf8mb4) COLLATE utf8mb4_bin = :key
 * FOR UPDATE
 */
#define TAKE                                                                                       \
	"SELECT " CLAIMED " FROM {table} AS ruststream_row" WHERE                                      \
	" ruststream_row.{id} = :id" READ_GROUP UNPROCESSED DUE WHERE " " KEY                          \
	" COLLATE utf8mb4_bin = :key FOR UPDATE"
	[RS_OP_TAKE_ROW] = {.statements = {TAKE}, .forms = KEYED},
	[RS_OP_TAKE_PAYLOAD] = {.statements = {TAKE}, .needs = RS_ROLE_PAYLOAD, .forms = KEYED},

	/* UPDATE `db`.`table` SET `attempt` = COALESCE(`attempt`, 1) + 1 WHERE `id` = :id */
	[RS_OP_COUNT_ATTEMPT] = {.statements = {"UPDATE {table} SET " COUNT_ATTEMPT THIS_ROW},
							 .needs = RS_ROLE_ATTEMPT,
							 .forms = KEYED},

	/*
	 * SELECT ruststream_row.`retry_after` FROM .. WHERE ruststream_row.`group` = :group
	 *     AND ruststream_row.`processed_at` IS NULL AND ruststream_row.`retry_after` > :now
	 * ORDER BY ruststream_row.`priority`, ruststream_row.`retry_after`, ruststream_row.`id` LIMIT 1
	 *
	 * In claim order, so that the claim's index serves it: a hint, beside polling.
	 */
	[RS_OP_NEXT_DUE] =
		{.statements = {"SELECT ruststream_row.{retry_after}" ROWS READ_GROUP UNPROCESSED WHERE
						" ruststream_row.{retry_after} > :now" CLAIM_ORDER " LIMIT 1"},
		 .needs = RS_ROLE_RETRY_AFTER},

	/*
	 * SELECT 1 FROM `db`.`table`
	 * WHERE `id` = :id AND (`locked_until` = :token OR `locked_until` = :announced) FOR UPDATE
	 *
	 * The guard of each settlement.  In the row lock form, where another worker may have the
	 * row by now, it is passed over where that is so:
	 *
	 * SELECT 1 FROM `db`.`table` AS ruststream_row
	 * WHERE `id` = :id AND ruststream_row.`group` = :group AND ruststream_row.`processed_at` IS
	 * NULL AND COALESCE(`attempt`, 1) = :attempt FOR UPDATE SKIP LOCKED
	 *
	 * and in the advisory lock form FOR UPDATE alone. One failure is never settled
	 * twice.
	 */
	[RS_OP_RECLAIM] = {.statements = {"SELECT 1 FROM {table} AS ruststream_row" THIS_ROW READ_GROUP
										  UNPROCESSED GUARD "[!locked_until:[attempt:" WHERE
									  " COALESCE({attempt}, 1) = :attempt]]"
									  " FOR UPDATE[row_lock: SKIP LOCKED]"}},

	/* SELECT 1 FROM .. the same without the attempt .. FOR UPDATE */
	[RS_OP_UNSETTLED] = {.statements = {"SELECT 1 FROM {table} AS ruststream_row" THIS_ROW
											READ_GROUP UNPROCESSED GUARD " FOR UPDATE"}},

	/*
	 * UPDATE `db`.`table` SET `processed_at` = :now, `locked_until` = NULL
	 * WHERE `id` = :id AND `processed_at` IS NULL
	 *     AND (`locked_until` = :token OR `locked_until` = :announced)
	 *
	 * or, without processed_at, DELETE FROM `db`.`table` WHERE .. the same ..
	 */
	[RS_OP_ACK] = {.statements = {"[processed_at:UPDATE {table} SET {processed_at} = :now"
								  "[locked_until:, " END_LEASE "]]"
								  "[!processed_at:DELETE FROM {table}]" THIS_ROW
								  "[processed_at:" WHERE " {processed_at} IS NULL]" GUARD}},

	/* UPDATE `db`.`table` SET `attempt` = COALESCE(`attempt`, 1) + 1 WHERE `id` = :id */
	[RS_OP_RETRY] = {.statements = {"UPDATE {table} SET " COUNT_ATTEMPT THIS_ROW},
					 .needs = RS_ROLE_ATTEMPT,
					 .forms = RS_IN_FORM(RS_FORM_ROW_LOCK)},

	/* UPDATE `db`.`table` SET `locked_until` = NULL WHERE `id` = :id AND (.. the token ..) */
	[RS_OP_RELEASE] = {.statements = {"UPDATE {table} SET " END_LEASE THIS_ROW GUARD},
					   .needs = RS_ROLE_LOCKED_UNTIL},

	/*
	 * UPDATE `db`.`table` SET `retry_after` = :until, `attempt` = COALESCE(`attempt`, 1) + 1
	 * WHERE `id` = :id
	 *
	 * or, in the lease form,
	 *
	 * UPDATE `db`.`table` SET `retry_after` = :until, `locked_until` = NULL
	 * WHERE `id` = :id AND (.. the token ..)
	 */
	[RS_OP_RETRY_AFTER] = {.statements = {"UPDATE {table} SET {retry_after} = :until"
										  "[row_lock:[attempt:, " COUNT_ATTEMPT
										  "]][locked_until:, " END_LEASE "]" THIS_ROW GUARD},
						   .needs = RS_ROLE_RETRY_AFTER},

	/*
	 * UPDATE `db`.`table`
	 * SET `headers` = .. with :origin .., `group` = :dead_group, `locked_until` = NULL
	 * WHERE `id` = :id AND (.. the token ..)
	 *
	 * In this order, since what is assigned is what the next assignment reads.
	 */
	[RS_OP_MOVE_GROUP] = {.statements = {"UPDATE {table} SET"
										 "[headers: {headers} = " HEADERS_WITH_ORIGIN ",]"
										 " {group} = :dead_group"
										 "[locked_until:, " END_LEASE "]" THIS_ROW GUARD},
						  .needs = RS_ROLE_GROUP},

	/*
	 * INSERT INTO `db`.`dest` (`id`, `payload`) SELECT `id`, `payload` FROM `db`.`table`
	 * WHERE `id` = :id AND (.. the token ..)
	 *
	 * DELETE FROM `db`.`table` WHERE .. the same ..
	 *
	 * In the lease form the column of the lease is written as NULL.  Where there are headers, FROM
	 * is
	 *
	 * (SELECT `id`, `headers`, `payload`, .. headers with :origin .. AS ruststream_made
	 *  FROM `db`.`table` WHERE ..) AS ruststream_headers
	 */
	[RS_OP_MOVE_TABLE] = {.statements = {"INSERT INTO {dest} ({columns}) SELECT {moved} FROM"
										 "[headers: (SELECT {columns}, " HEADERS_WITH_ORIGIN
										 " AS ruststream_made FROM]"
										 " {table}" THIS_ROW GUARD
										 "[headers:) AS ruststream_headers]",
										 "DELETE FROM {table}" THIS_ROW GUARD}},

	/*
	 * UPDATE `db`.`table` SET `locked_until` = :until WHERE `id` = :id AND (.. the token ..)
	 *
	 * A token whose writing had no clear end, because the connection was lost, is written again.
	 */
	[RS_OP_EXTEND] = {.statements = {"UPDATE {table} SET {locked_until} = :until" THIS_ROW GUARD},
					  .needs = RS_ROLE_LOCKED_UNTIL},

	/*
	 * INSERT INTO `db`.`table`
	 *     (`group`, `priority`, `retry_after`, `partition_key`, `headers`, `payload`)
	 * VALUES (:group, COALESCE(:priority, DEFAULT(`priority`)), :until, :partition_key, :headers,
	 *     :payload)
	 */
	[RS_OP_PUBLISH] = {.statements = {"INSERT INTO {into}"
									  "[group:{ (|, }{group}][priority:{ (|, }{priority}]"
									  "[retry_after:{ (|, }{retry_after}]"
									  "[partition_key:{ (|, }{partition_key}]"
									  "[headers:{ (|, }{headers}][payload:{ (|, }{payload}]"
									  "[group:{) VALUES (|, }:group][priority:{) VALUES (|, }"
									  "COALESCE(:priority, DEFAULT({priority}))]"
									  "[retry_after:{) VALUES (|, }:until]"
									  "[partition_key:{) VALUES (|, }:partition_key]"
									  "[headers:{) VALUES (|, }:headers]"
									  "[payload:{) VALUES (|, }:payload])"}},

	/*
	 * SELECT COUNT(CASE WHEN ruststream_counted.leased = 0 AND (ruststream_counted.due IS NULL
	 *         OR ruststream_counted.due <= :now) THEN 1 END),
	 *     COUNT(CASE WHEN ruststream_counted.leased = 0 AND ruststream_counted.due > :now
	 *         THEN 1 END),
	 *     MIN(CASE WHEN ruststream_counted.leased = 0 AND ruststream_counted.due <= :now
	 *         THEN ruststream_counted.due END),
	 *     COUNT(CASE WHEN ruststream_counted.leased = 1 THEN 1 END)
	 * FROM (SELECT ruststream_row.`retry_after` AS due,
	 *         COALESCE(ruststream_row.`locked_until` > :now, 0) AS leased FROM ..
	 *     WHERE ruststream_row.`group` = :group AND ruststream_row.`processed_at` IS NULL
	 *     ORDER BY .. LIMIT :limit) AS ruststream_counted
	 *
	 * Ready, waiting, since when the oldest is ready, in work.
	 */
	[RS_OP_DEPTH] =
		{.statements =
			 {"SELECT COUNT(CASE WHEN ruststream_counted.leased = 0"
			  " AND (ruststream_counted.due IS NULL OR ruststream_counted.due <= :now)"
			  " THEN 1 END),"
			  " COUNT(CASE WHEN ruststream_counted.leased = 0"
			  " AND ruststream_counted.due > :now THEN 1 END),"
			  " MIN(CASE WHEN ruststream_counted.leased = 0 AND ruststream_counted.due <= :now"
			  " THEN ruststream_counted.due END),"
			  " COUNT(CASE WHEN ruststream_counted.leased = 1 THEN 1 END)"
			  " FROM (SELECT [retry_after:ruststream_row.{retry_after}][!retry_after:NULL] AS due,"
			  " [locked_until:COALESCE(ruststream_row.{locked_until} > :now, 0)][!locked_until:0]"
			  " AS leased" ROWS READ_GROUP UNPROCESSED CLAIM_ORDER
			  " LIMIT :limit) AS ruststream_counted"}},

	/*
	 * SELECT COUNT(*) FROM (SELECT 1 FROM `db`.`table` AS ruststream_row
	 *     WHERE ruststream_row.`group` = :dead_group AND ruststream_row.`processed_at` IS NULL
	 *     LIMIT :limit) AS ruststream_counted
	 */
	[RS_OP_DEPTH_DEAD_GROUP] = {.statements = {"SELECT COUNT(*) FROM (SELECT 1" ROWS WHERE
											   " ruststream_row.{group} = :dead_group" UNPROCESSED
											   " LIMIT :limit) AS ruststream_counted"},
								.needs = RS_ROLE_GROUP},

	/* SELECT COUNT(*) FROM (SELECT 1 FROM `db`.`dest` LIMIT :limit) AS ruststream_counted */
	[RS_OP_DEPTH_DEAD_TABLE] = {.statements = {"SELECT COUNT(*) FROM (SELECT 1 FROM {dest}"
											   " LIMIT :limit) AS ruststream_counted"}},
};

/* INSERT INTO `db`.`table` () VALUES () */
static const char *const mysql_publish_defaults[] = {"INSERT INTO {into} () VALUES ()", NULL};

/*
 * CREATE INDEX `ruststream_claim` ON `db`.`table`
 *     (`group`, `processed_at`, `priority`, `retry_after`, `id`)
 *
 * There are no partial indexes: rows that are processed are in a part of their own.
 */
static const char mysql_claim_index[] =
	"CREATE INDEX `ruststream_claim` ON {into} ([group:{group}, ][processed_at:{processed_at}, ]"
	"[priority:{priority}, ][retry_after:{retry_after}, ]{id})";

/* CREATE INDEX `ruststream_lease` ON `db`.`table` (`locked_until`) */
static const char mysql_lease_index[] =
	"CREATE INDEX `ruststream_lease` ON {into} ({locked_until})";

const rs_catalogue rs_mysql_catalogue = {
	.operations = mysql_operations,
	.publish_defaults = mysql_publish_defaults,
	.indexes = {[RS_INDEX_CLAIM] = mysql_claim_index, [RS_INDEX_LEASE] = mysql_lease_index},
};
