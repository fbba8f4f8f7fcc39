/*-------------------------------------------------------------------------
 *
 * driver_postgres_text.c
 *	  The PostgreSQL driver: the text of a handler that is SQL, as statements.
 *
 * It is split at its semicolons, and :id, :payload, :attempt and :headers become $1, $2, .. by
 * first use, wherever SQL would look for a value: not in strings, quoted names and comments.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_postgres.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char *const parameter_names[RS_GIVEN_COUNT] = {"id", "payload", "attempt", "headers"};

static bool
is_word(char c)
{
	return isalnum((unsigned char) c) || c == '_' || (unsigned char) c >= 0x80;
}

/* Behind a quoted stretch that begins at text; a quote that is doubled goes on. */
static const char *
skip_quoted(const char *text, bool has_escapes)
{
	char quote = *text++;

	while (*text != '\0')
	{
		if (has_escapes && *text == '\\' && text[1] != '\0')
			text += 2;
		else if (*text == quote && text[1] == quote)
			text += 2;
		else if (*text++ == quote)
			break;
	}
	return text;
}

/* Comments within comments count. */
static const char *
skip_comment(const char *text)
{
	int depth = 0;

	if (text[0] == '-')
		return text + strcspn(text, "\n");
	while (*text != '\0')
	{
		if (text[0] == '/' && text[1] == '*')
		{
			depth++;
			text += 2;
		}
		else if (text[0] == '*' && text[1] == '/')
		{
			text += 2;
			if (--depth == 0)
				break;
		}
		else
			text++;
	}
	return text;
}

/* Behind $tag$ .. $tag$, or behind the one character where it is no such. */
static const char *
skip_dollars(const char *text)
{
	size_t tag = 1;
	const char *end;

	if (!isdigit((unsigned char) text[1]))
	{
		while (is_word(text[tag]))
			tag++;
	}
	if (text[tag] != '$')
		return text + 1;
	tag++;
	for (end = text + tag; *end != '\0'; end++)
	{
		if (strncmp(end, text, tag) == 0)
			return end + tag;
	}
	return end;
}

/*
 * Behind whatever begins here and is not to be looked into: strings, names in quotes, comments.
 * text itself where nothing of the kind does.
 */
static const char *
skip_opaque(const char *start, const char *text)
{
	bool in_word = text > start && is_word(text[-1]);

	if (*text == '\'')
	{
		bool has_escapes = text > start && (text[-1] == 'e' || text[-1] == 'E') &&
						   !(text - 1 > start && is_word(text[-2]));

		return skip_quoted(text, has_escapes);
	}
	if (*text == '"')
		return skip_quoted(text, false);
	if ((text[0] == '-' && text[1] == '-') || (text[0] == '/' && text[1] == '*'))
		return skip_comment(text);
	if (*text == '$' && !in_word)
		return skip_dollars(text);
	return text;
}

/* Which of its parameters is named here, behind a colon; -1: none. */
static int
parameter_at(const char *name, size_t *length)
{
	*length = 0;
	while (is_word(name[*length]))
		(*length)++;
	for (int i = 0; i < RS_GIVEN_COUNT; i++)
	{
		if (strlen(parameter_names[i]) == *length && memcmp(name, parameter_names[i], *length) == 0)
			return i;
	}
	return -1;
}

/* The number that the statement gives a parameter, by first use. */
static int
number_of(rs_postgres_statement *into, int given)
{
	for (int i = 0; i < into->count; i++)
	{
		if (into->given[i] == given)
			return i + 1;
	}
	into->given[into->count++] = given;
	return into->count;
}

/* The statement's first word is one of those that begin or end a transaction. */
static bool
controls_transactions(const char *text)
{
	static const char *const words[] = {"begin", "start", "commit", "end", "abort", "rollback"};
	size_t length = 0;

	while (is_word(text[length]))
		length++;
	for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
	{
		if (strlen(words[i]) == length && strncasecmp(text, words[i], length) == 0)
			return true;
	}
	return length == 7 && strncasecmp(text, "prepare", 7) == 0 &&
		   strncasecmp(text + 7 + strspn(text + 7, " \t\r\n"), "transaction", 11) == 0;
}

/* Behind space and comments. */
static const char *
skip_blank(const char *text)
{
	for (;;)
	{
		const char *next = text + strspn(text, " \t\r\n\f\v");

		if ((next[0] == '-' && next[1] == '-') || (next[0] == '/' && next[1] == '*'))
			next = skip_comment(next);
		if (next == text)
			return text;
		text = next;
	}
}

/*
 * Read the statement that begins at text into out, which has room for twice its length; returns
 * where it ends, behind its semicolon.
 */
static const char *
read_statement(const char *text, rs_postgres_statement *into, char *out)
{
	const char *start = text;
	int depth = 0;

	into->text = out;
	into->ends_transactions = controls_transactions(text);
	while (*text != '\0' && !(*text == ';' && depth == 0))
	{
		const char *next = skip_opaque(start, text);
		size_t length;
		int given;

		if (next > text)
		{
			memcpy(out, text, (size_t) (next - text));
			out += next - text;
			text = next;
			continue;
		}
		depth += (*text == '(') - (*text == ')');
		if (text[0] == ':' && text[1] == ':')
		{
			*out++ = *text++;
			*out++ = *text++;
			continue;
		}
		given = text[0] == ':' ? parameter_at(text + 1, &length) : -1;
		if (given >= 0)
		{
			out += sprintf(out, "$%d", number_of(into, given));
			text += 1 + length;
			continue;
		}
		*out++ = *text++;
	}
	*out = '\0';
	return *text == ';' ? text + 1 : text;
}

/* Split a handler's text; false: out of memory. */
static bool
read_handler(rs_postgres_handler *handler)
{
	size_t size = strlen(handler->source) + 1;
	const char *text = skip_blank(handler->source);
	char *out = rs_alloc(&handler->arena, size * 2);
	int room = 1;

	for (const char *at = text; *at != '\0'; at++)
		room += *at == ';';
	handler->statements = rs_alloc(&handler->arena, sizeof(rs_postgres_statement) * (size_t) room);
	if (out == NULL || handler->statements == NULL)
		return false;
	while (*text != '\0')
	{
		rs_postgres_statement *next = &handler->statements[handler->count];

		if (*text == ';')
		{
			text = skip_blank(text + 1);
			continue;
		}
		text = skip_blank(read_statement(text, next, out));
		out += strlen(out) + 1;
		handler->count++;
	}
	return true;
}

rs_postgres_handler *
rs_postgres_read_handler(const char *source)
{
	rs_postgres_handler *handler = calloc(1, sizeof(rs_postgres_handler));

	if (handler == NULL)
		return NULL;
	handler->source = strdup(source);
	if (handler->source != NULL && read_handler(handler))
		return handler;
	rs_arena_free(&handler->arena);
	free(handler->source);
	free(handler);
	return NULL;
}
