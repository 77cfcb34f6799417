#!/usr/bin/env bash
# tiny llama: host 1 of 2, ranks 2 to 3 of 4.
# Written by flagscale VERSION for run 20250102-030405-abcdef; can be run by hand.
# shellcheck disable=SC2016,SC2317,SC2329 # values are literal; traps call functions
# Options of the caller's shell (SHELLOPTS, BASHOPTS, BASH_ENV) do not apply to this script. The
# start file that BASH_ENV names is read before before_start instead.
if [[ -f ${BASH_SOURCE[0]-} && ${SHELLOPTS@a}${BASHOPTS@a}${BASH_ENV+x} == *x* ]]; then
    exec env -u SHELLOPTS -u BASHOPTS -u BASH_ENV FLAGSCALE_BASH_ENV="${BASH_ENV-}" \
        bash -- "${BASH_SOURCE[0]}" "$@"
fi
set -uo pipefail

# Name of the run in messages, and its files on this host.
run_label='run 20250102-030405-abcdef on h01'
run_dir=/data/runs/tiny/logs/details/host_1_h01/20250102-030405-abcdef
pid_file=/data/runs/tiny/logs/pids/host_1_h01.pid
exit_file="$run_dir/exit.json"
agent_file="$run_dir/agent.json"
script_file="$run_dir/script"
cd -- /home/user/work || exit 1

# Identity of the run: `stop` ends the processes with this environment, and no others.
export FLAGSCALE_RUN_ID=20250102-030405-abcdef
export FLAGSCALE_STATUS_DIR=/data/runs/tiny/logs/details/host_1_h01/20250102-030405-abcdef/status
# Defaults; overridden by `experiment.envs` and the environment of the launch.
export PYTHONUNBUFFERED=1
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='h01:${rank}: '
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=5
export OMP_NUM_THREADS=4
export TORCHDYNAMO_DISABLE=1
# experiment.runner.notify
export FLAGSCALE_NOTIFY_COMMAND='mail -s '"'"'it'"'"''"'"'s over'"'"' $USER'

# The program's own packages, the adapted training backend, this project.
export PYTHONPATH=/opt/flagscale/third_party/Megatron-LM:/opt/flagscale/flagscale/rank_hooks:/opt/flagscale"${PYTHONPATH:+:$PYTHONPATH}"

# Supervisor, launcher of the ranks, training program.
agent=(
    /opt/venv/bin/python /opt/flagscale/flagscale/run_module.py flagscale.launcher.agent
    --options '{
     "max_restarts": 3,
     "on_failure": "stop",
     "lost_host_timeout": 20.0,
     "start_timeout": 600.0,
     "hang_detection_timeout": 1800.0,
     "run_name": "tiny llama",
     "run_dir": "/data/runs/tiny/logs/details/host_1_h01/20250102-030405-abcdef",
     "name": "h01",
     "node_rank": 1,
     "first_rank": 2,
     "nproc": 2,
     "stop_grace": 60.0,
     "notify_on": [
      "failed",
      "stalled",
      "restarted"
     ],
     "master_addr": "h00",
     "liveness_port": 29501,
     "master_name": "h00"
    }'
)
torchrun=(
    /opt/venv/bin/python -u /opt/flagscale/flagscale/run_module.py torch.distributed.run
    --nnodes 2
    --node_rank 1
    --nproc_per_node 2
    --rdzv_id 20250102-030405-abcdef
    --master_addr h00
    --master_port 29500
    --log_dir /data/runs/tiny/logs/details/host_1_h01/20250102-030405-abcdef/ranks
    --redirects 3
    --tee 3
    --max_restarts 0
)
program=(
    /opt/program.py
    --save /data/runs/tiny/checkpoints
    --load /data/runs/tiny/checkpoints
    --tensorboard-dir /data/runs/tiny/tensorboard
    --wandb-save-dir /data/runs/tiny/wandb
)
# Passed to the agent alone: hidden from the commands below and from the ranks.
hidden_0=${FLAGSCALE_RUN_SECRET-}
hidden_1=${FLAGSCALE_NOTIFY_WEBHOOK-}
unset FLAGSCALE_RUN_SECRET FLAGSCALE_NOTIFY_WEBHOOK
give_secrets() {
    export FLAGSCALE_RUN_SECRET=$hidden_0
    export FLAGSCALE_NOTIFY_WEBHOOK=$hidden_1
}

# experiment.cmds, verbatim.
before_start=
after_stop=

