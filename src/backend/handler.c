/*-------------------------------------------------------------------------
 *
 * handler.c
 *	  A subscription's handler: which function it is, what it is given, what
 *	  it has answered.
 *
 * A handler is looked up anew for each delivery (fmgr_info in the delivery's
 * memory): that costs about a microsecond, and leaves nothing behind that
 * CREATE OR REPLACE FUNCTION, or an error in the middle of a call, could make
 * wrong.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/compat.h"

#include "access/htup_details.h"
#include "catalog/namespace.h"
#include "catalog/pg_collation.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "common/int.h"
#include "executor/executor.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/fmgrprotos.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"
#include "utils/syscache.h"
#include "utils/typcache.h"

PG_FUNCTION_INFO_V1(rs_sql_attempt);
PG_FUNCTION_INFO_V1(rs_sql_delivery);

const RsDelivery *rs_delivery_in_handler;
const RsSubscription *rs_subscription_in_handler;

/* ------------------------------------------------------ finding the handler */

/* Types between which a payload is decoded: text, and bytes that are text. */
static bool
is_document_type(Oid type)
{
	return type == JSONBOID || type == JSONOID || type == TEXTOID || type == VARCHAROID ||
		   type == BYTEAOID;
}

static bool
payload_fits(Oid column_type, Oid input_type)
{
	Oid base;

	if (!OidIsValid(column_type))
		return false;
	base = getBaseType(column_type);
	if (input_type == column_type || input_type == base)
		return true;
	return is_document_type(base) && is_document_type(input_type);
}

/* An outcome; of a batch also one for each row. */
static bool
is_outcome_type(Oid type, bool batch)
{
	Oid outcome_type = rs_objects(false)->outcome_type;

	return type == outcome_type || (batch && type == get_array_type(outcome_type));
}

/* What an argument is told of: a delivery; of a batch also of each row's. */
static bool
is_delivery_type(Oid type, bool batch)
{
	Oid delivery_type = rs_objects(false)->delivery_type;

	return type == delivery_type || (batch && type == get_array_type(delivery_type));
}

/* What is wrong with the first argument, for single rows; NULL: it fits. */
static char *
examine_input(Oid type, const RsQueue *queue, RsHandler *handler)
{
	if (type == queue->row_type)
		handler->input = RS_INPUT_ROW;
	else if (payload_fits(queue->type[RS_ROLE_PAYLOAD], type))
		handler->input = RS_INPUT_PAYLOAD;
	else if (is_document_type(type) && queue->attnum[RS_ROLE_PAYLOAD] == InvalidAttrNumber)
		return pstrdup("It takes a payload, but the queue has no payload column.");
	else
		return psprintf("Its first argument is of type %s.", format_type_be(type));
	return NULL;
}

/*
 * What a procedure gives back: the type of its last argument, where that is its
 * only output; void where it has none.
 */
static Oid
procedure_result(HeapTuple tuple)
{
	Oid *types;
	char **names;
	char *modes;
	int count = get_func_arg_info(tuple, &types, &names, &modes);
	Oid result = VOIDOID;

	for (int i = 0; modes != NULL && i < count; i++)
	{
		if (modes[i] == PROARGMODE_IN || modes[i] == PROARGMODE_VARIADIC)
			continue;
		if (i < count - 1)
			return RECORDOID;
		result = types[i];
	}
	return result;
}

/*
 * Does this function fit?  Fills in *handler and returns NULL, else returns
 * what is wrong with it, as a sentence for errdetail.
 */
