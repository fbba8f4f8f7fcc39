/*-------------------------------------------------------------------------
 *
 * core_test.c
 *	  Print what the core decides and words, one section a run, so that the
 *	  golden files in expected/ can be read against the contract.
 *
 *	  core_test lanes | settle | statement | problem | key | isolation |
 *				backoff | buffer | time | statement_sqlite
 *
 *-------------------------------------------------------------------------
 */
#include "core.h"

#include <stdio.h>
#include <string.h>

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* ------------------------------------------------------- descriptions */

typedef struct named_table
{
	const char *label;
	rs_table table;
} named_table;

static const named_table tables[] = {
	{"minimal: an id only", {.schema = "public", .name = "jobs", .column = {[RS_ROLE_ID] = "id"}}},
	{"everything but processed_at, read with ONLY",
	 {.schema = "app",
	  .name = "email_jobs",
	  .column = {[RS_ROLE_ID] = "id",
				 [RS_ROLE_GROUP] = "group_name",
				 [RS_ROLE_PRIORITY] = "priority",
				 [RS_ROLE_PARTITION_KEY] = "partition_key",
				 [RS_ROLE_RETRY_AFTER] = "retry_after",
				 [RS_ROLE_ATTEMPT] = "attempt",
				 [RS_ROLE_HEADERS] = "headers",
				 [RS_ROLE_PAYLOAD] = "payload"},
	  .only = true}},
	{"everything, processed rows kept",
	 {.schema = "app",
	  .name = "kept_jobs",
	  .column = {[RS_ROLE_ID] = "id",
				 [RS_ROLE_GROUP] = "group_name",
				 [RS_ROLE_PRIORITY] = "priority",
				 [RS_ROLE_PARTITION_KEY] = "partition_key",
				 [RS_ROLE_RETRY_AFTER] = "retry_after",
				 [RS_ROLE_ATTEMPT] = "attempt",
				 [RS_ROLE_PROCESSED_AT] = "processed_at",
				 [RS_ROLE_HEADERS] = "headers",
				 [RS_ROLE_PAYLOAD] = "payload"}}},
	{"priorities and delays",
	 {.schema = "app",
	  .name = "level_jobs",
	  .column = {[RS_ROLE_ID] = "id",
				 [RS_ROLE_GROUP] = "group_name",
				 [RS_ROLE_PRIORITY] = "priority",
				 [RS_ROLE_RETRY_AFTER] = "retry_after",
				 [RS_ROLE_ATTEMPT] = "attempt",
				 [RS_ROLE_PAYLOAD] = "payload"}}},
	{"fifo",
	 {.schema = "app",
	  .name = "fifo_jobs",
	  .column = {[RS_ROLE_ID] = "id",
				 [RS_ROLE_GROUP] = "group_name",
				 [RS_ROLE_PRIORITY] = "priority",
				 [RS_ROLE_RETRY_AFTER] = "retry_after",
				 [RS_ROLE_PROCESSED_AT] = "processed_at",
				 [RS_ROLE_PAYLOAD] = "payload"},
	  .fifo = true,
	  .only = true}},
	{"fifo, nothing else",
	 {.schema = "app",
	  .name = "fifo_jobs",
	  .column = {[RS_ROLE_ID] = "id", [RS_ROLE_GROUP] = "group_name"},
	  .fifo = true}},
	{"fifo, lease",
	 {.schema = "app",
	  .name = "fifo_jobs",
	  .column = {[RS_ROLE_ID] = "id",
				 [RS_ROLE_GROUP] = "group_name",
				 [RS_ROLE_RETRY_AFTER] = "retry_after",
				 [RS_ROLE_LOCKED_UNTIL] = "locked_until"},
	  .fifo = true}},
	{"partition key, nothing else",
	 {.schema = "app",
	  .name = "keyed_jobs",
	  .column = {[RS_ROLE_ID] = "id", [RS_ROLE_PARTITION_KEY] = "customer"}}},
	{"partition key, lease",
	 {.schema = "app",
	  .name = "keyed_jobs",
	  .column = {[RS_ROLE_ID] = "id",
				 [RS_ROLE_GROUP] = "group_name",
				 [RS_ROLE_PARTITION_KEY] = "customer",
				 [RS_ROLE_RETRY_AFTER] = "retry_after",
				 [RS_ROLE_LOCKED_UNTIL] = "locked_until",
				 [RS_ROLE_PAYLOAD] = "payload"}}},
	{"partition key, advisory lock",
	 {.schema = "app",
	  .name = "keyed_jobs",
	  .column = {[RS_ROLE_ID] = "id",
				 [RS_ROLE_PARTITION_KEY] = "customer",
				 [RS_ROLE_PRIORITY] = "priority",
				 [RS_ROLE_RETRY_AFTER] = "retry_after",
				 [RS_ROLE_ATTEMPT] = "attempt"},
	  .lock_key = "jobs-{id}"}},
	{"groups, nothing else",
	 {.schema = "app",
	  .name = "group_jobs",
	  .column = {[RS_ROLE_ID] = "id", [RS_ROLE_GROUP] = "group_name"}}},
	{"groups, and headers of type json",
	 {.schema = "app",
	  .name = "json_jobs",
	  .column = {[RS_ROLE_ID] = "id", [RS_ROLE_GROUP] = "group_name", [RS_ROLE_HEADERS] = "note"},
	  .headers_are_json = true}},
	{"processed rows kept, nothing else",
	 {.schema = "app",
	  .name = "processed_jobs",
	  .column = {[RS_ROLE_ID] = "id", [RS_ROLE_PROCESSED_AT] = "processed_at"}}},
	{"delays and a payload",
	 {.schema = "app",
	  .name = "delayed_jobs",
	  .column = {[RS_ROLE_ID] = "id",
				 [RS_ROLE_RETRY_AFTER] = "retry_after",
				 [RS_ROLE_PAYLOAD] = "payload"}}},
	{"names that need their quotes",
	 {.schema = "Odd \"schema\"",
	  .name = "we\"ird",
	  .column = {[RS_ROLE_ID] = "order",
				 [RS_ROLE_PRIORITY] = "a\"b\"",
				 [RS_ROLE_ATTEMPT] = "{id} [x] :now $1",
				 [RS_ROLE_PAYLOAD] = "Payload"},
	  .only = true}},
	{"lease",
	 {.schema = "app",
	  .name = "lease_jobs",
	  .column =
		  {[RS_ROLE_ID] = "id", [RS_ROLE_LOCKED_UNTIL] = "note", [RS_ROLE_PAYLOAD] = "payload"}}},
	{"lease, everything, processed rows kept",
	 {.schema = "app",
	  .name = "lease_jobs",
	  .column = {[RS_ROLE_ID] = "id",
				 [RS_ROLE_GROUP] = "group_name",
				 [RS_ROLE_PRIORITY] = "priority",
				 [RS_ROLE_RETRY_AFTER] = "retry_after",
				 [RS_ROLE_ATTEMPT] = "attempt",
				 [RS_ROLE_PROCESSED_AT] = "processed_at",
				 [RS_ROLE_LOCKED_UNTIL] = "locked_until",
				 [RS_ROLE_HEADERS] = "headers",
				 [RS_ROLE_PAYLOAD] = "payload"},
	  .only = true}},
	{"advisory lock",
	 {.schema = "app",
	  .name = "key_jobs",
	  .column = {[RS_ROLE_ID] = "id"},
	  .lock_key = "jobs-{id}"}},
	{"advisory lock, everything, an odd key",
	 {.schema = "app",
	  .name = "key_jobs",
	  .column = {[RS_ROLE_ID] = "id",
				 [RS_ROLE_GROUP] = "group_name",
				 [RS_ROLE_PRIORITY] = "priority",
				 [RS_ROLE_RETRY_AFTER] = "retry_after",
				 [RS_ROLE_ATTEMPT] = "attempt",
				 [RS_ROLE_PROCESSED_AT] = "processed_at",
				 [RS_ROLE_HEADERS] = "headers",
				 [RS_ROLE_PAYLOAD] = "payload"},
	  .lock_key = "{a\"b}{c}it's {{\\n}} {id}"}},
};

