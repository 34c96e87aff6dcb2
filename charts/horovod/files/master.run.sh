#!/bin/sh
# The master: waits for the workers, runs the command of master.args, then gives the workers back,
# however that went.
#
#   run.sh --job NAME [WORD ...]    the Job this is, and the command
set -u
. /horovod/generated/settings.sh
job_name=$2 # as an argument: ranks would inherit a variable, and say that they do not know it
shift 2
np=$(sed -e 's/.*slots=//' -e 's/.*://' "$HOSTFILE" | awk '{ n += $1 } END { print n }')
account=/var/run/secrets/kubernetes.io/serviceaccount
patience_s=10
deadline=$(($(date +%s) + START_TIMEOUT))
export HOROVODRUN_HOSTFILE=$HOSTFILE
/horovod/generated/discover_hosts.sh --watch 10 &
watcher=$!

# The page of the job, for a horovodrun in the command; beyond the pod under TLS only.
show_dashboard() {
    export HOROVODRUN_DASHBOARD=$DASHBOARD HOROVODRUN_DASHBOARD_TOKEN_FILE=/horovod/dashboard/token
    [ -n "$DASHBOARD_HOST" ] || return 0
    certificate=$(umask 077 && mktemp -p /dev/shm 2>/dev/null || mktemp)
    cat /horovod/dashboard/tls.crt /horovod/dashboard/tls.key >"$certificate"
    export HOROVODRUN_DASHBOARD_ADDRESS=0.0.0.0 HOROVODRUN_DASHBOARD_HOST=$DASHBOARD_HOST
    export HOROVODRUN_DASHBOARD_CERTIFICATE=$certificate
}

# For the process of the command: the scripts end it where they fail, as a failing command would.
prepare() {
    [ -z "${DASHBOARD:-}" ] || show_dashboard
    if [ "$MODE" = native ]; then
        export HOROVODRUN_AWAIT_AGENTS=$PORT HOROVODRUN_SECRET_FILE=/horovod/secret/secret
        wait_for_statefulset
        left=$((deadline - $(date +%s)))
        export HOROVOD_START_TIMEOUT=$((left > 1 ? left : 1))
        return
    fi
    . /horovod/generated/ssh-setup.sh
    export OMPI_MCA_orte_default_hostfile=$HOSTFILE PRTE_MCA_prte_default_hostfile=$HOSTFILE
    export OMPI_MCA_orte_keep_fqdn_hostnames=t
    export I_MPI_HYDRA_HOST_FILE=$HOSTFILE HYDRA_HOST_FILE=$HOSTFILE I_MPI_HYDRA_BOOTSTRAP=ssh
    wait_for_statefulset
    . /horovod/generated/waitWorkersReady.sh
    make_one_of_two
}

address_of() {
    getent ahosts "$1" | sed -e 's/ .*//' -e 1q
}

# On the network of the nodes the master may share its address with a worker, where there was no
# other node. mpirun rejects two names for one machine: the worker's gets the slots of both, and comes
# first, as the master did. mpirun then runs the ranks of both here.
make_one_of_two() {
    master=$STATEFULSET-master
    [ -w "${HOSTFILE%/*}" ] && grep -q "^$master[ :]" "$HOSTFILE" || return 0
    own=$(address_of "$master")
    for host in $workers; do
        [ -n "$own" ] && [ "$(address_of "$host")" = "$own" ] || continue
        awk -v master="$master" -v shared="$host" '
            { split($0, words, "[ :]"); slots = $0; sub(/.*[=:]/, "", slots) }
            words[1] == master || words[1] == shared { both += slots; form = $0; next }
            { others = others $0 "\n" }
            END {
                match(form, /[ :](slots=)?/)
                print shared substr(form, RSTART, RLENGTH) both
                printf "%s", others
            }' "$HOSTFILE" >"$HOSTFILE.new" && mv -f "$HOSTFILE.new" "$HOSTFILE"
        echo "horovod: no node is left for the master alone: it shares that of $host, and mpirun" \
            "runs the ranks of both in the pod of the master" >&2
        return 0
    done
}

