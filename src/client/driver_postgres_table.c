/*-------------------------------------------------------------------------
 *
 * driver_postgres_table.c
 *	  The PostgreSQL driver: looking at a table.
 *
 * What may be a queue, and which types its columns may have, is the same as for the extension
 * (src/backend/bind.c).
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_postgres.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct looking
{
	rs_session *base;
	rs_arena *arena;
	rs_look *look;
	const rs_table *table;
	char oid[16];
	char kind;
	bool answer; /* of a question */
	rs_result result;
} looking;

static rs_result
ask(looking *at, const char *text, const rs_value *values, int count, rs_row_callback row)
{
	const rs_command command = {.text = text, .slot = -1, .parameter_count = count};
	rs_result result = rs_postgres_execute(at->base, &command, values, count, row, at, NULL);

	return result == RS_DONE ? at->result : result;
}

static bool
refuse(looking *at, const char *hint, const char *format, const char *column, const char *role,
	   const char *type)
{
	char message[512];

	(void) snprintf(message, sizeof(message), format, column, at->look->name, role, type);
	rs_error_set(&at->base->error, RUSTSTREAM_REFUSED, "42804", hint, "%s", message);
	at->result = RS_FAILED;
	return false;
}

/* ---------------------------------------------------------------- columns */

#define MAX_TYPES 6
#define INTEGERS RS_OID_INT2, RS_OID_INT4, RS_OID_INT8
#define TEXTS RS_OID_TEXT, RS_OID_VARCHAR

/* The types a role's column may have, domains over them included; none: any. */
typedef struct role_rule
{
	Oid types[MAX_TYPES];
	const char *hint;
	bool is_settled; /* settlements write it */
	bool is_cleared; /* NULL means something */
} role_rule;

static const role_rule rules[RS_ROLE_COUNT] = {
	[RS_ROLE_ID] = {{INTEGERS, RS_OID_UUID, TEXTS},
					"An id is of type smallint, integer, bigint, uuid, text or varchar.",
					false,
					false},
	[RS_ROLE_GROUP] = {{TEXTS}, "A group is of type text or varchar.", true, false},
	[RS_ROLE_PRIORITY] = {{INTEGERS},
						  "A priority is of type smallint, integer or bigint.",
						  false,
						  false},
	[RS_ROLE_PARTITION_KEY] = {{INTEGERS, RS_OID_UUID, TEXTS},
							   "A partition key is of an integer type, uuid, text or varchar.",
							   false,
							   false},
	[RS_ROLE_RETRY_AFTER] = {{RS_OID_TIMESTAMPTZ},
							 "This role needs a column of type timestamp with time zone.",
							 true,
							 false},
	[RS_ROLE_ATTEMPT] = {{INTEGERS},
						 "An attempt is of type smallint, integer or bigint.",
						 true,
						 false},
	[RS_ROLE_PROCESSED_AT] = {{RS_OID_TIMESTAMPTZ},
							  "This role needs a column of type timestamp with time zone.",
							  true,
							  true},
	[RS_ROLE_LOCKED_UNTIL] = {{RS_OID_TIMESTAMPTZ},
							  "This role needs a column of type timestamp with time zone.",
							  true,
							  true},
	[RS_ROLE_HEADERS] = {{RS_OID_JSONB, RS_OID_JSON},
						 "Headers are of type jsonb or json.",
						 false,
						 false},
};

static const Oid lock_key_types[MAX_TYPES + 1] = {INTEGERS, RS_OID_UUID, TEXTS, RS_OID_BOOL};

static bool
is_among(Oid type, const Oid *types, int count)
{
	for (int i = 0; i < count; i++)
	{
		if (types[i] == type)
			return true;
	}
	return false;
}

