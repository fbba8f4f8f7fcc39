/*-------------------------------------------------------------------------
 *
 * origin.c
 *	  Where a dead letter came from, and why: the headers that its move adds, and
 *	  that ruststream.redrive reads and takes away again.
 *
 *	ruststream-origin-queue			the queue, schema and name quoted where needed
 *	ruststream-origin-group			the group it was in, where the queue has groups
 *	ruststream-origin-subscription	the subscription that gave it up
 *	ruststream-reason				the error's message, or the reason that the handler gave
 *	ruststream-sqlstate				the error's code; absent where the handler answered
 *	ruststream-dead-lettered-at		when, as ISO 8601 in UTC
 *
 * The group is the row's own, so the statement adds it; the statement that looks
 * for dead letters knows the first two, too (core/headers_postgresql.h).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/catalog.h"
#include "backend/delivery.h"

#include "catalog/pg_type_d.h"
#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/datetime.h"
#include "utils/json.h"

/* A reason is clipped to so many bytes: the whole of it is in the history. */
#define REASON_BYTES 1024

static const char *const names[] = {
	"ruststream-origin-queue", "ruststream-origin-group", "ruststream-origin-subscription",
	"ruststream-reason",       "ruststream-sqlstate",     "ruststream-dead-lettered-at"};

/* Add a header to the text of an object. */
static void
add(StringInfo object, const char *name, const char *value)
{
	appendStringInfoChar(object, object->len == 0 ? '{' : ',');
	escape_json(object, name);
	appendStringInfoChar(object, ':');
	escape_json(object, value);
}

static char *
clipped(const char *reason)
{
	return pnstrdup(reason, pg_mbcliplen(reason, (int) strlen(reason), REASON_BYTES));
}

Datum
rs_origin(const RsSubscription *subscription, const RsDelivery *delivery, TimestampTz now)
{
	char at[MAXDATELEN + 1];
	int utc = 0;
	StringInfoData object;

	initStringInfo(&object);
	add(&object, "ruststream-origin-queue",
		quote_qualified_identifier(subscription->queue.table.schema,
								   subscription->queue.table.name));
	add(&object, "ruststream-origin-subscription", subscription->name);
	if (delivery->reason != NULL)
		add(&object, "ruststream-reason", clipped(delivery->reason));
	if (delivery->sqlstate != 0)
		add(&object, "ruststream-sqlstate", unpack_sql_state(delivery->sqlstate));
	add(&object, "ruststream-dead-lettered-at",
		JsonEncodeDateTime(at, TimestampTzGetDatum(now), TIMESTAMPTZOID, &utc));
	appendStringInfoChar(&object, '}');
	return PointerGetDatum(cstring_to_text_with_len(object.data, object.len));
}

Datum
rs_origin_headers(void)
{
	Datum values[lengthof(names)];

	for (size_t i = 0; i < lengthof(names); i++)
		values[i] = CStringGetTextDatum(names[i]);
	return PointerGetDatum(
		construct_array(values, lengthof(names), TEXTOID, -1, false, TYPALIGN_INT));
}
