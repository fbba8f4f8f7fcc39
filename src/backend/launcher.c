/*-------------------------------------------------------------------------
 *
 * launcher.c
 *	  The launcher, one a cluster: starts a supervisor in each database that has
 *	  the extension.
 *
 * It is connected to no database, so it cannot know where the extension is.  At
 * its own start it has a supervisor look at each database, one after another,
 * which leaves at once where there is nothing for it to do.  Afterwards it
 * sleeps until it is told: by a transaction that has installed the extension
 * or changed a registration, by a supervisor that exits, or by a command that
 * had a database closed.  Nothing is polled.
 *
 * The postmaster starts it after recovery only, so a standby is quiet until it
 * is promoted, and restarts it whenever it ends.  Supervisors do not need it
 * while they run: a new launcher finds them in shared memory.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "storage/ipc.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/shared.h"

/* A supervisor that takes longer than this to settle holds up no other. */
#define SETTLE_TIMEOUT_MSEC 5000

/* Lines about missing slots, at most one in this time. */
#define COMPLAIN_MSEC 60000

/*
 * Supervisors registered by this launcher that have not attached yet: the
 * handle tells of one that never will.  By entry of RsShared.database.
 */
typedef struct Registration
{
	uint64 cookie;
	BackgroundWorkerHandle *handle; /* NULL: none */
} Registration;

static Registration registration[RS_MAX_DATABASES];

/* Databases still to be looked at since this launcher has started. */
static List *unseen = NIL;

static TimestampTz last_complaint = 0;

void
rs_launcher_register(void)
{
	BackgroundWorker worker = {0};

	strlcpy(worker.bgw_name, "ruststream launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "ruststream launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_library_name, "ruststream", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "rs_launcher_main", BGW_MAXLEN);
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = 1;
	RegisterBackgroundWorker(&worker);
}

/* -------------------------------------------------------------- pg_database */

/* Earlier releases of 15 do not know of databases that a failed DROP has left invalid. */
#ifndef DATCONNLIMIT_INVALID_DB
#define DATCONNLIMIT_INVALID_DB (-2)
#endif

static bool
accepts_connections(Form_pg_database database)
{
	return database->datallowconn && database->datconnlimit != DATCONNLIMIT_INVALID_DB;
}

/* The databases that accept connections, or that one if it does. */
static List *
list_databases(Oid only)
{
	List *databases = NIL;
	Relation relation;
	TableScanDesc scan;
	HeapTuple tuple;

	pgstat_report_activity(STATE_RUNNING, "reading pg_database");
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	(void) GetTransactionSnapshot();

	relation = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(relation, 0, NULL);
	while (HeapTupleIsValid(tuple = heap_getnext(scan, ForwardScanDirection)))
	{
		Form_pg_database database = (Form_pg_database) GETSTRUCT(tuple);
		MemoryContext save;

		if (!accepts_connections(database) || (OidIsValid(only) && database->oid != only))
			continue;
		save = MemoryContextSwitchTo(TopMemoryContext);
		databases = lappend_oid(databases, database->oid);
		MemoryContextSwitchTo(save);
	}
	table_endscan(scan);
	table_close(relation, AccessShareLock);
	CommitTransactionCommand();
	return databases;
}

static bool
can_connect(Oid dboid)
{
	List *found = list_databases(dboid);
	bool result = (found != NIL);

	list_free(found);
	return result;
}

/* -------------------------------------------------------------- supervisors */

/* The caller holds the lock: this entry's supervisor did not get under way. */
static void
start_failed(RsDatabase *database)
{
	database->cookie = 0;
	database->wanted = true;
	database->restarts++;
	database->next_start =
		TimestampTzPlusMilliseconds(GetCurrentTimestamp(), rs_restart_delay(database->restarts));
}

