// SPDX-License-Identifier: Apache-2.0
//
// fuzz_http.c - what browsers, and others, send to the job page; and what ranks tell of themselves.
//
// A request that is read has used no more than there is, and the same bytes without the last one
// are not yet a request.
#include "fuzz.h"
#include "web/http.h"
#include "web/web.h"

#include <stdlib.h>

static void read_as_page(const uint8_t *data, size_t bytes)
{
    char *command[] = {"x"};
    model_t *model = model_new(command, 1);
    char *text = malloc(bytes + 1);
    buf_t out = {0};
    MUST(model != NULL && text != NULL);
    memcpy(text, data, bytes);
    text[bytes] = '\0';
    model_place(model, 0, 0, text, 1);
    model_snapshot(model, 0, text);
    model_snapshot(model, 0, text);
    model_json(model, true, &out);
    for (size_t i = 0; i < out.len; i++) {
        MUST(out.data[i] != '<' && out.data[i] >= ' ');
    }
    model_rank_json(model, 0, &out);
    model_metrics(model, METRICS_OPEN, &out);
    model_text(model, 80, 10, &out);
    buf_free(&out);
    free(text);
    model_free(model);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    http_request_t request;
    size_t used = 0;
    if (http_read((const char *)data, bytes, "hvd-1", &request, &used) == 200) {
        MUST(used >= 4 && used <= bytes && request.path[0] == '/');
        MUST(http_read((const char *)data, used - 1, "hvd-1", &request, &used) == 0);
    }
    read_as_page(data, bytes);
    return 0;
}
