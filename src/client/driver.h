/*-------------------------------------------------------------------------
 *
 * driver.h
 *	  What an engine's driver does for the library: connections, transactions,
 *	  statements, keys, and calling a handler that is SQL.
 *
 * The library (worker.c, deliver.c, catalog.c) decides nothing by engine.  The
 * statements come from the core's catalogue of the driver's dialect, the
 * catalogs' statements and schema from the driver.  A driver is a const rs_driver in
 * driver_<engine>.c, and the files beside it, which alone include that engine's header; it is
 * listed in rs_drivers (client.c) under RS_WITH_<ENGINE>, which the Makefile defines where the
 * library is found.
 *
 * What a driver owes
 * ------------------
 *
 * - Nothing prints, exits, or leaks; every call that does not return RS_DONE
 *   leaves session->error filled in (rs_error_set).
 * - RS_TRANSIENT is for what contract.md, section 2 calls transient: the whole transaction
 *   must be rolled back, and the same may succeed the next time.  RS_LOST: the
 *   session is of no more use; the library closes it and opens another one.
 *   RS_FAILED: anything else; the transaction can be rolled back.
 * - Values given to a row callback last for that callback.
 * - A session is used by one thread at a time, rs_driver.interrupt aside.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_DRIVER_H
#define RUSTSTREAM_DRIVER_H

#include "core/core.h"
#include "client/ruststream.h"

typedef enum rs_result
{
	RS_DONE,
	RS_FAILED,
	RS_TRANSIENT,
	RS_LOST
} rs_result;

/* An error, in memory of its own, so that telling of it cannot fail. */
typedef struct rs_error
{
	ruststream_code code;
	char state[24];
	char message[1024];
	char hint[768];
} rs_error;

/* Fill an error in; the message is cut where it is too long.  hint may be NULL. */
extern void rs_error_set(rs_error *error, ruststream_code code, const char *state, const char *hint,
						 const char *format, ...) __attribute__((format(printf, 5, 6)));

/* ----------------------------------------------------------------- values */

typedef enum rs_kind
{
	RS_NULL,
	RS_INTEGER,
	RS_REAL,
	RS_TEXT,
	RS_BYTES
} rs_kind;

/* A value as it travels to and from a database; text need not be terminated. */
typedef struct rs_value
{
	rs_kind kind;
	int64_t integer;
	double real;
	const char *text; /* of RS_TEXT and RS_BYTES */
	size_t length;
} rs_value;

#define RS_VALUE_NULL ((rs_value){.kind = RS_NULL})
extern rs_value rs_value_of_integer(int64_t integer);
extern rs_value rs_value_of_text(const char *text); /* NULL gives RS_NULL */
extern rs_value rs_value_of_bytes(const void *bytes, size_t length);
extern bool rs_value_equal(const rs_value *a, const rs_value *b);

/* A row of a result; false ends the statement early, and is no error. */
typedef bool (*rs_row_callback)(void *arg, const rs_value *columns, int count);

/*
 * A statement.  One that is executed often has a slot, in which a session keeps it prepared for as
 * long as its text is the same (plans of several tables share the slots); slot -1 is prepared
 * for one execution.
 */
typedef struct rs_command
{
	const char *text;
	int slot;
	int parameter_count;
	rs_parameter parameters[RS_MAX_PARAMETERS]; /* of a catalogue's statement */
} rs_command;

/* Operation times statement, and whatever a driver adds for itself behind them. */
#define RS_SLOT(operation, index) ((int) (operation) *4 + (index))
#define RS_SLOT_COUNT (RS_OPERATION_COUNT * 4 + 32)

/* --------------------------------------------------------------- sessions */

/* Rows that a worker leaves alone for now, because they have just failed. */
#define RS_MAX_HELD 64
typedef struct rs_held
{
	int count;
	rs_value ids[RS_MAX_HELD];  /* their text is the worker's */
	int64_t until[RS_MAX_HELD]; /* on the monotonic clock, microseconds */
} rs_held;

/* Leave one more out, as long as its text is there; where there is no room for it nothing changes.
 */
static inline void
rs_leave_out(rs_held *held, const rs_value *id)
{
	if (held->count < RS_MAX_HELD)
		held->ids[held->count++] = *id;
}

/* The head of each driver's own session structure. */
typedef struct rs_session
{
	const struct rs_driver *driver;
	rs_error error;        /* of the last call that did not return RS_DONE */
	const rs_table *table; /* the worker's queue, or NULL */
	const rs_held *held;   /* the worker's, or NULL: for claims that leave rows out */
	const rs_value
		*passed; /* candidates that were found already, and are left out of the next look, .. */
	int passed_count; /* .. where a look finds one */
} rs_session;

typedef struct rs_url
{
	rs_dialect dialect;
	char *user; /* NULL where it is not given, as everything below */
	char *password;
	char *host;
	int port;       /* 0: not given */
	char *database; /* SQLite's path */
	char **parameter_names;
	char **parameter_values;
	int parameter_count;
	char *display; /* the URL for messages: without the password */
} rs_url;

/* The value of a URL's parameter; NULL where it is not given. */
extern const char *rs_url_parameter(const rs_url *url, const char *name);

