/*-------------------------------------------------------------------------
 *
 * driver_mysql.h
 *	  What the files of the driver for MySQL and MariaDB share; the only one that
 *	  includes the header of libmariadb, which speaks to both.
 *
 *	driver_mysql.c				sessions, transactions, keys
 *	driver_mysql_connect.c		a connection, as the URL wants it
 *	driver_mysql_statement.c	statements that are prepared
 *	driver_mysql_claim.c		claims, which are several statements
 *	driver_mysql_table.c		looking at a table
 *	driver_mysql_text.c			the text of a handler that is SQL
 *	driver_mysql_handler.c		running it, and how it answers
 *	driver_mysql_install.c		our own tables
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_DRIVER_MYSQL_H
#define RUSTSTREAM_DRIVER_MYSQL_H

#include <mysql.h>

#include "client/client.h"

/* The oldest versions with SKIP LOCKED. */
#define RS_MYSQL_OLDEST 80001
#define RS_MARIADB_OLDEST 100600

/* Errors that are looked at by number. */
enum
{
	RS_MYSQL_LOCK_WAIT_TIMEOUT = 1205,
	RS_MYSQL_DEADLOCK = 1213,
	RS_MYSQL_RECORD_CHANGED = 1020,
	RS_MYSQL_LOCK_NOWAIT = 3572,
	RS_MYSQL_BINLOG_STATEMENT = 1665,
	RS_MYSQL_NO_SUCH_TABLE = 1146,
	RS_MYSQL_NO_SUCH_SAVEPOINT_OR_ROUTINE = 1305,
	RS_MYSQL_NEEDS_PREPARING = 1615,
	RS_MYSQL_UNKNOWN_STATEMENT = 1243,
	RS_MYSQL_UNPREPARABLE = 1295,
	RS_MYSQL_SIGNAL = 1644, /* one of a handler's own */
	RS_MYSQL_ACCESS_DENIED = 1045,
	RS_MYSQL_SHUTDOWN = 1053,
	RS_MYSQL_CONNECTION_KILLED = 1927,
	RS_MYSQL_SESSION_KILLED = 3169,
	RS_MYSQL_DISCONNECTED = 4031
};

/* A result's column, in memory that grows with what is read. */
typedef struct rs_mysql_column
{
	char *buffer;
	unsigned long size;
	unsigned long length;
	long long integer;
	double real;
	my_bool is_null;
} rs_mysql_column;

#define RS_MYSQL_MAX_COLUMNS 32

/* A statement's values, where the condition on each row that is left alone has so many. */
#define RS_MYSQL_MAX_HELD_VALUES 4
#define RS_MYSQL_MAX_VALUES (RS_MAX_PARAMETERS + RS_MAX_HELD * RS_MYSQL_MAX_HELD_VALUES)

/* A prepared statement. */
typedef struct rs_mysql_statement
{
	char *text;
	MYSQL_STMT *prepared;
	rs_mysql_column *columns; /* RS_MYSQL_MAX_COLUMNS, once it has returned rows */
} rs_mysql_statement;

/* What stands at a parameter's place in a handler. */
typedef enum rs_mysql_argument
{
	RS_ARGUMENT_ID,
	RS_ARGUMENT_PAYLOAD,
	RS_ARGUMENT_ATTEMPT,
	RS_ARGUMENT_HEADERS,
	RS_ARGUMENT_COUNT
} rs_mysql_argument;

#define RS_MYSQL_MAX_HANDLER_STATEMENTS 16
#define RS_MYSQL_MAX_ARGUMENTS 32

/* One statement of a handler that is SQL. */
typedef struct rs_mysql_handler_statement
{
	rs_mysql_statement statement;
	rs_mysql_argument arguments[RS_MYSQL_MAX_ARGUMENTS];
	int argument_count;
	bool is_text; /* run as text, since the server does not prepare it */
} rs_mysql_handler_statement;

typedef struct rs_mysql_session
{
	rs_session base;
	MYSQL *db;
	const rs_url *url;
	bool is_mariadb;
	unsigned long version; /* 10.11.6 is 101106 */
	unsigned long thread_id;
	MYSQL *killer;  /* the connection of rs_driver.interrupt, once it was needed */
	char *settings; /* what rs_mysql_settings tells of a session that is as we want it */
	char *limits;   /* the statement that sets others as they were at the beginning */
	char *database; /* the URL's, as the server spells it */

	unsigned code;       /* the number of the last error */
	bool is_lost;        /* of no more use */
	bool may_be_open;    /* a transaction may be: the server does not tell with errors */
	bool in_transaction; /* begin has been called, and no commit or rollback since */
	bool has_savepoint;
	bool needs_set_up; /* before the next transaction, because a handler has changed settings */
	char *guard;       /* the named lock of a partition key, held until the transaction ends */
	int fifo_misses;   /* claims of a FIFO group in a row that have found a row of it locked */

	rs_mysql_statement kept[RS_SLOT_COUNT];

	/* A handler that is SQL, as it was written, and its statements. */
	char *handler;
	rs_mysql_handler_statement handler_statements[RS_MYSQL_MAX_HANDLER_STATEMENTS];
	int handler_count;
	bool has_answer; /* the variables of an answer may be set */
} rs_mysql_session;

