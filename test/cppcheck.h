/*
 * What cppcheck has to know of the server's headers, which it does not read:
 * above all, that errors do not return.
 */
#define PG_VERSION_NUM 150000
#define CppAsString2(x) "x"

#define DEBUG1 14
#define LOG 15
#define NOTICE 18
#define WARNING 19
#define ERROR 21
#define FATAL 22
#define PANIC 23
#define ereport(level, ...)                                                                        \
	do                                                                                             \
	{                                                                                              \
		(void) (__VA_ARGS__);                                                                      \
		if ((level) >= ERROR)                                                                      \
			abort();                                                                               \
	} while (0)
#define elog(level, ...)                                                                           \
	do                                                                                             \
	{                                                                                              \
		(void) (__VA_ARGS__);                                                                      \
		if ((level) >= ERROR)                                                                      \
			abort();                                                                               \
	} while (0)

#define foreach(cell, list)                                                                        \
	for (cell = list_head(list); cell != NULL; cell = lnext(list, cell))
