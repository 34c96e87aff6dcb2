// SPDX-License-Identifier: Apache-2.0
//
// simulate_events.c - what is going to happen, by time: a binary heap.
//
// Events of one moment come in the order in which they were added, so a run repeats itself.
#include "simulate/simulate.h"

#include <stdlib.h>

static bool is_before(const sim_event_t *a, const sim_event_t *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

static bool has_room(events_t *events)
{
    if (events->n < events->cap) {
        return true;
    }
    size_t cap = events->cap > 0 ? 2 * events->cap : 256;
    sim_event_t *heap = realloc(events->heap, cap * sizeof *heap);
    if (heap == NULL) {
        events->failed = true;
        return false;
    }
    events->heap = heap;
    events->cap = cap;
    return true;
}

void events_add(events_t *events, double at_ns, int what, int number)
{
    if (!has_room(events)) {
        return;
    }
    sim_event_t event = {at_ns, events->n_made++, what, number};
    size_t at = events->n++;
    while (at > 0 && is_before(&event, &events->heap[(at - 1) / 2])) {
        events->heap[at] = events->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    events->heap[at] = event;
}

bool events_next(events_t *events, sim_event_t *event_p)
{
    if (events->n == 0) {
        return false;
    }
    *event_p = events->heap[0];
    sim_event_t last = events->heap[--events->n];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < events->n; at = child) {
        child += child + 1 < events->n && is_before(&events->heap[child + 1], &events->heap[child]);
        if (!is_before(&events->heap[child], &last)) {
            break;
        }
        events->heap[at] = events->heap[child];
    }
    if (events->n > 0) {
        events->heap[at] = last;
    }
    return true;
}

void events_free(events_t *events)
{
    free(events->heap);
    *events = (events_t){0};
}
