/*-------------------------------------------------------------------------
 *
 * failure.c
 *	  The history of failures: ruststream.failure_history.
 *
 * A failure is recorded in the transaction that settles it, so that there is
 * one record per failed delivery, neither more nor fewer, and as the owner of
 * our catalogs, since a subscription's owner has no right to write there.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"

#include "catalog/pg_type_d.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"

/* How many failures of a subscription are kept; CppAsString2 below needs a literal. */
#define RS_FAILURES_KEPT 1000

/* No text of a failure is kept beyond this: the history is bounded in bytes, too. */
#define RS_FAILURE_TEXT_BYTES 8192

/* The owner's statement, prepared once a backend. */
static SPIPlanPtr insert_plan;

static const char insert_text[] =
	"INSERT INTO ruststream.failure_history (at, subscription_id, subscription, queue, row_id, "
	"attempt, sqlstate, message, detail, hint, context) "
	"VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";

/*
 * In id order, the newest RS_FAILURES_KEPT of each subscription stay; those of
 * subscriptions that are gone go.  Where that cuts is found once for each
 * subscription: without MATERIALIZED it would be for each failure.  It waits for
 * nobody: what a transaction that is still open has deleted (unsubscribe, or another
 * prune) is that one's.
 */
static const char prune_text[] =
	"WITH c AS MATERIALIZED (SELECT d.subscription_id, "
	"              (SELECT h.id FROM ruststream.failure_history AS h "
	"               WHERE h.subscription_id OPERATOR(pg_catalog.=) d.subscription_id "
	"               ORDER BY h.id DESC OFFSET " CppAsString2(
		RS_FAILURES_KEPT) " LIMIT 1) AS cut, "
						  "              EXISTS (SELECT 1 FROM ruststream.subscription AS s "
						  "                      WHERE s.id OPERATOR(pg_catalog.=) "
						  "d.subscription_id) AS known "
						  "       FROM (SELECT DISTINCT g.subscription_id FROM "
						  "ruststream.failure_history AS g) AS d) "
						  "DELETE FROM ruststream.failure_history AS f "
						  "WHERE f.id OPERATOR(pg_catalog.=) ANY (ARRAY("
						  "SELECT o.id FROM c JOIN ruststream.failure_history AS o "
						  "ON o.subscription_id OPERATOR(pg_catalog.=) c.subscription_id "
						  "WHERE o.id OPERATOR(pg_catalog.<=) c.cut OR NOT c.known "
						  "FOR UPDATE OF o SKIP LOCKED))";

/* A text for the history, clipped at a character's boundary. */
static Datum
clipped_text(const char *text)
{
	int length = strlen(text);

	if (length > RS_FAILURE_TEXT_BYTES)
		length = pg_mbcliplen(text, length, RS_FAILURE_TEXT_BYTES);
	return PointerGetDatum(cstring_to_text_with_len(text, length));
}

static Datum
optional_text(const char *text, char *null)
{
	*null = text == NULL ? 'n' : ' ';
	return text == NULL ? (Datum) 0 : clipped_text(text);
}

void
rs_failure_record(const RsSubscription *subscription, const RsDelivery *delivery,
				  const ErrorData *error)
{
	static Oid types[] = {TIMESTAMPTZOID, INT4OID, TEXTOID, OIDOID,  TEXTOID, INT8OID,
						  TEXTOID,        TEXTOID, TEXTOID, TEXTOID, TEXTOID};
	Datum values[lengthof(types)];
	char nulls[lengthof(types)];
	MemoryContext save_context = CurrentMemoryContext;
	Oid save_userid;
	int save_sec_context;
	int rc;

	memset(nulls, ' ', sizeof(nulls));
	values[0] = TimestampTzGetDatum(GetCurrentTimestamp());
	values[1] = Int32GetDatum(subscription->id);
	values[2] = CStringGetTextDatum(subscription->name);
	values[3] = ObjectIdGetDatum(subscription->queue.relid);
	values[4] = CStringGetTextDatum(delivery->id_text);
	values[5] = Int64GetDatum(delivery->attempt);
	values[6] = CStringGetTextDatum(unpack_sql_state(error->sqlerrcode));
	values[7] = clipped_text(error->message ? error->message : "");
	values[8] = optional_text(error->detail, &nulls[8]);
	values[9] = optional_text(error->hint, &nulls[9]);
	values[10] = optional_text(error->context, &nulls[10]);

	/* An error leaves the user to the abort of the (sub)transaction. */
	rs_become_catalog_owner(&save_userid, &save_sec_context);
	PushActiveSnapshot(GetTransactionSnapshot());
	if (insert_plan == NULL)
	{
		SPIPlanPtr plan = SPI_prepare(insert_text, lengthof(types), types);

		if (plan == NULL || SPI_keepplan(plan) != 0)
			elog(ERROR, "could not prepare the record of a failure: %s",
				 SPI_result_code_string(SPI_result));
		insert_plan = plan;
	}
	rc = SPI_execute_plan(insert_plan, values, nulls, false, 0);
	if (rc != SPI_OK_INSERT)
		elog(ERROR, "could not record a failure: %s", SPI_result_code_string(rc));
	PopActiveSnapshot();
	SetUserIdAndSecContext(save_userid, save_sec_context);
	/* SPI leaves us in its own memory. */
	MemoryContextSwitchTo(save_context);
	rs_wake_pruner_at_commit();
}

void
rs_failure_prune(void)
{
	Oid save_userid;
	int save_sec_context;
	int rc;

	SPI_connect();
	PushActiveSnapshot(GetTransactionSnapshot());
	rs_become_catalog_owner(&save_userid, &save_sec_context);
	rc = SPI_execute(prune_text, false, 0);
	if (rc != SPI_OK_DELETE)
		elog(ERROR, "could not prune the history of failures: %s", SPI_result_code_string(rc));
	SetUserIdAndSecContext(save_userid, save_sec_context);
	PopActiveSnapshot();
	SPI_finish();
}
