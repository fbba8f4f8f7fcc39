/*-------------------------------------------------------------------------
 *
 * supervisor.c
 *	  The supervisor, one a database: reads the subscriptions and keeps their
 *	  workers running, and a heartbeat for each owner that needs one.
 *
 * Whenever its latch is set (a registration has changed, a worker has left, the
 * configuration was reloaded, a failure was recorded) and whenever a restart
 * comes due, it reads the subscriptions in a short transaction, compares them
 * with the processes it has, and stops and starts until they agree.  It keeps
 * nothing else in mind than how often starts have failed, so an error may end
 * it at any time: the launcher starts another one, which finds the processes
 * in shared memory.
 *
 * It is connected as the bootstrap superuser, and reads our own catalogs only:
 * it never touches a user's table.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/transam.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_database.h"
#include "commands/dbcommands.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "storage/ipc.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "backend/backend.h"
#include "backend/catalog.h"
#include "backend/compat.h"
#include "backend/shared.h"
#include "backend/supervisor.h"

/* The history of failures is pruned no more often than this. */
#define PRUNE_MSEC 10000

#define COMPLAIN_MSEC 60000

/* How often a subscription that may not run is looked at again. */
#define PROBLEM_MSEC 5000

#define WAITING_FOR_SLOT                                                                           \
	"waiting for a worker slot: raise max_worker_processes or ruststream.max_workers"

/* All in TopMemoryContext. */
static List *subscriptions = NIL;
static bool adopted = false;

/* Starts that found no slot, whoever's they were. */
static int slot_failures = 0;
static TimestampTz slot_retry = 0;
static TimestampTz last_complaint = 0;

static TimestampTz last_prune = 0;

static char database_name[NAMEDATALEN];

/* ------------------------------------------------------- reading subscriptions */

bool
rs_owner_refusal(Oid owner, char *reason, Size size)
{
	HeapTuple tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(owner));
	const char *name;
	bool can_login;

	if (!HeapTupleIsValid(tuple))
	{
		strlcpy(reason, "its owner no longer exists", size);
		return true;
	}
	name = pstrdup(NameStr(((Form_pg_authid) GETSTRUCT(tuple))->rolname));
	can_login = ((Form_pg_authid) GETSTRUCT(tuple))->rolcanlogin;
#if PG_VERSION_NUM >= 170000
	can_login = true; /* the check can be bypassed */
#endif
	ReleaseSysCache(tuple);

	if (!can_login)
		snprintf(reason, size, "its owner \"%s\" has no LOGIN, so no worker can connect as it",
				 name);
	else if (rs_database_aclcheck(MyDatabaseId, owner, ACL_CONNECT) != ACLCHECK_OK)
		snprintf(reason, size, "its owner \"%s\" may not CONNECT to this database", name);
	else
		return false;
	return true;
}

/* A superuser must not run what somebody else attached to his table, or to a partition of it. */
static bool
check_superuser(RsSupervised *subscription, Oid relid, const char *owner)
{
	Oid table = OidIsValid(relid) ? rs_not_of_superuser(relid) : InvalidOid;

	if (!OidIsValid(table))
		return true;
	if (table == subscription->queue)
		snprintf(subscription->problem, RS_REASON_BYTES,
				 "its owner \"%s\" is a superuser, the owner of its queue is not", owner);
	else
		snprintf(subscription->problem, RS_REASON_BYTES,
				 "its owner \"%s\" is a superuser, the owner of table %s is not", owner,
				 rs_relation_label(table));
	return false;
}

/*
 * Can a process connect as the owner, and may it serve this queue?  Says why
 * not.  Whatever else may be wrong, the worker finds out.
 */
static void
check_owner(RsSupervised *subscription, Oid dead_letter_table)
{
	const char *name;

	if (rs_owner_refusal(subscription->owner, subscription->problem, RS_REASON_BYTES) ||
		!superuser_arg(subscription->owner))
		return;
	name = GetUserNameFromId(subscription->owner, false);
	if (check_superuser(subscription, subscription->queue, name))
		(void) check_superuser(subscription, dead_letter_table, name);
}

