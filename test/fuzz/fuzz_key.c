/*-------------------------------------------------------------------------
 *
 * fuzz_key.c
 *	  Any text as the template of a lock key: refused, or read piece by piece and rendered in
 *	  each dialect, within the buffer and the same at any size of it.
 *
 *-------------------------------------------------------------------------
 */
#include "core/core.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void
check_pieces(const char *key)
{
	const char *cursor = key;
	const char *start;
	size_t length;
	bool is_column;
	int columns = 0;

	while (rs_key_next(&cursor, &is_column, &start, &length))
	{
		if (length == 0 || start < key || start + length > key + strlen(key))
			abort();
		columns += is_column;
	}
	for (int n = 0; n < columns; n++)
	{
		if (!rs_key_column(key, n, &start, &length) || length == 0)
			abort();
	}
	if (rs_key_column(key, columns, &start, &length))
		abort();
}

static void
check_rendering(rs_dialect dialect, const rs_table *table, size_t size)
{
	rs_statement whole = rs_statement_render(dialect, RS_OP_CANDIDATES, 0, table, NULL, NULL, 0);
	char *buffer = malloc(whole.length + 1);
	char *part = malloc(size + 1);

	if (buffer != NULL && part != NULL)
	{
		(void) rs_statement_render(dialect, RS_OP_CANDIDATES, 0, table, NULL, buffer,
								   whole.length + 1);
		if (strlen(buffer) != whole.length)
			abort();
		(void) rs_statement_render(dialect, RS_OP_CANDIDATES, 0, table, NULL, part, size + 1);
		if (strncmp(buffer, part, size) != 0)
			abort();
	}
	free(buffer);
	free(part);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char *key = malloc(size + 1);
	rs_table table = {.schema = "s", .name = "t", .column = {[RS_ROLE_ID] = "id"}};

	if (key == NULL)
		return 0;
	memcpy(key, data, size);
	key[size] = '\0';
	if (rs_key_check(key).code == RS_OK)
	{
		check_pieces(key);
		table.lock_key = key;
		check_rendering(RS_DIALECT_POSTGRESQL, &table, size);
		check_rendering(RS_DIALECT_SQLITE, &table, size);
	}
	free(key);
	return 0;
}
