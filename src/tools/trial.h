// SPDX-License-Identifier: Apache-2.0
//
// trial.h - a rank of the trial job of horovodrun --doctor.
//
// trial.c; called by horovodrun.c.
#ifndef HVD_TOOLS_TRIAL_H
#define HVD_TOOLS_TRIAL_H

int trial_rank(void); // its exit code

#endif
