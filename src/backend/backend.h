/*-------------------------------------------------------------------------
 *
 * backend.h
 *	  What the files of the backend room share.  See src/README.md for the map
 *	  of the room, its processes and its invariants.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_BACKEND_H
#define RUSTSTREAM_BACKEND_H

#include "postgres.h"

#include "executor/spi.h"
#include "fmgr.h"
#include "nodes/pg_list.h"
#include "port/atomics.h"
#include "storage/latch.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "utils/portal.h"
#include "utils/timestamp.h"

#include "core/core.h"

/* ------------------------------------------------------------------ init.c */

extern bool rs_workers_enabled;    /* ruststream.workers */
extern int rs_max_workers;         /* ruststream.max_workers */
extern int rs_crash_restart_delay; /* ruststream.crash_restart_delay, ms */
extern bool rs_trace;              /* ruststream.trace */

/* Was the library loaded at server start?  Without it there are no workers. */
extern bool rs_preloaded(void);

/* --------------------------------------------------------------- catalog.c */

/* The oids of our own objects in this database. */
typedef struct RsObjects
{
	Oid schema;
	Oid owner; /* of the extension: writes our catalogs and the failures */
	Oid queue; /* table ruststream.queue */
	Oid subscription;
	Oid failure_history;
	Oid outcome_type;
	Oid delivery_type;
} RsObjects;

/*
 * Look them up (cached, with invalidation).  Needs a transaction.  Where the
 * extension is not installed: error 55000, or NULL if missing_ok.
 */
extern const RsObjects *rs_objects(bool missing_ok);

/* A queue's description, bound to the table as it is now. */
typedef struct RsQueue
{
	Oid relid;
	rs_table table;                   /* what the core sees */
	AttrNumber attnum[RS_ROLE_COUNT]; /* 0: no column plays the role */
	Oid type[RS_ROLE_COUNT];          /* the column's type; InvalidOid if none */
	Oid row_type;
	TupleDesc shape; /* the table's columns, as they were when this was bound */
	bool wake;       /* a trigger tells us of inserts */
} RsQueue;

/* What the handler takes as its first argument. */
typedef enum RsHandlerInput
{
	RS_INPUT_ROW,    /* the row, as the table's composite type */
	RS_INPUT_ROWS,   /* the rows of a batch, as an array of that type */
	RS_INPUT_PAYLOAD /* the payload, decoded */
} RsHandlerInput;

typedef struct RsHandler
{
	char *name; /* schema.fn(argtypes), quoted: what messages say */
	Oid function;
	RsHandlerInput input;
	Oid input_type;
	bool takes_delivery;   /* ruststream.delivery as second argument */
	bool takes_deliveries; /* .. or an array of it: one for each row of a batch */
	bool is_procedure;     /* called so that it may COMMIT; not transactional */
	bool returns_void;     /* else ruststream.outcome, of a procedure in its last argument */
	bool answers_each;     /* .. or an array of it: one for each row of a batch */
	bool strict;
} RsHandler;

/*
 * A subscription as loaded.  Everything in it lives in one memory context and
 * is thrown away and loaded afresh when an invalidation says that something
 * it was built from may have changed (rs_catalog_generation).
 */
typedef struct RsSubscription
{
	MemoryContext context;
	int32 id;
	char *name;
	Oid owner;
	char *group_name; /* NULL where the table has no groups, or each is read */
	bool every_group; /* of a fifo queue, each in its own order */
	RsQueue queue;
	RsHandler handler;
	rs_policy policy;
	int64 lease;                /* how long a claim lasts, microseconds; lease form */
	int64 timeout;              /* of a handler, microseconds; 0: none */
	Oid dead_letter_table;      /* InvalidOid: none, or a group */
	char *dead_letter_group;    /* NULL: none, or a table */
	rs_destination destination; /* filled where there is such a table */
	bool paused;
	bool copied; /* made in another database: quiet until resumed */
	int workers;
	int batch_size;            /* how many rows a claim takes at most; 0: one, and no batch */
	int64 poll_interval;       /* microseconds */
	int deliveries_per_commit; /* so many may share a claim; row lock form: and a commit */
	int64 max_commit_wait;     /* microseconds of work, then it commits, or lets go of the rest */
} RsSubscription;

