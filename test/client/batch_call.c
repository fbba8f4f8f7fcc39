/*-------------------------------------------------------------------------
 *
 * batch_call.c
 *	  A worker whose callback takes batches, on any engine; batch.t runs it.
 *
 *	  batch_call URL SUBSCRIPTION
 *
 * It prints "- STEP" for each step of the trace, "! TEXT" for each notice, "call N", and "row
 * PAYLOAD ATTEMPT" for each row that the callback is given.  The payload of a row says what is
 * done to it:
 *
 *		retry, later, discard, dead	answers that
 *		bad, unreadable				answers a failure of this row, that it does not decode
 *		whole						returns RUSTSTREAM_FAIL, whatever it has answered; once, at
 *									the first attempt, whole_once
 *		note						publishes into the table "noted" through the delivery's handle
 *		wait						prints "waiting", and reads a line of standard input
 *
 * It drains, and ends at SIGTERM as the library has it.
 *
 *-------------------------------------------------------------------------
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "client/ruststream.h"

static ruststream_worker *worker;
static int calls;

static void
on_signal(int number)
{
	(void) number;
	ruststream_worker_stop(worker);
}

static void
print_trace(void *arg, const char *text)
{
	printf("%s %s\n", (const char *) arg, text);
}

/* Without buffers, and again when a signal comes in between. */
static void
wait_for_line(void)
{
	char line[16];

	printf("waiting\n");
	while (fgets(line, sizeof(line), stdin) == NULL && !feof(stdin))
		clearerr(stdin);
}

static ruststream_outcome
handle(ruststream_delivery *const *deliveries, size_t count, void *arg)
{
	ruststream_outcome outcome = RUSTSTREAM_ACK;

	(void) arg;
	printf("call %d\n", ++calls);
	for (size_t i = 0; i < count; i++)
	{
		ruststream_delivery *delivery = deliveries[i];
		const char *word = delivery->payload;

		printf("row %s %lld\n", word, (long long) delivery->attempt);
		if (strcmp(word, "retry") == 0)
			ruststream_answer(delivery, RUSTSTREAM_RETRY);
		else if (strcmp(word, "later") == 0)
		{
			ruststream_delay(delivery, 3600000);
			ruststream_reason(delivery, "not now");
			ruststream_answer(delivery, RUSTSTREAM_RETRY_AFTER);
		}
		else if (strcmp(word, "discard") == 0)
			ruststream_answer(delivery, RUSTSTREAM_DISCARD);
		else if (strcmp(word, "dead") == 0)
			ruststream_answer(delivery, RUSTSTREAM_DEAD_LETTER);
		else if (strcmp(word, "bad") == 0)
		{
			ruststream_reason(delivery, "this one is bad");
			ruststream_answer(delivery, RUSTSTREAM_FAIL);
		}
		else if (strcmp(word, "unreadable") == 0)
			ruststream_answer(delivery, RUSTSTREAM_UNDECODABLE);
		else if (strcmp(word, "whole") == 0 ||
				 (strcmp(word, "whole_once") == 0 && delivery->attempt == 1))
			outcome = RUSTSTREAM_FAIL;
		else if (strcmp(word, "note") == 0)
		{
			const ruststream_task task = {
				.table = "noted", .payload = "noted", .payload_length = 5};

			if (ruststream_publish(delivery->handle, &task, NULL, 0) != RUSTSTREAM_OK)
				printf("publish: %s\n", ruststream_message(delivery->handle));
		}
		else if (strcmp(word, "wait") == 0)
			wait_for_line();
	}
	return outcome;
}

int
main(int argc, char **argv)
{
	static char step[] = "-";
	static char notice[] = "!";
	const struct sigaction action = {.sa_handler = on_signal};
	ruststream *db = NULL;
	ruststream_code code;

	if (argc != 3)
		return 2;
	(void) setvbuf(stdout, NULL, _IOLBF, 0);
	code = ruststream_open(argv[1], &db);
	if (code == RUSTSTREAM_OK)
	{
		ruststream_on_trace(db, print_trace, step);
		ruststream_on_notice(db, print_trace, notice);
		code = ruststream_worker_open_batch(db, argv[2], handle, NULL, &worker);
	}
	if (code == RUSTSTREAM_OK)
	{
		(void) sigaction(SIGTERM, &action, NULL);
		code = ruststream_worker_run(worker, RUSTSTREAM_DRAIN);
	}
	if (code != RUSTSTREAM_OK)
		printf("failed: %s (%s)\n", ruststream_message(db), ruststream_hint(db));
	(void) signal(SIGTERM, SIG_IGN);
	ruststream_worker_close(worker);
	ruststream_close(db);
	return (int) code;
}
