/*-------------------------------------------------------------------------
 *
 * main.h
 *	  What the files of the command line share.  They know the library by
 *	  ruststream.h alone.
 *
 *	main.c		the commands, their options and their help
 *	main_work.c	work: threads and signals
 *	main_show.c	what is printed: status, errors, notices
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_MAIN_H
#define RUSTSTREAM_MAIN_H

#include "client/ruststream.h"

/* Exit codes, as the help and docs/client.md list them. */
enum
{
	EXIT_DONE = 0,
	EXIT_FAILED = 1,
	EXIT_USAGE = 2,
	EXIT_NOT_FOUND = 3,
	EXIT_REFUSED = 4,
	EXIT_NO_DATABASE = 5,
	EXIT_STILL_BUSY = 6
};

/* A command's option: NULL for its argument means that it is a flag. */
typedef struct option_text
{
	const char *name;
	const char *argument;
	const char *help;
} option_text;

#define MAX_OPTIONS 32
#define MAX_WORDS 64

/* What was asked for. */
typedef struct request
{
	const struct command *command;
	const char *program;
	const char *url;
	const char *words[MAX_WORDS]; /* behind the URL */
	int word_count;
	const char *values[MAX_OPTIONS]; /* by the command's options; NULL: not given */
	bool json;
} request;

typedef struct command
{
	const char *name;
	const char *words; /* what follows the URL, for the help */
	int least_words;
	int most_words;
	const char *help;
	const char *example; /* without the program's name; lines */
	const option_text *options;
	int (*run)(const request *asked, ruststream *db);
	bool opens_by_itself; /* db is NULL */
} command;

/* An option's value, "" for a flag that is given; NULL: not given. */
extern const char *option_value(const request *asked, const char *name);
extern bool option_flag(const request *asked, const char *name);
/* A duration in milliseconds; false, having complained, where it is none. */
extern bool option_duration(const request *asked, const char *name, int64_t *result);
extern bool option_number(const request *asked, const char *name, int64_t least, int64_t most,
						  int64_t *result);

/* main_show.c */
extern int exit_code(ruststream_code code);
/* Print the handle's error and return its exit code. */
extern int show_error(const request *asked, const ruststream *db);
extern void show_notice(void *arg, const char *text); /* arg: the request */
extern int show_status(const request *asked, ruststream *db);
extern void show_id(const request *asked, const char *id);
extern void show_counts(const request *asked, int64_t delivered, int64_t failed);
/* The same of a message of our own. */
extern int fail_with(const request *asked, int code, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
/* Wrong usage: the message, and where to read more. */
extern int complain(const request *asked, const char *format, ...)
	__attribute__((format(printf, 2, 3)));

/* main_work.c */
extern int run_work(const request *asked, ruststream *db);

#endif /* RUSTSTREAM_MAIN_H */
