/*-------------------------------------------------------------------------
 *
 * core.h
 *	  The vocabulary of ruststream: every enum, struct and prototype of the
 *	  pure room.
 *
 * The core decides and words.  It performs no I/O, allocates nothing, reads
 * no clock and keeps no state, so that both engines (src/backend and
 * src/client) can ask it anything at any time, and so that an error that
 * jumps past it leaks nothing.  Results go into the caller's buffers.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_CORE_H
#define RUSTSTREAM_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---------------------------------------------------------------- words */

/*
 * What the columns of a queue are for.  Every role but "id" is optional, and
 * each is a switch for one behaviour.
 */
#define RS_ROLES(X)                                                                                \
	X(RS_ROLE_ID, "id")                                                                            \
	X(RS_ROLE_GROUP, "group")                                                                      \
	X(RS_ROLE_PRIORITY, "priority")                                                                \
	X(RS_ROLE_PARTITION_KEY, "partition_key")                                                      \
	X(RS_ROLE_RETRY_AFTER, "retry_after")                                                          \
	X(RS_ROLE_ATTEMPT, "attempt")                                                                  \
	X(RS_ROLE_PROCESSED_AT, "processed_at")                                                        \
	X(RS_ROLE_LOCKED_UNTIL, "locked_until")                                                        \
	X(RS_ROLE_HEADERS, "headers")                                                                  \
	X(RS_ROLE_PAYLOAD, "payload")

/* How rows are taken; the description decides (see rs_table_form). */
#define RS_FORMS(X)                                                                                \
	X(RS_FORM_ROW_LOCK, "row_lock")                                                                \
	X(RS_FORM_LEASE, "lease")                                                                      \
	X(RS_FORM_ADVISORY_LOCK, "advisory_lock")

/* What a handler answers; also the words of the error and decode policies. */
#define RS_OUTCOMES(X)                                                                             \
	X(RS_OUTCOME_ACK, "ack")                                                                       \
	X(RS_OUTCOME_RETRY, "retry")                                                                   \
	X(RS_OUTCOME_RETRY_AFTER, "retry_after")                                                       \
	X(RS_OUTCOME_DISCARD, "discard")                                                               \
	X(RS_OUTCOME_DEAD_LETTER, "dead_letter")

#define RS_ISOLATIONS(X)                                                                           \
	X(RS_ISOLATION_DEFAULT, "default")                                                             \
	X(RS_ISOLATION_READ_UNCOMMITTED, "read uncommitted")                                           \
	X(RS_ISOLATION_READ_COMMITTED, "read committed")                                               \
	X(RS_ISOLATION_REPEATABLE_READ, "repeatable read")                                             \
	X(RS_ISOLATION_SERIALIZABLE, "serializable")

/* When a transaction takes SQLite's write lock, which is what its levels come to. */
#define RS_MODES(X)                                                                                \
	X(RS_MODE_DEFAULT, "default")                                                                  \
	X(RS_MODE_DEFERRED, "deferred")                                                                \
	X(RS_MODE_IMMEDIATE, "immediate")                                                              \
	X(RS_MODE_EXCLUSIVE, "exclusive")

#define RS_DIALECTS(X)                                                                             \
	X(RS_DIALECT_POSTGRESQL, "postgresql")                                                         \
	X(RS_DIALECT_SQLITE, "sqlite")                                                                 \
	X(RS_DIALECT_MYSQL, "mysql") /* MariaDB speaks it, too */

#define RS_BACKOFFS(X)                                                                             \
	X(RS_BACKOFF_CONSTANT, "constant")                                                             \
	X(RS_BACKOFF_LINEAR, "linear")                                                                 \
	X(RS_BACKOFF_EXPONENTIAL, "exponential")

/*
 * The steps of a delivery, in the words of the contract and of the trace.
 * The settlement's outcome follows RS_STEP_SETTLE, the number of rows
 * RS_STEP_CLAIM.
 */
