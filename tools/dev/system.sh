#!/usr/bin/env bash
# The system packages that tests use beyond what the README asks for: the one list of them.
# With --if-possible a machine without root or apt, or whose mirror is not reached, is no failure:
# the tests that need more are skipped, and the end of their run says so.
set -euo pipefail

# A program, or a file, and the package that brings it: a compiler for fsccl and Python's headers
# for it; what the test bed makes hosts of (sshd, bridges, packet filters, clocks); the launchers
# that the benchmark runs under.
declare -A packages=(
    [git]=git [g++]=g++ [ps]=procps
    [ssh]=openssh-client [sshd]=openssh-server [ip]=iproute2 [nft]=nftables [faketime]=faketime
    [mpirun.openmpi]=openmpi-bin [mpirun.mpich]=mpich [slurmd]=slurm-wlm [munged]=munge
    [slurmdbd]=slurmdbd [mariadbd]=mariadb-server
)
read -r header package < <("${PYTHON:-python3}" -c '
import sys, sysconfig
print(sysconfig.get_path("include") + "/Python.h", "python%d.%d-dev" % sys.version_info[:2])')
packages[$header]=$package
# A browser for the pages of runs. Ubuntu's is a snap, which tests cannot do with.
browser=chromium-headless-shell
if grep -qsx ID=debian /etc/os-release; then packages[$browser]=$browser; fi

need=()
for name in "${!packages[@]}"; do
    [[ -e $name ]] || PATH=$PATH:/usr/sbin:/sbin command -v "$name" >/dev/null || need+=("${packages[$name]}")
done
((${#need[@]})) || exit 0

if ((EUID)) || ! command -v apt-get >/dev/null; then
    [[ ${1-} == --if-possible ]] && exit 0
    echo "make system installs Debian's packages, as root: ${need[*]}" >&2
    exit 1
fi
echo "== install ${need[*]}"
# Servers are installed to be started by tests, not by their packages.
if [[ ! -e /usr/sbin/policy-rc.d ]]; then
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends "${need[@]}" >/dev/null; }; then
    echo "not installed: ${need[*]}" >&2
    [[ ${1-} == --if-possible ]]
fi
