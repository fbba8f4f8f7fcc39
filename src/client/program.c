/*-------------------------------------------------------------------------
 *
 * program.c
 *	  A program as the handler: the payload on its standard input, its answer an
 *	  exit status.
 *
 *		0		ack
 *		10		retry
 *		11		retry_after; a number on the first line of its output is the delay in seconds
 *		12		discard
 *		13		dead_letter
 *		14		the payload does not decode
 *		other	a failure; the last line of its standard error says why
 *
 * With 10 to 13, the output's first line (of 11, what follows the number) is the reason.  The
 * environment has RUSTSTREAM_SUBSCRIPTION, RUSTSTREAM_QUEUE, RUSTSTREAM_ID, RUSTSTREAM_ATTEMPT and
 * RUSTSTREAM_HEADERS.
 *
 * A program of batches gets a line of JSON for each row (batch_handler.c), and RUSTSTREAM_ROWS in
 * place of what is one row's.  With 0 it may print an outcome for each row.
 *
 * The command is run by /bin/sh, in a process group of its own, all of which ends with
 * it: when it is cancelled, first by SIGTERM, then by SIGKILL.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

/* How often a program that is silent is looked at, and how long it has after a SIGTERM. */
#define LOOK_MS 50
#define TERM_MS 5000

/* What a pipe holds at the most, unless somebody makes it larger. */
#define PIPE_SIZE 65536

/* The ends of the pipes to a program; -1 once closed.  What it says is kept up to here. */
typedef struct running
{
	pid_t pid;
	int input;
	int output;
	int errors;
	const char *payload;
	size_t left;
	char *said; /* in first, unless more is wanted */
	size_t said_length;
	size_t said_room;
	size_t said_most; /* what is beyond this is dropped */
	bool said_too_much;
	char first[1024];
	char complained[2048]; /* the end of it */
	size_t complained_length;
} running;

static void
close_end(int *end)
{
	if (*end >= 0)
		(void) close(*end);
	*end = -1;
}

/* --------------------------------------------------------------- starting */

/* The environment, with what we say of the delivery before everything else. */
static char **
make_environment(rs_arena *arena, const ruststream_delivery *delivery,
				 const rs_program_batch *batch)
{
	size_t count = 0;
	char **result;
	int n = 0;

	while (environ[count] != NULL)
		count++;
	result = rs_alloc(arena, (count + 6) * sizeof(char *));
	if (result == NULL)
		return NULL;
	result[n++] = rs_print(arena, "RUSTSTREAM_SUBSCRIPTION=%s", delivery->subscription);
	result[n++] = rs_print(arena, "RUSTSTREAM_QUEUE=%s", delivery->queue);
	if (batch != NULL)
		result[n++] = rs_print(arena, "RUSTSTREAM_ROWS=%d", batch->rows);
	else
	{
		result[n++] = rs_print(arena, "RUSTSTREAM_ID=%s", delivery->id);
		result[n++] = rs_print(arena, "RUSTSTREAM_ATTEMPT=%lld", (long long) delivery->attempt);
		result[n++] = rs_print(arena, "RUSTSTREAM_HEADERS=%s",
							   delivery->headers != NULL ? delivery->headers : "{}");
	}
	for (size_t i = 0; i < count; i++)
	{
		/* Not the password: a program has no use for it. */
		if (strncmp(environ[i], "RUSTSTREAM_", 11) != 0)
			result[n++] = environ[i];
	}
	return arena->is_exhausted ? NULL : result;
}

static bool
make_pipe(int ends[2])
{
	if (pipe2(ends, O_CLOEXEC) == 0)
		return true;
	ends[0] = ends[1] = -1;
	return false;
}