static const rs_table plain = {.schema = "public", .name = "jobs", .column = {[RS_ROLE_ID] = "id"}};

static const rs_table full = {.schema = "public",
							  .name = "jobs",
							  .column = {[RS_ROLE_ID] = "id",
										 [RS_ROLE_GROUP] = "group_name",
										 [RS_ROLE_RETRY_AFTER] = "retry_after",
										 [RS_ROLE_ATTEMPT] = "attempt"}};

/* --------------------------------------------------------- small printers */

static void
print_steps(const rs_step *steps)
{
	for (; *steps != RS_STEP_END; steps++)
		printf("%s%s", rs_step_word(*steps), steps[1] == RS_STEP_END ? "\n" : ", ");
}

static void
print_problem(rs_problem problem)
{
	const char *text = rs_problem_text(problem.code);
	const char *hole = strstr(text, "%s");

	if (problem.code == RS_OK)
		printf("ok\n");
	else if (hole == NULL)
		printf("%s\n  hint: %s\n", text, rs_problem_hint(problem.code));
	else
		printf("%.*s%s%s\n  hint: %s\n", (int) (hole - text), text, problem.subject, hole + 2,
			   rs_problem_hint(problem.code));

	if ((hole != NULL) != (problem.subject != NULL))
		printf("BROKEN: subject and %%s do not match\n");
}

