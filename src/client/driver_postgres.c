/*-------------------------------------------------------------------------
 *
 * driver_postgres.c
 *	  The PostgreSQL driver: connections, errors, transactions.
 *
 * A delivery asks for few round trips: what stands around our statements (BEGIN, the
 * savepoint, settings, the clock) travels as one text wherever nothing of the
 * user's runs in between, or behind the claim, in a pipeline.
 *
 * Our statements are kept prepared and planned with what would scan or sort a queue disabled,
 * whatever the statistics said when they were planned.  These settings are on (plans_our_way) while
 * our statements run, and off while a handler does.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_postgres.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/*
 * A bitmap would have to be sorted, and so would any other index.  Prepared statements would be
 * planned anew for the first five values; one plan does for all.
 */
#define OUR_WAY                                                                                    \
	"SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off; "                                \
	"SET LOCAL plan_cache_mode = force_generic_plan; "
#define THEIR_WAY                                                                                  \
	"SET LOCAL enable_seqscan TO DEFAULT; SET LOCAL enable_sort TO DEFAULT; "                      \
	"SET LOCAL plan_cache_mode TO DEFAULT; "

/* The running clock, in microseconds since 1970. */
#define NOW                                                                                        \
	"SELECT (pg_catalog.date_part('epoch', pg_catalog.clock_timestamp())"                          \
	" OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8"

/* Both in one statement, which is kept prepared: to plan the clock's costs more than to read it. */
#define NOW_AND_OUR_WAY                                                                            \
	NOW ", pg_catalog.set_config('enable_seqscan', 'off', true),"                                  \
		" pg_catalog.set_config('enable_sort', 'off', true),"                                      \
		" pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', true)"
#define OUR_WAY_SIZE sizeof(OUR_WAY NOW)

/* A handler may keep its transaction waiting, and a worker be idle, for as long as need be. */
#define SET_UP "SET idle_in_transaction_session_timeout = 0; "
#define SET_UP_14 SET_UP "SET idle_session_timeout = 0; "
#define SET_UP_17 SET_UP_14 "SET transaction_timeout = 0; "

static const char *
set_up_text(const PGconn *connection)
{
	int version = PQserverVersion(connection);

	return version >= 170000 ? SET_UP_17 : version >= 140000 ? SET_UP_14 : SET_UP;
}

/* ----------------------------------------------------------------- errors */

/* libpq's messages end with a line feed, and may have several lines. */
static void
take_message(rs_error *error, ruststream_code code, const char *message)
{
	size_t length;

	rs_error_set(error, code, "", NULL, "%s", message);
	length = strlen(error->message);
	while (length > 0 && error->message[length - 1] == '\n')
		error->message[--length] = '\0';
	for (size_t i = 0; i < length; i++)
	{
		if (error->message[i] == '\n' || error->message[i] == '\t')
			error->message[i] = ' ';
	}
}

/*
 * The statements that were kept are the server's no more: a pooler has another one, or a handler
 * has dropped them.
 */
static bool
is_of_statements(const char *state, const char *message)
{
	return strcmp(state, "26000") == 0 || strcmp(state, "42P05") == 0 ||
		   (strcmp(state, "0A000") == 0 && strstr(message, "cached plan") != NULL);
}

/* Nothing is sent: the names are not used again. */
static void
drop_names(rs_postgres_session *session)
{
	for (int i = 0; i < RS_SLOT_COUNT; i++)
	{
		free(session->kept[i].text);
		session->kept[i].text = NULL;
	}
}

