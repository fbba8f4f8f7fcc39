# MySQL and MariaDB: what depends on the server: its settings and version, types and collations, accounts and TLS.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use ClientTest qw(run start finish program);
use File::Temp qw(tempdir);
use IO::Socket::UNIX;
use MysqlServer;
use POSIX ();
use Test::More;
use Time::HiRes qw(sleep);

my $missing = MysqlServer::missing();
plan skip_all => $missing if $missing;
plan skip_all => 'this build does not serve MySQL' unless `@{[program()]} --version` =~ /\bmysql\b/;

my ($server, $url, $code, $out, $err);
my %pretending;

END { kill 'KILL', keys %pretending; }

sub sql { return $server->sql(@_); }

# A command that must go well.
sub must
{
	my ($status, $text, $wrong) = run(@_);
	die "@_: $wrong" if $status != 0;
	return $text;
}

my %FORM = (row_lock => [], lease => [qw(--locked-until locked_until)], advisory_lock => [qw(--lock-key key-{account}-{id})]);
my $EFFECT = 'INSERT INTO effect (id, payload, headers) VALUES (:id, :payload, :headers)';
my $LEFT = 'SELECT CONCAT((SELECT COUNT(*) FROM jobs), (SELECT COUNT(*) FROM effect))';

# An empty database with a queue of a form that has every role, and a subscription to its group "s".  Of given
# types; after some SQL.
sub new_queue
{
	my ($form, %given) = @_;
	my $text = $given{text} // 'VARCHAR(50)';
	my $payload = $given{payload} // 'LONGTEXT';
	my @keys = $form eq 'row_lock' ? () : qw(--partition-key account);

	sql('DROP DATABASE IF EXISTS app; CREATE DATABASE app', '');
	sql("CREATE TABLE jobs (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, group_name $text NOT NULL, priority INT, account $text,"
		  . " retry_after DATETIME(6), attempt INT, locked_until DATETIME, headers JSON, payload $payload);"
		  . " CREATE TABLE effect (number BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, id BIGINT, payload $payload, headers JSON)");
	sql($given{after}) if $given{after};
	must('install', $url);
	must('describe', $url, 'jobs', qw(--id id --payload payload --attempt attempt --group group_name --priority priority --retry-after retry_after
		  --headers headers --create-index), @keys, @{ $FORM{$form} });
	must('subscribe', $url, 's', 'jobs', '--handler', $EFFECT);
	return;
}

# A row in a form's queue, of a key where it has keys.
sub publish
{
	my ($form, $payload, $key) = @_;
	must('publish', $url, 'jobs', $payload, '--group', 's', '--headers', '{"a": "b"}', $form eq 'row_lock' ? () : ('--partition-key', $key));
	return;
}

# ------------------------------------------------------- settings of the server

$server = MysqlServer->new(lower_case_table_names => 1);
$url = $server->url;

# What a server may be set to, for sessions that come; each is as unlike ours as can be.
my %settings = (
	autocommit => 'OFF',
	completion_type => "'CHAIN'",
	time_zone => "'+05:00'",
	sql_mode => "'ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES,STRICT_ALL_TABLES,ONLY_FULL_GROUP_BY'",
	character_set_server => "'latin1'",
	$server->is_mariadb ? () : (sql_require_primary_key => 'ON', default_table_encryption => 'OFF', explain_format => "'JSON'"));
my $DEFAULTS = 'SET GLOBAL TRANSACTION ISOLATION LEVEL REPEATABLE READ, ' . join(', ', map { "GLOBAL $_ = DEFAULT" } sort keys %settings);
my $ODD = 'SET ' . join(', ', map { "GLOBAL $_ = $settings{$_}" } sort keys %settings) . '; SET GLOBAL TRANSACTION ISOLATION LEVEL SERIALIZABLE';
$DEFAULTS =~ s/, /; SET /;

