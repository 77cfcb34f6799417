# shellcheck shell=bash disable=SC2034,SC2154
# Write the script of a host and its files, and start the script, unless a run of this experiment is
# alive on this host.
old_mask=$(umask)
umask 077
fail() { printf '%s\n' "$1" >&2; exit 73; }
for directory in "${script%/*}" "${output%/*}" "${pid_file%/*}" "$run_dir"; do
    [[ -d $directory ]] || mkdir -p -- "$directory" || fail "cannot create $directory"
done
# Nobody else may be able to replace these files or to redirect them. The owner of new files is not
# always this user: some file systems map root to another one.
probe=$script.$$.new
(set -o noclobber && : >"$probe") 2>/dev/null || fail "cannot write $probe"
read -r own_uid < <(stat -c %u -- "$probe")
rm -f -- "$probe"
hint='set another experiment.exp_dir'
directories=("${script%/*}" "${output%/*}" "${pid_file%/*}" "${run_dir%/*}" "$run_dir")
# Directories that may be shared, but in which other users must not rename the ones above.
parents=("${output%/*/*}" "${run_dir%/*/*}")
mapfile -t states < <(stat -c '%f %u' -- "${directories[@]}" "${parents[@]/%//.}")
for ((i = 0; i < ${#directories[@]}; i++)); do
    directory=${directories[i]}
    read -r mode uid <<<"${states[i]}"
    (((0x$mode & 0xf000) == 0x4000)) || fail "$directory is not a directory: $hint"
    [[ $uid == "$own_uid" ]] ||
        fail "$directory belongs to user $(id -nu "$uid" 2>/dev/null || echo "$uid"): $hint"
    ((0x$mode & 2)) && fail "$directory is writable by every user: chmod o-w it, or $hint"
done
for directory in "${parents[@]}"; do
    read -r mode _ <<<"${states[i++]}"
    (((0x$mode & 0x202) == 2)) &&
        fail "$directory is writable by every user and has no sticky bit: chmod o-w it, or $hint"
done
# One start at a time on this host. The lock is held from the checks until the script is visible in
# the process table, so that every later check finds it.
lock_start "$start_lock"
if [[ $boot == "$old_boot" ]] && started_at "$old_pid" && [[ $ticks == "$old_ticks" ]] &&
    { [[ ! -r /proc/$old_pid/environ ]] || carries "$old_pid" "$old_entry"; }; then
    printf '%s\n' "the previous run is alive there (script pid $old_pid)" >&2
    exit 75
fi
carrying "$status_dir_prefix" "$old_entry"
for pid in "${pids[@]}"; do
    started_at "$pid"
    # This process may carry the id of the run that it starts, and so may another part of the run
    # that has been started on this machine.
    [[ -n $ticks && $pid != "$$" ]] || continue
    carries "$pid" "$new_entry" && continue
    # A process that is starting a program, or ending, shows no environment for a moment.
    sleep 0.1
    started_at "$pid"
    [[ -n $ticks ]] || continue
    carries "$pid" "$new_entry" && continue
    printf '%s\n' "a run of this experiment is alive there (pid $pid)" >&2
    exit 75
done
if [[ -n $claim_file ]]; then
    read -r claim <"$claim_file"
    [[ $claim == "$run_id" ]] || { echo "another launch has begun in the meantime" >&2; exit 74; }
fi
if [[ -n $old_output && -e $output ]]; then
    [[ -d ${old_output%/*} ]] || mkdir -p -- "${old_output%/*}"
    mv -- "$output" "$old_output" || fail "cannot keep $output"
fi
for ((i = 0; i < ${#paths[@]}; i++)); do
    # A new file takes the place of the old one, so that a symbolic link is replaced, not followed.
    new_file=${paths[i]}.$$.new
    (set -o noclobber && printf '%s' "${texts[i]}" >"$new_file") || fail "cannot write ${paths[i]}"
    [[ ${paths[i]} != "$script" ]] || chmod 700 -- "$new_file" || fail "cannot make $script executable"
    mv -fT -- "$new_file" "${paths[i]}" || fail "cannot write ${paths[i]}"
done
[[ ! -L $output ]] || fail "$output is a symbolic link"
: >>"$output" || fail "cannot write $output"
umask "$old_mask"
report boot_id "$boot"
if [[ -n $tied ]]; then
    # The script replaces this process, whose parent waits for it.
    started_at "$$"
    report pid "$$"
    report start_ticks "$ticks"
    print_results
    unlock_start # this process carries the id of the run already
    exec bash "$script" </dev/null >>"$output" 2>&1
fi
# The script runs in its own session with its own standard streams, so it outlives this program. It
# begins after its start time has been read, since it may end at once.
command -v setsid >/dev/null || fail "there is no setsid: install util-linux"
coproc starter {
    read -r || exit # this program was killed
    unlock_start
    exec setsid bash "$script" </dev/null >>"$output" 2>&1
}
pid=$starter_PID
started_at "$pid"
report pid "$pid"
report start_ticks "$ticks"
echo >&"${starter[1]}"
# A busy machine takes its time until the script shows its environment.
for ((end = SECONDS + 30; SECONDS < end; )); do
    carries "$pid" "$new_entry" && break
    started_at "$pid"
    [[ -n $ticks ]] || break # it has ended already
    sleep 0.005
done
print_results