rs_result
rs_postgres_fail(rs_postgres_session *session, const PGresult *result)
{
	rs_error *error = &session->base.error;
	const char *state = result != NULL ? PQresultErrorField(result, PG_DIAG_SQLSTATE) : NULL;
	const char *message =
		result != NULL ? PQresultErrorField(result, PG_DIAG_MESSAGE_PRIMARY) : NULL;
	const char *detail = result != NULL ? PQresultErrorField(result, PG_DIAG_MESSAGE_DETAIL) : NULL;

	session->has_now = false;
	if (PQstatus(session->connection) == CONNECTION_BAD || state == NULL || message == NULL)
	{
		bool lost = PQstatus(session->connection) == CONNECTION_BAD;

		take_message(error, lost ? RUSTSTREAM_UNAVAILABLE : RUSTSTREAM_DATABASE,
					 message != NULL ? message : PQerrorMessage(session->connection));
		if (state != NULL)
			(void) snprintf(error->state, sizeof(error->state), "%s", state);
		return lost ? RS_LOST : RS_FAILED;
	}
	rs_error_set(error, RUSTSTREAM_DATABASE, state,
				 PQresultErrorField(result, PG_DIAG_MESSAGE_HINT), "%s%s%s%s", message,
				 detail != NULL ? " (" : "", detail != NULL ? detail : "",
				 detail != NULL ? ")" : "");
	if (is_of_statements(state, message))
	{
		/* Behind a pooler it will come again: each statement travels whole from now on. */
		session->loses_statements = session->is_pooled;
		drop_names(session);
		return RS_TRANSIENT;
	}
	return strcmp(state, "40001") == 0 || strcmp(state, "40P01") == 0 ? RS_TRANSIENT : RS_FAILED;
}

rs_result
rs_postgres_refuse_ended(rs_postgres_session *session)
{
	rs_error_set(&session->base.error, RUSTSTREAM_DATABASE, "2D000",
				 "A handler works inside its delivery's transaction, which is not its to end: "
				 "answer an outcome instead.",
				 "the handler has ended its delivery's transaction");
	return RS_FAILED;
}

bool
rs_postgres_has_ended(const rs_postgres_session *session)
{
	return session->in_transaction && PQtransactionStatus(session->connection) == PQTRANS_IDLE;
}

/* ---------------------------------------------------------- running a text */

/* What the clock said, where the result is its. */
static void
take_now(rs_postgres_session *session, const PGresult *result)
{
	if (PQresultStatus(result) != PGRES_TUPLES_OK || PQntuples(result) != 1)
		return;
	session->now = strtoll(PQgetvalue(result, 0, 0), NULL, 10);
	session->has_now = true;
}

rs_result
rs_postgres_run(rs_postgres_session *session, const char *text)
{
	PGresult *result = PQexec(session->connection, text);
	rs_result code = RS_DONE;

	session->has_now = false;
	switch (PQresultStatus(result))
	{
		case PGRES_COMMAND_OK:
		case PGRES_EMPTY_QUERY:
			break;
		case PGRES_TUPLES_OK:
			take_now(session, result);
			break;
		default:
			code = rs_postgres_fail(session, result);
	}
	PQclear(result);
	return code;
}

/*
 * The text that reads the clock and turns our way on: by the statement that is kept since the last
 * begin, unless a pooler is in between, which may know prepared statements by other names.
 */
static void
write_our_way(const rs_postgres_session *session, char text[OUR_WAY_SIZE])
{
	const rs_postgres_kept *kept = &session->kept[RS_SLOT_OUR_WAY];

	if (kept->text == NULL || session->is_pooled)
		(void) snprintf(text, OUR_WAY_SIZE, "%s", OUR_WAY NOW);
	else
		(void) snprintf(text, OUR_WAY_SIZE, "EXECUTE ruststream_%u", kept->number);
}

rs_result
rs_postgres_plan_our_way(rs_postgres_session *session)
{
	rs_result result = RS_DONE;

	if (session->plans_our_way)
		return result;
	result = rs_postgres_run(session, OUR_WAY);
	session->plans_our_way = result == RS_DONE;
	return result;
}

/* ------------------------------------------------------------ connections */

