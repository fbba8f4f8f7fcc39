/*-------------------------------------------------------------------------
 *
 * driver_mysql_text.c
 *	  The driver for MySQL and MariaDB: the text of a handler that is SQL.
 *
 * What it may be is said in driver_mysql_handler.c.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_mysql.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* --------------------------------------------------------------- reading */

static const char *const argument_names[RS_ARGUMENT_COUNT] = {
	[RS_ARGUMENT_ID] = "id",
	[RS_ARGUMENT_PAYLOAD] = "payload",
	[RS_ARGUMENT_ATTEMPT] = "attempt",
	[RS_ARGUMENT_HEADERS] = "headers",
};

/* Part of a name that is not quoted. */
static bool
is_name(char character)
{
	return isalnum((unsigned char) character) || character == '_' || character == '$' ||
		   (unsigned char) character >= 0x80;
}

static bool
find_argument(const char *name, size_t length, rs_mysql_argument *argument)
{
	for (int i = 0; i < RS_ARGUMENT_COUNT; i++)
	{
		if (strlen(argument_names[i]) == length && memcmp(argument_names[i], name, length) == 0)
		{
			*argument = (rs_mysql_argument) i;
			return true;
		}
	}
	return false;
}

/* Behind a quoted text or a comment that begins here; the same place where none does. */
static const char *
skip_quoted(const char *at)
{
	char quote = *at;

	if (quote == '\'' || quote == '"' || quote == '`')
	{
		for (at++; *at != '\0'; at++)
		{
			if (*at == '\\' && quote != '`' && at[1] != '\0')
				at++;
			else if (*at == quote)
				return at + 1;
		}
		return at;
	}
	if (at[0] == '/' && at[1] == '*')
	{
		const char *end = strstr(at + 2, "*/");

		return end != NULL ? end + 2 : at + strlen(at);
	}
	if (at[0] == '#' ||
		(at[0] == '-' && at[1] == '-' && (at[2] == '\0' || isspace((unsigned char) at[2]))))
		return at + strcspn(at, "\n");
	return at;
}

rs_result
rs_mysql_read_statement(rs_mysql_session *session, const char **cursor, rs_mysql_reading *into)
{
	const char *at = *cursor;

	into->length = 0;
	into->argument_count = 0;
	into->is_empty = true;
	while (*at != '\0' && *at != ';')
	{
		const char *end = skip_quoted(at);

		if (end == at && at[0] == ':' && is_name(at[1]))
		{
			rs_mysql_argument argument;

			for (end = at + 1; is_name(*end);)
				end++;
			if (!find_argument(at + 1, (size_t) (end - at - 1), &argument))
				return rs_mysql_refuse(session, "It may name :id, :payload, :attempt and :headers.",
									   "the handler names \"%.*s\"", (int) (end - at), at);
			if (into->argument_count == RS_MYSQL_MAX_ARGUMENTS)
				return rs_mysql_refuse(session, "Have a stored procedure do it.",
									   "a statement of the handler names more than %d values",
									   RS_MYSQL_MAX_ARGUMENTS);
			into->arguments[into->argument_count++] = argument;
			into->text[into->length++] = '?';
			at = end;
			continue;
		}
		if (end == at)
		{
			into->is_empty = into->is_empty && isspace((unsigned char) *at);
			end = at + 1;
		}
		else
			into->is_empty = into->is_empty && strchr("/#-", *at) != NULL;
		memcpy(into->text + into->length, at, (size_t) (end - at));
		into->length += (size_t) (end - at);
		at = end;
	}
	*cursor = *at == ';' ? at + 1 : at;
	return RS_DONE;
}

/* ------------------------------------------------------------ procedures */

bool
rs_mysql_is_procedure_name(const char *text)
{
	int parts = 0;

	for (;;)
	{
		const char *end = *text == '`' ? skip_quoted(text) : text;

		while (*text != '`' && is_name(*end))
			end++;
		if (end == text || ++parts > 2)
			return false;
		if (*end == '\0')
			return true;
		if (*end != '.')
			return false;
		text = end + 1;
	}
}

