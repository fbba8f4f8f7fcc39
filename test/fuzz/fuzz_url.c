/*-------------------------------------------------------------------------
 *
 * fuzz_url.c
 *	  Any text as a URL: read or refused, and its password never shown.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	rs_arena arena = {0};
	rs_url url;
	rs_error error = {0};
	char *text = malloc(size + 1);

	if (text == NULL)
		return 0;
	memcpy(text, data, size);
	text[size] = '\0';
	if (rs_url_parse(text, &arena, &url, &error))
	{
		if (url.display == NULL || url.port < 0 || url.port > 65535 ||
			(url.dialect == RS_DIALECT_SQLITE && url.database == NULL))
			abort();
		for (int i = 0; i < url.parameter_count; i++)
		{
			if (url.parameter_names[i] == NULL || url.parameter_values[i] == NULL ||
				rs_url_parameter(&url, url.parameter_names[i]) == NULL)
				abort();
		}
	}
	else if (error.code != RUSTSTREAM_MISUSE || error.message[0] == '\0')
		abort();
	rs_arena_free(&arena);
	free(text);
	return 0;
}
