# A standby is quiet; promoted, it works.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $primary = new_node('primary', init => { allows_streaming => 1 });
$primary->safe_psql('postgres', <<'SQL');
CREATE TABLE done (id bigint UNIQUE);
SELECT ruststream.create_queue('jobs');
CREATE FUNCTION handle(job jobs) RETURNS void LANGUAGE sql AS 'INSERT INTO done VALUES (job.id)';
SELECT ruststream.subscribe('jobs', 'jobs', 'handle');
INSERT INTO jobs (payload) SELECT '{}' FROM generate_series(1, 10);
SQL
wait_for_empty($primary, 'jobs', 'the primary delivers');

$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;
$primary->wait_for_catchup($standby);

my $ours = "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'ruststream %'";
is($standby->safe_psql('postgres', $ours), '0', 'no process of ours runs on a standby');
is($standby->safe_psql('postgres', 'SELECT count(*) FROM done'), '10', 'which can be read');
is($standby->safe_psql('postgres', 'SELECT count(*) FROM ruststream.stat_worker'), '0',
	'and so can its views');

$primary->safe_psql('postgres', "SELECT ruststream.pause('jobs')");
$primary->safe_psql('postgres', "INSERT INTO jobs (payload) SELECT '{}' FROM generate_series(1, 5)");
$primary->safe_psql('postgres', "SELECT ruststream.resume('jobs')");
wait_for_empty($primary, 'jobs', 'the primary delivers what came while it was paused');
$primary->safe_psql('postgres', "SELECT ruststream.alter_subscription('jobs', workers => 0)");
wait_for($primary, "SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'ruststream worker'",
	'and then has no workers');
$primary->safe_psql('postgres', "INSERT INTO jobs (payload) SELECT '{}' FROM generate_series(1, 5)");
$primary->wait_for_catchup($standby);
$primary->stop;

$standby->promote;
$standby->safe_psql('postgres', "SELECT ruststream.alter_subscription('jobs', workers => 1)");
wait_for_empty($standby, 'jobs', 'the promoted standby delivers');
is($standby->safe_psql('postgres', 'SELECT count(*) FROM done'), '20', 'each row once');
$standby->stop;

done_testing();
