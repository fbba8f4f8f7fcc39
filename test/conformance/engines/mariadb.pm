# The MariaDB column: the command line on a private server, and a stored procedure for the handler.
package Conformance::mariadb;
use strict;
use warnings;

use File::Basename qw(dirname);
use lib dirname(__FILE__);
use lib dirname(__FILE__) . '/../../client';

use Cwd qw(abs_path);
use MariadbServer;

require(dirname(abs_path(__FILE__)) . '/sqlite.pm');
our @ISA = ('Conformance::commandline');

{
	# What SQLite's column does by the command line alone is the same here; but this is not SQLite.
	no strict 'refs';
	*{"Conformance::commandline::$_"} = \&{"Conformance::sqlite::$_"} for qw(run columns insert);
}

my %TYPE = (
	group => 'group_name VARCHAR(100) NOT NULL',
	priority => 'priority INT',
	partition_key => 'partition_key VARCHAR(100)',
	retry_after => 'retry_after DATETIME(6)',
	attempt => 'attempt INT',
	processed_at => 'processed_at DATETIME(6)',
	headers => 'headers JSON',
);

# What README.md says of the handler.
my $HANDLER = <<'SQL';
DELIMITER //
CREATE OR REPLACE PROCEDURE handle (IN id BIGINT, IN payload LONGTEXT, IN attempt BIGINT, OUT outcome VARCHAR(20), OUT delay INT)
BEGIN
	INSERT INTO effect (payload, attempt, anchor) VALUES (payload, attempt,
		IF(payload = 'orphan' OR (payload = 'orphan_once' AND attempt = 1), 1, NULL));
	SELECT 'a result set', payload;
	CASE
		WHEN payload IN ('discard', 'retry') THEN SET outcome = payload;
		WHEN payload = 'later' THEN SET outcome = 'retry_after', delay = 3600;
		WHEN payload = 'dead' THEN SET outcome = 'dead_letter';
		WHEN payload = 'retry_once' AND attempt = 1 THEN SET outcome = 'retry';
		WHEN payload = 'later_once' AND attempt = 1 THEN SET outcome = 'retry_after', delay = 0;
		WHEN payload = 'error' OR (payload = 'error_once' AND attempt = 1) THEN
			SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'so it was asked';
		WHEN payload IN ('publish', 'publish_error') THEN
			INSERT INTO jobs (payload) VALUES ('child');
			IF payload = 'publish_error' THEN
				SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'so it was asked';
			END IF;
		WHEN payload = 'ended' THEN DELETE FROM jobs WHERE jobs.id = id;
		WHEN payload = 'steal' THEN UPDATE jobs SET locked_until = '9999-12-31' WHERE jobs.id = id;
		ELSE SELECT 1, 2, 3;
	END CASE;
END//
CREATE TRIGGER keep BEFORE DELETE ON jobs FOR EACH ROW
	IF OLD.payload = 'kept' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'kept'; END IF//
DELIMITER ;
SQL

