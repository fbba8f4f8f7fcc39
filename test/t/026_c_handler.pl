# Handlers written in C, loaded by a worker: their writes and the end of their
# task are one commit, and what they leave behind when they fail is unwound.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use PostgreSQL::Test::Utils;
use RuststreamTest;
use Test::More;

my $pg_config = $ENV{PG_CONFIG} // 'pg_config';
chomp(my $include = `$pg_config --includedir-server`);
my $library = PostgreSQL::Test::Utils::tempdir() . '/handlers.so';
system_or_bail($ENV{CC} // 'gcc', '-shared', '-fPIC', '-O1', "-I$include", '-o', $library,
	source_dir() . '/test/modules/handlers.c');

my $node = new_node('c_handler');
$node->safe_psql('postgres', <<"SQL");
SELECT ruststream.create_queue('letters');
SELECT ruststream.create_queue('jobs');
CREATE TABLE noted (what text);
CREATE FUNCTION note_payload(text) RETURNS void LANGUAGE c AS '$library';
CREATE FUNCTION fail_on_row(jobs) RETURNS void LANGUAGE c AS '$library';
SELECT ruststream.subscribe('letters', 'letters', 'note_payload');
SELECT ruststream.subscribe('jobs', 'jobs', 'fail_on_row', on_error => 'discard');
SELECT ruststream.publish('letters', '"a letter"');
INSERT INTO jobs (payload) VALUES ('{}');
SQL

wait_for_empty($node, 'letters', 'a payload handler in C delivers');
wait_for_empty($node, 'jobs', 'a row handler in C fails, and its row is discarded');
is($node->safe_psql('postgres', 'SELECT what FROM noted'), '"a letter"',
	'what acked is kept, what failed is not');
is( $node->safe_psql('postgres', q{SELECT sqlstate, message FROM ruststream.failure}),
	'23514|row 1 is not wanted', 'its error is recorded');

# The same in the caller's session.
$node->safe_psql('postgres', q{SELECT ruststream.pause('jobs'), ruststream.pause('letters');
	INSERT INTO jobs (payload) VALUES ('{}')});
$node->safe_psql('postgres', q{SELECT ruststream.alter_subscription('jobs', workers => 0), ruststream.resume('jobs')});
$node->safe_psql('postgres', q{CALL ruststream.drain('jobs')});
is($node->safe_psql('postgres', 'SELECT count(*) FROM jobs'), '0', 'drained');
is($node->safe_psql('postgres', 'SELECT count(*) FROM noted'), '1', 'and nothing of it kept');

$node->stop;
done_testing();
