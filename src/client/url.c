/*-------------------------------------------------------------------------
 *
 * url.c
 *	  Reads the URL of a database.
 *
 *		scheme:[//[user[:password]@][host[:port]]/]path[?name=value[&..]]
 *
 * SQLite's is sqlite:path, and what follows sqlite:// is a path, too, so that
 * sqlite:///var/app.db is /var/app.db, and sqlite://app.db is app.db.  Each
 * part may have characters written as %XX; a part with a zero byte is refused.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <string.h>

static const struct
{
	const char *scheme;
	rs_dialect dialect;
} schemes[] = {
	{"sqlite", RS_DIALECT_SQLITE},         {"mysql", RS_DIALECT_MYSQL},
	{"mariadb", RS_DIALECT_MYSQL},         {"postgres", RS_DIALECT_POSTGRESQL},
	{"postgresql", RS_DIALECT_POSTGRESQL},
};

#define FORMS                                                                                      \
	"Write sqlite:PATH, mysql://user@host/database or postgres://user@host/database; "             \
	"characters with a meaning in a URL are written as %XX."

/* A stretch of the URL's text. */
typedef struct part
{
	const char *start;
	const char *end;
} part;

typedef struct parsing
{
	rs_arena *arena;
	rs_url *url;
	rs_error *error;
} parsing;

/* The text is not repeated: it may hold a password. */
static bool
refuse(const parsing *state, const char *what)
{
	rs_error_set(state->error, RUSTSTREAM_MISUSE, "", FORMS, "this is not a database's URL: %s",
				 what);
	return false;
}

static bool
out_of_memory(const parsing *state)
{
	rs_error_set(state->error, RUSTSTREAM_NO_MEMORY, "", NULL, "out of memory");
	return false;
}

static const char *
find(part in, char character)
{
	return in.start == in.end ? NULL : memchr(in.start, character, (size_t) (in.end - in.start));
}

/* The last one, for a password may hold an unescaped @. */
static const char *
find_last(part in, char character)
{
	for (const char *at = in.end; at > in.start; at--)
	{
		if (at[-1] == character)
			return at - 1;
	}
	return NULL;
}

static int
hex_digit(char digit)
{
	if (digit >= '0' && digit <= '9')
		return digit - '0';
	if (digit >= 'a' && digit <= 'f')
		return digit - 'a' + 10;
	if (digit >= 'A' && digit <= 'F')
		return digit - 'A' + 10;
	return -1;
}

/* Copy a part with its %XX undone. */
static bool
decode(const parsing *state, part from, char **result)
{
	char *out = rs_alloc(state->arena, (size_t) (from.end - from.start) + 1);

	if (out == NULL)
		return out_of_memory(state);
	*result = out;
	for (const char *at = from.start; at < from.end; at++)
	{
		int high;
		int low;

		if (*at != '%')
		{
			*out++ = *at;
			continue;
		}
		high = from.end - at > 2 ? hex_digit(at[1]) : -1;
		low = high >= 0 ? hex_digit(at[2]) : -1;
		if (low < 0)
			return refuse(state, "a % is not followed by two hexadecimal digits");
		if (high == 0 && low == 0)
			return refuse(state, "%00 is in it");
		*out++ = (char) (high * 16 + low);
		at += 2;
	}
	*out = '\0';
	return true;
}

static bool
parse_scheme(const parsing *state, part scheme)
{
	size_t length = (size_t) (scheme.end - scheme.start);

	for (size_t i = 0; i < sizeof(schemes) / sizeof(schemes[0]); i++)
	{
		if (strlen(schemes[i].scheme) == length &&
			memcmp(schemes[i].scheme, scheme.start, length) == 0)
		{
			state->url->dialect = schemes[i].dialect;
			return true;
		}
	}
	return refuse(state, "its scheme is none that is served");
}

static bool
parse_port(const parsing *state, part digits)
{
	int port = 0;

	if (digits.start == digits.end)
		return refuse(state, "its port is empty");
	for (const char *at = digits.start; at < digits.end; at++)
	{
		if (*at < '0' || *at > '9' || port > 65535)
			return refuse(state, "its port is no number from 1 to 65535");
		port = port * 10 + (*at - '0');
	}
	if (port < 1 || port > 65535)
		return refuse(state, "its port is no number from 1 to 65535");
	state->url->port = port;
	return true;
}

static bool
parse_host(const parsing *state, part host)
{
	const char *colon;

	if (host.start < host.end && *host.start == '[')
	{
		const char *bracket = find(host, ']');

		if (bracket == NULL)
			return refuse(state, "a [ has no ]");
		if (bracket + 1 != host.end &&
			(bracket[1] != ':' || !parse_port(state, (part){bracket + 2, host.end})))
			return state->error->code != RUSTSTREAM_OK ||
				   refuse(state, "something follows the ] that is no port");
		return decode(state, (part){host.start + 1, bracket}, &state->url->host);
	}
	colon = find(host, ':');
	if (colon != NULL)
	{
		if (!parse_port(state, (part){colon + 1, host.end}))
			return false;
		host.end = colon;
	}
	return host.start == host.end || decode(state, host, &state->url->host);
}

