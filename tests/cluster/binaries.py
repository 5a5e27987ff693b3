"""The programs of a Kubernetes cluster, in the directory that TIDEGATE_CLUSTER_BIN names.

Debian does not package all of them, and the tests neither build nor download programs:
docs/testing.md describes where to get each one. If a program is missing, the tests fail.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

VARIABLE = "TIDEGATE_CLUSTER_BIN"
KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
PLUGINS = ("loopback", "ptp", "host-local")
"""Plugins of the Container Network Interface: a pair of interfaces for each pod, and routes between nodes."""
OLDEST = (1, 36)


class BinariesError(Exception):
    """A program is missing, cannot be run or is too old. The message is one line."""


class Binaries:
    """A directory with `etcd`, `kubectl`, the programs of Kubernetes, and plugins for the pods' network."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        if not self.directory.is_dir():
            raise BinariesError(f"{VARIABLE} is {directory}, which is not a directory")
        wanted = ("etcd", "kubectl", *KUBERNETES, *PLUGINS)
        missing = [name for name in wanted if not os.access(self.directory / name, os.X_OK)]
        if missing:
            raise BinariesError(
                f"{directory} has no {', '.join(missing)}; docs/testing.md says where they come from"
            )
        self.versions = {name: self._version(name, "--version") for name in ("etcd", *KUBERNETES)}
        for name in KUBERNETES:
            found = re.search(r"v(\d+)\.(\d+)\.", self.versions[name])
            if found is None or (int(found[1]), int(found[2])) < OLDEST:
                raise BinariesError(
                    f"{directory}/{name} is {self.versions[name]!r}; these tests are for Kubernetes 1.36 or newer"
                )

    def path(self, name: str) -> str:
        """Return the path of a program, which is the same in every mount namespace."""
        return str(self.directory / name)

    def _version(self, name: str, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [self.path(name), *arguments],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except OSError as e:
            raise BinariesError(f"{self.path(name)} cannot be run: {e.strerror}") from e
        if done.returncode:
            raise BinariesError(f"{self.path(name)} {arguments[0]}: {done.stderr.strip()[-300:]}")
        return done.stdout.splitlines()[0].strip()
