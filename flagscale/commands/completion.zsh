#compdef flagscale
# Completion of flagscale in zsh. In ~/.zshrc, after compinit:
#   eval "$(flagscale completion zsh)"
_flagscale() {
    local line value text
    local -a open open_texts closed closed_texts
    for line in "${(@f)$(_call_program flagscale "$words[1]" __complete zsh "${(@q)${(@Q)words[2,CURRENT]}}" 2>/dev/null)}"; do
        [[ -n $line ]] || continue
        value=${line%%$'\t'*}
        text=${line#*$'\t'}
        if [[ $value == *[=./] ]]; then
            open+=("$value")
            open_texts+=("$value${text:+  -- $text}")
        else
            closed+=("$value")
            closed_texts+=("$value${text:+  -- $text}")
        fi
    done
    # After these the same word goes on.
    (( $#open )) && compadd -l -S '' -d open_texts -- "${open[@]}"
    (( $#closed )) && compadd -l -d closed_texts -- "${closed[@]}"
}
if [[ $funcstack[1] == _flagscale ]]; then
    _flagscale "$@"
else
    compdef _flagscale flagscale
fi
