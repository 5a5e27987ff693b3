# A mirror is made anew, and the governor's books are of no use without it. What somebody forced the removal for stays
# while it is in use. What cannot be removed, as where a disk is mounted, rm tells of: a package whose script fails here can
# neither be removed nor installed.
remove_state() {
    # Of our code only bytecode is left, some of it from what ran during the removal.
    find /usr/lib/tidegate -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || :
    find /usr/lib/tidegate -depth -type d -empty -delete 2>/dev/null || :
    if in_use /var/lib/tidegate/driver; then
        echo "tidegate: containers that run load the driver from /var/lib/tidegate/driver; when they have ended:" \
            "rm -r /var/lib/tidegate" >&2
    else
        rm -rf --one-file-system /var/lib/tidegate/driver /var/lib/tidegate/state.db* || :
    fi
    if in_use /run/tidegate; then
        echo "tidegate: containers that run have their grants from /run/tidegate, which goes with the next boot" >&2
    else
        rm -rf --one-file-system /run/tidegate || :
    fi
    # What `tidegate cdi generate` wrote names our hook.
    rm -f /run/cdi/tidegate.json
    # What else is there, the journal of an engine that could not be put back, stays.
    rmdir /var/lib/tidegate/setup 2>/dev/null || :
    rmdir /var/lib/tidegate 2>/dev/null || :
}
