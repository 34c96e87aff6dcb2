// SPDX-License-Identifier: Apache-2.0
//
// http.c - one request over HTTP or HTTPS, by libcurl.
//
// Servers prove who they are, or nothing is sent: certificate and name are always verified. The
// libcurl of the wheel does not know where a system keeps its certificates, and no libcurl looks
// into SSL_CERT_FILE, so the file is chosen here. A redirect is not followed, as it could carry the
// token elsewhere. One thread.
#define CURL_DISABLE_DEPRECATION // CURLOPT_PROTOCOLS: its successor is not in libcurl before 7.85
#include "pai/internal.h"

#include <curl/curl.h>
#include <strings.h>
#include <unistd.h>

#define BODY_LIMIT (64 * MIB)

// --- Whom to trust -------------------------------------------------------------------------------

static const char *const ca_files[] = {
    "/etc/ssl/certs/ca-certificates.crt",                // Debian, Ubuntu, Alpine, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",                  // RHEL, Fedora, Amazon Linux
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // the same, newer
    "/etc/ssl/ca-bundle.pem",                            // SUSE
    "/etc/ssl/cert.pem",                                 // Alpine without ca-certificates
};

// NULL: none.
static const char *choose_ca_file(const char *said)
{
    const char *file = said[0] != '\0' ? said : environment("SSL_CERT_FILE");
    for (size_t i = 0; file == NULL && i < N_ELEMENTS(ca_files); i++) {
        file = access(ca_files[i], R_OK) == 0 ? ca_files[i] : NULL;
    }
    return file;
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

static hvd_status_t explain(CURLcode code, const char *text, const pai_request_t *request,
                            err_t *err)
{
    static const struct {
        CURLcode code;
        const char *fix;
    } fixes[] = {
        {CURLE_COULDNT_RESOLVE_HOST, "check the name in --server"},
        {CURLE_COULDNT_CONNECT, "is the address of --server right, and is the server up?"},
        {CURLE_OPERATION_TIMEDOUT, "is the server up? --timeout gives it more time"},
        {CURLE_PEER_FAILED_VERIFICATION,
         "if its certificate is signed by an authority of your own, name that authority's "
         "certificate with --ca-file"},
        {CURLE_SSL_CACERT_BADFILE,
         "--ca-file, or SSL_CERT_FILE, must be a file of certificates in PEM"},
    };
    bool is_about_trust =
        code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CACERT_BADFILE;
    const char *fix = "check --server";
    for (size_t i = 0; i < N_ELEMENTS(fixes); i++) {
        fix = fixes[i].code == code ? fixes[i].fix : fix;
    }
    if (is_about_trust && choose_ca_file(request->ca_file) == NULL) {
        fix = "this machine has no certificates to trust: install ca-certificates, or name a file "
              "of certificates with --ca-file";
    }
    return fail(err, HVD_PEER_LOST, "%s %s: %s; %s", request->method, request->url,
                text[0] != '\0' ? text : curl_easy_strerror(code), fix);
}

// --- The request ---------------------------------------------------------------------------------

static struct curl_slist *make_headers(const pai_request_t *request)
{
    struct curl_slist *headers = NULL;
    buf_t line = {0};
    if (request->token != NULL) {
        buf_printf(&line, "Authorization: Bearer %s", request->token);
        buf_append(&line, "", 1);
        headers = line.failed ? NULL : curl_slist_append(headers, (const char *)line.data);
        wipe(line.data, line.len);
        buf_clear(&line);
    }
    if (request->content_type != NULL) {
        buf_printf(&line, "Content-Type: %s", request->content_type);
        buf_append(&line, "", 1);
        headers = line.failed ? headers : curl_slist_append(headers, (const char *)line.data);
    }
    buf_free(&line);
    return curl_slist_append(headers, "Expect:"); // no asking first
}

static CURLcode perform(CURL *curl, const pai_request_t *request, pai_reply_t *reply, char *fault)
{
    const char *ca_file = choose_ca_file(request->ca_file);
    struct curl_slist *headers = make_headers(request);
    long timeout_ms = (long)(request->timeout_s * 1000);
    curl_easy_setopt(curl, CURLOPT_URL, request->url);
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS, (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
    curl_easy_setopt(curl, CURLOPT_SSL_VERIFYPEER, 1L);
    curl_easy_setopt(curl, CURLOPT_SSL_VERIFYHOST, 2L);
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, timeout_ms);
    curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS, timeout_ms);
    curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, fault);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, reply);
    curl_easy_setopt(curl, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(curl, CURLOPT_HEADERDATA, reply);
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
    if (ca_file != NULL) {
        curl_easy_setopt(curl, CURLOPT_CAINFO, ca_file);
    }
    if (request->content_type != NULL) {
        curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE, (long)strlen(request->body));
        curl_easy_setopt(curl, CURLOPT_POSTFIELDS, request->body);
    }
    curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, request->method);
    CURLcode code = curl_easy_perform(curl);
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &reply->code);
    curl_slist_free_all(headers);
    return code;
}

hvd_status_t pai_http(const pai_request_t *request, pai_reply_t *reply_p, err_t *err)
{
    char fault[CURL_ERROR_SIZE] = "";
    pai_reply_t reply = {0};
    CURL *curl = curl_easy_init();
    if (curl == NULL) {
        return fail(err, HVD_NO_MEMORY, "libcurl failed to start; is there enough memory?");
    }
    CURLcode code = perform(curl, request, &reply, fault);
    curl_easy_cleanup(curl);
    if (code == CURLE_OK && buf_append(&reply.body, "", 1) != NULL) {
        reply.body.len--;
        *reply_p = reply;
        return HVD_OK;
    }
    pai_reply_free(&reply);
    return explain(code, fault, request, err);
}

void pai_reply_free(pai_reply_t *reply)
{
    buf_free(&reply->body);
    *reply = (pai_reply_t){0};
}
