// SPDX-License-Identifier: Apache-2.0
//
// top.h - horovodrun --top: all ranks of a job, on all its hosts, in a terminal (top.c).
//
// It owns nothing; one thread.
#ifndef HVD_TOOLS_TOP_H
#define HVD_TOOLS_TOP_H

#include "cli/cli.h"

int top_main(const options_t *options);

#endif
