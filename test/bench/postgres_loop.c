/*-------------------------------------------------------------------------
 *
 * postgres_loop.c
 *	  What a user would write by hand: the statements of a delivery from a row lock
 *	  queue, prepared, in a loop, for comparison with the client library.
 *
 *	  postgres_loop CONNECTION
 *
 * The tables are script/bench-postgres-client's.  Ends when no row is left.
 *
 * The same as the library's: the claim, the savepoint, the handler, deferred constraints,
 * the end, one transaction a delivery; each of them a round trip, as one writes it.  Not
 * here, since this handler needs none of it: undoing settings that it has left (RESET),
 * settings that the planner has for our statements alone, any other outcome, and counters.
 * The claim reads the clock itself; the library reads it first, to have one "now".
 *
 *-------------------------------------------------------------------------
 */
#include <libpq-fe.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static PGconn *connection;

static PGresult *
checked(PGresult *result)
{
	ExecStatusType status = PQresultStatus(result);

	if (status != PGRES_COMMAND_OK && status != PGRES_TUPLES_OK)
	{
		fprintf(stderr, "%s", PQresultErrorMessage(result));
		exit(1);
	}
	return result;
}

static void
run(const char *text)
{
	PQclear(checked(PQexec(connection, text)));
}

static PGresult *
run_prepared(const char *name, int count, const char *const *values)
{
	return checked(PQexecPrepared(connection, name, count, values, NULL, NULL, 0));
}

static void
prepare(const char *name, const char *text)
{
	PQclear(checked(PQprepare(connection, name, text, 0, NULL)));
}

int
main(int argc, char **argv)
{
	static const char *const limits[] = {"{}", "1"};

	connection = PQconnectdb(argc == 2 ? argv[1] : "");
	if (PQstatus(connection) != CONNECTION_OK)
		return 2;
	prepare("claim",
			"SELECT * FROM (SELECT id, coalesce(attempt, 1)::int8, payload FROM jobs"
			" WHERE retry_after IS NULL AND id <> ALL ($1)"
			" ORDER BY retry_after NULLS FIRST, id LIMIT $2 FOR UPDATE SKIP LOCKED) AS undelayed"
			" UNION ALL SELECT * FROM (SELECT id, coalesce(attempt, 1)::int8, payload FROM jobs"
			" WHERE retry_after <= clock_timestamp() AND id <> ALL ($1)"
			" ORDER BY retry_after NULLS FIRST, id LIMIT $2 FOR UPDATE SKIP LOCKED) AS come_due"
			" LIMIT $2");
	prepare("handle", "INSERT INTO effect (job, payload) VALUES ($1, $2)");
	prepare("ack", "DELETE FROM jobs WHERE id = $1");
	for (;;)
	{
		PGresult *row;
		PGresult *ended;
		const char *values[2];

		run("BEGIN");
		row = run_prepared("claim", 2, limits);
		if (PQntuples(row) == 0)
			break;
		values[0] = PQgetvalue(row, 0, 0);
		values[1] = PQgetvalue(row, 0, 2);
		run("SAVEPOINT claimed");
		PQclear(run_prepared("handle", 2, values));
		run("SET CONSTRAINTS ALL IMMEDIATE; RELEASE SAVEPOINT claimed");
		ended = run_prepared("ack", 1, values);
		if (strcmp(PQcmdTuples(ended), "1") != 0)
			return 1;
		PQclear(ended);
		run("COMMIT");
		PQclear(row);
	}
	PQfinish(connection);
	return 0;
}
