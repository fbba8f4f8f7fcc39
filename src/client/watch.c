/*-------------------------------------------------------------------------
 *
 * watch.c
 *	  The watch on a delivery; client.h says what it guards.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

bool
rs_watch_init(rs_watch *watch, ruststream *handle)
{
	pthread_condattr_t attributes;
	bool done;

	memset(watch, 0, sizeof(*watch));
	watch->driver = handle->driver;
	watch->url = &handle->url;
	if (pthread_mutex_init(&watch->mutex, NULL) != 0)
		return false;
	if (pthread_condattr_init(&attributes) != 0)
	{
		pthread_mutex_destroy(&watch->mutex);
		return false;
	}
	done = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0 &&
		   pthread_cond_init(&watch->changed, &attributes) == 0;
	pthread_condattr_destroy(&attributes);
	if (!done)
		pthread_mutex_destroy(&watch->mutex);
	return done;
}

void
rs_watch_destroy(rs_watch *watch)
{
	if (watch->is_started)
	{
		pthread_mutex_lock(&watch->mutex);
		watch->quits = true;
		pthread_cond_signal(&watch->changed);
		pthread_mutex_unlock(&watch->mutex);
		pthread_join(watch->thread, NULL);
	}
	pthread_cond_destroy(&watch->changed);
	pthread_mutex_destroy(&watch->mutex);
	for (int i = 0; i < watch->lease_room; i++)
		free(watch->leases[i].id_text);
	free(watch->leases);
	free(watch->extend_text);
}

/* ------------------------------------------------------------- the thread */

/* Everything an extension needs, so that it can be written without the mutex. */
typedef struct extension
{
	uint64_t generation;
	rs_command command;
	char *id_text;
	rs_value id;
	char token[RS_TIME_SIZE + 8];
	char until[RS_TIME_SIZE + 8];
} extension;

/* A lease moves forward, whatever the clock does. */
static int64_t
next_end(const rs_watch *watch, const rs_lease *lease, int64_t now)
{
	int64_t end = now + watch->lease;
	int64_t held;

	if (watch->driver->parse_time(lease->token, strlen(lease->token), &held) && end <= held)
		end = held + RS_SECOND;
	return end;
}

/* Announce a token and take along what its writing needs; the mutex is held. */
static bool
announce(rs_watch *watch, rs_lease *lease, extension *next, int64_t now)
{
	rs_value id = lease->id;

	next->id_text = NULL;
	if (id.kind == RS_TEXT || id.kind == RS_BYTES)
	{
		next->id_text = malloc(id.length + 1);
		if (next->id_text == NULL)
			return false;
		memcpy(next->id_text, id.text, id.length);
		id.text = next->id_text;
	}
	next->id = id;
	next->generation = watch->generation;
	next->command = watch->extend;
	memcpy(next->token, lease->token, sizeof(next->token));
	/* One whose writing had no clear end is tried again. */
	if (lease->announced[0] == '\0')
		watch->driver->format_time(next_end(watch, lease, now), true, lease->announced);
	memcpy(next->until, lease->announced, sizeof(next->until));
	return true;
}

static rs_result
write_extension(rs_session *session, const extension *next, int64_t *found)
{
	rs_value values[RS_PARAM_COUNT] = {{RS_NULL, 0, 0, NULL, 0}};
	rs_value bound[RS_MAX_PARAMETERS];

	values[RS_PARAM_ID] = next->id;
	values[RS_PARAM_TOKEN] = rs_value_of_text(next->token);
	values[RS_PARAM_ANNOUNCED] = rs_value_of_text(next->until);
	values[RS_PARAM_UNTIL] = rs_value_of_text(next->until);
	for (int i = 0; i < next->command.parameter_count; i++)
		bound[i] = values[next->command.parameters[i]];
	return session->driver->execute(session, &next->command, bound, next->command.parameter_count,
									NULL, NULL, found);
}

/* A lease by its number, unless it was settled, or the delivery ended, while the mutex was not
 * held. */
