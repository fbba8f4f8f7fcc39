/*-------------------------------------------------------------------------
 *
 * failpoint.c
 *	  Named points at which a test has a process die, or stop.
 *
 * Built only with RUSTSTREAM_FAILPOINTS: a release has neither the setting nor
 * the points.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"

#ifdef RUSTSTREAM_FAILPOINTS

#include <signal.h>
#include <unistd.h>

#include "miscadmin.h"
#include "utils/guc.h"

/*
 * 'name:n': SIGKILL when this process reaches the point for the n-th time;
 * 'name:n:postmaster': the postmaster first; 'name:n:stop': SIGSTOP, until the test goes on
 * with it.
 */
static char *failpoint;
static int reached;

void
rs_failpoint_init(void)
{
	DefineCustomStringVariable("ruststream.failpoint",
							   "Kills a process at a named point (test builds only).",
							   "\"name:n\" sends SIGKILL to itself the n-th time it is there; "
							   "\"name:n:postmaster\" to the postmaster first; "
							   "\"name:n:stop\" sends SIGSTOP.",
							   &failpoint, "", PGC_SIGHUP, 0, NULL, NULL, NULL);
}

void
rs_failpoint_reached(const char *name)
{
	size_t length = strlen(name);
	const char *count;
	const char *what;
	bool stops;

	if (failpoint == NULL || strncmp(failpoint, name, length) != 0 || failpoint[length] != ':')
		return;
	count = failpoint + length + 1;
	what = strchr(count, ':');
	stops = what != NULL && strcmp(what, ":stop") == 0;
	/* One that has been stopped once goes on, though its setting may be what it was. */
	if (++reached < atoi(count) || (stops && reached > atoi(count)))
		return;

	/* A test counts these, to know that every point was reached. */
	ereport(LOG, errmsg_internal("failure point \"%s\" reached", failpoint), errhidestmt(true),
			errhidecontext(true));
	if (what != NULL && !stops)
		kill(PostmasterPid, SIGKILL);
	kill(getpid(), stops ? SIGSTOP : SIGKILL);
}

#endif /* RUSTSTREAM_FAILPOINTS */