/* Take over one row of ruststream.subscription. */
static void
take_row(HeapTuple tuple, TupleDesc desc)
{
	bool isnull;
	int32 id = DatumGetInt32(SPI_getbinval(tuple, desc, 1, &isnull));
	const char *name = SPI_getvalue(tuple, desc, 2);
	Oid database = DatumGetObjectId(SPI_getbinval(tuple, desc, 5, &isnull));
	uint64 identifier = (uint64) DatumGetInt64(SPI_getbinval(tuple, desc, 6, &isnull));
	bool paused = DatumGetBool(SPI_getbinval(tuple, desc, 7, &isnull));
	bool quiet = paused || database != MyDatabaseId || identifier != GetSystemIdentifier();
	int workers = DatumGetInt32(SPI_getbinval(tuple, desc, 8, &isnull));
	TransactionId version = DatumGetTransactionId(SPI_getbinval(tuple, desc, 9, &isnull));
	Oid dead_letter_table = DatumGetObjectId(SPI_getbinval(tuple, desc, 11, &isnull));
	RsSupervised *subscription = rs_supervised_find(subscriptions, id);

	if (subscription == NULL)
	{
		MemoryContext save = MemoryContextSwitchTo(TopMemoryContext);

		subscription = palloc0(sizeof(RsSupervised));
		subscription->id = id;
		/* What an earlier supervisor has reported is not known: it matches nothing. */
		strlcpy(subscription->reported, "?", RS_REASON_BYTES);
		subscriptions = lappend(subscriptions, subscription);
		MemoryContextSwitchTo(save);
	}

	subscription->listed = true;
	subscription->queue = DatumGetObjectId(SPI_getbinval(tuple, desc, 3, &isnull));
	subscription->owner = DatumGetObjectId(SPI_getbinval(tuple, desc, 4, &isnull));
	memset(subscription->name, 0, NAMEDATALEN);
	memcpy(subscription->name, name, pg_mbcliplen(name, strlen(name), NAMEDATALEN - 1));
	if (subscription->version != version)
	{
		/* A changed registration deserves a fresh start. */
		subscription->version = version;
		subscription->failures = 0;
		subscription->next_start = 0;
	}

	/* What was made in another database stays quiet until it is resumed. */
	if (quiet)
		workers = 0;
	subscription->wanted = rs_workers_enabled ? workers : 0;

	/* Sessions that drain hold leases as well. */
	subscription->leases = DatumGetBool(SPI_getbinval(tuple, desc, 10, &isnull)) && !quiet;

	subscription->problem[0] = '\0';
	if (subscription->wanted > 0 || subscription->leases)
		check_owner(subscription, dead_letter_table);
	if (subscription->problem[0] != '\0')
	{
		subscription->wanted = 0;
		subscription->leases = false;
	}
}

/* Read the subscriptions; false: the extension is not there. */
static bool
read_subscriptions(void)
{
	ListCell *cell;
	bool present;

	foreach (cell, subscriptions)
	{
		RsSupervised *subscription = lfirst(cell);

		subscription->listed = false;
		subscription->wanted = 0;
		subscription->leases = false;
		subscription->problem[0] = '\0';
	}

	rs_supervisor_looks();
	pgstat_report_activity(STATE_RUNNING, "reading ruststream.subscription");
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	present = (rs_objects(true) != NULL);
	if (present)
	{
		SPI_connect();
		PushActiveSnapshot(GetTransactionSnapshot());
		if (SPI_execute("SELECT s.id, s.name, s.queue::pg_catalog.oid, s.owner, s.database, "
						"s.system_identifier, s.paused, s.workers, s.xmin, "
						"q.locked_until_column IS NOT NULL, s.dead_letter_table::pg_catalog.oid "
						"FROM ruststream.subscription AS s JOIN ruststream.queue AS q "
						"ON q.relation OPERATOR(pg_catalog.=) s.queue ORDER BY s.id",
						true, 0) != SPI_OK_SELECT)
			elog(ERROR, "could not read the subscriptions");
		for (uint64 i = 0; i < SPI_processed; i++)
			take_row(SPI_tuptable->vals[i], SPI_tuptable->tupdesc);
		PopActiveSnapshot();
		SPI_finish();
	}
	CommitTransactionCommand();
	return present;
}