static rs_lease *
still_held(rs_watch *watch, uint64_t generation, int number)
{
	return watch->is_active && watch->generation == generation && watch->leases[number].is_held
			   ? &watch->leases[number]
			   : NULL;
}

static void
close_own(rs_watch *watch)
{
	if (watch->own != NULL)
		watch->driver->close(watch->own);
	watch->own = NULL;
}

/* The time by the thread's own connection, which is made where there is none, or none any more. */
static rs_result
ask_time(rs_watch *watch, int64_t *now)
{
	rs_result result = RS_LOST;
	rs_error error;

	for (int i = 0; i < 2 && result == RS_LOST; i++)
	{
		result = RS_DONE;
		if (watch->own == NULL)
			result = watch->driver->open(watch->url, &watch->own, &error);
		if (result == RS_DONE)
			result = watch->driver->now(watch->own, now);
		if (result == RS_LOST)
			close_own(watch);
	}
	return result;
}

/*
 * Extend a lease; the mutex is held at the beginning and at the end, and not while the database
 * is asked.  A lease that is found to be somebody else's is left to the settlement, whose guard
 * says so.
 */
static void
extend(rs_watch *watch, int number)
{
	rs_lease *lease;
	extension next;
	int64_t now = 0;
	int64_t found = 0;
	rs_result result;
	uint64_t generation = watch->generation;

	pthread_mutex_unlock(&watch->mutex);
	result = ask_time(watch, &now);
	pthread_mutex_lock(&watch->mutex);
	lease = still_held(watch, generation, number);
	if (lease == NULL)
		return;
	if (result != RS_DONE || !announce(watch, lease, &next, now))
	{
		lease->next_extension = rs_monotonic() + watch->lease / 8;
		return;
	}
	pthread_mutex_unlock(&watch->mutex);

	result = write_extension(watch->own, &next, &found);
	free(next.id_text);
	if (result == RS_LOST)
		close_own(watch);
	else if (result != RS_DONE)
		(void) watch->driver->rollback(watch->own);

	pthread_mutex_lock(&watch->mutex);
	lease = still_held(watch, next.generation, number);
	if (lease == NULL)
		return;
	if (result == RS_DONE && found > 0)
	{
		memcpy(lease->token, next.until, sizeof(lease->token));
		lease->announced[0] = '\0';
		lease->next_extension = rs_monotonic() + watch->lease / 2;
	}
	else if (result == RS_DONE)
	{
		lease->is_held = false;
		watch->held_count--;
	}
	else
	{
		/* Whether it was written is known, unless the connection was lost over it. */
		if (result != RS_LOST)
			lease->announced[0] = '\0';
		lease->next_extension = rs_monotonic() + watch->lease / 8;
	}
}

/* The number of the lease that is to be extended first; -1: none is held. */
static int
next_lease(const rs_watch *watch)
{
	int next = -1;

	for (int i = 0; i < watch->lease_count && watch->held_count > 0; i++)
	{
		if (watch->leases[i].is_held &&
			(next < 0 || watch->leases[i].next_extension < watch->leases[next].next_extension))
			next = i;
	}
	return next;
}

/* Wait for a change, or until a time of the monotonic clock (0: no such). */
static void
wait_until(rs_watch *watch, int64_t until)
{
	struct timespec when = {.tv_sec = (time_t) (until / RS_SECOND),
							.tv_nsec = (long) (until % RS_SECOND) * 1000};

	watch->sleeps_until = until == 0 ? INT64_MAX : until;
	if (until == 0)
		pthread_cond_wait(&watch->changed, &watch->mutex);
	else
		pthread_cond_timedwait(&watch->changed, &watch->mutex, &when);
	watch->sleeps_until = 0;
}

