# Batches on each engine and in each form: what callbacks and programs may answer, and what becomes of a batch whose
# process, connection or leases go.  The tables are the conformance suite's.
use strict;
use warnings;
use Cwd qw(abs_path);
use FindBin;
use lib $FindBin::Bin, "$FindBin::Bin/../conformance";
use ClientTest qw(run start finish program);
use File::Temp qw(tempdir);
use IO::Handle;
use IPC::Open2;
use Test::More;
use Time::HiRes qw(sleep time);

my $home = abs_path("$FindBin::Bin/../conformance");
my $caller = program() =~ s{library/ruststream$}{batch_call}r;
plan skip_all => 'batch_call is not built' unless $caller ne program() && -x $caller;
$ENV{RUSTSTREAM} = program();
my $PATIENCE = 60;
our $ROLES = [qw(attempt retry_after)];

# ---------------------------------------------------------------- helpers

my ($engine, $form, $scenario);

# A queue in the form of the moment, subscribed to by batches of ten unless something else is asked for.
sub fresh
{
	my ($how, %settings) = @_;
	$scenario = { form => $form, roles => $ROLES, settings => {} };
	$engine->setup($scenario);
	my $refusal = $engine->describe($scenario);
	die $refusal if $refusal;
	$engine->sql('CREATE TABLE noted (' . $engine->columns({ form => '', roles => [] }) . ')');
	run('describe', $engine->url, qw(noted --id id --payload payload --lock-key key-{id} --create-index));
	my ($code, undef, $err) = run('subscribe', $engine->url, 'jobs', 'jobs', @$how, '--batch-size', $settings{batch_size} // 10,
		'--dead-letter', 'dead', '--lease', $settings{lease} // '30s', '--retry-delay', $settings{retry_delay} // '1h', '--poll-interval', '50ms',
		$settings{max_attempts} ? ('--max-attempts', $settings{max_attempts}) : (),
		$settings{timeout} ? ('--timeout', $settings{timeout}) : ());
	die $err if $code != 0;
	return;
}

sub insert { $engine->insert({ payload => $_ }, $scenario) for @_; return; }