#define RS_STEPS(X)                                                                                \
	X(RS_STEP_END, "")                                                                             \
	X(RS_STEP_BEGIN, "BEGIN")                                                                      \
	X(RS_STEP_CLAIM, "CLAIM")                                                                      \
	X(RS_STEP_LOCK, "LOCK")                                                                        \
	X(RS_STEP_TAKE, "TAKE")                                                                        \
	X(RS_STEP_SAVEPOINT, "SAVEPOINT ruststream_claim")                                             \
	X(RS_STEP_HANDLER, "HANDLER")                                                                  \
	X(RS_STEP_ROLLBACK_TO, "ROLLBACK TO SAVEPOINT ruststream_claim")                               \
	X(RS_STEP_ROLLBACK, "ROLLBACK")                                                                \
	X(RS_STEP_SETTLE, "SETTLE")                                                                    \
	X(RS_STEP_COMMIT, "COMMIT")                                                                    \
	X(RS_STEP_UNLOCK, "UNLOCK")                                                                    \
	X(RS_STEP_LEASE_LOST, "LEASE LOST")                                                            \
	X(RS_STEP_UNCLAIM, "UNCLAIM")

#define RS_ENUM_MEMBER(symbol, word) symbol,

typedef enum rs_role
{
	RS_ROLES(RS_ENUM_MEMBER) RS_ROLE_COUNT
} rs_role;

typedef enum rs_form
{
	RS_FORMS(RS_ENUM_MEMBER) RS_FORM_COUNT
} rs_form;

typedef enum rs_outcome
{
	RS_OUTCOMES(RS_ENUM_MEMBER) RS_OUTCOME_COUNT
} rs_outcome;

typedef enum rs_isolation
{
	RS_ISOLATIONS(RS_ENUM_MEMBER) RS_ISOLATION_COUNT
} rs_isolation;

typedef enum rs_mode
{
	RS_MODES(RS_ENUM_MEMBER) RS_MODE_COUNT
} rs_mode;

typedef enum rs_dialect
{
	RS_DIALECTS(RS_ENUM_MEMBER) RS_DIALECT_COUNT
} rs_dialect;

typedef enum rs_backoff
{
	RS_BACKOFFS(RS_ENUM_MEMBER) RS_BACKOFF_COUNT
} rs_backoff;

typedef enum rs_step
{
	RS_STEPS(RS_ENUM_MEMBER) RS_STEP_COUNT
} rs_step;

/* The word of a member, a string constant; never NULL for a valid member. */
extern const char *rs_role_word(rs_role role);
extern const char *rs_form_word(rs_form form);
extern const char *rs_outcome_word(rs_outcome outcome);
extern const char *rs_isolation_word(rs_isolation isolation);
extern const char *rs_mode_word(rs_mode mode);
extern const char *rs_dialect_word(rs_dialect dialect);
extern const char *rs_backoff_word(rs_backoff backoff);
extern const char *rs_step_word(rs_step step);

/*
 * Find the member a word names.  Case-sensitive, save for isolation levels and
 * modes, which SQL writes in any case.  Returns false, leaving *result alone,
 * where the word names none.  rs_isolation_find and rs_mode_find take "default"
 * for none declared.
 */
extern bool rs_form_find(const char *word, rs_form *result);
extern bool rs_outcome_find(const char *word, rs_outcome *result);
extern bool rs_backoff_find(const char *word, rs_backoff *result);
extern bool rs_isolation_find(const char *word, rs_isolation *result);
extern bool rs_mode_find(const char *word, rs_mode *result);

/* -------------------------------------------------------------- problems */

/*
 * What can be wrong with a description, and what to do about it: symbol,
 * text, hint.  One %s in the text, where there is one, is rs_problem.subject.
 */
