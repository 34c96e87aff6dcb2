// SPDX-License-Identifier: Apache-2.0
//
// tf_ops.c - the operations TensorFlow gets to know: one row each, registered when it loads us.
//
// tf.load_op_library() opens libhvd_tf.so and makes Python functions of the operations registered
// meanwhile, so registration happens in a constructor. That is why this library is apart from the
// core, which is loaded earlier. If TensorFlow lacks what is needed nothing is registered, and
// hvd_tf_problem() tells Python what was missing.
//
// Every operation counts as stateful: TensorFlow would otherwise merge equal calls and compute
// "constant" results once. Python lifts the order between stateful operations (mpi_ops.py).
#include "bind/tf_bind.h"
#include "bind/tf_device.h"

#include <stdio.h>
#include <string.h>

#define MOVED "T: {uint8, int8, uint16, int16, int32, int64, half, bfloat16, float, double, bool}"
#define REDUCED "T: {uint8, int8, uint16, int16, int32, int64, half, bfloat16, float, double}"

// X(name behind "Horovod", operation, output, grouped, reduces, types)
#define COLLECTIVES(X)                                                                             \
    X(Allreduce, HVD_ALLREDUCE, OUTPUT_LIKE_INPUT, false, true, REDUCED)                           \
    X(GroupedAllreduce, HVD_ALLREDUCE, OUTPUT_LIKE_INPUT, true, true, REDUCED)                     \
    X(Allgather, HVD_ALLGATHER, OUTPUT_ALLOCATED, false, false, MOVED)                             \
    X(GroupedAllgather, HVD_ALLGATHER, OUTPUT_ALLOCATED, true, false, MOVED)                       \
    X(Broadcast, HVD_BROADCAST, OUTPUT_LIKE_INPUT, false, false, MOVED)                            \
    X(BroadcastInplace, HVD_BROADCAST, OUTPUT_IS_INPUT, false, false, MOVED)                       \
    X(Alltoall, HVD_ALLTOALL, OUTPUT_ALLOCATED, false, false, MOVED)                               \
    X(Reducescatter, HVD_REDUCESCATTER, OUTPUT_ALLOCATED, false, true, REDUCED)                    \
    X(GroupedReducescatter, HVD_REDUCESCATTER, OUTPUT_ALLOCATED, true, true, REDUCED)              \
    X(Join, HVD_JOIN, OUTPUT_NONE, false, false, NULL)                                             \
    X(Barrier, HVD_BARRIER, OUTPUT_NONE, false, false, NULL)

// X(name behind "Horovod", about a process set, function)
#define QUESTIONS(X)                                                                               \
    X(Size, true, answer_size)                                                                     \
    X(ProcessSetIncluded, true, answer_included)                                                   \
    X(LocalSize, false, answer_local_size)                                                         \
    X(Rank, false, answer_rank)                                                                    \
    X(LocalRank, false, answer_local_rank)

// --- Questions: negative answers are the codes users know, -1 for "not initialised" --------------

static int answer_size(hvd_ctx_t *ctx, int process_set)
{
    return ctx == NULL ? -1 : hvd_process_set_size(ctx, process_set);
}

static int answer_included(hvd_ctx_t *ctx, int process_set)
{
    int member = ctx == NULL ? -1 : hvd_process_set_rank(ctx, process_set);
    return member >= 0 ? 1 : member == HVD_NOT_MEMBER ? 0 : member;
}

static int answer_local_size(hvd_ctx_t *ctx, int process_set)
{
    (void)process_set;
    return ctx == NULL ? -1 : hvd_local_size(ctx);
}

static int answer_rank(hvd_ctx_t *ctx, int process_set)
{
    (void)process_set;
    return ctx == NULL ? -1 : hvd_rank(ctx);
}

static int answer_local_rank(hvd_ctx_t *ctx, int process_set)
{
    (void)process_set;
    return ctx == NULL ? -1 : hvd_local_rank(ctx);
}

// --- Tables --------------------------------------------------------------------------------------

enum {
#define X(name, ...) ROW_##name,
    COLLECTIVES(X) N_COLLECTIVES,
#undef X
};
enum {
#define X(name, ...) ASK_##name,
    QUESTIONS(X) N_QUESTIONS,
#undef X
};

