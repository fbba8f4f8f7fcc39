/*-------------------------------------------------------------------------
 *
 * autonomous.c
 *	  ruststream.autonomous(..): statements that commit by themselves, whatever
 *	  becomes of the caller's transaction.  The caller's side.
 *
 * They are executed by a process of their own, the helper, which a session gets
 * at its first call and keeps.  It is connected as the user of the caller, so
 * what it may do is what that role may do.  The two talk through queues in a
 * segment of shared memory that is theirs alone.
 *
 * The helper can come to wait for a lock that the caller's own transaction
 * holds.  While the caller waits on its latch, nobody can see that it waits for
 * the helper.  So after a moment it waits for the helper's transaction as one
 * waits for a lock, and the deadlock detector ends what could not end.
 *
 * A caller that is interrupted cancels the helper and awaits its answer, so
 * that nothing goes on behind its back; whether the helper had committed by then it
 * cannot tell.  Calls are numbered: the answer to another one is thrown away.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "storage/dsm.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "tcop/utility.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

#include "backend/autonomous.h"
#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/shared.h"

/* Wait on the latch for so long before waiting where the deadlock detector looks. */
#define VISIBLE_MSEC 50

/* Cancel again after a second, in case it was caught; after ten give the helper up. */
#define CANCEL_MSEC 1000
#define GIVE_UP_CANCELS 10

/* This session's helper; segment NULL: there is none. */
typedef struct Helper
{
	MemoryContext context;
	dsm_segment *segment;
	RsAutonomous *shared;
	BackgroundWorkerHandle *handle;
	shm_mq_handle *requests;
	shm_mq_handle *answers;
	uint64 number; /* of the latest call */
	bool sending;  /* the request may be half in the queue */
	bool busy;     /* the helper may be executing */
} Helper;

static Helper helper;

/* What became of a call. */
typedef enum Progress
{
	PROGRESS_ANSWERED,
	PROGRESS_NOT_BEGUN, /* the helper has left, and done nothing */
	PROGRESS_UNKNOWN    /* .. having begun */
} Progress;

PG_FUNCTION_INFO_V1(rs_sql_autonomous);

/* ------------------------------------------------------------------ who may */

/*
 * Whoever may call it could connect as the same role by himself.  So it is
 * refused wherever the current user is somebody else than the session's.
 */
static void
check_user(void)
{
	Oid owner =
		rs_subscription_in_handler != NULL ? rs_subscription_in_handler->owner : GetSessionUserId();

	if (InLocalUserIdChange() || InSecurityRestrictedOperation())
		ereport(ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("ruststream.autonomous cannot be called in a SECURITY DEFINER function or "
					   "another security-restricted operation"),
				errhint("Call it from a function that runs with the rights of its caller."));
	if (GetUserId() != owner)
		ereport(ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("ruststream.autonomous can be called by \"%s\" only",
					   GetUserNameFromId(owner, false)),
				errdetail("The current user is \"%s\".", GetUserNameFromId(GetUserId(), false)),
				errhint("RESET ROLE before calling it."));
	PreventCommandIfReadOnly("ruststream.autonomous()");
	PreventCommandIfParallelMode("ruststream.autonomous()");
}

/* ------------------------------------------------------------- the helper's life */

/* Let the helper go: it leaves by itself once it is idle. */
static void
release_helper(bool terminate)
{
	if (helper.segment == NULL)
		return;
	if (terminate && helper.handle != NULL)
		TerminateBackgroundWorker(helper.handle);
	if (helper.requests != NULL)
		shm_mq_detach(helper.requests);
	if (helper.answers != NULL)
		shm_mq_detach(helper.answers);
	dsm_detach(helper.segment);
	MemoryContextDelete(helper.context);
	memset(&helper, 0, sizeof(helper));
}

/* The session ends in the middle of a call: nobody waits for its end any more. */
static void
leave_helper(int code, Datum arg)
{
	if (helper.segment != NULL && helper.busy)
		TerminateBackgroundWorker(helper.handle);
}

static void
no_helper(const char *detail)
{
	release_helper(false);
	ereport(ERROR, errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
			errmsg("no process is available for an autonomous session"),
			errdetail_internal("%s", detail),
			errhint("Each session that calls ruststream.autonomous takes one worker process while "
					"it uses it: raise max_worker_processes."));
}

