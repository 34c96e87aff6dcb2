// SPDX-License-Identifier: Apache-2.0
//
// info.h - what the views of hvd-info share: options, knobs, tables.
//
// hvd-info.c has the list of views and most of them; info_transports.c and info_gpu.c have one
// each, info_table.c the tables. live.c, which has one too, needs none of this.
#ifndef HVD_TOOLS_INFO_H
#define HVD_TOOLS_INFO_H

#include "base/base.h"

typedef struct info_options {
    int ranks, hosts;
    bool has_ranks;  // they were asked for
    const char *job; // NULL: all of them
} info_options_t;

// The knobs in force; false: they are wrong, and it was said.
bool info_load_knobs(config_t *config);

// Cells row after row; columns are as wide as their widest cell.
typedef struct table {
    int n_columns;
    buf_t cells; // char *, owned
} table_t;

void table_add(table_t *table, const char *format, ...) PRINTF_LIKE(2, 3);
void table_print(table_t *table); // and gives its memory back
const char *info_size_text(size_t bytes, char text[32]);

int info_gpu_selftest(const info_options_t *options); // 3: there is no GPU
int info_transports(const info_options_t *options);   // the exit code

#endif
