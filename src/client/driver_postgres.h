/*-------------------------------------------------------------------------
 *
 * driver_postgres.h
 *	  What the files of the PostgreSQL driver share; the only one that includes
 *	  libpq's header.
 *
 *	driver_postgres.c			connections, errors, transactions
 *	driver_postgres_execute.c	statements, what they take and return
 *	driver_postgres_claim.c		claims of FIFO groups and partition keys
 *	driver_postgres_batch.c		claims of several rows
 *	driver_postgres_text.c		the text of a handler that is SQL
 *	driver_postgres_handler.c	running it, and how it answers
 *	driver_postgres_key.c		advisory keys, and poolers that lose them
 *	driver_postgres_table.c		looking at a table
 *	driver_postgres_catalog.c	our own tables
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_DRIVER_POSTGRES_H
#define RUSTSTREAM_DRIVER_POSTGRES_H

#include <libpq-fe.h>

#include "client/client.h"

/* The oldest server: WITH .. AS MATERIALIZED. */
#define RS_POSTGRES_OLDEST 120000

/* The types that are told apart: pg_type's own numbers, which never change. */
enum
{
	RS_OID_BOOL = 16,
	RS_OID_BYTEA = 17,
	RS_OID_INT8 = 20,
	RS_OID_INT2 = 21,
	RS_OID_INT4 = 23,
	RS_OID_TEXT = 25,
	RS_OID_JSON = 114,
	RS_OID_VARCHAR = 1043,
	RS_OID_TIMESTAMP = 1114,
	RS_OID_TIMESTAMPTZ = 1184,
	RS_OID_UUID = 2950,
	RS_OID_JSONB = 3802
};

/* What a handler can be given: its id, payload, attempt, headers. */
#define RS_MAX_KEPT_TYPES 4

/* A statement that is kept prepared: its text, and the name that the server knows it by. */
typedef struct rs_postgres_kept
{
	char *text;
	unsigned number;
	Oid types[RS_MAX_KEPT_TYPES]; /* of a handler's parameters */
} rs_postgres_kept;

/* Statements of a handler that are kept prepared. */
#define RS_MAX_HANDLER_STATEMENTS 16

/* Slots behind those of the catalogue's operations. */
enum
{
	RS_SLOT_HANDLER = RS_OPERATION_COUNT * 4,
	RS_SLOT_LOCK = RS_SLOT_HANDLER + RS_MAX_HANDLER_STATEMENTS,
	RS_SLOT_UNLOCK,
	RS_SLOT_IS_HELD,
	RS_SLOT_GUARD,
	RS_SLOT_TRY_KEY,
	RS_SLOT_OUR_WAY,
	RS_SLOT_THEIR_WAY,
	RS_SLOT_SAVEPOINT
};

typedef struct rs_postgres_session
{
	rs_session base;
	const rs_url *url;
	PGconn *connection;
	PGcancel *cancel; /* only read once it is made: interrupt is another thread's */
	rs_arena scratch; /* of one statement: its parameters, and bytes that are decoded */

	rs_postgres_kept kept[RS_SLOT_COUNT];
	unsigned statements;   /* that were ever prepared, so that no name comes twice .. */
	unsigned forgotten;    /* .. and how many of them the server has forgotten */
	bool loses_statements; /* a pooler gives our statements to others: nothing is kept */

	rs_isolation default_isolation; /* of transactions that declare none */
	bool in_transaction;            /* we have begun one, whatever a handler has made of it */
	bool plans_our_way;             /* the settings that our statements are planned with are on */
	bool needs_reset;               /* a handler that is SQL has run: its settings are to go .. */
	bool was_reset;                 /* .. and have gone, if this transaction commits */
	bool marks_claim;               /* a claim's statement: the savepoint is to follow it */
	const char *mark;               /* the savepoint in front of the handler, or NULL */
	bool has_now;                   /* the clock was read along with the last statement */
	int64_t now;

	/* Where the walk over the partition keys has come to; NULL: it begins. */
	rs_arena line_arena;
	rs_value line;

	/* Of the row that was claimed last: the types of what a handler is given. */
	Oid id_type;
	Oid headers_type;
	Oid payload_type;
	struct rs_postgres_handler *handler; /* the one that is SQL and was run last */
	rs_answer *answer;                   /* while it runs */
	Oid outcome_type; /* ruststream.outcome, where the extension is installed .. */
	bool asked_for_outcome_type;

	bool is_pooled;              /* what answers is not the server that we are connected to */
	bool keys_work;              /* .. or is, or its sessions outlive a transaction all the same */
	bool lost_a_key;             /* one was found released: unlock with care */
	Oid listens_to;              /* the table whose inserts wake us, or 0 .. */
	const rs_table *listens_for; /* .. found out for this one */
} rs_postgres_session;

static inline rs_postgres_session *
rs_postgres_of(rs_session *base)
{
	return (rs_postgres_session *) base;
}

/* --------------------------------------------------------- driver_postgres.c */

/* What a failed result, or a connection without one (NULL), comes to; fills the error in. */
extern rs_result rs_postgres_fail(rs_postgres_session *session, const PGresult *result);
/* Run one text of one or more statements, the last of which may return rs_postgres_now's column. */
extern rs_result rs_postgres_run(rs_postgres_session *session, const char *text);
/* Have the planner's settings as our own statements want them. */
extern rs_result rs_postgres_plan_our_way(rs_postgres_session *session);
/* What follows a claim of the row lock form, as statements that can be kept prepared. */
#define RS_POSTGRES_THEIR_WAY                                                                      \
	"SELECT pg_catalog.set_config('enable_seqscan', NULL, true),"                                  \
	" pg_catalog.set_config('enable_sort', NULL, true),"                                           \
	" pg_catalog.set_config('plan_cache_mode', NULL, true)"