/* ------------------------------------------------------------------ lanes */

static void
test_lanes(void)
{
	for (int lane = 0; lane < 2 * RS_FORM_COUNT; lane++)
	{
		rs_form form = (rs_form) (lane / 2);
		bool transactional = lane % 2 == 0;

		printf("%s, %stransactional\n  opening: ", rs_form_word(form), transactional ? "" : "not ");
		print_steps(rs_lane_opening(form, transactional));
		for (int outcome = 0; outcome < RS_OUTCOME_COUNT; outcome++)
		{
			printf("  %s: ", rs_outcome_word((rs_outcome) outcome));
			print_steps(rs_lane_ending(form, transactional, (rs_outcome) outcome));
		}
	}
}

/* ----------------------------------------------------------------- settle */

static void
print_settlement(const char *how, rs_settlement settlement)
{
	printf("  %-34s -> %s by %s%s%s%s%s%s: ", how, rs_outcome_word(settlement.outcome),
		   rs_operation_word(settlement.operation),
		   settlement.counts_attempt ? ", counts the attempt" : "",
		   settlement.capped ? ", capped" : "",
		   settlement.lacks_retry_after ? ", lacks retry_after" : "",
		   settlement.lacks_dead_letter ? ", lacks dead letter" : "",
		   settlement.delay_is_given ? ", given delay" : "");
	print_steps(settlement.steps);
}

static void
print_settlements(const char *label, const rs_table *table, const rs_policy *policy,
				  int64_t attempt)
{
	char how[64];

	printf("%s\n  on_error %s, on_decode_error %s, attempt %lld\n", label,
		   rs_outcome_word(policy->on_error), rs_outcome_word(policy->on_decode_error),
		   (long long) attempt);

	for (int answer = 0; answer < RS_OUTCOME_COUNT; answer++)
	{
		snprintf(how, sizeof(how), "answer %s", rs_outcome_word((rs_outcome) answer));
		print_settlement(
			how, rs_settle(table, policy, RS_CAUSE_ANSWER, (rs_outcome) answer, false, attempt));
	}
	print_settlement(
		"answer retry_after with its delay",
		rs_settle(table, policy, RS_CAUSE_ANSWER, RS_OUTCOME_RETRY_AFTER, true, attempt));
	print_settlement("error",
					 rs_settle(table, policy, RS_CAUSE_ERROR, RS_OUTCOME_ACK, false, attempt));
	print_settlement("decode error", rs_settle(table, policy, RS_CAUSE_DECODE_ERROR, RS_OUTCOME_ACK,
											   false, attempt));
	print_settlement("settle error", rs_settle(table, policy, RS_CAUSE_SETTLE_ERROR, RS_OUTCOME_ACK,
											   false, attempt));
}

static rs_policy
default_policy(const rs_table *table, bool has_dead_letter, int max_attempts)
{
	return (rs_policy){
		.on_error = rs_default_on_error(table),
		.on_decode_error = rs_default_on_decode_error(table, has_dead_letter),
		.has_dead_letter = has_dead_letter,
		.max_attempts = max_attempts,
		.transactional = true,
	};
}

