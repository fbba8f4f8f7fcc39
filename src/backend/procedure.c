/*-------------------------------------------------------------------------
 *
 * procedure.c
 *	  Calling a handler that is a procedure, which may COMMIT as it goes.
 *
 * A statement that ends its own transaction lives in a portal, which the commit
 * spares, and which lends it a snapshot afterwards.  So the CALL is run as a
 * client's would be: parsed, and put into a portal of its own.  Everything it
 * uses is in the delivery's memory, since the transaction's goes with each COMMIT.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"

#include "executor/tstoreReceiver.h"
#include "funcapi.h"
#include "lib/stringinfo.h"
#include "nodes/params.h"
#include "tcop/pquery.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/portal.h"
#include "utils/snapmgr.h"
#include "utils/tuplestore.h"

static void
set_parameter(ParamListInfo parameters, Oid type, Datum value, bool isnull)
{
	ParamExternData *parameter = &parameters->params[parameters->numParams++];

	parameter->value = value;
	parameter->isnull = isnull;
	parameter->ptype = type;
	parameter->pflags = PARAM_FLAG_CONST;
}

/* CALL schema.procedure($1, $2), and NULL for the outcome, which is an output. */
static char *
call_text(const RsHandler *handler)
{
	StringInfoData text;

	initStringInfo(&text);
	appendStringInfo(
		&text, "CALL %s($1",
		quote_qualified_identifier(get_namespace_name(get_func_namespace(handler->function)),
								   get_func_name(handler->function)));
	if (handler->takes_delivery)
		appendStringInfoString(&text, ", $2");
	if (!handler->returns_void)
		appendStringInfo(&text, ", NULL::ruststream.outcome%s", handler->answers_each ? "[]" : "");
	appendStringInfoChar(&text, ')');
	return text.data;
}

static Portal
make_portal(const char *text, ParamListInfo parameters)
{
	Oid types[2];
	RawStmt *raw = linitial_node(RawStmt, pg_parse_query(text));
	List *queries;
	Portal portal = CreateNewPortal();

	for (int i = 0; i < parameters->numParams; i++)
		types[i] = parameters->params[i].ptype;
	PushActiveSnapshot(GetTransactionSnapshot());
	queries = pg_analyze_and_rewrite_fixedparams(raw, text, types, parameters->numParams, NULL);
	PopActiveSnapshot();

	portal->visible = false;
	PortalDefineQuery(portal, NULL, text, CMDTAG_CALL,
					  pg_plan_queries(queries, text, CURSOR_OPT_PARALLEL_OK, NULL), NULL);
	PortalStart(portal, parameters, 0, InvalidSnapshot);
	return portal;
}

/* The one row that a CALL with an output gives. */
static RsAnswer
read_result(const RsHandler *handler, const RsDelivery *delivery, Tuplestorestate *store,
			TupleDesc descriptor)
{
	TupleTableSlot *slot = MakeSingleTupleTableSlot(descriptor, &TTSOpsMinimalTuple);
	Datum value = (Datum) 0;
	bool isnull = true;

	if (tuplestore_gettupleslot(store, true, false, slot))
		value = slot_getattr(slot, 1, &isnull);
	return rs_handler_answer(handler, delivery, value, isnull);
}

RsAnswer
rs_procedure_call(const RsSubscription *subscription, const RsDelivery *delivery)
{
	const RsHandler *handler = &subscription->handler;
	ParamListInfo parameters = makeParamList(2);
	Tuplestorestate *store = tuplestore_begin_heap(false, false, 64);
	DestReceiver *receiver = CreateDestReceiver(DestTuplestore);
	MemoryContext context = CurrentMemoryContext;
	TupleDesc descriptor;
	RsAnswer answer = {.outcome = RS_OUTCOME_ACK};
	Portal portal;

	parameters->numParams = 0;
	set_parameter(parameters, handler->input_type, delivery->input, delivery->input_isnull);
	if (handler->takes_deliveries)
		set_parameter(parameters, get_array_type(rs_objects(false)->delivery_type),
					  rs_batch_deliveries(subscription, delivery), false);
	else if (handler->takes_delivery)
		set_parameter(parameters, rs_objects(false)->delivery_type,
					  rs_handler_delivery(subscription, delivery), false);

	portal = make_portal(call_text(handler), parameters);
	descriptor = portal->tupDesc != NULL ? CreateTupleDescCopy(portal->tupDesc) : NULL;
	SetTuplestoreDestReceiverParams(receiver, store, context, false, NULL, NULL);

	rs_delivery_in_handler = delivery;
	rs_subscription_in_handler = subscription;
	PG_TRY();
	{
#if PG_VERSION_NUM < 180000
		(void) PortalRun(portal, FETCH_ALL, true, true, receiver, receiver, NULL);
#else
		(void) PortalRun(portal, FETCH_ALL, true, receiver, receiver, NULL);
#endif
	}
	PG_FINALLY();
	{
		rs_delivery_in_handler = NULL;
		rs_subscription_in_handler = NULL;
	}
	PG_END_TRY();

	MemoryContextSwitchTo(context);
	if (!handler->returns_void)
		answer = read_result(handler, delivery, store, descriptor);
	receiver->rDestroy(receiver);
	tuplestore_end(store);
	PortalDrop(portal, false);
	return answer;
}
