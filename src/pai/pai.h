// SPDX-License-Identifier: Apache-2.0
//
// pai.h - horovodrun on OpenPAI: job files and the cluster's REST API, and jobs from the inside.
//
// Owns what is OpenPAI's own and stands on launch/, which starts the ranks and knows nothing of it.
// Called by the program horovodrun, from its one thread. Every function returns an exit code.
#ifndef HVD_PAI_H
#define HVD_PAI_H

#include "launch/launch.h"

// `horovodrun pai ...`, outside of a cluster; argv[1] is "pai" (cli.c).
int pai_main(int argc, char **argv);
// --pai: waits for all tasks, runs the job, tells the workers how it ended (master.c). launcher: of
// others, or NULL.
int pai_run(const options_t *options, int (*launcher)(const options_t *));
// --pai-worker: waits for the master, and ends with its exit code (gate.c).
int pai_worker(const options_t *options);
// --pai-gate: the agent of a task, over ssh, which also stands between the two (gate.c).
int pai_gate(const options_t *options);

#endif
