# shellcheck shell=bash
# First part of the scripts that a user or a scheduler starts with any environment.

# Options of the caller's shell (SHELLOPTS, BASHOPTS, BASH_ENV) do not apply to this script. The
# start file that BASH_ENV names is read before before_start instead.
if [[ -f ${BASH_SOURCE[0]-} && ${SHELLOPTS@a}${BASHOPTS@a}${BASH_ENV+x} == *x* ]]; then
    exec env -u SHELLOPTS -u BASHOPTS -u BASH_ENV FLAGSCALE_BASH_ENV="${BASH_ENV-}" \
        bash -- "${BASH_SOURCE[0]}" "$@"
fi
