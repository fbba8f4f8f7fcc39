/*-------------------------------------------------------------------------
 *
 * failpoint.c
 *	  Named points at which a test has a process die.
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

#include "utils/guc.h"

/* 'name:n': SIGKILL when this process reaches the point for the n-th time. */
static char *failpoint;
static int reached;

void
rs_failpoint_init(void)
{
	DefineCustomStringVariable("ruststream.failpoint",
							   "Kills a process at a named point (test builds only).",
							   "\"name:n\" sends SIGKILL to itself the n-th time it is there.",
							   &failpoint, "", PGC_SIGHUP, 0, NULL, NULL, NULL);
}

void
rs_failpoint_reached(const char *name)
{
	size_t length = strlen(name);

	if (failpoint == NULL || strncmp(failpoint, name, length) != 0 || failpoint[length] != ':')
		return;
	if (++reached >= atoi(failpoint + length + 1))
		kill(getpid(), SIGKILL);
}

#endif /* RUSTSTREAM_FAILPOINTS */
