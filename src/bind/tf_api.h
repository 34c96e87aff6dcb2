// SPDX-License-Identifier: Apache-2.0
//
// tf_api.h - the part of TensorFlow's C API that libhvd_tf.so uses, declared by hand.
//
// TensorFlow is neither a build requirement nor linked: tf_api_load() finds the functions in the
// libtensorflow_framework that the process has loaded already. All of them are part of the stable C
// API (2.12 and later have them), so one binary serves every version.
//
// Owner: tf_api is filled once, while the library is being loaded, and read only afterwards.
#ifndef HVD_BIND_TF_API_H
#define HVD_BIND_TF_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_ShapeHandle TF_ShapeHandle;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;

// What TensorFlow's header calls an opaque callback is a std::function in the frame of the caller
// of an asynchronous kernel. This is libstdc++'s layout of one; see take_done() in tf_kernels.c.
typedef struct tf_done {
    char functor[16];
    bool (*manager)(struct tf_done *to, const struct tf_done *from, int operation);
    void (*invoker)(struct tf_done *done);
} tf_done_t;

typedef struct tf_text {
    const char *data;
    size_t len;
} tf_text_t;

// Numbers of TF_DataType and TF_Code; they are part of TensorFlow's file formats and never change.
enum {
    TF_FLOAT = 1,
    TF_DOUBLE = 2,
    TF_INT32 = 3,
    TF_UINT8 = 4,
    TF_INT16 = 5,
    TF_INT8 = 6,
    TF_INT64 = 9,
    TF_BOOL = 10,
    TF_BFLOAT16 = 14,
    TF_UINT16 = 17,
    TF_HALF = 19,
};
enum {
    TF_OK = 0,
    TF_UNKNOWN = 2,
    TF_INVALID_ARGUMENT = 3,
    TF_RESOURCE_EXHAUSTED = 8,
    TF_FAILED_PRECONDITION = 9,
    TF_ABORTED = 10,
};

typedef void *(*tf_create_fn)(TF_OpKernelConstruction *construction);
typedef void (*tf_compute_fn)(void *kernel, TF_OpKernelContext *context);
typedef void (*tf_compute_async_fn)(void *kernel, TF_OpKernelContext *context, tf_done_t *done);
typedef void (*tf_delete_fn)(void *kernel);
typedef void (*tf_shape_fn)(TF_ShapeInferenceContext *context, TF_Status *status);