/* Slots behind those of the catalogue. */
enum
{
	RS_MYSQL_SLOT_NOW = RS_OPERATION_COUNT * 4,
	RS_MYSQL_SLOT_LOCK,
	RS_MYSQL_SLOT_UNLOCK,
	RS_MYSQL_SLOT_HELD,
	RS_MYSQL_SLOT_ANSWER
};

static inline rs_mysql_session *
rs_mysql_of(rs_session *base)
{
	return (rs_mysql_session *) base;
}

/* driver_mysql.c */

/* The connection's last error, and that of a statement. */
extern rs_result rs_mysql_fail(rs_mysql_session *session);
extern rs_result rs_mysql_fail_statement(rs_mysql_session *session, MYSQL_STMT *prepared);
/* An error of our own. */
extern rs_result rs_mysql_refuse(rs_mysql_session *session, const char *hint, const char *format,
								 ...) __attribute__((format(printf, 3, 4)));
extern rs_result rs_mysql_no_memory(rs_mysql_session *session);
/* Run one statement of no parameters, and ignore what it returns. */
extern rs_result rs_mysql_run(rs_mysql_session *session, const char *text);
/* An expression that tells the settings which our statements rely on. */
extern const char *rs_mysql_settings(const rs_mysql_session *session);
/* Have them as we want them; autocommit only outside a transaction, which it would commit. */
extern rs_result rs_mysql_set_up(rs_mysql_session *session, bool with_autocommit);
extern rs_result rs_mysql_begin(rs_session *base, rs_purpose purpose, const rs_table *table);
extern rs_result rs_mysql_commit(rs_session *base);
/* Release the named lock that is the transaction's, if there is one. */
extern void rs_mysql_release_guard(rs_mysql_session *session);
extern rs_result rs_mysql_lock_key(rs_session *base, const char *key, bool *locked);
extern void rs_mysql_unlock_key(rs_session *base, const char *key);
extern bool rs_mysql_key_is_held(rs_session *base, const char *key);

/* driver_mysql_connect.c */

/* NULL where it fails: only error is filled in then. */
extern MYSQL *rs_mysql_connect(const rs_url *url, rs_error *error);

/* driver_mysql_statement.c */
extern rs_result rs_mysql_execute(rs_session *base, const rs_command *command,
								  const rs_value *values, int count, rs_row_callback row, void *arg,
								  int64_t *affected);
/* Prepare text into an empty statement, and bind values to it. */
extern rs_result rs_mysql_prepare(rs_mysql_session *session, rs_mysql_statement *statement,
								  const char *text, size_t length);
extern rs_result rs_mysql_bind(rs_mysql_session *session, rs_mysql_statement *statement,
							   const rs_value *values, int count);
extern void rs_mysql_drop(rs_mysql_statement *statement);
extern void rs_mysql_forget_statements(rs_session *base);

/* driver_mysql_claim.c */
extern rs_result rs_mysql_claim(rs_session *base, struct rs_plan *plan, rs_value *values,
								rs_row_callback row, void *arg);
extern rs_result rs_mysql_candidates(rs_session *base, struct rs_plan *plan, rs_value *values,
									 rs_row_callback row, void *arg);
extern rs_result rs_mysql_is_head(rs_session *base, struct rs_plan *plan, rs_value *values,
								  bool *is_head);

/* driver_mysql_table.c */
extern rs_result rs_mysql_look(rs_session *base, const rs_table *table, rs_arena *arena,
							   rs_look *look);
extern rs_result rs_mysql_check_plan(rs_session *base, const struct rs_plan *plan,
									 const char **warning);

/* driver_mysql_text.c */

/* A statement as it is prepared, with ? in its arguments' places. */
typedef struct rs_mysql_reading
{
	char *text; /* as large as the handler */
	size_t length;
	rs_mysql_argument arguments[RS_MYSQL_MAX_ARGUMENTS];
	int argument_count;
	bool is_empty; /* space and comments */
} rs_mysql_reading;

/* Read one statement and move behind it. */
extern rs_result rs_mysql_read_statement(rs_mysql_session *session, const char **cursor,
										 rs_mysql_reading *into);
/* "name" or "schema.name", and nothing else; quoted by backticks or not. */
extern bool rs_mysql_is_procedure_name(const char *text);
/* The CALL of a procedure, by the names of its parameters; *text is to be freed. */
extern rs_result rs_mysql_make_call(rs_mysql_session *session, const char *handler, char **text);

/* driver_mysql_handler.c */
extern rs_result rs_mysql_check_handler(rs_session *base, const char *handler);
extern const char *rs_mysql_left_open(rs_session *base);
extern rs_result rs_mysql_call_handler(rs_session *base, const char *handler,
									   const ruststream_delivery *delivery, const rs_value *id,
									   const rs_value *payload, bool transactional,
									   rs_answer *answer);
extern rs_result rs_mysql_check_writes(rs_session *base);
extern void rs_mysql_forget_handler(rs_mysql_session *session);

/* driver_mysql_install.c */
extern const char *const rs_mysql_catalog[RS_CATALOG_COUNT];
extern rs_result rs_mysql_install(rs_session *base, bool with_wal,
								  ruststream_notice_callback notice, void *arg);
extern rs_result rs_mysql_find_version(rs_session *base, int64_t *version);

#endif /* RUSTSTREAM_DRIVER_MYSQL_H */
