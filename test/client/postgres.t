# PostgreSQL from outside: what the conformance suite cannot show, since it takes several sessions, a kill, a pooler,
# or the extension's workers beside ours.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin, "$FindBin::Bin/../conformance";
use ClientTest;
use IO::Handle;
use PostgresServer;
use Socket;
use Test::More;
use Time::HiRes qw(sleep);

plan skip_all => 'this build does not serve PostgreSQL' unless `@{[program()]} --version` =~ /\bpostgres\b/;
my $server = PostgresServer->new or plan skip_all => 'there is no PostgreSQL server';
my $url = $server->url;
my $PATIENCE = 60;

sub pg { return join "\n", $server->sql('postgres', @_); }

# Until a question answers what is expected.
sub becomes
{
	my ($question, $expected, $what) = @_;
	my $answer = '';
	for (my $waited = 0; $waited < $PATIENCE; $waited += 0.05)
	{
		$answer = pg($question);
		last if $answer eq $expected;
		sleep 0.05;
	}
	return is($answer, $expected, $what);
}

my %FORM = (
	locked => [],
	leased => ['--locked-until', 'locked_until'],
	keyed => ['--lock-key', 'key-{id}'],
);

# A queue in each form, and a table for what handlers write.
sub fresh
{
	my (@more) = @_;
	pg('SET client_min_messages = warning', 'DROP SCHEMA public CASCADE', 'CREATE SCHEMA public',
		map({ "CREATE TABLE $_ (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, attempt integer DEFAULT 1,"
				  . ' retry_after timestamptz, locked_until timestamptz, payload jsonb)',
			  "CREATE INDEX ON $_ (retry_after NULLS FIRST, id)" } sort keys %FORM),
		'CREATE TABLE effect (number bigint GENERATED ALWAYS AS IDENTITY, id bigint, attempt integer, note text)', @more);
	run('install', $url);
	for my $queue (sort keys %FORM)
	{
		my ($code, undef, $err) = run('describe', $url, $queue, qw(--id id --attempt attempt --retry-after retry_after --payload payload), @{ $FORM{$queue} });
		die $err if $code != 0;
	}
	return;
}

sub subscribe
{
	my ($queue, $handler, @options) = @_;
	my ($code, undef, $err) = run('subscribe', $url, 's', $queue, '--handler', $handler, @options);
	return $code == 0 ? '' : $err;
}

my $HANDLER = 'INSERT INTO effect (id, attempt) VALUES (:id, :attempt)';

# ------------------------------------------------------------- our tables

fresh();
is((run('install', $url))[0], 0, 'installed again: nothing happens');
is(pg('SELECT count(*) FROM ruststream_version'), '1', '.. and there is one version');
is(subscribe('locked', $HANDLER), '', 'subscribed by a bare name');
is(pg('SELECT queue FROM ruststream_subscription'), 'public.locked', '.. which is kept with its schema');
for my $case (
	['INSERT INTO nowhere VALUES (:id)', qr/relation "nowhere" does not exist/],
	['INSERT INTO effect (nothing) VALUES (:id)', qr/column "nothing" of relation "effect" does not exist/],
	['SELECT :paylod', qr/syntax error at or near ":"/],
	['SELECT nofunction()', qr/function nofunction\(\) does not exist/],
	['locked', qr/syntax error at or near "locked"/])
{
	my ($code, undef, $err) = run('subscribe', $url, 'wrong', 'locked', '--handler', $case->[0]);
	ok($code == 4 && $err =~ $case->[1], "refused as a handler: $case->[0]") or diag("$code: $err");
}
is(subscribe('leased', 'CREATE TEMPORARY TABLE later (id int); INSERT INTO later VALUES (1)'), '', 'what a later statement needs an earlier one may make');
is(subscribe('locked', $HANDLER), '', 'what it is given needs no type yet');
pg(q{INSERT INTO ruststream_subscription (name, queue, handler) VALUES ('in_sql', 'leased', 'SELECT 1')});
is(pg(q{SELECT queue FROM ruststream_subscription WHERE name = 'in_sql'}), 'public.leased', '.. as is one that SQL subscribes');
pg(q{UPDATE ruststream_subscription SET paused = true WHERE name = 'in_sql'});
is(pg(q{SELECT state FROM ruststream_status WHERE subscription = 'in_sql'}), 'paused', 'SQL pauses, and looks');
like((run('status', $url))[1], qr/^in_sql +public\.leased +paused/m, '.. and so does the command line');

