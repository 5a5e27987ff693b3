# shellcheck shell=sh
# Finds the mirror and keyring of a Debian or Ubuntu release, for the tools that create root file systems and source this
# file.
# find_suite sets, for the release $suite:
#
#     mirror        the mirror of its packages; MIRROR from the environment takes precedence
#     components    the components of its archive
#     keyring       the keyring that verifies its signatures
#     script        debootstrap's script, which may be that of another release
#
# Ubuntu's releases are looked up alongside Debian's on the mirror that this machine's apt uses, or otherwise on Ubuntu's
# own mirror.

# shellcheck disable=SC2034 # the caller reads them

keyrings=/usr/share/keyrings
keyring_deb=pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb
keyring_sha256=36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8

# The mirror of this machine's own release.
own_mirror() {
    codename="$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)"
    # shellcheck disable=SC2016 # the fields are apt's to fill
    apt-get indextargets --format '$(CREATED_BY) $(CODENAME) $(COMPONENT) $(REPO_URI)' |
        sed -n "s/^Packages $codename main //p" | head -n 1
}

# download URI FILE, with apt's own proxies.
download() {
    /usr/lib/apt/apt-helper -qq -o APT::Sandbox::User=root download-file "$1" "$2" >/dev/null 2>&1
}

is_ubuntu() {
    case "$1" in
        jammy | noble | plucky | questing | resolute | stonking) return 0 ;;
        *) return 1 ;;
    esac
}

ubuntu_mirror() {
    for candidate in "$(own_mirror | sed 's|/debian/*$|/ubuntu|')" http://archive.ubuntu.com/ubuntu; do
        if [ -n "$candidate" ] && download "$candidate/dists/$suite/InRelease" "$PWD/build/$suite.InRelease"; then
            rm -f "$PWD/build/$suite.InRelease"
            echo "$candidate"
            return
        fi
    done
}

find_suite() {
    mkdir -p build
    script="/usr/share/debootstrap/scripts/$suite"
    if is_ubuntu "$suite"; then
        components="main universe"
        mirror="${MIRROR:-$(ubuntu_mirror)}"
        # All of Ubuntu's releases share one script.
        [ -e "$script" ] || script=/usr/share/debootstrap/scripts/gutsy
        keyring="$keyrings/ubuntu-archive-keyring.gpg"
        if ! [ -e "$keyring" ]; then  # no Debian before trixie has the package
            keyring="$PWD/build/ubuntu-archive-keyring.gpg"
            [ -e "$keyring" ] || fetch_keyring
        fi
    else
        components=main
        mirror="${MIRROR:-$(own_mirror)}"
        [ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid
        keyring="$keyrings/debian-archive-keyring.gpg"
    fi
}

fetch_keyring() {
    download "$mirror/$keyring_deb" "$keyring.deb" || return 0  # debootstrap reports the missing keyring
    if echo "$keyring_sha256  $keyring.deb" | sha256sum --check --status; then
        dpkg-deb --fsys-tarfile "$keyring.deb" | tar -xO ./usr/share/keyrings/ubuntu-archive-keyring.gpg >"$keyring.new"
        mv "$keyring.new" "$keyring"
    fi
    rm -f "$keyring.deb"
}

# bootstrap_suite DIRECTORY LOG [OPTION...]
bootstrap_suite() {
    directory="$1" log_file="$2"
    shift 2
    debootstrap --variant=minbase --keyring="$keyring" --components="$(echo "$components" | tr ' ' ,)" "$@" \
        "$suite" "$directory" "$mirror" "$script" >"$log_file" 2>&1 </dev/null
}