static void
close_session(rs_session *base)
{
	rs_postgres_session *session = rs_postgres_of(base);

	if (session == NULL)
		return;
	drop_names(session);
	rs_postgres_forget_handler(session);
	PQfreeCancel(session->cancel);
	PQfinish(session->connection);
	rs_arena_free(&session->scratch);
	rs_arena_free(&session->line_arena);
	free(session);
}

#define MAX_OPTIONS 64

/* What libpq is told; false: the URL has more parameters than could be meant. */
static bool
collect_options(const rs_url *url, const char *port, const char *names[], const char *values[])
{
	const struct
	{
		const char *name;
		const char *value;
	} first[] = {
		{"client_encoding", "UTF8"},
		{"fallback_application_name", "ruststream"},
		{"connect_timeout", "30"},
		{"user", url->user},
		{"password", url->password},
		{"host", url->host},
		{"port", port},
		{"dbname", url->database},
	};
	int count = 0;

	/* A parameter of the URL comes later, and counts. */
	for (size_t i = 0; i < sizeof(first) / sizeof(first[0]); i++)
	{
		if (first[i].value == NULL || first[i].value[0] == '\0')
			continue;
		names[count] = first[i].name;
		values[count++] = first[i].value;
	}
	if (url->parameter_count > MAX_OPTIONS - 1 - count)
		return false;
	for (int i = 0; i < url->parameter_count; i++)
	{
		names[count] = url->parameter_names[i];
		values[count++] = url->parameter_values[i];
	}
	names[count] = NULL;
	values[count] = NULL;
	return true;
}

/* Settings, and what we ask of a new connection: who answers, and how its transactions begin. */
static rs_result
set_up(rs_postgres_session *session)
{
	PGconn *connection = session->connection;
	rs_result result = rs_postgres_run(session, set_up_text(connection));
	PGresult *answer;

	if (result != RS_DONE)
		return result;
	answer = PQexec(connection, "SELECT pg_catalog.pg_backend_pid(),"
								" pg_catalog.current_setting('default_transaction_isolation')");
	if (PQresultStatus(answer) == PGRES_TUPLES_OK && PQntuples(answer) == 1)
	{
		session->is_pooled = atoi(PQgetvalue(answer, 0, 0)) != PQbackendPID(connection);
		if (!rs_isolation_find(PQgetvalue(answer, 0, 1), &session->default_isolation))
			session->default_isolation = RS_ISOLATION_READ_COMMITTED;
	}
	else
		result = rs_postgres_fail(session, answer);
	PQclear(answer);
	return result;
}

rs_result
rs_postgres_connect(const rs_url *url, PGconn **result, rs_error *error)
{
	const char *names[MAX_OPTIONS];
	const char *values[MAX_OPTIONS];
	char port[16] = "";
	PGconn *connection;

	*result = NULL;
	if (url->port != 0)
		(void) snprintf(port, sizeof(port), "%d", url->port);
	if (!collect_options(url, port, names, values))
	{
		rs_error_set(error, RUSTSTREAM_MISUSE, "", NULL, "the URL has too many parameters");
		return RS_FAILED;
	}
	connection = PQconnectdbParams(names, values, 0);
	if (connection == NULL)
		rs_error_set(error, RUSTSTREAM_NO_MEMORY, "", NULL, "out of memory");
	else if (PQstatus(connection) != CONNECTION_OK)
	{
		take_message(error, RUSTSTREAM_UNAVAILABLE, PQerrorMessage(connection));
		if (PQconnectionNeedsPassword(connection) || PQconnectionUsedPassword(connection))
			(void) snprintf(error->hint, sizeof(error->hint), "%s", RS_HINT_PASSWORD);
	}
	else if (PQserverVersion(connection) < RS_POSTGRES_OLDEST)
		rs_error_set(error, RUSTSTREAM_UNAVAILABLE, "", "Use PostgreSQL 12 or later.",
					 "PostgreSQL %d is too old", PQserverVersion(connection) / 10000);
	else
	{
		*result = connection;
		return RS_DONE;
	}
	PQfinish(connection);
	return RS_FAILED;
}

