# shellcheck shell=bash disable=SC2034
# What every program for a host begins with: how it answers, and how it reads processes.

answers=()
# Everything is said in one piece, since sshd and paramiko work for every piece.
say() { answers+=("$1=$2"); }
tell() { printf '%s\0' "${answers[@]}"; }

read -r boot </proc/sys/kernel/random/boot_id

started_at() { # $1: pid; sets `ticks` and `parent`, to nothing if it is gone or a zombie
    local stat='' fields
    ticks='' parent=''
    # In one piece: the name of a program may hold a line end.
    { IFS= read -r -d '' stat <"/proc/$1/stat"; } 2>/dev/null
    [[ -n $stat ]] || return
    read -ra fields <<<"${stat##*) }"
    [[ ${fields[0]} == [ZXx] ]] || ticks=${fields[19]} parent=${fields[1]}
}

# Bash reads these about as fast as grep would, and grep would be one more process on every host.
carrying() { # $1: text; sets `pids` to the processes whose environment holds it
    local file environment LC_ALL=C
    pids=()
    for file in /proc/[0-9]*/environ; do
        environment=
        { read -r -N 8388608 environment <"$file"; } 2>/dev/null
        [[ $environment == *"$1"* ]] || continue
        file=${file#/proc/}
        pids+=("${file%/environ}")
    done
}

carries() { # $1: pid, $2: name=value; whether its environment has exactly this
    local entry
    while IFS= read -rd '' entry; do
        [[ $entry == "$2" ]] && return
    done </proc/"$1"/environ
    return 1
} 2>/dev/null