/* The segment, with this session at its ends of the queues. */
static void
create_segment(void)
{
	dsm_segment *segment = dsm_create(RS_AUTONOMOUS_BYTES, DSM_CREATE_NULL_IF_MAXSEGMENTS);
	shm_mq *queue;

	if (segment == NULL)
		no_helper("All dynamic shared memory segments are taken.");
	dsm_pin_mapping(segment);
	helper.context =
		AllocSetContextCreate(TopMemoryContext, "ruststream autonomous", ALLOCSET_SMALL_SIZES);
	helper.segment = segment;
	helper.shared = dsm_segment_address(segment);
	memset(helper.shared, 0, sizeof(RsAutonomous));
	helper.shared->database = MyDatabaseId;
	helper.shared->user = GetUserId();
	helper.shared->caller = MyProcPid;
	helper.shared->depth = rs_autonomous_depth + 1;
	SpinLockInit(&helper.shared->mutex);

	queue = shm_mq_create(RS_AUTONOMOUS_REQUESTS(helper.shared), RS_AUTONOMOUS_QUEUE_BYTES);
	shm_mq_set_sender(queue, MyProc);
	queue = shm_mq_create(RS_AUTONOMOUS_ANSWERS(helper.shared), RS_AUTONOMOUS_QUEUE_BYTES);
	shm_mq_set_receiver(queue, MyProc);
}

static void
start_helper(void)
{
	static bool registered = false;
	BackgroundWorker worker = {.bgw_flags =
								   BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION,
							   .bgw_start_time = BgWorkerStart_RecoveryFinished,
							   .bgw_restart_time = BGW_NEVER_RESTART,
							   .bgw_notify_pid = MyProcPid};
	char reason[RS_REASON_BYTES];
	MemoryContext save;

	/* Each is a process: a statement that calls itself would take them all. */
	if (rs_autonomous_depth >= RS_AUTONOMOUS_DEPTH)
		ereport(ERROR, errcode(ERRCODE_STATEMENT_TOO_COMPLEX),
				errmsg("autonomous sessions are nested too deeply"),
				errdetail("No more than %d may wait for one another.", RS_AUTONOMOUS_DEPTH),
				errhint("Have the autonomous statement do its work without calling "
						"ruststream.autonomous again."));
	if (rs_owner_refusal(GetUserId(), reason, sizeof(reason)))
		ereport(ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("cannot start an autonomous session"), errdetail_internal("%s.", reason));
	if (!registered)
		before_shmem_exit(leave_helper, (Datum) 0);
	registered = true;

	create_segment();
	snprintf(worker.bgw_name, BGW_MAXLEN, "ruststream autonomous for process %d", MyProcPid);
	snprintf(worker.bgw_type, BGW_MAXLEN, "ruststream autonomous");
	snprintf(worker.bgw_library_name, sizeof(worker.bgw_library_name), "ruststream");
	snprintf(worker.bgw_function_name, BGW_MAXLEN, "rs_autonomous_main");
	worker.bgw_main_arg = UInt32GetDatum(dsm_segment_handle(helper.segment));

	save = MemoryContextSwitchTo(helper.context);
	if (!RegisterDynamicBackgroundWorker(&worker, &helper.handle))
	{
		MemoryContextSwitchTo(save);
		no_helper("All worker processes are taken.");
	}
	helper.requests = shm_mq_attach((shm_mq *) RS_AUTONOMOUS_REQUESTS(helper.shared),
									helper.segment, helper.handle);
	helper.answers = shm_mq_attach((shm_mq *) RS_AUTONOMOUS_ANSWERS(helper.shared), helper.segment,
								   helper.handle);
	MemoryContextSwitchTo(save);
}

/* ----------------------------------------------------------------- the request */

static void
put_argument(StringInfo request, Oid type, Datum value, bool isnull)
{
	Oid output;
	bool is_varlena;

	if (get_typtype(type) == TYPTYPE_PSEUDO)
		ereport(ERROR, errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				errmsg("an argument of ruststream.autonomous cannot be of type %s",
					   format_type_be(type)));
	rs_put_number(request, type);
	if (isnull)
	{
		rs_put_text(request, NULL);
		return;
	}
	getTypeOutputInfo(type, &output, &is_varlena);
	rs_put_text(request, OidOutputFunctionCall(output, value));
}