rs_result
rs_postgres_open(const rs_url *url, rs_session **result, rs_error *error)
{
	rs_postgres_session *session = calloc(1, sizeof(rs_postgres_session));

	*result = NULL;
	if (session == NULL)
	{
		rs_error_set(error, RUSTSTREAM_NO_MEMORY, "", NULL, "out of memory");
		return RS_FAILED;
	}
	session->base.driver = &rs_postgres_driver;
	session->url = url;
	if (rs_postgres_connect(url, &session->connection, error) != RS_DONE)
	{
		close_session(&session->base);
		return RS_FAILED;
	}
	(void) PQsetNoticeReceiver(session->connection, rs_postgres_receive, session);
	session->cancel = PQgetCancel(session->connection);
	if (set_up(session) != RS_DONE)
	{
		*error = session->base.error;
		error->code = RUSTSTREAM_UNAVAILABLE;
		close_session(&session->base);
		return RS_FAILED;
	}
	*result = &session->base;
	return RS_DONE;
}

static void *
native(rs_session *base)
{
	return rs_postgres_of(base)->connection;
}

static void
interrupt(rs_session *base)
{
	char ignored[256];

	(void) PQcancel(rs_postgres_of(base)->cancel, ignored, sizeof(ignored));
}

/* ----------------------------------------------------------- transactions */

/* Which level a transaction of this purpose has. */
static rs_isolation
level_of(const rs_postgres_session *session, rs_purpose purpose, const rs_table *table)
{
	if (purpose == RS_FOR_US)
		return RS_ISOLATION_READ_COMMITTED;
	return table->isolation == RS_ISOLATION_DEFAULT ? session->default_isolation : table->isolation;
}

/*
 * What is left to the server's defaults is so by the session's settings at the beginning of the
 * message, in which they are perhaps reset from what a handler has made of them: then it is said.
 */
static const char *
begin_text(const rs_postgres_session *session, rs_purpose purpose, const rs_table *table)
{
	rs_isolation level = purpose == RS_FOR_US || session->needs_reset
							 ? level_of(session, purpose, table)
							 : table->isolation;

	switch (level)
	{
		case RS_ISOLATION_READ_COMMITTED:
			return "BEGIN ISOLATION LEVEL READ COMMITTED, READ WRITE; ";
		case RS_ISOLATION_REPEATABLE_READ:
			return "BEGIN ISOLATION LEVEL REPEATABLE READ, READ WRITE; ";
		case RS_ISOLATION_SERIALIZABLE:
			return "BEGIN ISOLATION LEVEL SERIALIZABLE, READ WRITE; ";
		default:
			return "BEGIN READ WRITE; ";
	}
}

/*
 * What follows is ours: a claim, a take or a settlement, unless a handler comes first, as it does
 * in the transaction of a delivery whose claim is committed.  There a mark stands in front of the
 * handler, by which check_writes knows the transaction again.
 *
 * Above READ COMMITTED the clock is read before the transaction, so that the claim is the
 * statement that takes its snapshot.
 *
 * In the row lock form the savepoint comes along with the claim, where that is one statement.
 */
