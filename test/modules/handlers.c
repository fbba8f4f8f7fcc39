/*
 * Handlers in C, for test/t/026_c_handler.pl: what any C function that takes a
 * payload or a row, and returns void or an outcome, can be.
 */
#include "postgres.h"

#include "catalog/pg_type_d.h"
#include "executor/executor.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "utils/builtins.h"

PG_MODULE_MAGIC;

PG_FUNCTION_INFO_V1(note_payload);
PG_FUNCTION_INFO_V1(fail_on_row);

/* note_payload(text) returns void: keeps the payload. */
Datum
note_payload(PG_FUNCTION_ARGS)
{
	Oid types[] = {TEXTOID};
	Datum values[] = {PG_GETARG_DATUM(0)};

	SPI_connect();
	if (SPI_execute_with_args("INSERT INTO noted VALUES ($1)", 1, types, values, NULL, false, 0) !=
		SPI_OK_INSERT)
		elog(ERROR, "could not keep the payload");
	SPI_finish();
	PG_RETURN_VOID();
}

/* fail_on_row(job) returns void: writes, leaves SPI connected, and fails. */
Datum
fail_on_row(PG_FUNCTION_ARGS)
{
	bool isnull;
	Datum id = GetAttributeByName(PG_GETARG_HEAPTUPLEHEADER(0), "id", &isnull);

	SPI_connect();
	if (SPI_execute("INSERT INTO noted VALUES ('not kept')", false, 0) != SPI_OK_INSERT)
		elog(ERROR, "could not write");
	ereport(ERROR, errcode(ERRCODE_CHECK_VIOLATION),
			errmsg("row " INT64_FORMAT " is not wanted", DatumGetInt64(id)));
	PG_RETURN_VOID();
}
