/*-------------------------------------------------------------------------
 *
 * main.c
 *	  The command line: its commands, their options and their help.
 *
 *-------------------------------------------------------------------------
 */
#include "client/main.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --------------------------------------------------------------- commands */

static int
run_install(const request *asked, ruststream *db)
{
	return ruststream_install(db, option_flag(asked, "wal")) == RUSTSTREAM_OK
			   ? EXIT_DONE
			   : show_error(asked, db);
}

static const option_text install_options[] = {{"wal", NULL, "SQLite: turn write-ahead logging on"},
											  {NULL, NULL, NULL}};

static int
run_describe(const request *asked, ruststream *db)
{
	const ruststream_queue queue = {
		.table = asked->words[0],
		.id_column = option_value(asked, "id"),
		.group_column = option_value(asked, "group"),
		.priority_column = option_value(asked, "priority"),
		.partition_key_column = option_value(asked, "partition-key"),
		.retry_after_column = option_value(asked, "retry-after"),
		.attempt_column = option_value(asked, "attempt"),
		.processed_at_column = option_value(asked, "processed-at"),
		.locked_until_column = option_value(asked, "locked-until"),
		.headers_column = option_value(asked, "headers"),
		.payload_column = option_value(asked, "payload"),
		.fifo = option_flag(asked, "fifo"),
		.lock_key = option_value(asked, "lock-key"),
		.isolation = option_value(asked, "isolation"),
		.mode = option_value(asked, "mode"),
		.create_index = option_flag(asked, "create-index"),
	};

	if (queue.id_column == NULL)
		return complain(asked, "describe needs --id COLUMN");
	return ruststream_describe(db, &queue) == RUSTSTREAM_OK ? EXIT_DONE : show_error(asked, db);
}

static const option_text describe_options[] = {
	{"id", "COLUMN",
	 "identifies a row: unique by itself and not NULL; the one role that is needed"},
	{"group", "COLUMN", "a subscription reads the rows of its group"},
	{"priority", "COLUMN", "smaller goes first"},
	{"partition-key", "COLUMN", "rows of one key go one at a time"},
	{"retry-after", "COLUMN", "not due before that time"},
	{"attempt", "COLUMN", "counts deliveries"},
	{"processed-at", "COLUMN", "ended rows stay, with the time of their end"},
	{"locked-until", "COLUMN", "the lease form: the end of a row's lease"},
	{"headers", "COLUMN", "an object of strings in JSON"},
	{"payload", "COLUMN", "what the handler gets"},
	{"fifo", NULL, "one row of a group at a time, in order"},
	{"lock-key", "TEMPLATE", "the advisory lock form: such as 'account-{account}'"},
	{"isolation", "LEVEL", "of deliveries: 'read committed', ..; not on SQLite"},
	{"mode", "MODE", "SQLite: deferred (unless given), immediate or exclusive"},
	{"create-index", NULL, "make the index that claims need, where it is missing"},
	{NULL, NULL, NULL}};

static int
run_forget(const request *asked, ruststream *db)
{
	return ruststream_forget(db, asked->words[0]) == RUSTSTREAM_OK ? EXIT_DONE
																   : show_error(asked, db);
}

/* A duration of a subscription, where zero would mean that none is given. */
static bool
option_setting(const request *asked, const char *name, int64_t *result)
{
	if (!option_duration(asked, name, result))
		return false;
	if (option_value(asked, name) == NULL || *result > 0)
		return true;
	(void) complain(asked, "--%s takes 1ms at least, not \"%s\"", name, option_value(asked, name));
	return false;
}

