/*-------------------------------------------------------------------------
 *
 * backoff.c
 *	  How long a row that failed waits before it is tried again.
 *
 *-------------------------------------------------------------------------
 */
#include "core.h"

/* attempt times unit, or cap where that is smaller; both are positive. */
static int64_t
linear(int64_t unit, int64_t cap, int64_t attempt)
{
	return attempt > cap / unit ? cap : attempt * unit;
}

/* unit doubled per attempt after the first, or cap where that is smaller. */
static int64_t
exponential(int64_t unit, int64_t cap, int64_t attempt)
{
	int64_t doublings = attempt - 1;

	/* Shifting the cap down instead of the unit up cannot overflow. */
	if (doublings >= 63 || unit > cap >> doublings)
		return cap;
	return unit << doublings;
}

/* value * random / 2^32, without a 128-bit product. */
static int64_t
fraction(int64_t value, uint32_t random)
{
	uint64_t high = (uint64_t) value >> 32;
	uint64_t low = (uint64_t) value & UINT32_MAX;

	return (int64_t) (high * random + ((low * random) >> 32));
}

int64_t
rs_backoff_delay(rs_backoff backoff, int64_t unit, int64_t cap, int64_t attempt, uint32_t random)
{
	int64_t delay = unit;

	if (unit <= 0 || cap <= 0)
		return 0;
	if (attempt < 1)
		attempt = 1;

	if (backoff == RS_BACKOFF_LINEAR)
		delay = linear(unit, cap, attempt);
	else if (backoff == RS_BACKOFF_EXPONENTIAL)
		delay = exponential(unit, cap, attempt);
	if (delay > cap)
		delay = cap;

	return delay - fraction(delay / 4, random);
}