static rs_result
begin(rs_session *base, rs_purpose purpose, const rs_table *table)
{
	rs_postgres_session *session = rs_postgres_of(base);
	bool handler_first = purpose == RS_FOR_DELIVERY && rs_table_form(table) != RS_FORM_ROW_LOCK;
	bool takes_snapshot = level_of(session, purpose, table) != RS_ISOLATION_READ_COMMITTED;
	bool resets = session->needs_reset;
	bool reads_now = !takes_snapshot && !handler_first;
	int64_t now = 0;
	char name[32];
	char our_way[OUR_WAY_SIZE] = OUR_WAY;
	char text[1536];
	rs_result result = RS_DONE;

	if (PQtransactionStatus(session->connection) == PQTRANS_INTRANS ||
		PQtransactionStatus(session->connection) == PQTRANS_INERROR)
	{
		/* A callback without a transaction of ours has left one of its own. */
		result = base->driver->rollback(base);
		if (result != RS_DONE)
			return result;
	}
	if (takes_snapshot && !handler_first)
	{
		result = rs_postgres_run(session, NOW);
		now = session->now;
	}
	else if (reads_now && !session->is_pooled)
		result = rs_postgres_prepare(session, RS_SLOT_OUR_WAY, NOW_AND_OUR_WAY, 0, NULL, name);
	if (result != RS_DONE)
		return result;
	if (reads_now)
		write_our_way(session, our_way);
	(void) snprintf(text, sizeof(text), "%s%s%s%s", resets ? "RESET ROLE; RESET ALL; " : "",
					resets ? set_up_text(session->connection) : "",
					begin_text(session, purpose, table),
					handler_first ? "SAVEPOINT ruststream_handler" : our_way);
	result = rs_postgres_run(session, text);
	session->in_transaction = result == RS_DONE;
	session->plans_our_way = result == RS_DONE && !handler_first;
	session->was_reset = resets;
	session->mark = handler_first ? "ruststream_handler" : NULL;
	if (takes_snapshot && !handler_first && result == RS_DONE)
	{
		session->now = now;
		session->has_now = true;
	}
	return result;
}

/* A COMMIT of a transaction that has failed says ROLLBACK, and no error. */
static rs_result
commit(rs_session *base)
{
	rs_postgres_session *session = rs_postgres_of(base);
	PGresult *result;
	rs_result code = RS_DONE;

	session->has_now = false;
	if (rs_postgres_has_ended(session))
		return rs_postgres_refuse_ended(session);
	result = PQexec(session->connection, "COMMIT");
	if (PQresultStatus(result) != PGRES_COMMAND_OK)
		code = rs_postgres_fail(session, result);
	else if (strcmp(PQcmdStatus(result), "COMMIT") != 0)
	{
		rs_error_set(&base->error, RUSTSTREAM_DATABASE, "25P02", NULL,
					 "the transaction had failed already, and was rolled back");
		code = RS_FAILED;
	}
	PQclear(result);
	session->in_transaction = false;
	session->plans_our_way = false;
	session->mark = NULL;
	if (code == RS_DONE && session->was_reset)
		session->needs_reset = session->was_reset = false;
	return code;
}

/* A handler may have left anything: a query under way, a COPY, a pipeline. */
static bool
come_to_rest(PGconn *connection)
{
	PGresult *result;

	if (PQpipelineStatus(connection) != PQ_PIPELINE_OFF || PQsetnonblocking(connection, 0) != 0)
		return false;
	if (PQtransactionStatus(connection) != PQTRANS_ACTIVE)
		return true;
	while ((result = PQgetResult(connection)) != NULL)
	{
		ExecStatusType status = PQresultStatus(result);

		PQclear(result);
		if (status == PGRES_COPY_IN || status == PGRES_COPY_OUT || status == PGRES_COPY_BOTH)
			return false;
		if (PQstatus(connection) == CONNECTION_BAD)
			return false;
	}
	return true;
}

static rs_result
rollback(rs_session *base)
{
	rs_postgres_session *session = rs_postgres_of(base);
	PGTransactionStatusType status;

	session->has_now = false;
	session->in_transaction = false;
	session->plans_our_way = false;
	session->was_reset = false;
	session->mark = NULL;
	if (PQstatus(session->connection) == CONNECTION_BAD || !come_to_rest(session->connection))
		return RS_LOST;
	status = PQtransactionStatus(session->connection);
	if (status == PQTRANS_INTRANS || status == PQTRANS_INERROR)
		(void) rs_postgres_run(session, "ROLLBACK");
	return PQtransactionStatus(session->connection) == PQTRANS_IDLE ? RS_DONE : RS_LOST;
}

