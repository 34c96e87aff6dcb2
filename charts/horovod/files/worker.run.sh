#!/bin/sh
# A worker: dials the launcher, or waits for it to come by ssh, as its only process.
set -eu
. /horovod/generated/settings.sh
if [ "$MODE" = native ]; then
    exec horovodrun --agent --redial --dial "$STATEFULSET-launcher:$PORT" \
        --secret-file /horovod/secret/secret --agent-name "$POD_NAME.$STATEFULSET"
fi
. /horovod/generated/ssh-setup.sh
mkdir -p /run/sshd 2>/dev/null || true
# Ranks find the environment of the image and of worker.env, as they would without ssh.
env | grep -E '^[A-Za-z_][A-Za-z0-9_]*=' |
    grep -v -E '^(HOME|HOSTNAME|LOGNAME|OLDPWD|PWD|SHELL|SHLVL|TERM|USER|_)=' >"$dir/environment"
cat >"$dir/sshd_config" <<END
Port $PORT
HostKey $dir/id_horovod
AuthorizedKeysFile $dir/authorized_keys
PidFile none
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
PermitUserEnvironment yes
KbdInteractiveAuthentication no
MaxStartups 256:30:512
END
exec "$(command -v sshd || echo /usr/sbin/sshd)" -D -e -f "$dir/sshd_config"
