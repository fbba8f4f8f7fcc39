/*-------------------------------------------------------------------------
 *
 * isolation.c
 *	  Which isolation levels, or modes, a table may declare, dialect by dialect.
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

	if (dialect == RS_DIALECT_SQLITE && level != RS_ISOLATION_DEFAULT)
		return (rs_problem){.code = RS_PROBLEM_ISOLATION_SQLITE, .subject = word};

	/* A locking read at the default of MySQL locks gaps too: inserts would wait for handlers. */
	if (dialect == RS_DIALECT_MYSQL && level == RS_ISOLATION_DEFAULT)
		level = RS_ISOLATION_READ_COMMITTED;

	*result = level;
	return (rs_problem){.code = RS_OK};
}

rs_problem
rs_mode_declare(rs_dialect dialect, const char *word, rs_mode *result)
{
	rs_mode mode = RS_MODE_DEFAULT;

	if (word != NULL && !rs_mode_find(word, &mode))
		return (rs_problem){.code = RS_PROBLEM_MODE_UNKNOWN, .subject = word};
	if (dialect != RS_DIALECT_SQLITE && mode != RS_MODE_DEFAULT)
		return (rs_problem){.code = RS_PROBLEM_MODE_NOT_SQLITE, .subject = word};
	*result = mode;
	return (rs_problem){.code = RS_OK};
}
