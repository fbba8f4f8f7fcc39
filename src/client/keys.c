/*-------------------------------------------------------------------------
 *
 * keys.c
 *	  See keys.h.
 *
 *-------------------------------------------------------------------------
 */
#include "client/keys.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct held_key
{
	struct held_key *next;
	const void *owner;
	size_t length;
	char key[];
} held_key;

struct rs_key_file
{
	rs_key_file *next;
	dev_t device;
	ino_t inode;
	int uses;
	int lock; /* the descriptor that holds the lock */
	held_key *held;
};

/* Guards all files and keys: they are few, and looked at for microseconds. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static rs_key_file *files;

/* ------------------------------------------------------------------ files */

static pid_t
read_pid(int lock)
{
	char text[32] = "";

	if (pread(lock, text, sizeof(text) - 1, 0) <= 0)
		return 0;
	return (pid_t) strtol(text, NULL, 10);
}

/* Take the file's lock and write who has it; else *pid is who has, where that is known. */
static rs_key_result
take_lock(const char *path, int *lock, pid_t *pid)
{
	size_t size = strlen(path) + sizeof("-ruststream");
	char *name = malloc(size);
	char text[32];
	int length;
	bool is_written;

	if (name == NULL)
		return RS_KEY_NO_MEMORY;
	(void) snprintf(name, size, "%s-ruststream", path);
	*lock = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	free(name);
	if (*lock < 0)
		return RS_KEY_SYSTEM;
	/* Of the open file, not of the process: closing another descriptor does not drop it. */
	if (flock(*lock, LOCK_EX | LOCK_NB) != 0)
	{
		rs_key_result result = errno == EWOULDBLOCK ? RS_KEY_OTHER_PROCESS : RS_KEY_SYSTEM;
		int problem = errno;

		*pid = read_pid(*lock);
		(void) close(*lock);
		errno = problem;
		return result;
	}
	length = snprintf(text, sizeof(text), "%ld\n", (long) getpid());
	/* For the message that another process gives: without it there is just no number. */
	is_written = ftruncate(*lock, 0) == 0 && pwrite(*lock, text, (size_t) length, 0) == length;
	(void) is_written;
	return RS_KEY_DONE;
}

static rs_key_result
open_locked(const char *path, const struct stat *identity, rs_key_file **result, pid_t *pid)
{
	rs_key_file *file = files;
	rs_key_result taken;

	while (file != NULL && (file->device != identity->st_dev || file->inode != identity->st_ino))
		file = file->next;
	if (file == NULL)
	{
		file = calloc(1, sizeof(rs_key_file));
		if (file == NULL)
			return RS_KEY_NO_MEMORY;
		taken = take_lock(path, &file->lock, pid);
		if (taken != RS_KEY_DONE)
		{
			int problem = errno;

			free(file);
			errno = problem;
			return taken;
		}
		file->device = identity->st_dev;
		file->inode = identity->st_ino;
		file->next = files;
		files = file;
	}
	file->uses++;
	*result = file;
	return RS_KEY_DONE;
}

rs_key_result
rs_keys_open(const char *path, rs_key_file **file, pid_t *pid)
{
	struct stat identity;
	rs_key_result result;

	*pid = 0;
	if (stat(path, &identity) != 0)
		return RS_KEY_SYSTEM;
	/* By its other name it would have another lock file. */
	if (identity.st_nlink > 1)
		return RS_KEY_LINKED;
	pthread_mutex_lock(&mutex);
	result = open_locked(path, &identity, file, pid);
	pthread_mutex_unlock(&mutex);
	return result;
}

/* ------------------------------------------------------------------- keys */

/* Where the pointer to a key is, or the list's end; the mutex is held. */
static held_key **
find(rs_key_file *file, const char *key, size_t length)
{
	held_key **at = &file->held;

	while (*at != NULL &&
		   ((*at)->length != length || (length > 0 && memcmp((*at)->key, key, length) != 0)))
		at = &(*at)->next;
	return at;
}

void
rs_keys_close(rs_key_file *file, const void *owner)
{
	rs_key_file **at = &files;
	held_key **key;

	pthread_mutex_lock(&mutex);
	key = &file->held;
	while (*key != NULL)
	{
		held_key *gone = *key;

		if (gone->owner == owner)
		{
			*key = gone->next;
			free(gone);
		}
		else
			key = &gone->next;
	}
	if (--file->uses == 0)
	{
		while (*at != file)
			at = &(*at)->next;
		*at = file->next;
		(void) close(file->lock);
		free(file);
	}
	pthread_mutex_unlock(&mutex);
}

rs_key_result
rs_keys_lock(rs_key_file *file, const char *key, const void *owner, bool *locked)
{
	size_t length = strlen(key);
	held_key *mine = malloc(sizeof(held_key) + length + 1);

	*locked = false;
	if (mine == NULL)
		return RS_KEY_NO_MEMORY;
	mine->owner = owner;
	mine->length = length;
	memcpy(mine->key, key, length + 1);
	pthread_mutex_lock(&mutex);
	if (*find(file, key, length) == NULL)
	{
		mine->next = file->held;
		file->held = mine;
		*locked = true;
	}
	pthread_mutex_unlock(&mutex);
	if (!*locked)
		free(mine);
	return RS_KEY_DONE;
}

void
rs_keys_unlock(rs_key_file *file, const char *key, const void *owner)
{
	held_key **at;
	held_key *gone = NULL;

	pthread_mutex_lock(&mutex);
	at = find(file, key, strlen(key));
	if (*at != NULL && (*at)->owner == owner)
	{
		gone = *at;
		*at = gone->next;
	}
	pthread_mutex_unlock(&mutex);
	free(gone);
}

bool
rs_keys_held(rs_key_file *file, const char *key, size_t length, const void *owner)
{
	const held_key *found;
	bool held;

	pthread_mutex_lock(&mutex);
	found = *find(file, key, length);
	held = found != NULL && (owner == NULL || found->owner == owner);
	pthread_mutex_unlock(&mutex);
	return held;
}