static const tf_collective_t collectives[] = {
#define X(name, ...) {"Horovod" #name, __VA_ARGS__},
    COLLECTIVES(X)
#undef X
};
static const tf_question_t questions[] = {
#define X(name, ...) {"Horovod" #name, __VA_ARGS__},
    QUESTIONS(X)
#undef X
};

#define X(name, ...)                                                                               \
    static void *create_##name(TF_OpKernelConstruction *construction)                              \
    {                                                                                              \
        return tf_collective_create(construction, &collectives[ROW_##name]);                       \
    }
COLLECTIVES(X)
#undef X
#define X(name, ...)                                                                               \
    static void *ask_##name(TF_OpKernelConstruction *construction)                                 \
    {                                                                                              \
        return tf_question_create(construction, &questions[ASK_##name]);                           \
    }
QUESTIONS(X)
#undef X

static const tf_create_fn create_collective[] = {
#define X(name, ...) create_##name,
    COLLECTIVES(X)
#undef X
};
static const tf_create_fn create_question[] = {
#define X(name, ...) ask_##name,
    QUESTIONS(X)
#undef X
};

// --- Shapes --------------------------------------------------------------------------------------

static void shape_like_input(TF_ShapeInferenceContext *context, TF_Status *status)
{
    TF_ShapeHandle *shape = tf_api.NewShapeHandle();
    int n = (int)tf_api.ShapeInferenceContextNumInputs(context);
    for (int i = 0; i < n && tf_api.GetCode(status) == TF_OK; i++) {
        tf_api.ShapeInferenceContextGetInput(context, i, shape, status);
        if (tf_api.GetCode(status) == TF_OK) {
            tf_api.ShapeInferenceContextSetOutput(context, i, shape, status);
        }
    }
    tf_api.DeleteShapeHandle(shape);
}

// The API has no way to leave one dimension open; Python sets the others (mpi_ops.py).
static void shape_unknown(TF_ShapeInferenceContext *context, TF_Status *status)
{
    tf_api.ShapeInferenceContextSetUnknownShape(context, status);
}

static void shape_scalar(TF_ShapeInferenceContext *context, TF_Status *status)
{
    TF_ShapeHandle *shape = tf_api.ShapeInferenceContextScalar(context);
    tf_api.ShapeInferenceContextSetOutput(context, 0, shape, status);
    tf_api.DeleteShapeHandle(shape);
}

// --- Registration --------------------------------------------------------------------------------

static char problem[256];

__attribute__((visibility("default"))) const char *hvd_tf_problem(void);

// "" if every operation is registered, else why not.
const char *hvd_tf_problem(void)
{
    return problem;
}

static bool registered(TF_Status *status, const char *name)
{
    if (tf_api.GetCode(status) != TF_OK && problem[0] == '\0') {
        snprintf(problem, sizeof problem, "cannot register %s: %s", name, tf_api.Message(status));
    }
    return tf_api.GetCode(status) == TF_OK;
}

static void add_attributes(TF_OpDefinitionBuilder *builder, const char *const *specs)
{
    for (; *specs != NULL; specs++) {
        tf_api.OpDefinitionBuilderAddAttr(builder, *specs);
    }
}

static void describe_tensors(TF_OpDefinitionBuilder *builder, const tf_collective_t *row)
{
    if (row->output == OUTPUT_NONE) {
        return;
    }
    tf_api.OpDefinitionBuilderAddAttr(builder, row->types);
    if (row->grouped) {
        tf_api.OpDefinitionBuilderAddAttr(builder, "num_tensors: int >= 1");
    }
    tf_api.OpDefinitionBuilderAddInput(builder,
                                       row->grouped ? "tensors: num_tensors * T" : "tensor: T");
    tf_api.OpDefinitionBuilderAddOutput(builder,
                                        row->grouped ? "outputs: num_tensors * T" : "output: T");
}

static bool has_splits(const tf_collective_t *row)
{
    return row->op == HVD_ALLTOALL;
}

static void describe_own(TF_OpDefinitionBuilder *builder, const tf_collective_t *row)
{
    static const char *const reducing[] = {
        "reduce_op: int",         "prescale_factor: float = 1.0", "postscale_factor: float = 1.0",
        "prescale_bits: int = 0", "postscale_bits: int = 0",      NULL};
    if (row->reduces) {
        add_attributes(builder, reducing);
    }
    if (row->op == HVD_BROADCAST) {
        tf_api.OpDefinitionBuilderAddAttr(builder, "root_rank: int");
    } else if (has_splits(row)) { // none given: as many rows for everybody
        tf_api.OpDefinitionBuilderAddInput(builder, "splits: int32");
        tf_api.OpDefinitionBuilderAddOutput(builder, "received_splits: int32");
    } else if (row->op == HVD_JOIN) {
        tf_api.OpDefinitionBuilderAddOutput(builder, "last_joined: int32");
    }
}

static bool register_operation(TF_OpDefinitionBuilder *builder, tf_shape_fn shape, const char *name,
                               TF_Status *status)
{
    tf_api.OpDefinitionBuilderSetIsStateful(builder, true);
    tf_api.OpDefinitionBuilderSetShapeInferenceFunction(builder, shape);
    tf_api.RegisterOpDefinition(builder, status);
    return registered(status, name);
}

static bool register_kernel(int i, const char *device, tf_compute_async_fn compute,
                            TF_Status *status)
{
    const tf_collective_t *row = &collectives[i];
    TF_KernelBuilder *builder = tf_api.NewAsyncKernelBuilder(
        row->name, device, create_collective[i], compute, tf_collective_delete);
    if (has_splits(row)) {
        tf_api.KernelBuilder_HostMemory(builder, "splits");
        tf_api.KernelBuilder_HostMemory(builder, "received_splits");
    }
    tf_api.RegisterKernelBuilder(row->name, builder, status);
    return registered(status, row->name);
}

static bool register_collective(int i, bool on_devices, TF_Status *status)
{
    // tensor_name: what ranks know the tensor by; "" means the name of the node in the graph. With
    // by_order (eager calls without a name) it is the series that the calling thread counts in.
    static const char *const common[] = {"tensor_name: string = ''", "by_order: bool = false",
                                         "ignore_name_scope: bool = false",
                                         "process_set_id: int = 0", NULL};
    static const tf_shape_fn shape_of[] = {
        [OUTPUT_LIKE_INPUT] = shape_like_input,
        [OUTPUT_IS_INPUT] = shape_like_input,
        [OUTPUT_ALLOCATED] = shape_unknown,
        [OUTPUT_NONE] = shape_unknown,
    };
    const tf_collective_t *row = &collectives[i];
    TF_OpDefinitionBuilder *builder = tf_api.NewOpDefinitionBuilder(row->name);
    describe_tensors(builder, row);
    describe_own(builder, row);
    add_attributes(builder, common);
    if (!register_operation(builder, row->op == HVD_JOIN ? shape_scalar : shape_of[row->output],
                            row->name, status)) {
        return false;
    }
    return register_kernel(i, "CPU", tf_collective_compute, status) &&
           (!on_devices || row->output == OUTPUT_NONE ||
            register_kernel(i, "GPU", tf_collective_compute_on_device, status));
}

static bool register_question(int i, TF_Status *status)
{
    const tf_question_t *row = &questions[i];
    TF_OpDefinitionBuilder *builder = tf_api.NewOpDefinitionBuilder(row->name);
    if (row->about_set) {
        tf_api.OpDefinitionBuilderAddAttr(builder, "process_set_id: int = 0");
    }
    tf_api.OpDefinitionBuilderAddOutput(builder, "answer: int32");
    if (!register_operation(builder, shape_scalar, row->name, status)) {
        return false;
    }
    tf_api.RegisterKernelBuilder(row->name,
                                 tf_api.NewKernelBuilder(row->name, "CPU", create_question[i],
                                                         tf_question_compute, tf_question_delete),
                                 status);
    return registered(status, row->name);
}

__attribute__((constructor)) static void register_all(void)
{
    const char *missing = NULL;
    if (!tf_api_load(&missing)) {
        snprintf(problem, sizeof problem,
                 "%s is not loaded: import tensorflow (2.12 or later) first", missing);
        return;
    }
    TF_Status *status = tf_api.NewStatus();
    bool ok = true;
    bool on_devices = tf_device_load();
    for (int i = 0; i < N_COLLECTIVES && ok; i++) {
        ok = register_collective(i, on_devices, status);
    }
    for (int i = 0; i < N_QUESTIONS && ok; i++) {
        ok = register_question(i, status);
    }
    tf_api.DeleteStatus(status);
}
