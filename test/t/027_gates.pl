# What commits while a claim is under way.
#
# To stop a claim between its snapshot and its lock, a row-level security policy of the
# queue, forced upon its owner, waits for an advisory lock where the session's setting
# test.gate asks for it.  Policies do not hold for a superuser, and only who has connected as
# the owner may drain, which is why these are no isolation tests.  A prepared
# transaction holds the lock: the gate.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use IPC::Run;
use RuststreamTest;
use Test::More;

my $node = new_node('gates', conf => "max_prepared_transactions = 2\n");
my @app = (extra_params => [ '-U', 'app' ]);

sub sql { return $node->safe_psql('postgres', $_[0]) }
sub app { return $node->safe_psql('postgres', $_[0], @app) }

sub close_gate { return sql(q{BEGIN; SELECT pg_advisory_xact_lock(1); PREPARE TRANSACTION 'gate'}) }
sub open_gate { return sql(q{ROLLBACK PREPARED 'gate'}) }

# A session of the owner that works while others do: returns what awaits its end and
# gives its trace.
sub start
{
	my @statements = ("SET application_name = 'claim'", @_);
	my ($output, $errors) = ('', '');
	my $psql = IPC::Run::start(
		[ 'psql', '-XAtq', '-v', 'VERBOSITY=terse', '-U', 'app', '-d', $node->connstr('postgres'), map { ('-c', $_) } @statements ],
		'>', \$output, '2>', \$errors);

	wait_for($node, q{SELECT wait_event = 'advisory' FROM pg_stat_activity WHERE application_name = 'claim'},
		'it waits at the gate');
	return sub { $psql->finish; return join ', ', $errors =~ /NOTICE:  (.*)/g };
}

sql(<<'SQL');
CREATE ROLE app LOGIN;
CREATE SCHEMA gate AUTHORIZATION app;
SQL
app(<<'SQL');
CREATE TABLE gate.done (task text, attempt integer, session name DEFAULT current_setting('application_name'));
CREATE TABLE gate.t (k integer PRIMARY KEY, v text);
CREATE TABLE gate.seen (v text, level text DEFAULT current_setting('transaction_isolation'));
CREATE FUNCTION gate.gate() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	IF current_setting('test.gate', true) = 'claim' THEN
		PERFORM pg_advisory_xact_lock_shared(1);
	END IF;
	RETURN true;
END $$;
CREATE FUNCTION gate.work(payload text, d ruststream.delivery) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO gate.done VALUES (d.id, d.attempt);
	RETURN CASE current_setting('test.answer', true) WHEN 'retry' THEN ruststream.retry()
		WHEN 'retry_after' THEN ruststream.retry_after('1 h') ELSE ruststream.ack() END;
END $$;
CREATE FUNCTION gate.reads(payload text) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
	IF current_setting('test.gate', true) = 'handler' THEN
		PERFORM pg_advisory_xact_lock_shared(1);
	END IF;
	INSERT INTO gate.seen SELECT v FROM gate.t WHERE k = 1;
END $$;
SQL

my @traced = (q{SET test.gate = 'claim'}, 'SET ruststream.trace = on', q{CALL ruststream.drain('work', 1)});

# Another delivery, which passes the gate.
sub settle
{
	my ($answer) = @_;

	return app("SET application_name = 'settle';\nSET test.answer = '$answer';\nCALL ruststream.drain('work', 1);");
}

# Make a queue of two rows, gated; the description goes on with these arguments.
sub make_queue
{
	my ($arguments, $handler) = @_;

	app(<<"SQL");
SET client_min_messages = error;
DROP TABLE IF EXISTS gate.q;
TRUNCATE gate.done, gate.seen, gate.t;
INSERT INTO gate.t VALUES (1, 'old');
CREATE TABLE gate.q (id integer PRIMARY KEY, payload text, attempt integer DEFAULT 1, retry_after timestamptz,
	processed_at timestamptz);
CREATE INDEX ON gate.q (retry_after NULLS FIRST, id) WHERE processed_at IS NULL;
CREATE INDEX ON gate.q (id) WHERE processed_at IS NULL;
ALTER TABLE gate.q ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE POLICY gate ON gate.q USING (gate.gate()) WITH CHECK (true);
INSERT INTO gate.q VALUES (1, 'one'), (2, 'two');
SELECT ruststream.attach_queue('gate.q', 'id', payload_column => 'payload', attempt_column => 'attempt',
	processed_at_column => 'processed_at', $arguments);
SELECT ruststream.subscribe('work', 'gate.q', '$handler', workers => 0, retry_delay => '0');
SQL
	return;
}

