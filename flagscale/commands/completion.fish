# Completion of flagscale in fish. In ~/.config/fish/config.fish:
#   flagscale completion fish | source
function __flagscale_complete
    set --local words (commandline --tokenize --cut-at-cursor --current-process)
    set words[1] (string replace --regex '^~' $HOME -- $words[1])
    $words[1] __complete fish $words[2..] (commandline --current-token --cut-at-cursor) 2>/dev/null
end
complete --command flagscale --no-files --arguments '(__flagscale_complete)'