static int
run_subscribe(const request *asked, ruststream *db)
{
	int64_t workers = 0;
	int64_t max_attempts = 0;
	int64_t batch_size = 0;
	ruststream_subscription subscription = {
		.name = asked->words[0],
		.queue = asked->words[1],
		.handler = option_value(asked, "handler"),
		.program = option_value(asked, "exec"),
		.group_name = option_value(asked, "group"),
		.transactional = option_value(asked, "transactional"),
		.dead_letter = option_value(asked, "dead-letter"),
		.on_error = option_value(asked, "on-error"),
		.on_decode_error = option_value(asked, "on-decode-error"),
		.decode = option_value(asked, "decode"),
		.backoff = option_value(asked, "backoff"),
	};

	if (!option_number(asked, "workers", 1, 64, &workers) ||
		!option_number(asked, "max-attempts", 1, 1000000, &max_attempts) ||
		!option_number(asked, "batch-size", 1, 10000, &batch_size) ||
		!option_setting(asked, "retry-delay", &subscription.retry_delay) ||
		!option_setting(asked, "max-retry-delay", &subscription.max_retry_delay) ||
		!option_setting(asked, "lease", &subscription.lease) ||
		!option_setting(asked, "timeout", &subscription.timeout) ||
		!option_setting(asked, "poll-interval", &subscription.poll_interval))
		return EXIT_USAGE;
	subscription.workers = (int) workers;
	subscription.max_attempts = (int) max_attempts;
	subscription.batch_size = (int) batch_size;
	return ruststream_subscribe(db, &subscription) == RUSTSTREAM_OK ? EXIT_DONE
																	: show_error(asked, db);
}

static const option_text subscribe_options[] = {
	{"handler", "SQL", "run for each row; on MySQL it may be the name of a procedure"},
	{"exec", "COMMAND", "or a program: payload on its input, answer by its exit status"},
	{"group", "NAME", "the group it reads; its own name unless given"},
	{"transactional", "on|off", "off keeps writes whatever is answered; off for programs"},
	{"workers", "N", "how many of them, 1 unless given"},
	{"batch-size", "N", "the handler takes up to so many rows at once; not transactional"},
	{"max-attempts", "N", "then a row becomes a dead letter"},
	{"dead-letter", "NAME", "a group, or a table where the queue has no groups"},
	{"on-error", "POLICY", "retry, retry_after, discard or dead_letter"},
	{"on-decode-error", "POLICY", "the same, of payloads that are not what they should be"},
	{"decode", "any|text|json", "what payloads must be"},
	{"retry-delay", "TIME", "unit of the backoff, 1s unless given"},
	{"backoff", "KIND", "exponential (unless given), linear or constant"},
	{"max-retry-delay", "TIME", "the backoff's limit, 1h unless given"},
	{"lease", "TIME", "30s unless given"},
	{"timeout", "TIME", "cancels a handler that takes longer"},
	{"poll-interval", "TIME", "how often an idle worker looks, 1s unless given"},
	{NULL, NULL, NULL}};

static int
run_unsubscribe(const request *asked, ruststream *db)
{
	return ruststream_unsubscribe(db, asked->words[0]) == RUSTSTREAM_OK ? EXIT_DONE
																		: show_error(asked, db);
}

static int
run_pause(const request *asked, ruststream *db)
{
	return ruststream_pause(db, asked->words[0]) == RUSTSTREAM_OK ? EXIT_DONE
																  : show_error(asked, db);
}

static int
run_resume(const request *asked, ruststream *db)
{
	return ruststream_resume(db, asked->words[0]) == RUSTSTREAM_OK ? EXIT_DONE
																   : show_error(asked, db);
}

/* All of standard input; NULL where it cannot be had. */
static char *
read_input(size_t *length)
{
	char *text = NULL;
	size_t room = 0;

	*length = 0;
	for (;;)
	{
		char *larger;
		size_t got;

		if (room - *length < 2)
		{
			room = room == 0 ? 65536 : room * 2;
			larger = realloc(text, room);
			if (larger == NULL)
			{
				free(text);
				return NULL;
			}
			text = larger;
		}
		got = fread(text + *length, 1, room - *length - 1, stdin);
		*length += got;
		if (got == 0)
			break;
	}
	if (ferror(stdin))
	{
		free(text);
		return NULL;
	}
	text[*length] = '\0';
	return text;
}

