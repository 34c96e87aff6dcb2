// SPDX-License-Identifier: Apache-2.0
//
// http.c - reads requests: one pass over lines, a row for each header that matters.
//
// Only GET and HEAD without a body; no folded lines, no blanks before colons, no bytes that are not
// printable ASCII; one Host. Nothing is decoded: the paths and the values of queries that we hand
// out need none.
#define _GNU_SOURCE
#include "web/http.h"

#include <ctype.h>
#include <stdlib.h>
#include <strings.h>

#define MAX_HEADERS 64

typedef struct text {
    const char *at;
    size_t bytes;
} text_t;

static bool is_token_char(char c)
{
    return isalnum((unsigned char)c) || (c != '\0' && strchr("!#$%&'*+-.^_`|~", c) != NULL);
}

static bool copy(text_t from, char *to, size_t bytes)
{
    if (from.bytes >= bytes) {
        return false;
    }
    memcpy(to, from.at, from.bytes);
    to[from.bytes] = '\0';
    return true;
}

static bool is_word(text_t text, const char *word)
{
    return text.bytes == strlen(word) && strncasecmp(text.at, word, text.bytes) == 0;
}

static bool has_word(text_t text, const char *word)
{
    return memmem(text.at, text.bytes, word, strlen(word)) != NULL;
}

// Cuts what is before the mark off the text; all of it, if there is no mark.
static text_t cut(text_t *text, char mark)
{
    const char *end = text->bytes > 0 ? memchr(text->at, mark, text->bytes) : NULL;
    text_t part = {text->at, end != NULL ? (size_t)(end - text->at) : text->bytes};
    size_t used = part.bytes + (end != NULL);
    text->at += used;
    text->bytes -= used;
    return part;
}

static text_t trim(text_t text)
{
    while (text.bytes > 0 && (text.at[0] == ' ' || text.at[0] == '\t')) {
        text.at++;
        text.bytes--;
    }
    while (text.bytes > 0 && (text.at[text.bytes - 1] == ' ' || text.at[text.bytes - 1] == '\t')) {
        text.bytes--;
    }
    return text;
}

// A number of at most nine digits; -1: it is none.
static int number_of(text_t text)
{
    int number = 0;
    for (size_t i = 0; i < text.bytes; i++) {
        if (!isdigit((unsigned char)text.at[i]) || i >= 9) {
            return -1;
        }
        number = number * 10 + (text.at[i] - '0');
    }
    return text.bytes > 0 ? number : -1;
}

// --- The first line ------------------------------------------------------------------------------

static int read_query(text_t query, http_request_t *r)
{
    while (query.bytes > 0) {
        text_t value = cut(&query, '&'), name = cut(&value, '=');
        bool is_fine = true;
        if (is_word(name, "token")) {
            is_fine = copy(value, r->token, sizeof r->token);
        } else if (is_word(name, "id")) {
            r->id = number_of(value);
            is_fine = r->id >= 0;
        } else if (is_word(name, "columns")) {
            r->columns = MAX(number_of(value), 0);
        } else if (is_word(name, "rows")) {
            r->rows = MAX(number_of(value), 0);
        }
        if (!is_fine) {
            return 400;
        }
    }
    return 200;
}

static int read_target(text_t target, http_request_t *r)
{
    for (size_t i = 0; i < target.bytes; i++) {
        if (target.at[i] <= ' ' || target.at[i] >= 0x7f) {
            return 400;
        }
    }
    if (target.bytes == 0 || target.at[0] != '/' || memchr(target.at, '#', target.bytes) != NULL) {
        return 400;
    }
    text_t path = cut(&target, '?');
    return copy(path, r->path, sizeof r->path) ? read_query(target, r) : 404;
}

static int read_first(text_t line, http_request_t *r)
{
    text_t method = cut(&line, ' '), target = cut(&line, ' ');
    bool is_old = is_word(line, "HTTP/1.0") && line.at[0] == 'H';
    bool is_new = is_word(line, "HTTP/1.1") && line.at[0] == 'H';
    for (size_t i = 0; i < method.bytes; i++) {
        if (!is_token_char(method.at[i])) {
            return 400;
        }
    }
    if (!is_old && !is_new) {
        return line.bytes > 5 && strncmp(line.at, "HTTP/", 5) == 0 ? 505 : 400;
    }
    r->keeps_alive = is_new;
    r->is_head = method.bytes == 4 && memcmp(method.at, "HEAD", 4) == 0;
    if (!r->is_head && (method.bytes != 3 || memcmp(method.at, "GET", 3) != 0)) {
        return method.bytes > 0 ? 405 : 400;
    }
    return read_target(target, r);
}

// --- Headers -------------------------------------------------------------------------------------

typedef struct request_reading {
    http_request_t *request;
    const char *cookie;
    int n_hosts;
} request_reading_t;

// "name", "name:port", "[::1]:port": what is before the port.
static int take_host(request_reading_t *reading, text_t value)
{
    text_t host = value;
    if (value.bytes > 0 && value.at[0] == '[') {
        const char *end = memchr(value.at, ']', value.bytes);
        if (end == NULL) {
            return 400;
        }
        host.bytes = (size_t)(end - value.at) + 1;
    } else {
        host = cut(&value, ':');
    }
    return reading->n_hosts++ == 0 && copy(host, reading->request->host, 256) ? 200 : 400;
}

