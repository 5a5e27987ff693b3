# Returns whether anything below a directory is mounted in any process's mount namespace. The mirror and the grant are mounted in
# containers, and files that are removed disappear there as well.
in_use() {
    # Resolved, because an administrator may have made it a link to a directory on another disk.
    below="$(readlink -e -- "$1")" && [ -d "$below" ] || return 1
    # Its device and its path in that file system, in the form that mountinfo uses.
    device="$(findmnt -f -n -o MAJ:MIN -T "$below" | tr -d ' ')"
    root="$(findmnt -f -n -o FSROOT -T "$below")"
    target="$(findmnt -f -n -o TARGET -T "$below")"
    place="$(
        sed 's/\\/\\134/g; s/ /\\040/g' <<END
${root%/}${below#"${target%/}"}
END
    )"
    # With xargs, because on a large node the names would exceed the maximum length of a command line. A disk that is
    # mounted at the directory itself does not count as use.
    echo /proc/[0-9]*/mountinfo | xargs cat 2>/dev/null | cut -d ' ' -f 2-4 | grep -F " $device $place/" | grep -q -v '/$'
}
