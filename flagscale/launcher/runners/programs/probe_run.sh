# shellcheck shell=bash disable=SC2034,SC2154
# Report whether a run is alive on this host, and send what is new in its files.
if [[ -n $start_lock ]]; then
    # Wait for a start that is in progress, even if its launcher was killed.
    lock_start "$start_lock"
    unlock_start
fi
# A pid and its start time alone prove nothing: the state that names them is a file. Processes of
# another user cannot be looked into.
is_script_of_run() { [[ ! -r /proc/$pid/environ ]] || carries "$pid" "$entry"; }
alive=
if [[ -z $expected_boot || $boot == "$expected_boot" ]]; then
    started_at "$pid"
    [[ -n $ticks && $ticks == "$start_ticks" ]] && is_script_of_run && alive=script
    # Without the script, other processes of the run may be alive: search all environments.
    if [[ -z $alive ]] && grep -qzsFx -e "$entry" /proc/[0-9]*/environ; then alive=orphans; fi
fi
report alive "$alive"
if [[ -n $count_ranks ]]; then
    ranks=0
    for file in $(grep -lzsFx -e "$entry" /proc/[0-9]*/environ); do
        if grep -qzs '^LOCAL_RANK=' "$file"; then ((ranks += 1)); fi
    done
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
    done < <(list_sizes "${followed_files[@]}" "$run_dir/$status"*/rank_*.jsonl)
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
