/*-------------------------------------------------------------------------
 *
 * driver_postgres_catalog.c
 *	  The PostgreSQL driver: our own tables, and being idle.
 *
 * Our tables are in the schema public, whatever the extension has beside them: the
 * command line describes and subscribes there, and the extension in its own.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_postgres.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "schema_postgres.h" /* made of schema_postgres.sql */
#include "upgrade_postgres_2.h"

static const rs_schema schema = {.tables = rs_schema_postgres, .upgrades = {rs_upgrade_postgres_2}};

#define IS " OPERATOR(pg_catalog.=) "
#define QUEUE_COLUMNS                                                                              \
	"id_column, group_column, priority_column, partition_key_column, retry_after_column, "         \
	"attempt_column, processed_at_column, locked_until_column, headers_column, payload_column, "   \
	"fifo, lock_key, isolation, mode"
#define SUBSCRIPTION_COLUMNS                                                                       \
	"queue, handler, program, group_name, transactional, workers, max_attempts, dead_letter, "     \
	"on_error, on_decode_error, decode, retry_delay_ms, backoff, max_retry_delay_ms, lease_ms, "   \
	"timeout_ms, poll_interval_ms, batch_size"
#define ADD(column, n) column " = " column " OPERATOR(pg_catalog.+) $" #n ", "

/* What each takes and returns: catalog_text.c. */
const char *const rs_postgres_catalog[RS_CATALOG_COUNT] = {
	[RS_CATALOG_QUEUE] = "SELECT " QUEUE_COLUMNS " FROM public.ruststream_queue"
						 " WHERE name" IS "public.ruststream_table_name($1)",
	[RS_CATALOG_QUEUE_UPDATE] =
		"UPDATE public.ruststream_queue SET (" QUEUE_COLUMNS ") = "
		"($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14) WHERE name" IS
		"public.ruststream_table_name($15)",
	[RS_CATALOG_QUEUE_INSERT] = "INSERT INTO public.ruststream_queue (" QUEUE_COLUMNS ", name) "
								"VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, "
								"$14, $15)",
	[RS_CATALOG_QUEUE_DELETE] = "DELETE FROM public.ruststream_queue"
								" WHERE name" IS "public.ruststream_table_name($1)",
	[RS_CATALOG_QUEUE_READERS] = "SELECT name FROM public.ruststream_subscription"
								 " WHERE queue" IS "public.ruststream_table_name($1)",

	[RS_CATALOG_SUBSCRIPTION] = "SELECT " SUBSCRIPTION_COLUMNS
								", paused FROM public.ruststream_subscription WHERE name" IS "$1",
	[RS_CATALOG_SUBSCRIPTION_UPDATE] =
		"UPDATE public.ruststream_subscription SET (" SUBSCRIPTION_COLUMNS ") = "
		"($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18) "
		"WHERE name" IS "$19",
	[RS_CATALOG_SUBSCRIPTION_INSERT] =
		"INSERT INTO public.ruststream_subscription (" SUBSCRIPTION_COLUMNS ", name) VALUES "
		"($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)",
	[RS_CATALOG_SUBSCRIPTION_DELETE] =
		"DELETE FROM public.ruststream_subscription WHERE name" IS "$1",
	[RS_CATALOG_SUBSCRIPTION_PAUSE] =
		"UPDATE public.ruststream_subscription SET paused = $1 WHERE name" IS "$2",
	[RS_CATALOG_SUBSCRIPTIONS] =
		"SELECT name, workers FROM public.ruststream_subscription ORDER BY name",

	[RS_CATALOG_FAILURE_INSERT] =
		"INSERT INTO public.ruststream_failure (at, subscription, queue, id, attempt, sqlstate, "
		"message, hint) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
	[RS_CATALOG_FAILURE_PRUNE] =
		"DELETE FROM public.ruststream_failure WHERE subscription" IS
		"$1 AND number OPERATOR(pg_catalog.<=) (SELECT number FROM public.ruststream_failure "
		"WHERE subscription" IS "$2 ORDER BY number DESC LIMIT 1 OFFSET 1000)",
	[RS_CATALOG_FAILURE_DELETE] =
		"DELETE FROM public.ruststream_failure WHERE subscription" IS "$1",

	[RS_CATALOG_COUNTER_ADD] = "UPDATE public.ruststream_counter SET " ADD("acked", 1)
		ADD("retried", 2) ADD("delayed", 3) ADD("discarded", 4) ADD("dead_lettered", 5)
			ADD("failed", 6) ADD("lease_lost", 7) "transient = transient OPERATOR(pg_catalog.+) $8"
												  " WHERE subscription" IS "$9",
	[RS_CATALOG_COUNTER_INSERT] =
		"INSERT INTO public.ruststream_counter (acked, retried, delayed, discarded, dead_lettered, "
		"failed, lease_lost, transient, subscription) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
	[RS_CATALOG_COUNTER_DELETE] =
		"DELETE FROM public.ruststream_counter WHERE subscription" IS "$1",

	[RS_CATALOG_WORKER_INSERT] =
		"INSERT INTO public.ruststream_worker (started_at, seen_at, state, subscription, id) "
		"VALUES ($1, $2, $3, $4, $5)",
	[RS_CATALOG_WORKER_SEEN] =
		"UPDATE public.ruststream_worker SET seen_at = $1, state = $2 WHERE id" IS "$3",
	[RS_CATALOG_WORKER_DELETE] = "DELETE FROM public.ruststream_worker WHERE id" IS "$1",
	[RS_CATALOG_WORKER_PRUNE] =
		"DELETE FROM public.ruststream_worker WHERE seen_at OPERATOR(pg_catalog.<) $1",

	[RS_CATALOG_STATUS] =
		"SELECT subscription, queue, state, workers, workers_wanted, delivered, failed, "
		"last_error, "
		"pg_catalog.to_char(pg_catalog.timezone('UTC', last_error_at), "
		"'YYYY-MM-DD\"T\"HH24:MI:SS.US+00:00') FROM public.ruststream_status ORDER BY subscription",
};