/* All but its number, which comes first and is not known yet. */
static void
make_request(FunctionCallInfo fcinfo, StringInfo request)
{
	Datum *values = NULL;
	Oid *types = NULL;
	bool *nulls = NULL;
	int count = 0;
	int nest_level;

	if (PG_ARGISNULL(0))
		ereport(ERROR, errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("the SQL of an autonomous statement must not be null"));
	if (PG_NARGS() > 1)
		count = extract_variadic_args(fcinfo, 1, true, &values, &types, &nulls);
	if (count < 0)
		ereport(ERROR, errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("the array of arguments of an autonomous statement must not be null"));

	initStringInfo(request);
	rs_put_number(request, 0);
	for (int i = 0; rs_autonomous_settings[i] != NULL; i++)
		rs_put_text(request, GetConfigOption(rs_autonomous_settings[i], false, false));
	rs_put_text(request, text_to_cstring(PG_GETARG_TEXT_PP(0)));
	rs_put_number(request, (uint64) count);

	nest_level = rs_begin_transmission();
	for (int i = 0; i < count; i++)
		put_argument(request, types[i], values[i], nulls[i]);
	rs_end_transmission(nest_level);
}

/* -------------------------------------------------------------------- the call */

/* Read what has come; the answer to another call is not for us. */
static shm_mq_result
receive(RsReader *answer)
{
	shm_mq_result result;
	void *data;

	do
	{
		result = shm_mq_receive(helper.answers, &answer->left, &data, true);
		answer->data = data;
	} while (result == SHM_MQ_SUCCESS && rs_get_number(answer) != helper.number);
	return result;
}

/* The transaction that a process is in; false: in none. */
static bool
transaction_of_process(pid_t pid, VirtualTransactionId *transaction)
{
	PGPROC *proc = pid != 0 ? BackendPidGetProc((int) pid) : NULL;

	if (proc == NULL)
		return false;
	GET_VXID_FROM_PGPROC(*transaction, *proc);
	return VirtualTransactionIdIsValid(*transaction);
}

/* Wait until it ends, which has nothing to do with the caller's lock_timeout. */
static void
wait_for_end(VirtualTransactionId transaction)
{
	int save_timeout = LockTimeout;

	LockTimeout = 0;
	PG_TRY();
	{
		(void) VirtualXactLock(transaction, true);
	}
	PG_FINALLY();
	{
		LockTimeout = save_timeout;
	}
	PG_END_TRY();
}

/*
 * Wait for the end of the helper's transaction; false: it was not that of the
 * call, for it is still connecting, which takes transactions, and locks, as well.
 */
static bool
wait_for_transaction(void)
{
	VirtualTransactionId transaction;
	bool begun;
	pid_t pid;

	SpinLockAcquire(&helper.shared->mutex);
	begun = helper.shared->transaction_of == helper.number;
	transaction = helper.shared->transaction;
	pid = helper.shared->pid;
	SpinLockRelease(&helper.shared->mutex);
	if (!begun && !transaction_of_process(pid, &transaction))
		return false;
	wait_for_end(transaction);
	return begun;
}

/* False: the helper has left without an answer. */
static bool
await_answer(RsReader *answer)
{
	TimestampTz visible = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), VISIBLE_MSEC);
	bool waited = false;

	for (;;)
	{
		shm_mq_result result;

		CHECK_FOR_INTERRUPTS();
		result = receive(answer);
		if (result != SHM_MQ_WOULD_BLOCK)
			return result == SHM_MQ_SUCCESS;
		if (!waited && GetCurrentTimestamp() >= visible)
		{
			waited = wait_for_transaction();
			if (waited)
				continue;
		}
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_EXIT_ON_PM_DEATH | (waited ? 0 : WL_TIMEOUT),
						 waited ? -1 : VISIBLE_MSEC, rs_wait_event_autonomous());
		ResetLatch(MyLatch);
	}
}

/*
 * The helper is ours, or exits under the mutex: the pid is right.  Returns whether
 * it has begun the call; where it has not, it never will.
 */
static bool
cancel_helper(void)
{
	bool begun;

	SpinLockAcquire(&helper.shared->mutex);
	helper.shared->cancelled = helper.number;
	begun = helper.shared->begun == helper.number;
	if (helper.shared->pid != 0)
		kill(helper.shared->pid, SIGINT);
	SpinLockRelease(&helper.shared->mutex);
	return begun;
}

