# shellcheck shell=bash disable=SC2154
# Body of a job's batch script. It runs on the first node that Slurm allocates, and contains no value
# of a plan: those are in the variables above it.

umask 077
exec </dev/null >>"$job_dir/output" 2>&1 || exit 1
job=$SLURM_JOB_ID start=${SLURM_RESTART_COUNT:-0} here=$SLURMD_NODENAME
why='' srun_pid='' end_signalled='' interrupted=yes watcher=''

# Write a file for the launcher atomically.
write_file() { # $1: name, then lines
    local name=$1
    shift
    printf '%s\n' "$@" >"$job_dir/.$name" && mv -- "$job_dir/.$name" "$job_dir/$name"
}
# srun does not notice that all processes of a node are gone, or that processes which Slurm no longer
# tracks have ended, and would keep the other nodes forever. Agents record their end: once one has, an
# agent without a record is considered lost after a timeout.
end_without_lost_nodes() {
    local ended since=''
    while sleep 2; do
        ended=("$details"/host_*/"$run_id"/exit.json)
        if [[ ! -e ${ended[0]} ]]; then
            since=
        elif ((SECONDS - ${since:=$SECONDS} >= lost_node_seconds)); then
            ((${#ended[@]} >= count)) || echo "flagscale: $((count - ${#ended[@]})) node(s) of job $job are lost"
            kill -TERM "$srun_pid"
            return
        fi
    done
}
finish() { # $1: exit code, $2: why the job ended; empty if its ranks ended by themselves
    [[ -z $watcher ]] || kill "$watcher" 2>/dev/null
    write_file ended "start=$start" "code=$1" "why=$2"
    # Slurm may requeue a cancelled job.
    [[ $2 == again || $2 == cancelled && $start -lt $requeue ]] || rm -f -- "$job_dir"/secrets.*
    echo "flagscale: job $job of run $run_id ends with exit code $1${2:+ ($2)}"
    exit "$1"
}
read_start_ticks() { # $1: pid; sets `ticks` to the start time of the process
    local stat fields
    ticks=
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return
    read -ra fields <<<"${stat##*) }"
    ticks=${fields[19]}
}
# Send TERM to the script of this node: its agent saves and ends the job, on the other nodes too. srun
# must not get the signal, because it would kill the ranks at once.
end_ranks() {
    local pid start_ticks
    [[ -n $srun_pid && -z $end_signalled ]] || return
    end_signalled=yes
    for _ in {1..50}; do
        if read -r pid start_ticks _ <"$own_dir/script" && read_start_ticks "$pid" && [[ $ticks == "$start_ticks" ]]; then
            echo "flagscale: job $job is to end; its ranks are signalled to save"
            kill -TERM "$pid" && return
        fi 2>/dev/null
        kill -0 "$srun_pid" 2>/dev/null || return
        sleep 0.1
    done
    kill -TERM "$srun_pid"
}
# USR1 means a stop, or Slurm's signal before the time limit. TERM, which Slurm sends to all processes
# of a job at once, means a cancelled job.
trap 'why=${why:-time} interrupted=yes; end_ranks' USR1
trap 'why=${why:-cancelled} interrupted=yes' TERM

echo "flagscale: job $job of run $run_id, start $((start + 1)), on $SLURM_JOB_NODELIST"
if ((start > requeue)); then
    echo "flagscale: Slurm has started this job $start times before; slurm.requeue allows $requeue"
    finish 1 requeued
fi

# Node ranks follow Slurm's order, unless a hostfile defines it.
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
    # Many hosts resolve their own name to a loopback address. Others reach this host at the source
    # address of its route to them.
    read -r address _ < <(getent ahosts "$master_addr")
    if [[ $first == "$here" && $address == 127.* ]]; then
        read -r peer _ < <(getent ahosts "$peer")
        route=$(ip -o route get "$peer" 2>/dev/null)
        [[ ! $route =~ \ src\ ([^ ]+) ]] || master_addr=${BASH_REMATCH[1]}
    fi
fi
if [[ -z $master_port ]]; then
    find_port="$ports"$'\nfree_port "$1" && echo "$free"'
    on_first=()
    [[ $first == "$here" ]] || on_first=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" --export=ALL)
    master_port=$("${on_first[@]}" bash -c "$find_port" ports "$liveness_port")
    [[ -n $master_port ]] || finish 1 port
fi
if [[ -z $liveness_port ]]; then
    liveness_port=$((master_port < 65535 ? master_port + 1 : master_port - 1))
fi
write_file nodes "job=$job" "start=$start" "nodes=$nodes" "master=$master_addr:$master_port" ||
    finish 1 disk

# Remove the records of an earlier start of this job.
rm -f -- "$details"/host_*/"$run_id"/exit.json
export FLAGSCALE_MASTER_ADDR=$master_addr FLAGSCALE_MASTER_PORT=$master_port
node_arguments=("$run_id" "$job_dir" "$scripts" "$outputs" "$start" "$nodes" "$first" "$liveness_port" "$count")
# If Slurm tracks processes by process group, it finds few of them, and each node's script has to end
# the others. This does no harm if Slurm does not answer.
config=$(scontrol show config 2>/dev/null)
[[ $config == *proctrack/* && $config != *proctrack/pgid* ]] || node_arguments+=("$details")
srun "${srun[@]}" "${inside[@]}" bash -c "$node" node "${node_arguments[@]}" &
srun_pid=$!
if [[ -n $lost_node_seconds ]]; then
    end_without_lost_nodes &
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
    write_file ended "start=$start" "code=$code" "why=again"
    echo "flagscale: job $job has reached its time limit and is requeued"
    scontrol requeue "$job" && exit 0
fi
finish "$code" "$why"
