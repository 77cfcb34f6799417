# shellcheck shell=bash disable=SC2154
# Body of a job's batch script. It runs on the first node that Slurm allocates, and contains no value
# of a plan. job.py (render_batch_script) puts these variables in front of it:
#
#   run_id               id of the run
#   job_dir              directory of the files that job and launcher exchange (see files.py)
#   scripts              directory of the nodes' scripts, host_<rank>_<name>_run.sh
#   outputs              directory of the nodes' output, host_<rank>_<name>.output
#   details              directory of the agents' records, host_<rank>_<name>/<run id>/
#   node_count           number of nodes
#   requeue              slurm.requeue: how often Slurm may start this job again
#   lost_node_seconds    time after the end of the job's first agent until srun is ended; empty: never
#   on_bad_host          runner.on_bad_host: if it is not `stop`, the job goes on without lost nodes
#   guard_seconds        interval at which guard.sh looks for this script's node
#   master_addr          address of the ranks' rendezvous; empty: this script finds one
#   master_port          port of the ranks' rendezvous; empty: a free port of the first node
#   liveness_port        port of the agents; empty: next to master_port
#   srun_options         array: options of srun
#   container_command    array: command that runs each node's program in a container; may be empty
#   free_port_source     bash source text of ports.sh, for a shell on the first node
#   node_source          bash source text of node.sh, for a shell on each node
#   guard_source         bash source text of guard.sh, for a shell on a few other nodes

umask 077
exec </dev/null >>"$job_dir/output" 2>&1 || exit 1
job=$SLURM_JOB_ID earlier_starts=${SLURM_RESTART_COUNT:-0} this_node=$SLURMD_NODENAME
end_reason='' srun_pid='' end_signalled='' interrupted=yes helpers=()

