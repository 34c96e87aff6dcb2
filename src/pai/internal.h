// SPDX-License-Identifier: Apache-2.0
//
// internal.h - what the files of pai/ share.
//
// Outside of a cluster: cli.c, and documents, checks and requests below it. Inside of a job:
// master.c, gate.c. One thread.
#ifndef HVD_PAI_INTERNAL_H
#define HVD_PAI_INTERNAL_H

#include "pai/pai.h"

#define PAI_FILE_LIMIT MIB
#define PAI_PATH_BYTES 256
#define PAI_MAX_DEPTH 64 // of maps and lists in each other

// The two forms of a job file: JSON for the clusters up to 0.17, YAML for those since.
typedef enum pai_format { PAI_AUTO, PAI_V1, PAI_V2 } pai_format_t;

// --- Options (options.def, cli.c) ----------------------------------------------------------------

enum { INIT = 1, CHECK = 2, SUBMIT = 4, STATUS = 8, LOGS = 16, STOP = 32 };

typedef struct pai_options {
#define PAI_OPTION(kind, field, ...) KNOB_TYPE_##kind field;
#include "pai/options.def"
#undef PAI_OPTION
    char **words; // what follows the options; points into argv
    int n_words;
} pai_options_t;

// --- Documents (document.c): JSON is read as the YAML it is --------------------------------------

typedef struct pai_document pai_document_t;
typedef struct pai_node pai_node_t; // of a document, and gone with it

enum pai_type {
    IS_TEXT = 1,
    IS_INT = 2,
    IS_REAL = 4,
    IS_BOOL = 8,
    IS_NULL = 16,
    IS_MAP = 32,
    IS_LIST = 64,
    IS_ANYTHING = 127,
};

hvd_status_t pai_document_read(const char *text, size_t bytes, const char *file,
                               pai_document_t **document_p, err_t *err);
void pai_document_free(pai_document_t *document);
const pai_node_t *pai_root(const pai_document_t *document); // NULL: empty
unsigned pai_type(const pai_node_t *node);                  // one bit
size_t pai_line(const pai_node_t *node);
const char *pai_text(const pai_node_t *node);               // of a scalar, as it stands; else ""
int64_t pai_int(const pai_node_t *node, int64_t otherwise); // NULL or no number: otherwise
int pai_count(const pai_document_t *document, const pai_node_t *node); // of a list or a map
const pai_node_t *pai_item(const pai_document_t *document, const pai_node_t *node, int i);
const pai_node_t *pai_key(const pai_document_t *document, const pai_node_t *map, int i);
const pai_node_t *pai_value(const pai_document_t *document, const pai_node_t *map, int i);
// The value of a key; NULL where there is none, or no map.
const pai_node_t *pai_get(const pai_document_t *document, const pai_node_t *map, const char *key);
hvd_status_t pai_file_read(const char *path, buf_t *text, err_t *err); // with a '\0' behind

// HVD_OK: the text is JSON, and nothing else that YAML would be.
hvd_status_t pai_json_check(const char *text, size_t bytes, const char *file, err_t *err);

// --- Checking (check.c; the rules are in rules.c) ------------------------------------------------

// What a text must look like.
typedef struct pai_form {
    const char *pattern; // extended regular expression
    const char *told_as;
} pai_form_t;

// What may stand under a key.
typedef struct pai_rule {
    const char *key; // "*": any key without a rule of its own; NULL: end of the rules
    unsigned types;
    bool is_required, may_not_be_empty;
    int64_t min, max;             // of a whole number, unless both are 0
    const pai_form_t *form;       // of a text
    const char *choices;          // of a text: a|b|c
    const pai_form_t *key_form;   // of the keys that "*" stands for
    const struct pai_rule *rules; // of what is in a map; NULL: anything
    const struct pai_rule *item;  // of what is in a list
} pai_rule_t;

typedef struct pai_findings {
    const char *file;
    buf_t text; // a line each
    int n_errors, n_warnings;
} pai_findings_t;

void pai_find(pai_findings_t *findings, const pai_node_t *at, const char *path, bool is_warning,
              const char *format, ...) PRINTF_LIKE(5, 6);
void pai_check_map(const pai_document_t *document, const pai_node_t *map, const pai_rule_t *rules,
                   const char *path, pai_findings_t *findings);
// Keys of a job, and of the prerequisites of each type.
extern const pai_rule_t pai_v1_job[], pai_v2_job[];
extern const pai_rule_t pai_v2_image[], pai_v2_data[], pai_v2_script[];
// Which form a document has: v1 if it has a jobName, v2 if a protocolVersion, else by its name.
pai_format_t pai_format_of(const pai_document_t *document, const char *file);
// Everything that is wrong with a job. findings->text is the caller's to free.
void pai_check(const pai_document_t *document, pai_format_t format, pai_findings_t *findings);

// --- Writing (write.c) ---------------------------------------------------------------------------

// Failed: no memory, or a text that is not UTF-8.
void pai_write(const pai_options_t *options, pai_format_t format, buf_t *out);

// --- The server (rest.c over http.c) -------------------------------------------------------------

typedef struct pai_reply {
    long code;                   // of HTTP
    buf_t body;                  // with a '\0' behind
    char warning[256], type[64]; // headers X-Warning and Content-Type
} pai_reply_t;

typedef struct pai_request {
    const char *method, *url;
    const char *token;        // NULL: none
    const char *content_type; // NULL: no body
    const char *body;
    const char *ca_file; // "": SSL_CERT_FILE, or the system's
    double timeout_s;
} pai_request_t;

// HVD_OK: there is a reply, whatever its code.
hvd_status_t pai_http(const pai_request_t *request, pai_reply_t *reply_p, err_t *err);
void pai_reply_free(pai_reply_t *reply);

int pai_submit(const pai_options_t *options, const char *text, pai_format_t format,
               const pai_document_t *document);
int pai_status(const pai_options_t *options);
int pai_logs(const pai_options_t *options);
int pai_stop(const pai_options_t *options);

// --- Inside of a job -----------------------------------------------------------------------------

// The tasks of this job as hosts, this one first (tasks.c).
hvd_status_t pai_tasks(const options_t *options, hosts_t *hosts_p, err_t *err);
// Which of the others is the master: master-0, else the first whose role has no other task. NULL:
// none is like that.
const host_t *pai_master(const hosts_t *tasks);

// Name of the interface that has the address; false: none (gate.c).
bool pai_interface(const char *address, char *name, size_t bytes);
void pai_choose_fabric(const options_t *options); // fabric.c

// What a gate tells the worker last: this and the exit code of the master.
#define PAI_GATE_END "end"

#endif