/*
 * Goes up whenever something a loaded subscription was built from may have
 * changed: its catalog rows, the table, the handler, a role.  Compare after
 * AcceptInvalidationMessages (every transaction start does that).
 */
extern uint64 rs_catalog_generation(void);

/* Installed by init.c: the invalidation callbacks. */
extern void rs_catalog_init(void);

/*
 * Load and check a subscription, by id or by name.  Needs a transaction and a
 * snapshot.  Allocates in a new context below parent.  Errors: 42704 where
 * there is none (NULL if missing_ok); for a subscription that cannot work (the
 * table or a column is gone, the handler does not fit or may not be executed,
 * the owner may not read, update or delete, no index serves the claims, ..)
 * the error that says so, with a hint.
 */
extern RsSubscription *rs_subscription_load(int32 id, bool missing_ok, MemoryContext parent);
extern int32 rs_subscription_id(const char *name, bool missing_ok);

/*
 * Refuse to deliver at a level that does not see its own lease; the default of
 * this session counts where none is declared.
 */
extern void rs_subscription_check_level(const RsSubscription *subscription);

/*
 * Read a queue's description and bind it to its table; all its strings in the
 * current context.  Errors: 42704 where the table is not attached, else what
 * has gone wrong with it since.
 */
extern void rs_queue_load(Oid relid, RsQueue *queue);

/* Does the table still have the columns that it was bound with?  It is locked. */
extern bool rs_queue_has_its_shape(const RsQueue *queue);

/*
 * The indexes that the claims of this queue need and do not have: a list of
 * CREATE INDEX statements, in the current context.
 */
extern List *rs_queue_missing_indexes(const RsQueue *queue);

/* Error where this owner is a superuser, and the table belongs to somebody who is not. */
extern void rs_check_superuser(Oid owner, Oid relid);

/* Act as the owner of our catalogs; leave with the values it stored. */
extern void rs_become_catalog_owner(Oid *save_userid, int *save_sec_context);

/* --------------------------------------------------------------- execute.c */

/* The values a statement may take; those it does not take are ignored. */
typedef struct RsValues
{
	Datum value[RS_PARAM_COUNT];
	bool isnull[RS_PARAM_COUNT];
	Oid type[RS_PARAM_COUNT];
} RsValues;

typedef struct RsPlans RsPlans;

/*
 * The prepared statements of one queue, prepared at first use and kept; they
 * live in a context of their own below parent.  queue and destination must
 * outlive them.  rs_plans_free also frees SPI's plans.
 */
extern RsPlans *rs_plans_create(const RsQueue *queue, const rs_destination *destination,
								MemoryContext parent);
extern void rs_plans_free(RsPlans *plans);

/* Set a value; type is needed for id, headers and payload only (else 0). */
extern void rs_values_init(RsValues *values);
extern void rs_value_set(RsValues *values, rs_parameter parameter, Datum value, Oid type);

/*
 * Execute an operation's statements in order, as the current user, under our
 * own planner settings.  Must be connected to SPI; each statement sees the
 * effects of those before it, and the first that touches no row is the last.
 * Returns how many rows the last one touched; an operation that has no
 * statement for this table returns -1.
 *
 * rs_query leaves the last result in SPI_tuptable, for the caller to free: in
 * drain SPI's memory lives as long as the CALL, however many deliveries.
 */
extern int64 rs_execute(RsPlans *plans, rs_operation operation, const RsValues *values);
extern int64 rs_query(RsPlans *plans, rs_operation operation, const RsValues *values);

