/*-------------------------------------------------------------------------
 *
 * keys.h
 *	  Advisory keys where the database has none: kept in the process, by the
 *	  identity of the database's file.
 *
 * As no other process can see them, only one may serve a file: it holds a lock on a file beside the
 * database (its name and "-ruststream"), which the system drops when the process ends, however
 * it ends.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_KEYS_H
#define RUSTSTREAM_KEYS_H

#include <stdbool.h>
#include <sys/types.h>

/* A file whose keys this process serves. */
typedef struct rs_key_file rs_key_file;

typedef enum rs_key_result
{
	RS_KEY_DONE,
	RS_KEY_OTHER_PROCESS, /* *pid: which, or 0 */
	RS_KEY_LINKED,        /* the file has several names: hard links */
	RS_KEY_SYSTEM,        /* errno says why */
	RS_KEY_NO_MEMORY
} rs_key_result;

/* Begin and end using a file's keys; the uses are counted. */
extern rs_key_result rs_keys_open(const char *path, rs_key_file **file, pid_t *pid);
extern void rs_keys_close(rs_key_file *file, const void *owner);

/* Owners are told apart by address.  A key that its owner holds is not had a second time. */
extern rs_key_result rs_keys_lock(rs_key_file *file, const char *key, const void *owner,
								  bool *locked);
extern void rs_keys_unlock(rs_key_file *file, const char *key, const void *owner);
/* Held by this owner; NULL: by anybody. */
extern bool rs_keys_held(rs_key_file *file, const char *key, size_t length, const void *owner);

#endif /* RUSTSTREAM_KEYS_H */
