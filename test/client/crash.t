# kill -9 at each point of a delivery, and several processes on one file.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use ClientTest;
use Test::More;
use Time::HiRes qw(sleep);

my $url = url();
my $HANDLER = 'INSERT INTO effect (id, attempt) VALUES (:id, :attempt)';

my %POINTS = (
	leased => [qw(after_claim after_claim_commit after_begin_delivery after_handler after_settle before_commit after_commit)],
	keyed => [qw(after_lock after_take after_begin_delivery after_handler after_settle before_commit after_commit after_unlock)],
);

# What a crash at a point leaves: has the handler's effect been committed, is the attempt counted?
my %COMMITTED = map { $_ => 1 } qw(after_commit after_unlock);
my %UNCOUNTED = map { $_ => 1 } qw(after_claim after_lock);

for my $queue (sort keys %POINTS)
{
	new_database();
	run('subscribe', $url, 's', $queue, '--handler', $HANDLER, '--lease', '1s');
	for my $point (@{ $POINTS{$queue} })
	{
		sql("DELETE FROM effect; INSERT INTO $queue (payload) VALUES ('x')");
		my ($code) = finish(start({ RUSTSTREAM_FAILPOINT => $point }, 'work', $url, '--drain'));
		is($code, -9, "$queue: killed $point");
		is(sql("SELECT count(*) || (SELECT count(*) FROM effect) FROM $queue"),
			$COMMITTED{$point} ? '01' : '10', '.. the row and the effect are one');
		is(sql("SELECT ifnull(attempt, 1) FROM $queue"), $COMMITTED{$point} ? '' : $UNCOUNTED{$point} ? 1 : 2, '.. the attempt');
		my ($again) = (0);
		for (1 .. 200)
		{
			run('work', $url, '--drain');
			last if sql("SELECT count(*) FROM $queue") eq '0';
			sleep 0.05;
		}
		is(sql("SELECT count(*) || (SELECT count(*) FROM effect) FROM $queue"), '01', '.. delivered once in the end');
	}
}

# The other end of a delivery: what is settled after a rollback.
new_database();
run('subscribe', $url, 's', 'leased', '--handler', "$HANDLER; SELECT ruststream_discard()", '--lease', '1s');
for my $point (qw(after_rollback after_settle before_commit))
{
	sql("DELETE FROM leased; INSERT INTO leased (payload) VALUES ('x')");
	is((finish(start({ RUSTSTREAM_FAILPOINT => $point }, 'work', $url, '--drain')))[0], -9, "a discard killed $point");
	is(sql('SELECT count(*) || (SELECT count(*) FROM effect) FROM leased'), '10', '.. leaves the row and no effect');
}

# Several processes share a lease queue, and at each point one of them is killed, in the middle of its work.
new_database();
run('subscribe', $url, 's', 'leased', '--handler', $HANDLER, '--lease', '1s', '--poll-interval', '20ms', '--workers', '2');
my @workers = map { start({}, 'work', $url) } 1 .. 2;
my $rows = 0;
for my $point (@{ $POINTS{leased} })
{
	my $code = 0;
	while ($code == 0) # the others may have been quicker
	{
		sql("WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200) INSERT INTO leased (id, payload) SELECT $rows + i, 'x' FROM n");
		$rows += 200;
		($code) = finish(start({ RUSTSTREAM_FAILPOINT => "$point:5" }, 'work', $url, '--drain'));
	}
	is($code, -9, "beside others: killed $point");
}
ok(wait_for('SELECT count(*) FROM leased', 0), 'several processes empty a queue, though others are killed');
is(sql('SELECT count(*) || \'/\' || count(DISTINCT id) FROM effect'), "$rows/$rows", 'and each row has its effect once');
kill 'TERM', map { $_->{pid} } @workers;
is((finish($_))[0], 0, 'and ends in order') for @workers;

done_testing();