/* In a group of its own, with no signal blocked or ignored. */
static int
spawn(const char *program, char **environment, const int input[2], const int output[2],
	  const int errors[2], pid_t *pid)
{
	char *const arguments[] = {(char *) "sh", (char *) "-c", (char *) program, NULL};
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attributes;
	sigset_t none;
	sigset_t defaults;
	int problem = posix_spawn_file_actions_init(&actions);

	if (problem != 0)
		return problem;
	problem = posix_spawnattr_init(&attributes);
	if (problem != 0)
	{
		posix_spawn_file_actions_destroy(&actions);
		return problem;
	}
	sigemptyset(&none);
	sigemptyset(&defaults);
	sigaddset(&defaults, SIGPIPE);
	sigaddset(&defaults, SIGINT);
	sigaddset(&defaults, SIGTERM);
	problem = posix_spawn_file_actions_adddup2(&actions, input[0], STDIN_FILENO);
	if (problem == 0)
		problem = posix_spawn_file_actions_adddup2(&actions, output[1], STDOUT_FILENO);
	if (problem == 0)
		problem = posix_spawn_file_actions_adddup2(&actions, errors[1], STDERR_FILENO);
	if (problem == 0)
		problem = posix_spawnattr_setflags(
			&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
	if (problem == 0)
		problem = posix_spawnattr_setsigmask(&attributes, &none);
	if (problem == 0)
		problem = posix_spawnattr_setsigdefault(&attributes, &defaults);
	if (problem == 0)
		problem = posix_spawn(pid, "/bin/sh", &actions, &attributes, arguments, environment);
	posix_spawnattr_destroy(&attributes);
	posix_spawn_file_actions_destroy(&actions);
	return problem;
}

/* Start the program and keep our ends; an error's number, or 0. */
static int
start(const char *program, const ruststream_delivery *delivery, const rs_program_batch *batch,
	  running *child)
{
	rs_arena arena = {0};
	int input[2];
	int output[2];
	int errors[2];
	bool has_input = make_pipe(input);
	bool has_output = make_pipe(output);
	bool has_errors = make_pipe(errors);
	char **environment = make_environment(&arena, delivery, batch);
	int problem = 0;

	if (!has_input || !has_output || !has_errors)
		problem = EMFILE;
	else if (environment == NULL)
		problem = ENOMEM;
	else
		problem = spawn(program, environment, input, output, errors, &child->pid);
	rs_arena_free(&arena);
	close_end(&input[0]);
	close_end(&output[1]);
	close_end(&errors[1]);
	child->input = input[1];
	child->output = output[0];
	child->errors = errors[0];
	if (problem != 0)
	{
		close_end(&child->input);
		close_end(&child->output);
		close_end(&child->errors);
		return problem;
	}
	(void) fcntl(child->input, F_SETFL, O_NONBLOCK);
	(void) fcntl(child->output, F_SETFL, O_NONBLOCK);
	(void) fcntl(child->errors, F_SETFL, O_NONBLOCK);
	return 0;
}

/* ---------------------------------------------------------------- talking */

/* A program need not read its input: then the rest of it is dropped. */
static void
feed(running *child)
{
	ssize_t written = write(child->input, child->payload, child->left);

	if (written > 0)
	{
		child->payload += written;
		child->left -= (size_t) written;
	}
	else if (written < 0 && errno != EAGAIN && errno != EINTR)
		child->left = 0;
	if (child->left == 0)
		close_end(&child->input);
}

/* Keep what it has said, as far as there is room, and more may be had. */
static void
keep_said(running *child, const char *bytes, size_t length)
{
	while (child->said_room - 1 - child->said_length < length &&
		   child->said_room < child->said_most)
	{
		size_t room = child->said_room * 2;
		char *larger = malloc(room);

		if (larger == NULL)
			break;
		memcpy(larger, child->said, child->said_length);
		if (child->said != child->first)
			free(child->said);
		child->said = larger;
		child->said_room = room;
	}
	if (length > child->said_room - 1 - child->said_length)
	{
		length = child->said_room - 1 - child->said_length;
		child->said_too_much = true;
	}
	memcpy(child->said + child->said_length, bytes, length);
	child->said_length += length;
}

/* Take what it says now; false: nothing. */
static bool
listen_to(running *child, int *end, bool is_output)
{
	char buffer[4096];
	ssize_t got = read(*end, buffer, sizeof(buffer));
	size_t length = got > 0 ? (size_t) got : 0;

	if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
		close_end(end);
	if (is_output)
	{
		keep_said(child, buffer, length);
		return got > 0;
	}
	for (size_t i = 0; i < length; i++)
	{
		if (child->complained_length == sizeof(child->complained) - 1)
		{
			/* Keep the end: half of what is there goes. */
			child->complained_length /= 2;
			memmove(child->complained,
					child->complained + sizeof(child->complained) - 1 - child->complained_length,
					child->complained_length);
		}
		child->complained[child->complained_length++] = buffer[i];
	}
	return got > 0;
}

/* What it has said before its end is in the pipe; what it has left running may say more for ever.
 */
static void
hear_out(running *child, int *end, bool is_output)
{
	for (size_t heard = 0; *end >= 0 && heard < PIPE_SIZE; heard += 4096)
	{
		if (!listen_to(child, end, is_output))
			return;
	}
}

/* Talk for a little while. */
static void
talk(running *child)
{
	struct pollfd ends[3] = {{.fd = child->input, .events = POLLOUT},
							 {.fd = child->output, .events = POLLIN},
							 {.fd = child->errors, .events = POLLIN}};

	if (poll(ends, 3, LOOK_MS) <= 0)
		return;
	if (ends[0].revents != 0)
		feed(child);
	if (ends[1].revents != 0)
		(void) listen_to(child, &child->output, true);
	if (ends[2].revents != 0)
		(void) listen_to(child, &child->errors, false);
}

/* Until it has ended, or is made to; its status as waitpid tells it. */
static int
converse(running *child, rs_watch *watch)
{
	int64_t killed_at = 0;
	int status = 0;
	pid_t ended = 0;

	if (child->left == 0)
		close_end(&child->input);
	while (ended == 0)
	{
		if (child->input >= 0 || child->output >= 0 || child->errors >= 0)
			talk(child);
		/* Whatever it has left running keeps the pipes, not us. */
		ended = waitpid(child->pid, &status, WNOHANG);
		if (ended == 0 && child->output < 0 && child->errors < 0)
			(void) poll(NULL, 0, 2);
		if (ended != 0 || !rs_watch_is_cancelled(watch))
			continue;
		if (killed_at == 0)
		{
			(void) kill(-child->pid, SIGTERM);
			killed_at = rs_monotonic();
		}
		else if (rs_monotonic() - killed_at > TERM_MS * RS_MILLISECOND)
			(void) kill(-child->pid, SIGKILL);
	}
	hear_out(child, &child->output, true);
	hear_out(child, &child->errors, false);
	return ended == child->pid ? status : -1;
}

/* -------------------------------------------------------------- its answer */

/* Cut a text to its first line, without spaces around it. */
static char *
first_line(char *text)
{
	char *end;

	while (*text == ' ' || *text == '\n' || *text == '\r' || *text == '\t')
		text++;
	end = text + strcspn(text, "\r\n");
	while (end > text && (end[-1] == ' ' || end[-1] == '\t'))
		end--;
	*end = '\0';
	return text;
}

static char *
last_line(char *text)
{
	size_t length = strlen(text);

	while (length > 0 && strchr(" \r\n\t", text[length - 1]) != NULL)
		text[--length] = '\0';
	while (length > 0 && text[length - 1] != '\n')
		length--;
	return text + length;
}

char *
rs_program_delay(char *text, rs_answer *answer)
{
	char *end;
	double seconds = strtod(text, &end);

	if (end == text || !(seconds >= 0 && seconds < 3.2e9))
		return text;
	answer->has_delay = true;
	answer->delay = (int64_t) (seconds * (double) RS_SECOND);
	return first_line(end);
}

static void
fail(rs_answer *answer, rs_error *error, const char *what, int number, const char *why)
{
	answer->failed = true;
	rs_error_set(error, RUSTSTREAM_DATABASE, "", NULL, "%s%s%s %d", why, why[0] != '\0' ? ": " : "",
				 what, number);
}

static void
read_answer(running *child, int status, rs_answer *answer, rs_error *error)
{
	static const rs_outcome outcomes[] = {RS_OUTCOME_RETRY, RS_OUTCOME_RETRY_AFTER,
										  RS_OUTCOME_DISCARD, RS_OUTCOME_DEAD_LETTER};
	int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
	char *said;

	child->said[child->said_length] = '\0';
	child->complained[child->complained_length] = '\0';
	if (WIFSIGNALED(status))
		fail(answer, error, "the program was ended by signal", WTERMSIG(status),
			 last_line(child->complained));
	else if (code == 0)
		answer->outcome = RS_OUTCOME_ACK;
	else if (code >= 10 && code <= 13)
	{
		answer->outcome = outcomes[code - 10];
		said = first_line(child->said);
		if (answer->outcome == RS_OUTCOME_RETRY_AFTER)
			said = rs_program_delay(said, answer);
		(void) snprintf(answer->reason, sizeof(answer->reason), "%s", said);
	}
	else
	{
		answer->undecodable = code == 14;
		fail(answer, error, "the program ended with status", code, last_line(child->complained));
	}
}

/* A batch's output is for the caller to read, if it may hold answers. */
static void
hand_over_output(running *child, rs_program_batch *batch, rs_answer *answer, rs_error *error)
{
	if (answer->failed || answer->outcome != RS_OUTCOME_ACK)
		return;
	if (child->said_too_much)
	{
		answer->failed = true;
		rs_error_set(error, RUSTSTREAM_DATABASE, "",
					 "Print one outcome for each row, or nothing at all.",
					 "the program printed more than can be answers to %d rows", batch->rows);
		return;
	}
	batch->output = strdup(child->said);
	if (batch->output == NULL)
	{
		answer->failed = true;
		rs_error_set(error, RUSTSTREAM_NO_MEMORY, "", NULL, "out of memory");
	}
}

void
rs_program_run(const char *program, const ruststream_delivery *delivery, rs_program_batch *batch,
			   rs_watch *watch, rs_answer *answer, rs_error *error)
{
	running child = {.payload = delivery->payload,
					 .left = delivery->payload != NULL ? delivery->payload_length : 0};
	const struct timespec at_once = {0, 0};
	sigset_t broken_pipe;
	sigset_t before;
	sigset_t pending;
	bool was_pending;
	int problem;
	int status;

	child.said = child.first;
	child.said_room = sizeof(child.first);
	child.said_most = sizeof(child.first);
	if (batch != NULL)
	{
		child.payload = batch->input;
		child.left = batch->length;
		child.said_most = (size_t) (batch->rows + 1) * sizeof(answer->reason);
	}

	/* A program that does not read must not end us by SIGPIPE, nor change what SIGPIPE does. */
	sigemptyset(&broken_pipe);
	sigaddset(&broken_pipe, SIGPIPE);
	sigemptyset(&pending);
	(void) sigpending(&pending);
	was_pending = sigismember(&pending, SIGPIPE) == 1;
	pthread_sigmask(SIG_BLOCK, &broken_pipe, &before);

	problem = start(program, delivery, batch, &child);
	if (problem != 0)
		fail(answer, error, "the program could not be started: error", problem, strerror(problem));
	else
	{
		status = converse(&child, watch);
		close_end(&child.input);
		close_end(&child.output);
		close_end(&child.errors);
		read_answer(&child, status, answer, error);
		if (batch != NULL)
			hand_over_output(&child, batch, answer, error);
	}
	if (child.said != child.first)
		free(child.said);

	if (!was_pending)
	{
		while (sigtimedwait(&broken_pipe, NULL, &at_once) == -1 && errno == EINTR)
			continue;
	}
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}