/* A cursor over an operation of one statement that selects; for SPI_cursor_fetch. */
extern Portal rs_open_cursor(RsPlans *plans, rs_operation operation, const RsValues *values);

/* --------------------------------------------------------------- planner.c */

/* Installed by init.c: plans our statements so that they never scan or sort a queue. */
extern void rs_planner_init(void);

/*
 * The text of the statement of ours that is being executed, or NULL.  A statement that
 * is planned meanwhile is known by this address.
 */
extern const char *rs_planner_own_text;

/* ----------------------------------------------------- deliver.c, handler.c */

/* One row in work, or a batch of them. */
typedef struct RsDelivery
{
	Datum id; /* in its column's type, in the delivery's context */
	char *id_text;
	int64 attempt; /* as it stood before the claim */
	Datum headers;
	bool headers_isnull;
	Datum input; /* the row or the raw payload */
	bool input_isnull;
	int64 priority;
	bool priority_isnull;
	bool was_delayed; /* had a retry_after */
	TimestampTz due;  /* .. this one */
	TimestampTz claimed_at;
	Oid place_table; /* row lock form: where the row is, as it was claimed */
	ItemPointerData place;

	/*
	 * A delivery that stands for a batch, being like its first row: the rows
	 * that the handler takes.  rows is 0 for a delivery of one row.
	 */
	int rows;
	struct RsDelivery **row;

	/* Of which line it is, where the queue has lines and it is in one. */
	bool has_line;
	Datum line; /* the group, or the partition key, in the delivery's context */

	/*
	 * Lease form: the token that the claim wrote, and the one that an extension
	 * may have put in its place.  Both are up to date once the extensions have
	 * been stopped (holds_lease is false again).  The row may hold one of them for
	 * longer: is_leased says so until it is settled, given back, or somebody else's.
	 */
	bool holds_lease;
	int lease_number; /* in shared memory, from 1; 0: nothing extends it */
	bool is_leased;
	TimestampTz token;
	TimestampTz announced;

	/* Advisory lock form: what this session has locked; NULL: nothing (any more). */
	char *key;
	char *guard; /* of its partition key */

	/* Why it did not succeed, for a dead letter: set before it is settled. */
	const char *reason; /* NULL: not known */
	int sqlstate;       /* of the error; 0: it was answered */
} RsDelivery;

/* Ways of holding a transaction: a worker's own, or drain's through SPI. */
typedef struct RsSession
{
	void (*begin)(rs_isolation isolation); /* afterwards: in a transaction,
											* connected to SPI, active snapshot */
	void (*commit)(void);
	void (*rollback)(void);                             /* also after an error, from any depth */
	void (*clean)(void);                                /* between two deliveries: remove what the
														 * handler left in the session */
	void (*drop_cursors)(void);                         /* those of the handler, before a commit */
	void (*loaded)(const RsSubscription *subscription); /* may be NULL */
	bool rethrows_cancel;                               /* a cancel is the caller's, no failure */
	bool is_process;                                    /* of ours, the session being its own */

	/*
	 * Within a transaction that several deliveries share, after one of them:
	 * remove what the handler left in the session, as far as that can be done
	 * here.  False: there is something that only clean will remove.  The guards of
	 * lines are no handler's, though the claim has added them to what the session has:
	 * so after such a claim comes remember_claimed, which keeps that in the given
	 * context until clean; may be NULL.
	 */
	bool (*clean_within)(void);
	void (*remember_claimed)(MemoryContext context);

	/*
	 * The transaction that a procedure begins in, and may end: no SPI, no
	 * snapshot, no savepoint.  Its end also undoes what it has SET.
	 */
	void (*begin_procedure)(void);
	void (*commit_procedure)(void);
	void (*rollback_procedure)(void);
	int trace_level; /* NOTICE or LOG */
} RsSession;

