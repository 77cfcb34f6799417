#!/usr/bin/env bash
# Run the README's two commands in a minimal system: debootstrap's packages plus those listed under
# "You need". They run as an ordinary user and as root, in a path with a space.
#   SUITE    release of Debian or Ubuntu (default: that of this machine)
#   TARGETS  make targets to run there (default: quickstart test)
#   ACCOUNTS users to run them as (default: tester root; root last, because it installs packages)
set -euo pipefail
cd "$(dirname "$0")/../.."

# shellcheck source=/dev/null
suite=${SUITE:-$(. /etc/os-release && echo "$VERSION_CODENAME")}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/flagscale/bare
base=$cache/$suite
rootfs=$cache/rootfs-$suite
logs=$cache/logs-$suite

((EUID == 0)) || { echo "make test-bare requires root: it creates a system and enters it" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "make test-bare requires debootstrap" >&2; exit 1; }

make_base() {
    [[ -e $base ]] && return
    mkdir -p "$cache"
    rm -rf "$base.part"
    debootstrap --variant=minbase --include=python3,python3-venv,make,git \
        "$suite" "$base.part" ${MIRROR:+"$MIRROR"}
    mv "$base.part" "$base"
}

# Settings with which this machine's pip and apt reach their registries.
registry_variables() { env -0 | grep -zE '^(PIP_[A-Z_]+|[A-Za-z]+_(proxy|PROXY)|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|TEST_WORKERS)=' || true; }
pip_configs() { printf '%s\n' /etc/pip.conf "${PIP_CONFIG_FILE:-}" ~/.config/pip/pip.conf ~/.pip/pip.conf; }
referenced_paths() { # files and directories named in those settings
    { registry_variables | tr '\0' '\n'; pip_configs | xargs -d '\n' cat 2>/dev/null; } |
        sed 's#file://##g' | grep -oE '(^|[ =,])/[^ ,]+' | tr -d " =,"  | sed "s#/simple/*\$##" | sort -u
}

create_rootfs() { # a fresh copy of the base system, with the source tree for both accounts
    rm -rf --one-file-system "$rootfs"
    cp -a --reflink=auto "$base" "$rootfs"
    cp /etc/resolv.conf /etc/hosts "$rootfs/etc/"
    apt-config dump | grep -E '^Acquire::(http|https)' >"$rootfs/etc/apt/apt.conf.d/99machine" || true
    local file
    while read -r file; do
        if [[ -f $file ]]; then install -D "$file" "$rootfs$file"; fi
    done < <(pip_configs; referenced_paths)
    chroot "$rootfs" useradd --create-home --shell /bin/bash tester
    local account home
    for account in tester root; do
        home=$rootfs$(chroot "$rootfs" bash -c "echo ~$account")
        mkdir -p "$home/flag scale"
        git ls-files -z --cached --others --exclude-standard |
            tar --null --files-from=- --ignore-failed-read -c 2>/dev/null | tar -xC "$home/flag scale"
        [[ ! -f ~/.config/pip/pip.conf ]] || install -D ~/.config/pip/pip.conf "$home/.config/pip/pip.conf"
        chroot "$rootfs" chown -R "$account:" "${home#"$rootfs"}"
    done
}

run_in_rootfs() { # in new namespaces, so that no mount and no process outlives it
    local path account target failed=0
    mount --bind "$rootfs" "$rootfs"
    mkdir -p "$logs" "$cache/apt/partial" "$rootfs/logs" "$rootfs/before"
    mount --bind "$logs" "$rootfs/logs"
    mount --bind "$cache/apt" "$rootfs/var/cache/apt/archives"
    mount --rbind /sys "$rootfs/sys"
    mount --rbind /dev "$rootfs/dev"
    while read -r path; do
        [[ -d $path ]] || continue
        mkdir -p "$rootfs$path"
        mount --bind -o ro "$path" "$rootfs$path"
    done < <(referenced_paths)
    # pivot_root, not chroot: the test bed enters namespaces, whose root would remain this machine's.
    cd "$rootfs"
    pivot_root . before
    mount -t proc proc /proc
    umount --lazy /before
    for account in ${ACCOUNTS:-tester root}; do
        for target in ${TARGETS:-quickstart test}; do
            run_make "$account" "$target" || failed=1
        done
    done
    return $failed
}

run_make() {
    local account=$1 target=$2 log=/logs/$1-$2.log settings code=0 start=$SECONDS
    mapfile -d '' -t settings < <(registry_variables)
    setpriv --reuid "$account" --regid "$account" --init-groups --reset-env \
        env LANG=C.UTF-8 "${settings[@]}" bash -c 'cd ~/"flag scale" && exec make "$@"' make "$target" \
        </dev/null >"$log" 2>&1 || code=$?
    printf '%-7s make %-12s exit code %d after %d s: %s\n' \
        "$account" "$target" "$code" $((SECONDS - start)) "$(grep . "$log" | tail -n 1)"
    ((code == 0)) || echo "        see $logs${log#/logs}"
    return "$code"
}

if [[ ${1-} == enter ]]; then
    run_in_rootfs
else
    make_base
    create_rootfs
    unshare --mount --pid --fork --kill-child --propagation private "$0" enter
fi
