#!/usr/bin/env bash
# tiny llama: host 1 of 2, ranks 2 to 3 of 4.
# Written by flagscale VERSION for run 20250102-030405-abcdef; also runs by hand.
# shellcheck disable=SC2016,SC2317,SC2329 # values are literal; traps call functions
set -uo pipefail

# The run's name, its directory on this host, and what prints them.
who='run 20250102-030405-abcdef on h01'
run_dir=/data/runs/tiny/logs/details/host_1_h01/20250102-030405-abcdef
pid_file=/data/runs/tiny/logs/pids/host_1_h01.pid
exit_file="$run_dir/exit.json"
agent_file="$run_dir/agent.json"
script_file="$run_dir/script"
cd -- /home/user/work || exit 1

# Every process of the run carries this; `stop` ends those and no others.
export FLAGSCALE_RUN_ID=20250102-030405-abcdef
export FLAGSCALE_STATUS_DIR=/data/runs/tiny/logs/details/host_1_h01/20250102-030405-abcdef/status
# Defaults; `experiment.envs` or the environment of the launch wins over them.
export PYTHONUNBUFFERED=1
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='h01:${rank}: '
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=5
export OMP_NUM_THREADS=4
export TORCHDYNAMO_DISABLE=1
# experiment.runner.notify
export FLAGSCALE_NOTIFY_COMMAND='mail -s '"'"'it'"'"''"'"'s over'"'"' $USER'

# The program's own packages, the adapted training backend, this project.
export PYTHONPATH=/opt/flagscale/third_party/Megatron-LM:/opt/flagscale"${PYTHONPATH:+:$PYTHONPATH}"

# Supervisor, launcher of the ranks, training program.
agent=(
    /opt/venv/bin/python -c 'import sys; sys.path[0] = sys.argv.pop(1); from flagscale.launcher.agent import main; sys.exit(main())' /opt/flagscale
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
    /opt/venv/bin/python -u -m torch.distributed.run
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
# For the agent alone: neither the commands below nor the ranks get to see these.
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

# While this run lives here, another start of its script changes nothing and runs nothing.
read -r boot </proc/sys/kernel/random/boot_id
started_at() { # $1: pid; sets `ticks` to when that process was started, to nothing if it is gone
    local stat fields
    ticks=
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return
    read -ra fields <<<"${stat##*) }"
    [[ ${fields[0]} == [ZXx] ]] || ticks=${fields[19]}
}
refuse_beside() { # $1: what it is, $2: its pid, $3: when it was started, $4: in which boot
    [[ $4 == "$boot" ]] || return
    started_at "$2"
    [[ $ticks == "$3" ]] || return
    echo "flagscale: $who is alive already ($1 $2); nothing was changed" >&2
    exit 1
}
if [[ -e $agent_file ]]; then
    IFS= read -r -d '' record <"$agent_file"
    known='"pid": ([0-9]+).*"start_ticks": ([0-9]+).*"boot_id": "([^"]+)'
    [[ $record =~ $known ]] && refuse_beside agent "${BASH_REMATCH[@]:1:3}"
fi
if [[ -e $script_file ]]; then
    read -r other_pid other_ticks other_boot <"$script_file"
    refuse_beside script "$other_pid" "$other_ticks" "$other_boot"
    rm -f -- "$script_file"
fi
started_at "$$"
# Of two starts at the same moment one finds the file of the other.
(umask 077 && mkdir -p -- "$run_dir" "${pid_file%/*}" &&
    set -C && echo "$$ $ticks $boot" >"$script_file" &&
    set +C && echo "$$" >"$pid_file") || exit 1
[[ ! -e $exit_file ]] || rm -f -- "$exit_file"

phase=before_start
agent_pid=

# However the script ends, what follows the job runs and the job's code is kept.
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
        # A stop sends TERM to every process of the run; this may end in its grace period.
        (trap "" TERM INT HUP; set +u -e && eval "$after_stop") ||
            echo "flagscale: after_stop failed with exit code $?" >&2
    fi
    rm -f -- "$pid_file" "$script_file"
    echo "flagscale: $who ended with exit code $code; logs of its ranks: $run_dir/ranks"
    exit "$code"
}
# The agent ends the job; before there is one, the script just ends.
on_signal() {
    [[ -n $agent_pid ]] || exit $((128 + $1))
    interrupted=yes
    kill -TERM "$agent_pid" 2>/dev/null
}
echo "flagscale: $who starts; logs of its ranks: $run_dir/ranks"
trap finish EXIT
trap 'on_signal 15' TERM
trap 'on_signal 2' INT
trap 'on_signal 1' HUP

# Commands before the job run in this shell, so that it sees what they set; the first that fails
# ends the script.
if [[ -n $before_start ]]; then
    set +u -e
    eval "$before_start"
    set -u +e
fi

# The job, watched by an agent that leaves no process of this run behind.
phase=job
(give_secrets && exec "${agent[@]}" -- "${torchrun[@]}" "${program[@]}") &
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
