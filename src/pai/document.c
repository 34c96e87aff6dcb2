// SPDX-License-Identifier: Apache-2.0
//
// document.c - reads a job file or an answer of the server: YAML, or JSON, which is YAML too.
//
// libyaml makes a document of nodes with their places in the text; this file adds what a scalar is
// (a quoted one is a text, a plain one may be a number, a truth value or nothing, as YAML 1.2 and
// JSON have it) and how to get around. Nodes live as long as their document. libyaml takes more
// than JSON (commas before a bracket, comments, True); where a server wants JSON, jansson says
// whether it is. Both check UTF-8 and how deeply brackets are nested.
#include "pai/internal.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <yaml.h>

struct pai_document {
    yaml_document_t yaml;
};

// A pai_node_t is a node of libyaml: the name keeps its header out of pai.h.
static const yaml_node_t *yaml_of(const pai_node_t *node)
{
    return (const yaml_node_t *)(const void *)node;
}

// libyaml wants a document it may change, and changes nothing here.
static yaml_document_t *yaml_in(const pai_document_t *document)
{
    return (yaml_document_t *)&document->yaml;
}

static const pai_node_t *node_at(const pai_document_t *document, int index)
{
    return (const pai_node_t *)(const void *)yaml_document_get_node(yaml_in(document), index);
}

// libyaml takes ever longer for each further bracket: far fewer than it could read are let through.
static bool is_shallow(yaml_parser_t *parser)
{
    int depth = 0;
    for (bool at_end = false; !at_end && depth <= PAI_MAX_DEPTH;) {
        yaml_event_t event;
        at_end = !yaml_parser_parse(parser, &event) || event.type == YAML_STREAM_END_EVENT;
        depth += event.type == YAML_MAPPING_START_EVENT || event.type == YAML_SEQUENCE_START_EVENT;
        depth -= event.type == YAML_MAPPING_END_EVENT || event.type == YAML_SEQUENCE_END_EVENT;
        yaml_event_delete(&event);
    }
    return depth <= PAI_MAX_DEPTH;
}

static hvd_status_t check_depth(const char *text, size_t bytes, const char *file, err_t *err)
{
    yaml_parser_t parser;
    if (!yaml_parser_initialize(&parser)) {
        return fail(err, HVD_NO_MEMORY, "no memory to read %s", file);
    }
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, bytes);
    bool is_right = is_shallow(&parser);
    size_t line = parser.mark.line + 1;
    yaml_parser_delete(&parser);
    return is_right ? HVD_OK
                    : fail(err, HVD_INVALID_ARGUMENT,
                           "%s, line %zu: maps and lists are nested more than %d deep", file, line,
                           PAI_MAX_DEPTH);
}

hvd_status_t pai_document_read(const char *text, size_t bytes, const char *file,
                               pai_document_t **document_p, err_t *err)
{
    hvd_status_t status = check_depth(text, bytes, file, err);
    yaml_parser_t parser;
    if (status != HVD_OK) {
        return status;
    }
    pai_document_t *document = calloc(1, sizeof *document);
    if (document == NULL || !yaml_parser_initialize(&parser)) {
        free(document);
        return fail(err, HVD_NO_MEMORY, "no memory to read %s", file);
    }
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, bytes);
    bool is_read = yaml_parser_load(&parser, &document->yaml);
    if (!is_read) {
        fail(err, HVD_INVALID_ARGUMENT, "%s, line %zu: %s", file, parser.problem_mark.line + 1,
             parser.problem != NULL ? parser.problem : "this is neither JSON nor YAML");
        free(document);
    } else {
        *document_p = document;
    }
    yaml_parser_delete(&parser);
    return is_read ? HVD_OK : HVD_INVALID_ARGUMENT;
}

void pai_document_free(pai_document_t *document)
{
    if (document != NULL) {
        yaml_document_delete(&document->yaml);
        free(document);
    }
}

const pai_node_t *pai_root(const pai_document_t *document)
{
    return (const pai_node_t *)(const void *)yaml_document_get_root_node(yaml_in(document));
}

// --- What a node is ------------------------------------------------------------------------------

static bool is_one_of(const char *text, const char *const *words)
{
    while (*words != NULL && strcmp(*words, text) != 0) {
        words++;
    }
    return *words != NULL;
}

