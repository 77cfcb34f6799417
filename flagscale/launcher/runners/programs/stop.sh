# shellcheck shell=bash disable=SC2034,SC2154
# End exactly the processes of this host that have a run's id in their environment, and descendants
# of those that were started with an emptied environment: TERM to the agent, which ends the job in
# order; then, or without an agent, TERM to every process of the run, and KILL after a grace period.
if [[ -n $expected_boot && $boot != "$expected_boot" ]]; then report end yes; print_results; exit 0; fi

# Processes of the run, and the start time of each, which distinguishes it from a later process with
# the same pid.
members=()
declare -A started=() tree=()
find_members() {
    members=()
    local pid pids
    carrying "$entry"
    for pid in "${pids[@]}"; do
        # Check again after its start time was read: the pid may have been reused in between.
        [[ " $spared " != *" $pid "* ]] || continue
        started_at "$pid"
        [[ -n $ticks ]] && carries "$pid" "$entry" && members+=("$pid") && started[$pid]=$ticks
    done
    for pid in "${!tree[@]}"; do
        [[ " ${members[*]} " == *" $pid "* ]] || ! is_alive "$pid" || members+=("$pid")
    done
}
is_alive() { # $1: pid of a member
    started_at "$1"
    [[ -n $ticks && $ticks == "${started[$1]}" ]]
}
send_signal() { # $1: signal, $2: pid; sent right after checking that it is still the same process
    is_alive "$2" && kill "-$1" "$2" 2>/dev/null
}
exec {idle_fd}<> <(:)
pauses=0
pause() { # sleeps 10 to 50 ms without starting a process
    read -rt "0.0$((pauses < 5 ? ++pauses : 5))" -u "$idle_fd"
}
# Wait for the members without starting a process; once they have ended, search for processes that
# they have started in the meantime.
wait_until_ended() { # $1: seconds, $2: function that is applied to the members
    local deadline=$((SECONDS + $1)) pid alive
    while ((${#members[@]})); do
        "$2"
        while :; do
            alive=()
            for pid in "${members[@]}"; do is_alive "$pid" && alive+=("$pid"); done
            ((${#alive[@]} && SECONDS < deadline)) || break
            pause
        done
        find_members
        ((SECONDS < deadline)) || break
    done
    ((${#members[@]} == 0))
}
declare -A terminated=() killed=()
do_nothing() { :; }
terminate_members() {
    for pid in "${members[@]}"; do
        [[ -z ${terminated[$pid]:-} ]] && send_signal TERM "$pid" && terminated[$pid]=1
    done
}
kill_members() {
    for pid in "${members[@]}"; do send_signal KILL "$pid" && killed[$pid]=1; done
}
# Add a process of the run and its descendants to the members, without starting a process. Another run
# may have been started from this one, and is left out with its descendants.
add_tree() { # $1: pid, $2: pid of its parent
    local pid file children='' of_thread
    [[ " $spared " != *" $1 "* ]] || return
    started_at "$1"
    [[ -n $ticks && $parent == "$2" ]] && ! carries_other_id "$1" || return
    members+=("$1") started[$1]=$ticks tree[$1]=1
    for file in /proc/"$1"/task/*/children; do
        of_thread=
        { read -r of_thread <"$file"; } 2>/dev/null
        children+=" $of_thread"
    done
    for pid in $children; do add_tree "$pid" "$1"; done
}
carries_other_id() { # $1: pid
    local entry_text
    while IFS= read -rd '' entry_text; do
        [[ $entry_text != "${entry%%=*}="* ]] || { [[ $entry_text != "$entry" ]]; return; }
    done <"/proc/$1/environ"
    return 1
} 2>/dev/null
# A rank process has RANK in its environment, and its parent, torchrun, does not.
ranks=()
collect_ranks() {
    local pid entry_text rank_parent environment LC_ALL=C
    declare -A rank=()
    for pid in "${members[@]}"; do
        environment=()
        mapfile -d '' -t environment <"/proc/$pid/environ"
        for entry_text in "${environment[@]}"; do
            [[ $entry_text == RANK=[0-9]* ]] && rank[$pid]=${entry_text#RANK=}
        done
    done 2>/dev/null
    for pid in "${!rank[@]}"; do
        started_at "$pid"
        rank_parent=$parent
        [[ -z $rank_parent || -n ${rank[$rank_parent]:-} ]] || ranks+=("${rank[$pid]}:$pid")
    done
}
owner=
member_count=0
is_foreign() { # $1: pid; succeeds if another user owns it; sets `owner`
    # An unreadable environment proves nothing: that of an ending process cannot be read either.
    kill -0 "$1" && return 1
    local name uid user=
    while read -r name uid _; do
        [[ $name == Uid: ]] && user=$(id -nu "$uid" || echo "user $uid")
    done <"/proc/$1/status"
    is_alive "$1" && owner=$user
} 2>/dev/null
# Find the agent through the file that it writes.
agent=
find_agent() {
    local record=''
    { IFS= read -rd '' record <"$run_dir/$agent_file"; } 2>/dev/null
    [[ $record == *"$boot"* && $record =~ \"pid\":\ ([0-9]+).*\"start_ticks\":\ ([0-9]+) ]] || return
    started_at "${BASH_REMATCH[1]}"
    [[ $ticks == "${BASH_REMATCH[2]}" ]] && agent=${BASH_REMATCH[1]} started[$agent]=$ticks
}
find_agent
started_at "$script_pid"
[[ -n $ticks && $ticks == "$start_ticks" ]] && started[$script_pid]=$ticks || script_pid=
# A pid and its start time come from files, which prove nothing: a process belongs to the run only if
# it carries the run's id. That of another user is not readable, and cannot be signalled. The
# environment of some of this user's own processes is not readable either, such as ssh-agent.
for pid in $script_pid $agent; do
    carries "$pid" "$entry" && continue
    [[ -r /proc/$pid/environ ]] || kill -0 "$pid" 2>/dev/null || continue
    [[ $pid == "$script_pid" ]] && script_pid=
    [[ $pid == "$agent" ]] && agent=
done
for pid in $script_pid $agent; do
    # The environments of another user's processes are unreadable, so no others would be found.
    is_foreign "$pid" || continue
    members=("$pid")
    member_count=1
    report owner "$owner"
    break
done
if [[ -z $owner ]]; then
    if [[ -n $script_pid ]]; then
        started_at "$script_pid" && add_tree "$script_pid" "$parent"
    elif [[ -n $agent ]]; then
        started_at "$agent" && add_tree "$agent" "$parent" && find_members
    fi
    ((${#members[@]})) || find_members
    member_count=${#members[@]}
fi
if ((member_count)) && [[ -z $owner ]]; then
    collect_ranks
    # The record may be stale: the agent has to be a process of this run.
    if [[ -n $agent && " ${members[*]} " == *" $agent "* ]]; then
        send_signal TERM "$agent" && wait_until_ended $((grace + agent_seconds)) do_nothing
    fi
    wait_until_ended "$grace" terminate_members || wait_until_ended "$kill_seconds" kill_members
    [[ ! -e $pid_file ]] || rm -f -- "$pid_file"
fi
report found "$member_count"
report terminated "${!terminated[*]}"
report killed "${!killed[*]}"
report left "${members[*]}"
report ranks "${ranks[*]}"
