/*-------------------------------------------------------------------------
 *
 * statement.c
 *	  Operation, dialect and table to the statements that carry it out: chooses
 *	  from the dialect's catalogue, and renders.
 *
 *-------------------------------------------------------------------------
 */
#include "catalogue.h"
#include "template.h"

static const rs_catalogue *const catalogues[RS_DIALECT_COUNT] = {
	[RS_DIALECT_POSTGRESQL] = &rs_postgresql_catalogue,
	[RS_DIALECT_SQLITE] = &rs_sqlite_catalogue,
	[RS_DIALECT_MYSQL] = &rs_mysql_catalogue,
};

int
rs_statement_count(rs_dialect dialect, rs_operation operation, const rs_table *table)
{
	const rs_catalogue_entry *entry = &catalogues[dialect]->operations[operation];
	unsigned lines = RS_WITH_LINES(rs_table_lines(table));
	int count = 0;

	if (table->column[RS_ROLE_ID] == NULL || table->column[entry->needs] == NULL)
		return 0;
	if (entry->forms != 0 && (entry->forms & RS_IN_FORM(rs_table_form(table))) == 0 &&
		(entry->any_form & lines) == 0)
		return 0;
	if (entry->lines != 0 && (entry->lines & lines) == 0)
		return 0;
	while (count < RS_MAX_STATEMENTS && entry->statements[count] != NULL)
		count++;
	return count;
}

rs_parameter
rs_line_parameter(const rs_table *table)
{
	return rs_table_lines(table) == RS_LINES_GROUP ? RS_PARAM_GROUP : RS_PARAM_PARTITION_KEY;
}

/* Whether the description leaves publish any column to fill. */
static bool
publishes_columns(const rs_table *table)
{
	return table->column[RS_ROLE_GROUP] != NULL || table->column[RS_ROLE_PRIORITY] != NULL ||
		   table->column[RS_ROLE_RETRY_AFTER] != NULL ||
		   table->column[RS_ROLE_PARTITION_KEY] != NULL || table->column[RS_ROLE_HEADERS] != NULL ||
		   table->column[RS_ROLE_PAYLOAD] != NULL;
}

static rs_search
search_of(const rs_table *table)
{
	if (table->column[RS_ROLE_RETRY_AFTER] == NULL)
		return RS_SEARCH_PLAIN;
	return table->column[RS_ROLE_PRIORITY] == NULL ? RS_SEARCH_BY_DELAY : RS_SEARCH_BY_LEVEL;
}

/* What stands in for an operation's statement where the table wants another; else NULL. */
static const char *const *
variant_for(const rs_catalogue *from, rs_operation operation, const rs_table *table)
{
	unsigned lines = RS_WITH_LINES(rs_table_lines(table));
	unsigned search = RS_SEARCHED(search_of(table));

	if (operation == RS_OP_PUBLISH && !publishes_columns(table))
		return from->publish_defaults;
	if (from->variants == NULL)
		return NULL;
	for (const rs_catalogue_variant *variant = from->variants; variant->pieces != NULL; variant++)
	{
		if (variant->operation == operation &&
			(variant->lines == 0 || (variant->lines & lines) != 0) &&
			(variant->searches == 0 || (variant->searches & search) != 0))
			return variant->pieces;
	}
	return NULL;
}

static bool
is_claim(rs_operation operation)
{
	return operation >= RS_OP_CLAIM_ROW && operation <= RS_OP_CLAIM_LINE_PAYLOAD;
}

/* The most pieces a claim has, what a lease puts around it included. */
#define MAX_PIECES 10

rs_statement
rs_statement_render(rs_dialect dialect, rs_operation operation, int index, const rs_table *table,
					const rs_destination *destination, char *buffer, size_t size)
{
	const rs_catalogue *from = catalogues[dialect];
	const char *const *variant;
	const char *pieces[MAX_PIECES] = {NULL};
	bool stamps =
		from->before_lease != NULL && is_claim(operation) && rs_table_form(table) == RS_FORM_LEASE;
	int count = 0;

	if (index < 0 || index >= rs_statement_count(dialect, operation, table))
		return rs_template_render(dialect, table, destination, pieces, buffer, size);

	if (stamps)
		pieces[count++] = from->before_lease;
	else if (operation == RS_OP_CANDIDATES && from->before_candidate != NULL)
		pieces[count++] = from->before_candidate;
	variant = variant_for(from, operation, table);
	if (variant == NULL)
		pieces[count++] = from->operations[operation].statements[index];
	else
		for (; *variant != NULL; variant++)
			pieces[count++] = *variant;
	if (stamps)
		pieces[count++] = from->after_lease;
	return rs_template_render(dialect, table, destination, pieces, buffer, size);
}

rs_statement
rs_index_render(rs_dialect dialect, const rs_table *table, rs_index index, char *buffer,
				size_t size)
{
	const char *pieces[] = {catalogues[dialect]->indexes[index], NULL};

	return rs_template_render(dialect, table, NULL, pieces, buffer, size);
}

bool
rs_index_is_needed(rs_dialect dialect, const rs_table *table, rs_index index)
{
	rs_lines lines = rs_table_lines(table);

	if (catalogues[dialect]->indexes[index] == NULL)
		return false;
	if (index == RS_INDEX_LINE)
		return lines == RS_LINES_PARTITION_KEY;
	if (index == RS_INDEX_LEASE)
		return lines != RS_LINES_NONE && rs_table_form(table) == RS_FORM_LEASE;
	return true;
}

int
rs_index_columns(const rs_table *table, rs_index index, rs_role *roles)
{
	static const rs_role order[] = {RS_ROLE_GROUP,    RS_ROLE_PARTITION_KEY,
									RS_ROLE_PRIORITY, RS_ROLE_RETRY_AFTER,
									RS_ROLE_ID,       RS_ROLE_LOCKED_UNTIL};
	static const unsigned has[RS_INDEX_COUNT] = {
		[RS_INDEX_CLAIM] = 1u << RS_ROLE_GROUP | 1u << RS_ROLE_PRIORITY |
						   1u << RS_ROLE_RETRY_AFTER | 1u << RS_ROLE_ID,
		[RS_INDEX_LINE] = 1u << RS_ROLE_GROUP | 1u << RS_ROLE_PARTITION_KEY |
						  1u << RS_ROLE_PRIORITY | 1u << RS_ROLE_RETRY_AFTER | 1u << RS_ROLE_ID,
		[RS_INDEX_LEASE] = 1u << RS_ROLE_PARTITION_KEY | 1u << RS_ROLE_LOCKED_UNTIL,
	};
	unsigned wanted = has[index];
	int count = 0;

	if (index == RS_INDEX_LEASE && table->fifo)
		wanted |= 1u << RS_ROLE_GROUP;
	for (size_t i = 0; i < sizeof(order) / sizeof(order[0]); i++)
	{
		if (table->column[order[i]] != NULL && (wanted & 1u << order[i]) != 0)
			roles[count++] = order[i];
	}
	return count;
}
