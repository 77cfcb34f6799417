# shellcheck shell=bash disable=SC2034
# Which ports of this host are free.

# Ports at which something listens on this host, of IPv4 and IPv6.
listening() { # $1: port; sets `inode` to its socket's
    local local_address state hex
    printf -v hex '%04X' "$1"
    while read -r _ local_address _ state _ _ _ _ _ inode _; do
        [[ $state == 0A && ${local_address##*:} == "$hex" ]] && return 0
    done < <(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null)
    return 1
}
# A port at which ranks can meet, below the ports that the kernel gives to connections, so that none of
# those takes it first. The agents meet at the port beside it, unless the user says where.
free_port() { # $1: the agents' port, or nothing; sets `free`
    local low
    read -r low _ </proc/sys/net/ipv4/ip_local_port_range
    ((low > 21000)) || low=60999
    for _ in {1..100}; do
        free=$((20000 + (RANDOM * 32768 + RANDOM) % (low - 20000)))
        [[ $free != "$1" ]] && ! listening "$free" || continue
        [[ -n $1 ]] || ! listening $((free + 1)) || continue
        return 0
    done
    return 1
}
