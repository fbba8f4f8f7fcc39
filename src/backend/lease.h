/*-------------------------------------------------------------------------
 *
 * lease.h
 *	  The lease of a delivery in work, between the process that holds it and
 *	  the heartbeat that extends it.
 *
 * The token of a lease is the row's locked_until.  An extension moves it: the
 * heartbeat announces the new token here before it writes it, so that at any
 * moment the row holds the token held or the one announced.  A settlement
 * first stops further extensions, cancels one that is under way (it may be
 * waiting for the delivery's own transaction), and then accepts either.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_LEASE_H
#define RUSTSTREAM_LEASE_H

#include "backend/backend.h"

/* An id longer than this cannot be extended: its handler has one lease's time. */
#define RS_LEASE_ID_BYTES 1024

/*
 * Have the lease of this delivery extended every half lease (microseconds)
 * from now on.  Starts nothing by itself: the supervisor keeps a heartbeat for
 * each owner that has lease subscriptions.
 */
extern void rs_lease_hold(const RsSubscription *subscription, const RsDelivery *delivery,
						  TimestampTz token, int64 lease);

/*
 * Extend no further.  Fills in the tokens that the row may hold now, the one
 * held and, where an extension was under way, the one announced (else the same
 * again).  Also called, and harmless, where no lease is held.
 */
extern void rs_lease_stop(TimestampTz *held, TimestampTz *announced);

/* Can leases be extended for this owner here and now?  Else why not, for a hint. */
extern const char *rs_lease_unavailable(Oid owner);

extern PGDLLEXPORT void rs_heartbeat_main(Datum arg);

#endif /* RUSTSTREAM_LEASE_H */
