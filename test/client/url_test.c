/*-------------------------------------------------------------------------
 *
 * url_test.c
 *	  What URLs are read as, and what is said of those that are none.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"
#include "tap.h"

#include <stdlib.h>
#include <string.h>

/*
 * A URL and what it is read as: dialect|user|password|host|port|database|parameters, or the
 * refusal.
 */
static const char *const cases[][2] = {
	{"sqlite:app.db", "sqlite|||||app.db|"},
	{"sqlite://app.db", "sqlite|||||app.db|"},
	{"sqlite:///var/app.db", "sqlite|||||/var/app.db|"},
	{"sqlite:/var/app.db", "sqlite|||||/var/app.db|"},
	{"sqlite:my%20app%3f.db?mode=rwc&busy_timeout=5",
	 "sqlite|||||my app?.db|mode=rwc,busy_timeout=5"},
	{"sqlite:a:b@c.db", "sqlite|||||a:b@c.db|"},
	{"mysql://root@localhost/app", "mysql|root||localhost||app|"},
	{"mysql://root:s%40cret@localhost:3307/app", "mysql|root|s@cret|localhost|3307|app|"},
	{"mysql://root:a@b@localhost/app", "mysql|root|a@b|localhost||app|"},
	{"mariadb:///app?socket=%2Frun%2Fmysqld.sock", "mysql|||||app|socket=/run/mysqld.sock"},
	{"mysql://:secret@host", "mysql||secret|host|||"},
	{"postgres://u:p@[::1]:5433/d?sslmode=require", "postgresql|u|p|::1|5433|d|sslmode=require"},
	{"postgresql://[fe80::1]/d", "postgresql|||fe80::1||d|"},
	{"postgresql:///d", "postgresql|||||d|"},
	{"postgres://u:@h/d?a=&b=%3d", "postgresql|u||h||d|a=,b=="},
	{"", "it has no scheme"},
	{"app.db", "it has no scheme"},
	{"oracle://x", "its scheme is none that is served"},
	{"SQLITE:x", "its scheme is none that is served"},
	{"sqlite:", "it names no file"},
	{"sqlite://", "it names no file"},
	{"sqlite:a%0", "a % is not followed by two hexadecimal digits"},
	{"sqlite:a%zz", "a % is not followed by two hexadecimal digits"},
	{"sqlite:a%", "a % is not followed by two hexadecimal digits"},
	{"sqlite:a%00b", "%00 is in it"},
	{"sqlite:a?", "nothing follows the ?"},
	{"sqlite:a?mode", "a parameter is not written as name=value"},
	{"sqlite:a?=rw", "a parameter is not written as name=value"},
	{"sqlite:a?mode=rw&", "a parameter is not written as name=value"},
	{"mysql:host/app", "no // follows its scheme"},
	{"mysql://h:0/app", "its port is no number from 1 to 65535"},
	{"mysql://h:65536/app", "its port is no number from 1 to 65535"},
	{"mysql://h:99999999999999999999/app", "its port is no number from 1 to 65535"},
	{"mysql://h:x/app", "its port is no number from 1 to 65535"},
	{"mysql://h:/app", "its port is empty"},
	{"postgres://[::1/d", "a [ has no ]"},
	{"postgres://[::1]x/d", "something follows the ] that is no port"},
};

static const char *
or_empty(const char *text)
{
	return text != NULL ? text : "";
}

static void
describe(const rs_url *url, char *text, size_t size)
{
	char port[16] = "";
	size_t length;

	if (url->port != 0)
		(void) snprintf(port, sizeof(port), "%d", url->port);
	(void) snprintf(text, size, "%s|%s|%s|%s|%s|%s|", rs_dialect_word(url->dialect),
					or_empty(url->user), or_empty(url->password), or_empty(url->host), port,
					or_empty(url->database));
	for (int i = 0; i < url->parameter_count; i++)
	{
		length = strlen(text);
		(void) snprintf(text + length, size - length, "%s%s=%s", i > 0 ? "," : "",
						url->parameter_names[i], url->parameter_values[i]);
	}
}

int
main(void)
{
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
	{
		rs_arena arena = {0};
		rs_error error = {0};
		rs_url url;
		char found[512] = "";
		char name[256];
		bool parsed = rs_url_parse(cases[i][0], &arena, &url, &error);
		bool as_expected;

		if (parsed)
		{
			describe(&url, found, sizeof(found));
			as_expected = strcmp(found, cases[i][1]) == 0 &&
						  (url.password == NULL || strlen(url.password) < 3 ||
						   strstr(url.display, url.password) == NULL);
		}
		else
			as_expected =
				strstr(error.message, cases[i][1]) != NULL && error.code == RUSTSTREAM_MISUSE;
		(void) snprintf(name, sizeof(name), "%s", cases[i][0]);
		if (!ok(as_expected, name))
			printf("# found: %s\n", parsed ? found : error.message);
		rs_arena_free(&arena);
	}
	return done_testing();
}