/* The call is interrupted: have the helper stop, and see that it has. */
static void
abandon_call(void)
{
	RsReader answer;
	shm_mq_result result = SHM_MQ_WOULD_BLOCK;

	/* What is half in the queue cannot be taken back; what is not begun needs no waiting. */
	if (helper.sending || !cancel_helper())
	{
		release_helper(true);
		return;
	}

	HOLD_CANCEL_INTERRUPTS();
	for (int i = 0; i < GIVE_UP_CANCELS && result == SHM_MQ_WOULD_BLOCK; i++)
	{
		TimestampTz until = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), CANCEL_MSEC);
		long timeout = CANCEL_MSEC;

		(void) cancel_helper();
		while ((result = receive(&answer)) == SHM_MQ_WOULD_BLOCK && timeout > 0)
		{
			(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, timeout,
							 rs_wait_event_autonomous());
			ResetLatch(MyLatch);
			CHECK_FOR_INTERRUPTS();
			timeout = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), until);
		}
	}
	RESUME_CANCEL_INTERRUPTS();
	helper.busy = false;
	if (result != SHM_MQ_SUCCESS)
		release_helper(true);
}

/* Announce a call; false: the helper is about to leave. */
static bool
announce_call(StringInfo request)
{
	bool leaving;

	helper.number++;
	SpinLockAcquire(&helper.shared->mutex);
	leaving = helper.shared->leaving;
	helper.shared->announced = helper.number;
	SpinLockRelease(&helper.shared->mutex);
	memcpy(request->data, &helper.number, sizeof(helper.number));
	return !leaving;
}

static Progress
call_helper(StringInfo request, RsReader *answer)
{
	volatile bool answered = false;
	bool begun;

	if (!announce_call(request))
		return PROGRESS_NOT_BEGUN;

	helper.busy = true;
	helper.sending = true;
	PG_TRY();
	{
		if (shm_mq_send(helper.requests, request->len, request->data, false, true) ==
			SHM_MQ_SUCCESS)
		{
			helper.sending = false;
			answered = await_answer(answer);
		}
	}
	PG_CATCH();
	{
		abandon_call();
		PG_RE_THROW();
	}
	PG_END_TRY();
	helper.busy = false;
	helper.sending = false;
	if (answered)
		return PROGRESS_ANSWERED;

	SpinLockAcquire(&helper.shared->mutex);
	begun = helper.shared->begun == helper.number;
	SpinLockRelease(&helper.shared->mutex);
	return begun ? PROGRESS_UNKNOWN : PROGRESS_NOT_BEGUN;
}

/* A helper that died, or was terminated; the next call starts another one. */
static void
lost_helper(Progress progress)
{
	bool connected;

	SpinLockAcquire(&helper.shared->mutex);
	connected = helper.shared->connected;
	SpinLockRelease(&helper.shared->mutex);
	release_helper(true);
	if (progress == PROGRESS_UNKNOWN)
		ereport(ERROR, errcode(ERRCODE_TRANSACTION_RESOLUTION_UNKNOWN),
				errmsg("the autonomous session ended before it answered"),
				errdetail("Whether it had committed is not known."));
	ereport(ERROR, errcode(ERRCODE_CONNECTION_FAILURE),
			connected ? errmsg("the autonomous session ended before it began")
					  : errmsg("the autonomous session could not connect to the database"),
			errhint("The server's log says why."));
}

/*
 * ruststream.autonomous(sql text [, VARIADIC args "any"]) returns bigint:
 * execute it in a session of its own, and commit.  Errors: its own, and 42501
 * where the current user is not the owner of the delivery or the session's
 * user, 25006 in a read-only transaction, 53400 no process is free, 08006 and
 * 08007 the process has died.
 */
Datum
rs_sql_autonomous(PG_FUNCTION_ARGS)
{
	StringInfoData request;
	RsReader answer;
	Progress progress = PROGRESS_NOT_BEGUN;

	check_user();
	make_request(fcinfo, &request);

	/* One that was left from an earlier call may be just about to leave. */
	if (helper.segment != NULL && helper.shared->user == GetUserId())
		progress = call_helper(&request, &answer);
	if (progress == PROGRESS_NOT_BEGUN)
	{
		release_helper(false);
		start_helper();
		progress = call_helper(&request, &answer);
	}
	if (progress != PROGRESS_ANSWERED)
		lost_helper(progress);

	if (rs_get_number(&answer) == RS_ANSWER_ERROR)
		ThrowErrorData(rs_get_error(&answer));
	PG_RETURN_INT64((int64) rs_get_number(&answer));
}
