/*-------------------------------------------------------------------------
 *
 * main_show.c
 *	  What the command line prints.
 *
 * Results go to standard output, everything else to standard error.
 *
 *-------------------------------------------------------------------------
 */
#include "client/main.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int
exit_code(ruststream_code code)
{
	switch (code)
	{
		case RUSTSTREAM_OK:
			return EXIT_DONE;
		case RUSTSTREAM_MISUSE:
			return EXIT_USAGE;
		case RUSTSTREAM_NOT_FOUND:
			return EXIT_NOT_FOUND;
		case RUSTSTREAM_REFUSED:
			return EXIT_REFUSED;
		case RUSTSTREAM_UNAVAILABLE:
		case RUSTSTREAM_NOT_INSTALLED:
			return EXIT_NO_DATABASE;
		case RUSTSTREAM_BUSY:
			return EXIT_STILL_BUSY;
		default:
			return EXIT_FAILED;
	}
}

/* Text that may be anything, as JSON that is always valid; takes the value's place in an object. */
static json_t *
text_value(const char *text)
{
	size_t length = text != NULL ? strlen(text) : 0;
	json_t *value = text != NULL ? json_stringn(text, length) : json_null();

	/* A text that was cut may end inside a character. */
	for (int i = 0; i < 3 && value == NULL && length > 0; i++)
		value = json_stringn(text, --length);
	return value != NULL ? value : json_string("(not UTF-8)");
}

static void
print_json(FILE *to, json_t *value)
{
	char *text = value != NULL ? json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;

	fprintf(to, "%s\n", text != NULL ? text : "null");
	free(text);
	json_decref(value);
}

/* An error in JSON; hint and state may be empty. */
static void
print_error(const char *message, const char *hint, const char *state, int code)
{
	json_t *error = json_object();

	json_object_set_new(error, "error", text_value(message));
	json_object_set_new(error, "hint", hint[0] != '\0' ? text_value(hint) : json_null());
	json_object_set_new(error, "state", state[0] != '\0' ? text_value(state) : json_null());
	json_object_set_new(error, "exit_code", json_integer(code));
	print_json(stderr, error);
}

int
show_error(const request *asked, const ruststream *db)
{
	int code = exit_code(db != NULL ? ruststream_error(db) : RUSTSTREAM_NO_MEMORY);
	const char *message = db != NULL ? ruststream_message(db) : "out of memory";
	const char *hint = db != NULL ? ruststream_hint(db) : "";

	if (asked->json)
	{
		print_error(message, hint, db != NULL ? ruststream_state(db) : "", code);
		return code;
	}
	fprintf(stderr, "%s: %s\n", asked->program, message);
	if (hint[0] != '\0')
		fprintf(stderr, "hint: %s\n", hint);
	return code;
}

int
fail_with(const request *asked, int code, const char *format, ...)
{
	va_list arguments;
	char message[1024];

	va_start(arguments, format);
	(void) vsnprintf(message, sizeof(message), format, arguments);
	va_end(arguments);
	if (asked->json)
		print_error(message, "", "", code);
	else
		fprintf(stderr, "%s: %s\n", asked->program, message);
	return code;
}

int
complain(const request *asked, const char *format, ...)
{
	va_list arguments;
	char message[1024];
	char hint[128];

	va_start(arguments, format);
	(void) vsnprintf(message, sizeof(message), format, arguments);
	va_end(arguments);
	(void) snprintf(hint, sizeof(hint), "Try: %s help%s%s", asked->program,
					asked->command != NULL ? " " : "",
					asked->command != NULL ? asked->command->name : "");
	if (asked->json)
		print_error(message, hint, "", EXIT_USAGE);
	else
		fprintf(stderr, "%s: %s\n%s\n", asked->program, message, hint);
	return EXIT_USAGE;
}

void
show_notice(void *arg, const char *text)
{
	const request *asked = arg;

	fprintf(stderr, "%s: %s\n", asked->program, text);
}

void
show_id(const request *asked, const char *id)
{
	if (asked->json)
		print_json(stdout, json_pack("{s:o}", "id", text_value(id)));
	else
		printf("%s\n", id);
}

void
show_counts(const request *asked, int64_t delivered, int64_t failed)
{
	if (asked->json)
		print_json(stdout, json_pack("{s:I, s:I}", "delivered", (json_int_t) delivered, "failed",
									 (json_int_t) failed));
	else
		fprintf(stderr, "%s: delivered %lld, of which %lld failed\n", asked->program,
				(long long) delivered, (long long) failed);
}

/* ----------------------------------------------------------------- status */

typedef struct showing
{
	const request *asked;
	json_t *rows; /* with --json */
	int count;
} showing;

static json_t *
count_value(int64_t count)
{
	return count >= 0 ? json_integer((json_int_t) count) : json_null();
}

static void
add_row(showing *to, const ruststream_status *row)
{
	json_t *object = json_object();

	json_object_set_new(object, "subscription", text_value(row->subscription));
	json_object_set_new(object, "queue", text_value(row->queue));
	json_object_set_new(object, "state", text_value(row->state));
	json_object_set_new(object, "workers", json_integer((json_int_t) row->workers));
	json_object_set_new(object, "workers_wanted", json_integer((json_int_t) row->workers_wanted));
	json_object_set_new(object, "ready", count_value(row->ready));
	json_object_set_new(object, "waiting", count_value(row->waiting));
	json_object_set_new(object, "in_work", count_value(row->in_work));
	json_object_set_new(object, "dead", count_value(row->dead));
	json_object_set_new(object, "capped", json_boolean(row->capped));
	json_object_set_new(object, "oldest", text_value(row->oldest));
	json_object_set_new(object, "delivered", json_integer((json_int_t) row->delivered));
	json_object_set_new(object, "failed", json_integer((json_int_t) row->failed));
	json_object_set_new(object, "last_error", text_value(row->last_error));
	json_object_set_new(object, "last_error_at", text_value(row->last_error_at));
	json_array_append_new(to->rows, object);
}

static void
print_count(int64_t count)
{
	if (count < 0)
		printf("%9s", "-");
	else
		printf("%9lld", (long long) count);
}

static void
show_row(void *arg, const ruststream_status *row)
{
	showing *to = arg;

	if (to->asked->json)
	{
		add_row(to, row);
		return;
	}
	if (to->count++ == 0)
		printf("%-20s %-20s %-10s %9s%9s%9s%9s%10s%9s\n", "subscription", "queue", "state", "ready",
			   "waiting", "in work", "dead", "delivered", "failed");
	printf("%-20s %-20s %-10.10s ", row->subscription, row->queue, row->state);
	print_count(row->ready);
	print_count(row->waiting);
	print_count(row->in_work);
	print_count(row->dead);
	printf("%10lld%9lld%s\n", (long long) row->delivered, (long long) row->failed,
		   row->capped ? "  (counted up to 10,000)" : "");
	if (strlen(row->state) > 10)
		printf("    %s\n", row->state);
	if (row->last_error != NULL)
		printf("    last error, %s: %s\n", row->last_error_at != NULL ? row->last_error_at : "",
			   row->last_error);
}

int
show_status(const request *asked, ruststream *db)
{
	showing to = {.asked = asked, .rows = asked->json ? json_array() : NULL};
	ruststream_code code =
		ruststream_look(db, asked->word_count > 0 ? asked->words[0] : NULL, show_row, &to);

	if (code != RUSTSTREAM_OK)
	{
		json_decref(to.rows);
		return show_error(asked, db);
	}
	if (asked->json)
		print_json(stdout, to.rows);
	else if (to.count == 0)
		printf("no subscriptions\n");
	return EXIT_DONE;
}
