# shellcheck shell=bash disable=SC2034,SC2154
# What this host is like: cores, devices, the interface to the master, its clock, old runs; for a
# preflight also where the run will write, what it needs, and what its Python is like.
say clock "$EPOCHREALTIME"
say boot_id "$boot"

# Files are read in one piece: bash takes as long for a line as for a whole file.
all_of() { # $1: file; sets `all`
    all=
    { read -r -N 4194304 all <"$1"; } 2>/dev/null
}
cpus=0
all_of /proc/self/status
if [[ $all =~ Cpus_allowed_list:[[:space:]]*([0-9,-]+) ]]; then
    for part in ${BASH_REMATCH[1]//,/ }; do ((cpus += ${part#*-} - ${part%-*} + 1)); done
fi
say cpus "$cpus"

shopt -s nullglob
look_for() { # $1: kind of chip; what its adapter knows sets these
    local count=0 product='' devices=() key value
    eval "${looks[$1]}"
    say "count_$1" "$count"
    say "product_$1" "$product"
}
for kind in "${!looks[@]}"; do look_for "$kind"; done

# The interface over which this host reaches the master, or is the master.
address=
if [[ $master == *:* || $master =~ ^[0-9.]+$ ]]; then
    address=$master
elif [[ -n $master ]]; then
    # What stands in the table of hosts is found without a process.
    all_of /etc/hosts
    name=${master//./\\.} line=$'(^|\n)[ \t]*([0-9a-fA-F.:]+)[ \t]([^#\n]*[ \t])?'
    [[ $all =~ $line$name([[:space:]]|$) ]] && address=${BASH_REMATCH[2]}
    [[ -n $address ]] || read -r address _ < <(getent ahosts "$master")
fi
# A host often resolves its own name to a loopback address.
if [[ $address == 127.* || $address == ::1 ]]; then
    say loopback yes
    read -r _ _ address _ <<<"${SSH_CONNECTION:-}"
fi
interface=
# The kernel's table of routes, of IPv4: the longest prefix, and of those the smallest metric.
route_to() { # $1: address; sets `interface`, to nothing where there is no route
    local name to flags metric mask bytes target best=-1 cheapest=0
    IFS=. read -ra bytes <<<"$1"
    # Byte by byte the other way round, as the kernel prints them.
    target=$((bytes[3] << 24 | bytes[2] << 16 | bytes[1] << 8 | bytes[0]))
    while read -r name to _ flags _ _ metric mask _; do
        # Up, and no refusal.
        [[ $mask == [0-9A-F]* ]] && ((0x$flags & 1 && ! (0x$flags & 0x200))) || continue
        ((0x$to == (target & 0x$mask))) || continue
        mask=$((0x${mask:6:2}${mask:4:2}${mask:2:2}${mask:0:2}))
        ((mask > best || (mask == best && metric < cheapest))) || continue
        best=$mask cheapest=$metric interface=$name
    done </proc/net/route
}
[[ $address =~ ^[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+$ && -r /proc/net/route ]] && route_to "$address"
if [[ -n $interface || -z $address ]]; then
    :
elif command -v ip >/dev/null; then
    route=$(ip -o route get "$address" 2>/dev/null)
    [[ $route =~ \ dev\ ([^ ]+) ]] && interface=${BASH_REMATCH[1]}
    if [[ $interface == lo ]]; then
        read -r _ interface _ < <(ip -o addr show to "$address" 2>/dev/null)
    fi
else
    interface=$(python_program interface "$address")
fi
say address "$address"
say interface "${interface%%@*}"

if [[ $port == any ]]; then
    free_port "$agents_port" && say port "$free"
elif [[ -n $port ]] && ! listening "$port"; then
    say port "$port"
fi
for wanted in "$port" "$agents_port"; do
    [[ $wanted == [0-9]* ]] && listening "$wanted" || continue
    # Whose it is can be seen of processes of the same user, and by root.
    opened=$(find /proc/[0-9]*/fd -maxdepth 1 -lname "socket:\\[$inode\\]" 2>/dev/null)
    holder=
    if [[ $opened =~ ^/proc/([0-9]+)/ ]]; then
        read -r name <"/proc/${BASH_REMATCH[1]}/comm" && holder="process ${BASH_REMATCH[1]} ($name)"
    fi 2>/dev/null
    say busy_port "$wanted"
    say port_holder "${holder:-another process}"
    break
done

# Processes of runs of this very directory carry where they report to.
carrying "$mark"
for pid in "${pids[@]}"; do
    while IFS= read -r -d '' entry; do
        [[ $entry == "$id_variable"=* ]] && say alive "${entry#*=}"
    done <"/proc/$pid/environ" 2>/dev/null
done

if [[ -n ${thorough-} ]]; then
    [[ -e $project/flagscale/launcher/agent.py ]] && say project yes
    absent=()
    for number in "${!needed[@]}"; do
        [[ -e ${needed[number]} ]] || absent+=("$number")
    done
    say absent "${absent[*]}"
    # Where this run will write: the nearest directories that exist already.
    nearest() { # $1: path; sets `directory`, and `reason` to why it can't be written
        directory=$1
        while [[ ! -e $directory && ! -L $directory && $directory == /?* ]]; do
            directory=${directory%/*}
        done
        directory=${directory:-/}
        reason=
        [[ -w $directory && -x $directory ]] || reason=$not_writable
        [[ -d $directory ]] || reason=$not_a_directory
    }
    say_place() { # $1: what the names end with
        say "existing$1" "$directory"
        say "unfit$1" "$reason"
        read -r blocks size < <(stat -f -c '%a %S' -- "$directory" 2>/dev/null) &&
            say "free$1" "$((blocks * size))"
    }
    say user "${USER:-${LOGNAME:-$EUID}}"
    for place in "$exp_dir" "$log_root"; do
        nearest "$place"
        [[ -z $reason ]] || break
    done
    say_place ''
    for number in "${!written[@]}"; do
        nearest "${written[number]}"
        say_place "_$number"
    done
    # What it may start from.
    entries=() checkpoints=()
    [[ -z $load ]] || entries=("$load"/iter_*/)
    for entry in "${entries[@]}"; do
        entry=${entry%/}
        [[ ${entry##*/} =~ ^$checkpoint_name$ ]] && checkpoints+=("${entry##*/}")
    done
    say checkpoints "${checkpoints[*]}"
    if ((${#checkpoints[@]})) || [[ -n $load && -e $load/$tracker ]]; then
        asked+=("${asked_of_checkpoints[@]}")
    fi
    look_at_python
fi
