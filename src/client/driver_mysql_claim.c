/*-------------------------------------------------------------------------
 *
 * driver_mysql_claim.c
 *	  The driver for MySQL and MariaDB: claims, which are several statements.
 *
 *		any table			ranges of the claim's index, one locking read each, until one finds a
 *							row; in the lease form then the stamp
 *		FIFO groups			the group's rows are counted, and counted again by a read that locks
 *							them and skips what is locked: only where both agree is nothing of the
 *							group in work, and its head is taken
 *		partition keys		candidates are read without locking.  Of the first whose key can be
 *							locked by name the head of the key is looked for, without locking;
 *							and that row is locked, and taken if it still may be
 *
 * Whoever ends the work on a key unlocks it once that is committed, or rolled back: so the head is
 * that of a read which is younger than the lock, with a snapshot of its own.  Plain reads at READ
 * COMMITTED have one each; at other levels they are made before the transaction begins, which
 * keeps the handler's snapshot younger, too.
 *
 * Nothing here waits for a lock: where a row or a key is in work it is passed over.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_mysql.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_CANDIDATES 16

typedef struct candidate
{
	rs_value id;
	const char *lock; /* what is to be locked by name */
	bool has_key;     /* else it is in no line */
	bool was_refused;
} candidate;

typedef struct candidate_list
{
	rs_arena arena;
	int count;
	candidate candidates[MAX_CANDIDATES];
} candidate_list;

typedef struct claiming
{
	rs_mysql_session *session;
	rs_plan *plan;
	rs_value *values;
	rs_row_callback row;
	void *arg;
	int64_t wanted; /* rows */
	int64_t found;
	bool reads_outside; /* plain reads are made before the transaction begins */
	rs_result result;   /* of what a callback has executed */
} claiming;

static rs_result
run(claiming *claim, rs_operation operation, int index, rs_row_callback row)
{
	rs_result result;

	claim->values[RS_PARAM_LIMIT] = rs_value_of_integer(claim->wanted - claim->found);
	result = rs_plan_run(&claim->session->base, claim->plan, operation, index, claim->values, row,
						 claim, NULL);
	return result == RS_DONE ? claim->result : result;
}

/* --------------------------------------------------------------- callbacks */

/* A row that is locked by now: ours.  Its result is complete, so another statement may be run. */
static bool
take_row(void *arg, const rs_value *columns, int count)
{
	claiming *claim = arg;

	(void) count;
	if (rs_plan_count(claim->plan, RS_OP_STAMP) > 0)
	{
		claim->values[RS_PARAM_ID] = columns[0];
		claim->result = rs_plan_run(&claim->session->base, claim->plan, RS_OP_STAMP, 0,
									claim->values, NULL, NULL, NULL);
	}
	if (claim->result != RS_DONE)
		return false;
	claim->found++;
	return claim->row(claim->arg, columns, 4);
}

static bool
pass_candidate(void *arg, const rs_value *columns, int count)
{
	claiming *claim = arg;

	claim->found++;
	return claim->row(claim->arg, columns, count) && claim->found < claim->wanted;
}

typedef struct kept_id
{
	rs_arena *arena;
	rs_value id;
} kept_id;

static bool
keep_id(void *arg, const rs_value *columns, int count)
{
	kept_id *kept = arg;

	(void) count;
	kept->id = rs_copy_value(kept->arena, &columns[0]);
	return false;
}

/* --------------------------------------------------- ranges of the index */

typedef struct level
{
	bool is_there;
	rs_value priority; /* an integer, or NULL */
} level;

static bool
read_level(void *arg, const rs_value *columns, int count)
{
	(void) count;
	*(level *) arg = (level){.is_there = true, .priority = columns[0]};
	return false;
}

