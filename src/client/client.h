/*-------------------------------------------------------------------------
 *
 * client.h
 *	  What the files of this room share; driver.h is the door to the engines.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_CLIENT_H
#define RUSTSTREAM_CLIENT_H

#include <pthread.h>
#include <stdatomic.h>

#include "client/driver.h"

#define RS_MILLISECOND INT64_C(1000)
#define RS_SECOND INT64_C(1000000)

/* ---------------------------------------------------------------- arena.c */

/*
 * Memory that goes away all at once: one arena a lifetime.  What cannot be had is
 * NULL, and remembered, so that a series of calls need be checked but once.
 */
typedef struct rs_block rs_block;

struct rs_arena
{
	rs_block *blocks;
	bool is_exhausted; /* a request since the last reset came to nothing */
};

extern void *rs_alloc(rs_arena *arena, size_t size);                           /* zeroed */
extern char *rs_copy(rs_arena *arena, const char *text);                       /* NULL gives NULL */
extern char *rs_copy_bytes(rs_arena *arena, const char *bytes, size_t length); /* terminated */
extern char *rs_copy_integer(rs_arena *arena, int64_t number);                 /* its digits */
extern char *rs_print(rs_arena *arena, const char *format, ...)
	__attribute__((format(printf, 2, 3)));
extern rs_value rs_copy_value(rs_arena *arena, const rs_value *value);
/* What a column holds as text, an engine's number, too; NULL where it is NULL. */
extern char *rs_text_of(rs_arena *arena, const rs_value *value);
/*
 * An array of count items, each of size bytes, with room for one more: the array itself, or a
 * larger copy; *room, 0 at first, goes along.  NULL: out of memory, and the array is as it was.
 */
extern void *rs_grow(rs_arena *arena, void *items, int count, int *room, size_t size);
/* Keeps its first block for the next round. */
extern void rs_arena_reset(rs_arena *arena);
extern void rs_arena_free(rs_arena *arena);

/* ------------------------------------------------------------------ url.c */

/* Read a URL; what it allocates is the arena's. */
extern bool rs_url_parse(const char *text, rs_arena *arena, rs_url *url, rs_error *error);

/* --------------------------------------------------------------- client.c */

struct ruststream
{
	rs_arena arena; /* the URL */
	rs_url url;
	const rs_driver *driver;
	rs_session *session;
	rs_error error;
	ruststream_notice_callback notice;
	void *notice_arg;
	ruststream_notice_callback trace;
	void *trace_arg;
	ruststream_worker *worker; /* at most one */
	bool in_handler;           /* a callback runs, in the delivery's transaction */
};

/*
 * Each public call begins with this: the last one's error is over, there is a session, and no
 * handler runs in it, unless that is allowed.
 */
extern ruststream_code rs_begin_call(ruststream *handle);
extern ruststream_code rs_begin_call_in_handler(ruststream *handle);
/* Take the session's error over, and return its code. */
extern ruststream_code rs_take_error(ruststream *handle);
extern ruststream_code rs_fail(ruststream *handle, ruststream_code code, const char *hint,
							   const char *format, ...) __attribute__((format(printf, 4, 5)));
/* The same with a problem that the core has found. */
extern ruststream_code rs_fail_problem(ruststream *handle, rs_problem problem);
extern ruststream_code rs_no_memory(ruststream *handle);
extern void rs_tell(ruststream *handle, const char *format, ...)
	__attribute__((format(printf, 2, 3)));
/* Have a session again, after one was lost. */
extern ruststream_code rs_reconnect(ruststream *handle);

/* Is it UTF-8?  What is not becomes "?", and a character that was cut at the end goes. */
extern bool rs_is_utf8(const char *text, size_t length);
extern void rs_make_utf8(char *text);

/* Microseconds of a clock that only goes on; for waits and leases, never for rows. */
extern int64_t rs_monotonic(void);
extern uint32_t rs_random(void);

/* -------------------------------------------------------------- install.c */