sub new
{
	my ($class, $home) = @_;
	return bless { program => $ENV{RUSTSTREAM} // "$home/../../src/client/build/ruststream" }, $class;
}

# Why this engine cannot be run here, if so.
sub available
{
	my ($self) = @_;
	my $missing = MariadbServer::missing();

	return $missing if $missing;
	return "there is no $self->{program}" unless -x $self->{program};
	return 'this build does not serve MySQL' unless `$self->{program} --version` =~ /\bmysql\b/;
	$self->{server} = MariadbServer->new;
	return '';
}

sub url { return $_[0]{server}->url; }

sub sql
{
	my ($self, $sql) = @_;
	return split /\n/, $self->{server}->sql($sql);
}

sub columns
{
	my ($self, $scenario) = @_;
	my @columns = ('id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY', map { $TYPE{$_} // die "no role $_\n" } @{ $scenario->{roles} });
	push @columns, 'locked_until DATETIME' if $scenario->{form} eq 'lease';
	return join ', ', @columns, 'payload LONGTEXT';
}

sub setup
{
	my ($self, $scenario) = @_;
	my $columns = $self->columns($scenario);

	$self->{server}->sql('DROP DATABASE IF EXISTS app; CREATE DATABASE app', '');
	$self->{server}->sql("CREATE TABLE jobs ($columns); CREATE TABLE dead ($columns);"
		  . 'CREATE TABLE anchor (id INT PRIMARY KEY);'
		  . 'CREATE TABLE effect (number BIGINT AUTO_INCREMENT PRIMARY KEY, payload TEXT, attempt BIGINT,'
		  . " anchor INT, FOREIGN KEY (anchor) REFERENCES anchor (id));\n$HANDLER");
	$self->sql("INSERT INTO dead (id, payload) VALUES ($_, 'there')") for @{ $scenario->{taken} // [] };
	my ($text, $well) = $self->run($self->{program}, 'install', $self->url);
	die $text unless $well;
	return;
}

sub describe
{
	my ($self, $scenario) = @_;
	my @options = ('--id', 'id', '--payload', 'payload', '--create-index');

	for my $role (@{ $scenario->{roles} })
	{
		push @options, '--' . $role =~ tr/_/-/r, $role eq 'group' ? 'group_name' : $role;
	}
	push @options, '--locked-until', 'locked_until' if $scenario->{form} eq 'lease';
	push @options, '--lock-key', $scenario->{lock_key} // 'key-{id}' if $scenario->{form} eq 'advisory_lock';
	push @options, '--fifo' if $scenario->{fifo};
	push @options, "--$_", $scenario->{$_} for grep { defined $scenario->{$_} } qw(isolation mode);
	my ($text, $well) = $self->run($self->{program}, 'describe', $self->url, 'jobs', @options);
	return $well ? '' : $text;
}

sub subscribe
{
	my ($self, $scenario) = @_;
	my %settings = %{ $scenario->{settings} };
	my @options = ('--handler', 'handle');

	$settings{dead_letter} = $settings{dead_letter} eq 'table' ? 'dead' : 'graveyard' if $settings{dead_letter};
	push @options, '--' . $_ =~ tr/_/-/r, $settings{$_} for sort keys %settings;
	my ($text, $well) = $self->run($self->{program}, 'subscribe', $self->url, 'jobs', 'jobs', @options);
	return $well ? '' : $text;
}

# A literal; a time is given in seconds from now.
sub value
{
	my ($self, $name, $value) = @_;
	return 'NULL' if $value eq 'NULL';
	return "UTC_TIMESTAMP(6) + INTERVAL $value SECOND" if $name =~ /^(retry_after|locked_until)$/;
	return $value if $value =~ /^-?\d+$/;
	return "'" . $value =~ s/'/''/gr . "'";
}

sub drain
{
	my ($self) = @_;
	my ($text, $well) = $self->run($self->{program}, 'work', $self->url, '--drain', '--trace');
	die $text unless $well;
	return grep { !/^ruststream: / } split /\n/, $text;
}

sub rows
{
	my ($self, $table, $scenario) = @_;
	my %has = map { $_ => 1 } @{ $scenario->{roles} };
	my @parts = ('payload', "' '", $has{attempt} ? 'COALESCE(attempt, 1)' : "'-'");

	push @parts, "IF(retry_after > UTC_TIMESTAMP(6), ' waiting', '')" if $has{retry_after};
	push @parts, "IF(processed_at IS NULL, '', ' processed')" if $has{processed_at};
	push @parts, "IF(locked_until IS NULL, '', ' leased')" if $scenario->{form} eq 'lease';
	push @parts, "IF(group_name = 'jobs', '', CONCAT(' group=', group_name))" if $has{group};
	return $self->sql('SELECT CONCAT(' . join(', ', @parts) . ") FROM $table ORDER BY id");
}

sub effects
{
	my ($self) = @_;
	return $self->sql("SELECT CONCAT(payload, ' ', attempt) FROM effect ORDER BY number");
}

sub stop
{
	my ($self) = @_;
	$self->{server}->stop;
	return;
}

1;
