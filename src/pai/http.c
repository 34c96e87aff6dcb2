// SPDX-License-Identifier: Apache-2.0
//
// http.c - one request over HTTP or HTTPS, through the libcurl of this machine.
//
// libcurl is looked for when it is needed, so horovodrun runs where there is none; the few names
// and numbers used of it are part of its stable binary interface and written down here. Servers
// prove who they are, or nothing is sent: certificate and name are always verified. A redirect is
// not followed, as it could carry the token elsewhere. One thread.
#include "pai/internal.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <strings.h>

#define BODY_LIMIT (64 * MIB)
#define CURL_ERROR_BYTES 256

// Of <curl/curl.h>: kind of value times 10000, plus the number of the option.
enum {
    OPT_POSTFIELDSIZE = 60,
    OPT_SSL_VERIFYPEER = 64,
    OPT_SSL_VERIFYHOST = 81,
    OPT_NOSIGNAL = 99,
    OPT_TIMEOUT_MS = 155,
    OPT_CONNECTTIMEOUT_MS = 156,
    OPT_PROTOCOLS = 181,
    OPT_WRITEDATA = 10001,
    OPT_URL = 10002,
    OPT_ERRORBUFFER = 10010,
    OPT_POSTFIELDS = 10015,
    OPT_HTTPHEADER = 10023,
    OPT_HEADERDATA = 10029,
    OPT_CUSTOMREQUEST = 10036,
    OPT_CAINFO = 10065,
    OPT_WRITEFUNCTION = 20011,
    OPT_HEADERFUNCTION = 20079,
};
enum { INFO_RESPONSE_CODE = 0x200002, PROTOCOL_HTTP = 1, PROTOCOL_HTTPS = 2 };
enum { FAULT_CONNECT = 7, FAULT_RESOLVE = 6, FAULT_LATE = 28, FAULT_PEER = 60, FAULT_CA = 77 };

typedef struct curl {
    void *library;
    void *(*init)(void);
    int (*setopt)(void *handle, int option, ...);
    int (*perform)(void *handle);
    int (*getinfo)(void *handle, int info, ...);
    void (*cleanup)(void *handle);
    void *(*add_header)(void *list, const char *line);
    void (*free_headers)(void *list);
    const char *(*why)(int code);
} curl_t;

static hvd_status_t find_curl(curl_t *curl, err_t *err)
{
    static const char *const names[] = {"libcurl.so.4", "libcurl-gnutls.so.4", "libcurl.so"};
    const struct {
        const char *name;
        void *place;
    } symbols[] = {
        {"curl_easy_init", &curl->init},
        {"curl_easy_setopt", &curl->setopt},
        {"curl_easy_perform", &curl->perform},
        {"curl_easy_getinfo", &curl->getinfo},
        {"curl_easy_cleanup", &curl->cleanup},
        {"curl_slist_append", &curl->add_header},
        {"curl_slist_free_all", &curl->free_headers},
        {"curl_easy_strerror", &curl->why},
    };

    for (size_t i = 0; i < N_ELEMENTS(names) && curl->library == NULL; i++) {
        curl->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    }
    if (curl->library == NULL) {
        return fail(err, HVD_UNSUPPORTED,
                    "talking to a server needs libcurl, which is not installed; install it "
                    "(apt-get install libcurl4, dnf install libcurl)");
    }
    for (size_t i = 0; i < N_ELEMENTS(symbols); i++) {
        void *found = dlsym(curl->library, symbols[i].name);
        if (found == NULL) {
            return fail(err, HVD_UNSUPPORTED, "the installed libcurl has no %s", symbols[i].name);
        }
        memcpy(symbols[i].place, &found, sizeof found);
    }
    return HVD_OK;
}

// --- What comes back -----------------------------------------------------------------------------

static size_t on_body(const char *data, size_t size, size_t n, void *arg)
{
    pai_reply_t *reply = arg;
    if (reply->body.len + size * n > BODY_LIMIT ||
        buf_append(&reply->body, data, size * n) == NULL) {
        return 0; // libcurl stops
    }
    return size * n;
}

static void keep_header(const char *line, size_t bytes, const char *name, char *value, size_t room)
{
    size_t name_bytes = strlen(name);
    if (bytes > name_bytes && strncasecmp(line, name, name_bytes) == 0) {
        while (bytes > name_bytes && strchr(" \r\n", line[bytes - 1]) != NULL) {
            bytes--;
        }
        const char *at = line + name_bytes;
        at += *at == ' ';
        snprintf(value, room, "%.*s", (int)(line + bytes - at), at);
    }
}

static size_t on_header(const char *data, size_t size, size_t n, void *arg)
{
    pai_reply_t *reply = arg;
    keep_header(data, size * n, "X-Warning:", reply->warning, sizeof reply->warning);
    keep_header(data, size * n, "Content-Type:", reply->type, sizeof reply->type);
    return size * n;
}

