/*-------------------------------------------------------------------------
 *
 * utf8.c
 *	  Text that comes from outside, or was cut: is it UTF-8, and making it so.
 *
 * A database refuses what is not, and a failure that could not be recorded would never end.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <string.h>

/* How long the character is that begins here; 0: what is here is none. */
static size_t
character(const char *text, size_t length)
{
	unsigned char lead = (unsigned char) text[0];
	size_t more = lead < 0x80                   ? 0
				  : lead >= 0xC2 && lead < 0xE0 ? 1
				  : lead >= 0xE0 && lead < 0xF0 ? 2
				  : lead >= 0xF0 && lead < 0xF5 ? 3
												: length;

	if (more >= length)
		return 0;
	for (size_t n = 1; n <= more; n++)
	{
		unsigned char next = (unsigned char) text[n];

		if ((next & 0xC0) != 0x80)
			return 0;
		/* Overlong forms, surrogates, and what is beyond Unicode. */
		if (n == 1 && ((lead == 0xE0 && next < 0xA0) || (lead == 0xED && next > 0x9F) ||
					   (lead == 0xF0 && next < 0x90) || (lead == 0xF4 && next > 0x8F)))
			return 0;
	}
	return more + 1;
}

bool
rs_is_utf8(const char *text, size_t length)
{
	for (size_t i = 0; i < length;)
	{
		size_t step = character(text + i, length - i);

		if (step == 0)
			return false;
		i += step;
	}
	return true;
}

void
rs_make_utf8(char *text)
{
	size_t length = strlen(text);

	for (size_t i = 0; i < length;)
	{
		size_t step = character(text + i, length - i);

		if (step == 0)
		{
			text[i] = '?';
			step = 1;
		}
		i += step;
	}
}
