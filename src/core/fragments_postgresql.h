/*-------------------------------------------------------------------------
 *
 * fragments_postgresql.h
 *	  What the SQL of PostgreSQL is put together from, for
 *	  statement_postgresql.c and search_postgresql.c.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_FRAGMENTS_POSTGRESQL_H
#define RUSTSTREAM_FRAGMENTS_POSTGRESQL_H

#include "catalogue.h"

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
#define READ_KEY WHERE " ruststream_row.{partition_key} OPERATOR(pg_catalog.=) :partition_key"
#define THIS_ROW WHERE " ruststream_row.{id} OPERATOR(pg_catalog.=) :id"

/* In the lease form: no live lease; and, for what its holder does, still this one. */
#define UNLEASED                                                                                   \
	"[locked_until:" WHERE " (ruststream_row.{locked_until} IS NULL OR"                            \
	" ruststream_row.{locked_until} OPERATOR(pg_catalog.<=) :now)]"
/* Until when some row of the line is leased; NULL: none is. */
#define LINE_LEASE                                                                                 \
	"(SELECT ruststream_row.{locked_until} FROM {table} AS ruststream_row{}[fifo:" READ_GROUP      \
	"][!fifo:" READ_KEY "]" UNPROCESSED WHERE                                                      \
	" ruststream_row.{locked_until} OPERATOR(pg_catalog.>) :now"                                   \
	" ORDER BY ruststream_row.{locked_until} LIMIT 1)"
#define GUARD                                                                                      \
	"[locked_until:" WHERE " (ruststream_row.{locked_until} OPERATOR(pg_catalog.=) :token OR"      \
	" ruststream_row.{locked_until} OPERATOR(pg_catalog.=) :announced)]"
#define END_LEASE "[locked_until:{locked_until} = NULL]"

/* The order of the indexes that rs_index_render makes, what is compared for equality aside. */
#define IN_CLAIM_ORDER(first)                                                                      \
	" ORDER BY" first "[priority: ruststream_row.{priority} NULLS FIRST,]"                         \
	"[retry_after: ruststream_row.{retry_after} NULLS FIRST,] ruststream_row.{id}"
#define CLAIM_ORDER IN_CLAIM_ORDER("")

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

/* The row is due by itself, wherever it stands. */
#define DUE                                                                                        \
	"[retry_after:" WHERE " (ruststream_row.{retry_after} IS NULL OR"                              \
	" ruststream_row.{retry_after} OPERATOR(pg_catalog.<=) :now)]"

/* Row lock form: where the row is, to see whether it is changed within its claim's transaction. */
#define PLACE "[row_lock:, ruststream_row.tableoid, ruststream_row.ctid]"

/* What a claim finds is locked; rows without a key are in no line. */
#define OF_NO_KEY "[partition_key:" WHERE " ruststream_row.{partition_key} IS NULL]"
#define KEY_FIRST "[partition_key: ruststream_row.{partition_key},]"
#define OF_CLAIM(carried)                                                                          \
	(CLAIMED(carried) PLACE, OF_NO_KEY UNLEASED NOT_HELD, IN_CLAIM_ORDER(KEY_FIRST),               \
	 " LIMIT :limit FOR UPDATE SKIP LOCKED")
#define CLAIM_ROW OF_CLAIM("ruststream_row")
#define CLAIM_PAYLOAD OF_CLAIM("ruststream_row.{payload}")

/* A candidate's key is what will be locked, its partition key what will be guarded. */
#define CANDIDATE                                                                                  \
	"ruststream_row.{id}[advisory_lock:, {key}][!advisory_lock:, NULL::pg_catalog.text]"           \
	"[partition_key:, ruststream_row.{partition_key}]"
#define OF_CANDIDATES (CANDIDATE, UNLEASED NOT_HELD, CLAIM_ORDER, " LIMIT :limit")
#define OF_FREE_CANDIDATES                                                                         \
	(CANDIDATE, KEY_IS_FREE NOT_HELD, CLAIM_ORDER, " LIMIT :limit FOR UPDATE SKIP LOCKED")

#define OF_LOOSE_CANDIDATES                                                                        \
	(CANDIDATE, OF_NO_KEY KEY_IS_FREE NOT_HELD, IN_CLAIM_ORDER(KEY_FIRST),                         \
	 " LIMIT :limit FOR UPDATE SKIP LOCKED")

/* The head of a partition key: the first of its rows that are due. */
#define OF_HEAD ("ruststream_row.{id}", "", CLAIM_ORDER, " LIMIT 1")

/* found: what is selected, a condition on it, its order, and what ends the statement. */
#define FIND(found, which) FIND_OPENED(which, OPEN found)
#define OPEN(...) __VA_ARGS__
#define FIND_OPENED(...) FIND_PARTS(__VA_ARGS__)
#define FIND_PARTS(which, selected, condition, order, end)                                         \
	"SELECT " selected                                                                             \
	" FROM {table} AS ruststream_row{}" READ_GROUP UNPROCESSED which condition order end

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

#define CLAIMING (RS_IN_FORM(RS_FORM_ROW_LOCK) | RS_IN_FORM(RS_FORM_LEASE))
#define KEYED RS_IN_FORM(RS_FORM_ADVISORY_LOCK)

/* What is claimed of a line is its head, whose id comes in between. */
#define LINE_HEAD(selected)                                                                        \
	"SELECT " selected " FROM {table} AS ruststream_row{}" WHERE                                   \
	" ruststream_row.{id} OPERATOR(pg_catalog.=) ("
#define LINE_END                                                                                   \
	")" READ_GROUP "[!fifo:" READ_KEY "]" UNPROCESSED DUE NOT_HELD "[locked_until:" WHERE          \
	" " LINE_LEASE " IS NULL] FOR UPDATE SKIP LOCKED"

/* The walk over the lines: one step down an index leads from a line to the next. */
#define WALK(first, next)                                                                          \
	"WITH RECURSIVE ruststream_line (line, number) AS ((SELECT (" first "), 1::pg_catalog.int8)"   \
	" UNION ALL SELECT (" next "), ruststream_line.number OPERATOR(pg_catalog.+) 1"                \
	" FROM ruststream_line WHERE ruststream_line.line IS NOT NULL"                                 \
	" AND ruststream_line.number OPERATOR(pg_catalog.<) :limit) SELECT ruststream_line.line, "
#define END_WALK " FROM ruststream_line WHERE ruststream_line.line IS NOT NULL"

/* A row is taken while it is what its candidate was. */
#define TAKE_FOUND(carried)                                                                        \
	FOUND "SELECT " CLAIMED(                                                                       \
		carried) " FROM {table} AS ruststream_row{}" THIS_ROW READ_GROUP UNPROCESSED DUE WHERE     \
				 " {key} OPERATOR(pg_catalog.=) :key"
#define TAKE_END                                                                                   \
	" FOR UPDATE SKIP LOCKED) [attempt:UPDATE {table} AS ruststream_row SET " COUNT_ATTEMPT        \
		OF_FOUND "][!attempt:SELECT ruststream_found.* FROM ruststream_found]"

extern const rs_catalogue_variant rs_postgresql_variants[];

#endif /* RUSTSTREAM_FRAGMENTS_POSTGRESQL_H */