static unsigned type_of_plain(const char *text)
{
    static const char *const nothings[] = {"", "~", "null", "Null", "NULL", NULL};
    static const char *const truths[] = {"true", "True", "TRUE", "false", "False", "FALSE", NULL};
    char *end;
    if (is_one_of(text, nothings)) {
        return IS_NULL;
    }
    if (is_one_of(text, truths)) {
        return IS_BOOL;
    }
    if (strchr("+-.0123456789", text[0]) == NULL) {
        return IS_TEXT;
    }
    errno = 0;
    (void)strtoll(text, &end, 10);
    if (*end == '\0' && end != text && errno == 0) {
        return IS_INT;
    }
    (void)strtod(text, &end);
    return *end == '\0' && end != text ? IS_REAL : IS_TEXT;
}

unsigned pai_type(const pai_node_t *node)
{
    const yaml_node_t *yaml = yaml_of(node);
    switch (yaml->type) {
    case YAML_MAPPING_NODE:
        return IS_MAP;
    case YAML_SEQUENCE_NODE:
        return IS_LIST;
    case YAML_SCALAR_NODE:
        return yaml->data.scalar.style == YAML_PLAIN_SCALAR_STYLE
                   ? type_of_plain((const char *)yaml->data.scalar.value)
                   : IS_TEXT;
    default:
        return IS_NULL;
    }
}

size_t pai_line(const pai_node_t *node)
{
    return yaml_of(node)->start_mark.line + 1;
}

const char *pai_text(const pai_node_t *node)
{
    const yaml_node_t *yaml = yaml_of(node);
    return yaml != NULL && yaml->type == YAML_SCALAR_NODE ? (const char *)yaml->data.scalar.value
                                                          : "";
}

int64_t pai_int(const pai_node_t *node, int64_t otherwise)
{
    return node != NULL && pai_type(node) == IS_INT ? strtoll(pai_text(node), NULL, 10) : otherwise;
}

// --- Getting around ------------------------------------------------------------------------------

int pai_count(const pai_document_t *document, const pai_node_t *node)
{
    const yaml_node_t *yaml = yaml_of(node);
    (void)document;
    if (yaml != NULL && yaml->type == YAML_MAPPING_NODE) {
        return (int)(yaml->data.mapping.pairs.top - yaml->data.mapping.pairs.start);
    }
    return yaml != NULL && yaml->type == YAML_SEQUENCE_NODE
               ? (int)(yaml->data.sequence.items.top - yaml->data.sequence.items.start)
               : 0;
}

const pai_node_t *pai_item(const pai_document_t *document, const pai_node_t *node, int i)
{
    return node_at(document, yaml_of(node)->data.sequence.items.start[i]);
}

const pai_node_t *pai_key(const pai_document_t *document, const pai_node_t *map, int i)
{
    return node_at(document, yaml_of(map)->data.mapping.pairs.start[i].key);
}

const pai_node_t *pai_value(const pai_document_t *document, const pai_node_t *map, int i)
{
    return node_at(document, yaml_of(map)->data.mapping.pairs.start[i].value);
}

const pai_node_t *pai_get(const pai_document_t *document, const pai_node_t *map, const char *key)
{
    int n = map != NULL && pai_type(map) == IS_MAP ? pai_count(document, map) : 0;
    for (int i = 0; i < n; i++) {
        if (strcmp(pai_text(pai_key(document, map, i)), key) == 0) {
            return pai_value(document, map, i);
        }
    }
    return NULL;
}

// --- JSON and nothing else -----------------------------------------------------------------------

// Numbers of any size pass: whether they fit is for the rules to say.
hvd_status_t pai_json_check(const char *text, size_t bytes, const char *file, err_t *err)
{
    json_error_t error;
    json_t *json =
        json_loadb(text, bytes, JSON_DECODE_ANY | JSON_DECODE_INT_AS_REAL | JSON_ALLOW_NUL, &error);
    if (json == NULL) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "%s, line %d: a v1 job is JSON: here, at column %d, it is not: %s", file,
                    error.line, error.column, error.text);
    }
    json_decref(json);
    return HVD_OK;
}

// --- Files ---------------------------------------------------------------------------------------

hvd_status_t pai_file_read(const char *path, buf_t *text, err_t *err)
{
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return fail_errno(err, errno, "cannot open %s", path);
    }
    for (size_t n = 1; n > 0 && text->len <= PAI_FILE_LIMIT && buf_reserve(text, 4096);) {
        n = fread(text->data + text->len, 1, 4096, file);
        text->len += n;
    }
    bool is_whole = feof(file) && !ferror(file) && !text->failed && text->len <= PAI_FILE_LIMIT;
    fclose(file);
    buf_append(text, "", 1);
    if (!is_whole || text->failed) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "cannot read all of %s: is it a file, and smaller than 1 MiB?", path);
    }
    text->len--;
    return HVD_OK;
}
