# shellcheck shell=bash disable=SC2154
# What the batch script of a job does. It runs on the first node that Slurm gives, and holds no value
# of a plan: those are in the variables above it.

umask 077
exec </dev/null >>"$job_dir/output" 2>&1 || exit 1
job=$SLURM_JOB_ID start=${SLURM_RESTART_COUNT:-0} here=$SLURMD_NODENAME
why='' srun_pid='' told='' interrupted=yes watcher=''

# A file of the run's for its launcher, whole or not at all.
put() { # $1: name, then lines
    local name=$1
    shift
    printf '%s\n' "$@" >"$job_dir/.$name" && mv -- "$job_dir/.$name" "$job_dir/$name"
}
# Of a node whose processes are all gone srun does not learn, nor of the end of some that Slurm has lost
# hold of, and would hold the other nodes for ever: agents that have ended say so, and after some time
# one that has not is not there any more.
end_without_lost() {
    local ended since=''
    while sleep 2; do
        ended=("$details"/host_*/"$run_id"/exit.json)
        if [[ ! -e ${ended[0]} ]]; then
            since=
        elif ((SECONDS - ${since:=$SECONDS} >= patience)); then
            ((${#ended[@]} >= count)) || echo "flagscale: $((count - ${#ended[@]})) node(s) of job $job are lost"
            kill -TERM "$srun_pid"
            return
        fi
    done
}
finish() { # $1: exit code, $2: why the job ended; nothing where its ranks did by themselves
    [[ -z $watcher ]] || kill "$watcher" 2>/dev/null
    put ended "start=$start" "code=$1" "why=$2"
    # Slurm may be about to start a cancelled job again.
    [[ $2 == again || $2 == cancelled && $start -lt $requeue ]] || rm -f -- "$job_dir"/secrets.*
    echo "flagscale: job $job of run $run_id ends with exit code $1${2:+ ($2)}"
    exit "$1"
}
started_at() { # $1: pid; sets `ticks` to when that process was started
    local stat fields
    ticks=
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return
    read -ra fields <<<"${stat##*) }"
    ticks=${fields[19]}
}
# TERM to the script of this node: its agent saves and ends the job, on the other nodes too. srun must
# not be told, since it would kill the ranks at once.
end_ranks() {
    local pid began
    [[ -n $srun_pid && -z $told ]] || return
    told=yes
    for _ in {1..50}; do
        if read -r pid began _ <"$own_dir/script" && started_at "$pid" && [[ $ticks == "$began" ]]; then
            echo "flagscale: job $job is to end; its ranks are told to save"
            kill -TERM "$pid" && return
        fi 2>/dev/null
        kill -0 "$srun_pid" 2>/dev/null || return
        sleep 0.1
    done
    kill -TERM "$srun_pid"
}
# USR1 is a stop, or Slurm's signal before the time limit; TERM, which Slurm sends to all processes of
# a job at once, a cancelled one.
trap 'why=${why:-time} interrupted=yes; end_ranks' USR1
trap 'why=${why:-cancelled} interrupted=yes' TERM

echo "flagscale: job $job of run $run_id, start $((start + 1)), on $SLURM_JOB_NODELIST"
if ((start > requeue)); then
    echo "flagscale: Slurm has started this job $start times before; slurm.requeue allows $requeue"
    finish 1 requeued
fi

# Node ranks are Slurm's, unless a hostfile gives the order.
nodes=$SLURM_JOB_NODELIST first=$here own_dir=$details/host_0_node-0/$run_id
for ((part = 1; part < ${SLURM_HET_SIZE:-1}; part++)); do
    list=SLURM_JOB_NODELIST_HET_GROUP_$part
    nodes+=,${!list}
done
if [[ -e $job_dir/hosts ]]; then
    mapfile -t names <"$job_dir/hosts"
    first=${names[0]} nodes=$(IFS=, && echo "${names[*]}")
    for rank in "${!names[@]}"; do
        [[ ${names[rank]} != "$here" ]] || own_dir=$details/host_${rank}_$here/$run_id
    done
fi
if [[ -z $master_addr ]]; then
    master_addr=$first peer=
    while read -r name address; do
        if [[ $name == "$first" ]]; then master_addr=$address; else peer=$address; fi
    done < <(sinfo --noheader --Node --nodes="$nodes" --format='%N %o' 2>/dev/null)
    # Many hosts take their own name for a loopback address. Others reach this one at the address that
    # it has on the way to them.
    read -r address _ < <(getent ahosts "$master_addr")
    if [[ $first == "$here" && $address == 127.* ]]; then
        read -r peer _ < <(getent ahosts "$peer")
        route=$(ip -o route get "$peer" 2>/dev/null)
        [[ ! $route =~ \ src\ ([^ ]+) ]] || master_addr=${BASH_REMATCH[1]}
    fi
fi
if [[ -z $master_port ]]; then
    look="$ports"$'\nfree_port "$1" && echo "$free"'
    on_first=()
    [[ $first == "$here" ]] || on_first=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" --export=ALL)
    master_port=$("${on_first[@]}" bash -c "$look" ports "$liveness_port")
    [[ -n $master_port ]] || finish 1 port
fi
if [[ -z $liveness_port ]]; then
    liveness_port=$((master_port < 65535 ? master_port + 1 : master_port - 1))
fi
put nodes "job=$job" "start=$start" "nodes=$nodes" "master=$master_addr:$master_port" ||
    finish 1 disk

# How an earlier start ended is none of this one's.
rm -f -- "$details"/host_*/"$run_id"/exit.json
export FLAGSCALE_MASTER_ADDR=$master_addr FLAGSCALE_MASTER_PORT=$master_port
given=("$run_id" "$job_dir" "$scripts" "$outputs" "$start" "$nodes" "$first" "$liveness_port" "$count")
# By process groups Slurm finds few of a job's processes: somebody else has to end the others. Where
# it does not answer that does no harm either.
config=$(scontrol show config 2>/dev/null)
[[ $config == *proctrack/* && $config != *proctrack/pgid* ]] || given+=("$details")
srun "${srun[@]}" "${inside[@]}" bash -c "$node" node "${given[@]}" &
srun_pid=$!
if [[ -n $patience ]]; then
    end_without_lost &
    watcher=$!
fi
[[ $why != time ]] || end_ranks
while [[ -n $interrupted ]]; do
    interrupted=
    wait "$srun_pid"
    code=$?
done
[[ ! -e $job_dir/stop ]] || finish "$code" stop
if [[ $why == time ]] && ((start < requeue)); then
    put ended "start=$start" "code=$code" "why=again"
    echo "flagscale: job $job has come to its time limit and is requeued"
    scontrol requeue "$job" && exit 0
fi
finish "$code" "$why"
