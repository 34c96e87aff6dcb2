// SPDX-License-Identifier: Apache-2.0
//
// page.c - the job page, in one piece: the files of page/, which the build has put into page_files.
//
// The page runs what is inside it and nothing else: its policy names the script and the style by
// their hashes, so a name that became HTML by some mistake would still do nothing. Pure.
#define _GNU_SOURCE
#include "web/page_files.h"
#include "web/web.h"

#include <openssl/evp.h>
#include <stdio.h>

// 'sha256-...' of a part of the page.
static bool put_hash(const char *text, size_t bytes, char out[64])
{
    uint8_t digest[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    if (EVP_Digest(text, bytes, digest, &n, EVP_sha256(), NULL) != 1) {
        return false;
    }
    EVP_EncodeBlock((uint8_t *)out, digest, (int)n);
    return true;
}

static bool make_policy(bool is_file, char *policy, size_t bytes)
{
    char script[64], style[64];
    bool is_fine = put_hash(page_script, page_script_bytes, script) &&
                   put_hash(page_style, page_style_bytes, style);
    snprintf(policy, bytes,
             "default-src 'none'; script-src 'sha256-%s'; style-src 'sha256-%s'; img-src data:; "
             "base-uri 'none'; form-action 'none'%s",
             script, style, is_file ? "" : "; connect-src 'self'; frame-ancestors 'none'");
    return is_fine;
}

static void put_part(buf_t *out, const char *name, const page_t *page, const buf_t *data)
{
    if (strcmp(name, "style") == 0) {
        buf_append(out, page_style, page_style_bytes);
    } else if (strcmp(name, "script") == 0) {
        buf_append(out, page_script, page_script_bytes);
    } else if (strcmp(name, "data") == 0 && data != NULL) {
        buf_append(out, data->data, data->len);
    } else if (strcmp(name, "policy") == 0 && data != NULL) {
        buf_printf(out, "<meta http-equiv=\"Content-Security-Policy\" content=\"%s\">",
                   page->policy);
    }
}

// {{name}} stands for a part.
bool page_make(const buf_t *data, page_t *page)
{
    const char *at = page_html, *end = page_html + page_html_bytes;
    *page = (page_t){0};
    if (!make_policy(data != NULL, page->policy, sizeof page->policy)) {
        return false;
    }
    while (at < end) {
        const char *mark = memmem(at, (size_t)(end - at), "{{", 2);
        const char *stop = mark != NULL ? memmem(mark, (size_t)(end - mark), "}}", 2) : NULL;
        char name[16] = "";
        buf_append(&page->html, at, (size_t)((stop != NULL ? mark : end) - at));
        if (stop == NULL) {
            break;
        }
        snprintf(name, sizeof name, "%.*s", (int)(stop - mark - 2), mark + 2);
        put_part(&page->html, name, page, data);
        at = stop + 2;
    }
    return !page->html.failed;
}

void page_free(page_t *page)
{
    buf_free(&page->html);
}