static void
test_settle(void)
{
	rs_policy policy;
	rs_table lease = full;
	rs_table keyed = full;

	policy = default_policy(&plain, false, 0);
	print_settlements("id only, default policies", &plain, &policy, 1);

	policy = default_policy(&full, false, 0);
	print_settlements("retry_after and attempt, default policies", &full, &policy, 1000000000);

	policy = default_policy(&full, true, 3);
	print_settlements("dead group, max_attempts 3, before the cap", &full, &policy, 2);
	print_settlements("dead group, max_attempts 3, at the cap", &full, &policy, 3);
	print_settlements("dead group, max_attempts 3, beyond the cap", &full, &policy, 4);

	policy = default_policy(&full, true, 1);
	print_settlements("dead group, max_attempts 1", &full, &policy, 1);

	policy = default_policy(&full, true, 2);
	policy.dead_letter_is_table = true;
	policy.on_error = RS_OUTCOME_RETRY;
	policy.on_decode_error = RS_OUTCOME_RETRY;
	print_settlements("dead table, max_attempts 2, before the cap", &full, &policy, 1);
	print_settlements("dead table, max_attempts 2, at the cap", &full, &policy, 2);

	policy = default_policy(&full, true, 0);
	policy.on_error = RS_OUTCOME_DEAD_LETTER;
	policy.on_decode_error = RS_OUTCOME_DISCARD;
	print_settlements("dead group, no cap, errors move", &full, &policy, 99);

	policy = default_policy(&full, true, 1);
	policy.on_error = RS_OUTCOME_DISCARD;
	policy.on_decode_error = RS_OUTCOME_DISCARD;
	print_settlements("dead group, at the cap, errors are discarded", &full, &policy, 1);

	policy = default_policy(&plain, false, 0);
	policy.on_error = RS_OUTCOME_RETRY_AFTER;
	policy.on_decode_error = RS_OUTCOME_DEAD_LETTER;
	print_settlements("id only, policies it cannot carry out", &plain, &policy, 1);

	policy = default_policy(&full, false, 0);
	policy.on_error = RS_OUTCOME_DEAD_LETTER;
	policy.on_decode_error = RS_OUTCOME_DEAD_LETTER;
	print_settlements("no dead letter, policies that want one", &full, &policy, 1);

	lease.column[RS_ROLE_LOCKED_UNTIL] = "locked_until";
	keyed.lock_key = "jobs-{id}";
	policy = default_policy(&lease, true, 0);
	print_settlements("lease", &lease, &policy, 1);
	policy.transactional = false;
	print_settlements("lease, not transactional", &lease, &policy, 1);

	policy = default_policy(&keyed, true, 0);
	print_settlements("advisory lock", &keyed, &policy, 1);
	policy.transactional = false;
	print_settlements("advisory lock, not transactional", &keyed, &policy, 1);

	policy = default_policy(&full, true, 0);
	policy.transactional = false;
	print_settlements("row lock, not transactional", &full, &policy, 1);
}

/* -------------------------------------------------------------- statement */

static const char *const dead_columns[] = {"id", "pay\"load", "note"};
static const rs_destination dead = {.schema = "app",
									.name = "dead \"letters\"",
									.columns = dead_columns,
									.column_count = (int) COUNT_OF(dead_columns)};

static void
print_statement(rs_statement statement, const char *text, size_t size)
{
	if (statement.length >= size || strlen(text) != statement.length)
		printf("BROKEN: length %zu\n", statement.length);
	printf("    %s\n", text);
	for (int i = 0; i < statement.parameter_count; i++)
		printf("%s$%d %s%s", i == 0 ? "      " : ", ", i + 1,
			   rs_parameter_word(statement.parameters[i]),
			   i + 1 == statement.parameter_count ? "\n" : "");
}

static void
print_statements(rs_dialect dialect, const rs_table *table)
{
	char buffer[16384];
	rs_statement statement;
	rs_role roles[RS_ROLE_COUNT];
	int count;

	for (int operation = 0; operation < RS_OPERATION_COUNT; operation++)
	{
		count = rs_statement_count(dialect, (rs_operation) operation, table);
		printf("  %s: %d\n", rs_operation_word((rs_operation) operation), count);
		for (int i = 0; i < count; i++)
		{
			statement = rs_statement_render(dialect, (rs_operation) operation, i, table, &dead,
											buffer, sizeof(buffer));
			print_statement(statement, buffer, sizeof(buffer));
		}
	}

	for (int index = 0; index < RS_INDEX_COUNT; index++)
	{
		if (!rs_index_is_needed(dialect, table, (rs_index) index))
			continue;
		printf("  index:");
		count = rs_index_columns(table, (rs_index) index, roles);
		for (int i = 0; i < count; i++)
			printf(" %s", rs_role_word(roles[i]));
		printf("\n");
		statement = rs_index_render(dialect, table, (rs_index) index, buffer, sizeof(buffer));
		print_statement(statement, buffer, sizeof(buffer));
	}
}

static void
test_statement(void)
{
	for (size_t i = 0; i < COUNT_OF(tables); i++)
	{
		printf("%s\n", tables[i].label);
		print_statements(RS_DIALECT_POSTGRESQL, &tables[i].table);
	}
}

