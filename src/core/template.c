/*-------------------------------------------------------------------------
 *
 * template.c
 *	  Renders the catalogue's templates; template.h says what they are made of.
 *
 *-------------------------------------------------------------------------
 */
#include "core.h"
#include "template.h"

#include <string.h>

/* A rendering under way. */
typedef struct rendering
{
	rs_dialect dialect;
	const rs_table *table;
	const rs_destination *destination;
	char *buffer;
	size_t size;
	rs_statement statement; /* its length may run ahead of size */
	const char *separator;  /* the last {a|b} hole, to tell its repetition */
	size_t separator_length;
} rendering;

static void
put(rendering *out, const char *text, size_t length)
{
	size_t position = out->statement.length;

	if (position < out->size)
	{
		size_t room = out->size - position;

		memcpy(out->buffer + position, text, length < room ? length : room);
	}
	out->statement.length += length;
}

static void
put_text(rendering *out, const char *text)
{
	put(out, text, strlen(text));
}

/* What is inside a quoted name: the quotes are the dialect's. */
static void
put_inside_quotes(rendering *out, const char *name, size_t length)
{
	char quote = out->dialect == RS_DIALECT_MYSQL ? '`' : '"';

	for (size_t i = 0; i < length; i++)
	{
		if (name[i] == quote)
			put(out, &quote, 1);
		put(out, &name[i], 1);
	}
}

static void
put_name_of_length(rendering *out, const char *name, size_t length)
{
	const char *quote = out->dialect == RS_DIALECT_MYSQL ? "`" : "\"";

	put_text(out, quote);
	put_inside_quotes(out, name, length);
	put_text(out, quote);
}

static void
put_name(rendering *out, const char *name)
{
	put_name_of_length(out, name, strlen(name));
}

static void
put_qualified_name(rendering *out, const char *schema, const char *name)
{
	put_name(out, schema);
	put_text(out, ".");
	put_name(out, name);
}

/* What a move carries; as values, a row arrives without its lease, and with other headers. */
static void
put_destination_columns(rendering *out, bool as_values)
{
	const char *lease = out->table->column[RS_ROLE_LOCKED_UNTIL];
	const char *headers = out->table->column[RS_ROLE_HEADERS];

	for (int i = 0; i < out->destination->column_count; i++)
	{
		const char *column = out->destination->columns[i];

		if (i > 0)
			put_text(out, ", ");
		if (as_values && lease != NULL && strcmp(column, lease) == 0)
			put_text(out, "NULL");
		else if (as_values && headers != NULL && strcmp(column, headers) == 0)
			put_text(out, "ruststream_headers.ruststream_made");
		else
			put_name(out, column);
	}
}

/*
 * Text inside a literal.  PostgreSQL's is an E'' one, whatever
 * standard_conforming_strings says; in SQLite a backslash is nothing special.
 */
static void
put_literal_text(rendering *out, const char *text, size_t length)
{
	for (size_t i = 0; i < length; i++)
	{
		if (text[i] == '\'' || (text[i] == '\\' && out->dialect != RS_DIALECT_SQLITE))
			put(out, &text[i], 1);
		put(out, &text[i], 1);
	}
}

/* How a dialect joins the pieces of a key, NULL being empty. */
typedef struct key_words
{
	const char *begin;
	const char *between;
	const char *before_column;
	const char *after_column;
	const char *before_text;
	const char *end;
} key_words;

/*
 * As every client of the contract renders it.  A key's columns may be of
 * different collations, so in PostgreSQL it has one of its own.
 */
static const key_words key_words_of[RS_DIALECT_COUNT] = {
	[RS_DIALECT_POSTGRESQL] = {.begin = "(pg_catalog.concat(",
							   .between = ", ",
							   .before_column = "ruststream_row.",
							   .after_column = "",
							   .before_text = "E'",
							   .end = ") COLLATE pg_catalog.\"C\")"},
	[RS_DIALECT_SQLITE] = {.begin = "(",
						   .between = " || ",
						   .before_column = "ifnull(ruststream_row.",
						   .after_column = ", '')",
						   .before_text = "'",
						   .end = ")"},
	[RS_DIALECT_MYSQL] = {.begin = "CONCAT_WS('', ",
						  .between = ", ",
						  .before_column = "ruststream_row.",
						  .after_column = "",
						  .before_text = "'",
						  .end = ")"},
};

