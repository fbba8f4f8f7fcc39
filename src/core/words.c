/*-------------------------------------------------------------------------
 *
 * words.c
 *	  The words of every enum, and the finders that read them back.
 *
 *-------------------------------------------------------------------------
 */
#include "core.h"

#include <string.h>

#define WORD_ENTRY(symbol, word) [symbol] = word,

static const char *const role_words[] = {RS_ROLES(WORD_ENTRY)};
static const char *const form_words[] = {RS_FORMS(WORD_ENTRY)};
static const char *const outcome_words[] = {RS_OUTCOMES(WORD_ENTRY)};
static const char *const isolation_words[] = {RS_ISOLATIONS(WORD_ENTRY)};
static const char *const mode_words[] = {RS_MODES(WORD_ENTRY)};
static const char *const dialect_words[] = {RS_DIALECTS(WORD_ENTRY)};
static const char *const backoff_words[] = {RS_BACKOFFS(WORD_ENTRY)};
static const char *const step_words[] = {RS_STEPS(WORD_ENTRY)};
static const char *const operation_words[] = {RS_OPERATIONS(WORD_ENTRY)};
static const char *const parameter_words[] = {RS_PARAMETERS(WORD_ENTRY)};

#define TEXT_ENTRY(symbol, text, hint) [symbol] = text,
#define HINT_ENTRY(symbol, text, hint) [symbol] = hint,

static const char *const problem_texts[] = {RS_PROBLEMS(TEXT_ENTRY)};
static const char *const problem_hints[] = {RS_PROBLEMS(HINT_ENTRY)};

const char *
rs_role_word(rs_role role)
{
	return role_words[role];
}

const char *
rs_form_word(rs_form form)
{
	return form_words[form];
}

const char *
rs_outcome_word(rs_outcome outcome)
{
	return outcome_words[outcome];
}

const char *
rs_isolation_word(rs_isolation isolation)
{
	return isolation_words[isolation];
}

const char *
rs_mode_word(rs_mode mode)
{
	return mode_words[mode];
}

const char *
rs_dialect_word(rs_dialect dialect)
{
	return dialect_words[dialect];
}

const char *
rs_backoff_word(rs_backoff backoff)
{
	return backoff_words[backoff];
}

const char *
rs_step_word(rs_step step)
{
	return step_words[step];
}

const char *
rs_operation_word(rs_operation operation)
{
	return operation_words[operation];
}

const char *
rs_parameter_word(rs_parameter parameter)
{
	return parameter_words[parameter];
}

const char *
rs_problem_text(rs_problem_code code)
{
	return problem_texts[code];
}

const char *
rs_problem_hint(rs_problem_code code)
{
	return problem_hints[code];
}

/* The index of a word among count words; count where it is not there. */
static int
find_word(const char *const *words, int count, const char *word)
{
	int i = 0;

	while (i < count && strcmp(words[i], word) != 0)
		i++;
	return i;
}

bool
rs_form_find(const char *word, rs_form *result)
{
	int found = find_word(form_words, RS_FORM_COUNT, word);

	if (found == RS_FORM_COUNT)
		return false;
	*result = (rs_form) found;
	return true;
}

bool
rs_outcome_find(const char *word, rs_outcome *result)
{
	int found = find_word(outcome_words, RS_OUTCOME_COUNT, word);

	if (found == RS_OUTCOME_COUNT)
		return false;
	*result = (rs_outcome) found;
	return true;
}

bool
rs_backoff_find(const char *word, rs_backoff *result)
{
	int found = find_word(backoff_words, RS_BACKOFF_COUNT, word);

	if (found == RS_BACKOFF_COUNT)
		return false;
	*result = (rs_backoff) found;
	return true;
}

/* Not tolower(): our words are ASCII, and the locale must not matter. */
static char
ascii_lower(char c)
{
	return c >= 'A' && c <= 'Z' ? (char) (c - 'A' + 'a') : c;
}

/* Whether text, in any case, is the lower-case word. */
static bool
is_word_in_any_case(const char *text, const char *word)
{
	while (*word != '\0' && ascii_lower(*text) == *word)
	{
		text++;
		word++;
	}
	return *text == '\0' && *word == '\0';
}

bool
rs_isolation_find(const char *word, rs_isolation *result)
{
	for (int i = 0; i < RS_ISOLATION_COUNT; i++)
	{
		if (is_word_in_any_case(word, isolation_words[i]))
		{
			*result = (rs_isolation) i;
			return true;
		}
	}
	return false;
}

bool
rs_mode_find(const char *word, rs_mode *result)
{
	for (int i = 0; i < RS_MODE_COUNT; i++)
	{
		if (is_word_in_any_case(word, mode_words[i]))
		{
			*result = (rs_mode) i;
			return true;
		}
	}
	return false;
}