/* Our tables are there and of this version, or the handle's error says what is wrong. */
extern ruststream_code rs_check_installed(ruststream *handle);

/* Which version of our tables this library works with. */
#define RS_SCHEMA_VERSION 2

/* An engine's SQL; each text ends by writing into ruststream_version which version there is now. */
typedef struct rs_schema
{
	const char *tables; /* in a database that has none */
	/* [n]: from version n + 1 to the next.  What has been released stays as it is. */
	const char *upgrades[RS_SCHEMA_VERSION - 1];
} rs_schema;

/*
 * For drivers, whose install locks out others: make our tables where there are none, and bring
 * those of an earlier version up to date, keeping their rows; run executes a text of the schema.
 * RS_FAILED where there are those of a later version.
 */
extern rs_result rs_make_tables(rs_session *session, const rs_schema *schema,
								rs_result (*run)(rs_session *session, const char *text));
/* Commit where result is RS_DONE; else roll back, and keep the session's error. */
extern rs_result rs_commit_or_roll_back(rs_session *session, rs_result result);

/* ----------------------------------------------------------------- look.c */

/*
 * For drivers, as they look at a table: one more column, whose name and type are values of the
 * engine's catalog.  NULL where either is NULL or there is no memory.
 */
extern rs_column *rs_look_add(rs_look *look, rs_arena *arena, const rs_value *name,
							  const rs_value *type);
/* The column of that name; NULL: there is none. */
extern const rs_column *rs_look_find(const rs_look *look, const char *name, size_t length);

/* -------------------------------------------------------------- catalog.c */

/* One catalog statement; its values are positional. */
extern rs_result rs_catalog(rs_session *session, rs_catalog_statement statement,
							const rs_value *values, int count, rs_row_callback row, void *arg,
							int64_t *affected);

/* Now, as the catalogs' time columns have it. */
extern rs_result rs_now_text(rs_session *session, char buffer[RS_TIME_SIZE + 8]);

/* A queue's description; what it allocates is the arena's. */
extern ruststream_code rs_load_queue(ruststream *handle, const char *name, rs_arena *arena,
									 rs_table *table);

/* A subscription as our table has it; in the arena. */
typedef struct rs_subscription
{
	const char *name;
	const char *queue;
	const char *handler; /* or NULL */
	const char *program; /* or NULL */
	const char *group_name;
	const char *transactional; /* "on", "off" or NULL */
	int64_t workers;
	int64_t max_attempts;
	const char *dead_letter;
	const char *on_error;
	const char *on_decode_error;
	const char *decode;
	int64_t retry_delay; /* milliseconds, as the following */
	const char *backoff;
	int64_t max_retry_delay;
	int64_t lease;
	int64_t timeout;
	int64_t poll_interval;
	int64_t batch_size; /* 0: one row at a time */
	bool paused;
	const char *fingerprint; /* every setting in one text: has anything changed? */
} rs_subscription;

extern ruststream_code rs_load_subscription(ruststream *handle, const char *name, rs_arena *arena,
											rs_subscription *subscription);

/* ----------------------------------------------------------------- plan.c */

/* How many rows a batch may have. */
#define RS_MAX_BATCH 10000

typedef enum rs_decode
{
	RS_DECODE_ANY,
	RS_DECODE_TEXT,
	RS_DECODE_JSON
} rs_decode;

/*
 * A queue, or a subscription, bound to its table as it is now, with its statements.  Everything is
 * the arena's.
 */
typedef struct rs_plan
{
	rs_arena *arena;
	rs_table table;
	rs_look look;
	rs_destination destination;
	rs_subscription subscription; /* of a subscription's plan */
	rs_policy policy;
	const char *warning; /* a constant: what is allowed, but had better be known; or NULL */
	rs_decode decode;
	int64_t lease; /* microseconds, as the following; whole seconds */
	int64_t timeout;
	int64_t poll_interval;
	int batch_size; /* how many rows a claim takes at most; 0: one row at a time */
	rs_dialect dialect;
	rs_command *commands; /* RS_OPERATION_COUNT * RS_MAX_STATEMENTS, rendered at first use */
} rs_plan;

