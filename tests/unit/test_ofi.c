// SPDX-License-Identifier: Apache-2.0
//
// test_ofi.c - the libfabric transport by itself: streams over endpoints with and without
// connections, registered memory and its release, callers that do not belong to the job.
//
// Two domains live in this process and talk over loopback; no RDMA hardware is needed (tests/rdma
// has the tests with verbs).
#define _GNU_SOURCE
#include "net_world.h"

#include "net/ofi.h"

#include <signal.h>

#define PATIENCE_MS 20000
#define QUIET_MS 15000
#define STREAM_BYTES (3 * OFI_BUFFERS * OFI_BUFFER_BYTES + 12345)

typedef struct pair {
    place_t places[2];
    domain_t *domains[2];
    net_link_t *links[2];
} pair_t;

static void open_place(place_t *place, int rank, const char *const *knobs, domain_t **domain_p)
{
    err_t err = {0};
    place_init(place, rank, 2, knobs, "the secret");
    must(transport_ofi.open(&place->job, domain_p, &err), &err);
}

// Both know both addresses afterwards.
static void introduce(pair_t *p)
{
    buf_t addresses[2] = {0};
    err_t err = {0};
    for (int r = 0; r < 2; r++) {
        must(transport_ofi.address(p->domains[r], &addresses[r], &err), &err);
    }
    const uint8_t *data[2] = {addresses[0].data, addresses[1].data};
    size_t bytes[2] = {addresses[0].len, addresses[1].len};
    for (int r = 0; r < 2; r++) {
        must(transport_ofi.attach(p->domains[r], data, bytes, &err), &err);
    }
    buf_free(&addresses[0]);
    buf_free(&addresses[1]);
}

static void connect_links(pair_t *p)
{
    err_t err = {0};
    for (int r = 0; r < 2; r++) {
        must(transport_ofi.connect(p->domains[r], 1 - r, LANE_DATA, &p->links[r], &err), &err);
    }
}

static void open_pair(pair_t *p, const char *const *knobs)
{
    for (int r = 0; r < 2; r++) {
        open_place(&p->places[r], r, knobs, &p->domains[r]);
    }
    introduce(p);
}

static void close_pair(pair_t *p)
{
    for (int r = 0; r < 2; r++) {
        transport_ofi.close(p->domains[r]);
        place_free(&p->places[r]);
    }
}

static void progress(pair_t *p)
{
    transport_ofi.progress(p->domains[0]);
    transport_ofi.progress(p->domains[1]);
}

// A stream each way, in pieces of every size, checked byte by byte.
static void exchange(pair_t *p, size_t bytes)
{
    static uint8_t piece[200000];
    uint64_t state = 7, deadline_ns = deadline_in_ms(PATIENCE_MS);
    size_t sent[2] = {0}, got[2] = {0};
    while (got[0] < bytes || got[1] < bytes) {
        for (int r = 0; r < 2; r++) {
            size_t wanted = 1 + test_random(&state) % sizeof piece;
            size_t n = MIN(bytes - sent[r], wanted);
            for (size_t i = 0; i < n; i++) {
                piece[i] = stream_byte((uint64_t)r, sent[r] + i);
            }
            ssize_t moved = n > 0 ? link_send(p->links[r], piece, n) : 0;
            assert_true(moved >= 0);
            sent[r] += (size_t)moved;
            moved = link_recv(p->links[r], piece, 1 + test_random(&state) % sizeof piece);
            assert_true(moved >= 0);
            for (ssize_t i = 0; i < moved; i++) {
                assert_int_equal(piece[i], stream_byte((uint64_t)(1 - r), got[r] + (size_t)i));
            }
            got[r] += (size_t)moved;
        }
        progress(p);
        assert_true(clock_ns() < deadline_ns);
    }
}

static const char *const by_tcp[] = {"HOROVOD_OFI_PROVIDER=tcp", NULL};
static const char *const by_rxm[] = {"HOROVOD_OFI_PROVIDER=tcp;ofi_rxm", NULL};

static void mine(int number)
{
    (void)number;
}