/* A row that is left alone for a while.  Beyond so many the worker itself waits. */
#define RS_MAX_HELD 1000

typedef struct RsHeld
{
	Datum id; /* a copy in the engine's context */
	TimestampTz until;
} RsHeld;

typedef struct RsLines RsLines;
#define RS_MAX_TRANSIENT 100

/* A row, and its transient failures in a row; they do not end with another row's success. */
typedef struct RsTransient
{
	char *id;
	int count;
} RsTransient;

/* lines.c */

typedef struct RsEngine
{
	const RsSession *session;
	int nest_level; /* of settings, while in a transaction */
	MemoryContext context;
	MemoryContext delivery_context; /* reset per delivery */
	int32 subscription_id;
	RsSubscription *subscription;
	uint64 generation; /* of the catalog when it was loaded */
	RsPlans *plans;

	/*
	 * The rows that failed last in a way that did not delay them, and until
	 * when this worker leaves each alone: nothing loops hot.
	 */
	int held_count;
	RsHeld held[RS_MAX_HELD];
	Oid held_type;          /* of their ids */
	TimestampTz rest_until; /* claims themselves fail, or too many rows: no claim before */

	/*
	 * The rows whose deliveries have failed transiently of late, the latest last, and
	 * how often in a row; and how often the claim itself has.
	 */
	RsTransient transient[RS_MAX_TRANSIENT];
	int transient_count;
	int transient_claims;

	/*
	 * The row that was ended last, from which the next claim may go on, and
	 * until when; see deliver.c.
	 */
	MemoryContext mark_context;
	int16 id_length; /* of the id's type */
	bool id_byval;
	char id_align;
	bool has_mark;
	Datum mark_id;
	int64 mark_priority;
	bool mark_priority_isnull;
	TimestampTz mark_until;

	/* Of batches: no more rows than this, since one could not be settled; 0: no such limit. */
	int batch_limit;

	/*
	 * A queue of lines: what the claim knows of them; whether some guard was held by
	 * somebody else in this claim, and in how many claims in a row that came to
	 * nothing; and whether the row that is claimed leaves none for other workers.
	 */
	RsLines *lines;
	bool was_blocked;
	int blocked_claims;
	bool is_alone;

	bool has_recorded_failures; /* the history may want pruning */

	/* See lane_lease_several.c: the rows of its last claim, where some have not been begun. */
	struct RsWork *claimed; /* in commit_context; NULL: there are none */
	int claimed_count;
	int begun; /* so many of them have been */

	/* See shared_commit.c. */
	MemoryContext commit_context; /* reset per shared commit, and per claim of several leases */
	int alone;                    /* so many deliveries go one at a time first */
	double handling_time;         /* of late, microseconds a handler; negative: not known */
	int subtransactions;          /* of a delivery, at most, in the last such commit */

	int64 delivery_limit; /* a call of rs_deliver delivers no more than these; 0: any */
	int delivered;        /* by the last one, where it has delivered */

	TimestampTz next_due; /* when a row is known to come due; 0: not known */
} RsEngine;

typedef enum RsProgress
{
	RS_PROGRESS_DELIVERED, /* a row came to its end or back to the queue */
	RS_PROGRESS_CLAIMED,   /* several rows are leased: the next calls deliver them */
	RS_PROGRESS_TRANSIENT, /* rolled back for a transient failure: claim anew */
	RS_PROGRESS_NOTHING,   /* nothing is due; next_due may be set */
	RS_PROGRESS_HELD,      /* nothing is due but rows to be left alone */
	RS_PROGRESS_QUIET      /* paused, copied or gone: do not deliver */
} RsProgress;

extern void rs_engine_init(RsEngine *engine, const RsSession *session, int32 subscription_id,
						   MemoryContext parent);
extern void rs_engine_free(RsEngine *engine);

/* Set the level of the transaction that has just begun. */
extern void rs_set_isolation(rs_isolation isolation);

