/*-------------------------------------------------------------------------
 *
 * fuzz_time.c
 *	  Any text as one of SQLite's times: what is read is written again as the same time, and
 *	  text compares as times do.
 *
 *-------------------------------------------------------------------------
 */
#include "core/core.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int64_t
to_millisecond(int64_t time)
{
	return time - ((time % 1000) + 1000) % 1000;
}

/* Written, read, written: the same text and the same millisecond. */
static void
check_round(int64_t time, char text[RS_TIME_SIZE])
{
	char again[RS_TIME_SIZE];
	int64_t read = 0;

	rs_time_format(time, text);
	if (strlen(text) >= RS_TIME_SIZE || !rs_time_parse(text, strlen(text), &read))
		abort();
	rs_time_format(read, again);
	if (strcmp(text, again) != 0)
		abort();
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char text[RS_TIME_SIZE];
	char other[RS_TIME_SIZE];
	int64_t time = 0;
	int64_t any = 0;

	if (size >= sizeof(any))
	{
		memcpy(&any, data, sizeof(any));
		check_round(any, other);
	}
	if (!rs_time_parse((const char *) data, size, &time))
		return 0;
	check_round(time, text);
	if (size >= sizeof(any))
	{
		int64_t first = to_millisecond(time);
		int64_t second = 0;
		int order;

		/* As the formatted text has them: beyond the years it can say, the nearest it can. */
		(void) rs_time_parse(text, strlen(text), &first);
		(void) rs_time_parse(other, strlen(other), &second);
		order = strcmp(text, other);
		if ((order < 0) != (first < second) || (order > 0) != (first > second))
			abort();
	}
	return 0;
}
