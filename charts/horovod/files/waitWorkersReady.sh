#!/bin/sh
# Waits until every worker of the hostfile lets us in, all at the same time; names those that do
# not, the first time after ten seconds.
set -eu
. /horovod/generated/settings.sh
. /horovod/generated/ssh-setup.sh
left=$(mktemp -d)
deadline=$(($(date +%s) + START_TIMEOUT))
workers=$(sed -e 's/[ :].*//' -e "/^$STATEFULSET-master\$/d" "$HOSTFILE")
/horovod/generated/discover_hosts.sh --watch 10 &
watcher=$!
waiting=
for host in $workers; do
    (
        until ssh -F "$dir/config" -o ConnectionAttempts=1 "$host" true 2>"$left/$host"; do
            [ "$(date +%s)" -lt "$deadline" ] || exit 1
            sleep 0.3
        done
        rm "$left/$host"
    ) &
    waiting="$waiting $!"
done
for one in $waiting; do
    wait "$one" || true
done
kill "$watcher" 2>/dev/null || true
[ -n "$(ls "$left")" ] || exit 0
echo "horovod: after $START_TIMEOUT s these workers do not answer on port $PORT:" >&2
for host in $(ls "$left"); do
    echo "  $host: $(tail -n 1 "$left/$host")" >&2
done
echo "See why with: kubectl -n $NAMESPACE describe pod ${host%%.*}" >&2
exit 69