static int
run_publish(const request *asked, ruststream *db)
{
	ruststream_task task = {
		.table = asked->words[0],
		.payload = asked->word_count > 1 ? asked->words[1] : NULL,
		.group_name = option_value(asked, "group"),
		.headers = option_value(asked, "headers"),
		.partition_key = option_value(asked, "partition-key"),
		.has_priority = option_flag(asked, "priority"),
	};
	char id[256];
	char *input = NULL;
	int result = EXIT_DONE;

	if (!option_number(asked, "priority", INT64_MIN, INT64_MAX, &task.priority) ||
		!option_duration(asked, "delay", &task.delay))
		return EXIT_USAGE;
	if (task.payload != NULL && strcmp(task.payload, "-") == 0)
	{
		input = read_input(&task.payload_length);
		if (input == NULL)
			return complain(asked, "standard input cannot be read");
		task.payload = input;
	}
	else if (task.payload != NULL)
		task.payload_length = strlen(task.payload);
	if (ruststream_publish(db, &task, id, sizeof(id)) == RUSTSTREAM_OK)
		show_id(asked, id);
	else
		result = show_error(asked, db);
	free(input);
	return result;
}

static const option_text publish_options[] = {
	{"group", "NAME", "the group it is for"},
	{"priority", "N", "smaller goes first"},
	{"delay", "TIME", "due so much later"},
	{"headers", "JSON", "an object of strings"},
	{"partition-key", "KEY", "rows of one key go one at a time"},
	{NULL, NULL, NULL}};

static const option_text work_options[] = {
	{"drain", NULL, "end when nothing is due"},
	{"grace", "TIME", "how long handlers may finish after SIGTERM, 30s unless given"},
	{"trace", NULL, "print each step of each delivery"},
	{"progress", NULL, "with --drain: say each second how far it is, as on a terminal"},
	{NULL, NULL, NULL}};

static const option_text no_options[] = {{NULL, NULL, NULL}};

static const command commands[] = {
	{"install", "", 0, 0, "make ruststream's tables in a database, or bring them up to date",
	 "install sqlite:app.db --wal", install_options, run_install, false},
	{"describe", "TABLE", 1, 1, "say which columns of a table play which roles",
	 "describe sqlite:app.db email --id id --payload payload --attempt attempt \\\n"
	 "      --retry-after retry_after --locked-until locked_until --create-index",
	 describe_options, run_describe, false},
	{"forget", "TABLE", 1, 1, "forget a description; the table stays", "forget sqlite:app.db email",
	 no_options, run_forget, false},
	{"subscribe", "NAME TABLE", 2, 2, "have the rows of a table handled",
	 "subscribe sqlite:app.db mailer email --handler \"INSERT INTO sent VALUES (:payload)\"\n"
	 "  ruststream subscribe mysql://app@db.example/shop mailer email --handler send_mail\n"
	 "  ruststream subscribe postgres://app@/shop mailer email --exec ./send-mail --timeout 1m",
	 subscribe_options, run_subscribe, false},
	{"unsubscribe", "NAME", 1, 1, "forget a subscription; the rows stay",
	 "unsubscribe sqlite:app.db mailer", no_options, run_unsubscribe, false},
	{"pause", "NAME", 1, 1, "let a subscription's workers rest", "pause sqlite:app.db mailer",
	 no_options, run_pause, false},
	{"resume", "NAME", 1, 1, "let a subscription's workers go on", "resume sqlite:app.db mailer",
	 no_options, run_resume, false},
	{"work", "[NAME ..]", 0, MAX_WORDS, "deliver, until SIGTERM or SIGINT",
	 "work @/etc/shop/database-url mailer --grace 1m", work_options, run_work, true},
	{"publish", "TABLE [PAYLOAD]", 1, 2, "insert a row (- reads the payload from standard input)",
	 "publish sqlite:app.db email '{\"to\": \"ada@example.org\"}' --delay 5m", publish_options,
	 run_publish, false},
	{"status", "[NAME]", 0, 1, "show each subscription: state, depth, counts, last error",
	 "status sqlite:app.db", no_options, show_status, false},
};

