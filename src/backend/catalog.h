/*-------------------------------------------------------------------------
 *
 * catalog.h
 *	  The rows of our two catalogs, for the files that read and write them:
 *	  catalog.c, queue.c, subscription.c.  Everybody else sees RsQueue and
 *	  RsSubscription (backend.h).
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_CATALOG_H
#define RUSTSTREAM_CATALOG_H

#include "backend/backend.h"

#include "access/attnum.h"
#include "utils/relcache.h"

/*
 * The columns of ruststream.queue and ruststream.subscription, in the order of
 * the install script.  The first column of each is its key.
 */
enum
{
	RS_QUEUE_RELATION = 1,
	RS_QUEUE_ID_COLUMN,
	RS_QUEUE_GROUP_COLUMN,
	RS_QUEUE_FIFO,
	RS_QUEUE_PRIORITY_COLUMN,
	RS_QUEUE_PARTITION_KEY_COLUMN,
	RS_QUEUE_RETRY_AFTER_COLUMN,
	RS_QUEUE_ATTEMPT_COLUMN,
	RS_QUEUE_PROCESSED_AT_COLUMN,
	RS_QUEUE_LOCKED_UNTIL_COLUMN,
	RS_QUEUE_HEADERS_COLUMN,
	RS_QUEUE_PAYLOAD_COLUMN,
	RS_QUEUE_LOCK_KEY,
	RS_QUEUE_ISOLATION,
	RS_QUEUE_WAKE,
	RS_QUEUE_NATTS = RS_QUEUE_WAKE
};

enum
{
	RS_SUBSCRIPTION_ID = 1,
	RS_SUBSCRIPTION_NAME,
	RS_SUBSCRIPTION_QUEUE,
	RS_SUBSCRIPTION_HANDLER,
	RS_SUBSCRIPTION_HANDLER_OID,
	RS_SUBSCRIPTION_OWNER,
	RS_SUBSCRIPTION_OWNER_NAME,
	RS_SUBSCRIPTION_DATABASE,
	RS_SUBSCRIPTION_SYSTEM_IDENTIFIER,
	RS_SUBSCRIPTION_PAUSED,
	RS_SUBSCRIPTION_GROUP_NAME,
	RS_SUBSCRIPTION_TRANSACTIONAL,
	RS_SUBSCRIPTION_WORKERS,
	RS_SUBSCRIPTION_BATCH_SIZE,
	RS_SUBSCRIPTION_MAX_ATTEMPTS,
	RS_SUBSCRIPTION_DEAD_LETTER_GROUP,
	RS_SUBSCRIPTION_DEAD_LETTER_TABLE,
	RS_SUBSCRIPTION_ON_ERROR,
	RS_SUBSCRIPTION_ON_DECODE_ERROR,
	RS_SUBSCRIPTION_RETRY_DELAY,
	RS_SUBSCRIPTION_BACKOFF,
	RS_SUBSCRIPTION_MAX_RETRY_DELAY,
	RS_SUBSCRIPTION_LEASE,
	RS_SUBSCRIPTION_TIMEOUT,
	RS_SUBSCRIPTION_POLL_INTERVAL,
	RS_SUBSCRIPTION_DELIVERIES_PER_COMMIT,
	RS_SUBSCRIPTION_MAX_COMMIT_WAIT,
	RS_SUBSCRIPTION_NATTS = RS_SUBSCRIPTION_MAX_COMMIT_WAIT
};

#define RS_MAX_NATTS RS_SUBSCRIPTION_NATTS

/* A row of either.  values[attnum - 1] belongs to column attnum. */
typedef struct RsRow
{
	Datum values[RS_MAX_NATTS];
	bool nulls[RS_MAX_NATTS];
} RsRow;

static inline Datum
rs_row_get(const RsRow *row, AttrNumber column)
{
	return row->values[column - 1];
}

static inline bool
rs_row_isnull(const RsRow *row, AttrNumber column)
{
	return row->nulls[column - 1];
}

static inline void
rs_row_set(RsRow *row, AttrNumber column, Datum value)
{
	row->values[column - 1] = value;
	row->nulls[column - 1] = false;
}