// Must be the first: the library is loaded once.
static void signals_stay_with_the_program(void **state)
{
    (void)state;
    static const int numbers[] = {SIGINT, SIGTERM};
    place_t place;
    domain_t *d;
    for (size_t i = 0; i < N_ELEMENTS(numbers); i++) {
        signal(numbers[i], mine);
    }
    open_place(&place, 0, by_tcp, &d);
    for (size_t i = 0; i < N_ELEMENTS(numbers); i++) {
        assert_ptr_equal(signal(numbers[i], SIG_DFL), mine);
    }
    transport_ofi.close(d);
    place_free(&place);
}

static void streams_cross(void **state)
{
    (void)state;
    const struct {
        const char *const *knobs;
        bool connects;
    } rows[] = {{by_tcp, true}, {by_rxm, false}};
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        pair_t p = {0};
        open_pair(&p, rows[i].knobs);
        assert_int_equal(p.domains[0]->ep == NULL, rows[i].connects);
        connect_links(&p);
        exchange(&p, STREAM_BYTES);
        close_pair(&p);
    }
}

static void memory_is_kept_and_released(void **state)
{
    (void)state;
    char knob[64];
    snprintf(knob, sizeof knob, "HOROVOD_OFI_CACHE_BYTES=%zu", 2 * OFI_SLAB_BYTES);
    const char *const knobs[] = {by_tcp[0], knob, NULL};
    place_t place;
    domain_t *d;
    ofi_slab_t *slabs[4];
    err_t err = {0};
    open_place(&place, 0, knobs, &d);
    for (int i = 0; i < 4; i++) {
        slabs[i] = ofi_slab_take(d, &err);
        assert_non_null(slabs[i]);
        memset(slabs[i]->memory, i, OFI_SLAB_BYTES);
    }
    assert_int_equal(d->registered_bytes, 4 * OFI_SLAB_BYTES);
    for (int i = 0; i < 4; i++) {
        ofi_slab_give(d, slabs[i]);
    }
    assert_int_equal(d->registered_bytes, 2 * OFI_SLAB_BYTES); // the first two given back are gone
    assert_ptr_equal(ofi_slab_take(d, &err), slabs[3]);
    assert_ptr_equal(ofi_slab_take(d, &err), slabs[2]);
    assert_int_equal(d->registered_bytes, 2 * OFI_SLAB_BYTES);
    assert_int_equal(d->spare_bytes, 0);
    ofi_slab_give(d, slabs[3]);
    ofi_slab_give(d, slabs[2]);
    transport_ofi.close(d);
    place_free(&place);
}

static void quiet_links_give_memory_back(void **state)
{
    (void)state;
    const char *const knobs[] = {by_tcp[0], "HOROVOD_OFI_CACHE_BYTES=0", NULL};
    pair_t p = {0};
    open_pair(&p, knobs);
    assert_int_equal(p.domains[0]->registered_bytes, 0);
    connect_links(&p);
    exchange(&p, 1000000);
    assert_int_equal(p.domains[0]->registered_bytes, 2 * OFI_SLAB_BYTES);
    uint64_t deadline_ns = deadline_in_ms(QUIET_MS);
    while (p.domains[0]->registered_bytes > OFI_SLAB_BYTES && clock_ns() < deadline_ns) {
        progress(&p);
        nap_us(1000);
    }
    assert_int_equal(p.domains[0]->registered_bytes, OFI_SLAB_BYTES); // what it receives in
    exchange(&p, 1000000);
    assert_int_equal(p.domains[0]->registered_bytes, 2 * OFI_SLAB_BYTES);
    close_pair(&p);
}

static void strangers_are_refused(void **state)
{
    (void)state;
    pair_t p = {0};
    uint8_t byte = 0;
    open_pair(&p, by_tcp);
    p.domains[1]->token[5] ^= 1; // rank 0 now shows something else than rank 1 expects
    connect_links(&p);
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    ssize_t n = 0;
    while (n == 0 && clock_ns() < deadline_ns) {
        progress(&p);
        n = link_send(p.links[0], &byte, 1);
    }
    assert_int_equal(n, HVD_PEER_LOST);
    assert_non_null(strstr(p.links[0]->err.text, "rank 1 over ofi (tcp)"));
    assert_false(((ofi_link_t *)p.links[1])->connected);
    close_pair(&p);
}