#define COMMAND_COUNT ((int) (sizeof(commands) / sizeof(commands[0])))

/* ------------------------------------------------------------------- help */

static void
print_help(const char *program)
{
	printf("Any table of a database as a transactional task queue.\n\n"
		   "Usage: %s COMMAND URL [ARGUMENT ..] [OPTION ..]\n\nCommands:\n",
		   program);
	for (int i = 0; i < COMMAND_COUNT; i++)
		printf("  %-12s %-16s %s\n", commands[i].name, commands[i].words, commands[i].help);
	printf("  %-12s %-16s %s\n", "help", "[COMMAND]", "show this, or a command's options");
	printf(
		"\nURL is one of\n"
		"  sqlite:PATH           ?mode=rwc makes the file\n"
		"  mysql://user@host/database\n"
		"  postgres://user@host/database\n"
		"  @FILE                 the first line of a file\n"
		"  -                     the environment variable RUSTSTREAM_URL\n"
		"A password is best kept in such a file, or in RUSTSTREAM_PASSWORD.\n"
		"This build serves: %s.\n\n"
		"TIME is a number with ms, s, m, h or d behind it; alone it is seconds.\n"
		"--json prints results and errors as JSON.\n\n"
		"Exit status: 0 done; 1 the database or the system refused; 2 wrong usage; 3 not found;\n"
		"4 refused, as a description or setting cannot hold; 5 no database, or not installed;\n"
		"6 still busy.\n",
		ruststream_drivers());
}

static void
print_command_help(const char *program, const command *one)
{
	printf("Usage: %s %s URL%s%s [OPTION ..]\n\n%c%s.\n", program, one->name,
		   one->words[0] != '\0' ? " " : "", one->words, toupper((unsigned char) one->help[0]),
		   one->help + 1);
	printf("\nOptions:\n");
	for (const option_text *option = one->options; option->name != NULL; option++)
	{
		char text[64];

		(void) snprintf(text, sizeof(text), "--%s%s%s", option->name,
						option->argument != NULL ? " " : "",
						option->argument != NULL ? option->argument : "");
		printf("  %-26s %s\n", text, option->help);
	}
	printf("  %-26s %s\n", "--json", "print results and errors as JSON");
	printf("\nExample:\n  %s %s\n", program, one->example);
	if (strcmp(one->name, "subscribe") == 0)
		printf(
			"\nSQL may use :id, :payload, :attempt and :headers. No answer is ack; others are, on "
			"SQLite\n"
			"  and PostgreSQL, SELECT ruststream_retry_after(30) (also ruststream_retry, "
			"_discard,\n"
			"  _dead_letter, _undecodable; a reason may be the last argument), and on MySQL\n"
			"  SET @ruststream_outcome = 'retry_after', @ruststream_delay = 30, or a procedure's "
			"OUT\n"
			"  parameters outcome, delay and reason.\n"
			"With --batch-size :payload is an array in JSON of the rows' id, attempt, headers and\n"
			"  payload; a program gets these on a line each, and may print an outcome for each.\n"
			"A program answers by its exit status: 0 ack, 10 retry, 11 retry_after (a first line\n"
			"  such as \"30\" on its output is the delay in seconds), 12 discard, 13 dead_letter,\n"
			"  14 the payload does not decode; anything else is a failure.\n");
}

static const command *
find_command(const char *name)
{
	for (int i = 0; i < COMMAND_COUNT; i++)
	{
		if (strcmp(commands[i].name, name) == 0)
			return &commands[i];
	}
	return NULL;
}

/* ---------------------------------------------------------------- options */

const char *
option_value(const request *asked, const char *name)
{
	const option_text *options = asked->command->options;

	for (int i = 0; options[i].name != NULL; i++)
	{
		if (strcmp(options[i].name, name) == 0)
			return asked->values[i];
	}
	return NULL;
}

bool
option_flag(const request *asked, const char *name)
{
	return option_value(asked, name) != NULL;
}

