/*-------------------------------------------------------------------------
 *
 * heartbeat.h
 *	  Between the two files of a heartbeat: heartbeat.c chooses the lease that
 *	  is to be extended, and waits; extend.c extends it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_HEARTBEAT_H
#define RUSTSTREAM_HEARTBEAT_H

#include <signal.h>

#include "backend/shared.h"

/* A lease of ours, as the last look found it. */
typedef struct RsSeenLease
{
	int number; /* in RsShared.lease */
	uint64 serial;
	TimestampTz due;
	int64 length;
	bool blocked;
} RsSeenLease;

/* Who we are: set before the first extension. */
extern void rs_extend_init(RsHeartbeat *heartbeat, uint64 cookie, Oid owner);

/*
 * An attempt: between these two, which may be far apart, a cancel counts.
 * rs_extend_end may be called again, and is by rs_extend.
 */
extern void rs_extend_begin(void);
extern void rs_extend_end(void);

/* SIGINT: pg_cancel_backend, a settlement or a time-out, each for what is under way. */
extern void rs_extend_cancel(SIGNAL_ARGS);

/*
 * Try to extend a lease, at most until the deadline, waiting no longer than
 * this for a lock.  What comes of it is noted in the lease.
 */
extern void rs_extend(const RsSeenLease *seen, TimestampTz deadline, long lock_msec);

#endif /* RUSTSTREAM_HEARTBEAT_H */
