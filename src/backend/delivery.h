/*-------------------------------------------------------------------------
 *
 * delivery.h
 *	  What the files of the delivery engine share: engine.c (the subscription
 *	  and the transactions), claim.c, lines.c, guard.c, deliver.c (the row lock lane, and what
 *	  all lanes have in common), shared_commit.c, batch.c, lane_lease.c, lane_advisory.c,
 *	  settlement.c and recover.c.  The rest of the backend sees rs_deliver alone.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_DELIVERY_H
#define RUSTSTREAM_DELIVERY_H

#include "backend/backend.h"

#include "storage/lock.h"

/* What a delivery is doing: decides what an error means. */
typedef enum RsStage
{
	RS_STAGE_CLAIM,
	RS_STAGE_DECODE,
	RS_STAGE_HANDLER,
	RS_STAGE_SETTLE
} RsStage;

/*
 * One delivery on its way.  Lives in the frame of rs_deliver, across its PG_TRY.
 * Where that one is a batch it goes through its lane as one delivery of several
 * rows, and each row has a work of its own, to be settled by.
 */
typedef struct RsWork
{
	RsEngine *engine;
	RsStage stage;
	RsDelivery delivery;
	RsAnswer answer;
	ErrorData *error; /* why the delivery failed, in the delivery's context */
	rs_cause cause;   /* once it is decided how to settle it */
	rs_settlement settlement;
	ResourceOwner outer_owner; /* of the transaction around the savepoint */
	bool inserted;             /* perhaps into its own queue, in what is committed */
	int sharing;           /* so many rows were claimed for one commit; 0: it is the row's own */
	bool is_over;          /* of a batch: settled, or recovered from */
	bool is_told;          /* the error is the whole batch's, which has been reported */
	struct RsBatch *batch; /* NULL: this is one row */
} RsWork;

/* The rows of a batch, in claim order; in the delivery's memory. */
typedef struct RsBatch
{
	int count;
	RsWork *works;
	int settling; /* row lock form: the row whose settlement is under way, -1: none */
} RsBatch;

/* ---------------------------------------------------------------- engine.c */

/* Report a step in the contract's words, where ruststream.trace is on. */
extern void rs_trace_step(const RsEngine *engine, rs_step step, const char *suffix);

/*
 * The session's transactions.  Outside one we stay in the delivery's memory,
 * so that nothing piles up in a context that is never reset.
 */
extern void rs_engine_begin(RsEngine *engine, rs_isolation isolation);
extern void rs_engine_commit(RsEngine *engine);
extern void rs_engine_rollback(RsEngine *engine);

/* Has something that the subscription was loaded from changed since? */
extern bool rs_engine_is_outdated(const RsEngine *engine);

/* Fire what is deferred now, where the savepoint can still undo it. */
extern void rs_fire_deferred_constraints(void);

/* Nothing of the handler's, or of a trigger's, is left to run when the transaction commits. */
extern void rs_end_user_code(const RsSession *session);

/*
 * Begin the claim's transaction with a subscription that is up to date.
 * Returns false where there is nothing to deliver for (and no transaction).
 */
extern bool rs_engine_begin_delivery(RsEngine *engine);

/*
 * Where the transaction of a claim has its snapshot already, and would keep it:
 * begin it again, so that the next statement sees what has been committed by now.
 */
extern void rs_engine_renew(RsEngine *engine);

/* The values that the statements of a delivery take, "now" among them. */
extern void rs_delivery_values(const RsSubscription *subscription, const RsDelivery *delivery,
							   RsValues *values);

/* ----------------------------------------------------------------- claim.c */

/*
 * How many rows a claim may take, of as many as limit: one of each line, and no more than
 * drain was asked for.  The second of those that are delivered one after another, by
 * deliveries_per_commit: as many as would be within max_commit_wait, going by what a
 * delivery has taken of late (the third, in microseconds); 1 while they go one at a time.
 */
extern int rs_claim_limit(const RsEngine *engine, int limit);
extern int rs_claim_limit_in_time(const RsEngine *engine);
extern void rs_note_handling_time(RsEngine *engine, int64 microseconds);

/*
 * Claim up to limit rows, into zeroed deliveries, in claim order.  Returns how
 * many; 0 where none is due, and engine->next_due is set then.
 */
extern int rs_claim(RsEngine *engine, RsDelivery *deliveries, int limit);

