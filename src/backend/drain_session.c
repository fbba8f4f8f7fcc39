/*-------------------------------------------------------------------------
 *
 * drain_session.c
 *	  The session of somebody who drains: what a handler leaves in it goes, and
 *	  what the caller had stays.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/delivery.h"
#include "backend/drain.h"

#include "catalog/dependency.h"
#include "commands/async.h"
#include "commands/prepare.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/guc_tables.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/snapmgr.h"

/* ------------------------------------------------- what handlers leave behind */

/*
 * What a session keeps beyond a commit.  One query says what was there before
 * the first delivery and what is there after each, so that the difference is
 * what handlers have left.  It runs outside the delivery's transaction, where
 * only session-level advisory locks remain.
 */
#define CURSORS "SELECT 'cursor', c.name, 0, 0, 0, '' FROM pg_catalog.pg_cursors AS c"

static const char cursors_text[] = CURSORS;
static const char session_state_text[] =
	"SELECT 'prepared', p.name, 0, 0, 0, '' FROM pg_catalog.pg_prepared_statements AS p "
	"UNION ALL " CURSORS
	" UNION ALL SELECT 'channel', l, 0, 0, 0, '' FROM pg_catalog.pg_listening_channels() AS l "
	"UNION ALL SELECT 'object', '', d.classid::pg_catalog.int8, d.objid::pg_catalog.int8, 0, '' "
	"FROM pg_catalog.pg_depend AS d "
	"WHERE d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_namespace'::pg_catalog.regclass "
	"AND d.refobjid OPERATOR(pg_catalog.=) pg_catalog.pg_my_temp_schema() "
	"AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_depend AS i "
	"WHERE i.classid OPERATOR(pg_catalog.=) d.classid "
	"AND i.objid OPERATOR(pg_catalog.=) d.objid AND i.objsubid OPERATOR(pg_catalog.=) 0 "
	"AND i.deptype OPERATOR(pg_catalog.=) 'i') "
	"UNION ALL SELECT 'lock', '', k.classid::pg_catalog.int8, k.objid::pg_catalog.int8, "
	"k.objsubid, k.mode FROM pg_catalog.pg_locks AS k "
	"WHERE k.locktype OPERATOR(pg_catalog.=) 'advisory' "
	"AND k.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid() AND k.granted";

#define STATE_COLUMNS 6

/* Of each thing that the caller's session had before: its row, as one text. */
static List *callers_state;

/*
 * The same after a claim whose deliveries share a commit, where that took locks of its own;
 * they go with its transaction.
 */
static List *claims_state;

/* The queries, prepared once a backend: they run with each delivery. */
static SPIPlanPtr cursors_plan;
static SPIPlanPtr session_state_plan;

/* One thing that a session has: its columns, and all of them as one text. */
typedef struct StateRow
{
	char *columns[STATE_COLUMNS];
	char *key;
} StateRow;

/* Take over the rows of a result, in the current context. */
static StateRow *
take_rows(int count)
{
	StateRow *rows = palloc(sizeof(StateRow) * Max(count, 1));

	for (int i = 0; i < count; i++)
	{
		StringInfoData key;

		initStringInfo(&key);
		for (int n = 0; n < STATE_COLUMNS; n++)
		{
			char *column = SPI_getvalue(SPI_tuptable->vals[i], SPI_tuptable->tupdesc, n + 1);

			rows[i].columns[n] = column;
			appendStringInfo(&key, "%s|", column ? column : "");
		}
		rows[i].key = key.data;
	}
	SPI_freetuptable(SPI_tuptable);
	return rows;
}

/* Read the session's state, or part of it. */
static StateRow *
read_rows(SPIPlanPtr *plan, const char *text, int *count)
{
	MemoryContext save_context = CurrentMemoryContext;
	int rc;

	PushActiveSnapshot(GetTransactionSnapshot());
	if (*plan == NULL)
	{
		SPIPlanPtr prepared = SPI_prepare(text, 0, NULL);

		if (prepared == NULL || SPI_keepplan(prepared) != 0)
			elog(ERROR, "could not prepare the query of the session's state: %s",
				 SPI_result_code_string(SPI_result));
		*plan = prepared;
	}
	rc = SPI_execute_plan(*plan, NULL, NULL, false, 0);
	PopActiveSnapshot();
	/* SPI leaves us in its own memory. */
	MemoryContextSwitchTo(save_context);
	if (rc != SPI_OK_SELECT)
		elog(ERROR, "could not read the session's state: %s", SPI_result_code_string(rc));
	*count = (int) SPI_processed;
	return take_rows(*count);
}

static StateRow *
read_session_state(int *count)
{
	return read_rows(&session_state_plan, session_state_text, count);
}

static List *
remember(MemoryContext context)
{
	int count;
	StateRow *rows = read_session_state(&count);
	MemoryContext save = MemoryContextSwitchTo(context);
	List *state = NIL;

	for (int i = 0; i < count; i++)
		state = lappend(state, pstrdup(rows[i].key));
	MemoryContextSwitchTo(save);
	return state;
}

static bool
is_in(const List *state, const char *key)
{
	ListCell *cell;

	foreach (cell, state)
	{
		if (strcmp(lfirst(cell), key) == 0)
			return true;
	}
	return false;
}

void
rs_drain_remember_session(MemoryContext context)
{
	callers_state = remember(context);
	claims_state = NIL;
}

static bool
is_callers(const char *key)
{
	return is_in(callers_state, key);
}

