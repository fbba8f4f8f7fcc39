/*-------------------------------------------------------------------------
 *
 * interrupt.c
 *	  A handler's end before its time: the timeout of its subscription, and
 *	  ruststream.cancel.
 *
 * Both cancel what runs as the server's own timeouts do, and only while the
 * handler runs: neither may reach the settlement, the next delivery, or another
 * process.  So a timer is armed around the call alone; and a cancel is two steps,
 * to mark the run in the slot and to send SIGINT, of which the first succeeds
 * only while that very run is under way.  Who leaves the run and finds it marked
 * waits for the signal, which is on its way.
 *
 * SIGINT may also be the session's own cancel: pg_cancel_backend, or
 * statement_timeout.  While a handler runs the signal comes here first, since a
 * handler may turn a cancel into an error of its own, whose origin nobody could
 * tell afterwards.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <errno.h>
#include <signal.h>

#include "backend/catalog.h"
#include "backend/delivery.h"
#include "backend/shared.h"

#include "catalog/pg_authid.h"
#include "common/hashfn.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/timeout.h"

PG_FUNCTION_INFO_V1(rs_sql_cancel);

/*
 * In RsSlot.run: the run has been cancelled; it is over, and can be cancelled no
 * more.  The rest is its number, never 0.
 */
#define RUN_CANCELLED 1u
#define RUN_OVER 2u
#define RUN_STEP 4u

/* What has cancelled the run that is under way, or was last. */
typedef enum Cause
{
	CAUSE_NONE,
	CAUSE_TIMEOUT,
	CAUSE_CANCEL
} Cause;

static volatile sig_atomic_t cause = CAUSE_NONE;

/* The signal of ruststream.cancel has arrived. */
static volatile sig_atomic_t signal_seen = false;

/* The session itself was cancelled, and since then the run was not. */
static volatile sig_atomic_t session_cancelled = false;

static uint32 last_run = 0;
static TimeoutId run_timeout = MAX_TIMEOUTS;
static struct sigaction session_action;

/* ------------------------------------------------------------ in signal handlers */

static void
cancel_run(Cause by)
{
	/* With no cancel pending, an earlier one of the session's has had its effect. */
	if (!QueryCancelPending)
		session_cancelled = false;
	if (cause == CAUSE_NONE)
		cause = by;
	QueryCancelPending = true;
	InterruptPending = true;
	SetLatch(MyLatch);
}

static void
run_timed_out(void)
{
	cancel_run(CAUSE_TIMEOUT);
}

static void
run_signalled(int signal_number)
{
	int save_errno = errno;

	if (rs_my_slot != NULL && !signal_seen &&
		(pg_atomic_read_u32(&rs_my_slot->run) & RUN_CANCELLED) != 0)
	{
		signal_seen = true;
		cancel_run(CAUSE_CANCEL);
	}
	else
	{
		/* lock_timeout comes as a SIGINT, too, but cancels nothing but a statement. */
		if (!get_timeout_indicator(LOCK_TIMEOUT, false))
			session_cancelled = true;
		session_action.sa_handler(signal_number);
	}
	errno = save_errno;
}

/* ------------------------------------------------------------------------ the run */

static void
enter_run(const RsSubscription *subscription)
{
	struct sigaction action = {.sa_handler = run_signalled, .sa_flags = SA_RESTART};

	cause = CAUSE_NONE;
	signal_seen = false;
	session_cancelled = false;
	sigemptyset(&action.sa_mask);
	sigaction(SIGINT, &action, &session_action);

	if (rs_my_slot != NULL)
	{
		last_run += RUN_STEP;
		if (last_run == 0)
			last_run = RUN_STEP;
		/* A full barrier: whoever sees the number sees which row it is. */
		(void) pg_atomic_exchange_u32(&rs_my_slot->run, last_run);
	}
	if (subscription->timeout > 0)
	{
		if (run_timeout == MAX_TIMEOUTS)
			run_timeout = RegisterTimeout(USER_TIMEOUT, run_timed_out);
		enable_timeout_at(run_timeout, GetCurrentTimestamp() + subscription->timeout);
	}
}

/* From here on nothing cancels it any more, nor what comes after it. */
static void
leave_run(const RsSubscription *subscription)
{
	if (subscription->timeout > 0)
		disable_timeout(run_timeout, false);
	if (rs_my_slot != NULL)
	{
		uint32 run = pg_atomic_fetch_or_u32(&rs_my_slot->run, RUN_OVER);

		/* Between its two steps nothing stops whoever cancels us. */
		while ((run & RUN_CANCELLED) != 0 && !signal_seen)
			pg_usleep(1000);
		pg_atomic_write_u32(&rs_my_slot->run, 0);
	}
	sigaction(SIGINT, &session_action, NULL);
	if (cause != CAUSE_NONE && !session_cancelled)
		QueryCancelPending = false;
}

/* Raised by the server's answer to a signal or a timer, not by a user's code? */
bool
rs_is_interrupt(const ErrorData *error)
{
	return error->sqlerrcode == ERRCODE_QUERY_CANCELED && error->funcname != NULL &&
		   strcmp(error->funcname, "ProcessInterrupts") == 0;
}

bool
rs_is_session_cancel(const ErrorData *error)
{
	return error->sqlerrcode == ERRCODE_QUERY_CANCELED &&
		   (session_cancelled || rs_is_interrupt(error));
}