/* The lowest priority there is, or the next one above the last. */
static rs_result
next_level(claiming *claim, bool is_first, bool *is_there)
{
	rs_value *priority = &claim->values[RS_PARAM_PRIORITY];
	level next = {false, RS_VALUE_NULL};
	rs_result result;

	/* NULL is below every number. */
	if (!is_first && priority->kind == RS_NULL)
		*priority = rs_value_of_integer(INT64_MIN);
	result = rs_plan_run(&claim->session->base, claim->plan, RS_OP_LEVEL, is_first ? 0 : 1,
						 claim->values, read_level, &next, NULL);
	*is_there = next.is_there;
	*priority = next.priority;
	return result;
}

/*
 * Read range after range, in claim order, until enough rows are found: so rows that wait for their
 * time are never read.  whole is the statement of the order as a whole, for tables without such.
 */
static rs_result
walk(claiming *claim, rs_operation whole, rs_operation undelayed, rs_operation come_due,
	 rs_row_callback row)
{
	bool has_priority = claim->plan->table.column[RS_ROLE_PRIORITY] != NULL;
	bool there = true;
	rs_result result = RS_DONE;

	if (claim->plan->table.column[RS_ROLE_RETRY_AFTER] == NULL)
		return run(claim, whole, 0, row);
	for (bool is_first = true; result == RS_DONE && claim->found < claim->wanted; is_first = false)
	{
		if (has_priority)
			result = next_level(claim, is_first, &there);
		else
			there = is_first;
		if (result != RS_DONE || !there)
			return result;
		result = run(claim, undelayed, 0, row);
		if (result == RS_DONE && claim->found < claim->wanted)
			result = run(claim, come_due, 0, row);
	}
	return result;
}

/* --------------------------------------------------------- partition keys */

static bool
keep_candidate(void *arg, const rs_value *columns, int count)
{
	candidate_list *list = arg;
	candidate *next = &list->candidates[list->count];

	(void) count;
	if (list->count == MAX_CANDIDATES)
		return false;
	next->id = rs_copy_value(&list->arena, &columns[0]);
	next->lock = rs_copy_bytes(&list->arena, columns[1].text, columns[1].length);
	next->has_key = columns[2].kind != RS_NULL;
	next->was_refused = false;
	list->count++;
	return true;
}

/* The first row of the key that row :id has, which has to be locked: none, if that row has gone. */
static rs_result
find_head(const claiming *claim, rs_arena *arena, rs_value *head)
{
	kept_id kept = {arena, RS_VALUE_NULL};
	claiming finding = *claim;
	rs_result result;

	finding.wanted = 1;
	finding.found = 0;
	finding.row = keep_id;
	finding.arg = &kept;
	result = walk(&finding, RS_OP_HEAD, RS_OP_HEAD_UNDELAYED, RS_OP_HEAD_COME_DUE, pass_candidate);
	*head = kept.id;
	if (result == RS_DONE && arena->is_exhausted)
		return rs_mysql_no_memory(claim->session);
	return result;
}

static bool
is_left_alone(const claiming *claim, const rs_value *id)
{
	const rs_held *held = claim->session->base.held;

	for (int i = 0; held != NULL && i < held->count; i++)
	{
		if (rs_value_equal(id, &held->ids[i]))
			return true;
	}
	return false;
}

/* Lock the head of the candidate's key, whose lock is ours, and take it if it still may be. */
static rs_result
take_candidate(claiming *claim, candidate_list *list, const candidate *chosen)
{
	rs_value head = chosen->id;
	rs_result result = RS_DONE;

	claim->values[RS_PARAM_ID] = chosen->id;
	if (chosen->has_key)
		result = find_head(claim, &list->arena, &head);
	if (result != RS_DONE || head.kind == RS_NULL || is_left_alone(claim, &head))
		return result;
	claim->values[RS_PARAM_ID] = head;
	claim->values[RS_PARAM_KEY] = rs_value_of_text(chosen->lock);
	if (claim->reads_outside)
		result = rs_mysql_begin(&claim->session->base, RS_FOR_DELIVERY, &claim->plan->table);
	return result == RS_DONE ? run(claim, RS_OP_LOCK_CANDIDATE, 0, take_row) : result;
}

