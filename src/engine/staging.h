// SPDX-License-Identifier: Apache-2.0
//
// staging.h - tensors of a GPU, which run as host memory: what the engine does at both ends.
//
// Private to engine/; staging.c says how it works.
#ifndef HVD_ENGINE_STAGING_H
#define HVD_ENGINE_STAGING_H

#include "engine/engine.h"

hvd_status_t staging_new(staging_t **staging_p, err_t *err);
void staging_close(staging_t *staging); // waits, not for ever, for copies that are under way
void staging_free(staging_t *staging);  // all requests have gone
// Of a request that is held_by_device: its copies are queued, and then it is the engine's. Not if
// this fails.
hvd_status_t staging_begin(hvd_ctx_t *ctx, const hvd_request_t *asked, request_t *request,
                           err_t *err) EXCLUDES(ctx->lock);
void *staging_output(request_t *request, int t, size_t bytes); // NULL: no memory
hvd_status_t staging_end(request_t *request, err_t *err);      // its results go to the device
hvd_status_t staging_settle(request_t *request, uint64_t deadline_ns); // and have landed there
void staging_release(request_t *request);
uint64_t staging_next_look(const staging_t *staging); // NEVER_NS: nothing is under way
void staging_watch(hvd_ctx_t *ctx) REQUIRES(ctx->baton) EXCLUDES(ctx->lock); // is it broken?

#endif
