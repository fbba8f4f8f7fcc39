# The MariaDB column: the command line on a private server, and a stored procedure for the handler.  MySQL's is
# the same on another server.
package Conformance::mariadb;
use strict;
use warnings;

use File::Basename qw(dirname);
use lib dirname(__FILE__) . '/../../client';

use MysqlServer;
use engines::commandline;
our @ISA = ('Conformance::commandline');

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
-- What a transaction that is rolled back leaves as it is: the first try is known.
CREATE FUNCTION is_first_try () RETURNS BOOLEAN DETERMINISTIC MODIFIES SQL DATA
BEGIN
	UPDATE tries SET number = number + 1;
	RETURN (SELECT number FROM tries) = 1;
END//
CREATE PROCEDURE handle (IN id BIGINT, IN payload LONGTEXT, IN attempt BIGINT, OUT outcome VARCHAR(20), OUT delay INT)
BEGIN
	INSERT INTO effect (payload, attempt, anchor) VALUES (payload, attempt,
		IF(payload = 'orphan' OR (payload = 'orphan_once' AND attempt = 1), 1, NULL));
	SELECT 'a result set', payload;
	CASE
		WHEN payload = 'level' THEN
			-- What innodb_trx says is renewed once nobody has read it for a tenth of a second.
			DO SLEEP(0.2);
			UPDATE effect SET effect.payload = (SELECT LOWER(trx_isolation_level) FROM information_schema.innodb_trx
				WHERE trx_mysql_thread_id = CONNECTION_ID());
		WHEN payload = 'slow' THEN SELECT SLEEP(1.6);
		WHEN payload = 'raise' OR (payload = 'own_once' AND attempt > 1) THEN UPDATE seen SET value = value + 1;
		WHEN payload = 'own_once' THEN
			UPDATE seen SET value = value + 1;
			SET outcome = 'retry';
		WHEN payload IN ('transient', 'transient_once') THEN
			IF payload = 'transient' OR is_first_try() THEN
				SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'transient';
			END IF;
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
	CASE
		WHEN OLD.payload = 'kept' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'kept';
		WHEN OLD.payload = 'kept_once' AND is_first_try() THEN
			SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'transient';
		ELSE BEGIN END;
	END CASE//
CREATE PROCEDURE commits (IN id BIGINT, IN payload LONGTEXT, IN attempt BIGINT, OUT outcome VARCHAR(20), OUT delay INT)
BEGIN
	START TRANSACTION;
	INSERT INTO effect (payload, attempt) VALUES ('first', attempt);
	COMMIT;
	START TRANSACTION;
	INSERT INTO effect (payload, attempt) VALUES ('second', attempt);
	IF payload = 'error' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'so it was asked'; END IF;
	COMMIT;
END//
CREATE PROCEDURE left_open (IN id BIGINT, IN payload LONGTEXT, IN attempt BIGINT)
BEGIN
	START TRANSACTION;
	INSERT INTO effect (payload, attempt) VALUES ('open', attempt);
END//
DELIMITER ;
SQL

# Why this engine cannot be run here, if so.
sub available
{
	my ($self) = @_;
	my $reason = MysqlServer::missing_kind($self->kind) || $self->missing('mysql');

	return $reason if $reason;
	$self->{server} = MysqlServer->new(kind => $self->kind);
	bless $self, 'Conformance::snapshot_isolation' if $self->{server}->checks_snapshot eq 'ON';
	return '';
}

sub kind { return 'mariadb'; }

sub url { return $_[0]{server}->url; }
sub session { return $_[0]{server}->session; }
sub handler { return $_[1]{handler} // 'handle'; }

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
	return join ', ', @columns, 'payload LONGTEXT', 'loud LONGTEXT AS (UPPER(payload))';
}

sub setup
{
	my ($self, $scenario) = @_;
	my $columns = $self->columns($scenario);

	$self->{server}->sql('DROP DATABASE IF EXISTS app; CREATE DATABASE app', '');
	$self->{server}->sql("CREATE TABLE jobs ($columns); CREATE TABLE dead ($columns, origin VARCHAR(10) DEFAULT 'moved');"
		  . "CREATE TABLE seen (name VARCHAR(10) PRIMARY KEY, value INT); INSERT INTO seen VALUES ('x', 1);"
		  . 'CREATE TABLE tries (number INT) ENGINE = MyISAM; INSERT INTO tries VALUES (0);'
		  . 'CREATE TABLE anchor (id INT PRIMARY KEY);'
		  . 'CREATE TABLE effect (number BIGINT AUTO_INCREMENT PRIMARY KEY, payload TEXT, attempt BIGINT,'
		  . " anchor INT, FOREIGN KEY (anchor) REFERENCES anchor (id));\n$HANDLER");
	$self->sql("INSERT INTO dead (id, payload) VALUES ($_, 'there')") for @{ $scenario->{taken} // [] };
	$self->must('install', $self->url);
	return;
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

# A server whose innodb_snapshot_isolation is on, for what is refused there: MariaDB's default from 11.6.2 on.
package Conformance::snapshot_isolation;
our @ISA = ('Conformance::mariadb');

1;
