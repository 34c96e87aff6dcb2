{{/* SPDX-License-Identifier: Apache-2.0

Names, and what several templates say alike. Everything that depends on the values is worked out
once here: horovod.master is the values of the master with those of `driver` laid over them.
*/}}

{{- define "horovod.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Pods are called <fullname>-<i> and <fullname>-master, labels end at 63: some room is left. */}}
{{- define "horovod.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride | trunc 45 | trimSuffix "-" -}}
{{- end -}}

{{/* The template of a Job cannot be changed: an upgrade makes the next one. */}}
{{- define "horovod.job" -}}
{{- $full := include "horovod.fullname" . -}}
{{- .Release.IsUpgrade | ternary (printf "%s-r%d" $full .Release.Revision) $full -}}
{{- end -}}

{{- define "horovod.master" -}}
{{- $master := mergeOverwrite (deepCopy .Values.master) (deepCopy (default dict .Values.driver)) -}}
{{- $apart := include "horovod.masterApart" (dict "master" $master "root" .) -}}
{{- if and $apart (not $master.affinity) -}}
  {{- $labels := set (include "horovod.selector" . | fromYaml) "role" "worker" -}}
  {{- $term := dict "labelSelector" (dict "matchLabels" $labels) "topologyKey" "kubernetes.io/hostname" -}}
  {{- $affinity := dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term) -}}
  {{- if eq $apart "preferred" -}}
    {{- $affinity = dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term)) -}}
  {{- end -}}
  {{- $_ := set $master "affinity" (dict "podAntiAffinity" $affinity) -}}
{{- end -}}
{{- toYaml $master -}}
{{- end -}}

{{/* Whether the master shall have a node without a worker, as mpirun takes two names for one machine
for a mistake: "preferred", as master.run.sh can make one name of them, whose ranks then run in the
master's pod; "required" where these would lack the GPUs of the worker's. (dict "master" ... "root" $) */}}
{{- define "horovod.masterApart" -}}
{{- $mpi := has (include "horovod.mode" .root) (list "openmpi" "intelmpi") -}}
{{- if and $mpi .root.Values.useHostNetwork .master.runsRanks -}}
{{- include "horovod.gpus" (dict "own" .root.Values.worker "all" .root.Values) | ne "0" | ternary "required" "preferred" -}}
{{- end -}}
{{- end -}}

{{- define "horovod.mode" -}}
{{- $ssh := or .Values.ssh.useSecrets .Values.ssh.existingSecret -}}
{{- default (ternary "openmpi" "native" (not (not $ssh))) .Values.mode -}}
{{- end -}}

{{/* "true" where sshd runs in the pods. */}}
{{- define "horovod.ssh" -}}
{{- if ne (include "horovod.mode" .) "native" -}}true{{- end -}}
{{- end -}}

{{- define "horovod.port" -}}
{{- ternary .Values.ssh.port .Values.native.port (eq (include "horovod.ssh" .) "true") -}}
{{- end -}}

{{- define "horovod.labels" -}}
app: {{ include "horovod.name" . }}
chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
release: {{ .Release.Name }}
heritage: {{ .Release.Service }}
app.kubernetes.io/name: {{ include "horovod.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* As in the first charts: it cannot be changed on an upgrade. */}}
{{- define "horovod.selector" -}}
app: {{ include "horovod.name" . }}
release: {{ .Release.Name }}
heritage: {{ .Release.Service }}
{{- end -}}

{{/* An image of its own has its own tag, and its registry in its name. */}}
{{- define "horovod.image" -}}
{{- $common := .root.Values.image -}}
{{- $version := .root.Chart.AppVersion -}}
{{- if .image.repository -}}
{{- printf "%s:%s" .image.repository (default $version .image.tag | toString) -}}
{{- else -}}
{{- $name := $common.repository -}}
{{- with $common.registry -}}
{{- $name = printf "%s/%s" (trimSuffix "/" .) $name -}}
{{- end -}}
{{- printf "%s:%s" $name (coalesce .image.tag $common.tag $version | toString) -}}
{{- end -}}
{{- end -}}

{{- define "horovod.pullPolicy" -}}
{{- default .root.Values.image.pullPolicy .image.pullPolicy -}}
{{- end -}}

{{- define "horovod.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "horovod.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* The secret of either kind: given, or made for the release and kept on upgrades. */}}
{{- define "horovod.secretName" -}}
{{- $given := ternary .Values.ssh.existingSecret .Values.native.existingSecret (eq (include "horovod.ssh" .) "true") -}}
{{- default (include "horovod.fullname" .) $given -}}
{{- end -}}

{{/* Of the page: its token, and its certificate. */}}
{{- define "horovod.dashboardSecret" -}}
{{- default (printf "%s-dashboard" (include "horovod.fullname" .)) .Values.dashboard.existingSecret -}}
{{- end -}}

{{/* What the page is called inside the cluster. */}}
{{- define "horovod.dashboardHost" -}}
{{- printf "%s-dashboard.%s.svc" (include "horovod.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/* Annotations of the master's pod: (dict "master" ... "root" $). */}}
{{- define "horovod.masterAnnotations" -}}
{{- $annotations := deepCopy (default dict .master.podAnnotations) -}}
{{- with .root.Values.dashboard -}}
{{- if and .enabled .annotations -}}
  {{- $ours := dict "prometheus.io/scrape" "true" "prometheus.io/path" "/metrics" "prometheus.io/scheme" "https" -}}
  {{- $annotations = merge $annotations $ours (dict "prometheus.io/port" (.port | toString)) -}}
{{- end -}}
{{- end -}}
{{- with $annotations -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/* GPUs of a pod: (dict "own" worker-or-master-values "all" .Values). */}}
{{- define "horovod.gpus" -}}
{{- $resources := coalesce .own.resources .all.resources | default dict -}}
{{- $gpus := 0 -}}
{{- range $name, $count := $resources.limits -}}
  {{- if regexMatch "/(gpu|mig-.*)$|^gpu.intel.com/(i915|xe)$" $name -}}{{- $gpus = add $gpus ($count | int) -}}{{- end -}}
{{- end -}}
{{- $gpus -}}
{{- end -}}

{{/* Ranks of a pod, of the same dict. */}}
{{- define "horovod.slots" -}}
{{- coalesce (int .own.slots) (include "horovod.gpus" . | int) 1 -}}
{{- end -}}

{{/* One line of the hostfile, in the form the mode's launcher reads. */}}
{{- define "horovod.host" -}}
{{- if eq .mode "intelmpi" -}}{{ .host }}:{{ .slots }}{{- else -}}{{ .host }} slots={{ .slots }}{{- end -}}
{{- end -}}

{{- define "horovod.hostfile" -}}
{{- $full := include "horovod.fullname" . -}}
{{- $mode := include "horovod.mode" . -}}
{{- $master := include "horovod.master" . | fromYaml -}}
{{- if $master.runsRanks -}}
{{ include "horovod.host" (dict "mode" $mode "host" (printf "%s-master" $full) "slots" (include "horovod.slots" (dict "own" $master "all" .Values))) }}
{{- end }}
{{- $slots := include "horovod.slots" (dict "own" .Values.worker "all" .Values) }}
{{- range $i := until (int .Values.worker.number) }}
{{ include "horovod.host" (dict "mode" $mode "host" (printf "%s-%d.%s" $full $i $full) "slots" $slots) }}
{{- end }}
{{- end -}}

{{/* A map of variables as a container's env. */}}
{{- define "horovod.env" -}}
{{- range $name, $value := .env }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Names of a worker's own variables, which its ranks keep where the master has them too. */}}
{{- define "horovod.keptEnv" -}}
{{- $names := keys .env | sortAlpha }}
{{- range .extraEnv }}
{{- $names = append $names .name }}
{{- end }}
{{- join "," $names }}
{{- end -}}

{{/* Resources of a pod, with its RDMA device: (dict "own" ... "all" .Values). */}}
{{- define "horovod.resources" -}}
{{- $resources := coalesce .own.resources .all.resources | default dict | deepCopy -}}
{{- if .all.rdma.resource -}}
  {{- $device := dict .all.rdma.resource .all.rdma.count -}}
  {{- $_ := set $resources "limits" (merge (default dict $resources.limits) $device) -}}
  {{- $_ := set $resources "requests" (merge (default dict $resources.requests) $device) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* "true" where pods run as root: sshd on a low port, and added capabilities, which reach no other
user. Else pods fit the restricted Pod Security Standard. */}}
{{- define "horovod.root" -}}
{{- if or (include "horovod.ssh" .) .Values.rdma.resource -}}true{{- end -}}
{{- end -}}

{{- define "horovod.podSecurity" -}}
{{- if not (kindIs "invalid" .Values.podSecurityContext) -}}
{{- toYaml .Values.podSecurityContext -}}
{{- else if not (include "horovod.root" .) -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile:
  type: RuntimeDefault
{{- else -}}
runAsUser: 0
runAsGroup: 0
{{- end -}}
{{- end -}}

{{/* (dict "own" ... "root" $): of a container. */}}
{{- define "horovod.containerSecurity" -}}
{{- $given := .root.Values.containerSecurityContext -}}
{{- $context := dict -}}
{{- if not (kindIs "invalid" $given) -}}
  {{- $context = deepCopy $given -}}
{{- else if not (include "horovod.root" .root) -}}
  {{- $context = dict "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL")) -}}
{{- end -}}
{{- if .root.Values.rdma.resource -}}
  {{- $capabilities := default dict $context.capabilities -}}
  {{- $_ := set $capabilities "add" (append (default list $capabilities.add) "IPC_LOCK" | uniq) -}}
  {{- $_ := set $context "capabilities" $capabilities -}}
{{- end -}}
{{- if .own.privileged -}}
  {{- $context = dict "privileged" true -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* What both kinds of pods have: (dict "own" ... "root" $ "files" {name: mode} "ownsFiles" bool). */}}
{{- define "horovod.podCommon" -}}
{{- $v := .root.Values -}}
{{- if $v.useHostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- if $v.useHostPID }}
hostPID: true
{{- end }}
{{- with $v.imagePullSecrets }}
imagePullSecrets:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with $v.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .own.nodeSelector }}
nodeSelector:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with .own.affinity }}
affinity:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations:
{{ toYaml . | indent 2 }}
{{- end }}
securityContext:
{{ include "horovod.podSecurity" .root | indent 2 }}
volumes:
  - name: horovod-cm
    configMap:
      name: {{ include "horovod.fullname" .root }}
      items:
{{- range $key, $mode := .files }}
        - key: {{ $key }}
          path: {{ regexReplaceAll "^(master|worker)\\." $key "" }}
          mode: {{ $mode }}
{{- end }}
  - name: horovod-secret
    secret:
      secretName: {{ include "horovod.secretName" .root }}
      defaultMode: 0440
{{- if include "horovod.ssh" .root }}
      items:
        - key: host-key
          path: id_rsa
{{- if or $v.ssh.hostKeyPub $v.ssh.existingSecret }}
        - key: host-key-pub
          path: authorized_keys
{{- end }}
{{- end }}
{{- if .ownsFiles }}
  - name: horovod-generated
    emptyDir: {}
{{- end }}
{{- with $v.shmSize }}
  - name: horovod-shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ . }}
{{- end }}
{{- with $v.volumes }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- end -}}

