/*-------------------------------------------------------------------------
 *
 * shared.h
 *	  What our processes share: the layout of our shared memory, and the doors
 *	  to it.  Included by the files of the process part only; the engine asks
 *	  through backend.h.
 *
 * One lock, RsShared.lock, guards whatever the comments below do not exempt.
 * It is held for the length of a scan over a few small arrays, never across an
 * allocation, a catalog lookup or a wait, and no insert and no delivery takes
 * it: the wake-up path and the counters use atomics, what a worker shows of its
 * delivery uses a change count, and each lease has a spinlock.  The one
 * exception: to signal a heartbeat, when a lease ends or begins while an
 * extension is in its way.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_SHARED_H
#define RUSTSTREAM_SHARED_H

#include "backend/backend.h"
#include "backend/lease.h"

#include "storage/condition_variable.h"
#include "storage/spin.h"

#define RS_MAX_DATABASES 256
#define RS_MAX_SUBSCRIPTIONS 1024
#define RS_MAX_HEARTBEATS 256
#define RS_SESSION_SLOTS 32 /* for drain, beyond those of the workers */
#define RS_MAX_CRASHED 16   /* deliveries remembered over a crash */

#define RS_ID_BYTES 128
#define RS_REASON_BYTES 256
#define RS_QUEUE_NAME_BYTES (2 * NAMEDATALEN + 8)

/* The rate of deliveries: six buckets of ten seconds. */
#define RS_RATE_BUCKETS 6
#define RS_RATE_BUCKET_USEC INT64CONST(10000000)

/*
 * A database that has, may have or is losing a supervisor.  Everything is
 * guarded by RsShared.lock, save for "failures".
 *
 * wanted, the supervisor's identity and closing make up the state:
 *
 *	wanted			somebody has to look at the database (again): the launcher by
 *					starting a supervisor, or the one that runs
 *	cookie == 0		no supervisor; else one is registered or, once pid is set, runs
 *	closing > 0		a command needs the database empty: nothing may start or attach
 *
 * An entry is free, and its dboid invalid, when none of the three holds.
 */
typedef struct RsDatabase
{
	Oid dboid;
	bool wanted;
	int closing; /* how many transactions keep it closed */

	uint64 cookie;
	pid_t pid;
	Latch *latch;
	TimestampTz started_at;
	bool settled; /* it has found the extension */

	/* Restarts of a supervisor that keeps failing. */
	int restarts;
	TimestampTz next_start;

	/* Failures recorded since the history was last pruned. */
	pg_atomic_uint32 failures;
} RsDatabase;

/*
 * What shared memory knows of a process that a supervisor starts: the head of a
 * worker's slot, and of a heartbeat.  Guarded by RsShared.lock, but for stop.
 *
 * It is allocated by the supervisor, taken over by the process, and freed when that
 * exits, or by the supervisor if it never came.  A process is identified by (entry,
 * cookie): as it frees its entry under the lock while it exits, whoever finds the
 * cookie in place while holding the lock may signal the pid and hits no other process.
 */
typedef struct RsEntry
{
	bool is_heartbeat; /* constant: which of the two it is the head of */
	uint64 cookie;     /* 0: free */
	pid_t pid;         /* 0: not attached yet */
	Oid database;
	Oid owner; /* whom it is connected as */
	Latch *latch;
	TimestampTz attached_at;
	pg_atomic_uint32 stop; /* 1: leave once nothing is in work, or no lease held */
} RsEntry;

/*
 * What a process of ours works for: one slot a worker, and spare ones so that
 * a session which drains can be seen as well.  The workers' slots come first.
 */
typedef struct RsSlot
{
	RsEntry entry;

	/*
	 * Guarded by RsShared.lock.  A publisher reads database, subscription,
	 * queue and latch without it, once it has seen idle set: the owner of the
	 * slot sets idle after them.  A slot that changes hands meanwhile costs a
	 * wake-up in vain.
	 */
	Oid queue;
	int32 subscription;
	char subscription_name[NAMEDATALEN];
	char queue_name[RS_QUEUE_NAME_BYTES]; /* for the log, after a crash */

	/*
	 * Which run of a handler is under way, and whether it has been cancelled
	 * (interrupt.c); 0: none.  Set and cleared by the process of the slot, after and
	 * before it writes which row that is.  Cancelled by compare and exchange, with
	 * RsShared.lock held.
	 */
	pg_atomic_uint32 run;

	pg_atomic_uint32 idle; /* 1: set my latch when a row arrives */

	/*
	 * Written by the process of the slot alone, without a lock; odd while it
	 * writes.  A reader copies, and starts again if it saw an odd count or
	 * the count has moved.
	 */
	pg_atomic_uint32 changecount;
	RsWorkerState state;
	TimestampTz since;
	bool delivering;
	char id[RS_ID_BYTES]; /* perhaps clipped */
	uint64 id_hash;       /* of the whole of it */
	int64 attempt;
	int rows; /* of which this is the first */
	TimestampTz delivery_since;
	TimestampTz lease_until; /* as the claim stamped it; 0: no lease */
	int lease_number;        /* of what extends it, from 1; 0: the slot's own, if anything */
} RsSlot;

