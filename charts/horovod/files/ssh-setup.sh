# Sourced by the scripts beside it: ssh for this user with the release's key, which is also the key
# of every host of the release, so that ssh knows whom it talks to. Nothing outside of ~/.ssh and
# /tmp is written.
key=/etc/secret-volume/id_rsa
dir=${HOME:-/root}/.ssh
mkdir -p "$dir" 2>/dev/null && [ -w "$dir" ] || { dir=/tmp/horovod-ssh; mkdir -p "$dir"; }
chmod 700 "$dir"
umask 077
cp "$key" "$dir/id_horovod"
chmod 600 "$dir/id_horovod"
if ! ssh-keygen -y -f "$dir/id_horovod" >"$dir/id_horovod.pub" </dev/null; then
    echo "horovod: ssh.hostKey is not a private key that this image's ssh can read" >&2
    exit 78
fi
cp "$dir/id_horovod.pub" "$dir/authorized_keys"
[ ! -f /etc/secret-volume/authorized_keys ] ||
    cat /etc/secret-volume/authorized_keys >>"$dir/authorized_keys"
printf '* %s\n' "$(cut -d' ' -f1,2 "$dir/id_horovod.pub")" >"$dir/known_hosts_horovod"
cat >"$dir/config" <<END
Host *
    Port $PORT
    IdentityFile $dir/id_horovod
    UserKnownHostsFile $dir/known_hosts_horovod
    StrictHostKeyChecking yes
    ConnectTimeout 2
    ConnectionAttempts 10
    LogLevel ERROR
END
export OMPI_MCA_plm_rsh_args="-F $dir/config"
export HOROVODRUN_SSH_COMMAND="ssh -F $dir/config"