/* What the tables above leave out: order, which SQLite's claims see to by themselves. */
static const named_table ordered[] = {
	{"fifo lease",
	 {.schema = "app",
	  .name = "fifo_jobs",
	  .column = {[RS_ROLE_ID] = "id",
				 [RS_ROLE_GROUP] = "group_name",
				 [RS_ROLE_RETRY_AFTER] = "retry_after",
				 [RS_ROLE_LOCKED_UNTIL] = "locked_until"},
	  .fifo = true}},
	{"fifo lease with priorities, nothing else",
	 {.schema = "app",
	  .name = "fifo_jobs",
	  .column = {[RS_ROLE_ID] = "id",
				 [RS_ROLE_GROUP] = "group_name",
				 [RS_ROLE_PRIORITY] = "priority",
				 [RS_ROLE_LOCKED_UNTIL] = "locked_until"},
	  .fifo = true}},
	{"lease with partition keys",
	 {.schema = "app",
	  .name = "key_jobs",
	  .column = {[RS_ROLE_ID] = "id",
				 [RS_ROLE_PARTITION_KEY] = "account",
				 [RS_ROLE_ATTEMPT] = "attempt",
				 [RS_ROLE_LOCKED_UNTIL] = "locked_until"}}},
	{"advisory lock with partition keys",
	 {.schema = "app",
	  .name = "key_jobs",
	  .column = {[RS_ROLE_ID] = "id", [RS_ROLE_PARTITION_KEY] = "account"},
	  .lock_key = "jobs-{id}"}},
};

static void
print_statements_of_dialect(rs_dialect dialect)
{
	for (size_t i = 0; i < COUNT_OF(tables); i++)
	{
		rs_table table = tables[i].table;

		table.only = false; /* PostgreSQL's alone */
		printf("%s\n", tables[i].label);
		print_statements(dialect, &table);
	}
	for (size_t i = 0; i < COUNT_OF(ordered); i++)
	{
		printf("%s\n", ordered[i].label);
		print_statements(dialect, &ordered[i].table);
	}
}

static void
test_statement_sqlite(void)
{
	print_statements_of_dialect(RS_DIALECT_SQLITE);
}

static void
test_statement_mysql(void)
{
	rs_table table = tables[1].table;

	print_statements_of_dialect(RS_DIALECT_MYSQL);
	table.only = false;
	table.claim_index = "a `claim` index";
	printf("%s, with its index\n", tables[1].label);
	print_statements(RS_DIALECT_MYSQL, &table);
}

/* ---------------------------------------------------------------- problem */

static const named_table described[] = {
	{"id only", {.column = {[RS_ROLE_ID] = "id"}}},
	{"no id", {.column = {[RS_ROLE_PAYLOAD] = "payload"}}},
	{"two roles", {.column = {[RS_ROLE_ID] = "id", [RS_ROLE_PAYLOAD] = "id"}}},
	{"two roles, the id aside",
	 {.column = {[RS_ROLE_ID] = "id", [RS_ROLE_GROUP] = "x", [RS_ROLE_HEADERS] = "x"}}},
	{"names that differ in case", {.column = {[RS_ROLE_ID] = "id", [RS_ROLE_PAYLOAD] = "ID"}}},
	{"lease", {.column = {[RS_ROLE_ID] = "id", [RS_ROLE_LOCKED_UNTIL] = "until"}}},
	{"advisory lock", {.column = {[RS_ROLE_ID] = "id"}, .lock_key = "jobs-{id}"}},
	{"two forms",
	 {.column = {[RS_ROLE_ID] = "id", [RS_ROLE_LOCKED_UNTIL] = "until"}, .lock_key = "k-{id}"}},
	{"fifo", {.column = {[RS_ROLE_ID] = "id", [RS_ROLE_GROUP] = "g"}, .fifo = true}},
	{"fifo without a group", {.column = {[RS_ROLE_ID] = "id"}, .fifo = true}},
	{"fifo with a lock key",
	 {.column = {[RS_ROLE_ID] = "id", [RS_ROLE_GROUP] = "g"}, .fifo = true, .lock_key = "k"}},
	{"fifo with a partition key",
	 {.column = {[RS_ROLE_ID] = "id", [RS_ROLE_GROUP] = "g", [RS_ROLE_PARTITION_KEY] = "k"},
	  .fifo = true}},
	{"an empty lock key", {.column = {[RS_ROLE_ID] = "id"}, .lock_key = ""}},
	{"a broken lock key", {.column = {[RS_ROLE_ID] = "id"}, .lock_key = "jobs-{id"}},
};

static void
test_problem(void)
{
	for (size_t i = 0; i < COUNT_OF(described); i++)
	{
		printf("%s (%s): ", described[i].label, rs_form_word(rs_table_form(&described[i].table)));
		print_problem(rs_table_check(&described[i].table));
	}

	for (size_t i = 0; i < COUNT_OF(described); i++)
	{
		if (rs_table_check(&described[i].table).code != RS_OK)
			continue;
		for (int dialect = 0; dialect < RS_DIALECT_COUNT; dialect++)
		{
			rs_table table = described[i].table;

			table.isolation = RS_ISOLATION_SERIALIZABLE;
			printf("%s (%s), %s at serializable: ", described[i].label,
				   rs_form_word(rs_table_form(&table)), rs_dialect_word((rs_dialect) dialect));
			print_problem(rs_table_check_dialect((rs_dialect) dialect, &table));
		}
	}
}

