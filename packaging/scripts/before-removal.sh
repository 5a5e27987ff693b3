# Functions for the packages' removal scripts: refuse a removal while containers are running, and undo `tidegate setup`.

# An engine ends a container with the program that started it: without that program, no container could be ended.
refuse_in_use() {
    if in_use /run/tidegate || in_use /var/lib/tidegate/driver; then
        echo "tidegate: containers that use Tidegate are running, and engines need its programs to end them; end them" \
            "first (tidegate ps)" >&2
        exit 1
    fi
}

# Engines' configurations name our programs. A container with a missing runtime does not start, and one with a missing
# hook starts ungoverned.
undo_setups() {
    journal=/var/lib/tidegate/setup/journal.json
    [ -e "$journal" ] || return 0
    for engine in docker podman containerd crio; do
        grep -qs "\"$engine\":" "$journal" || continue  # undoing the last engine removes the journal
        tidegate setup "$engine" --undo ||
            echo "tidegate: $engine is still set up; remove tidegate-hook and tidegate-runtime from its files by hand" >&2
    done
}