#define RS_PROBLEMS(X)                                                                             \
	X(RS_OK, "", "")                                                                               \
	X(RS_PROBLEM_NO_ID, "a queue needs an id column",                                              \
	  "Name the column that identifies a row, for example id_column => 'id'.")                     \
	X(RS_PROBLEM_COLUMN_TWICE, "column \"%s\" plays two roles",                                    \
	  "Give each role a column of its own.")                                                       \
	X(RS_PROBLEM_TWO_FORMS, "a queue cannot have both a lease column and a lock key",              \
	  "Leave out locked_until_column for the advisory lock form, or lock_key for the lease form.") \
	X(RS_PROBLEM_FIFO_WITHOUT_GROUP, "fifo needs a group column",                                  \
	  "Name the column whose rows are delivered one at a time, or leave fifo off.")                \
	X(RS_PROBLEM_FIFO_ADVISORY, "fifo cannot be combined with the advisory lock form",             \
	  "Put the group's column into the lock key instead.")                                         \
	X(RS_PROBLEM_FIFO_PARTITION_KEY, "fifo cannot be combined with a partition key",               \
	  "The rows of a FIFO group go one at a time already: leave out one of the two.")              \
	X(RS_PROBLEM_KEY_EMPTY, "the lock key is empty", "Write a template such as 'jobs-{id}'.")      \
	X(RS_PROBLEM_KEY_UNCLOSED, "the lock key \"%s\" has a \"{\" without its \"}\"",                \
	  "Write columns as {column}; \"{{\" and \"}}\" stand for the braces themselves.")             \
	X(RS_PROBLEM_KEY_STRAY_BRACE, "the lock key \"%s\" has a \"}\" without its \"{\"",             \
	  "Write columns as {column}; \"{{\" and \"}}\" stand for the braces themselves.")             \
	X(RS_PROBLEM_KEY_EMPTY_COLUMN, "the lock key \"%s\" has an empty placeholder",                 \
	  "Write the column's name between the braces, for example 'jobs-{id}'.")                      \
	X(RS_PROBLEM_ISOLATION_UNKNOWN, "\"%s\" is not an isolation level",                            \
	  "Use \"read committed\", \"repeatable read\" or \"serializable\", or leave it out for the "  \
	  "server's default.")                                                                         \
	X(RS_PROBLEM_ISOLATION_READ_UNCOMMITTED,                                                       \
	  "PostgreSQL has no isolation level \"read uncommitted\" of its own",                         \
	  "It runs as \"read committed\": declare that instead.")                                      \
	X(RS_PROBLEM_ISOLATION_SQLITE, "SQLite has no isolation levels to declare, \"%s\" included",   \
	  "Its transactions are always serializable. Declare a mode instead, if any: deferred, "       \
	  "immediate or exclusive.")                                                                   \
	X(RS_PROBLEM_MODE_UNKNOWN, "\"%s\" is not a transaction mode",                                 \
	  "Use deferred, immediate or exclusive, or leave it out for deferred.")                       \
	X(RS_PROBLEM_MODE_NOT_SQLITE, "only SQLite has transaction modes, such as \"%s\"",             \
	  "Declare an isolation level instead, or neither.")                                           \
	X(RS_PROBLEM_SQLITE_ROW_LOCK,                                                                  \
	  "SQLite has no row lock form: its locks are on the whole database",                          \
	  "Name a column for the lease (locked_until), or a lock key for the advisory lock form.")     \
	X(RS_PROBLEM_MYSQL_FIFO_SERIALIZABLE,                                                          \
	  "a fifo queue in the row lock form cannot be served at serializable by MySQL or MariaDB",    \
	  "There its plain reads lock what they read. Declare a lower level, or use a lease.")

#define RS_PROBLEM_MEMBER(symbol, text, hint) symbol,

typedef enum rs_problem_code
{
	RS_PROBLEMS(RS_PROBLEM_MEMBER) RS_PROBLEM_COUNT
} rs_problem_code;

typedef struct rs_problem
{
	rs_problem_code code;
	const char *subject; /* fills the text's %s; NULL where it has none */
} rs_problem;

/* The text (with at most one %s) and the hint of a problem. */
extern const char *rs_problem_text(rs_problem_code code);
extern const char *rs_problem_hint(rs_problem_code code);

/* ---------------------------------------------------------------- table.c */

/*
 * A table description.  The strings are raw names, unquoted, and belong to
 * the caller; they must outlive every use of the description.
 */
typedef struct rs_table
{
	const char *schema;
	const char *name;
	const char *column[RS_ROLE_COUNT]; /* NULL: no column plays the role */
	bool fifo;                         /* one row of a group at a time */
	bool headers_are_json;             /* of type json, not jsonb */
	bool only;                         /* a plain table, read without its inheritance children */
	const char *lock_key;              /* key template of the advisory lock form, or NULL */
	rs_isolation isolation;
	rs_mode mode;            /* SQLite's */
	const char *claim_index; /* MySQL's: the index that claims walk; NULL: whichever there is */
} rs_table;

/* The form a description has: the lease column and the lock key decide. */
extern rs_form rs_table_form(const rs_table *table);

/*
 * Rows that go one at a time, in claim order, stand in a line: those of a FIFO
 * group, or of one partition key.
 */
typedef enum rs_lines
{
	RS_LINES_NONE,
	RS_LINES_GROUP,
	RS_LINES_PARTITION_KEY
} rs_lines;

extern rs_lines rs_table_lines(const rs_table *table);

