"""Refuses containers under gVisor's runsc, which runs hooks as runc does but cannot be supported.

The programs in such a container run on gVisor's own kernel, in a process that has left the host's
file system: neither mounts by the hook nor device nodes reach them. Without these checks the hook
would fail because it does not find the root file system, an error that does not name the cause.
"""

from __future__ import annotations

from oci_hook.errors import BundleError, show

NAME = "runsc"
PROCESS = b"runsc-sandbox"
"""First word in the command line of the process that runsc names in the OCI state."""


def refusal(runtime: str) -> BundleError:
    """Return the error for a container that asks for a GPU."""
    return BundleError(
        f"the runtime {show(runtime)} (gVisor) is not supported: its containers have a kernel of"
        " their own, which mounts and devices of the host do not reach",
        hint="start containers that ask for a GPU with runc or crun",
    )


def refuse_process(pid: int) -> None:
    """Refuse a container if its process belongs to gVisor."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
            words = file.read(256)
    except OSError:
        return  # a process that has ended is refused later
    if words.partition(b"\0")[0] == PROCESS:
        raise refusal(NAME)
