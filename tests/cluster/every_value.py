# SPDX-License-Identifier: Apache-2.0
"""Every row of the chart's table set to something else, and where a cluster shows it.

Three releases share the rows. A row is: the value's name, what it is set to, the object, the path
in it, and what must be found there, if that is not the value itself. What is found may also have it
as an element or as a part: see holds().
"""
IMAGE = {"repository": "docker.io/uber/horovod", "tag": "0.12.1-tf1.8.0-py3.5",
         "pullPolicy": "Never"}
IMAGE_NAME = "%s:%s" % (IMAGE["repository"], IMAGE["tag"])
SPREAD = [{"maxSkew": 2, "topologyKey": "kubernetes.io/hostname",
           "whenUnsatisfiable": "ScheduleAnyway",
           "labelSelector": {"matchLabels": {"role": "worker"}}}]
AFFINITY = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
    "nodeSelectorTerms": [{"matchExpressions": [{"key": "kubernetes.io/hostname",
                                                 "operator": "Exists"}]}]}}}
FIELD = [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
TOLERATIONS = [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]
LIMITS = {"limits": {"memory": "3Gi"}, "requests": {"memory": "64Mi"}}
OTHER_IMAGE = "registry.invalid/team/other:9"
FEWER = {"limits": {"memory": "2Gi"}, "requests": {"memory": "32Mi"}}
CONTAINER = "spec.containers.0."
MOUNTS = CONTAINER + "volumeMounts"
SETTINGS = "data.settings.sh"


def of_pods(side, pod):
    """Rows that workers and master have alike."""
    return [
        (side + ".image.repository", IMAGE["repository"], pod, CONTAINER + "image", IMAGE_NAME),
        (side + ".image.tag", IMAGE["tag"], pod, CONTAINER + "image", IMAGE_NAME),
        (side + ".image.pullPolicy", "Never", pod, CONTAINER + "imagePullPolicy"),
        (side + ".env", {"SIDE": side}, pod, CONTAINER + "env", {"name": "SIDE", "value": side}),
        (side + ".extraEnv", FIELD, pod, CONTAINER + "env", {
            "name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName",
                                                       "apiVersion": "v1"}}}),
        (side + ".privileged", True, pod, CONTAINER + "securityContext.privileged"),
        (side + ".resources", LIMITS, pod, CONTAINER + "resources"),
        (side + ".nodeSelector", {"kubernetes.io/os": "linux"}, pod, "spec.nodeSelector"),
        (side + ".affinity", AFFINITY, pod, "spec.affinity"),
        (side + ".tolerations", TOLERATIONS, pod, "spec.tolerations", TOLERATIONS[0]),
        (side + ".priorityClassName", "hvd-test", pod, "spec.priorityClassName"),
        (side + ".podAnnotations", {"example.com/note": side}, pod,
         "metadata.annotations", {"example.com/note": side}),
        (side + ".podLabels", {"team": side}, pod, "metadata.labels", {"team": side}),
    ]