/*
 * Bind a description to its table, or a subscription to its queue; the errors say what does not
 * fit.  describing: a missing index is no error.
 */
extern ruststream_code rs_bind_queue(ruststream *handle, rs_plan *plan, const rs_table *table,
									 bool describing);
extern ruststream_code rs_bind_subscription(ruststream *handle, rs_plan *plan,
											const rs_subscription *subscription);

/* The statement that makes a missing index, in the arena; NULL where none is missing. */
extern const char *rs_missing_index(rs_plan *plan, rs_index index);

/* How many statements an operation has here, and one of them; NULL: out of memory. */
extern int rs_plan_count(const rs_plan *plan, rs_operation operation);
extern const rs_command *rs_plan_command(rs_plan *plan, rs_operation operation, int index);

/* Does any of its statements take this parameter?  Where it cannot be said, it does. */
extern bool rs_plan_takes(rs_plan *plan, rs_operation operation, rs_parameter parameter);

/* Execute statement number index with its share of values[], which is by rs_parameter. */
extern rs_result rs_plan_run(rs_session *session, rs_plan *plan, rs_operation operation, int index,
							 const rs_value *values, rs_row_callback row, void *arg,
							 int64_t *affected);

/* ---------------------------------------------------------------- watch.c */

/* The lease of a row in work. */
typedef struct rs_lease
{
	bool is_held;
	rs_value id; /* copied into id_text */
	char *id_text;
	size_t id_size;
	char token[RS_TIME_SIZE + 8];
	char announced[RS_TIME_SIZE + 8]; /* "": none */
	int64_t next_extension;           /* monotonic */
} rs_lease;

/*
 * The watch on a delivery: a thread beside the worker, with a connection of its own, that extends
 * its leases, one a row, and ends a handler that is past its timeout.
 *
 * A lease's token is announced here before it is written.  So at each moment the row holds
 * the token or the announced one, and a settlement, which stops the watch first
 * (rs_watch_stop), need not wait for an extension under way: that one finds neither when it comes,
 * and changes nothing.  A token whose writing had no clear end is tried again, and no other is
 * announced before that.
 */
typedef struct rs_watch
{
	pthread_mutex_t mutex; /* guards everything below */
	pthread_cond_t changed;
	pthread_t thread;
	bool is_started;
	bool quits;
	bool is_active;      /* a handler runs */
	uint64_t generation; /* which delivery */
	rs_lease *leases;    /* of this delivery, and room for those of larger ones */
	int lease_count;
	int lease_room;
	int held_count;       /* how many of them are held */
	int64_t lease;        /* microseconds */
	int64_t deadline;     /* monotonic, as the following; 0: none */
	int64_t sleeps_until; /* INT64_MAX: until it is called */
	bool timed_out;
	bool cancels;        /* the worker was interrupted */
	rs_session *session; /* the worker's: to be interrupted */
	rs_session *own;     /* the thread's, opened when it is first needed */
	const rs_url *url;
	const rs_driver *driver;
	rs_command extend; /* its text is copied */
	char *extend_text;
} rs_watch;

extern bool rs_watch_init(rs_watch *watch, ruststream *handle);
extern void rs_watch_destroy(rs_watch *watch);
/* A new plan: its statement of RS_OP_EXTEND, or NULL. */
extern bool rs_watch_prepare(rs_watch *watch, const rs_command *extend);
/* Begin a delivery; token may be NULL.  Returns false where no thread can be had. */
extern bool rs_watch_begin(rs_watch *watch, rs_session *session, const rs_value *id,
						   const char *token, int64_t lease, int64_t timeout);
/*
 * Begin the delivery of a batch: hold the leases of its rows, if their tokens say that they have
 * any, and number them.  The handler begins later.
 */
