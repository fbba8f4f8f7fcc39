/*-------------------------------------------------------------------------
 *
 * driver_sqlite.h
 *	  What the files of the SQLite driver share; the only one that includes
 *	  SQLite's own header.
 *
 *	driver_sqlite.c			connections, transactions, errors, waiting for locks
 *	driver_sqlite_statement.c	statements and values
 *	driver_sqlite_table.c	looking at a table
 *	driver_sqlite_handler.c	handlers that are SQL
 *	driver_sqlite_install.c	our own tables
 *	keys.c					advisory keys, which are the process's
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_DRIVER_SQLITE_H
#define RUSTSTREAM_DRIVER_SQLITE_H

#include <sqlite3.h>

#include "client/client.h"
#include "client/keys.h"

/* The oldest version with RETURNING. */
#define RS_SQLITE_OLDEST 3035000

/* Statements of a handler that are kept prepared. */
#define RS_MAX_HANDLER_STATEMENTS 16

/* A statement of a handler, prepared. */
typedef struct rs_sqlite_handler_statement
{
	sqlite3_stmt *statement;
	size_t end; /* where in the handler's text it ends */
	/* The numbers of :id, :payload, :attempt and :headers; 0: it has none such. */
	int id;
	int payload;
	int attempt;
	int headers;
} rs_sqlite_handler_statement;

typedef struct rs_sqlite_session
{
	rs_session base;
	sqlite3 *db;
	sqlite3_stmt *kept[RS_SLOT_COUNT];

	int64_t busy_limit; /* microseconds that a lock is waited for */
	int64_t busy_until; /* of the statement under way; monotonic */

	int64_t next_file_check; /* of the monotonic clock */

	/* A handler that is SQL: its statements, and what it has answered. */
	char *handler;
	rs_sqlite_handler_statement handler_statements[RS_MAX_HANDLER_STATEMENTS];
	int handler_count;
	rs_answer *answer; /* while it runs */

	bool handles; /* a handler runs: our settings are not its to change */
	bool guards;  /* .. and transactions are not its to end */
	bool denied_setting;

	rs_key_file *keys; /* once the advisory lock form is used */
	int64_t data_version;
} rs_sqlite_session;

extern rs_result rs_sqlite_fail(rs_sqlite_session *session);
/* RS_LOST where the file is not the one of its name any more. */
extern rs_result rs_sqlite_check_file(rs_session *base);
/* One or more statements without values. */
extern rs_result rs_sqlite_run(rs_sqlite_session *session, const char *text);

/* driver_sqlite_statement.c */
/* Bind parameter number n; what it points to must last until the bindings are cleared. */
extern int rs_sqlite_bind(sqlite3_stmt *statement, int n, const rs_value *value);
extern rs_result rs_sqlite_execute(rs_session *base, const rs_command *command,
								   const rs_value *values, int count, rs_row_callback row,
								   void *arg, int64_t *affected);
extern void rs_sqlite_forget_statements(rs_session *base);

/* driver_sqlite_table.c */
extern rs_result rs_sqlite_look(rs_session *base, const rs_table *table, rs_arena *arena,
								rs_look *look);

/* driver_sqlite_install.c */
extern rs_result rs_sqlite_install(rs_session *base, bool with_wal,
								   ruststream_notice_callback notice, void *arg);
extern rs_result rs_sqlite_find_version(rs_session *base, int64_t *version);

/* driver_sqlite_handler.c */
extern bool rs_sqlite_register_functions(rs_sqlite_session *session);
extern rs_result rs_sqlite_check_handler(rs_session *base, const char *handler);
extern const char *rs_sqlite_left_open(rs_session *base);
extern rs_result rs_sqlite_call_handler(rs_session *base, const char *handler,
										const ruststream_delivery *delivery, const rs_value *id,
										const rs_value *payload, bool transactional,
										rs_answer *answer);
extern void rs_sqlite_guard(rs_session *base, bool on, bool transactional);
extern rs_result rs_sqlite_check_writes(rs_session *base);
extern rs_result rs_sqlite_judge_failure(rs_session *base);
extern void rs_sqlite_forget_handler(rs_sqlite_session *session);

#endif /* RUSTSTREAM_DRIVER_SQLITE_H */