/* Lock the candidate's key, which is the transaction's from then on. */
static rs_result
try_candidate(claiming *claim, candidate_list *list, candidate *chosen)
{
	rs_mysql_session *session = claim->session;
	bool locked = false;
	rs_result result = rs_mysql_lock_key(&session->base, chosen->lock, &locked);

	chosen->was_refused = true;
	if (result != RS_DONE || !locked)
		return result;
	session->guard = strdup(chosen->lock);
	if (session->guard == NULL)
	{
		rs_mysql_unlock_key(&session->base, chosen->lock);
		return rs_mysql_no_memory(session);
	}
	result = take_candidate(claim, list, chosen);
	if (result != RS_DONE || claim->found > 0)
		return result;
	if (claim->reads_outside)
		return rs_mysql_commit(&session->base);
	rs_mysql_release_guard(session);
	return RS_DONE;
}

/* Where one row of a key could not be had no other is tried. */
static bool
is_of_refused_key(const candidate_list *list, int n)
{
	for (int i = 0; i < n; i++)
	{
		if (list->candidates[i].was_refused &&
			strcmp(list->candidates[i].lock, list->candidates[n].lock) == 0)
			return true;
	}
	return false;
}

static rs_result
try_candidates(claiming *claim, candidate_list *list)
{
	rs_result result = RS_DONE;

	for (int n = 0; n < list->count && result == RS_DONE && claim->found == 0; n++)
	{
		if (!is_of_refused_key(list, n))
			result = try_candidate(claim, list, &list->candidates[n]);
	}
	return result;
}

/* Candidates that are neither left alone by this worker nor left out, nor of the key of such a row.
 */
static rs_result
find_candidates(const claiming *claim, const rs_held *left_out, candidate_list *list)
{
	rs_session *base = &claim->session->base;
	const rs_held *held = base->held;
	claiming finding = *claim;
	rs_result result;

	list->count = 0;
	finding.wanted = MAX_CANDIDATES;
	finding.row = keep_candidate;
	finding.arg = list;
	base->held = left_out;
	result = walk(&finding, RS_OP_CANDIDATES, RS_OP_CANDIDATES_UNDELAYED, RS_OP_CANDIDATES_COME_DUE,
				  pass_candidate);
	base->held = held;
	if (result == RS_DONE && list->arena.is_exhausted)
		return rs_mysql_no_memory(claim->session);
	return result;
}

/* Where none of the first can be had, those behind them are looked at without their keys. */
static rs_result
claim_of_key(claiming *claim)
{
	rs_session *base = &claim->session->base;
	candidate_list list = {.count = 0};
	rs_held left_out = {.count = 0};
	rs_result result = claim->reads_outside ? rs_mysql_commit(base) : RS_DONE;

	if (base->held != NULL)
		left_out = *base->held;
	do
	{
		if (result == RS_DONE)
			result = find_candidates(claim, &left_out, &list);
		if (result == RS_DONE)
			result = try_candidates(claim, &list);
		for (int n = 0; n < list.count; n++)
		{
			if (list.candidates[n].was_refused)
				rs_leave_out(&left_out, &list.candidates[n].id);
		}
	} while (result == RS_DONE && claim->found == 0 && list.count == MAX_CANDIDATES &&
			 left_out.count < RS_MAX_HELD);
	rs_arena_free(&list.arena);
	return result;
}

/* ------------------------------------------------------------ FIFO groups */

typedef struct counts
{
	int64_t rows;
	int64_t leased;
} counts;

static bool
read_counts(void *arg, const rs_value *columns, int count)
{
	counts *of = arg;

	of->rows = columns[0].integer;
	of->leased = count > 1 ? columns[1].integer : 0;
	return false;
}

static rs_result
count_group(claiming *claim, int index, counts *of)
{
	return rs_plan_run(&claim->session->base, claim->plan, RS_OP_COUNT_GROUP, index, claim->values,
					   read_counts, of, NULL);
}

/*
 * The head: a row, as a claim returns it, and whether it is due.  Where it is not, or is left
 * alone, the rows behind it wait.
 */
