#!/bin/sh
# The master: waits for the workers, runs the command of master.args, then gives the workers back,
# however that went.
set -u
. /horovod/generated/settings.sh
np=$(sed -e 's/.*slots=//' -e 's/.*://' "$HOSTFILE" | awk '{ n += $1 } END { print n }')
export HOROVODRUN_HOSTFILE=$HOSTFILE
if [ "$MODE" = native ]; then
    export HOROVODRUN_AGENT_PORT=$PORT HOROVODRUN_SECRET_FILE=/horovod/secret/secret
    export HOROVOD_START_TIMEOUT=$START_TIMEOUT
    /horovod/generated/discover_hosts.sh --watch 10 &
    watcher=$!
fi

# For the process of the command: the scripts end it where they fail, as a failing command would.
prepare_ssh() {
    . /horovod/generated/ssh-setup.sh
    export OMPI_MCA_orte_default_hostfile=$HOSTFILE PRTE_MCA_prte_default_hostfile=$HOSTFILE
    export OMPI_MCA_orte_keep_fqdn_hostnames=t
    export I_MPI_HYDRA_HOST_FILE=$HOSTFILE HYDRA_HOST_FILE=$HOSTFILE I_MPI_HYDRA_BOOTSTRAP=ssh
    . /horovod/generated/waitWorkersReady.sh
}

# api METHOD PATH [DATA]: what the service account may do is very little, see its Role.
api() {
    token=/var/run/secrets/kubernetes.io/serviceaccount
    server=${KUBERNETES_SERVICE_HOST:-kubernetes.default.svc}:${KUBERNETES_SERVICE_PORT:-443}
    if command -v curl >/dev/null; then
        curl --fail --silent --show-error --max-time 10 --cacert $token/ca.crt --request "$1" \
            --header "Authorization: Bearer $(cat $token/token)" \
            --header 'Content-Type: application/merge-patch+json' \
            ${3:+--data} ${3:+"$3"} "https://$server$2"
    else
        python3 - "$1" "https://$server$2" "${3:-}" $token <<'END'
import ssl, sys, urllib.request
method, url, data, token = sys.argv[1:]
request = urllib.request.Request(url, data.encode() or None, method=method, headers={
    "Authorization": "Bearer " + open(token + "/token").read(),
    "Content-Type": "application/merge-patch+json"})
context = ssl.create_default_context(cafile=token + "/ca.crt")
print(urllib.request.urlopen(request, timeout=10, context=context).read().decode())
END
    fi
}

# is_tried_again JOB: whether Kubernetes starts a job anew that fails now.
is_tried_again() {
    case $1 in *'"FailureTarget"'* | *'"Failed"'*) return 1 ;; esac # its deadline has passed
    failed=$(printf '%s\n' "$1" | sed -n 's/.*"failed": *\([0-9][0-9]*\).*/\1/p')
    [ "${failed:-0}" -lt "$BACKOFF_LIMIT" ]
}

# release_workers CODE: gives the workers back after the command, or the wait for them, has ended
# with this code.
#
# An upgrade that comes while this job runs lets us ask for the next job only, then changes the
# workers, which ends ours, and deletes it: the workers are then those of the next one.
release_workers() {
    job=$(api GET "/apis/batch/v1/namespaces/$NAMESPACE/jobs/$HOROVOD_JOB_NAME" 2>/dev/null) ||
        return 1
    case $job in *deletionTimestamp*) return 1 ;; esac
    [ "$1" -eq 0 ] || ! is_tried_again "$job" || return 0
    api PATCH "/apis/apps/v1/namespaces/$NAMESPACE/statefulsets/$STATEFULSET/scale" \
        '{"spec":{"replicas":0}}' >/dev/null
}

if [ $# -eq 0 ]; then
    set -- "horovodrun -np $np python3 /horovod/examples/pytorch_mnist.py"
fi
{
    [ "$MODE" = native ] || prepare_ssh
    exec sh -c "$*"
} &
child=$!
trap 'kill -TERM $child 2>/dev/null' TERM INT
wait $child
code=$?
while kill -0 $child 2>/dev/null; do # the wait was interrupted by a signal
    wait $child
    code=$?
done
[ -z "${watcher:-}" ] || kill "$watcher" 2>/dev/null
if [ "$RELEASE_WORKERS" = yes ]; then
    release_workers $code ||
        echo "horovod: the workers were not given back: the API did not answer, or they belong to" \
            "the job of an upgrade by now" >&2
fi
exit $code
