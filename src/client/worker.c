/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  A subscription at work: wait -> claim -> deliver -> settle -> observe.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* How often a worker looks whether its subscription has changed, and tells what it has done. */
#define LOOK_INTERVAL RS_SECOND
#define FLUSH_INTERVAL RS_SECOND
#define SEEN_INTERVAL (5 * RS_SECOND)

void
rs_worker_trace(const ruststream_worker *worker, rs_step step, const char *suffix)
{
	ruststream *handle = worker->handle;
	char text[96];

	if (handle->trace == NULL)
		return;
	(void) snprintf(text, sizeof(text), "%s%s%s", rs_step_word(step), suffix[0] != '\0' ? " " : "",
					suffix);
	handle->trace(handle->trace_arg, text);
}

/* ---------------------------------------------------------------- loading */

/* What the worker's own handler asks of the subscription. */
static ruststream_code
check_handler(ruststream_worker *worker, const rs_plan *plan)
{
	ruststream *handle = worker->handle;

	if (worker->handler != NULL && plan->batch_size > 0)
		return rs_fail(handle, RUSTSTREAM_REFUSED,
					   "Open its worker with ruststream_worker_open_batch, or subscribe without "
					   "batch_size.",
					   "the callback takes one row at a time, and subscription \"%s\" asks for "
					   "batches",
					   worker->name);
	if (worker->batch_handler != NULL && plan->batch_size == 0)
		return rs_fail(handle, RUSTSTREAM_REFUSED,
					   "Say in batch_size how many rows at most it takes.",
					   "the callback takes batches, and subscription \"%s\" asks for one row at a "
					   "time",
					   worker->name);
	if (worker->handler == NULL && worker->batch_handler == NULL &&
		plan->subscription.handler == NULL && plan->subscription.program == NULL)
		return rs_fail(handle, RUSTSTREAM_REFUSED,
					   "Subscribe again with a handler or a program, or open its worker with a "
					   "callback.",
					   "subscription \"%s\" has no handler", worker->name);
	if (worker->needs_transaction && !plan->policy.transactional)
		return rs_fail(handle, RUSTSTREAM_REFUSED,
					   plan->batch_size > 0
						   ? "Subscribe again without batch_size: batches are not transactional."
						   : "Subscribe again with transactional => \"on\", or do without the "
							 "delivery's transaction.",
					   "the handler of subscription \"%s\" needs the delivery's transaction, but "
					   "the subscription is not transactional",
					   worker->name);
	return RUSTSTREAM_OK;
}

/* Bind the subscription as it is now, and take it up in place of the former one. */
static ruststream_code
take_up(ruststream_worker *worker, rs_arena *arena, const rs_subscription *subscription)
{
	ruststream *handle = worker->handle;
	rs_plan plan = {.arena = arena};
	const rs_command *extend = NULL;
	ruststream_code code = rs_bind_subscription(handle, &plan, subscription);

	if (code == RUSTSTREAM_OK)
		code = check_handler(worker, &plan);
	if (code != RUSTSTREAM_OK)
		return code;
	if (plan.table.lock_key != NULL && handle->driver->prepare_keys != NULL &&
		handle->driver->prepare_keys(handle->session) != RS_DONE)
		return rs_take_error(handle);
	if (plan.table.column[RS_ROLE_LOCKED_UNTIL] != NULL)
	{
		extend = rs_plan_command(&plan, RS_OP_EXTEND, 0);
		if (extend == NULL)
			return rs_no_memory(handle);
	}
	if (!rs_watch_prepare(&worker->watch, extend))
		return rs_no_memory(handle);

	handle->driver->forget_statements(handle->session);
	rs_arena_free(&worker->plan_arena);
	worker->plan_arena = *arena;
	worker->plan = plan;
	worker->plan.arena = &worker->plan_arena;
	memset(arena, 0, sizeof(*arena));
	handle->session->table = &worker->plan.table;
	handle->session->held = &worker->held;
	worker->is_loaded = true;
	return RUSTSTREAM_OK;
}

