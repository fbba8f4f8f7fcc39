# MySQL and MariaDB, on a private MariaDB server: what the conformance suite does not see.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use ClientTest qw(run start finish said program);
use File::Temp qw(tempdir);
use MysqlServer;
use Test::More;
use Time::HiRes qw(sleep time);

my $missing = MysqlServer::missing();
plan skip_all => $missing if $missing;
plan skip_all => 'this build does not serve MySQL' unless `@{[program()]} --version` =~ /\bmysql\b/;

my $server = MysqlServer->new;
my $url = $server->url;
my ($code, $out, $err);

sub sql { return $server->sql(@_); }

# Workers that go on until they are told to end.
my %working;

sub start_worker
{
	my $worker = start({}, 'work', $url, @_);
	$working{ $worker->{pid} } = 1;
	return $worker;
}

# End it; what finish says of it.
sub stop_worker
{
	my ($worker) = @_;
	kill 'TERM', $worker->{pid};
	delete $working{ $worker->{pid} };
	return finish($worker);
}

END { kill 'KILL', keys %working; }

# Poll until SQL answers what is wanted, for a minute at the most.
sub wait_for
{
	my ($text, $wanted) = @_;
	my $until = time() + 60;
	while (time() < $until)
	{
		return 1 if sql($text) eq $wanted;
		sleep 0.11; # InnoDB tells of its transactions no more often
	}
	diag("waited for \"$wanted\", found \"" . sql($text) . '"');
	return 0;
}

# A command that must go well.
sub must
{
	my ($status, $text, $wrong) = run(@_);
	die "@_: $wrong" if $status != 0;
	return $text;
}

my %FORM = (row_lock => [], lease => [qw(--locked-until locked_until)], advisory_lock => [qw(--lock-key key-{id})]);

# An empty database with a queue of a form, and a table for what handlers write.
sub new_queue
{
	my ($form, @options) = @_;
	sql('DROP DATABASE IF EXISTS app; CREATE DATABASE app', '');
	sql('CREATE TABLE jobs (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, group_name VARCHAR(50) NOT NULL DEFAULT \'s\', priority INT,'
		  . ' account VARCHAR(50), retry_after DATETIME(6), attempt INT, locked_until DATETIME, payload LONGTEXT);'
		  . 'CREATE TABLE effect (number BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, id BIGINT, attempt INT, at DATETIME(6), ended DATETIME(6));'
		  . 'CREATE TABLE other (id INT NOT NULL PRIMARY KEY, n INT NOT NULL DEFAULT 0); INSERT INTO other (id) SELECT seq FROM seq_1_to_100');
	must('install', $url);
	must('describe', $url, 'jobs', qw(--id id --payload payload --attempt attempt --create-index), @{ $FORM{$form} }, @options);
	return;
}

sub subscribe
{
	my ($handler, @options) = @_;
	must('subscribe', $url, 's', 'jobs', '--handler', $handler, '--poll-interval', '20ms', @options);
	return;
}

my $EFFECT = 'INSERT INTO effect (id, attempt) VALUES (:id, :attempt)';
my $LEFT = 'SELECT CONCAT((SELECT COUNT(*) FROM jobs), (SELECT COUNT(*) FROM effect))';

sub left { return sql($LEFT); }
sub work { return run('work', $url, '--drain', @_); }

# ------------------------------------------------------------ connections

for my $case (
	['mysql://root@/?socket=' . $server->socket, 2, 'the URL names no database'],
	["$url&speed=fast", 2, 'unknown parameter "speed"'],
	["$url&tls=maybe", 2, 'parameter "tls" cannot be "maybe"'],
	["$url&tls=on", 5, 'is not encrypted'],
	['mysql://root@/nowhere?socket=' . $server->socket, 5, "Unknown database 'nowhere'"],
	['mysql://root@/app?socket=/nonexistent', 5, "Can't connect"],
	['mysql://nobody:s3cret@/app?socket=' . $server->socket, 5, 'Access denied'],
	['mysql://nobody:s3cret@/app?socket=' . $server->socket, 5, 'hint: The password is the URL'])
{
	($code, $out, $err) = run('status', $case->[0]);
	ok($code == $case->[1] && index($err, $case->[2]) >= 0, "refused: $case->[2]") or diag("$code: $err");
	unlike($err, qr/s3cret/, '.. without the password');
}

($code, $out, $err) = run('status', $url);
ok($code == 5 && $err =~ /no tables of ruststream yet/, 'a database without our tables');
sql(q{CREATE USER clerk IDENTIFIED BY 's3:cr@t'; GRANT ALL ON app.* TO clerk});
{
	local $ENV{RUSTSTREAM_PASSWORD} = 's3:cr@t';
	like((run('status', $server->url('clerk')))[2], qr/no tables of ruststream yet/, 'a password from the environment');
}
my $file = tempdir(CLEANUP => 1) . '/url';
open(my $secret, '>', $file) or die;
print $secret $server->url('clerk:s3%3Acr%40t'), "\n";
close $secret;
like((run('status', "\@$file"))[2], qr/no tables of ruststream yet/, '.. or from a file');

# ----------------------------------------------------- what cannot be a queue

new_queue('row_lock');
must('install', $url);
sql('CREATE TABLE files (id INT PRIMARY KEY) ENGINE = MyISAM; CREATE VIEW view AS SELECT id FROM jobs;'
	  . 'CREATE TABLE odd (id DOUBLE PRIMARY KEY, text_id VARCHAR(10), late VARCHAR(20), number DECIMAL(10), UNIQUE (text_id(5)), KEY (number))');