/*
 * A heartbeat, one a database and owner: extends the leases of that owner's
 * deliveries there.
 */
typedef struct RsHeartbeat
{
	/*
	 * A delivery that takes a lease reads database, owner and latch without the
	 * lock, after it has written the lease: what it misses is an entry that
	 * changes hands, and a heartbeat that starts looks at all leases.
	 */
	RsEntry entry;

	pg_atomic_uint32 holds;    /* goes up with each lease that is taken */
	pg_atomic_uint32 busy;     /* 1: extending a lease, until looks_at at most */
	pg_atomic_uint64 looks_at; /* when it looks at the leases again by itself */
} RsHeartbeat;

#define RS_NO_SLOT (-1)

/*
 * The lease of a row that a slot's process has in work.  RsShared.lease has one
 * for each slot, in the order of the slots, and behind them those that batches
 * share: such a one is a slot's from its reservation until its row is settled.
 * All of it is guarded by its mutex.
 *
 *	slot				whose it is; RS_NO_SLOT: nobody's.  A slot's own never changes
 *	held				set by the process of the slot, which clears it to settle
 *	extender != 0		the heartbeat of this cookie has an extension under way,
 *						which writes "announced"; else the two tokens are equal
 *	lost				an extension has found neither token in the row
 */
typedef struct RsLease
{
	slock_t mutex;
	int slot;
	bool held;
	bool lost;
	bool blocked;  /* the last extension came to nothing */
	bool reported; /* .. and that was logged */
	uint64 serial; /* which row's: goes up with each */
	uint64 extender;
	Oid database;
	Oid owner;
	Oid queue;
	TimestampTz token;
	TimestampTz announced;
	int64 length;    /* microseconds */
	TimestampTz due; /* when it is to be extended (again) */
	char id[RS_LEASE_ID_BYTES];
} RsLease;

/*
 * Counters of a subscription.  The key and the texts are guarded by
 * RsShared.lock; the numbers are atomics.
 */
typedef struct RsCounters
{
	Oid database; /* InvalidOid: free */
	int32 subscription;
	TimestampTz reset_at;
	char broken[RS_REASON_BYTES];  /* a worker's reason; empty: none */
	char problem[RS_REASON_BYTES]; /* why the supervisor cannot start workers */

	pg_atomic_uint64 count[RS_COUNTER_COUNT];
	pg_atomic_uint64 rate[RS_RATE_BUCKETS]; /* bucket number << 32 | deliveries */
} RsCounters;

/* A delivery that was in work when the server crashed. */
typedef struct RsCrashed
{
	Oid database;
	pid_t pid;
	char subscription_name[NAMEDATALEN];
	char queue_name[RS_QUEUE_NAME_BYTES];
	char id[RS_ID_BYTES];
	int64 attempt;
} RsCrashed;

/* The last crash, kept by the postmaster while shared memory is rebuilt. */
typedef struct RsCrash
{
	int in_a_row; /* 0: none since the server was started */
	TimestampTz at;
	int deliveries; /* more than RS_MAX_CRASHED: the rest is not kept */
	RsCrashed delivery[RS_MAX_CRASHED];
} RsCrash;

typedef struct RsShared
{
	LWLock *lock;
	ConditionVariable left;    /* broadcast when a process of ours has left */
	ConditionVariable started; /* broadcast when a heartbeat is being started */

	/* Set at start, constant afterwards. */
	int worker_slots;
	int slots;
	int leases;
	RsLease *lease; /* of each slot, and for batches */
	RsCrash crash;
	TimestampTz quiet_until; /* crash_restart_delay: nothing starts before */

	/* Guarded by lock. */
	bool crash_logged;
	uint64 last_cookie;
	Latch *launcher; /* NULL: none is running */
	bool databases_full_logged;
	bool subscriptions_full_logged;
	RsDatabase database[RS_MAX_DATABASES];
	RsCounters counters[RS_MAX_SUBSCRIPTIONS];
	RsHeartbeat heartbeat[RS_MAX_HEARTBEATS];

	RsSlot slot[FLEXIBLE_ARRAY_MEMBER];
} RsShared;

/* NULL where the library was not preloaded. */
extern RsShared *rs_shared;

/* This process's slot, or NULL. */
extern RsSlot *rs_my_slot;

/* ----------------------------------------------------------------- entry.c */

/* The caller holds the lock exclusively for all of these. */

/* This entry, which is free, gets a new cookie. */
extern void rs_entry_take(RsEntry *entry, Oid database, Oid owner);
/* This process takes it over. */
extern void rs_entry_attach(RsEntry *entry);
/* Free what the entry is the head of; and what that does to its head. */
extern void rs_entry_free(RsEntry *entry);
extern void rs_entry_clear(RsEntry *entry);
/*
 * The processes of a database: free the entries of those that have not come yet, and
 * terminate the others (signal false: leave them).  Returns how many there are, beside
 * this process.
 */
