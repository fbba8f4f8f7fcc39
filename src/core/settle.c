/*-------------------------------------------------------------------------
 *
 * settle.c
 *	  How a delivery ends: form, outcome, attempt and policy make a settlement.
 *
 * contract.md, sections 2 and 3, in two const tables; the functions only choose
 * the row to read.
 *
 *-------------------------------------------------------------------------
 */
#include "core.h"

/* Everything a form does, from the claim to the settlement. */
typedef struct lane
{
	const rs_step *opening;
	const rs_step *endings[RS_OUTCOME_COUNT];
	const rs_step *after_failed_ack; /* the delivery's transaction is gone */
} lane;

static const rs_step row_lock_opening[] = {RS_STEP_BEGIN, RS_STEP_CLAIM, RS_STEP_SAVEPOINT,
										   RS_STEP_HANDLER, RS_STEP_END};

/* The handler's writes and the row's end are one commit. */
static const rs_step row_lock_keeping[] = {RS_STEP_SETTLE, RS_STEP_COMMIT, RS_STEP_END};

/*
 * The handler's writes go, the row's lock stays: it was taken before the
 * savepoint, so nobody else can have claimed the row when it is settled.
 */
static const rs_step row_lock_dropping[] = {RS_STEP_ROLLBACK_TO, RS_STEP_SETTLE, RS_STEP_COMMIT,
											RS_STEP_END};

static const rs_step row_lock_afresh[] = {RS_STEP_ROLLBACK, RS_STEP_BEGIN, RS_STEP_SETTLE,
										  RS_STEP_COMMIT, RS_STEP_END};

/* The decision table: form x outcome -> steps.  A form without a lane has NULLs. */
static const lane lanes[RS_FORM_COUNT] = {
	[RS_FORM_ROW_LOCK] = {.opening = row_lock_opening,
						  .endings = {[RS_OUTCOME_ACK] = row_lock_keeping,
									  [RS_OUTCOME_RETRY] = row_lock_dropping,
									  [RS_OUTCOME_RETRY_AFTER] = row_lock_dropping,
									  [RS_OUTCOME_DISCARD] = row_lock_dropping,
									  [RS_OUTCOME_DEAD_LETTER] = row_lock_dropping},
						  .after_failed_ack = row_lock_afresh},
};

/* Outcome -> operation, in every form; a dead letter's is the one for a group. */
static const rs_operation operations[RS_OUTCOME_COUNT] = {
	[RS_OUTCOME_ACK] = RS_OP_ACK,
	[RS_OUTCOME_RETRY] = RS_OP_RETRY,
	[RS_OUTCOME_RETRY_AFTER] = RS_OP_RETRY_AFTER,
	[RS_OUTCOME_DISCARD] = RS_OP_ACK,
	[RS_OUTCOME_DEAD_LETTER] = RS_OP_MOVE_GROUP,
};

const rs_step *
rs_lane_opening(rs_form form)
{
	return lanes[form].opening;
}

const rs_step *
rs_lane_ending(rs_form form, rs_outcome outcome)
{
	return lanes[form].endings[outcome];
}

rs_outcome
rs_default_on_error(const rs_table *table)
{
	return table->column[RS_ROLE_RETRY_AFTER] != NULL ? RS_OUTCOME_RETRY_AFTER : RS_OUTCOME_RETRY;
}

rs_outcome
rs_default_on_decode_error(const rs_table *table, bool has_dead_letter)
{
	return has_dead_letter ? RS_OUTCOME_DEAD_LETTER : rs_default_on_error(table);
}

static bool
tries_again(rs_outcome outcome)
{
	return outcome == RS_OUTCOME_RETRY || outcome == RS_OUTCOME_RETRY_AFTER;
}

/*
 * What is asked for, before the table and the cap have their say.  A row whose
 * settlement failed is tried again whatever the error policy says: its handler
 * has not failed, and nothing it did is left.
 */
static rs_outcome
wanted_outcome(const rs_table *table, const rs_policy *policy, rs_cause cause, rs_outcome answer)
{
	switch (cause)
	{
		case RS_CAUSE_ANSWER:
			return answer;
		case RS_CAUSE_DECODE_ERROR:
			return policy->on_decode_error;
		case RS_CAUSE_SETTLE_ERROR:
			return rs_default_on_error(table);
		case RS_CAUSE_ERROR:
			break;
	}
	return policy->on_error;
}

/* The error policy, where there is no dead letter for it to name. */
static rs_outcome
error_outcome_without_dead_letter(const rs_table *table, const rs_policy *policy)
{
	return policy->on_error == RS_OUTCOME_DEAD_LETTER ? rs_default_on_error(table)
													  : policy->on_error;
}

static bool
is_at_cap(const rs_policy *policy, int64_t attempt)
{
	return policy->has_dead_letter && policy->max_attempts > 0 && attempt >= policy->max_attempts;
}

static rs_operation
operation_of(rs_outcome outcome, const rs_policy *policy)
{
	if (outcome == RS_OUTCOME_DEAD_LETTER && policy->dead_letter_is_table)
		return RS_OP_MOVE_TABLE;
	return operations[outcome];
}

rs_settlement
rs_settle(const rs_table *table, const rs_policy *policy, rs_cause cause, rs_outcome answer,
		  bool has_answer_delay, int64_t attempt)
{
	rs_settlement result = {.outcome = wanted_outcome(table, policy, cause, answer)};
	rs_form form = rs_table_form(table);
	bool is_answer = cause == RS_CAUSE_ANSWER;

	if (result.outcome == RS_OUTCOME_DEAD_LETTER && !policy->has_dead_letter)
	{
		result.outcome = error_outcome_without_dead_letter(table, policy);
		result.lacks_dead_letter = is_answer;
	}

	/* Before the table's roles are looked at: a row that moves needs no delay. */
	if (tries_again(result.outcome) && is_at_cap(policy, attempt))
	{
		result.outcome = RS_OUTCOME_DEAD_LETTER;
		result.capped = true;
	}

	if (result.outcome == RS_OUTCOME_RETRY_AFTER && table->column[RS_ROLE_RETRY_AFTER] == NULL)
	{
		result.outcome = RS_OUTCOME_RETRY;
		result.lacks_retry_after = is_answer && answer == RS_OUTCOME_RETRY_AFTER;
	}

	/* An answered dead_letter may have become a retry_after: not its delay. */
	result.delay_is_given = result.outcome == RS_OUTCOME_RETRY_AFTER && is_answer &&
							answer == RS_OUTCOME_RETRY_AFTER && has_answer_delay;
	result.counts_attempt = tries_again(result.outcome) && table->column[RS_ROLE_ATTEMPT] != NULL;
	result.operation = operation_of(result.outcome, policy);
	result.steps = cause == RS_CAUSE_SETTLE_ERROR ? lanes[form].after_failed_ack
												  : lanes[form].endings[result.outcome];
	return result;
}