/* The advisory key of a row: the template's pieces, joined. */
static void
put_key(rendering *out)
{
	const key_words *words = &key_words_of[out->dialect];
	const char *cursor = out->table->lock_key;
	const char *start;
	size_t length;
	bool is_column;
	bool in_text = false;

	put_text(out, words->begin);
	for (int i = 0; rs_key_next(&cursor, &is_column, &start, &length); i++)
	{
		if (in_text && is_column)
			put_text(out, "'");
		if (i > 0 && (is_column || !in_text))
			put_text(out, words->between);
		if (is_column)
		{
			put_text(out, words->before_column);
			put_name_of_length(out, start, length);
			put_text(out, words->after_column);
		}
		else
		{
			if (!in_text)
				put_text(out, words->before_text);
			put_literal_text(out, start, length);
		}
		in_text = !is_column;
	}
	if (in_text)
		put_text(out, "'");
	put_text(out, words->end);
}

/* The table's name, a purpose and a column's text, joined as MySQL does. */
static void
put_lock_text(rendering *out, const char *purpose, const char *column)
{
	const rs_table *table = out->table;

	put_text(out, "CONCAT('");
	put_literal_text(out, table->schema, strlen(table->schema));
	put_text(out, ".");
	put_literal_text(out, table->name, strlen(table->name));
	put_text(out, purpose);
	put_text(out, "', ruststream_row.");
	put_name(out, column);
	put_text(out, ")");
}

/* What stands for the rows of a partition key, or for a row that has none. */
static void
put_partition(rendering *out)
{
	const rs_table *table = out->table;

	if (table->column[RS_ROLE_PARTITION_KEY] == NULL)
	{
		put_text(out, "NULL");
		return;
	}
	put_text(out, "COALESCE(");
	put_lock_text(out, ":key:", table->column[RS_ROLE_PARTITION_KEY]);
	put_text(out, ", ");
	put_lock_text(out, ":row:", table->column[RS_ROLE_ID]);
	put_text(out, ")");
}

/* A number from 1 to RS_MAX_PARAMETERS, so of two digits at most. */
static void
put_parameter_number(rendering *out, int number)
{
	char sign = out->dialect == RS_DIALECT_SQLITE ? '?' : '$';
	char digits[] = {sign, (char) ('0' + number / 10), (char) ('0' + number % 10)};

	put(out, digits, 1);
	if (number < 10)
		put(out, digits + 2, 1);
	else
		put(out, digits + 1, 2);
}

static void
put_parameter(rendering *out, rs_parameter parameter)
{
	rs_statement *statement = &out->statement;
	int i = 0;

	if (out->dialect == RS_DIALECT_MYSQL)
	{
		statement->parameters[statement->parameter_count++] = parameter;
		put_text(out, "?");
		return;
	}
	while (i < statement->parameter_count && statement->parameters[i] != parameter)
		i++;
	if (i == statement->parameter_count)
		statement->parameters[statement->parameter_count++] = parameter;
	put_parameter_number(out, i + 1);
}

/* A hole {first|next}; bar points into it. */
static void
put_separator(rendering *out, const char *hole, const char *bar, size_t length)
{
	bool again = length == out->separator_length && memcmp(hole, out->separator, length) == 0;

	if (again)
		put(out, bar + 1, (size_t) (hole + length - (bar + 1)));
	else
		put(out, hole, (size_t) (bar - hole));
	out->separator = hole;
	out->separator_length = length;
}

static bool
is_word(const char *text, size_t length, const char *word)
{
	return strlen(word) == length && memcmp(text, word, length) == 0;
}

/* The column that plays the role of this name; NULL where none does. */
static const char *
column_of(const rs_table *table, const char *role_name, size_t length)
{
	for (int role = 0; role < RS_ROLE_COUNT; role++)
	{
		if (is_word(role_name, length, rs_role_word((rs_role) role)))
			return table->column[role];
	}
	return NULL;
}

/* The name of an index of ours on this table, where names of indexes are not the table's own. */
static void
put_index_name(rendering *out, const char *purpose)
{
	const char *quote = out->dialect == RS_DIALECT_MYSQL ? "`" : "\"";

	put_text(out, quote);
	put_text(out, purpose);
	put_inside_quotes(out, out->table->name, strlen(out->table->name));
	put_text(out, quote);
}