static hvd_status_t explain(const curl_t *curl, int code, const char *text,
                            const pai_request_t *request, err_t *err)
{
    static const struct {
        int code;
        const char *fix;
    } fixes[] = {
        {FAULT_RESOLVE, "check the name in --server"},
        {FAULT_CONNECT, "is the address of --server right, and is the server up?"},
        {FAULT_LATE, "is the server up? --timeout gives it more time"},
        {FAULT_PEER, "if its certificate is signed by an authority of your own, name that "
                     "authority's certificate with --ca-file"},
        {FAULT_CA, "--ca-file must be a file of certificates in PEM"},
    };
    const char *fix = "check --server";

    for (size_t i = 0; i < N_ELEMENTS(fixes); i++) {
        fix = fixes[i].code == code ? fixes[i].fix : fix;
    }
    return fail(err, HVD_PEER_LOST, "%s %s: %s; %s", request->method, request->url,
                text[0] != '\0' ? text : curl->why(code), fix);
}

// --- The request ---------------------------------------------------------------------------------

static void *make_headers(const curl_t *curl, const pai_request_t *request)
{
    void *headers = NULL;
    buf_t line = {0};
    if (request->token != NULL) {
        buf_printf(&line, "Authorization: Bearer %s", request->token);
        buf_append(&line, "", 1);
        headers = line.failed ? NULL : curl->add_header(headers, (const char *)line.data);
        wipe(line.data, line.len);
        buf_clear(&line);
    }
    if (request->content_type != NULL) {
        buf_printf(&line, "Content-Type: %s", request->content_type);
        buf_append(&line, "", 1);
        headers = line.failed ? headers : curl->add_header(headers, (const char *)line.data);
    }
    buf_free(&line);
    return curl->add_header(headers, "Expect:"); // no asking first
}

static int perform(const curl_t *curl, void *handle, const pai_request_t *request,
                   pai_reply_t *reply, char *fault)
{
    void *headers = make_headers(curl, request);
    long timeout_ms = (long)(request->timeout_s * 1000);
    curl->setopt(handle, OPT_URL, request->url);
    curl->setopt(handle, OPT_PROTOCOLS, (long)(PROTOCOL_HTTP | PROTOCOL_HTTPS));
    curl->setopt(handle, OPT_SSL_VERIFYPEER, 1L);
    curl->setopt(handle, OPT_SSL_VERIFYHOST, 2L);
    curl->setopt(handle, OPT_NOSIGNAL, 1L);
    curl->setopt(handle, OPT_TIMEOUT_MS, timeout_ms);
    curl->setopt(handle, OPT_CONNECTTIMEOUT_MS, timeout_ms);
    curl->setopt(handle, OPT_ERRORBUFFER, fault);
    curl->setopt(handle, OPT_WRITEFUNCTION, on_body);
    curl->setopt(handle, OPT_WRITEDATA, reply);
    curl->setopt(handle, OPT_HEADERFUNCTION, on_header);
    curl->setopt(handle, OPT_HEADERDATA, reply);
    curl->setopt(handle, OPT_HTTPHEADER, headers);
    if (request->ca_file[0] != '\0') {
        curl->setopt(handle, OPT_CAINFO, request->ca_file);
    }
    if (request->content_type != NULL) {
        curl->setopt(handle, OPT_POSTFIELDSIZE, (long)strlen(request->body));
        curl->setopt(handle, OPT_POSTFIELDS, request->body);
    }
    curl->setopt(handle, OPT_CUSTOMREQUEST, request->method);
    int code = curl->perform(handle);
    curl->getinfo(handle, INFO_RESPONSE_CODE, &reply->code);
    curl->free_headers(headers);
    return code;
}

hvd_status_t pai_http(const pai_request_t *request, pai_reply_t *reply_p, err_t *err)
{
    char fault[CURL_ERROR_BYTES] = "";
    curl_t curl = {0};
    pai_reply_t reply = {0};
    hvd_status_t status = find_curl(&curl, err);
    if (status != HVD_OK) {
        return status;
    }
    void *handle = curl.init();
    if (handle == NULL) {
        return fail(err, HVD_NO_MEMORY, "libcurl failed to start; is there enough memory?");
    }
    int code = perform(&curl, handle, request, &reply, fault);
    curl.cleanup(handle);
    if (code == 0 && buf_append(&reply.body, "", 1) != NULL) {
        reply.body.len--;
        *reply_p = reply;
        return HVD_OK;
    }
    pai_reply_free(&reply);
    return explain(&curl, code, fault, request, err);
}

void pai_reply_free(pai_reply_t *reply)
{
    buf_free(&reply->body);
    *reply = (pai_reply_t){0};
}
