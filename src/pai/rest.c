// SPDX-License-Identifier: Apache-2.0
//
// rest.c - submit, status, logs and stop: the REST API of an OpenPAI cluster, v1 and v2.
//
// The two versions differ in their paths only: a table. What the server refuses is told in its own
// words ({"code", "message"}). The token comes from a file or the environment, never from an
// argument, and goes to the server named by --server only: logs may lie elsewhere and are fetched
// without it.
#define _GNU_SOURCE
#include "pai/internal.h"

#include <stdlib.h>
#include <strings.h>

#define EXIT_REFUSED 1 // by the server
#define TOKEN_BYTES (16 * KIB)
#define NAME_LETTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-~"

// Paths below the server; %s: user, then job.
static const struct {
    const char *submit, *submit_type, *job, *stop;
} apis[] = {
    [PAI_V1] = {"/api/v1/user/%s/jobs", "application/json", "/api/v1/user/%s/jobs/%s",
                "/api/v1/user/%s/jobs/%s/executionType"},
    [PAI_V2] = {"/api/v2/jobs", "text/yaml", "/api/v2/jobs/%s~%s",
                "/api/v2/jobs/%s~%s/executionType"},
};

typedef struct rest_call {
    const pai_options_t *options;
    pai_format_t api;
    char user[256], job[256];
    char *token; // NULL: none
} rest_call_t;

// --- Who, and for whom ---------------------------------------------------------------------------

static hvd_status_t read_token(const pai_options_t *options, char **token_p, err_t *err)
{
    const char *said = environment("HOROVODRUN_PAI_TOKEN");
    buf_t text = {0};
    hvd_status_t status = HVD_OK;
    if (options->token_file[0] != '\0') {
        status = pai_file_read(options->token_file, &text, err);
        said = status == HVD_OK ? (const char *)text.data : NULL;
    }
    *token_p = NULL;
    if (said != NULL) {
        size_t begin = strspn(said, " \t\r\n"), bytes = strcspn(said + begin, " \t\r\n");
        *token_p = bytes > 0 && bytes <= TOKEN_BYTES ? strndup(said + begin, bytes) : NULL;
        if (*token_p == NULL) {
            status =
                fail(err, HVD_INVALID_ARGUMENT, "there is no token in %s",
                     options->token_file[0] != '\0' ? options->token_file : "HOROVODRUN_PAI_TOKEN");
        }
    }
    if (text.data != NULL) {
        wipe(text.data, text.len);
    }
    buf_free(&text);
    return status;
}

static bool is_plain_name(const char *name)
{
    return name[0] != '\0' && name[strspn(name, NAME_LETTERS)] == '\0';
}

static bool is_loopback(const char *url)
{
    static const char *const starts[] = {"http://127.", "http://localhost", "http://[::1]"};

    for (size_t i = 0; i < N_ELEMENTS(starts); i++) {
        if (strncmp(url, starts[i], strlen(starts[i])) == 0) {
            return true;
        }
    }
    return false;
}

static hvd_status_t check_server(const pai_options_t *options, err_t *err)
{
    const char *server = options->server;
    bool is_open = strncmp(server, "http://", 7) == 0;

    if (server[0] == '\0') {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "the cluster is missing; give --server, or set HOROVODRUN_PAI_SERVER");
    }
    if (!is_open && strncmp(server, "https://", 8) != 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "--server is \"%.200s\", but must begin with https:// or http://", server);
    }
    if (is_open && !is_loopback(server)) {
        say("warning: %s is not encrypted; anybody on the network path can read the token", server);
    }
    return HVD_OK;
}

