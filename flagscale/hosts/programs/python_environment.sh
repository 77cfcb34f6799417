# shellcheck shell=bash disable=SC2034,SC2154
# Report the Python environment of this host: from the cache of an earlier probe, or by running it.

# Read the cache. A single `stat` decides whether its contents are still valid.
read_cache() { # sets `environment`
    local line lines=() paths=("${cache%/*}" "$cache") stats=() current_stats=() cached_lines=()
    local private="^$EUID,[0-7]*[0145][0145],"
    [[ -f $cache && ! -L $cache && ! -L ${cache%/*} ]] || return
    { mapfile -t lines <"$cache"; } 2>/dev/null
    [[ ${lines[0]-} == "$key" && ${lines[-1]} == end ]] || return
    for line in "${lines[@]:1}"; do
        case $line in
            "stat "*)
                line=${line#stat }
                stats+=("${line%% *}")
                paths+=("${line#* }")
                ;;
            "absent "*) [[ ! -e ${line#absent } ]] || return ;;
            "= "*) cached_lines+=("$line") ;;
        esac
    done
    mapfile -t current_stats < <(
        LC_ALL=C stat -L -c '%u,%a,%d:%i:%s:%.9Y:%.9Z' -- "${paths[@]}" 2>/dev/null
    )
    [[ ${current_stats[0]-} =~ $private && ${current_stats[1]-} =~ $private ]] || return
    [[ ${current_stats[*]:2} == "${stats[*]}" ]] || return
    printf -v environment '%s\n' "${cached_lines[@]}"
}
report_python_error() { # $1: output of the failed command
    local last=${1##*$'\n'}
    report python_error "${last:-its environment cannot be activated}"
}
inspect_python() {
    local tree='' key cache='' environment='' replies=''
    local cache_root=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
    if [[ -n $compare_code ]]; then
        # The state of the code's files before Python reads them.
        tree=$(find -L "${code_roots[@]}" \( -name __pycache__ -o -name .git \) -prune -o \
            -printf '%p %D:%i %s %T@ %C@\n' 2>/dev/null | sha256sum)
    fi
    key="flagscale $query_digest $tree $HOSTNAME $PATH"
    key+=" ${PYTHONPATH-} ${PYTHONHOME-} ${PYTHONNOUSERSITE-}"
    [[ $cache_root == /* && $key$cache_root != *$'\n'* ]] &&
        cache=$cache_root/flagscale/hosts/$HOSTNAME-$cache_name
    if [[ -n $cache && -z $ignore_cache ]] && read_cache; then
        report cached yes
    elif ! environment=$(
        python_program inspect "$project" "$compare_code" "$python" "$cache" "$key" 2>&1
    ); then
        report_python_error "$environment"
        return
    fi
    # Replies of modules are never cached: they may change without any sign that could be checked.
    if ((${#module_queries[@]})) && ! replies=$(python_program query "${module_queries[@]}" 2>&1); then
        report_python_error "$replies"
        return
    fi
    report python "$environment"$'\n'"$replies"
}
