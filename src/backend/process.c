/*-------------------------------------------------------------------------
 *
 * process.c
 *	  What our processes have in common: whom they are connected as, which
 *	  settings they go by, and how they wait and answer signals.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "libpq/pqsignal.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/sinval.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"

#include "backend/backend.h"
#include "backend/compat.h"

/* ---------------------------------------------------------------- beginning */

void
rs_process_signals(pqsigfunc on_cancel)
{
	pqsignal(SIGTERM, die);
	pqsignal(SIGINT, on_cancel);
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	BackgroundWorkerUnblockSignals();

	/* A reload since the process was forked has been ignored. */
	ConfigReloadPending = true;
}

void
rs_connect_as_owner(Oid database, Oid owner)
{
	uint32 flags = 0;

#if PG_VERSION_NUM >= 170000
	flags |= BGWORKER_BYPASS_ROLELOGINCHECK;
#endif
	BackgroundWorkerInitializeConnectionByOid(database, owner, flags);
	if (GetSessionUserId() != owner)
	{
		StartTransactionCommand();
		SetConfigOption("session_authorization", GetUserNameFromId(owner, false), PGC_SUSET,
						PGC_S_OVERRIDE);
		CommitTransactionCommand();
	}
	SetConfigOption("role", "none", PGC_SUSET, PGC_S_OVERRIDE);
}

void
rs_process_name(const char *name)
{
	SetConfigOption("application_name", name, PGC_USERSET, PGC_S_OVERRIDE);
}

void
rs_process_settings(void)
{
	static const char *const settings[][2] = {
		{"default_transaction_isolation", "read committed"},
		{"default_transaction_read_only", "off"},
		{"default_transaction_deferrable", "off"},
		{"statement_timeout", "0"},
		{"lock_timeout", "0"},
		{"idle_in_transaction_session_timeout", "0"},
#if PG_VERSION_NUM >= 170000
		{"transaction_timeout", "0"},
#endif
	};

	for (int i = 0; i < (int) lengthof(settings); i++)
		SetConfigOption(settings[i][0], settings[i][1], PGC_SUSET, PGC_S_OVERRIDE);
}

/* ------------------------------------------------------------------ waiting */

void
rs_process_interrupts(void)
{
	CHECK_FOR_INTERRUPTS();
	if (ConfigReloadPending)
	{
		ConfigReloadPending = false;
		ProcessConfigFile(PGC_SIGHUP);
	}
	if (catchupInterruptPending)
		ProcessCatchupInterrupt();
}

void
rs_process_interrupts_or_exit(int exit_code)
{
	/* Quietly: nothing is interrupted. */
	if (ProcDiePending)
		proc_exit(exit_code);
	rs_process_interrupts();
}

void
rs_process_wait(TimestampTz until)
{
	int events = WL_LATCH_SET | WL_EXIT_ON_PM_DEATH;
	long timeout = -1;

	if (until != DT_NOEND)
	{
		timeout = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), until);
		events |= WL_TIMEOUT;
	}
	Assert(!IsTransactionState());

	/* Signals that came while a wait for a lock has reset our latch. */
	if (InterruptPending || ConfigReloadPending)
		return;
	pgstat_report_activity(STATE_IDLE, NULL);
	(void) WaitLatch(MyLatch, events, timeout, rs_wait_event_idle());
	ResetLatch(MyLatch);
}