struct rs_work;
extern bool rs_watch_hold(rs_watch *watch, struct rs_work *const *rows, int count, int64_t lease);
extern bool rs_watch_handler_begins(rs_watch *watch, rs_session *session, int64_t timeout);
/* No more interruptions of the worker's session: the handler is over. */
extern void rs_watch_handler_ended(rs_watch *watch, bool *timed_out);
/* No more extensions of one of its leases; what the row may hold now. */
extern void rs_watch_stop(rs_watch *watch, int number, char token[RS_TIME_SIZE + 8],
						  char announced[RS_TIME_SIZE + 8]);
extern void rs_watch_cancel(rs_watch *watch);
/* Has the handler been asked to end? */
extern bool rs_watch_is_cancelled(rs_watch *watch);

/* -------------------------------------------------------------- program.c */

/* What a program gets for a batch, and what it has printed, which is the caller's to free. */
typedef struct rs_program_batch
{
	int rows;
	const char *input;
	size_t length;
	char *output; /* terminated; NULL: nothing */
} rs_program_batch;

/*
 * Run a program as the handler; what goes wrong is the answer's.  batch is NULL, or else the
 * delivery is like that of its first row.
 */
extern void rs_program_run(const char *program, const ruststream_delivery *delivery,
						   rs_program_batch *batch, rs_watch *watch, rs_answer *answer,
						   rs_error *error);

/* A number of seconds, up to a hundred years of them, is the answer's delay; what follows it. */
extern char *rs_program_delay(char *text, rs_answer *answer);

/* --------------------------------------------------------------- worker.c */

struct ruststream_worker
{
	ruststream *handle;
	char *name;
	ruststream_handler handler; /* NULL: the subscription's own */
	ruststream_batch_handler batch_handler;
	void *handler_arg;
	bool needs_transaction;

	rs_arena plan_arena;
	rs_plan plan;
	bool is_loaded;
	bool is_paused;
	bool has_handled; /* a handler has run in the session */

	rs_arena delivery_arena; /* reset before each delivery */
	rs_held held;
	rs_watch watch;
	int64_t last_lease; /* no two tokens of ours are the same */

	char *transient_id; /* the row that failed so last, and how often in a row */
	int transient_count;
	int batch_limit; /* after a batch that could not be settled as a whole; 0: none */
	int miss_count;  /* claims in a row that have found candidates and could have none of them */

	atomic_bool stops;
	atomic_bool interrupts;
	int stop_pipe[2]; /* readable once it is to stop */

	int64_t counts[8];         /* not yet in the catalog: RS_COUNT_* */
	_Atomic int64_t delivered; /* read by any thread, as the following */
	_Atomic int64_t failed;
	char id[96];     /* host, pid and number */
	char state[256]; /* "": running; else why not */
	bool is_registered;
	int64_t next_due;   /* the database's clock */
	int64_t next_flush; /* monotonic, as the following */
	int64_t next_look;
	int64_t next_seen;
};

/* What became of an attempt to deliver. */
typedef enum rs_progress
{
	RS_PROGRESS_NOTHING,
	RS_PROGRESS_HELD, /* nothing, beside rows that are left alone */
	RS_PROGRESS_DELIVERED,
	RS_PROGRESS_TRANSIENT, /* try again */
	RS_PROGRESS_RELEASED,  /* interrupted: the row was given back */
	RS_PROGRESS_BROKEN     /* the handle's error says why */
} rs_progress;

/* ruststream_counter's columns, in order. */
enum
{
	RS_COUNT_ACKED,
	RS_COUNT_RETRIED,
	RS_COUNT_DELAYED,
	RS_COUNT_DISCARDED,
	RS_COUNT_DEAD_LETTERED,
	RS_COUNT_FAILED,
	RS_COUNT_LEASE_LOST,
	RS_COUNT_TRANSIENT
};

extern void rs_worker_trace(const ruststream_worker *worker, rs_step step, const char *suffix);

/* -------------------------------------------------------------- deliver.c */