/* What there is to say of a column that plays a role. */
static bool
check_role(looking *at, rs_role role, const rs_column *column, Oid type, int64_t precision,
		   bool is_always_identity)
{
	const role_rule *rule = &rules[role];
	const char *word = rs_role_word(role);

	if (rule->types[0] != 0 && !is_among(type, rule->types, MAX_TYPES))
		return refuse(
			at, rule->hint,
			type == RS_OID_TIMESTAMP
				? "column \"%s\" of table \"%s\" cannot be the %s column: it is of type %s, and "
				  "what it says depends on the time zone of whoever reads it"
				: "column \"%s\" of table \"%s\" cannot be the %s column: it is of type %s",
			column->name, word, column->type);
	if (role == RS_ROLE_LOCKED_UNTIL && precision >= 0 && precision < 6)
		return refuse(
			at,
			"This role needs a column of type timestamp with time zone, without a "
			"precision: a lease is known by its exact time.",
			"column \"%s\" of table \"%s\" cannot be the %s column: it is of type %s, which "
			"rounds",
			column->name, word, column->type);
	if (rule->is_settled && (column->is_generated || is_always_identity))
		return refuse(at, "This role needs a column that can be written.",
					  "column \"%s\" of table \"%s\" cannot be the %s column: it is generated (%s)",
					  column->name, word, column->type);
	if (rule->is_cleared && !column->is_nullable)
		return refuse(at, "Let the column be NULL: ALTER TABLE .. ALTER COLUMN .. DROP NOT NULL.",
					  "column \"%s\" of table \"%s\" cannot be the %s column: it is NOT NULL (%s)",
					  column->name, word, column->type);
	return true;
}

/* The columns of a lock key: the text of other types depends on settings. */
static bool
check_key_column(looking *at, const rs_column *column, Oid type)
{
	const char *start;
	size_t length;

	for (int n = 0;
		 at->table->lock_key != NULL && rs_key_column(at->table->lock_key, n, &start, &length); n++)
	{
		if (strlen(column->name) == length && memcmp(column->name, start, length) == 0 &&
			!is_among(type, lock_key_types, MAX_TYPES + 1))
			return refuse(
				at,
				"The columns of a lock key are integers, text, uuid or boolean: the text "
				"of other types depends on settings.",
				"column \"%s\" of table \"%s\" cannot be part of the %s: it is of type %s",
				column->name, "lock key", column->type);
	}
	return true;
}

/* name, type as declared, is generated, NOT NULL, type or a domain's, precision, identity always */
static bool
keep_column(void *arg, const rs_value *values, int count)
{
	looking *at = arg;
	rs_column *column = rs_look_add(at->look, at->arena, &values[0], &values[1]);
	Oid type = (Oid) values[4].integer;

	(void) count;
	if (column == NULL)
		return false;
	column->is_generated = values[2].integer != 0;
	column->is_nullable = values[3].integer == 0;
	for (int role = 0; role < RS_ROLE_COUNT; role++)
	{
		const char *name = at->table->column[role];

		if (name == NULL || strcmp(name, column->name) != 0)
			continue;
		if (!check_role(at, (rs_role) role, column, type, values[5].integer,
						values[6].integer != 0))
			return false;
		if (role == RS_ROLE_PAYLOAD)
			at->look->payload_is_bytes = type == RS_OID_BYTEA;
		if (role == RS_ROLE_HEADERS)
			at->look->headers_are_json = type == RS_OID_JSON;
	}
	return check_key_column(at, column, type);
}

#define COLUMNS                                                                                    \
	"SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod),"                           \
	" a.attgenerated OPERATOR(pg_catalog.<>) '', a.attnotnull,"                                    \
	" (WITH RECURSIVE b (oid) AS (SELECT a.atttypid UNION ALL SELECT t.typbasetype"                \
	" FROM b JOIN pg_catalog.pg_type AS t ON t.oid OPERATOR(pg_catalog.=) b.oid"                   \
	" WHERE t.typtype OPERATOR(pg_catalog.=) 'd')"                                                 \
	" SELECT t.oid::pg_catalog.int8 FROM b"                                                        \
	" JOIN pg_catalog.pg_type AS t ON t.oid OPERATOR(pg_catalog.=) b.oid"                          \
	" WHERE t.typtype OPERATOR(pg_catalog.<>) 'd'),"                                               \
	" a.atttypmod, a.attidentity OPERATOR(pg_catalog.=) 'a'"                                       \
	" FROM pg_catalog.pg_attribute AS a"                                                           \
	" WHERE a.attrelid OPERATOR(pg_catalog.=) $1::pg_catalog.oid"                                  \
	" AND a.attnum OPERATOR(pg_catalog.>) 0 AND NOT a.attisdropped ORDER BY a.attnum"

/* ---------------------------------------------------------------- indexes */

