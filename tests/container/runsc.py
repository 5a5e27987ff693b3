#!/usr/bin/python3
"""A stand-in for gVisor's runsc, which no Debian has.

Written from runsc's source of August 2026 (container/container.go: New, State; sandbox/sandbox.go: createSandboxProcess;
specutils/hooks.go): the sandbox process is called runsc-sandbox in its command line, and has namespaces and an empty root of
its own. Hooks run on the host's side and get that process's number, with the status `created`; what one that fails wrote is
in runsc's error. No program of a container is run.
"""

import json
import subprocess
import sys
from pathlib import Path

SANDBOX = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x40000000
MS_PRIVATE, MS_REC, MNT_DETACH, SYS_pivot_root = 1 << 18, 1 << 14, 2, 155
assert libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET) == 0
assert libc.mount(None, b"/", None, MS_PRIVATE | MS_REC, None) == 0
assert libc.mount(b"none", sys.argv[1].encode(), b"tmpfs", 0, None) == 0
os.chdir(sys.argv[1])
assert libc.syscall(SYS_pivot_root, b".", b".") == 0
assert libc.umount2(b".", MNT_DETACH) == 0
os.chdir("/")
os.write(1, b"ready\\n")
os.read(0, 1)
"""


def main():
    command, ident = sys.argv[1:], sys.argv[-1]
    bundle = command[command.index("--bundle") + 1]
    config = json.loads(Path(bundle, "config.json").read_text())
    root = Path(bundle, "sandbox")
    root.mkdir()
    sandbox = subprocess.Popen(
        ["runsc-sandbox", "-c", SANDBOX, root],
        executable="/usr/bin/python3", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert sandbox.stdout.readline() == b"ready\n"
        state = {
            "ociVersion": "1.2.0",
            "id": ident,
            "status": "created",
            "pid": sandbox.pid,
            "bundle": bundle,
        }
        state["annotations"] = config.get("annotations", {})
        hooks = config.get("hooks", {})
        for hook in [*hooks.get("prestart", ()), *hooks.get("createRuntime", ())]:
            done = subprocess.run(
                hook["args"], executable=hook["path"], input=json.dumps(state), capture_output=True, text=True, check=False,
                env=dict(word.split("=", 1) for word in hook["env"]),
            )  # fmt: skip
            if done.returncode:
                sys.exit(
                    f'creating container: failure executing hook "{hook["path"]}", err: exit status {done.returncode}\n'
                    f"stdout: {done.stdout}\nstderr: {done.stderr}"
                )
    finally:
        sandbox.kill()
        sandbox.wait()


if __name__ == "__main__":
    main()
