/*-------------------------------------------------------------------------
 *
 * headers_postgresql.h
 *	  What statement_postgresql.c does with headers: a dead letter carries where
 *	  it came from, and loses that again on its way back.
 *
 * Headers are an object of strings, but whatever else a user has put there must
 * neither break the statement nor be changed by it.  Where the column is json and not
 * jsonb, text is put before the last brace and nothing is parsed: jsonb
 * refuses some of what json lets pass.  Braces are holes of a template, so
 * the literals write them as \x7b and \x7d, and {} comes from a function.
 *
 * :origin is the text of an object of one header at least; the group is the row's.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RUSTSTREAM_HEADERS_POSTGRESQL_H
#define RUSTSTREAM_HEADERS_POSTGRESQL_H

#define HEADERS "ruststream_row.{headers}"
#define ORIGIN_GROUP "'ruststream-origin-group', ruststream_row.{group}::pg_catalog.text"
#define IS_OBJECT(type)                                                                            \
	"COALESCE(pg_catalog." type "_typeof(" HEADERS "), 'object') OPERATOR(pg_catalog.=) 'object'"

#define JSONB_WITH_ORIGIN                                                                          \
	"CASE WHEN " IS_OBJECT("jsonb") " THEN COALESCE(" HEADERS ", pg_catalog.jsonb_build_object())" \
									"[group: OPERATOR(pg_catalog.||) "                             \
									"pg_catalog.jsonb_build_object(" ORIGIN_GROUP ")]"             \
									" OPERATOR(pg_catalog.||) :origin::pg_catalog.jsonb"           \
									" ELSE " HEADERS " END"

/* Its text, from the first brace to before the last; whether there is a header in it. */
#define SPACE "E' \\n\\r\\t'"
#define SPACE_AND_BRACES "E' \\n\\r\\t\\x7b\\x7d'"
#define TEXT_OF(object) "(" object ")::pg_catalog.text"
#define OPEN_TEXT(object) "pg_catalog.left(pg_catalog.rtrim(" TEXT_OF(object) ", " SPACE "), -1)"
#define OWN_HEADERS "COALESCE(" HEADERS ", pg_catalog.json_build_object())"
#define JSON_WITH_ORIGIN                                                                           \
	"CASE WHEN " IS_OBJECT("json") " THEN pg_catalog.concat(" OPEN_TEXT(                           \
		OWN_HEADERS) ", "                                                                          \
					 "CASE WHEN pg_catalog.btrim(" TEXT_OF(                                        \
						 OWN_HEADERS) ", " SPACE_AND_BRACES                                        \
									  ") OPERATOR(pg_catalog.<>) '' THEN ',' END, "                \
									  "[group:pg_catalog.substr(" OPEN_TEXT(                       \
										  "pg_catalog.json_build_object(" ORIGIN_GROUP             \
										  ")") ", 2), ',', ]pg_catalog.substr(:origin, "           \
											   "2))::pg_catalog.json ELSE " HEADERS " END"

/* The headers of a row that becomes a dead letter. */
#define HEADERS_WITH_ORIGIN "[json:" JSON_WITH_ORIGIN "][!json:" JSONB_WITH_ORIGIN "]"

/* The headers of a dead letter that goes back; :origin_headers are the names of what goes. */
#define HEADERS_WITHOUT_ORIGIN                                                                     \
	"CASE WHEN " HEADERS " IS NULL THEN NULL"                                                      \
	"[!json: WHEN " IS_OBJECT(                                                                     \
		"jsonb") " THEN " HEADERS " OPERATOR(pg_catalog.-) "                                       \
				 ":origin_headers]"                                                                \
				 "[json: WHEN " IS_OBJECT(                                                         \
					 "json") " THEN COALESCE((SELECT pg_catalog.json_object_agg("                  \
							 "ruststream_header.key, ruststream_header.value)"                     \
							 " FROM pg_catalog.json_each(" HEADERS                                 \
							 ") AS ruststream_header WHERE ruststream_header.key"                  \
							 " OPERATOR(pg_catalog.<>) ALL (:origin_headers)), "                   \
							 "pg_catalog.json_build_object())]"                                    \
							 " ELSE " HEADERS " END"

#endif /* RUSTSTREAM_HEADERS_POSTGRESQL_H */
