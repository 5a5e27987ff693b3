# Moves Podman's hooks out of a directory that earlier versions used and that Buildah reads as well: Buildah fails to
# build images while they are there.
move_hooks() {
    grep -qs '"/usr/bin/tidegate-hook"' /etc/containers/oci/hooks.d/50-tidegate-devices.json || return 0
    grep -qs '"podman":' /var/lib/tidegate/setup/journal.json || return 0
    if said=$(tidegate setup podman 2>&1); then
        echo "$said" | sed -n 's/^podman: /tidegate: /p; s/^to do: /tidegate: to do: /p'
    else
        echo "tidegate: Podman's hooks are still in a directory where they make Buildah fail: ${said##*tidegate: }" >&2
    fi
}
