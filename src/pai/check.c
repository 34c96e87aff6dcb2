// SPDX-License-Identifier: Apache-2.0
//
// check.c - holds a document against rules, and names every place where it breaks one.
//
// Rules are data (rules.c); this file walks document and rules side by side. A finding has the
// line, the path of the key ("taskRoles[1].shmMB"), what is there and what must be. Nothing stops
// at the first finding: a job file is mended in one go. The walk goes as deep as the rules do.
#define _GNU_SOURCE
#include "pai/internal.h"

#include <regex.h>
#include <stdlib.h>

void pai_find(pai_findings_t *findings, const pai_node_t *at, const char *path, bool is_warning,
              const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    buf_printf(&findings->text, "%s:%zu: %s%s%s%s\n", findings->file, at != NULL ? pai_line(at) : 1,
               is_warning ? "warning: " : "", path, path[0] != '\0' ? ": " : "", text);
    findings->n_errors += !is_warning;
    findings->n_warnings += is_warning;
}

// --- Words ---------------------------------------------------------------------------------------

// "a text or nothing"
static const char *types_text(unsigned types, char text[128])
{
    static const struct {
        unsigned type;
        const char *name;
    } names[] = {
        {IS_TEXT, "a text"},        {IS_INT, "a whole number"}, {IS_REAL, "a number"},
        {IS_BOOL, "true or false"}, {IS_MAP, "a map of keys"},  {IS_LIST, "a list"},
        {IS_NULL, "null"},
    };
    size_t len = 0;

    text[0] = '\0';
    for (size_t i = 0; i < N_ELEMENTS(names) && len < 128; i++) {
        if ((types & names[i].type) != 0) {
            len += (size_t)snprintf(text + len, 128 - len, "%s%s", len > 0 ? " or " : "",
                                    names[i].name);
        }
    }
    return text;
}

static bool has_form(const pai_form_t *form, const char *text)
{
    regex_t regex;
    if (regcomp(&regex, form->pattern, REG_EXTENDED | REG_NOSUB) != 0) {
        return true; // out of memory: the server will look again
    }
    bool matches = regexec(&regex, text, 0, NULL, 0) == 0;
    regfree(&regex);
    return matches;
}

static bool is_choice(const char *choices, const char *text)
{
    size_t bytes = strlen(text);
    for (const char *at = choices; bytes > 0; at += strcspn(at, "|") + 1) {
        if (strcspn(at, "|") == bytes && strncmp(at, text, bytes) == 0) {
            return true;
        }
        if (at[strcspn(at, "|")] == '\0') {
            break;
        }
    }
    return false;
}

static void put_path(const char *path, const char *key, char out[PAI_PATH_BYTES])
{
    snprintf(out, PAI_PATH_BYTES, "%s%s%s", path, path[0] != '\0' ? "." : "", key);
}

// --- Values --------------------------------------------------------------------------------------

static void check_value(const pai_document_t *document, const pai_node_t *value,
                        const pai_rule_t *rule, const char *path, pai_findings_t *findings);

static void check_list(const pai_document_t *document, const pai_node_t *list,
                       const pai_rule_t *rule, const char *path, pai_findings_t *findings)
{
    int n = pai_count(document, list);
    for (int i = 0; rule->item != NULL && i < n; i++) {
        char inner[PAI_PATH_BYTES + 16];
        snprintf(inner, sizeof inner, "%s[%d]", path, i);
        inner[PAI_PATH_BYTES - 1] = '\0';
        check_value(document, pai_item(document, list, i), rule->item, inner, findings);
    }
}

static void check_scalar(const pai_node_t *value, const pai_rule_t *rule, unsigned type,
                         const char *path, pai_findings_t *findings)
{
    const char *text = pai_text(value);
    if (type == IS_INT && (rule->min != 0 || rule->max != 0)) {
        int64_t number = pai_int(value, 0);
        if (number < rule->min) {
            pai_find(findings, value, path, false, "is %s, but must be at least %lld", text,
                     (long long)rule->min);
        } else if (rule->max > rule->min && number > rule->max) {
            pai_find(findings, value, path, false, "is %s, but must be at most %lld", text,
                     (long long)rule->max);
        }
    }
    if (type == IS_TEXT && rule->may_not_be_empty && text[0] == '\0') {
        pai_find(findings, value, path, false, "is empty");
    } else if (type == IS_TEXT && rule->form != NULL && !has_form(rule->form, text)) {
        pai_find(findings, value, path, false, "is \"%.100s\", but must be %s", text,
                 rule->form->told_as);
    }
    if (rule->choices != NULL && (type & (IS_TEXT | IS_INT)) != 0 &&
        !is_choice(rule->choices, text)) {
        pai_find(findings, value, path, false, "is \"%.100s\", but must be one of %s", text,
                 rule->choices);
    }
}