static void *
watch_main(void *arg)
{
	rs_watch *watch = arg;

	pthread_mutex_lock(&watch->mutex);
	while (!watch->quits)
	{
		int64_t now = rs_monotonic();
		bool runs = watch->is_active && watch->session != NULL;
		int lease = watch->is_active ? next_lease(watch) : -1;
		int64_t until = 0;

		if (runs && watch->deadline != 0 && now >= watch->deadline)
			watch->timed_out = true;
		if (runs && (watch->timed_out || watch->cancels))
		{
			/* Again and again: what is between two statements does not notice. */
			watch->driver->interrupt(watch->session);
			until = now + 50 * RS_MILLISECOND;
		}
		if (lease >= 0 && now >= watch->leases[lease].next_extension)
		{
			extend(watch, lease);
			continue;
		}
		if (lease >= 0 && (until == 0 || watch->leases[lease].next_extension < until))
			until = watch->leases[lease].next_extension;
		if (runs && watch->deadline != 0 && !watch->timed_out &&
			(until == 0 || watch->deadline < until))
			until = watch->deadline;
		wait_until(watch, until);
	}
	pthread_mutex_unlock(&watch->mutex);
	close_own(watch);
	return NULL;
}

/* Signals are for the threads of whoever uses the library. */
static bool
start_thread(rs_watch *watch)
{
	sigset_t all;
	sigset_t before;
	bool started;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	started = pthread_create(&watch->thread, NULL, watch_main, watch) == 0;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	watch->is_started = started;
	return started;
}

/* --------------------------------------------------- the worker's side */

bool
rs_watch_prepare(rs_watch *watch, const rs_command *extend_command)
{
	char *text = extend_command != NULL ? strdup(extend_command->text) : NULL;

	if (extend_command != NULL && text == NULL)
		return false;
	pthread_mutex_lock(&watch->mutex);
	free(watch->extend_text);
	watch->extend_text = text;
	if (extend_command != NULL)
	{
		watch->extend = *extend_command;
		watch->extend.text = text;
		watch->extend.slot = -1; /* seldom enough to be prepared anew, and the plan may change */
	}
	pthread_mutex_unlock(&watch->mutex);
	return true;
}

/* Copy the id into memory that is kept from delivery to delivery. */
static bool
keep_id(rs_lease *lease, const rs_value *id)
{
	lease->id = *id;
	if (id->kind != RS_TEXT && id->kind != RS_BYTES)
		return true;
	if (id->length + 1 > lease->id_size)
	{
		char *text = realloc(lease->id_text, id->length + 1);

		if (text == NULL)
			return false;
		lease->id_text = text;
		lease->id_size = id->length + 1;
	}
	memcpy(lease->id_text, id->text, id->length);
	lease->id.text = lease->id_text;
	return true;
}

/* A new delivery, with room for so many leases. */
static bool
begin_leases(rs_watch *watch, int count)
{
	watch->generation++;
	watch->lease_count = 0;
	watch->held_count = 0;
	if (count > watch->lease_room)
	{
		rs_lease *leases = realloc(watch->leases, sizeof(rs_lease) * (size_t) count);

		if (leases == NULL)
			return false;
		memset(leases + watch->lease_room, 0,
			   sizeof(rs_lease) * (size_t) (count - watch->lease_room));
		watch->leases = leases;
		watch->lease_room = count;
	}
	return true;
}

static bool
add_lease(rs_watch *watch, const rs_value *id, const char *token, int64_t now)
{
	rs_lease *lease = &watch->leases[watch->lease_count];

	if (!keep_id(lease, id))
		return false;
	lease->is_held = true;
	lease->announced[0] = '\0';
	memcpy(lease->token, token, strlen(token) + 1);
	lease->next_extension = now + watch->lease / 2;
	watch->lease_count++;
	watch->held_count++;
	return true;
}

/* When the thread has something to do for the delivery; INT64_MAX: never. */
static int64_t
next_need(const rs_watch *watch)
{
	int lease = next_lease(watch);
	int64_t need = lease >= 0 ? watch->leases[lease].next_extension : INT64_MAX;

	if (watch->deadline != 0 && watch->deadline < need)
		need = watch->deadline;
	return watch->cancels ? 0 : need;
}

