/*-------------------------------------------------------------------------
 *
 * client.c
 *	  Handles and their errors.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

static const rs_driver *const rs_drivers[] = {
#ifdef RS_WITH_SQLITE
	&rs_sqlite_driver,
#endif
#ifdef RS_WITH_MYSQL
	&rs_mysql_driver,
#endif
#ifdef RS_WITH_POSTGRES
	&rs_postgres_driver,
#endif
	NULL};

const char *
ruststream_version(void)
{
	return RUSTSTREAM_VERSION;
}

const char *
ruststream_drivers(void)
{
	static const char names[] = ""
#ifdef RS_WITH_SQLITE
								" sqlite"
#endif
#ifdef RS_WITH_MYSQL
								" mysql"
#endif
#ifdef RS_WITH_POSTGRES
								" postgres"
#endif
		;

	return names[0] == ' ' ? names + 1 : names;
}

/* ----------------------------------------------------------------- errors */

void
rs_error_set(rs_error *error, ruststream_code code, const char *state, const char *hint,
			 const char *format, ...)
{
	va_list arguments;

	error->code = code;
	(void) snprintf(error->state, sizeof(error->state), "%s", state != NULL ? state : "");
	(void) snprintf(error->hint, sizeof(error->hint), "%s", hint != NULL ? hint : "");
	va_start(arguments, format);
	(void) vsnprintf(error->message, sizeof(error->message), format, arguments);
	va_end(arguments);
	/* They are stored, and were cut, or are the words of a program. */
	rs_make_utf8(error->message);
	rs_make_utf8(error->hint);
}

ruststream_code
rs_begin_call(ruststream *handle)
{
	memset(&handle->error, 0, sizeof(handle->error));
	if (handle->session == NULL)
		return rs_fail(handle, RUSTSTREAM_UNAVAILABLE, NULL, "the database is not open");
	return RUSTSTREAM_OK;
}

ruststream_code
rs_take_error(ruststream *handle)
{
	handle->error = handle->session->error;
	if (handle->error.code == RUSTSTREAM_OK)
		handle->error.code = RUSTSTREAM_DATABASE;
	return handle->error.code;
}

ruststream_code
rs_fail(ruststream *handle, ruststream_code code, const char *hint, const char *format, ...)
{
	va_list arguments;
	char message[sizeof(handle->error.message)];

	va_start(arguments, format);
	(void) vsnprintf(message, sizeof(message), format, arguments);
	va_end(arguments);
	rs_error_set(&handle->error, code, "", hint, "%s", message);
	return code;
}

ruststream_code
rs_no_memory(ruststream *handle)
{
	return rs_fail(handle, RUSTSTREAM_NO_MEMORY, NULL, "out of memory");
}

void
rs_tell(ruststream *handle, const char *format, ...)
{
	va_list arguments;
	char text[2560];

	if (handle->notice == NULL)
		return;
	va_start(arguments, format);
	(void) vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	handle->notice(handle->notice_arg, text);
}

ruststream_code
ruststream_error(const ruststream *handle)
{
	return handle->error.code;
}

const char *
ruststream_message(const ruststream *handle)
{
	return handle->error.message;
}

const char *
ruststream_hint(const ruststream *handle)
{
	return handle->error.hint;
}

const char *
ruststream_state(const ruststream *handle)
{
	return handle->error.state;
}

void
ruststream_on_notice(ruststream *handle, ruststream_notice_callback callback, void *arg)
{
	handle->notice = callback;
	handle->notice_arg = arg;
}

void
ruststream_on_trace(ruststream *handle, ruststream_notice_callback callback, void *arg)
{
	handle->trace = callback;
	handle->trace_arg = arg;
}

/* ------------------------------------------------------------ connections */

static const rs_driver *
find_driver(rs_dialect dialect)
{
	for (int i = 0; rs_drivers[i] != NULL; i++)
	{
		if (rs_drivers[i]->dialect == dialect)
			return rs_drivers[i];
	}
	return NULL;
}

static ruststream_code
connect_handle(ruststream *handle)
{
	rs_error error = {0};

	if (handle->driver->open(&handle->url, &handle->session, &error) != RS_DONE)
	{
		handle->error = error;
		return error.code;
	}
	return RUSTSTREAM_OK;
}

ruststream_code
ruststream_open(const char *url, ruststream **result)
{
	ruststream *handle = calloc(1, sizeof(ruststream));

	*result = handle;
	if (handle == NULL)
		return RUSTSTREAM_NO_MEMORY;
	if (!rs_url_parse(url, &handle->arena, &handle->url, &handle->error))
		return handle->error.code;
	if (handle->url.password == NULL && handle->url.dialect != RS_DIALECT_SQLITE)
	{
		const char *password = getenv("RUSTSTREAM_PASSWORD");

		handle->url.password = rs_copy(&handle->arena, password);
		if (password != NULL && handle->url.password == NULL)
			return rs_no_memory(handle);
	}

	handle->driver = find_driver(handle->url.dialect);
	if (handle->driver == NULL)
		return rs_fail(handle, RUSTSTREAM_UNAVAILABLE,
					   "Build with the development files of its client library installed.",
					   "this build of ruststream does not serve %s; it serves: %s",
					   handle->url.display, ruststream_drivers());
	return connect_handle(handle);
}

ruststream_code
rs_reconnect(ruststream *handle)
{
	if (handle->session != NULL)
		handle->driver->close(handle->session);
	handle->session = NULL;
	return connect_handle(handle);
}

void
ruststream_close(ruststream *handle)
{
	if (handle == NULL)
		return;
	if (handle->session != NULL)
		handle->driver->close(handle->session);
	rs_arena_free(&handle->arena);
	free(handle);
}

void *
ruststream_connection(ruststream *handle)
{
	return handle->session != NULL ? handle->driver->native(handle->session) : NULL;
}

/* ----------------------------------------------------------------- clocks */

int64_t
rs_monotonic(void)
{
	struct timespec now;

	(void) clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t) now.tv_sec * RS_SECOND + now.tv_nsec / 1000;
}

/* For jitter: where there is no entropy yet, the clock will do. */
uint32_t
rs_random(void)
{
	uint32_t random;

	if (getrandom(&random, sizeof(random), GRND_NONBLOCK) != (ssize_t) sizeof(random))
		random = (uint32_t) rs_monotonic() * UINT32_C(2654435761);
	return random;
}
