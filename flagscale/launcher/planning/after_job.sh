# shellcheck shell=bash disable=SC2034,SC2154
# What a host's script does from the start of the job on.

agent_pid=$!
interrupted=yes
while [[ -n $interrupted ]]; do
    interrupted=
    wait "$agent_pid"
    code=$?
done
# Nobody can kill -9 the agent and keep the job: what it left is ended here.
if ((code == 137)); then
    "${agent[@]}" --sweep
fi
agent_pid=
exit "$code"
