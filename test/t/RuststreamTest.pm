# What the TAP tests share: nodes with ruststream loaded, and waiting.
#
# The tests run against an installed extension.  Where it lies outside the
# server's own directories, script/test says so in a file that TEMP_CONFIG
# names, which PostgreSQL's own modules append to every node's configuration.
package RuststreamTest;

use strict;
use warnings;

use Exporter 'import';
use File::Basename qw(dirname);
use Cwd qw(abs_path);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(new_node source_dir wait_for wait_for_empty poll_until backends_of);

# The top of the source tree.
sub source_dir
{
	return abs_path(dirname(__FILE__) . '/../..');
}

# A running node.  Options: preload => 0 leaves the library out of
# shared_preload_libraries; extension => 0 does not create the extension in
# database postgres; conf => lines for postgresql.conf; start => 0; and init =>
# { .. } what PostgreSQL::Test::Cluster::init takes.
sub new_node
{
	my ($name, %option) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	$node->init(%{ $option{init} // {} });
	$node->append_conf('postgresql.conf', "shared_preload_libraries = 'ruststream'\n")
	  if $option{preload} // 1;
	$node->append_conf('postgresql.conf', <<'CONF');
max_worker_processes = 32
log_min_messages = info
autovacuum_naptime = 1s
CONF
	$node->append_conf('postgresql.conf', "$option{conf}\n") if defined $option{conf};
	return $node unless $option{start} // 1;
	$node->start;
	$node->safe_psql('postgres', 'CREATE EXTENSION ruststream')
	  if $option{extension} // 1;
	return $node;
}

# Poll, in statements of their own, until a query answers what is expected
# ('t' unless given).  A test of its own; on failure says what it answers now.
sub wait_for
{
	my ($node, $query, $what, $expected, $database) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	$expected //= 't';
	$database //= 'postgres';
	return ok(poll_until($node, $query, $expected, $database), $what);
}

# poll_query_until, also while the server is down: a psql that cannot connect may be
# gone before it has been given the query, which dies of a broken pipe.
sub poll_until
{
	my ($node, $query, $expected, $database) = @_;

	for (1 .. 100)
	{
		my $result = eval { $node->poll_query_until($database // 'postgres', $query, $expected // 't') };

		return $result if $@ eq '';
		die $@ unless $@ =~ /Broken pipe/;
	}
	return 0;
}

# Wait until a table is empty.
sub wait_for_empty
{
	my ($node, $table, $what, $database) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return wait_for($node, "SELECT NOT EXISTS (SELECT FROM $table)",
		$what // "$table drains", 't', $database);
}

# The pids of our processes of one kind ("ruststream worker", ..).
sub backends_of
{
	my ($node, $kind) = @_;

	return split /\n/, $node->safe_psql('postgres',
		"SELECT pid FROM pg_stat_activity WHERE backend_type = '$kind' ORDER BY pid");
}

1;
