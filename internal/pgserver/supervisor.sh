# Arguments: the server's folder, the programs' folder, the superuser's name, then the server's arguments.
# Standard input is a pipe whose end is the end of the parent. A line of it is a signal that stops the server, which is
# then started again. File descriptor 3 is a pipe whose end tells the parent that the first server is gone.
dir=$1 bin=$2 role=$3
shift 3

# Only the parent's end stops this. postgres sets its own handlers for these.
trap '' HUP INT TERM

exec >>"$dir/log" 2>&1
umask 077

server=
start() {
	"$bin/postgres" -D "$dir/data" "$@" </dev/null &
	server=$!
}

if [ -d "$dir/data" ] || "$bin/initdb" -D "$dir/data" -U "$role" -A scram-sha-256 --pwfile="$dir/password" \
	-E UTF8 --locale=C --no-sync --no-instructions 3>&- </dev/null
then
	start "$@"
fi
exec 3>&-

while read -r signal; do
	kill "-$signal" "$server"
	wait "$server"
	start "$@"
done

if [ -n "$server" ]; then
	# A server that has only just begun ignores the first signals, so one is not enough.
	(
		n=0
		while :; do
			case $n in
				[0-9]) kill -INT "$server" ;; # fast: disconnects everybody
				1[0-4]) kill -QUIT "$server" ;; # immediate
				*) kill -KILL "$server" ;;
			esac
			sleep 1
			n=$((n + 1))
		done
	) &
	insist=$!
	wait "$server"
	kill -KILL "$insist"
fi
rm -rf "$dir"
