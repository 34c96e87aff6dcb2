// SPDX-License-Identifier: Apache-2.0
//
// tf_api.c - finds TensorFlow's C API in the process.
//
// libhvd_tf.so is loaded by tf.load_op_library(), so TensorFlow is there already: its framework
// library is asked for without loading it, each function is looked up once. Nothing is linked.
#include "bind/tf_api.h"

#include <dlfcn.h>
#include <string.h>

tf_api_t tf_api;

static const struct {
    const char *symbol;
    size_t offset;
} wanted[] = {
#define X(result, name, arguments) {"TF_" #name, offsetof(tf_api_t, name)},
    TF_FUNCTIONS(X)
#undef X
};

bool tf_api_load(const char **missing_p)
{
    static const char library[] = "libtensorflow_framework.so.2";
    void *tensorflow = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
    if (tensorflow == NULL) {
        *missing_p = library;
        return false;
    }
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        void *function = dlsym(tensorflow, wanted[i].symbol);
        if (function == NULL) {
            *missing_p = wanted[i].symbol;
            return false;
        }
        memcpy((char *)&tf_api + wanted[i].offset, &function, sizeof function);
    }
    return true; // the library stays open: the kernels use it as long as the process lives
}
