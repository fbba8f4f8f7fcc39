# The README's five minutes, as they are printed there: every statement runs, as
# an ordinary role, and answers what the README says it answers.
use strict;
use warnings;

use FindBin;
use lib $FindBin::Bin;
use RuststreamTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $readme = slurp_file(source_dir() . '/README.md');
my ($tour) = $readme =~ /^## Five minutes$(.*?)^## /ms;
my @blocks = $tour =~ /^```sql\n(.*?)^```$/msg;
cmp_ok(scalar @blocks, '>', 5, 'the README has a tour');

my $node = new_node('tour', extension => 0);
my $database = 'postgres';
my @as_app = (extra_params => [ '-U', 'app' ]);

# What the tour takes for granted: a role with a schema, and for its last
# step a table that is there already.
$node->safe_psql($database, <<'SQL');
CREATE ROLE app LOGIN;
CREATE SCHEMA app AUTHORIZATION app;
CREATE SCHEMA billing AUTHORIZATION app;
SET ROLE app;
CREATE TABLE billing.jobs (job_id uuid PRIMARY KEY, body jsonb, not_before timestamptz, tries int);
SQL

like(shift @blocks, qr/^CREATE EXTENSION ruststream;$/, 'it begins with the extension');
$node->safe_psql($database, 'CREATE EXTENSION ruststream');

# Run SQL as the tour's role; its output as psql prints it, without the footer.
sub run_sql
{
	my ($sql) = @_;
	my ($output, $error) = ('', '');

	my $status = $node->psql($database, "\\pset format aligned\n\\pset tuples_only off\n"
		  . "\\pset footer off\n$sql",
		stdout => \$output, stderr => \$error, on_error_stop => 1, @as_app);
	return ($status, $output, $error);
}

sub tidy
{
	my ($text) = @_;
	$text =~ s/^.*(?:is "aligned"|is "off"|format is|footer is|only is).*\n//mg;
	$text =~ s/[ \t]+$//mg;
	$text =~ s/\s+\z//;
	return $text;
}

# What the README says takes a second may take longer here, but once it has
# taken too long, nothing is waited for any more.
my $patience = 30;

foreach my $block (@blocks)
{
	# A statement that is followed by what it answers, or what is between such.
	while ($block =~ /\G(.*?;[^\n]*\n)((?:--[^\n]*\n)+|(?=\z))/sgc)
	{
		my ($sql, $answer) = ($1, $2);
		my ($first) = $sql =~ /^\s*([^\n]*)/;

		if ($answer eq '')
		{
			my ($status, undef, $error) = run_sql($sql);
			is($status, 0, "runs: $first") or diag($error);
			next;
		}

		$answer =~ s/^-- ?//mg;
		my $deadline = time() + $patience;
		my $seen = tidy((run_sql($sql))[1]);
		while ($seen ne tidy($answer) && time() < $deadline)
		{
			$node->safe_psql($database, "SELECT pg_sleep(0.1)");
			$seen = tidy((run_sql($sql))[1]);
		}
		is($seen, tidy($answer), "answers: $first") or $patience = 0;
	}
	is(substr($block, pos($block) // 0), '', 'nothing of the block is left out');
}

done_testing();