/*
 * Check a description by itself, without looking at any table.  Returns the
 * first problem; .code is RS_OK where there is none.
 */
extern rs_problem rs_table_check(const rs_table *table);

/* Check that a dialect's engine can serve a description that has passed the check above. */
extern rs_problem rs_table_check_dialect(rs_dialect dialect, const rs_table *table);

/* -------------------------------------------------------------- isolation.c */

/*
 * Read a declared level; NULL means that nothing is declared.  Refuses what
 * the dialect does not have.
 */
extern rs_problem rs_isolation_declare(rs_dialect dialect, const char *word, rs_isolation *result);

/* The same for a mode, which SQLite alone has. */
extern rs_problem rs_mode_declare(rs_dialect dialect, const char *word, rs_mode *result);

/* ------------------------------------------------------------------- key.c */

/*
 * Check a lock key template.  rs_key_column yields the n-th placeholder
 * (counting from 0) of a template that has passed the check: its start in the
 * template and its length; false after the last.
 */
extern rs_problem rs_key_check(const char *lock_key);

/*
 * The pieces of a template that has passed the check, one a call: what a
 * placeholder names, or text, of which an escaped brace is one character.
 * *cursor begins at the template and moves; false at its end.
 */
extern bool rs_key_next(const char **cursor, bool *is_column, const char **start, size_t *length);
extern bool rs_key_column(const char *lock_key, int n, const char **start, size_t *length);

/* ------------------------------------------------------------- statement.c */

/*
 * What a delivery asks of the database.  An operation is one or more
 * statements, executed in order.
 */
