/*-------------------------------------------------------------------------
 *
 * driver_postgres_claim.c
 *	  The PostgreSQL driver: claims of FIFO groups and partition keys.
 *
 * The rows of a FIFO group, or of one partition key, stand in a line: they go one at a time.
 *Whoever takes one holds the line's guard, which ends with the transaction (contract.md, section
 *7), and reads the line's head only then, so that it sees what the holder before it has committed:
 *
 *	SELECT pg_try_advisory_xact_lock(hashtextextended('jobs:' || group, 0))
 *	   AND pg_try_advisory_xact_lock(hashtextextended('public.jobs:' || group, 0))
 *	SELECT .. FROM jobs WHERE id = (.. the first unfinished row of the group, if it is due ..)
 *	   AND .. FOR UPDATE SKIP LOCKED
 *
 * A partition key has the guard 'public.jobs:key:' || key, and its head is the first row that is
 * due. Which key comes next is looked for among the rows that are due, in claim order, past keys
 * that are guarded now.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_postgres.h"

#include <stdio.h>
#include <string.h>

/* How many keys are tried in one claim: others may be quicker at each of them. */
#define MAX_KEYS 16

/* ------------------------------------------------------------------- texts */

/* A name in quotes. */
static const char *
quoted(rs_arena *arena, const char *name)
{
	char *text = rs_alloc(arena, 2 * strlen(name) + 3);
	char *out = text;

	if (text == NULL)
		return "";
	*out++ = '"';
	for (; *name != '\0'; name++)
	{
		if (*name == '"')
			*out++ = '"';
		*out++ = *name;
	}
	*out++ = '"';
	return text;
}

/* " AND ruststream_row.column condition"; nothing where no column plays the role. */
static const char *
condition(rs_arena *arena, const rs_table *table, rs_role role, const char *format)
{
	const char *name = table->column[role] != NULL ? quoted(arena, table->column[role]) : NULL;

	return name != NULL ? rs_print(arena, format, name, name) : "";
}

#define UNPROCESSED " AND ruststream_row.%s IS NULL"
#define OF_GROUP " AND ruststream_row.%s OPERATOR(pg_catalog.=) $1"
#define DUE " AND (ruststream_row.%s IS NULL OR ruststream_row.%s OPERATOR(pg_catalog.<=) $2)"
#define LEASED " AND ruststream_leased.%s OPERATOR(pg_catalog.>) $2"

/* What the texts of one table share. */
typedef struct pieces
{
	const char *from; /* ONLY "schema"."table" */
	const char *id;
	const char *row;   /* id, attempt, headers, payload, as a claim returns them */
	const char *ours;  /* unprocessed rows of the group */
	const char *due;   /* .. that are due */
	const char *order; /* claim order */
	const char *line;  /* the line's column */
} pieces;

static pieces
pieces_of(rs_arena *arena, const rs_table *table)
{
	const char *const *column = table->column;
	pieces result = {
		.from = rs_print(arena, "%s%s.%s", table->only ? "ONLY " : "", quoted(arena, table->schema),
						 quoted(arena, table->name)),
		.id = quoted(arena, column[RS_ROLE_ID]),
		.due = condition(arena, table, RS_ROLE_RETRY_AFTER, DUE),
		.line = quoted(arena, column[table->fifo ? RS_ROLE_GROUP : RS_ROLE_PARTITION_KEY]),
	};

	result.row =
		rs_print(arena, "ruststream_row.%s, %s%s%s::pg_catalog.int8, %s%s, ruststream_row%s%s",
				 result.id, column[RS_ROLE_ATTEMPT] != NULL ? "COALESCE(ruststream_row." : "1",
				 column[RS_ROLE_ATTEMPT] != NULL ? quoted(arena, column[RS_ROLE_ATTEMPT]) : "",
				 column[RS_ROLE_ATTEMPT] != NULL ? ", 1)" : "",
				 column[RS_ROLE_HEADERS] != NULL ? "ruststream_row." : "NULL::pg_catalog.jsonb",
				 column[RS_ROLE_HEADERS] != NULL ? quoted(arena, column[RS_ROLE_HEADERS]) : "",
				 column[RS_ROLE_PAYLOAD] != NULL ? "." : "",
				 column[RS_ROLE_PAYLOAD] != NULL ? quoted(arena, column[RS_ROLE_PAYLOAD]) : "");
	result.ours = rs_print(arena, "%s AND ($2::pg_catalog.timestamptz IS NOT NULL)%s",
						   table->column[RS_ROLE_GROUP] != NULL
							   ? condition(arena, table, RS_ROLE_GROUP, OF_GROUP)
							   : " AND $1::pg_catalog.text IS NOT NULL",
						   condition(arena, table, RS_ROLE_PROCESSED_AT, UNPROCESSED));
	result.order = rs_print(
		arena, " ORDER BY %s%s%s%sruststream_row.%s",
		column[RS_ROLE_PRIORITY] != NULL ? "ruststream_row." : "",
		column[RS_ROLE_PRIORITY] != NULL
			? rs_print(arena, "%s NULLS FIRST, ", quoted(arena, column[RS_ROLE_PRIORITY]))
			: "",
		column[RS_ROLE_RETRY_AFTER] != NULL ? "ruststream_row." : "",
		column[RS_ROLE_RETRY_AFTER] != NULL
			? rs_print(arena, "%s NULLS FIRST, ", quoted(arena, column[RS_ROLE_RETRY_AFTER]))
			: "",
		result.id);
	return result;
}

