/*-------------------------------------------------------------------------
 *
 * lines.c
 *	  Claims from queues whose rows stand in lines: FIFO groups, and partition
 *	  keys.
 *
 * Of a line one row is in work at a time, in claim order.  Whoever takes one
 * first takes the line's guard (guard.c), and then looks for its head: with the
 * guard held, what was committed by its last holder is seen, and nobody else
 * takes from this line.  In the row lock form the guard is held until the
 * delivery's transaction ends; in the lease form until the claim's does, and then the
 * live lease of a row keeps the others of its line.
 *
 * Which line comes next
 * ---------------------
 *
 * A subscription to one FIFO group has one line.  Else there may be a million,
 * of which most may be busy, or wait; and a claim must not cost more for that.
 * Three things say where there may be something to take, none of which needs to
 * be right, since the claim itself looks at the head again:
 *
 * - with partition keys, the first rows that are due, in claim order: as long as
 *	 not all of those are of busy keys, the queue's own order holds among the keys,
 *	 too;
 * - the walk: one step down the index leads from a line to the next, so that
 *	 each line has its turn.  It goes on a portion at a time, from claim to claim,
 *	 and is at rest for a while after a portion without anything to take;
 * - the lines that were served last, of which there may be more.
 *
 * Only where all of these come to nothing the walk goes all the way around, once
 * for each time that the worker has nothing to do.
 *
 * Before all that come the lines whose rows were claimed and rolled back, as the
 * first rows of any other queue would: who is at fault among rows that share a
 * commit is found as they are tried in smaller numbers, and not where the next
 * ones are always others.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/delivery.h"

#include "access/xact.h"
#include "catalog/pg_type_d.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

/* How many lines a portion of the walk has. */
#define PORTION 32

/* How many claims the walk rests after a portion without anything to take. */
#define REST 8

/* How many of the lines that were served last are known. */
#define KNOWN 16

typedef struct Line
{
	bool isnull; /* the rows without a partition key, which are in no line */
	Datum value;
} Line;

/* Lines to be looked at, and how far that has come; a portion fits in. */
typedef struct LineList
{
	MemoryContext context;
	int next;
	int count;
	Line line[RS_MAX_GUARDS];
} LineList;

struct RsLines
{
	MemoryContext context;
	MemoryContext cursor_context;
	Oid type;
	int16 length;
	bool byval;

	/* The walk: the last line it has seen (none: it begins), and what it has ahead. */
	bool has_cursor;
	Datum cursor;
	LineList *ahead;
	int rest;

	/* The lines that were served last, and whose turn it is. */
	int known_count;
	int turn;
	Line known[KNOWN];

	/* The lines of the last claim, and those that are claimed from again first. */
	LineList *claimed;
	LineList *again;
};

static LineList *
make_list(MemoryContext parent)
{
	LineList *list = MemoryContextAllocZero(parent, sizeof(LineList));

	list->context = AllocSetContextCreate(parent, "ruststream list", ALLOCSET_SMALL_SIZES);
	return list;
}

static RsLines *
lines_of(RsEngine *engine)
{
	const RsQueue *queue = &engine->subscription->queue;
	RsLines *lines = engine->lines;
	rs_role role =
		rs_table_lines(&queue->table) == RS_LINES_GROUP ? RS_ROLE_GROUP : RS_ROLE_PARTITION_KEY;

	if (lines != NULL)
		return lines;
	lines = MemoryContextAllocZero(engine->context, sizeof(RsLines));
	lines->context =
		AllocSetContextCreate(engine->context, "ruststream lines", ALLOCSET_SMALL_SIZES);
	lines->cursor_context =
		AllocSetContextCreate(lines->context, "ruststream cursor", ALLOCSET_SMALL_SIZES);
	lines->ahead = make_list(lines->context);
	lines->claimed = make_list(lines->context);
	lines->again = make_list(lines->context);
	lines->type = queue->type[role];
	get_typlenbyval(lines->type, &lines->length, &lines->byval);
	engine->lines = lines;
	return lines;
}

void
rs_lines_forget(RsEngine *engine)
{
	if (engine->lines == NULL)
		return;
	MemoryContextDelete(engine->lines->context);
	pfree(engine->lines);
	engine->lines = NULL;
}

static Line
copy_line(const RsLines *lines, const Line *line, MemoryContext context)
{
	MemoryContext save = MemoryContextSwitchTo(context);
	Line copy = {.isnull = line->isnull};

	if (!line->isnull)
		copy.value = datumCopy(line->value, lines->byval, lines->length);
	MemoryContextSwitchTo(save);
	return copy;
}

static void
empty_list(LineList *list)
{
	list->next = list->count = 0;
	MemoryContextReset(list->context);
}