// "user~job", or a job of --user; job NULL: of --user, whatever its name.
static hvd_status_t open_call(const pai_options_t *options, pai_format_t api, const char *job,
                              rest_call_t *call, err_t *err)
{
    const char *tilde = job != NULL ? strchr(job, '~') : NULL;
    hvd_status_t status;
    *call = (rest_call_t){.options = options, .api = api};
    snprintf(call->user, sizeof call->user, "%.*s", tilde != NULL ? (int)(tilde - job) : 255,
             tilde != NULL ? job : options->user);
    snprintf(call->job, sizeof call->job, "%s", tilde != NULL ? tilde + 1 : job != NULL ? job : "");
    bool needs_user = job != NULL || api == PAI_V1;
    if (needs_user && !is_plain_name(call->user)) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "the user of the job is missing; write USER~JOB, give --user, or set "
                    "HOROVODRUN_PAI_USER");
    }
    if (job != NULL && !is_plain_name(call->job)) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "\"%.200s\" is not a job name; use letters, digits, \".\", \"_\" and \"-\"",
                    call->job);
    }
    TRY(check_server(options, err), out);
    TRY(read_token(options, &call->token, err), out);
out:
    return status;
}

static void close_call(rest_call_t *call)
{
    if (call->token != NULL) {
        wipe(call->token, strlen(call->token));
        free(call->token);
        call->token = NULL;
    }
}

// --- Asking --------------------------------------------------------------------------------------

// What the server says against it, in its own words.
static void tell_refusal(const pai_reply_t *reply)
{
    pai_document_t *document = NULL;
    const char *code = "", *message = "";
    if (pai_document_read((const char *)reply->body.data, reply->body.len, "the answer", &document,
                          NULL) == HVD_OK &&
        pai_root(document) != NULL) {
        code = pai_text(pai_get(document, pai_root(document), "code"));
        message = pai_text(pai_get(document, pai_root(document), "message"));
    }
    if (message[0] == '\0') {
        message = (const char *)reply->body.data;
    }
    say("the server refused: %ld %s%s%.800s%s", reply->code, code, code[0] != '\0' ? ": " : "",
        message,
        reply->code == 401 ? " (give a valid token: --token-file, or HOROVODRUN_PAI_TOKEN)" : "");
    pai_document_free(document);
}

// A path of the server as a URL; NULL: no memory, which was said.
static char *url_of(const rest_call_t *call, const char *path)
{
    const char *server = call->options->server;
    size_t bytes = strlen(server);
    char *url = NULL;
    while (bytes > 0 && server[bytes - 1] == '/') {
        bytes--;
    }
    if (asprintf(&url, "%.*s%s", (int)bytes, server, path) < 0) {
        say("no memory for a request");
        return NULL;
    }
    return url;
}

// An exit code; the reply is the caller's when it is 0.
static int send_request(const pai_request_t *request, pai_reply_t *reply_p)
{
    err_t err = {0};
    if (pai_http(request, reply_p, &err) != HVD_OK) {
        say("%s", err.text);
        return EXIT_UNREACHABLE;
    }
    if (reply_p->warning[0] != '\0') {
        say("the server warns: %s", reply_p->warning);
    }
    if (reply_p->code < 200 || reply_p->code >= 300) {
        tell_refusal(reply_p);
        pai_reply_free(reply_p);
        return EXIT_REFUSED;
    }
    return 0;
}

// The same of our server, at a path.
static int ask(const rest_call_t *call, const char *method, const char *path, const char *type,
               const char *body, pai_reply_t *reply_p)
{
    pai_request_t request = {.method = method,
                             .token = call->token,
                             .content_type = type,
                             .body = body,
                             .ca_file = call->options->ca_file,
                             .timeout_s = call->options->timeout};
    char *url = url_of(call, path);
    if (url == NULL) {
        return EXIT_INTERNAL;
    }
    request.url = url;
    int code = send_request(&request, reply_p);
    free(url);
    return code;
}

static void path_of(const rest_call_t *call, const char *format, char *path, size_t bytes)
{
    // One %s for the user, or two: user and job. Written out, as the compiler cannot check a table.
    const char *first = strstr(format, "%s");
    const char *second = first != NULL ? strstr(first + 2, "%s") : NULL;
    if (first == NULL) {
        snprintf(path, bytes, "%s", format);
    } else if (second == NULL) {
        snprintf(path, bytes, "%.*s%s%s", (int)(first - format), format, call->user, first + 2);
    } else {
        snprintf(path, bytes, "%.*s%s%.*s%s%s", (int)(first - format), format, call->user,
                 (int)(second - first - 2), first + 2, call->job, second + 2);
    }
}

