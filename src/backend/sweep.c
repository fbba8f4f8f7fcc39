/*-------------------------------------------------------------------------
 *
 * sweep.c
 *	  What redrive and purge have in common: finding many rows of a table and doing
 *	  something with each, in the caller's transaction and with the caller's rights.
 *
 * A cursor finds the rows, and locks them without waiting for anybody; each portion
 * that it gives is moved, or deleted, by their ids.  So memory does not grow with
 * their number, the table is read once, and whoever has a row in work keeps it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/sweep.h"

#include "miscadmin.h"
#include "utils/array.h"
#include "utils/datum.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

/* So many rows are found, and then moved or deleted, at a time. */
#define PORTION 1000

/* A column of a row that was found, in the current context. */
static Datum
column(SPITupleTable *table, int row, int number)
{
	Form_pg_attribute attribute = TupleDescAttr(table->tupdesc, number - 1);
	bool isnull;
	Datum value = SPI_getbinval(table->vals[row], table->tupdesc, number, &isnull);

	return isnull ? (Datum) 0 : datumCopy(value, attribute->attbyval, attribute->attlen);
}

/* Take the rows of the portion at hand. */
static int
read_portion(RsFound *found)
{
	SPITupleTable *table = SPI_tuptable;
	int count = (int) SPI_processed;

	for (int i = 0; i < count; i++)
	{
		found[i].id = column(table, i, 1);
		if (table->tupdesc->natts == 1)
			continue;
		found[i].origin = SPI_getvalue(table->vals[i], table->tupdesc, 2);
		found[i].place = column(table, i, 3);
		found[i].table = column(table, i, 4);
	}
	SPI_freetuptable(table);
	return count;
}

int64
rs_sweep(RsSweep *sweep)
{
	MemoryContext portion =
		AllocSetContextCreate(CurrentMemoryContext, "ruststream portion", ALLOCSET_DEFAULT_SIZES);
	MemoryContext save_context = CurrentMemoryContext;
	Portal portal = rs_open_cursor(sweep->finder, sweep->find, &sweep->values);
	int64 done = 0;

	for (;;)
	{
		int64 wanted = sweep->limit < 0 ? PORTION : Min(PORTION, sweep->limit - done);
		RsFound *found;
		int count;

		CHECK_FOR_INTERRUPTS();
		if (wanted == 0)
			break;
		SPI_cursor_fetch(portal, true, wanted);
		/* SPI leaves us in its own memory. */
		MemoryContextSwitchTo(portion);
		found = palloc0(sizeof(RsFound) * wanted);
		count = read_portion(found);
		if (count > 0)
			done += sweep->work(sweep->arg, found, count);
		MemoryContextSwitchTo(save_context);
		MemoryContextReset(portion);
		if (count == 0)
			break;
	}

	SPI_cursor_close(portal);
	MemoryContextDelete(portion);
	return done;
}

Datum
rs_found_ids(Oid type, const RsFound *found, int count)
{
	Datum *ids = palloc(sizeof(Datum) * count);

	for (int i = 0; i < count; i++)
		ids[i] = found[i].id;
	return rs_array(type, ids, count);
}

Datum
rs_array(Oid type, Datum *ids, int count)
{
	int16 length;
	bool byval;
	char align;

	get_typlenbyvalalign(type, &length, &byval, &align);
	return PointerGetDatum(construct_array(ids, count, type, length, byval, align));
}

/* All of them, or none: what we have locked can only be kept by the table's own code. */
void
rs_check_swept(int64 done, int count, const char *what, Oid relid)
{
	if (done != count)
		ereport(ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("only " INT64_FORMAT " of %d rows of table %s could be %s", done, count,
					   rs_relation_label(relid), what),
				errhint("A trigger or a row-level security policy of the table may keep you from "
						"changing them."));
}
