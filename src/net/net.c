// SPDX-License-Identifier: Apache-2.0
//
// net.c - the table of transports, and which of them serves which peer.
//
// Set-up has three steps, between which boot carries every rank's bytes to all others:
//   net_open, net_address    each transport opens and says how it is reached
//   net_attach, net_attached each learns everyone's addresses and says whether that worked
//   net_settle               with everyone's answers, a transport is chosen for each peer
// The choice must be the same on both sides of a pair although knobs may differ: it walks the order
// of the lower rank, and takes the first transport that both offer and that reaches (a question to
// which both sides give the same answer, see net.h).
//
// Lifelines: shared memory does not notice that a process died. So the lowest rank of a host keeps
// a silent TCP connection to each other rank of it that is not reached by TCP anyway: when a
// process dies, its connection ends.
//
// Cost: one small array entry per rank; links exist only where used. A domain that needs a system
// call for its progress is asked on every call while links of it are in use, else every IDLE_NS.
// Thread: the holder of the engine, except net_wake. net_t owns domains, links and the sleeper.
#define _GNU_SOURCE
#include "net/rows.h"

#include <stdio.h>
#include <stdlib.h>

#define UNENCRYPTED_BIT 0x80 // in a rank's answer, behind the bits of the rows
#define IDLE_NS (50 * NS_PER_US)
#define CALLS_PER_CLOCK 16
// Domains that cannot wake anybody are asked after this time, and while nothing happens ever more
// rarely, up to 32 times it.
#define ASK_NS (100 * NS_PER_US)
#define MOST_DOUBLINGS 5u

// --- Which transports ----------------------------------------------------------------------------

int net_row_named(const char *name, size_t bytes)
{
    for (int i = 0; i < N_TRANSPORTS; i++) {
        if (strlen(transports[i]->name) == bytes && memcmp(transports[i]->name, name, bytes) == 0) {
            return i;
        }
    }
    return NO_ROW;
}

static int row_of(const transport_t *transport)
{
    return net_row_named(transport->name, strlen(transport->name));
}

static void prefer(net_t *net, int row, bool carries)
{
    for (int i = 0; i < net->n_order; i++) {
        if (net->order[i] == row) {
            return;
        }
    }
    if (net->n_order < (int)N_TRANSPORTS) { // as every row is there once, which gcc -O3 cannot see
        net->order[net->n_order++] = (int8_t)row;
        net->rows[row].carries = carries;
    }
}

static hvd_status_t fail_unknown_name(const char *name, size_t bytes, err_t *err)
{
    char names[128] = "";
    size_t len = 0;
    for (int i = 0; i < N_TRANSPORTS; i++) {
        len += (size_t)snprintf(names + len, sizeof names - len, "%s%s", i > 0 ? ", " : "",
                                transports[i]->name);
    }
    return fail(err, HVD_INVALID_ARGUMENT,
                "HOROVOD_TRANSPORTS names \"%.*s\", which is not a transport; choose from %s",
                (int)MIN(bytes, 100), name, names);
}

// Fills the order. A rank always reaches itself; TCP is there for lifelines, wanted or not.
static hvd_status_t choose_order(net_t *net, err_t *err)
{
    const char *text = net->job.config->transports;
    bool all = text == NULL || text[strspn(text, ", ")] == '\0';
    prefer(net, row_of(&transport_self), true);
    for (int i = 0; all && i < N_TRANSPORTS; i++) {
        prefer(net, i, true);
    }
    while (!all && *(text += strspn(text, ", ")) != '\0') {
        size_t bytes = strcspn(text, ", ");
        int row = net_row_named(text, bytes);
        if (row == NO_ROW) {
            return fail_unknown_name(text, bytes, err);
        }
        prefer(net, row, true);
        text += bytes;
    }
    prefer(net, row_of(&transport_tcp), false);
    for (int i = 0; i < N_TRANSPORTS; i++) {
        snprintf(net->rows[i].left_out, sizeof net->rows[i].left_out, "not in HOROVOD_TRANSPORTS");
    }
    return HVD_OK;
}