bool
option_duration(const request *asked, const char *name, int64_t *result)
{
	static const struct
	{
		const char *unit;
		double milliseconds;
	} units[] = {{"ms", 1},          {"s", 1000},      {"", 1000},
				 {"m", 60 * 1000.0}, {"h", 3600000.0}, {"d", 86400000.0}};
	const char *text = option_value(asked, name);
	char *end;
	double number;

	if (text == NULL)
		return true;
	number = strtod(text, &end);
	for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++)
	{
		double milliseconds = number * units[i].milliseconds;

		if (end == text || strcmp(end, units[i].unit) != 0)
			continue;
		if (!(milliseconds >= 0 && milliseconds < 1e15))
			break;
		*result = (int64_t) milliseconds;
		return true;
	}
	(void) complain(asked, "--%s takes a time such as 500ms, 30s, 5m, 2h or 1d, not \"%s\"", name,
					text);
	return false;
}

bool
option_number(const request *asked, const char *name, int64_t least, int64_t most, int64_t *result)
{
	const char *text = option_value(asked, name);
	char *end;
	long long number;

	if (text == NULL)
		return true;
	errno = 0;
	number = strtoll(text, &end, 10);
	if (end != text && *end == '\0' && errno == 0 && number >= least && number <= most)
	{
		*result = number;
		return true;
	}
	(void) complain(asked, "--%s takes a number, not \"%s\"", name, text);
	return false;
}

/* What getopt_long returns for --json: no letter. */
#define JSON 999

/* Read the words and options behind the command; the exit code where that is all. */
static bool
parse(request *asked, int argc, char **argv, int *result)
{
	struct option known[MAX_OPTIONS + 2] = {{NULL, 0, NULL, 0}};
	int count = 0;
	int found;

	for (; asked->command->options[count].name != NULL; count++)
	{
		known[count].name = asked->command->options[count].name;
		known[count].has_arg =
			asked->command->options[count].argument != NULL ? required_argument : no_argument;
		known[count].val = 1000 + count;
	}
	known[count++] = (struct option){"json", no_argument, NULL, JSON};
	known[count] = (struct option){"help", no_argument, NULL, 'h'};

	opterr = 0;
	optind = 1;
	while ((found = getopt_long(argc, argv, ":h", known, NULL)) != -1)
	{
		if (found >= 1000)
			asked->values[found - 1000] = optarg != NULL ? optarg : "";
		else if (found == JSON)
			asked->json = true;
		else if (found == 'h')
		{
			print_command_help(asked->program, asked->command);
			*result = EXIT_DONE;
			return false;
		}
		else if (optopt > ' ' && optopt < JSON && optopt != 'h')
		{
			/* One letter of several, perhaps: what stands behind it is still to be read. */
			*result = complain(asked, "unknown option -%c", optopt);
			return false;
		}
		else
		{
			*result = complain(asked, found == ':' ? "%s needs an argument" : "unknown option %s",
							   argv[optind - 1]);
			return false;
		}
	}
	if (optind < argc)
		asked->url = argv[optind++];
	for (; optind < argc; optind++)
	{
		if (asked->word_count == MAX_WORDS)
		{
			*result = complain(asked, "too many arguments");
			return false;
		}
		asked->words[asked->word_count++] = argv[optind];
	}
	if (asked->url == NULL)
		*result = complain(asked, "%s needs a database's URL", asked->command->name);
	else if (asked->word_count < asked->command->least_words)
		*result = complain(asked, "%s needs %s", asked->command->name, asked->command->words);
	else if (asked->word_count > asked->command->most_words)
		*result = complain(asked, "\"%s\" is one argument too many",
						   asked->words[asked->command->most_words]);
	else
		return true;
	return false;
}

/*
 * The URL itself, in memory of its own: from a file, the environment, or the command line, where a
 * password is then painted over, so that it shows in no list of processes for long.
 */