/* What a transaction is for. */
typedef enum rs_purpose
{
	RS_FOR_US,      /* a claim of the lease or advisory lock form, or a settlement: READ COMMITTED,
					 * on SQLite IMMEDIATE */
	RS_FOR_DELIVERY /* the queue's own level or mode */
} rs_purpose;

/* Fill the session's error in, and return RS_FAILED. */
extern rs_result rs_session_no_memory(rs_session *session);

/* ------------------------------------------------------ looking at a table */

typedef struct rs_column
{
	const char *name;
	const char *type; /* as declared */
	bool is_generated;
	bool is_nullable;
} rs_column;

/* What a driver sees of a table; memory is the arena's. */
typedef struct rs_look
{
	const char *schema;    /* as statements are to name it */
	const char *name;      /* as the engine spells it */
	const char *full_name; /* as our tables have it, where that is not name; else NULL */
	bool only;             /* a plain table: rows of tables that inherit from it are not its */
	rs_column *columns;
	int column_count;
	int column_room;                /* of columns: rs_look_add's */
	bool id_is_unique;              /* by itself, always: no partial or deferred index */
	const char *claim_index;        /* its name, where claims are to be made to use it; or NULL */
	bool has_index[RS_INDEX_COUNT]; /* one that serves, where it is needed */
	bool payload_is_bytes;          /* bytes, not text, are what its column stores */
	bool headers_are_json;          /* PostgreSQL: of type json, not jsonb */
} rs_look;

/* What a driver says where it could not log in. */
#define RS_HINT_PASSWORD                                                                           \
	"The password is the URL's, or else the environment's: RUSTSTREAM_PASSWORD."

typedef struct rs_arena rs_arena; /* arena.c */

/* ----------------------------------------------------------------- handlers */

/* What a handler has answered. */
typedef struct rs_answer
{
	bool failed; /* an error: outcome does not count, and rs_session.error says which */
	bool undecodable;
	rs_outcome outcome;
	bool has_delay;
	int64_t delay; /* microseconds */
	char reason[1024];
} rs_answer;

/* ---------------------------------------------------------------- catalogs */

/*
 * The statements on our own tables, by what they do; the texts of
 * rs_portable_catalog (catalog_text.c) say which parameters they take and which columns
 * they return.  A driver gives those, or its own with the same meaning.
 */
typedef enum rs_catalog_statement
{
	RS_CATALOG_QUEUE,
	RS_CATALOG_QUEUE_UPDATE,
	RS_CATALOG_QUEUE_INSERT,
	RS_CATALOG_QUEUE_DELETE,
	RS_CATALOG_QUEUE_READERS,
	RS_CATALOG_SUBSCRIPTION,
	RS_CATALOG_SUBSCRIPTION_UPDATE,
	RS_CATALOG_SUBSCRIPTION_INSERT,
	RS_CATALOG_SUBSCRIPTION_DELETE,
	RS_CATALOG_SUBSCRIPTION_PAUSE,
	RS_CATALOG_SUBSCRIPTIONS,
	RS_CATALOG_FAILURE_INSERT,
	RS_CATALOG_FAILURE_PRUNE,
	RS_CATALOG_FAILURE_DELETE,
	RS_CATALOG_COUNTER_ADD,
	RS_CATALOG_COUNTER_INSERT,
	RS_CATALOG_COUNTER_DELETE,
	RS_CATALOG_WORKER_INSERT,
	RS_CATALOG_WORKER_SEEN,
	RS_CATALOG_WORKER_DELETE,
	RS_CATALOG_WORKER_PRUNE,
	RS_CATALOG_STATUS,
	RS_CATALOG_COUNT
} rs_catalog_statement;

extern const char *const rs_portable_catalog[RS_CATALOG_COUNT];

/* ------------------------------------------------------------------ a driver */

struct rs_plan;