static void check_value(const pai_document_t *document, const pai_node_t *value,
                        const pai_rule_t *rule, const char *path, pai_findings_t *findings)
{
    unsigned type = pai_type(value);
    unsigned allowed = rule->types | ((rule->types & IS_REAL) != 0 ? (unsigned)IS_INT : 0);
    char is[128], must_be[128];
    if ((type & allowed) == 0) {
        pai_find(findings, value, path, false, "is %s, but must be %s", types_text(type, is),
                 types_text(rule->types, must_be));
    } else if ((type & (IS_MAP | IS_LIST)) != 0 && rule->may_not_be_empty &&
               pai_count(document, value) == 0) {
        pai_find(findings, value, path, false, "is empty, but needs at least one entry");
    } else if (type == IS_MAP && rule->rules != NULL) {
        pai_check_map(document, value, rule->rules, path, findings);
    } else if (type == IS_LIST) {
        check_list(document, value, rule, path, findings);
    } else if (type != IS_MAP) {
        check_scalar(value, rule, type, path, findings);
    }
}

// --- Maps ----------------------------------------------------------------------------------------

static const pai_rule_t *rule_of(const pai_rule_t *rules, const char *key)
{
    const pai_rule_t *other = NULL;
    for (; rules->key != NULL; rules++) {
        if (strcmp(rules->key, key) == 0) {
            return rules;
        }
        other = strcmp(rules->key, "*") == 0 ? rules : other;
    }
    return other;
}

static void find_unknown(const pai_node_t *at, const char *key, const pai_rule_t *rules,
                         const char *path, pai_findings_t *findings)
{
    size_t nearest = strlen(key) / 3 + 1;
    const char *meant = NULL;
    for (; rules->key != NULL; rules++) {
        size_t distance = edit_distance(key, rules->key);
        if (distance < nearest || (distance == nearest && meant == NULL)) {
            nearest = distance;
            meant = rules->key;
        }
    }
    pai_find(findings, at, path, false, "no such key%s%s%s", meant != NULL ? "; did you mean " : "",
             meant != NULL ? meant : "", meant != NULL ? "?" : "");
}

static void check_pair(const pai_document_t *document, const pai_node_t *map, int i,
                       const pai_rule_t *rules, const char *path, pai_findings_t *findings)
{
    const pai_node_t *key = pai_key(document, map, i);
    const char *name = pai_text(key);
    const pai_rule_t *rule = rule_of(rules, name);
    char inner[PAI_PATH_BYTES];
    put_path(path, name, inner);
    for (int other = 0; other < i; other++) {
        if (strcmp(pai_text(pai_key(document, map, other)), name) == 0) {
            pai_find(findings, key, inner, false, "is given twice, first in line %zu",
                     pai_line(pai_key(document, map, other)));
            return;
        }
    }
    if (rule == NULL) {
        find_unknown(key, name, rules, inner, findings);
        return;
    }
    if (rule->key_form != NULL && !has_form(rule->key_form, name)) {
        pai_find(findings, key, inner, false, "the name \"%.100s\" must be %s", name,
                 rule->key_form->told_as);
    }
    check_value(document, pai_value(document, map, i), rule, inner, findings);
}

void pai_check_map(const pai_document_t *document, const pai_node_t *map, const pai_rule_t *rules,
                   const char *path, pai_findings_t *findings)
{
    for (int i = 0; i < pai_count(document, map); i++) {
        check_pair(document, map, i, rules, path, findings);
    }
    for (; rules->key != NULL; rules++) {
        char inner[PAI_PATH_BYTES];
        if (rules->is_required && pai_get(document, map, rules->key) == NULL) {
            put_path(path, rules->key, inner);
            pai_find(findings, map, inner, false, "is missing");
        }
    }
}
