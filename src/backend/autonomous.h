/*-------------------------------------------------------------------------
 *
 * autonomous.h
 *	  What a session that calls ruststream.autonomous and the helper process
 *	  that executes for it have in common: a segment of shared memory with two
 *	  queues in it, and the messages in those.  Included by autonomous.c (the
 *	  caller), autonomous_session.c (the helper) and autonomous_message.c.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_AUTONOMOUS_H
#define RUSTSTREAM_AUTONOMOUS_H

#include "postgres.h"

#include "lib/stringinfo.h"
#include "storage/lock.h"
#include "storage/shm_mq.h"
#include "storage/spin.h"

#define RS_AUTONOMOUS_QUEUE_BYTES 65536

/* An autonomous session may have one of its own, and so on: no deeper than this. */
#define RS_AUTONOMOUS_DEPTH 3

/*
 * The head of the segment.  It lives as long as the caller or the helper is
 * attached to it.  Calls are numbered from 1, by the caller.
 *
 * pid is the helper's, from before it connects until it begins to exit, which
 * it says under the mutex: whoever finds a pid here while holding the mutex may
 * signal it and hits no other process.
 */
typedef struct RsAutonomous
{
	/* Constant. */
	Oid database;
	Oid user;
	pid_t caller;
	int depth; /* 1: the caller is no such helper itself */

	/* Guarded by the mutex. */
	slock_t mutex;
	pid_t pid;
	bool connected;        /* it has come as far as to its database */
	bool leaving;          /* it takes no call any more */
	uint64 announced;      /* the call that the caller is about to send */
	uint64 cancelled;      /* this call and those before it are to be given up */
	uint64 begun;          /* the call that the helper has begun */
	uint64 transaction_of; /* the call whose transaction this is: */
	VirtualTransactionId transaction;
} RsAutonomous;

#define RS_AUTONOMOUS_REQUESTS(shared) ((char *) (shared) + MAXALIGN(sizeof(RsAutonomous)))
#define RS_AUTONOMOUS_ANSWERS(shared) (RS_AUTONOMOUS_REQUESTS(shared) + RS_AUTONOMOUS_QUEUE_BYTES)
#define RS_AUTONOMOUS_BYTES (MAXALIGN(sizeof(RsAutonomous)) + 2 * RS_AUTONOMOUS_QUEUE_BYTES)

/* ---------------------------------------------------- autonomous_message.c */

/*
 * A request:	number, a text for each of rs_autonomous_settings, the SQL, how
 *				many arguments, and of each its type and its text
 * An answer:	number, RsAnswerKind; the rows, or the fields of an error
 */
typedef enum RsAnswerKind
{
	RS_ANSWER_ROWS,
	RS_ANSWER_ERROR
} RsAnswerKind;

/* What of a message is still to be read. */
typedef struct RsReader
{
	const char *data;
	Size left;
} RsReader;

extern void rs_put_number(StringInfo message, uint64 number);
extern void rs_put_text(StringInfo message, const char *text); /* or NULL */
extern uint64 rs_get_number(RsReader *reader);
extern const char *rs_get_text(RsReader *reader); /* within the message */

extern void rs_put_error(StringInfo message, const ErrorData *error);
extern ErrorData *rs_get_error(RsReader *reader); /* its texts are within the message */

/* How deep this session is itself; 0: it is no helper. */
extern int rs_autonomous_depth;

/* The settings that the caller's session lends to the call; NULL ends them. */
extern const char *const rs_autonomous_settings[];

/*
 * From here to rs_end_transmission values are written and read as text that
 * means the same in both sessions.
 */
extern int rs_begin_transmission(void);
extern void rs_end_transmission(int nest_level);

#endif /* RUSTSTREAM_AUTONOMOUS_H */