/*
 * What claim.c and lines.c share: the values that a claim of so many rows takes;
 * when something will be due, where nothing is, as engine->next_due; a column of a result row,
 * copied into the current context, its type being the one we go by; and a delivery, filled in from
 * a row of the result.
 */
extern void rs_claim_values(RsEngine *engine, int limit, RsValues *values);
extern void rs_claim_look_ahead(RsEngine *engine, const RsValues *values);
extern Datum rs_claim_fetch(int row, int column, Oid type, bool *isnull);
extern void rs_claim_read(RsEngine *engine, const RsValues *values, int row, RsDelivery *delivery);

/* A value as its type prints it, in the current context. */
extern char *rs_datum_text(Datum value, Oid type);

/* A row that may be taken once its key is locked. */
typedef struct RsCandidate
{
	Datum id;
	char *key; /* NULL where the queue has no such keys */
	bool has_line;
	Datum line;  /* its partition key */
	char *guard; /* what that locks; NULL: nothing */
} RsCandidate;

#define RS_MAX_CANDIDATES 10

/*
 * Advisory lock form, and partition keys in any.  The first rows that are due, at most
 * limit, and their keys; free_only: of those whose key no other session holds, and
 * which nobody has locked.  These are locked until the transaction ends.  Returns how
 * many, 0 as above.  rs_claim_read_candidate fills one in from the result.
 *
 * Advisory lock form: with the key of one locked and in delivery->key, take it: false
 * where it is not to be claimed any more.
 */
extern int rs_claim_candidates(RsEngine *engine, bool free_only, RsCandidate *candidates,
							   int limit);
extern void rs_claim_read_candidate(RsEngine *engine, int row, RsCandidate *candidate);
extern bool rs_claim_take(RsEngine *engine, RsDelivery *delivery);

/*
 * Lease form: the row has been leased for a while; have its delivery carry what it holds by
 * now, as its claim would have found it.  False where it is not to be delivered any more.
 */
extern bool rs_claim_refresh(RsEngine *engine, RsDelivery *delivery);

/* The row has been ended: the next claim may go on behind it. */
extern void rs_claim_mark(RsEngine *engine, const RsDelivery *delivery);

/*
 * Leave a row alone for the retry delay; until when the first of those rows
 * (or the worker itself, after claims that failed) is left alone, 0: none is.
 */
extern void rs_claim_hold(RsEngine *engine, const RsDelivery *delivery);
extern TimestampTz rs_claim_held_until(RsEngine *engine);

/* ----------------------------------------------------------------- lines.c */

/* rs_claim, of a queue of lines: at most one row of each. */
extern int rs_claim_lines(RsEngine *engine, RsDelivery *deliveries, int limit);

/*
 * Advisory lock form: the head of some line that nobody else was at, another one in
 * each call as far as possible; false: there is none.
 */
extern bool rs_lines_candidate(RsEngine *engine, RsCandidate *candidate);

/* The last claim was rolled back: its lines come first in the next ones. */
extern void rs_lines_again(RsEngine *engine);

/* What is known of the lines is of no use any more. */
extern void rs_lines_forget(RsEngine *engine);

/* ----------------------------------------------------------------- guard.c */

/*
 * The advisory locks that keep others from a line.  Its name in text is the group's,
 * or the partition key's.  They are tried without waiting, all or none; they
 * belong to the transaction, or to the session.  rs_guard_name is what the one of a
 * partition key locks, in the current context.
 */
typedef struct RsGuard
{
	int count;
	LOCKTAG tags[2];
} RsGuard;

/*
 * Each lock takes room in the server's lock table, which all sessions share: a
 * process holds those of so many rows at once at most.
 */
#define RS_MAX_GUARDS 100

extern RsGuard rs_guard_of_line(const RsQueue *queue, const char *line);
extern char *rs_guard_name(const RsQueue *queue, const char *line);
extern RsGuard rs_guard_of_key(const char *key);
extern bool rs_guard_try(const RsGuard *guard, bool for_session);
extern bool rs_guard_is_held(const RsGuard *guard);
extern void rs_guard_release(const RsGuard *guard, bool for_session);

/* --------------------------------------------------------------- deliver.c */

/*
 * The claim has found so many rows.  False: its transaction is over, and *progress says why:
 * nothing was found, or what the claim went by has changed.
 */
