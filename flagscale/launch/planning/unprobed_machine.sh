# shellcheck shell=bash disable=SC2034,SC2154
# What a host's script finds out by itself where nobody asked the host before: in a dry run, and in a
# run without a preflight, which then needs one command a host and no more.

# Nobody asked this host what it is like, so it looks. `experiment.envs` wins.
cores=$(nproc)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}"
if [[ -e /proc/driver/nvidia/gpus ]] || command -v nvidia-smi >/dev/null; then
    # No NVLink multicast: it is not safe on hosts that are shared with others.
    export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
    export TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}"
else
    export TORCHDYNAMO_DISABLE="${TORCHDYNAMO_DISABLE:-1}"
fi
