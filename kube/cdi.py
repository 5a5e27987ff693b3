"""Writes a CDI specification for each claim, which the engine reads when a container starts.

The container's part of the claim is encoded in the arguments of the hook, which no tenant can
change. Files appear atomically, and only root may read them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from governor.cdi import HOOK, make_claim_spec
from kube.claims import AllocatedClaim
from kube.errors import CdiError
from kube.names import CDI_CLASS, DRIVER

_PREFIX, _SUFFIX, _NEW = f"{DRIVER}-{CDI_CLASS}_", ".json", ".new"


def make_spec(
    claim: AllocatedClaim,
    minors: Mapping[str, int | None],
    *,
    hook: str = HOOK,
    arguments: Sequence[str] = (),
    dev_dir: str = "/dev",
) -> dict[str, Any]:
    """Return the CDI specification of a claim.

    `minors` are the minor numbers of its GPUs' device nodes, by UUID; a simulated GPU has none.
    Raise DeviceError if the host lacks a device node.
    """
    shares = [(share.name, minors.get(share.uuid)) for share in claim.shares]
    return make_claim_spec(
        claim.reference.uid, shares, hook=hook, arguments=arguments, dev_dir=dev_dir
    )


class Directory:
    """The directory from which engines read CDI specifications; only claims' files are touched."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def file(self, uid: str) -> Path:
        """Return the file of a claim."""
        return self._path / f"{_PREFIX}{uid}{_SUFFIX}"

    def write(self, uid: str, spec: Mapping[str, Any]) -> bool:
        """Write a claim's specification; return False if the same one already exists."""
        data = json.dumps(spec, indent=2).encode() + b"\n"
        path = self.file(uid)
        new = path.with_suffix(_NEW)  # engines read only .json and .yaml
        try:
            if self._same(path, data):
                return False
            self._path.mkdir(mode=0o755, parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(new, flags, 0o600), "wb") as file:  # noqa: PTH123 - a descriptor
                file.write(data)
            new.rename(path)
        except OSError as e:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            raise CdiError(
                f"{path}: {e.strerror}",
                hint="free disk space, or make the directory writable by the driver",
            ) from e
        return True

    def has(self, uid: str) -> bool:
        """Return whether a claim's specification exists."""
        return self.file(uid).is_file()

    def remove(self, uid: str) -> bool:
        """Remove a claim's specification; return False if there is none."""
        path = self.file(uid)
        try:
            path.with_suffix(_NEW).unlink(missing_ok=True)
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as e:
            raise CdiError(f"{path}: {e.strerror}", hint="remove it by hand") from e
        return True

    def uids(self) -> set[str]:
        """Return the uids of the claims that have a file here, complete or not."""
        try:
            names = [entry.name for entry in os.scandir(self._path)]
        except FileNotFoundError:
            return set()
        except OSError as e:
            raise CdiError(f"{self._path}: {e.strerror}", hint="run as root") from e
        return {
            name.removeprefix(_PREFIX).removesuffix(suffix)
            for name in names
            for suffix in (_SUFFIX, _NEW)
            if name.startswith(_PREFIX) and name.endswith(suffix)
        }

    @staticmethod
    def _same(path: Path, data: bytes) -> bool:
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
                return file.read(len(data) + 1) == data and (os.fstat(file.fileno()).st_uid == 0)
        except FileNotFoundError:
            return False