// --- Submit and stop -----------------------------------------------------------------------------

int pai_submit(const pai_options_t *options, const char *text, pai_format_t format,
               const pai_document_t *document)
{
    const char *name =
        pai_text(pai_get(document, pai_root(document), format == PAI_V1 ? "jobName" : "name"));
    char path[1024];
    pai_reply_t reply;
    rest_call_t call;
    err_t err = {0};
    if (open_call(options, format, NULL, &call, &err) != HVD_OK) {
        say("%s", err.text);
        return EXIT_USAGE;
    }
    path_of(&call, apis[format].submit, path, sizeof path);
    int code = ask(&call, "POST", path, apis[format].submit_type, text, &reply);
    if (code == 0) {
        fprintf(stdout, "submitted %s%s%s\n", call.user, call.user[0] != '\0' ? "~" : "", name);
        pai_reply_free(&reply);
    }
    close_call(&call);
    return code;
}

int pai_stop(const pai_options_t *options)
{
    pai_format_t api = options->api == 0 ? PAI_V1 : PAI_V2;
    char path[1024];
    pai_reply_t reply;
    rest_call_t call;
    err_t err = {0};
    if (open_call(options, api, options->words[0], &call, &err) != HVD_OK) {
        say("%s", err.text);
        return EXIT_USAGE;
    }
    path_of(&call, apis[api].stop, path, sizeof path);
    int code = ask(&call, "PUT", path, "application/json", "{\"value\":\"STOP\"}", &reply);
    if (code == 0) {
        fprintf(stdout, "%s~%s is being stopped\n", call.user, call.job);
        pai_reply_free(&reply);
    }
    close_call(&call);
    return code;
}

// --- Status and logs -----------------------------------------------------------------------------

typedef struct task {
    const char *role, *index, *state, *address, *exit_code, *log;
} task_t;

typedef int (*task_fn)(const rest_call_t *call, const task_t *task);

// A value as text; "" for what is not there or null.
static const char *word_of(const pai_document_t *document, const pai_node_t *map, const char *key)
{
    const pai_node_t *value = pai_get(document, map, key);
    return value == NULL || pai_type(value) == IS_NULL ? "" : pai_text(value);
}

// The first answer that is not 0. It does not end the walk: one log that cannot be had does not
// hide the others.
static int walk_tasks(const rest_call_t *call, const pai_document_t *document, task_fn visit)
{
    const pai_node_t *roles = pai_get(document, pai_root(document), "taskRoles");
    int n_roles = roles != NULL && pai_type(roles) == IS_MAP ? pai_count(document, roles) : 0;
    int code = 0;
    for (int r = 0; r < n_roles; r++) {
        const pai_node_t *tasks = pai_get(document, pai_value(document, roles, r), "taskStatuses");
        int n_tasks = tasks != NULL && pai_type(tasks) == IS_LIST ? pai_count(document, tasks) : 0;
        for (int t = 0; t < n_tasks; t++) {
            const pai_node_t *at = pai_item(document, tasks, t);
            task_t task = {.role = pai_text(pai_key(document, roles, r)),
                           .index = word_of(document, at, "taskIndex"),
                           .state = word_of(document, at, "taskState"),
                           .address = word_of(document, at, "containerIp"),
                           .exit_code = word_of(document, at, "containerExitCode"),
                           .log = word_of(document, at, "containerLog")};
            int one = visit(call, &task);
            code = code != 0 ? code : one;
        }
    }
    return code;
}

static void task_name(const task_t *task, char *name, size_t bytes)
{
    snprintf(name, bytes, "%s-%s", task->role, task->index);
}

static int print_task(const rest_call_t *call, const task_t *task)
{
    char name[300];
    (void)call;
    task_name(task, name, sizeof name);
    fprintf(stdout, "  %-16s %-12s %s%s%s\n", name, task->state, task->address,
            task->exit_code[0] != '\0' ? " exit code " : "", task->exit_code);
    return 0;
}