static rs_result
savepoint(rs_session *base)
{
	rs_postgres_session *session = rs_postgres_of(base);

	if (session->mark != NULL)
		return RS_DONE; /* it came with the claim */
	session->plans_our_way = false;
	session->mark = RS_POSTGRES_CLAIM_MARK;
	return rs_postgres_run(session, THEIR_WAY RS_POSTGRES_SAVEPOINT);
}

static rs_result
rollback_to(rs_session *base)
{
	rs_postgres_session *session = rs_postgres_of(base);
	rs_result result =
		rs_postgres_has_ended(session)
			? rs_postgres_refuse_ended(session)
			: rs_postgres_run(session,
							  "ROLLBACK TO SAVEPOINT " RS_POSTGRES_CLAIM_MARK "; " OUR_WAY NOW);

	session->plans_our_way = result == RS_DONE;
	return result;
}

/*
 * Deferred constraints fire in front of the mark, so that what they refuse is the handler's
 * failure.  Where the mark is gone, the transaction is not the one that the delivery began.  The
 * time is what a row that is kept is marked with; one that is deleted needs none.
 */
static rs_result
check_writes(rs_session *base)
{
	rs_postgres_session *session = rs_postgres_of(base);
	bool reads_now = base->table != NULL && base->table->column[RS_ROLE_PROCESSED_AT] != NULL;
	char our_way[OUR_WAY_SIZE] = OUR_WAY;
	char text[1024];
	rs_result result;

	if (rs_postgres_has_ended(session))
		return rs_postgres_refuse_ended(session);
	if (reads_now)
		write_our_way(session, our_way);
	(void) snprintf(text, sizeof(text), "SET CONSTRAINTS ALL IMMEDIATE; RELEASE SAVEPOINT %s; %s%s",
					session->mark, session->needs_reset ? "RESET ROLE; " : "", our_way);
	result = rs_postgres_run(session, text);
	session->plans_our_way = result == RS_DONE;
	if (result == RS_FAILED &&
		(strcmp(base->error.state, "3B001") == 0 || strcmp(base->error.state, "25P01") == 0))
		return rs_postgres_refuse_ended(session);
	return result;
}

static void
guard_handler(rs_session *base, bool on, bool transactional)
{
	(void) on;
	(void) transactional;
	rs_postgres_of(base)->has_now = false;
}

static rs_result
now(rs_session *base, int64_t *result)
{
	rs_postgres_session *session = rs_postgres_of(base);
	rs_result code = session->has_now ? RS_DONE : rs_postgres_run(session, NOW);

	*result = session->now;
	session->has_now = false;
	return code;
}

const rs_driver rs_postgres_driver = {
	.name = "postgres",
	.dialect = RS_DIALECT_POSTGRESQL,
	.open = rs_postgres_open,
	.close = close_session,
	.native = native,
	.begin = begin,
	.commit = commit,
	.rollback = rollback,
	.savepoint = savepoint,
	.rollback_to = rollback_to,
	.execute = rs_postgres_execute,
	.forget_statements = rs_postgres_forget_statements,
	.now = now,
	.format_time = rs_postgres_format_time,
	.parse_time = rs_time_parse,
	.claim = rs_postgres_claim,
	.candidates = rs_postgres_candidates,
	.lock_key = rs_postgres_lock_key,
	.unlock_key = rs_postgres_unlock_key,
	.key_is_held = rs_postgres_key_is_held,
	.prepare_keys = rs_postgres_prepare_keys,
	.look = rs_postgres_look,
	.check_plan = rs_postgres_check_plan,
	.check_handler = rs_postgres_check_handler,
	.call_handler = rs_postgres_call_handler,
	.left_open = rs_postgres_left_open,
	.guard_handler = guard_handler,
	.check_writes = check_writes,
	.interrupt = interrupt,
	.wait = rs_postgres_wait,
	.catalog = rs_postgres_catalog,
	.install = rs_postgres_install,
	.find_version = rs_postgres_find_version,
};
