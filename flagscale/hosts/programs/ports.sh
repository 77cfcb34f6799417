# shellcheck shell=bash disable=SC2034
# Find free TCP ports of this host.

# A port is in use if anything listens on it, over IPv4 or IPv6.
listening() { # $1: port; succeeds if it is in use, and sets `inode` to that of the socket
    local local_address state hex
    printf -v hex '%04X' "$1"
    while read -r _ local_address _ state _ _ _ _ _ inode _; do
        [[ $state == 0A && ${local_address##*:} == "$hex" ]] && return 0
    done < <(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null)
    return 1
}
# Pick a rendezvous port for ranks; sets `free_port`. It lies below the kernel's ephemeral ports, so that
# no outgoing connection takes it first. Its argument is the port that the user has set for the agents,
# which is then not picked. If that is empty, agents use the port after `free_port`, which is free too.
find_free_port() { # $1: port of the agents, or nothing
    local low
    read -r low _ </proc/sys/net/ipv4/ip_local_port_range
    ((low > 21000)) || low=60999
    for _ in {1..100}; do
        free_port=$((20000 + (RANDOM * 32768 + RANDOM) % (low - 20000)))
        [[ $free_port != "$1" ]] && ! listening "$free_port" || continue
        [[ -n $1 ]] || ! listening $((free_port + 1)) || continue
        return 0
    done
    return 1
}
