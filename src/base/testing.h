// SPDX-License-Identifier: Apache-2.0
//
// testing.h - what only tests ask of base/.
//
// Kept out of base.h and peer.h, so that the product cannot come to depend on it. Any thread.
#ifndef HVD_BASE_TESTING_H
#define HVD_BASE_TESTING_H

#include "base/base.h"

// The process runs no more code, though it may still have files open.
bool process_is_ending(int pid);

#endif