/* Forget the counters of subscriptions that are gone. */
static void
forget_counters(void)
{
	int32 *keep = palloc(sizeof(int32) * Max(list_length(subscriptions), 1));
	int nkeep = 0;
	ListCell *cell;

	foreach (cell, subscriptions)
	{
		RsSupervised *subscription = lfirst(cell);

		if (subscription->listed)
			keep[nkeep++] = subscription->id;
	}
	rs_stats_forget(MyDatabaseId, keep, nkeep);
	pfree(keep);
}

/* -------------------------------------------------------------------- workers */

/* All slots are taken: try again later, and say so once a minute. */
static void
out_of_slots(TimestampTz now)
{
	slot_failures++;
	slot_retry = TimestampTzPlusMilliseconds(now, rs_restart_delay(slot_failures));

	if (!TimestampDifferenceExceeds(last_complaint, now, COMPLAIN_MSEC))
		return;
	last_complaint = now;
	ereport(LOG, (errmsg("ruststream cannot start all processes of database \"%s\"", database_name),
				  errhint("Raise max_worker_processes or ruststream.max_workers.")));
}

/*
 * Start what is missing and due: the heartbeats first, without which leases
 * run out, then one worker of each subscription before the second of any.
 * Returns when to try again at the latest.
 */
static TimestampTz
start_missing(void)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz until = DT_NOEND;
	bool more = true;
	ListCell *cell;

	if (!rs_owners_start(now, slot_retry, &until))
	{
		out_of_slots(now);
		until = Min(until, slot_retry);
	}

	for (int round = 1; more; round++)
	{
		more = false;
		foreach (cell, subscriptions)
		{
			RsSupervised *subscription = lfirst(cell);
			int count = rs_roster_count(subscription);

			/* What holds back the heartbeat has a time of its own to try again. */
			if (count >= subscription->wanted ||
				(subscription->leases && !rs_owner_is_served(subscription->owner)))
				continue;
			if (subscription->next_start > now)
				until = Min(until, subscription->next_start);
			else if (slot_retry > now)
				until = Min(until, slot_retry);
			else if (count >= round)
				more = true;
			else if (!rs_roster_start(subscription))
			{
				out_of_slots(now);
				until = Min(until, slot_retry);
			}
			else
				more = true;
		}
	}

	/* Everybody has got what he wants. */
	if (slot_retry <= now)
		slot_failures = 0;
	return until;
}

/* Have status show why there are fewer workers than there should be. */
static void
report_problem(RsSupervised *subscription, TimestampTz now)
{
	const char *problem = subscription->problem;

	if (subscription->leases && !rs_owner_is_served(subscription->owner))
		problem = rs_owner_problem(subscription->owner);
	else if (rs_roster_count(subscription) < subscription->wanted && slot_retry > now)
		problem = WAITING_FOR_SLOT;
	if (strcmp(problem, subscription->reported) == 0)
		return;
	strlcpy(subscription->reported, problem, RS_REASON_BYTES);
	rs_stats_problem(subscription->id, problem[0] != '\0' ? problem : NULL);
}

/* Make workers and subscriptions agree; returns when to look again. */
static TimestampTz
reconcile(void)
{
	TimestampTz until;
	ListCell *cell;
	bool forget = !adopted;

	if (!adopted)
	{
		rs_roster_adopt(subscriptions);
		rs_owners_adopt();
	}
	adopted = true;

	foreach (cell, subscriptions)
	{
		RsSupervised *subscription = lfirst(cell);

		/* A slot that is free now may be what others have been waiting for. */
		if (rs_roster_reap(subscription))
		{
			slot_failures = 0;
			slot_retry = 0;
		}
		rs_roster_stop_surplus(subscription);
		if (!subscription->listed && subscription->workers == NIL)
		{
			pfree(subscription);
			subscriptions = foreach_delete_current(subscriptions, cell);
			forget = true;
		}
	}
	if (rs_owners_reap())
	{
		slot_failures = 0;
		slot_retry = 0;
	}
	rs_owners_want(subscriptions);
	if (forget)
		forget_counters();

	until = start_missing();
	foreach (cell, subscriptions)
	{
		RsSupervised *subscription = lfirst(cell);

		report_problem(subscription, GetCurrentTimestamp());
		/* Nobody tells us when it is mended. */
		if (subscription->listed && subscription->problem[0] != '\0')
			until = Min(until, TimestampTzPlusMilliseconds(GetCurrentTimestamp(), PROBLEM_MSEC));
	}
	return until;
}

