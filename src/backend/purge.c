/*-------------------------------------------------------------------------
 *
 * purge.c
 *	  purge: delete the rows that have been processed, where the queue keeps them.
 *
 * No claim looks at a processed row, so nothing here is in a delivery's way: it
 * locks those rows alone, and none that somebody else has locked.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/sweep.h"

#include "utils/builtins.h"

PG_FUNCTION_INFO_V1(rs_sql_purge);

typedef struct Purge
{
	const RsQueue *queue;
	RsPlans *plans;
} Purge;

static int64
purge_portion(void *arg, RsFound *found, int count)
{
	Purge *purge = arg;
	RsValues values;
	int64 done;

	rs_values_init(&values);
	rs_value_set(&values, RS_PARAM_IDS, rs_found_ids(purge->queue->type[RS_ROLE_ID], found, count),
				 0);
	done = rs_execute(purge->plans, RS_OP_PURGE, &values);
	rs_check_swept(done, count, "deleted", purge->queue->relid);
	return done;
}

/*
 * ruststream.purge(queue regclass, older_than interval) returns bigint: delete the
 * rows that were processed so long ago; returns how many.  Errors: 42704 not a
 * queue, 42501 not its owner, 55000 it keeps no processed rows, 22023 a negative age.
 */
Datum
rs_sql_purge(PG_FUNCTION_ARGS)
{
	Oid relid = PG_GETARG_OID(0);
	int64 age = rs_interval_microseconds(PG_GETARG_INTERVAL_P(1), "older_than", 0, RS_MAX_INTERVAL);
	RsQueue queue = {0};
	Purge purge = {.queue = &queue};
	RsSweep work = {
		.find = RS_OP_FIND_PROCESSED, .limit = -1, .work = purge_portion, .arg = &purge};
	int64 done;

	rs_queue_load(relid, &queue);
	if (!rs_owns_table(relid))
		ereport(ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("must be owner of table %s", rs_relation_label(relid)));
	if (queue.table.column[RS_ROLE_PROCESSED_AT] == NULL)
		ereport(ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("queue %s keeps no processed rows", rs_relation_label(relid)),
				errdetail("It has no processed_at column: a row that has been processed is "
						  "deleted."),
				errhint("Give the table such a column, and attach it with processed_at_column."));

	rs_values_init(&work.values);
	rs_value_set(&work.values, RS_PARAM_UNTIL, TimestampTzGetDatum(GetCurrentTimestamp() - age), 0);
	SPI_connect();
	purge.plans = rs_plans_create(&queue, NULL, CurrentMemoryContext);
	work.finder = purge.plans;
	done = rs_sweep(&work);
	rs_plans_free(purge.plans);
	SPI_finish();
	PG_RETURN_INT64(done);
}
