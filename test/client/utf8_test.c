/*-------------------------------------------------------------------------
 *
 * utf8_test.c
 *	  Text that is made UTF-8 before it is stored.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"
#include "tap.h"

#include <string.h>

static void
becomes(const char *given, const char *expected, const char *what)
{
	char text[64];

	(void) snprintf(text, sizeof(text), "%s", given);
	rs_make_utf8(text);
	ok(strcmp(text, expected) == 0, what);
	ok(rs_is_utf8(text, strlen(text)), ".. and is UTF-8");
	ok((strcmp(given, expected) == 0) == rs_is_utf8(given, strlen(given)),
	   ".. which it was if it was left alone");
}

int
main(void)
{
	becomes("", "", "nothing");
	becomes("caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80",
			"caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80", "what is UTF-8 is left alone");
	becomes("\xFF\xFE x", "?? x", "bytes of no character");
	becomes("caf\xE9 noir", "caf? noir", "another encoding");
	becomes("\xC0\x80\xED\xA0\x80\xF4\x90\x80\x80.", "?????????.",
			"overlong, surrogate, beyond Unicode");
	becomes("x\xC3", "x", "a character that is cut");
	becomes("x\xE2\x82", "x", ".. later");
	becomes("x\xF0\x9F\x98", "x", ".. later still");
	becomes("\xA9\xA9", "??", "the end of one, twice");
	return done_testing();
}
