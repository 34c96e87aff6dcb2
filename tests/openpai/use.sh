#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What must work in the image of deploy/openpai; runs inside it, on loopback: the RDMA parts are
# there, Intel MPI trains, and an OpenPAI job of a master and a worker does, natively and through
# Intel MPI. Both tasks are this container, with OpenPAI's variables, keys and ssh aliases.
set -euo pipefail
port=23022
train=(python3 examples/pytorch_mnist.py --epochs 1 --limit 2000)

check() { # what is checked, a text that must be in the output, a command
    local name=$1 text=$2
    shift 2
    if ! "$@" >/tmp/out 2>&1 || ! grep -q -- "$text" /tmp/out; then
        tail -n 40 /tmp/out
        echo "FAILED $name: wanted \"$text\" from $*"
        exit 1
    fi
    echo "ok     $name"
}

task() { # role of this task, command
    env PAI_CURRENT_TASK_ROLE_NAME="$1" PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX=0 \
        PAI_TASK_ROLE_LIST=master,worker \
        PAI_TASK_ROLE_TASK_COUNT_master=1 PAI_TASK_ROLE_TASK_COUNT_worker=1 \
        PAI_HOST_IP_master_0=127.0.0.1 PAI_HOST_IP_worker_0=127.0.0.1 \
        PAI_PORT_LIST_master_0_ssh=$port PAI_PORT_LIST_worker_0_ssh=$port "${@:2}"
}

job() { # options of horovodrun
    task worker horovodrun --pai-worker >/tmp/worker 2>&1 &
    task master horovodrun --pai "$@" "${train[@]}"
    wait $! # the worker ends with the job's exit code
}

start_sshd() { # as OpenPAI does: keys of the job, aliases, a port of the task
    ssh-keygen -A >/dev/null
    ssh-keygen -q -t rsa -N '' -f /root/.ssh/id_rsa
    cp /root/.ssh/id_rsa.pub /root/.ssh/authorized_keys
    printf 'Host %s\n HostName 127.0.0.1\n Port %s\n User root\n StrictHostKeyChecking no\n' \
        'master-0 worker-0' $port >>/etc/ssh/ssh_config
    printf ' UserKnownHostsFile /dev/null\n LogLevel ERROR\n' >>/etc/ssh/ssh_config
    env | grep -E '^(PATH|LD_LIBRARY_PATH|PYTHONPATH|I_MPI_ROOT|FI_PROVIDER_PATH)=' \
        >/root/.ssh/environment
    /usr/sbin/sshd -p $port -o PermitUserEnvironment=yes -o PidFile=/tmp/sshd.pid
    trap 'kill "$(cat /tmp/sshd.pid)"' EXIT
}

check "the ofi transport is built" "no RDMA device" hvd-info --transports
check "libfabric has tcp" "provider: tcp" fi_info -p tcp
check "verbs tools" "" sh -c 'command -v ibv_devinfo ib_write_bw'
check "Intel MPI starts ranks" "recognised as *pmi" mpiexec.hydra -n 2 hvd-info --launcher
check "training by Intel MPI" "test accuracy" \
    mpiexec.hydra -n 2 -genv HOROVOD_CPU_OPERATIONS MPI "${train[@]}"
start_sshd
check "an OpenPAI job" "test accuracy" job
check "an OpenPAI job by Intel MPI" "test accuracy" job --mpi
