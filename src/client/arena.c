/*-------------------------------------------------------------------------
 *
 * arena.c
 *	  Memory that goes away all at once, and the values that travel in it.
 *
 *-------------------------------------------------------------------------
 */
#include "client/client.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_SIZE ((size_t) 8192)

struct rs_block
{
	rs_block *next;
	size_t size;
	size_t used;
	max_align_t data[];
};

static void *
new_block(rs_arena *arena, size_t size)
{
	size_t room = size > BLOCK_SIZE ? size : BLOCK_SIZE;
	rs_block *block = malloc(sizeof(rs_block) + room);

	if (block == NULL)
	{
		arena->is_exhausted = true;
		return NULL;
	}
	block->next = arena->blocks;
	block->size = room;
	block->used = size;
	arena->blocks = block;
	return block->data;
}

void *
rs_alloc(rs_arena *arena, size_t size)
{
	rs_block *block = arena->blocks;
	size_t aligned;
	void *result;

	if (size > SIZE_MAX - 2 * BLOCK_SIZE)
	{
		arena->is_exhausted = true;
		return NULL;
	}
	aligned = (size + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
	if (block != NULL && block->size - block->used >= aligned)
	{
		result = (char *) block->data + block->used;
		block->used += aligned;
	}
	else
		result = new_block(arena, aligned);
	if (result != NULL)
		memset(result, 0, aligned);
	return result;
}

char *
rs_copy_bytes(rs_arena *arena, const char *bytes, size_t length)
{
	char *copy = length < SIZE_MAX ? rs_alloc(arena, length + 1) : NULL;

	if (copy != NULL && length > 0)
		memcpy(copy, bytes, length);
	return copy;
}

char *
rs_copy(rs_arena *arena, const char *text)
{
	return text == NULL ? NULL : rs_copy_bytes(arena, text, strlen(text));
}

/* As "%lld" has it, without its cost: each delivery needs the text of its id. */
char *
rs_copy_integer(rs_arena *arena, int64_t number)
{
	char text[20];
	char *at = text + sizeof(text);
	uint64_t rest = number < 0 ? 0 - (uint64_t) number : (uint64_t) number;

	do
	{
		*--at = (char) ('0' + rest % 10);
		rest /= 10;
	} while (rest > 0);
	if (number < 0)
		*--at = '-';
	return rs_copy_bytes(arena, at, (size_t) (text + sizeof(text) - at));
}

char *
rs_print(rs_arena *arena, const char *format, ...)
{
	va_list arguments;
	int length;
	char *result;

	va_start(arguments, format);
	length = vsnprintf(NULL, 0, format, arguments);
	va_end(arguments);
	if (length < 0)
		return NULL;
	result = rs_alloc(arena, (size_t) length + 1);
	if (result == NULL)
		return NULL;
	va_start(arguments, format);
	(void) vsnprintf(result, (size_t) length + 1, format, arguments);
	va_end(arguments);
	return result;
}

void *
rs_grow(rs_arena *arena, void *items, int count, int *room, size_t size)
{
	int more = *room == 0 ? 16 : *room * 2;
	void *larger;

	if (count < *room)
		return items;
	larger = rs_alloc(arena, size * (size_t) more);
	if (larger == NULL)
		return NULL;
	if (count > 0)
		memcpy(larger, items, size * (size_t) count);
	*room = more;
	return larger;
}

void
rs_arena_reset(rs_arena *arena)
{
	rs_block *first = arena->blocks;

	arena->is_exhausted = false;
	if (first == NULL)
		return;
	while (first->next != NULL)
	{
		rs_block *next = first->next;

		free(first);
		first = next;
	}
	first->used = 0;
	arena->blocks = first;
}

void
rs_arena_free(rs_arena *arena)
{
	while (arena->blocks != NULL)
	{
		rs_block *next = arena->blocks->next;

		free(arena->blocks);
		arena->blocks = next;
	}
}

/* ----------------------------------------------------------------- values */

rs_value
rs_value_of_integer(int64_t integer)
{
	return (rs_value){.kind = RS_INTEGER, .integer = integer};
}

rs_value
rs_value_of_text(const char *text)
{
	if (text == NULL)
		return RS_VALUE_NULL;
	return (rs_value){.kind = RS_TEXT, .text = text, .length = strlen(text)};
}

rs_value
rs_value_of_bytes(const void *bytes, size_t length)
{
	if (bytes == NULL)
		return RS_VALUE_NULL;
	return (rs_value){.kind = RS_BYTES, .text = bytes, .length = length};
}

bool
rs_value_equal(const rs_value *a, const rs_value *b)
{
	if (a->kind != b->kind)
		return false;
	switch (a->kind)
	{
		case RS_NULL:
			return true;
		case RS_INTEGER:
			return a->integer == b->integer;
		case RS_REAL:
			return !(a->real < b->real) && !(a->real > b->real);
		default:
			return a->length == b->length &&
				   (a->length == 0 || memcmp(a->text, b->text, a->length) == 0);
	}
}

char *
rs_text_of(rs_arena *arena, const rs_value *value)
{
	if (value->kind == RS_INTEGER)
		return rs_print(arena, "%lld", (long long) value->integer);
	if (value->kind != RS_TEXT && value->kind != RS_BYTES)
		return NULL;
	return rs_copy_bytes(arena, value->text, value->length);
}

rs_value
rs_copy_value(rs_arena *arena, const rs_value *value)
{
	rs_value copy = *value;

	if (value->kind == RS_TEXT || value->kind == RS_BYTES)
	{
		copy.text = rs_copy_bytes(arena, value->text, value->length);
		if (copy.text == NULL)
			return RS_VALUE_NULL;
	}
	return copy;
}
