# shellcheck shell=bash disable=SC2034,SC2154
# Part of a host's script that follows the start of the job.

agent_pid=$!
interrupted=yes
while [[ -n $interrupted ]]; do
    interrupted=
    wait "$agent_pid"
    code=$?
done
# If the agent was killed with SIGKILL, the processes it left behind are ended here.
if ((code == 137)); then
    "${agent[@]}" --sweep
fi
agent_pid=
exit "$code"
