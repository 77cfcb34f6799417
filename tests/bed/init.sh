# First process of a host of the bed. It sets up the host's file systems and prints "ready". Then it
# runs the commands on stdin, one per line, and prints "done" after each. When stdin ends, so does
# the host, because the end of process 1 ends its whole pid namespace.
#
# Environment variables: BED_NAME, BED_DIR (this host's files), BED_TOP (the bed's files),
# BED_ROOT (shared | private), BED_SHARED (directories, one per line), BED_USERS (names, one per
# line), BED_INSTALLED (directories in /tmp with programs that every host needs, one per line).
set -eu
IFS='
'
mount --make-rprivate /

mnt=$BED_DIR/mnt
mkdir -p "$mnt"
share_into() { # $1: mount point of the new file system, $2: prefix it replaces, $3: directories
    for directory in $BED_TOP $3; do
        case $directory/ in "$2"/*) ;; *) continue ;; esac
        mkdir -p "$1${directory#"$2"}"
        mount --bind "$directory" "$1${directory#"$2"}"
    done
}

if [ "$BED_ROOT" = private ]; then
    mount -t tmpfs -o mode=755 tmpfs "$mnt"
    mkdir "$mnt/upper" "$mnt/work" "$mnt/root"
    mount -t overlay overlay \
        -o "lowerdir=/,upperdir=$mnt/upper,workdir=$mnt/work,xino=off" "$mnt/root"
    root=$mnt/root
    # A new host does not contain the files in this machine's /tmp, except for programs. The host
    # can read these, and its changes to them are private, as elsewhere in its root.
    for directory in $BED_INSTALLED; do
        mkdir -p "$mnt/held$directory"
        mount --bind "$root$directory" "$mnt/held$directory"
    done
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    for directory in $BED_INSTALLED; do
        mkdir -p "$root$directory"
        mount --move "$mnt/held$directory" "$root$directory"
    done
    mount --rbind /dev "$root/dev"
    mount -t proc proc "$root/proc"
    mount -t sysfs sysfs "$root/sys"
    share_into "$root" "" "$BED_SHARED"
    cd "$root"
    mkdir .old
    pivot_root . .old
    umount -l /.old
    rmdir /.old
    cd /
else
    mount -t proc proc /proc
    mount -t sysfs sysfs /sys
    mount -t tmpfs -o mode=1777 tmpfs "$mnt"
    share_into "$mnt" /tmp "$BED_INSTALLED$IFS$BED_SHARED"
    mount --move "$mnt" /tmp
fi
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd
# Outside the bed's directory, which only root can enter: sshd reads the keys as the login user.
cp "$BED_TOP/identity.pub" /run/authorized_keys
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
# Files about the host in root's home directory are private to each host.
mkdir -p /root/.cache/flagscale/hosts
mount -t tmpfs -o mode=700 tmpfs /root/.cache/flagscale/hosts
hostname "$BED_NAME"

# Files that differ between hosts, with a shared or a private root.
replace_file() { # $1: file to replace; its new content is on stdin
    mkdir -p /run/etc
    cat >"/run/etc/${1##*/}"
    mount --bind "/run/etc/${1##*/}" "$1"
}
replace_file /etc/hosts <"$BED_TOP/etc_hosts"
# Names that are not in the file do not exist; a query to a name server would take 10 s to fail.
sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf >"/run/nsswitch.conf"
replace_file /etc/nsswitch.conf </run/nsswitch.conf
for file in /root/.bashrc /root/.profile; do
    if [ -e "$file" ]; then mount --bind /dev/null "$file"; fi
done
if [ -n "$BED_USERS" ]; then
    number=2000
    cp /etc/passwd /run/passwd
    for user in $BED_USERS; do
        printf '%s:x:%d:100::/home/%s:/bin/sh\n' "$user" "$number" "$user" >>/run/passwd
        mkdir -p "/run/home/$user"
        chown "$number:100" "/run/home/$user"
        number=$((number + 1))
    done
    replace_file /etc/passwd </run/passwd
    mount --bind /run/home /home
fi

start_sshd() {
    /usr/sbin/sshd -D -e -f "$BED_DIR/sshd_config" </dev/null >/dev/null 2>>"$BED_DIR/sshd.log" &
    echo $! >/run/sshd.pid
}

echo ready
while read -r command; do
    case $command in
        network) ip -batch "$BED_DIR/network" </dev/null ;;
        sshd) start_sshd ;;
        *) echo "unknown command: $command" >&2; exit 1 ;;
    esac
    echo done
done