static hvd_status_t open_rows(net_t *net, err_t *err)
{
    for (int i = 0; i < net->n_order; i++) {
        const transport_t *transport = transports[net->order[i]];
        row_t *row = &net->rows[net->order[i]];
        hvd_status_t status = transport->open(&net->job, &row->domain, err);

        if (status == HVD_UNSUPPORTED) {
            snprintf(row->left_out, sizeof row->left_out, "%.*s", (int)sizeof row->left_out - 1,
                     err->text);
            log_debug(net->job.log, "net", "transport %s is not used: %s", transport->name,
                      err->text);
            row->domain = NULL;
            continue;
        }
        if (status != HVD_OK) {
            return status;
        }
        int fd;
        row->needs_call = transport->wait_fd != NULL && transport->wait_fd(row->domain, &fd);
        row->cannot_wake = transport->wait_fd != NULL && !row->needs_call;
        if (row->needs_call && (status = sleeper_watch(net->sleeper, fd, err)) != HVD_OK) {
            return status;
        }
    }
    return HVD_OK;
}

// --- Cores ---------------------------------------------------------------------------------------

bool net_oversubscribed(const net_t *net)
{
    return net->oversubscribed;
}

bool net_has_spare_cores(const net_t *net)
{
    return net->has_spare_cores;
}

core_use_t net_core_use(net_t *net)
{
    return cores_look(&net->cores);
}

void net_part_cores(net_t *net, uint64_t now_ns)
{
    cores_part(&net->cores, now_ns);
}

// --- Choosing ------------------------------------------------------------------------------------

uint8_t net_attached_bit(const transport_t *transport)
{
    return (uint8_t)(1u << row_of(transport));
}

// Forgets offers of ranks that could not attach, and tells each transport who could.
static hvd_status_t spread_answers(net_t *net, const uint8_t *attached_by_rank, err_t *err)
{
    uint8_t *answers = malloc((size_t)net->job.size);
    if (answers == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for the answers of %d ranks", net->job.size);
    }
    for (int i = 0; i < N_TRANSPORTS; i++) {
        for (int r = 0; r < net->job.size; r++) {
            answers[r] = attached_by_rank[r] >> i & 1;
        }
        if (net->rows[i].domain != NULL && transports[i]->settle != NULL) {
            transports[i]->settle(net->rows[i].domain, answers);
        }
    }
    free(answers);
    for (int r = 0; r < net->job.size; r++) {
        offers_t *offers = &net->offers[r];
        int n = 0;
        for (int i = 0; i < offers->n; i++) {
            if (attached_by_rank[r] >> offers->order[i] & 1) {
                offers->order[n++] = offers->order[i];
            }
        }
        offers->n = (int8_t)n;
    }
    return HVD_OK;
}

static bool offered_by(const net_t *net, int rank, int row)
{
    const offers_t *offers = &net->offers[rank];
    for (int i = 0; i < offers->n; i++) {
        if (offers->order[i] == row) {
            return true;
        }
    }
    return false;
}

// Whether a row can serve this rank and peer; if not, `why` says what is in the way.
static bool serves(net_t *net, int row, int peer, char *why, size_t why_bytes)
{
    const row_t *state = &net->rows[row];
    if (state->domain == NULL) {
        snprintf(why, why_bytes, "%s", state->left_out);
        return false;
    }
    if (!state->carries) {
        snprintf(why, why_bytes, "not in HOROVOD_TRANSPORTS");
        return false;
    }
    if (!offered_by(net, net->job.rank, row) || !offered_by(net, peer, row)) {
        snprintf(why, why_bytes, "not working on rank %d",
                 offered_by(net, peer, row) ? net->job.rank : peer);
        return false;
    }
    return transports[row]->reaches(state->domain, peer, why, why_bytes);
}

static int choose_row(net_t *net, int peer)
{
    const offers_t *offers = &net->offers[MIN(peer, net->job.rank)];
    char why[160];
    for (int i = 0; i < offers->n; i++) {
        if (serves(net, offers->order[i], peer, why, sizeof why)) {
            return offers->order[i];
        }
    }
    return NO_ROW;
}

// The row by which tensors of this rank reach another host unencrypted, or NO_ROW. It is the same
// before everyone's answers are known: only shm may fail to attach, and it leads to no other host.
static int unencrypted_row(net_t *net)
{
    bool is_meant = net->job.config->encrypt == ENCRYPT_NEVER;
    for (int r = 0; !is_meant && r < net->job.size; r++) {
        int row = net_same_host(net, r) ? NO_ROW : choose_row(net, r);
        if (row != NO_ROW && transports[row]->warn_unencrypted != NULL) {
            return row;
        }
    }
    return NO_ROW;
}