extern int rs_entries_evict(Oid database, bool signal);

/* At the exit of its process: free it, if it has the cookie still, and tell the supervisor. */
extern void rs_entry_leave(RsEntry *entry, uint64 cookie);

/* ---------------------------------------------------------------- shared.c */

extern void rs_shared_init(void);

/* The caller holds the lock, exclusively except for the first, for all of these. */
extern RsDatabase *rs_database_find(Oid dboid); /* NULL: no entry */
extern RsDatabase *rs_database_get(Oid dboid);  /* NULL: all are taken */
extern void rs_database_want(RsDatabase *database);
extern void rs_database_release(RsDatabase *database); /* frees it where nothing holds it */
extern void rs_slot_free(RsSlot *slot);

/*
 * The others take the lock themselves.  A worker's slot, with a new cookie; NULL: none is free, or
 * the database closes.
 */
extern RsSlot *rs_slot_allocate(Oid database, int32 subscription, const char *subscription_name,
								Oid owner, Oid queue, uint64 *cookie);

/* A spare slot for this session while it drains, if there is one left. */
extern void rs_slot_attach_session(void);
extern void rs_slot_detach_session(void);

/* Is it one of the workers' slots, or a spare one? */
extern bool rs_slot_is_worker(const RsSlot *slot);

/*
 * Take over a supervisor's registration for this process; false: it is ours no
 * more.  At exit the entry is given back, and the launcher looks at it again
 * unless rs_supervisor_absent() was called: the extension is not there.
 */
extern bool rs_supervisor_attach(Oid dboid, uint64 cookie);
extern void rs_supervisor_absent(void);

/*
 * A supervisor is about to read the subscriptions.  Has somebody wanted it to
 * look (again) since then?  To be asked before it waits: its latch may have
 * been set, and reset by a wait for a lock, while it was reading.
 */
extern void rs_supervisor_looks(void);
extern bool rs_supervisor_wanted(void);

/* The supervisor has found the extension: the launcher may go on. */
extern void rs_supervisor_settled(void);

/* The delay before the n-th start in a row of something that fails: 1 s, doubling to 30 s. */
extern int64 rs_restart_delay(int failures);

/* ----------------------------------------------------------------- lease.c */

/* What a heartbeat needs to know, in its bgw_extra. */
typedef struct RsHeartbeatArgs
{
	Oid database;
	Oid owner;
	int heartbeat;
	uint64 cookie;
} RsHeartbeatArgs;

/* When a lease has to be extended at the latest: after three quarters of its time. */
#define RS_LEASE_SERVE_BY(due, length) ((due) + (length) / 4)

/* A heartbeat's entry, with a new cookie; NULL: none is free, or the database closes. */
extern RsHeartbeat *rs_heartbeat_allocate(Oid database, Oid owner, uint64 *cookie);

/* Take over the supervisor's registration; NULL: it is ours no more, so exit. */
extern RsHeartbeat *rs_heartbeat_attach(const RsHeartbeatArgs *args);

/* The caller holds RsShared.lock exclusively.  The second: nobody works in this slot any more. */
extern void rs_heartbeat_free(RsHeartbeat *heartbeat);
extern void rs_lease_forget(const RsSlot *slot);

/* The token of the lease of this number (0: the slot's own) that the slot holds; 0: none. */
extern TimestampTz rs_lease_token(const RsSlot *slot, int lease_number);

/* ----------------------------------------------------------------- stats.c */

/* Why the supervisor cannot start a subscription's workers; NULL: it can. */
extern void rs_stats_problem(int32 subscription_id, const char *reason);
extern bool rs_stats_is_broken(int32 subscription_id);

/* Forget the counters of the subscriptions of a database that are not listed. */
extern void rs_stats_forget(Oid dboid, const int32 *keep, int nkeep);

/* ------------------------------------------------------------ supervisor.c */

/* Why no process can connect to this database as this role; false: one can. */
extern bool rs_owner_refusal(Oid owner, char *reason, Size size);

/* ------------------------------------------------------------------ wake.c */

extern void rs_wake_init(void);

/* Once this transaction has committed: a database has to be looked at (again). */
extern void rs_announce_at_commit(Oid dboid);

/* ------------------------------------------------------------- database.c */

extern void rs_database_init(void);

/* End of a transaction: what it kept closed may start again. */
extern void rs_database_reopen(bool committed);

/* -------------------------------------------------------------- launcher.c */

extern void rs_launcher_register(void);

/* What a supervisor needs to know, in its bgw_extra. */
typedef struct RsSupervisorArgs
{
	Oid database;
	uint64 cookie;
} RsSupervisorArgs;

#endif /* RUSTSTREAM_SHARED_H */