pg('CREATE ROLE stranger', 'ALTER TABLE ruststream_version OWNER TO stranger', 'CREATE ROLE server LOGIN', 'GRANT ALL ON SCHEMA public TO server');
like((run('status', $url =~ s/postgres@/server@/r))[2], qr/belong to a role that could make this one do/, 'tables of a stranger are not obeyed');
pg('ALTER TABLE ruststream_version OWNER TO postgres');
like((run('status', $url =~ s/postgres@/server@/r))[2], qr/permission denied for table ruststream_version\nhint: GRANT SELECT, INSERT, UPDATE, DELETE/,
	'a role that may not read them is told what it needs');
pg('GRANT SELECT ON ruststream_version, ruststream_queue, ruststream_subscription TO server',
	'GRANT SELECT, INSERT, UPDATE, DELETE ON ruststream_failure, ruststream_counter, ruststream_worker TO server',
	'GRANT SELECT, UPDATE, DELETE ON locked TO server', 'GRANT INSERT ON effect TO server', "INSERT INTO locked (payload) VALUES ('{}')");
is((run('work', $url =~ s/postgres@/server@/r, 's', '--drain'))[0], 0, 'what a worker needs is what the manual says');
is(pg(q{SELECT count(*) FROM locked}), '0', '.. and with that it delivers');
is(pg(q{SELECT acked FROM ruststream_counter WHERE subscription = 's'}), '1', '.. and counts');
pg('DROP OWNED BY server', 'REVOKE ALL ON SCHEMA public FROM server', 'DROP ROLE server, stranger');

# ------------------------------------------------------------- passwords

# A server that never answers, so that the list of processes can be looked at.
{
	socket(my $listener, PF_INET, SOCK_STREAM, 0) or die "socket: $!\n";
	bind($listener, sockaddr_in(0, INADDR_LOOPBACK)) && listen($listener, 5) or die "listen: $!\n";
	my ($port) = sockaddr_in(getsockname $listener);
	my $child = start({}, 'status', "postgres://u:s3cret\@127.0.0.1:$port/x?sslmode=disable&sslpassword=s3cret&password=s3cret&connect_timeout=600");
	accept(my $asked, $listener) or die "accept: $!\n";
	open(my $in, '<', "/proc/$child->{pid}/cmdline") or die;
	my $line = do { local $/; <$in> };
	ok($line =~ /u:x+\@127/ && $line !~ /s3cret/, 'passwords on the command line are painted over') or diag($line);
	kill 'KILL', $child->{pid};
	finish($child);
}

# ------------------------------------------------------------- what is refused

pg('CREATE TABLE local_time (id integer PRIMARY KEY, due timestamp)', 'CREATE VIEW seen AS SELECT 1 AS id',
	'CREATE TABLE rounded (id integer PRIMARY KEY, until timestamptz(3))');
