# shellcheck shell=bash disable=SC2034,SC2154
# Part of a host's script that makes conda available.

# Use conda from PATH, from CONDA_EXE or from a usual place.
if ! command -v conda >/dev/null; then
    for _base in "${CONDA_EXE%/bin/conda}" ~/miniconda3 ~/miniforge3 ~/anaconda3 /opt/conda; do
        if [ -x "$_base/bin/conda" ]; then export PATH="$_base/condabin:$_base/bin:$PATH"; fi
    done
fi
command -v conda >/dev/null || { echo "flagscale: there is no conda on this host" >&2; exit 1; }
eval "$(conda shell.bash hook)"
