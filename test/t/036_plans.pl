# A worker keeps the plans that it made while its queue was empty, and vacuumed, so
# that every index cost the same.  They must do for a large queue: each statement
# goes to its rows by the index that leads there, in each form, for single rows and
# for batches.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('plans', conf => 'autovacuum = off');

sub ask
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# Pages of the queue and its indexes that have been looked at.
sub pages
{
	my ($queue) = @_;
	return ask('SELECT heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit'
		  . " FROM pg_statio_user_tables WHERE relname = '$queue'");
}

# The claim's index is older than the index of ids, so that it comes first where both
# cost the same.
my %lease = (column => 'locked_until timestamptz,', attach => ", locked_until_column => 'locked_until'");
my %key = (column => '', attach => ", lock_key => 'jobs-{id}'");
my %lock = (column => '', attach => '');
my %queues = (
	locked => { %lock }, locked_batch => { %lock, batch => 1 },
	leased => { %lease }, leased_batch => { %lease, batch => 1 },
	keyed => { %key }, keyed_batch => { %key, batch => 1 });

foreach my $queue (sort keys %queues)
{
	my $array = $queues{$queue}{batch} ? '[]' : '';
	my $setting = $queues{$queue}{batch} ? ', batch_size => 5' : '';

	ask(<<"SQL");
CREATE TABLE $queue (id bigint NOT NULL GENERATED ALWAYS AS IDENTITY, priority integer, retry_after timestamptz,
	attempt integer, $queues{$queue}{column} payload text);
CREATE INDEX ON $queue (priority NULLS FIRST, retry_after NULLS FIRST, id);
ALTER TABLE $queue ADD PRIMARY KEY (id);
SELECT ruststream.attach_queue('$queue', 'id', priority_column => 'priority', retry_after_column => 'retry_after',
	attempt_column => 'attempt', payload_column => 'payload'$queues{$queue}{attach});
CREATE FUNCTION $queue($queue$array) RETURNS void LANGUAGE sql AS '';
SQL
	ask("VACUUM (ANALYZE) $queue");
	ask("SELECT ruststream.subscribe('$queue', '$queue', '$queue'$setting)");
	wait_for($node, "SELECT state = 'idle' FROM ruststream.stat_worker WHERE subscription = '$queue'",
		"$queue: its worker has looked");
	# one that is settled, so that this is planned, too
	ask("INSERT INTO $queue (payload) VALUES ('1')");
	wait_for_empty($node, $queue);

	ask("INSERT INTO $queue (retry_after, payload) SELECT 'infinity', i FROM generate_series(1, 150000) AS i");
	wait_for($node, "SELECT state = 'idle' FROM ruststream.stat_worker WHERE subscription = '$queue'",
		"$queue: its worker has looked again");
	my $before = pages($queue);
	ask("INSERT INTO $queue (payload) SELECT i FROM generate_series(1, 50) AS i");
	# By its counter: a look at the table would count.
	wait_for($node, "SELECT acked = 51 FROM ruststream.stat_subscription WHERE subscription = '$queue'",
		"$queue: 50 rows among 150,000 come to their end");
	wait_for($node, "SELECT state = 'idle' FROM ruststream.stat_worker WHERE subscription = '$queue'", 'and it is idle');
	# A walk through the index of ids alone takes 400, and as many again for its rows.
	my $read = pages($queue) - $before;
	note "$queue: $read pages";
	cmp_ok($read, '<', 2500, "$queue: it went straight to them");
}

$node->stop;
done_testing();