/* Claim a row, or a batch, deliver it and settle it. */
extern rs_progress rs_deliver(ruststream_worker *worker);

/*
 * What a claim that has found nothing has come to.  It has come to its end, which is the end of
 * those in a row that came to none.
 */
extern rs_progress rs_found_nothing(ruststream_worker *worker);

/* How often a worker looks again at once, where others were quicker to take every candidate. */
#define RS_MAX_MISSES 10

/* Where a delivery is when something goes wrong. */
typedef enum rs_stage
{
	RS_STAGE_CLAIM,
	RS_STAGE_HANDLER,
	RS_STAGE_SETTLE
} rs_stage;

/* One delivery; its memory is the worker's delivery_arena. */
typedef struct rs_work
{
	ruststream_worker *worker;
	rs_stage stage;
	ruststream_delivery delivery;
	bool has_row;
	rs_value id;
	rs_value payload;
	int64_t attempt;
	char token[RS_TIME_SIZE + 8]; /* "": none */
	char announced[RS_TIME_SIZE + 8];
	bool holds_lease; /* the watch extends it .. */
	int lease_number; /* .. by this number */
	const char *key;  /* advisory keys that are held, or NULL */
	const char *partition;
	rs_answer answer;
	bool is_answered; /* a row of a batch: by itself */
	bool has_error;
	bool is_told;   /* the error is one of a whole batch */
	bool is_over;   /* a row of a batch: it is not to be touched any more */
	rs_error error; /* the handler's, or what made the settlement fail */
} rs_work;

extern rs_result rs_work_begin(rs_work *work, rs_purpose purpose);
extern rs_result rs_work_commit(rs_work *work);
extern void rs_work_rollback(rs_work *work);
extern void rs_work_fail(rs_work *work, const char *state, const char *hint, const char *format,
						 ...) __attribute__((format(printf, 4, 5)));
extern void rs_unlock_keys(rs_work *work);

/* A delivery of the worker's, without a row. */
extern rs_work rs_work_of(ruststream_worker *worker);

/* The parts of a claim: a token, the row that a statement returns (arg is its work), and a result.
 */
extern rs_result rs_set_token(rs_work *work, rs_value *values, int64_t now);
extern bool rs_keep_row(void *arg, const rs_value *columns, int count);
/* The claim's own result: the row may not fit into memory. */
extern rs_result rs_check_row(rs_work *work, rs_result result);
/*
 * A look for candidates, in a transaction of its own: begin it, and say in values what its
 * statement takes (now_text keeps the time); and end it, with the trace of how many it has found.
 */
extern rs_result rs_begin_look(rs_work *work, int limit, rs_value *values,
							   char now_text[RS_TIME_SIZE + 8]);
extern rs_result rs_end_look(rs_work *work, rs_result result, int found);
/* Take the row whose key is locked, unless it has been settled meanwhile. */
extern rs_result rs_take(rs_work *work, const rs_value *id, const rs_value *line);
/* What a delivery is settled by, as far as its handler goes. */
extern rs_settlement rs_decide(rs_work *work);
/* One step of what remains after the handler. */
extern rs_result rs_take_step(rs_work *work, rs_step step, const rs_settlement *settlement,
							  bool *lost);
/* It is settled: account for it. */
extern void rs_conclude(rs_work *work, const rs_settlement *settlement);

/* ---------------------------------------------------------------- batch.c */

/*
 * The rows of one claim, handled by one call.  It is one delivery where it is about the handler,
 * and one for each row where it is about a row: claim, decoding, lease, key, settlement, failure.
 */
typedef struct rs_batch
{
	rs_work call; /* the handler's: its answer, and its error */
	rs_work **rows;
	int count;
	rs_work **given; /* those that the handler takes: the others did not decode */
	ruststream_delivery **deliveries;
	int given_count;
	int settling; /* row lock form: the row whose settlement is under way, or -1 */
} rs_batch;

extern rs_progress rs_deliver_batch(ruststream_worker *worker);