/* Put what a hole stands for and return where the template goes on. */
static const char *
put_hole(rendering *out, const char *hole)
{
	const rs_table *table = out->table;
	const char *end = strchr(hole, '}');
	const char *bar = strchr(hole, '|');
	size_t length = (size_t) (end - hole);

	if (length == 0)
		out->separator_length = 0;
	else if (bar != NULL && bar < end)
		put_separator(out, hole, bar, length);
	else if (is_word(hole, length, "table"))
	{
		if (table->only)
			put_text(out, "ONLY ");
		put_qualified_name(out, table->schema, table->name);
	}
	else if (is_word(hole, length, "into"))
		put_qualified_name(out, table->schema, table->name);
	else if (is_word(hole, length, "dest"))
		put_qualified_name(out, out->destination->schema, out->destination->name);
	else if (is_word(hole, length, "columns"))
		put_destination_columns(out, false);
	else if (is_word(hole, length, "moved"))
		put_destination_columns(out, true);
	else if (is_word(hole, length, "key"))
		put_key(out);
	else if (is_word(hole, length, "partition"))
		put_partition(out);
	else if (is_word(hole, length, "index"))
	{
		if (table->claim_index == NULL)
			return end + 1;
		put_text(out, " FORCE INDEX (");
		put_name(out, table->claim_index);
		put_text(out, ")");
	}
	else if (is_word(hole, length, "bare"))
		put_name(out, table->name);
	else if (is_word(hole, length, "claim_index"))
		put_index_name(out, "ruststream_claim_");
	else if (is_word(hole, length, "lease_index"))
		put_index_name(out, "ruststream_lease_");
	else
		put_name(out, column_of(table, hole, length));
	return end + 1;
}

/* The same for a parameter; name is behind the colon. */
static const char *
put_named_parameter(rendering *out, const char *name)
{
	size_t length = 0;

	while ((name[length] >= 'a' && name[length] <= 'z') || name[length] == '_')
		length++;
	for (int i = 0; i < RS_PARAM_COUNT; i++)
	{
		if (is_word(name, length, rs_parameter_word((rs_parameter) i)))
			put_parameter(out, (rs_parameter) i);
	}
	return name + length;
}

/* Has the table the role of this name, is it the name of its form, or "fifo" and so? */
static bool
holds(const rs_table *table, const char *name, size_t length)
{
	if (is_word(name, length, "fifo"))
		return table->fifo;
	return column_of(table, name, length) != NULL ||
		   (is_word(name, length, "json") && table->headers_are_json) ||
		   is_word(name, length, rs_form_word(rs_table_form(table)));
}

/* Return where the template goes on: into the conditional text or behind it. */
static const char *
enter_condition(const rendering *out, const char *condition)
{
	bool wanted = *condition != '!';
	const char *name = wanted ? condition : condition + 1;
	const char *cursor = strchr(condition, ':');
	int depth = 1;

	if (holds(out->table, name, (size_t) (cursor - name)) == wanted)
		return cursor + 1;
	while (depth > 0)
	{
		cursor++;
		depth += (*cursor == '[') - (*cursor == ']');
	}
	return cursor + 1;
}

static void
put_template(rendering *out, const char *cursor)
{
	while (*cursor != '\0')
	{
		if (*cursor == '{')
			cursor = put_hole(out, cursor + 1);
		else if (*cursor == '[')
			cursor = enter_condition(out, cursor + 1);
		else if (*cursor == ']')
			cursor++; /* the end of conditional text that was entered */
		else if (cursor[0] == ':' && cursor[1] == ':')
		{
			put(out, cursor, 2);
			cursor += 2;
		}
		else if (*cursor == ':')
			cursor = put_named_parameter(out, cursor + 1);
		else
			put(out, cursor++, 1);
	}
}

rs_statement
rs_template_render(rs_dialect dialect, const rs_table *table, const rs_destination *destination,
				   const char *const *pieces, char *buffer, size_t size)
{
	rendering out = {.dialect = dialect,
					 .table = table,
					 .destination = destination,
					 .buffer = buffer,
					 .size = size};

	for (; *pieces != NULL; pieces++)
		put_template(&out, *pieces);
	if (size > 0)
		buffer[out.statement.length < size ? out.statement.length : size - 1] = '\0';
	return out.statement;
}