# api METHOD PATH [DATA]: what the service account may do is very little, see its Role.
api() {
    server=${KUBERNETES_SERVICE_HOST:-kubernetes.default.svc}:${KUBERNETES_SERVICE_PORT:-443}
    if command -v curl >/dev/null; then
        curl --fail --silent --show-error --max-time $patience_s --cacert $account/ca.crt \
            --request "$1" --header "Authorization: Bearer $(cat $account/token)" \
            --header 'Content-Type: application/merge-patch+json' \
            ${3:+--data} ${3:+"$3"} "https://$server$2"
    else
        python3 - "$1" "https://$server$2" "${3:-}" $account $patience_s <<'END'
import ssl, sys, urllib.request
method, url, data, account, patience_s = sys.argv[1:]
request = urllib.request.Request(url, data.encode() or None, method=method, headers={
    "Authorization": "Bearer " + open(account + "/token").read(),
    "Content-Type": "application/merge-patch+json"})
context = ssl.create_default_context(cafile=account + "/ca.crt")
print(urllib.request.urlopen(request, timeout=float(patience_s), context=context).read().decode())
END
    fi
}

# told NAME: a number or a word that stands once in the description of the StatefulSet.
told() {
    printf '%s\n' "$description" |
        sed -n "s/.*\"$1\": *\"\{0,1\}\([A-Za-z0-9.-]*\).*/\1/p"
}

# Whether workers of the last release are left, or the description is older than the last change.
is_rolling() {
    [ "$(told observedGeneration)" = "$(told generation)" ] || return 0
    updated=$(told updatedReplicas)
    [ "$(told currentRevision)" != "$(told updateRevision)" ] && [ "${updated:-0}" -lt "$WORKERS" ]
}

are_ready() {
    ready=$(told readyReplicas)
    [ "$(told observedGeneration)" = "$(told generation)" ] &&
        [ "$(told currentRevision)" = "$(told updateRevision)" ] &&
        [ "${ready:-0}" -ge "$WORKERS" ]
}

# Until Kubernetes has the workers ready. To ask for them too early takes longer: name servers keep
# the answer that there is no such name for 5 to 30 s. After an upgrade workers are replaced one
# after the other, and ranks on one of the last release would die with it. Who is late is left to the
# command, as an elastic job may do without. Where we may not ask, workers get a second's start.
wait_for_statefulset() {
    late=$(($(date +%s) + 10))
    [ "$WORKERS" -gt 0 ] || return 0
    while [ -r $account/token ] && description=$(
        patience_s=3
        api GET "/apis/apps/v1/namespaces/$NAMESPACE/statefulsets/$STATEFULSET" 2>/dev/null
    ); do
        now=$(date +%s)
        if are_ready || [ "$now" -ge $((deadline - 1)) ] ||
            { [ "$now" -ge $late ] && ! is_rolling; }; then
            return 0
        fi
        sleep 0.2
    done
    sleep 1
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
    job=$(api GET "/apis/batch/v1/namespaces/$NAMESPACE/jobs/$job_name" 2>/dev/null) ||
        return 1
    case $job in *deletionTimestamp*) return 1 ;; esac
    [ "$1" -eq 0 ] || ! is_tried_again "$job" || return 0
    api PATCH "/apis/apps/v1/namespaces/$NAMESPACE/statefulsets/$STATEFULSET/scale" \
        '{"spec":{"replicas":0}}' >/dev/null
}

# On the network of its node the master has the name of that: an agent stands for it, as for workers.
agent=
if [ "$MODE" = native ] && [ "$(hostname)" != "$STATEFULSET-master" ]; then
    horovodrun --agent --redial --dial "127.0.0.1:$PORT" --secret-file /horovod/secret/secret \
        --agent-name "$STATEFULSET-master" &
    agent=$!
fi
if [ $# -eq 0 ]; then
    set -- "horovodrun -np $np python3 /horovod/examples/pytorch_mnist.py"
fi
{
    prepare
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
kill "$watcher" $agent 2>/dev/null
if [ "$RELEASE_WORKERS" = yes ]; then
    release_workers $code ||
        echo "horovod: the workers were not released: the API did not answer, or they belong to" \
            "the job of an upgrade by now" >&2
fi
exit $code