/* Look after the registrations: who has come, and who never will. */
static void
check_registrations(void)
{
	for (int i = 0; i < RS_MAX_DATABASES; i++)
	{
		RsDatabase *database = &rs_shared->database[i];
		Registration *mine = &registration[i];
		pid_t pid;
		bool stopped;

		if (mine->handle == NULL)
			continue;
		stopped = (GetBackgroundWorkerPid(mine->handle, &pid) == BGWH_STOPPED);

		LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
		if (database->cookie != mine->cookie || database->pid != 0)
			stopped = true; /* it has attached, or left, or may not attach */
		else if (stopped)
			start_failed(database);
		LWLockRelease(rs_shared->lock);

		if (stopped)
		{
			pfree(mine->handle);
			mine->handle = NULL;
		}
	}
}

/*
 * Choose the database that is to get a supervisor now.  Returns InvalidOid if
 * there is none, and says when to look again at the latest.
 */
static Oid
choose_database(TimestampTz *until)
{
	TimestampTz now = GetCurrentTimestamp();
	Oid chosen = InvalidOid;
	bool unsettled = false;

	*until = DT_NOEND;
	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < RS_MAX_DATABASES; i++)
	{
		RsDatabase *database = &rs_shared->database[i];

		if (!OidIsValid(database->dboid))
			continue;
		if (database->cookie != 0)
		{
			TimestampTz settles =
				TimestampTzPlusMilliseconds(database->started_at, SETTLE_TIMEOUT_MSEC);

			if (!database->settled && settles > now)
			{
				unsettled = true;
				*until = Min(*until, settles);
			}
		}
		else if (database->wanted && database->closing == 0)
		{
			if (database->next_start <= now)
				chosen = database->dboid;
			else
				*until = Min(*until, database->next_start);
		}
	}

	/* One after another. */
	if (unsettled)
		chosen = InvalidOid;
	while (!unsettled && !OidIsValid(chosen) && unseen != NIL)
	{
		RsDatabase *database = rs_database_get(llast_oid(unseen));

		unseen = list_delete_last(unseen);
		if (database == NULL || database->cookie != 0 || database->wanted)
			continue;
		database->wanted = true;
		if (database->closing == 0)
			chosen = database->dboid;
	}
	LWLockRelease(rs_shared->lock);
	return chosen;
}

/* The database is gone, or takes no connections: nobody is wanted there. */
static void
forget_database(Oid dboid)
{
	RsDatabase *database;

	rs_stats_forget(dboid, NULL, 0);
	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	database = rs_database_find(dboid);
	if (database != NULL)
	{
		database->wanted = false;
		rs_database_release(database);
	}
	LWLockRelease(rs_shared->lock);
}

static void
complain(void)
{
	TimestampTz now = GetCurrentTimestamp();

	if (!TimestampDifferenceExceeds(last_complaint, now, COMPLAIN_MSEC))
		return;
	last_complaint = now;
	ereport(LOG,
			(errmsg("ruststream cannot start a supervisor: all worker processes are in use"),
			 errhint("Raise max_worker_processes: ruststream needs one for its launcher, one for "
					 "each database that uses it, one for each worker, and one for each role "
					 "there that owns subscriptions to queues of the lease form.")));
}

static void
start_supervisor(Oid dboid)
{
	BackgroundWorker worker = {0};
	BackgroundWorkerHandle *handle;
	RsSupervisorArgs args = {0};
	RsDatabase *database;
	MemoryContext save;
	bool registered;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	database = rs_database_find(dboid);
	if (database == NULL || !database->wanted || database->cookie != 0 || database->closing > 0)
	{
		LWLockRelease(rs_shared->lock);
		return;
	}
	args.database = dboid;
	args.cookie = ++rs_shared->last_cookie;
	database->cookie = args.cookie;
	database->pid = 0;
	database->settled = false;
	database->started_at = GetCurrentTimestamp();
	LWLockRelease(rs_shared->lock);

	snprintf(worker.bgw_name, BGW_MAXLEN, "ruststream supervisor of database %u", dboid);
	strlcpy(worker.bgw_type, "ruststream supervisor", BGW_MAXLEN);
	strlcpy(worker.bgw_library_name, "ruststream", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "rs_supervisor_main", BGW_MAXLEN);
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	worker.bgw_notify_pid = MyProcPid;
	StaticAssertStmt(sizeof(args) <= BGW_EXTRALEN, "arguments must fit");
	memcpy(worker.bgw_extra, &args, sizeof(args));

	save = MemoryContextSwitchTo(TopMemoryContext);
	registered = RegisterDynamicBackgroundWorker(&worker, &handle);
	MemoryContextSwitchTo(save);

	if (registered)
	{
		Registration *mine = &registration[database - rs_shared->database];

		if (mine->handle != NULL)
			pfree(mine->handle);
		mine->handle = handle;
		mine->cookie = args.cookie;
		return;
	}

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	if (database->dboid == dboid && database->cookie == args.cookie)
		start_failed(database);
	LWLockRelease(rs_shared->lock);
	complain();
}