/*
 * Claim, deliver and settle one row, or several in one commit; engine->delivered
 * says how many.  Called outside any transaction of ours.
 * Errors, with everything rolled back: what keeps the subscription itself from
 * working, and a cancel where the session rethrows it.
 */
extern RsProgress rs_deliver(RsEngine *engine);

/* The delivery whose handler is running in this backend, or NULL. */
extern const RsDelivery *rs_delivery_in_handler;
extern const RsSubscription *rs_subscription_in_handler;

/* What a handler answered. */
typedef struct RsAnswer
{
	rs_outcome outcome;
	bool has_delay;
	int64 delay;           /* microseconds */
	char *reason;          /* or NULL */
	struct RsAnswer *each; /* of a batch, one for each row; NULL: this one is for all */
} RsAnswer;

/* What a handler is wanted for. */
typedef struct RsHandlerUse
{
	const RsQueue *queue;
	bool transactional;
	bool batch; /* never transactional */
} RsHandlerUse;

/*
 * Bind and check the handler of a subscription (registration, and each load).
 * function is the one that was bound before, by whatever name it goes now, or
 * InvalidOid; where it is gone, the one of its name that fits is taken in its
 * place.  Else text, "schema.fn" or "fn(argtype, ..)", says which.  Checks that
 * it fits its use, and that owner may execute it.
 */
extern void rs_handler_resolve(const char *text, Oid function, const RsHandlerUse *use, Oid owner,
							   RsHandler *handler);

/*
 * Decode the row for the handler, and call it, in the current transaction.
 * Errors of the first are decode errors; of the second the handler's.  A row
 * of a batch is decoded by itself first, and then the batch put together.
 */
extern void rs_handler_decode(const RsSubscription *subscription, RsDelivery *delivery);
extern RsAnswer rs_handler_call(const RsSubscription *subscription, const RsDelivery *delivery);

/* What the handlers' callers share: its second argument, and what it has answered. */
extern Datum rs_handler_delivery(const RsSubscription *subscription, const RsDelivery *delivery);
extern RsAnswer rs_handler_answer(const RsHandler *handler, const RsDelivery *delivery, Datum datum,
								  bool isnull);

/* One outcome as a value; never NULL. */
extern RsAnswer rs_handler_outcome(const RsHandler *handler, Datum outcome);

/* ------------------------------------------------------- handler_batch.c */

/* What is wrong with a batch handler's first argument, as a sentence; NULL: it fits. */
extern char *rs_batch_input_problem(Oid type, const RsQueue *queue);

/* The rows of a batch as one array, in claim order. */
extern Datum rs_batch_input(const RsSubscription *subscription, const RsDelivery *batch);

/* A handler's second argument that tells of each row: an array of ruststream.delivery. */
extern Datum rs_batch_deliveries(const RsSubscription *subscription, const RsDelivery *batch);

/*
 * One outcome for each row, from an array that is not NULL.  Errors: 2202E not
 * as many as there are rows, 22004 a NULL among them.
 */
extern RsAnswer rs_batch_answer(const RsHandler *handler, const RsDelivery *batch, Datum array);

/* ------------------------------------------------------------- interrupt.c */

/* Was the error raised by the server's answer to a cancel, and not by a user's code? */
extern bool rs_is_interrupt(const ErrorData *error);

/* A row's id, hashed: what is shown of a long one is clipped. */
extern uint64 rs_id_hash(const char *id);

/* ------------------------------------------------------------- procedure.c */

/*
 * Call a handler that is a procedure, decoded input given, so that it may end
 * transactions and begin new ones: in one that the session has begun for it, and
 * ending in another.
 */
extern RsAnswer rs_procedure_call(const RsSubscription *subscription, const RsDelivery *delivery);

/* --------------------------------------------------------------- failure.c */

/*
 * Record a failure of a delivery in ruststream.failure_history, in the current
 * transaction, as the owner of our catalogs.  Needs SPI and a snapshot.
 */
