/*-------------------------------------------------------------------------
 *
 * look.c
 *	  The columns of a table that a driver looks at.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <string.h>

rs_column *
rs_look_add(rs_look *look, rs_arena *arena, const rs_value *name, const rs_value *type)
{
	rs_column *columns =
		rs_grow(arena, look->columns, look->column_count, &look->column_room, sizeof(rs_column));
	rs_column *column;

	if (columns == NULL)
		return NULL;
	look->columns = columns;
	column = &columns[look->column_count];
	column->name = rs_text_of(arena, name);
	column->type = rs_text_of(arena, type);
	if (column->name == NULL || column->type == NULL)
		return NULL;
	look->column_count++;
	return column;
}

const rs_column *
rs_look_find(const rs_look *look, const char *name, size_t length)
{
	for (int i = 0; i < look->column_count; i++)
	{
		if (strlen(look->columns[i].name) == length &&
			memcmp(look->columns[i].name, name, length) == 0)
			return &look->columns[i];
	}
	return NULL;
}
