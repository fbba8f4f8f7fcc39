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

/* A row whose id is longer than this is not extended: its handler has one lease's time. */
#define RS_LEASE_ID_BYTES 1024

/* ruststream.batch_leases: how many leases there are beyond one for each process. */
extern int rs_batch_leases;

/*
 * Before a claim: how many rows of it, of so many wanted, can be extended?  One
 * always, by the lease of this process; the others, of a batch, share what
 * ruststream.batch_leases provides.  They are reserved until they are held, or given
 * back unused.
 */
extern int rs_lease_reserve(int rows);
extern void rs_lease_unreserve(void);

/*
 * Have the lease of this delivery extended every half lease from now on: from
 * its token, which the claim has written and committed.  Starts nothing by itself: the
 * supervisor keeps a heartbeat for each owner that has lease subscriptions.
 */
extern void rs_lease_hold(const RsSubscription *subscription, RsDelivery *delivery);

/*
 * Extend no further.  Leaves in the delivery the tokens that the row may hold
 * now, the one held and, where an extension was under way, the one announced
 * (else the same again).  Harmless where nothing could be extended.  Never waits
 * for an extension: one that is under way is cancelled.
 */
extern void rs_lease_stop(RsDelivery *delivery);

/*
 * Can leases be extended for this owner here and now?  NULL: they can; else
 * why not, for a hint, in the current context.  Needs a transaction.  May wait a
 * few seconds for a supervisor that has only just been told of the owner's
 * first lease subscription.
 */
extern const char *rs_lease_unavailable(Oid owner);

extern PGDLLEXPORT void rs_heartbeat_main(Datum arg);

#endif /* RUSTSTREAM_LEASE_H */