/* One part of such a name, without its quotes; moves behind it. */
static void
unquote(const char **cursor, char *name, size_t size)
{
	const char *at = *cursor;
	const char *end = *at == '`' ? skip_quoted(at) : at + strcspn(at, ".");
	size_t length = 0;

	if (*at == '`')
		at++;
	for (; at < end && *at != '\0' && length + 1 < size; at++)
	{
		if (*at == '`' && (at + 1 == end || at[1] != '`'))
			break;
		if (*at == '`')
			at++;
		name[length++] = *at;
	}
	name[length] = '\0';
	*cursor = *end == '.' ? end + 1 : end;
}

typedef struct call
{
	char text[2048];
	size_t length;
	int count;
	char stranger[128]; /* the first parameter that names nothing */
	bool is_there;
} call;

/* The parameter's name: NULL where the procedure has none. */
static bool
add_parameter(void *arg, const rs_value *columns, int count)
{
	static const char *const answers[] = {"outcome", "delay", "reason"};
	call *into = arg;
	char name[128];
	const char *value = NULL;
	bool is_answer = false;

	(void) count;
	into->is_there = true;
	if (columns[0].kind == RS_NULL)
		return false;
	(void) snprintf(name, sizeof(name), "%.*s", (int) columns[0].length, columns[0].text);
	for (size_t i = 0; i < sizeof(answers) / sizeof(answers[0]); i++)
	{
		if (strcasecmp(name, answers[i]) == 0)
		{
			value = answers[i];
			is_answer = true;
		}
	}
	for (int i = 0; i < RS_ARGUMENT_COUNT; i++)
	{
		if (strcasecmp(name, argument_names[i]) == 0)
			value = argument_names[i];
	}
	if (value == NULL)
	{
		memcpy(into->stranger, name, sizeof(name));
		return false;
	}
	into->length +=
		(size_t) snprintf(into->text + into->length, sizeof(into->text) - into->length, "%s%s%s",
						  into->count++ > 0 ? ", " : "", is_answer ? "@ruststream_" : ":", value);
	return into->length < sizeof(into->text) - 8;
}

rs_result
rs_mysql_make_call(rs_mysql_session *session, const char *handler, char **text)
{
	static const rs_command command = {
		.text = "SELECT p.PARAMETER_NAME FROM information_schema.ROUTINES AS r"
				" LEFT JOIN information_schema.PARAMETERS AS p"
				" ON p.SPECIFIC_SCHEMA = r.ROUTINE_SCHEMA AND p.SPECIFIC_NAME = r.SPECIFIC_NAME"
				" AND p.ROUTINE_TYPE = 'PROCEDURE'"
				" WHERE r.ROUTINE_SCHEMA = COALESCE(?, DATABASE()) AND r.ROUTINE_NAME = ?"
				" AND r.ROUTINE_TYPE = 'PROCEDURE' ORDER BY p.ORDINAL_POSITION",
		.slot = -1};
	call into = {.count = 0};
	char schema[256];
	char name[256];
	const char *cursor = handler;
	rs_value values[2];
	rs_result result;

	unquote(&cursor, schema, sizeof(schema));
	unquote(&cursor, name, sizeof(name));
	values[0] = name[0] != '\0' ? rs_value_of_text(schema) : RS_VALUE_NULL;
	values[1] = rs_value_of_text(name[0] != '\0' ? name : schema);
	if (strlen(handler) > 600)
		return rs_mysql_refuse(session, NULL, "the name of the procedure is too long");
	into.length = (size_t) snprintf(into.text, sizeof(into.text), "CALL %s(", handler);
	result = rs_mysql_execute(&session->base, &command, values, 2, add_parameter, &into, NULL);
	if (result != RS_DONE)
		return result;
	if (!into.is_there)
	{
		rs_error_set(&session->base.error, RUSTSTREAM_REFUSED, "",
					 "Make it, or grant EXECUTE on it; SQL text is written as statements.",
					 "there is no procedure \"%.200s\"", handler);
		return RS_FAILED;
	}
	if (into.stranger[0] != '\0')
		return rs_mysql_refuse(
			session,
			"Name parameters after what they take (id, payload, attempt, headers) "
			"or answer (outcome, delay, reason), or write the CALL out.",
			"nothing is known for parameter \"%s\" of procedure \"%s\"", into.stranger, handler);
	(void) snprintf(into.text + into.length, sizeof(into.text) - into.length, ")");
	*text = strdup(into.text);
	return *text != NULL ? RS_DONE : rs_mysql_no_memory(session);
}
