/*-------------------------------------------------------------------------
 *
 * failpoint.c
 *	  See failpoint.h.
 *
 *-------------------------------------------------------------------------
 */
#include "client/failpoint.h"

#ifdef RUSTSTREAM_FAILPOINTS

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void
rs_failpoint(const char *name)
{
	static atomic_int passed;
	const char *wanted = getenv("RUSTSTREAM_FAILPOINT");
	size_t length = strlen(name);
	int number = 1;
	const char *what;

	if (wanted == NULL || strncmp(wanted, name, length) != 0 ||
		(wanted[length] != '\0' && wanted[length] != ':'))
		return;
	if (wanted[length] == ':')
		number = atoi(wanted + length + 1);
	if (atomic_fetch_add(&passed, 1) + 1 != number)
		return;
	what = strrchr(wanted, ':');
	/* To this thread, so that it goes no further. */
	if (what != NULL && strcmp(what, ":stop") == 0)
		(void) raise(SIGSTOP);
	else
		(void) kill(getpid(), SIGKILL);
}

#else

/* A file of nothing is not C. */
typedef int rs_no_failpoints;

#endif
