/*-------------------------------------------------------------------------
 *
 * driver_postgres_claim.c
 *	  The PostgreSQL driver: claims of FIFO groups and partition keys.
 *
 * The rows of a FIFO group, or of one partition key, stand in a line: they go one at a time.
 * Whoever takes one holds the line's guard, which ends with the transaction (contract.md, section
 * 7), and reads the line's head only then, so that it sees what the holder before it has committed.
 *
 *		FIFO groups			guard; RS_OP_CLAIM_LINE_*
 *		partition keys		the keys of the first rows that are due, in claim order; where none of
 *							them can be had, a walk over all keys, which goes on where the one
 *							before it has found something.  Of each key: guard, RS_OP_CLAIM_LINE_*
 *		advisory lock form	the same with RS_OP_LINE_CANDIDATE.  The transaction's guard, and the
 *							transaction's lock on the row's key, only show that nobody has them: the
 *							library locks both for the session
 *
 * A guard that was taken in vain would be held until the transaction ends, which in the row lock
 * form is a handler's whole run: a savepoint stands in front of the first, and gives them up.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_postgres.h"

/* How many of the first rows are looked at, and how many keys a portion of the walk has. */
#define FIRST 10
#define PORTION 32

typedef struct claiming
{
	rs_postgres_session *session;
	rs_plan *plan;
	rs_value *values;
	rs_row_callback row;
	void *arg;
	bool of_candidates;
	bool found;
	bool has_savepoint;
	rs_arena arena; /* of the lines that are looked at, and of a candidate */
	rs_value candidate[3];
} claiming;

/* Lines in the order in which they are tried; NULL: the rows that are in none. */
typedef struct line_list
{
	claiming *of;
	int count;
	int seen; /* by the walk, those without anything due included */
	rs_value last;
	rs_value line[PORTION + 1];
} line_list;

static rs_result
run(claiming *claim, rs_operation operation, int64_t limit, rs_row_callback row, void *arg)
{
	claim->values[RS_PARAM_LIMIT] = rs_value_of_integer(limit);
	return rs_plan_run(&claim->session->base, claim->plan, operation, 0, claim->values, row, arg,
					   NULL);
}

/* ------------------------------------------------------------------- guards */

static bool
read_yes(void *arg, const rs_value *columns, int count)
{
	(void) count;
	*(bool *) arg = columns[0].kind == RS_INTEGER && columns[0].integer != 0;
	return false;
}

static bool
read_is_null(void *arg, const rs_value *columns, int count)
{
	*(bool *) arg = columns[count - 1].kind == RS_NULL;
	return false;
}

#define TRY_LOCK(name)                                                                             \
	"pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended(" name ", 0))"

/* Both names, so that the guard is the same whether a client writes the schema or not. */
static rs_result
guard_group(rs_session *base, const rs_table *table, const char *group, bool *guarded)
{
	static const rs_command command = {
		.text = "SELECT " TRY_LOCK(
			"pg_catalog.concat($2::pg_catalog.text, ':', "
			"$3::pg_catalog.text)") " AND " TRY_LOCK("pg_catalog.concat($1::pg_catalog.text, '.', "
													 "$2::pg_catalog.text, ':', "
													 "$3::pg_catalog.text)"),
		.slot = RS_SLOT_GUARD};
	const rs_value values[] = {rs_value_of_text(table->schema), rs_value_of_text(table->name),
							   rs_value_of_text(group)};

	return rs_postgres_execute(base, &command, values, 3, read_yes, guarded, NULL);
}

static rs_result
guard_key(claiming *claim, const rs_value *key, bool *guarded)
{
	static const rs_command command = {
		.text = "SELECT " TRY_LOCK("pg_catalog.concat($1::pg_catalog.text, '.', "
								   "$2::pg_catalog.text, ':key:', $3::pg_catalog.text)"),
		.slot = RS_SLOT_GUARD};
	const rs_table *table = &claim->plan->table;
	const rs_value values[] = {rs_value_of_text(table->schema), rs_value_of_text(table->name),
							   *key};

	return rs_postgres_execute(&claim->session->base, &command, values, 3, read_yes, guarded, NULL);
}

static rs_result
try_row_key(claiming *claim, const rs_value *key, bool *is_free)
{
	static const rs_command command = {.text = "SELECT " TRY_LOCK("$1::pg_catalog.text"),
									   .slot = RS_SLOT_TRY_KEY};

	return rs_postgres_execute(&claim->session->base, &command, key, 1, read_yes, is_free, NULL);
}

/* ---------------------------------------------------------------- one line */

