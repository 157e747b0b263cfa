# Runs prted so that others of its host reach neither its ports nor the files of its session:
# sh prted_with_door.sh LIBRARY prted ARGUMENT...
#
# The launcher of Open MPI 5 starts this on each other host of a job, also where no shell reads the words.
door=$1
shift
if [ -r "$door" ]; then
    LD_PRELOAD=${LD_PRELOAD:+$LD_PRELOAD:}$door
    export LD_PRELOAD
else
    echo "ringcomm run: host $(uname -n) has no $door: other users of it reach the ports of its prted." \
        "Install ringcomm there as on this host" >&2
fi

# The session is in prted.PID of TMPDIR, also if that is there and another user's. prted passes on to those that it
# starts where its own is; of two places, the last one counts (measured with Open MPI 5.0.11).
has_place=${PRTE_MCA_prte_tmpdir_base-}${PRTE_MCA_prte_remote_tmpdir_base-}
before=
for each; do
    case $before:$each in
    *tmpdir_base:*/ringcomm-prted-*) ;;
    prte_tmpdir_base:* | prte_remote_tmpdir_base:*) has_place=yes ;;
    *:--daemonize) has_place=yes ;; # nobody would remove a new one
    esac
    before=$each
done
[ -n "$has_place" ] && exec "$@"

parent=${TMPDIR:-/tmp}
case $(ls -ld "$parent/.") in
????????w[!tT]*) parent=/dev/shm ;; # there every user could put another in its place
esac
if ! session=$(mktemp -d "$parent/ringcomm-prted-XXXXXXXXXX"); then
    echo "ringcomm run: host $(uname -n): no folder can be made in $parent: other users of it can change" \
        "the files of its prted. Set TMPDIR there" >&2
    exec "$@"
fi
trap : HUP INT TERM # prted ends at these, and then this
"$@" --prtemca prte_remote_tmpdir_base "$session"
code=$?
rm -rf "$session"
exit "$code"
