#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# examples/launch/kubernetes.sh REGISTRY: the example on two workers and the master, with the chart.
# The image is deploy/docker/Dockerfile's, pushed to REGISTRY as horovod-c. HELM="helm template"
# shows what would be made.
set -eu
${HELM:-helm install} mnist charts/horovod --set image.registry="$1" --set worker.number=2 \
    --set shmSize=256Mi \
    --set 'master.args={horovodrun -np 3 python /horovod/examples/pytorch_mnist.py --epochs 1}'