/* Indexes that queries may use, whose keys are columns of default order and collation. */
#define INDEXES                                                                                    \
	" FROM pg_catalog.pg_index AS i"                                                               \
	" JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) i.indexrelid"                  \
	" JOIN pg_catalog.pg_am AS m ON m.oid OPERATOR(pg_catalog.=) c.relam"                          \
	" WHERE i.indrelid OPERATOR(pg_catalog.=) $1::pg_catalog.oid"                                  \
	" AND i.indisvalid AND i.indisready AND i.indislive"                                           \
	" AND m.amname OPERATOR(pg_catalog.=) 'btree'"                                                 \
	" AND NOT EXISTS (SELECT 1 FROM pg_catalog.unnest(i.indclass::pg_catalog.oid[]) AS k (oid)"    \
	" JOIN pg_catalog.pg_opclass AS o ON o.oid OPERATOR(pg_catalog.=) k.oid"                       \
	" WHERE NOT o.opcdefault"                                                                      \
	" AND o.opcname OPERATOR(pg_catalog.<>) ALL ('{text_ops,varchar_ops}'::pg_catalog.name[]))"
#define KEY_NAMES                                                                                  \
	"ARRAY(SELECT a.attname::pg_catalog.text"                                                      \
	" FROM pg_catalog.generate_series(0, i.indnkeyatts OPERATOR(pg_catalog.-) 1) AS n"             \
	" LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid OPERATOR(pg_catalog.=) i.indrelid"      \
	" AND a.attnum OPERATOR(pg_catalog.=) i.indkey[n]"                                             \
	" AND a.attcollation OPERATOR(pg_catalog.=) i.indcollation[n]"                                 \
	" AND (a.attname OPERATOR(pg_catalog.=) $3 OR i.indoption[n] OPERATOR(pg_catalog.=)"           \
	" CASE WHEN a.attname OPERATOR(pg_catalog.=) ANY ($4::pg_catalog.text[]) THEN 2 ELSE 0 END)"   \
	" ORDER BY n)"

/*
 * $1 the table, $2 the keys, $3 the group, $4 those of them that have NULL first, $5 the column of
 * the condition, and $6 how that is
 */
#define IS_THERE                                                                                   \
	"SELECT EXISTS (SELECT 1" INDEXES " AND " KEY_NAMES                                            \
	" OPERATOR(pg_catalog.=) $2::pg_catalog.text[]"                                                \
	" AND CASE WHEN $5::pg_catalog.text IS NULL THEN i.indpred IS NULL"                            \
	" ELSE pg_catalog.pg_get_expr(i.indpred, i.indrelid) OPERATOR(pg_catalog.=)"                   \
	" pg_catalog.format($6::pg_catalog.text, $5::pg_catalog.text) END)"

/* $1 the table, $2 the id */
#define IS_UNIQUE                                                                                  \
	"SELECT EXISTS (SELECT 1" INDEXES                                                              \
	" AND i.indisunique AND i.indimmediate AND i.indpred IS NULL"                                  \
	" AND i.indnkeyatts OPERATOR(pg_catalog.=) 1"                                                  \
	" AND (SELECT a.attname FROM pg_catalog.pg_attribute AS a"                                     \
	" WHERE a.attrelid OPERATOR(pg_catalog.=) i.indrelid"                                          \
	" AND a.attnum OPERATOR(pg_catalog.=) i.indkey[0]) OPERATOR(pg_catalog.=) $2)"

static bool
keep_answer(void *arg, const rs_value *values, int count)
{
	looking *at = arg;

	(void) count;
	at->answer = values[0].integer != 0;
	return false;
}

/* The columns as an array, which is how its text is read. */
static char *
array_of(looking *at, const rs_role *roles, int count)
{
	char *text = rs_copy(at->arena, "{");

	for (int i = 0; i < count && text != NULL; i++)
	{
		const char *name = at->table->column[roles[i]];
		char *quoted = rs_alloc(at->arena, 2 * strlen(name) + 1);
		char *out = quoted;

		if (quoted == NULL)
			return NULL;
		for (; *name != '\0'; name++)
		{
			if (*name == '"' || *name == '\\')
				*out++ = '\\';
			*out++ = *name;
		}
		text = rs_print(at->arena, "%s%s\"%s\"", text, i > 0 ? "," : "", quoted);
	}
	return text != NULL ? rs_print(at->arena, "%s}", text) : NULL;
}

