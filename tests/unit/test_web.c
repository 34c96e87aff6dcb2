// SPDX-License-Identifier: Apache-2.0
//
// test_web.c - the job page without a browser.
//
// Requests that are read and refused, JSON of anything, and what is known of a job, from pages of
// ranks that tell the truth and others. No sockets: tests/launch/test_dashboard.py has those.
#define _GNU_SOURCE
#include "web/http.h"
#include "web/web.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define GET "GET / HTTP/1.1\r\nHost: a\r\n"

static int status_of(const char *text)
{
    http_request_t request;
    size_t used;
    return http_read(text, strlen(text), "hvd-1", &request, &used);
}

static void requests_are_read(void **state)
{
    (void)state;
    static const char text[] = "HEAD /rank?id=17&token=abc HTTP/1.1\r\nhOST: [::1]:80\r\n"
                               "Cookie: x=1; hvd-1=t0; hvd-10=no\r\nAuthorization: bearer  xyz \r\n"
                               "Accept: text/plain, application/openmetrics-text;q=1\r\n"
                               "Sec-Fetch-Site: cross-site\r\nOrigin: http://b\r\n\r\nGET";
    http_request_t r;
    size_t used = 0;
    assert_int_equal(http_read(text, sizeof text - 1, "hvd-1", &r, &used), 200);
    assert_int_equal(used, sizeof text - 1 - 3);
    assert_true(r.is_head && r.keeps_alive && r.wants_open_metrics && r.is_cross_site);
    assert_string_equal(r.path, "/rank");
    assert_int_equal(r.id, 17);
    assert_string_equal(r.token, "abc");
    assert_string_equal(r.host, "[::1]");
    assert_string_equal(r.cookie, "t0");
    assert_string_equal(r.bearer, "xyz");
    assert_string_equal(r.origin, "http://b");
    for (size_t n = 0; n < used; n++) { // whatever has come so far
        http_request_t part;
        size_t none;
        assert_int_equal(http_read(text, n, "hvd-1", &part, &none), 0);
    }
}

