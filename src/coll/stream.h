// SPDX-License-Identifier: Apache-2.0
//
// stream.h - collectives among ranks of one host, streamed through shared-memory windows.
//
// The tensor flows through cache-sized slices: while slice i is copied into the windows, slice i-1
// is reduced by all ranks in parallel, each its own part, and slice i-2 is copied out, so that main
// memory sees every byte of the tensor read once and written once. stream.c explains the method.
// Threads: the holder of the engine.
#ifndef HVD_COLL_STREAM_H
#define HVD_COLL_STREAM_H

#include "coll/coll.h"
#include "net/shm.h"

typedef struct stream stream_t;

// Does it know the stages of this operation?
bool stream_serves(hvd_op_t op);
hvd_status_t stream_new(domain_t *shm, int my_rank, int n_ranks, stream_t **stream_p, err_t *err);
void stream_free(stream_t *stream);
hvd_status_t stream_start(stream_t *stream, const coll_task_t *task, err_t *err);
// HVD_OK: finished. HVD_IN_PROGRESS: a peer is not as far yet; *moved_p tells whether anything was
// done.
hvd_status_t stream_progress(stream_t *stream, bool *moved_p);

#endif
