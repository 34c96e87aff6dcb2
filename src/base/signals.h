// SPDX-License-Identifier: Apache-2.0
//
// signals.h - what signals are called, for messages.
//
// NULL for a number without a name. Any thread; owns nothing.
#ifndef HVD_BASE_SIGNALS_H
#define HVD_BASE_SIGNALS_H

const char *signal_name_of(int signo);        // "SIGKILL"
const char *signal_description_of(int signo); // "Killed"

#endif
