# Completion of flagscale in bash. In ~/.bashrc:
#   eval "$(flagscale completion bash)"
_flagscale() {
    local value program=${COMP_WORDS[0]/#\~/$HOME}
    COMPREPLY=()
    # Words are separated at = and :, so the line is passed whole.
    while IFS=$'\t' read -r value _; do
        COMPREPLY+=("$value")
    done < <("$program" __complete bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
    if ((${#COMPREPLY[@]} == 1)) && [[ ${COMPREPLY[0]} == *[=./] ]]; then
        compopt -o nospace
    fi
}
complete -o nosort -F _flagscale flagscale 2>/dev/null || complete -F _flagscale flagscale