// X(result, name, arguments)
#define TF_FUNCTIONS(X)                                                                            \
    X(TF_Status *, NewStatus, (void))                                                              \
    X(void, DeleteStatus, (TF_Status *))                                                           \
    X(void, SetStatus, (TF_Status *, int code, const char *text))                                  \
    X(void, SetPayload, (TF_Status *, const char *key, const char *value))                         \
    X(int, GetCode, (const TF_Status *))                                                           \
    X(const char *, Message, (const TF_Status *))                                                  \
    X(TF_OpDefinitionBuilder *, NewOpDefinitionBuilder, (const char *name))                        \
    X(void, OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder *, const char *spec))              \
    X(void, OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder *, const char *spec))             \
    X(void, OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder *, const char *spec))            \
    X(void, OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder *, bool))                    \
    X(void, OpDefinitionBuilderSetShapeInferenceFunction, (TF_OpDefinitionBuilder *, tf_shape_fn)) \
    X(void, RegisterOpDefinition, (TF_OpDefinitionBuilder *, TF_Status *))                         \
    X(TF_ShapeHandle *, NewShapeHandle, (void))                                                    \
    X(void, DeleteShapeHandle, (TF_ShapeHandle *))                                                 \
    X(int64_t, ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext *))                       \
    X(void, ShapeInferenceContextGetInput,                                                         \
      (TF_ShapeInferenceContext *, int i, TF_ShapeHandle *, TF_Status *))                          \
    X(void, ShapeInferenceContextSetOutput,                                                        \
      (TF_ShapeInferenceContext *, int i, TF_ShapeHandle *, TF_Status *))                          \
    X(TF_ShapeHandle *, ShapeInferenceContextScalar, (TF_ShapeInferenceContext *))                 \
    X(void, ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext *, TF_Status *))       \
    X(TF_KernelBuilder *, NewKernelBuilder,                                                        \
      (const char *op, const char *device, tf_create_fn, tf_compute_fn, tf_delete_fn))             \
    X(TF_KernelBuilder *, NewAsyncKernelBuilder,                                                   \
      (const char *op, const char *device, tf_create_fn, tf_compute_async_fn, tf_delete_fn))       \
    X(void, KernelBuilder_HostMemory, (TF_KernelBuilder *, const char *tensor))                    \
    X(void, RegisterKernelBuilder, (const char *name, TF_KernelBuilder *, TF_Status *))            \
    X(void, RunAsyncOpKernelDoneCallback, (tf_done_t *))                                           \
    X(tf_text_t, OpKernelConstruction_GetName, (TF_OpKernelConstruction *))                        \
    X(void, OpKernelConstruction_Failure, (TF_OpKernelConstruction *, TF_Status *))                \
    X(void, OpKernelConstruction_GetAttrType,                                                      \
      (TF_OpKernelConstruction *, const char *name, int *value_p, TF_Status *))                    \
    X(void, OpKernelConstruction_GetAttrInt32,                                                     \
      (TF_OpKernelConstruction *, const char *name, int32_t *value_p, TF_Status *))                \
    X(void, OpKernelConstruction_GetAttrInt64,                                                     \
      (TF_OpKernelConstruction *, const char *name, int64_t *value_p, TF_Status *))                \
    X(void, OpKernelConstruction_GetAttrFloat,                                                     \
      (TF_OpKernelConstruction *, const char *name, float *value_p, TF_Status *))                  \
    X(void, OpKernelConstruction_GetAttrBool,                                                      \
      (TF_OpKernelConstruction *, const char *name, unsigned char *value_p, TF_Status *))          \
    X(void, OpKernelConstruction_GetAttrSize,                                                      \
      (TF_OpKernelConstruction *, const char *name, int32_t *list_p, int32_t *bytes_p,             \
       TF_Status *))                                                                               \
    X(void, OpKernelConstruction_GetAttrString,                                                    \
      (TF_OpKernelConstruction *, const char *name, char *value, size_t bytes, TF_Status *))       \
    X(int, NumInputs, (TF_OpKernelContext *))                                                      \
    X(void, GetInput, (TF_OpKernelContext *, int i, TF_Tensor **tensor_p, TF_Status *))            \
    X(void, OpKernelContext_Failure, (TF_OpKernelContext *, TF_Status *))                          \
    X(TF_Tensor *, AllocateOutput,                                                                 \
      (TF_OpKernelContext *, int i, int dtype, const int64_t *dims, int n_dims, size_t bytes,      \
       TF_Status *))                                                                               \
    X(TF_Tensor *, ForwardInputOrAllocateOutput,                                                   \
      (TF_OpKernelContext *, const int *inputs, int n_inputs, int output, const int64_t *dims,     \
       int n_dims, int *forwarded_p, TF_Status *))                                                 \
    X(void, SetOutput, (TF_OpKernelContext *, int i, const TF_Tensor *, TF_Status *))              \
    X(void, DeleteTensor, (TF_Tensor *))                                                           \
    X(int, NumDims, (const TF_Tensor *))                                                           \
    X(int64_t, Dim, (const TF_Tensor *, int i))                                                    \
    X(void *, TensorData, (const TF_Tensor *))

typedef struct tf_api {
#define X(result, name, arguments) result(*name) arguments;
    TF_FUNCTIONS(X)
#undef X
} tf_api_t;

extern tf_api_t tf_api;

// Fills tf_api. false if TensorFlow is not loaded or lacks a function; *missing_p then names it.
bool tf_api_load(const char **missing_p);

#endif