uint8_t net_attached(net_t *net)
{
    uint8_t bits = unencrypted_row(net) != NO_ROW ? UNENCRYPTED_BIT : 0;
    _Static_assert(N_TRANSPORTS < 8, "the highest bit is no row's");
    for (int i = 0; i < N_TRANSPORTS; i++) {
        domain_t *domain = net->rows[i].domain;
        if (domain != NULL &&
            (transports[i]->is_attached == NULL || transports[i]->is_attached(domain))) {
            bits |= (uint8_t)(1u << i);
        }
    }
    return bits;
}

// Once in a job, by a rank that knows it of itself.
static void warn_unencrypted(net_t *net, const uint8_t *attached_by_rank)
{
    int row = unencrypted_row(net);
    int lowest = 0;
    while (lowest < net->job.rank && (attached_by_rank[lowest] & UNENCRYPTED_BIT) == 0) {
        lowest++;
    }
    if (row != NO_ROW && lowest == net->job.rank) {
        transports[row]->warn_unencrypted(net->rows[row].domain);
    }
}

static hvd_status_t add_lifeline(net_t *net, int peer, err_t *err)
{
    domain_t *tcp = net_domain(net, &transport_tcp);
    char why[160];
    int row = net->offers[peer].chosen;
    bool agrees_by_tcp = row != NO_ROW && transports[row]->is_for_data;
    if (tcp == NULL || row == row_of(&transport_tcp) || agrees_by_tcp) {
        return HVD_OK; // its own links tell
    }
    if (!transport_tcp.reaches(tcp, peer, why, sizeof why)) {
        log_warn(net->job.log, "net", "no lifeline to rank %d: %s; its death would be noticed late",
                 peer, why);
        return HVD_OK;
    }
    hvd_status_t status =
        transport_tcp.connect(tcp, peer, LANE_CONTROL, &net->lifelines[net->n_lifelines], err);
    net->n_lifelines += status == HVD_OK;
    return status;
}

static hvd_status_t open_lifelines(net_t *net, err_t *err)
{
    int lowest = 0;
    int n_here = 0;
    for (int r = net->job.size - 1; r >= 0; r--) {
        if (net_same_host(net, r)) {
            lowest = r;
            n_here++;
        }
    }
    net->lifelines = calloc((size_t)n_here, sizeof *net->lifelines);
    if (net->lifelines == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for %d lifelines", n_here);
    }
    for (int r = 0; r < net->job.size; r++) {
        bool mine = net->job.rank == lowest ? net_same_host(net, r) : r == lowest;
        if (mine && r != net->job.rank) {
            hvd_status_t status = add_lifeline(net, r, err);
            if (status != HVD_OK) {
                return status;
            }
        }
    }
    return HVD_OK;
}

// The word peers ring, if a transport has one, decides how this rank sleeps.
static hvd_status_t share_sleeper(net_t *net, err_t *err)
{
    for (int i = 0; i < N_TRANSPORTS; i++) {
        domain_t *domain = net->rows[i].domain;
        atomic_uint *word = domain != NULL && transports[i]->wake_word != NULL
                                ? transports[i]->wake_word(domain)
                                : NULL;
        if (word != NULL) {
            return sleeper_share(net->sleeper, word, err);
        }
    }
    return HVD_OK;
}

hvd_status_t net_settle(net_t *net, const uint8_t *attached_by_rank, err_t *err)
{
    hvd_status_t status = spread_answers(net, attached_by_rank, err);
    if (status != HVD_OK) {
        return status;
    }
    for (int r = 0; r < net->job.size; r++) {
        net->offers[r].chosen = (int8_t)choose_row(net, r);
    }
    net->settled = true;
    warn_unencrypted(net, attached_by_rank);
    cores_init(&net->cores, net_domain(net, &transport_shm), &net->job);
    status = share_sleeper(net, err);
    return status == HVD_OK ? open_lifelines(net, err) : status;
}

// --- Life ----------------------------------------------------------------------------------------

