// SPDX-License-Identifier: Apache-2.0
//
// bench_simulate.c - hvd-bench --simulate: the sizes of the options on a machine that is not here.
//
// Prints, for each size, the way the engine would choose and what its agreement and its bytes take.
#include "simulate/simulate.h"
#include "tools/bench.h"

#include <stdio.h>

static void print_machine(const machine_t *m)
{
    int n_hosts = machine_n_hosts(m);
    printf("%d rank%s on %d host%s; a message between hosts: %.2f us on its way, %.2f us of a core "
           "at each end, %.4g GB/s a host\n",
           m->n_ranks, plural(m->n_ranks), n_hosts, plural(n_hosts), m->network.latency_ns / 1e3,
           m->network.message_ns / 1e3, 1 / m->network.byte_ns);
    printf("inside a host: %.2f us, %.2f us, %.4g GB/s a core\n\n", m->host.latency_ns / 1e3,
           m->host.message_ns / 1e3, 1 / m->host.byte_ns);
    printf("%-14s %12s  %-10s %-20s %12s %12s %12s\n", "operation", "bytes", "way", "algorithm",
           "agreement us", "data us", "total us");
}

static void print_price(const bench_options_t *o, size_t bytes, const price_t *price)
{
    double total_ns = price->agreement_ns + price->data_ns;
    bool is_known = price->data_ns >= 0;
    if (o->json) {
        printf(
            "{\"simulated\": true, \"op\": \"%s\", \"ranks\": %d, \"hosts\": %d, \"bytes\": %zu, "
            "\"way\": \"%s\", \"algorithm\": \"%s\", \"agreement_us\": %.3f",
            o->op, o->simulated.n_ranks, machine_n_hosts(&o->simulated), bytes, price->way,
            price->algorithm, price->agreement_ns / 1e3);
        if (is_known) {
            printf(", \"data_us\": %.3f, \"total_us\": %.3f", price->data_ns / 1e3, total_ns / 1e3);
        }
        puts("}");
        return;
    }
    printf("%-14s %12zu  %-10s %-20s %12.1f ", o->op, bytes, price->way, price->algorithm,
           price->agreement_ns / 1e3);
    if (is_known) {
        printf("%12.1f %12.1f\n", price->data_ns / 1e3, total_ns / 1e3);
    } else {
        printf("  its plan has too many steps to simulate\n");
    }
}

static bool find_op(const char *name, hvd_op_t *op_p)
{
    for (int op = 0; op < HVD_N_OPS; op++) {
        if (strcmp(name, hvd_op_name((hvd_op_t)op)) == 0 &&
            (op_infos[op].layout != LAYOUT_NOTHING || op_has((hvd_op_t)op, OP_INSTANT))) {
            *op_p = (hvd_op_t)op;
            return true;
        }
    }
    return false;
}

int bench_simulate(const bench_options_t *o)
{
    machine_t m = o->simulated;
    config_t config;
    err_t err;
    hvd_op_t op;
    if (!find_op(o->op, &op)) {
        fprintf(stderr,
                "hvd-bench: --simulate cannot price '%s'; choose an operation of the "
                "library, such as allreduce\n",
                o->op);
        return 2;
    }
    if (config_load(&config, NULL, NULL, &err) != HVD_OK) {
        fprintf(stderr, "hvd-bench: %s\n", err.text);
        return 1;
    }
    m.tree_arity = (int)config.tree_arity;
    m.segment_bytes = config.segment_bytes;
    hvd_status_t status = HVD_OK;
    if (!o->json) {
        print_machine(&m);
    }
    for (int i = 0; i < o->n_bytes && status == HVD_OK; i++) {
        price_t price;
        size_t bytes = o->bytes[i] / sizeof(float) * sizeof(float);
        status = simulate_operation(&m, &config, op, bytes, &price, &err);
        if (status == HVD_OK) {
            print_price(o, bytes, &price);
            fflush(stdout);
        }
    }
    config_free(&config);
    if (status != HVD_OK) {
        fprintf(stderr, "hvd-bench: %s\n", err.text);
    }
    return status == HVD_OK ? 0 : 1;
}
