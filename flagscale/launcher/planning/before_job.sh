# shellcheck shell=bash disable=SC2034,SC2154
# What a host's script does until the job starts. It holds no value of a plan: those are in the
# variables above it.

# While this run lives here, another start of its script changes nothing and runs nothing.
read -r boot </proc/sys/kernel/random/boot_id
started_at() { # $1: pid; sets `ticks` to when that process was started, to nothing if it is gone
    local stat fields
    ticks=
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return
    read -ra fields <<<"${stat##*) }"
    [[ ${fields[0]} == [ZXx] ]] || ticks=${fields[19]}
}
refuse_beside() { # $1: what it is, $2: its pid, $3: when it was started, $4: in which boot
    [[ $4 == "$boot" ]] || return
    started_at "$2"
    [[ $ticks == "$3" ]] || return
    echo "flagscale: $who is alive already ($1 $2); nothing was changed" >&2
    exit 1
}
if [[ -e $agent_file ]]; then
    IFS= read -r -d '' record <"$agent_file"
    known='"pid": ([0-9]+).*"start_ticks": ([0-9]+).*"boot_id": "([^"]+)'
    [[ $record =~ $known ]] && refuse_beside agent "${BASH_REMATCH[@]:1:3}"
fi
if [[ -e $script_file ]]; then
    read -r other_pid other_ticks other_boot <"$script_file"
    refuse_beside script "$other_pid" "$other_ticks" "$other_boot"
    rm -f -- "$script_file"
fi
started_at "$$"
# Of two starts at the same moment one finds the file of the other.
(umask 077 && mkdir -p -- "$run_dir" "${pid_file%/*}" &&
    set -C && echo "$$ $ticks $boot" >"$script_file" &&
    set +C && echo "$$" >"$pid_file") || exit 1
[[ ! -e $exit_file ]] || rm -f -- "$exit_file"

phase=before_start
agent_pid=

# However the script ends, what follows the job runs and the job's code is kept.
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
        # A stop sends TERM to every process of the run; this may end in its grace period.
        (trap "" TERM INT HUP; set +u -e && eval "$after_stop") ||
            echo "flagscale: after_stop failed with exit code $?" >&2
    fi
    rm -f -- "$pid_file" "$script_file"
    echo "flagscale: $who ended with exit code $code; logs of its ranks: $run_dir/ranks"
    exit "$code"
}
# The agent ends the job; before there is one, the script just ends.
on_signal() {
    [[ -n $agent_pid ]] || exit $((128 + $1))
    interrupted=yes
    kill -TERM "$agent_pid" 2>/dev/null
}
echo "flagscale: $who starts; logs of its ranks: $run_dir/ranks"
trap finish EXIT
trap 'on_signal 15' TERM
trap 'on_signal 2' INT
trap 'on_signal 1' HUP

# Commands before the job run in this shell, so that it sees what they set; the first that fails
# ends the script.
if [[ -n $before_start ]]; then
    set +u -e
    eval "$before_start"
    set -u +e
fi

# The job, watched by an agent that leaves no process of this run behind.
phase=job
