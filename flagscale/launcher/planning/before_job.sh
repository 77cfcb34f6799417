# shellcheck shell=bash disable=SC2034,SC2154
# Part of a host's script that runs until the job starts. It contains no value of a plan: those are
# in the variables above it.

# If this run is still alive on this host, a second start of its script exits without any change.
read -r boot </proc/sys/kernel/random/boot_id
read_start_ticks() { # $1: pid; sets `ticks` to the start time of the process, empty if it has ended
    local stat fields
    ticks=
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return
    read -ra fields <<<"${stat##*) }"
    [[ ${fields[0]} == [ZXx] ]] || ticks=${fields[19]}
}
refuse_if_alive() { # $1: agent or script, $2: its pid, $3: its start ticks, $4: its boot id
    [[ $4 == "$boot" ]] || return
    read_start_ticks "$2"
    [[ $ticks == "$3" ]] || return
    echo "flagscale: $run_label is alive already ($1 $2); nothing was changed" >&2
    exit 1
}
if [[ -e $agent_file ]]; then
    IFS= read -r -d '' record <"$agent_file"
    agent_pattern='"pid": ([0-9]+).*"start_ticks": ([0-9]+).*"boot_id": "([^"]+)'
    [[ $record =~ $agent_pattern ]] && refuse_if_alive agent "${BASH_REMATCH[@]:1:3}"
fi
if [[ -e $script_file ]]; then
    other_pid="" other_ticks="" other_boot=""
    # Another start may have created the file, and not written to it yet.
    for _ in {1..50}; do
        read -r other_pid other_ticks other_boot <"$script_file" && break
        [[ -e $script_file ]] || break
        sleep 0.1
    done
    refuse_if_alive script "$other_pid" "$other_ticks" "$other_boot"
    rm -f -- "$script_file"
fi
read_start_ticks "$$"
# `set -C` makes the write fail if the file exists, so only one of two simultaneous starts goes on, and
# none writes through a symbolic link.
(umask 077 && mkdir -p -- "$run_dir" "${pid_file%/*}" &&
    set -C && echo "$$ $ticks $boot" >"$script_file" &&
    rm -f -- "$pid_file" && echo "$$" >"$pid_file") || exit 1
[[ ! -e $exit_file ]] || rm -f -- "$exit_file"

phase=before_start
agent_pid=
earlier_pid="" # of the last background process before the agent

# Runs after_stop however the script ends, and exits with the job's exit code.
finish() {
    local code=$?
    trap - EXIT
    trap : TERM INT HUP
    if [[ $phase == before_start ]]; then
        local how="failed with exit code $code"
        ((code)) || how="left the script with exit code 0" code=1
        echo "flagscale: before_start $how; the job was not started" >&2
        printf '{"code": %d, "phase": "before_start", "how": "%s", "ended": %(%s)T}\n' \
            "$code" "$how" -1 >"$run_dir/.exit" && mv -- "$run_dir/.exit" "$exit_file"
    fi
    if [[ -n $after_stop ]]; then
        # A stop sends TERM to every process of the run; after_stop may use its grace period.
        (trap "" TERM INT HUP; set +u -e && eval "$after_stop") ||
            echo "flagscale: after_stop failed with exit code $?" >&2
    fi
    rm -f -- "$pid_file" "$script_file"
    echo "flagscale: $run_label ended with exit code $code; logs of its ranks: $run_dir/ranks"
    exit "$code"
}
# The agent ends the job; before the agent is started, the script just exits.
on_signal() {
    # Between the start of the agent and the next command, only bash knows its pid.
    [[ $phase == before_start || ${!-} == "$earlier_pid" ]] || agent_pid=$!
    [[ -n $agent_pid ]] || exit $((128 + $1))
    interrupted=yes
    kill -TERM "$agent_pid" 2>/dev/null
}
echo "flagscale: $run_label starts; logs of its ranks: $run_dir/ranks"
trap finish EXIT
trap 'on_signal 15' TERM
trap 'on_signal 2' INT
trap 'on_signal 1' HUP

# before_start runs in this shell, so that the job sees variables set by it; the first command that
# fails ends the script.
if [[ -n $before_start ]]; then
    set +u
    # The start file of non-interactive shells often defines commands such as `module`.
    # shellcheck source=/dev/null
    [[ -z ${FLAGSCALE_BASH_ENV-} ]] || . "$FLAGSCALE_BASH_ENV"
    set -e
    eval "$before_start"
    set -u +e
fi

# The job runs under an agent that leaves no process of this run behind.
earlier_pid=${!-}
phase=job