extern void rs_failure_record(const RsSubscription *subscription, const RsDelivery *delivery,
							  const ErrorData *error);

/*
 * Drop what is beyond the newest 1,000 of each subscription, in the current
 * transaction, connecting to SPI by itself.
 */
extern void rs_failure_prune(void);

/* ------------------------------------------------------------- user_code.c */

/*
 * Would an update of this column of a table, which the caller has open and locked
 * for it, run code that is not the server's: triggers, policies, rules,
 * constraints?  Locks partitions likewise, without waiting; true also where it
 * cannot.
 */
extern bool rs_update_runs_code(Relation relation, const char *column);

/* ----------------------------------------------------------------- stats.c */

#define RS_COUNTERS(X)                                                                             \
	X(RS_COUNT_DELIVERIES, "deliveries")                                                           \
	X(RS_COUNT_ACKED, "acked")                                                                     \
	X(RS_COUNT_RETRIED, "retried")                                                                 \
	X(RS_COUNT_DELAYED, "delayed")                                                                 \
	X(RS_COUNT_DISCARDED, "discarded")                                                             \
	X(RS_COUNT_DEAD_LETTERED, "dead_lettered")                                                     \
	X(RS_COUNT_FAILED, "failed")                                                                   \
	X(RS_COUNT_DECODE_FAILED, "decode_failed")                                                     \
	X(RS_COUNT_SETTLE_FAILED, "settle_failed")                                                     \
	X(RS_COUNT_TRANSIENT, "transient")                                                             \
	X(RS_COUNT_LEASE_LOST, "lease_lost")

typedef enum RsCounter
{
	RS_COUNTERS(RS_ENUM_MEMBER) RS_COUNTER_COUNT
} RsCounter;

/* What a worker is doing, as stat_worker shows it. */
#define RS_WORKER_STATES(X)                                                                        \
	X(RS_WORKER_STARTING, "starting")                                                              \
	X(RS_WORKER_CLAIMING, "claiming")                                                              \
	X(RS_WORKER_IDLE, "idle")                                                                      \
	X(RS_WORKER_DELIVERING, "delivering")                                                          \
	X(RS_WORKER_HOLDING, "holding")

typedef enum RsWorkerState
{
	RS_WORKER_STATES(RS_ENUM_MEMBER) RS_WORKER_STATE_COUNT
} RsWorkerState;

/*
 * All of these do nothing where the library was not preloaded, so that the
 * engine need not care.  rs_stats_attach takes a slot for this backend (a worker takes
 * the slot its supervisor gave it) and finds the subscription's counters;
 * rs_stats_detach gives both back, and is called at backend exit as well.
 */
extern void rs_stats_attach(const RsSubscription *subscription);
extern void rs_stats_detach(void);
extern void rs_stats_count(RsCounter counter);
extern void rs_stats_state(RsWorkerState state);
extern void rs_stats_delivery_begin(const RsDelivery *delivery);
extern void rs_stats_delivery_end(void);

/* Why a subscription does not work, for status; NULL: it does. */
extern void rs_stats_broken(int32 subscription_id, const char *reason);

/* ---------------------------------------------------------------- status.c */

/*
 * What the current user may see of a subscription: figures are for pg_monitor
 * and for the owner of the table as well, ids of rows and texts of errors for
 * members of the subscription's owner.
 */
typedef enum RsVisibility
{
	RS_SEES_NOTHING,
	RS_SEES_FIGURES,
	RS_SEES_ALL
} RsVisibility;

extern RsVisibility rs_subscription_visibility(int32 id);

/* ------------------------------------------------------------------ wake.c */

/* Wake an idle worker of the queue once this transaction has committed. */
extern void rs_wake_at_commit(Oid queue);

/* Has this transaction, as far as we know, inserted into the queue? */
extern bool rs_wake_is_marked(Oid queue);