NATIVE = [
    ("useHostNetwork", True, "worker", "spec.hostNetwork"),
    ("useHostPID", True, "worker", "spec.hostPID"),
    ("native.port", 23999, "configmap", SETTINGS, "PORT=23999\n"),
    ("native.existingSecret", "hvd-secret", "worker", "spec.volumes",
     {"name": "horovod-secret", "secret": {"secretName": "hvd-secret", "defaultMode": 0o440}}),
    ("worker.number", 2, "statefulset", "spec.replicas"),
    ("worker.slots", 2, "configmap", "data.hostfile",
     "mnist-trainer-1.mnist-trainer slots=2"),
    ("worker.podManagementPolicy", "OrderedReady", "statefulset", "spec.podManagementPolicy"),
    ("worker.release", False, "configmap", SETTINGS, "RELEASE_WORKERS=no\n"),
    ("worker.topologySpreadConstraints", SPREAD, "worker", "spec.topologySpreadConstraints"),
    ("worker.terminationGracePeriodSeconds", 7, "worker", "spec.terminationGracePeriodSeconds"),
    *of_pods("worker", "worker"),
    *of_pods("master", "master"),
    ("master.runsRanks", False, "configmap", "data.hostfile",
     "mnist-trainer-0.mnist-trainer slots=2\nmnist-trainer-1.mnist-trainer slots=2"),
    ("master.args", ["horovodrun -np 4 sh -c",
                     "'echo rank $HOROVOD_RANK side $SIDE on $NODE: $(df -m /dev/shm |",
                     "tail -n 1)'"],
     "master", CONTAINER + "args"),
    ("master.backoffLimit", 1, "job", "spec.backoffLimit"),
    ("master.activeDeadlineSeconds", 900, "job", "spec.activeDeadlineSeconds"),
    ("master.ttlSecondsAfterFinished", 600, "job", "spec.ttlSecondsAfterFinished"),
    ("master.startTimeout", 77, "configmap", SETTINGS, "START_TIMEOUT=77\n"),
    ("shmSize", "99Mi", "worker", "spec.volumes",
     {"name": "horovod-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "99Mi"}}),
    ("volumes", [{"name": "data", "emptyDir": {}}], "worker", "spec.volumes",
     {"name": "data", "emptyDir": {}}),
    ("volumeMounts", [{"name": "data", "mountPath": "/data"}], "master", MOUNTS,
     {"name": "data", "mountPath": "/data"}),
    ("imagePullSecrets", [{"name": "registry"}], "master", "spec.imagePullSecrets"),
    ("serviceAccount.name", "hvd-account", "master", "spec.serviceAccountName"),
    ("serviceAccount.annotations", {"example.com/role": "trainer"}, "serviceaccount",
     "metadata.annotations", {"example.com/role": "trainer"}),
    ("dashboard.enabled", True, "configmap", SETTINGS, "DASHBOARD=8090\n"),
    ("dashboard.port", 8090, "configmap", SETTINGS, "DASHBOARD=8090\n"),
    ("dashboard.expose", True, "master", CONTAINER + "ports",
     {"name": "dashboard", "containerPort": 8090, "protocol": "TCP"}),
    ("dashboard.annotations", True, "master", "metadata.annotations",
     {"prometheus.io/scrape": "true", "prometheus.io/port": "8090"}),
    ("dashboard.podMonitor.enabled", True, "podmonitor", "metadata.name", "mnist-trainer"),
    ("dashboard.podMonitor.interval", "7s", "podmonitor",
     "spec.podMetricsEndpoints.0.interval"),
    ("dashboard.podMonitor.labels", {"release": "prometheus"}, "podmonitor", "metadata.labels",
     {"release": "prometheus"}),
    ("networkPolicy.enabled", True, "networkpolicy", "metadata.name", "mnist-trainer"),
    ("podDisruptionBudget.enabled", True, "poddisruptionbudget", "spec.maxUnavailable", 0),
    ("nameOverride", "trainer", "worker", "metadata.labels.app"),
]

MPIRUN = [
    ("resources", LIMITS, "worker", CONTAINER + "resources"),
    ("ssh.port", 2222, "worker", CONTAINER + "ports.0.containerPort"),
    ("ssh.useSecrets", True, "worker", CONTAINER + "ports.0.name", "ssh"),
    ("ssh.hostKey", None, "secret", "data.host-key"),  # made by the test, as base64 in the Secret
    ("ssh.hostKeyPub", None, "secret", "data.host-key-pub"),
    ("worker.number", 1, "statefulset", "spec.replicas"),
    ("master.slots", 2, "configmap", "data.hostfile", "my-job-master slots=2\n"),
    ("driver", {"args": ["mpirun -np 3 --allow-run-as-root sh -c 'echo on $(hostname)'"]}, "master",
     CONTAINER + "args", "mpirun -np 3 --allow-run-as-root sh -c 'echo on $(hostname)'"),
    ("podSecurityContext", {"runAsUser": 0, "fsGroup": 4321}, "worker", "spec.securityContext"),
    ("containerSecurityContext", {"readOnlyRootFilesystem": False}, "master",
     CONTAINER + "securityContext"),
    ("test.image", IMAGE_NAME, "test", CONTAINER + "image"),
    ("test.resources", FEWER, "test", CONTAINER + "resources"),
    ("fullnameOverride", "my-job", "job", "metadata.name"),
]

# Whose pods stay Pending: nobody schedules them.
ELSEWHERE = [
    ("mode", "ssh", "configmap", SETTINGS, "MODE=ssh\n"),
    ("image.registry", "registry.invalid/team", "worker", CONTAINER + "image", OTHER_IMAGE),
    ("image.repository", "other", "master", CONTAINER + "image", OTHER_IMAGE),
    ("image.tag", "9", "worker", CONTAINER + "image", OTHER_IMAGE),
    ("image.pullPolicy", "Never", "worker", CONTAINER + "imagePullPolicy"),
    ("ssh.existingSecret", "hvd-keys", "worker", "spec.volumes",
     {"name": "horovod-secret", "secret": {
         "secretName": "hvd-keys", "defaultMode": 0o440,
         "items": [{"key": "host-key", "path": "id_rsa"},
                   {"key": "host-key-pub", "path": "authorized_keys"}]}}),
    ("dashboard.enabled", True, "configmap", SETTINGS, "DASHBOARD=8080\n"),
    ("dashboard.existingSecret", "hvd-page", "master", "spec.volumes",
     {"name": "horovod-dashboard", "secret": {"secretName": "hvd-page", "defaultMode": 0o440}}),
    ("worker.number", 1, "statefulset", "spec.replicas"),
    ("rdma.resource", "rdma/hca", "worker", CONTAINER + "securityContext.capabilities.add",
     "IPC_LOCK"),
    ("rdma.count", 2, "worker", CONTAINER + "resources.limits", {"rdma/hca": "2"}),
    ("schedulerName", "nobody", "worker", "spec.schedulerName"),
    ("serviceAccount.create", False, "master", "spec.serviceAccountName", "default"),
]
RELEASES = {"native": NATIVE, "mpirun": MPIRUN, "elsewhere": ELSEWHERE}


def values_of(rows):
    """-> what helm is given"""
    values = {}
    for name, value, *_ in rows:
        *path, last = name.split(".")
        inner = values
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return values


def holds(found, wanted):
    """Whether it is that, or has it: as an element, as a part of a text, or as some of its keys."""
    if found == wanted:
        return True
    if isinstance(found, list):
        return any(holds(one, wanted) for one in found)
    if isinstance(found, dict) and isinstance(wanted, dict):
        return all(key in found and holds(found[key], value) for key, value in wanted.items())
    return isinstance(found, str) and isinstance(wanted, str) and wanted in found


def at(value, path):
    """What is at a path of keys and numbers; keys of files have dots."""
    while path:
        if isinstance(value, dict) and path in value:
            return value[path]
        part, _, path = path.partition(".")
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value