static void
release_lock(char **columns)
{
	LOCKTAG tag;
	LOCKMODE mode = strcmp(columns[5], "ShareLock") == 0 ? ShareLock : ExclusiveLock;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, (uint32) strtoul(columns[2], NULL, 10),
						 (uint32) strtoul(columns[3], NULL, 10),
						 (uint16) strtoul(columns[4], NULL, 10));
	/* A session may hold a lock several times over. */
	while (rs_lock_held_by_me(&tag, mode))
		LockRelease(&tag, mode, true);
}

static void
drop_cursor(char **columns)
{
	Portal portal = GetPortalByName(columns[1]);

	if (PortalIsValid(portal))
		PortalDrop(portal, false);
}

/* The handler's cursors, before the commit; each transaction asks. */
void
rs_drain_drop_cursors(void)
{
	int count;
	StateRow *cursors = read_rows(&cursors_plan, cursors_text, &count);

	for (int i = 0; i < count; i++)
	{
		if (!is_callers(cursors[i].key))
			drop_cursor(cursors[i].columns);
	}
}

/* Remove one thing; what lies in the temporary schema goes in the end, all at once. */
static void
remove_from_session(char **columns, ObjectAddresses *temporary)
{
	if (strcmp(columns[0], "prepared") == 0)
		DropPreparedStatement(columns[1], false);
	else if (strcmp(columns[0], "cursor") == 0)
		drop_cursor(columns);
	else if (strcmp(columns[0], "channel") == 0)
		Async_Unlisten(columns[1]);
	else if (strcmp(columns[0], "object") == 0)
	{
		ObjectAddress address = {(Oid) strtoul(columns[2], NULL, 10),
								 (Oid) strtoul(columns[3], NULL, 10), 0};

		add_exact_object_address(&address, temporary);
	}
	else
		release_lock(columns);
}

/*
 * Whatever a handler has left waits for the end of the transaction: then so does
 * the next delivery.  A lock that ends with the transaction counts, too, since
 * it cannot be told from a session's.
 */
bool
rs_drain_is_clean(void)
{
	int count;
	const StateRow *state = read_session_state(&count);
	bool is_clean = true;

	for (int i = 0; i < count && is_clean; i++)
		is_clean = is_callers(state[i].key) || is_in(claims_state, state[i].key);
	return is_clean;
}

void
rs_drain_remember_claimed(MemoryContext context)
{
	claims_state = remember(context);
}

/* Undo what a handler left in the caller's session, and nothing the caller had. */
void
rs_drain_clean(void)
{
	int count;
	StateRow *state = read_session_state(&count);
	ObjectAddresses *temporary = new_object_addresses();

	for (int i = 0; i < count; i++)
	{
		if (!is_callers(state[i].key))
			remove_from_session(state[i].columns, temporary);
	}
	PushActiveSnapshot(GetTransactionSnapshot());
	performMultipleDeletions(temporary, DROP_CASCADE,
							 PERFORM_DELETION_INTERNAL | PERFORM_DELETION_QUIETLY);
	PopActiveSnapshot();
	free_object_addresses(temporary);
	claims_state = NIL;
	/* The next transaction must begin without a snapshot. */
	SPI_commit();
}

/* ----------------------------------------------------------------- settings */

/*
 * What the caller's session had set before a procedure that may SET and COMMIT:
 * pairs of a name and a value.
 */
static List *callers_settings;
static Oid callers_session_user;

/*
 * The settings that a session may make and RESET ALL would undo, as such pairs in
 * the current context.  The view pg_settings would do, but for those that belong to
 * nobody ("my.own").
 */
static List *
read_settings(void)
{
	List *settings = NIL;
	struct config_generic **variables;
	int count;

#if PG_VERSION_NUM < 160000
	variables = get_guc_variables();
	count = GetNumConfigOptions();
#else
	variables = get_guc_variables(&count);
#endif
	for (int i = 0; i < count; i++)
	{
		const char *value;

		if (variables[i]->context < PGC_SUSET || (variables[i]->flags & GUC_NO_RESET_ALL) != 0)
			continue;
		/*
		 * Nor what this role may not set, and has not: a handler whose language
		 * is loaded with it defines settings of that kind.
		 */
		if (variables[i]->context == PGC_SUSET && variables[i]->source < PGC_S_SESSION &&
			!superuser())
			continue;
		value = GetConfigOption(variables[i]->name, true, false);
		settings =
			lappend(settings, list_make2(pstrdup(variables[i]->name), pstrdup(value ? value : "")));
	}
	return settings;
}

/* What the caller had set; false where it is a setting that the handler made. */
static bool
callers_setting(const char *name, const char **value)
{
	ListCell *cell;

	foreach (cell, callers_settings)
	{
		if (strcmp(linitial(lfirst(cell)), name) == 0)
		{
			*value = lsecond(lfirst(cell));
			return true;
		}
	}
	*value = NULL;
	return false;
}

/* SET, or RESET where there is no value. */
static void
set_for_session(const char *name, const char *value)
{
	(void) set_config_option(name, value, superuser() ? PGC_SUSET : PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SET, true, 0, false);
}

void
rs_drain_restore_settings(void)
{
	List *settings;
	ListCell *cell;

	/* The role first: what follows is done with the caller's rights. */
	if (GetSessionUserId() != callers_session_user)
		set_for_session("session_authorization", GetUserNameFromId(callers_session_user, false));
	set_for_session("role", "none");

	settings = read_settings();
	foreach (cell, settings)
	{
		const char *now = lsecond(lfirst(cell));
		const char *before;

		if (!callers_setting(linitial(lfirst(cell)), &before) || strcmp(before, now) != 0)
			set_for_session(linitial(lfirst(cell)), before);
	}
	SPI_commit();
}

void
rs_drain_remember_settings(void)
{
	callers_session_user = GetSessionUserId();
	callers_settings = read_settings();
}
