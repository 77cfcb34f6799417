# shellcheck shell=bash disable=SC2034,SC2154
# Report facts of this host: cores, memory, devices, the network interface to the master, the clock
# and runs that are alive. For a preflight also the output paths, the required paths and the Python
# environment.
report clock "$EPOCHREALTIME"
report boot_id "$boot"

# Files are read with a single `read`: bash takes as long for a line as for a whole file.
read_file() { # $1: file; sets `contents`
    contents=
    { read -r -N 4194304 contents <"$1"; } 2>/dev/null
}
cpus=0
read_file /proc/self/status
if [[ $contents =~ Cpus_allowed_list:[[:space:]]*([0-9,-]+) ]]; then
    for part in ${BASH_REMATCH[1]//,/ }; do ((cpus += ${part#*-} - ${part%-*} + 1)); done
fi
report cpus "$cpus"
read_file /proc/meminfo
[[ $contents =~ MemTotal:[[:space:]]*([0-9]+) ]] && report memory_kib "${BASH_REMATCH[1]}"

shopt -s nullglob
count_devices() { # $1: kind of chip; the script of its adapter sets `count` and `product`
    local count=0 product='' devices=() key value
    eval "${device_probes[$1]}"
    report "count_$1" "$count"
    report "product_$1" "$product"
}
for kind in "${!device_probes[@]}"; do count_devices "$kind"; done

# The interface over which this host reaches the master, or over which it is reached as the master.
address=
if [[ $master == *:* || $master =~ ^[0-9.]+$ ]]; then
    address=$master
elif [[ -n $master ]]; then
    # Entries of /etc/hosts are found without starting a process.
    read_file /etc/hosts
    name=${master//./\\.} line=$'(^|\n)[ \t]*([0-9a-fA-F.:]+)[ \t]([^#\n]*[ \t])?'
    [[ $contents =~ $line$name([[:space:]]|$) ]] && address=${BASH_REMATCH[2]}
    [[ -n $address ]] || read -r address _ < <(getent ahosts "$master")
fi
# A host often resolves its own name to a loopback address.
if [[ $address == 127.* || $address == ::1 ]]; then
    report loopback yes
    read -r _ _ address _ <<<"${SSH_CONNECTION:-}"
fi
interface=
# Look an address up in the kernel's IPv4 routing table: longest prefix, then smallest metric.
route_to() { # $1: address; sets `interface`, empty where there is no route
    local name to flags metric mask bytes target best=-1 cheapest=0
    IFS=. read -ra bytes <<<"$1"
    # The kernel prints addresses in host byte order, least significant byte first.
    target=$((bytes[3] << 24 | bytes[2] << 16 | bytes[1] << 8 | bytes[0]))
    while read -r name to _ flags _ _ metric mask _; do
        # The route is up (RTF_UP) and not a reject route (RTF_REJECT).
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
report address "$address"
report interface "${interface%%@*}"

if [[ $port == any ]]; then
    find_free_port "$agents_port" && report port "$free_port"
elif [[ -n $port ]] && ! listening "$port"; then
    report port "$port"
fi
for requested in "$port" "$agents_port"; do
    [[ $requested == [0-9]* ]] && listening "$requested" || continue
    # The process that holds the port is visible to the same user and to root.
    opened=$(find /proc/[0-9]*/fd -maxdepth 1 -lname "socket:\\[$inode\\]" 2>/dev/null)
    holder=
    if [[ $opened =~ ^/proc/([0-9]+)/ ]]; then
        read -r name <"/proc/${BASH_REMATCH[1]}/comm" && holder="process ${BASH_REMATCH[1]} ($name)"
    fi 2>/dev/null
    report busy_port "$requested"
    report port_holder "${holder:-another process}"
    break
done

# Processes of runs in this log directory have their status directory in their environment.
carrying "$status_dir_prefix"
for pid in "${pids[@]}"; do
    while IFS= read -r -d '' entry; do
        [[ $entry == "$run_id_variable"=* ]] && report alive "${entry#*=}"
    done <"/proc/$pid/environ" 2>/dev/null
done

if [[ -n ${preflight-} ]]; then
    [[ -e $project/flagscale/launcher/agent.py ]] && report project yes
    missing=()
    for number in "${!required_paths[@]}"; do
        [[ -e ${required_paths[number]} ]] || missing+=("$number")
    done
    report missing "${missing[*]}"
    # For paths that this run will write: the nearest directory that exists already.
    nearest() { # $1: path; sets `directory`, and `problem` if it is not writable
        directory=$1
        while [[ ! -e $directory && ! -L $directory && $directory == /?* ]]; do
            directory=${directory%/*}
        done
        directory=${directory:-/}
        problem=
        [[ -w $directory && -x $directory ]] || problem=$not_writable
        [[ -d $directory ]] || problem=$not_a_directory
    }
    report_path_state() { # $1: suffix of the reported names
        report "existing$1" "$directory"
        report "problem$1" "$problem"
        read -r blocks size < <(stat -f -c '%a %S' -- "$directory" 2>/dev/null) &&
            report "free$1" "$((blocks * size))"
    }
    report user "${USER:-${LOGNAME:-$EUID}}"
    for path in "$exp_dir" "$log_root"; do
        nearest "$path"
        [[ -z $problem ]] || break
    done
    report_path_state ''
    for number in "${!output_paths[@]}"; do
        nearest "${output_paths[number]}"
        report_path_state "_$number"
    done
    # Checkpoints that this run may start from.
    entries=() checkpoints=()
    [[ -z $load_dir ]] || entries=("$load_dir"/iter_*/)
    for entry in "${entries[@]}"; do
        entry=${entry%/}
        [[ ${entry##*/} =~ ^$checkpoint_name$ ]] && checkpoints+=("${entry##*/}")
    done
    # The directory may be a checkpoint itself, or the link to the best one.
    if [[ -n $load_dir && -f $load_dir/.metadata ]]; then
        entry=$(realpath -- "$load_dir")
        checkpoints=("${entry##*/}")
    fi
    report checkpoints "${checkpoints[*]}"
    if ((${#checkpoints[@]})) || [[ -n $load_dir && -e $load_dir/$tracker ]]; then
        module_queries+=("${checkpoint_queries[@]}")
    fi
    inspect_python
fi