static char *
take_url(const request *asked, char *given)
{
	char line[4096];
	FILE *file;
	char *url;

	if (strcmp(given, "-") == 0)
	{
		const char *from = getenv("RUSTSTREAM_URL");

		if (from == NULL)
			(void) complain(asked, "RUSTSTREAM_URL is not set");
		return from != NULL ? strdup(from) : NULL;
	}
	if (given[0] == '@')
	{
		errno = 0;
		file = fopen(given + 1, "r");
		if (file == NULL || fgets(line, sizeof(line), file) == NULL)
		{
			(void) complain(asked, "no URL can be read from \"%s\": %s", given + 1,
							errno != 0 ? strerror(errno) : "it is empty");
			if (file != NULL)
				(void) fclose(file);
			return NULL;
		}
		(void) fclose(file);
		line[strcspn(line, "\r\n")] = '\0';
		return strdup(line);
	}
	url = strdup(given);
	if (url != NULL)
	{
		char *at = strrchr(given, '@');
		char *slashes = strstr(given, "://");
		char *colon = slashes != NULL && at != NULL ? strchr(slashes + 3, ':') : NULL;

		for (; colon != NULL && colon + 1 < at; colon++)
			colon[1] = 'x';
		/* libpq takes it as a parameter, too. */
		for (char *secret = strstr(given, "password="); secret != NULL;
			 secret = strstr(secret, "password="))
		{
			for (secret += strlen("password="); *secret != '\0' && *secret != '&'; secret++)
				*secret = 'x';
		}
	}
	return url;
}

static int
run(request *asked)
{
	ruststream *db = NULL;
	int result;

	if (asked->command->opens_by_itself)
		return asked->command->run(asked, NULL);
	if (ruststream_open(asked->url, &db) != RUSTSTREAM_OK)
		result = show_error(asked, db);
	else
	{
		ruststream_on_notice(db, show_notice, asked);
		result = asked->command->run(asked, db);
	}
	ruststream_close(db);
	return result;
}

static int
help(request *asked, const char *name)
{
	const command *one = name != NULL ? find_command(name) : NULL;

	if (name != NULL && one == NULL)
		return complain(asked, "there is no command \"%s\"", name);
	if (one != NULL)
		print_command_help(asked->program, one);
	else
		print_help(asked->program);
	return EXIT_DONE;
}

/*
 * Whoever starts us may have closed some of the three; then what we open, a connection say, would
 * be taken for one of them, and be written our messages.
 */
static bool
have_standard_files(void)
{
	for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
	{
		/* The other way round, so that they fail as they did. */
		if (fcntl(fd, F_GETFD) == -1 &&
			open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd)
			return false;
	}
	return true;
}

/* The exit code, unless the output could not be written. */
static int
end(const request *asked, int result)
{
	if ((fflush(stdout) == 0 && !ferror(stdout)) || result != EXIT_DONE)
		return result;
	return fail_with(asked, EXIT_FAILED, "the output cannot be written: %s", strerror(errno));
}

int
main(int argc, char **argv)
{
	request asked = {.program = "ruststream"};
	const char *name = argc > 1 ? argv[1] : "";
	char *url;
	int result = EXIT_FAILED;

	if (!have_standard_files())
		return EXIT_FAILED;
	for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
		asked.json |= strcmp(argv[i], "--json") == 0;
	if (strcmp(name, "--version") == 0 || strcmp(name, "version") == 0)
	{
		printf("ruststream %s (%s)\n", ruststream_version(), ruststream_drivers());
		return end(&asked, EXIT_DONE);
	}
	if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0)
		return end(&asked, help(&asked, argc > 2 ? argv[2] : NULL));
	if (name[0] == '\0')
		return complain(&asked, "no command is given");
	asked.command = find_command(name);
	if (asked.command == NULL)
		return complain(&asked, "there is no command \"%s\"", name);
	if (!parse(&asked, argc - 1, argv + 1, &result))
		return end(&asked, result);
	url = take_url(&asked, (char *) (uintptr_t) asked.url);
	if (url == NULL)
		return EXIT_USAGE;
	asked.url = url;
	result = run(&asked);
	free(url);
	return end(&asked, result);
}
