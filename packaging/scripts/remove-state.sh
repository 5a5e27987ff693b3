# Removes the mirror, the governor's state and the runtime directory. A mirror can be recreated, and the governor's
# database is useless without it. If the removal was forced, directories that are in use stay. An error from rm, such as
# one for the mount point of a disk, is only reported: a package whose script fails here could be neither removed nor
# installed.
remove_state() {
    # Only bytecode is left of the package's code, some of it from programs that ran during the removal.
    find /usr/lib/tidegate -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || :
    find /usr/lib/tidegate -depth -type d -empty -delete 2>/dev/null || :
    if in_use /var/lib/tidegate/driver; then
        echo "tidegate: running containers load the driver from /var/lib/tidegate/driver; when they have ended:" \
            "rm -r /var/lib/tidegate" >&2
    else
        rm -rf --one-file-system /var/lib/tidegate/driver /var/lib/tidegate/state.db* || :
    fi
    if in_use /run/tidegate; then
        echo "tidegate: running containers have their grants in /run/tidegate, which disappears at the next boot" >&2
    else
        rm -rf --one-file-system /run/tidegate || :
    fi
    # The file that `tidegate cdi generate` wrote names our hook.
    rm -f /run/cdi/tidegate.json
    # Anything else there, such as the journal of an engine that could not be restored, stays.
    rmdir /var/lib/tidegate/setup 2>/dev/null || :
    rmdir /var/lib/tidegate 2>/dev/null || :
}