# Write a file for the launcher atomically.
write_file() { # $1: name, then lines
    local name=$1
    shift
    printf '%s\n' "$@" >"$job_dir/.$name" && mv -- "$job_dir/.$name" "$job_dir/$name"
}
# Set `places` to the numbers of the hosts that the job is on now, if it goes on without lost nodes.
read_places() {
    local record
    [[ $on_bad_host != stop ]] && record=$(<"$coordinator_dir/liveness.json") || return
    [[ $record =~ \"places\":\ \[([0-9,[:space:]]+)\] ]] || return
    # shellcheck disable=SC2206 # numbers, which are separated by commas and newlines
    places=(${BASH_REMATCH[1]//,/ })
} 2>/dev/null
# Succeed if the file, which is in the directory of a host, is of a host in `places`.
is_in_places() { # $1: path
    local number=${1#"$details"/host_}
    [[ " ${places[*]} " == *" ${number%%_*} "* ]]
}
# Succeed if an agent of the job has recorded its end; sets `ended` to all records.
is_job_ending() {
    local path places
    ended=("$details"/host_*/"$run_id"/exit.json)
    [[ -e ${ended[0]} ]] || return
    read_places || return 0
    for path in "${ended[@]}"; do
        is_in_places "$path" && return
    done
    return 1
}
# End srun a fixed time after the first agent has recorded its end. srun does not notice that all
# processes of a node are gone, or that processes which Slurm no longer tracks have ended, and would
# keep the other nodes forever. The time suffices for all agents to end: one without a record is lost.
end_srun_after_first_agent() {
    local ended since=''
    while sleep 2; do
        if ! is_job_ending; then
            since=
        elif ((SECONDS - ${since:=$SECONDS} >= lost_node_seconds)); then
            ((${#ended[@]} >= node_count)) || echo "flagscale: $((node_count - ${#ended[@]})) node(s) of job $job are lost"
            kill -TERM "$srun_pid"
            return
        fi
    done
}
finish() { # $1: exit code, $2: why the job ended; empty if its ranks ended by themselves
    # An srun that is killed ends its step at once, even if a node of it is lost.
    ((!${#helpers[@]})) || kill -KILL "${helpers[@]}" 2>/dev/null
    write_file ended "start=$earlier_starts" "code=$1" "why=$2"
    # Slurm may requeue a job after TERM, which then needs its secrets again.
    [[ $2 == cancelled && $earlier_starts -lt $requeue ]] || rm -f -- "$job_dir"/secrets.*
    echo "flagscale: job $job of run $run_id ends with exit code $1${2:+ ($2)}"
    exit "$1"
}
# Set `code` to the exit code of a job that may have gone on without nodes: the codes of those, and of
# srun, which misses some of them, do not count.
read_job_code() {
    local path places record records=0 job_code=0
    read_places || return
    for path in "$details"/host_*/"$run_id"/exit.json; do
        is_in_places "$path" && record=$(<"$path") && [[ $record =~ \"code\":\ ([0-9]+) ]] || continue
        ((++records))
        ((job_code)) || job_code=${BASH_REMATCH[1]}
    done
    ((records < ${#places[@]})) || code=$job_code
}
# Succeed if the job has ended because it could not go on without a lost node.
has_lost_place() {
    local number places record
    read_places && record=$(<"$coordinator_dir/liveness.json") || return
    for number in "${places[@]}"; do
        [[ $record != *"\"$number\": \"lost\""* ]] || return 0
    done
    return 1
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
    local pid start_ticks may_have_left=''
    [[ -n $srun_pid && -z $end_signalled ]] || return
    end_signalled=yes
    # The job may go on without this node.
    [[ $on_bad_host == stop || $first_node == "$this_node" ]] || may_have_left=yes
    for _ in {1..50}; do
        [[ -z $may_have_left || ! -e $agent_dir/exit.json ]] || break
        if read -r pid start_ticks _ <"$agent_dir/script" && read_start_ticks "$pid" && [[ $ticks == "$start_ticks" ]]; then
            echo "flagscale: job $job is to end; its ranks are signalled to save"
            kill -TERM "$pid" && return
        fi 2>/dev/null
        kill -0 "$srun_pid" 2>/dev/null || return
        sleep 0.1
    done
    # shellcheck disable=SC2016 # for a shell on the first node
    [[ -n $may_have_left ]] && "${on_first_node[@]}" bash -c 'read -r pid _ <"$1" && kill -TERM "$pid"' \
        end_ranks "$coordinator_dir/script" && return
    kill -TERM "$srun_pid"
}
# USR1 comes from Slurm before the time limit (--signal of sbatch) or from `action=stop`, which also
# creates the file `stop`: below, that file overrides the reason `time`. TERM, which Slurm sends to
# all processes of a job at once, means that the job is cancelled or preempted. Both signals interrupt
# `wait`; `interrupted` makes the loop below wait again.
trap 'end_reason=${end_reason:-time} interrupted=yes; end_ranks' USR1
trap 'end_reason=${end_reason:-cancelled} interrupted=yes' TERM

echo "flagscale: job $job of run $run_id, start $((earlier_starts + 1)), on $SLURM_JOB_NODELIST"
if ((earlier_starts > requeue)); then
    echo "flagscale: Slurm has started this job $earlier_starts times before; slurm.requeue allows $requeue"
    finish 1 too_many_requeues
fi

# Node ranks follow Slurm's order, unless a hostfile defines it.
nodes=$SLURM_JOB_NODELIST first_node=$this_node agent_dir=$details/host_0_node-0/$run_id
coordinator_dir=$agent_dir
for ((component = 1; component < ${SLURM_HET_SIZE:-1}; component++)); do
    list=SLURM_JOB_NODELIST_HET_GROUP_$component
    nodes+=,${!list}
done
if [[ -e $job_dir/hosts ]]; then
    mapfile -t names <"$job_dir/hosts"
    first_node=${names[0]} nodes=$(IFS=, && echo "${names[*]}")
    coordinator_dir=$details/host_0_$first_node/$run_id
    for rank in "${!names[@]}"; do
        [[ ${names[rank]} != "$this_node" ]] || agent_dir=$details/host_${rank}_$this_node/$run_id
    done
fi
on_first_node=()
[[ $first_node == "$this_node" ]] ||
    on_first_node=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$first_node" --export=ALL)
if [[ -z $master_addr ]]; then
    master_addr=$first_node peer=
    while read -r name address; do
        if [[ $name == "$first_node" ]]; then master_addr=$address; else peer=$address; fi
    done < <(sinfo --noheader --Node --nodes="$nodes" --format='%N %o' 2>/dev/null)
    # Many hosts resolve their own name to a loopback address. Others reach this host at the source
    # address of its route to them.
    read -r address _ < <(getent ahosts "$master_addr")
    if [[ $first_node == "$this_node" && $address == 127.* ]]; then
        read -r peer _ < <(getent ahosts "$peer")
        route=$(ip -o route get "$peer" 2>/dev/null)
        [[ ! $route =~ \ src\ ([^ ]+) ]] || master_addr=${BASH_REMATCH[1]}
    fi
fi
if [[ -z $master_port ]]; then
    find_port="$free_port_source"$'\nfind_free_port "$1" && echo "$free_port"'
    master_port=$("${on_first_node[@]}" bash -c "$find_port" find_port "$liveness_port")
    [[ -n $master_port ]] || finish 1 port
fi
if [[ -z $liveness_port ]]; then
    liveness_port=$((master_port < 65535 ? master_port + 1 : master_port - 1))
fi
write_file nodes "job=$job" "start=$earlier_starts" "nodes=$nodes" "master=$master_addr:$master_port" ||
    finish 1 disk

# Remove the records of an earlier start of this job.
rm -f -- "$details"/host_*/"$run_id"/exit.json
export FLAGSCALE_MASTER_ADDR=$master_addr FLAGSCALE_MASTER_PORT=$master_port
# If Slurm tracks processes by process group, it finds few of them, and each node's program has to end
# the others: it does so if `leftovers_dir` is not empty. This does no harm if Slurm does not answer.
leftovers_dir=$details
config=$(scontrol show config 2>/dev/null)
[[ $config != *proctrack/* || $config == *proctrack/pgid* ]] || leftovers_dir=
# The arguments of node.sh, in its order.
node_arguments=(
    "$run_id" "$job_dir" "$scripts" "$outputs" "$earlier_starts" "$nodes" "$first_node"
    "$liveness_port" "$node_count" "$leftovers_dir"
)
# A signal of `action=stop` is lost if it comes before Slurm has started this script.
[[ ! -e $job_dir/stop ]] || finish 143 stop
srun "${srun_options[@]}" "${container_command[@]}" bash -c "$node_source" node "${node_arguments[@]}" &
srun_pid=$!
if [[ -n $lost_node_seconds ]]; then
    end_srun_after_first_agent &
    helpers+=($!)
fi
if [[ $on_bad_host != stop ]] && ((node_count > 1)); then
    guards=$((node_count > 4 ? 4 : node_count - 1))
    # The arguments of guard.sh, in its order.
    guard_arguments=(
        "$run_id" "$job_dir" "$details" "$job" "$earlier_starts" "$requeue" "$this_node" "$first_node"
        "$coordinator_dir" "$on_bad_host" "$guard_seconds"
    )
    srun --overlap --no-kill --nodes="$guards" --ntasks="$guards" --ntasks-per-node=1 --exclude="$this_node" \
        --kill-on-bad-exit=0 --wait=0 --export=ALL --cpu-bind=none \
        bash -c "$(declare -f write_file read_places is_in_places read_job_code)"$'\n'"$guard_source" \
        guard "${guard_arguments[@]}" \
        >/dev/null 2>&1 &
    helpers+=($!)
    disown "$!" # so that bash does not report its end
fi
[[ $end_reason != time ]] || end_ranks
while [[ -n $interrupted ]]; do
    interrupted=
    wait "$srun_pid"
    code=$?
done
read_job_code
[[ ! -e $job_dir/stop ]] || finish "$code" stop
requeue_reason='' event=''
if [[ $end_reason == time ]]; then
    requeue_reason=requeued_at_time_limit event='reached its time limit'
elif [[ -z $end_reason ]] && has_lost_place; then
    requeue_reason=requeued_after_loss event='lost a node without which it cannot go on'
fi
if [[ -n $requeue_reason ]] && ((earlier_starts < requeue)); then
    # Not by `finish`, which would remove the secrets.
    write_file ended "start=$earlier_starts" "code=$code" "why=$requeue_reason"
    echo "flagscale: job $job has $event and is requeued"
    scontrol requeue "$job" && exit 0
fi
finish "$code" "$end_reason"
