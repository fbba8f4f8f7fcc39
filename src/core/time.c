/*-------------------------------------------------------------------------
 *
 * time.c
 *	  SQLite's times, which are text.
 *
 * The text has a fixed order of fields and a fixed offset, so comparing it as
 * text compares the times: a fraction begins with ".", which sorts behind the
 * "+" that stands there without one.
 *
 *-------------------------------------------------------------------------
 */
#include "core.h"

#define SECOND INT64_C(1000000)
#define DAY (86400 * SECOND)

/* The first and the last microsecond that four digits of a year can say. */
#define FIRST_TIME (-INT64_C(719528) * DAY)
#define LAST_TIME (INT64_C(2932897) * DAY - 1)

/* A day of the proleptic Gregorian calendar. */
typedef struct date
{
	int64_t year;
	int64_t month; /* 1 to 12 */
	int64_t day;   /* 1 to 31 */
} date;

/*
 * Days since 1970-01-01, and back.  Years are counted from March, so that the
 * leap day is a year's last; 400 such years have 146,097 days.  719468 is the
 * number of days from 0000-03-01 to 1970-01-01.
 */
static int64_t
days_of_date(date given)
{
	int64_t year = given.month > 2 ? given.year : given.year - 1;
	int64_t month = (given.month + 9) % 12;
	int64_t cycle = (year >= 0 ? year : year - 399) / 400;
	int64_t year_of_cycle = year - cycle * 400;

	return cycle * 146097 + year_of_cycle * 365 + year_of_cycle / 4 - year_of_cycle / 100 +
		   (153 * month + 2) / 5 + given.day - 1 - 719468;
}

static date
date_of_days(int64_t days)
{
	int64_t from_march = days + 719468;
	int64_t cycle = (from_march >= 0 ? from_march : from_march - 146096) / 146097;
	int64_t day_of_cycle = from_march - cycle * 146097;
	int64_t year_of_cycle =
		(day_of_cycle - day_of_cycle / 1460 + day_of_cycle / 36524 - day_of_cycle / 146096) / 365;
	int64_t day_of_year =
		day_of_cycle - (365 * year_of_cycle + year_of_cycle / 4 - year_of_cycle / 100);
	int64_t month = (5 * day_of_year + 2) / 153;
	date result = {.year = cycle * 400 + year_of_cycle + (month >= 10 ? 1 : 0),
				   .month = month < 10 ? month + 3 : month - 9,
				   .day = day_of_year - (153 * month + 2) / 5 + 1};

	return result;
}

/* Write a number with leading zeros and return the position behind it. */
static char *
put_digits(char *out, int64_t number, int digits)
{
	for (int i = digits - 1; i >= 0; i--)
	{
		out[i] = (char) ('0' + number % 10);
		number /= 10;
	}
	return out + digits;
}

static char *
put_character(char *out, char character)
{
	*out = character;
	return out + 1;
}

void
rs_time_format(int64_t time, char buffer[RS_TIME_SIZE])
{
	char *out = buffer;
	int64_t days;
	int64_t rest;
	int64_t milliseconds;
	date when;

	if (time < FIRST_TIME)
		time = FIRST_TIME;
	if (time > LAST_TIME)
		time = LAST_TIME;
	days = (time >= 0 ? time : time - (DAY - 1)) / DAY;
	rest = time - days * DAY;
	when = date_of_days(days);

	out = put_digits(out, when.year, 4);
	out = put_character(out, '-');
	out = put_digits(out, when.month, 2);
	out = put_character(out, '-');
	out = put_digits(out, when.day, 2);
	out = put_character(out, 'T');
	out = put_digits(out, rest / (3600 * SECOND), 2);
	out = put_character(out, ':');
	out = put_digits(out, rest / (60 * SECOND) % 60, 2);
	out = put_character(out, ':');
	out = put_digits(out, rest / SECOND % 60, 2);
	milliseconds = rest / 1000 % 1000;
	if (milliseconds != 0)
	{
		out = put_character(out, '.');
		out = put_digits(out, milliseconds, 3);
	}
	for (const char *offset = "+00:00"; *offset != '\0'; offset++)
		out = put_character(out, *offset);
	*out = '\0';
}

/* What is left to be read. */
typedef struct reading
{
	const char *at;
	const char *end;
	bool failed;
} reading;

/* Exactly so many digits, of a number from low to high. */
static int64_t
take_number(reading *from, int digits, int64_t low, int64_t high)
{
	int64_t number = 0;

	for (int i = 0; i < digits; i++)
	{
		if (from->at == from->end || *from->at < '0' || *from->at > '9')
		{
			from->failed = true;
			return low;
		}
		number = number * 10 + (*from->at++ - '0');
	}
	if (number < low || number > high)
		from->failed = true;
	return number;
}

/* One of the characters, which is returned; anything else fails. */
static char
take_one_of(reading *from, const char *characters)
{
	if (from->at != from->end)
	{
		for (; *characters != '\0'; characters++)
		{
			if (*from->at == *characters)
			{
				from->at++;
				return *characters;
			}
		}
	}
	from->failed = true;
	return '\0';
}

static bool
is_next(const reading *from, char character)
{
	return from->at != from->end && *from->at == character;
}

/* The fraction, without its point, in microseconds. */
static int64_t
take_fraction(reading *from)
{
	int64_t fraction = 0;
	int digits = 0;

	while (from->at != from->end && *from->at >= '0' && *from->at <= '9')
	{
		if (digits < 6)
			fraction = fraction * 10 + (*from->at - '0');
		digits++;
		from->at++;
	}
	if (digits == 0 || digits > 9)
		from->failed = true;
	for (; digits < 6; digits++)
		fraction *= 10;
	return fraction;
}

/* Z, +HH:MM, -HH:MM, or the end: microseconds ahead of UTC. */
static int64_t
take_offset(reading *from)
{
	int64_t hours;
	int64_t minutes;
	char sign;

	if (from->at == from->end)
		return 0;
	sign = take_one_of(from, "Z+-");
	if (sign == 'Z' || from->failed)
		return 0;
	hours = take_number(from, 2, 0, 23);
	(void) take_one_of(from, ":");
	minutes = take_number(from, 2, 0, 59);
	return (sign == '-' ? -1 : 1) * (hours * 60 + minutes) * 60 * SECOND;
}

static int64_t
days_in_month(int64_t year, int64_t month)
{
	static const int64_t days[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
	bool is_leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;

	return month == 2 && is_leap ? 29 : days[month - 1];
}

bool
rs_time_parse(const char *text, size_t length, int64_t *result)
{
	reading from = {.at = text, .end = text + length};
	date when;
	int64_t time;

	when.year = take_number(&from, 4, 0, 9999);
	(void) take_one_of(&from, "-");
	when.month = take_number(&from, 2, 1, 12);
	(void) take_one_of(&from, "-");
	when.day = take_number(&from, 2, 1, 31);
	(void) take_one_of(&from, "T ");
	if (from.failed || when.day > days_in_month(when.year, when.month))
		return false;

	time = days_of_date(when) * DAY;
	time += take_number(&from, 2, 0, 23) * 3600 * SECOND;
	(void) take_one_of(&from, ":");
	time += take_number(&from, 2, 0, 59) * 60 * SECOND;
	(void) take_one_of(&from, ":");
	time += take_number(&from, 2, 0, 59) * SECOND;
	if (is_next(&from, '.'))
	{
		from.at++;
		time += take_fraction(&from);
	}
	time -= take_offset(&from);
	if (from.failed || from.at != from.end)
		return false;
	*result = time;
	return true;
}