/* Make the error of a run that was cancelled of the one it has ended with. */
static void
word_error(const RsSubscription *subscription, ErrorData *error)
{
	error->detail =
		error->message == NULL || rs_is_interrupt(error)
			? NULL
			: psprintf("It did not stop at that, but failed afterwards: %s", error->message);
	error->sqlerrcode = ERRCODE_QUERY_CANCELED;
	error->funcname = NULL;
	error->filename = NULL;
	if (cause == CAUSE_TIMEOUT)
	{
		error->message = psprintf("the handler was cancelled after its timeout of %s",
								  rs_interval_text(subscription->timeout));
		error->hint = psprintf("ruststream.alter_subscription(%s, timeout => ..) gives it longer.",
							   quote_literal_cstr(subscription->name));
	}
	else
	{
		error->message = pstrdup("the delivery was cancelled by ruststream.cancel");
		error->hint = NULL;
	}
}

void
rs_run_handler(const RsSubscription *subscription, void (*call)(void *arg), void *arg)
{
	MemoryContext context = CurrentMemoryContext;
	ErrorData *error;

	enter_run(subscription);
	PG_TRY();
	{
		call(arg);
	}
	PG_CATCH();
	{
		leave_run(subscription);
		if (cause == CAUSE_NONE || (session_cancelled && geterrcode() == ERRCODE_QUERY_CANCELED))
			PG_RE_THROW();
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		word_error(subscription, error);
		ReThrowError(error);
	}
	PG_END_TRY();
	leave_run(subscription);

	/* It has caught the cancel, or came to its end at the same moment. */
	if (cause != CAUSE_NONE)
	{
		ErrorData returned = {0};

		word_error(subscription, &returned);
		ereport(ERROR, errcode(ERRCODE_QUERY_CANCELED), errmsg_internal("%s", returned.message),
				returned.hint ? errhint("%s", returned.hint) : 0);
	}
}

/* ------------------------------------------------------------ ruststream.cancel */

/*
 * The subscriptions of a queue whose deliveries the current user may cancel.  An
 * error where there are subscriptions, but none of his.
 */
static List *
subscriptions_to_cancel(Oid queue)
{
	List *rows = rs_catalog_find(rs_objects(false)->subscription, RS_SUBSCRIPTION_QUEUE, F_OIDEQ,
								 ObjectIdGetDatum(queue));
	List *result = NIL;
	ListCell *cell;

	foreach (cell, rows)
	{
		const RsRow *row = lfirst(cell);

		if (has_privs_of_role(GetUserId(), rs_subscription_owner(row)))
			result = lappend_int(result, DatumGetInt32(rs_row_get(row, RS_SUBSCRIPTION_ID)));
	}
	if (rows != NIL && result == NIL)
		ereport(
			ERROR, errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			errmsg("permission denied to cancel deliveries of queue %s", rs_relation_label(queue)),
			errhint("Be a member of the role that owns the subscription."));
	return result;
}

uint64
rs_id_hash(const char *id)
{
	return hash_bytes_extended((const unsigned char *) id, (int) strlen(id), 0);
}

/* Cancel what this slot's process runs, where it is that row. */
static bool
cancel_in_slot(RsSlot *slot, List *subscriptions, Oid queue, uint64 id_hash, const char *id)
{
	uint32 run = pg_atomic_read_u32(&slot->run);

	Assert(LWLockHeldByMe(rs_shared->lock));

	if (slot->entry.cookie == 0 || slot->entry.pid == 0 || slot->entry.database != MyDatabaseId ||
		slot->queue != queue || run == 0 || (run & (RUN_CANCELLED | RUN_OVER)) != 0 ||
		!list_member_int(subscriptions, slot->subscription))
		return false;
	/* What is read now belongs to this run if it is still under way afterwards. */
	pg_read_barrier();
	if (slot->id_hash != id_hash || strncmp(slot->id, id, strnlen(slot->id, RS_ID_BYTES)) != 0 ||
		!pg_atomic_compare_exchange_u32(&slot->run, &run, run | RUN_CANCELLED))
		return false;
	return kill(slot->entry.pid, SIGINT) == 0;
}

/*
 * ruststream.cancel(queue regclass, id text) returns boolean: cancel the delivery
 * of this row while its handler runs, which counts as a failure; false where none
 * does.  Errors: 42704 not a queue, 42501 not a member of the owner of one of its
 * subscriptions, 55000 not preloaded.
 */
Datum
rs_sql_cancel(PG_FUNCTION_ARGS)
{
	Oid queue = PG_GETARG_OID(0);
	char *id = text_to_cstring(PG_GETARG_TEXT_PP(1));
	uint64 id_hash = rs_id_hash(id);
	List *subscriptions;
	bool cancelled = false;

	(void) rs_queue_row_of(queue);
	subscriptions = subscriptions_to_cancel(queue);
	if (rs_shared == NULL)
		ereport(ERROR, errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("deliveries cannot be cancelled on this server"),
				errdetail("What is in work is known through shared memory."),
				errhint("Add ruststream to shared_preload_libraries and restart the server."));

	/* Under the lock no process leaves its slot: the pid is the slot's, and no other's. */
	LWLockAcquire(rs_shared->lock, LW_SHARED);
	for (int i = 0; i < rs_shared->slots; i++)
		cancelled |= cancel_in_slot(&rs_shared->slot[i], subscriptions, queue, id_hash, id);
	LWLockRelease(rs_shared->lock);
	PG_RETURN_BOOL(cancelled);
}
