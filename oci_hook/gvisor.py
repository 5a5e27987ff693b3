"""gVisor's runsc, which runs hooks as runc does and cannot be served.

A container's programs run on a kernel of gVisor's own, in a process that has left the host's file
system: no mount of the hook's reaches them, and device nodes neither. Without these checks the
hook fails to find the root file system, which says nothing of the cause.
"""

from __future__ import annotations

from oci_hook.errors import BundleError, show

NAME = "runsc"
PROCESS = b"runsc-sandbox"
"""What runsc calls the process whose number is in the OCI state, in its command line."""


def refusal(runtime: str) -> BundleError:
    """Return the error for a container that asks for a GPU."""
    return BundleError(
        f"the runtime {show(runtime)} (gVisor) is not supported: its containers have a kernel of"
        " their own, which no mount and no device of the host's reaches",
        hint="start containers that ask for a GPU with runc or crun",
    )


def refuse_process(pid: int) -> None:
    """Refuse a container whose process is gVisor's."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
            words = file.read(256)
    except OSError:
        return  # what has ended is refused where it is needed
    if words.partition(b"\0")[0] == PROCESS:
        raise refusal(NAME)