static bool
read_head(void *arg, const rs_value *columns, int count)
{
	if (columns[4].kind != RS_INTEGER || columns[4].integer == 0 || is_left_alone(arg, &columns[0]))
		return false;
	return take_row(arg, columns, count);
}

/* How often the two counts are repeated while rows are being inserted between them. */
#define MAX_COUNTS 5

#define MAX_MISSES 4

/*
 * A row is locked: by a delivery, or by another claim that is counting, which sees ours and comes
 * to nothing as well.  So that neither of two that meet goes away for long, it is tried again a few
 * times, after a random moment that the library waits outside the transaction.
 */
static rs_result
miss(rs_mysql_session *session)
{
	if (++session->fifo_misses < MAX_MISSES)
	{
		rs_error_set(&session->base.error, RUSTSTREAM_BUSY, "", NULL,
					 "a row of the group is in work or being claimed");
		return RS_TRANSIENT;
	}
	session->fifo_misses = 0;
	return RS_DONE;
}

static rs_result
claim_head(claiming *claim)
{
	counts all = {0, 0};
	counts unlocked = {0, 0};
	rs_result result = RS_DONE;

	for (int i = 0; i < MAX_COUNTS && result == RS_DONE; i++)
	{
		result = count_group(claim, 0, &all);
		if (result == RS_DONE && all.rows == 0)
			return RS_DONE;
		if (result == RS_DONE)
			result = count_group(claim, 1, &unlocked);
		/* One that is missing is in work; one more has come in between. */
		if (unlocked.rows <= all.rows)
			break;
	}
	if (result != RS_DONE)
		return result;
	if (unlocked.rows != all.rows)
		return miss(claim->session);
	claim->session->fifo_misses = 0;
	return unlocked.leased > 0 ? RS_DONE : run(claim, RS_OP_CLAIM_ROW, 0, read_head);
}

/* ----------------------------------------------------------------- claims */

rs_result
rs_mysql_claim(rs_session *base, struct rs_plan *plan, rs_value *values, rs_row_callback row,
			   void *arg)
{
	claiming claim = {.session = rs_mysql_of(base),
					  .plan = plan,
					  .values = values,
					  .row = row,
					  .arg = arg,
					  .wanted = values[RS_PARAM_LIMIT].integer};
	rs_isolation isolation = rs_table_form(&plan->table) == RS_FORM_ROW_LOCK
								 ? plan->table.isolation
								 : RS_ISOLATION_READ_COMMITTED;

	claim.reads_outside = isolation != RS_ISOLATION_READ_COMMITTED;
	if (plan->table.fifo)
		return claim_head(&claim);
	if (plan->table.column[RS_ROLE_PARTITION_KEY] != NULL)
		return claim_of_key(&claim);
	if (isolation == RS_ISOLATION_SERIALIZABLE)
		return run(&claim, RS_OP_CLAIM_ROW, 0, take_row);
	return walk(&claim, RS_OP_CLAIM_ROW, RS_OP_CLAIM_UNDELAYED, RS_OP_CLAIM_COME_DUE, take_row);
}

rs_result
rs_mysql_candidates(rs_session *base, struct rs_plan *plan, rs_value *values, rs_row_callback row,
					void *arg)
{
	claiming claim = {.session = rs_mysql_of(base),
					  .plan = plan,
					  .values = values,
					  .row = row,
					  .arg = arg,
					  .wanted = values[RS_PARAM_LIMIT].integer};

	return walk(&claim, RS_OP_CANDIDATES, RS_OP_CANDIDATES_UNDELAYED, RS_OP_CANDIDATES_COME_DUE,
				pass_candidate);
}

rs_result
rs_mysql_is_head(rs_session *base, struct rs_plan *plan, rs_value *values, bool *is_head)
{
	claiming claim = {.session = rs_mysql_of(base), .plan = plan, .values = values};
	rs_arena arena = {0};
	rs_value head;
	rs_result result = find_head(&claim, &arena, &head);

	*is_head = result == RS_DONE && rs_value_equal(&head, &values[RS_PARAM_ID]);
	rs_arena_free(&arena);
	return result;
}