sub rows { return join ', ', $engine->rows($_[0] // 'jobs', $scenario); }

sub one { return join ' ', $engine->sql($_[0]); }

# Start the worker with the callback; what it says is read line by line.
sub call
{
	my $pid = open2(my $out, my $in, $caller, $engine->url, 'jobs');
	$in->autoflush(1);
	return { pid => $pid, out => $out, in => $in, said => [] };
}

sub until_waiting
{
	my ($child) = @_;
	while (defined(my $line = readline($child->{out})))
	{
		chomp $line;
		return 1 if $line eq 'waiting';
		push @{ $child->{said} }, $line;
	}
	return 0;
}

# Its end: the exit code or -signal, and what it has said.
sub ended
{
	my ($child) = @_;
	close $child->{in};
	push @{ $child->{said} }, map { s/\n//r } readline($child->{out});
	waitpid($child->{pid}, 0);
	return ($? & 127 ? -($? & 127) : $? >> 8, @{ $child->{said} });
}

sub calls { return join '; ', map { s/^(?:call \d+|row )//r || 'call' } grep { /^(?:call|row) / } @_; }

# Drain, again and again, until the queue is as it should be.
sub drained_to
{
	my ($expected) = @_;
	for (my $until = time() + $PATIENCE; time() < $until; sleep 0.1)
	{
		return 1 if rows() eq $expected;
		run('work', $engine->url, '--drain');
	}
	return 0;
}

# ------------------------------------------------------------------ callbacks

sub answers
{
	fresh([]);
	insert(qw(a later discard dead bad unreadable));
	my ($code, @said) = ended(call());
	is($code, 0, "$form: a callback answers each row");
	is(calls(@said), 'call; a 1; later 1; discard 1; dead 1; bad 1; unreadable 1', '.. which it gets at once, in order');
	is(rows(), 'later 2 waiting, bad 2 waiting', '.. and each goes its way');
	my $attempt = $form eq 'row_lock' ? 1 : 2;
	is(rows('dead'), "dead $attempt, unreadable $attempt", '.. into the dead letters, too');
	is(one('SELECT message FROM ruststream_failure ORDER BY number'), 'not now this one is bad the handler could not decode the payload',
		'.. with its reason');
	is(one('SELECT failed FROM ruststream_counter'), 2, '.. and is counted');
	is(scalar(grep({ /^! .*row 5 failed .*this one is bad/ } @said)), 1, '.. and told');
	return;
}

sub failures
{
	fresh([], max_attempts => 3);
	insert(qw(a note));
	$engine->insert({ payload => 'b', attempt => 3 }, $scenario);
	insert('whole');
	my ($code, @said) = ended(call());
	is(rows() . ' / ' . rows('dead'), 'a 2 waiting, note 2 waiting, whole 2 waiting / b ' . ($form eq 'row_lock' ? 3 : 4),
		"$form: a callback that fails fails each row, by its own attempt");
	is(scalar(grep({ /^! .*batch of 4 rows/ } @said)), 1, '.. and is told of once');
	is(one('SELECT COUNT(*) FROM ruststream_failure'), 4, '.. but kept for each');
	is(one('SELECT COUNT(*) FROM noted'), $form eq 'row_lock' ? 0 : 1, '.. and its writes are undone where there is a transaction');
	return;
}

# Of many rows, so that an engine that likes another order has the chance to show it.
sub order
{
	local $ROLES = [qw(attempt retry_after priority)];
	fresh([], batch_size => 100);
	my (@expected, %words);
	for my $n (1 .. 60)
	{
		my ($priority, $ago) = ((5, 'NULL', 3)[$n % 3], $n % 4 == 0 ? 'NULL' : -1000 - $n);
		$engine->insert({ payload => "r$n", priority => $priority, retry_after => $ago }, $scenario);
		push @expected, [$priority eq 'NULL' ? -1 : $priority, $ago eq 'NULL' ? -9999 : $ago, $n];
	}
	@expected = sort { $a->[0] <=> $b->[0] || $a->[1] <=> $b->[1] || $a->[2] <=> $b->[2] } @expected;
	is(calls(grep { defined } (ended(call()))[1 .. 3000]) =~ s/(; )+$//r, join('; ', 'call', map { "r$_->[2] 1" } @expected), "$form: a batch is in claim order");
	return;
}

sub writes
{
	fresh([]);
	insert(qw(note later bad));
	ended(call());
	is(rows(), 'later 2 waiting, bad 2 waiting', "$form: a callback that writes");
	is(one('SELECT COUNT(*) FROM noted'), 1, '.. keeps what it has written, whatever it answers');
	return;
}

sub killed
{
	fresh([], lease => '1s');
	insert(qw(a b wait));
	my $child = call();
	ok(until_waiting($child), "$form: a worker that is killed in its handler");
	kill 'KILL', $child->{pid};
	is((ended($child))[0], -9, '.. dies');
	for (1 .. 200)
	{
		last if rows() =~ /wait/;
		sleep 0.05;
	}
	is(join('/', map { s/ .*//r } split /, /, rows()), 'a/b/wait', '.. and loses no row');
	my ($again, @said, $calls);
	for (my $until = time() + $PATIENCE; time() < $until && rows() ne ''; sleep 0.1)
	{
		$again = call();
		print { $again->{in} } "go on\n";
		(undef, @said) = ended($again);
		$calls = calls(@said) || $calls;
	}
	is($calls, $form eq 'row_lock' ? 'call; a 1; b 1; wait 1' : 'call; a 2; b 2; wait 2', '.. they come again');
	is(rows(), '', '.. and are ended');
	return;
}

sub stopped
{
	fresh([], batch_size => 3);
	insert(qw(a b wait c));
	my $child = call();
	until_waiting($child);
	kill 'TERM', $child->{pid};
	print { $child->{in} } "go on\n";
	my ($code, @said) = ended($child);
	is("$code " . calls(@said), '0 call; a 1; b 1; wait 1', "$form: a worker that is stopped ends its batch, and begins no other");
	is(rows(), 'c 1', '.. whose rows are settled');
	return;
}

sub session_lost
{
	my ($kill) = @_;
	fresh([]);
	insert(qw(a wait b));
	my $child = call();
	until_waiting($child);
	$kill->();
	print { $child->{in} } "go on\ngo on\n";
	my ($code, @said) = ended($child);
	is($code, 0, "$form: a connection that is lost in the handler") or diag(join "\n", @said);
	is(calls(@said), {
			row_lock => 'call; a 1; wait 1; b 1; call; a 1; wait 1; b 1',
			lease => 'call; a 1; wait 1; b 1',
			advisory_lock => 'call; a 1; wait 1; b 1; call; a 2; wait 2; b 2' }->{$form},
		'.. has the batch delivered again, unless its leases are still held');
	is(rows(), '', '.. and every row ends');
	return;
}

sub leases
{
	# A row that is lost is left alone for so long, and a drain waits for it.
	fresh([], lease => '1s', retry_delay => '100ms');
	insert(qw(a wait b));
	my $child = call();
	until_waiting($child);
	my $begun = one('SELECT MIN(locked_until) FROM jobs');
	my $extended = 0;
	for (my $until = time() + $PATIENCE; time() < $until && $extended < 3; sleep 0.1)
	{
		$extended = one("SELECT COUNT(*) FROM jobs WHERE locked_until > '$begun'");
	}
	is($extended, 3, 'lease: each row of a batch is extended while its handler runs');
	my (undef, $out) = run('work', $engine->url, '--drain');
	is($out, '', '.. so that nobody else has them');
	is(rows(), 'a 2 leased, wait 2 leased, b 2 leased', '.. as they are counted once');
	$engine->sql('UPDATE jobs SET locked_until = ' . $engine->value('locked_until', 7200) . " WHERE payload = 'a'");
	print { $child->{in} } "go on\n";
	my ($code, @said) = ended($child);
	is(rows(), 'a 2 leased', '.. and one whose lease is taken away');
	is(scalar(grep({ $_ eq '- LEASE LOST' } @said)), 1, '.. is lost alone');
	is(scalar(grep({ /^! .*row 1 failed .*lease was lost/ } @said)), 1, '.. and told of');
	return;
}

# ------------------------------------------------------------------- programs

my $READ = 'cat >> \'%s\'';

sub programs
{
	my ($log) = @_;
	my $read = sprintf $READ, $log;
	my $queue = $engine->isa('Conformance::libpq') ? 'public.jobs' : 'jobs';
	my $contents = sub { open(my $in, '<', $log) or return; return map { s/\n//r } <$in>; };
	my $answer = sub { my ($command, @rows) = @_; fresh(['--exec', $command]); unlink $log; insert(@rows); return run('work', $engine->url, '--drain'); };

	$answer->("$read; test \"\$RUSTSTREAM_ROWS\" = 2 && test \"\$RUSTSTREAM_QUEUE\" = '$queue' && test -z \"\$RUSTSTREAM_ID\"", 'a "quoted" one', "b\tc");
	is(join("\n", $contents->()), '{"id":"1","attempt":1,"headers":null,"payload":"a \"quoted\" one"}' . "\n"
		  . '{"id":"2","attempt":1,"headers":null,"payload":"b\u0009c"}', "$form: a program gets a line of JSON a row");
	is(rows(), '', '.. and acknowledges all of them by its exit status');
	$answer->("$read; echo not all; exit 11", qw(a b));
	is(rows(), 'a 2 waiting, b 2 waiting', '.. or answers something else for all');
	$answer->("$read; echo 'retry_after 3600 busy'; echo; echo dead_letter", qw(a b));
	is(rows(), 'a 2 waiting, b 2 waiting', '.. an empty line is no outcome');
	$answer->("$read; echo 'retry_after 3600 busy'; echo 'fail so it is'; echo undecodable", qw(a b c));
	is(rows() . ' / ' . rows('dead'), 'a 2 waiting, b 2 waiting / c ' . ($form eq 'row_lock' ? 1 : 2), '.. or each by a line');
	is(one('SELECT message FROM ruststream_failure ORDER BY number'), 'busy so it is the handler could not decode the payload', '.. with a reason');
	my (undef, undef, $err) = $answer->("$read; echo ack", qw(a b));
	like($err, qr/the program answered 1 outcomes for 2 rows/, '.. one line for two rows is none');
	is(rows(), 'a 2 waiting, b 2 waiting', '.. and a failure of both');
	(undef, undef, $err) = $answer->("$read; echo ack; echo done", qw(a b));
	like($err, qr/answer to row 2 is no outcome: "done"/, '.. nor is another word one');
	(undef, undef, $err) = $answer->("$read; yes ack | head -n 100000", qw(a b));
	like($err, qr/more than can be answers to 2 rows/, '.. nor are a hundred thousand lines');
	is(rows(), 'a 2 waiting, b 2 waiting', '.. a failure of both');
	(undef, undef, $err) = $answer->('echo broken >&2; exit 3', qw(a b));
	like($err, qr/batch of 2 rows.*broken/, '.. and why it has failed is told');
	return;
}

# Programs that take too long, and workers that have no more time.
sub cancelled
{
	my ($log) = @_;
	fresh(['--exec', 'sleep 60'], timeout => '200ms');
	insert(qw(a b));
	my (undef, undef, $err) = run('work', $engine->url, '--drain');
	like($err, qr/batch of 2 rows.*cancelled after its timeout/, "$form: a program that is past its timeout");
	is(rows(), 'a 2 waiting, b 2 waiting', '.. has failed for each row');
	fresh(['--exec', "echo begun > '$log'; sleep 60"]);
	unlink $log;
	insert(qw(a b));
	my $child = start({}, 'work', $engine->url, '--grace', '50ms');
	for (my $until = time() + $PATIENCE; time() < $until && !-s $log; sleep 0.02) { }
	kill 'TERM', $child->{pid};
	(my $code, undef, $err) = finish($child);
	is($code, 0, '.. a worker that has no more time');
	like($err, qr/released a batch of 2 rows, from row 1 on/, '.. says so');
	is(rows(), $form eq 'row_lock' ? 'a 1, b 1' : 'a 2, b 2', '.. and gives its rows back');
	return;
}

# A lock that is waited for in vain: the settlement is tried again, the handler is not.
sub busy
{
	fresh([]);
	insert(qw(a wait b));
	my $pid = open2(my $out, my $in, $caller, $engine->url =~ s{busy_timeout=\d+}{busy_timeout=300}r, 'jobs');
	my $child = { pid => $pid, out => $out, in => $in, said => [] };
	until_waiting($child);
	my $locker = open(my $locked, '-|', 'sqlite3', '-batch', '-cmd', '.timeout 10000', $engine->{file},
		'BEGIN IMMEDIATE', '.shell echo locked; sleep 1', 'COMMIT') // die "sqlite3: $!";
	readline $locked;
	print { $child->{in} } "go on\n";
	my ($code, @said) = ended($child);
	close $locked;
	is($code, 0, "$form: a settlement that is locked out");
	is(calls(@said), 'call; a 1; wait 1; b 1', '.. is tried again by itself');
	is(rows(), '', '.. until it is done');
	cmp_ok(one('SELECT transient FROM ruststream_counter'), '>=', 1, '.. which is counted');
	return;
}

my %SQL = (
	sqlite => "INSERT INTO noted (payload) SELECT json_extract(value, '\$.payload') || ' ' || json_extract(value, '\$.attempt')"
	  . ' FROM json_each(:payload) WHERE :id IS NULL AND :attempt IS NULL; %s',
	libpq => "INSERT INTO noted (payload) SELECT (job ->> 'payload') || ' ' || (job ->> 'attempt')"
	  . ' FROM jsonb_array_elements(:payload) AS job WHERE :id IS NULL AND :attempt IS NULL; %s',
	mariadb => "INSERT INTO noted (payload) SELECT CONCAT(job.payload, ' ', job.attempt) FROM JSON_TABLE(:payload, '\$[*]' COLUMNS"
	  . " (payload LONGTEXT PATH '\$.payload', attempt INT PATH '\$.attempt')) AS job WHERE :id IS NULL AND :attempt IS NULL; %s");
# Answers, and a failure.
my %SAY = (
	sqlite => ['SELECT ruststream_retry_after(3600)', 'SELECT abs(-9223372036854775808)'],
	libpq => ['SELECT ruststream_retry_after(3600)', 'SELECT 1 / 0'],
	mariadb => [q{SET @ruststream_outcome = 'retry_after', @ruststream_delay = 3600}, q{SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'so'}]);

sub statements
{
	my ($name) = @_;
	my $noted = 'SELECT payload FROM noted ORDER BY id';

	fresh(['--handler', sprintf $SQL{$name}, '']);
	insert('a', 'a "quoted" one');
	run('work', $engine->url, '--drain');
	is(rows(), '', "$form: SQL takes the rows as an array in JSON");
	is(join(', ', $engine->sql($noted)), 'a 1, a "quoted" one 1', '.. with what it needs');
	fresh(['--handler', sprintf $SQL{$name}, $SAY{$name}[0]]);
	insert(qw(a b));
	run('work', $engine->url, '--drain');
	is(rows(), 'a 2 waiting, b 2 waiting', '.. answers one outcome for all');
	is(one('SELECT COUNT(*) FROM noted'), 2, '.. and keeps its writes');
	fresh(['--handler', sprintf $SQL{$name}, $SAY{$name}[1]]);
	insert(qw(a b));
	my (undef, undef, $err) = run('work', $engine->url, '--drain');
	is(rows(), 'a 2 waiting, b 2 waiting', '.. an error of it is one of each row');
	like($err, qr/batch of 2 rows/, '.. told of once');
	is(one('SELECT COUNT(*) FROM noted'), $form eq 'row_lock' ? 0 : 2, '.. and its writes are undone where there is a transaction');
	return;
}

# Failures that may not come again, of the handler: the batch is claimed anew, ten times at the most.
sub transient
{
	fresh(['--handler', sprintf $SQL{libpq}, "SELECT transient() WHERE nextval('tries') = 1"]);
	insert(qw(a b));
	run('work', $engine->url, '--drain');
	is(rows(), '', "$form: a transient failure of the handler has the batch claimed anew");
	is(join(', ', $engine->sql('SELECT payload FROM noted ORDER BY id')), $form eq 'row_lock' ? 'a 1, b 1' : 'a 1, b 1, a 2, b 2',
		'.. and its writes are undone where there is a transaction');
	fresh(['--handler', 'SELECT transient()']);
	insert(qw(a b));
	my (undef, undef, $err) = run('work', $engine->url, '--drain');
	is(rows(), $form eq 'row_lock' ? 'a 2 waiting, b 2 waiting' : 'a 11 waiting, b 11 waiting', '.. the tenth is a failure of each row');
	is(scalar(() = $err =~ /batch of 2 rows/g), 1, '.. told of once');
	is(one('SELECT transient FROM ruststream_counter'), 10, '.. and they are counted');
	return;
}

# kill -9 at each point: nothing is lost, and what was settled does not come again.
sub crashes
{
	my ($log) = @_;
	my %points = (
		row_lock => [qw(after_claim after_handler after_settle before_commit after_commit)],
		lease => [qw(after_claim after_claim_commit after_handler after_settle:2 before_commit:2 after_commit:2)],
		advisory_lock => [qw(after_lock after_take after_handler after_settle:2 after_commit:2 after_unlock:2)]);
	# How many rows are left then.
	my %left = (after_commit => 0, 'after_settle:2' => 2, 'before_commit:2' => 2, 'after_commit:2' => 1, 'after_unlock:2' => 1);

	fresh(['--exec', sprintf($READ, $log)], lease => '1s');
	for my $point (@{ $points{$form} })
	{
		unlink $log;
		$engine->sql('DELETE FROM jobs');
		insert(qw(a b c));
		my ($code) = finish(start({ RUSTSTREAM_FAILPOINT => $point }, 'work', $engine->url, '--drain'));
		is($code, -9, "$form: killed $point");
		# A session that is killed is cleaned up a moment after its process has gone.
		my $left = $left{$point} // 3;
		for (my $until = time() + $PATIENCE; time() < $until; sleep 0.05)
		{
			last if one('SELECT COUNT(*) FROM jobs') == $left;
		}
		is(one('SELECT COUNT(*) FROM jobs'), $left, '.. what was not committed is there');
		unlink $log;
		ok(drained_to(''), '.. and is delivered');
		my $again = do { open(my $in, '<', $log) or die "$log: $!" if $left > 0; $left > 0 ? scalar(() = <$in>) : 0 };
		is($again, $left, '.. alone');
	}
	return;
}

# ----------------------------------------------------------------------- all

my %KILL = (
	libpq => sub { one('SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid()'
			  . " AND datname = current_database() AND backend_type = 'client backend'"); },
	mariadb => sub { $engine->sql("KILL $_") for $engine->sql("SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND db = 'app'"); });

for my $name (@ARGV ? @ARGV : qw(sqlite libpq mariadb))
{
	require "engines/$name.pm";
	$engine = "Conformance::$name"->new($home);
	my $missing = $engine->available;
	if ($missing)
	{
		note("$name: $missing");
		next;
	}
	for my $each ($name eq 'sqlite' ? qw(lease advisory_lock) : qw(row_lock lease advisory_lock))
	{
		$form = $each;
		subtest "$name: $form" => sub {
			my $log = tempdir(CLEANUP => 1) . '/log';
			answers();
			failures();
			writes();
			order();
			killed();
			stopped();
			session_lost($KILL{$name}) if $KILL{$name};
			leases() if $form eq 'lease';
			busy() if $name eq 'sqlite';
			programs($log);
			cancelled($log);
			statements($name);
			transient() if $name eq 'libpq';
			crashes($log);
		};
	}
	$engine->stop;
}
done_testing();