/* user[:password]@host[:port] */
static bool
parse_authority(const parsing *state, part authority)
{
	const char *at = find_last(authority, '@');

	if (at != NULL)
	{
		part user = {authority.start, at};
		const char *colon = find(user, ':');

		if (colon != NULL)
		{
			if (!decode(state, (part){colon + 1, at}, &state->url->password))
				return false;
			user.end = colon;
		}
		if (user.start != user.end && !decode(state, user, &state->url->user))
			return false;
		authority.start = at + 1;
	}
	return parse_host(state, authority);
}

static int
count_parameters(part query)
{
	int count = query.start < query.end ? 1 : 0;

	for (const char *at = query.start; at < query.end; at++)
		count += *at == '&';
	return count;
}

static bool
parse_query(const parsing *state, part query)
{
	rs_url *url = state->url;
	size_t room = (size_t) count_parameters(query) * sizeof(char *);

	if (room == 0)
		return true;
	url->parameter_names = rs_alloc(state->arena, room);
	url->parameter_values = rs_alloc(state->arena, room);
	if (url->parameter_names == NULL || url->parameter_values == NULL)
		return out_of_memory(state);

	for (;;)
	{
		const char *ampersand = find(query, '&');
		part one = {query.start, ampersand != NULL ? ampersand : query.end};
		const char *equals = find(one, '=');
		int n = url->parameter_count;

		if (equals == NULL || equals == one.start)
			return refuse(state, "a parameter is not written as name=value");
		if (!decode(state, (part){one.start, equals}, &url->parameter_names[n]) ||
			!decode(state, (part){equals + 1, one.end}, &url->parameter_values[n]))
			return false;
		url->parameter_count = n + 1;
		if (ampersand == NULL)
			return true;
		query.start = ampersand + 1;
	}
}

/* For messages: as it was given, without the password and without secrets among the parameters. */
static bool
make_display(const parsing *state, const char *scheme, size_t scheme_length)
{
	rs_url *url = state->url;
	const char *path = url->database != NULL ? url->database : "";

	if (url->dialect == RS_DIALECT_SQLITE)
		url->display = rs_print(state->arena, "sqlite:%s", path);
	else
		url->display = rs_print(state->arena, "%.*s://%s%s%s/%s", (int) scheme_length, scheme,
								url->user != NULL ? url->user : "", url->user != NULL ? "@" : "",
								url->host != NULL ? url->host : "", path);
	return url->display != NULL || out_of_memory(state);
}

bool
rs_url_parse(const char *text, rs_arena *arena, rs_url *url, rs_error *error)
{
	parsing state = {.arena = arena, .url = url, .error = error};
	part rest = {text, text + strlen(text)};
	const char *colon = find(rest, ':');
	const char *mark;
	size_t scheme_length;

	memset(url, 0, sizeof(*url));
	if (colon == NULL)
		return refuse(&state, "it has no scheme");
	scheme_length = (size_t) (colon - text);
	if (!parse_scheme(&state, (part){text, colon}))
		return false;
	rest.start = colon + 1;

	mark = find(rest, '?');
	if (mark != NULL)
	{
		if (mark + 1 == rest.end)
			return refuse(&state, "nothing follows the ?");
		if (!parse_query(&state, (part){mark + 1, rest.end}))
			return false;
		rest.end = mark;
	}

	if (rest.end - rest.start >= 2 && rest.start[0] == '/' && rest.start[1] == '/')
		rest.start += 2;
	else if (url->dialect != RS_DIALECT_SQLITE)
		return refuse(&state, "no // follows its scheme");
	if (url->dialect == RS_DIALECT_SQLITE)
	{
		if (rest.start == rest.end)
			return refuse(&state, "it names no file");
	}
	else
	{
		const char *slash = find(rest, '/');
		part authority = {rest.start, slash != NULL ? slash : rest.end};

		if (!parse_authority(&state, authority))
			return false;
		rest.start = slash != NULL ? slash + 1 : rest.end;
	}
	if (rest.start != rest.end && !decode(&state, rest, &url->database))
		return false;
	return make_display(&state, text, scheme_length);
}

const char *
rs_url_parameter(const rs_url *url, const char *name)
{
	for (int i = 0; i < url->parameter_count; i++)
	{
		if (strcmp(url->parameter_names[i], name) == 0)
			return url->parameter_values[i];
	}
	return NULL;
}
