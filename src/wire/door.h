// SPDX-License-Identifier: Apache-2.0
//
// door.h - how a connection begins: the hello, the proof of the secret, and the door where whoever
// listens lets others in.
//
// A greeting is what both sides of one connection do first: the side that connected sends the 64
// bytes of the hello, the other one checks that they name its job before it spends anything on a
// handshake, and TLS does the rest (secure.h).
//
// A door listens, and greets everybody who comes. Until a stranger has proved the secret it costs
// a descriptor and, after a hello that names this job, what a handshake needs. Its time is limited;
// so is the number of strangers: when more knock, the oldest makes room, those who have not even
// said hello first, but nobody before it has had DOOR_GRACE. Until then the others wait in the
// kernel's queue. So strangers push out each other, and a thousand ranks that start together all
// get in. Who is turned away is counted, and a line in the log tells of it once a minute at most.
//
// A door is passive: its owner sleeps on door_fd, which is readable when there is something to do,
// and then calls door_progress. Nothing here blocks. One thread at a time, except door_n_refused.
#ifndef HVD_WIRE_DOOR_H
#define HVD_WIRE_DOOR_H

#include "wire/secure.h"

#include <sys/socket.h>

// --- A greeting ----------------------------------------------------------------------------------

typedef hvd_status_t (*admit_fn)(void *owner, const hello_t *hello, err_t *err);

typedef struct greeting {
    int fd; // connected, non-blocking; the caller's
    bool is_server;
    bool is_silent; // server: another job is cut without an answer
    secure_keys_t *keys;
    hello_t hello; // server: what it must be until it has come, of which role is compared
    // Server, may be NULL: whether a hello of this job and role is welcome. Asked when it has come,
    // and again when its sender has proved the secret and is about to be let in.
    admit_fn admit;
    void *owner;
    uint8_t bytes[HELLO_BYTES];
    size_t n_bytes;   // of the hello, sent or received
    bool has_proved;  // the handshake is through
    secure_t *secure; // once the hello is through; its owner takes it when the greeting is over
} greeting_t;

// Client: puts the job's name and the rest of a nonce, of which the first bytes are kept, into the
// hello that is to be sent.
hvd_status_t greeting_prepare(greeting_t *greeting, size_t n_nonce_kept, err_t *err);
// HVD_OK: the other side has proved the secret; HVD_IN_PROGRESS: call again when the socket is
// ready as greeting_wants_write says; else refused or lost.
hvd_status_t greeting_step(greeting_t *greeting, err_t *err);
bool greeting_wants_write(const greeting_t *greeting);

// --- A door --------------------------------------------------------------------------------------

#define DOOR_STRANGERS 256              // at a time
#define DOOR_GRACE_NS (100 * NS_PER_MS) // a stranger is not pushed out before
// From being accepted to the proof of the secret; not counting when the owner was held up.
#define DOOR_PATIENCE_NS (2 * NS_PER_S)
#define DOOR_ADDRESS_BYTES 64
#define DOOR_LISTENERS 64

typedef struct door door_t;

// Who has come in. The owner takes descriptor and secure_t over. The descriptor is marked
// (fd_not_for_children): it is closed with fd_close.
typedef struct guest {
    int fd;
    secure_t *secure;
    hello_t hello;
    char address[DOOR_ADDRESS_BYTES];
    uint64_t since_ns; // accepted
} guest_t;

typedef struct door_rules {
    const char *name; // whose door it is, for the log
    const log_t *log;
    secure_keys_t *keys; // must outlive the door
    hello_role_t role;
    uint64_t patience_ns; // 0: DOOR_PATIENCE_NS
    bool is_silent;       // a client of another job is cut without an answer
    bool is_probed;       // who comes and goes without a word only asks whether the port answers
    void *owner;
    admit_fn admit;                             // may be NULL
    void (*prepare)(const void *owner, int fd); // may be NULL: options of the sockets
    void (*enter)(void *owner, const guest_t *guest);
} door_rules_t;

hvd_status_t door_open(const door_rules_t *rules, door_t **door_p, err_t *err);
// Listens at one more address; 0 or an errno. *at_p and *bytes_p are then as the kernel has them,
// with the port it chose. "::" takes IPv4 callers too.
int door_listen(door_t *door, struct sockaddr_storage *at_p, socklen_t *bytes_p);
int door_fd(const door_t *door);
int door_progress(door_t *door); // how many things happened
int door_n_strangers(const door_t *door);
uint64_t door_n_refused(const door_t *door); // so far; any thread
// One who came in has turned out to be no friend: counted and told as the others are.
void door_refuse(door_t *door, const char *address, const char *why);
void door_close(door_t *door); // safe on NULL

#endif
