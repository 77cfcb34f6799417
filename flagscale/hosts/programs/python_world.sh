# shellcheck shell=bash disable=SC2034,SC2154
# What the Python of this host is like, from what it has kept of an earlier answer or by asking it.
# What Python said before: one `stat` decides whether it still holds.
kept_world() {
    local line lines=() paths=("${kept%/*}" "$kept") marks=() now=() told=()
    local private="^$EUID,[0-7]*[0145][0145],"
    [[ -f $kept && ! -L $kept && ! -L ${kept%/*} ]] || return
    { mapfile -t lines <"$kept"; } 2>/dev/null
    [[ ${lines[0]-} == "$key" && ${lines[-1]} == end ]] || return
    for line in "${lines[@]:1}"; do
        case $line in
            "made "*)
                line=${line#made }
                marks+=("${line%% *}")
                paths+=("${line#* }")
                ;;
            "gone "*) [[ ! -e ${line#gone } ]] || return ;;
            "= "*) told+=("$line") ;;
        esac
    done
    mapfile -t now < <(LC_ALL=C stat -L -c '%u,%a,%d:%i:%s:%.9Y:%.9Z' -- "${paths[@]}" 2>/dev/null)
    [[ ${now[0]-} =~ $private && ${now[1]-} =~ $private ]] || return
    [[ ${now[*]:2} == "${marks[*]}" ]] || return
    printf -v world '%s\n' "${told[@]}"
}
not_answered() { # $1: what was said instead
    local last=${1##*$'\n'}
    say python_error "${last:-its environment cannot be activated}"
}
look_at_python() {
    local tree='' key kept='' world='' replies='' cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
    if [[ -n $compared ]]; then
        # The files of its code as they are before Python reads them.
        tree=$(find -L "${code_roots[@]}" \( -name __pycache__ -o -name .git \) -prune -o \
            -printf '%p %D:%i %s %T@ %C@\n' 2>/dev/null | sha256sum)
    fi
    key="flagscale $question $tree $HOSTNAME $PATH"
    key+=" ${PYTHONPATH-} ${PYTHONHOME-} ${PYTHONNOUSERSITE-}"
    [[ $cache == /* && $key$cache != *$'\n'* ]] && kept=$cache/flagscale/hosts/$HOSTNAME-$kept_name
    if [[ -n $kept && -z $fresh ]] && kept_world; then
        say kept yes
    elif ! world=$(python_program look "$project" "$compared" "$python" "$kept" "$key" 2>&1); then
        not_answered "$world"
        return
    fi
    # What its modules answer changes without its being told: it is never kept.
    if ((${#asked[@]})) && ! replies=$(python_program ask "${asked[@]}" 2>&1); then
        not_answered "$replies"
        return
    fi
    say python "$world"$'\n'"$replies"
}
