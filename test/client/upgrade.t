# Our tables of an earlier version: nothing works with them but install, which brings them up to date and keeps their
# rows.  schema_1/ has what version 1 made, as it was released.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin, "$FindBin::Bin/../conformance";
use ClientTest;
use MysqlServer;
use PostgresServer;
use Test::More;
use Time::HiRes qw(sleep time);

my $VERSION = 2;
my @TABLES = map { "ruststream_$_" } qw(queue subscription failure counter worker);

sub text_of
{
	my ($file) = @_;
	open(my $in, '<', "$FindBin::Bin/$file") or die "$file: $!\n";
	local $/;
	return scalar readline $in;
}

# ------------------------------------------------------------- the engines
#
# Of each: sql, its answer; empty, a database without tables of ours; catalog, all that describes these; time, the type
# of a column for it.

my $file = url() =~ s/^sqlite://r;
my %sqlite = (
	name => 'sqlite', driver => 'sqlite', url => url(), time => 'TEXT', id => 'INTEGER PRIMARY KEY',
	missing => sub { return ''; },
	# Not beginning with "--", which the shell would take for an option.
	sql => sub { return sql("\n" . join(';', @_)); },
	empty => sub { unlink map { "$file$_" } '', '-wal', '-shm', '-journal', '-ruststream'; sql('PRAGMA journal_mode = wal'); return; },
	# The text of statements, since it is what SQLite keeps, but for comments and space.
	catalog => sub {
		my $text = sql("SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE tbl_name LIKE 'ruststream%' ORDER BY 1, 2;"
			  . "SELECT s.name, c.* FROM sqlite_schema AS s, pragma_table_xinfo(s.name) AS c WHERE s.name LIKE 'ruststream%' ORDER BY s.name, c.cid");
		return $text =~ s/ *--[^\n]*//gr =~ s/[ \t]*\n[ \t]+/ /gr =~ s/ *, */, /gr;
	},
	set_version => 'UPDATE ruststream_version SET version = %d');

my $pg;
my %postgres = (
	name => 'postgres', driver => 'postgres', time => 'timestamptz', id => 'bigint PRIMARY KEY',
	missing => sub {
		$pg = PostgresServer->new or return 'there is no PostgreSQL server';
		$_[0]{url} = $pg->url;
		return '';
	},
	sql => sub { return join "\n", $pg->sql('postgres', @_); },
	empty => sub { $pg->sql('postgres', 'SET client_min_messages = warning', 'DROP SCHEMA public CASCADE', 'CREATE SCHEMA public'); return; },
	catalog => sub {
		my $ours = "n.nspname = 'public' AND c.relname LIKE 'ruststream%'";
		return join "\n", $pg->sql('postgres',
			"SELECT c.relname, c.relkind, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity, pg_get_expr(d.adbin, d.adrelid)"
			  . " FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0"
			  . " LEFT JOIN pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum WHERE $ours ORDER BY c.relname, a.attnum",
			"SELECT c.relname, o.conname, o.contype, o.convalidated, pg_get_constraintdef(o.oid) FROM pg_constraint AS o JOIN pg_class AS c ON c.oid = o.conrelid"
			  . " JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE $ours ORDER BY 1, 2",
			"SELECT c.relname, pg_get_indexdef(c.oid) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.relkind = 'i' AND $ours ORDER BY 1",
			"SELECT c.relname, pg_get_viewdef(c.oid) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.relkind = 'v' AND $ours ORDER BY 1",
			"SELECT c.relname, t.tgname, pg_get_triggerdef(t.oid) FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid"
			  . " JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE NOT t.tgisinternal AND $ours ORDER BY 1, 2",
			"SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'public'::regnamespace ORDER BY oid::regprocedure::text");
	},
	set_version => 'UPDATE ruststream_version SET version = %d');

