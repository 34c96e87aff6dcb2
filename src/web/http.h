// SPDX-License-Identifier: Apache-2.0
//
// http.h - requests of HTTP/1.1, as strictly as a server may read that has a handful of pages.
//
// Pure. What is not understood is refused, with the status that says why.
#ifndef HVD_WEB_HTTP_H
#define HVD_WEB_HTTP_H

#include "base/base.h"

#define HTTP_REQUEST_BYTES 8192 // a whole request
#define HTTP_TOKEN_BYTES 128

typedef struct http_request {
    bool is_head, keeps_alive, wants_open_metrics;
    bool is_cross_site; // as the browser says
    char path[64];
    char token[HTTP_TOKEN_BYTES];  // of the query
    char bearer[HTTP_TOKEN_BYTES]; // of Authorization
    char cookie[HTTP_TOKEN_BYTES]; // of the cookie that was asked for
    int id;                        // of the query; -1: none
    int columns, rows;             // likewise; 0
    char host[256];                // without the port
    char origin[300];              // "": none
} http_request_t;

// 200: *used_p bytes were a request; 0: more is to come; else the status to refuse it with. cookie:
// the name of the one to look for.
int http_read(const char *data, size_t bytes, const char *cookie, http_request_t *request_p,
              size_t *used_p);
const char *http_reason(int status);

#endif