/* -------------------------------------------------------------------- key */

static void
test_key(void)
{
	static const char *const keys[] = {
		"jobs",  "jobs-{id}", "{a}{b}:{c d}", "{{{id}}}",  "{{id}}", "}}{{", "{\"q\"}",
		"",      "{",         "jobs-{id",     "jobs-{",    "{a{b}",  "}",    "jobs-id}",
		"{a}}b", "{a}}}",     "{}",           "jobs-{}-x", "{{}",    "{}}",
	};

	for (size_t i = 0; i < COUNT_OF(keys); i++)
	{
		rs_problem problem = rs_key_check(keys[i]);
		const char *start;
		size_t length;

		printf("'%s': ", keys[i]);
		print_problem(problem);
		if (problem.code != RS_OK)
			continue;
		for (int n = 0; rs_key_column(keys[i], n, &start, &length); n++)
			printf("  column %d: %.*s\n", n, (int) length, start);
	}
}

/* -------------------------------------------------------------- isolation */

static void
print_word(const char *word)
{
	printf("  %s%s%s: ", word ? "'" : "", word ? word : "NULL", word ? "'" : "");
}

static void
test_isolation(void)
{
	static const char *const words[] = {
		NULL,
		"default",
		"read committed",
		"READ COMMITTED",
		"Repeatable Read",
		"serializable",
		"read uncommitted",
		"READ UNCOMMITTED",
		"",
		"read",
		"read committed ",
		"snapshot",
	};

	static const char *const modes[] = {NULL,        "default", "deferred",    "IMMEDIATE",
										"exclusive", "",        "serializable"};

	for (int dialect = 0; dialect < RS_DIALECT_COUNT; dialect++)
	{
		printf("%s\n", rs_dialect_word((rs_dialect) dialect));
		for (size_t i = 0; i < COUNT_OF(words); i++)
		{
			rs_isolation level = RS_ISOLATION_COUNT;
			rs_problem problem = rs_isolation_declare((rs_dialect) dialect, words[i], &level);

			print_word(words[i]);
			if (problem.code == RS_OK)
				printf("%s, ", rs_isolation_word(level));
			else if (level != RS_ISOLATION_COUNT)
				printf("BROKEN: a level in spite of the ");
			print_problem(problem);
		}
		for (size_t i = 0; i < COUNT_OF(modes); i++)
		{
			rs_mode mode = RS_MODE_COUNT;
			rs_problem problem = rs_mode_declare((rs_dialect) dialect, modes[i], &mode);

			print_word(modes[i]);
			if (problem.code == RS_OK)
				printf("mode %s, ", rs_mode_word(mode));
			else if (mode != RS_MODE_COUNT)
				printf("BROKEN: a mode in spite of the ");
			print_problem(problem);
		}
	}

	for (int outcome = 0; outcome < RS_OUTCOME_COUNT; outcome++)
	{
		rs_outcome found;

		if (!rs_outcome_find(rs_outcome_word((rs_outcome) outcome), &found) ||
			found != (rs_outcome) outcome)
			printf("BROKEN: outcome %d is not found by its word\n", outcome);
	}
	for (int form = 0; form < RS_FORM_COUNT; form++)
	{
		rs_form found;

		if (!rs_form_find(rs_form_word((rs_form) form), &found) || found != (rs_form) form)
			printf("BROKEN: form %d is not found by its word\n", form);
	}
	for (int backoff = 0; backoff < RS_BACKOFF_COUNT; backoff++)
	{
		rs_backoff found;

		if (!rs_backoff_find(rs_backoff_word((rs_backoff) backoff), &found) ||
			found != (rs_backoff) backoff)
			printf("BROKEN: backoff %d is not found by its word\n", backoff);
	}
	printf("other words are case-sensitive: %s\n", rs_outcome_find("ACK", &(rs_outcome){0}) ||
														   rs_form_find("Lease", &(rs_form){0}) ||
														   rs_backoff_find("", &(rs_backoff){0})
													   ? "no"
													   : "yes");
}

/* ---------------------------------------------------------------- backoff */

#define SECOND INT64_C(1000000)
#define HOUR (3600 * SECOND)

