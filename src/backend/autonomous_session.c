/*-------------------------------------------------------------------------
 *
 * autonomous_session.c
 *	  The helper of a session that calls ruststream.autonomous: one process,
 *	  started at the first call, connected as the user of the caller.
 *
 * Each call is one transaction: the caller's settings are put in place, the
 * statements executed, deferred constraints checked, everything committed, and
 * then whatever of a session outlives a commit is removed, so that the next
 * call finds a session as if it were new.  Its answer is the number of rows or
 * the error.
 *
 * In between it waits on its latch, outside any transaction.  It leaves when
 * its caller has left, and when nothing was asked of it for a while, to give
 * its slot back.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "storage/dsm.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "tcop/dest.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "backend/autonomous.h"
#include "backend/backend.h"
#include "backend/compat.h"

/* It leaves when it has had nothing to do for so long. */
#define IDLE_MSEC 10000

/*
 * Where it waits for its own caller it is the one to notice, and to fail: the
 * caller waits with its own deadlock_timeout, which is hardly that short.
 */
#define DEADLOCK_TIMEOUT "100ms"

static RsAutonomous *shared;
static shm_mq_handle *requests;
static shm_mq_handle *answers;

/* Is a call under way, so that a cancel has something to cancel? */
static volatile sig_atomic_t running = false;

static void
cancel_call(SIGNAL_ARGS)
{
	if (running)
		StatementCancelHandler(postgres_signal_arg);
}

/* From here on our pid is nobody's business: see RsAutonomous. */
static void
say_goodbye(int code, Datum arg)
{
	SpinLockAcquire(&shared->mutex);
	shared->pid = 0;
	shared->leaving = true;
	SpinLockRelease(&shared->mutex);
}

/* ------------------------------------------------------------------- executing */

/* Has the caller given this call up before we could begin? */
static bool
begin_call(uint64 number)
{
	bool cancelled;

	/* First running: who sets cancelled after we have looked, signals after it. */
	running = true;
	SpinLockAcquire(&shared->mutex);
	shared->begun = number;
	cancelled = shared->cancelled >= number;
	SpinLockRelease(&shared->mutex);
	return !cancelled;
}

/* Tell the caller what to wait for, so that the deadlock detector sees it wait. */
static void
publish_transaction(uint64 number)
{
	VirtualTransactionId transaction;

	GET_VXID_FROM_PGPROC(transaction, *MyProc);
	SpinLockAcquire(&shared->mutex);
	shared->transaction = transaction;
	shared->transaction_of = number;
	SpinLockRelease(&shared->mutex);
}

/*
 * A value of a domain is read as its base type's: the domain has checked it
 * where it was made, perhaps by functions that this search_path does not find.
 */
static void
read_argument(RsReader *reader, ParamExternData *parameter)
{
	Oid type = (Oid) rs_get_number(reader);
	const char *text = rs_get_text(reader);
	Oid input;
	Oid ioparam;

	if (!SearchSysCacheExists1(TYPEOID, ObjectIdGetDatum(type)))
		ereport(ERROR, errcode(ERRCODE_UNDEFINED_OBJECT),
				errmsg("the type of an argument does not exist in the autonomous session"),
				errdetail("What the caller's transaction has created is not there before its "
						  "commit."));
	parameter->ptype = type;
	parameter->pflags = PARAM_FLAG_CONST;
	parameter->isnull = text == NULL;
	parameter->value = (Datum) 0;
	if (text == NULL)
		return;
	getTypeInputInfo(getBaseType(type), &input, &ioparam);
	parameter->value = OidInputFunctionCall(input, unconstify(char *, text), ioparam, -1);
}

static ParamListInfo
read_arguments(RsReader *reader)
{
	int count = (int) rs_get_number(reader);
	ParamListInfo parameters = makeParamList(count);
	int nest_level = rs_begin_transmission();

	for (int i = 0; i < count; i++)
		read_argument(reader, &parameters->params[i]);
	rs_end_transmission(nest_level);
	return parameters;
}

/* SPI leaves it to us to say what it does not execute. */
static void
refuse(int code)
{
	if (code == SPI_ERROR_TRANSACTION)
		ereport(ERROR, errcode(ERRCODE_INVALID_TRANSACTION_TERMINATION),
				errmsg("an autonomous statement cannot begin or end transactions"),
				errhint("All that is passed to one call is one transaction, and committed at its "
						"end."));
	if (code == SPI_ERROR_COPY)
		ereport(ERROR, errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				errmsg("an autonomous statement cannot COPY from or to the client"));
	elog(ERROR, "could not execute an autonomous statement: %s", SPI_result_code_string(code));
}

/* As at a commit, but while the caller's settings are still in place. */
static void
fire_deferred_constraints(void)
{
	ConstraintsSetStmt *all_immediate = makeNode(ConstraintsSetStmt);

	all_immediate->constraints = NIL;
	all_immediate->deferred = false;
	AfterTriggerSetState(all_immediate);
}

