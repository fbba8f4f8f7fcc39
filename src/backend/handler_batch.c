/*-------------------------------------------------------------------------
 *
 * handler_batch.c
 *	  What a batch handler is given, and what it has answered: arrays with one
 *	  element for each row, in claim order.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"

#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"

static Datum
make_array(Datum *elements, int count, Oid type)
{
	int16 length;
	bool byval;
	char align;

	get_typlenbyvalalign(type, &length, &byval, &align);
	return PointerGetDatum(construct_array(elements, count, type, length, byval, align));
}

char *
rs_batch_input_problem(Oid type, const RsQueue *queue)
{
	if (type == get_array_type(queue->row_type))
		return NULL;
	if (OidIsValid(get_element_type(type)))
		return psprintf("Its first argument is of type %s.", format_type_be(type));
	return psprintf(
		"It takes one row at a time, and batch_size asks for batches: let it take %s[], "
		"or subscribe without batch_size.",
		format_type_be(queue->row_type));
}

Datum
rs_batch_input(const RsSubscription *subscription, const RsDelivery *batch)
{
	Datum *rows = palloc(sizeof(Datum) * batch->rows);

	for (int i = 0; i < batch->rows; i++)
		rows[i] = batch->row[i]->input;
	return make_array(rows, batch->rows, subscription->queue.row_type);
}

Datum
rs_batch_deliveries(const RsSubscription *subscription, const RsDelivery *batch)
{
	Datum *deliveries = palloc(sizeof(Datum) * batch->rows);

	for (int i = 0; i < batch->rows; i++)
		deliveries[i] = rs_handler_delivery(subscription, batch->row[i]);
	return make_array(deliveries, batch->rows, rs_objects(false)->delivery_type);
}

RsAnswer
rs_batch_answer(const RsHandler *handler, const RsDelivery *batch, Datum array)
{
	ArrayType *outcomes = DatumGetArrayTypeP(array);
	RsAnswer answer = {.outcome = RS_OUTCOME_ACK};
	int count = ArrayGetNItems(ARR_NDIM(outcomes), ARR_DIMS(outcomes));
	ArrayIterator iterator;
	Datum value;
	bool isnull;

	if (ARR_NDIM(outcomes) > 1)
		ereport(ERROR, errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
				errmsg("the handler %s answered an array of %d dimensions", handler->name,
					   ARR_NDIM(outcomes)),
				errhint("Return an array of one dimension, with one outcome for each row."));
	if (count != batch->rows)
		ereport(ERROR, errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
				errmsg("the handler %s answered %d outcomes for %d rows", handler->name, count,
					   batch->rows),
				errhint("Return one outcome for each row, in the order of the rows, or declare it "
						"to return one ruststream.outcome for all."));

	answer.each = palloc(sizeof(RsAnswer) * count);
	iterator = array_create_iterator(outcomes, 0, NULL);
	for (int i = 0; array_iterate(iterator, &value, &isnull); i++)
	{
		if (isnull)
			ereport(ERROR, errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					errmsg("the handler %s answered NULL for row %s", handler->name,
						   batch->row[i]->id_text),
					errhint("Return ruststream.ack(), or another outcome, for each row."));
		answer.each[i] = rs_handler_outcome(handler, value);
	}
	array_free_iterator(iterator);
	return answer;
}
