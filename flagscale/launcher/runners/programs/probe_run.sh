# shellcheck shell=bash disable=SC2034,SC2154
# Report whether a run is alive on this host, and send what is new in its files.
if [[ -n $start_lock ]]; then
    # Wait for a start that is in progress, even if its launcher was killed.
    lock_start "$start_lock"
    unlock_start
fi
# A pid and its start time alone prove nothing: the state that names them is a file. Processes of
# another user cannot be looked into.
is_script_of_run() {
    carries "$pid" "$entry" || ! { [[ -r /proc/$pid/environ ]] || kill -0 "$pid" 2>/dev/null; }
}
alive=
if [[ -z $expected_boot || $boot == "$expected_boot" ]]; then
    started_at "$pid"
    [[ -n $ticks && $ticks == "$start_ticks" ]] && is_script_of_run && alive=script
    # Without the script, other processes of the run may be alive: search all environments.
    if [[ -z $alive ]] && grep -qzsFx -e "$entry" /proc/[0-9]*/environ; then alive=orphans; fi
fi
report alive "$alive"
children_of() { # $1: pid; sets `children`
    local file of_thread
    children=
    for file in /proc/"$1"/task/*/children; do
        of_thread=
        { read -r of_thread <"$file"; } 2>/dev/null
        children+=" $of_thread"
    done
}
# Count the ranks, of which a command may have emptied the environment: children of the process that
# the agent has started.
count_ranks() { # $1: pid of the agent
    local pid starter children starters
    children_of "$1"
    starters=$children
    for starter in $starters; do
        carries "$starter" "$entry" || continue
        children_of "$starter"
        for pid in $children; do
            started_at "$pid"
            [[ -n $ticks ]] || continue
            if ! carries "$pid" "$entry" || grep -qzs '^LOCAL_RANK=' "/proc/$pid/environ"; then
                ((ranks += 1))
            fi
        done
    done
}
if [[ -n $count_ranks ]]; then
    ranks=0 record=
    { IFS= read -rd '' record <"$run_dir/$agent_file"; } 2>/dev/null
    if [[ $record == *"$boot"* && $record =~ \"pid\":\ ([0-9]+) ]] &&
        carries "${BASH_REMATCH[1]}" "$entry"; then
        count_ranks "${BASH_REMATCH[1]}"
    fi
    report ranks "$ranks"
fi
if [[ -n $output_file && -r $output_file ]]; then
    report last_line "$(tail -c 2000 -- "$output_file" | grep -v '^[[:space:]]*$' | tail -n 1)"
fi

shopt -s nullglob
send_chunk() { # $1: path, $2: offset, $3: bytes
    printf 'file=%d %d %s\0' "$3" "$2" "$1"
    if (($3)); then tail -c +$(($2 + 1)) -- "$1" | head -c "$3"; fi
}
list_sizes() { (($# == 0)) || stat -c '%s %n' -- "$@"; }
send_files() {
    local size path offset count
    while read -r size path; do
        offset=${offsets[$path]:-0}
        ((size > offset)) || continue
        count=$((size - offset))
        if ((count > max_bytes)); then count=$max_bytes; report more yes; fi
        send_chunk "$path" "$offset" "$count"
    done < <(list_sizes "${followed_files[@]}" "$run_dir/$status"*/*.jsonl)
    while read -r size path; do
        send_chunk "$path" 0 "$size"
    done < <(list_sizes "$run_dir"/*.json "$run_dir/$status"*/rank_*.place)
    # If the job has failed, send the end of the ranks' stderr as well.
    if [[ -e $run_dir/$exit_file ]] && ! grep -q '"code": 0[,}]' "$run_dir/$exit_file"; then
        while read -r size path; do
            offset=$((size > tail_bytes ? size - tail_bytes : 0))
            send_chunk "$path" "$offset" $((size - offset))
        done < <(list_sizes "$run_dir/$ranks_directory"/*/attempt_*/*/stderr.log)
    fi
}
[[ -z $fetch ]] || send_files