/* ---------------------------------------------------------------- versions */

typedef struct installed
{
	bool is_there;
	bool is_trusted; /* its owner may do what we may, or more */
} installed;

static bool
read_owner(void *arg, const rs_value *columns, int count)
{
	installed *found = arg;

	(void) count;
	found->is_there = true;
	found->is_trusted = columns[0].integer != 0;
	return false;
}

static bool
read_version(void *arg, const rs_value *columns, int count)
{
	(void) count;
	*(int64_t *) arg = columns[0].integer;
	return false;
}

/*
 * Whoever owns the tables decides what our workers execute, so they count only where their owner is
 * a superuser, the database's owner, or a member of our role.
 */
rs_result
rs_postgres_find_version(rs_session *base, int64_t *version)
{
	static const rs_command owner = {
		.text =
			"SELECT r.rolsuper OR r.oid OPERATOR(pg_catalog.=) (SELECT d.datdba"
			" FROM pg_catalog.pg_database AS d"
			" WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database())"
			" OR pg_catalog.pg_has_role(r.oid, current_user::pg_catalog.regrole::pg_catalog.oid,"
			" 'MEMBER')"
			" FROM pg_catalog.pg_class AS c"
			" JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace"
			" JOIN pg_catalog.pg_roles AS r ON r.oid OPERATOR(pg_catalog.=) c.relowner"
			" WHERE n.nspname OPERATOR(pg_catalog.=) 'public'"
			" AND c.relname OPERATOR(pg_catalog.=) 'ruststream_version'",
		.slot = -1};
	static const rs_command read = {
		.text = "SELECT pg_catalog.max(version) FROM public.ruststream_version", .slot = -1};
	installed found = {false, false};
	rs_result result = rs_postgres_execute(base, &owner, NULL, 0, read_owner, &found, NULL);

	*version = 0;
	if (result == RS_DONE && found.is_there && found.is_trusted)
		result = rs_postgres_execute(base, &read, NULL, 0, read_version, version, NULL);
	if (result == RS_FAILED && strcmp(base->error.state, "42501") == 0 &&
		base->error.hint[0] == '\0')
		(void) snprintf(base->error.hint, sizeof(base->error.hint),
						"GRANT SELECT, INSERT, UPDATE, DELETE on the tables of ruststream in the "
						"schema public to the role that connects.");
	if (result != RS_DONE || !found.is_there || found.is_trusted)
		return result;
	rs_error_set(&base->error, RUSTSTREAM_REFUSED, "42501",
				 "They say what this program executes. Let their owner be the role that serves, a "
				 "member of it, the owner of the database, or a superuser.",
				 "the tables of ruststream in this database belong to a role that could make this "
				 "one do what it may not do itself");
	return RS_FAILED;
}

/* One installation at a time: a lock that goes with the transaction, on a number of our own. */
#define ONE_AT_A_TIME "SELECT pg_catalog.pg_advisory_xact_lock(7238147152366728818)"

static rs_result
run_text(rs_session *base, const char *text)
{
	return rs_postgres_run(rs_postgres_of(base), text);
}

rs_result
rs_postgres_install(rs_session *base, bool with_wal, ruststream_notice_callback notice, void *arg)
{
	rs_result result = base->driver->begin(base, RS_FOR_US, NULL);

	(void) with_wal;
	(void) notice;
	(void) arg;
	if (result == RS_DONE)
		result = rs_postgres_run(rs_postgres_of(base), ONE_AT_A_TIME);
	if (result == RS_DONE)
		result = rs_make_tables(base, &schema, run_text);
	result = rs_commit_or_roll_back(base, result);
	if (result == RS_FAILED && strcmp(base->error.state, "42501") == 0 &&
		base->error.hint[0] == '\0')
		(void) snprintf(
			base->error.hint, sizeof(base->error.hint),
			"They are made in the schema public, where their owner must have CREATE; who "
			"brings them up to date has to be their owner, or a superuser.");
	return result;
}

/* ------------------------------------------------------------------- plans */