/* Have a session, and the subscription as it is now. */
static ruststream_code
load(ruststream_worker *worker)
{
	ruststream *handle = worker->handle;
	rs_arena arena = {0};
	rs_subscription subscription;
	ruststream_code code = RUSTSTREAM_OK;

	if (handle->session == NULL || handle->driver->rollback(handle->session) == RS_LOST)
	{
		worker->is_loaded = false;
		code = rs_reconnect(handle);
	}
	if (code == RUSTSTREAM_OK)
		code = rs_load_subscription(handle, worker->name, &arena, &subscription);
	if (code == RUSTSTREAM_OK)
	{
		if (subscription.paused && !worker->is_paused)
			rs_tell(handle,
					"subscription \"%s\" is paused: nothing is delivered before it is resumed",
					worker->name);
		worker->is_paused = subscription.paused;
		if (!worker->is_loaded ||
			strcmp(subscription.fingerprint, worker->plan.subscription.fingerprint) != 0)
			code = take_up(worker, &arena, &subscription);
	}
	rs_arena_free(&arena);
	if (code == RUSTSTREAM_OK)
		worker->next_look = rs_monotonic() + LOOK_INTERVAL;
	else
		worker->is_loaded = false;
	return code;
}

/* --------------------------------------------------------------- accounts */

/* Each in a transaction of its own; what cannot be told now is told later. */
static bool
in_transaction(ruststream_worker *worker, bool (*tell)(ruststream_worker *worker))
{
	rs_session *session = worker->handle->session;

	if (session == NULL || session->driver->begin(session, RS_FOR_US, NULL) != RS_DONE)
		return false;
	if (tell(worker) && session->driver->commit(session) == RS_DONE)
		return true;
	(void) session->driver->rollback(session);
	return false;
}

static bool
add_counts(ruststream_worker *worker)
{
	rs_session *session = worker->handle->session;
	rs_value values[9];
	int64_t found = 0;

	for (int i = 0; i < 8; i++)
		values[i] = rs_value_of_integer(worker->counts[i]);
	values[8] = rs_value_of_text(worker->name);
	if (rs_catalog(session, RS_CATALOG_COUNTER_ADD, values, 9, NULL, NULL, &found) != RS_DONE)
		return false;
	if (found == 0 &&
		rs_catalog(session, RS_CATALOG_COUNTER_INSERT, values, 9, NULL, NULL, NULL) != RS_DONE)
		return false;
	if (worker->counts[RS_COUNT_FAILED] > 0)
	{
		const rs_value names[] = {values[8], values[8]};

		return rs_catalog(session, RS_CATALOG_FAILURE_PRUNE, names, 2, NULL, NULL, NULL) == RS_DONE;
	}
	return true;
}

static void
flush_counts(ruststream_worker *worker)
{
	bool any = false;

	for (int i = 0; i < 8; i++)
		any |= worker->counts[i] != 0;
	if (any && in_transaction(worker, add_counts))
		memset(worker->counts, 0, sizeof(worker->counts));
}

static const char *
state_of(const ruststream_worker *worker)
{
	return worker->state[0] != '\0' ? worker->state : "running";
}

static bool
say_seen(ruststream_worker *worker)
{
	rs_session *session = worker->handle->session;
	char at[RS_TIME_SIZE + 8];
	int64_t now;
	int64_t found = 0;

	if (session->driver->now(session, &now) != RS_DONE)
		return false;
	session->driver->format_time(now, false, at);
	{
		const rs_value seen[] = {rs_value_of_text(at), rs_value_of_text(state_of(worker)),
								 rs_value_of_text(worker->id)};

		if (rs_catalog(session, RS_CATALOG_WORKER_SEEN, seen, 3, NULL, NULL, &found) != RS_DONE)
			return false;
	}
	if (found == 0)
	{
		const rs_value values[] = {rs_value_of_text(at), rs_value_of_text(at),
								   rs_value_of_text(state_of(worker)),
								   rs_value_of_text(worker->name), rs_value_of_text(worker->id)};
		char long_ago[RS_TIME_SIZE + 8];
		rs_value limit;

		session->driver->format_time(now - 3600 * RS_SECOND, false, long_ago);
		limit = rs_value_of_text(long_ago);
		if (rs_catalog(session, RS_CATALOG_WORKER_PRUNE, &limit, 1, NULL, NULL, NULL) != RS_DONE)
			return false;
		return rs_catalog(session, RS_CATALOG_WORKER_INSERT, values, 5, NULL, NULL, NULL) ==
			   RS_DONE;
	}
	return true;
}

static bool
say_gone(ruststream_worker *worker)
{
	const rs_value id = rs_value_of_text(worker->id);

	return rs_catalog(worker->handle->session, RS_CATALOG_WORKER_DELETE, &id, 1, NULL, NULL,
					  NULL) == RS_DONE;
}

