# Batches: kill -9, spread over the named failure points of each form, of a worker
# and of the postmaster with it.  Afterwards no task is lost, each attempt of each
# has had one effect, and a row whose delivery died was claimed again as its form
# says: with no effect and no attempt counted (row lock), or counted (lease,
# advisory lock), where the handler's writes are its own.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamCrash;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $process_kills = 4;       # of each point
my $postmaster_kills = 1;    # of each point
my @forms = (
	{   queue => 'locked',
		form => "form => 'row_lock'",
		points => [ qw(after_begin after_claim after_savepoint after_handler after_rollback_to
			  after_settle before_commit after_commit) ] },
	{   queue => 'leased',
		form => "form => 'lease'",
		points => [ qw(after_claim after_claim_commit after_handler after_settle before_commit after_commit) ] },
	{   queue => 'keyed',
		form => "form => 'advisory_lock', lock_key => 'tasks-{id}'",
		points => [ qw(after_lock after_take after_handler after_settle before_commit after_commit after_unlock) ] });

my $crash = RuststreamCrash->new('batch_crash');
my $node = $crash->node;

sub ask
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# Of three tasks one asks to be tried again on its first attempt; and batches whose
# first row's number divides by seven fail on that row's first attempt.
sub create_queue
{
	my ($queue, $form) = @_;

	ask(<<"SQL");
SELECT ruststream.create_queue('$queue', $form);
CREATE TABLE ${queue}_published (id bigint);
CREATE TABLE ${queue}_effect (id bigint, attempt integer, UNIQUE (id, attempt));
CREATE FUNCTION $queue(tasks ${queue}[], d ruststream.delivery[]) RETURNS ruststream.outcome[] LANGUAGE plpgsql AS \$\$
BEGIN
	INSERT INTO ${queue}_effect SELECT t.id::bigint, t.attempt FROM unnest(d) AS t;
	IF d[1].attempt = 1 AND tasks[1].id % 7 = 0 THEN
		RAISE EXCEPTION 'the first attempt fails';
	END IF;
	RETURN (SELECT array_agg(CASE WHEN t.attempt = 1 AND t.id::bigint % 3 = 1 THEN ruststream.retry_after('1 ms')
		ELSE ruststream.ack() END ORDER BY ordinality) FROM unnest(d) WITH ORDINALITY AS t);
END \$\$;
SELECT ruststream.subscribe('$queue', '$queue', '$queue', workers => 2, batch_size => 5, lease => '1 s',
	poll_interval => '100 ms', retry_delay => '1 ms');
SQL
	return;
}

my $total = 0;
foreach my $form (@forms)
{
	my $queue = $form->{queue};

	create_queue($queue, $form->{form});
	$crash->publish_by(sub {
		$crash->try_sql(<<"SQL");
WITH task AS (
	INSERT INTO $queue (payload) SELECT '{}' FROM generate_series(1, 30)
	WHERE (SELECT count(*) FROM (SELECT FROM $queue LIMIT 15) AS waiting) < 15
	RETURNING id)
INSERT INTO ${queue}_published SELECT id FROM task
SQL
	});
	foreach my $point (@{ $form->{points} })
	{
		$total += $crash->kill_at($point, $process_kills, $postmaster_kills, 3);
	}
	$crash->end_kills;
	wait_for_empty($node, $queue, "$queue: every task comes to its end");
	is(ask("SELECT state FROM ruststream.status WHERE subscription = '$queue'"), 'running',
		"$queue: the subscription is at work");
	ask("SELECT ruststream.pause('$queue')");
	cmp_ok(ask("SELECT count(*) FROM ${queue}_published"), '>', 50, "$queue: there was work to do");
	is(ask("SELECT count(*) FROM ${queue}_published AS p FULL JOIN (SELECT DISTINCT id FROM ${queue}_effect) AS e USING (id)"
			  . ' WHERE p IS NULL OR e IS NULL'),
		'0', "$queue: none is lost, none comes from nowhere");
	is(ask("SELECT count(*) FROM ${queue}_effect AS e JOIN ruststream.failure AS f"
			  . " ON f.subscription = '$queue' AND f.id = e.id::text AND f.attempt = e.attempt"),
		'0', "$queue: nothing is left of what failed");
	note "$queue: " . ask("SELECT format('%s tasks, %s effects, %s failures', (SELECT count(*) FROM ${queue}_published),"
			  . " (SELECT count(*) FROM ${queue}_effect), (SELECT count(*) FROM ruststream.failure WHERE subscription = '$queue'))");
}
note "$total kills in all";

# Row lock: as if nobody had died.  Each attempt but the last was a failure or a retry.
is(ask(<<'SQL'), '0', 'locked: each attempt has one effect or one failure, and a death has neither');
WITH attempt AS (
	SELECT id, attempt FROM locked_effect
	UNION ALL SELECT id::bigint, attempt FROM ruststream.failure WHERE subscription = 'locked')
SELECT count(*) FROM (SELECT id, array_agg(attempt ORDER BY attempt) AS attempts FROM attempt GROUP BY id) AS a
WHERE attempts <> ARRAY(SELECT generate_series(1, cardinality(attempts))::bigint)
	OR cardinality(attempts) > CASE WHEN id % 3 = 1 THEN 2 ELSE 1 END
		+ (SELECT count(*) FROM ruststream.failure WHERE subscription = 'locked' AND id = a.id::text)
SQL
is(ask("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"), '0', 'no key is left locked');

$node->stop;
done_testing();
