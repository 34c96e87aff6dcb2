#!/bin/sh
# Lists where ranks can run now, a line "host:slots" for each: the master if it runs ranks, and
# every worker that is ready, also those that came after the job began. This is what elastic
# launchers call as their discovery script.
#
#   discover_hosts.sh --watch SECONDS   says who has not come after that time, and why, each minute
#                                       again, until all have
set -u
. /horovod/generated/settings.sh
export MODE HOSTFILE PORT STATEFULSET NAMESPACE SLOTS
if [ "${1:-}" = --watch ]; then
    sleep "$2" >/dev/null 2>&1 # Python is loaded after that: it would slow the start of the job
fi
exec python3 - "$@" <<'END'
import concurrent.futures
import itertools
import json
import os
import re
import socket
import ssl
import sys
import time
import urllib.request

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
NAME = os.environ["STATEFULSET"]
PORT = int(os.environ["PORT"])


def hosts_of_the_chart():
    with open(os.environ["HOSTFILE"]) as file:
        return [re.match(r"([^\s:]+)(?: slots=|:)(\d+)", line).groups() for line in file]


def exists(host):
    try:
        return bool(socket.getaddrinfo(host, PORT, type=socket.SOCK_STREAM))
    except OSError:
        return False


def hosts_beyond(n_workers):
    """Workers that somebody has scaled the StatefulSet up by."""
    for i in itertools.count(n_workers):
        host = "%s-%d.%s" % (NAME, i, NAME)
        if not exists(host):
            return
        yield host, os.environ["SLOTS"]


def is_ready(host):
    """As the readiness probe of the pod has it; workers that dial have a name when they are ready."""
    if host == NAME + "-master":
        return True
    if os.environ["MODE"] == "native":
        return exists(host)
    try:
        socket.create_connection((host, PORT), 2).close()
        return True
    except OSError:
        return False


def ready_and_not(hosts):
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        states = list(pool.map(is_ready, [host for host, _ in hosts]))
    return ([host for host, state in zip(hosts, states) if state],
            [host for host, state in zip(hosts, states) if not state])


def reasons(pod):
    for condition in pod["status"].get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            yield condition.get("message", "it is not scheduled")
    for container in pod["status"].get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting")
        if waiting:
            yield "%s %s" % (waiting.get("reason", "waiting"), waiting.get("message", ""))


def why(host):
    """What Kubernetes says about a worker, where we may ask."""
    pod = host.partition(".")[0]
    advice = "see: kubectl -n %s describe pod %s" % (os.environ["NAMESPACE"], pod)
    url = "https://%s:%s/api/v1/namespaces/%s/pods/%s" % (
        os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc"),
        os.environ.get("KUBERNETES_SERVICE_PORT", "443"), os.environ["NAMESPACE"], pod)
    try:
        with open(ACCOUNT + "/token") as file:
            bearer = {"Authorization": "Bearer " + file.read()}
        request = urllib.request.Request(url, headers=bearer)
        context = ssl.create_default_context(cafile=ACCOUNT + "/ca.crt")
        answer = urllib.request.urlopen(request, timeout=10, context=context).read()
        return "; ".join(reasons(json.loads(answer.decode()))) or advice
    except (OSError, ValueError, KeyError):
        return advice


def watch():
    while True:
        missing = ready_and_not(hosts_of_the_chart())[1]
        if not missing:
            return
        for host, _ in missing[:8]:
            print("horovod: waiting for %s: %s" % (host, why(host)), file=sys.stderr)
        if len(missing) > 8:
            print("horovod: ... and for %d more" % (len(missing) - 8), file=sys.stderr)
        sys.stderr.flush()
        time.sleep(60)


def main():
    if sys.argv[1:2] == ["--watch"]:
        return watch()
    hosts = hosts_of_the_chart()
    n_workers = len([host for host, _ in hosts if host != NAME + "-master"])
    for host, slots in ready_and_not(hosts + list(hosts_beyond(n_workers)))[0]:
        print("%s:%s" % (host, slots))


main()
END