/* Every combination of extremes: what must hold for all of them. */
static void
check_backoff_properties(void)
{
	static const int64_t values[] = {INT64_MIN,
									 -1,
									 0,
									 1,
									 2,
									 3,
									 SECOND,
									 HOUR,
									 1000000000,
									 INT64_C(1) << 32,
									 INT64_MAX / 2,
									 INT64_MAX - 1,
									 INT64_MAX};
	static const uint32_t randoms[] = {0, 1, UINT32_MAX / 2, UINT32_MAX - 1, UINT32_MAX};
	long long checked = 0;
	long long broken = 0;

	for (int kind = 0; kind < RS_BACKOFF_COUNT; kind++)
		for (size_t u = 0; u < COUNT_OF(values); u++)
			for (size_t c = 0; c < COUNT_OF(values); c++)
				for (size_t a = 0; a < COUNT_OF(values); a++)
					for (size_t r = 0; r < COUNT_OF(randoms); r++)
					{
						int64_t cap = values[c] > 0 ? values[c] : 0;
						int64_t full_delay =
							rs_backoff_delay((rs_backoff) kind, values[u], values[c], values[a], 0);
						int64_t delay = rs_backoff_delay((rs_backoff) kind, values[u], values[c],
														 values[a], randoms[r]);

						checked++;
						if (full_delay < 0 || full_delay > cap || delay > full_delay ||
							delay < full_delay - full_delay / 4)
							broken++;
					}
	printf("never negative, never above the cap, jitter within a quarter: %lld checked, %lld "
		   "broken\n",
		   checked, broken);
}

static void
test_backoff(void)
{
	static const int64_t attempts[] = {-1, 0,  1,  2,  3,  4,          5,        11,
									   12, 13, 63, 64, 65, 1000000000, INT64_MAX};
	static const uint32_t randoms[] = {0, 0x40000000, 0x80000000, 0xC0000000, UINT32_MAX};

	for (int kind = 0; kind < RS_BACKOFF_COUNT; kind++)
	{
		printf("%s, unit 1 s, cap 1 h\n", rs_backoff_word((rs_backoff) kind));
		for (size_t i = 0; i < COUNT_OF(attempts); i++)
			printf("  attempt %lld: %lld us\n", (long long) attempts[i],
				   (long long) rs_backoff_delay((rs_backoff) kind, SECOND, HOUR, attempts[i], 0));
	}

	printf("jitter on 8 s\n");
	for (size_t i = 0; i < COUNT_OF(randoms); i++)
		printf("  random 0x%08lX: %lld us\n", (unsigned long) randoms[i],
			   (long long) rs_backoff_delay(RS_BACKOFF_EXPONENTIAL, SECOND, HOUR, 4, randoms[i]));

	check_backoff_properties();
}

/* ------------------------------------------------------------------- time */

static void
print_time(int64_t time)
{
	char text[RS_TIME_SIZE];
	int64_t again;

	rs_time_format(time, text);
	printf("%lld: %s%s\n", (long long) time, text,
		   !rs_time_parse(text, strlen(text), &again) ? " BROKEN: is not read back" : "");
}

/* Every day of the calendar is read back, and text sorts as time does. */
static void
check_time_properties(void)
{
	const int64_t day = INT64_C(86400000000);
	char before[RS_TIME_SIZE] = "";
	char text[RS_TIME_SIZE];
	long long checked = 0;
	long long broken = 0;

	for (int64_t n = -719528; n < 2932897; n++)
	{
		int64_t time = n * day + (n & 1023) * 83000000 + (n % 3) * 7000;
		int64_t again = 0;

		rs_time_format(time, text);
		checked++;
		if (!rs_time_parse(text, strlen(text), &again) ||
			again != time - (time % 1000 + 1000) % 1000)
			broken++;
		if (strcmp(before, text) >= 0)
			broken++;
		memcpy(before, text, sizeof(text));
	}
	printf("every day of the years 0 to 9999: %lld checked, %lld broken\n", checked, broken);
}