static void requests_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int status;
    } cases[] = {
        {GET "\r\n", 200},
        {"POST / HTTP/1.1\r\nHost: a\r\n\r\n", 405},
        {"get / HTTP/1.1\r\nHost: a\r\n\r\n", 405},
        {"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505},
        {"GET / http/1.1\r\nHost: a\r\n\r\n", 400},
        {"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400},
        {"GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400},
        {"GET /\x80 HTTP/1.1\r\nHost: a\r\n\r\n", 400},
        {"GET /?id=-1 HTTP/1.1\r\nHost: a\r\n\r\n", 400},
        {"GET /?id=99999999999 HTTP/1.1\r\nHost: a\r\n\r\n", 400},
        {"GET / HTTP/1.1\r\n\r\n", 400},
        {GET "Host: b\r\n\r\n", 400},
        {GET "Host : b\r\n\r\n", 400},
        {GET " folded: x\r\n\r\n", 400},
        {GET "X: a\x01\r\n\r\n", 400},
        {GET "X: a\rb\r\n\r\n", 400},
        {GET "X: a\nY: b\r\n\r\n", 400},
        {GET "Content-Length: 4\r\n\r\nbody", 413},
        {GET "Content-Length: 0\r\n\r\n", 200},
        {GET "Transfer-Encoding: chunked\r\n\r\n", 501},
        {"\r\n\r\n", 400},
    };
    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        if (status_of(cases[i].text) != cases[i].status) {
            fail_msg("case %zu: %d", i, status_of(cases[i].text));
        }
    }
    char *endless = calloc(1, HTTP_REQUEST_BYTES + 1);
    memset(endless, 'a', HTTP_REQUEST_BYTES);
    assert_int_equal(status_of(endless), 431);
    free(endless);
}

static const char *json_of(const char *text)
{
    static char shown[256];
    buf_t out = {0};
    json_text(&out, text);
    snprintf(shown, sizeof shown, "%.*s", (int)out.len, (const char *)out.data);
    buf_free(&out);
    return shown;
}

static void json_holds_anything(void **state)
{
    (void)state;
    assert_string_equal(json_of("a\"b\\c\n"), "\"a\\\"b\\\\c\\n\"");
    assert_string_equal(json_of("</script><!--&"), "\"\\u003c/script\\u003e\\u003c!--\\u0026\"");
    assert_string_equal(json_of("gr\xc3\xb6\xc3\x9f\x65"), "\"gr\xc3\xb6\xc3\x9f\x65\"");
    assert_string_equal(json_of("\xff\xc0\x80\xed\xa0\x80"),
                        "\"\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\"");
    assert_string_equal(json_of("\xe2\x80\xa8\x01"), "\"\\ufffd\\u0001\"");
}

// --- A job ---------------------------------------------------------------------------------------

#define COUNTERS "counters\t1 2"

static void say(model_t *m, int id, const char *state, const char *more)
{
    char page[2048];
    snprintf(page, sizeof page, "rank\t%d\nstate\t%s\nin_flight\t1\n%s", id, state, more);
    model_snapshot(m, id, page);
}

static model_t *new_job(int n)
{
    char *command[] = {"train", "<b>"};
    model_t *m = model_new(command, 2);
    assert_non_null(m);
    model_generation(m, 0, n);
    for (int i = 0; i < n; i++) {
        model_place(m, i, i, "h", 100 + i);
    }
    return m;
}

static char *text_of(buf_t *out)
{
    buf_append(out, "", 1);
    assert_false(out->failed);
    return (char *)out->data;
}

static void waits_for(model_t *m, int id, char text[128])
{
    lock_take(&m->lock);
    model_waits_for(m, m->ranks[id], text, 128);
    lock_release(&m->lock);
}

static void a_waiting_rank_names_the_others(void **state)
{
    (void)state;
    char text[128];
    model_t *m = new_job(6);
    for (int i = 0; i < 2; i++) {
        say(m, i, "waiting", "now\t5\nflight\twaiting\t4.5\tallreduce\t0\tgrad.1\n");
    }
    say(m, 2, "waiting", "now\t5\nflight\twaiting\t4.5\tallreduce\t0\tgrad.2\n");
    waits_for(m, 0, text);
    assert_string_equal(text, "ranks 2, 3, 4 and 1 more");
    model_end(m, 5, 9, 0);
    model_gone(m, 4);
    waits_for(m, 0, text);
    assert_string_equal(text, "ranks 2, 3, 5");
    model_gone(m, 3);
    model_gone(m, 5);
    waits_for(m, 0, text);
    assert_string_equal(text, "rank 2");
    waits_for(m, 3, text);
    assert_string_equal(text, "");
    model_free(m);
}

static void lies_of_a_rank_do_no_harm(void **state)
{
    (void)state;
    static const char *const pages[] = {
        "",
        "\n\n\t\t\n",
        "state",
        "op\t1\t2\t3\t4\t5\tx\ty\n",
        COUNTERS "\n",
        "in_flight\t-5\n",
        "now\tx\nop\t-9223372036854775808\t1\t1\t1\t1\ta\tb\n",
        "share\tnan\tinf\t-1\nnow\t1\n",
        "late\t1\t1\t18446744073709551615\t1e308\n",
        "step\t1\nloss\nsamples\tnan\n",
        "flight\twaiting\t1\ta\t0\t\n",
        "stack\n",
        "memory\t-1\ncpu\tinf\n",
    };
    model_t *m = new_job(2);
    buf_t out = {0};
    for (size_t i = 0; i < N_ELEMENTS(pages); i++) {
        model_snapshot(m, (int)(i % 3), pages[i]); // the third rank is not there
        model_json(m, true, &out);
        model_metrics(m, METRICS_OPEN, &out);
        model_text(m, 0, 0, &out);
        model_rank_json(m, (int)(i % 3), &out);
    }
    assert_null(strstr(text_of(&out), "nan,"));
    buf_free(&out);
    model_free(m);
}

static void a_job_is_told_in_json(void **state)
{
    (void)state;
    buf_t out = {0};
    model_t *m = new_job(2);
    say(m, 0, "running",
        "now\t1000000\nshare\t0.5\t0.2\t0.3\nstep\t7\t0.25\nloss\t1.5\n"
        "op\t500\t400\t300\t200\t64\tallreduce\tgrad</script>\nstack\tFile x\n");
    model_output(m, 0, "hello <i>\n", 10);
    model_failure(m, "broken & gone", 13);
    model_json(m, true, &out);
    const char *text = text_of(&out);
    assert_non_null(strstr(text, "\"command\":\"train \\u003cb\\u003e\""));
    assert_non_null(strstr(text, "\"state\":\"running\""));
    assert_non_null(strstr(text, "\"step\":7,"));
    assert_non_null(strstr(text, "0.5,0.2,0.3"));
    assert_non_null(strstr(text, "\"EG\"]")); // 20 % and 30 %, in letters
    assert_non_null(strstr(text, "\"failure\":\"broken \\u0026 gone\""));
    buf_clear(&out);
    model_rank_json(m, 0, &out);
    text = text_of(&out);
    assert_non_null(strstr(text, "[999500,999600,999700,999800,64,\"allreduce\",\"grad\\u003c"));
    assert_non_null(strstr(text, "\"stack\":\"File x\\n\""));
    assert_non_null(strstr(text, "\"log\":\"hello \\u003ci\\u003e\\n\""));
    buf_clear(&out);
    model_rank_json(m, 9, &out);
    assert_string_equal(text_of(&out), "null");
    buf_free(&out);
    model_free(m);
}

static void memory_of_a_job_is_bounded(void **state)
{
    (void)state;
    model_t *m = new_job(1);
    char line[1000], page[128];
    memset(line, 'x', sizeof line);
    for (int i = 0; i < 1000; i++) {
        model_output(m, 0, line, sizeof line);
        model_event(m, 'i', "event %d", i);
        snprintf(page, sizeof page, "now\t%d\nop\t1\t1\t1\t1\t8\tallreduce\tx\n", i * 1000 + 1000);
        model_snapshot(m, 0, page);
    }
    assert_true(m->ranks[0]->log.len <= 2 * MODEL_LOG_BYTES);
    assert_int_equal(m->n_events, MODEL_EVENTS);
    assert_string_equal(m->events[MODEL_EVENTS - 1].text, "event 999");
    assert_int_equal(m->ranks[0]->n_operations, 1000);
    assert_int_equal(m->ranks[0]->n_history, MODEL_HISTORY);
    model_free(m);
}

static void metrics_of_a_job_have_labels(void **state)
{
    (void)state;
    buf_t out = {0};
    model_t *m = new_job(2);
    model_place(m, 1, 1, "odd\"\\host", 1);
    say(m, 0, "idle", "now\t1\n");
    say(m, 1, "idle", "now\t1\nmemory\t4096\ncpu\t1.5\n");
    model_metrics(m, METRICS_OPEN, &out);
    const char *text = text_of(&out);
    assert_non_null(strstr(text, "\nhvd_job_ranks 2\n"));
    assert_non_null(strstr(text, "\nhvd_failed_total{rank=\"0\",host=\"h\"} 0\n"));
    assert_non_null(strstr(text, "hvd_resident_bytes{rank=\"1\",host=\"odd\\\"\\\\host\"} 4096\n"));
    assert_null(strstr(text, "hvd_resident_bytes{rank=\"0\""));
    assert_non_null(strstr(text, "# EOF\n"));
    buf_free(&out);
    model_free(m);
}

static void the_page_is_whole(void **state)
{
    (void)state;
    page_t page;
    buf_t data = {0};
    assert_true(page_make(NULL, &page));
    buf_append(&page.html, "", 1);
    const char *html = (const char *)page.html.data;
    assert_non_null(strstr(html, "</html>"));
    assert_null(strstr(html, "{{"));
    assert_null(strstr(html, "http-equiv"));
    assert_null(strstr(html, "://")); // nothing of anybody else's
    assert_non_null(strstr(page.policy, "default-src 'none'; script-src 'sha256-"));
    page_free(&page);
    buf_printf(&data, "{\"job\":1}");
    assert_true(page_make(&data, &page));
    buf_append(&page.html, "", 1);
    html = (const char *)page.html.data;
    assert_non_null(strstr(html, "http-equiv=\"Content-Security-Policy\""));
    assert_non_null(strstr(html, ">{\"job\":1}</script>"));
    page_free(&page);
    buf_free(&data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_are_read),
        cmocka_unit_test(requests_are_refused),
        cmocka_unit_test(json_holds_anything),
        cmocka_unit_test(a_waiting_rank_names_the_others),
        cmocka_unit_test(lies_of_a_rank_do_no_harm),
        cmocka_unit_test(a_job_is_told_in_json),
        cmocka_unit_test(memory_of_a_job_is_bounded),
        cmocka_unit_test(metrics_of_a_job_have_labels),
        cmocka_unit_test(the_page_is_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
