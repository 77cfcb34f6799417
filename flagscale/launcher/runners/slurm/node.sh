# shellcheck shell=bash
# What srun runs on every node: it makes itself the script of the node's rank.

umask 077
run_id=$1 job_dir=$2 scripts=$3 outputs=$4 start=$5 nodes=$6 first=$7 liveness_port=$8 count=$9
guarded=${10-}
rank=$SLURM_PROCID name=node-$SLURM_PROCID
if [[ -e $job_dir/hosts ]]; then
    name=$SLURMD_NODENAME
    mapfile -t names <"$job_dir/hosts"
    for number in "${!names[@]}"; do
        [[ ${names[number]} != "$name" ]] || rank=$number
    done
fi
label=host_${rank}_$name
exec </dev/null >>"$outputs/$label.output" 2>&1 || exit 1
if [[ -e $job_dir/secrets.$rank ]]; then
    # shellcheck disable=SC1090
    . "$job_dir/secrets.$rank"
fi
text() { # $1: a text; as JSON
    local text=${1//\\/\\\\}
    printf '"%s"' "${text//\"/\\\"}"
}
meeting="{\"name\": $(text "$SLURMD_NODENAME"), \"earlier_starts\": $start"
if ((count > 1)); then
    meeting+=", \"master_addr\": $(text "$FLAGSCALE_MASTER_ADDR"), \"liveness_port\": $liveness_port"
    meeting+=", \"master_name\": $(text "$first"), \"hosts\": [$(text "$nodes")]"
fi
# Ends what is left of the run here once all that Slurm takes for its task, a process group, is gone.
guard() { # $1: the group
    local own="FLAGSCALE_STATUS_DIR=$guarded/$label/$run_id/status" left=() ended=() pid
    while kill -0 -- "-$1"; do sleep 1; done 2>/dev/null
    while :; do
        mapfile -t left < <(grep -lF -- "$own" /proc/[0-9]*/environ)
        ((${#left[@]})) || break
        for pid in "${left[@]//[!0-9]/}"; do kill -KILL "$pid" && ended+=("$pid"); done
        sleep 0.1
    done 2>/dev/null
    ((!${#ended[@]})) || echo "flagscale: $SLURMD_NODENAME: ended what Slurm has left: ${ended[*]}"
}
if [[ -n $guarded ]]; then
    read -r _ _ _ _ group _ </proc/self/stat
    set -m # in a group of its own
    ((!group)) || guard "$group" &
    set +m
fi
export FLAGSCALE_RUN_ID=$run_id FLAGSCALE_NODE=$SLURMD_NODENAME FLAGSCALE_MEETING="$meeting}"
# Whoever kills slurmstepd leaves nobody who would end the ranks: the script hears of it.
heeding=(setpriv --pdeathsig TERM --)
"${heeding[@]}" true 2>/dev/null || heeding=()
exec "${heeding[@]}" bash "$scripts/${label}_run.sh"
