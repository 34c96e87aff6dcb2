// SPDX-License-Identifier: Apache-2.0
//
// info_table.c - tables of text for hvd-info.
//
// A table owns its cells. Memory that is not there ends the program.
#define _GNU_SOURCE
#include "tools/info.h"

#include <stdio.h>
#include <stdlib.h>

#define MAX_COLUMNS 12

void table_add(table_t *table, const char *format, ...)
{
    va_list args;
    char *text;
    va_start(args, format);
    if (vasprintf(&text, format, args) < 0 || !buf_append(&table->cells, &text, sizeof text)) {
        fputs("hvd-info: out of memory\n", stderr);
        exit(1);
    }
    va_end(args);
}

static int blanks_after(int width, const char *cell, bool is_last)
{
    return is_last ? 0 : width + 2 - (int)strlen(cell);
}

void table_print(table_t *table)
{
    char **cells = (char **)(void *)table->cells.data;
    int n_cells = (int)(table->cells.len / sizeof *cells);
    int width[MAX_COLUMNS] = {0};
    for (int i = 0; i < n_cells; i++) {
        int column = i % table->n_columns;
        width[column] = MAX(width[column], (int)strlen(cells[i]));
    }
    for (int i = 0; i < n_cells; i++) {
        int column = i % table->n_columns;
        bool is_last = column == table->n_columns - 1 || cells[i + 1][0] == '\0';
        for (int next = i + 1; is_last && next % table->n_columns != 0; next++) {
            is_last = cells[next][0] == '\0'; // only blanks would follow
        }
        printf("%s%s%*s%s", column == 0 ? "  " : "", cells[i],
               blanks_after(width[column], cells[i], is_last), "",
               column == table->n_columns - 1 ? "\n" : "");
    }
    for (int i = 0; i < n_cells; i++) {
        free(cells[i]);
    }
    buf_free(&table->cells);
}

const char *info_size_text(size_t bytes, char text[32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
    size_t unit = 0;
    double value = (double)bytes;
    while (value >= 1024 && unit + 1 < N_ELEMENTS(units)) {
        value /= 1024;
        unit++;
    }
    snprintf(text, 32, value < 10 && value != (int)value ? "%.1f %s" : "%.0f %s", value,
             units[unit]);
    return text;
}