extern bool rs_has_claimed(RsEngine *engine, int rows, RsProgress *progress);

/* What to say where nothing was found: held, if rows are left alone, which come back. */
extern RsProgress rs_nothing_claimed(RsEngine *engine);

/* A row is in work: say so, and have a neighbour look for the next one. */
extern void rs_begin_work(RsWork *work);

/* Keep the error of the handler that has just been caught, or of what comes after it. */
extern void rs_keep_error(RsWork *work);
extern void rs_keep_settlement_error(RsWork *work);

/*
 * What was kept and cannot be left to a settlement is raised again, so that everything is rolled
 * back.
 */
extern void rs_raise_what_is_no_failure(const RsWork *work);

/*
 * Decode the row and call the handler below a savepoint, in the claim's
 * transaction.  Ends with the savepoint released where the handler's writes are kept, and
 * open after any other answer and after an error, which is left in work->error or
 * raised again, as by the next.
 */
extern void rs_handle_below_savepoint(RsWork *work);

/*
 * Decode the row and call the handler where the claim's transaction is over: in
 * the delivery's transaction, which stays open, or, where the subscription is
 * not transactional, in one of its own that is over afterwards, too.  An error
 * of the handler is left in work->error; what is no failure of the delivery
 * (transient, or a cancel of the caller's) is raised again.
 */
extern void rs_handle_claimed(RsWork *work);

/* Walk through what remains of the lane after the handler: these three in one. */
extern void rs_finish(RsWork *work);

/* How the delivery is to be settled, into work->cause and work->settlement. */
extern void rs_decide(RsWork *work);

/* One of the steps that remain; false: the row is lost. */
extern bool rs_take_step(RsWork *work, rs_step step);

/* After the commit: warn, report, count, and leave alone what may loop hot. */
extern void rs_conclude(RsWork *work);

/* The row lock lane: a row that has its commit to itself. */
extern RsProgress rs_deliver_row_lock(RsWork *work);

/* --------------------------------------------------------- shared_commit.c */

/* The row lock lane where deliveries may share a commit; a transaction has begun. */
extern RsProgress rs_deliver_sharing(RsWork *work);

/*
 * The transaction that several deliveries shared is rolled back: they are
 * delivered anew, one at a time.
 */
extern void rs_deliver_apart(RsWork *work);

/* ----------------------------------------------------------------- batch.c */

/* Deliver a batch in the form that the queue has; a transaction has begun. */
extern RsProgress rs_deliver_batch(RsWork *work);

/* ------------------------------------------------------------- interrupt.c */

/*
 * Call what runs a handler so that it can be cancelled, by its subscription's
 * timeout and by ruststream.cancel of the row that rs_stats_delivery_begin has
 * shown.  Where it has been, this raises 57014, whatever the call made of it.
 */
extern void rs_run_handler(const RsSubscription *subscription, void (*call)(void *arg), void *arg);

/*
 * Is this the cancel of the session that delivers, by signal or statement_timeout?
 * Neither is one of the above, nor a 57014 that a user's code has raised.
 */
extern bool rs_is_session_cancel(const ErrorData *error);

/* ------------------------------------------------------------ lane_lease.c */

extern RsProgress rs_deliver_lease(RsWork *work);

/* The claim has committed: have the leases of these rows extended, as rs_lease_reserve allows. */
extern void rs_hold_leases(RsWork *works, int count);

/* Deliver a row that is leased, whose turn it is. */
extern void rs_deliver_leased(RsWork *work);

/* Extend the lease no further, and learn which tokens the row may hold. */
extern void rs_stop_lease(RsDelivery *delivery);

/* The row is settled, given back, or somebody else's: nothing is left to release. */
extern void rs_forget_lease(RsDelivery *delivery);

/* ----------------------------------------------------- lane_lease_several.c */

/*
 * The lease lane where a claim may lease several rows; a transaction has begun.  Where it
 * has, these are delivered one a call, as long as rs_next_claimed finds another.
 */
extern RsProgress rs_deliver_leases(RsWork *work);
extern RsWork *rs_next_claimed(const RsEngine *engine);
extern RsProgress rs_deliver_claimed(RsWork *work);

/*
 * A delivery has come to such an end (failed: one that was recovered from): let go of
 * the rows behind it, unless it may go on.
 */
extern void rs_go_on(RsWork *work, RsProgress progress, bool failed);