static bool
hand_over(void *arg, const rs_value *columns, int count)
{
	claiming *claim = arg;

	claim->found = true;
	return claim->row(claim->arg, columns, count);
}

static bool
keep_candidate(void *arg, const rs_value *columns, int count)
{
	claiming *claim = arg;

	for (int i = 0; i < count && i < 3; i++)
		claim->candidate[i] = rs_copy_value(&claim->arena, &columns[i]);
	claim->found = true;
	return false;
}

/* A candidate is one whose key nobody else has. */
static rs_result
find_candidate(claiming *claim, bool is_loose)
{
	bool is_free = false;
	rs_result result = run(claim, is_loose ? RS_OP_LOOSE_CANDIDATE : RS_OP_LINE_CANDIDATE, 1,
						   keep_candidate, claim);

	if (result != RS_DONE || !claim->found)
		return result;
	claim->found = false;
	if (claim->arena.is_exhausted)
		return rs_postgres_no_memory(claim->session);
	result = try_row_key(claim, &claim->candidate[1], &is_free);
	if (result == RS_DONE && is_free)
		(void) hand_over(claim, claim->candidate, 3);
	return result;
}

static rs_result
claim_head(claiming *claim, bool is_loose)
{
	bool has_payload = claim->plan->table.column[RS_ROLE_PAYLOAD] != NULL;
	rs_operation operation = has_payload ? RS_OP_CLAIM_LINE_PAYLOAD : RS_OP_CLAIM_LINE_ROW;

	if (is_loose)
		operation = has_payload ? RS_OP_CLAIM_PAYLOAD : RS_OP_CLAIM_ROW;
	return run(claim, operation, 1, hand_over, claim);
}

/* Take the head of a line, or a row that is in none, if it can be had. */
static rs_result
try_line(claiming *claim, const rs_value *line)
{
	bool is_loose = line->kind == RS_NULL;
	bool guarded = is_loose;
	rs_result result = RS_DONE;

	if (!claim->has_savepoint)
		result = rs_postgres_run(claim->session, "SAVEPOINT ruststream_line");
	claim->has_savepoint = true;
	if (result == RS_DONE && !is_loose)
		result = guard_key(claim, line, &guarded);
	if (result != RS_DONE || !guarded)
		return result;
	claim->values[RS_PARAM_PARTITION_KEY] = *line;
	result = claim->of_candidates ? find_candidate(claim, is_loose) : claim_head(claim, is_loose);
	if (result == RS_DONE && !claim->found)
		result = rs_postgres_run(claim->session, "ROLLBACK TO SAVEPOINT ruststream_line");
	return result;
}

/* ----------------------------------------------------------- which line is next */

/* Of a candidate: id, key, partition key. */
static bool
keep_line(void *arg, const rs_value *columns, int count)
{
	line_list *lines = arg;
	const rs_value *line = &columns[count - 1];

	lines->seen++;
	for (int i = 0; i < lines->count; i++)
	{
		if (rs_value_equal(&lines->line[i], line))
			return true;
	}
	lines->line[lines->count++] = rs_copy_value(&lines->of->arena, line);
	return true;
}

static rs_result
try_lines(claiming *claim, const line_list *lines, int *tried)
{
	rs_result result = RS_DONE;

	if (claim->arena.is_exhausted)
		return rs_postgres_no_memory(claim->session);
	for (*tried = 0; *tried < lines->count && result == RS_DONE && !claim->found; ++*tried)
		result = try_line(claim, &lines->line[*tried]);
	return result;
}

/* The lines of the first rows that are due.  Returns through *all whether those are all rows. */
static rs_result
try_in_order(claiming *claim, bool *all)
{
	line_list first = {.of = claim};
	int tried;
	rs_result result = run(claim, RS_OP_CANDIDATES, FIRST, keep_line, &first);

	*all = first.seen < FIRST;
	return result == RS_DONE ? try_lines(claim, &first, &tried) : result;
}

/* A line, and NULL where its head is due. */
static bool
keep_walked(void *arg, const rs_value *columns, int count)
{
	line_list *lines = arg;

	(void) count;
	lines->seen++;
	lines->last = rs_copy_value(&lines->of->arena, &columns[0]);
	if (columns[1].kind == RS_NULL)
		lines->line[lines->count++] = lines->last;
	return true;
}

static rs_result
set_cursor(rs_postgres_session *session, const rs_value *cursor)
{
	rs_arena_reset(&session->line_arena);
	session->line = rs_copy_value(&session->line_arena, cursor);
	return session->line_arena.is_exhausted ? rs_postgres_no_memory(session) : RS_DONE;
}

