/*-------------------------------------------------------------------------
 *
 * failpoint.h
 *	  Named points at which a test has the process die, as kill -9 would have it, or
 *	  stop; not in a release.
 *
 * RUSTSTREAM_FAILPOINT=name or name:n, in the environment: at the n-th time; name:n:stop to
 * stop there (SIGSTOP) until the test goes on with it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_FAILPOINT_H
#define RUSTSTREAM_FAILPOINT_H

#ifdef RUSTSTREAM_FAILPOINTS
extern void rs_failpoint(const char *name);
#define RS_FAILPOINT(name) rs_failpoint(name)
#else
#define RS_FAILPOINT(name) ((void) 0)
#endif

#endif /* RUSTSTREAM_FAILPOINT_H */