/*
 * Let go of what has been claimed and not begun, as if it had not been claimed.  In
 * transactions of its own; what cannot be had is due when its lease ends.  Raises
 * nothing but a cancel of the caller's.
 */
extern void rs_unclaim(RsEngine *engine);

/* The same in the current transaction, of those rows whose handlers have not been run. */
extern int rs_unclaim_rows(RsWork *works, int count);

/* --------------------------------------------------------- lane_advisory.c */

extern RsProgress rs_deliver_advisory(RsWork *work);

/*
 * Is this candidate's key, or its line, one of those in front of it, which have been asked for?  A
 * session may have the same lock twice.
 */
extern bool rs_is_known_candidate(const RsCandidate *candidates, int number);

/* Lock a key for this session, without waiting; false: it is somebody else's. */
extern bool rs_lock_key(RsEngine *engine, RsDelivery *delivery, const RsCandidate *candidate);

/* rs_lines_candidate, in a transaction of its own. */
extern bool rs_find_line_candidate(RsEngine *engine, RsCandidate *candidate);

/* Does this session still hold the delivery's key?  True where it has none. */
extern bool rs_key_is_held(const RsDelivery *delivery);

/* Lock it again, without waiting, once it was lost; false: somebody has it, or there is none. */
extern bool rs_lock_key_again(const RsEngine *engine, RsDelivery *delivery);

/* Release it; also where the handler has done so before, or there is none. */
extern void rs_unlock_key(const RsEngine *engine, RsDelivery *delivery);

/* ---------------------------------------------------------------- origin.c */

/*
 * The headers that a dead letter is given, as the text of an object; and the names
 * of all of them, a text[].  Both in the current context.
 */
extern Datum rs_origin(const RsSubscription *subscription, const RsDelivery *delivery,
					   TimestampTz now);
extern Datum rs_origin_headers(void);

/* ------------------------------------------------------------ settlement.c */

/* Take over what the work has come to, before the delivery is settled. */
extern void rs_set_reason(RsWork *work);

/*
 * Execute the statements of a settlement, in the current transaction.
 * given_delay is the handler's own delay, in microseconds.  Returns false where
 * the lease is lost: nothing has been changed.  Errors: 55000 where they have
 * changed nothing, though the row is still there.
 */
extern bool rs_settle_delivery(RsEngine *engine, RsDelivery *delivery,
							   const rs_settlement *settlement, int64 given_delay);

/* The failure of a delivery whose handler asks for a dead letter without one. */
extern ErrorData *rs_lacking_dead_letter(const RsEngine *engine, const char *reason);

/*
 * Write into the history what went wrong, or the reason that the handler gave
 * with any answer but ack; nothing where there is neither.
 */
extern void rs_record_failure(RsWork *work);

/* After the commit: tell the log or drain's caller, count, hold what is hot. */
extern void rs_report_failure(const RsWork *work);
extern void rs_warn_of_lacks(const RsEngine *engine, const rs_settlement *settlement,
							 const RsDelivery *delivery);
extern void rs_count_settlement(rs_outcome outcome, bool failed);
extern void rs_hold_if_hot(RsEngine *engine, const RsDelivery *delivery,
						   const rs_settlement *settlement);

/* --------------------------------------------------------------- recover.c */

/* A serialization failure or a deadlock: not the handler's fault. */
extern bool rs_is_transient(const ErrorData *error);

/*
 * The delivery of a row has come through: its transient failures are counted in a row,
 * whichever others are delivered in between.
 */
extern void rs_forget_transient_failures(RsEngine *engine, const char *id);

/*
 * Somebody else has, or may have, the row: the delivery has lost its lease, or
 * its key.  Everything is rolled back already.
 */
extern void rs_lose(RsWork *work);

/*
 * The delivery's transaction is lost: everything is rolled back already, and
 * work->error says why.  Rethrows what is not a delivery's failure.
 */
extern RsProgress rs_recover(RsWork *work);

/*
 * A row of a batch whose settlement in a transaction of its own has failed, be it as often
 * as a transient failure may be had.
 */
#define RS_TRANSIENT_LIMIT 10 /* so many in a row make an ordinary failure */
extern void rs_recover_row(RsWork *row);

/* The same for a batch whose rows have not been settled, or have been in part. */
extern RsProgress rs_recover_batch(RsWork *work);

#endif /* RUSTSTREAM_DELIVERY_H */