for my $form (sort keys %FORM)
{
	new_queue($form, after => $ODD);
	publish($form, 'one', 'k');
	publish($form, 'two', 'k');
	($code, $out, $err) = run('work', $url, '--drain');
	sql($DEFAULTS);
	is(sql("$LEFT; SELECT GROUP_CONCAT(payload ORDER BY number) FROM effect"), "02\none,two", "$form, whatever the server's settings are") or diag($err);
}

# ------------------------------------------------------- types and collations

for my $form (sort keys %FORM)
{
	new_queue($form, payload => 'JSON');
	publish($form, '{"n": 7}', 'k');
	($code, $out, $err) = run('work', $url, '--drain');
	is(sql("$LEFT; SELECT JSON_EXTRACT(payload, '\$.n'), JSON_UNQUOTE(JSON_EXTRACT(headers, '\$.a')) FROM effect"), "01\n7 b", "$form, with a payload of type JSON")
	  or diag($err);
}

my @collations = split /\n/, sql("SELECT CONCAT(CHARACTER_SET_NAME, ' COLLATE ', COLLATION_NAME) FROM information_schema.COLLATIONS WHERE COLLATION_NAME IN"
	  . " ('latin1_swedish_ci', 'utf8mb4_bin', 'utf8mb4_general_ci', 'utf8mb4_0900_ai_ci', 'utf8mb4_0900_as_cs', 'ucs2_general_ci')");
for my $collation (@collations)
{
	for my $form (sort keys %FORM)
	{
		new_queue($form, text => "VARCHAR(50) CHARACTER SET $collation");
		publish($form, $_, "caf\xc3\xa9") for qw(one two);
		($code, $out, $err) = run('work', $url, '--drain');
		is(sql("$LEFT; SELECT GROUP_CONCAT(payload ORDER BY number) FROM effect"), "02\none,two", "$form, $collation") or diag($err);
	}
}

# ------------------------------------------------------------------- indexes

new_queue('lease');
sql('ALTER TABLE jobs ALTER INDEX ruststream_claim ' . ($server->is_mariadb ? 'IGNORED' : 'INVISIBLE'));
($code, $out, $err) = run('subscribe', $url, 's', 'jobs', '--handler', $EFFECT);
ok($code == 4 && $err =~ /CREATE INDEX/, 'an index that the server is told not to use is none') or diag($err);

# ---------------------------------------------------------- transient failures

new_queue('lease');
sql("CREATE TABLE other (id INT NOT NULL PRIMARY KEY); INSERT INTO other VALUES (1)");
must('subscribe', $url, 's', 'jobs', '--handler', "$EFFECT; SELECT id FROM other WHERE id = 1 FOR UPDATE NOWAIT", '--retry-delay', '1h');
publish('lease', 'one', 'k');
my $session = $server->session;
$session->do('START TRANSACTION');
$session->do('SELECT id FROM other FOR UPDATE');
($code, $out, $err) = run('work', $url, '--drain');
is(sql("$LEFT; SELECT transient, failed FROM ruststream_counter"), "10\n10 1", 'a lock that is not waited for is transient, ten times in a row at most') or diag($err);
$session->do('ROLLBACK');

# At repeatable read InnoDB writes to the newest version of a row, or refuses to where innodb_snapshot_isolation is
# on and there is a newer one than the transaction's snapshot.
sub change_meanwhile
{
	my ($form, @options) = @_;
	new_queue($form);
	sql("UPDATE ruststream_queue SET isolation = 'repeatable read'");
	sql('CREATE TABLE other (id INT NOT NULL PRIMARY KEY, n INT NOT NULL); INSERT INTO other VALUES (1, 0)');
	must('subscribe', $url, 's', 'jobs', '--handler', "$EFFECT; SELECT SLEEP(IF(n = 0, 2.2, 0)) FROM other; UPDATE other SET n = n + 1", @options);
	sql("INSERT INTO jobs (group_name, payload) VALUES ('s', 'one')");
	my $worker = start({}, 'work', $url, '--drain');
	for (1 .. 600)
	{
		last if sql("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE = 'User sleep'");
		sleep 0.05;
	}
	sql('UPDATE other SET n = 10');
	($code, $out, $err) = finish($worker);
	return;
}

