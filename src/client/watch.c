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
	free(watch->id_text);
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
next_end(const rs_watch *watch, int64_t now)
{
	int64_t end = now + watch->lease;
	int64_t held;

	if (watch->driver->parse_time(watch->token, strlen(watch->token), &held) && end <= held)
		end = held + RS_SECOND;
	return end;
}

/* Announce a token and take along what its writing needs; the mutex is held. */
static bool
announce(rs_watch *watch, extension *next, int64_t now)
{
	rs_value id = watch->id;

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
	memcpy(next->token, watch->token, sizeof(next->token));
	/* One whose writing had no clear end is tried again. */
	if (watch->announced[0] == '\0')
		watch->driver->format_time(next_end(watch, now), true, watch->announced);
	memcpy(next->until, watch->announced, sizeof(next->until));
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
 * Extend the lease; the mutex is held at the beginning and at the end, and not while the database
 * is asked.  A lease that is found to be somebody else's is left to the settlement, whose guard
 * says so.
 */
static void
extend(rs_watch *watch)
{
	extension next;
	int64_t now = 0;
	int64_t found = 0;
	rs_result result;
	uint64_t generation = watch->generation;

	pthread_mutex_unlock(&watch->mutex);
	result = ask_time(watch, &now);
	pthread_mutex_lock(&watch->mutex);
	if (!watch->is_active || watch->generation != generation)
		return;
	if (result != RS_DONE || !announce(watch, &next, now))
	{
		watch->next_extension = rs_monotonic() + watch->lease / 8;
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
	if (watch->generation != next.generation || !watch->is_active)
		return;
	if (result == RS_DONE && found > 0)
	{
		memcpy(watch->token, next.until, sizeof(watch->token));
		watch->announced[0] = '\0';
		watch->next_extension = rs_monotonic() + watch->lease / 2;
	}
	else if (result == RS_DONE)
		watch->has_lease = false;
	else
	{
		/* Whether it was written is known, unless the connection was lost over it. */
		if (result != RS_LOST)
			watch->announced[0] = '\0';
		watch->next_extension = rs_monotonic() + watch->lease / 8;
	}
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
		int64_t until = 0;

		if (runs && watch->deadline != 0 && now >= watch->deadline)
			watch->timed_out = true;
		if (runs && (watch->timed_out || watch->cancels))
		{
			/* Again and again: what is between two statements does not notice. */
			watch->driver->interrupt(watch->session);
			until = now + 50 * RS_MILLISECOND;
		}
		if (watch->is_active && watch->has_lease && now >= watch->next_extension)
		{
			extend(watch);
			continue;
		}
		if (watch->is_active && watch->has_lease && (until == 0 || watch->next_extension < until))
			until = watch->next_extension;
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
keep_id(rs_watch *watch, const rs_value *id)
{
	watch->id = *id;
	if (id->kind != RS_TEXT && id->kind != RS_BYTES)
		return true;
	if (id->length + 1 > watch->id_size)
	{
		char *text = realloc(watch->id_text, id->length + 1);

		if (text == NULL)
			return false;
		watch->id_text = text;
		watch->id_size = id->length + 1;
	}
	memcpy(watch->id_text, id->text, id->length);
	watch->id.text = watch->id_text;
	return true;
}

/* When the thread has something to do for the delivery; INT64_MAX: never. */
static int64_t
next_need(const rs_watch *watch)
{
	int64_t need = watch->has_lease ? watch->next_extension : INT64_MAX;

	if (watch->deadline != 0 && watch->deadline < need)
		need = watch->deadline;
	return watch->cancels ? 0 : need;
}

/*
 * A delivery's begin costs a lock and no wake-up, where the thread wakes by itself before it has
 * something to do: it looks again then.
 */
bool
rs_watch_begin(rs_watch *watch, rs_session *session, const rs_value *id, const char *token,
			   int64_t lease, int64_t timeout)
{
	int64_t now = rs_monotonic();
	bool begun = true;

	pthread_mutex_lock(&watch->mutex);
	watch->generation++;
	watch->has_lease = token != NULL;
	watch->announced[0] = '\0';
	if (token != NULL)
	{
		(void) snprintf(watch->token, sizeof(watch->token), "%s", token);
		watch->lease = lease;
		watch->next_extension = now + lease / 2;
		begun = keep_id(watch, id);
	}
	watch->deadline = timeout > 0 ? now + timeout : 0;
	watch->timed_out = false;
	watch->session = session;
	watch->is_active = begun;
	if (begun && !watch->is_started && next_need(watch) != INT64_MAX)
		begun = start_thread(watch);
	else if (begun && next_need(watch) < watch->sleeps_until)
		pthread_cond_signal(&watch->changed);
	watch->is_active = begun;
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
	if (!watch->has_lease)
		watch->is_active = false;
	pthread_mutex_unlock(&watch->mutex);
}

void
rs_watch_stop(rs_watch *watch, char token[RS_TIME_SIZE + 8], char announced[RS_TIME_SIZE + 8])
{
	pthread_mutex_lock(&watch->mutex);
	watch->is_active = false;
	memcpy(token, watch->token, sizeof(watch->token));
	memcpy(announced, watch->announced, sizeof(watch->announced));
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