#define RS_OPERATIONS(X)                                                                           \
	/* Row lock and lease: id, attempt, headers, the row, priority, retry_after. */                \
	X(RS_OP_CLAIM_ROW, "claim_row")                                                                \
	X(RS_OP_CLAIM_PAYLOAD, "claim_payload")       /* the same, with the payload for the row */     \
	X(RS_OP_CLAIM_ROW_BEHIND, "claim_row_behind") /* the same, behind a row of no priority */      \
	X(RS_OP_CLAIM_PAYLOAD_BEHIND, "claim_payload_behind")                                          \
	X(RS_OP_CLAIM_ROW_BEHIND_PRIORITY, "claim_row_behind_priority") /* .. of a priority */         \
	X(RS_OP_CLAIM_PAYLOAD_BEHIND_PRIORITY, "claim_payload_behind_priority")                        \
	/* The head of a line, which is a FIFO group, or the rows of one partition key. */             \
	X(RS_OP_CLAIM_LINE_ROW, "claim_line_row")                                                      \
	X(RS_OP_CLAIM_LINE_PAYLOAD, "claim_line_payload")                                              \
	X(RS_OP_LINES, "lines") /* the first lines, and when the head of each comes due */             \
	X(RS_OP_LINES_BEHIND, "lines_behind") /* .. behind one */                                      \
	X(RS_OP_LINE_WAITS, "line_waits")     /* what a line waits for: its head, a lease */           \
	/* Advisory lock: id and key of rows to be taken; with a partition key, that too. */           \
	X(RS_OP_CANDIDATES, "candidates")                                                              \
	X(RS_OP_CANDIDATES_BEHIND, "candidates_behind")                                                \
	X(RS_OP_CANDIDATES_BEHIND_PRIORITY, "candidates_behind_priority")                              \
	X(RS_OP_FREE_CANDIDATES, "free_candidates") /* .. that nobody else holds, locked */            \
	X(RS_OP_LINE_CANDIDATE, "line_candidate")   /* the head of a line, as a candidate */           \
	X(RS_OP_LOOSE_CANDIDATE, "loose_candidate") /* .. the first row that is in none */             \
	X(RS_OP_TAKE_ROW, "take_row") /* advisory lock: one of them, as a claim returns it */          \
	X(RS_OP_TAKE_PAYLOAD, "take_payload")                                                          \
	X(RS_OP_NEXT_DUE, "next_due")   /* when the next row comes due; NULL: none does */             \
	X(RS_OP_RECLAIM, "reclaim")     /* lock one row again, to settle it afresh */                  \
	X(RS_OP_UNSETTLED, "unsettled") /* is the row still there to be claimed? */                    \
	X(RS_OP_ACK, "ack")             /* end the row: delete it, or mark it processed */             \
	X(RS_OP_RETRY, "retry")                                                                        \
	X(RS_OP_RELEASE, "release") /* lease: a retry, its attempt being counted already */            \
	X(RS_OP_UNCLAIM, "unclaim") /* lease: undo the claim of these, each while its token holds */   \
	X(RS_OP_LEASED_ROW, "leased_row") /* one that is leased, as a claim returns it */              \
	X(RS_OP_LEASED_PAYLOAD, "leased_payload")                                                      \
	X(RS_OP_RETRY_AFTER, "retry_after")                                                            \
	X(RS_OP_MOVE_GROUP, "move_group")                                                              \
	X(RS_OP_MOVE_TABLE, "move_table")                                                              \
	X(RS_OP_EXTEND, "extend") /* move the token of a lease that is still held */                   \
	X(RS_OP_PUBLISH, "publish")                                                                    \
	X(RS_OP_FIND_DEAD, "find_dead")           /* dead letters: id, origin, ctid, tableoid */       \
	X(RS_OP_REDRIVE_GROUP, "redrive_group")   /* give these back to their groups */                \
	X(RS_OP_REDRIVE_TABLE, "redrive_table")   /* .. from the dead-letter table */                  \
	X(RS_OP_FIND_PROCESSED, "find_processed") /* ids of rows that have been processed */           \
	X(RS_OP_PURGE, "purge")                   /* delete these */                                   \
	X(RS_OP_DEPTH, "depth")                   /* ready, waiting, counted up to a limit */          \
	X(RS_OP_DEPTH_ALL, "depth_all")           /* .. of every group */                              \
	X(RS_OP_DEPTH_ALIVE, "depth_alive")       /* .. but the one of dead letters */                 \
	X(RS_OP_DEPTH_DEAD_GROUP, "depth_dead_group")                                                  \
	X(RS_OP_DEPTH_DEAD_TABLE, "depth_dead_table")                                                  \
	/* Claims of MySQL and MariaDB, which are several statements (statement_mysql.c). */           \
	X(RS_OP_CLAIM_UNDELAYED, "claim_undelayed") /* of one priority, rows without a delay */        \
	X(RS_OP_CLAIM_COME_DUE, "claim_come_due")   /* .. and those whose delay is over */             \
	X(RS_OP_CANDIDATES_UNDELAYED, "candidates_undelayed")                                          \
	X(RS_OP_CANDIDATES_COME_DUE, "candidates_come_due")                                            \
	X(RS_OP_LEVEL, "level")             /* the lowest priority; the lowest above another */        \
	X(RS_OP_COUNT_GROUP, "count_group") /* FIFO: its rows; those that are not locked */            \
	/* Partition keys: of the key of one row the first that is due; one range, or two. */          \
	X(RS_OP_HEAD, "head")                                                                          \
	X(RS_OP_HEAD_UNDELAYED, "head_undelayed")                                                      \
	X(RS_OP_HEAD_COME_DUE, "head_come_due")                                                        \
	X(RS_OP_LOCK_CANDIDATE, "lock_candidate") /* .. and that one, as a claim */                    \
	X(RS_OP_STAMP, "stamp")                   /* lease: the token, and the attempt */              \
	X(RS_OP_COUNT_ATTEMPT, "count_attempt")   /* advisory lock: the attempt of a row taken */

typedef enum rs_operation
{
	RS_OPERATIONS(RS_ENUM_MEMBER) RS_OPERATION_COUNT
} rs_operation;

extern const char *rs_operation_word(rs_operation operation);

/*
 * The values a statement takes.  Rendering numbers them in the order of their
 * first use and says which they are.
 */
