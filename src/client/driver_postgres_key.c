/*-------------------------------------------------------------------------
 *
 * driver_postgres_key.c
 *	  The PostgreSQL driver: advisory keys, and poolers that lose them.
 *
 * A key is a lock of the session's, on hashtextextended(key, 0).  A pooler in transaction mode
 * gives each transaction whichever session is free: a key would stay behind with one of them, held
 * by nobody who knows of it.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_postgres.h"

#include <poll.h>
#include <stdlib.h>

#define HASH "pg_catalog.hashtextextended($1, 0)"

/* This session holds the key. */
#define IS_HELD                                                                                    \
	"EXISTS (SELECT 1 FROM pg_catalog.pg_locks AS k"                                               \
	" WHERE k.locktype OPERATOR(pg_catalog.=) 'advisory' AND k.granted"                            \
	" AND k.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid()"                                \
	" AND k.mode OPERATOR(pg_catalog.=) 'ExclusiveLock'"                                           \
	" AND k.objsubid OPERATOR(pg_catalog.=) 1"                                                     \
	" AND k.database OPERATOR(pg_catalog.=) (SELECT d.oid FROM pg_catalog.pg_database AS d"        \
	" WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database())"                       \
	" AND (k.classid::pg_catalog.int8 OPERATOR(pg_catalog.<<) 32)"                                 \
	" OPERATOR(pg_catalog.|) k.objid::pg_catalog.int8 OPERATOR(pg_catalog.=) " HASH ")"

/* One question of a key, whose answer is yes or no. */
static rs_result
ask(rs_postgres_session *session, const char *text, int slot, const char *key, bool *yes)
{
	static const Oid types[RS_MAX_KEPT_TYPES] = {RS_OID_TEXT};
	rs_result code;
	PGresult *result =
		rs_postgres_send(session, text, slot, 1, types, &key, NULL, NULL, false, &code);

	*yes = false;
	if (result == NULL)
		return code;
	*yes = PQntuples(result) == 1 && PQgetvalue(result, 0, 0)[0] == 't';
	PQclear(result);
	return RS_DONE;
}

rs_result
rs_postgres_lock_key(rs_session *base, const char *key, bool *locked)
{
	rs_postgres_session *session = rs_postgres_of(base);
	rs_result result =
		ask(session, "SELECT pg_catalog.pg_try_advisory_lock(" HASH ")", RS_SLOT_LOCK, key, locked);

	if (*locked)
		session->lost_a_key = false;
	return result;
}

/* A key that is not held any more is not released: the server would warn of it. */
void
rs_postgres_unlock_key(rs_session *base, const char *key)
{
	rs_postgres_session *session = rs_postgres_of(base);
	bool unlocked;

	if (session->lost_a_key)
		(void) ask(session,
				   "SELECT CASE WHEN " IS_HELD " THEN pg_catalog.pg_advisory_unlock(" HASH ") END",
				   -1, key, &unlocked);
	else
		(void) ask(session, "SELECT pg_catalog.pg_advisory_unlock(" HASH ")", RS_SLOT_UNLOCK, key,
				   &unlocked);
}

bool
rs_postgres_key_is_held(rs_session *base, const char *key)
{
	rs_postgres_session *session = rs_postgres_of(base);
	bool held;

	if (ask(session, "SELECT " IS_HELD, RS_SLOT_IS_HELD, key, &held) != RS_DONE)
		held = false;
	session->lost_a_key |= !held;
	return held;
}

/* ---------------------------------------------------------------- poolers */

/* How long a pooler that is short of servers is waited for. */
#define POOL_PATIENCE_MS 2000

/*
 * The process that answers, asked by a text whose last statement returns it; 0 where no answer
 * comes in time.
 */
static int
pid_of(PGconn *connection, const char *text)
{
	struct pollfd socket = {.fd = PQsocket(connection), .events = POLLIN};
	int64_t until = rs_monotonic() + POOL_PATIENCE_MS * RS_MILLISECOND;
	PGresult *result;
	int pid = 0;

	if (PQsendQuery(connection, text) != 1)
		return 0;
	while (PQisBusy(connection))
	{
		int64_t left = (until - rs_monotonic()) / RS_MILLISECOND;

		if (left <= 0 || poll(&socket, 1, (int) left) < 0 || PQconsumeInput(connection) != 1)
			return 0;
	}
	while ((result = PQgetResult(connection)) != NULL)
	{
		if (PQresultStatus(result) == PGRES_TUPLES_OK && PQntuples(result) == 1)
			pid = atoi(PQgetvalue(result, 0, 0));
		PQclear(result);
	}
	return pid;
}

#define WHO "SELECT pg_catalog.pg_backend_pid()"

/*
 * Does this connection keep its server between two transactions?  A second one begins a
 * transaction meanwhile: where servers are shared, it has ours, or makes us have another.
 */
static bool
keeps_its_server(rs_postgres_session *session, PGconn *other)
{
	int ours = pid_of(session->connection, WHO);
	int theirs = pid_of(other, "BEGIN; " WHO);

	/* No server for it, while ours is idle: ours is kept for us. */
	if (theirs == 0)
		return ours != 0;
	if (ours == 0 || theirs == ours)
		return false;
	for (int i = 0; i < 4; i++)
	{
		if (pid_of(session->connection, WHO) != ours)
			return false;
	}
	return true;
}

rs_result
rs_postgres_prepare_keys(rs_session *base)
{
	rs_postgres_session *session = rs_postgres_of(base);
	PGconn *other;
	rs_error error;

	if (!session->is_pooled || session->keys_work)
		return RS_DONE;
	if (rs_postgres_connect(session->url, &other, &error) != RS_DONE)
	{
		base->error = error;
		return RS_FAILED;
	}
	session->keys_work = keeps_its_server(session, other);
	PQfinish(other);
	if (session->keys_work)
		return RS_DONE;
	rs_error_set(&base->error, RUSTSTREAM_REFUSED, "0A000",
				 "Connect to the server directly, or let the pooler keep a server for each client "
				 "(PgBouncer: pool_mode = session). The row lock and lease forms need neither.",
				 "this connection goes through a pooler that shares servers between transactions, "
				 "and an advisory lock would stay behind with one of them");
	return RS_FAILED;
}
