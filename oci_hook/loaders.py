"""For each machine, the directories in which glibc's loaders search an image for the driver."""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from oci_hook.light_typing import NamedTuple

# No loader searches this directory by default. Where glibc has no subdirectory for the machine
# (i386, and aarch64 with glibc 2.37 or later), ld.so.cache points to it.
BY_CACHE = "tidegate"
TLS = "tls"  # loaders older than glibc 2.37 search it first, or directly after glibc-hwcaps


class LoadersOf(NamedTuple):
    """Names and search directories of the loaders for a machine's 64-bit programs."""

    library_dirs: tuple[str, ...]
    name: str
    directory: str  # where programs expect the loader
    musl: str
    hwcaps: str  # the subdirectory for almost all processors since glibc 2.33; "": there is none
    platforms: tuple[str, ...]  # values of $PLATFORM, by processor and loader
    before: tuple[str, ...]  # subdirectories that a loader searches before Tidegate's
    # Loaders up to glibc 2.36 search these after Tidegate's, nested in this order.
    behind: tuple[str, ...]


LOADERS = {
    "x86_64": LoadersOf(
        ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib64", "lib64"),
        "ld-linux-x86-64.so.2",
        "lib64",
        "lib/ld-musl-x86_64.so.1",
        "glibc-hwcaps/x86-64-v2",
        ("x86_64", "haswell", "xeon_phi"),
        ("glibc-hwcaps/x86-64-v4", "glibc-hwcaps/x86-64-v3"),
        ("tls", "haswell", "xeon_phi", "avx512_1", "x86_64"),
    ),
    "aarch64": LoadersOf(
        ("usr/lib/aarch64-linux-gnu", "lib/aarch64-linux-gnu", "usr/lib64", "lib64"),
        "ld-linux-aarch64.so.1",
        "lib",
        "lib/ld-musl-aarch64.so.1",
        "",
        ("aarch64",),
        (),
        ("tls", "aarch64", "atomics"),
    ),
}


def subdirectory(loaders: LoadersOf, loader: bytes) -> str:
    """Return the subdirectory of a library directory in which this loader finds the driver."""
    if loaders.hwcaps and b"glibc-hwcaps" in loader:
        return loaders.hwcaps
    # glibc before 2.33 does not support glibc-hwcaps. Up to 2.36, a loader contains `tls` as a
    # separate string.
    if loaders.hwcaps or b"\0tls\0" in loader:
        return TLS
    return BY_CACHE