/* No row of the line has a live lease: " AND NOT EXISTS (..)". */
static const char *
line_is_free(rs_arena *arena, const rs_table *table, const pieces *of, const char *line)
{
	if (table->column[RS_ROLE_LOCKED_UNTIL] == NULL)
		return "";
	return rs_print(arena,
					" AND NOT EXISTS (SELECT 1 FROM %s AS ruststream_leased"
					" WHERE ruststream_leased.%s OPERATOR(pg_catalog.=) %s%s)",
					of->from, of->line, line,
					condition(arena, table, RS_ROLE_LOCKED_UNTIL, LEASED));
}

/* What is found is stamped in the lease form, and returned as it was before. */
static const char *
stamped(rs_arena *arena, const rs_table *table, const pieces *of, const char *find)
{
	const char *attempt = table->column[RS_ROLE_ATTEMPT];

	if (table->column[RS_ROLE_LOCKED_UNTIL] == NULL)
		return find;
	return rs_print(arena,
					"WITH ruststream_found (id, attempt, headers, input) AS MATERIALIZED (%s)"
					" UPDATE %s AS ruststream_row SET %s = $5%s FROM ruststream_found"
					" WHERE ruststream_row.%s OPERATOR(pg_catalog.=) ruststream_found.id"
					" RETURNING ruststream_found.*",
					find, of->from, quoted(arena, table->column[RS_ROLE_LOCKED_UNTIL]),
					attempt != NULL
						? rs_print(arena,
								   ", %s = COALESCE(ruststream_row.%s, 1) OPERATOR(pg_catalog.+) 1",
								   quoted(arena, attempt), quoted(arena, attempt))
						: "",
					of->id);
}

/* $1 the group, $2 now, $3 rows left alone, $4 the key, $5 the token. */
static const char *
head_text(rs_arena *arena, const rs_table *table, const pieces *of)
{
	const char *line = table->fifo ? "$1" : "$4";
	/* Each parameter is mentioned, so that the server knows its type. */
	const char *of_line =
		table->fifo ? " AND $4::pg_catalog.text IS NULL"
					: rs_print(arena, " AND ruststream_row.%s OPERATOR(pg_catalog.=) $4", of->line);
	const char *head = rs_print(
		arena, "(SELECT ruststream_row.%s FROM %s AS ruststream_row WHERE true%s%s%s%s LIMIT 1)",
		of->id, of->from, of->ours, of_line, table->fifo ? "" : of->due, of->order);

	return stamped(
		arena, table, of,
		rs_print(
			arena,
			"SELECT %s FROM %s AS ruststream_row WHERE ruststream_row.%s OPERATOR(pg_catalog.=) %s"
			"%s%s%s AND ruststream_row.%s OPERATOR(pg_catalog.<>) ALL ($3)%s"
			" FOR UPDATE SKIP LOCKED",
			of->row, of->from, of->id, head, of->ours, of_line, of->due, of->id,
			line_is_free(arena, table, of, line)));
}

/* A row that has no key stands in no line. */
static const char *
loose_text(rs_arena *arena, const rs_table *table, const pieces *of)
{
	const char *free = condition(arena, table, RS_ROLE_LOCKED_UNTIL, DUE);

	return stamped(
		arena, table, of,
		rs_print(arena,
				 "SELECT %s FROM %s AS ruststream_row WHERE ruststream_row.%s IS NULL%s%s%s"
				 " AND ruststream_row.%s OPERATOR(pg_catalog.<>) ALL ($3)"
				 " AND $4::pg_catalog.text IS NULL%s LIMIT 1 FOR UPDATE SKIP LOCKED",
				 of->row, of->from, of->line, of->ours, of->due, free, of->id, of->order));
}

