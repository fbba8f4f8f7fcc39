-- The table that the bench of MySQL and MariaDB works on; @rows says how many rows there are.
CREATE TABLE jobs (
	id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
	attempt INT,
	locked_until DATETIME,
	payload TEXT NOT NULL
) ENGINE = InnoDB;
CREATE TABLE effect (job BIGINT NOT NULL PRIMARY KEY, payload TEXT NOT NULL) ENGINE = InnoDB;
INSERT INTO jobs (payload) SELECT CONCAT('{"number": ', seq, '}') FROM seq_1_to_100000 WHERE seq <= @rows;
ANALYZE TABLE jobs;