static void
test_time(void)
{
	static const int64_t times[] = {0,
									1,
									999,
									1000,
									-1,
									-1000,
									500000,
									INT64_C(951782400000000),
									INT64_C(1767225599999999),
									INT64_C(1767225600000000),
									INT64_C(253402300799999999),
									INT64_C(253402300800000000),
									-INT64_C(62167219200000000),
									-INT64_C(62167219200000001),
									INT64_MIN,
									INT64_MAX};
	static const char *const texts[] = {
		"2026-01-01T00:00:00+00:00",
		"2026-01-01T00:00:00.5+00:00",
		"2026-01-01T00:00:00.123456789+00:00",
		"2026-01-01T00:00:00.1234567890+00:00",
		"2026-01-01T02:00:00+02:00",
		"2025-12-31T22:30:00-01:30",
		"2026-01-01T00:00:00Z",
		"2026-01-01 00:00:00",
		"2026-01-01T00:00:00.+00:00",
		"2026-01-01T00:00:00+0000",
		"2026-01-01T00:00:00+00:00 ",
		"2026-01-01T24:00:00+00:00",
		"2026-02-29T00:00:00+00:00",
		"2000-02-29T00:00:00+00:00",
		"1900-02-29T00:00:00+00:00",
		"2026-13-01T00:00:00+00:00",
		"2026-00-01T00:00:00+00:00",
		"2026-01-01",
		"26-01-01T00:00:00+00:00",
		"",
	};

	for (size_t i = 0; i < COUNT_OF(times); i++)
		print_time(times[i]);
	for (size_t i = 0; i < COUNT_OF(texts); i++)
	{
		int64_t time = 0;
		bool is_time = rs_time_parse(texts[i], strlen(texts[i]), &time);

		printf("'%s': ", texts[i]);
		if (is_time)
			printf("%lld\n", (long long) time);
		else
			printf("%s\n", time == 0 ? "not a time" : "BROKEN: a time in spite of the refusal");
	}
	check_time_properties();
}

/* ----------------------------------------------------------------- buffer */

/*
 * Whatever the size, the length is the whole statement's, the text its
 * beginning, terminated, and nothing behind the buffer's end is written.
 */
static void
check_buffer(const rs_table *table, const char *whole, size_t whole_length, size_t size)
{
	char buffer[16384];
	size_t kept = size == 0 ? 0 : size - 1;
	rs_statement statement;

	if (kept > whole_length)
		kept = whole_length;
	memset(buffer, '#', sizeof(buffer));
	statement =
		rs_statement_render(RS_DIALECT_POSTGRESQL, RS_OP_CLAIM_ROW, 0, table, NULL, buffer, size);

	if (statement.length != whole_length)
		printf("BROKEN: size %zu, length %zu\n", size, statement.length);
	if (size > 0 && (memcmp(buffer, whole, kept) != 0 || buffer[kept] != '\0'))
		printf("BROKEN: size %zu, text \"%.*s\"\n", size, (int) kept, buffer);
	if (buffer[size] != '#')
		printf("BROKEN: size %zu, written behind the end\n", size);
}

static void
test_buffer(void)
{
	const rs_table *table = &tables[1].table;
	char whole[8192];
	char small[8] = "#######";
	rs_statement statement = rs_statement_render(RS_DIALECT_POSTGRESQL, RS_OP_CLAIM_ROW, 0, table,
												 NULL, whole, sizeof(whole));

	for (size_t size = 0; size <= statement.length + 2; size++)
		check_buffer(table, whole, statement.length, size);
	printf("every size from 0 to two beyond the statement's is tried\n");

	statement =
		rs_statement_render(RS_DIALECT_POSTGRESQL, RS_OP_CLAIM_ROW, 0, table, NULL, NULL, 0);
	printf("no buffer: %s\n", statement.length == strlen(whole) ? "the length alone" : "BROKEN");

	(void) rs_statement_render(RS_DIALECT_POSTGRESQL, RS_OP_CLAIM_ROW, 0, table, NULL, small,
							   sizeof(small));
	printf("8 bytes: \"%s\"\n", small);

	for (int index = -1; index <= 1; index += 2)
	{
		statement = rs_statement_render(RS_DIALECT_POSTGRESQL, RS_OP_CLAIM_ROW, index, table, NULL,
										small, sizeof(small));
		printf("statement number %d: \"%s\", length %zu, %d parameters\n", index, small,
			   statement.length, statement.parameter_count);
	}
}

/* ------------------------------------------------------------------- main */

int
main(int argc, char **argv)
{
	static const struct
	{
		const char *name;
		void (*print)(void);
	} sections[] = {
		{"lanes", test_lanes},
		{"settle", test_settle},
		{"statement", test_statement},
		{"problem", test_problem},
		{"key", test_key},
		{"isolation", test_isolation},
		{"backoff", test_backoff},
		{"buffer", test_buffer},
		{"time", test_time},
		{"statement_sqlite", test_statement_sqlite},
		{"statement_mysql", test_statement_mysql},
	};

	for (size_t i = 0; argc == 2 && i < COUNT_OF(sections); i++)
	{
		if (strcmp(argv[1], sections[i].name) == 0)
		{
			sections[i].print();
			return 0;
		}
	}
	fprintf(stderr, "usage: core_test SECTION\n");
	return 2;
}
