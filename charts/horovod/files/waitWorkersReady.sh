# Sourced by the process of the master that then runs the command: waits until every worker of the
# hostfile lets us in, all at the same time; names those that do not, the first time after ten
# seconds, and ends the process if there still are some after START_TIMEOUT.
#
# Their pods are made at the same time as ours. Who asks for a name before it is there is told for 5
# to 30 s that there is none, as name servers keep that answer: they get a second's start.
left=$(mktemp -d)
deadline=$(($(date +%s) + START_TIMEOUT))
workers=$(sed -e 's/[ :].*//' -e "/^$STATEFULSET-master\$/d" "$HOSTFILE")
waiting=
/horovod/generated/discover_hosts.sh --watch 10 &
watcher=$!
trap 'kill $watcher $waiting 2>/dev/null; exit 143' TERM
for host in $workers; do
    (
        sleep 1
        until ssh -F "$dir/config" -o ConnectionAttempts=1 "$host" true 2>"$left/$host"; do
            [ "$(date +%s)" -lt "$deadline" ] || exit 1
            sleep 0.3
        done
        rm "$left/$host"
    ) &
    waiting="$waiting $!"
done
for one in $waiting; do
    wait "$one"
done
kill "$watcher" 2>/dev/null
wait "$watcher" 2>/dev/null # or the command would have a child it does not know
if [ -n "$(ls "$left")" ]; then
    echo "horovod: after $START_TIMEOUT s these workers do not answer on port $PORT:" >&2
    for host in $(ls "$left"); do
        echo "  $host: $(tail -n 1 "$left/$host")" >&2
    done
    echo "See why with: kubectl -n $NAMESPACE describe pod ${host%%.*}" >&2
    exit 69
fi
rmdir "$left"
