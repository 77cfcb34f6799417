# shellcheck shell=bash
# Program that srun runs on every node: it replaces itself with the script of the node's rank. The
# arguments are variables of job.sh, of the same names; `leftovers_dir` is the directory of the agents'
# records if this program has to end processes that Slurm does not track, else empty.

umask 077
run_id=$1 job_dir=$2 scripts=$3 outputs=$4 earlier_starts=$5 nodes=$6 first_node=$7
liveness_port=$8 node_count=$9 leftovers_dir=${10}
rank=$SLURM_PROCID name=node-$SLURM_PROCID
if [[ -e $job_dir/hosts ]]; then
    name=$SLURMD_NODENAME
    mapfile -t names <"$job_dir/hosts"
    for index in "${!names[@]}"; do
        [[ ${names[index]} != "$name" ]] || rank=$index
    done
fi
label=host_${rank}_$name
exec </dev/null >>"$outputs/$label.output" 2>&1 || exit 1
if [[ -e $job_dir/secrets.$rank ]]; then
    # shellcheck disable=SC1090
    . "$job_dir/secrets.$rank"
fi
json_string() { # $1: a text; prints it as a JSON string
    local text=${1//\\/\\\\}
    printf '"%s"' "${text//\"/\\\"}"
}
meeting="{\"name\": $(json_string "$SLURMD_NODENAME"), \"earlier_starts\": $earlier_starts"
if ((node_count > 1)); then
    meeting+=", \"master_addr\": $(json_string "$FLAGSCALE_MASTER_ADDR"), \"liveness_port\": $liveness_port"
    meeting+=", \"master_name\": $(json_string "$first_node"), \"hosts\": [$(json_string "$nodes")]"
fi
# End the remaining processes of the run on this node once the process group of its Slurm task is gone.
end_leftovers() { # $1: process group
    local status_entry="FLAGSCALE_STATUS_DIR=$leftovers_dir/$label/$run_id/status" remaining=() ended=() pid
    while kill -0 -- "-$1"; do sleep 1; done 2>/dev/null
    while :; do
        mapfile -t remaining < <(grep -lF -- "$status_entry" /proc/[0-9]*/environ)
        ((${#remaining[@]})) || break
        for pid in "${remaining[@]//[!0-9]/}"; do kill -KILL "$pid" && ended+=("$pid"); done
        sleep 0.1
    done 2>/dev/null
    ((!${#ended[@]})) || echo "flagscale: $SLURMD_NODENAME: ended processes that Slurm left alive: ${ended[*]}"
}
if [[ -n $leftovers_dir ]]; then
    read -r _ _ _ _ group _ </proc/self/stat
    set -m # start it in a process group of its own
    ((!group)) || end_leftovers "$group" &
    set +m
fi
export FLAGSCALE_RUN_ID=$run_id FLAGSCALE_NODE=$SLURMD_NODENAME FLAGSCALE_MEETING="$meeting}"
# If slurmstepd is killed, the script gets TERM and ends the ranks.
death_signal=(setpriv --pdeathsig TERM --)
"${death_signal[@]}" true 2>/dev/null || death_signal=()
exec "${death_signal[@]}" bash "$scripts/${label}_run.sh"
