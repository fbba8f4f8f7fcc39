/*-------------------------------------------------------------------------
 *
 * supervisor.h
 *	  What a supervisor keeps in mind: the subscriptions and their workers, the
 *	  owners and their heartbeats.
 *
 * supervisor.c decides how many there should be, roster.c and owners.c look
 * after those there are, by means of entry.c.  All this is private to one process, lives in
 * TopMemoryContext, and can be built again from the catalog and from shared
 * memory.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_SUPERVISOR_H
#define RUSTSTREAM_SUPERVISOR_H

#include "postmaster/bgworker.h"

#include "backend/shared.h"

/* A process that the supervisor looks after: it has registered it, or found it. */
typedef struct RsChild
{
	RsEntry *entry; /* NULL: there is none */
	uint64 cookie;
	Oid owner;                      /* whom it is connected as */
	BackgroundWorkerHandle *handle; /* NULL: found in shared memory, attached */
	TimestampTz started_at;
	bool attached;
	bool stopping; /* we told it to leave */
} RsChild;

typedef struct RsSupervised
{
	int32 id;
	char name[NAMEDATALEN];
	Oid owner;
	Oid queue;
	TransactionId version; /* xmin of its row: has the registration changed? */
	bool listed;           /* the row is there */
	int wanted;            /* how many workers there should be */
	bool leases;           /* its deliveries hold leases: the owner needs a heartbeat */
	List *workers;         /* of RsChild */

	char problem[RS_REASON_BYTES];  /* why it cannot have workers; empty: it can */
	char reported[RS_REASON_BYTES]; /* what status shows of that */

	int failures; /* starts in a row that came to nothing */
	TimestampTz next_start;
} RsSupervised;

/* ----------------------------------------------------------------- entry.c */

/*
 * The process that another supervisor has left behind in this entry, if there is one.
 * One that it registered and that has not attached yet may not any more.  The caller
 * holds RsShared.lock exclusively.
 */
extern bool rs_child_adopt(RsChild *child, RsEntry *entry);
/*
 * Register a process, with its names and arguments filled in, for an entry of this
 * cookie.  False, and the entry is free again: the server has no room for another one.
 */
extern bool rs_child_register(RsChild *child, RsEntry *entry, uint64 cookie, Oid owner,
							  BackgroundWorker *process);
/* Has it left, or will it never come? */
extern bool rs_child_is_gone(RsChild *child);
/* Tell it to leave, after what it has in work; or that it may stay. */
extern void rs_child_tell(RsChild *child, bool stop);
extern void rs_child_terminate(RsChild *child);
/* It is gone: there is none. */
extern void rs_child_forget(RsChild *child);

/* ---------------------------------------------------------------- roster.c */

extern RsSupervised *rs_supervised_find(List *subscriptions, int32 id);

extern void rs_roster_adopt(List *subscriptions);
extern bool rs_roster_reap(RsSupervised *subscription);
extern int rs_roster_count(const RsSupervised *subscription);
extern void rs_roster_stop_surplus(RsSupervised *subscription);

/* Start one worker; false: there is no slot. */
extern bool rs_roster_start(RsSupervised *subscription);

/* ---------------------------------------------------------------- owners.c */

extern void rs_owners_adopt(void);

/* Remove the heartbeats that have left; true if there were any. */
extern bool rs_owners_reap(void);

/* Say which owners need one; those of others are told to leave. */
extern void rs_owners_want(List *subscriptions);

/*
 * Start the heartbeats that are missing and due, none before slot_retry.
 * Returns false where there is no process for one; lowers *until to when to
 * try again.
 */
extern bool rs_owners_start(TimestampTz now, TimestampTz slot_retry, TimestampTz *until);

/* Is a heartbeat registered for this owner?  Else why not. */
extern bool rs_owner_is_served(Oid owner);
extern const char *rs_owner_problem(Oid owner);

#endif /* RUSTSTREAM_SUPERVISOR_H */