hvd_status_t net_open(const net_job_t *job, net_t **net_p, err_t *err)
{
    hvd_status_t status;
    err_t unheard;
    err = err != NULL ? err : &unheard; // reasons for leaving a transport out are kept
    net_t *net = calloc(1, sizeof *net);
    if (net == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for the network");
    }
    net->job = *job;
    net->offers = calloc((size_t)job->size, sizeof *net->offers);
    net->links = calloc((size_t)job->size * N_LANES, sizeof(net_link_t *));
    net->hooked = calloc((size_t)job->size * N_LANES, sizeof(net_link_t *));
    if (net->offers == NULL || net->links == NULL || net->hooked == NULL) {
        status = fail(err, HVD_NO_MEMORY, "no memory for links to %d ranks", job->size);
        goto close_net;
    }
    TRY(sleeper_new(&net->sleeper, err), close_net);
    TRY(choose_order(net, err), close_net);
    TRY(open_rows(net, err), close_net);
    *net_p = net;
    return HVD_OK;

close_net:
    net_close(net);
    return status;
}

void net_close(net_t *net)
{
    if (net == NULL) {
        return;
    }
    for (size_t i = 0; net->links != NULL && i < (size_t)net->job.size * N_LANES; i++) {
        link_close(net->links[i]);
    }
    for (int i = 0; i < net->n_lifelines; i++) {
        link_close(net->lifelines[i]);
    }
    sleeper_free(net->sleeper); // before the descriptors it watches and the word it rings
    for (int i = 0; i < N_TRANSPORTS; i++) {
        if (net->rows[i].domain != NULL) {
            transports[i]->close(net->rows[i].domain);
        }
    }
    free(net->offers);
    free(net->links);
    free(net->hooked);
    free(net->lifelines);
    free(net);
}

domain_t *net_domain(net_t *net, const transport_t *transport)
{
    return net->rows[row_of(transport)].domain;
}

// --- Links ---------------------------------------------------------------------------------------

// "shm: on another host; tcp: ..." for the rows of this rank's order before `row`.
static void explain(net_t *net, int peer, int row, char *text, size_t bytes)
{
    size_t len = 0;
    text[0] = '\0';
    for (int i = 0; i < net->n_order && net->order[i] != row && len < bytes; i++) {
        char why[320] = "the peer prefers another";
        if (transports[net->order[i]] == &transport_self) {
            continue;
        }
        serves(net, net->order[i], peer, why, sizeof why);
        int n = snprintf(text + len, bytes - len, "%s%s: %s", len > 0 ? "; " : "",
                         transports[net->order[i]]->name, why);
        len += n > 0 ? (size_t)n : 0;
    }
}

static net_link_t *make_link(net_t *net, int peer, lane_t lane, err_t *err)
{
    int row = net->offers[peer].chosen;
    if (row != NO_ROW && transports[row]->is_for_data && lane == LANE_CONTROL) {
        row = row_of(&transport_tcp); // always there, if only for lifelines
    }
    const char *hook = net->job.config->hook;
    net_link_t *link = NULL;

    if (row == NO_ROW) {
        char why[640];
        explain(net, peer, NO_ROW, why, sizeof why);
        fail(err, HVD_PEER_LOST,
             "no transport connects rank %d to rank %d (%s); check HOROVOD_TRANSPORTS",
             net->job.rank, peer, why);
        return NULL;
    }
    if (transports[row]->connect(net->rows[row].domain, peer, lane, &link, err) != HVD_OK) {
        return NULL;
    }
    if (hook != NULL && hook[0] != '\0') {
        const net_link_t *bare = link;
        if (hook_wrap(link, hook, &net->job, &link, err) != HVD_OK) {
            return NULL;
        }
        if (link != bare) {
            net->hooked[net->n_hooked++] = link;
        }
    }
    net->rows[row].n_links++;
    return link;
}

net_link_t *net_link(net_t *net, int peer, lane_t lane, err_t *err)
{
    if (peer < 0 || peer >= net->job.size || !net->settled) {
        fail(err, HVD_INVALID_ARGUMENT, "no link to rank %d of %d: %s", peer, net->job.size,
             net->settled ? "there is no such rank" : "the network is not set up yet");
        return NULL;
    }
    net_link_t **link = &net->links[(size_t)peer * N_LANES + lane];
    if (*link == NULL) {
        *link = make_link(net, peer, lane, err);
    }
    return *link;
}

