// SPDX-License-Identifier: Apache-2.0
//
// check_build.c - horovodrun --check-build: what this installation can do, in the words users know.
//
// Each framework is tried in a Python of its own, since importing one may take long or crash.
// Tensors are moved by operations of our own, or by the MPI library of mpirun where it is asked
// for; Gloo is only a name that users know for a job without MPI.
#define _GNU_SOURCE
#include "launch/launch.h"
#include "launch/process.h"

#define IMPORT_TIMEOUT_MS 60000

static bool can_import(const char *python, const char *module)
{
    char code[128], text[64];
    char *argv[] = {(char *)python, "-c", code, NULL};
    snprintf(code, sizeof code, "import %s", module);
    return run_program(argv, IMPORT_TIMEOUT_MS, text, sizeof text) == 0;
}

// The interpreter that would run a script here.
static const char *find_python(void)
{
    static const char *const names[] = {"python", "python3"};
    char text[64];
    for (size_t i = 0; i < N_ELEMENTS(names); i++) {
        char *argv[] = {(char *)names[i], "-c", "", NULL};
        if (run_program(argv, IMPORT_TIMEOUT_MS, text, sizeof text) == 0) {
            return names[i];
        }
    }
    return NULL;
}

static void item(FILE *out, bool is_there, const char *name)
{
    fprintf(out, "    [%s] %s\n", is_there ? "X" : " ", name);
}

int check_build(FILE *out)
{
    // A framework counts when both it and our binding to it can be imported.
    static const char *const frameworks[][2] = {{"TensorFlow", "horovod.tensorflow"},
                                                {"PyTorch", "horovod.torch"},
                                                {"MXNet", "horovod.mxnet"}};
    static const struct {
        const char *name;
        bool is_there;
    } operations[] = {
        {"NCCL", false}, {"DDL", false},
        {"CCL", false},  {"MPI", true},
        {"Gloo", false}, {"Horovod's own, over TCP, shared memory and libfabric", true}};
    const char *python = find_python();

    fprintf(out, "Horovod v%s:\n\nAvailable Frameworks:\n", hvd_version());
    for (size_t i = 0; i < N_ELEMENTS(frameworks); i++) {
        item(out, python != NULL && can_import(python, frameworks[i][1]), frameworks[i][0]);
    }
    fprintf(out, "\nAvailable Controllers:\n");
    item(out, true, "MPI");
    item(out, true, "Gloo");
    fprintf(out, "\nAvailable Tensor Operations:\n");
    for (size_t i = 0; i < N_ELEMENTS(operations); i++) {
        item(out, operations[i].is_there, operations[i].name);
    }
    return 0;
}
