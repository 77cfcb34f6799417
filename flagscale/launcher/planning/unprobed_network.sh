# shellcheck shell=bash disable=SC2034,SC2154
# Part of a host's script that detects the network interface, if the run has several hosts.

# Find the interface that reaches the other hosts. On the master, its name may resolve to a
# loopback address.
address=
read -r address _ < <(getent ahosts "$master") || true
if [[ $address == 127.* || $address == ::1 ]]; then
    read -r _ _ address _ <<<"${SSH_CONNECTION:-}"
fi
interface=
route=$(ip -o route get "$address" 2>/dev/null || true)
if [[ $route =~ \ dev\ ([^ ]+) ]]; then interface=${BASH_REMATCH[1]}; fi
if [[ $interface == lo ]]; then
    read -r _ interface _ < <(ip -o addr show to "$address") || true
fi
interface=${interface%%@*}
if [[ -n $interface ]]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$interface}"
    export FSCCL_SOCKET_IFNAME="${FSCCL_SOCKET_IFNAME:-=$interface}"
fi