static rs_result
look_for_index(looking *at, rs_index index)
{
	const char *const *column = at->table->column;
	rs_role roles[RS_ROLE_COUNT];
	rs_role nulls_first[RS_ROLE_COUNT];
	int count = rs_index_columns(at->table, index, roles);
	int nulls_first_count = 0;
	rs_result result;

	for (int i = 0; i < count; i++)
	{
		if (roles[i] == RS_ROLE_PRIORITY || roles[i] == RS_ROLE_RETRY_AFTER)
			nulls_first[nulls_first_count++] = roles[i];
	}
	const rs_value values[] = {
		rs_value_of_text(at->oid),
		rs_value_of_text(array_of(at, roles, count)),
		rs_value_of_text(column[RS_ROLE_GROUP] != NULL ? column[RS_ROLE_GROUP] : ""),
		rs_value_of_text(array_of(at, nulls_first, nulls_first_count)),
		rs_value_of_text(
			column[index == RS_INDEX_LEASE ? RS_ROLE_LOCKED_UNTIL : RS_ROLE_PROCESSED_AT]),
		rs_value_of_text(index == RS_INDEX_LEASE ? "(%I IS NOT NULL)" : "(%I IS NULL)"),
	};

	result = ask(at, IS_THERE, values, 6, keep_answer);
	at->look->has_index[index] = at->answer;
	return result;
}

static rs_result
look_at_indexes(looking *at)
{
	const rs_value id[] = {rs_value_of_text(at->oid),
						   rs_value_of_text(at->table->column[RS_ROLE_ID])};
	rs_result result = ask(at, IS_UNIQUE, id, 2, keep_answer);

	at->look->id_is_unique = at->answer;
	for (int i = 0; i < RS_INDEX_COUNT && result == RS_DONE; i++)
	{
		if (rs_index_is_needed(RS_DIALECT_POSTGRESQL, at->table, (rs_index) i))
			result = look_for_index(at, (rs_index) i);
	}
	return result;
}

/* --------------------------------------------------------------- the table */

/* oid, kind, schema, name, as our tables have it */
static bool
keep_table(void *arg, const rs_value *values, int count)
{
	looking *at = arg;

	(void) count;
	(void) snprintf(at->oid, sizeof(at->oid), "%lld", (long long) values[0].integer);
	at->kind = values[1].text[0];
	at->look->schema = rs_text_of(at->arena, &values[2]);
	at->look->name = rs_text_of(at->arena, &values[3]);
	at->look->full_name = rs_text_of(at->arena, &values[4]);
	return false;
}

#define TABLE                                                                                      \
	"SELECT c.oid::pg_catalog.int8, c.relkind::pg_catalog.text, n.nspname, c.relname,"             \
	" pg_catalog.format('%I.%I', n.nspname, c.relname)"                                            \
	" FROM pg_catalog.pg_class AS c"                                                               \
	" JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace"            \
	" WHERE c.oid OPERATOR(pg_catalog.=) pg_catalog.to_regclass($1)"

rs_result
rs_postgres_look(rs_session *base, const rs_table *table, rs_arena *arena, rs_look *look)
{
	looking at = {.base = base, .arena = arena, .look = look, .table = table, .result = RS_DONE};
	rs_value value = rs_value_of_text(table->name);
	rs_result result;

	memset(look, 0, sizeof(*look));
	result = ask(&at, TABLE, &value, 1, keep_table);
	if (result != RS_DONE)
		return result;
	if (at.oid[0] == '\0')
	{
		rs_error_set(&base->error, RUSTSTREAM_NOT_FOUND, "42P01",
					 "Write it with its schema, if that is not in the search path.",
					 "there is no table \"%s\"", table->name);
		return RS_FAILED;
	}
	if (at.kind != 'r' && at.kind != 'p')
	{
		rs_error_set(&base->error, RUSTSTREAM_REFUSED, "42809", NULL,
					 "\"%s\" is not a table, as a queue must be", table->name);
		return RS_FAILED;
	}
	look->only = at.kind == 'r';
	value = rs_value_of_text(at.oid);
	result = ask(&at, COLUMNS, &value, 1, keep_column);
	if (result == RS_DONE)
		result = look_at_indexes(&at);
	return result == RS_DONE && arena->is_exhausted ? rs_postgres_no_memory(rs_postgres_of(base))
													: result;
}
