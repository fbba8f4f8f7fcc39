/*-------------------------------------------------------------------------
 *
 * tap.h
 *	  Just enough of TAP for a test program of one file.
 *
 *-------------------------------------------------------------------------
 */
#ifndef TAP_H
#define TAP_H

#include <stdbool.h>
#include <stdio.h>

static int tap_number;
static int tap_failures;

static bool
ok(bool passed, const char *name)
{
	tap_number++;
	printf("%s %d - %s\n", passed ? "ok" : "not ok", tap_number, name);
	fflush(stdout);
	if (!passed)
		tap_failures++;
	return passed;
}

static int
done_testing(void)
{
	printf("1..%d\n", tap_number);
	return tap_failures == 0 ? 0 : 1;
}

#endif /* TAP_H */
