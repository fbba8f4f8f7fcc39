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
	int count = 0;

	if (table->column[RS_ROLE_ID] == NULL || table->column[entry->needs] == NULL)
		return 0;
	if (entry->forms != 0 && (entry->forms & RS_IN_FORM(rs_table_form(table))) == 0)
		return 0;
	while (count < RS_MAX_STATEMENTS && entry->statements[count] != NULL)
		count++;
	return count;
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

/* What stands in for an operation's statement where the table wants another; else NULL. */
static const char *const *
variant_for(const rs_catalogue *from, rs_operation operation, const rs_table *table)
{
	bool has_priority = table->column[RS_ROLE_PRIORITY] != NULL;

	if (operation == RS_OP_PUBLISH && !publishes_columns(table))
		return from->publish_defaults;
	if (table->column[RS_ROLE_RETRY_AFTER] == NULL)
		return NULL;
	if (operation == RS_OP_CLAIM_ROW)
		return has_priority ? from->claim_row_by_level : from->claim_row_by_delay;
	if (operation == RS_OP_CLAIM_PAYLOAD)
		return has_priority ? from->claim_payload_by_level : from->claim_payload_by_delay;
	if (operation == RS_OP_CANDIDATES)
		return has_priority ? from->candidates_by_level : from->candidates_by_delay;
	return NULL;
}

static bool
is_claim(rs_operation operation)
{
	return operation >= RS_OP_CLAIM_ROW && operation <= RS_OP_CLAIM_PAYLOAD_BEHIND_PRIORITY;
}

/* The most pieces a claim has, what a lease puts around it included. */
#define MAX_PIECES 8

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
rs_index_render(rs_dialect dialect, const rs_table *table, char *buffer, size_t size)
{
	const char *pieces[] = {catalogues[dialect]->claim_index, NULL};

	return rs_template_render(dialect, table, NULL, pieces, buffer, size);
}

rs_statement
rs_lease_index_render(rs_dialect dialect, const rs_table *table, char *buffer, size_t size)
{
	bool asks = table->fifo || table->column[RS_ROLE_PARTITION_KEY] != NULL;
	const char *pieces[] = {NULL, NULL};

	if (asks && table->column[RS_ROLE_LOCKED_UNTIL] != NULL)
		pieces[0] = catalogues[dialect]->lease_index;
	return rs_template_render(dialect, table, NULL, pieces, buffer, size);
}

int
rs_index_columns(const rs_table *table, rs_role *roles)
{
	static const rs_role order[] = {RS_ROLE_GROUP, RS_ROLE_PRIORITY, RS_ROLE_RETRY_AFTER,
									RS_ROLE_ID};
	int count = 0;

	for (size_t i = 0; i < sizeof(order) / sizeof(order[0]); i++)
	{
		if (table->column[order[i]] != NULL)
			roles[count++] = order[i];
	}
	return count;
}
