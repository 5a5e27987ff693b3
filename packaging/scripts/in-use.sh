# Whether a mount of any process leads below a directory. A container has the mirror and its grant mounted, and files that
# are removed are gone for it as well.
in_use() {
    # An administrator's link leads to another disk: what is mounted is there.
    below="$(readlink -e -- "$1")" && [ -d "$below" ] || return 1
    # Its device and its place in that file system, as mountinfo tells both.
    device="$(findmnt -f -n -o MAJ:MIN -T "$below" | tr -d ' ')"
    root="$(findmnt -f -n -o FSROOT -T "$below")"
    target="$(findmnt -f -n -o TARGET -T "$below")"
    place="$(
        sed 's/\\/\\134/g; s/ /\\040/g' <<END
${root%/}${below#"${target%/}"}
END
    )"
    # By xargs: on a large node they make too long a command. Where a disk is mounted at the directory, that is no use of it.
    echo /proc/[0-9]*/mountinfo | xargs cat 2>/dev/null | cut -d ' ' -f 2-4 | grep -F " $device $place/" | grep -q -v '/$'
}