static char *
examine(HeapTuple tuple, const RsHandlerUse *use, RsHandler *handler)
{
	Form_pg_proc proc = (Form_pg_proc) GETSTRUCT(tuple);
	const RsQueue *queue = use->queue;
	const RsObjects *objects = rs_objects(false);
	bool is_procedure = proc->prokind == PROKIND_PROCEDURE;
	Oid returned = is_procedure ? procedure_result(tuple) : proc->prorettype;
	int inputs = proc->pronargs;
	Oid *arguments = proc->proargtypes.values;
	char *problem;

	if (is_procedure && rs_table_form(&queue->table) == RS_FORM_ROW_LOCK)
		return pstrdup("It is a procedure: a COMMIT inside it would drop the lock on the row.");
	if (is_procedure && use->transactional)
		return pstrdup("It is a procedure, and the subscription is transactional: a COMMIT inside "
					   "it would end the delivery's transaction. Subscribe with "
					   "transactional => false.");
	if (!is_procedure && proc->prokind != PROKIND_FUNCTION)
		return pstrdup("It is not a plain function.");
	if (proc->proretset)
		return pstrdup("It returns a set.");
	if (OidIsValid(proc->provariadic))
		return pstrdup("It is variadic.");
	if (!use->batch && inputs > 0 && arguments[0] == get_array_type(queue->row_type))
		return pstrdup("It takes a batch of rows: say in batch_size how many at most.");
	if (!is_outcome_type(returned, use->batch) && returned != VOIDOID)
		return psprintf("It returns %s.", format_type_be(returned));
	/* An INOUT argument for the outcome takes nothing from us. */
	if (is_procedure && inputs > 1 && is_outcome_type(arguments[inputs - 1], use->batch))
		inputs--;
	if (inputs < 1 || inputs > 2)
		return psprintf("It takes %d arguments.", proc->pronargs);
	if (inputs == 2 && !is_delivery_type(arguments[1], use->batch))
		return psprintf("Its second argument is of type %s.", format_type_be(arguments[1]));
	problem = use->batch ? rs_batch_input_problem(arguments[0], queue)
						 : examine_input(arguments[0], queue, handler);
	if (problem != NULL)
		return problem;

	if (use->batch)
		handler->input = RS_INPUT_ROWS;
	handler->function = proc->oid;
	handler->input_type = arguments[0];
	handler->is_procedure = is_procedure;
	handler->takes_delivery = inputs == 2;
	handler->takes_deliveries = inputs == 2 && arguments[1] != objects->delivery_type;
	handler->returns_void = returned == VOIDOID;
	handler->answers_each = !handler->returns_void && returned != objects->outcome_type;
	handler->strict = proc->proisstrict;
	return NULL;
}

static char *
examine_oid(Oid function, const RsHandlerUse *use, RsHandler *handler)
{
	HeapTuple tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	char *problem;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for function %u", function);
	problem = examine(tuple, use, handler);
	ReleaseSysCache(tuple);
	return problem;
}

static void
refuse(const RsHandlerUse *use, const char *text, const char *detail)
{
	const RsQueue *queue = use->queue;

	ereport(ERROR, errcode(ERRCODE_INVALID_FUNCTION_DEFINITION),
			errmsg("function %s cannot be a %s of queue %s", text,
				   use->batch ? "batch handler" : "handler",
				   quote_qualified_identifier(queue->table.schema, queue->table.name)),
			errdetail_internal("%s", detail),
			use->batch
				? errhint("A batch handler takes an array of rows (%s[]), then, if it likes, a "
						  "ruststream.delivery[], and returns ruststream.outcome[], one for each "
						  "row, or one ruststream.outcome for all, or void.",
						  format_type_be(queue->row_type))
				: errhint("A handler takes the row (%s) or its payload, then, if it likes, a "
						  "ruststream.delivery, and returns ruststream.outcome or void.",
						  format_type_be(queue->row_type)));
}

/*
 * How many functions of this name there are, and how many of them fit: the
 * last that does is left in *handler, what is wrong with the last that does
 * not in *problem.
 */
static int
count_fitting(const char *name, const RsHandlerUse *use, RsHandler *handler, int *count,
			  char **problem)
{
	List *names;
	FuncCandidateList candidate;
	int fitting = 0;

#if PG_VERSION_NUM < 160000
	names = stringToQualifiedNameList(name);
#else
	names = stringToQualifiedNameList(name, NULL);
#endif
	*count = 0;
	candidate = FuncnameGetCandidates(names, -1, NIL, false, false, false, true);
	for (; candidate != NULL; candidate = candidate->next)
	{
		RsHandler trial = {0};
		char *wrong = examine_oid(candidate->oid, use, &trial);

		(*count)++;
		if (wrong != NULL)
			*problem = wrong;
		else
		{
			fitting++;
			*handler = trial;
		}
	}
	return fitting;
}

