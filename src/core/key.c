/*-------------------------------------------------------------------------
 *
 * key.c
 *	  The key template of the advisory lock form.
 *
 *-------------------------------------------------------------------------
 */
#include "core.h"

/*
 * One piece of a template: a placeholder, or a single character of text, which
 * an escaped brace counts as.
 */
typedef struct key_piece
{
	rs_problem_code problem; /* RS_OK, or why the template cannot be read on */
	bool is_column;
	const char *start; /* the column's name, or the character */
	size_t length;
	const char *next; /* where the following piece begins */
} key_piece;

/* A placeholder; cursor is behind its opening brace. */
static key_piece
read_column(const char *cursor)
{
	const char *end = cursor;

	/* An opening brace ends the search: "{a{b}" has lost a brace after the a. */
	while (*end != '\0' && *end != '{' && *end != '}')
		end++;

	if (*end != '}')
		return (key_piece){.problem = RS_PROBLEM_KEY_UNCLOSED};
	if (end == cursor)
		return (key_piece){.problem = RS_PROBLEM_KEY_EMPTY_COLUMN};
	return (key_piece){
		.is_column = true, .start = cursor, .length = (size_t) (end - cursor), .next = end + 1};
}

/* The piece at cursor, which is not the template's end. */
static key_piece
read_piece(const char *cursor)
{
	bool doubled = cursor[1] == cursor[0];

	if (*cursor == '{' && !doubled)
		return read_column(cursor + 1);
	if (*cursor == '}' && !doubled)
		return (key_piece){.problem = RS_PROBLEM_KEY_STRAY_BRACE};
	if (*cursor == '{' || *cursor == '}')
		return (key_piece){.start = cursor, .length = 1, .next = cursor + 2};
	return (key_piece){.start = cursor, .length = 1, .next = cursor + 1};
}

rs_problem
rs_key_check(const char *lock_key)
{
	const char *cursor = lock_key;

	if (*lock_key == '\0')
		return (rs_problem){.code = RS_PROBLEM_KEY_EMPTY};

	while (*cursor != '\0')
	{
		key_piece piece = read_piece(cursor);

		if (piece.problem != RS_OK)
			return (rs_problem){.code = piece.problem, .subject = lock_key};
		cursor = piece.next;
	}
	return (rs_problem){.code = RS_OK};
}

bool
rs_key_next(const char **cursor, bool *is_column, const char **start, size_t *length)
{
	key_piece piece;

	if (**cursor == '\0')
		return false;
	piece = read_piece(*cursor);
	*is_column = piece.is_column;
	*start = piece.start;
	*length = piece.length;
	*cursor = piece.next;
	return true;
}

bool
rs_key_column(const char *lock_key, int n, const char **start, size_t *length)
{
	const char *cursor = lock_key;
	bool is_column;
	int seen = 0;

	while (rs_key_next(&cursor, &is_column, start, length))
	{
		if (is_column && seen++ == n)
			return true;
	}
	return false;
}
