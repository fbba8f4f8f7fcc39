/*-------------------------------------------------------------------------
 *
 * origin.c
 *	  Where a dead letter came from, and why: the headers that its move adds, as
 *	  the extension's do (docs/concepts.md).
 *
 * The group is the row's own, so the statement adds it.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* A reason is clipped to so many bytes: the whole of it is in ruststream_failure. */
#define REASON_BYTES 1024

/* JSON is UTF-8: what is not, because it was cut within a character, ends in front of that. */
static bool
add(json_t *object, const char *name, const char *value, size_t most)
{
	size_t length = strlen(value);
	json_t *text;

	if (length > most)
		length = most;
	do
		text = json_stringn(value, length);
	while (text == NULL && length-- > 0);
	return json_object_set_new(object, name, text) == 0;
}

bool
rs_origin(const rs_work *work, int64_t now, rs_value *origin)
{
	const char *reason = work->has_error ? work->error.message : work->answer.reason;
	char at[RS_TIME_SIZE];
	json_t *object = json_object();
	bool done;
	char *text = NULL;

	rs_time_format(now, at);
	done =
		object != NULL &&
		add(object, "ruststream-origin-queue", work->worker->plan.subscription.queue, SIZE_MAX) &&
		add(object, "ruststream-origin-subscription", work->worker->name, SIZE_MAX);
	if (done && reason[0] != '\0')
		done = add(object, "ruststream-reason", reason, REASON_BYTES);
	if (done && work->has_error && work->error.state[0] != '\0')
		done = add(object, "ruststream-sqlstate", work->error.state, SIZE_MAX);
	done = done && add(object, "ruststream-dead-lettered-at", at, SIZE_MAX);
	if (done)
		text = json_dumps(object, JSON_COMPACT | JSON_PRESERVE_ORDER);
	*origin = rs_value_of_text(rs_copy(&work->worker->delivery_arena, text));
	free(text);
	json_decref(object);
	return origin->kind == RS_TEXT;
}
