"""A container held at the moment when a runtime runs its hooks: a mount namespace, a root, a process.

It serves tests that examine the hook's effects or start the hook hundreds of times; the runtimes
themselves take longer.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.container.bundles import DiskBundle


class HeldContainer:
    """A held container: in `with HeldContainer(bundle) as held`, `held.hook(argv)` runs the hook on it."""

    def __init__(
        self,
        bundle: DiskBundle,
        *,
        propagation: str = "private",
        mount: str = "",
        host: HeldContainer | None = None,
    ) -> None:
        """`host` is another held container; its mount namespace takes the place of the host's."""
        self.bundle = bundle
        self.enter = ["nsenter", "-m", "-t", str(host.process.pid)] if host else []
        self.mount = mount or 'mount --bind "$1" "$1"'
        self.propagation = propagation

    def __enter__(self) -> Self:
        self.bundle.write()
        root = self.bundle.rootfs
        # The process ends with this one at the latest, which holds the other end of its input.
        script = f'{self.mount} && mount --make-$2 "$1" && echo ready && exec cat'
        self.process = subprocess.Popen(
            [
                *self.enter,
                "unshare",
                "-m",
                "--propagation",
                "private",
                "sh",
                "-c",
                script,
                "sh",
                str(root),
                self.propagation,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def state(self, **changes: object) -> bytes:
        """Return the OCI state, as a runtime writes it."""
        state = {
            "ociVersion": "1.0.2",
            "id": f"held-{self.process.pid}",
            "status": "creating",
            "pid": self.process.pid,
            "bundle": str(self.bundle.path),
            "annotations": self.bundle.config.get("annotations", {}),
        }
        return json.dumps({**state, **changes}).encode()

    def hook(
        self,
        argv: list[str],
        *,
        stage: str = "createRuntime",
        stdin: bytes | None = None,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run the hook."""
        return subprocess.run(
            [*self.enter, *argv, stage],
            input=(self.state() if stdin is None else stdin).decode("utf-8", "surrogateescape"),
            errors="surrogateescape",
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
            env=env or {},
            cwd=cwd,
        )

    def mounts(self) -> list[str]:
        """Return the mount points below the root, as paths inside it."""
        prefix = str(self.bundle.rootfs)
        lines = Path(f"/proc/{self.process.pid}/mountinfo").read_text().splitlines()
        return sorted(
            line.split()[4].removeprefix(prefix)
            for line in lines
            if line.split()[4].startswith(prefix)
        )

    def all_mounts(self) -> list[str]:
        """Return every mount point in the namespace."""
        return [
            line.split()[4]
            for line in Path(f"/proc/{self.process.pid}/mountinfo").read_text().splitlines()
        ]
