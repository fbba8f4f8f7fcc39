/*-------------------------------------------------------------------------
 *
 * table.c
 *	  What a table description means, and whether it makes sense by itself.
 *
 *-------------------------------------------------------------------------
 */
#include "core.h"

#include <string.h>

rs_form
rs_table_form(const rs_table *table)
{
	if (table->column[RS_ROLE_LOCKED_UNTIL] != NULL)
		return RS_FORM_LEASE;
	if (table->lock_key != NULL)
		return RS_FORM_ADVISORY_LOCK;
	return RS_FORM_ROW_LOCK;
}

rs_lines
rs_table_lines(const rs_table *table)
{
	if (table->fifo)
		return RS_LINES_GROUP;
	if (table->column[RS_ROLE_PARTITION_KEY] != NULL)
		return RS_LINES_PARTITION_KEY;
	return RS_LINES_NONE;
}

/* The first column that plays two roles; NULL where each plays one. */
static const char *
column_of_two_roles(const rs_table *table)
{
	for (int i = 1; i < RS_ROLE_COUNT; i++)
	{
		if (table->column[i] == NULL)
			continue;
		for (int j = 0; j < i; j++)
		{
			if (table->column[j] != NULL && strcmp(table->column[i], table->column[j]) == 0)
				return table->column[i];
		}
	}
	return NULL;
}

rs_problem
rs_table_check(const rs_table *table)
{
	const char *twice = column_of_two_roles(table);

	if (table->column[RS_ROLE_ID] == NULL)
		return (rs_problem){.code = RS_PROBLEM_NO_ID};
	if (twice != NULL)
		return (rs_problem){.code = RS_PROBLEM_COLUMN_TWICE, .subject = twice};
	if (table->column[RS_ROLE_LOCKED_UNTIL] != NULL && table->lock_key != NULL)
		return (rs_problem){.code = RS_PROBLEM_TWO_FORMS};
	if (table->fifo && table->column[RS_ROLE_GROUP] == NULL)
		return (rs_problem){.code = RS_PROBLEM_FIFO_WITHOUT_GROUP};
	if (table->fifo && table->lock_key != NULL)
		return (rs_problem){.code = RS_PROBLEM_FIFO_ADVISORY};
	if (table->fifo && table->column[RS_ROLE_PARTITION_KEY] != NULL)
		return (rs_problem){.code = RS_PROBLEM_FIFO_PARTITION_KEY};
	if (table->lock_key != NULL)
		return rs_key_check(table->lock_key);
	return (rs_problem){.code = RS_OK};
}

rs_problem
rs_table_check_dialect(rs_dialect dialect, const rs_table *table)
{
	rs_form form = rs_table_form(table);

	if (dialect == RS_DIALECT_SQLITE && form == RS_FORM_ROW_LOCK)
		return (rs_problem){.code = RS_PROBLEM_SQLITE_ROW_LOCK};
	if (dialect == RS_DIALECT_MYSQL && form == RS_FORM_ROW_LOCK && table->fifo &&
		table->isolation == RS_ISOLATION_SERIALIZABLE)
		return (rs_problem){.code = RS_PROBLEM_MYSQL_FIFO_SERIALIZABLE};
	return (rs_problem){.code = RS_OK};
}
