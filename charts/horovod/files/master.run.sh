#!/bin/sh
# The master: runs the command of master.args, then gives the workers back.
set -u
. /horovod/generated/settings.sh
np=$(sed -e 's/.*slots=//' -e 's/.*://' "$HOSTFILE" | awk '{ n += $1 } END { print n }')
export HOROVODRUN_HOSTFILE=$HOSTFILE
case $MODE in
native)
    export HOROVODRUN_AGENT_PORT=$PORT HOROVODRUN_SECRET_FILE=/horovod/secret/secret
    export HOROVOD_START_TIMEOUT=$START_TIMEOUT
    /horovod/generated/discover_hosts.sh --watch 10 &
    watcher=$!
    ;;
*)
    . /horovod/generated/ssh-setup.sh
    export OMPI_MCA_orte_default_hostfile=$HOSTFILE PRTE_MCA_prte_default_hostfile=$HOSTFILE
    export OMPI_MCA_orte_keep_fqdn_hostnames=t
    export I_MPI_HYDRA_HOST_FILE=$HOSTFILE HYDRA_HOST_FILE=$HOSTFILE I_MPI_HYDRA_BOOTSTRAP=ssh
    ;;
esac

# The scale of our own StatefulSet is the one thing this pod may change.
release_workers() {
    token=/var/run/secrets/kubernetes.io/serviceaccount
    path=/apis/apps/v1/namespaces/$NAMESPACE/statefulsets/$STATEFULSET/scale
    server=${KUBERNETES_SERVICE_HOST:-kubernetes.default.svc}:${KUBERNETES_SERVICE_PORT:-443}
    url=https://$server$path
    if command -v curl >/dev/null; then
        curl --fail --silent --show-error --max-time 10 --output /dev/null \
            --cacert $token/ca.crt --header "Authorization: Bearer $(cat $token/token)" \
            --header 'Content-Type: application/merge-patch+json' \
            --request PATCH --data '{"spec":{"replicas":0}}' "$url"
    else
        python3 - "$url" $token <<'END'
import ssl, sys, urllib.request
url, token = sys.argv[1:]
request = urllib.request.Request(url, b'{"spec":{"replicas":0}}', method="PATCH", headers={
    "Authorization": "Bearer " + open(token + "/token").read(),
    "Content-Type": "application/merge-patch+json"})
context = ssl.create_default_context(cafile=token + "/ca.crt")
urllib.request.urlopen(request, timeout=10, context=context).read()
END
    fi || echo "horovod: the workers could not be given back; they stay until helm uninstall" >&2
}

if [ $# -eq 0 ]; then
    set -- "horovodrun -np $np python3 /horovod/examples/pytorch_mnist.py"
fi
sh -c "$*" &
child=$!
trap 'kill -TERM $child 2>/dev/null' TERM INT
wait $child
code=$?
while kill -0 $child 2>/dev/null; do # the wait was interrupted by a signal
    wait $child
    code=$?
done
[ -z "${watcher:-}" ] || kill "$watcher" 2>/dev/null
if [ "$RELEASE_WORKERS" = yes ] && { [ $code -eq 0 ] || [ "$MAY_RETRY" = no ]; }; then
    release_workers
fi
exit $code