#define RS_PARAMETERS(X)                                                                           \
	X(RS_PARAM_ID, "id")                 /* the row's id, in its column's own type */              \
	X(RS_PARAM_GROUP, "group")           /* the group that is read, text */                        \
	X(RS_PARAM_NOW, "now")               /* the one "now" of the statement, timestamptz */         \
	X(RS_PARAM_UNTIL, "until")           /* due again, or leased until then, timestamptz */        \
	X(RS_PARAM_TOKEN, "token")           /* the lease token that is held, timestamptz */           \
	X(RS_PARAM_DEAD_GROUP, "dead_group") /* the group dead letters go to, text */                  \
	X(RS_PARAM_HELD, "held")             /* rows to leave alone, an array of the id's type */      \
	X(RS_PARAM_ATTEMPT, "attempt")       /* what the row holds now, bigint */                      \
	X(RS_PARAM_LIMIT, "limit")           /* how many rows at most, bigint */                       \
	X(RS_PARAM_ANNOUNCED, "announced")   /* the one that may have replaced it */                   \
	X(RS_PARAM_KEY, "key")               /* the advisory key, text */                              \
	X(RS_PARAM_PRIORITY, "priority")     /* bigint */                                              \
	X(RS_PARAM_PARTITION_KEY, "partition_key")   /* text */                                        \
	X(RS_PARAM_ORIGIN, "origin")                 /* headers of a dead letter, an object as text */ \
	X(RS_PARAM_ORIGIN_HEADERS, "origin_headers") /* the names of all such headers, text[] */       \
	X(RS_PARAM_IDS, "ids")                       /* an array of the id's type */                   \
	X(RS_PARAM_TOKENS, "tokens")                 /* a token for each of these, timestamptz[] */    \
	X(RS_PARAM_GROUPS, "groups")                 /* the group of each of these, text[] */          \
	X(RS_PARAM_TIDS, "tids")       /* rows of a dead-letter table: their place, tid[] */           \
	X(RS_PARAM_TABLES, "tables")   /* .. and the partition that it is in, oid[] */                 \
	X(RS_PARAM_HEADERS, "headers") /* in the column's own type */                                  \
	X(RS_PARAM_PAYLOAD, "payload") /* in the column's own type */

typedef enum rs_parameter
{
	RS_PARAMETERS(RS_ENUM_MEMBER) RS_PARAM_COUNT
} rs_parameter;

extern const char *rs_parameter_word(rs_parameter parameter);

/* The parameter that names a line of this table, which has lines. */
extern rs_parameter rs_line_parameter(const rs_table *table);

/*
 * PostgreSQL ($1) and SQLite (?1) number each value once.  MySQL (?) wants one
 * for each time that a statement uses it.
 */
#define RS_MAX_PARAMETERS 48

/* What a statement needs beyond the queue's own description. */
typedef struct rs_destination
{
	const char *schema; /* the dead-letter table, where there is one */
	const char *name;
	const char *const *columns; /* what a move carries, the id included */
	int column_count;
} rs_destination;

typedef struct rs_statement
{
	size_t length; /* of the whole statement, also where the buffer is short */
	int parameter_count;
	rs_parameter parameters[RS_MAX_PARAMETERS]; /* in the order they are bound */
} rs_statement;

/*
 * How many statements an operation has for this table; 0: not available.
 * A retry without the attempt role has none because there is nothing to write;
 * nor has one in the advisory lock form, whose claim has counted it.
 */
extern int rs_statement_count(rs_dialect dialect, rs_operation operation, const rs_table *table);

/*
 * Render statement number "index" of an operation into buffer, always
 * terminated where size > 0.  destination may be NULL except for the moves
 * into a table and the count of its rows.  Names are quoted always.  The
 * result's length, compared with size, tells whether the buffer was large
 * enough (call again with length + 1 bytes).  An index that the operation does
 * not have renders as the empty statement.
 */
extern rs_statement rs_statement_render(rs_dialect dialect, rs_operation operation, int index,
										const rs_table *table, const rs_destination *destination,
										char *buffer, size_t size);

/* The indexes that the claims of a table may need. */
typedef enum rs_index
{
	RS_INDEX_CLAIM, /* the rows of a group in claim order */
	RS_INDEX_LINE,  /* .. of a partition key; FIFO groups have the one above */
	RS_INDEX_LEASE, /* the leased rows of a line */
	RS_INDEX_COUNT
} rs_index;

extern bool rs_index_is_needed(rs_dialect dialect, const rs_table *table, rs_index index);

/*
 * Render an index that the claims of a table need, as the statement that
 * makes it; the same result conventions, no parameters.  rs_index_columns
 * yields its columns in order: the roles into roles[] (RS_ROLE_COUNT entries
 * are enough), returning how many.  Every column is ascending; priority and
 * retry_after are NULLS FIRST, as the claim order wants them, while the others
 * keep the default; a group that is compared for equality only may be in any
 * order.  An index is partial: that of leases has what is not NULL, the others
 * what is not processed, where the table has processed_at.
 */
extern rs_statement rs_index_render(rs_dialect dialect, const rs_table *table, rs_index index,
									char *buffer, size_t size);
extern int rs_index_columns(const rs_table *table, rs_index index, rs_role *roles);