/* Have the supervisor of this database look again once it has committed. */
extern void rs_wake_supervisor_at_commit(void);

/* A failure has been recorded: once it has committed the history may want pruning. */
extern void rs_wake_pruner_at_commit(void);

/* Wake one idle worker of this queue now, other than ourselves. */
extern void rs_wake_neighbour(Oid queue);

/*
 * Say that this worker is about to look for a row and may be woken: before
 * the claim, so that a row committed after the claim's snapshot finds it.
 */
extern void rs_wake_idle(bool idle);

/*
 * Has this worker been woken, or told to stop, since rs_wake_idle(true)?  To be
 * asked before it waits on its latch, for a wait for a lock during the claim
 * may have reset that.
 */
extern bool rs_wake_pending(void);

/* --------------------------------------------------------------- process.c */

/* Handlers of signals, unblocked; that of SIGINT is the process's own. */
extern void rs_process_signals(pqsigfunc on_cancel);

/*
 * Connect this process as an owner, and be that owner: settings of the role or
 * of the database must not make somebody else of us.
 */
extern void rs_connect_as_owner(Oid database, Oid owner);

/* Its name in pg_stat_activity. */
extern void rs_process_name(const char *name);

/*
 * For processes that run nobody's code: what a role's or a database's own settings may not
 * change for their transactions.
 */
extern void rs_process_settings(void);

/*
 * Answer what came while the process waited; the second ends it without a word where it was
 * terminated.  And wait outside any transaction, at most until a point in time, for the latch.
 */
extern void rs_process_interrupts(void);
extern void rs_process_interrupts_or_exit(int exit_code);
extern void rs_process_wait(TimestampTz until);

/* --------------------------------------------- launcher.c, supervisor.c, .. */

/* What a worker needs to know, in its bgw_extra. */
typedef struct RsWorkerArgs
{
	Oid database;
	Oid owner;
	int32 subscription;
	int slot;
	uint64 cookie;
} RsWorkerArgs;

/*
 * Take over the slot that the supervisor allocated; false: it is ours no more,
 * so exit.  Comes first in a worker, before it connects: then the slot is given
 * back last, when the process no longer counts as connected to its database.
 */
extern bool rs_slot_attach(const RsWorkerArgs *args);

/*
 * Is this worker to leave, in an orderly way, when no delivery is in work?
 * Its latch is set when that is asked for.
 */
extern bool rs_slot_stop_requested(void);

/*
 * Remove from the session of a process of ours whatever a user's code may have
 * left in it beyond its transaction.  Outside any transaction.
 */
extern void rs_session_clean(void);

extern PGDLLEXPORT void rs_launcher_main(Datum arg);
extern PGDLLEXPORT void rs_supervisor_main(Datum arg);
extern PGDLLEXPORT void rs_worker_main(Datum arg);
extern PGDLLEXPORT void rs_autonomous_main(Datum arg);

/* Wait event of an idle process, by name from PostgreSQL 17 on. */
extern uint32 rs_wait_event_idle(void);
extern uint32 rs_wait_event_hold(void);
extern uint32 rs_wait_event_autonomous(void);

/* ------------------------------------------------------------ failpoint.c */

/*
 * Named failure points, for tests; release builds do not contain them.  The setting
 * ruststream.failpoint = 'name:n' kills this process (SIGKILL) the n-th time
 * it reaches that point; 'name:n:stop' stops it there (SIGSTOP).
 */
#ifdef RUSTSTREAM_FAILPOINTS
extern void rs_failpoint_init(void);
extern void rs_failpoint_reached(const char *name);
#define RS_FAILPOINT(name) rs_failpoint_reached(name)
#else
#define rs_failpoint_init() ((void) 0)
#define RS_FAILPOINT(name) ((void) 0)
#endif

#endif /* RUSTSTREAM_BACKEND_H */
