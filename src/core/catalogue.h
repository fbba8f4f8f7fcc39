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

/* The tables that have an operation, as bits; 0: each. */
#define RS_IN_FORM(form) (1u << (form))
#define RS_WITH_LINES(lines) (1u << (lines))

/* The statements of one operation, as templates (template.h), executed in order. */
typedef struct rs_catalogue_entry
{
	const char *statements[RS_MAX_STATEMENTS];
	rs_role needs;     /* the role without which there is no such operation */
	unsigned forms;    /* the forms that have it .. */
	unsigned any_form; /* .. and the lines that have it in any form */
	unsigned lines;    /* the lines that have it */
} rs_catalogue_entry;

/* In which order the rows that may be claimed are looked for. */
typedef enum rs_search
{
	RS_SEARCH_PLAIN,    /* one range of the index */
	RS_SEARCH_BY_DELAY, /* those without a delay, then those whose delay is over */
	RS_SEARCH_BY_LEVEL  /* the same for each priority */
} rs_search;

#define RS_SEARCHED(search) (1u << (search))

/*
 * What stands in for an operation's statement where the table wants another; in
 * pieces, for C limits a string's length.  The last piece is NULL.
 */
typedef struct rs_catalogue_variant
{
	rs_operation operation;
	unsigned lines;    /* RS_WITH_LINES bits; 0: any */
	unsigned searches; /* RS_SEARCHED bits; 0: any */
	const char *const *pieces;
} rs_catalogue_variant;

typedef struct rs_catalogue
{
	const rs_catalogue_entry *operations; /* RS_OPERATION_COUNT of them */
	const rs_catalogue_variant *variants; /* the first that fits counts; the last has no pieces;
										   * NULL: there are none */
	const char *const *publish_defaults;  /* where there is no column to fill */
	const char *before_lease;             /* NULL: claims are stamped by a statement of their own */
	const char *after_lease;
	const char *before_candidate;        /* NULL: nothing */
	const char *indexes[RS_INDEX_COUNT]; /* NULL: not needed in this dialect */
} rs_catalogue;

extern const rs_catalogue rs_postgresql_catalogue;
extern const rs_catalogue rs_sqlite_catalogue;
extern const rs_catalogue rs_mysql_catalogue;

#endif /* RUSTSTREAM_CATALOGUE_H */
