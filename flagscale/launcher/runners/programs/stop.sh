# shellcheck shell=bash disable=SC2034,SC2154
# Ends exactly the processes of this host that carry a run's id: TERM to the agent, which ends the job
# in order; then, or where there is no agent, to every process of the run, a grace period, KILL.
if [[ -n $wanted_boot && $boot != "$wanted_boot" ]]; then say end yes; tell; exit 0; fi

# What was found, and when each of it was started: that tells a process from a later one of its pid.
found=()
declare -A started=()
members() {
    found=()
    local pid pids
    carrying "$entry"
    for pid in "${pids[@]}"; do
        # Asked again now that it is known when the process was started.
        [[ " $spared " != *" $pid "* ]] || continue
        started_at "$pid"
        [[ -n $ticks ]] && carries "$pid" "$entry" && found+=("$pid") && started[$pid]=$ticks
    done
}
lives() { # $1: pid of what was found
    started_at "$1"
    [[ -n $ticks && $ticks == "${started[$1]}" ]]
}
send() { # $1: signal, $2: pid; it gets it at once after the look whether it still is the same
    lives "$2" && kill "-$1" "$2" 2>/dev/null
}
exec {never}<> <(:)
naps=0
pause() { # without a process of its own, and at first only for a moment
    read -rt "0.0$((naps < 5 ? ++naps : 5))" -u "$never"
}
# Those that were found are watched without a process of its own; when they are gone, whatever
# they have started in the meantime is looked for.
gone_within() { # $1: seconds, $2: what is done to the members found
    local deadline=$((SECONDS + $1)) pid left
    while ((${#found[@]})); do
        "$2"
        while :; do
            left=()
            for pid in "${found[@]}"; do lives "$pid" && left+=("$pid"); done
            ((${#left[@]} && SECONDS < deadline)) || break
            pause
        done
        members
        ((SECONDS < deadline)) || break
    done
    ((${#found[@]} == 0))
}
declare -A terminated=() killed=()
nothing() { :; }
terminate() {
    for pid in "${found[@]}"; do
        [[ -z ${terminated[$pid]:-} ]] && send TERM "$pid" && terminated[$pid]=1
    done
}
slay() {
    for pid in "${found[@]}"; do send KILL "$pid" && killed[$pid]=1; done
}
# The script, as long as it lives, and what it has started: found without a process of its own.
tree() { # $1: pid, $2: of its parent
    local pid children=
    [[ " $spared " != *" $1 "* ]] || return
    started_at "$1"
    [[ -n $ticks && $parent == "$2" ]] || return
    found+=("$1") started[$1]=$ticks
    { read -r children </proc/"$1"/task/"$1"/children; } 2>/dev/null
    for pid in $children; do tree "$pid" "$1"; done
}
# torchrun starts a rank: it has a rank, and its parent has none.
ranks=()
name_ranks() {
    local pid word above environment LC_ALL=C
    declare -A rank=()
    for pid in "${found[@]}"; do
        environment=()
        mapfile -d '' -t environment <"/proc/$pid/environ"
        for word in "${environment[@]}"; do
            [[ $word == RANK=[0-9]* ]] && rank[$pid]=${word#RANK=}
        done
    done 2>/dev/null
    for pid in "${!rank[@]}"; do
        started_at "$pid"
        above=$parent
        [[ -z $above || -n ${rank[$above]:-} ]] || ranks+=("${rank[$pid]}:$pid")
    done
}
owner=
said=0
closed() { # $1: pid; whether it is not this user's to end; sets `owner`
    # Its environment tells nothing here: that of a process about to end cannot be read either.
    kill -0 "$1" && return 1
    local name uid whose=
    while read -r name uid _; do
        [[ $name == Uid: ]] && whose=$(id -nu "$uid" || echo "user $uid")
    done <"/proc/$1/status"
    lives "$1" && owner=$whose
} 2>/dev/null
# By its own record, whoever started it.
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
for pid in $script_pid $agent; do
    # Of another user's run no other processes will be found: their environments are closed too.
    closed "$pid" || continue
    found=("$pid")
    said=1
    say owner "$owner"
    break
done
if [[ -z $owner ]]; then
    [[ -z $script_pid ]] || { started_at "$script_pid" && tree "$script_pid" "$parent"; }
    ((${#found[@]})) || members
    said=${#found[@]}
fi
if ((said)) && [[ -z $owner ]]; then
    name_ranks
    # Only a process of this very run is an agent of it.
    if [[ -n $agent && " ${found[*]} " == *" $agent "* ]]; then
        send TERM "$agent" && gone_within $((grace + agent_seconds)) nothing
    fi
    gone_within "$grace" terminate || gone_within "$kill_seconds" slay
    [[ ! -e $pid_file ]] || rm -f -- "$pid_file"
fi
say found "$said"
say terminated "${!terminated[*]}"
say killed "${!killed[*]}"
say left "${found[*]}"
say ranks "${ranks[*]}"
