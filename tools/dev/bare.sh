#!/usr/bin/env bash
# The README's two commands in a system where nothing was installed by hand: what debootstrap makes,
# and what "You need" names. As an ordinary user and as root, in a path with a space.
#   SUITE    release of Debian or Ubuntu (default: this machine's own)
#   TARGETS  what to make there (default: quickstart test)
#   ACCOUNTS who makes it (default: tester root; in this order, since root installs packages)
set -euo pipefail
cd "$(dirname "$0")/../.."

# shellcheck source=/dev/null
suite=${SUITE:-$(. /etc/os-release && echo "$VERSION_CODENAME")}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/flagscale/bare
base=$cache/$suite
room=$cache/room-$suite
logs=$cache/logs-$suite

((EUID == 0)) || { echo "make test-bare needs root: it makes a system and changes into it" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "make test-bare needs debootstrap" >&2; exit 1; }

make_base() {
    [[ -e $base ]] && return
    mkdir -p "$cache"
    rm -rf "$base.part"
    debootstrap --variant=minbase --include=python3,python3-venv,make,git \
        "$suite" "$base.part" ${MIRROR:+"$MIRROR"}
    mv "$base.part" "$base"
}

# How this machine's pip and apt reach their registries, whatever that is.
variables() { env -0 | grep -zE '^(PIP_[A-Z_]+|[A-Za-z]+_(proxy|PROXY)|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|TEST_WORKERS)=' || true; }
configurations() { printf '%s\n' /etc/pip.conf "${PIP_CONFIG_FILE:-}" ~/.config/pip/pip.conf ~/.pip/pip.conf; }
places() { # files and directories that those name
    { variables | tr '\0' '\n'; configurations | xargs -d '\n' cat 2>/dev/null; } |
        sed 's#file://##g' | grep -oE '(^|[ =,])/[^ ,]+' | tr -d " =,"  | sed "s#/simple/*\$##" | sort -u
}

furnish() { # the room: a fresh copy of the base, the tree in it twice
    rm -rf --one-file-system "$room"
    cp -a --reflink=auto "$base" "$room"
    cp /etc/resolv.conf /etc/hosts "$room/etc/"
    apt-config dump | grep -E '^Acquire::(http|https)' >"$room/etc/apt/apt.conf.d/99machine" || true
    local file
    while read -r file; do
        if [[ -f $file ]]; then install -D "$file" "$room$file"; fi
    done < <(configurations; places)
    chroot "$room" useradd --create-home --shell /bin/bash tester
    local account home
    for account in tester root; do
        home=$room$(chroot "$room" bash -c "echo ~$account")
        mkdir -p "$home/flag scale"
        git ls-files -z --cached --others --exclude-standard |
            tar --null --files-from=- --ignore-failed-read -c 2>/dev/null | tar -xC "$home/flag scale"
        [[ ! -f ~/.config/pip/pip.conf ]] || install -D ~/.config/pip/pip.conf "$home/.config/pip/pip.conf"
        chroot "$room" chown -R "$account:" "${home#"$room"}"
    done
}

enter() { # in namespaces of its own, so that no mount and no process outlives it
    local place account target failed=0
    mount --bind "$room" "$room"
    mkdir -p "$logs" "$cache/apt/partial" "$room/logs" "$room/before"
    mount --bind "$logs" "$room/logs"
    mount --bind "$cache/apt" "$room/var/cache/apt/archives"
    mount --rbind /sys "$room/sys"
    mount --rbind /dev "$room/dev"
    while read -r place; do
        [[ -d $place ]] || continue
        mkdir -p "$room$place"
        mount --bind -o ro "$place" "$room$place"
    done < <(places)
    # Not chroot: the test bed enters namespaces, whose root would still be this machine's.
    cd "$room"
    pivot_root . before
    mount -t proc proc /proc
    umount --lazy /before
    for account in ${ACCOUNTS:-tester root}; do
        for target in ${TARGETS:-quickstart test}; do
            make_there "$account" "$target" || failed=1
        done
    done
    return $failed
}

make_there() {
    local account=$1 target=$2 log=/logs/$1-$2.log words code=0 start=$SECONDS
    mapfile -d '' -t words < <(variables)
    setpriv --reuid "$account" --regid "$account" --init-groups --reset-env \
        env LANG=C.UTF-8 "${words[@]}" bash -c 'cd ~/"flag scale" && exec make "$@"' make "$target" \
        </dev/null >"$log" 2>&1 || code=$?
    printf '%-7s make %-12s exit code %d after %d s: %s\n' \
        "$account" "$target" "$code" $((SECONDS - start)) "$(grep . "$log" | tail -n 1)"
    ((code == 0)) || echo "        see $logs${log#/logs}"
    return "$code"
}

if [[ ${1-} == enter ]]; then
    enter
else
    make_base
    furnish
    unshare --mount --pid --fork --kill-child --propagation private "$0" enter
fi
