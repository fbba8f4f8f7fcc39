/*-------------------------------------------------------------------------
 *
 * utf8.c
 *	  Is a text UTF-8?  And, of one that is to be stored, making it so: what a program
 *	  says, and what was cut to fit, may be anything, and databases refuse it.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <string.h>

/* How many bytes follow a lead byte; more than there are of any character: it is none. */
static size_t
bytes_behind(unsigned char lead)
{
	return lead < 0x80                   ? 0
		   : lead >= 0xC2 && lead < 0xE0 ? 1
		   : lead >= 0xE0 && lead < 0xF0 ? 2
		   : lead >= 0xF0 && lead < 0xF5 ? 3
										 : 4;
}

static bool
continues(char byte)
{
	return ((unsigned char) byte & 0xC0) == 0x80;
}

/* The bytes of the character at the beginning of a text that is not empty; 0: there is none. */
static size_t
character_length(const char *text, size_t length)
{
	unsigned char lead = (unsigned char) text[0];
	size_t more = bytes_behind(lead);
	unsigned char next;

	if (more == 0)
		return 1;
	if (more == 4 || more >= length)
		return 0;
	for (size_t n = 1; n <= more; n++)
	{
		if (!continues(text[n]))
			return 0;
	}
	/* Overlong forms, surrogates, and what is beyond Unicode. */
	next = (unsigned char) text[1];
	if ((lead == 0xE0 && next < 0xA0) || (lead == 0xED && next > 0x9F) ||
		(lead == 0xF0 && next < 0x90) || (lead == 0xF4 && next > 0x8F))
		return 0;
	return more + 1;
}

bool
rs_is_utf8(const char *text, size_t length)
{
	for (size_t i = 0; i < length;)
	{
		size_t found = character_length(text + i, length - i);

		if (found == 0)
			return false;
		i += found;
	}
	return true;
}

/* Does the text end inside of a character? */
static bool
is_cut(const char *text, size_t length)
{
	size_t more = bytes_behind((unsigned char) text[0]);

	if (more == 4 || more < length)
		return false;
	for (size_t n = 1; n < length; n++)
	{
		if (!continues(text[n]))
			return false;
	}
	return true;
}

void
rs_make_utf8(char *text)
{
	size_t length = strlen(text);

	for (size_t i = 0; i < length;)
	{
		size_t found = character_length(text + i, length - i);

		if (found == 0 && is_cut(text + i, length - i))
		{
			text[i] = '\0';
			return;
		}
		if (found == 0)
			text[i] = '?';
		i += found == 0 ? 1 : found;
	}
}
