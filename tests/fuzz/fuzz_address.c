// SPDX-License-Identifier: Apache-2.0
//
// fuzz_address.c - the addresses of all of a rank's transports, from a rank that lies.
//
// Rank 0 of a job of two attaches with the input as what rank 1 has told. It either refuses with a
// sentence or ends up with a choice of transport that it can name.
#include "fuzz.h"
#include "net/net.h"

#define WAIT_MS 1000

static void attach(net_t *net, const uint8_t *data, size_t bytes)
{
    buf_t own = {0};
    err_t err = {0};
    MUST(net_address(net, &own, &err) == HVD_OK);
    const uint8_t *addresses[2] = {own.data, data};
    size_t lengths[2] = {own.len, bytes};
    if (net_attach(net, addresses, lengths, &err) == HVD_OK) {
        uint8_t attached[2] = {net_attached(net), net_attached(net)};
        char why_not[512];
        if (net_settle(net, attached, &err) == HVD_OK) {
            net_transport_name(net, 1, why_not, sizeof why_not);
        }
    } else {
        MUST(err.text[0] != '\0');
    }
    buf_free(&own);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static const char *const env[] = {"HOROVOD_TRANSPORTS=tcp", "HOROVOD_GLOO_IFACE=lo", NULL};
    static const uint8_t secret[32] = "of a job of two";
    static const int hosts[2] = {0, 1};
    config_t config;
    secure_keys_t *keys;
    net_t *net;
    err_t err = {0};
    MUST(config_load(&config, env, NULL, &err) == HVD_OK);
    MUST(secure_keys_new(secret, &keys, &err) == HVD_OK);
    net_job_t job = {.rank = 0, .size = 2, .host_of = hosts, .config = &config, .keys = keys};
    MUST(net_open(&job, &net, &err) == HVD_OK);
    attach(net, data, bytes);
    net_close(net);
    secure_keys_free(keys);
    config_free(&config);
    return 0;
}
