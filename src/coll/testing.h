// SPDX-License-Identifier: Apache-2.0
//
// testing.h - what tests compare collectives with: slow and obvious (reference.c).
//
// Kept out of coll.h, so that the product cannot come to depend on it. Pure, any thread.
#ifndef HVD_COLL_TESTING_H
#define HVD_COLL_TESTING_H

#include "coll/coll.h"

// Computes what every member must end up with. inputs[m] is member m's tensor (in an alltoall: the
// part of it that goes to this member); out is this member's.
void reference_run(const coll_args_t *args, const void *const *inputs, double pre, double post,
                   void *out);

#endif