// What strangers send to the shared endpoint has another tag: it arrives at no link.
static void strange_tags_are_not_heard(void **state)
{
    (void)state;
    pair_t p = {0};
    uint8_t byte = 0;
    open_pair(&p, by_rxm);
    p.domains[1]->token[5] ^= 1;
    connect_links(&p);
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    while (link_send(p.links[0], &byte, 1) == 0 && clock_ns() < deadline_ns) {
        progress(&p);
    }
    assert_true(((ofi_link_t *)p.links[0])->next_out > 0);
    deadline_ns = deadline_in_ms(300);
    while (clock_ns() < deadline_ns) {
        progress(&p);
        assert_int_equal(link_recv(p.links[1], &byte, 1), 0);
    }
    close_pair(&p);
}

static void refuses(const char *provider, int n_warnings, const char *sentence)
{
    char knob[64];
    snprintf(knob, sizeof knob, "HOROVOD_OFI_PROVIDER=%s", provider);
    place_t place;
    domain_t *d = NULL;
    err_t err = {0};
    place_init(&place, 0, 2, (const char *const[]){knob, NULL}, "the secret");
    assert_int_equal(transport_ofi.open(&place.job, &d, &err), HVD_UNSUPPORTED);
    assert_non_null(strstr(err.text, sentence));
    assert_int_equal(place.n_log_lines, n_warnings);
    place_free(&place);
}

static void a_missing_provider_is_told(void **state)
{
    (void)state;
    refuses("nosuch", 1, "libfabric has no provider nosuch that works here");
}

static void shm_reaches_one_host(void **state)
{
    (void)state;
    static const int apart[] = {0, 1};
    pair_t p = {0};
    char why[160] = "";
    open_pair(&p, (const char *const[]){"HOROVOD_OFI_PROVIDER=shm", NULL});
    assert_true(transport_ofi.reaches(p.domains[0], 1, why, sizeof why));
    connect_links(&p);
    exchange(&p, STREAM_BYTES);
    p.places[0].job.host_of = apart;
    assert_false(transport_ofi.reaches(p.domains[0], 1, why, sizeof why));
    assert_string_equal(why, "the libfabric provider \"shm\" does not reach other hosts");
    close_pair(&p);
}

// Reads so many bytes on rank 1, which must be those of the stream from `at` on.
static void read_stream(pair_t *p, size_t at, size_t bytes)
{
    uint8_t got[8192];
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    size_t n = 0;
    while (n < bytes) {
        ssize_t moved = link_recv(p->links[1], got, MIN(sizeof got, bytes - n));
        assert_true(moved >= 0);
        for (ssize_t i = 0; i < moved; i++) {
            assert_int_equal(got[i], stream_byte(0, at + n + (size_t)i));
        }
        n += (size_t)moved;
        progress(p);
        assert_true(clock_ns() < deadline_ns);
    }
}

static void a_head_leaves_with_what_follows(void **unused)
{
    (void)unused;
    pair_t p;
    uint8_t bytes[5016];
    open_pair(&p, by_tcp);
    connect_links(&p);
    exchange(&p, 1000);
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = stream_byte(0, i);
    }
    ofi_link_t *link = (ofi_link_t *)p.links[0];
    uint32_t n_messages = link->next_out;

    assert_int_equal(link_send_head(p.links[0], bytes, 16), 16);
    assert_int_equal(link_send(p.links[0], bytes + 16, 5000), 5000);
    assert_int_equal(link->next_out, n_messages + 1);
    read_stream(&p, 0, 5016);

    assert_int_equal(link_send_head(p.links[0], bytes, 16), 16);
    assert_int_equal(link->next_out, n_messages + 1);
    read_stream(&p, 0, 16); // progress sends it though nothing follows
    close_pair(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(signals_stay_with_the_program),
        cmocka_unit_test(streams_cross),
        cmocka_unit_test(a_head_leaves_with_what_follows),
        cmocka_unit_test(memory_is_kept_and_released),
        cmocka_unit_test(quiet_links_give_memory_back),
        cmocka_unit_test(strangers_are_refused),
        cmocka_unit_test(strange_tags_are_not_heard),
        cmocka_unit_test(a_missing_provider_is_told),
        cmocka_unit_test(shm_reaches_one_host),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
