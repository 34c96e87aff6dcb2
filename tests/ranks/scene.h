// SPDX-License-Identifier: Apache-2.0
//
// scene.h - a corner of the machine that belongs to one test program, and what is left there.
//
// In its own mount, network and IPC namespaces a program finds /tmp, /var/tmp and /dev/shm empty,
// and a loopback interface that nobody else uses. Whatever is there after a job was left by that
// job, however many others run beside it. Processes are counted wherever they are: those whose
// parent is gone become children of the test program.
//
// Depends on nothing but the C library: tests in Python load it as libscene.so.
// Threads: one.
#ifndef TESTS_RANKS_SCENE_H
#define TESTS_RANKS_SCENE_H

#include <stdbool.h>

// Before there are threads, and as often as you like. False: this machine does not let us (it takes
// root, or the right to make user namespaces); scene_look() then sees this program's processes,
// threads and descriptors only.
bool scene_make(void);

// Writes into a file that exists, as those that control the kernel do.
bool scene_write_file(const char *path, const char *text);

// What is there now, one thing a line.
typedef struct scene scene_t;
scene_t *scene_look(void);
void scene_free(scene_t *scene);

// What is there now and was not before, or "" when that is nothing; what is about to end gets so
// many milliseconds. The text is the scene's.
const char *scene_left(scene_t *before, int patience_ms);

#endif