for my $case (
	['nothing', ['--id', 'id'], 3, 'no table "nothing"'],
	['files', ['--id', 'id'], 4, 'engine MyISAM'],
	['view', ['--id', 'id'], 4, 'is a view'],
	['jobs', ['--id', 'ID'], 4, 'no column "ID"'],
	['jobs', ['--id', 'attempt'], 4, 'not unique by itself'],
	['odd', ['--id', 'id'], 4, 'of type double cannot be'],
	['odd', ['--id', 'text_id'], 4, 'not unique by itself'],
	['jobs', ['--id', 'id', '--retry-after', 'payload'], 4, 'of type longtext cannot be'],
	['jobs', ['--id', 'id', '--lock-key', 'x-{retry_after}'], 4, 'cannot be part of a lock key'],
	['jobs', ['--id', 'id', '--mode', 'immediate'], 4, 'only SQLite has transaction modes'],
	['jobs', ['--id', 'id', '--group', 'group_name', '--fifo', '--isolation', 'serializable'], 4, 'cannot be served at serializable'])
{
	($code, $out, $err) = run('describe', $url, $case->[0], @{ $case->[1] });
	ok($code == $case->[2] && index($err, $case->[3]) >= 0, "refused: $case->[3]") or diag("$code: $err");
}

($code, $out, $err) = run('describe', $url, 'jobs', qw(--id id --group group_name --retry-after retry_after --priority priority));
my ($index) = $err =~ /(CREATE INDEX .*\))/;
is($index, 'CREATE INDEX `ruststream_claim` ON `app`.`jobs` (`group_name`, `priority`, `retry_after`, `id`)', 'a missing index is told');
($code, $out, $err) = run('subscribe', $url, 's', 'jobs', '--handler', $EFFECT);
ok($code == 4 && index($err, $index) >= 0, 'and keeps from subscribing');
sql('CREATE INDEX wrong_way ON jobs (group_name, priority DESC, retry_after, id); CREATE INDEX too_short ON jobs (group_name, priority)')
  if sql('SELECT VERSION() NOT LIKE "10.6%"');
is((run('subscribe', $url, 's', 'jobs', '--handler', $EFFECT))[0], 4, 'as do others');
sql('CREATE INDEX ours ON jobs (group_name, priority, retry_after)');
is((run('subscribe', $url, 's', 'jobs', '--handler', $EFFECT))[0], 0, 'the primary key need not be named in it');
sql("INSERT INTO jobs (payload) VALUES ('x')");
work();
is(left(), '01', 'and it is used');

# ------------------------------------------------------------------ handlers

new_queue('row_lock', qw(--retry-after retry_after));
sql(<<'SQL');
DELIMITER //
CREATE PROCEDURE nothing () BEGIN END//
CREATE PROCEDURE strange (IN id BIGINT, IN colour TEXT) BEGIN END//
CREATE PROCEDURE talks (IN payload LONGTEXT, IN id BIGINT, IN attempt INT, IN headers TEXT)
BEGIN
	DECLARE n INT DEFAULT 0;
	SELECT seq, REPEAT('x', 500) FROM seq_1_to_2000;
	WHILE n < 5 DO SELECT n; SET n = n + 1; END WHILE;
	INSERT INTO effect (id, attempt) VALUES (id, attempt);
	SELECT 1 WHERE FALSE;
	SELECT payload, id, NOW(6), 1.5e0, 2.5, NULL, x'00ff';
END//
CREATE PROCEDURE fails_late ()
BEGIN
	SELECT seq FROM seq_1_to_1000;
	INSERT INTO effect (id) VALUES (0);
	SELECT (SELECT seq FROM seq_1_to_2 WHERE seq <= s.seq) FROM seq_1_to_2 AS s;
END//
CREATE PROCEDURE commits (IN id BIGINT) BEGIN INSERT INTO effect (id) VALUES (id); COMMIT; END//
CREATE PROCEDURE begins (IN id BIGINT) BEGIN COMMIT; START TRANSACTION; INSERT INTO effect (id) VALUES (id); END//
CREATE PROCEDURE spoils (IN id BIGINT)
BEGIN
	SET SESSION time_zone = '+05:00', sql_mode = 'ANSI_QUOTES', autocommit = 0, timestamp = 1;
	SET NAMES latin1;
	SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE;
	SET SESSION TRANSACTION READ ONLY;
	SET SESSION foreign_key_checks = 0, sql_safe_updates = 1;
	INSERT INTO effect (id, attempt) VALUES (id, 1);
END//
CREATE PROCEDURE answers (IN payload TEXT, OUT outcome TEXT, OUT delay DECIMAL(10, 3), OUT reason TEXT)
BEGIN
	SET outcome = payload, reason = 'because';
	IF payload = 'retry_after' THEN SET delay = 3600.5; END IF;
END//
DELIMITER ;
SQL
for my $case (
	['absent', 'there is no procedure "absent"'],
	['strange', 'nothing is known for parameter "colour"'],
	['INSERT INTO nowhere VALUES (:id)', "doesn't exist"],
	['SELECT :who', 'the handler names ":who"'],
	[" ; -- nothing\n", 'the handler is empty'],
	['SELECT FROM', 'error in your SQL syntax'])
{
	($code, $out, $err) = run('subscribe', $url, 's', 'jobs', '--handler', $case->[0]);
	ok($code == 4 && index($err, $case->[1]) >= 0, "refused: $case->[1]") or diag("$code: $err");
}

