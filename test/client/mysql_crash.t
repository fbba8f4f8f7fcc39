# kill -9 at each point of a delivery, and several processes on one queue, on a private MariaDB server.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use ClientTest qw(run start finish program);
use MysqlServer;
use Test::More;
use Time::HiRes qw(sleep time);

my $missing = MysqlServer::missing();
plan skip_all => $missing if $missing;
plan skip_all => 'this build does not serve MySQL' unless `@{[program()]} --version` =~ /\bmysql\b/;

my $server = MysqlServer->new;
my $url = $server->url;
my $HANDLER = 'INSERT INTO effect (id, attempt) VALUES (:id, :attempt)';

sub sql { return $server->sql(@_); }

my %FORM = (row_lock => [], lease => [qw(--locked-until locked_until)], advisory_lock => [qw(--lock-key key-{id})]);
my %POINTS = (
	row_lock => [qw(after_claim after_handler after_settle before_commit after_commit)],
	lease => [qw(after_claim after_claim_commit after_begin_delivery after_handler after_settle before_commit after_commit)],
	advisory_lock => [qw(after_lock after_take after_begin_delivery after_handler after_settle before_commit after_commit after_unlock)],
);

# What a crash at a point leaves: has the handler's effect been committed, is the attempt counted?
my %COMMITTED = map { $_ => 1 } qw(after_commit after_unlock);
my %UNCOUNTED = map { $_ => 1 } qw(after_claim after_lock);

sub new_queue
{
	my ($form, $handler, @options) = @_;
	sql('DROP DATABASE IF EXISTS app; CREATE DATABASE app', '');
	sql('CREATE TABLE jobs (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, attempt INT, locked_until DATETIME, payload TEXT);'
		  . 'CREATE TABLE effect (number BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, id BIGINT, attempt INT)');
	for my $command (
		['install', $url],
		['describe', $url, 'jobs', qw(--id id --payload payload --attempt attempt --create-index), @{ $FORM{$form} }],
		['subscribe', $url, 's', 'jobs', '--handler', $handler, '--lease', '1s', @options])
	{
		my ($code, $out, $err) = run(@$command);
		die "@$command: $err" if $code != 0;
	}
	return;
}

# A session that is killed is cleaned up a moment after its process has gone.
sub wait_for
{
	my ($text, $wanted) = @_;
	my $until = time() + 60;
	while (time() < $until)
	{
		return 1 if sql($text) eq $wanted;
		sleep 0.05;
	}
	diag("waited for \"$wanted\", found \"" . sql($text) . '"');
	return 0;
}

my $ALONE = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = 'app'";
my $LEFT = 'SELECT CONCAT((SELECT COUNT(*) FROM jobs), (SELECT COUNT(*) FROM effect))';

for my $form (sort keys %POINTS)
{
	new_queue($form, $HANDLER);
	for my $point (@{ $POINTS{$form} })
	{
		sql("DELETE FROM jobs; DELETE FROM effect; INSERT INTO jobs (payload) VALUES ('x')");
		my ($code) = finish(start({ RUSTSTREAM_FAILPOINT => $point }, 'work', $url, '--drain'));
		is($code, -9, "$form: killed $point");
		wait_for($ALONE, 1);
		is(sql($LEFT), $COMMITTED{$point} ? '01' : '10', '.. the row and the effect are one');
		is(sql('SELECT COALESCE(attempt, 1) FROM jobs'), $COMMITTED{$point} ? '' : $form eq 'row_lock' || $UNCOUNTED{$point} ? 1 : 2,
			'.. the attempt');
		for (1 .. 200)
		{
			run('work', $url, '--drain');
			last if sql('SELECT COUNT(*) FROM jobs') eq '0';
			sleep 0.05;
		}
		is(sql($LEFT), '01', '.. delivered once in the end');
	}
}

# The other end of a delivery: what is settled after a rollback.
for my $form (sort keys %POINTS)
{
	new_queue($form, "$HANDLER; SET \@ruststream_outcome = 'discard'");
	for my $point ($form eq 'row_lock' ? () : 'after_rollback', qw(after_settle before_commit))
	{
		sql("DELETE FROM jobs; INSERT INTO jobs (payload) VALUES ('x')");
		is((finish(start({ RUSTSTREAM_FAILPOINT => $point }, 'work', $url, '--drain')))[0], -9, "$form: a discard killed $point");
		wait_for($ALONE, 1);
		is(sql($LEFT), '10', '.. leaves the row and no effect');
	}
}

# Several processes share a queue, and at each point one of them is killed, in the middle of its work.
for my $form (sort keys %POINTS)
{
	my $rows = 0;
	new_queue($form, $HANDLER, '--poll-interval', '20ms', '--workers', '2');
	my @workers = map { start({}, 'work', $url) } 1 .. 2;
	for my $point (@{ $POINTS{$form} })
	{
		my $code = 0;
		while ($code == 0) # the others may have been quicker
		{
			sql('INSERT INTO jobs (payload) SELECT seq FROM seq_1_to_300');
			$rows += 300;
			($code) = finish(start({ RUSTSTREAM_FAILPOINT => "$point:5" }, 'work', $url, '--drain'));
		}
		is($code, -9, "$form, beside others: killed $point");
	}
	ok(wait_for('SELECT COUNT(*) FROM jobs', 0), "$form: several processes empty a queue, though others are killed");
	is(sql('SELECT COUNT(*), COUNT(DISTINCT id) FROM effect'), "$rows $rows", '.. and each row has its effect once');
	kill 'TERM', map { $_->{pid} } @workers;
	is((finish($_))[0], 0, '.. and ends in order') for @workers;
}
$server->stop;

done_testing();
