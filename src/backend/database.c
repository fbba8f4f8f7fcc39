/*-------------------------------------------------------------------------
 *
 * database.c
 *	  Commands that need a database without sessions, or our extension without
 *	  users: our processes there leave before such a command starts its work.
 *
 * DROP DATABASE, ALTER DATABASE .. RENAME and SET TABLESPACE, and CREATE
 * DATABASE for its template, refuse to work beside other sessions; DROP
 * EXTENSION would have to wait for the locks of deliveries in work.  So a
 * database is marked as closing, its supervisor and workers are terminated,
 * and nothing of ours starts there until the transaction of the command has
 * ended, however it ends.
 *
 * And two that bring work without a transaction of ours: COMMIT PREPARED, whose
 * transaction may have registered something, and ALTER DATABASE .. with
 * ALLOW_CONNECTIONS, whose database could not be looked at before.
 *
 * The hook raises no errors of its own: a command that the user may not give,
 * or that cannot work, is left to the standard code to refuse, and stops
 * nobody's workers.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "catalog/pg_extension.h"
#include "commands/dbcommands.h"
#include "commands/defrem.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "tcop/utility.h"
#include "utils/syscache.h"

#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/shared.h"

/* As long as the standard code waits; then it has its say about who is there. */
#define LEAVE_TIMEOUT_MSEC 5000

/* Databases that one transaction may keep closed; more are left alone. */
#define MAX_CLOSED 16

typedef struct Closed
{
	Oid dboid;
	bool forget; /* if it commits, the subscriptions are no more */
} Closed;

static Closed closed[MAX_CLOSED];
static int nclosed = 0;

static ProcessUtility_hook_type previous_process_utility = NULL;

/*
 * Terminate our processes in a database; with signal = false, only count them.
 * A process that has been registered but is not there yet finds its cookie
 * gone, and leaves before it connects.  A worker whose handler gives the
 * command does not count.
 */
static int
evict(Oid dboid, bool signal)
{
	RsDatabase *database;
	int present = 0;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	database = rs_database_find(dboid);
	if (database != NULL && database->pid != 0)
	{
		present++;
		if (signal)
			kill(database->pid, SIGTERM);
	}
	else if (database != NULL)
		database->cookie = 0;

	present += rs_entries_evict(dboid, signal);
	LWLockRelease(rs_shared->lock);
	return present;
}

/*
 * Close a database until the transaction ends, and wait until our processes
 * have left it.
 */
static void
close_database(Oid dboid, bool forget)
{
	RsDatabase *database;
	TimestampTz deadline;
	int i = 0;

	while (i < nclosed && closed[i].dboid != dboid)
		i++;
	if (i == MAX_CLOSED)
		return;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	database = rs_database_get(dboid);
	if (database == NULL)
	{
		/* All entries are taken: then no process of ours can be there. */
		LWLockRelease(rs_shared->lock);
		return;
	}
	if (i == nclosed)
	{
		closed[i].dboid = dboid;
		closed[i].forget = false;
		nclosed++;
		database->closing++;
		if (database->cookie != 0)
			database->wanted = true;
	}
	closed[i].forget |= forget;
	LWLockRelease(rs_shared->lock);

	if (evict(dboid, true) == 0)
		return;

	deadline = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), LEAVE_TIMEOUT_MSEC);
	ConditionVariablePrepareToSleep(&rs_shared->left);
	while (evict(dboid, false) > 0)
	{
		long timeout = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), deadline);

		if (timeout <= 0)
			break;
		ConditionVariableTimedSleep(&rs_shared->left, timeout, PG_WAIT_EXTENSION);
	}
	ConditionVariableCancelSleep();
}

/* At the end of a transaction, when it is too late for errors. */
void
rs_database_reopen(bool committed)
{
	if (nclosed == 0)
		return;

	for (int i = 0; i < nclosed; i++)
	{
		RsDatabase *database;

		if (committed && closed[i].forget)
			rs_stats_forget(closed[i].dboid, NULL, 0);

		LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
		database = rs_database_find(closed[i].dboid);
		if (database != NULL)
		{
			database->closing--;
			if (database->wanted)
				rs_database_want(database);
			else
				rs_database_release(database);
		}
		LWLockRelease(rs_shared->lock);
	}
	nclosed = 0;
}

/* May this user drop, rename or move this database, as far as we can tell? */
static Oid
own_database(const char *name)
{
	Oid dboid = get_database_oid(name, true);

	if (!OidIsValid(dboid) || dboid == MyDatabaseId || !rs_database_ownercheck(dboid, GetUserId()))
		return InvalidOid;
	return dboid;
}

