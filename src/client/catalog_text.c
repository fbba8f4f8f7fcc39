/*-------------------------------------------------------------------------
 *
 * catalog_text.c
 *	  The statements on our own tables, where SQL is the same everywhere.
 *
 * Parameters are positional.  Times are text in the engine's own form; flags are
 * 0 and 1.  A driver whose engine wants them written otherwise ($1, another schema) has a list
 * of its own, with the same parameters and columns.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver.h"

/* The columns of a description behind its name, in the order of rs_role; then the rest. */
#define QUEUE_COLUMNS                                                                              \
	"id_column, group_column, priority_column, partition_key_column, retry_after_column, "         \
	"attempt_column, processed_at_column, locked_until_column, headers_column, payload_column, "   \
	"fifo, lock_key, isolation, mode"

#define SUBSCRIPTION_COLUMNS                                                                       \
	"queue, handler, program, group_name, transactional, workers, max_attempts, dead_letter, "     \
	"on_error, on_decode_error, decode, retry_delay_ms, backoff, max_retry_delay_ms, lease_ms, "   \
	"timeout_ms, poll_interval_ms, batch_size"

const char *const rs_portable_catalog[RS_CATALOG_COUNT] = {
	/* name -> QUEUE_COLUMNS */
	[RS_CATALOG_QUEUE] = "SELECT " QUEUE_COLUMNS " FROM ruststream_queue WHERE name = ?",
	/* QUEUE_COLUMNS, name */
	[RS_CATALOG_QUEUE_UPDATE] =
		"UPDATE ruststream_queue SET id_column = ?, group_column = ?, priority_column = ?, "
		"partition_key_column = ?, retry_after_column = ?, attempt_column = ?, "
		"processed_at_column = ?, locked_until_column = ?, headers_column = ?, payload_column = ?, "
		"fifo = ?, lock_key = ?, isolation = ?, mode = ? WHERE name = ?",
	/* the same */
	[RS_CATALOG_QUEUE_INSERT] = "INSERT INTO ruststream_queue (" QUEUE_COLUMNS ", name) VALUES "
								"(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
	/* name */
	[RS_CATALOG_QUEUE_DELETE] = "DELETE FROM ruststream_queue WHERE name = ?",
	/* name -> the name of a subscription that reads it */
	[RS_CATALOG_QUEUE_READERS] = "SELECT name FROM ruststream_subscription WHERE queue = ?",

	/* name -> SUBSCRIPTION_COLUMNS, paused */
	[RS_CATALOG_SUBSCRIPTION] =
		"SELECT " SUBSCRIPTION_COLUMNS ", paused FROM ruststream_subscription WHERE name = ?",
	/* SUBSCRIPTION_COLUMNS, name */
	[RS_CATALOG_SUBSCRIPTION_UPDATE] =
		"UPDATE ruststream_subscription SET queue = ?, handler = ?, program = ?, group_name = ?, "
		"transactional = ?, workers = ?, max_attempts = ?, dead_letter = ?, on_error = ?, "
		"on_decode_error = ?, decode = ?, retry_delay_ms = ?, backoff = ?, max_retry_delay_ms = ?, "
		"lease_ms = ?, timeout_ms = ?, poll_interval_ms = ?, batch_size = ? WHERE name = ?",
	/* the same */
	[RS_CATALOG_SUBSCRIPTION_INSERT] =
		"INSERT INTO ruststream_subscription (" SUBSCRIPTION_COLUMNS ", name) VALUES "
		"(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
	/* name */
	[RS_CATALOG_SUBSCRIPTION_DELETE] = "DELETE FROM ruststream_subscription WHERE name = ?",
	/* paused, name */
	[RS_CATALOG_SUBSCRIPTION_PAUSE] =
		"UPDATE ruststream_subscription SET paused = ? WHERE name = ?",
	/* -> name, workers (-1: it has neither handler nor program) */
	[RS_CATALOG_SUBSCRIPTIONS] =
		"SELECT name, CASE WHEN handler IS NULL AND program IS NULL THEN -1 ELSE workers END "
		"FROM ruststream_subscription ORDER BY name",

	/* at, subscription, queue, id, attempt, sqlstate, message, hint */
	[RS_CATALOG_FAILURE_INSERT] =
		"INSERT INTO ruststream_failure (at, subscription, queue, id, attempt, sqlstate, message, "
		"hint) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
	/* subscription, subscription: keeps the newest 1,000 */
	[RS_CATALOG_FAILURE_PRUNE] =
		"DELETE FROM ruststream_failure WHERE subscription = ? AND number <= "
		"(SELECT number FROM (SELECT number FROM ruststream_failure WHERE subscription = ? "
		"ORDER BY number DESC LIMIT 1 OFFSET 1000) AS oldest)",
	/* subscription */
	[RS_CATALOG_FAILURE_DELETE] = "DELETE FROM ruststream_failure WHERE subscription = ?",

	/* eight numbers, in the order of RS_COUNT_*, subscription */
	[RS_CATALOG_COUNTER_ADD] =
		"UPDATE ruststream_counter SET acked = acked + ?, retried = retried + ?, "
		"delayed = delayed + ?, discarded = discarded + ?, dead_lettered = dead_lettered + ?, "
		"failed = failed + ?, lease_lost = lease_lost + ?, transient = transient + ? "
		"WHERE subscription = ?",
	/* the same */
	[RS_CATALOG_COUNTER_INSERT] =
		"INSERT INTO ruststream_counter (acked, retried, delayed, discarded, dead_lettered, "
		"failed, lease_lost, transient, subscription) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
	/* subscription */
	[RS_CATALOG_COUNTER_DELETE] = "DELETE FROM ruststream_counter WHERE subscription = ?",

	/* started_at, seen_at, state, subscription, id */
	[RS_CATALOG_WORKER_INSERT] =
		"INSERT INTO ruststream_worker (started_at, seen_at, state, subscription, id) "
		"VALUES (?, ?, ?, ?, ?)",
	/* seen_at, state, id */
	[RS_CATALOG_WORKER_SEEN] = "UPDATE ruststream_worker SET seen_at = ?, state = ? WHERE id = ?",
	/* id */
	[RS_CATALOG_WORKER_DELETE] = "DELETE FROM ruststream_worker WHERE id = ?",
	/* seen_at: not seen since then */
	[RS_CATALOG_WORKER_PRUNE] = "DELETE FROM ruststream_worker WHERE seen_at < ?",

	/* -> what ruststream_status has, but for what is counted in the queues */
	[RS_CATALOG_STATUS] = "SELECT subscription, queue, state, workers, workers_wanted, delivered, "
						  "failed, last_error, "
						  "last_error_at FROM ruststream_status ORDER BY subscription",
};