/* -------------------------------------------------------------------- failures */

/*
 * Keep the history of failures bounded.  Returns when we have to look again;
 * the first failure recorded since sets our latch.
 */
static TimestampTz
prune_failures(void)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz due = TimestampTzPlusMilliseconds(last_prune, PRUNE_MSEC);
	RsDatabase *database;
	uint32 failures = 0;

	LWLockAcquire(rs_shared->lock, LW_SHARED);
	database = rs_database_find(MyDatabaseId);
	if (database != NULL)
	{
		failures = pg_atomic_read_u32(&database->failures);
		if (due <= now)
			pg_atomic_write_u32(&database->failures, 0);
	}
	LWLockRelease(rs_shared->lock);

	if (failures == 0)
		return DT_NOEND;
	if (due > now)
		return due;

	last_prune = now;
	pgstat_report_activity(STATE_RUNNING, "pruning ruststream.failure_history");
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	rs_failure_prune();
	CommitTransactionCommand();

	/* At once: a wait for a lock may have reset our latch. */
	return now;
}

/* ------------------------------------------------------------------------ main */

/*
 * Nothing that ALTER DATABASE .. SET or the configuration says may change what
 * our statements mean, or end them.
 */
static void
own_settings(void)
{
	static const char *const settings[][2] = {
		{"role", "none"},
		{"search_path", "pg_catalog, pg_temp"},
		{"session_replication_role", "origin"},
		{"row_security", "off"},
		{"jit", "off"},
	};

	rs_process_settings();
	for (int i = 0; i < (int) lengthof(settings); i++)
		SetConfigOption(settings[i][0], settings[i][1], PGC_SUSET, PGC_S_OVERRIDE);
}

static void
name_process(void)
{
	char name[NAMEDATALEN * 2];
	const char *database;

	StartTransactionCommand();
	database = get_database_name(MyDatabaseId);
	strlcpy(database_name, database != NULL ? database : "?", NAMEDATALEN);
	CommitTransactionCommand();

	snprintf(name, sizeof(name), "ruststream supervisor: %s", database_name);
	rs_process_name(name);
}

void
rs_supervisor_main(Datum arg)
{
	RsSupervisorArgs args;

	memcpy(&args, MyBgworkerEntry->bgw_extra, sizeof(args));
	rs_process_signals(SIG_IGN);

	/* Comes before we connect: see rs_slot_attach. */
	if (rs_shared == NULL || !rs_supervisor_attach(args.database, args.cookie))
		proc_exit(0);
	BackgroundWorkerInitializeConnectionByOid(args.database, InvalidOid, 0);
	own_settings();
	name_process();
	last_prune = GetCurrentTimestamp();

	for (;;)
	{
		TimestampTz until;
		TimestampTz prune;

		rs_process_interrupts_or_exit(0);
		if (!read_subscriptions())
		{
			/* Nothing that workers do could be settled, and no lease extended. */
			LWLockAcquire(rs_shared->lock, LW_EXCLUSIVE);
			(void) rs_entries_evict(MyDatabaseId, true);
			LWLockRelease(rs_shared->lock);
			rs_stats_forget(MyDatabaseId, NULL, 0);
			rs_supervisor_absent();
			proc_exit(0);
		}
		rs_supervisor_settled();
		until = reconcile();
		prune = prune_failures();
		pgstat_report_stat(true);
		if (!rs_supervisor_wanted())
			rs_process_wait(Min(until, prune));
	}
}