static uint64
execute(RsReader *reader, uint64 number)
{
	SPIExecuteOptions options = {.dest = None_Receiver};
	const char *settings[16];
	const char *sql;
	uint64 rows;
	int nest_level;
	int code;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	publish_transaction(number);
	/* Whatever is SET from here on ends with the call, roles included. */
	nest_level = NewGUCNestLevel();
	PushActiveSnapshot(GetTransactionSnapshot());

	for (int i = 0; rs_autonomous_settings[i] != NULL; i++)
		settings[i] = rs_get_text(reader);
	sql = rs_get_text(reader);
	debug_query_string = sql;
	pgstat_report_activity(STATE_RUNNING, sql);
	options.params = read_arguments(reader);
	for (int i = 0; rs_autonomous_settings[i] != NULL; i++)
		(void) set_config_option(rs_autonomous_settings[i], settings[i], PGC_USERSET, PGC_S_SESSION,
								 GUC_ACTION_SET, true, 0, false);

	SPI_connect();
	code = SPI_execute_extended(sql, &options);
	if (code < 0)
		refuse(code);
	rows = SPI_processed;
	SPI_finish();

	/* What the commit would run: deferred triggers, and the queries of cursors WITH HOLD. */
	fire_deferred_constraints();
	PortalHashTableDeleteAll();
	PopActiveSnapshot();
	AtEOXact_GUC(false, nest_level);
	CommitTransactionCommand();
	return rows;
}

/* Execute one request, and write the answer into the current context. */
static void
answer_request(RsReader *reader, StringInfo answer)
{
	MemoryContext context = CurrentMemoryContext;
	uint64 number = rs_get_number(reader);
	ErrorData *error;
	uint64 rows;

	rs_put_number(answer, number);
	PG_TRY();
	{
		if (!begin_call(number))
			ereport(ERROR, errcode(ERRCODE_QUERY_CANCELED),
					errmsg("canceling an autonomous statement that had not begun"));
		rows = execute(reader, number);
		running = false;
		rs_put_number(answer, RS_ANSWER_ROWS);
		rs_put_number(answer, rows);
	}
	PG_CATCH();
	{
		running = false;
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		AbortOutOfAnyTransaction();
		MemoryContextSwitchTo(context);
		rs_put_number(answer, RS_ANSWER_ERROR);
		rs_put_error(answer, error);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	debug_query_string = NULL;
	/* A cancel that came too late must not hit the next call. */
	QueryCancelPending = false;
}

/* --------------------------------------------------------------------- waiting */

/* May we leave?  Not where the caller is about to send something. */
static bool
retire(uint64 answered)
{
	bool leave;

	SpinLockAcquire(&shared->mutex);
	leave = shared->announced <= answered;
	shared->leaving |= leave;
	SpinLockRelease(&shared->mutex);
	return leave;
}

/* Wait for a request; exits where none is to be expected any more. */
static void
receive(RsReader *reader, uint64 answered)
{
	TimestampTz deadline = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), IDLE_MSEC);

	Assert(!IsTransactionState());

	pgstat_report_activity(STATE_IDLE, NULL);
	for (;;)
	{
		void *data;
		long timeout;

		rs_process_interrupts();
		switch (shm_mq_receive(requests, &reader->left, &data, true))
		{
			case SHM_MQ_SUCCESS:
				reader->data = data;
				return;
			case SHM_MQ_DETACHED:
				proc_exit(0);
			case SHM_MQ_WOULD_BLOCK:
				break;
		}
		timeout = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), deadline);
		if (timeout <= 0 && retire(answered))
			proc_exit(0);
		/* An announced request is here in a moment. */
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, Max(timeout, 10),
						 rs_wait_event_idle());
		ResetLatch(MyLatch);
	}
}

/* ------------------------------------------------------------------------ main */

int rs_autonomous_depth = 0;

/* Take our place at the queues; false: the caller has gone. */
static bool
attach(dsm_handle handle)
{
	dsm_segment *segment = dsm_attach(handle);
	shm_mq *queue;

	if (segment == NULL)
		return false;
	shared = dsm_segment_address(segment);
	rs_autonomous_depth = shared->depth;
	before_shmem_exit(say_goodbye, (Datum) 0);
	SpinLockAcquire(&shared->mutex);
	shared->pid = MyProcPid;
	SpinLockRelease(&shared->mutex);

	queue = (shm_mq *) RS_AUTONOMOUS_REQUESTS(shared);
	shm_mq_set_receiver(queue, MyProc);
	requests = shm_mq_attach(queue, segment, NULL);
	queue = (shm_mq *) RS_AUTONOMOUS_ANSWERS(shared);
	shm_mq_set_sender(queue, MyProc);
	answers = shm_mq_attach(queue, segment, NULL);
	return true;
}

static void
connect_as_caller(void)
{
	char name[NAMEDATALEN];

	rs_connect_as_owner(shared->database, shared->user);
	snprintf(name, sizeof(name), "ruststream autonomous: for process %d", (int) shared->caller);
	rs_process_name(name);
	SetConfigOption("deadlock_timeout", DEADLOCK_TIMEOUT, PGC_SUSET, PGC_S_OVERRIDE);

	SpinLockAcquire(&shared->mutex);
	shared->connected = true;
	SpinLockRelease(&shared->mutex);
}

void
rs_autonomous_main(Datum arg)
{
	MemoryContext context;
	uint64 answered = 0;

	rs_process_signals(cancel_call);

	MemoryContextSwitchTo(TopMemoryContext);
	if (!attach((dsm_handle) DatumGetUInt32(arg)))
		proc_exit(0);
	connect_as_caller();

	context =
		AllocSetContextCreate(TopMemoryContext, "ruststream autonomous", ALLOCSET_DEFAULT_SIZES);
	for (;;)
	{
		RsReader reader;
		StringInfoData answer;

		MemoryContextSwitchTo(context);
		MemoryContextReset(context);
		receive(&reader, answered);
		initStringInfo(&answer);
		answer_request(&reader, &answer);
		rs_session_clean();
		pgstat_report_stat(false);
		memcpy(&answered, answer.data, sizeof(answered));
		if (shm_mq_send(answers, answer.len, answer.data, false, true) != SHM_MQ_SUCCESS)
			proc_exit(0);
	}
}
