# shellcheck shell=bash disable=SC2034,SC2154
# What a host's script finds out by itself where nobody asked the host before: in a dry run, and in a
# run without a preflight, which then needs one command a host and no more.

# Nobody asked this host what it is like, so it looks. `experiment.envs` wins.
cores=$(nproc)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}"