SKIP:
{
	skip 'the server has no innodb_snapshot_isolation', 2 unless $server->checks_snapshot;
	sql('SET GLOBAL innodb_snapshot_isolation = ON');
	change_meanwhile('row_lock');
	is(sql("$LEFT; SELECT n FROM other"), "01\n11", 'a row changed since the snapshot: delivered again, with one effect') or diag($err);
	is(sql('SELECT transient, failed FROM ruststream_counter'), '1 0', '.. and no failure');
	sql('SET GLOBAL innodb_snapshot_isolation = OFF');
}
change_meanwhile('lease', '--lease', '1s');
is(sql("$LEFT; SELECT n FROM other"), "01\n11", 'otherwise a lease that is extended meanwhile is settled') or diag($err);
is(sql('SELECT transient, failed, lease_lost FROM ruststream_counter'), '0 0 0', '.. at once');
$session->close;
$server->stop;

# ------------------------------------------------------- what a server may not be

$server = MysqlServer->new(log_bin => undef, binlog_format => 'STATEMENT', server_id => 1);
$url = $server->url;
($code, $out, $err) = run('install', $url);
ok($code == 1 && $err =~ /binlog_format is STATEMENT.*Set it to ROW or MIXED/, 'a server that logs statements') or diag($err);
$server->stop;

# A server of this version, which says no more than that: its socket.
sub pretend
{
	my ($version) = @_;
	my $place = tempdir(TMPDIR => 1, CLEANUP => 1);
	my $listening = IO::Socket::UNIX->new(Local => "$place/socket", Listen => 1) or die "socket: $!\n";
	my $packet = sub { return substr(pack('V', length $_[1]), 0, 3) . chr($_[0]) . $_[1]; };

	my $pid = fork() // die "fork: $!\n";
	if ($pid == 0)
	{
		my $client = $listening->accept;
		# The greeting's fields: protocol, version, session, salt, capabilities, character set, status, salt, plug-in.
		syswrite $client, $packet->(0, pack('C Z* V a8 x v C v v C x10 a13 Z*', 10, $version, 1, 'saltsalt', 0x8208, 45, 2, 8, 21,
				"saltsaltsalt\0", 'mysql_native_password'));
		sysread $client, my $answer, 4096;
		syswrite $client, $packet->(2, "\0\0\0\2\0\0\0");
		POSIX::_exit(0);
	}
	$pretending{$pid} = 1;
	return "$place/socket";
}

for my $case (
	['5.5.5-10.5.20-MariaDB', 'MariaDB 10.5.20-MariaDB', 1],
	['10.5.99-MariaDB-log', 'MariaDB 10.5.99', 1],
	['5.5.5-10.6.0-MariaDB', '', 0],
	['11.8.2-MariaDB', '', 0],
	['5.7.44-log', 'MySQL 5.7.44', 1],
	['8.0.0-dmr', 'MySQL 8.0.0', 1],
	['8.0.1', '', 0],
	['9.7.4', '', 0])
{
	my ($version, $name, $refused) = @$case;
	($code, $out, $err) = run('status', 'mysql://root@/app?socket=' . pretend($version));
	# One that is new enough is asked more, and is not there.
	ok($code == 5 && ($refused ? $err =~ /the server is \Q$name\E.*, which cannot skip locked rows\nhint: Use MariaDB 10\.6/ : $err !~ /the server is/),
		"version $version is " . ($refused ? 'refused' : 'new enough')) or diag($err);
}

# ----------------------------------------------------------- accounts and TLS

