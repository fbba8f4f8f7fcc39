/*-------------------------------------------------------------------------
 *
 * supervisor.h
 *	  What a supervisor keeps in mind: the subscriptions and their workers.
 *
 * supervisor.c decides how many workers there should be, roster.c looks after
 * those there are.  All this is private to one process, lives in
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

#endif /* RUSTSTREAM_SUPERVISOR_H */
