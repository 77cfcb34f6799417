# shellcheck shell=bash
# Program that srun runs on a few nodes other than that of the batch script, in a job that goes on
# without lost nodes. If such a job loses the node of its batch script, Slurm neither ends nor requeues
# it, and this program does. The arguments are variables of job.sh, of the same names; functions of
# job.sh are in front of this program.

umask 077
# shellcheck disable=SC2034 # read by the functions
run_id=$1 job_dir=$2 details=$3 job=$4 earlier_starts=$5 requeue=$6 this_node=$7 first_node=$8 \
    coordinator_dir=$9 on_bad_host=${10} guard_seconds=${11}
exec </dev/null >>"$job_dir/output" 2>&1 || exit 1
while sleep "$guard_seconds"; do
    # Slurm is not asked as long as all agents run.
    ended=("$details"/host_*/"$run_id"/exit.json)
    [[ -e ${ended[0]} ]] || continue
    job_nodes=$(squeue --noheader --jobs="$job" --format=%N) && [[ -n $job_nodes ]] || continue
    mapfile -t job_nodes < <(scontrol show hostnames "$job_nodes")
    [[ " ${job_nodes[*]} " != *" $this_node "* ]] || continue
    # With a hostfile, the first host's agent may be on another node, and the ranks go on.
    [[ -e $coordinator_dir/exit.json || " ${job_nodes[*]} " != *" $first_node "* ]] || continue
    # One of these programs acts.
    mkdir -- "$job_dir/guard.$earlier_starts" 2>/dev/null || exit
    code=1 end_reason=batch_node_lost
    if [[ -e $coordinator_dir/exit.json ]]; then
        end_reason=''
        read_job_code
    elif ((earlier_starts < requeue)); then
        echo "flagscale: job $job has lost $this_node, where its batch script ran, and is requeued"
        scontrol requeue "$job" && exit
    fi
    write_file ended "start=$earlier_starts" "code=$code" "why=$end_reason"
    rm -f -- "$job_dir"/secrets.*
    echo "flagscale: job $job has lost $this_node, where its batch script ran, and is cancelled"
    scancel "$job"
    exit
done