static rs_result
refuse(rs_session *base, const char *hint, const char *message)
{
	rs_error_set(&base->error, RUSTSTREAM_REFUSED, "", hint, "%s", message);
	return RS_FAILED;
}

rs_result
rs_postgres_check_plan(rs_session *base, const struct rs_plan *plan, const char **warning)
{
	rs_postgres_session *session = rs_postgres_of(base);
	const rs_table *table = &plan->table;
	rs_form form = rs_table_form(table);
	const char *handler = plan->subscription.handler;
	rs_isolation level =
		table->isolation == RS_ISOLATION_DEFAULT ? session->default_isolation : table->isolation;
	bool sees_one_snapshot =
		level == RS_ISOLATION_REPEATABLE_READ || level == RS_ISOLATION_SERIALIZABLE;

	*warning = NULL;
	if (form == RS_FORM_LEASE && plan->policy.transactional && sees_one_snapshot)
		return refuse(
			base,
			"Its transaction would not see that its lease has been extended. Describe the "
			"queue with \"read committed\", or subscribe without a transaction.",
			table->isolation == RS_ISOLATION_DEFAULT
				? "a lease queue cannot be served in transactions above \"read committed\", "
				  "which are this connection's default"
				: "a lease queue cannot be served in transactions above \"read committed\"");
	if (handler != NULL && (plan->policy.transactional || form == RS_FORM_ROW_LOCK) &&
		rs_postgres_ends_transactions(session, handler))
		return refuse(base,
					  plan->policy.transactional
						  ? "Answer an outcome instead, or subscribe without a transaction."
						  : "It would give up the row's lock; use the lease form, or leave it out.",
					  "the handler begins or ends a transaction, but works inside its delivery's");
	if (form == RS_FORM_ROW_LOCK && sees_one_snapshot)
		*warning =
			"above \"read committed\" claims and settlements that meet fail with serialization "
			"errors; they are tried again";
	return form == RS_FORM_ADVISORY_LOCK ? rs_postgres_prepare_keys(base) : RS_DONE;
}

/* ----------------------------------------------------------------- waiting */

/* The table that an idle worker listens for; 0 where that would be of no use. */
static Oid
table_to_listen_to(rs_postgres_session *session)
{
	const rs_table *table = session->base.table;
	const char *values[] = {table->schema, table->name};
	rs_result code;
	PGresult *result;
	Oid oid;

	/* What is heard behind a pooler is whoever's that has the server. */
	if (session->is_pooled)
		return 0;
	result = rs_postgres_send(session,
							  "SELECT c.oid FROM pg_catalog.pg_class AS c"
							  " JOIN pg_catalog.pg_namespace AS n"
							  " ON n.oid OPERATOR(pg_catalog.=) c.relnamespace"
							  " WHERE n.nspname OPERATOR(pg_catalog.=) $1"
							  " AND c.relname OPERATOR(pg_catalog.=) $2",
							  -1, 2, NULL, values, NULL, NULL, false, &code);
	if (result == NULL)
		return 0;
	oid = PQntuples(result) == 1 ? (Oid) strtoul(PQgetvalue(result, 0, 0), NULL, 10) : 0;
	PQclear(result);
	return oid;
}

/* True where it was not listening before: there may be something already. */
static bool
listen(rs_postgres_session *session)
{
	char text[96];
	Oid before = session->listens_to;

	if (session->base.table == NULL || session->listens_for == session->base.table)
		return false;
	session->listens_for = session->base.table;
	session->listens_to = table_to_listen_to(session);
	if (session->listens_to == before)
		return false;
	(void) snprintf(text, sizeof(text), "UNLISTEN ruststream_%u; LISTEN ruststream_%u", before,
					session->listens_to);
	return rs_postgres_run(session, text) == RS_DONE;
}

/* Whatever came, ours or a callback's own, is reason to look. */
static bool
was_notified(PGconn *connection)
{
	PGnotify *notice;
	bool any = false;

	while ((notice = PQnotifies(connection)) != NULL)
	{
		any = true;
		PQfreemem(notice);
	}
	return any;
}

rs_result
rs_postgres_wait(rs_session *base, int stop_fd, int64_t ms)
{
	rs_postgres_session *session = rs_postgres_of(base);
	PGconn *connection = session->connection;
	int64_t until = rs_monotonic() + ms * RS_MILLISECOND;

	if (listen(session) || was_notified(connection))
		return RS_DONE;
	for (;;)
	{
		struct pollfd sockets[] = {{.fd = stop_fd, .events = POLLIN},
								   {.fd = PQsocket(connection), .events = POLLIN}};
		int64_t left = (until - rs_monotonic() + RS_MILLISECOND - 1) / RS_MILLISECOND;

		if (left <= 0 || poll(sockets, 2, left < 60000 ? (int) left : 60000) < 0)
			return RS_DONE;
		if (sockets[0].revents != 0)
			return RS_DONE;
		if (sockets[1].revents != 0 && PQconsumeInput(connection) != 1)
			return RS_LOST;
		if (was_notified(connection))
			return RS_DONE;
	}
}