static void
add_line(const RsLines *lines, LineList *list, const Line *line)
{
	list->line[list->count++] = copy_line(lines, line, list->context);
}

/* ------------------------------------------------------------ lines served last */

static bool
is_same(const RsLines *lines, const Line *a, const Line *b)
{
	if (a->isnull || b->isnull)
		return a->isnull == b->isnull;
	return datumIsEqual(a->value, b->value, lines->byval, lines->length);
}

static void
forget_line(RsLines *lines, int index)
{
	if (!lines->byval && !lines->known[index].isnull)
		pfree(DatumGetPointer(lines->known[index].value));
	lines->known[index] = lines->known[--lines->known_count];
}

static void
remember_line(RsLines *lines, const Line *line)
{
	for (int i = 0; i < lines->known_count; i++)
	{
		if (is_same(lines, &lines->known[i], line))
			return;
	}
	if (lines->known_count == KNOWN)
		forget_line(lines, lines->turn % KNOWN);
	lines->known[lines->known_count++] = copy_line(lines, line, lines->context);
}

/* ------------------------------------------------------------ the head of a line */

/* The first of the times at which there may be something to take. */
static void
note_due(RsEngine *engine, TimestampTz due)
{
	if (due != 0 && !TIMESTAMP_NOT_FINITE(due) && (engine->next_due == 0 || due < engine->next_due))
		engine->next_due = due;
}

/* There was nothing to take though nobody holds the guard: until when, if that is known? */
static void
note_what_it_waits_for(RsEngine *engine, const RsValues *values)
{
	TimestampTz now = DatumGetTimestampTz(values->value[RS_PARAM_NOW]);
	TimestampTz until = 0;
	bool isnull;

	if (rs_query(engine->plans, RS_OP_LINE_WAITS, values) == 1)
	{
		for (int column = 1; column <= 2; column++)
		{
			/* NULL is 0. */
			TimestampTz time =
				DatumGetTimestampTz(rs_claim_fetch(0, column, TIMESTAMPTZOID, &isnull));

			if (time > now)
				until = Max(until, time);
		}
	}
	SPI_freetuptable(SPI_tuptable);
	note_due(engine, until);
}

/* Claim the head of a line, or so many of the rows that are in none: how many? */
static int
claim_rows(RsEngine *engine, bool of_line, const RsValues *values, RsDelivery *deliveries)
{
	bool row = engine->subscription->handler.input != RS_INPUT_PAYLOAD;
	rs_operation operation = of_line ? (row ? RS_OP_CLAIM_LINE_ROW : RS_OP_CLAIM_LINE_PAYLOAD)
									 : (row ? RS_OP_CLAIM_ROW : RS_OP_CLAIM_PAYLOAD);
	int found = (int) rs_query(engine->plans, operation, values);

	for (int i = 0; i < found; i++)
		rs_claim_read(engine, values, i, &deliveries[i]);
	SPI_freetuptable(SPI_tuptable);
	return found;
}

static RsGuard
guard_of(RsEngine *engine, const Line *line)
{
	char *name = rs_datum_text(line->value, lines_of(engine)->type);
	RsGuard guard = rs_guard_of_line(&engine->subscription->queue, name);

	pfree(name);
	return guard;
}

/* Take the head of a line, if it can be had; of the rows in none, up to limit. */
static int
claim_line(RsEngine *engine, const Line *line, RsDelivery *deliveries, int limit)
{
	RsLines *lines = lines_of(engine);
	RsValues values;
	RsGuard guard;

	if (line->isnull)
	{
		rs_claim_values(engine, limit, &values);
		return claim_rows(engine, false, &values, deliveries);
	}

	guard = guard_of(engine, line);
	/* The snapshot must be younger than the guard. */
	rs_engine_renew(engine);
	if (!rs_guard_try(&guard, false))
	{
		engine->was_blocked = true;
		return 0;
	}

	rs_claim_values(engine, 1, &values);
	rs_value_set(&values, rs_line_parameter(&engine->subscription->queue.table), line->value, 0);
	if (claim_rows(engine, true, &values, deliveries) > 0)
	{
		deliveries->has_line = true;
		deliveries->line = datumCopy(line->value, lines->byval, lines->length);
		return 1;
	}
	note_what_it_waits_for(engine, &values);
	rs_guard_release(&guard, false);
	return 0;
}

/*
 * Advisory lock form: the head of a line as a candidate, if nobody else is at the
 * line; the guard will be taken for the session before the row is.
 */