#define RS_POSTGRES_CLAIM_MARK "ruststream_claim"
#define RS_POSTGRES_SAVEPOINT "SAVEPOINT " RS_POSTGRES_CLAIM_MARK
/* The transaction that we began is over: a handler has ended it. */
extern bool rs_postgres_has_ended(const rs_postgres_session *session);
extern rs_result rs_postgres_refuse_ended(rs_postgres_session *session);
/* A connection as the URL wants it; NULL where it fails. */
extern rs_result rs_postgres_connect(const rs_url *url, PGconn **connection, rs_error *error);
extern rs_result rs_postgres_open(const rs_url *url, rs_session **session, rs_error *error);

/* -------------------------------------------------- driver_postgres_execute.c */

extern rs_result rs_postgres_execute(rs_session *base, const rs_command *command,
									 const rs_value *values, int count, rs_row_callback row,
									 void *arg, int64_t *affected);
extern void rs_postgres_forget_statements(rs_session *base);
extern rs_result rs_postgres_no_memory(rs_postgres_session *session);
/* The statement of a slot, prepared under a name that was never used in this session. */
extern rs_result rs_postgres_prepare(rs_postgres_session *session, int slot, const char *text,
									 int count, const Oid *types, char name[32]);
/*
 * Send one statement with values in their text form (or binary, by formats) and types (NULL:
 * whatever the statement makes of them), kept prepared in its slot, if it has one.  The result is
 * the caller's; NULL, with the error filled in, where it is no success.
 */
extern PGresult *rs_postgres_send(rs_postgres_session *session, const char *text, int slot,
								  int count, const Oid *types, const char *const *values,
								  const int *lengths, const int *formats, bool binary_result,
								  rs_result *code);
/* One value of a result; bytes that have to be decoded go into the scratch. */
extern rs_value rs_postgres_column(rs_postgres_session *session, const PGresult *result, int row,
								   int column);
extern void rs_postgres_format_time(int64_t time, bool is_token, char buffer[RS_TIME_SIZE + 8]);

/* ---------------------------------------------------- driver_postgres_claim.c */

extern rs_result rs_postgres_claim(rs_session *base, struct rs_plan *plan, rs_value *values,
								   rs_row_callback row, void *arg);
extern rs_result rs_postgres_candidates(rs_session *base, struct rs_plan *plan, rs_value *values,
										rs_row_callback row, void *arg);

/* ---------------------------------------------------- driver_postgres_batch.c */

extern rs_result rs_postgres_claim_batch(rs_session *base, struct rs_plan *plan,
										 const rs_value *values, rs_row_callback row, void *arg);

/* ----------------------------------------------------- driver_postgres_text.c */

/* What a handler is given, by these names in its text. */
enum
{
	RS_GIVEN_ID,
	RS_GIVEN_PAYLOAD,
	RS_GIVEN_ATTEMPT,
	RS_GIVEN_HEADERS,
	RS_GIVEN_COUNT
};

typedef struct rs_postgres_statement
{
	char *text; /* with $1, $2, .. */
	int given[RS_GIVEN_COUNT];
	int count;
	bool ends_transactions; /* or begins them */
} rs_postgres_statement;

typedef struct rs_postgres_handler
{
	char *source;
	rs_arena arena;
	rs_postgres_statement *statements;
	int count;
} rs_postgres_handler;

/* Read a handler's text; NULL: out of memory. */
extern rs_postgres_handler *rs_postgres_read_handler(const char *source);

/* -------------------------------------------------- driver_postgres_handler.c */

extern void rs_postgres_forget_handler(rs_postgres_session *session);
/* Does the handler's text begin or end a transaction by itself? */
extern bool rs_postgres_ends_transactions(rs_postgres_session *session, const char *handler);
extern rs_result rs_postgres_check_handler(rs_session *base, const char *handler);
extern const char *rs_postgres_left_open(rs_session *base);
extern rs_result rs_postgres_call_handler(rs_session *base, const char *handler,
										  const ruststream_delivery *delivery, const rs_value *id,
										  const rs_value *payload, bool transactional,
										  rs_answer *answer);
/* A message of the server's: an outcome, or nothing of ours. */
extern void rs_postgres_receive(void *arg, const PGresult *message);

/* ------------------------------------------------------ driver_postgres_key.c */

extern rs_result rs_postgres_lock_key(rs_session *base, const char *key, bool *locked);
extern void rs_postgres_unlock_key(rs_session *base, const char *key);
extern bool rs_postgres_key_is_held(rs_session *base, const char *key);
extern rs_result rs_postgres_prepare_keys(rs_session *base);

/* ---------------------------------------------------- driver_postgres_table.c */

extern rs_result rs_postgres_look(rs_session *base, const rs_table *table, rs_arena *arena,
								  rs_look *look);

/* -------------------------------------------------- driver_postgres_catalog.c */

extern const char *const rs_postgres_catalog[RS_CATALOG_COUNT];
extern rs_result rs_postgres_install(rs_session *base, bool with_wal,
									 ruststream_notice_callback notice, void *arg);
extern rs_result rs_postgres_find_version(rs_session *base, int64_t *version);
extern rs_result rs_postgres_check_plan(rs_session *base, const struct rs_plan *plan,
										const char **warning);
extern rs_result rs_postgres_wait(rs_session *base, int stop_fd, int64_t ms);

#endif /* RUSTSTREAM_DRIVER_POSTGRES_H */
