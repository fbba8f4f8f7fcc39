# The headers of a dead letter say where it came from and why, on every engine, in a table and in a group; and what
# a program says is kept, whatever bytes it is of.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin, "$FindBin::Bin/../conformance";
use ClientTest;
use JSON::PP;
use MysqlServer;
use PostgresServer;
use Test::More;

my $drivers = `@{[program()]} --version`;
my $long = 'too much of it: ' . ('x' x 900) . "\x{c3}\x{a9}" x 200;

# What differs: the database, its types, how a handler answers, and the error of a NULL where none may be.
my %ENGINE = (
	sqlite => {
		start => sub { new_database(); return (url(), \&sql) },
		id => 'INTEGER PRIMARY KEY', json => ['TEXT'], group => 'TEXT', lease => 'TEXT', state => 'SQLITE_CONSTRAINT', queue => 'jobs',
		handler => "SELECT ruststream_dead_letter('$long') WHERE :payload = 'dead'; INSERT INTO strict_effect SELECT NULL WHERE :payload = 'error'",
	},
	mysql => {
		start => sub { return if MysqlServer::missing(); my $server = MysqlServer->new; return ($server->url, sub { $server->sql(@_) }, $server) },
		id => 'BIGINT NOT NULL PRIMARY KEY', json => ['JSON', 'TEXT'], group => 'VARCHAR(50)', lease => 'DATETIME', state => '23000', queue => 'jobs',
		handler => "SET \@ruststream_outcome = IF(:payload = 'dead', 'dead_letter', NULL), \@ruststream_reason = '$long';"
		  . " INSERT INTO strict_effect SELECT NULL FROM (SELECT 1) AS one WHERE :payload = 'error'",
	},
	postgres => {
		start => sub { my $server = PostgresServer->new or return; return ($server->url, sub { join "\n", $server->sql('postgres', @_) }, $server) },
		id => 'bigint PRIMARY KEY', json => ['jsonb', 'json'], group => 'text', lease => 'timestamptz', state => '23502', queue => 'public.jobs',
		handler => "SELECT ruststream_dead_letter('$long') WHERE :payload = 'dead'; INSERT INTO strict_effect SELECT NULL WHERE :payload = 'error'",
	},
);

for my $name (sort keys %ENGINE)
{
	my $engine = $ENGINE{$name};
	SKIP:
	{
		skip "this build does not serve $name", 1 if $drivers !~ /\b$name\b/;
		my ($url, $sql, $server) = $engine->{start}->();
		skip "there is no server for $name", 1 if !$url;

		for my $json (@{ $engine->{json} })
		{
			for my $case (['a table', [], 'graves', 'graves', 's'], ['a group', ['--group', 'kind'], 'graveyard', 'jobs', 'jobs'])
			{
				my ($what, $described, $dead, $table, $group) = @$case;
				my $label = "$name, $json, $what";
				$sql->("DROP TABLE IF EXISTS $_") for qw(jobs graves strict_effect);
				my $columns = "(id $engine->{id}, kind $engine->{group}, headers $json, payload VARCHAR(50), locked_until $engine->{lease})";
				$sql->("CREATE TABLE $_ $columns") for qw(jobs graves);
				$sql->('CREATE TABLE strict_effect (id INTEGER NOT NULL)');
				for my $command (
					['install', $url],
					['describe', $url, 'jobs', qw(--id id --headers headers --payload payload --locked-until locked_until --create-index), @$described],
					['subscribe', $url, 's', 'jobs', '--group', $group, '--handler', $engine->{handler}, '--on-error', 'dead_letter', '--dead-letter', $dead])
				{
					my ($code, undef, $err) = run(@$command);
					is($code, 0, "$label: $command->[0]") or diag($err);
				}
				$sql->("INSERT INTO jobs (id, kind, headers, payload) VALUES (1, 'jobs', '{\"mine\": \"1\"}', 'dead'), (2, 'jobs', NULL, 'dead'),"
					  . " (3, 'jobs', '{\"mine\": \"3\"}', 'error'), (4, 'jobs', '[\"none\"]', 'dead')");
				$sql->(q{INSERT INTO jobs (id, kind, headers, payload) VALUES (5, 'jobs', 'no JSON', 'dead')}) if $json eq 'TEXT';
				my ($code, undef, $err) = run('work', $url, '--drain');
				is($code, 0, "$label: delivered") or diag($err);

				my $headers = sub { $sql->("SELECT headers FROM $table WHERE id = $_[0]" . ($table eq 'jobs' ? " AND kind = 'graveyard'" : '')) };
				my %of = map { $_ => eval { decode_json($headers->($_)) } // {} } 1 .. 3;
				is($of{1}{'ruststream-origin-queue'}, $engine->{queue}, "$label: the queue");
				is($of{1}{'ruststream-origin-subscription'}, 's', '.. the subscription');
				is($of{1}{'ruststream-origin-group'}, $table eq 'jobs' ? 'jobs' : undef, '.. the group, where there are groups');
				like($of{1}{'ruststream-reason'}, qr/^too much of it: x{900}\x{e9}+\??$/, '.. the reason, cut between characters');
				ok(!exists $of{1}{'ruststream-sqlstate'}, '.. no code, since it was answered');
				like($of{1}{'ruststream-dead-lettered-at'}, qr/^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00$/, '.. when');
				is($of{1}{mine}, '1', '.. and what was there');
				is($of{2}{'ruststream-origin-subscription'}, 's', "$label: headers that were NULL");
				is($of{3}{'ruststream-sqlstate'}, $engine->{state}, "$label: the code of an error");
				like($of{3}{'ruststream-reason'}, qr/null/i, '.. and its message');
				is($headers->(4), '["none"]', "$label: what is no object stays as it is");
				is($headers->(5), 'no JSON', '.. nor is it touched where it is no JSON') if $json eq 'TEXT';
			}
		}

		$sql->('DELETE FROM jobs');
		run('subscribe', $url, 's', 'jobs', '--group', 'jobs', '--on-error', 'discard',
			'--exec', q{printf 'caf\351 \355\240\200 \303\251\n' >&2; exit 3});
		$sql->("INSERT INTO jobs (id, kind, payload) VALUES (9, 'jobs', 'x')");
		run('work', $url, '--drain');
		is($sql->("SELECT message FROM ruststream_failure WHERE id = '9'"), "caf? ??? \x{c3}\x{a9}: the program ended with status 3",
			"$name: a program's words that are not UTF-8");
		is($sql->('SELECT DISTINCT queue FROM ruststream_failure'), $engine->{queue}, '.. of the queue as it is described');
		$server->stop if $server;
	}
}

done_testing();
