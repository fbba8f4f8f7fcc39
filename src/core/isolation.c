/*-------------------------------------------------------------------------
 *
 * isolation.c
 *	  Which isolation levels a table may declare, dialect by dialect.
 *
 *-------------------------------------------------------------------------
 */
#include "core.h"

rs_problem
rs_isolation_declare(rs_dialect dialect, const char *word, rs_isolation *result)
{
	rs_isolation level = RS_ISOLATION_DEFAULT;

	if (word != NULL && !rs_isolation_find(word, &level))
		return (rs_problem){.code = RS_PROBLEM_ISOLATION_UNKNOWN, .subject = word};

	/* Accepting it would promise dirty reads that PostgreSQL never gives. */
	if (dialect == RS_DIALECT_POSTGRESQL && level == RS_ISOLATION_READ_UNCOMMITTED)
		return (rs_problem){.code = RS_PROBLEM_ISOLATION_READ_UNCOMMITTED};

	*result = level;
	return (rs_problem){.code = RS_OK};
}
