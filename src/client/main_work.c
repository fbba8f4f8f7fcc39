/*-------------------------------------------------------------------------
 *
 * main_work.c
 *	  ruststream work: a thread, with a handle of its own, for each worker of each
 *	  subscription.
 *
 * The main thread takes the signals.  The first SIGTERM or SIGINT stops claiming and lets
 * handlers finish; after the grace period, or at the second, they are interrupted and their rows
 * released.
 *
 *-------------------------------------------------------------------------
 */
#include "client/main.h"

#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define DEFAULT_GRACE 30000
#define TICK_MS 100

struct crew;

typedef struct hand
{
	struct crew *crew;
	pthread_t thread;
	bool is_started;
	char *name; /* the subscription */

	/* Guarded by the crew's mutex. */
	ruststream_worker *worker; /* while it runs */
	bool is_done;
	int code; /* its exit code */
	int64_t delivered;
	int64_t failed;
} hand;

typedef struct crew
{
	const request *asked;
	bool drains;
	bool names_subscriptions; /* in the trace: there are several */
	hand *hands;
	int count;
	int room;
	bool is_exhausted;

	pthread_mutex_t mutex; /* guards the following, and each hand's part */
	bool stops;
	bool interrupts;
} crew;

/* ------------------------------------------------------------------- hands */

static void
print_trace(void *arg, const char *text)
{
	const hand *me = arg;

	if (me->crew->names_subscriptions)
		printf("%s: %s\n", me->name, text);
	else
		printf("%s\n", text);
	fflush(stdout);
}

static void
print_notice(void *arg, const char *text)
{
	const hand *me = arg;

	show_notice((void *) (uintptr_t) me->crew->asked, text);
}

/* Be there to be stopped, or learn that we are already; NULL: be there no more. */
static void
show_worker(hand *me, ruststream_worker *worker)
{
	pthread_mutex_lock(&me->crew->mutex);
	if (worker == NULL && me->worker != NULL)
		ruststream_worker_counts(me->worker, &me->delivered, &me->failed);
	me->worker = worker;
	if (worker != NULL && me->crew->stops)
		ruststream_worker_stop(worker);
	if (worker != NULL && me->crew->interrupts)
		ruststream_worker_interrupt(worker);
	pthread_mutex_unlock(&me->crew->mutex);
}

static bool
is_stopping(crew *all)
{
	bool stops;

	pthread_mutex_lock(&all->mutex);
	stops = all->stops;
	pthread_mutex_unlock(&all->mutex);
	return stops;
}

/* Open and run once; the exit code. */
static int
work_once(hand *me, char *said, size_t size)
{
	const request *asked = me->crew->asked;
	ruststream *db;
	ruststream_worker *worker = NULL;
	ruststream_code code = ruststream_open(asked->url, &db);
	int result = EXIT_DONE;

	if (db == NULL)
		return EXIT_FAILED;
	ruststream_on_notice(db, print_notice, me);
	if (option_flag(asked, "trace"))
		ruststream_on_trace(db, print_trace, me);
	if (code == RUSTSTREAM_OK)
		code = ruststream_worker_open(db, me->name, NULL, NULL, &worker);
	if (code == RUSTSTREAM_OK)
	{
		show_worker(me, worker);
		code =
			ruststream_worker_run(worker, me->crew->drains ? RUSTSTREAM_DRAIN : RUSTSTREAM_FOREVER);
	}
	if (code != RUSTSTREAM_OK && strcmp(said, ruststream_message(db)) != 0)
	{
		result = show_error(asked, db);
		(void) snprintf(said, size, "%s", ruststream_message(db));
	}
	else
		result = exit_code(code);
	show_worker(me, NULL);
	ruststream_worker_close(worker);
	ruststream_close(db);
	return result;
}

/* What cannot work yet may work later: said once, tried again each second. */
static void *
work_on(void *arg)
{
	hand *me = arg;
	char said[1024] = "";
	int code = work_once(me, said, sizeof(said));

	while (code != EXIT_DONE && code != EXIT_NOT_FOUND && !me->crew->drains &&
		   !is_stopping(me->crew))
	{
		const struct timespec second = {.tv_sec = 1};

		(void) nanosleep(&second, NULL);
		if (!is_stopping(me->crew))
			code = work_once(me, said, sizeof(said));
	}
	pthread_mutex_lock(&me->crew->mutex);
	me->code = code;
	me->is_done = true;
	pthread_mutex_unlock(&me->crew->mutex);
	return NULL;
}

/* --------------------------------------------------------------- the crew */

static void
add_hands(void *arg, const char *name, int workers)
{
	crew *all = arg;
	bool wanted = all->asked->word_count == 0;

	for (int i = 0; i < all->asked->word_count; i++)
		wanted = wanted || strcmp(all->asked->words[i], name) == 0;
	/* None: drained only.  Less than that: a callback's, by some other program. */
	if (workers == 0 && all->drains)
		workers = 1;
	if (workers <= 0 && all->asked->word_count > 0)
		workers = 1;
	for (int i = 0; wanted && i < workers; i++)
	{
		if (all->count == all->room)
		{
			int room = all->room == 0 ? 16 : all->room * 2;
			hand *hands = realloc(all->hands, sizeof(hand) * (size_t) room);

			if (hands == NULL)
			{
				all->is_exhausted = true;
				return;
			}
			all->hands = hands;
			all->room = room;
		}
		memset(&all->hands[all->count], 0, sizeof(hand));
		all->hands[all->count].name = strdup(name);
		if (all->hands[all->count].name == NULL)
		{
			all->is_exhausted = true;
			return;
		}
		all->count++;
	}
}