# If this run is still alive on this host, a second start of its script exits without any change.
read -r boot </proc/sys/kernel/random/boot_id
read_start_ticks() { # $1: pid; sets `ticks` to the start time of the process, empty if it has ended
    local stat fields
    ticks=
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return
    read -ra fields <<<"${stat##*) }"
    [[ ${fields[0]} == [ZXx] ]] || ticks=${fields[19]}
}
refuse_if_alive() { # $1: agent or script, $2: its pid, $3: its start ticks, $4: its boot id
    [[ $4 == "$boot" ]] || return
    read_start_ticks "$2"
    [[ $ticks == "$3" ]] || return
    echo "flagscale: $run_label is alive already ($1 $2); nothing was changed" >&2
    exit 1
}
if [[ -e $agent_file ]]; then
    IFS= read -r -d '' record <"$agent_file"
    agent_pattern='"pid": ([0-9]+).*"start_ticks": ([0-9]+).*"boot_id": "([^"]+)'
    [[ $record =~ $agent_pattern ]] && refuse_if_alive agent "${BASH_REMATCH[@]:1:3}"
fi
if [[ -e $script_file ]]; then
    other_pid="" other_ticks="" other_boot=""
    # Another start may have created the file, and not written to it yet.
    for _ in {1..50}; do
        read -r other_pid other_ticks other_boot <"$script_file" && break
        [[ -e $script_file ]] || break
        sleep 0.1
    done
    refuse_if_alive script "$other_pid" "$other_ticks" "$other_boot"
    rm -f -- "$script_file"
fi
read_start_ticks "$$"
# `set -C` makes the write fail if the file exists, so only one of two simultaneous starts goes on, and
# none writes through a symbolic link.
(umask 077 && mkdir -p -- "$run_dir" "${pid_file%/*}" &&
    set -C && echo "$$ $ticks $boot" >"$script_file" &&
    rm -f -- "$pid_file" && echo "$$" >"$pid_file") || exit 1
[[ ! -e $exit_file ]] || rm -f -- "$exit_file"

phase=before_start
agent_pid=
earlier_pid="" # of the last background process before the agent

# Runs after_stop however the script ends, and exits with the job's exit code.
finish() {
    local code=$?
    trap - EXIT
    trap : TERM INT HUP
    if [[ $phase == before_start ]]; then
        local how="failed with exit code $code"
        ((code)) || how="left the script with exit code 0" code=1
        echo "flagscale: before_start $how; the job was not started" >&2
        printf '{"code": %d, "phase": "before_start", "how": "%s", "ended": %(%s)T}\n' \
            "$code" "$how" -1 >"$run_dir/.exit" && mv -- "$run_dir/.exit" "$exit_file"
    fi
    if [[ -n $after_stop ]]; then
        # A stop sends TERM to every process of the run; after_stop may use its grace period.
        (trap "" TERM INT HUP; set +u -e && eval "$after_stop") ||
            echo "flagscale: after_stop failed with exit code $?" >&2
    fi
    rm -f -- "$pid_file" "$script_file"
    echo "flagscale: $run_label ended with exit code $code; logs of its ranks: $run_dir/ranks"
    exit "$code"
}
# The agent ends the job; before the agent is started, the script just exits.
on_signal() {
    # Between the start of the agent and the next command, only bash knows its pid.
    [[ $phase == before_start || ${!-} == "$earlier_pid" ]] || agent_pid=$!
    [[ -n $agent_pid ]] || exit $((128 + $1))
    interrupted=yes
    kill -TERM "$agent_pid" 2>/dev/null
}
echo "flagscale: $run_label starts; logs of its ranks: $run_dir/ranks"
trap finish EXIT
trap 'on_signal 15' TERM
trap 'on_signal 2' INT
trap 'on_signal 1' HUP

# before_start runs in this shell, so that the job sees variables set by it; the first command that
# fails ends the script.
if [[ -n $before_start ]]; then
    set +u
    # The start file of non-interactive shells often defines commands such as `module`.
    # shellcheck source=/dev/null
    [[ -z ${FLAGSCALE_BASH_ENV-} ]] || . "$FLAGSCALE_BASH_ENV"
    set -e
    eval "$before_start"
    set -u +e
fi

# The job runs under an agent that leaves no process of this run behind.
earlier_pid=${!-}
phase=job
(give_secrets && exec "${agent[@]}" -- "${torchrun[@]}" "${program[@]}") &
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
