/*-------------------------------------------------------------------------
 *
 * supervisor.h
 *	  What a supervisor keeps in mind: the subscriptions and their workers, the
 *	  owners and their heartbeats.
 *
 * supervisor.c decides how many there should be, roster.c and owners.c look
 * after those there are.  All this is private to one process, lives in
 * TopMemoryContext, and can be built again from the catalog and from shared
 * memory.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_SUPERVISOR_H
#define RUSTSTREAM_SUPERVISOR_H

#include "postmaster/bgworker.h"

#include "backend/shared.h"

typedef struct RsWorkerProcess
{
	RsSlot *slot;
	uint64 cookie;
	Oid owner;                      /* whom it is connected as */
	BackgroundWorkerHandle *handle; /* NULL: found in shared memory, attached */
	TimestampTz started_at;
	bool attached;
	bool stopping; /* we told it to leave */
} RsWorkerProcess;

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
	List *workers;

	char problem[RS_REASON_BYTES];  /* why it cannot have workers; empty: it can */
	char reported[RS_REASON_BYTES]; /* what status shows of that */

	int failures; /* starts in a row that came to nothing */
	TimestampTz next_start;
} RsSupervised;

/* ---------------------------------------------------------------- roster.c */

extern RsSupervised *rs_supervised_find(List *subscriptions, int32 id);

extern void rs_roster_adopt(List *subscriptions);
extern void rs_roster_terminate(void);
extern bool rs_roster_reap(RsSupervised *subscription);
extern int rs_roster_count(const RsSupervised *subscription);
extern void rs_roster_stop_surplus(RsSupervised *subscription);

/* Start one worker; false: there is no slot. */
extern bool rs_roster_start(RsSupervised *subscription);

/* ---------------------------------------------------------------- owners.c */

extern void rs_owners_adopt(void);
extern void rs_owners_terminate(void);

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
