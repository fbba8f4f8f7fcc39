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

	if (wanted == NULL || strncmp(wanted, name, length) != 0 ||
		(wanted[length] != '\0' && wanted[length] != ':'))
		return;
	if (wanted[length] == ':')
		number = atoi(wanted + length + 1);
	if (atomic_fetch_add(&passed, 1) + 1 == number)
		(void) kill(getpid(), SIGKILL);
}

#else

/* A file of nothing is not C. */
typedef int rs_no_failpoints;

#endif