static int take_origin(request_reading_t *reading, text_t value)
{
    return copy(value, reading->request->origin, sizeof reading->request->origin) ? 200 : 400;
}

static int take_authorization(request_reading_t *reading, text_t value)
{
    text_t kind = cut(&value, ' ');
    if (is_word(kind, "Bearer") &&
        !copy(trim(value), reading->request->bearer, sizeof reading->request->bearer)) {
        return 400;
    }
    return 200;
}

static int take_cookie(request_reading_t *reading, text_t value)
{
    while (value.bytes > 0) {
        text_t pair = trim(cut(&value, ';')), name = cut(&pair, '=');
        if (name.bytes == strlen(reading->cookie) &&
            memcmp(name.at, reading->cookie, name.bytes) == 0 &&
            !copy(pair, reading->request->cookie, sizeof reading->request->cookie)) {
            return 400;
        }
    }
    return 200;
}

static int take_accept(request_reading_t *reading, text_t value)
{
    reading->request->wants_open_metrics |= has_word(value, "application/openmetrics-text");
    return 200;
}

static int take_site(request_reading_t *reading, text_t value)
{
    reading->request->is_cross_site = is_word(value, "cross-site") || is_word(value, "same-site");
    return 200;
}

static int take_connection(request_reading_t *reading, text_t value)
{
    if (is_word(value, "close")) {
        reading->request->keeps_alive = false;
    }
    return 200;
}

static int take_length(request_reading_t *reading, text_t value)
{
    (void)reading;
    return number_of(value) == 0 ? 200 : 413;
}

static int take_coding(request_reading_t *reading, text_t value)
{
    (void)reading;
    (void)value;
    return 501;
}

static const struct {
    const char *name;
    int (*take)(request_reading_t *reading, text_t value);
} headers[] = {
    {"Host", take_host},
    {"Origin", take_origin},
    {"Authorization", take_authorization},
    {"Cookie", take_cookie},
    {"Accept", take_accept},
    {"Sec-Fetch-Site", take_site},
    {"Connection", take_connection},
    {"Content-Length", take_length},
    {"Transfer-Encoding", take_coding},
};

static int read_header(request_reading_t *reading, text_t line)
{
    text_t value = line, name = cut(&value, ':');
    if (name.bytes == 0 || name.bytes == line.bytes) {
        return 400;
    }
    for (size_t i = 0; i < name.bytes; i++) {
        if (!is_token_char(name.at[i])) {
            return 400;
        }
    }
    for (size_t i = 0; i < value.bytes; i++) {
        unsigned char c = (unsigned char)value.at[i];
        if ((c < ' ' && c != '\t') || c == 0x7f) {
            return 400;
        }
    }
    value = trim(value);
    for (size_t i = 0; i < N_ELEMENTS(headers); i++) {
        if (is_word(name, headers[i].name)) {
            return headers[i].take(reading, value);
        }
    }
    return 200;
}

// --- All of it -----------------------------------------------------------------------------------

int http_read(const char *data, size_t bytes, const char *cookie, http_request_t *request_p,
              size_t *used_p)
{
    static const char end[] = "\r\n\r\n";
    http_request_t request = {.id = -1};
    request_reading_t reading = {.request = &request, .cookie = cookie};
    const char *stop = bytes > 0 ? memmem(data, MIN(bytes, HTTP_REQUEST_BYTES), end, 4) : NULL;
    if (stop == NULL) {
        return bytes < HTTP_REQUEST_BYTES ? 0 : 431;
    }
    text_t rest = {data, (size_t)(stop - data) + 2};
    bool is_first = true;
    for (int n = 0; rest.bytes > 0; n++) {
        text_t line = cut(&rest, '\n');
        bool is_whole = line.bytes > 0 && line.at[line.bytes - 1] == '\r';
        line.bytes -= is_whole;
        int status = !is_whole || memchr(line.at, '\r', line.bytes) != NULL ? 400
                     : n > MAX_HEADERS                                      ? 431
                     : is_first ? read_first(line, &request)
                                : read_header(&reading, line);
        if (status != 200) {
            return status;
        }
        is_first = false;
    }
    if (reading.n_hosts != 1) {
        return 400;
    }
    *request_p = request;
    *used_p = (size_t)(stop - data) + 4;
    return 200;
}

const char *http_reason(int status)
{
    static const struct {
        int status;
        const char *reason;
    } reasons[] = {
        {200, "OK"},
        {303, "See Other"},
        {400, "Bad Request"},
        {401, "Unauthorized"},
        {403, "Forbidden"},
        {404, "Not Found"},
        {405, "Method Not Allowed"},
        {413, "Content Too Large"},
        {421, "Misdirected Request"},
        {431, "Request Header Fields Too Large"},
        {501, "Not Implemented"},
        {503, "Service Unavailable"},
        {505, "HTTP Version Not Supported"},
    };
    for (size_t i = 0; i < N_ELEMENTS(reasons); i++) {
        if (reasons[i].status == status) {
            return reasons[i].reason;
        }
    }
    return "Error";
}