{{/* (dict "generated" name-of-the-volume "root" $) */}}
{{- define "horovod.mounts" -}}
- name: {{ .generated }}
  mountPath: /horovod/generated
{{- with .root }}
- name: horovod-secret
  mountPath: {{ ternary "/etc/secret-volume" "/horovod/secret" (eq (include "horovod.ssh" .) "true") }}
  readOnly: true
{{- if .Values.shmSize }}
- name: horovod-shm
  mountPath: /dev/shm
{{- end }}
{{- with .Values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What can be wrong with the values though each of them is allowed. */}}
{{- define "horovod.check" -}}
{{- $mode := include "horovod.mode" . -}}
{{- if and .Values.ssh.useSecrets (eq $mode "native") -}}
{{- fail "mode is native, which uses no ssh, but ssh.useSecrets is true: leave mode empty, or set it to openmpi, intelmpi or ssh" -}}
{{- end -}}
{{- if and .Values.ssh.hostKey (not .Values.ssh.hostKeyPub) -}}
{{- fail "ssh.hostKey is given without ssh.hostKeyPub: give both, or neither to have a pair made for the release" -}}
{{- end -}}
{{- if and .Values.ssh.hostKeyPub (not .Values.ssh.hostKey) -}}
{{- fail "ssh.hostKeyPub is given without ssh.hostKey: give both, or neither to have a pair made for the release" -}}
{{- end -}}
{{- if and .Values.useHostNetwork (include "horovod.ssh" .) (eq (int .Values.ssh.port) 22) -}}
{{- fail "useHostNetwork with ssh.port 22 would meet the sshd of the node: choose another ssh.port, for example 32222" -}}
{{- end -}}
{{- with .Values.dashboard -}}
{{- if and .enabled (not .expose) (or .annotations .podMonitor.enabled) -}}
{{- fail "dashboard.podMonitor and dashboard.annotations are for a Prometheus in the cluster, which does not reach a page without dashboard.expose: set it to true" -}}
{{- end -}}
{{- end -}}
{{- if not (include "horovod.hostfile" . | trim) -}}
{{- fail "worker.number is 0 and master.runsRanks is false, which leaves no host for ranks: ask for a worker, or let the master run them" -}}
{{- end -}}
{{- end -}}

