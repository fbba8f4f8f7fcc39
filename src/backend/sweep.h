/*-------------------------------------------------------------------------
 *
 * sweep.h
 *	  Doing something with many rows of a table, a portion at a time: redrive.c
 *	  and purge.c.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_SWEEP_H
#define RUSTSTREAM_SWEEP_H

#include "backend/catalog.h"

/* A row that was found: its id, and of a dead letter where it came from and lies. */
typedef struct RsFound
{
	Datum id;
	char *origin; /* NULL: it does not say */
	Datum place;
	Datum table;
} RsFound;

/* What is done with a portion of the rows that were found. */
typedef struct RsSweep
{
	RsPlans *finder;
	rs_operation find;
	RsValues values; /* of the finder */
	int64 limit;     /* rows at most; negative: no limit */

	/* Called in memory that is reset afterwards; returns how many rows it has done. */
	int64 (*work)(void *arg, RsFound *found, int count);
	void *arg;
} RsSweep;

/* Connected to SPI.  Returns how many rows were done. */
extern int64 rs_sweep(RsSweep *sweep);

/* Their ids, and an array of any values, in the current context. */
extern Datum rs_found_ids(Oid type, const RsFound *found, int count);
extern Datum rs_array(Oid type, Datum *values, int count);

/* An error where fewer rows were done than were found, and locked. */
extern void rs_check_swept(int64 done, int count, const char *what, Oid relid);

#endif /* RUSTSTREAM_SWEEP_H */
