/*-------------------------------------------------------------------------
 *
 * driver_mysql_connect.c
 *	  The driver for MySQL and MariaDB: a connection, as the URL wants it.
 *
 *-------------------------------------------------------------------------
 */
#include "client/driver_mysql.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct parameters
{
	const char *socket;
	const char *tls; /* "off", "on", "verify" */
	const char *tls_ca;
	unsigned connect_timeout; /* seconds */
} parameters;

static bool
parse_seconds(const char *text, unsigned *result)
{
	char *end;
	unsigned long number = strtoul(text, &end, 10);

	if (*text < '0' || *text > '9' || *end != '\0' || number < 1 || number > 3600)
		return false;
	*result = (unsigned) number;
	return true;
}

static bool
read_parameters(const rs_url *url, parameters *given, rs_error *error)
{
	*given = (parameters){.tls = "off", .connect_timeout = 10};
	for (int i = 0; i < url->parameter_count; i++)
	{
		const char *name = url->parameter_names[i];
		const char *value = url->parameter_values[i];
		bool known = true;
		bool fine = true;

		if (strcmp(name, "socket") == 0)
			given->socket = value;
		else if (strcmp(name, "tls") == 0)
		{
			given->tls = value;
			fine = strcmp(value, "off") == 0 || strcmp(value, "on") == 0 ||
				   strcmp(value, "verify") == 0;
		}
		else if (strcmp(name, "tls_ca") == 0)
			given->tls_ca = value;
		else if (strcmp(name, "connect_timeout") == 0)
			fine = parse_seconds(value, &given->connect_timeout);
		else
			known = false;
		if (known && fine)
			continue;
		rs_error_set(error, RUSTSTREAM_MISUSE, "",
					 "MySQL's and MariaDB's parameters are socket=PATH, tls=off|on|verify, "
					 "tls_ca=PATH and connect_timeout=SECONDS.",
					 known ? "the URL's parameter \"%s\" cannot be \"%.100s\""
						   : "the URL has an unknown parameter \"%s\"",
					 name, value);
		return false;
	}
	if (url->database == NULL || url->database[0] == '\0')
	{
		rs_error_set(error, RUSTSTREAM_MISUSE, "", "Write mysql://user@host/database.",
					 "the URL names no database");
		return false;
	}
	return true;
}

static void
initialize_library(void)
{
	(void) mysql_library_init(0, NULL, NULL);
}

MYSQL *
rs_mysql_connect(const rs_url *url, rs_error *error)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	parameters given;
	my_bool yes = 1;
	my_bool verifies;
	bool wants_tls;
	MYSQL *db;

	(void) pthread_once(&once, initialize_library);
	if (!read_parameters(url, &given, error))
		return NULL;
	db = mysql_init(NULL);
	if (db == NULL)
	{
		rs_error_set(error, RUSTSTREAM_NO_MEMORY, "", NULL, "out of memory");
		return NULL;
	}
	wants_tls = strcmp(given.tls, "off") != 0;
	verifies = strcmp(given.tls, "verify") == 0;
	(void) mysql_options(db, MYSQL_SET_CHARSET_NAME, "utf8mb4");
	(void) mysql_options(db, MYSQL_OPT_CONNECT_TIMEOUT, &given.connect_timeout);
	if (wants_tls)
	{
		(void) mysql_options(db, MYSQL_OPT_SSL_ENFORCE, &yes);
		(void) mysql_options(db, MYSQL_OPT_SSL_VERIFY_SERVER_CERT, &verifies);
		if (given.tls_ca != NULL)
			(void) mysql_options(db, MYSQL_OPT_SSL_CA, given.tls_ca);
	}
	if (mysql_real_connect(db, url->host, url->user, url->password, url->database,
						   (unsigned) url->port, given.socket, CLIENT_FOUND_ROWS) == NULL)
	{
		rs_error_set(error, RUSTSTREAM_UNAVAILABLE, mysql_sqlstate(db),
					 mysql_errno(db) == RS_MYSQL_ACCESS_DENIED ? RS_HINT_PASSWORD : NULL,
					 "%s: %.800s (error %u)", url->display, mysql_error(db), mysql_errno(db));
		mysql_close(db);
		return NULL;
	}
	/* Where the server has no TLS the library connects in clear, without a word. */
	if (wants_tls && mysql_get_ssl_cipher(db) == NULL)
	{
		rs_error_set(error, RUSTSTREAM_UNAVAILABLE, "",
					 "Have the server offer TLS, or leave tls out of the URL.",
					 "%s: the connection is not encrypted, though the URL says tls=%s",
					 url->display, given.tls);
		mysql_close(db);
		return NULL;
	}
	return db;
}
