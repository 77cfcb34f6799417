# shellcheck shell=bash disable=SC2034,SC2154
# Does anything of a run live on this host, and what is new in its files?
alive=
if [[ -z $wanted_boot || $boot == "$wanted_boot" ]]; then
    started_at "$pid"
    [[ -n $ticks && $ticks == "$start_ticks" ]] && alive=script
    # Without its script, something of the run may still live: found by what it carries.
    if [[ -z $alive ]] && grep -qzsFx -e "$entry" /proc/[0-9]*/environ; then alive=orphans; fi
fi
say alive "$alive"
if [[ -n $count_ranks ]]; then
    ranks=0
    for file in $(grep -lzsFx -e "$entry" /proc/[0-9]*/environ); do
        if grep -qzs '^LOCAL_RANK=' "$file"; then ((ranks += 1)); fi
    done
    say ranks "$ranks"
fi
if [[ -n $last_of && -r $last_of ]]; then
    say last_line "$(tail -c 2000 -- "$last_of" | grep -v '^[[:space:]]*$' | tail -n 1)"
fi

shopt -s nullglob
send() { # $1: path, $2: offset, $3: bytes
    printf 'file=%d %d %s\0' "$3" "$2" "$1"
    if (($3)); then tail -c +$(($2 + 1)) -- "$1" | head -c "$3"; fi
}
sizes() { (($# == 0)) || stat -c '%s %n' -- "$@"; }
send_files() {
    local size path offset count
    while read -r size path; do
        offset=${offsets[$path]:-0}
        ((size > offset)) || continue
        count=$((size - offset))
        if ((count > most)); then count=$most; say more yes; fi
        send "$path" "$offset" "$count"
    done < <(sizes "${followed[@]}" "$run_dir/$status"*/rank_*.jsonl)
    while read -r size path; do
        send "$path" 0 "$size"
    done < <(sizes "$run_dir"/*.json "$run_dir/$status"*/rank_*.place)
    # What ranks wrote to stderr is asked for when the job has failed, and then its end.
    if [[ -e $run_dir/$exit_file ]] && ! grep -q '"code": 0[,}]' "$run_dir/$exit_file"; then
        while read -r size path; do
            offset=$((size > tail_bytes ? size - tail_bytes : 0))
            send "$path" "$offset" $((size - offset))
        done < <(sizes "$run_dir/$ranks_directory"/*/attempt_*/*/stderr.log)
    fi
}
[[ -z $fetch ]] || send_files
