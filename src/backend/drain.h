/*-------------------------------------------------------------------------
 *
 * drain.h
 *	  What a session that drains is given back (drain_session.c).
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_DRAIN_H
#define RUSTSTREAM_DRAIN_H

/* Before the first delivery, connected to SPI: note in this context what the session has. */
extern void rs_drain_remember_session(MemoryContext context);

/* Members of an RsSession, which says what they are for. */
extern void rs_drain_drop_cursors(void);
extern void rs_drain_clean(void);
extern bool rs_drain_is_clean(void);
extern void rs_drain_remember_claimed(MemoryContext context);

/*
 * Before a procedure, which may SET and COMMIT, in a transaction without our savepoint: note what
 * the session has set.  After its end, in another one: undo what it has set since, and commit.
 */
extern void rs_drain_remember_settings(void);
extern void rs_drain_restore_settings(void);

#endif /* RUSTSTREAM_DRAIN_H */
