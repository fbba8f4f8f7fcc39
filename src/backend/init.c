/*-------------------------------------------------------------------------
 *
 * init.c
 *	  _PG_init: settings, hooks, shared memory and the launcher.
 *
 * Without shared_preload_libraries the library is loaded by the first call of
 * one of our functions.  Then there is no shared memory and there are no
 * processes; everything else works.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>

#include "fmgr.h"
#include "miscadmin.h"
#include "utils/guc.h"

#include "backend/backend.h"
#include "backend/compat.h"
#include "backend/shared.h"

#if PG_VERSION_NUM >= 180000
PG_MODULE_MAGIC_EXT(.name = "ruststream", .version = RUSTSTREAM_VERSION);
#else
PG_MODULE_MAGIC;
#endif

bool rs_workers_enabled = true;
int rs_max_workers = 8;
int rs_crash_restart_delay = 1000;
bool rs_trace = false;

extern PGDLLEXPORT void _PG_init(void);

static void
define_settings(void)
{
	DefineCustomBoolVariable("ruststream.workers", "Runs the workers of subscriptions.",
							 "Off stops them, each after the delivery it has in work.",
							 &rs_workers_enabled, true, PGC_SIGHUP, 0, NULL, NULL, NULL);

	/*
	 * Sizes shared memory.  A setting of this kind cannot be defined later
	 * than server start; a session that loads the library by itself shows what
	 * the configuration says, to no effect.
	 */
	DefineCustomIntVariable(
		"ruststream.max_workers",
		"Sets how many workers may run at once in all databases together.", NULL, &rs_max_workers,
		8, 0, 1024, process_shared_preload_libraries_in_progress ? PGC_POSTMASTER : PGC_SIGHUP, 0,
		NULL, NULL, NULL);

	/* The same. */
	DefineCustomIntVariable(
		"ruststream.batch_leases",
		"Sets how many rows of lease batches may be in work at once, beyond one a worker.",
		"A claim takes no more rows than there are leases left.", &rs_batch_leases, 1000, 0,
		1000000, process_shared_preload_libraries_in_progress ? PGC_POSTMASTER : PGC_SIGHUP, 0,
		NULL, NULL, NULL);

	DefineCustomIntVariable("ruststream.crash_restart_delay",
							"Sets how long nothing is started after the server has crashed.",
							"Doubles while crashes go on, up to 30 times this.",
							&rs_crash_restart_delay, 1000, 0, INT_MAX / 60, PGC_SIGHUP, GUC_UNIT_MS,
							NULL, NULL, NULL);

	DefineCustomBoolVariable("ruststream.trace", "Reports each step of each delivery.",
							 "As NOTICE in drain, in the server's log in a worker.", &rs_trace,
							 false, PGC_USERSET, 0, NULL, NULL, NULL);
}

void
_PG_init(void)
{
	define_settings();
	rs_failpoint_init();
	MarkGUCPrefixReserved("ruststream");

	rs_catalog_init();
	rs_planner_init();
	rs_wake_init();

	/* In binary upgrade nothing of ours may run, or look as if it could. */
	if (!process_shared_preload_libraries_in_progress || IsBinaryUpgrade)
		return;

	rs_shared_init();
	rs_database_init();
	rs_launcher_register();
}