my $mysql;
my %mysql = (
	name => MysqlServer::kind(), driver => 'mysql', time => 'DATETIME(6)', id => 'BIGINT PRIMARY KEY',
	missing => sub {
		return MysqlServer::missing() if MysqlServer::missing();
		$mysql = MysqlServer->new;
		$_[0]{url} = $mysql->url;
		return '';
	},
	sql => sub { return $mysql->sql(join ';', @_); },
	empty => sub { $mysql->sql('DROP DATABASE app; CREATE DATABASE app', ''); return; },
	catalog => sub {
		my @names = split /\n/, $mysql->sql('SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()'
			  . " AND table_name LIKE 'ruststream%' ORDER BY 1");
		return join "\n", map({ $mysql->sql("SHOW FULL COLUMNS FROM $_") } @names),
		  # Constraints have no order.
		  map({ join("\n", sort map { s/,$//r } split /\\n/, $mysql->sql("SHOW CREATE TABLE $_") =~ s/ AUTO_INCREMENT=\d+//r) } @names),
		  $mysql->sql('SELECT trigger_name FROM information_schema.triggers WHERE trigger_schema = DATABASE();'
			  . 'SELECT routine_name FROM information_schema.routines WHERE routine_schema = DATABASE()');
	},
	set_version => 'INSERT INTO ruststream_version VALUES (%d)');

my $engine;

sub ask { return $engine->{sql}->(@_); }
sub refused { return $engine->{driver} eq 'sqlite' ? refuses(@_) : !eval { ask(@_); 1 }; }
sub catalog { return $engine->{catalog}->(); }
sub version { return ask('SELECT MAX(version) FROM ruststream_version'); }

# A database that version 1 was installed in and has worked in: a queue with rows, a subscription at work, another
# that is paused, a failure, and figures.
sub of_version_1
{
	my $queue = '(name, id_column, payload_column, attempt_column, retry_after_column, locked_until_column)';
	my $columns = "id $engine->{id}, payload VARCHAR(50), attempt INTEGER, retry_after $engine->{time}, locked_until " . $engine->{time} =~ s/\(6\)//r;

	$engine->{empty}->();
	ask(text_of("schema_1/$engine->{driver}.sql"));
	my $order = $engine->{driver} eq 'postgres' ? 'retry_after NULLS FIRST, id' : 'retry_after, id';
	ask((map { ("CREATE TABLE $_ ($columns)", "CREATE INDEX claim_$_ ON $_ ($order)") } qw(jobs mails)), 'CREATE TABLE effect (id INTEGER, payload VARCHAR(50))',
		(map { "INSERT INTO ruststream_queue $queue VALUES ('$_', 'id', 'payload', 'attempt', 'retry_after', 'locked_until')" } qw(jobs mails)),
		"INSERT INTO ruststream_subscription (name, queue, handler, transactional, workers, backoff) VALUES ('s', 'jobs',"
		  . " 'INSERT INTO effect (id, payload) VALUES (:id, :payload)', 'on', 2, 'linear')",
		"INSERT INTO ruststream_subscription (name, queue, program, paused) VALUES ('p', 'mails', 'cat', " . ($engine->{driver} eq 'postgres' ? 'true' : 1) . ')',
		"INSERT INTO ruststream_failure (at, subscription, queue, id, attempt, message) VALUES ('2026-01-02 03:04:05', 's', 'jobs', '1', 3, 'so it was')",
		"INSERT INTO ruststream_counter (subscription, acked, failed) VALUES ('s', 7, 3)",
		"INSERT INTO jobs (id, payload, attempt) VALUES (1, 'a', 3), (2, 'b', 0)", "INSERT INTO mails (id, payload) VALUES (1, 'c')");
	return;
}

# What was there in version 1, by its columns.
sub rows
{
	my %more = (subscription => 'name, queue, handler, program, group_name, transactional, workers, max_attempts, dead_letter, on_error, on_decode_error,'
		  . ' decode, retry_delay_ms, backoff, max_retry_delay_ms, lease_ms, timeout_ms, poll_interval_ms, paused');
	return join "\n", map { ask('SELECT ' . ($more{ s/ruststream_//r } // '*') . " FROM $_ ORDER BY 1") } @TABLES, 'jobs', 'mails', 'effect';
}

sub install { return run('install', $engine->{url}, @_); }

# Is it as a fresh one, and does it have what it had?
sub is_upgraded
{
	my ($fresh, $rows, $what) = @_;
	is(version(), $VERSION, "$what: the version is the new one");
	is(catalog(), $fresh, '.. and all is as in a fresh database');
	is(rows(), $rows, '.. and nothing is lost') if defined $rows;
	return;
}

sub upgrades
{
	my ($fresh) = @_;

	of_version_1();
	my $rows = rows();
	my $old = catalog();
	isnt($old, $fresh, 'version 1 is another one');
	for my $command (['work', '--drain'], ['status'], ['publish', 'jobs', 'd'], ['pause', 's'], ['subscribe', 't', 'jobs', '--exec', 'cat'])
	{
		my ($name, @rest) = @$command;
		my ($code, undef, $err) = run($name, $engine->{url}, @rest);
		is($code, 5, "$name does nothing with it");
		like($err, qr/are of version 1, and this is for version $VERSION\n.*Run: ruststream install URL/, '.. and says what to do');
	}
	is(rows(), $rows, '.. nothing has happened');
	is(catalog(), $old, '.. to the tables either');

	# One of them does it; MySQL's others may be told so.
	my @codes = sort { $a <=> $b } map { (finish($_))[0] } map { start({}, 'install', $engine->{url}) } 1 .. 3;
	my $wrong = $engine->{driver} eq 'mysql' ? qr/^0( 0| 6){2}$/ : qr/^0 0 0$/;
	like("@codes", $wrong, 'three installations at once');
	is_upgraded($fresh, $rows, 'install');
	my ($code, undef, $err) = install();
	is($code, 0, 'install again') or diag($err);
	is_upgraded($fresh, $rows, '.. changes nothing');
	return;
}

sub works
{
	my ($code, undef, $err) = run('work', $engine->{url}, '--drain');
	is($code, 0, 'the worker works') or diag($err);
	is(ask('SELECT id, payload FROM effect ORDER BY id') =~ tr/|/ /r, "1 a\n2 b", '.. and delivers what was waiting');
	is(ask("SELECT acked, failed FROM ruststream_counter WHERE subscription = 's'") =~ tr/|/ /r, '9 3', '.. and counts on');
	is(ask("SELECT state, last_error FROM ruststream_status ORDER BY subscription") =~ tr/|/ /r =~ s/ (NULL)?$//mr, "paused\nno worker so it was", '.. one is paused still');
	is(ask('SELECT COUNT(*) FROM mails'), 1, '.. and its row waits');
	($code, undef, $err) = run('subscribe', $engine->{url}, 'p', 'mails', '--exec', 'cat >/dev/null', '--batch-size', 10);
	is($code, 0, 'it may have batches now') or diag($err);
	is(ask("SELECT batch_size FROM ruststream_subscription WHERE name = 'p'"), 10, '.. which is kept');
	run('resume', $engine->{url}, 'p');
	run('work', $engine->{url}, '--drain');
	is(ask('SELECT COUNT(*) FROM mails'), 0, '.. and they are delivered');
	ok(refused("UPDATE ruststream_subscription SET batch_size = 10 WHERE name = 's'"), 'SQL cannot have batches of a transactional one');
	ok(refused("UPDATE ruststream_subscription SET batch_size = 0 WHERE name = 'p'"), '.. or of no rows');
	return;
}

sub refuses_later
{
	my ($fresh) = @_;
	ask(sprintf $engine->{set_version}, 99);
	my ($code, undef, $err) = install();
	is($code, 5, 'a version of the future is refused');
	like($err, qr/are of version 99, and this is for version $VERSION\n.*Use the ruststream that made them/, '.. with the reason');
	is(version(), 99, '.. and stays');
	is(catalog(), $fresh, '.. as it is');
	return;
}

# Where there is a transaction: what cannot be done as a whole is not done at all.
sub fails_as_a_whole
{
	my ($spoil, $mend, $reason) = @_;
	my $fresh = catalog();
	of_version_1();
	my ($rows, $old) = (rows(), catalog());
	ask(@$spoil);
	my $spoilt = catalog();
	my ($code, undef, $err) = install();
	isnt($code, 0, 'an upgrade that fails');
	like($err, $reason, '.. says why');
	is(version(), 1, '.. leaves the version');
	is(catalog(), $spoilt, '.. and the tables as they were');
	ask(@$mend);
	is(catalog(), $old, '.. mended');
	is((install())[0], 0, '.. it goes well');
	is_upgraded($fresh, $rows, '.. and then');
	return;
}

# Until it answers so, for a minute at the most.
sub becomes
{
	my ($question, $wanted) = @_;
	for (my $until = time() + 60; time() < $until; sleep 0.05)
	{
		return 1 if ask($question) eq $wanted;
	}
	diag("waited for $wanted: " . ask($question));
	return 0;
}

# A second installation while the first is in the middle of its step, held up by a reader of the table.
sub one_at_a_time
{
	my ($fresh) = @_;
	of_version_1();
	my $rows = rows();
	my $reader = $engine->{driver} eq 'mysql' ? $mysql->session : $pg->session('postgres');
	$reader->do('BEGIN');
	$reader->do('SELECT COUNT(*) FROM ruststream_subscription');
	my $first = start({}, 'install', $engine->{url});
	if ($engine->{driver} eq 'mysql')
	{
		ok(becomes("SELECT COUNT(*) FROM information_schema.processlist WHERE state = 'Waiting for table metadata lock'", 1), 'an installation is at work');
		my ($code, undef, $err) = install();
		is($code, 6, '.. another one does nothing');
		like($err, qr/another installation is at work/, '.. and says why');
		$reader->do('COMMIT');
	}
	else
	{
		my $waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype =";
		ok(becomes("$waiting 'relation'", 1), 'an installation is at work');
		my $second = start({}, 'install', $engine->{url});
		ok(becomes("$waiting 'advisory'", 1), '.. another one waits for it');
		$reader->do('COMMIT');
		is((finish($second))[0], 0, '.. and then has nothing to do');
	}
	is((finish($first))[0], 0, '.. the first goes well');
	$reader->close;
	is_upgraded($fresh, $rows, '.. in the end');
	return;
}

# Of a role that does not own them.
sub needs_ownership
{
	my ($fresh) = @_;
	my $url = $engine->{url} =~ s/postgres@/works@/r;
	of_version_1();
	my $old = catalog();
	ask('CREATE ROLE works LOGIN', 'GRANT ALL ON SCHEMA public TO works', 'GRANT ALL ON ALL TABLES IN SCHEMA public TO works');
	my ($code, undef, $err) = run('install', $url);
	isnt($code, 0, 'who does not own the tables cannot bring them up to date');
	like($err, qr/must be owner of table ruststream_subscription\n.*has to be their owner/, '.. and is told so');
	is(catalog(), $old, '.. and nothing has changed');
	ask('CREATE ROLE owns LOGIN', map({ "ALTER TABLE $_ OWNER TO owns" } @TABLES, 'ruststream_version'), 'ALTER VIEW ruststream_status OWNER TO owns',
		map({ "ALTER FUNCTION $_ OWNER TO owns" } split /\n/, ask("SELECT oid::regprocedure FROM pg_proc WHERE pronamespace = 'public'::regnamespace")),
		'GRANT CREATE, USAGE ON SCHEMA public TO owns');
	($code, undef, $err) = run('install', $engine->{url} =~ s/postgres@/owns@/r);
	is($code, 0, '.. their owner can') or diag($err);
	is_upgraded($fresh, undef, '.. so');
	is(ask("SELECT DISTINCT proowner::regrole FROM pg_proc WHERE pronamespace = 'public'::regnamespace"), 'owns', '.. all is its owner\'s still');
	ask('DROP OWNED BY works, owns', 'DROP ROLE works, owns');
	return;
}

# Where each statement commits: whatever was done is found done.
sub broken_off
{
	my ($fresh) = @_;
	my $step = text_of('../../src/client/upgrade_mysql_2.sql') =~ s/INSERT IGNORE INTO ruststream_version.*//sr;

	of_version_1();
	my $rows = rows();
	ask($step);
	is(version(), 1, 'an upgrade that was broken off is of version 1');
	like((run('status', $engine->{url}))[2], qr/Run: ruststream install URL/, '.. and nothing works with it');
	is((install())[0], 0, '.. but install');
	is_upgraded($fresh, $rows, '.. which ends it');

	$engine->{empty}->();
	ask(text_of('schema_1/mysql.sql') =~ s/INSERT IGNORE INTO ruststream_version.*//sr);
	is(version(), 'NULL', 'an installation of version 1 that was broken off has none');
	is((install())[0], 0, '.. and install');
	is_upgraded($fresh, undef, '.. ends it, too');
	return;
}

# What docs/client.md says that is needed.
sub needs_rights
{
	my ($fresh) = @_;
	of_version_1();
	my $old = catalog();
	my $url = $mysql->url('installs');
	ask('CREATE USER installs', 'GRANT CREATE, DROP, CREATE VIEW, INDEX, REFERENCES, SELECT, INSERT ON app.* TO installs');
	my ($code, undef, $err) = run('install', $url);
	isnt($code, 0, 'an account that may not alter tables');
	like($err, qr/ALTER command denied/, '.. is told so');
	is(version() . catalog(), "1$old", '.. and nothing has changed');
	ask('GRANT ALTER ON app.* TO installs');
	($code, undef, $err) = run('install', $url);
	is($code, 0, '.. one that may brings them up to date') or diag($err);
	is_upgraded($fresh, undef, '.. so');
	return;
}

for my $each (\%sqlite, \%postgres, \%mysql)
{
	$engine = $each;
	subtest $engine->{name} => sub {
		plan skip_all => "this build does not serve $engine->{driver}" unless `@{[program()]} --version` =~ /\b$engine->{driver}\b/;
		my $missing = $engine->{missing}->($engine);
		plan skip_all => $missing if $missing;
		$engine->{empty}->();
		my ($code, undef, $err) = install();
		is($code, 0, 'install') or diag($err);
		my $fresh = catalog();
		is(version(), $VERSION, 'a fresh database is of this version');
		upgrades($fresh);
		works();
		fails_as_a_whole(["CREATE TRIGGER ruststream_spoil BEFORE UPDATE ON ruststream_version BEGIN SELECT RAISE(ABORT, 'not today'); END"],
			['DROP TRIGGER ruststream_spoil'], qr/not today/) if $engine->{driver} eq 'sqlite';
		if ($engine->{driver} eq 'postgres')
		{
			fails_as_a_whole(['ALTER FUNCTION ruststream_wake(text, boolean) RENAME TO kept', "CREATE FUNCTION ruststream_wake(queue text, wake boolean) RETURNS integer LANGUAGE sql AS 'SELECT 1'"],
				['DROP FUNCTION ruststream_wake(text, boolean)', 'ALTER FUNCTION kept(text, boolean) RENAME TO ruststream_wake'], qr/cannot change return type/);
			one_at_a_time($fresh);
			needs_ownership($fresh);
		}
		if ($engine->{driver} eq 'mysql')
		{
			one_at_a_time($fresh);
			broken_off($fresh);
			needs_rights($fresh);
		}
		$engine->{empty}->();
		install();
		refuses_later($fresh);
	};
	$mysql->stop if $mysql;
	undef $pg;
	undef $mysql;
}
done_testing();