/*
 * From now on the thread is there for the delivery, unless *begun says that it has none; the mutex
 * is held.  That costs no wake-up where the thread wakes by itself before it has something to
 * do: it looks again then.
 */
static void
activate(rs_watch *watch, bool *begun)
{
	watch->is_active = *begun;
	if (*begun && !watch->is_started && next_need(watch) != INT64_MAX)
		*begun = start_thread(watch);
	else if (*begun && next_need(watch) < watch->sleeps_until)
		pthread_cond_signal(&watch->changed);
	watch->is_active = *begun;
}

bool
rs_watch_begin(rs_watch *watch, rs_session *session, const rs_value *id, const char *token,
			   int64_t lease, int64_t timeout)
{
	int64_t now = rs_monotonic();
	bool begun;

	pthread_mutex_lock(&watch->mutex);
	watch->lease = lease;
	begun = begin_leases(watch, 1) && (token == NULL || add_lease(watch, id, token, now));
	watch->deadline = timeout > 0 ? now + timeout : 0;
	watch->timed_out = false;
	watch->session = session;
	activate(watch, &begun);
	pthread_mutex_unlock(&watch->mutex);
	return begun;
}

bool
rs_watch_hold(rs_watch *watch, rs_work *const *rows, int count, int64_t lease)
{
	int64_t now = rs_monotonic();
	bool begun;

	pthread_mutex_lock(&watch->mutex);
	watch->lease = lease;
	begun = begin_leases(watch, count);
	for (int i = 0; i < count && begun; i++)
	{
		if (rows[i]->token[0] == '\0')
			continue;
		rows[i]->lease_number = watch->lease_count;
		begun = rows[i]->holds_lease = add_lease(watch, &rows[i]->id, rows[i]->token, now);
	}
	watch->deadline = 0;
	watch->timed_out = false;
	watch->session = NULL;
	activate(watch, &begun);
	pthread_mutex_unlock(&watch->mutex);
	return begun;
}

bool
rs_watch_handler_begins(rs_watch *watch, rs_session *session, int64_t timeout)
{
	bool begun = true;

	pthread_mutex_lock(&watch->mutex);
	watch->deadline = timeout > 0 ? rs_monotonic() + timeout : 0;
	watch->session = session;
	activate(watch, &begun);
	pthread_mutex_unlock(&watch->mutex);
	return begun;
}

void
rs_watch_handler_ended(rs_watch *watch, bool *timed_out)
{
	pthread_mutex_lock(&watch->mutex);
	*timed_out = watch->timed_out;
	watch->session = NULL;
	watch->deadline = 0;
	if (watch->held_count == 0)
		watch->is_active = false;
	pthread_mutex_unlock(&watch->mutex);
}

void
rs_watch_stop(rs_watch *watch, int number, char token[RS_TIME_SIZE + 8],
			  char announced[RS_TIME_SIZE + 8])
{
	rs_lease *lease;

	pthread_mutex_lock(&watch->mutex);
	lease = &watch->leases[number];
	if (lease->is_held)
		watch->held_count--;
	lease->is_held = false;
	if (watch->held_count == 0)
		watch->is_active = false;
	memcpy(token, lease->token, sizeof(lease->token));
	memcpy(announced, lease->announced, sizeof(lease->announced));
	pthread_mutex_unlock(&watch->mutex);
}

void
rs_watch_cancel(rs_watch *watch)
{
	pthread_mutex_lock(&watch->mutex);
	watch->cancels = true;
	if (watch->is_active && !watch->is_started)
		(void) start_thread(watch);
	pthread_cond_signal(&watch->changed);
	pthread_mutex_unlock(&watch->mutex);
}

bool
rs_watch_is_cancelled(rs_watch *watch)
{
	bool cancelled;

	pthread_mutex_lock(&watch->mutex);
	cancelled = watch->cancels || watch->timed_out;
	pthread_mutex_unlock(&watch->mutex);
	return cancelled;
}
