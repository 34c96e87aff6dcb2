// SPDX-License-Identifier: Apache-2.0
//
// tf_bind.h - what the files of libhvd_tf.so share: the table of operations and their kernels.
//
// tf_ops.c has one row for each operation TensorFlow gets to know and registers them while the
// library is loaded; tf_kernels.c runs them; tf_api.h is the way to TensorFlow.
#ifndef HVD_BIND_TF_BIND_H
#define HVD_BIND_TF_BIND_H

#include "bind/request.h"
#include "bind/tf_api.h"

// Where the memory of an operation's results comes from.
typedef enum tf_output {
    OUTPUT_LIKE_INPUT, // same shape: the input's own buffer if nobody else needs it
    OUTPUT_IS_INPUT,   // the input's own buffer, always: nobody but a variable may hold it
    OUTPUT_ALLOCATED,  // shape known once all ranks have agreed
    OUTPUT_NONE,       // no tensor: join and barrier
} tf_output_t;

typedef struct tf_collective {
    const char *name; // of the operation in TensorFlow
    hvd_op_t op;
    tf_output_t output;
    bool grouped;      // "tensors: num_tensors * T" instead of "tensor: T"
    bool reduces;      // has reduce_op and scale factors
    const char *types; // T
} tf_collective_t;

// A question a rank can answer by itself. ctx is NULL before init.
typedef struct tf_question {
    const char *name;
    bool about_set; // has process_set_id
    int (*answer)(hvd_ctx_t *ctx, int process_set);
} tf_question_t;

// Creates, runs and deletes the kernel of one node. `create` is told the row: TensorFlow itself
// does not say which operation it creates a kernel for.
void *tf_collective_create(TF_OpKernelConstruction *construction, const tf_collective_t *row);
void tf_collective_compute(void *kernel, TF_OpKernelContext *context, tf_done_t *done);
void tf_collective_compute_on_device(void *kernel, TF_OpKernelContext *context, tf_done_t *done);
void tf_collective_delete(void *kernel);

void *tf_question_create(TF_OpKernelConstruction *construction, const tf_question_t *row);
void tf_question_compute(void *kernel, TF_OpKernelContext *context);
void tf_question_delete(void *kernel);

// Gives the kernels the context they submit to; NULL takes it away and returns once no kernel is
// using the old one. Called from Python (ctypes) after init and before shutdown.
__attribute__((visibility("default"))) void hvd_tf_attach(hvd_ctx_t *ctx);

#endif
