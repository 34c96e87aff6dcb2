#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# examples/launch/kubeflow.sh REGISTRY [mpijob|trainjob]: the example as a job of the MPI Operator, or
# of Kubeflow Trainer 2, with the image that was pushed to REGISTRY as horovod-c.
# KUBECTL="cat" shows what would be made.
set -eu
sed "s|registry.example.com/team|$1|" "deploy/kubeflow/${2:-mpijob}.yaml" |
    ${KUBECTL:-kubectl apply -f -}
