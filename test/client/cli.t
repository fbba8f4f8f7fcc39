# The command line: messages, exit codes, JSON, programs as handlers, stopping.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use ClientTest;
use File::Temp qw(tempfile);
use IO::Socket::INET;
use Test::More;
use Time::HiRes qw(sleep);

my ($code, $out, $err);
my $url = url();

# --------------------------------------------------------------- help and usage

($code, $out, $err) = run('help');
ok($code == 0 && $out =~ /Exit status/ && $err eq '', 'help');
for my $command (qw(install describe forget subscribe unsubscribe pause resume work publish status))
{
	($code, $out) = run('help', $command);
	ok($code == 0 && $out =~ /^Usage: ruststream $command URL/ && $out =~ /^Example:\n  ruststream $command [a-z@]/m, "help $command");
	is((run($command, '--help'))[1], $out, '.. also as an option');
}
($code, $out) = run('--version');
like($out, qr/^ruststream \d+\.\d+ \(.*\bsqlite\b/, '--version');

for my $case (
	[[], 'no command is given'],
	[['walk'], 'there is no command "walk"'],
	[['status'], 'status needs a database\'s URL'],
	[['publish', $url], 'publish needs TABLE'],
	[['pause', $url, 'a', 'b'], '"b" is one argument too many'],
	[['status', $url, '--colour'], 'unknown option --colour'],
	[['subscribe', $url, 'a', 'b', '--lease'], '--lease needs an argument'],
	[['status', 'oracle://x'], 'its scheme is none that is served'],
	[['status', '-'], 'RUSTSTREAM_URL is not set'],
	[['status', 'mysql://u:s3cret@h/d', '-xh'], 'unknown option -x'],
	[['status', '@/dev/null'], 'no URL can be read from "/dev/null": it is empty'],
	[['status', '@/nonexistent'], 'no URL can be read from "/nonexistent"'])
{
	delete $ENV{RUSTSTREAM_URL};
	($code, $out, $err) = run(@{ $case->[0] });
	ok($code == 2 && index($err, $case->[1]) >= 0 && $out eq '', "usage: $case->[1]") or diag("$code: $err");
	unlike($err, qr/s3cret/, '.. and no password in it');
}
for my $case ([['status', '--json'], 2], [['status', $url, '--json', '--colour'], 2], [['walk', '--json'], 2])
{
	($code, $out, $err) = run(@{ $case->[0] });
	ok($code == $case->[1] && $err =~ /^\{"error":".*","hint":"Try: .*","state":null,"exit_code":$case->[1]\}\n$/, "in JSON: @{ $case->[0] }") or diag("$code: $err");
}

# ------------------------------------------------------------------- exit codes

($code, $out, $err) = run('status', 'sqlite:/nonexistent/x.db');
ok($code == 5 && $err =~ m{sqlite:/nonexistent/x\.db}, 'no database: 5');
unlike(join('', run('status', 'mysql://root:s3cret@h/d')), qr/s3cret/, 'no password in a message');
sql('SELECT 1');
($code, $out, $err) = run('status', 'sqlite:/dev/null');
is($code, 5, 'not installed: 5');
like($err, qr/hint: Run: ruststream install/, 'with a hint');

new_database();
is((run('install', $url))[0], 0, 'install is idempotent');
($code, $out, $err) = run('describe', $url, 'leased');
ok($code == 2 && $err =~ /describe needs --id COLUMN/, 'a description without an id');
for my $case (
	[['--lease', '5 parsecs'], '--lease takes a time'],
	[['--lease', '-1s'], '--lease takes a time'],
	[['--lease', 'nan'], '--lease takes a time'],
	[['--lease', '0'], '--lease takes 1ms at least'],
	[['--retry-delay', '0.1ms'], '--retry-delay takes 1ms at least'],
	[['--workers', 'many'], '--workers takes a number'],
	[['--workers', '65'], '--workers takes a number'])
{
	($code, $out, $err) = run('subscribe', $url, 'a', 'b', @{ $case->[0] });
	ok($code == 2 && index($err, $case->[1]) >= 0, "usage: @{ $case->[0] }");
}
is((run('status', $url))[1], "no subscriptions\n", 'status of nothing');
for my $case (['>/dev/full', 1], ['>&-', 1], ['>&- <&- 2>&-', 1])
{
	for my $command ("status '$url'", "publish '$url' leased x", 'help', '--version')
	{
		is(system(program() . " $command $case->[0] 2>/dev/null") >> 8, $case->[1], "output that cannot be written is an error: $command $case->[0]");
	}
}
is(sql("SELECT count(*) FROM leased"), 3, '.. of what is done all the same');
sql('DELETE FROM leased');
like(`@{[program()]} status '$url' 2>&1 >/dev/full`, qr/the output cannot be written: No space left/, '.. which says why');
{
	# What is opened in their place would be written our messages.
	my $files = `exec 2>&1 <&-; @{[program()]} status '$url' >&-; echo \$?`;
	is($files, "ruststream: the output cannot be written: Bad file descriptor\n1\n", 'closed files stay closed');
}
{
	local $ENV{RUSTSTREAM_URL} = $url;
	is((run('status', '-'))[0], 0, 'the URL from the environment');
	my ($handle, $file) = tempfile(UNLINK => 1);
	print $handle "$url\nmore\n";
	close $handle;
	is((run('status', "\@$file"))[0], 0, 'the URL from a file');
}
SKIP:
{
	# A server that never answers, so that there is time to look.
	my $listener = IO::Socket::INET->new(Listen => 5, LocalAddr => '127.0.0.1') or skip 'no socket', 1;
	my $place = '127.0.0.1:' . $listener->sockport;
	my %shown = ("mysql://u:s3cret\@$place/d" => "mysql://u:xxxxxx\@$place/d",
		"postgres://u:s3\@cret\@$place/d?password=s3cret&connect_timeout=60" => "postgres://u:xxxxxxx\@$place/d?password=xxxxxx&connect_timeout=60");
	for my $secret (sort keys %shown)
	{
		my ($engine) = $secret =~ /^(\w+)/;
		next unless `@{[program()]} --version` =~ /\b$engine\b/;
		my $child = start({}, 'status', $secret);
		accept(my $connection, $listener);
		open(my $in, '<', "/proc/$child->{pid}/cmdline") or skip 'no /proc', 1;
		is((split /\0/, readline $in)[2], $shown{$secret}, "a password is painted over: $engine");
		kill 'KILL', $child->{pid};
		finish($child);
	}
}
is((run('pause', $url, 'nobody'))[0], 3, 'not found: 3');
is((run('work', $url, 'nobody', '--drain'))[0], 3, 'no such subscription to work on: 3');
is((run('work', $url, 'nobody', '--drain', '--json'))[2], qq({"error":"there is no subscription \\"nobody\\"","hint":null,"state":null,"exit_code":3}\n), '.. in JSON');
for my $case (['work', $url, 'nobody'], ['status', $url, 'nobody'], ['publish', $url, 'leased', '--delay', 'soon'], ['status', $url, '--colour'])
{
	($code, $out, $err) = run(@$case, '--json');
	ok($code != 0 && $out eq '' && $err =~ /^\{"error":".*","hint":.*,"state":null,"exit_code":$code\}\n\z/, "in JSON: $case->[0] $case->[2]") or diag($err);
}
($code, $out, $err) = run('describe', $url, 'effect', '--id', 'number');
ok($code == 4 && $err =~ /SQLite has no row lock form/ && $err =~ /hint: Name a column for the lease/, 'refused: 4');
($code, $out, $err) = run('describe', $url, 'effect', '--id', 'number', '--lock-key', '{number', '--json');
ok($code == 4 && $err =~ /^\{"error":".*","hint":".*","state":null,"exit_code":4\}$/, 'an error in JSON') or diag($err);
for my $case (
	[['--handler', 'SELEKT'], 'syntax error'],
	[['--handler', '  '], 'the handler is empty'],
	[['--handler', 'SELECT :paylod'], 'the handler names ":paylod"'],
	[['--handler', 'SELECT :id; ; -- and
		SELECT ?'], 'the handler names "?"'],
	[['--handler', 'SELECT 1', '--exec', 'true'], 'a handler or a program, not both'],
	[['--handler', 'SELECT 1', '--on-error', 'ack'], 'on_error cannot be "ack"'],
	[['--handler', 'SELECT 1', '--on-error', 'dead_letter'], 'but there is none'],
	[['--handler', 'SELECT 1', '--backoff', 'random'], 'backoff cannot be'],
	[['--handler', 'SELECT 1', '--decode', 'xml'], 'decode cannot be'],
	[['--handler', 'SELECT 1', '--transactional', 'maybe'], 'transactional cannot be'],
	[['--handler', 'SELECT 1', '--max-attempts', '3'], 'max_attempts needs a dead letter'],
	[['--handler', 'SELECT 1', '--dead-letter', 'leased'], 'cannot go into the same table'],
	[['--handler', 'SELECT 1', '--dead-letter', 'keyed'], 'has no column "retry_after"'])
{
	($code, $out, $err) = run('subscribe', $url, 's', 'leased', @{ $case->[0] });
	ok($code == 4 && index($err, $case->[1]) >= 0, "refused: $case->[1]") or diag("$code: $err");
}
sql('CREATE TABLE plain (id INTEGER PRIMARY KEY, due TEXT, until TEXT)');
($code, $out, $err) = run('describe', $url, 'plain', qw(--id id --retry-after due --locked-until until));
ok($code == 0 && $err =~ /CREATE INDEX "ruststream_claim_plain" ON "plain" \("due", "id"\)/, 'a missing index is told');
($code, $out, $err) = run('subscribe', $url, 's', 'plain', '--handler', 'SELECT 1');
ok($code == 4 && $err =~ /hint: Make it: CREATE INDEX/, 'and needed to subscribe');
sql('CREATE INDEX mine ON plain (due, id)');
is((run('subscribe', $url, 's', 'plain', '--handler', 'SELECT 1'))[0], 0, 'whoever makes it');
is((run('forget', $url, 'plain'))[0], 4, 'a queue that is read is not forgotten');
run('unsubscribe', $url, 's');
is((run('forget', $url, 'plain'))[0], 0, 'afterwards it is');

# ------------------------------------------------------------ SQL is as good

sql("INSERT INTO ruststream_subscription (name, queue, handler) VALUES ('sql', 'leased', 'INSERT INTO effect (id) VALUES (:id)')");
sql("INSERT INTO leased (payload) VALUES ('x')");
is((run('work', $url, '--drain'))[0], 0, 'a subscription that SQL has made works');
is(sql('SELECT count(*) FROM effect'), 1, 'and delivers');
sql("UPDATE ruststream_subscription SET paused = 1; INSERT INTO leased (payload) VALUES ('x')");
like((run('work', $url, '--drain'))[2], qr/subscription "sql" is paused/, 'paused in SQL it says so');
is(sql('SELECT count(*) FROM leased'), 1, '.. and rests');
is(sql('SELECT state FROM ruststream_status'), 'paused', 'and says so');
run('resume', $url, 'sql');
($code, $out) = run('work', $url, '--drain', '--json');
is($out, qq({"delivered":1,"failed":0}\n), 'the counts in JSON');
ok(refuses("INSERT INTO ruststream_queue (name, id_column) VALUES ('effect', 'number')"), 'SQL is refused the row lock form as well');
run('unsubscribe', $url, 'sql');

# ------------------------------------------------------------------- publishing

($code, $out) = run('publish', $url, 'leased', '{"n": 1}', '--delay', '1h', '--json');
ok($code == 0 && $out =~ /^\{"id":"\d+"\}$/, 'publish tells the id');
is(sql("SELECT payload || (retry_after > strftime('%Y-%m-%dT%H:%M:%S+00:00', 'now', '+59 minutes')) FROM leased"),
	'{"n": 1}1', 'and the row waits');
is(sql("SELECT retry_after GLOB '????-??-??T??:??:??*+00:00' FROM leased"), 1, 'its time is text that sorts');
is((run('publish', $url, 'leased', 'x', '--group', 'g'))[0], 4, 'no group without a column for it');
sql('DELETE FROM leased');

# -------------------------------------------------------------------- programs

# What a program answers, and what comes of it: the row, and the failure.
for my $case (
	['cat >/dev/null; exit 0', '', ''],
	['exit 10', undef, undef],
	['echo 3600 not now; exit 11', '2 waits', 'not now'],
	['exit 12', '', ''],
	['echo bad >&2; echo worse >&2; exit 3', '2 waits', 'worse: the program ended with status 3'],
	['printf "\\377\\303" >&2; head -c 60000 /dev/zero | tr "\\0" x >&2; printf "\\nat \\377last\\n" >&2; exit 3', '2 waits', 'at ?last: the program ended with status 3'],
	['printf "\\377why\\303"; exit 12', '', '?why'],
	['kill -9 $$', '2 waits', 'the program was ended by signal 9'],
	['exit 14', '2 waits', 'the program ended with status 14'],
	['[ "$(cat)" = "pay load" ] && [ $RUSTSTREAM_ATTEMPT = 1 ] && [ $RUSTSTREAM_QUEUE = leased ] && [ $RUSTSTREAM_ID = 1 ]', '', ''])
{
	my ($command, $left, $failure) = @$case;
	next unless defined $left;
	sql("DELETE FROM leased; DELETE FROM ruststream_failure; INSERT INTO leased (payload) VALUES ('pay load')");
	run('subscribe', $url, 'p', 'leased', '--exec', $command, '--retry-delay', '1h');
	($code, $out, $err) = run('work', $url, '--drain');
	is(sql("SELECT attempt || CASE WHEN retry_after IS NULL THEN '' ELSE ' waits' END FROM leased"), $left, "program: $command");
	is(sql('SELECT message FROM ruststream_failure'), $failure, '.. and its failure');
}
sql("DELETE FROM leased; INSERT INTO leased (payload) VALUES (printf('%.*c', 3000000, 'x'))");
run('subscribe', $url, 'p', 'leased', '--exec', 'true');
($code) = run('work', $url, '--drain');
ok($code == 0 && sql('SELECT count(*) FROM leased') == 0, 'a program that does not read its input is no harm');
sql("INSERT INTO leased (payload) VALUES (printf('%.*c', 3000000, 'x'))");
run('subscribe', $url, 'p', 'leased', '--exec', '[ $(wc -c) = 3000000 ]');
run('work', $url, '--drain');
is(sql('SELECT count(*) FROM leased'), 0, 'and one that does gets all of it');
sql("INSERT INTO leased (payload) VALUES ('slow')");
run('subscribe', $url, 'p', 'leased', '--exec', 'sleep 600 & sleep 600', '--timeout', '200ms', '--retry-delay', '1h');
run('work', $url, '--drain');
like(sql('SELECT message FROM ruststream_failure ORDER BY number DESC LIMIT 1'), qr/cancelled after its timeout of 200 ms/, 'a program past its timeout is killed, its children with it');

# -------------------------------------------------------------------- decoding

sql("DELETE FROM leased; DELETE FROM ruststream_failure; INSERT INTO leased (payload) VALUES ('{\"a\": 1}'), ('{no'), (NULL), (x'ff')");
run('subscribe', $url, 'p', 'leased', '--handler', 'INSERT INTO effect (id) VALUES (:id)', '--decode', 'json', '--retry-delay', '1h');
sql('DELETE FROM effect');
run('work', $url, '--drain');
is(sql('SELECT group_concat(id) FROM effect'), 1, 'only what decodes is handled');
is(sql('SELECT count(*) FROM leased WHERE retry_after IS NOT NULL'), 3, 'and nothing else is thrown away');
like(sql('SELECT message FROM ruststream_failure'), qr/^the payload is not JSON.*\nthe payload is NULL\nthe payload is not UTF-8$/, 'why is recorded');

# -------------------------------------------------------- one file, two names

new_database();
my $file = $url =~ s/^sqlite://r;
run('subscribe', $url, 'k', 'keyed', '--handler', 'INSERT INTO effect (id) VALUES (:id)');
sql("INSERT INTO keyed (payload) VALUES ('a')");
link($file, "$file.link") or die "link: $!";
($code, $out, $err) = run('work', "$url.link", '--drain');
ok($code == 4 && $err =~ /has more than one name/, 'keys are not kept of a file with hard links');
unlink "$file.link";
symlink($file, "$file.link") or die "symlink: $!";
is((run('work', "$url.link", '--drain'))[0], 0, '.. but by way of a symbolic one');
unlink "$file.link";

# -------------------------------------------------------------------- stopping

new_database();
my $path = $url =~ s/^sqlite://r;
run('subscribe', $url, 's', 'leased', '--exec',
	qq{sqlite3 -cmd ".timeout 10000" $path "INSERT INTO effect (id) VALUES (\$RUSTSTREAM_ID)"; until [ -e $path-go ]; do sleep 0.05; done});
sql("INSERT INTO leased (payload) VALUES ('a'), ('b')");
my $worker = start({}, 'work', $url);
ok(wait_for('SELECT count(*) FROM effect', 1), 'a worker works');
kill 'TERM', $worker->{pid};
ok(said($worker, qr/stopping/), 'SIGTERM is told of');
open(my $go, '>', "$path-go") or die;
close $go;
($code, $out, $err) = finish($worker);
is($code, 0, 'SIGTERM is an orderly end');
is(sql('SELECT count(*) || locked_until IS NULL FROM leased'), 1, 'what runs is let finish, nothing more is claimed') or diag($err);
is(sql('SELECT count(*) FROM ruststream_worker'), 0, 'the worker is gone from the list');

unlink "$path-go";
$worker = start({}, 'work', $url, '--drain', '--progress');
ok(said($worker, qr/0 delivered so far, 0 failed/), 'a drain says how far it is');
open($go, '>', "$path-go") or die;
close $go;
($code, $out, $err) = finish($worker);
ok($code == 0 && $err =~ /delivered 1, of which 0 failed/, '.. and what it came to') or diag($err);
sql("INSERT INTO leased (payload) VALUES ('b')");

run('subscribe', $url, 's', 'leased', '--exec', 'sleep 600');
$worker = start({}, 'work', $url, '--grace', '100ms');
ok(wait_for('SELECT count(*) FROM leased WHERE locked_until IS NOT NULL', 1), 'a handler that takes its time');
kill 'INT', $worker->{pid};
($code, $out, $err) = finish($worker);
like($err, qr/released row \d \(attempt 1\)/, 'past the grace period its row is released, and that is told');
is(sql('SELECT attempt || ifnull(locked_until, 0) FROM leased'), '20', 'guarded, its attempt counted');
is(sql('SELECT count(*) FROM ruststream_failure'), 0, 'and it is no failure');

# -------------------------------------------------- what handlers may leave

new_database();
for my $setting ('busy_timeout = 0', 'query_only = on', 'locking_mode = exclusive', 'foreign_keys(off)')
{
	sql("DELETE FROM ruststream_failure; DELETE FROM leased; INSERT INTO leased (payload) VALUES ('a')");
	run('subscribe', $url, 's', 'leased', '--handler', "INSERT INTO effect (id) VALUES (:id); PRAGMA $setting", '--retry-delay', '1h');
	run('work', $url, '--drain');
	like(sql('SELECT message FROM ruststream_failure'), qr/must not change the settings/, "a handler that sets $setting fails");
}
is(sql('SELECT count(*) FROM effect'), 0, '.. without an effect');
sql('DELETE FROM leased');
run('subscribe', $url, 's', 'leased', '--handler', 'INSERT INTO effect (id) VALUES (:id); PRAGMA query_only; CREATE TEMP TABLE IF NOT EXISTS ruststream_subscription (x)', '--poll-interval', '50ms');
$worker = start({}, 'work', $url);
sql("INSERT INTO leased (payload) VALUES ('a')");
ok(wait_for('SELECT count(*) FROM effect', 1), 'a handler that hides our tables from its connection works');
ok(said($worker, qr/no such column/), '.. until they are needed');
sql("INSERT INTO leased (payload) VALUES ('b')");
ok(wait_for('SELECT count(*) FROM effect', 2), '.. and then through another one');
kill 'TERM', $worker->{pid};
is((finish($worker))[0], 0, '.. and ends in order');

# ----------------------------------------------------- changes while it works

new_database();
run('subscribe', $url, 's', 'leased', '--handler', "INSERT INTO effect (id, attempt) VALUES (:id, 1)", '--poll-interval', '50ms');
$worker = start({}, 'work', $url);
ok(wait_for("SELECT state FROM ruststream_status", 'running'), 'status knows of the worker');
sql("INSERT INTO leased (payload) VALUES ('a')");
ok(wait_for('SELECT count(*) FROM effect', 1), 'it delivers');
run('subscribe', $url, 's', 'leased', '--handler', "INSERT INTO effect (id, attempt) VALUES (:id, 2)", '--poll-interval', '50ms');
my $rounds = 0;
do
{
	sql("INSERT INTO leased (payload) VALUES ('b')");
	wait_for('SELECT count(*) FROM leased', 0);
} until (sql('SELECT max(attempt) FROM effect') == 2 || $rounds++ > 600);
is(sql('SELECT max(attempt) FROM effect'), 2, 'another handler is taken up');
sql('ALTER TABLE leased RENAME TO away');
ok(wait_for("SELECT state LIKE 'broken: %' FROM ruststream_status", 1), 'a broken subscription says so');
sql('ALTER TABLE away RENAME TO leased');
sql("INSERT INTO leased (payload) VALUES ('c')");
ok(wait_for('SELECT count(*) FROM leased', 0), 'and recovers when the cause is mended');

# The database is brought back from a backup, as it were, under a worker that should have been stopped before.
sql(".backup $file.backup");
rename("$file$_", "$file.away$_") for ('', '-wal', '-shm');
rename("$file.backup", $file) or die;
sql("DELETE FROM effect; INSERT INTO leased (payload) VALUES ('d')");
ok(wait_for('SELECT count(*) FROM effect', 1), 'the file that has the name now is the one that is served');
rename($file, "$file.away");
ok(said($worker, qr/unable to open database file/), '.. and none where there is none');
rename("$file.away", $file);
sql("INSERT INTO leased (payload) VALUES ('e')");
ok(wait_for('SELECT count(*) FROM effect', 2), '.. and it again when it is back');
kill 'TERM', $worker->{pid};
is((finish($worker))[0], 0, 'and ends in order');

done_testing();