# Passwords are asked for as the server does it by default: MySQL by caching_sha2_password.
SKIP:
{
	my $place = tempdir(TMPDIR => 1, CLEANUP => 1);
	my ($key, $certificate) = map { "$place/$_.pem" } qw(key certificate);
	skip 'there is no openssl', 11
	  if system("openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=here -addext subjectAltName=IP:127.0.0.1 -keyout $key -out $certificate >/dev/null 2>&1") != 0;
	chmod 0755, $place;
	chmod 0644, $key, $certificate;
	$server = MysqlServer->new(tcp => 1, ssl_key => $key, ssl_cert => $certificate);
	sql("CREATE USER who IDENTIFIED BY 'pass word', bare; GRANT ALL ON app.* TO who, bare");
	my $socket = 'mysql://who:pass%20word@/app?socket=' . $server->socket;
	my $tcp = "mysql://who:pass%20word\@127.0.0.1:$server->{port}/app";
	is((run('install', $socket))[0], 0, 'an account with a password, by socket');
	# Each time as if it were the first: the server remembers whom it has let in.
	for my $case (["$socket&tls=on", 'by socket, encrypted'], [$tcp, 'by TCP'], ["$tcp?tls=on", 'by TCP, encrypted'],
		["$tcp?tls=verify&tls_ca=$certificate", '.. by a certificate that is known'])
	{
		sql('FLUSH PRIVILEGES');
		($code, $out, $err) = run('status', $case->[0]);
		is($code, 0, $case->[1]) or diag($err);
	}
	($code, $out, $err) = run('status', $tcp =~ s/pass%20word/s3cret/r);
	ok($code == 5 && $err =~ /Access denied/ && $err !~ /s3cret/, 'a wrong password');
	# Of 127.0.0.1 libmariadb 3.4 trusts any that it cannot check.
	($code, $out, $err) = run('status', "mysql://bare\@127.0.0.2:$server->{port}/app?tls=verify");
	ok($code == 5 && $err =~ /certificate/, 'a certificate that nobody has signed') or diag($err);
	($code, $out, $err) = run('status', "$tcp?tls=verify&tls_ca=$certificate" =~ s/127\.0\.0\.1/127.0.0.2/r);
	ok($code == 5 && $err =~ /TLS\/SSL error/, 'one of another name') or diag($err);
	# What docs/client.md says that is needed to install, and to work.
	sql("CREATE USER installs, works; GRANT CREATE, DROP, CREATE VIEW, INDEX, REFERENCES, SELECT, INSERT ON other.* TO installs;"
		  . 'GRANT SELECT, INSERT, UPDATE, DELETE ON app.* TO works', '') if sql('CREATE DATABASE other', '') eq '';
	($code, $out, $err) = run('install', 'mysql://installs@/other?socket=' . $server->socket);
	is($code, 0, 'an account that may install') or diag($err);
	$url = $server->url;
	new_queue('lease');
	sql("CREATE PROCEDURE handle (IN id BIGINT, IN payload LONGTEXT) BEGIN INSERT INTO effect (id, payload) VALUES (id, payload); DO SLEEP(IF(payload = 'slow', 30, 0)); END//"
		  =~ s/^/DELIMITER \/\/\n/r . "\nGRANT EXECUTE ON PROCEDURE app.handle TO works//");
	must('subscribe', $url, 's', 'jobs', '--handler', 'handle', '--timeout', '500ms', '--retry-delay', '1h');
	sql("INSERT INTO jobs (group_name, payload) VALUES ('s', 'slow'), ('s', 'quick')");
	($code, $out, $err) = run('work', 'mysql://works@/app?socket=' . $server->socket, '--drain');
	is(sql("$LEFT; SELECT payload FROM effect"), "11\nquick", 'one that may work') or diag($err);
	like(sql('SELECT message FROM ruststream_failure'), qr/cancelled after its timeout/, '.. and end what takes too long');
	$server->stop;
}

done_testing();