/* The keys that other sessions guard, as hashes. */
#define GUARDED                                                                                    \
	"SELECT (k.classid::pg_catalog.int8 OPERATOR(pg_catalog.<<) 32)"                               \
	" OPERATOR(pg_catalog.|) k.objid::pg_catalog.int8 FROM pg_catalog.pg_locks AS k"               \
	" WHERE k.locktype OPERATOR(pg_catalog.=) 'advisory' AND k.granted"                            \
	" AND k.objsubid OPERATOR(pg_catalog.=) 1"                                                     \
	" AND k.database OPERATOR(pg_catalog.=) (SELECT d.oid FROM pg_catalog.pg_database AS d"        \
	" WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database())"                       \
	" AND k.pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid()"

/* The key of the first row that is due and could be had; $4 those that were tried. */
static const char *
key_text(rs_arena *arena, const rs_table *table, const pieces *of)
{
	const char *line = rs_print(arena, "ruststream_row.%s", of->line);

	return rs_print(
		arena,
		"SELECT %s::pg_catalog.text FROM %s AS ruststream_row WHERE true%s%s%s"
		" AND ruststream_row.%s OPERATOR(pg_catalog.<>) ALL ($3)"
		" AND (%s IS NULL OR (%s::pg_catalog.text OPERATOR(pg_catalog.<>) ALL "
		"($4::pg_catalog.text[])"
		" AND NOT pg_catalog.hashtextextended(pg_catalog.concat($5::pg_catalog.text, %s), 0)"
		" OPERATOR(pg_catalog.=) ANY (" GUARDED ")%s))%s LIMIT 1",
		line, of->from, of->ours, of->due, condition(arena, table, RS_ROLE_LOCKED_UNTIL, DUE),
		of->id, line, line, line, line_is_free(arena, table, of, line), of->order);
}

/* The texts of the worker's table, until its plan goes. */
static rs_result
have_texts(rs_postgres_session *session, const rs_table *table)
{
	rs_arena *arena = &session->line_arena;
	pieces of;

	if (session->head != NULL)
		return RS_DONE;
	rs_arena_reset(arena);
	of = pieces_of(arena, table);
	session->head = head_text(arena, table, &of);
	if (!table->fifo)
	{
		session->loose = loose_text(arena, table, &of);
		session->key = key_text(arena, table, &of);
	}
	if (!arena->is_exhausted)
		return RS_DONE;
	session->head = NULL;
	return rs_postgres_no_memory(session);
}

/* ------------------------------------------------------------------- guards */

static bool
read_yes(void *arg, const rs_value *columns, int count)
{
	(void) count;
	*(bool *) arg = columns[0].kind == RS_INTEGER && columns[0].integer != 0;
	return false;
}

/* Both names, so that the guard is the same whether a client writes the schema or not. */
static rs_result
guard_group(rs_session *base, const rs_table *table, const char *group, bool *guarded)
{
	static const rs_command command = {
		.text = "SELECT pg_catalog.pg_try_advisory_xact_lock("
				"pg_catalog.hashtextextended(pg_catalog.concat($2::pg_catalog.text, ':', "
				"$3::pg_catalog.text), 0))"
				" AND pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended("
				"pg_catalog.concat($1::pg_catalog.text, '.', $2::pg_catalog.text, ':', "
				"$3::pg_catalog.text), 0))",
		.slot = RS_SLOT_GUARD};
	const rs_value values[] = {rs_value_of_text(table->schema), rs_value_of_text(table->name),
							   rs_value_of_text(group)};

	return rs_postgres_execute(base, &command, values, 3, read_yes, guarded, NULL);
}

static rs_result
guard_key(rs_session *base, const char *prefix, const char *key, bool *guarded)
{
	static const rs_command command = {
		.text = "SELECT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended("
				"pg_catalog.concat($1::pg_catalog.text, $2::pg_catalog.text), 0))",
		.slot = RS_SLOT_GUARD};
	const rs_value values[] = {rs_value_of_text(prefix), rs_value_of_text(key)};

	return rs_postgres_execute(base, &command, values, 2, read_yes, guarded, NULL);
}

/* ------------------------------------------------------------------- claims */

typedef struct found
{
	rs_row_callback row;
	void *arg;
	bool any;
} found;

static bool
hand_over(void *arg, const rs_value *columns, int count)
{
	found *into = arg;

	into->any = true;
	return into->row(into->arg, columns, count);
}

