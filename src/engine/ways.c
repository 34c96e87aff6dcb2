// SPDX-License-Identifier: Apache-2.0
//
// ways.c - the ways a batch can take, a row each, in the order of preference.
//
// All members choose from what all of them know, and so alike. The names in timelines, the choice
// and `hvd-info --algorithms` walk this one table. Pure functions.
#include "engine/run.h"

static bool nothing_is_forced(const way_case_t *given)
{
    return given->algorithm == NULL ||
           given->algorithm[0] == '\0'; // every batch asks several times
}

bool way_is_forced(const way_case_t *given, const char *name)
{
    coll_forced_t forced;
    return !nothing_is_forced(given) &&
           coll_forced(given->args->op, given->algorithm, &forced, NULL) == HVD_OK &&
           forced.way != NULL && strcmp(forced.way, name) == 0;
}

// What cannot be read counts as a plan, which then says what is wrong with it.
bool way_is_forced_to_plan(const way_case_t *given)
{
    coll_forced_t forced;
    return !nothing_is_forced(given) &&
           (coll_forced(given->args->op, given->algorithm, &forced, NULL) != HVD_OK ||
            forced.plan != NULL);
}

// Agreeing to it was all there is to it.
static bool agreed_takes(const way_case_t *given)
{
    op_layout_t layout = op_infos[given->args->op].layout;
    return layout == LAYOUT_NOTHING || (layout == LAYOUT_WHOLE && given->args->bytes == 0);
}

// Nobody chooses it: run.c begins with it where the members of a set have not agreed yet.
static bool init_nccl_takes(const way_case_t *given)
{
    (void)given;
    return false;
}

const way_t ways[N_WAYS] = {
    [WAY_BOARD] = {.name = "BOARD",
                   .tells = "board: in the host's shared memory, without agreement messages",
                   .takes = board_takes},
    [WAY_RIDING] = {.name = "RIDING",
                    .tells = "riding: inside control messages",
                    .takes = way_riding_takes,
                    .start = way_riding_start},
    [WAY_AGREED] = {.name = "AGREED",
                    .tells = "agreed: nothing is left to do once all ranks have submitted it",
                    .takes = agreed_takes},
    [WAY_INIT_NCCL] = {.name = "INIT_NCCL",
                       .tells = "init_nccl: members of a process set agree whether to use NCCL",
                       .takes = init_nccl_takes,
                       .start = way_init_nccl_start,
                       .progress = way_init_nccl_progress,
                       .abandon = way_init_nccl_abandon},
    [WAY_NCCL] = {.name = "NCCL",
                  .tells = "nccl: from GPU to GPU",
                  .takes = way_nccl_takes,
                  .start = way_nccl_start,
                  .progress = way_nccl_progress,
                  .abandon = way_nccl_abandon},
    [WAY_ALONE] = {.name = "LOCAL",
                   .tells = "alone: copied",
                   .takes = way_alone_takes,
                   .start = way_alone_start},
    [WAY_PIECES] = {.name = "PLAN",
                    .tells = "plan: ",
                    .by_plan = true,
                    .takes = way_pieces_takes,
                    .start = way_pieces_start,
                    .progress = way_pieces_progress},
    [WAY_MPI] = {.name = "MPI",
                 .tells = "mpi: by the launcher's MPI library",
                 .takes = way_mpi_takes,
                 .start = way_mpi_start,
                 .progress = way_mpi_progress},
    [WAY_DIRECT] = {.name = "DIRECT",
                    .tells = "direct: from process to process, or through shared memory",
                    .takes = way_direct_takes,
                    .start = way_direct_start,
                    .progress = way_direct_progress,
                    .abandon = way_direct_abandon},
    [WAY_STREAM] = {.name = "STREAM",
                    .tells = "stream: through shared memory",
                    .takes = way_stream_takes,
                    .start = way_stream_start,
                    .progress = way_stream_progress},
    [WAY_TWO_LEVEL] = {.name = "TWO_LEVEL",
                       .tells = "two_level: shared memory, and between hosts ",
                       .by_plan = true,
                       .takes = way_two_level_takes,
                       .start = way_two_level_start,
                       .progress = way_two_level_progress},
    [WAY_PLAN] = {.name = "PLAN",
                  .tells = "plan: ",
                  .by_plan = true,
                  .takes = way_plan_takes,
                  .start = way_plan_start,
                  .progress = way_plan_progress},
};

way_id_t way_choose(const way_case_t *given)
{
    int id = 0;
    while (id < WAY_PLAN && !ways[id].takes(given)) {
        id++;
    }
    return (way_id_t)id;
}