/* In the lease form a line of which a row is leased need not be guarded to see that. */
static rs_result
leave_out_leased(claiming *claim, line_list *lines)
{
	int kept = 0;
	rs_result result = RS_DONE;

	if (rs_table_form(&claim->plan->table) != RS_FORM_LEASE)
		return RS_DONE;
	for (int i = 0; i < lines->count && result == RS_DONE; i++)
	{
		bool is_free = true;

		claim->values[RS_PARAM_PARTITION_KEY] = lines->line[i];
		if (lines->line[i].kind != RS_NULL)
			result = run(claim, RS_OP_LINE_WAITS, 1, read_is_null, &is_free);
		if (is_free)
			lines->line[kept++] = lines->line[i];
	}
	lines->count = kept;
	return result;
}

/* Walk on by a portion, and set the cursor behind what was tried.  *ends: that was the last. */
static rs_result
walk_on(claiming *claim, bool *ends)
{
	rs_postgres_session *session = claim->session;
	line_list portion = {.of = claim};
	bool begins = session->line.kind == RS_NULL;
	int tried = 0;
	rs_result result;

	rs_arena_reset(&claim->arena);
	if (begins)
		portion.line[portion.count++] = RS_VALUE_NULL;
	claim->values[RS_PARAM_PARTITION_KEY] = session->line;
	result = run(claim, begins ? RS_OP_LINES : RS_OP_LINES_BEHIND, PORTION, keep_walked, &portion);
	if (result == RS_DONE)
		result = leave_out_leased(claim, &portion);
	if (result == RS_DONE)
		result = try_lines(claim, &portion, &tried);
	if (result != RS_DONE)
		return result;
	*ends = portion.seen < PORTION;
	if (claim->found)
		return set_cursor(session, &portion.line[tried - 1]);
	return set_cursor(session, *ends ? &RS_VALUE_NULL : &portion.last);
}

/* On from where the last walk has come to, to the end, and once more from the beginning. */
static rs_result
walk(claiming *claim)
{
	bool from_beginning = claim->session->line.kind == RS_NULL;
	rs_result result;

	for (;;)
	{
		bool ends = false;

		result = walk_on(claim, &ends);
		if (result != RS_DONE || claim->found || (ends && from_beginning))
			return result;
		from_beginning |= ends;
	}
}

static rs_result
claim_of_keys(claiming *claim)
{
	bool all = false;
	rs_result result = try_in_order(claim, &all);

	if (result == RS_DONE && !claim->found && !all)
		result = walk(claim);
	rs_arena_free(&claim->arena);
	return result;
}

/* ------------------------------------------------------------------- claims */

/* The one statement that claims: in the row lock form the handler is next, found or not. */
static rs_result
claim_once(claiming *claim)
{
	rs_result result;

	claim->session->marks_claim = rs_table_form(&claim->plan->table) == RS_FORM_ROW_LOCK;
	result = claim_head(claim, rs_table_lines(&claim->plan->table) == RS_LINES_NONE);
	claim->session->marks_claim = false;
	return result;
}

static rs_result
claim_of_group(claiming *claim)
{
	bool guarded = false;
	rs_result result = guard_group(&claim->session->base, &claim->plan->table,
								   claim->plan->subscription.group_name, &guarded);

	return result == RS_DONE && guarded ? claim_once(claim) : result;
}

rs_result
rs_postgres_claim(rs_session *base, struct rs_plan *plan, rs_value *values, rs_row_callback row,
				  void *arg)
{
	claiming claim = {
		.session = rs_postgres_of(base), .plan = plan, .values = values, .row = row, .arg = arg};

	switch (rs_table_lines(&plan->table))
	{
		case RS_LINES_GROUP:
			return claim_of_group(&claim);
		case RS_LINES_PARTITION_KEY:
			return claim_of_keys(&claim);
		default:
			if (values[RS_PARAM_LIMIT].integer > 1)
				return rs_postgres_claim_batch(base, plan, values, row, arg);
			return claim_once(&claim);
	}
}

rs_result
rs_postgres_candidates(rs_session *base, struct rs_plan *plan, rs_value *values,
					   rs_row_callback row, void *arg)
{
	claiming claim = {.session = rs_postgres_of(base),
					  .plan = plan,
					  .values = values,
					  .row = row,
					  .arg = arg,
					  .of_candidates = true};

	if (rs_table_lines(&plan->table) == RS_LINES_PARTITION_KEY)
		return claim_of_keys(&claim);
	return rs_plan_run(base, plan, RS_OP_FREE_CANDIDATES, 0, values, row, arg, NULL);
}