/* Once a second: what was done; every few seconds: that we are there. */
static void
observe(ruststream_worker *worker, ruststream_run how)
{
	int64_t now = rs_monotonic();

	if (now >= worker->next_flush)
	{
		flush_counts(worker);
		worker->next_flush = now + FLUSH_INTERVAL;
	}
	if (how == RUSTSTREAM_FOREVER && now >= worker->next_seen)
	{
		worker->is_registered |= in_transaction(worker, say_seen);
		worker->next_seen = now + SEEN_INTERVAL;
	}
}

/* --------------------------------------------------------------- opening */

static bool
open_pipe(int ends[2])
{
	if (pipe(ends) != 0)
	{
		ends[0] = ends[1] = -1;
		return false;
	}
	for (int i = 0; i < 2; i++)
	{
		(void) fcntl(ends[i], F_SETFD, FD_CLOEXEC);
		(void) fcntl(ends[i], F_SETFL, O_NONBLOCK);
	}
	return true;
}

static void
name_worker(ruststream_worker *worker)
{
	static atomic_int number;
	char host[64] = "";

	(void) gethostname(host, sizeof(host) - 1);
	(void) snprintf(worker->id, sizeof(worker->id), "%s:%ld:%d", host, (long) getpid(),
					atomic_fetch_add(&number, 1) + 1);
}

static ruststream_code
open_worker(ruststream *handle, const char *subscription, ruststream_handler handler,
			ruststream_batch_handler batch_handler, void *arg, ruststream_worker **result)
{
	ruststream_worker *worker;
	ruststream_code code = rs_begin_call(handle);

	*result = NULL;
	if (code == RUSTSTREAM_OK && handle->worker != NULL)
		code = rs_fail(handle, RUSTSTREAM_MISUSE, "Open another handle for it.",
					   "this handle has a worker already");
	if (code == RUSTSTREAM_OK)
		code = rs_check_installed(handle);
	if (code != RUSTSTREAM_OK)
		return code;

	worker = calloc(1, sizeof(ruststream_worker));
	if (worker == NULL)
		return rs_no_memory(handle);
	worker->handle = handle;
	worker->handler = handler;
	worker->batch_handler = batch_handler;
	worker->handler_arg = arg;
	worker->stop_pipe[0] = worker->stop_pipe[1] = -1;
	worker->name = strdup(subscription);
	name_worker(worker);
	if (worker->name == NULL || !rs_watch_init(&worker->watch, handle))
	{
		free(worker->name);
		free(worker);
		return rs_no_memory(handle);
	}
	handle->worker = worker;
	if (!open_pipe(worker->stop_pipe))
		code = rs_fail(handle, RUSTSTREAM_SYSTEM, NULL, "no pipe can be made");
	if (code == RUSTSTREAM_OK)
		code = load(worker);
	if (code != RUSTSTREAM_OK)
	{
		rs_error kept = handle->error;

		ruststream_worker_close(worker);
		handle->error = kept;
		return code;
	}
	*result = worker;
	return RUSTSTREAM_OK;
}

ruststream_code
ruststream_worker_open(ruststream *handle, const char *subscription, ruststream_handler handler,
					   void *arg, ruststream_worker **worker)
{
	return open_worker(handle, subscription, handler, NULL, arg, worker);
}

ruststream_code
ruststream_worker_open_batch(ruststream *handle, const char *subscription,
							 ruststream_batch_handler handler, void *arg,
							 ruststream_worker **worker)
{
	return open_worker(handle, subscription, NULL, handler, arg, worker);
}

ruststream_code
ruststream_worker_needs_transaction(ruststream_worker *worker)
{
	memset(&worker->handle->error, 0, sizeof(worker->handle->error));
	worker->needs_transaction = true;
	return check_handler(worker, &worker->plan);
}

void
ruststream_worker_close(ruststream_worker *worker)
{
	ruststream *handle;

	if (worker == NULL || worker->handle->in_handler)
		return;
	handle = worker->handle;
	flush_counts(worker);
	if (worker->is_registered)
		(void) in_transaction(worker, say_gone);
	rs_watch_destroy(&worker->watch);
	(void) rs_let_go(worker, INT64_MAX);
	if (handle->session != NULL)
	{
		handle->driver->forget_statements(handle->session);
		handle->session->table = NULL;
		handle->session->held = NULL;
	}
	for (int i = 0; i < 2; i++)
	{
		if (worker->stop_pipe[i] >= 0)
			(void) close(worker->stop_pipe[i]);
	}
	rs_arena_free(&worker->plan_arena);
	rs_arena_free(&worker->delivery_arena);
	free(worker->transient_id);
	free(worker->name);
	handle->worker = NULL;
	free(worker);
}

