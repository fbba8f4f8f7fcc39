/*-------------------------------------------------------------------------
 *
 * template.h
 *	  The templates that the SQL catalogue is written in.
 *
 *	{id}, {group}, ..	the column of a role, quoted as the dialect quotes, unqualified
 *	{table}				the queue, as FROM, UPDATE and DELETE name it, with ONLY
 *						where the description says so
 *	{into}				the queue, as INSERT and CREATE INDEX name it
 *	{bare}				the queue without its schema
 *	{dest}				the dead-letter table
 *	{columns}			what a move carries, separated by commas
 *	{moved}				the same as values: of a lease, NULL; of headers, what
 *						the statement makes of them in ruststream_headers.ruststream_made
 *	{key}				the advisory key of a row of the alias ruststream_row
 *	{partition}			MySQL: what to lock by name for its partition key, or, without
 *						one, for the row
 *	{index}				MySQL: FORCE INDEX, where the description names the claims' index
 *	{a|b}				a, then b as long as the same hole comes again: the
 *						separator of a list whose items are optional
 *	{}					nothing: the next {a|b} begins a list of its own
 *	{claim_index}		the name of the index that claims need
 *	{lease_index}		the name of the index that finds leased rows
 *	:id, :group, ..		a parameter: $1, $2, .. or ?1, ?2, .. by first use, or ?
 *	[role:text]			text, where the table has the role
 *	[!role:text]		text, where it has not
 *	[row_lock:text]		the same of the table's form
 *	[json:text]			the same where headers are json
 *	[fifo:text]			the same of a fifo table; all of these nest
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_TEMPLATE_H
#define RUSTSTREAM_TEMPLATE_H

#include "core.h"

/*
 * Render a template that is given in pieces, the last one being NULL, into
 * buffer, always terminated where size > 0.
 */
extern rs_statement rs_template_render(rs_dialect dialect, const rs_table *table,
									   const rs_destination *destination, const char *const *pieces,
									   char *buffer, size_t size);

#endif /* RUSTSTREAM_TEMPLATE_H */