/* ----------------------------------------------------------------- settle.c */

/* How a delivery came to its end, before any policy is applied. */
typedef enum rs_cause
{
	RS_CAUSE_ANSWER,       /* the handler answered an outcome */
	RS_CAUSE_ERROR,        /* the handler failed */
	RS_CAUSE_DECODE_ERROR, /* the row did not decode */
	RS_CAUSE_SETTLE_ERROR  /* the ack's settlement or COMMIT failed */
} rs_cause;

typedef struct rs_policy
{
	rs_outcome on_error;        /* never RS_OUTCOME_ACK */
	rs_outcome on_decode_error; /* never RS_OUTCOME_ACK */
	bool transactional;         /* else the handler's writes are kept, whatever it answers */
	bool has_dead_letter;
	bool dead_letter_is_table; /* else it is a group */
	int max_attempts;          /* 0: no cap */
	rs_backoff backoff;
	int64_t retry_delay;     /* microseconds, the backoff's unit */
	int64_t max_retry_delay; /* microseconds, the backoff's cap */
} rs_policy;

/*
 * The defaults of the policies: retry_after where the table has that role,
 * else retry; and for rows that do not decode, the dead letter where there is
 * one, else as for any other error.
 */
extern rs_outcome rs_default_on_error(const rs_table *table);
extern rs_outcome rs_default_on_decode_error(const rs_table *table, bool has_dead_letter);

typedef struct rs_settlement
{
	rs_outcome outcome;     /* what is settled, after policy and cap */
	rs_operation operation; /* the statements that settle it */
	bool counts_attempt;    /* whether they add one to attempt */
	bool capped;            /* max_attempts turned it into a dead letter */
	bool lacks_retry_after; /* a delay was asked of a table without the role */
	bool lacks_dead_letter; /* dead_letter was answered, but there is none:
							 * settled as an error instead */
	bool delay_is_given;    /* the handler's own delay, else the backoff's */
	const rs_step *steps;   /* what remains of the lane after the handler,
							 * ended by RS_STEP_END */
} rs_settlement;

/*
 * Decide the settlement of one delivery.  answer matters for RS_CAUSE_ANSWER
 * only.  attempt is the delivery's, as it stood before the claim (the first
 * delivery is 1).  has_answer_delay: the answer came with a delay.
 */
extern rs_settlement rs_settle(const rs_table *table, const rs_policy *policy, rs_cause cause,
							   rs_outcome answer, bool has_answer_delay, int64_t attempt);

/*
 * The lanes, as printed by ruststream.transaction_plan: the steps up to the
 * handler, and those that follow it for each outcome.  Both are ended by
 * RS_STEP_END.
 */
extern const rs_step *rs_lane_opening(rs_form form, bool transactional);
extern const rs_step *rs_lane_ending(rs_form form, bool transactional, rs_outcome outcome);

/* ------------------------------------------------------------------- time.c */

/*
 * Times are microseconds since 1970-01-01 00:00 UTC.  In SQLite they are text,
 * "YYYY-MM-DDTHH:MM:SS+00:00" or "YYYY-MM-DDTHH:MM:SS.fff+00:00", so that their
 * order as text is their order in time; rounded down to the millisecond, and
 * without a fraction where that is zero.
 */
#define RS_TIME_SIZE 30

/* Write a time of the years 0 to 9999 (the nearest of them otherwise), terminated. */
extern void rs_time_format(int64_t time, char buffer[RS_TIME_SIZE]);

/*
 * Read a time in that form, with up to nine digits of a fraction and any offset
 * or "Z"; what is finer than a microsecond is dropped.  A space may stand for
 * the "T", and no offset at all means UTC.  Returns false, leaving *result
 * alone, for anything else.
 */
extern bool rs_time_parse(const char *text, size_t length, int64_t *result);

/* ---------------------------------------------------------------- backoff.c */

/*
 * The delay before attempt number attempt + 1, in microseconds: constant is
 * the unit, linear attempt times it, exponential doubles it per attempt; never
 * above cap.  Jitter takes away up to a quarter, so that rows which failed
 * together do not come back together: random is any 32 random bits, and 0
 * means no jitter.  Never negative, and never overflows.
 */
extern int64_t rs_backoff_delay(rs_backoff backoff, int64_t unit, int64_t cap, int64_t attempt,
								uint32_t random);

#endif /* RUSTSTREAM_CORE_H */
