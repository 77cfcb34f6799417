# shellcheck shell=bash disable=SC2154
# Filter the output on this host: run filter_program with the first Python that can.
for python in "${pythons[@]}"; do
    if command -v -- "$python" >/dev/null && filter_program "$filter_request" 2>/dev/null; then
        report filtered yes
        break
    fi
done
