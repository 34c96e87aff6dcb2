// SPDX-License-Identifier: Apache-2.0
//
// yaml.c - the configuration file: maps of maps of values, read with libyaml.
//
// A value's key is its path with dots ("params.cycle_time_ms"), which is looked up in the table of
// options. A list of values counts as one value with commas; null as not said. Positions are told
// in errors. Nothing is kept.
#include "cli/options.h"

#include <errno.h>
#include <stdlib.h>
#include <yaml.h>

#define MAX_DEPTH 8
#define KEY_BYTES 256

typedef struct yaml_walk {
    options_t *options;
    const char *path;
    char keys[MAX_DEPTH][KEY_BYTES]; // key in force at each depth
    int depth;                       // of maps
    bool wants_value[MAX_DEPTH];
    bool in_list;
    buf_t list;
} yaml_walk_t;

// A key that says the opposite of its option.
static bool yaml_is_inverted(const option_t *option)
{
    return strcmp(option->info.kind, "bool") == 0 &&
           strncmp(option->info.flag, "--no-", strlen("--no-")) == 0;
}

static hvd_status_t set_inverted(options_t *options, int i, const char *text, const char *said_as,
                                 err_t *err)
{
    option_t option = option_at(i);
    bool value;
    hvd_status_t status = knob_parse(&option.info, said_as, text, &value, err);
    return status != HVD_OK ? status
                            : options_set(options, i, value ? "0" : "1", said_as, BY_FILE, err);
}

static hvd_status_t set_key(options_t *options, const char *key, const char *text, const char *file,
                            err_t *err)
{
    const char *nearest = NULL;
    size_t distance = strlen(key) / 3 + 1;
    char said_as[256];
    snprintf(said_as, sizeof said_as, "%s in %s", key, file);
    if (strcmp(key, "logging.with_timestamp") == 0) {
        return set_inverted(options, N_OWN_OPTIONS + KNOB_log_hide_time, text, said_as, err);
    }
    for (int i = 0; i < N_OPTIONS; i++) {
        option_t option = option_at(i);
        if (option.info.flag[0] == '\0' || option.info.yaml[0] == '\0') {
            continue;
        }
        if (strcmp(option.info.yaml, key) == 0) {
            return yaml_is_inverted(&option) ? set_inverted(options, i, text, said_as, err)
                                             : options_set(options, i, text, said_as, BY_FILE, err);
        }
        keep_nearer(key, option.info.yaml, &distance, &nearest);
    }
    return fail(err, HVD_INVALID_ARGUMENT, "unknown key %s in %s%s%s%s", key, file,
                nearest != NULL ? ", did you mean " : "", nearest != NULL ? nearest : "",
                nearest != NULL ? "?" : "");
}

static hvd_status_t fail_at(const yaml_walk_t *walk, const yaml_event_t *event, const char *what,
                            err_t *err)
{
    return fail(err, HVD_INVALID_ARGUMENT, "%s, line %zu: %s", walk->path,
                event->start_mark.line + 1, what);
}

static void dotted_key(const yaml_walk_t *walk, char *text, size_t bytes)
{
    size_t len = 0;
    text[0] = '\0';
    for (int i = 0; i < walk->depth && len < bytes; i++) {
        len += (size_t)snprintf(text + len, bytes - len, "%s%s", i > 0 ? "." : "", walk->keys[i]);
    }
}

static hvd_status_t give_value(yaml_walk_t *walk, const char *value, err_t *err)
{
    char key[KEY_BYTES];
    dotted_key(walk, key, sizeof key);
    walk->wants_value[walk->depth - 1] = false;
    if (value[0] == '\0' || strcmp(value, "~") == 0 || strcmp(value, "null") == 0) {
        return HVD_OK;
    }
    return set_key(walk->options, key, value, walk->path, err);
}