/* Who is to work on what, as the database says. */
static int
gather(crew *all)
{
	ruststream *db;
	int result = EXIT_DONE;

	if (ruststream_open(all->asked->url, &db) != RUSTSTREAM_OK ||
		ruststream_each_subscription(db, add_hands, all) != RUSTSTREAM_OK)
		result = show_error(all->asked, db);
	ruststream_close(db);
	if (result == EXIT_DONE && all->is_exhausted)
		return show_error(all->asked, NULL);
	for (int n = 0; n < all->asked->word_count && result == EXIT_DONE; n++)
	{
		bool found = false;

		for (int i = 0; i < all->count; i++)
			found = found || strcmp(all->hands[i].name, all->asked->words[n]) == 0;
		if (!found)
			result = fail_with(all->asked, EXIT_NOT_FOUND, "there is no subscription \"%s\"",
							   all->asked->words[n]);
	}
	for (int i = 1; i < all->count; i++)
		all->names_subscriptions |= strcmp(all->hands[i].name, all->hands[0].name) != 0;
	return result;
}

static void
stop_all(crew *all, bool interrupts)
{
	pthread_mutex_lock(&all->mutex);
	all->stops = true;
	all->interrupts |= interrupts;
	for (int i = 0; i < all->count; i++)
	{
		if (all->hands[i].worker == NULL)
			continue;
		if (interrupts)
			ruststream_worker_interrupt(all->hands[i].worker);
		else
			ruststream_worker_stop(all->hands[i].worker);
	}
	pthread_mutex_unlock(&all->mutex);
}

/* What has been done so far; true: everybody is done. */
static bool
take_stock(crew *all, int64_t *delivered, int64_t *failed)
{
	bool done = true;

	*delivered = 0;
	*failed = 0;
	pthread_mutex_lock(&all->mutex);
	for (int i = 0; i < all->count; i++)
	{
		hand *one = &all->hands[i];

		if (one->worker != NULL)
			ruststream_worker_counts(one->worker, &one->delivered, &one->failed);
		*delivered += one->delivered;
		*failed += one->failed;
		done = done && (one->is_done || !one->is_started);
	}
	pthread_mutex_unlock(&all->mutex);
	return done;
}

static int64_t
clock_ms(void)
{
	struct timespec now;

	(void) clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t) now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Wait for signals and for the others' end. */
static void
oversee(crew *all, const sigset_t *signals, int64_t grace)
{
	const struct timespec tick = {.tv_nsec = TICK_MS * 1000000L};
	bool shows_progress = all->drains && !all->asked->json &&
						  (option_flag(all->asked, "progress") || isatty(STDERR_FILENO));
	int64_t deadline = 0;
	int64_t next_progress = clock_ms() + 1000;
	int64_t delivered;
	int64_t failed;

	while (!take_stock(all, &delivered, &failed))
	{
		int caught = sigtimedwait(signals, NULL, &tick);

		if (caught > 0 && deadline == 0)
		{
			fprintf(stderr, "%s: stopping; handlers have %lld ms to finish\n", all->asked->program,
					(long long) grace);
			stop_all(all, false);
			deadline = clock_ms() + grace;
		}
		else if (caught > 0 || (deadline != 0 && clock_ms() >= deadline))
			stop_all(all, true);
		if (shows_progress && clock_ms() >= next_progress)
		{
			fprintf(stderr, "%s: %lld delivered so far, %lld failed\n", all->asked->program,
					(long long) delivered, (long long) failed);
			next_progress += 1000;
		}
	}
}

static int
start_and_oversee(crew *all, int64_t grace)
{
	sigset_t signals;
	int64_t delivered;
	int64_t failed;
	int result = EXIT_DONE;

#ifdef M_TRIM_THRESHOLD
	/* Each delivery allocates and frees the same again: giving it back to the system costs a fifth.
	 */
	(void) mallopt(M_TRIM_THRESHOLD, 16 * 1024 * 1024);
#endif
	sigemptyset(&signals);
	sigaddset(&signals, SIGTERM);
	sigaddset(&signals, SIGINT);
	/* For every thread: the main one takes them when it is ready. */
	pthread_sigmask(SIG_BLOCK, &signals, NULL);
	for (int i = 0; i < all->count; i++)
	{
		hand *one = &all->hands[i];

		one->crew = all;
		one->is_started = pthread_create(&one->thread, NULL, work_on, one) == 0;
		if (!one->is_started)
		{
			fprintf(stderr, "%s: no thread can be started\n", all->asked->program);
			one->code = EXIT_FAILED;
		}
	}
	oversee(all, &signals, grace);
	for (int i = 0; i < all->count; i++)
	{
		if (all->hands[i].is_started)
			pthread_join(all->hands[i].thread, NULL);
		if (all->hands[i].code != EXIT_DONE)
			result = all->hands[i].code;
	}
	(void) take_stock(all, &delivered, &failed);
	show_counts(all->asked, delivered, failed);
	return result;
}

int
run_work(const request *asked, ruststream *db)
{
	crew all = {.asked = asked, .drains = option_flag(asked, "drain")};
	int64_t grace = DEFAULT_GRACE;
	int result;

	(void) db;
	if (!option_duration(asked, "grace", &grace))
		return EXIT_USAGE;
	if (pthread_mutex_init(&all.mutex, NULL) != 0)
		return show_error(asked, NULL);
	result = gather(&all);
	if (result == EXIT_DONE && all.count == 0)
		fprintf(stderr, "%s: there are no subscriptions to work on\n", asked->program);
	else if (result == EXIT_DONE)
		result = start_and_oversee(&all, grace);
	for (int i = 0; i < all.count; i++)
		free(all.hands[i].name);
	free(all.hands);
	pthread_mutex_destroy(&all.mutex);
	return result;
}
