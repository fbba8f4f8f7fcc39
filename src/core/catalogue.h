/*-------------------------------------------------------------------------
 *
 * catalogue.h
 *	  The shape of a dialect's SQL catalogue: what statement_<dialect>.c fills
 *	  in and statement.c renders.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_CATALOGUE_H
#define RUSTSTREAM_CATALOGUE_H

#include "core.h"

#define RS_MAX_STATEMENTS 2

/* The statements of one operation, as templates (template.h), executed in order. */
typedef struct rs_catalogue_entry
{
	const char *statements[RS_MAX_STATEMENTS];
	rs_role needs;  /* the role without which there is no such operation */
	unsigned forms; /* the forms that have it, as RS_IN_FORM bits; 0: each */
} rs_catalogue_entry;

#define RS_IN_FORM(form) (1u << (form))

typedef struct rs_catalogue
{
	const rs_catalogue_entry *operations; /* RS_OPERATION_COUNT of them */
	/*
	 * Instead of the above, for some tables; in pieces, for C limits a string's
	 * length.  The last piece is NULL.
	 */
	const char *const *claim_row_by_delay;
	const char *const *claim_payload_by_delay;
	const char *const *candidates_by_delay;
	const char *const *claim_row_by_level;
	const char *const *claim_payload_by_level;
	const char *const *candidates_by_level;
	const char *before_lease; /* NULL: claims are stamped by a statement of their own */
	const char *after_lease;
	const char *before_candidate; /* NULL: nothing */
	const char *const *publish_defaults;
	const char *claim_index;
	const char *lease_index; /* NULL: none is needed */
} rs_catalogue;

extern const rs_catalogue rs_postgresql_catalogue;
extern const rs_catalogue rs_sqlite_catalogue;
extern const rs_catalogue rs_mysql_catalogue;

#endif /* RUSTSTREAM_CATALOGUE_H */
