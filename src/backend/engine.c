/*-------------------------------------------------------------------------
 *
 * engine.c
 *	  The engine of a worker or a drain: its subscription, kept up to date, and its
 *	  transactions.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/backend.h"
#include "backend/delivery.h"

#include "access/xact.h"
#include "commands/trigger.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

void
rs_trace_step(const RsEngine *engine, rs_step step, const char *suffix)
{
	if (!rs_trace)
		return;
	ereport(engine->session->trace_level,
			errmsg_internal("%s%s%s", rs_step_word(step), suffix[0] == '\0' ? "" : " ", suffix),
			errhidestmt(true), errhidecontext(true));
}

void
rs_set_isolation(rs_isolation isolation)
{
	static const int levels[RS_ISOLATION_COUNT] = {
		[RS_ISOLATION_DEFAULT] = -1,
		[RS_ISOLATION_READ_UNCOMMITTED] = XACT_READ_UNCOMMITTED,
		[RS_ISOLATION_READ_COMMITTED] = XACT_READ_COMMITTED,
		[RS_ISOLATION_REPEATABLE_READ] = XACT_REPEATABLE_READ,
		[RS_ISOLATION_SERIALIZABLE] = XACT_SERIALIZABLE,
	};

	/* The level of a transaction is fixed by its first snapshot. */
	Assert(!FirstSnapshotSet);
	if (levels[isolation] >= 0)
		XactIsoLevel = levels[isolation];
}

void
rs_engine_init(RsEngine *engine, const RsSession *session, int32 subscription_id,
			   MemoryContext parent)
{
	memset(engine, 0, sizeof(*engine));
	engine->session = session;
	engine->context = AllocSetContextCreate(parent, "ruststream engine", ALLOCSET_DEFAULT_SIZES);
	engine->delivery_context =
		AllocSetContextCreate(engine->context, "ruststream delivery", ALLOCSET_DEFAULT_SIZES);
	engine->mark_context =
		AllocSetContextCreate(engine->context, "ruststream mark", ALLOCSET_SMALL_SIZES);
	engine->commit_context =
		AllocSetContextCreate(engine->context, "ruststream shared commit", ALLOCSET_SMALL_SIZES);
	engine->handling_time = -1;
	engine->subscription_id = subscription_id;
}

static void
forget_subscription(RsEngine *engine)
{
	if (engine->plans != NULL)
		rs_plans_free(engine->plans);
	if (engine->subscription != NULL)
		MemoryContextDelete(engine->subscription->context);
	engine->plans = NULL;
	engine->subscription = NULL;
	engine->has_mark = false;
	rs_lines_forget(engine);
}

void
rs_engine_free(RsEngine *engine)
{
	forget_subscription(engine);
	MemoryContextDelete(engine->context);
}

void
rs_engine_begin(RsEngine *engine, rs_isolation isolation)
{
	rs_trace_step(engine, RS_STEP_BEGIN, "");
	engine->session->begin(isolation);
	engine->nest_level = NewGUCNestLevel();
	MemoryContextSwitchTo(engine->delivery_context);
}

/*
 * Never AfterTriggerFireDeferred() here: in a subtransaction, with earlier
 * events pending outside it, it loses track of them when a rollback follows.
 */
void
rs_fire_deferred_constraints(void)
{
	ConstraintsSetStmt *all_immediate = makeNode(ConstraintsSetStmt);

	all_immediate->constraints = NIL;
	all_immediate->deferred = false;
	AfterTriggerSetState(all_immediate);
}

/*
 * What a commit would run of it: deferred triggers, and the query of each cursor
 * WITH HOLD, which goes unread.
 */
void
rs_end_user_code(const RsSession *session)
{
	rs_fire_deferred_constraints();
	session->drop_cursors();
}

void
rs_engine_commit(RsEngine *engine)
{
	rs_trace_step(engine, RS_STEP_COMMIT, "");
	/*
	 * User code runs in a settlement, too: it must not be left to run behind the
	 * end of what it may set.
	 */
	rs_end_user_code(engine->session);
	AtEOXact_GUC(false, engine->nest_level);
	engine->session->commit();
	MemoryContextSwitchTo(engine->delivery_context);
}

void
rs_engine_rollback(RsEngine *engine)
{
	rs_trace_step(engine, RS_STEP_ROLLBACK, "");
	engine->session->rollback();
	MemoryContextSwitchTo(engine->delivery_context);
}

bool
rs_engine_is_outdated(const RsEngine *engine)
{
	return engine->generation != rs_catalog_generation();
}

/* Load the subscription in a transaction of its own; an error is the caller's. */
static void
load_subscription(RsEngine *engine)
{
	engine->session->begin(RS_ISOLATION_DEFAULT);
	/* Before the load: what changes during it must be seen as a change. */
	engine->generation = rs_catalog_generation();
	PushActiveSnapshot(GetTransactionSnapshot());
	engine->subscription = rs_subscription_load(engine->subscription_id, true, engine->context);
	if (engine->subscription != NULL)
		get_typlenbyvalalign(engine->subscription->queue.type[RS_ROLE_ID], &engine->id_length,
							 &engine->id_byval, &engine->id_align);
	PopActiveSnapshot();
	engine->session->commit();
	MemoryContextSwitchTo(engine->delivery_context);
	if (engine->subscription == NULL)
		return;

	/* A row left alone is known by its id, also after a reload. */
	if (engine->held_type != engine->subscription->queue.type[RS_ROLE_ID])
		engine->held_count = 0;
	engine->held_type = engine->subscription->queue.type[RS_ROLE_ID];
	engine->plans = rs_plans_create(&engine->subscription->queue,
									&engine->subscription->destination, engine->context);
	rs_stats_attach(engine->subscription);
	rs_stats_broken(engine->subscription_id, NULL);
	if (engine->session->loaded != NULL)
		engine->session->loaded(engine->subscription);
}

/*
 * The level of the claim's transaction: in the row lock form that is the
 * delivery's own; the other forms' claims are ours.
 */
static rs_isolation
claim_level(const rs_table *table)
{
	return rs_table_form(table) == RS_FORM_ROW_LOCK ? table->isolation
													: RS_ISOLATION_READ_COMMITTED;
}

void
rs_engine_renew(RsEngine *engine)
{
	if (!FirstSnapshotSet || !IsolationUsesXactSnapshot())
		return;
	AtEOXact_GUC(false, engine->nest_level);
	engine->session->commit();
	engine->session->begin(claim_level(&engine->subscription->queue.table));
	engine->nest_level = NewGUCNestLevel();
	MemoryContextSwitchTo(engine->delivery_context);
}

/*
 * Begin the claim's transaction with a subscription that is up to date.
 * The level must be known before the first snapshot, and whether the catalogs have changed is
 * known only inside a transaction: so look, and begin again where they have.
 * Returns false where there is nothing to deliver for (and no transaction).
 */
bool
rs_engine_begin_delivery(RsEngine *engine)
{
	for (;;)
	{
		if (engine->subscription == NULL)
			load_subscription(engine);
		if (engine->subscription == NULL || engine->subscription->paused ||
			engine->subscription->copied)
			return false;

		/* Not when it is loaded: the server's default may change at any time. */
		rs_subscription_check_level(engine->subscription);
		engine->session->begin(claim_level(&engine->subscription->queue.table));
		engine->nest_level = NewGUCNestLevel();
		if (!rs_engine_is_outdated(engine))
			break;
		engine->session->rollback();
		forget_subscription(engine);
	}
	rs_trace_step(engine, RS_STEP_BEGIN, "");
	return true;
}