const char *net_transport_name(net_t *net, int peer, char *why_not, size_t bytes)
{
    int row = net->settled ? net->offers[peer].chosen : NO_ROW;
    if (why_not != NULL && bytes > 0) {
        explain(net, peer, row, why_not, bytes);
    }
    return row == NO_ROW ? "none" : transports[row]->name;
}

// --- Going on ------------------------------------------------------------------------------------

// True when domains without links in use are to be asked too. Reads the clock now and then only.
static bool time_to_look(net_t *net)
{
    bool woken = net->look;
    if (!woken && ++net->n_calls % CALLS_PER_CLOCK != 0) {
        return false;
    }
    uint64_t now_ns = clock_ns();
    if (!woken && now_ns - net->last_look_ns < IDLE_NS) {
        return false;
    }
    net->look = false;
    net->last_look_ns = now_ns;
    return true;
}

int net_progress(net_t *net)
{
    int n_happened = 0;
    bool look = time_to_look(net);
    for (int i = 0; i < N_TRANSPORTS; i++) {
        row_t *row = &net->rows[i];
        if (row->domain != NULL && transports[i]->progress != NULL &&
            (look || row->n_links > 0 || !row->needs_call)) {
            n_happened += transports[i]->progress(row->domain);
        }
    }
    for (int i = 0; i < net->n_hooked; i++) {
        uint64_t next_ns = NEVER_NS;
        n_happened += hook_progress(net->hooked[i], &next_ns);
    }
    net->n_quiet = n_happened > 0 ? 0 : net->n_quiet;
    return n_happened;
}

hvd_status_t net_health(net_t *net, lane_t lane, int *peer_p, err_t *err)
{
    hvd_status_t status = HVD_OK;
    for (int i = 0; i < N_TRANSPORTS && status == HVD_OK; i++) {
        if (net->rows[i].domain != NULL && transports[i]->health != NULL) {
            status = transports[i]->health(net->rows[i].domain, lane, peer_p, err);
        }
    }
    return status;
}

uint64_t net_n_foreign(const net_t *net)
{
    uint64_t n = 0;
    for (int i = 0; i < N_TRANSPORTS; i++) {
        if (net->rows[i].domain != NULL && transports[i]->n_foreign != NULL) {
            n += transports[i]->n_foreign(net->rows[i].domain);
        }
    }
    return n;
}

bool net_is_opening(net_t *net)
{
    bool is_opening = false;
    for (int i = 0; i < N_TRANSPORTS; i++) {
        domain_t *domain = net->rows[i].domain;
        if (domain != NULL && transports[i]->is_opening != NULL) {
            is_opening |= transports[i]->is_opening(domain);
        }
    }
    return is_opening;
}

// --- Sleeping ------------------------------------------------------------------------------------

unsigned net_before_sleep(net_t *net)
{
    uint64_t due_ns = NEVER_NS;
    for (int i = 0; i < net->n_hooked; i++) {
        hook_progress(net->hooked[i], &due_ns);
    }
    for (int i = 0; i < N_TRANSPORTS; i++) {
        const row_t *row = &net->rows[i];
        if (row->domain != NULL && transports[i]->arm != NULL) {
            transports[i]->arm(row->domain);
        }
        if (row->cannot_wake && row->n_links > 0) {
            due_ns = MIN(due_ns, clock_ns() + (ASK_NS << MIN(net->n_quiet++, MOST_DOUBLINGS)));
        }
    }
    atomic_store(&net->due_ns, due_ns);
    return sleeper_announce(net->sleeper);
}

// Touches nothing that only the holder of the engine may: the caller may have let it go.
void net_sleep(net_t *net, unsigned ticket, uint64_t deadline_ns)
{
    uint64_t due_ns = atomic_load(&net->due_ns);
    sleeper_sleep(net->sleeper, ticket, MIN(deadline_ns, due_ns));
}

void net_after_sleep(net_t *net)
{
    sleeper_end(net->sleeper);
    net->look = true;
}

void net_wake(net_t *net)
{
    sleeper_wake(net->sleeper);
}
