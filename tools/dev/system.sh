#!/usr/bin/env bash
# Install the system packages that tests use in addition to the README's requirements.
# With --if-possible, exit with 0 if this is not possible (no root, no apt, unreachable mirror): the
# tests that require the missing packages are then skipped and listed at the end of the test run.
set -euo pipefail

# Packages by the program or file that they provide: a compiler and Python's headers for fsccl;
# the test bed's hosts (sshd, bridges, packet filters, clocks); launchers for the benchmark; shells that complete commands.
declare -A packages=(
    [git]=git [g++]=g++ [ps]=procps
    [ssh]=openssh-client [sshd]=openssh-server [ip]=iproute2 [nft]=nftables [faketime]=faketime
    [mpirun.openmpi]=openmpi-bin [mpirun.mpich]=mpich [slurmd]=slurm-wlm [munged]=munge
    [slurmdbd]=slurmdbd [mariadbd]=mariadb-server [zsh]=zsh [fish]=fish
)
read -r header package < <("${PYTHON:-python3}" -c '
import sys, sysconfig
print(sysconfig.get_path("include") + "/Python.h", "python%d.%d-dev" % sys.version_info[:2])')
packages[$header]=$package
# Browser that renders run reports. Ubuntu packages it as a snap, which tests cannot use.
browser=chromium-headless-shell
if grep -qsx ID=debian /etc/os-release; then packages[$browser]=$browser; fi

missing=()
for name in "${!packages[@]}"; do
    [[ -e $name ]] || PATH=$PATH:/usr/sbin:/sbin command -v "$name" >/dev/null || missing+=("${packages[$name]}")
done
((${#missing[@]})) || exit 0

if ((EUID)) || ! command -v apt-get >/dev/null; then
    [[ ${1-} == --if-possible ]] && exit 0
    echo "make system installs Debian packages and requires root: ${missing[*]}" >&2
    exit 1
fi
echo "== install ${missing[*]}"
# Tests start the servers themselves: keep the packages from starting them.
if [[ ! -e /usr/sbin/policy-rc.d ]]; then
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null; }; then
    echo "not installed: ${missing[*]}" >&2
    [[ ${1-} == --if-possible ]]
fi
