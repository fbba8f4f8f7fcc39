# Handlers that are procedures, drained in fresh sessions of an ordinary role.
use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use RuststreamTest;
use Test::More;

my $node = new_node('procedures');
my @low = (extra_params => [ '-U', 'low' ]);
$node->safe_psql('postgres', 'CREATE ROLE low LOGIN; CREATE SCHEMA low AUTHORIZATION low');
$node->safe_psql('postgres', <<'SQL', @low);
CREATE TABLE low.first (id bigint PRIMARY KEY, attempt int NOT NULL DEFAULT 1, payload jsonb);
CREATE TABLE low.second (LIKE low.first INCLUDING ALL);
CREATE TABLE low.done (id text, what text);
SELECT ruststream.attach_queue('low.first', 'id', attempt_column => 'attempt', payload_column => 'payload',
	lock_key => 'first-{id}');
SELECT ruststream.attach_queue('low.second', 'id', attempt_column => 'attempt', payload_column => 'payload');
CREATE PROCEDURE low.commits(j jsonb, d ruststream.delivery) LANGUAGE plpgsql AS $$
BEGIN INSERT INTO low.done VALUES (d.id, 'first'); COMMIT; END $$;
CREATE FUNCTION low.takes(j jsonb, d ruststream.delivery) RETURNS void LANGUAGE sql AS
	$$ INSERT INTO low.done VALUES (d.id, 'second') $$;
SELECT ruststream.subscribe('first', 'low.first', 'low.commits', workers => 0, transactional => false);
SELECT ruststream.subscribe('second', 'low.second', 'low.takes', workers => 0);
INSERT INTO low.first SELECT g, 1, '{}' FROM generate_series(1, 3) AS g;
SQL

# Its language is loaded by the first delivery, and defines settings that only a
# superuser may set: they are nothing that the handler has set.
$node->safe_psql('postgres', q{CALL ruststream.drain('first')}, @low);
is($node->safe_psql('postgres', q{SELECT string_agg(id, ' ' ORDER BY id) FROM low.done}), '1 2 3',
	'each was handled once in a fresh session');
is($node->safe_psql('postgres', 'SELECT count(*) FROM ruststream.failure_history'), '0', 'and none failed');

# A delivery within a delivery would take the session's state for its own.
$node->safe_psql('postgres', <<'SQL', @low);
TRUNCATE low.done;
CREATE OR REPLACE PROCEDURE low.commits(j jsonb, d ruststream.delivery) LANGUAGE plpgsql AS $$
BEGIN COMMIT; CALL ruststream.drain('second'); END $$;
SELECT ruststream.alter_subscription('first', on_error => 'discard');
INSERT INTO low.first SELECT g, 1, '{}' FROM generate_series(1, 20) AS g;
INSERT INTO low.second SELECT g, 1, '{}' FROM generate_series(1, 20) AS g;
SQL
$node->safe_psql('postgres', q{PREPARE mine AS SELECT 1; CALL ruststream.drain('first'); EXECUTE mine}, @low);
is($node->safe_psql('postgres', q{SELECT DISTINCT sqlstate || ' ' || message FROM ruststream.failure}),
	'55000 ruststream.drain cannot be called by a handler', 'a handler cannot drain');
is($node->safe_psql('postgres', 'SELECT (SELECT count(*) FROM low.first), (SELECT count(*) FROM low.second)'),
	'0|20', 'and has not');

$node->stop;
done_testing();
