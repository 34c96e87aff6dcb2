// SPDX-License-Identifier: Apache-2.0
//
// cases.h - one operation described as data: every rank builds its own input from the description,
// knows what every other rank brings, and so checks its result without asking anybody.
//
// Values repeat with a period that is prime and so out of step with every slice, segment and block.
// They are small whole numbers, whose sums and products are exact in every dtype; half types may
// have others, whose sum comes out differently if it is rounded more than once on the way.
#ifndef TESTS_RANKS_CASES_H
#define TESTS_RANKS_CASES_H

#include "harness.h"

#define MAX_GROUP 4

typedef enum form {
    FORM_IN_PLACE, // output is input; allgather and alltoall as FORM_OUT_OF_PLACE
    FORM_OUT_OF_PLACE,
    FORM_LIBRARY,  // the handle owns the output
    FORM_CALLBACK, // hvd_request.alloc gives it
    N_FORMS
} form_t;

typedef struct op_case {
    hvd_op_t op;
    hvd_dtype_t dtype;
    hvd_reduce_t reduce;
    form_t form;
    int set;            // process set
    const int *members; // its ranks, ascending
    int n_members;
    int root; // broadcast: position among the members
    int n_tensors;
    int n_dims;           // 0 to 3; with 0 or 1 there is one column
    size_t rows, columns; // of the first tensor. allgather, alltoall: about, see cases.c
    double pre, post;
    bool rounding; // half types, Sum and Average: values that show rounding more than once
    unsigned salt; // varies values and splits
} op_case_t;

typedef struct case_tensor {
    uint8_t *input, *output; // output NULL: given out by the library
    uint8_t *input_memory, *output_memory;
    int64_t shape[3];
    size_t n_in, n_out; // elements
    int64_t rows_out;
} case_tensor_t;

// A case under way; zero it first, or let op_check do so.
typedef struct op_run {
    op_case_t c;
    int member; // this rank's position
    int n_tensors;
    case_tensor_t tensors[MAX_GROUP];
    int32_t splits[MAX_RANKS];
    hvd_handle_t handle;
    bool forgets;           // set before op_submit: the handle is released at once
    atomic_int n_done;      // times the completion callback ran
    hvd_status_t done_with; // what it was told
} op_run_t;

void op_describe(const op_case_t *c, char *text, size_t bytes);
// Builds the input and submits. run must stay where it is until op_check.
void op_submit(rank_t *r, const op_case_t *c, const char *name, unsigned flags, op_run_t *run);
// Waits, checks output, shape, splits, and that nothing else was written; releases everything.
void op_check(rank_t *r, op_run_t *run);
void op_run(rank_t *r, const op_case_t *c, const char *name);
// Makes a case random in everything that its op allows; members and set are the caller's.
op_case_t op_random(dice_t *dice, int set, const int *members, int n_members, size_t max_bytes);

#endif