like((run('describe', $url, 'local_time', qw(--id id --retry-after due)))[2], qr/time zone of whoever reads it/, 'timestamp without time zone is refused');
like((run('describe', $url, 'rounded', qw(--id id --locked-until until)))[2], qr/which rounds/, 'a lease that is rounded is refused');
like((run('describe', $url, 'seen', qw(--id id)))[2], qr/is not a table/, 'a view is refused');
like((run('describe', $url, 'locked', qw(--id id --lock-key k-{retry_after})))[2], qr/cannot be part of the lock key/, 'a key of what depends on settings is refused');
like(subscribe('locked', 'COMMIT'), qr/begins or ends a transaction/, 'a handler that commits is refused');
like(subscribe('locked', "SELECT 1; /* ; */ COMMIT", '--transactional', 'off'), qr/give up the row's lock/, '.. in the row lock form whatever its mode');
is(subscribe('leased', "BEGIN; $HANDLER; COMMIT", '--transactional', 'off'), '', '.. and not where no transaction of ours is open');

# ------------------------------------------------------------- handlers

fresh(q{CREATE FUNCTION "app fn"(p jsonb, a integer) RETURNS text LANGUAGE sql AS $$SELECT $1 ->> 'k' || $2$$});
is(subscribe('locked', <<'SQL'), '', 'a handler of every kind of token');
-- :id in a comment; and ' in it
INSERT INTO effect (id, note) VALUES (:id, ':id' || E'\':id;' || $$:id;$$ || $x$ $$:id $x$ || "app fn"(:payload, :attempt));
/* /* :payload; */ ; */
INSERT INTO effect (id, note) SELECT ((:payload)::text::jsonb ->> 'n')::bigint, (ARRAY[1,2,3])[2:3]::text;;
SQL
pg(q{INSERT INTO locked (payload) VALUES ('{"k": "v", "n": 7}')});
is((run('work', $url, '--drain'))[0], 0, '.. runs');
is(pg('SELECT id, note FROM effect ORDER BY number'), "1|:id':id;:id; \$\$:id v1\n7|{2,3}", '.. and only its parameters are replaced');

is(subscribe('locked', q{SELECT set_config('search_path', 'pg_temp', false), set_config('DateStyle', 'German', false), set_config('TimeZone', 'Asia/Kolkata', false); SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE, READ ONLY; SET ROLE pg_monitor}), '',
	'a handler that sets what it should not');
pg('TRUNCATE effect', q{INSERT INTO locked (payload) VALUES ('1'), ('2')}, q{INSERT INTO locked (payload, retry_after) VALUES ('3', clock_timestamp() + interval '1 s')});
my $worker = start({}, 'work', $url);
becomes('SELECT count(*) FROM locked', '0', '.. neither stops the next delivery, nor the one that is due later');
kill 'TERM', $worker->{pid};
is((finish($worker))[0], 0, '.. nor the end of the worker');
is(subscribe('locked', q{INSERT INTO effect (note) VALUES (current_setting('transaction_isolation')); SET default_transaction_isolation = 'serializable'}), '',
	'a handler that sets the level of what follows');
pg('TRUNCATE effect', q{INSERT INTO locked (payload) VALUES ('1'), ('2')});
run('work', $url, '--drain');
is(pg('SELECT DISTINCT note FROM effect'), 'read committed', '.. has not set that of the next delivery');

is(subscribe('locked', q{COPY effect TO STDOUT}, '--on-error', 'discard'), '', 'a handler that copies to its client');
pg(q{INSERT INTO locked (payload) VALUES ('1'), ('2')});
run('work', $url, '--drain');
is(pg(q{SELECT count(*), (SELECT count(*) FROM ruststream_failure WHERE message LIKE 'a handler cannot COPY%') FROM locked}), '0|2', '.. fails, and the connection goes on');

# ------------------------------------------------------------- settings

# Ours are those of our statements, whose triggers see them, and nobody else's.
my $SETTINGS = q{concat_ws(' ', current_setting('enable_seqscan'), current_setting('enable_sort'), current_setting('plan_cache_mode'))};
for my $queue (sort keys %FORM)
{
	fresh('ALTER DATABASE postgres SET enable_sort = off', "ALTER DATABASE postgres SET plan_cache_mode = 'force_custom_plan'",
		"CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS \$\$BEGIN INSERT INTO effect (note) VALUES ('ours: ' || $SETTINGS); RETURN OLD; END\$\$",
		"CREATE TRIGGER tell BEFORE DELETE ON $queue FOR EACH ROW EXECUTE FUNCTION tell()",
		"INSERT INTO $queue (payload) VALUES ('1'), ('2')");
	subscribe($queue, "INSERT INTO effect (note) VALUES ('theirs: ' || $SETTINGS); SELECT set_config('enable_seqscan', 'off', false), set_config('statement_timeout', '7s', false)");
	run('work', $url, '--drain');
	is(pg('SELECT string_agg(note, $$; $$ ORDER BY number) FROM effect'),
		join('; ', ('theirs: on off force_custom_plan', 'ours: off off force_generic_plan') x 2),
		"$queue: a handler runs with the settings that it was given, whatever the one before has set, and the end of its row with ours");
}
pg('ALTER DATABASE postgres RESET enable_sort', 'ALTER DATABASE postgres RESET plan_cache_mode');

# A claim that fails brings no savepoint, and leaves a connection that goes on.
fresh('CREATE ROLE server LOGIN', 'GRANT ALL ON SCHEMA public TO server');
subscribe('locked', $HANDLER, '--poll-interval', '50ms');
pg('GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO server', 'REVOKE UPDATE ON locked FROM server', q{INSERT INTO locked (payload) VALUES ('1')});
my $refused = start({}, 'work', $url =~ s/postgres@/server@/r);
becomes(q{SELECT count(*) FROM ruststream_worker WHERE state LIKE 'broken: permission denied%'}, '1', 'a claim that is not allowed');
my $session = pg(q{SELECT pid FROM pg_stat_activity WHERE usename = 'server'});
pg('GRANT UPDATE ON locked TO server');
becomes('SELECT count(*) FROM locked', '0', '.. is made once it is');
is(pg(q{SELECT pid FROM pg_stat_activity WHERE usename = 'server'}), $session, '.. by the same session');
kill 'TERM', $refused->{pid};
finish($refused);
pg('DROP OWNED BY server', 'DROP ROLE server');
# What is said of an outcome or an error may be anything, and is kept: cut to fit, and as UTF-8.
run('subscribe', $url, 's', 'leased', '--exec', q{printf '\377why'; exit 12});
pg('DELETE FROM ruststream_failure', q{INSERT INTO leased (payload) VALUES ('1')});
run('work', $url, '--drain');
is(pg('SELECT count(*), (SELECT message FROM ruststream_failure) FROM leased'), '0|?why', 'a program that says something that is no text');
for my $handler (q{SELECT ruststream_discard(repeat('é', 600))}, q{DO $$ BEGIN RAISE EXCEPTION '%', repeat('é', 600); END $$})
{
	subscribe('leased', $handler, '--on-error', 'discard');
	pg('DELETE FROM ruststream_failure', q{INSERT INTO leased (payload) VALUES ('1')});
	run('work', $url, '--drain');
	is(pg(q{SELECT count(*), (SELECT message = repeat('é', 511) FROM ruststream_failure) FROM leased}), '0|t', ".. and a text that is cut inside a character: $handler");
}

# Times end with the year 9999.
is((run('publish', $url, 'locked', '1', '--delay', '3000000d'))[0], 0, 'a row that is not to be due for eight thousand years');
is(pg('SELECT extract(year FROM max(retry_after)) FROM locked'), '9999', '.. waits for as long as there are times');
subscribe('leased', $HANDLER, '--lease', '3000000d');
pg('TRUNCATE effect', q{INSERT INTO leased (payload) VALUES ('1')});
run('work', $url, '--drain');
is(pg('SELECT count(*) FROM effect'), '1', '.. and so does a lease');

# ------------------------------------------------------------- callbacks

SKIP:
{
	my $program = program() =~ s{library/ruststream$}{postgres_test}r;
	skip 'postgres_test is not built', 1 unless $program ne program() && -x $program;
	fresh();
	local $ENV{RUSTSTREAM_LOOK} = "host=$server->{directory} user=postgres dbname=postgres";
	my $out = `$program '$url' 2>&1`;
	is($?, 0, 'callbacks in C');
	unlike($out, qr/^not ok/m, '.. do and are refused what they should') or diag($out);
}

# ------------------------------------------------------------- killed at each point

my %POINTS = (
	locked => [qw(after_claim after_handler after_settle before_commit after_commit)],
	leased => [qw(after_claim after_claim_commit after_begin_delivery after_handler after_settle before_commit after_commit)],
	keyed => [qw(after_lock after_take after_begin_delivery after_handler after_settle before_commit after_commit after_unlock)],
);

SKIP:
{
	fresh();
	for my $queue (sort keys %POINTS)
	{
		subscribe($queue, $HANDLER, '--lease', '1s');
		for my $point (@{ $POINTS{$queue} })
		{
			my $committed = $point =~ /^after_(commit|unlock)$/;
			pg('TRUNCATE effect', "INSERT INTO $queue (payload) VALUES ('1')");
			my ($code) = finish(start({ RUSTSTREAM_FAILPOINT => $point }, 'work', $url, '--drain'));
			skip 'built without failure points', 1 if $code == 0;
			is($code, -9, "$queue: killed $point");
			becomes(q{SELECT count(*) FROM pg_stat_activity WHERE application_name = 'ruststream'}, '0', '.. its sessions end');
			is(pg("SELECT count(*), (SELECT count(*) FROM effect) FROM $queue"), $committed ? '0|1' : '1|0', '.. the row and the effect are one');
			becomes(qq{SELECT count(*) FROM $queue WHERE locked_until > clock_timestamp()}, '0', '.. its lease ends');
			run('work', $url, '--drain');
			is(pg("SELECT count(*), (SELECT count(*) FROM effect) FROM $queue"), '0|1', '.. delivered once in the end');
			my $attempt = $committed || $queue eq 'locked' || $point =~ /^after_(claim|lock)$/ ? 1 : 2;
			is(pg('SELECT attempt FROM effect'), $attempt, '.. the attempt');
		}
	}
}

# ------------------------------------------------------------- the connection is lost

fresh('CREATE SEQUENCE tries');
for my $queue (sort keys %FORM)
{
	pg('TRUNCATE effect', 'ALTER SEQUENCE tries RESTART', "INSERT INTO $queue (payload) VALUES ('1'), ('2')");
	subscribe($queue, "$HANDLER; SELECT pg_terminate_backend(pg_backend_pid()) WHERE nextval('tries') = 1", '--lease', '1s', '--retry-delay', '10ms');
	my $lost = start({}, 'work', $url);
	becomes("SELECT count(*), (SELECT count(*) FROM effect), (SELECT count(DISTINCT id) FROM effect) FROM $queue", '0|2|2',
		"$queue: a session that is ended within a delivery loses nothing, and repeats nothing");
	kill 'TERM', $lost->{pid};
	finish($lost);
}

# ------------------------------------------------------------- leases

fresh();
subscribe('leased', "SELECT pg_sleep(3); $HANDLER", '--lease', '1s', '--workers', '2', '--poll-interval', '50ms');
pg(q{INSERT INTO leased (payload) VALUES ('1')});
$worker = start({}, 'work', $url);
becomes('SELECT count(*) FROM leased', '0', 'a handler outlives its lease, which is extended');
is(pg('SELECT string_agg(attempt::text, $$,$$) FROM effect'), '1', '.. and nobody else had the row');
is(pg(q{SELECT count(pg_terminate_backend(pid)) > 0 FROM pg_stat_activity WHERE application_name = 'ruststream' AND query ~ '^UPDATE.*locked_until' AND state = 'idle'}), 't',
	'.. by a connection that is lost then');
pg(q{INSERT INTO leased (payload) VALUES ('1')});
becomes('SELECT string_agg(attempt::text, $$,$$) FROM effect', '1,1', '.. and made anew, in time');
kill 'TERM', $worker->{pid};
finish($worker);

# ------------------------------------------------------------- waking

fresh();
subscribe('locked', $HANDLER, '--poll-interval', '1h');
pg(q{SELECT ruststream_wake('locked')});
$worker = start({}, 'work', $url);
becomes(q{SELECT count(*) FROM pg_stat_activity WHERE application_name = 'ruststream' AND state = 'idle' AND state_change < clock_timestamp() - interval '0.3 s'}, '1', 'a worker is idle');
pg(q{INSERT INTO locked (payload) VALUES ('1')});
becomes('SELECT count(*) FROM locked', '0', '.. and an insert wakes it');
kill 'TERM', $worker->{pid};
finish($worker);

# ------------------------------------------------------------- many workers, two programs

for my $queue (sort keys %FORM)
{
	fresh();
	subscribe($queue, $HANDLER, '--workers', '3', '--poll-interval', '20ms');
	pg("INSERT INTO $queue (payload) SELECT to_jsonb(i) FROM generate_series(1, 600) AS i");
	my @programs = map { start({}, 'work', $url, '--drain') } 1 .. 2;
	is(join(',', map { (finish($_))[0] } @programs), '0,0', "$queue: two programs of three workers drain");
	is(pg("SELECT count(*), count(DISTINCT id), (SELECT count(*) FROM $queue) FROM effect"), '600|600|0', '.. each row once');
}

# ------------------------------------------------------------- lines

# A session that holds a lock by name until it is closed.
sub hold
{
	my ($name) = @_;
	open(my $session, '|-', $server->{bin} . '/psql', '-XqAt', '-h', $server->{directory}, '-U', 'postgres', '-o', '/dev/null', 'postgres') or die "psql: $!\n";
	$session->autoflush;
	print $session "SELECT pg_advisory_lock(hashtextextended('$name', 0));\n";
	becomes(q{SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1}, '1', "$name is held");
	return $session;
}

# Fails where another row of its key is in work; the key is an integer.
my $ALONE = 'SELECT 1 / pg_try_advisory_xact_lock(42, (:payload)::text::integer)::integer; ' . $HANDLER;

sub lined
{
	my ($queue, @more) = @_;
	fresh("ALTER TABLE $queue ADD line integer");
	my @describe = (qw(--id id --attempt attempt --payload payload --partition-key line), @{ $FORM{$queue} });
	my ($code, undef, $err) = run('describe', $url, $queue, @describe);
	is($code, 0, "$queue: described with a partition key");
	like($err, qr/index that is missing.*CREATE INDEX ON "public"\."$queue" \("line", "id"\)/, '.. whose index is asked for');
	like(subscribe($queue, $ALONE), qr/has no index for its claims/, '.. and is needed');
	is((run('describe', $url, $queue, @describe, '--create-index'))[0], 0, '.. and made');
	is(subscribe($queue, $ALONE, '--retry-delay', '1h', @more), '', '.. after which it can be subscribed to');
	return;
}

for my $queue (sort keys %FORM)
{
	lined($queue);
	pg("INSERT INTO $queue (payload, line) SELECT '1', 1 FROM generate_series(1, 50)",
		"INSERT INTO $queue (payload, line) SELECT to_jsonb(i), i FROM generate_series(2, 80) AS i",
		"INSERT INTO $queue (payload) SELECT '0'");
	my $holder = hold("public.$queue:key:1");
	is((run('work', $url, '--drain'))[0], 0, "$queue: a worker drains while somebody has a key");
	is(pg("SELECT count(*), min(line), max(line) FROM $queue"), '50|1|1', '.. all but the rows of that key');
	close $holder;
	is((run('work', $url, '--drain'))[0], 0, '.. and these once it is free');
	is(pg("SELECT count(*), (SELECT string_agg(id::text, ',' ORDER BY number) FROM effect WHERE id <= 50) FROM $queue"),
		'0|' . join(',', 1 .. 50), '.. in order');
	is(pg('SELECT count(*) FROM ruststream_failure'), '0', '.. nothing having failed');

	lined($queue, '--workers', '3', '--poll-interval', '20ms');
	pg("INSERT INTO $queue (payload, line) SELECT to_jsonb(i % 4), i % 4 FROM generate_series(1, 200) AS i");
	my @programs = map { start({}, 'work', $url) } 1 .. 2;
	becomes("SELECT count(*) FROM $queue", '0', "$queue: two programs of three workers empty it");
	for (@programs)
	{
		kill 'TERM', $_->{pid};
		finish($_);
	}
	is(pg('SELECT count(*), count(DISTINCT id), (SELECT count(*) FROM ruststream_failure) FROM effect'), '200|200|0', '.. each row once, those of one key one at a time');
	is(pg('SELECT count(*) FROM (SELECT id, lag(id) OVER (PARTITION BY id % 4 ORDER BY number) AS before FROM effect) AS e WHERE before > id'), '0', '.. in their order');
}

lined('leased');
pg(q{INSERT INTO leased (payload, line, locked_until) SELECT to_jsonb(i), i, CASE WHEN i <= 60 THEN timestamptz 'infinity' END FROM generate_series(1, 70) AS i},
	q{INSERT INTO leased (payload, line) SELECT to_jsonb(i), i FROM generate_series(1, 60) AS i});
is((run('work', $url, '--drain'))[0], 0, 'a worker drains past keys of which a row is leased');
is(pg('SELECT count(*), max(line) FROM leased'), '120|60', '.. and leaves these alone');

lined('keyed');
pg(q{INSERT INTO keyed (payload, line) VALUES ('1', 1), ('1', 1), ('2', 2)});
my $holder = hold('key-1');
is((run('work', $url, '--drain'))[0], 0, 'a worker drains while somebody has the key of a row');
is(pg('SELECT string_agg(id::text, $$,$$ ORDER BY id) FROM keyed'), '1,2', '.. which holds back those of its partition key, and no others');
close $holder;
is((run('work', $url, '--drain'))[0], 0, '.. and goes on afterwards');
is(pg('SELECT string_agg(id::text, $$,$$ ORDER BY number) FROM effect'), '3,1,2', '.. in order');
subscribe('keyed', "SELECT pg_advisory_unlock(hashtextextended('public.keyed:key:7', 0)) WHERE :attempt = 1; $HANDLER", '--retry-delay', '10ms');
pg(q{INSERT INTO keyed (payload, line) VALUES ('7', 7)});
is((run('work', $url, '--drain'))[0], 0, 'a handler releases the lock of its partition key');
is(pg('SELECT count(*), (SELECT string_agg(attempt::text, $$,$$) FROM effect WHERE id = 4), (SELECT message LIKE $$%was lost%$$ FROM ruststream_failure) FROM keyed'), '0|2|t',
	'.. and has lost its delivery, but not the next');

# ------------------------------------------------------------- a pooler

SKIP:
{
	chomp(my $pgbouncer = `command -v pgbouncer 2>/dev/null` || '');
	$pgbouncer = '/usr/sbin/pgbouncer' if $pgbouncer eq '' && -x '/usr/sbin/pgbouncer';
	skip 'there is no pgbouncer', 4 if $pgbouncer eq '';
	my $place = "$server->{directory}/pool";
	for my $mode (qw(transaction session))
	{
		fresh();
		mkdir $place;
		chown((getpwnam 'postgres')[2, 3], $place) if $> == 0;
		open(my $ini, '>', "$server->{directory}/$mode.ini") or die;
		print $ini "[databases]\npostgres = host=$server->{directory} user=postgres\n[pgbouncer]\nlisten_addr =\nunix_socket_dir = $place\n"
		  . "listen_port = 6432\nauth_type = any\npool_mode = $mode\nlogfile = $place/log\npidfile = $place/pid\n";
		close $ini;
		$server->as_owner($pgbouncer, '-d', "$server->{directory}/$mode.ini");
		my $pooled = "postgres://postgres@/postgres?host=$place&port=6432";
		for (1 .. 600) { last if (run('status', $pooled))[0] != 5; sleep 0.1; } # until it listens
		my ($code, undef, $err) = run('subscribe', $pooled, 's', 'keyed', '--handler', $HANDLER);
		if ($mode eq 'session') { is($code, 0, 'keys work through a pooler that keeps sessions'); }
		else
		{
			is($code, 4, 'keys are refused through a pooler in transaction mode');
			like($err, qr/pool_mode = session/, '.. with what to do');
			run('subscribe', $pooled, 's', 'locked', '--handler', $HANDLER, '--workers', '3');
			pg(q{INSERT INTO locked (payload) SELECT '1' FROM generate_series(1, 300)});
			run('work', $pooled, '--drain');
			is(pg('SELECT count(*), count(DISTINCT id), (SELECT count(*) FROM locked) FROM effect'), '300|300|0', '.. and the row lock form works');
		}
		open(my $pid, '<', "$place/pid") or die;
		kill 'INT', readline($pid) + 0;
		for (1 .. 200) { last unless -e "$place/pid"; sleep 0.05; }
	}
}

# ------------------------------------------------------------- beside the extension

SKIP:
{
	my $both = PostgresServer->new(preload => 1, conf => 'ruststream.max_workers = 16');
	skip 'there is no server with the extension', 6 unless $both && ($both->try('postgres', 'CREATE EXTENSION ruststream'))[1];
	$server = $both;
	$url = $server->url;
	for my $queue (sort keys %FORM)
	{
		my $column = { locked => '', leased => ", locked_until_column => 'locked_until'", keyed => ", lock_key => 'key-{id}'" }->{$queue};
		fresh(q{CREATE OR REPLACE FUNCTION handle(task jsonb) RETURNS ruststream.outcome LANGUAGE plpgsql AS $$
			DECLARE author text := CASE WHEN ruststream.attempt() IS NULL THEN 'client' ELSE 'extension' END;
			BEGIN
				INSERT INTO effect (id, note) VALUES ((task ->> 'n')::bigint, author);
				PERFORM pg_sleep(0.001);
				IF random() < 0.2 THEN RETURN ruststream.retry('again'); END IF;
				RETURN ruststream.ack();
			END $$},
			"SELECT ruststream.attach_queue('$queue', id_column => 'id', attempt_column => 'attempt', retry_after_column => 'retry_after', payload_column => 'payload'$column)",
			"INSERT INTO $queue (payload) SELECT jsonb_build_object('n', i) FROM generate_series(1, 2000) AS i");
		is(subscribe($queue, 'SELECT handle(:payload)', '--workers', '3', '--poll-interval', '20ms', '--lease', '5s'), '', "$queue: a handler of the extension serves the client, too");
		$worker = start({}, 'work', $url);
		pg("SELECT ruststream.subscribe('s', '$queue', 'handle', workers => 3, lease => '5 s')");
		becomes("SELECT count(*) FROM $queue", '0', '.. both drain the queue');
		is(pg('SELECT count(*), count(DISTINCT id), count(DISTINCT note) FROM effect'), '2000|2000|2', '.. each row once, and both had some');
		kill 'TERM', $worker->{pid};
		finish($worker);
		pg(q{SELECT ruststream.unsubscribe('s')});
	}
}

done_testing();
