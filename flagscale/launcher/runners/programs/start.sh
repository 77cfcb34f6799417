# shellcheck shell=bash disable=SC2034,SC2154
# Writes what a host's script needs, the script itself among it, and starts that.
old_mask=$(umask)
umask 077
if [[ $boot == "$old_boot" ]] && started_at "$old_pid" && [[ $ticks == "$old_ticks" ]]; then
    printf '%s\n' "the run before is alive there (script pid $old_pid)" >&2
    exit 75
fi
fail() { printf '%s\n' "$1" >&2; exit 73; }
for directory in "${script%/*}" "${output%/*}" "$run_dir"; do
    [[ -d $directory ]] || mkdir -p -- "$directory" || fail "cannot make $directory"
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
say boot_id "$boot"
if [[ -n $tied ]]; then
    # The script takes the place of this very process, whose parent waits for it.
    started_at "$$"
    say pid "$$"
    say start_ticks "$ticks"
    tell
    exec bash "$script" </dev/null >>"$output" 2>&1
fi
# The script is in no list of jobs of ours, leads its own session and holds none of our files: it
# lives on when this program has ended.
setsid bash "$script" </dev/null >>"$output" 2>&1 &
pid=$!
started_at "$pid"
[[ -n $ticks ]] || fail "setsid bash does not start"
say pid "$pid"
say start_ticks "$ticks"
tell