/* The one function of this name that fits, among all its overloads. */
static void
find_by_name(const char *text, const RsHandlerUse *use, RsHandler *handler)
{
	char *problem = NULL;
	int count;
	int fitting = count_fitting(text, use, handler, &count, &problem);

	if (count == 0)
		ereport(ERROR, errcode(ERRCODE_UNDEFINED_FUNCTION),
				errmsg("function \"%s\" does not exist", text),
				errhint("Create the handler first, or name its schema."));
	if (fitting == 0)
		refuse(use, text, count == 1 ? problem : "None of the functions of that name fits.");
	if (fitting > 1)
		ereport(ERROR, errcode(ERRCODE_AMBIGUOUS_FUNCTION),
				errmsg("function name \"%s\" is not unique", text),
				errdetail("More than one function of that name can be a handler of this queue."),
				errhint("Write its argument types too, for example \"%s(%s%s)\".", text,
						format_type_be(use->queue->row_type), use->batch ? "[]" : ""));
}

static void
find_by_oid(const char *text, Oid function, const RsHandlerUse *use, RsHandler *handler)
{
	char *problem = examine_oid(function, use, handler);

	if (problem != NULL)
		refuse(use, text, problem);
}

static void
find_by_signature(const char *text, const RsHandlerUse *use, RsHandler *handler)
{
	Oid function = DatumGetObjectId(DirectFunctionCall1(regprocedurein, CStringGetDatum(text)));

	if (!OidIsValid(function))
		ereport(ERROR, errcode(ERRCODE_UNDEFINED_FUNCTION),
				errmsg("function \"%s\" does not exist", text));
	find_by_oid(text, function, use, handler);
}

/* The parenthesis at which a signature's arguments begin; NULL: it is a name alone. */
static char *
arguments_of(char *text)
{
	bool quoted = false;

	for (; *text != '\0'; text++)
	{
		if (*text == '"')
			quoted = !quoted;
		else if (*text == '(' && !quoted)
			return text;
	}
	return NULL;
}

/*
 * Find again a handler that was dropped and made anew.  Its signature names
 * types that may have been renamed since, the table's first of all; so where
 * the one function of its name that fits takes the row, it is it.
 */
static void
find_successor(const char *signature, const RsHandlerUse *use, RsHandler *handler)
{
	char *name = pstrdup(signature);
	char *arguments = arguments_of(name);
	char *problem = NULL;
	int count;

	if (arguments != NULL)
		*arguments = '\0';
	if (count_fitting(name, use, handler, &count, &problem) != 1 ||
		handler->input == RS_INPUT_PAYLOAD)
		find_by_signature(signature, use, handler);
}

void
rs_handler_resolve(const char *text, Oid function, const RsHandlerUse *use, Oid owner,
				   RsHandler *handler)
{
	memset(handler, 0, sizeof(*handler));

	if (OidIsValid(function) && SearchSysCacheExists1(PROCOID, ObjectIdGetDatum(function)))
		find_by_oid(text, function, use, handler);
	else if (OidIsValid(function))
		find_successor(text, use, handler);
	else if (arguments_of(pstrdup(text)) != NULL)
		find_by_signature(text, use, handler);
	else
		find_by_name(text, use, handler);

	handler->name = format_procedure_qualified(handler->function);

	if (rs_proc_aclcheck(handler->function, owner, ACL_EXECUTE) != ACLCHECK_OK)
		ereport(ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("role \"%s\" may not execute function %s", GetUserNameFromId(owner, false),
					   handler->name),
				errhint("GRANT EXECUTE ON FUNCTION %s TO %s.", handler->name,
						quote_identifier(GetUserNameFromId(owner, false))));
}

/* ----------------------------------------------------- decoding the payload */

/* The text of a document, in the server's encoding. */
static char *
document_text(Datum value, Oid type)
{
	switch (type)
	{
		case JSONBOID:
			return DatumGetCString(DirectFunctionCall1(jsonb_out, value));
		case BYTEAOID:
		{
			bytea *bytes = DatumGetByteaPP(value);
			int length = VARSIZE_ANY_EXHDR(bytes);
			char *text = pnstrdup(VARDATA_ANY(bytes), length);

			/* also verifies it, and refuses zero bytes */
			return pg_any_to_server(text, length, PG_UTF8);
		}
		default:
			return TextDatumGetCString(value);
	}
}

