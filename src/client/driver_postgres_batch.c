/*-------------------------------------------------------------------------
 *
 * driver_postgres_batch.c
 *	  The PostgreSQL driver: claims of several rows.
 *
 * No statement promises the order of RETURNING, so the rows are put into claim order here: by the
 * priority and the delay that a claim returns behind the payload, and by the id, as far as we can
 * compare it.  An id that is no number is left where the statement has it, which looks rows up in
 * claim order, and so returns them; as are all rows where the session's DateStyle is not ISO,
 * and we cannot read their delays.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_postgres.h"

#include <stdlib.h>
#include <string.h>

/* What a claim returns, in this order. */
enum
{
	COLUMN_ID,
	COLUMN_ATTEMPT,
	COLUMN_HEADERS,
	COLUMN_PAYLOAD,
	COLUMN_PRIORITY,
	COLUMN_RETRY_AFTER,
	COLUMN_COUNT
};

typedef struct claimed_row
{
	rs_value columns[COLUMN_COUNT];
	int64_t due; /* INT64_MIN: no delay */
	int number;  /* as it was returned */
} claimed_row;

typedef struct claimed_rows
{
	rs_arena arena;
	claimed_row **rows;
	int count;
	int room;
	bool is_unreadable; /* a delay of theirs */
} claimed_rows;

/* A time as the server writes it, with an offset that may be of hours alone; NULL: before all. */
static bool
read_due(const rs_value *value, int64_t *due)
{
	char text[64];
	size_t length = value->length;

	*due = INT64_MIN;
	if (value->kind == RS_NULL)
		return true;
	if (value->kind != RS_TEXT || length < 3 || length > sizeof(text) - 4)
		return false;
	memcpy(text, value->text, length);
	memcpy(text + length, ":00", 4);
	if (text[length - 3] == '+' || text[length - 3] == '-')
		length += 3;
	return rs_time_parse(text, length, due);
}

static bool
keep_row(void *arg, const rs_value *columns, int count)
{
	claimed_rows *all = arg;
	claimed_row *row = rs_alloc(&all->arena, sizeof(claimed_row));

	if (row == NULL || all->count == all->room)
		return false;
	for (int i = 0; i < COLUMN_COUNT && i < count; i++)
		row->columns[i] = rs_copy_value(&all->arena, &columns[i]);
	all->is_unreadable |= !read_due(&row->columns[COLUMN_RETRY_AFTER], &row->due);
	row->number = all->count;
	all->rows[all->count++] = row;
	return true;
}

/* NULL goes first; what is no number is equal to everything. */
static int
compare_numbers(const rs_value *a, const rs_value *b)
{
	if (a->kind == RS_NULL || b->kind == RS_NULL)
		return (a->kind != RS_NULL) - (b->kind != RS_NULL);
	if (a->kind != RS_INTEGER || b->kind != RS_INTEGER)
		return 0;
	return (a->integer > b->integer) - (a->integer < b->integer);
}

static int
compare_rows(const void *a, const void *b)
{
	const claimed_row *left = *(claimed_row *const *) a;
	const claimed_row *right = *(claimed_row *const *) b;
	int order = compare_numbers(&left->columns[COLUMN_PRIORITY], &right->columns[COLUMN_PRIORITY]);

	if (order == 0)
		order = (left->due > right->due) - (left->due < right->due);
	if (order == 0)
		order = compare_numbers(&left->columns[COLUMN_ID], &right->columns[COLUMN_ID]);
	return order != 0 ? order : left->number - right->number;
}

rs_result
rs_postgres_claim_batch(rs_session *base, struct rs_plan *plan, const rs_value *values,
						rs_row_callback row, void *arg)
{
	rs_operation operation =
		plan->table.column[RS_ROLE_PAYLOAD] != NULL ? RS_OP_CLAIM_PAYLOAD : RS_OP_CLAIM_ROW;
	claimed_rows all = {.room = (int) values[RS_PARAM_LIMIT].integer};
	rs_result result = RS_DONE;

	all.rows = rs_alloc(&all.arena, sizeof(claimed_row *) * (size_t) all.room);
	if (all.rows != NULL)
		result = rs_plan_run(base, plan, operation, 0, values, keep_row, &all, NULL);
	if (result == RS_DONE && all.arena.is_exhausted)
		result = rs_postgres_no_memory(rs_postgres_of(base));
	if (result == RS_DONE)
	{
		if (!all.is_unreadable)
			qsort(all.rows, (size_t) all.count, sizeof(claimed_row *), compare_rows);
		for (int i = 0; i < all.count && row(arg, all.rows[i]->columns, COLUMN_COUNT); i++)
			continue;
	}
	rs_arena_free(&all.arena);
	return result;
}
