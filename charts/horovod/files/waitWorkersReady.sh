# Sourced by the process of the master that then runs the command: waits until every worker of the
# hostfile lets us in, all at the same time; names those that do not at the deadline, and ends the
# process.
left=$(mktemp -d)
workers=$(sed -e 's/[ :].*//' -e "/^$STATEFULSET-master\$/d" "$HOSTFILE")
waiting=
trap 'kill $waiting 2>/dev/null; exit 143' TERM
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
    wait "$one"
done
if [ -n "$(ls "$left")" ]; then
    echo "horovod: after $START_TIMEOUT s these workers do not answer on port $PORT:" >&2
    for host in $(ls "$left"); do
        echo "  $host: $(tail -n 1 "$left/$host")" >&2
    done
    echo "See why with: kubectl -n $NAMESPACE describe pod ${host%%.*}" >&2
    exit 69
fi
rmdir "$left"