static Datum
document_from_text(char *text, Oid type)
{
	switch (type)
	{
		case JSONBOID:
			return DirectFunctionCall1(jsonb_in, CStringGetDatum(text));
		case JSONOID:
			return DirectFunctionCall1(json_in, CStringGetDatum(text));
		case BYTEAOID:
		{
			char *bytes = pg_server_to_any(text, strlen(text), PG_UTF8);

			return PointerGetDatum(cstring_to_text(bytes));
		}
		default:
			return CStringGetTextDatum(text);
	}
}

static Datum
headers_as_jsonb(const RsSubscription *subscription, const RsDelivery *delivery)
{
	if (subscription->queue.type[RS_ROLE_HEADERS] == JSONOID)
		return document_from_text(document_text(delivery->headers, JSONOID), JSONBOID);
	return delivery->headers;
}

void
rs_handler_decode(const RsSubscription *subscription, RsDelivery *delivery)
{
	const RsHandler *handler = &subscription->handler;
	Oid column_type;

	if (delivery->rows > 0)
	{
		delivery->input = rs_batch_input(subscription, delivery);
		delivery->input_isnull = false;
		return;
	}
	/* A handler that is told its headers takes them as well. */
	if (handler->takes_delivery && !delivery->headers_isnull)
		(void) headers_as_jsonb(subscription, delivery);
	if (handler->input != RS_INPUT_PAYLOAD)
		return;

	if (delivery->input_isnull)
	{
		if (handler->strict)
			ereport(ERROR, errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					errmsg("the payload is null, and the handler is declared STRICT"));
		return;
	}

	column_type = getBaseType(subscription->queue.type[RS_ROLE_PAYLOAD]);
	if (handler->input_type == column_type ||
		handler->input_type == subscription->queue.type[RS_ROLE_PAYLOAD])
		return;
	/* varchar and text are the same bytes */
	if ((handler->input_type == TEXTOID || handler->input_type == VARCHAROID) &&
		(column_type == TEXTOID || column_type == VARCHAROID))
		return;

	delivery->input =
		document_from_text(document_text(delivery->input, column_type), handler->input_type);
}

/* ------------------------------------------------------- calling the handler */

/* The delivery as a value of type ruststream.delivery. */
Datum
rs_handler_delivery(const RsSubscription *subscription, const RsDelivery *delivery)
{
	Oid type = rs_objects(false)->delivery_type;
	TupleDesc descriptor = lookup_rowtype_tupdesc(type, -1);
	Datum values[7] = {0};
	bool nulls[7] = {false};
	HeapTuple tuple;

	Assert(descriptor->natts == lengthof(values));
	values[0] = CStringGetTextDatum(subscription->name);
	values[1] = ObjectIdGetDatum(subscription->queue.relid);
	values[2] = CStringGetTextDatum(delivery->id_text);
	values[3] = Int32GetDatum((int32) Min(delivery->attempt, PG_INT32_MAX));
	nulls[4] = delivery->headers_isnull;
	if (!nulls[4])
		values[4] = headers_as_jsonb(subscription, delivery);
	values[5] = TimestampTzGetDatum(delivery->claimed_at);
	values[6] = TimestampTzGetDatum(delivery->token);
	nulls[6] = delivery->token == 0;

	tuple = heap_form_tuple(descriptor, values, nulls);
	ReleaseTupleDesc(descriptor);
	return HeapTupleGetDatum(tuple);
}

/* An answer's delay in microseconds, a month being 30 days; never negative. */
static int64
delay_microseconds(const Interval *interval)
{
	int64 days = (int64) interval->month * DAYS_PER_MONTH + interval->day;
	int64 result;

	if (pg_mul_s64_overflow(days, USECS_PER_DAY, &result) ||
		pg_add_s64_overflow(result, interval->time, &result))
		ereport(ERROR, errcode(ERRCODE_DATETIME_VALUE_OUT_OF_RANGE),
				errmsg("the delay that the handler answered is out of range"));
	return Max(result, 0);
}

