# shellcheck shell=bash
# For jobs started with --no-kill, which go on without lost nodes. If such a job loses its batch node,
# on which its batch script runs, Slurm neither ends nor requeues it; this program does so. srun runs it
# on a few other nodes. It requeues or cancels the job once its coordinator has ended or is lost, too.
#
# job.sh puts its functions write_file, read_places, is_in_places and read_job_code in front of this
# program. They read run_id, job_dir, details, coordinator_dir and on_bad_host, and set code.

umask 077
# shellcheck disable=SC2034 # read by the functions
run_id=$1 job_dir=$2 details=$3 job_id=$4 starts_before=$5 max_requeues=$6 batch_node=$7 first_node=$8 \
    coordinator_dir=$9 on_bad_host=${10} poll_seconds=${11}
# srun, which passes output on, ends with the batch node.
exec </dev/null >>"$job_dir/output" 2>&1 || exit 1
while sleep "$poll_seconds"; do
    # Ask Slurm only after some agent has ended.
    exit_files=("$details"/host_*/"$run_id"/exit.json)
    [[ -e ${exit_files[0]} ]] || continue
    # Without an answer, no node counts as lost.
    node_list=$(squeue --noheader --jobs="$job_id" --format=%N) && [[ -n $node_list ]] || continue
    node_names=$(scontrol show hostnames "$node_list") && [[ -n $node_names ]] || continue
    mapfile -t nodes <<<"$node_names"
    [[ " ${nodes[*]} " != *" $batch_node "* ]] || continue
    # With a hostfile the coordinator may not be on the batch node; then its loss alone does not end
    # the run.
    [[ -e $coordinator_dir/exit.json || " ${nodes[*]} " != *" $first_node "* ]] || continue
    # Only the guard that creates this directory acts. Any other failure, as of a full disk, may pass.
    guard_dir=$job_dir/guard.$starts_before
    if ! mkdir -- "$guard_dir" 2>/dev/null; then
        [[ ! -d $guard_dir ]] || exit 0
        continue
    fi
    code=1 end_reason=batch_node_lost
    if [[ -e $coordinator_dir/exit.json ]]; then
        end_reason=''
        read_job_code
        echo "flagscale: job $job_id has ended with code $code without $batch_node, where its batch script ran; its nodes are released"
    else
        echo "flagscale: job $job_id has lost $batch_node, where its batch script ran"
        if ((starts_before < max_requeues)); then
            # A successful request ends this program. slurmctld may not answer while a backup takes
            # over, perhaps from the same node.
            for _ in {1..10}; do
                echo "flagscale: requeueing job $job_id"
                scontrol requeue "$job_id" && exit 0
                sleep "$poll_seconds"
            done
        fi
        echo "flagscale: job $job_id is cancelled"
    fi
    write_file ended "start=$starts_before" "code=$code" "why=$end_reason"
    rm -f -- "$job_dir"/secrets.*
    until scancel "$job_id"; do
        sleep "$poll_seconds"
    done
    exit 0
done
