# SPDX-License-Identifier: Apache-2.0
"""Values the chart must take, and values it must refuse with the name of the key."""

PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPublicKeyOfTheTests tests"
PRIVATE = "-----BEGIN OPENSSH PRIVATE KEY-----\nnot a key, but it looks like one\n" \
          "-----END OPENSSH PRIVATE KEY-----"
KEYS = {"useSecrets": True, "hostKey": PRIVATE, "hostKeyPub": PUBLIC}
MPIRUN = "mpirun -np 3 --hostfile /horovod/generated/hostfile --mca orte_keep_fqdn_hostnames t " \
         "--allow-run-as-root --display-map --tag-output --timestamp-output sh -c 'python train.py'"
OLD_IMAGE = {"repository": "uber/horovod", "tag": "0.12.1-tf1.8.0-py3.5"}
GPUS = {"limits": {"nvidia.com/gpu": 4}}

GOOD = {
    "defaults": {},
    "seed-gpu": {"ssh": KEYS, "worker": {"number": 2, "image": OLD_IMAGE},
                 "master": {"image": OLD_IMAGE, "args": [MPIRUN]}},
    "seed-host-network": {"useHostNetwork": True, "ssh": dict(KEYS, port=32222),
                          "worker": {"number": 2, "image": OLD_IMAGE},
                          "master": {"image": OLD_IMAGE, "args": [MPIRUN]}},
    "native-two": {"worker": {"number": 2}, "master": {"args": ["horovodrun -np 3 python t.py"]}},
    "native-host-network": {"useHostNetwork": True, "worker": {"number": 3}},
    "as-the-first-table-has-them": {"master": {"args": {}, "env": {}}, "worker": {"env": {}},
                                    "resources": {}, "ssh": {"port": 22, "useSecrets": False}},
    "driver-alias": {"driver": {"args": ["horovodrun", "python", "t.py"], "env": {"A": 1}}},
    "generated-keys": {"mode": "openmpi", "worker": {"number": 1}},
    "existing-ssh-secret": {"ssh": {"existingSecret": "my-keys"}},
    "existing-native-secret": {"native": {"existingSecret": "mine", "port": 5000}},
    "intelmpi": {"mode": "intelmpi", "worker": {"number": 2, "slots": 2}},
    "horovodrun-over-ssh": {"mode": "ssh", "ssh": KEYS},
    "gpu-slots": {"resources": GPUS, "worker": {"number": 2}},
    "gpu-workers-only": {"worker": {"number": 2, "resources": GPUS},
                         "master": {"runsRanks": False}},
    "master-only": {"worker": {"number": 0}},
    "environment": {"worker": {"env": {"W": "1", "FLAG": True}},
                    "master": {"env": {"M": "two words"},
                               "extraEnv": [{"name": "NODE", "valueFrom": {
                                   "fieldRef": {"fieldPath": "spec.nodeName"}}}]}},
    "placement": {"worker": {"nodeSelector": {"pool": "gpu"},
                             "tolerations": [{"key": "gpu", "operator": "Exists"}],
                             "affinity": {"podAntiAffinity": {}},
                             "topologySpreadConstraints": [{
                                 "maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
                                 "whenUnsatisfiable": "DoNotSchedule",
                                 "labelSelector": {"matchLabels": {"role": "worker"}}}],
                             "priorityClassName": "high", "podAnnotations": {"a": "b"},
                             "podLabels": {"team": "vision"}},
                  "master": {"nodeSelector": {"pool": "cpu"}, "podAnnotations": {"c": "d"}},
                  "schedulerName": "volcano", "imagePullSecrets": [{"name": "registry"}]},
    "image-of-its-own": {"image": {"registry": "registry.example.com/team/", "tag": 2},
                         "worker": {"number": 1, "image": {"pullPolicy": "Always"}},
                         "master": {"image": {"repository": "example.org/master", "tag": "7"}}},
    "policies": {"networkPolicy": {"enabled": True}, "podDisruptionBudget": {"enabled": True}},
    "dashboard": {"dashboard": {"enabled": True}, "worker": {"number": 1}},
    "dashboard-for-prometheus": {
        "dashboard": {"enabled": True, "expose": True, "annotations": True,
                      "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
        "master": {"podAnnotations": {"c": "d"}}, "networkPolicy": {"enabled": True},
        "worker": {"number": 1}},
    "dashboard-own-secret": {"mode": "ssh", "ssh": KEYS, "worker": {"number": 1}, "dashboard": {
        "enabled": True, "expose": True, "port": 9090, "existingSecret": "page"}},
    "limits-of-the-job": {"master": {"backoffLimit": 3, "activeDeadlineSeconds": 3600,
                                     "ttlSecondsAfterFinished": 0}},
    "rdma": {"rdma": {"resource": "rdma/hca", "count": 2}, "shmSize": "8Gi"},
    "volumes": {"volumes": [{"name": "data", "emptyDir": {}}],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}], "shmSize": ""},
    "workers-stay": {"worker": {"release": False}, "serviceAccount": {"create": False,
                                                                      "name": "trainer"}},
    "privileged": {"worker": {"privileged": True}, "master": {"privileged": True},
                   "useHostPID": True},
    "own-security": {"podSecurityContext": {"runAsUser": 2000, "runAsNonRoot": True},
                     "containerSecurityContext": {"readOnlyRootFilesystem": True}},
    "long-names": {"fullnameOverride": "a-very-long-name-for-a-job-that-trains-a-very-large-model"},
}