/* ---------------------------------------------------------------- stopping */

void
ruststream_worker_stop(ruststream_worker *worker)
{
	int kept = errno;

	atomic_store(&worker->stops, true);
	/* A full pipe is as good as one more byte; and a signal handler leaves errno alone. */
	if (write(worker->stop_pipe[1], "", 1) != 1)
		errno = kept;
}

void
ruststream_worker_interrupt(ruststream_worker *worker)
{
	atomic_store(&worker->interrupts, true);
	ruststream_worker_stop(worker);
	rs_watch_cancel(&worker->watch);
}

void
ruststream_worker_counts(const ruststream_worker *worker, int64_t *delivered, int64_t *failed)
{
	*delivered = worker->delivered;
	*failed = worker->failed;
}

/* ---------------------------------------------------------------- waiting */

/* Idle in the driver, which may notice that there is something new; or here, without a session. */
static void
wait_for(ruststream_worker *worker, int64_t microseconds)
{
	rs_session *session = worker->handle->session;
	struct pollfd stop = {.fd = worker->stop_pipe[0], .events = POLLIN};
	int64_t ms = (microseconds + 999) / 1000;

	if (ms <= 0 || atomic_load(&worker->stops))
		return;
	if (session != NULL && worker->is_loaded)
	{
		(void) session->driver->wait(session, worker->stop_pipe[0], ms);
		return;
	}
	(void) poll(&stop, 1, (int) (ms < 60000 ? ms : 60000));
}

/* After a transient failure: a little, and more the more there were in a row, at random. */
static void
wait_out(ruststream_worker *worker)
{
	int doublings = worker->transient_count < 8 ? worker->transient_count : 8;
	int64_t most = RS_MILLISECOND << doublings;

	wait_for(worker, (int64_t) (rs_random() % (uint32_t) most));
}

static bool
read_due(void *arg, const rs_value *columns, int count)
{
	ruststream_worker *worker = arg;

	(void) count;
	if (columns[0].kind == RS_TEXT)
		(void) worker->handle->driver->parse_time(columns[0].text, columns[0].length,
												  &worker->next_due);
	return false;
}

/* Until the next row comes due, as far as we know of it; the poll interval at the most. */
static int64_t
idle_time(ruststream_worker *worker)
{
	rs_session *session = worker->handle->session;
	rs_value values[RS_PARAM_COUNT] = {{RS_NULL, 0, 0, NULL, 0}};
	int64_t idle = worker->plan.poll_interval;
	char now_text[RS_TIME_SIZE + 8];
	int64_t now;

	if (rs_plan_count(&worker->plan, RS_OP_NEXT_DUE) == 0 ||
		session->driver->now(session, &now) != RS_DONE)
		return idle;
	session->driver->format_time(now, false, now_text);
	values[RS_PARAM_NOW] = rs_value_of_text(now_text);
	values[RS_PARAM_GROUP] = rs_value_of_text(worker->plan.subscription.group_name);
	worker->next_due = INT64_MAX;
	if (rs_plan_run(session, &worker->plan, RS_OP_NEXT_DUE, 0, values, read_due, worker, NULL) !=
		RS_DONE)
	{
		(void) session->driver->rollback(session);
		return idle;
	}
	/* Never less than the text's own precision, lest the last millisecond be spent asking. */
	if (worker->next_due != INT64_MAX && worker->next_due - now < idle)
		idle = worker->next_due - now > RS_MILLISECOND ? worker->next_due - now : RS_MILLISECOND;
	return idle;
}

/* ---------------------------------------------------------------- running */

/* Have what a delivery needs; RS_PROGRESS_DELIVERED says that it is there. */
static rs_progress
prepare(ruststream_worker *worker)
{
	if ((!worker->is_loaded || rs_monotonic() >= worker->next_look) &&
		load(worker) != RUSTSTREAM_OK)
		return RS_PROGRESS_BROKEN;
	if (worker->held.count > 0)
		(void) rs_let_go(worker, rs_monotonic());
	return worker->is_paused ? RS_PROGRESS_NOTHING : RS_PROGRESS_DELIVERED;
}

