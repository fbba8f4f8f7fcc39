/*-------------------------------------------------------------------------
 *
 * autonomous_message.c
 *	  The messages between a session and the helper that executes its
 *	  autonomous statements.
 *
 * Values travel as text, not as they lie in memory: the two sessions may see
 * different definitions of a type, since the caller's transaction may have
 * changed it, and a type's input function is what checks a value.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/guc.h"

#include "backend/autonomous.h"

const char *const rs_autonomous_settings[] = {
	"search_path", "TimeZone", "DateStyle", "IntervalStyle", "lc_monetary", "lock_timeout", NULL};

void
rs_put_number(StringInfo message, uint64 number)
{
	appendBinaryStringInfo(message, (const char *) &number, sizeof(number));
}

/* Its length with the final zero, and that many bytes; a length of 0 is NULL. */
void
rs_put_text(StringInfo message, const char *text)
{
	Size length = text != NULL ? strlen(text) + 1 : 0;

	rs_put_number(message, length);
	if (text != NULL)
		appendBinaryStringInfo(message, text, (int) length);
}

static const char *
get_bytes(RsReader *reader, Size size)
{
	const char *bytes = reader->data;

	if (size > reader->left)
		elog(ERROR, "message of an autonomous session is too short");
	reader->data += size;
	reader->left -= size;
	return bytes;
}

uint64
rs_get_number(RsReader *reader)
{
	uint64 number;

	memcpy(&number, get_bytes(reader, sizeof(number)), sizeof(number));
	return number;
}

const char *
rs_get_text(RsReader *reader)
{
	Size length = rs_get_number(reader);

	return length > 0 ? get_bytes(reader, length) : NULL;
}

void
rs_put_error(StringInfo message, const ErrorData *error)
{
	rs_put_number(message, (uint64) error->sqlerrcode);
	rs_put_number(message, (uint64) error->internalpos);
	rs_put_text(message, error->message);
	rs_put_text(message, error->detail);
	rs_put_text(message, error->detail_log);
	rs_put_text(message, error->hint);
	rs_put_text(message, error->context);
	rs_put_text(message, error->internalquery);
	rs_put_text(message, error->schema_name);
	rs_put_text(message, error->table_name);
	rs_put_text(message, error->column_name);
	rs_put_text(message, error->datatype_name);
	rs_put_text(message, error->constraint_name);
}

ErrorData *
rs_get_error(RsReader *reader)
{
	ErrorData *error = palloc0(sizeof(ErrorData));

	error->elevel = ERROR;
	error->assoc_context = CurrentMemoryContext;
	error->sqlerrcode = (int) rs_get_number(reader);
	error->internalpos = (int) rs_get_number(reader);
	error->message = unconstify(char *, rs_get_text(reader));
	error->detail = unconstify(char *, rs_get_text(reader));
	error->detail_log = unconstify(char *, rs_get_text(reader));
	error->hint = unconstify(char *, rs_get_text(reader));
	error->context = unconstify(char *, rs_get_text(reader));
	error->internalquery = unconstify(char *, rs_get_text(reader));
	error->schema_name = unconstify(char *, rs_get_text(reader));
	error->table_name = unconstify(char *, rs_get_text(reader));
	error->column_name = unconstify(char *, rs_get_text(reader));
	error->datatype_name = unconstify(char *, rs_get_text(reader));
	error->constraint_name = unconstify(char *, rs_get_text(reader));
	return error;
}

int
rs_begin_transmission(void)
{
	static const char *const settings[][2] = {
		{"search_path", "pg_catalog"}, /* names are written in full */
		{"DateStyle", "ISO"},          {"IntervalStyle", "postgres"},
		{"extra_float_digits", "3"},   {"lc_monetary", "C"},
	};
	int nest_level = NewGUCNestLevel();

	for (int i = 0; i < (int) lengthof(settings); i++)
		(void) set_config_option(settings[i][0], settings[i][1], PGC_USERSET, PGC_S_SESSION,
								 GUC_ACTION_SAVE, true, 0, false);
	return nest_level;
}

void
rs_end_transmission(int nest_level)
{
	AtEOXact_GUC(true, nest_level);
}
