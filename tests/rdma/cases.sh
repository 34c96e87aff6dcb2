#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What is tested over verbs, in the guests of guests.sh. Node 1 only lets itself be logged into;
# node 0 starts jobs of one rank on each. A case is a function, and passes if it returns 0.
#
#   PROGRAMS=... IMPI=... cases.sh [CASE ...]
set -uo pipefail

log_in() { # keys of this run, and a door in each guest
    mkdir -p /run/sshd /root/.ssh
    if [ "$NODE" = 0 ]; then
        ssh-keygen -q -t ed25519 -N '' -f /share/key
        touch /share/has_key
    fi
    wait_for /share/has_key
    install -m 600 /share/key /root/.ssh/id_ed25519
    install -m 600 /share/key.pub /root/.ssh/authorized_keys
    printf '%s\n' 'Host *' 'StrictHostKeyChecking no' 'UserKnownHostsFile /dev/null' \
        'LogLevel ERROR' >/root/.ssh/config
    chown -R 0:0 /root/.ssh && chmod 700 /root /root/.ssh
    /usr/sbin/sshd -o UsePAM=no -o HostKey=/root/.ssh/id_ed25519 -o StrictModes=no \
        -o PermitRootLogin=yes -o MaxStartups=50
    touch "/share/open.$NODE"
}

wait_for() { # file
    for _ in $(seq 1200); do
        [ -e "$1" ] && return 0
        sleep 0.1
    done
    echo "waited in vain for $1"
    return 1
}

job() { # program and arguments, by our own launcher
    "$PROGRAMS/horovodrun" --start-timeout 600 -np 2 -H node0:1,node1:1 "$@" >/run/out 2>&1
}

intel() { # program and arguments, by Intel MPI's
    env I_MPI_ROOT="$IMPI" LD_LIBRARY_PATH="$IMPI/lib" PATH="$IMPI/bin:$PATH" \
        FI_PROVIDER_PATH="$IMPI/lib" I_MPI_HYDRA_IFACE=wire I_MPI_DEBUG=5 \
        "$IMPI/bin/mpiexec.hydra" -hosts node0,node1 -n 2 -ppn 1 -launcher ssh \
        -genv FI_PROVIDER 'verbs;ofi_rxm' -genv I_MPI_FABRICS ofi -genv FI_UNIVERSE_SIZE 2 \
        "$@" >/run/out 2>&1
}

says() { # text that the last job must have printed
    grep -qF -- "$1" /run/out && return 0
    echo "nowhere in the output: $1"
    return 1
}

# --- Cases ----------------------------------------------------------------------------------------

info() {
    "$PROGRAMS/hvd-info" --transports >/run/out 2>&1
    says "to ranks on other hosts  ofi"
}

kinds() { # every operation, dtype and reduction
    job "$PROGRAMS/test_ops" --launched --only "every kind"
    says "rank 0 of 2: 1 subtests ok" && says "rank 1 of 2: 1 subtests ok" &&
        says "travel by libfabric (verbs), which does not encrypt them"
}

again() { # connections made and ended three times
    job "$PROGRAMS/launched" --inits 3
    says "rank 0 of 2, 0 of 1 here, ok" && says "rank 1 of 2, 0 of 1 here, ok" &&
        says "travel by libfabric (verbs)"
}

killed() { # the other learns whose end it was
    ! job "$PROGRAMS/launched" --kill 1 && says "rank 1"
}

without_connections() { # one endpoint for all peers; a large queue would be too much for soft-RoCE
    job env HOROVOD_OFI_PROVIDER='verbs;ofi_rxm' FI_UNIVERSE_SIZE=2 "$PROGRAMS/launched"
    says "rank 0 of 2, 0 of 1 here, ok" && says "rank 1 of 2, 0 of 1 here, ok" &&
        says "travel by libfabric (verbs;ofi_rxm)"
}

memlock() { # too little memory may be locked: it is said, and tensors travel by TCP
    job setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock \
        bash -c "ulimit -l 64; exec $PROGRAMS/launched"
    says "rank 0 of 2, 0 of 1 here, ok" && says "this process may lock 64 KiB" &&
        says "ulimit -l unlimited"
}

memlock_forced() { # no other transport is allowed: a clean end
    ! job env HOROVOD_TRANSPORTS=ofi setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock \
        bash -c "ulimit -l 64; exec $PROGRAMS/launched" &&
        says "no transport connects rank" && says "this process may lock 64 KiB"
}

no_device() { # the files of the device are missing, as in a container that was not given them
    mv /dev/infiniband /dev/hidden
    "$PROGRAMS/hvd-info" --transports >/run/out 2>&1
    mv /dev/hidden /dev/infiniband
    says "to ranks on other hosts  tcp" && says "are /dev/infiniband/uverbs0 and rdma_cm there?"
}

intel_mpi() { # collectives by Intel MPI, which runs over verbs
    intel -genv HOROVOD_CPU_OPERATIONS MPI -genv HOROVOD_LOG_LEVEL debug "$PROGRAMS/launched"
    says "rank 0 of 2, 0 of 1 here, ok" && says "rank 1 of 2, 0 of 1 here, ok" &&
        says "libfabric provider: verbs" && says "collectives by libmpi"
}

intel_own() { # started by Intel MPI, collectives our own over verbs
    intel "$PROGRAMS/launched"
    says "rank 0 of 2, 0 of 1 here, ok" && says "rank 1 of 2, 0 of 1 here, ok" &&
        says "travel by libfabric (verbs)"
}

cases=(info again kinds killed without_connections memlock memlock_forced no_device intel_mpi
       intel_own)

log_in
if [ "$NODE" = 1 ]; then
    for _ in $(seq 9000); do
        [ -e /share/over ] && exit 0
        sleep 0.1
    done
    exit 1
fi
wait_for /share/open.1
n_failed=0
for case in "${@:-${cases[@]}}"; do
    start=$SECONDS
    if "$case"; then
        echo "ok     $case ($((SECONDS - start)) s)"
    else
        echo "FAILED $case"
        tail -n 40 /run/out
        n_failed=$((n_failed + 1))
    fi
done
touch /share/over
exit "$((n_failed > 0))"