static int
find_candidate(RsEngine *engine, const Line *line, RsCandidate *candidate)
{
	rs_operation operation = line->isnull ? RS_OP_LOOSE_CANDIDATE : RS_OP_LINE_CANDIDATE;
	RsValues values;
	RsGuard guard = {0};
	int found;

	if (!line->isnull)
		guard = guard_of(engine, line);
	if (!rs_guard_try(&guard, false))
	{
		engine->was_blocked = true;
		return 0;
	}
	rs_claim_values(engine, 1, &values);
	if (!line->isnull)
		rs_value_set(&values, RS_PARAM_PARTITION_KEY, line->value, 0);
	found = (int) rs_query(engine->plans, operation, &values);
	if (found > 0)
		rs_claim_read_candidate(engine, 0, candidate);
	SPI_freetuptable(SPI_tuptable);
	rs_guard_release(&guard, false);
	return found;
}

/* -------------------------------------------------------------------- the walk */

/* Every group is read but that of our own dead letters. */
static bool
is_of_dead_letters(const RsSubscription *subscription, Datum group)
{
	const char *dead = subscription->dead_letter_group;
	text *name;

	if (!subscription->every_group || dead == NULL)
		return false;
	name = DatumGetTextPP(group);
	return VARSIZE_ANY_EXHDR(name) == strlen(dead) &&
		   memcmp(VARDATA_ANY(name), dead, strlen(dead)) == 0;
}

/*
 * Walk on by a portion.  What seems to have something to take is ahead then.
 * Returns whether the walk has come to the end, and will begin anew.
 */
static bool
walk_on(RsEngine *engine)
{
	RsLines *lines = lines_of(engine);
	const rs_table *table = &engine->subscription->queue.table;
	bool begins = !lines->has_cursor;
	RsValues values;
	TimestampTz now;
	int found;

	empty_list(lines->ahead);
	rs_claim_values(engine, PORTION, &values);
	now = DatumGetTimestampTz(values.value[RS_PARAM_NOW]);
	if (!begins)
		rs_value_set(&values, rs_line_parameter(table), lines->cursor, 0);
	else if (rs_table_lines(table) == RS_LINES_PARTITION_KEY)
		add_line(lines, lines->ahead, &(Line){.isnull = true});

	found = (int) rs_query(engine->plans, begins ? RS_OP_LINES : RS_OP_LINES_BEHIND, &values);
	for (int i = 0; i < found; i++)
	{
		Line line = {0};
		bool isnull;
		TimestampTz due;

		line.value = rs_claim_fetch(i, 1, lines->type, &isnull);
		due = DatumGetTimestampTz(rs_claim_fetch(i, 2, TIMESTAMPTZOID, &isnull));
		if (i == found - 1)
		{
			MemoryContextReset(lines->cursor_context);
			lines->cursor = copy_line(lines, &line, lines->cursor_context).value;
			lines->has_cursor = true;
		}
		if (due > now)
			note_due(engine, due);
		else if (!is_of_dead_letters(engine->subscription, line.value))
			add_line(lines, lines->ahead, &line);
		if (!lines->byval)
			pfree(DatumGetPointer(line.value));
	}
	SPI_freetuptable(SPI_tuptable);
	if (found < PORTION)
		lines->has_cursor = false;
	return found < PORTION;
}

/* ----------------------------------------------------------- which line is next */

/* What is looked for: deliveries, or a candidate. */
typedef struct Search
{
	RsEngine *engine;
	RsDelivery *deliveries;
	RsCandidate *candidate;
	int limit;
	int found;
} Search;

static bool
try_line(Search *search, const Line *line)
{
	RsLines *lines = lines_of(search->engine);
	int found;

	if (search->candidate != NULL)
		found = find_candidate(search->engine, line, search->candidate);
	else
		found = claim_line(search->engine, line, &search->deliveries[search->found],
						   search->limit - search->found);
	search->found += found;
	if (found > 0 && search->candidate == NULL)
		add_line(lines, lines->claimed, line);
	return found > 0;
}

/* The lines of a list, in their order. */
static void
try_list(Search *search, LineList *list, bool remembers)
{
	RsLines *lines = lines_of(search->engine);

	while (search->found < search->limit && list->next < list->count)
	{
		const Line *line = &list->line[list->next++];

		if (try_line(search, line) && remembers)
			remember_line(lines, line);
	}
}

/* The lines that were served last, each in its turn. */
static void
try_known(Search *search)
{
	RsEngine *engine = search->engine;
	RsLines *lines = lines_of(engine);
	bool was_blocked = engine->was_blocked;

	for (int left = lines->known_count; left > 0 && search->found < search->limit; left--)
	{
		int index = lines->turn++ % lines->known_count;

		engine->was_blocked = false;
		if (!try_line(search, &lines->known[index]) && !engine->was_blocked)
		{
			/* The one that takes its place comes next. */
			forget_line(lines, index);
			lines->turn = index;
		}
		was_blocked |= engine->was_blocked;
	}
	engine->was_blocked = was_blocked;
}