/* The template of a CREATE DATABASE, if this user may copy it. */
static Oid
template_database(const CreatedbStmt *stmt)
{
	const char *name = "template1";
	ListCell *cell;
	Oid dboid;
	HeapTuple tuple;
	bool allowed = false;

	foreach (cell, stmt->options)
	{
		DefElem *option = lfirst_node(DefElem, cell);

		if (strcmp(option->defname, "template") == 0 && option->arg != NULL)
			name = defGetString(option);
	}
	if (!have_createdb_privilege())
		return InvalidOid;

	dboid = get_database_oid(name, true);
	tuple = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(dboid));
	if (HeapTupleIsValid(tuple))
	{
		allowed = ((Form_pg_database) GETSTRUCT(tuple))->datistemplate ||
				  rs_database_ownercheck(dboid, GetUserId());
		ReleaseSysCache(tuple);
	}
	return allowed ? dboid : InvalidOid;
}

static bool
sets_tablespace(const AlterDatabaseStmt *stmt)
{
	ListCell *cell;

	foreach (cell, stmt->options)
	{
		if (strcmp(lfirst_node(DefElem, cell)->defname, "tablespace") == 0)
			return true;
	}
	return false;
}

/* Does the command drop our extension, and may this user do that? */
static bool
drops_extension(const DropStmt *stmt)
{
	ListCell *cell;

	if (stmt->removeType != OBJECT_EXTENSION)
		return false;
	foreach (cell, stmt->objects)
	{
		Oid extension;

		if (strcmp(strVal(lfirst(cell)), "ruststream") != 0)
			continue;
		extension = get_extension_oid("ruststream", true);
		return OidIsValid(extension) && rs_extension_ownercheck(extension, GetUserId());
	}
	return false;
}

/*
 * Make room for a command.  Where it may not run inside a transaction block
 * we say so ourselves, before anybody is stopped for it.
 */
static void
make_room(Node *command, bool toplevel)
{
	Oid dboid = InvalidOid;
	bool forget = false;

	switch (nodeTag(command))
	{
		case T_DropdbStmt:
			PreventInTransactionBlock(toplevel, "DROP DATABASE");
			dboid = own_database(((DropdbStmt *) command)->dbname);
			forget = true;
			break;
		case T_CreatedbStmt:
			PreventInTransactionBlock(toplevel, "CREATE DATABASE");
			dboid = template_database((CreatedbStmt *) command);
			break;
		case T_AlterDatabaseStmt:
			if (sets_tablespace((AlterDatabaseStmt *) command))
			{
				PreventInTransactionBlock(toplevel, "ALTER DATABASE SET TABLESPACE");
				dboid = own_database(((AlterDatabaseStmt *) command)->dbname);
			}
			break;
		case T_RenameStmt:
			if (((RenameStmt *) command)->renameType == OBJECT_DATABASE &&
				have_createdb_privilege())
				dboid = own_database(((RenameStmt *) command)->subname);
			break;
		case T_DropStmt:
			if (drops_extension((DropStmt *) command))
				dboid = MyDatabaseId;
			forget = true;
			break;
		default:
			break;
	}
	if (OidIsValid(dboid))
		close_database(dboid, forget);
}

/*
 * COMMIT PREPARED leaves no word of what the transaction did.  A database
 * without the extension is none of our business.
 */
static void
look_again(void)
{
	RsDatabase *database;
	bool served;

	LWLockAcquire(rs_shared->lock, LW_SHARED);
	database = rs_database_find(MyDatabaseId);
	served = (database != NULL && database->cookie != 0);
	LWLockRelease(rs_shared->lock);
	if (served || rs_objects(true) != NULL)
		rs_wake_supervisor_at_commit();
}

static bool
allows_connections(const AlterDatabaseStmt *stmt)
{
	ListCell *cell;

	foreach (cell, stmt->options)
	{
		DefElem *option = lfirst_node(DefElem, cell);

		if (strcmp(option->defname, "allow_connections") == 0)
			return option->arg == NULL || defGetBoolean(option);
	}
	return false;
}

static void
process_utility(PlannedStmt *pstmt, const char *queryString, bool readOnlyTree,
				ProcessUtilityContext context, ParamListInfo params, QueryEnvironment *queryEnv,
				DestReceiver *dest, QueryCompletion *qc)
{
	Node *command = pstmt->utilityStmt;
	bool prepared = IsA(command, TransactionStmt) &&
					((TransactionStmt *) command)->kind == TRANS_STMT_COMMIT_PREPARED;
	Oid opened = InvalidOid;

	if (!XactReadOnly)
		make_room(command, context == PROCESS_UTILITY_TOPLEVEL);

	if (previous_process_utility != NULL)
		previous_process_utility(pstmt, queryString, readOnlyTree, context, params, queryEnv, dest,
								 qc);
	else
		standard_ProcessUtility(pstmt, queryString, readOnlyTree, context, params, queryEnv, dest,
								qc);

	if (prepared)
		look_again();
	if (IsA(command, AlterDatabaseStmt) && allows_connections((AlterDatabaseStmt *) command))
		opened = get_database_oid(((AlterDatabaseStmt *) command)->dbname, true);
	if (OidIsValid(opened))
		rs_announce_at_commit(opened);
}

void
rs_database_init(void)
{
	previous_process_utility = ProcessUtility_hook;
	ProcessUtility_hook = process_utility;
}