typedef struct rs_driver
{
	const char *name; /* "sqlite"; the URL's scheme is url.c's business */
	rs_dialect dialect;

	/* Connect.  Only error is filled in where it fails; *session is NULL then. */
	rs_result (*open)(const rs_url *url, rs_session **session, rs_error *error);
	void (*close)(rs_session *session); /* rolls back what is open */
	void *(*native)(rs_session *session);

	/*
	 * Transactions.  rollback is called where none is open, too, and returns RS_LOST
	 * where the session cannot be trusted any more, else RS_DONE.  savepoint and rollback_to
	 * (both of ruststream_claim) are NULL where there is no row lock form.
	 */
	rs_result (*begin)(rs_session *session, rs_purpose purpose, const rs_table *table);
	rs_result (*commit)(rs_session *session);
	rs_result (*rollback)(rs_session *session);
	rs_result (*savepoint)(rs_session *session);
	rs_result (*rollback_to)(rs_session *session);

	/*
	 * Execute one statement with its values, as many as it has parameters.  row may be
	 * NULL.  *affected: rows returned, or else rows found (not changed); may be NULL.
	 */
	rs_result (*execute)(rs_session *session, const rs_command *command, const rs_value *values,
						 int count, rs_row_callback row, void *arg, int64_t *affected);
	/* The plan has gone: nothing that was kept prepared is needed any more. */
	void (*forget_statements)(rs_session *session);

	/* The database's running clock, microseconds since 1970 UTC. */
	rs_result (*now)(rs_session *session, int64_t *now);
	/* A time as parameters and columns have it, and back; a token's is as the column stores it. */
	void (*format_time)(int64_t time, bool is_token, char buffer[RS_TIME_SIZE + 8]);
	bool (*parse_time)(const char *text, size_t length, int64_t *time);

	/*
	 * Claim, inside a transaction: each row goes to the callback as id, attempt (as before the
	 * claim), headers, payload.  NULL: the one statement of RS_OP_CLAIM_*, which does all.
	 * Otherwise guards, locking reads and stamps are the driver's, by rs_plan_run.  values[]
	 * is by rs_parameter, with now, token, group and limit set.
	 */
	rs_result (*claim)(rs_session *session, struct rs_plan *plan, rs_value *values,
					   rs_row_callback row, void *arg);

	/*
	 * The same for candidates of the advisory lock form, values[] with now, group and limit: id,
	 * key, and the partition key.  NULL: the one statement of RS_OP_CANDIDATES.
	 */
	rs_result (*candidates)(rs_session *session, struct rs_plan *plan, rs_value *values,
							rs_row_callback row, void *arg);

	/*
	 * Inside the transaction that takes a candidate with a partition key, both keys being held,
	 * values[] with id, now, group and partition key: is it the first of its partition key that is
	 * due?  NULL: RS_OP_TAKE_* asks.
	 */
	rs_result (*is_head)(rs_session *session, struct rs_plan *plan, rs_value *values,
						 bool *is_head);

	/* Advisory keys of this session: without waiting; *locked says whether it could be had. */
	rs_result (*lock_key)(rs_session *session, const char *key, bool *locked);
	void (*unlock_key)(rs_session *session, const char *key);
	bool (*key_is_held)(rs_session *session, const char *key);
	/* Before the first key: whether keys can work here at all; NULL: they always can. */
	rs_result (*prepare_keys)(rs_session *session);

	/* Look at a table; RS_FAILED with RUSTSTREAM_NOT_FOUND where there is none. */
	rs_result (*look)(rs_session *session, const rs_table *table, rs_arena *arena, rs_look *look);

	/*
	 * Whether a subscription that is bound can be served by this engine and through this
	 * connection; *warning is a constant that is to be told, or NULL.  NULL: every one can.
	 */
	rs_result (*check_plan)(rs_session *session, const struct rs_plan *plan, const char **warning);

	/*
	 * Check the SQL handler as far as that can be without running it, and run it.  What it does
	 * wrong is answer->failed with session->error filled in and RS_DONE; RS_TRANSIENT and
	 * RS_LOST as ever.  The delivery is what a callback would see; id and payload are as
	 * the database gave them.  A batch's has no id, and its payload is an array in JSON.
	 */
	rs_result (*check_handler)(rs_session *session, const char *handler);
	rs_result (*call_handler)(rs_session *session, const char *handler,
							  const ruststream_delivery *delivery, const rs_value *id,
							  const rs_value *payload, bool transactional, rs_answer *answer);
	/*
	 * A callback has failed: was it for a transient failure of its connection, or the loss of it,
	 * or (RS_FAILED) something else?  May be NULL: something else.
	 */
	rs_result (*judge_failure)(rs_session *session);
	/*
	 * After a handler that is in no transaction of ours: has it left one of its own open?  Then the
	 * state that such a failure has; else NULL.
	 */
	const char *(*left_open)(rs_session *session);
	/* Around a callback or program of the user's: what it must not do is refused.  May be NULL. */
	void (*guard_handler)(rs_session *session, bool on, bool transactional);
	/*
	 * After a transactional handler, before the settlement: fire deferred constraints; RS_FAILED
	 * where they, or a transaction that the handler has ended, make it fail.  May be NULL.
	 */
	rs_result (*check_writes)(rs_session *session);
	/* From another thread: cancel what runs, if anything. */
	void (*interrupt)(rs_session *session);

	/*
	 * Idle: return after ms milliseconds, when stop_fd becomes readable, or when there may be
	 * something new.
	 */
	rs_result (*wait)(rs_session *session, int stop_fd, int64_t ms);

	const char *const *catalog; /* RS_CATALOG_COUNT statements; NULL among them: the portable one */
	/* Make our tables, or bring them up to date. */
	rs_result (*install)(rs_session *session, bool with_wal, ruststream_notice_callback notice,
						 void *arg);
	/* Which version they are of; 0: there are none, or their making has been broken off. */
	rs_result (*find_version)(rs_session *session, int64_t *version);
} rs_driver;

#ifdef RS_WITH_SQLITE
extern const rs_driver rs_sqlite_driver;
#endif
#ifdef RS_WITH_MYSQL
extern const rs_driver rs_mysql_driver;
#endif
#ifdef RS_WITH_POSTGRES
extern const rs_driver rs_postgres_driver;
#endif

#endif /* RUSTSTREAM_DRIVER_H */