/* Take the head of a line, or a row that is in none. */
static rs_result
take(rs_session *base, const char *text, int slot, const rs_value *values, const rs_value *key,
	 found *into)
{
	const rs_command command = {.text = text, .slot = slot, .parameters = {[2] = RS_PARAM_HELD}};
	const rs_value bound[] = {values[RS_PARAM_GROUP], values[RS_PARAM_NOW], RS_VALUE_NULL, *key,
							  values[RS_PARAM_TOKEN]};
	bool is_lease = values[RS_PARAM_TOKEN].kind != RS_NULL;

	return rs_postgres_execute(base, &command, bound, is_lease ? 5 : 4, hand_over, into, NULL);
}

typedef struct next_key
{
	rs_arena *arena;
	bool any;
	const char *key; /* NULL: the row has none */
} next_key;

static bool
read_key(void *arg, const rs_value *columns, int count)
{
	next_key *into = arg;

	(void) count;
	into->any = true;
	into->key = columns[0].kind == RS_TEXT
					? rs_copy_bytes(into->arena, columns[0].text, columns[0].length)
					: NULL;
	return false;
}

/* The keys that were tried, as the text of an array. */
static const char *
tried_too(rs_arena *arena, const char *tried, const char *key)
{
	rs_value value = rs_value_of_text(key);
	char *copy = rs_alloc(arena, 2 * value.length + 1);
	char *out = copy;
	size_t length = strlen(tried);

	if (copy == NULL)
		return tried;
	for (; *key != '\0'; key++)
	{
		if (*key == '"' || *key == '\\')
			*out++ = '\\';
		*out++ = *key;
	}
	return rs_print(arena, "%.*s%s\"%s\"}", (int) length - 1, tried, length > 2 ? "," : "", copy);
}

static rs_result
claim_of_keys(rs_session *base, const rs_plan *plan, const rs_value *values, found *into)
{
	rs_postgres_session *session = rs_postgres_of(base);
	rs_arena arena = {0};
	const char *prefix = rs_print(&arena, "%s.%s:key:", plan->table.schema, plan->table.name);
	const char *tried = "{}";
	rs_result result = RS_DONE;

	for (int i = 0; i < MAX_KEYS && result == RS_DONE && !into->any; i++)
	{
		const rs_command command = {
			.text = session->key, .slot = RS_SLOT_KEY, .parameters = {[2] = RS_PARAM_HELD}};
		const rs_value bound[] = {values[RS_PARAM_GROUP], values[RS_PARAM_NOW], RS_VALUE_NULL,
								  rs_value_of_text(tried), rs_value_of_text(prefix)};
		next_key next = {.arena = &arena};
		bool guarded = false;
		rs_value key;

		result = rs_postgres_execute(base, &command, bound, 5, read_key, &next, NULL);
		if (result != RS_DONE || !next.any)
			break;
		key = rs_value_of_text(next.key);
		if (next.key == NULL)
		{
			/* Rows without a key are taken one by one, past those that others have locked. */
			result = take(base, session->loose, RS_SLOT_LOOSE, values, &key, into);
			break;
		}
		result = guard_key(base, prefix, next.key, &guarded);
		if (result == RS_DONE && guarded)
			result = take(base, session->head, RS_SLOT_HEAD, values, &key, into);
		tried = tried_too(&arena, tried, next.key);
	}
	if (arena.is_exhausted)
		result = rs_postgres_no_memory(session);
	rs_arena_free(&arena);
	return result;
}

static rs_result
claim_of_group(rs_session *base, const rs_plan *plan, const rs_value *values, found *into)
{
	rs_postgres_session *session = rs_postgres_of(base);
	const rs_value no_key = RS_VALUE_NULL;
	bool guarded = false;
	rs_result result = guard_group(base, &plan->table, plan->subscription.group_name, &guarded);

	if (result != RS_DONE || !guarded)
		return result;
	return take(base, session->head, RS_SLOT_HEAD, values, &no_key, into);
}

rs_result
rs_postgres_claim(rs_session *base, struct rs_plan *plan, rs_value *values, rs_row_callback row,
				  void *arg)
{
	const rs_table *table = &plan->table;
	found into = {.row = row, .arg = arg};
	rs_result result;

	if (!table->fifo && table->column[RS_ROLE_PARTITION_KEY] == NULL)
		return rs_plan_run(base, plan,
						   table->column[RS_ROLE_PAYLOAD] != NULL ? RS_OP_CLAIM_PAYLOAD
																  : RS_OP_CLAIM_ROW,
						   0, values, row, arg, NULL);
	result = have_texts(rs_postgres_of(base), table);
	if (result != RS_DONE)
		return result;
	return table->fifo ? claim_of_group(base, plan, values, &into)
					   : claim_of_keys(base, plan, values, &into);
}
