# shellcheck shell=bash disable=SC2034,SC2154
# Write the script of a host and its files, and start the script.
old_mask=$(umask)
umask 077
if [[ $boot == "$old_boot" ]] && started_at "$old_pid" && [[ $ticks == "$old_ticks" ]]; then
    printf '%s\n' "the previous run is alive there (script pid $old_pid)" >&2
    exit 75
fi
fail() { printf '%s\n' "$1" >&2; exit 73; }
for directory in "${script%/*}" "${output%/*}" "$run_dir"; do
    [[ -d $directory ]] || mkdir -p -- "$directory" || fail "cannot create $directory"
done
if [[ -n $old_output && -e $output ]]; then
    [[ -d ${old_output%/*} ]] || mkdir -p -- "${old_output%/*}"
    mv -- "$output" "$old_output" || fail "cannot keep $output"
fi
for ((i = 0; i < ${#paths[@]}; i++)); do
    printf '%s' "${texts[i]}" >"${paths[i]}" || fail "cannot write ${paths[i]}"
done
[[ -x $script ]] || chmod 700 -- "$script" || fail "cannot make $script executable"
: >>"$output" || fail "cannot write $output"
umask "$old_mask"
report boot_id "$boot"
if [[ -n $tied ]]; then
    # The script replaces this process, whose parent waits for it.
    started_at "$$"
    report pid "$$"
    report start_ticks "$ticks"
    print_results
    exec bash "$script" </dev/null >>"$output" 2>&1
fi
# The script runs in its own session with its own standard streams, so it outlives this program.
setsid bash "$script" </dev/null >>"$output" 2>&1 &
pid=$!
started_at "$pid"
[[ -n $ticks ]] || fail "setsid bash does not start"
report pid "$pid"
report start_ticks "$ticks"
print_results
