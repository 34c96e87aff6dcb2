// SPDX-License-Identifier: Apache-2.0
//
// tf_device.h - the order of TensorFlow's work on a GPU, and of ours.
//
// TensorFlow does not tell a kernel of the C API which streams it uses. So all streams of the
// device's context are taken together, as CUDA 12.5 can: what they have been given so far comes
// before a collective, and what they are given later comes after it. Without these two functions
// there are no kernels for GPUs, and TensorFlow copies tensors to the host around those for CPUs.
//
// Threads: any; one lock. The streams are made once for a device and never given back.
#ifndef HVD_BIND_TF_DEVICE_H
#define HVD_BIND_TF_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

// Has this process a driver that can do it?
bool tf_device_load(void);

// Where a kernel runs: the device whose context is current, and a stream of ours there.
typedef struct tf_device {
    void *context; // NULL: the host
    void *stream;
    int ordinal;
} tf_device_t;

bool tf_device_here(tf_device_t *here_p);
// Our stream goes on behind all that the device has been given.
bool tf_device_follow(const tf_device_t *device);
// The device goes on behind our stream.
bool tf_device_lead(const tf_device_t *device);

#endif
