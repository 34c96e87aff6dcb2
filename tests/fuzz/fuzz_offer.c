// SPDX-License-Identifier: Apache-2.0
//
// fuzz_offer.c - the addresses a rank tells all others, from a rank that lies.
//
// What decodes has as many addresses as fit, can be sorted and printed, and means the same when it
// is encoded and decoded again.
#include "fuzz.h"
#include "net/tcp.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    tcp_offer_t offer, twice;
    buf_t again = {0};
    err_t err;
    if (tcp_offer_decode(data, bytes, 3, &offer, &err) != HVD_OK) {
        MUST(err.text[0] != '\0');
        return 0;
    }
    MUST(offer.n_addrs >= 0 && offer.n_addrs <= TCP_MAX_ADDRS);
    tcp_offer_encode(&offer, &again);
    MUST(tcp_offer_decode(again.data, again.len, 3, &twice, NULL) == HVD_OK);
    MUST(memcmp(&offer, &twice, sizeof offer) == 0);
    buf_free(&again);
    tcp_iface_t here = {.addr = {.family = AF_INET, .ip = {10, 0, 0, 1}}, .prefix_bits = 24};
    tcp_sort_addrs(offer.addrs, offer.n_addrs, &here, 1, bytes % 2 == 0);
    for (int i = 0; i < offer.n_addrs; i++) {
        char text[TCP_ADDR_TEXT];
        struct sockaddr_storage name;
        tcp_addr_text(&offer.addrs[i], text);
        MUST(tcp_addr_to_socket(&offer.addrs[i], &name) > 0);
    }
    return 0;
}