{{/* Values of earlier charts that work, and what is better now: a list of sentences, for NOTES. */}}
{{- define "horovod.oldValues" -}}
{{- $master := include "horovod.master" . | fromYaml -}}
{{- $said := list -}}
{{- if and .Values.ssh.useSecrets (not .Values.mode) -}}
  {{- $said = append $said "ssh.useSecrets is a value of earlier charts and still runs sshd in the workers. Without it, keys and sshd are not needed: master.args can be \"horovodrun -np N python train.py\". For mpirun, mode=openmpi makes a pair of keys for the release." -}}
{{- end -}}
{{- if .Values.driver -}}
  {{- $said = append $said "driver is the name that the chart of the Horovod repository has for master: its values are used as those of master." -}}
{{- end -}}
{{- range $key, $image := dict "worker.image" .Values.worker.image "master.image" $master.image -}}
  {{- if regexMatch "(^|/)uber/horovod$" (default "" $image.repository) -}}
    {{- $said = append $said (printf "%s.repository is %s, whose last image has Horovod 0.12 and Python 3.5: an image of your own is made by deploy/docker/Dockerfile or Dockerfile.spark." $key $image.repository) -}}
  {{- end -}}
{{- end -}}
{{- with $said -}}
{{- toYaml (prepend . "Old values:") -}}
{{- else -}}
[]
{{- end -}}
{{- end -}}