/* ---------------------------------------------------------- batch_claim.c */

/* Claim the batch's rows, in the transaction that has begun. */
extern rs_result rs_batch_claim(rs_batch *batch);
/*
 * Advisory lock form: look for candidates, in a transaction, and lock the keys of the first of
 * them, one row a key.  *count: how many there were.
 */
extern rs_result rs_batch_lock(rs_batch *batch, int *count);
/* Take the rows whose keys are locked, and leave in the batch those that could be. */
extern rs_result rs_batch_take(rs_batch *batch);

/* -------------------------------------------------------- batch_handler.c */

/*
 * Call the handler with the rows that it is given, watched.  RS_DONE: it has answered (each row's
 * answer is in its work), or failed as a whole (batch->call.has_error); else what is wrong is
 * more than a failure.
 */
extern rs_result rs_handle_batch(rs_batch *batch);

/* --------------------------------------------------------------- handle.c */

/*
 * Decode the row and call the handler, watched.  RS_DONE: it has answered, or failed
 * by itself (work->has_error); else what is wrong is more than a failure.
 */
extern rs_result rs_handle(rs_work *work);
/* Is the payload what the subscription says that it must be?  Else the work has failed. */
extern bool rs_decode_payload(rs_work *work);
/*
 * A handler that is in no transaction of ours fails where it has left one of its own open: what it
 * wrote there would be lost, and ours could not begin.  RS_LOST: it could not be rolled back.
 */
extern rs_result rs_check_left(rs_session *session, rs_answer *answer);
/* What a callback has answered; false: no outcome, but a failure. */
extern bool rs_take_outcome(rs_answer *answer, ruststream_outcome outcome);

/* ------------------------------------------------------------- settle_row.c */

typedef enum rs_settled
{
	RS_SETTLED,
	RS_SETTLED_LOST,  /* the row is not ours any more */
	RS_SETTLED_FAILED /* the session's error says why */
} rs_settled;

/* Carry a settlement out, with its record of the failure, in the current transaction. */
extern rs_settled rs_settle_row(rs_work *work, const rs_settlement *settlement, rs_result *result);
extern rs_result rs_record_failure(rs_work *work);
extern void rs_values_of(rs_work *work, rs_value values[RS_PARAM_COUNT]);
extern void rs_count_settlement(rs_work *work, const rs_settlement *settlement);
extern void rs_report(rs_work *work);
extern void rs_hold(rs_work *work);
/* Let go what has waited long enough (INT64_MAX: everything); when the next one will have. */
extern int64_t rs_let_go(ruststream_worker *worker, int64_t now);
extern void rs_stop_lease(rs_work *work);

/* --------------------------------------------------------------- origin.c */

/* The headers of a row that becomes a dead letter now; false: out of memory. */
extern bool rs_origin(const rs_work *work, int64_t now, rs_value *origin);

/* -------------------------------------------------------------- recover.c */

/* Everything is rolled back already; work->error says why. */
extern rs_progress rs_recover(rs_work *work, rs_result result);
extern void rs_lose(rs_work *work);
/* How far a settlement in a fresh transaction came. */
typedef enum rs_afresh
{
	RS_AFRESH_SETTLED,
	RS_AFRESH_TAKEN, /* somebody else has the row: recorded the failure alone */
	RS_AFRESH_FAILED
} rs_afresh;

/* The parts of a recovery, for the rows of a batch. */
extern bool rs_have_new_session(ruststream_worker *worker);
extern rs_afresh rs_settle_afresh(rs_work *work, const rs_settlement *settlement, bool records);
extern void rs_settle_by_policy(rs_work *work, rs_cause cause);
/* Count a transient failure of this row; NULL: of a claim.  Has it had its share? */
extern bool rs_count_transient(ruststream_worker *worker, const char *id);
/* An orderly stop: the row goes back as it is. */
extern void rs_give_back(rs_work *work);

#endif /* RUSTSTREAM_CLIENT_H */