static void
try_lines(Search *search)
{
	RsEngine *engine = search->engine;
	RsLines *lines = lines_of(engine);
	bool whole = false;

	try_list(search, lines->ahead, true);
	if (search->found > 0)
		return;

	/* A portion further, unless the last one came to nothing. */
	if (lines->rest > 0)
		lines->rest--;
	else
	{
		bool begins = !lines->has_cursor;

		whole = walk_on(engine) && begins;
		try_list(search, lines->ahead, true);
		lines->rest = search->found > 0 ? 0 : REST;
	}
	if (search->found == 0)
		try_known(search);
	if (search->found > 0 || whole)
		return;

	/* All the way around. */
	lines->has_cursor = false;
	lines->rest = 0;
	do
	{
		CHECK_FOR_INTERRUPTS();
		whole = walk_on(engine);
		try_list(search, lines->ahead, true);
	} while (search->found == 0 && !whole);
}

/*
 * The lines of the first rows that are due, in their order.  Returns how many rows
 * there were: 0 says that none is due.
 */
static int
try_in_order(Search *search)
{
	RsEngine *engine = search->engine;
	RsLines *lines = lines_of(engine);
	RsCandidate candidates[RS_MAX_CANDIDATES];
	Line tried[RS_MAX_CANDIDATES];
	int count = rs_claim_candidates(engine, false, candidates, RS_MAX_CANDIDATES);

	engine->is_alone = true;
	for (int i = 0; i < count; i++)
	{
		bool again = false;

		tried[i] = (Line){.isnull = !candidates[i].has_line, .value = candidates[i].line};
		for (int j = 0; j < i && !again; j++)
			again = is_same(lines, &tried[j], &tried[i]);
		if (!again && search->found < search->limit)
			(void) try_line(search, &tried[i]);
		/* Of another line than what is claimed: that is for somebody else. */
		if (i > 0 && (!again || tried[i].isnull))
			engine->is_alone = false;
	}
	return count;
}

/* -------------------------------------------------------------------- the claim */

static int
claim_group(RsEngine *engine, RsDelivery *delivery)
{
	Line line = {.value = CStringGetTextDatum(engine->subscription->group_name)};

	engine->is_alone = true;
	return claim_line(engine, &line, delivery, 1);
}

static void
search_keys(Search *search)
{
	RsEngine *engine = search->engine;
	TimestampTz first;
	RsValues values;

	if (try_in_order(search) == 0 || search->found > 0)
		return;
	try_lines(search);
	if (search->found > 0)
		return;
	/* A key that is busy may be free before some row comes due, or after. */
	first = engine->next_due;
	rs_claim_values(engine, 1, &values);
	rs_claim_look_ahead(engine, &values);
	note_due(engine, first);
}

int
rs_claim_lines(RsEngine *engine, RsDelivery *deliveries, int limit)
{
	RsLines *lines = lines_of(engine);
	Search search = {.engine = engine, .deliveries = deliveries, .limit = limit};

	/* As many rows are left alone as can be: another might fail as well. */
	(void) rs_claim_held_until(engine);
	if (engine->held_count == RS_MAX_HELD)
		return 0;

	if (rs_table_lines(&engine->subscription->queue.table) == RS_LINES_GROUP &&
		!engine->subscription->every_group)
		return claim_group(engine, deliveries);

	/* To renew the snapshot is to give back what was claimed before. */
	if (IsolationUsesXactSnapshot())
		search.limit = Min(limit, 1);
	empty_list(lines->claimed);
	try_list(&search, lines->again, false);
	if (search.found > 0)
		engine->is_alone = false;
	else if (!engine->subscription->every_group)
		search_keys(&search);
	else
	{
		try_lines(&search);
		engine->is_alone = lines->ahead->next == lines->ahead->count;
	}
	return search.found;
}

void
rs_lines_again(RsEngine *engine)
{
	RsLines *lines = engine->lines;
	LineList *list;

	if (lines == NULL || lines->claimed->count == 0)
		return;
	list = lines->again;
	/* Behind them those that were to come anyhow; what finds no room waits for its turn. */
	for (int i = list->next; i < list->count && lines->claimed->count < RS_MAX_GUARDS; i++)
		add_line(lines, lines->claimed, &list->line[i]);
	lines->again = lines->claimed;
	lines->claimed = list;
	empty_list(list);
}

bool
rs_lines_candidate(RsEngine *engine, RsCandidate *candidate)
{
	Search search = {.engine = engine, .candidate = candidate, .limit = 1};

	try_lines(&search);
	return search.found > 0;
}