RsAnswer
rs_handler_answer(const RsHandler *handler, const RsDelivery *delivery, Datum datum, bool isnull)
{
	if (handler->returns_void)
		return (RsAnswer){.outcome = RS_OUTCOME_ACK};
	if (isnull)
		ereport(ERROR, errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("the handler %s answered NULL", handler->name),
				errhint("Return ruststream.ack(), or another outcome."));
	return handler->answers_each ? rs_batch_answer(handler, delivery, datum)
								 : rs_handler_outcome(handler, datum);
}

RsAnswer
rs_handler_outcome(const RsHandler *handler, Datum outcome)
{
	RsAnswer answer = {.outcome = RS_OUTCOME_ACK};
	HeapTupleHeader header = DatumGetHeapTupleHeader(outcome);
	bool isnull;
	Datum value;
	char *word;

	value = GetAttributeByNum(header, 1, &isnull);
	word = isnull ? NULL : TextDatumGetCString(value);
	if (word == NULL || !rs_outcome_find(word, &answer.outcome))
		ereport(ERROR, errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("the handler %s answered an unknown outcome \"%s\"", handler->name,
					   word ? word : "NULL"),
				errhint("Make outcomes with ruststream.ack(), retry(), retry_after(), discard() "
						"or dead_letter()."));

	value = GetAttributeByNum(header, 2, &isnull);
	if (!isnull)
	{
		answer.has_delay = true;
		answer.delay = delay_microseconds(DatumGetIntervalP(value));
	}
	value = GetAttributeByNum(header, 3, &isnull);
	if (!isnull)
		answer.reason = TextDatumGetCString(value);
	return answer;
}

RsAnswer
rs_handler_call(const RsSubscription *subscription, const RsDelivery *delivery)
{
	const RsHandler *handler = &subscription->handler;
	LOCAL_FCINFO(fcinfo, 2);
	FmgrInfo flinfo;
	PgStat_FunctionCallUsage usage;
	Datum result;

	/* Rights may have changed since the subscription was loaded. */
	if (rs_proc_aclcheck(handler->function, GetUserId(), ACL_EXECUTE) != ACLCHECK_OK)
		aclcheck_error(ACLCHECK_NO_PRIV, OBJECT_FUNCTION, get_func_name(handler->function));
	InvokeFunctionExecuteHook(handler->function);

	fmgr_info_cxt(handler->function, &flinfo, CurrentMemoryContext);
	/* It may have been replaced since it was looked at. */
	if (flinfo.fn_strict && delivery->input_isnull)
		ereport(ERROR, errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("the payload is null, and the handler is declared STRICT"));
	InitFunctionCallInfoData(*fcinfo, &flinfo, handler->takes_delivery ? 2 : 1,
							 DEFAULT_COLLATION_OID, NULL, NULL);
	fcinfo->args[0].value = delivery->input;
	fcinfo->args[0].isnull = delivery->input_isnull;
	if (handler->takes_delivery)
	{
		fcinfo->args[1].value = handler->takes_deliveries
									? rs_batch_deliveries(subscription, delivery)
									: rs_handler_delivery(subscription, delivery);
		fcinfo->args[1].isnull = false;
	}

	rs_delivery_in_handler = delivery;
	rs_subscription_in_handler = subscription;
	PG_TRY();
	{
		pgstat_init_function_usage(fcinfo, &usage);
		result = FunctionCallInvoke(fcinfo);
		pgstat_end_function_usage(&usage, true);
	}
	PG_FINALLY();
	{
		rs_delivery_in_handler = NULL;
		rs_subscription_in_handler = NULL;
	}
	PG_END_TRY();

	return rs_handler_answer(handler, delivery, result, fcinfo->isnull);
}

/*
 * ruststream.attempt() returns integer: which attempt the delivery in work is,
 * the first being 1; NULL outside a handler.
 */
Datum
rs_sql_attempt(PG_FUNCTION_ARGS)
{
	if (rs_delivery_in_handler == NULL)
		PG_RETURN_NULL();
	PG_RETURN_INT32((int32) Min(rs_delivery_in_handler->attempt, PG_INT32_MAX));
}

/* ruststream.delivery(): the delivery in work; NULL outside a handler. */
Datum
rs_sql_delivery(PG_FUNCTION_ARGS)
{
	if (rs_delivery_in_handler == NULL)
		PG_RETURN_NULL();
	PG_RETURN_DATUM(rs_handler_delivery(rs_subscription_in_handler, rs_delivery_in_handler));
}