static hvd_status_t on_scalar(yaml_walk_t *walk, const yaml_event_t *event, err_t *err)
{
    const char *text = (const char *)event->data.scalar.value;
    if (walk->depth == 0) {
        return fail_at(walk, event, "expected \"key: value\"", err);
    }
    if (walk->in_list) {
        if (walk->list.len > 0) {
            buf_append(&walk->list, ",", 1);
        }
        buf_append(&walk->list, text, strlen(text));
        return HVD_OK;
    }
    if (walk->wants_value[walk->depth - 1]) {
        return give_value(walk, text, err);
    }
    snprintf(walk->keys[walk->depth - 1], KEY_BYTES, "%s", text);
    walk->wants_value[walk->depth - 1] = true;
    return HVD_OK;
}

static hvd_status_t on_map(yaml_walk_t *walk, const yaml_event_t *event, err_t *err)
{
    if (walk->depth == MAX_DEPTH || walk->in_list) {
        return fail_at(walk, event, "a map does not belong here", err);
    }
    if (walk->depth > 0) {
        walk->wants_value[walk->depth - 1] = false;
    }
    walk->wants_value[walk->depth++] = false;
    return HVD_OK;
}

static hvd_status_t on_list_end(yaml_walk_t *walk, err_t *err)
{
    buf_append(&walk->list, "", 1);
    walk->in_list = false;
    if (walk->list.failed) {
        return fail(err, HVD_NO_MEMORY, "no memory to read %s", walk->path);
    }
    return give_value(walk, (const char *)walk->list.data, err);
}

static hvd_status_t on_event(yaml_walk_t *walk, const yaml_event_t *event, err_t *err)
{
    switch (event->type) {
    case YAML_SCALAR_EVENT:
        return on_scalar(walk, event, err);
    case YAML_MAPPING_START_EVENT:
        return on_map(walk, event, err);
    case YAML_MAPPING_END_EVENT:
        walk->depth--;
        return HVD_OK;
    case YAML_SEQUENCE_START_EVENT:
        if (walk->in_list || walk->depth == 0 || !walk->wants_value[walk->depth - 1]) {
            return fail_at(walk, event, "a list does not belong here", err);
        }
        walk->in_list = true;
        buf_clear(&walk->list);
        return HVD_OK;
    case YAML_SEQUENCE_END_EVENT:
        return on_list_end(walk, err);
    case YAML_ALIAS_EVENT:
        return fail_at(walk, event, "aliases are not supported", err);
    default:
        return HVD_OK;
    }
}

static hvd_status_t walk_events(yaml_walk_t *walk, yaml_parser_t *parser, err_t *err)
{
    for (bool at_end = false; !at_end;) {
        yaml_event_t event;
        if (!yaml_parser_parse(parser, &event)) {
            return fail(err, HVD_INVALID_ARGUMENT, "%s, line %zu: %s", walk->path,
                        parser->problem_mark.line + 1,
                        parser->problem != NULL ? parser->problem : "this is not YAML");
        }
        hvd_status_t status = on_event(walk, &event, err);
        at_end = event.type == YAML_STREAM_END_EVENT;
        yaml_event_delete(&event);
        if (status != HVD_OK) {
            return status;
        }
    }
    return HVD_OK;
}

hvd_status_t config_file_read(const char *path, options_t *options, err_t *err)
{
    options_t from_file = {0};
    yaml_walk_t walk = {.options = &from_file, .path = path};
    yaml_parser_t parser;
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return fail_errno(err, errno, "cannot open the configuration file %s", path);
    }
    if (!yaml_parser_initialize(&parser)) {
        fclose(file);
        return fail(err, HVD_NO_MEMORY, "no memory to read %s", path);
    }
    yaml_parser_set_input_file(&parser, file);
    hvd_status_t status = walk_events(&walk, &parser, err);
    yaml_parser_delete(&parser);
    fclose(file);
    buf_free(&walk.list);
    for (int i = 0; status == HVD_OK && i < N_OPTIONS; i++) {
        if (options->origins[i] != BY_FLAG && from_file.texts[i] != NULL) {
            options->texts[i] = from_file.texts[i];
            options->origins[i] = BY_FILE;
            from_file.texts[i] = NULL;
        }
    }
    options_free(&from_file);
    return status;
}