# name: values, what the message must have
BAD = {
    "no such value": ({"wroker": {"number": 2}}, "wroker"),
    "no such value inside": ({"worker": {"replicas": 2}}, "replicas"),
    "mode": ({"mode": "mvapich"}, "mode"),
    "port as text": ({"ssh": {"port": "22"}}, "ssh.port"),
    "port too high": ({"ssh": {"port": 70000}}, "ssh.port"),
    "privileged port for agents": ({"native": {"port": 22}}, "native.port"),
    "half a worker": ({"worker": {"number": 2.5}}, "worker.number"),
    "fewer than none": ({"worker": {"number": -1}}, "worker.number"),
    "nobody to run ranks": ({"worker": {"number": 0}, "master": {"runsRanks": False}},
                            "worker.number is 0 and master.runsRanks is false"),
    "nor under its other name": ({"worker": {"number": 0}, "driver": {"runsRanks": False}},
                                 "worker.number is 0 and master.runsRanks is false"),
    "args as text": ({"master": {"args": "mpirun"}}, "master.args"),
    "args as map": ({"master": {"args": {"mpirun": "-np 3"}}}, "master.args"),
    "env as list": ({"worker": {"env": [{"name": "A", "value": "1"}]}}, "worker.env"),
    "env name": ({"master": {"env": {"NOT A NAME": "1"}}}, "NOT A NAME"),
    "pull policy": ({"worker": {"image": {"pullPolicy": "Sometimes"}}}, "worker.image.pullPolicy"),
    "pod management": ({"worker": {"podManagementPolicy": "Both"}}, "worker.podManagementPolicy"),
    "not a key": ({"ssh": {"useSecrets": True, "hostKey": "/root/.ssh/id_rsa",
                           "hostKeyPub": PUBLIC}}, "ssh.hostKey"),
    "half a pair": ({"ssh": {"useSecrets": True, "hostKey": PRIVATE}}, "ssh.hostKeyPub"),
    "the other half": ({"ssh": {"useSecrets": True, "hostKeyPub": PUBLIC}},
                       "ssh.hostKeyPub is given without ssh.hostKey:"),
    "two ways": ({"mode": "native", "ssh": KEYS}, "ssh.useSecrets"),
    "sshd of the node": ({"useHostNetwork": True, "ssh": KEYS}, "ssh.port"),
    "shared memory": ({"shmSize": "lots"}, "shmSize"),
    "no deadline": ({"master": {"startTimeout": 0}}, "master.startTimeout"),
    "an empty section": ({"worker": None}, "worker"),
    "no number": ({"worker": {"number": None}}, "number"),
    "no image": ({"image": {"repository": ""}}, "image.repository"),
    "a page Prometheus cannot reach": ({"dashboard": {"enabled": True, "podMonitor": {
        "enabled": True}}}, "dashboard.expose"),
    "port of the page": ({"dashboard": {"port": 80}}, "dashboard.port"),
    "resources": ({"resources": {"limit": {"cpu": 1}}}, "limit"),
}