static inline void
rs_row_set_null(RsRow *row, AttrNumber column)
{
	row->values[column - 1] = (Datum) 0;
	row->nulls[column - 1] = true;
}

/* --------------------------------------------------------------- catalog.c */

/*
 * Find the rows of a catalog whose column equals key, in no particular order,
 * in the current context; equal is the function of the equality operator.  Sees
 * what is committed and what this transaction has done, whatever its snapshot.
 */
extern List *rs_catalog_find(Oid catalog, AttrNumber column, RegProcedure equal, Datum key);

/* The row of a queue, of a subscription; NULL where there is none. */
extern RsRow *rs_queue_row(Oid relid);
extern RsRow *rs_subscription_row(const char *name);

/*
 * Insert a row, or update the one that has its key.  rs_catalog_execute runs
 * any statement (names are resolved in pg_catalog) and returns how many rows
 * it processed.  Both act as the owner of our catalogs.
 */
extern void rs_catalog_insert(Oid catalog, const RsRow *row);
extern void rs_catalog_update(Oid catalog, const RsRow *row);
extern uint64 rs_catalog_execute(const char *sql, int nargs, Oid *types, Datum *values,
								 const char *nulls);

/* Whether this backend hears of changes of a relation (see rs_catalog_generation). */
extern void rs_watch_relation(Oid relid);

/*
 * An error where somebody who is not a superuser has been granted the right to
 * write our catalogs, or to have code of his run when they are written: that
 * would be the way to everybody's rights.
 */
extern void rs_catalog_check(void);

/*
 * Does the current user own this table, or is it a member of its owner?  False
 * where it is gone.
 */
extern bool rs_owns_table(Oid relid);

/* A relation's owner; InvalidOid where it is gone. */
extern Oid rs_relation_owner(Oid relid);

/*
 * The first, of a table and its partitions, that no superuser owns; InvalidOid
 * where there is none.  Each of them is watched.
 */
extern Oid rs_not_of_superuser(Oid relid);

/* Schema and name of a relation, quoted where needed, for messages. */
extern char *rs_relation_label(Oid relid);

/* ------------------------------------------------------------------ bind.c */

/*
 * Describe a queue by its row and bind the description to the table as it is
 * now, checking everything a delivery relies on.  Takes an AccessShareLock on the table and
 * keeps it to the end of the transaction.  Strings are in the current context.
 */
extern void rs_queue_bind(const RsRow *row, RsQueue *queue);

/* The row of a queue that must be one: else error 42704. */
extern RsRow *rs_queue_row_of(Oid relid);

/* ------------------------------------------------------------------ load.c */

/* Was this subscription made in another database or cluster? */
extern bool rs_subscription_is_copied(const RsRow *row);

/*
 * Who owns it here: of a copied one, the role of the name it remembers;
 * InvalidOid where that is gone.
 */
extern Oid rs_subscription_owner(const RsRow *row);

/*
 * Build a subscription from its row, with all checks, as rs_subscription_load
 * does.  A copied one is given its name, owner and flags only.
 */
extern RsSubscription *rs_subscription_build(const RsRow *row, MemoryContext parent);

/*
 * An interval in microseconds, a month being 30 days.  An error, naming what it
 * is for, where it is not between min and max.
 */
extern int64 rs_interval_microseconds(const Interval *interval, const char *what, int64 min,
									  int64 max);

/* So many microseconds in words, in the current context: "30 s". */
extern char *rs_interval_text(int64 microseconds);

/*
 * Error where the owner may not use the table's schema; or lacks a right on the table, of this
 * name, where these rights are needed in all.
 */
extern void rs_check_schema_usage(Oid owner, Oid relid);
extern void rs_check_right(Oid owner, Oid relid, AclMode right, const char *word,
						   const char *needed);

/* ----------------------------------------------------------- dead_letter.c */

/* Bind subscription->dead_letter_table as the destination; error where it cannot take a move. */
extern void rs_bind_dead_letter_table(RsSubscription *subscription);

/* No interval is longer, so that "now" plus any of them is a point in time. */
#define RS_MAX_INTERVAL (INT64CONST(100) * 365 * USECS_PER_DAY)

#endif /* RUSTSTREAM_CATALOG_H */