/* -------------------------------------------------------------------- main */

static void
launcher_exit(int code, Datum arg)
{
	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	rs_shared->launcher = NULL;
	LWLockRelease(rs_shared->lock);
}

static void
launcher_attach(void)
{
	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	rs_shared->launcher = MyLatch;

	/* Whom a launcher before us registered, and who is not there yet: not needed. */
	for (int i = 0; i < RS_MAX_DATABASES; i++)
	{
		RsDatabase *database = &rs_shared->database[i];

		if (database->cookie != 0 && database->pid == 0)
		{
			database->cookie = 0;
			database->wanted = true;
		}
	}
	LWLockRelease(rs_shared->lock);
	before_shmem_exit(launcher_exit, (Datum) 0);
}

/* After a crash: say what was in work, as it may be the cause, and wait. */
static void
recover_from_crash(void)
{
	const RsCrash *crash = &rs_shared->crash;
	TimestampTz now = GetCurrentTimestamp();
	bool logged;

	LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
	logged = rs_shared->crash_logged;
	rs_shared->crash_logged = true;
	LWLockRelease(rs_shared->lock);

	if (crash->in_a_row > 0 && !logged)
	{
		for (int i = 0; i < Min(crash->deliveries, RS_MAX_CRASHED); i++)
		{
			const RsCrashed *crashed = &crash->delivery[i];

			ereport(LOG,
					(errmsg("ruststream had row %s of %s in work for subscription \"%s\" when the "
							"server crashed",
							crashed->id, crashed->queue_name, crashed->subscription_name),
					 errdetail("Attempt " INT64_FORMAT ", process %d, database %u.",
							   crashed->attempt, (int) crashed->pid, crashed->database)));
		}
		if (crash->deliveries > RS_MAX_CRASHED)
			ereport(LOG, (errmsg("ruststream had %d more rows in work when the server crashed",
								 crash->deliveries - RS_MAX_CRASHED)));
		ereport(LOG,
				(errmsg_plural("ruststream starts again in %ld ms, after %d crash of the server",
							   "ruststream starts again in %ld ms, after %d crashes of the server "
							   "in a row",
							   crash->in_a_row,
							   TimestampDifferenceMilliseconds(now, rs_shared->quiet_until),
							   crash->in_a_row)));
	}

	while (GetCurrentTimestamp() < rs_shared->quiet_until)
	{
		rs_process_interrupts_or_exit(1);
		rs_process_wait(rs_shared->quiet_until);
	}
}

void
rs_launcher_main(Datum arg)
{
	/* It has no statement that a cancel could be meant for. */
	rs_process_signals(SIG_IGN);
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	rs_process_name("ruststream launcher");

	launcher_attach();
	recover_from_crash();
	unseen = list_databases(InvalidOid);

	for (;;)
	{
		TimestampTz until;
		Oid dboid;

		rs_process_interrupts_or_exit(1);
		check_registrations();
		dboid = choose_database(&until);
		if (!OidIsValid(dboid))
			rs_process_wait(until);
		else if (can_connect(dboid))
			start_supervisor(dboid);
		else
			forget_database(dboid);
	}
}