sub rows
{
	return sql(q{SELECT string_agg(v, ', ' ORDER BY v) FROM (
		SELECT format('%s done at %s by %s', task, attempt, session) FROM gate.done
		UNION ALL SELECT format('%s %s at %s', id, CASE WHEN processed_at IS NULL THEN 'waits' ELSE 'ended' END, attempt)
		FROM gate.q) AS q (v)});
}

# A claim meets a settlement.  The claim has its snapshot and has found a row; before it
# locks that row, another delivery of it settles and commits.  At read committed the claim
# must look at what the row has become: gone, or due again with its attempt counted.  At
# repeatable read and serializable it cannot: the lock fails with a serialization error.
# That is nobody's fault, so the claim must be made anew with a fresh snapshot: the row is
# neither lost, nor delivered twice, nor counted as failed.
my $delivery = 'CLAIM 1, SAVEPOINT ruststream_claim, HANDLER, SETTLE ack, COMMIT';
for my $level ('read committed', 'repeatable read', 'serializable')
{
	my $trace = $level eq 'read committed' ? "BEGIN, $delivery" : "BEGIN, ROLLBACK, BEGIN, $delivery";

	for my $answer ('ack', 'retry')
	{
		make_queue("isolation => '$level'", 'gate.work');
		close_gate();
		my $claim = start(@traced);
		settle($answer);
		open_gate();
		is($claim->(), $trace, "$level, $answer: the claim's steps");
		is(rows(), $answer eq 'ack'
			? '1 done at 1 by settle, 1 ended at 1, 2 done at 1 by claim, 2 ended at 1'
			: '1 done at 2 by claim, 1 ended at 2, 2 waits at 1', "$level, $answer: the rows");
		is(sql('SELECT count(*) FROM ruststream.failure_history'), '0', "$level, $answer: nothing has failed");
	}
}

# Advisory lock form: the take.  A claim has found its candidates; before it locks their
# keys, another holder settles the first of them.  The key is free then, but the row is not
# to be claimed any more: the take must see that, leave its attempt alone, and go on.
for my $answer ('ack', 'retry_after')
{
	make_queue(q{retry_after_column => 'retry_after', lock_key => 'take-{id}'}, 'gate.work');
	close_gate();
	my $claim = start(@traced);
	settle($answer);
	open_gate();
	is($claim->(), 'BEGIN, CLAIM 2, COMMIT, LOCK, BEGIN, TAKE 0, COMMIT, UNLOCK, LOCK, BEGIN, TAKE, COMMIT, '
		  . 'BEGIN, HANDLER, SETTLE ack, COMMIT, UNLOCK', "take, $answer: the claim's steps");
	is(rows(), $answer eq 'ack'
		? '1 done at 1 by settle, 1 ended at 2, 2 done at 1 by claim, 2 ended at 2'
		: '1 waits at 2, 2 done at 1 by claim, 2 ended at 2', "take, $answer: the rows");
}

# Snapshot rule, (i): a commit between the claim and the handler.  A repeatable read
# delivery's snapshot is the claim's, not the handler's: what commits after the claim has
# begun stays unseen even by the handler's first statement.  At read committed the
# handler's first statement sees the commit.
for my $gate ('claim', 'handler')
{
	for my $level ('read committed', 'repeatable read', 'serializable')
	{
		make_queue("isolation => '$level'", 'gate.reads');
		close_gate();
		my $claim = start("SET test.gate = '$gate'", q{CALL ruststream.drain('work', 1)});
		sql(q{UPDATE gate.t SET v = 'new' WHERE k = 1});
		open_gate();
		$claim->();
		is(sql('SELECT * FROM gate.seen'), ($level eq 'read committed' ? 'new' : 'old') . "|$level",
			"$level: what is seen of a commit within the $gate");
	}
}

# A lock_timeout comes as the same signal as a cancel of the session.  What its handler makes
# of it is the handler's failure, and no cancel of the drain.
make_queue(q{retry_after_column => 'retry_after'}, 'gate.work');
app(<<'SQL');
CREATE FUNCTION gate.impatient(payload text) RETURNS void LANGUAGE plpgsql SET lock_timeout = '10ms' AS $$
BEGIN
	PERFORM pg_advisory_xact_lock(1);
EXCEPTION WHEN lock_not_available THEN
	RAISE query_canceled USING MESSAGE = 'it was locked';
END $$;
SELECT ruststream.alter_subscription('work', handler => 'gate.impatient', on_error => 'discard');
SQL
close_gate();
app(q{CALL ruststream.drain('work', 2)});
open_gate();
is(sql(q{SELECT string_agg(format('%s %s', sqlstate, message), ', ') FROM ruststream.failure}),
	'57014 it was locked, 57014 it was locked', 'a lock_timeout is no cancel of the session');

$node->stop;
done_testing();