# Of one row with this handler: its exit code and messages.
sub deliver_one
{
	my ($handler, $payload) = @_;
	sql("DELETE FROM jobs; DELETE FROM effect; DELETE FROM ruststream_failure; INSERT INTO jobs (payload) VALUES ('" . ($payload // 'x') . "')");
	subscribe($handler);
	return work();
}

deliver_one('nothing');
is(left(), '00', 'a procedure without parameters');
deliver_one('app.talks');
is(left(), '01', 'one that returns all kinds of result sets');
deliver_one('`app`.`talks`');
is(left(), '01', '.. its name quoted');
deliver_one('CALL talks(:payload, :id, :attempt, :headers)');
is(left(), '01', '.. called by SQL');
deliver_one('fails_late');
is(left(), '10', 'one that fails behind its first results has failed');
like(sql('SELECT message FROM ruststream_failure'), qr/Subquery returns more than 1 row/, '.. and its message is kept');
for my $procedure (qw(commits begins))
{
	deliver_one($procedure);
	is(sql('SELECT COUNT(*) FROM jobs'), 1, "one that $procedure a transaction has failed");
	like(sql('SELECT message FROM ruststream_failure'), qr/has ended its delivery's transaction/, '.. and is told why');
}
deliver_one("INSERT INTO effect (id) VALUES (:id); -- it's :not; one\nINSERT INTO effect (id, attempt) SELECT :id, LENGTH(';:x') /* ; */ FROM DUAL WHERE ':' = \":\" AND '\\';' <> `x`.`a;b` ;");
is(left(), '10', 'statements are told apart');
deliver_one("INSERT INTO effect (id) VALUES (:id); -- it's :not; one\nINSERT INTO effect (id, attempt) SELECT :id, LENGTH(';:x') /* ; */ FROM DUAL WHERE ':' = \":\" AND '\\';' <> ';' # :no\n;");
is(left(), '02', '.. in quotes and comments, too') or diag(sql('SELECT message FROM ruststream_failure'));

sql("DELETE FROM jobs; DELETE FROM effect; INSERT INTO jobs (payload) VALUES ('a'), ('b')");
subscribe('spoils');
work();
is(left(), '02', 'a handler that changes the settings of its session');
sql("INSERT INTO jobs (payload) VALUES ('c')");
($code, $out, $err) = finish(start({}, 'work', $url, '--drain'));
is(left(), '03', '.. spoils nothing');
for my $limit ('sql_select_limit = 0', $server->is_mariadb ? 'max_statement_time = 0.000001' : 'max_execution_time = 1')
{
	sql("DELETE FROM effect; INSERT INTO jobs (payload) VALUES ('a'), ('b')");
	subscribe("$EFFECT; SET \@ruststream_outcome = 'discard', SESSION $limit");
	work();
	is(left(), '00', ".. nor does one that limits what its session may do, by $limit: it has answered");
}

for my $case (['ack', 0], ['discard', 0], ['retry_after', 1], ['dead_letter', 1], ['undecodable', 1], ['whatever', 1])
{
	($code, $out, $err) = deliver_one('answers', $case->[0]);
	is(sql('SELECT COUNT(*) FROM jobs'), $case->[1], "the answer $case->[0]");
}
like($err, qr/answered "whatever", which is no outcome/, '.. which is told');
deliver_one('answers', 'retry_after');
is(sql('SELECT retry_after > UTC_TIMESTAMP() + INTERVAL 3590 SECOND AND retry_after < UTC_TIMESTAMP() + INTERVAL 3610 SECOND FROM jobs'), 1,
	'a delay in seconds');
is(sql('SELECT message FROM ruststream_failure'), 'because', 'and a reason');
deliver_one("SELECT 'retry_after', 'x' INTO \@ruststream_outcome, \@x; SET \@ruststream_delay = -1");
like(sql('SELECT message FROM ruststream_failure'), qr/negative delay/, 'a negative delay is a failure');
deliver_one("SET \@ruststream_outcome = 'retry_after', \@ruststream_delay = 'soon'");
like(sql('SELECT message FROM ruststream_failure'), qr/what is none/, '.. and so is one that is no number');
deliver_one("SET \@ruststream_outcome = 'retry_after', \@ruststream_delay = '3.6e3'");
is(sql('SELECT retry_after > UTC_TIMESTAMP() + INTERVAL 3590 SECOND FROM jobs'), 1, '.. unlike a text that is one');
sql("DELETE FROM jobs; INSERT INTO jobs (payload) VALUES ('first'), ('second')");
subscribe("SET \@ruststream_outcome = IF(:payload = 'first', 'discard', \@ruststream_outcome); SELECT IF(:payload = 'first', (SELECT 1 UNION SELECT 2), 1)");
work();
is(sql('SELECT payload FROM jobs'), 'first', "what a failed handler had answered is not the next one's answer");

# A handler of a subscription that is not transactional is in no transaction of ours.
new_queue('lease', qw(--retry-after retry_after));
sql("INSERT INTO jobs (payload) VALUES ('x')");
subscribe('START TRANSACTION; ' . $EFFECT, qw(--transactional off));
work();
is(left(), '10', 'a transaction that is left open is undone');
like(sql('SELECT message FROM ruststream_failure'), qr/left a transaction open/, '.. and a failure');
sql('UPDATE jobs SET retry_after = NULL');
subscribe("$EFFECT; SET \@ruststream_outcome = 'discard'", qw(--transactional off));
work();
is(left(), '01', 'otherwise its writes are kept whatever it answers');
sql("DELETE FROM effect; INSERT INTO jobs (payload) VALUES ('a'), ('b')");
subscribe("$EFFECT; SET TRANSACTION READ ONLY", '--transactional', 'off');
work();
is(left(), '02', 'and what it says of the next transaction is not meant for ours');

# What is said of an outcome or an error may be anything, and is kept: cut to fit, and as UTF-8.
must('subscribe', $url, 's', 'jobs', '--exec', q{printf '\377why'; exit 12});
sql("DELETE FROM ruststream_failure; INSERT INTO jobs (payload) VALUES ('x')");
work();
is(sql('SELECT COUNT(*), (SELECT message FROM ruststream_failure) FROM jobs'), '0 ?why', 'a program that says something that is no text');
subscribe("SET \@ruststream_outcome = 'discard', \@ruststream_reason = REPEAT('é', 600)");
sql("DELETE FROM ruststream_failure; INSERT INTO jobs (payload) VALUES ('x')");
work();
is(sql("SELECT COUNT(*), (SELECT message = REPEAT('é', 511) FROM ruststream_failure) FROM jobs"), '0 1', '.. and a reason that is cut inside a character');

# ------------------------------------------------------- isolation and locks

new_queue('row_lock', qw(--retry-after retry_after --priority priority));
sql("INSERT INTO jobs (payload) VALUES ('a'), ('b'), ('c')");
subscribe("$EFFECT; DO SLEEP(IF(:payload = 'a', 30, 0))");
my $worker = start({}, 'work', $url, '--drain');
ok(wait_for("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE INFO LIKE '%SLEEP(IF%' AND STATE = 'User sleep'", 1), 'a handler is at work');
is(sql("SET innodb_lock_wait_timeout = 1; INSERT INTO jobs (payload) VALUES ('d'), ('e'); SELECT GROUP_CONCAT(payload) FROM jobs WHERE id > 1"), 'b,c,d,e',
	'inserts do not wait for it');
is(sql('SELECT payload FROM jobs ORDER BY id FOR UPDATE SKIP LOCKED'), "b\nc\nd\ne", 'and it has locked its row and no other');
kill 'KILL', $worker->{pid};
finish($worker);
ok(wait_for('SELECT COUNT(*) FROM (SELECT id FROM jobs FOR UPDATE SKIP LOCKED) AS x', 5), 'a worker that is killed lets it go');
is(sql('SELECT COUNT(*) FROM effect'), 0, '.. without an effect');

my $checks_snapshot = $server->checks_snapshot;

for my $level ('read uncommitted', 'read committed', 'repeatable read', 'serializable')
{
	for my $form (sort keys %FORM)
	{
		new_queue($form, qw(--retry-after retry_after --priority priority --isolation), $level);
		sql("INSERT INTO jobs (payload, priority) VALUES ('a', 2), ('b', 1), ('c', NULL)");
		# The variable is the session's; which level the transaction has InnoDB knows.
		my @handler = ('--handler', "UPDATE other SET n = n + 1 WHERE id = 1; INSERT INTO effect (id, attempt) SELECT :id, COUNT(*) FROM information_schema.INNODB_TRX "
			  . "WHERE trx_mysql_thread_id = CONNECTION_ID() AND LOWER(trx_isolation_level) = '$level'");
		($code, $out, $err) = run('subscribe', $url, 's', 'jobs', @handler);
		if ($form eq 'lease' && $level =~ /repeatable|serializable/ && $checks_snapshot eq 'ON')
		{
			ok($code == 4 && $err =~ /lease cannot be served in transactions at $level/, "$form at $level: refused");
			next;
		}
		work();
		is(sql('SELECT GROUP_CONCAT(id ORDER BY number), SUM(attempt) FROM effect'), '3,2,1 3', "$form at $level") or diag($err);
	}
}

SKIP:
{
	skip 'the server has no innodb_snapshot_isolation', 5 unless $checks_snapshot;
	new_queue('lease', '--isolation', 'repeatable read');
	sql("SET GLOBAL innodb_snapshot_isolation = OFF; INSERT INTO jobs (payload) VALUES ('x')");
	is((run('subscribe', $url, 's', 'jobs', '--handler', $EFFECT))[0], 0, 'a lease at repeatable read');
	sql('SET GLOBAL innodb_snapshot_isolation = ON');
	($code, $out, $err) = work();
	ok($code != 0 && $err =~ /lease cannot be served in transactions at repeatable read/, '.. is not served where it could not be settled');
	is(left(), '10', '.. and its row stays');
	($code, $out, $err) = run('subscribe', $url, 's', 'jobs', '--handler', $EFFECT);
	ok($code == 4 && $err =~ /innodb_snapshot_isolation/, '.. nor subscribed to');
	is((run('subscribe', $url, 's', 'jobs', '--handler', $EFFECT, qw(--transactional off)))[0], 0, '.. but for a subscription without transactions');
	sql("SET GLOBAL innodb_snapshot_isolation = $checks_snapshot");
}

# ------------------------------------------------------- transient failures

new_queue('row_lock');
sql("INSERT INTO jobs (payload) VALUES ('x')");
subscribe("$EFFECT; UPDATE other SET n = n + 1 WHERE id = 1; DO SLEEP(0.2); UPDATE other SET n = n + 1 WHERE id = 2");
my $session = $server->session;
$session->do('START TRANSACTION');
$session->do('UPDATE other SET n = n + 1 WHERE id > 1');
$worker = start({}, 'work', $url, '--drain');
ok(wait_for("SELECT COUNT(*) FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT'", 1), 'a handler waits for a lock');
$session->do('UPDATE other SET n = n + 1 WHERE id = 1');
$session->do('COMMIT');
($code, $out, $err) = finish($worker);
is(left(), '01', 'a deadlock is tried again');
is(sql('SELECT n FROM other WHERE id <= 2'), "2\n2", '.. with one effect');
is(sql('SELECT transient > 0, failed FROM ruststream_counter'), '1 0', '.. and is no failure');

sql('SET GLOBAL innodb_lock_wait_timeout = 1');
sql("INSERT INTO jobs (payload) VALUES ('y')");
subscribe("$EFFECT; UPDATE other SET n = n + 1 WHERE id = 3");
$session->do('START TRANSACTION');
$session->do('UPDATE other SET n = n + 1 WHERE id = 3');
my $transient = sql('SELECT transient FROM ruststream_counter');
$worker = start_worker();
ok(wait_for("SELECT transient > $transient FROM ruststream_counter", 1), 'a lock that is waited for too long is transient');
$session->do('COMMIT');
ok(wait_for($LEFT, '02'), '.. and tried again');
stop_worker($worker);
$session->do('START TRANSACTION');
$session->do('UPDATE other SET n = n + 1 WHERE id = 4');
sql("INSERT INTO jobs (payload) VALUES ('z')");
subscribe('UPDATE other SET n = n + 1 WHERE id = 4', '--retry-delay', '1h');
$worker = start_worker();
ok(wait_for("SELECT COUNT(*) FROM ruststream_failure WHERE message LIKE 'Lock wait timeout%'", 1), '.. ten times, and then it is a failure');
stop_worker($worker);
$session->do('ROLLBACK');
is(sql('SELECT COUNT(*), MAX(attempt) FROM jobs'), '1 2', '.. which is settled as one');
sql('SET GLOBAL innodb_lock_wait_timeout = 50');

# ------------------------------------------------------- connections that end

for my $form (sort keys %FORM)
{
	new_queue($form);
	sql("INSERT INTO jobs (payload) VALUES ('x')");
	subscribe("$EFFECT; SELECT SLEEP(IF(:attempt = 1 AND (SELECT n = 0 FROM other WHERE id = 1), 30, 0))");
	$worker = start_worker('--trace');
	ok(wait_for("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE INFO LIKE '%SLEEP(IF%' AND STATE = 'User sleep'", 1), "$form: a handler is at work");
	sql('UPDATE other SET n = 1 WHERE id = 1');
	sql('KILL CONNECTION ' . sql("SELECT ID FROM information_schema.PROCESSLIST WHERE STATE = 'User sleep'"));
	ok(wait_for($LEFT, '01'), '.. its connection is killed, and it is delivered again with one effect');
	is((stop_worker($worker))[0], 0, '.. and the worker ends in order');
}

new_queue('lease');
subscribe($EFFECT);
$worker = start_worker();
sql("INSERT INTO jobs (payload) VALUES ('x')");
ok(wait_for($LEFT, '01'), 'a worker is at work');
$server->stop('KILL');
$server->start;
sql("INSERT INTO jobs (payload) VALUES ('y')");
ok(wait_for($LEFT, '02'), 'a server that crashes and comes back is found again');
stop_worker($worker);

# ------------------------------------------------------------------- leases

new_queue('lease', qw(--retry-after retry_after));
sql("INSERT INTO jobs (payload) VALUES ('x')");
subscribe("$EFFECT; DO SLEEP(30)", '--timeout', '500ms', '--retry-delay', '1h');
($code, $out, $err) = work();
like($err, qr/cancelled after its timeout of 500 ms/, 'a handler is cancelled after its timeout');
is(left(), '10', '.. without an effect');

sql('DELETE FROM jobs; DELETE FROM effect');
sql("INSERT INTO jobs (payload) VALUES ('x')");
subscribe("$EFFECT; DO SLEEP(3)", '--lease', '1s');
my @workers = map { start_worker() } 1 .. 2;
ok(wait_for($LEFT, '01'), 'a handler outlives its lease, which is extended');
is(sql('SELECT attempt FROM effect'), 1, '.. and nobody else took the row');
stop_worker($_) for @workers;

sql("DELETE FROM effect; INSERT INTO jobs (payload) VALUES ('x')");
@workers = (start_worker());
ok(wait_for("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = 'app' AND COMMAND = 'Sleep'", 1), 'a lease is extended by another connection');
ok(wait_for($LEFT, '01'), '.. until the handler ends');
my $other = sql("SELECT MAX(ID) FROM information_schema.PROCESSLIST WHERE DB = 'app' AND ID <> CONNECTION_ID()");
sql("KILL CONNECTION $other; INSERT INTO jobs (payload) VALUES ('x')");
ok(wait_for("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE = 'User sleep'", 1), 'that one is lost between two handlers');
push @workers, start_worker();
ok(wait_for($LEFT, '02'), '.. and made anew');
is(sql('SELECT GROUP_CONCAT(attempt) FROM effect'), '1,1', '.. in time');
stop_worker($_) for @workers;

sql('DELETE FROM effect');
sql("INSERT INTO jobs (payload) VALUES ('x')");
subscribe("$EFFECT; DO SLEEP(1)", '--retry-delay', '100ms');
$worker = start({}, 'work', $url, '--drain', '--trace');
ok(wait_for("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE = 'User sleep'", 1), 'while a handler works');
sql("UPDATE jobs SET locked_until = locked_until + INTERVAL 1 HOUR");
($code, $out, $err) = finish($worker);
like($out, qr/SETTLE ack\nROLLBACK\nLEASE LOST\n/, 'another takes its row: the lease is lost');
is(left(), '10', '.. and so are its writes');
is(sql('SELECT locked_until > UTC_TIMESTAMP() + INTERVAL 1 HOUR FROM jobs'), 1, ".. and the other's lease is untouched");
is(sql('SELECT lease_lost FROM ruststream_counter'), 1, '.. and it is counted');

# A server that does not answer is no reason to stay.
sql("DELETE FROM effect; DELETE FROM jobs; INSERT INTO jobs (payload) VALUES ('x')");
subscribe("DO SLEEP(600)");
$worker = start_worker(qw(--grace 100ms));
ok(wait_for("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE = 'User sleep'", 1), 'while a handler works');
kill 'STOP', $server->{pid};
for (1 .. 600)
{
	kill 'TERM', $worker->{pid};
	last if said($worker, qr/leaving, though not everybody has ended/, 0.1);
}
($code, $out, $err) = finish($worker);
kill 'CONT', $server->{pid};
is($code, 1, '.. its server stops: the worker leaves all the same');
sql("KILL QUERY $_") for split /\n/, sql("SELECT ID FROM information_schema.PROCESSLIST WHERE STATE = 'User sleep'");
is(sql('SELECT COUNT(*) FROM jobs'), 1, '.. and its row is left');

# ----------------------------------------------------------- FIFO and keys

my $TIMED = 'INSERT INTO effect (id, attempt, at) VALUES (:id, :attempt, SYSDATE(6)); DO SLEEP(0.01);'
  . ' UPDATE effect SET ended = SYSDATE(6) WHERE number = LAST_INSERT_ID()';
my $OVERLAP = 'SELECT COUNT(*) FROM effect AS a JOIN effect AS b ON a.number < b.number AND a.at < b.ended AND b.at < a.ended';

# Several processes until the queue is empty.
sub work_together
{
	my ($processes) = @_;
	my @all = map { start_worker() } 1 .. $processes;
	my $emptied = wait_for('SELECT COUNT(*) FROM jobs', 0);
	my @wrong = grep { (stop_worker($_))[0] != 0 } @all;
	return $emptied && !@wrong;
}

for my $form (qw(row_lock lease))
{
	new_queue($form, qw(--group group_name --retry-after retry_after --fifo));
	sql('INSERT INTO jobs (payload) SELECT seq FROM seq_1_to_40');
	subscribe($TIMED, '--workers', 2);
	ok(work_together(2), "$form, fifo: four workers in two processes");
	is(sql("$OVERLAP"), 0, '.. one row at a time');
	is(sql('SELECT GROUP_CONCAT(id ORDER BY at) = GROUP_CONCAT(id ORDER BY id), COUNT(*) FROM effect'), '1 40', '.. in order');

	sql("INSERT INTO jobs (payload) VALUES ('a'), ('b')");
	sql("UPDATE jobs SET retry_after = UTC_TIMESTAMP() + INTERVAL 1 HOUR WHERE payload = 'a'");
	work();
	is(sql('SELECT COUNT(*) FROM jobs'), 1, 'rows that come due earlier go before one that waits');
	$session->close;
	$session = $server->session;
	sql("DELETE FROM jobs; INSERT INTO jobs (payload) VALUES ('a'), ('b')");
	$session->do('START TRANSACTION');
	$session->do("SELECT id FROM jobs WHERE payload = 'b' FOR UPDATE");
	work();
	is(sql('SELECT COUNT(*) FROM jobs'), 2, 'while any row of the group is locked elsewhere none is taken, nor waited for');
	sql('DELETE FROM ruststream_counter');
	my $waiting = start_worker();
	ok(wait_for('SELECT COALESCE(SUM(transient), 0) > 20 FROM ruststream_counter', 1), '.. and who looks again and again');
	is(sql('SELECT state FROM ruststream_status'), 'running', '.. is not broken');
	$session->do('COMMIT');
	ok(wait_for('SELECT COUNT(*) FROM jobs', 0), '.. and goes on');
	unlike((stop_worker($waiting))[2], qr/being claimed/, '.. without a word');
	work();
	is(sql('SELECT COUNT(*) FROM jobs'), 0, '.. and then they are');
}
new_queue('lease', qw(--group group_name --fifo));
sql("INSERT INTO jobs (payload, locked_until) VALUES ('a', NULL), ('b', UTC_TIMESTAMP() + INTERVAL 1 HOUR)");
subscribe($EFFECT);
work();
is(left(), '20', 'nor while any of them holds a live lease');

my $SAME_KEY = '(SELECT account FROM key_of WHERE id = a.id) = (SELECT account FROM key_of WHERE id = b.id)';
for my $form (sort keys %FORM)
{
	for my $level ('read uncommitted', 'read committed', 'repeatable read', 'serializable')
	{
		new_queue($form, qw(--partition-key account --retry-after retry_after --priority priority --isolation), $level);
		sql("INSERT INTO jobs (account, payload, priority) SELECT IF(seq % 6 = 0, NULL, CONCAT('a', seq % 6)), seq, seq % 2 FROM seq_1_to_60");
		subscribe("INSERT INTO other (id, n) SELECT 1000 + :id, COALESCE(MAX(n), 0) FROM other WHERE id = -1; $TIMED", '--workers', 2, '--retry-delay', '10ms');
		sql('CREATE TABLE key_of AS SELECT id, account, priority FROM jobs');
		ok(work_together(2), "$form, partition keys at $level: four workers in two processes");
		is(sql("$OVERLAP AND $SAME_KEY"), 0, '.. rows of one key one at a time');
		is(sql('SELECT COUNT(*) FROM effect AS a JOIN key_of AS k ON k.id = a.id JOIN effect AS b JOIN key_of AS l ON l.id = b.id AND l.account = k.account'
				  . ' WHERE (k.priority, k.id) < (l.priority, l.id) AND a.at > b.at'
				  # After its tenth deadlock in a row a row is delayed, and its key goes on meanwhile.
				  . ' AND NOT EXISTS (SELECT 1 FROM ruststream_failure AS f WHERE f.id = a.id)'), 0, '.. in order');
		is(sql('SELECT COUNT(*), COUNT(DISTINCT id) FROM effect'), '60 60', '.. each of them once');
		cmp_ok(sql($OVERLAP), '>', 0, '.. and different keys side by side');
	}
}

# A key that is let go while candidates are read: its first row was passed over, a later one is found free.  Between
# the two are so many rows of a busy key that the key is let go meanwhile.
for my $form (sort keys %FORM)
{
	new_queue($form, qw(--partition-key account));
	sql("INSERT INTO jobs (account) VALUES ('a'); INSERT INTO jobs (account) SELECT 'busy' FROM seq_1_to_60000; INSERT INTO jobs (account) VALUES ('a')");
	subscribe($EFFECT);
	my ($holder, $other) = ($server->session, $server->session);
	$holder->do("SELECT GET_LOCK('app.app.jobs:key:a', 0)");
	$other->do("SELECT GET_LOCK('app.app.jobs:key:busy', 0)");
	$worker = start_worker();
	# The row in front is passed over as soon as the statement is seen.
	ok(wait_for("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE ID <> CONNECTION_ID() AND INFO LIKE '%IS_FREE_LOCK%'", 1),
		"$form: while candidates are read");
	$holder->do("SELECT RELEASE_LOCK('app.app.jobs:key:a')");
	ok(wait_for('SELECT COUNT(*) FROM effect', 2), '.. their key is let go');
	is(sql('SELECT id FROM effect ORDER BY number LIMIT 1'), 1, '.. and its first row goes first');
	stop_worker($worker);
	$_->close for $holder, $other;
}

# Keys of each type, and what a collation or the length of a lock's name makes of them.
for my $case (
	['BIGINT UNSIGNED', '18446744073709551615', '7'],
	['VARCHAR(30) CHARACTER SET latin1', "'\xc3\xa4'", "'b\\'`'"],
	['VARCHAR(30) COLLATE utf8mb4_general_ci', "'x'", "'x '", "'X'", "'\xc3\xa9'", "'e'", "''"],
	['VARCHAR(200)', "REPEAT('\xc3\xa4', 100)", "REPEAT('\xc3\x84', 100)", "'short'"],
	["ENUM('one', '\xc3\xa4')", "'\xc3\xa4'", "'one'"],
	$server->is_mariadb ? ['UUID', "'00000000-0000-0000-0000-00000000000a'", "'00000000-0000-0000-0000-00000000000b'"] : ())
{
	my ($type, @keys) = @$case;
	for my $form (sort keys %FORM)
	{
		new_queue($form);
		sql("DROP TABLE jobs; CREATE TABLE jobs (id INT NOT NULL AUTO_INCREMENT PRIMARY KEY, line $type, payload TEXT, attempt INT, locked_until DATETIME)");
		must('describe', $url, 'jobs', qw(--id id --payload payload --attempt attempt --partition-key line --create-index), @{ $FORM{$form} });
		sql('INSERT INTO jobs (line) VALUES ' . join(', ', map { "($_), (NULL), ($_)" } @keys));
		sql('CREATE TABLE key_of AS SELECT id, line FROM jobs');
		subscribe($EFFECT, '--workers', 2);
		ok(work_together(1), "$form: keys of type $type");
		is(sql('SELECT COUNT(*), COUNT(DISTINCT id) FROM effect'), join(' ', (3 * @keys) x 2), '.. each row once');
		is(sql('SELECT COUNT(*) FROM effect AS a JOIN key_of AS k ON k.id = a.id JOIN effect AS b JOIN key_of AS l ON l.id = b.id AND CAST(l.line AS BINARY) = CAST(k.line AS BINARY)'
			  . ' WHERE a.id < b.id AND a.number > b.number'), 0, '.. in order');
	}
}

# The first row of a key that somebody else has locked keeps the later ones, and no other key.
for my $form (qw(row_lock lease))
{
	new_queue($form, qw(--partition-key account));
	sql("INSERT INTO jobs (id, account) SELECT seq, 'a' FROM seq_1_to_40; INSERT INTO jobs (id, account) VALUES (41, 'b'), (42, NULL)");
	subscribe($EFFECT);
	my $other = $server->session;
	$other->do('START TRANSACTION');
	$other->do('SELECT id FROM jobs WHERE id IN (1, 42) FOR UPDATE');
	is((work())[0], 0, "$form: the first rows are locked elsewhere");
	is(sql('SELECT GROUP_CONCAT(id) FROM effect'), 41, '.. behind one no other of its key is taken, but others are');
	$other->do('COMMIT');
	work();
	is(sql('SELECT GROUP_CONCAT(id ORDER BY number) = CONCAT(41, ",", GROUP_CONCAT(IF(id = 41, NULL, id) ORDER BY id)), COUNT(*) FROM effect'), '1 42', '.. until they are let go');
	$other->close;
}
# The same of a key of its own, in the advisory lock form.
new_queue('row_lock');
must('describe', $url, 'jobs', qw(--id id --payload payload --attempt attempt --partition-key account --lock-key {payload} --create-index));
sql("INSERT INTO jobs (id, account, payload) SELECT seq, 'a', IF(seq = 1, 'taken', seq) FROM seq_1_to_40; INSERT INTO jobs (id, account, payload) VALUES (41, 'b', 'x')");
subscribe($EFFECT);
$session->do("SELECT GET_LOCK('app.taken', 0)");
is((work())[0], 0, 'advisory_lock: the key of the first row is held elsewhere');
is(sql('SELECT GROUP_CONCAT(id) FROM effect'), 41, '.. behind it no other of its partition key is taken, but others are');
$session->do("SELECT RELEASE_LOCK('app.taken')");
work();
is(sql('SELECT GROUP_CONCAT(id ORDER BY number) = CONCAT(41, ",", GROUP_CONCAT(IF(id = 41, NULL, id) ORDER BY id)), COUNT(*) FROM effect'), '1 41', '.. until it is free');

new_queue('row_lock', qw(--partition-key account));
sql("INSERT INTO jobs (account, payload) VALUES ('a', 'x'), (NULL, 'y')");
subscribe("$EFFECT; SELECT IF(:attempt = 1, RELEASE_ALL_LOCKS(), 0)", '--retry-delay', '10ms');
work();
is(sql('SELECT GROUP_CONCAT(CONCAT(id, attempt) ORDER BY id) FROM effect'), '12,22', 'a handler that lets its partition key go has failed');
is(sql('SELECT COUNT(*) FROM ruststream_failure WHERE message LIKE "%released the lock of its partition key"'), 2, '.. and is told why');

# -------------------------------------------------------------- advisory keys

new_queue('advisory_lock', qw(--lock-key), '{payload}');
subscribe($EFFECT);
my $long = 'k' x 80;
sql("INSERT INTO jobs (payload) VALUES ('one'), ('two'), ('$long')");
$session->do("SELECT GET_LOCK('app.one', 0), GET_LOCK(SHA2('app.$long', 256), 0)");
work();
is(sql('SELECT id FROM jobs'), "1\n3", 'keys that somebody else holds are not taken, a long one by its hash');
$session->do("SELECT RELEASE_ALL_LOCKS()");
work();
is(left(), '03', '.. until they are free');

# Characters that take four bytes, in one of many keys, and in a name that is long by them alone.
my $smile = "\xf0\x9f\x98\x80";
sql("DELETE FROM effect; ALTER TABLE jobs MODIFY payload LONGTEXT CHARACTER SET utf8mb4; INSERT INTO jobs (payload) VALUES ('caf\xc3\xa9'), ('$smile'), ('" . $smile x 64 . "')");
my $name = $server->is_mariadb ? "CONCAT(CONVERT('app.' USING utf8mb4), '$smile')" : "SHA2('app.$smile', 256)";
$session->do("SELECT GET_LOCK($name, 0)");
work();
is(left(), '12', 'keys in any characters');
is(sql("SELECT payload = '$smile' FROM jobs"), 1, '.. under the name that the server takes');
$session->do("SELECT RELEASE_ALL_LOCKS()");
work();
is(left(), '03', '.. each once');
# The database's name is in lower case, which a hash tells apart.
my $shop = $url =~ s{/app\?}{/Shop?}r;
my $long_key = 'k' x 70;
sql('CREATE DATABASE Shop; CREATE TABLE Shop.jobs (id INT NOT NULL PRIMARY KEY); INSERT INTO Shop.jobs VALUES (1)', '');
must('install', $shop);
must('describe', $shop, 'jobs', qw(--id id --lock-key), "$long_key-{id}", '--create-index');
must('subscribe', $shop, 's', 'jobs', '--handler', 'DO 1');
is($session->do("SELECT GET_LOCK(SHA2('shop.$long_key-1', 256), 0)"), 1, 'somebody has a key of another database');
must('work', $shop, '--drain');
is(sql('SELECT COUNT(*) FROM Shop.jobs'), 1, '.. whose name is in lower case in it');
$session->do('SELECT RELEASE_ALL_LOCKS()');
must('work', $shop, '--drain');
is(sql('SELECT COUNT(*) FROM Shop.jobs'), 0, '.. and it is served when that is free');
sql('DROP DATABASE Shop');

new_queue('advisory_lock', qw(--lock-key), '{payload}');
sql("INSERT INTO jobs (payload) VALUES ('mine')");
subscribe("$EFFECT; DO RELEASE_LOCK('app.mine')", '--retry-delay', '1h');
$worker = start_worker();
wait_for('SELECT COUNT(*) FROM ruststream_failure', 1);
($code, $out, $err) = stop_worker($worker);
like($err, qr/the lock on key "mine" was lost/, 'a handler that lets its key go has lost it');
is(left(), '10', '.. and its writes');

# A settlement counts the rows that it finds, though it may write what is there already.
new_queue('advisory_lock', qw(--retry-after retry_after));
sql("CREATE TRIGGER later BEFORE UPDATE ON jobs FOR EACH ROW SET NEW.retry_after = IF(NEW.retry_after IS NULL, NULL, '2099-01-01')");
sql("INSERT INTO jobs (payload) VALUES ('a')");
subscribe("UPDATE jobs SET retry_after = '2098-01-01' WHERE id = :id; SET \@ruststream_outcome = 'retry_after', \@ruststream_delay = 60", '--transactional', 'off');
work();
is(sql('SELECT attempt, retry_after FROM jobs'), '2 2099-01-01 00:00:00.000000', 'a settlement that finds its row, and need not change it');
is(sql('SELECT COUNT(*) FROM ruststream_failure'), 0, '.. is no failure');

# ------------------------------------------------------------- odd ids, held rows

for my $case (
	['BIGINT UNSIGNED', '18446744073709551615', '9223372036854775808', '7'],
	['VARCHAR(30) CHARACTER SET latin1', "'\xc3\xa4'", "'b\\'`'", "'c'"],
	['VARBINARY(10)', "x'00ff'", "x'80'", "x'c3'"],
	# MySQL has no such type.
	$server->is_mariadb ? ['UUID', "'00000000-0000-0000-0000-000000000001'", "'00000000-0000-0000-0000-000000000002'", "'00000000-0000-0000-0000-000000000003'"] : ())
{
	my ($type, @ids) = @$case;
	new_queue('row_lock');
	sql("CREATE TABLE odd (`i``d` $type NOT NULL PRIMARY KEY, word VARCHAR(10), tries INT)");
	must('describe', $url, 'odd', '--id', 'i`d', qw(--payload word --attempt tries --create-index));
	must('subscribe', $url, 'o', 'odd', '--retry-delay', '300ms', '--handler',
		"INSERT INTO effect (id) VALUES (1); SELECT IF(:payload = 'bad' AND :attempt < 3, (SELECT 1 UNION SELECT 2), 1)");
	sql("INSERT INTO odd VALUES ($ids[0], 'bad', NULL), ($ids[1], 'bad', NULL), ($ids[2], 'good', NULL)");
	($code, $out, $err) = work('--trace');
	is(sql('SELECT CONCAT((SELECT COUNT(*) FROM odd), (SELECT COUNT(*) FROM effect), (SELECT COUNT(*) FROM ruststream_failure))'), '034',
		"ids of type $type, some of them left alone for a while") or diag($err);
}

$session->close;
$server->stop;

done_testing();