// What the server knows of the job; NULL with the exit code.
static pai_document_t *get_job(const rest_call_t *call, int *code_p)
{
    pai_document_t *document = NULL;
    char path[1024];
    pai_reply_t reply;
    err_t err = {0};
    path_of(call, apis[call->api].job, path, sizeof path);
    *code_p = ask(call, "GET", path, NULL, NULL, &reply);
    if (*code_p != 0) {
        return NULL;
    }
    if (pai_document_read((const char *)reply.body.data, reply.body.len, "the server's answer",
                          &document, &err) != HVD_OK) {
        say("%s; is --server the address of an OpenPAI cluster?", err.text);
        *code_p = EXIT_REFUSED;
    }
    pai_reply_free(&reply);
    return document;
}

static void print_job(const rest_call_t *call, const pai_document_t *document)
{
    const pai_node_t *job = pai_get(document, pai_root(document), "jobStatus");
    const char *exit_code = word_of(document, job, "appExitCode");
    const char *said = word_of(document, job, "appExitDiagnostics");
    fprintf(stdout, "%s~%s: %s%s%s\n", call->user, call->job, word_of(document, job, "state"),
            exit_code[0] != '\0' ? ", exit code " : "", exit_code);
    if (said[0] != '\0') {
        fprintf(stdout, "  %s\n", said);
    }
}

static int print_status(const rest_call_t *call, const pai_document_t *document)
{
    print_job(call, document);
    return walk_tasks(call, document, print_task);
}

// 1 or 0; walk_tasks then tells whether any is.
static int is_wanted(const rest_call_t *call, const task_t *task)
{
    char name[300];
    task_name(task, name, sizeof name);
    return call->options->task[0] == '\0' || strcmp(call->options->task, name) == 0;
}

// Logs may lie on another machine, behind another address than --server.
static int print_log(const rest_call_t *call, const task_t *task)
{
    const pai_options_t *options = call->options;
    bool is_ours = task->log[0] == '/';
    pai_request_t request = {.method = "GET",
                             .token = is_ours ? call->token : NULL,
                             .ca_file = options->ca_file,
                             .timeout_s = options->timeout};
    pai_reply_t reply;
    char name[300];
    if (!is_wanted(call, task)) {
        return 0;
    }
    task_name(task, name, sizeof name);
    if (task->log[0] == '\0') {
        fprintf(stdout, "==> %s: no log yet <==\n", name);
        return 0;
    }
    char *url = is_ours ? url_of(call, task->log) : NULL;
    request.url = is_ours ? url : task->log;
    if (request.url == NULL) {
        return EXIT_INTERNAL;
    }
    fprintf(stdout, "==> %s: %s <==\n", name, request.url);
    fflush(stdout);
    int code = send_request(&request, &reply);
    if (code == 0) {
        if (strncasecmp(reply.type, "text/html", 9) != 0) { // a page is for a browser
            fwrite(reply.body.data, 1, reply.body.len, stdout);
            fprintf(stdout, "\n");
        }
        pai_reply_free(&reply);
    }
    free(url);
    return code;
}

static int print_logs(const rest_call_t *call, const pai_document_t *document)
{
    const char *task = call->options->task;
    if (task[0] != '\0' && walk_tasks(call, document, is_wanted) == 0) {
        say("%s~%s has no task %s; %s pai status lists them", call->user, call->job, task, PROGRAM);
        return EXIT_USAGE;
    }
    return walk_tasks(call, document, print_log);
}

static int show(const pai_options_t *options,
                int (*print)(const rest_call_t *, const pai_document_t *))
{
    pai_format_t api = options->api == 0 ? PAI_V1 : PAI_V2;
    rest_call_t call;
    err_t err = {0};
    int code = EXIT_USAGE;
    if (open_call(options, api, options->words[0], &call, &err) != HVD_OK) {
        say("%s", err.text);
    } else {
        pai_document_t *document = get_job(&call, &code);
        if (document != NULL) {
            code = print(&call, document);
        }
        pai_document_free(document);
    }
    close_call(&call);
    return code;
}

int pai_status(const pai_options_t *options)
{
    return show(options, print_status);
}

int pai_logs(const pai_options_t *options)
{
    return show(options, print_logs);
}
