# shellcheck shell=bash disable=SC2034,SC2154
# Part of a host's script that detects the host's cores if the host was not probed before: in a dry
# run, and in a run without preflight, which needs only one command per host.

# This host was not probed: detect its cores here. `experiment.envs` takes precedence.
cores=$(nproc)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}"