/*
 * What a handler has left in its session may be why nothing works any more: the next attempt
 * is made through a new one.
 */
static void
leave_session(ruststream_worker *worker)
{
	rs_error kept = worker->handle->error;

	worker->has_handled = false;
	worker->is_loaded = false;
	(void) rs_reconnect(worker->handle);
	worker->handle->error = kept;
}

static rs_progress
step(ruststream_worker *worker)
{
	rs_progress progress = prepare(worker);

	if (progress == RS_PROGRESS_DELIVERED)
		progress = rs_deliver(worker);
	if (progress == RS_PROGRESS_BROKEN && worker->has_handled)
		leave_session(worker);
	return progress;
}

ruststream_code
ruststream_worker_step(ruststream_worker *worker, bool *delivered)
{
	rs_progress progress;

	if (worker->handle->in_handler)
		return rs_begin_call(worker->handle);
	memset(&worker->handle->error, 0, sizeof(worker->handle->error));
	do
	{
		progress = step(worker);
		if (progress == RS_PROGRESS_TRANSIENT)
			wait_out(worker);
	} while (progress == RS_PROGRESS_TRANSIENT && !atomic_load(&worker->stops));
	observe(worker, RUSTSTREAM_DRAIN);
	if (delivered != NULL)
		*delivered = progress == RS_PROGRESS_DELIVERED;
	if (progress == RS_PROGRESS_BROKEN)
		return worker->handle->error.code;
	memset(&worker->handle->error, 0, sizeof(worker->handle->error));
	return RUSTSTREAM_OK;
}

/* The worker cannot go on as it is: say so, and look again later. */
static void
rest_broken(ruststream_worker *worker)
{
	ruststream *handle = worker->handle;
	char state[sizeof(worker->state)];

	(void) snprintf(state, sizeof(state), "broken: %.240s", handle->error.message);
	rs_make_utf8(state);
	if (strcmp(state, worker->state) != 0)
		rs_tell(handle, "subscription \"%s\": %s%s%s", worker->name, handle->error.message,
				handle->error.hint[0] != '\0' ? ". " : "", handle->error.hint);
	memcpy(worker->state, state, sizeof(state));
	worker->is_loaded = false;
	worker->next_seen = 0;
	observe(worker, RUSTSTREAM_FOREVER);
	wait_for(worker, worker->plan.poll_interval > 0 ? worker->plan.poll_interval : RS_SECOND);
}

/*
 * Rows are left alone, and nothing else is due: until the first of them may be had, which it may be
 * by now, or there may be something new.
 */
static void
rest_held(ruststream_worker *worker)
{
	int64_t now = rs_monotonic();
	int64_t next = rs_let_go(worker, now);

	if (next == INT64_MAX)
		return;
	wait_for(worker,
			 next - now < worker->plan.poll_interval ? next - now : worker->plan.poll_interval);
}

/* One turn; false: this is the end. */
static bool
turn(ruststream_worker *worker, ruststream_run how)
{
	switch (step(worker))
	{
		case RS_PROGRESS_DELIVERED:
			break;
		case RS_PROGRESS_TRANSIENT:
			wait_out(worker);
			observe(worker, how);
			return true;
		case RS_PROGRESS_RELEASED:
			return false;
		case RS_PROGRESS_HELD:
			rest_held(worker);
			break;
		case RS_PROGRESS_NOTHING:
			if (how == RUSTSTREAM_DRAIN)
				return false;
			wait_for(worker, idle_time(worker));
			break;
		case RS_PROGRESS_BROKEN:
			if (how == RUSTSTREAM_DRAIN)
				return false;
			rest_broken(worker);
			return true;
	}
	if (worker->state[0] != '\0')
		worker->next_seen = 0;
	worker->state[0] = '\0';
	observe(worker, how);
	return true;
}

ruststream_code
ruststream_worker_run(ruststream_worker *worker, ruststream_run how)
{
	ruststream *handle = worker->handle;

	if (handle->in_handler)
		return rs_begin_call(handle);
	memset(&handle->error, 0, sizeof(handle->error));
	while (!atomic_load(&worker->stops))
	{
		if (handle->error.code != RUSTSTREAM_OK)
			memset(&handle->error, 0, sizeof(handle->error));
		if (!turn(worker, how))
			break;
	}
	flush_counts(worker);
	if (how == RUSTSTREAM_FOREVER)
		memset(&handle->error, 0, sizeof(handle->error));
	return handle->error.code;
}
