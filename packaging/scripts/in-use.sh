# Returns whether a mount of any process leads below a directory. The mirror and the grant are mounted in containers,
# and files that are removed disappear there as well.
in_use() {
    # A link that an administrator made leads to another disk: what is mounted is there.
    below="$(readlink -e -- "$1")" && [ -d "$below" ] || return 1
    # Its device and its path in that file system, in the form of mountinfo.
    device="$(findmnt -f -n -o MAJ:MIN -T "$below" | tr -d ' ')"
    root="$(findmnt -f -n -o FSROOT -T "$below")"
    target="$(findmnt -f -n -o TARGET -T "$below")"
    place="$(
        sed 's/\\/\\134/g; s/ /\\040/g' <<END
${root%/}${below#"${target%/}"}
END
    )"
    # With xargs, because on a large node the names make too long a command. A disk that is mounted at the directory
    # itself does not count as use.
    echo /proc/[0-9]*/mountinfo | xargs cat 2>/dev/null | cut -d ' ' -f 2-4 | grep -F " $device $place/" | grep -q -v '/$'
}
