# shellcheck shell=bash disable=SC2034
# Common head of every program that is sent to a host: reporting results and reading /proc.

results=()
# Results are printed in one write at the end: sshd and paramiko have a cost per write.
report() { results+=("$1=$2"); } # $1: name, $2: value
print_results() { printf '%s\0' "${results[@]}"; }

read -r boot </proc/sys/kernel/random/boot_id

started_at() { # $1: pid; sets `ticks` and `parent`, both empty if the process ended or is a zombie
    local stat='' fields
    ticks='' parent=''
    # Read the file as a whole: the name of a program may contain a newline.
    { IFS= read -r -d '' stat <"/proc/$1/stat"; } 2>/dev/null
    [[ -n $stat ]] || return
    read -ra fields <<<"${stat##*) }"
    [[ ${fields[0]} == [ZXx] ]] || ticks=${fields[19]} parent=${fields[1]}
}

# Set `pids` to the processes whose environment contains any of the texts; an empty text is ignored.
carrying() { # $@: texts
    local file environment text LC_ALL=C
    pids=()
    # Bash reads these files about as fast as grep would, and grep would be one more process.
    for file in /proc/[0-9]*/environ; do
        environment=
        { read -r -N 8388608 environment <"$file"; } 2>/dev/null
        for text; do
            [[ -n $text && $environment == *"$text"* ]] || continue
            file=${file#/proc/}
            pids+=("${file%/environ}")
            break
        done
    done
}

# Hold the lock of a start on this host. A host without flock(1) goes without.
lock_start() { # $1: file
    { exec {start_lock_fd}>>"$1"; } 2>/dev/null || return
    ! command -v flock >/dev/null || flock "$start_lock_fd"
}
unlock_start() { [[ -z ${start_lock_fd:-} ]] || exec {start_lock_fd}>&-; }

carries() { # $1: pid, $2: name=value; succeeds if its environment has exactly this entry
    local entry
    while IFS= read -rd '' entry; do
        [[ $entry == "$2" ]] && return
    done </proc/"$1"/environ
    return 1
} 2>/dev/null
