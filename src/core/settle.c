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
	const rs_step *endings[RS_OUTCOME_COUNT]; /* of an answer */
	const rs_step *after_error;               /* NULL: as after an answer */
	const rs_step *after_failed_ack;          /* the delivery's transaction is gone */
} lane;

#define ENDINGS(ack, other)                                                                        \
	{                                                                                              \
		[RS_OUTCOME_ACK] = (ack), [RS_OUTCOME_RETRY] = (other),                                    \
		[RS_OUTCOME_RETRY_AFTER] = (other), [RS_OUTCOME_DISCARD] = (other),                        \
		[RS_OUTCOME_DEAD_LETTER] = (other),                                                        \
	}

static const rs_step row_lock_opening[] = {RS_STEP_BEGIN, RS_STEP_CLAIM, RS_STEP_SAVEPOINT,
										   RS_STEP_HANDLER, RS_STEP_END};

/* The claim's transaction ends before the handler's begins: its mark stays in the row. */
static const rs_step lease_opening[] = {RS_STEP_BEGIN, RS_STEP_CLAIM,   RS_STEP_COMMIT,
										RS_STEP_BEGIN, RS_STEP_HANDLER, RS_STEP_END};
static const rs_step lease_opening_apart[] = {RS_STEP_BEGIN, RS_STEP_CLAIM, RS_STEP_COMMIT,
											  RS_STEP_HANDLER, RS_STEP_END};

/* The key is locked between two transactions: it belongs to the session. */
static const rs_step advisory_opening[] = {
	RS_STEP_BEGIN, RS_STEP_CLAIM,  RS_STEP_COMMIT, RS_STEP_LOCK,    RS_STEP_BEGIN,
	RS_STEP_TAKE,  RS_STEP_COMMIT, RS_STEP_BEGIN,  RS_STEP_HANDLER, RS_STEP_END};
static const rs_step advisory_opening_apart[] = {RS_STEP_BEGIN,  RS_STEP_CLAIM,   RS_STEP_COMMIT,
												 RS_STEP_LOCK,   RS_STEP_BEGIN,   RS_STEP_TAKE,
												 RS_STEP_COMMIT, RS_STEP_HANDLER, RS_STEP_END};

/* The handler's writes and the row's end are one commit. */
static const rs_step keeping[] = {RS_STEP_SETTLE, RS_STEP_COMMIT, RS_STEP_END};
static const rs_step keeping_unlock[] = {RS_STEP_SETTLE, RS_STEP_COMMIT, RS_STEP_UNLOCK,
										 RS_STEP_END};

/*
 * The handler's writes go, the row's lock stays: it was taken before the
 * savepoint, so nobody else can have claimed the row when it is settled.
 */
static const rs_step dropping_to_savepoint[] = {RS_STEP_ROLLBACK_TO, RS_STEP_SETTLE, RS_STEP_COMMIT,
												RS_STEP_END};

/* The handler's writes go with its transaction. */
static const rs_step dropping[] = {RS_STEP_ROLLBACK, RS_STEP_BEGIN, RS_STEP_SETTLE, RS_STEP_COMMIT,
								   RS_STEP_END};
static const rs_step dropping_unlock[] = {RS_STEP_ROLLBACK, RS_STEP_BEGIN,  RS_STEP_SETTLE,
										  RS_STEP_COMMIT,   RS_STEP_UNLOCK, RS_STEP_END};

/* The handler's transaction is over, and was its own. */
static const rs_step apart[] = {RS_STEP_BEGIN, RS_STEP_SETTLE, RS_STEP_COMMIT, RS_STEP_END};
static const rs_step apart_unlock[] = {RS_STEP_BEGIN, RS_STEP_SETTLE, RS_STEP_COMMIT,
									   RS_STEP_UNLOCK, RS_STEP_END};

/* The decision table: form x transactional x outcome -> steps. */
static const lane lanes[RS_FORM_COUNT][2] = {
	[RS_FORM_ROW_LOCK] = {[false] = {.opening = row_lock_opening,
									 .endings = ENDINGS(keeping, keeping),
									 .after_error = dropping_to_savepoint,
									 .after_failed_ack = dropping},
						  [true] = {.opening = row_lock_opening,
									.endings = ENDINGS(keeping, dropping_to_savepoint),
									.after_failed_ack = dropping}},
	[RS_FORM_LEASE] = {[false] = {.opening = lease_opening_apart,
								  .endings = ENDINGS(apart, apart),
								  .after_failed_ack = dropping},
					   [true] = {.opening = lease_opening,
								 .endings = ENDINGS(keeping, dropping),
								 .after_failed_ack = dropping}},
	[RS_FORM_ADVISORY_LOCK] = {[false] = {.opening = advisory_opening_apart,
										  .endings = ENDINGS(apart_unlock, apart_unlock),
										  .after_failed_ack = dropping_unlock},
							   [true] = {.opening = advisory_opening,
										 .endings = ENDINGS(keeping_unlock, dropping_unlock),
										 .after_failed_ack = dropping_unlock}},
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
rs_lane_opening(rs_form form, bool transactional)
{
	return lanes[form][transactional].opening;
}

const rs_step *
rs_lane_ending(rs_form form, bool transactional, rs_outcome outcome)
{
	return lanes[form][transactional].endings[outcome];
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
operation_of(rs_form form, rs_outcome outcome, const rs_policy *policy)
{
	if (outcome == RS_OUTCOME_DEAD_LETTER && policy->dead_letter_is_table)
		return RS_OP_MOVE_TABLE;
	if (outcome == RS_OUTCOME_RETRY && form == RS_FORM_LEASE)
		return RS_OP_RELEASE;
	return operations[outcome];
}

static const rs_step *
steps_of(const lane *from, rs_cause cause, rs_outcome outcome)
{
	if (cause == RS_CAUSE_SETTLE_ERROR)
		return from->after_failed_ack;
	if (cause != RS_CAUSE_ANSWER && from->after_error != NULL)
		return from->after_error;
	return from->endings[outcome];
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
	/* In the other forms the claim has counted it. */
	result.counts_attempt = form == RS_FORM_ROW_LOCK && tries_again(result.outcome) &&
							table->column[RS_ROLE_ATTEMPT] != NULL;
	result.operation = operation_of(form, result.outcome, policy);
	result.steps = steps_of(&lanes[form][policy->transactional], cause, result.outcome);
	return result;
}
