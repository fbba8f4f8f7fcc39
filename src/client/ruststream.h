/*-------------------------------------------------------------------------
 *
 * ruststream.h
 *	  Any table of SQLite, MySQL, MariaDB or PostgreSQL as a transactional task
 *	  queue: the client library.  This header is its reference manual.
 *
 * A minimum:
 *
 *		ruststream *db;
 *		ruststream_worker *worker;
 *
 *		if (ruststream_open("sqlite:app.db", &db) != RUSTSTREAM_OK ||
 *			ruststream_worker_open(db, "mailer", send_mail, NULL, &worker) != RUSTSTREAM_OK ||
 *			ruststream_worker_run(worker, RUSTSTREAM_DRAIN) != RUSTSTREAM_OK)
 *			fprintf(stderr, "%s\n", ruststream_message(db));
 *		ruststream_worker_close(worker);
 *		ruststream_close(db);
 *
 * What holds for every call
 * -------------------------
 *
 * Errors	A call that can fail returns RUSTSTREAM_OK (0) or another code of
 *			ruststream_code, and leaves a message, often a hint, on the handle.
 *			They last until the next call with that handle.  No call exits,
 *			prints, raises a signal, or leaves a transaction of ours open.
 *			Beside what its comment names, a call that asks the database may
 *			return RUSTSTREAM_UNAVAILABLE, _NOT_INSTALLED, _NOT_FOUND for a name
 *			that is not there, _BUSY, _DATABASE, _SYSTEM and _NO_MEMORY; one
 *			that is given a worker or handle of a call that failed is not allowed.
 * Memory	Strings and structures that you pass in are copied where they are
 *			needed beyond the call.  Strings that a call or a callback gives
 *			you belong to the library, and last as long as its comment says.
 *			Where memory runs out a call returns RUSTSTREAM_NO_MEMORY and has
 *			changed nothing.
 * Threads	A handle is one connection, and is used by one thread at a time, with
 *			the worker that was opened on it.  Different handles are independent.
 *			ruststream_worker_stop, ruststream_worker_interrupt and
 *			ruststream_worker_counts alone may be called from any thread, while the
 *			worker is open, and the first from a signal handler.  A
 *			worker has threads of its own (for leases); they block all signals and
 *			call nothing of yours.
 * Losses	Where the connection is lost, calls with the handle return
 *			RUSTSTREAM_UNAVAILABLE from then on: close it and open another one.  A worker
 *			connects again by itself.
 * Units	Times are in milliseconds, lengths in bytes, text is UTF-8.  A pointer
 *			that may be NULL says so; otherwise it may not.
 * Zero		In the structures that you fill in, zero (NULL, false) means "not
 *			given", so clear them first: ruststream_queue queue = {0};
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_H
#define RUSTSTREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Around declarations that C++ shall find as C's. */
#ifdef __cplusplus
#define RUSTSTREAM_BEGIN_C                                                                         \
	extern "C"                                                                                     \
	{
#define RUSTSTREAM_END_C }
#else
#define RUSTSTREAM_BEGIN_C
#define RUSTSTREAM_END_C
#endif

#if defined(__GNUC__)
#define RUSTSTREAM_API __attribute__((visibility("default")))
#else
#define RUSTSTREAM_API
#endif

RUSTSTREAM_BEGIN_C

/* A handle: one database, one connection. */
typedef struct ruststream ruststream;

/* A subscription at work, on a handle. */
typedef struct ruststream_worker ruststream_worker;

/* What a call returns. */
typedef enum ruststream_code
{
	RUSTSTREAM_OK = 0,
	RUSTSTREAM_NO_MEMORY = 1,
	RUSTSTREAM_MISUSE = 2,        /* an argument or a URL that cannot be meant */
	RUSTSTREAM_UNAVAILABLE = 3,   /* no such driver in this build, or no connection */
	RUSTSTREAM_NOT_INSTALLED = 4, /* the database has no tables of ours, or older or newer ones */
	RUSTSTREAM_NOT_FOUND = 5,     /* no such queue, subscription, table */
	RUSTSTREAM_REFUSED = 6,  /* a description or setting that cannot hold; the message says why */
	RUSTSTREAM_BUSY = 7,     /* the database stayed locked, or the file is served by a process
							  * that does not share it */
	RUSTSTREAM_DATABASE = 8, /* the database refused a statement */
	RUSTSTREAM_SYSTEM = 9    /* the operating system refused a call */
} ruststream_code;

/* The library's version, such as "0.1"; a constant. */
RUSTSTREAM_API const char *ruststream_version(void);

/*
 * Which engines this build serves, separated by spaces: "sqlite mysql postgres",
 * or fewer of them; a constant.
 */
RUSTSTREAM_API const char *ruststream_drivers(void);

/* ---------------------------------------------------------------- handles */

/*
 * Open a database.
 *
 *	url		sqlite:PATH, sqlite:///absolute/path
 *				?mode=ro|rw|rwc			rw: the file must exist (rwc makes it)
 *				&busy_timeout=MS		how long a lock is waited for, 10000 unless given
 *				&foreign_keys=on|off	on unless given
 *			mysql://user@host:port/database
 *				?socket=PATH			instead of the host
 *				&tls=off|on|verify		off unless given; on: encrypted or refused
 *				&tls_ca=PATH
 *				&connect_timeout=SECONDS	10 unless given
 *			postgres://user@host:port/database?parameter=value
 *			Characters may be written as %XX.  A password may be part of the URL, or
 *			come from the environment variable RUSTSTREAM_PASSWORD; it is in no message.
 *	handle	set in any case but RUSTSTREAM_NO_MEMORY (NULL), so that the
 *			message can be read: close it, whatever the call returned
 *
 * Returns RUSTSTREAM_MISUSE for what is no URL, RUSTSTREAM_UNAVAILABLE where the
 * database cannot be opened, is too old, or its driver is not in this build.
 */
RUSTSTREAM_API ruststream_code ruststream_open(const char *url, ruststream **handle);

/* Close a handle, after its worker; NULL is allowed.  An open transaction is rolled back. */
RUSTSTREAM_API void ruststream_close(ruststream *handle);

/*
 * The code, message, hint and state (the SQLSTATE, or SQLite's name of the error) of
 * the last call with this handle.  Never NULL; empty where there is none.
 */
RUSTSTREAM_API ruststream_code ruststream_error(const ruststream *handle);
RUSTSTREAM_API const char *ruststream_message(const ruststream *handle);
RUSTSTREAM_API const char *ruststream_hint(const ruststream *handle);
RUSTSTREAM_API const char *ruststream_state(const ruststream *handle);

/* What is told while something works: a warning, a failed delivery, a row released. */
typedef void (*ruststream_notice_callback)(void *arg, const char *text);

/*
 * Have notices told.  The text lasts for the callback.  The callback may not use
 * the handle.  NULL: nobody is told, which is the beginning.
 */
RUSTSTREAM_API void ruststream_on_notice(ruststream *handle, ruststream_notice_callback callback,
										 void *arg);

/*
 * The same for each step of each delivery, in the words of the contract:
 * "BEGIN", "CLAIM 1", "HANDLER", "SETTLE ack", "COMMIT" and so on.
 */
RUSTSTREAM_API void ruststream_on_trace(ruststream *handle, ruststream_notice_callback callback,
										void *arg);

/*
 * The native connection: a sqlite3 *, MYSQL * or PGconn *, the handle's own.  Inside a
 * handler it is in the delivery's transaction, if the subscription is transactional.
 */
RUSTSTREAM_API void *ruststream_connection(ruststream *handle);

/* --------------------------------------------------------------- catalogs */

/*
 * Make our tables and views in the database (ruststream_queue,
 * ruststream_subscription, ruststream_failure, ruststream_status, ..), or bring them up
 * to this version, keeping their rows; nothing where they are.  All or nothing, but on MySQL and
 * MariaDB what was broken off is completed by the next call.
 *
 * On SQLite a notice recommends write-ahead logging where it is off; with_wal turns it on.
 */
RUSTSTREAM_API ruststream_code ruststream_install(ruststream *handle, bool with_wal);

/*
 * What the columns of a table are for.  Each role but the id is a switch for one behaviour
 * (docs/client.md).  A column for the lease gives the lease form, a lock key
 * the advisory lock form; neither is the row lock form, which SQLite has not.
 */
typedef struct ruststream_queue
{
	const char *table;
	const char *id_column;
	const char *group_column; /* this and the following may be NULL */
	const char *priority_column;
	const char *partition_key_column;
	const char *retry_after_column;
	const char *attempt_column;
	const char *processed_at_column;
	const char *locked_until_column;
	const char *headers_column;
	const char *payload_column;
	bool fifo;
	const char *lock_key;  /* such as "account-{account}" */
	const char *isolation; /* "read committed", ..; not on SQLite */
	const char *mode;      /* "deferred", "immediate", "exclusive"; SQLite alone */
	bool create_index;     /* make the indexes that claims need, where they are missing */
} ruststream_queue;

/*
 * Describe a table, or describe it anew.  RUSTSTREAM_NOT_FOUND: there is no such table;
 * RUSTSTREAM_REFUSED says what is wrong with the description or the table.  A missing index is no
 * error but a notice, which says how to make it.
 */
RUSTSTREAM_API ruststream_code ruststream_describe(ruststream *handle,
												   const ruststream_queue *queue);

/*
 * Forget a description; the table stays.  RUSTSTREAM_NOT_FOUND where there is none,
 * RUSTSTREAM_REFUSED while a subscription reads it.
 */
RUSTSTREAM_API ruststream_code ruststream_forget(ruststream *handle, const char *table);

typedef struct ruststream_subscription
{
	const char *name;
	const char *queue;   /* a table that is described */
	const char *handler; /* SQL text, or the name of a stored procedure or function */
	const char *program; /* or a command for /bin/sh; neither: ruststream_worker_open's callback */
	const char *group_name;    /* the group it reads; the subscription's name unless given */
	const char *transactional; /* "on", "off"; NULL: off for programs and batches, else on */
	int workers;               /* of the command line; 1 unless given */
	int max_attempts;          /* needs a dead letter and the role attempt */
	const char *dead_letter;   /* a group, or a table where there are no groups */
	const char *on_error;      /* "retry", "retry_after", "discard", "dead_letter" */
	const char *on_decode_error;
	const char *decode;      /* what payloads must be: "any" (unless given), "text", "json" */
	int64_t retry_delay;     /* 1000 unless given */
	const char *backoff;     /* "exponential" unless given, "linear", "constant" */
	int64_t max_retry_delay; /* 3600000 unless given */
	int64_t lease;           /* 30000 unless given; rounded up to whole seconds */
	int64_t timeout;         /* of a handler; none unless given */
	int64_t poll_interval;   /* 1000 unless given */
	int batch_size;          /* how many rows at most a handler takes at once, 1 to 10000: it is one
							  * of batches then, and not transactional.  0: one row at a time */
} ruststream_subscription;

/*
 * Make a subscription, or replace the one of that name.  RUSTSTREAM_NOT_FOUND where the
 * queue is not described, RUSTSTREAM_REFUSED says what cannot hold.  Workers that run take it
 * up within their poll interval.
 */
RUSTSTREAM_API ruststream_code ruststream_subscribe(ruststream *handle,
													const ruststream_subscription *subscription);

/*
 * Forget, pause or resume a subscription; RUSTSTREAM_NOT_FOUND where there is none of that
 * name.  Deliveries in work end as they would have.
 */
RUSTSTREAM_API ruststream_code ruststream_unsubscribe(ruststream *handle, const char *name);
RUSTSTREAM_API ruststream_code ruststream_pause(ruststream *handle, const char *name);
RUSTSTREAM_API ruststream_code ruststream_resume(ruststream *handle, const char *name);

/* --------------------------------------------------------------- publishing */

typedef struct ruststream_task
{
	const char *table;   /* a table that is described */
	const void *payload; /* NULL: none */
	size_t payload_length;
	const char *group_name;
	const char *headers; /* an object of strings in JSON */
	const char *partition_key;
	int64_t priority; /* counts where has_priority */
	bool has_priority;
	int64_t delay; /* due so much later */
} ruststream_task;

/*
 * Insert a row; a plain INSERT does as well.  Inside a handler, with the worker's own handle,
 * it is part of the delivery and appears exactly with its ack.
 *
 *	id, size	receives the row's id as text, cut to size; may be NULL, 0
 *
 * RUSTSTREAM_NOT_FOUND where the table is not described, RUSTSTREAM_REFUSED where it has not
 * the role of something that is given, or headers are not what they should be.  On
 * SQLite another handle cannot publish while a delivery that has written is open:
 * RUSTSTREAM_BUSY, after the busy timeout.
 */
RUSTSTREAM_API ruststream_code ruststream_publish(ruststream *handle, const ruststream_task *task,
												  char *id, size_t size);

/* ----------------------------------------------------------------- looking */

/* One subscription.  The strings last for the callback; counts stop at 10,000 rows. */
typedef struct ruststream_status
{
	const char *subscription;
	const char *queue;
	const char *state; /* "running", "paused", "no worker", "broken: .." */
	int64_t workers;
	int64_t workers_wanted;
	int64_t ready;
	int64_t waiting;
	int64_t in_work;    /* lease form; -1: not known */
	int64_t dead;       /* -1: no dead letter */
	bool capped;        /* a count stopped at its limit */
	const char *oldest; /* since when the oldest ready row is due, or NULL */
	int64_t delivered;
	int64_t failed;
	const char *last_error;    /* or NULL */
	const char *last_error_at; /* or NULL */
} ruststream_status;

typedef void (*ruststream_status_callback)(void *arg, const ruststream_status *status);

/*
 * Each subscription, or the one of that name (name may be NULL), by name;
 * RUSTSTREAM_NOT_FOUND where there is none of that name.  One that cannot work as it is
 * is told of as "broken: ..".  The callback may not use the handle.
 */
RUSTSTREAM_API ruststream_code ruststream_look(ruststream *handle, const char *name,
											   ruststream_status_callback callback, void *arg);

/*
 * One subscription's name and how many workers it wants, for whoever starts them; -1: only a
 * callback can serve it.  The name lasts for the callback, which may not use the handle.
 */
typedef void (*ruststream_subscription_callback)(void *arg, const char *name, int workers);

RUSTSTREAM_API ruststream_code ruststream_each_subscription(
	ruststream *handle, ruststream_subscription_callback callback, void *arg);

/* ----------------------------------------------------------------- working */

/* What a handler answers. */
typedef enum ruststream_outcome
{
	RUSTSTREAM_ACK,
	RUSTSTREAM_RETRY,
	RUSTSTREAM_RETRY_AFTER, /* after the subscription's backoff, or ruststream_delay */
	RUSTSTREAM_DISCARD,
	RUSTSTREAM_DEAD_LETTER,
	RUSTSTREAM_FAIL,       /* an error, which on_error settles; ruststream_reason says which.  Where
							* the connection's last error was transient (SQLITE_BUSY, a deadlock), all
							* is rolled back and begun anew instead */
	RUSTSTREAM_UNDECODABLE /* the payload is not what it should be: on_decode_error settles */
} ruststream_outcome;

/* A row in work, for the length of its handler. */
typedef struct ruststream_delivery
{
	ruststream *handle; /* publishing through it is part of the delivery; other calls with it
						 * return RUSTSTREAM_MISUSE, and to close it does nothing */
	const char *subscription;
	const char *queue;   /* as ruststream_queue names it: on PostgreSQL with its schema */
	const char *id;      /* as text; bytes as \x and their hexadecimal digits */
	int64_t attempt;     /* 1 at the first delivery */
	const char *headers; /* NULL: none */
	const void *payload; /* NULL: none; followed by a zero byte that is not counted */
	size_t payload_length;
	void *connection; /* as ruststream_connection: in the delivery's transaction, which is not
					   * the handler's to end, or, if not transactional, in none */
} ruststream_delivery;

/*
 * A handler.  It may block for as long as it likes: its lease is extended meanwhile.  It
 * answers an outcome, and undoes nothing itself: unless it answers ack, or the
 * subscription is not transactional, its writes are rolled back.
 */
typedef ruststream_outcome (*ruststream_handler)(ruststream_delivery *delivery, void *arg);

/*
 * A handler of batches: the rows of one claim, in claim order, as many as were due.
 *
 * There are count deliveries, one a row; the array and all that is in it last for the call.  Each
 * has the same connection, which is in the claim's transaction in the row lock form, and in none
 * in the others.
 *
 * It answers each row by ruststream_answer, and returns the outcome of those that it has not
 * answered.  If it returns RUSTSTREAM_FAIL it has failed as a whole, whatever it has answered:
 * each row is settled by on_error and its own attempt, and, in the row lock form, its writes are
 * undone.  Otherwise they are kept, whatever the outcomes; so a row that is answered
 * RUSTSTREAM_FAIL is settled by on_error, and nothing is undone for it.
 *
 * It runs in the thread that runs the worker, and may block for as long as it likes, as the lease
 * of each row is extended meanwhile.
 */
typedef ruststream_outcome (*ruststream_batch_handler)(ruststream_delivery *const *deliveries,
													   size_t count, void *arg);

/* Inside a handler of batches: answer one row.  The last answer counts. */
RUSTSTREAM_API void ruststream_answer(ruststream_delivery *delivery, ruststream_outcome outcome);

/* Inside a handler, before it returns: how long RUSTSTREAM_RETRY_AFTER waits. */
RUSTSTREAM_API void ruststream_delay(ruststream_delivery *delivery, int64_t delay);

/* The same: why it answers what it answers, kept in ruststream_failure; cut to 1023 bytes. */
RUSTSTREAM_API void ruststream_reason(ruststream_delivery *delivery, const char *reason);

/* The same: was it asked to end early, by its timeout or by ruststream_worker_interrupt? */
RUSTSTREAM_API bool ruststream_is_cancelled(const ruststream_delivery *delivery);

/*
 * Open a worker of a subscription.  A handle has one at a time.
 *
 *	handler		called with arg; NULL: the subscription's own handler or program
 *	worker		set to NULL where it fails
 *
 * RUSTSTREAM_NOT_FOUND where there is no such subscription, RUSTSTREAM_REFUSED where it
 * cannot work as it is, RUSTSTREAM_MISUSE where the handle has a worker; RUSTSTREAM_BUSY where
 * another process serves advisory lock queues of the same SQLite file.
 */
RUSTSTREAM_API ruststream_code ruststream_worker_open(ruststream *handle, const char *subscription,
													  ruststream_handler handler, void *arg,
													  ruststream_worker **worker);

/*
 * The same for a subscription with a batch_size: RUSTSTREAM_REFUSED where there is none, as
 * ruststream_worker_open with a callback is where there is one.
 *
 *	handler		called with arg; NULL: the subscription's own handler or program
 */
RUSTSTREAM_API ruststream_code ruststream_worker_open_batch(ruststream *handle,
															const char *subscription,
															ruststream_batch_handler handler,
															void *arg, ruststream_worker **worker);

/*
 * Say that the handler writes through the delivery's transaction: RUSTSTREAM_REFUSED
 * where the subscription is not transactional.
 */
RUSTSTREAM_API ruststream_code ruststream_worker_needs_transaction(ruststream_worker *worker);

/*
 * Deliver one row, or one batch, if any is due.
 *
 *	delivered	whether one was; may be NULL
 *
 * What a handler or settlement does wrong is the row's failure, not this call's: it returns
 * another code than RUSTSTREAM_OK only where the worker cannot go on.
 */
RUSTSTREAM_API ruststream_code ruststream_worker_step(ruststream_worker *worker, bool *delivered);

typedef enum ruststream_run
{
	RUSTSTREAM_FOREVER, /* until it is stopped, through lost connections and broken
						   subscriptions */
	RUSTSTREAM_DRAIN    /* until nothing is due */
} ruststream_run;

/*
 * Deliver row after row, or batch after batch.  Returns RUSTSTREAM_OK when it was stopped, or
 * drained; what else a drain may return is what a step may.  Forever, whatever goes wrong is told
 * as a notice and waited out.
 */
RUSTSTREAM_API ruststream_code ruststream_worker_run(ruststream_worker *worker, ruststream_run how);

/* Claim nothing more; a handler that runs is let finish.  From any thread or signal handler. */
RUSTSTREAM_API void ruststream_worker_stop(ruststream_worker *worker);

/*
 * The same, and end the handler that runs, where that is possible: SQL is cancelled, a
 * program killed, a callback must look at ruststream_is_cancelled.  Its writes are undone and
 * its row is released, and a notice says so.  From any thread.
 */
RUSTSTREAM_API void ruststream_worker_interrupt(ruststream_worker *worker);

/* How many rows this worker has delivered, and how many of these deliveries had failed. */
RUSTSTREAM_API void ruststream_worker_counts(const ruststream_worker *worker, int64_t *delivered,
											 int64_t *failed);

/* Close a worker; NULL is allowed.  Not from within its handler. */
RUSTSTREAM_API void ruststream_worker_close(ruststream_worker *worker);

RUSTSTREAM_END_C

#endif /* RUSTSTREAM_H */
