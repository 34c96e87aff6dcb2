// SPDX-License-Identifier: Apache-2.0
//
// client.h - one connection of a browser (client.c), and the pictures of the job it is sent.
//
// The server owns its clients; a picture belongs to all who are still sent it. Private to web/. The
// server's thread.
#ifndef HVD_WEB_CLIENT_H
#define HVD_WEB_CLIENT_H

#include "web/http.h"

#include <openssl/ssl.h>

// A picture of the job, sent to many.
typedef struct shot {
    int n_users;
    buf_t text;
} shot_t;

typedef struct web_client {
    int fd;
    SSL *tls;        // NULL: in the clear
    bool is_local;   // at the Unix socket: this user
    bool has_proved; // the token
    bool streams;    // events
    bool is_closing; // once everything is sent
    bool wants_write, wants_read;
    char in[HTTP_REQUEST_BYTES];
    size_t n_in;
    buf_t out; // an answer
    size_t n_out;
    shot_t *shot; // being sent, after the answer
    size_t n_shot;
    uint64_t since_ns, deadline_ns; // deadline: until then it has to do something
    uint32_t events;                // watched
    struct web_client *prev, *next;
} web_client_t;

shot_t *shot_new(void);
void shot_release(shot_t *shot); // safe on NULL

// Takes the descriptor over; NULL: no memory, and it is closed.
web_client_t *client_new(int fd, SSL_CTX *tls, bool is_local);
void client_free(web_client_t *client);
// What can be read now; false: the other side is gone, or sends too much.
bool client_receive(web_client_t *client);
// What can be written now; false: the other side is gone. *moved_p: something was.
bool client_send(web_client_t *client, bool *moved_p);
bool client_has_output(const web_client_t *client);

#endif
