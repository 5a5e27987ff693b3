"""`tidegate install`: print the commands that complete an installation with pip."""

from __future__ import annotations

import argparse
import shlex
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SUMMARY = "Print the commands that complete an installation with pip, and run none of them"

# Directories that are hidden in the units' sandboxes (ProtectHome=, PrivateTmp=).
HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")  # noqa: S108 - refused


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Set the description; the verb has no options."""
    parser.description = (
        "Print a shell script that installs the configuration, the units and, where engines look"
        " for them, the programs. A package does all of this."
    )


def run(_args: argparse.Namespace) -> int:
    """Print the script."""
    from governor import install_paths

    if install_paths.is_checkout():
        where = shlex.quote(str(install_paths.CODE))
        print(_comment(f"This is a checkout. `make -C {where} install` does what a package does."))
    elif not install_paths.is_wheel():
        print(
            _comment(
                f"{install_paths.CODE.parent} was installed by a package or by make install:"
                " nothing is left to do."
            )
        )
    else:
        # sys.prefix is not used: outside a virtual environment, pip installs commands below
        # /usr/local.
        print("\n".join(script(install_paths.CODE, Path(sysconfig.get_path("scripts")))))
    return 0


def script(code: Path, commands: Path) -> Iterator[str]:
    """Yield the lines of the script, for pip's directories of the code and the commands."""
    share = code / "governor/share"
    yield from _faults(code, commands)
    yield "# Where engines, units and `tidegate setup` look for programs. The hook runs under"
    yield "# /usr/bin/python3, which has to be 3.11 or newer, and needs nothing but Python itself."
    for name in ("tidegate", "tidegate-governor"):
        if commands != Path("/usr/bin"):
            yield _command("ln", "-sf", commands / name, f"/usr/bin/{name}")
    for name in ("tidegate-hook", "tidegate-runtime"):
        yield _command("ln", "-sf", code / "oci_hook/front" / name, f"/usr/bin/{name}")
    yield ""
    yield "# The configuration: every option is in it, commented out."
    yield _command("mkdir", "-p", "/etc/tidegate/config.d")
    yield "[ -e /etc/tidegate/config.yaml ] || " + _command(
        "cp", share / "config.yaml", "/etc/tidegate/config.yaml"
    )
    yield ""
    yield "# The units refresh the mirror at boot and when the driver changes, and start the"
    yield "# governor after that."
    kinds = ("service", "path", "socket")
    units = [unit for kind in kinds for unit in sorted(share.glob(f"systemd/*.{kind}"))]
    yield _command("mkdir", "-p", "/etc/systemd/system", "/etc/udev/rules.d")
    yield _command("cp", *units, "/etc/systemd/system/")
    yield _command("cp", *sorted(share.glob("udev/*.rules")), "/etc/udev/rules.d/")
    for server in (code / "oci_hook/tidegate-forkserver", code / "governor/tidegate-steering"):
        yield _command(
            "sed", "-i", f"s|^ExecStart=.*|ExecStart={server}|",
            f"/etc/systemd/system/{server.name}.service",
        )  # fmt: skip
    yield "systemctl daemon-reload"
    yield "systemctl enable --now tidegate-refresh.path tidegate-refresh.service"
    yield "systemctl enable --now tidegate-steering.socket"
    yield "systemctl enable --now tidegate-governor.service tidegate-forkserver.service"
    yield ""
    yield "# For each engine that will use it: tidegate setup docker, podman, containerd or crio."
    yield "# After an upgrade with pip: systemctl start tidegate-refresh, then systemctl restart"
    yield "# tidegate-governor. Running containers keep the control library that they have."
    yield "tidegate doctor"


def _faults(code: Path, commands: Path) -> Iterator[str]:
    """Yield the faults of this location, as comments and a command that ends the script."""
    from governor import install_paths

    if install_paths.PRIVATE.exists():
        yield _comment(
            f"{install_paths.PRIVATE} exists: Tidegate is installed by a package or make install."
        )
        yield "# This script would replace its programs and hide its units. Uninstall it first."
        yield "exit 1"
        yield ""
    reasons = []
    if f"{code}/".startswith(HIDDEN):
        reasons.append("the units' sandboxes do not see it")
    if not (_is_roots(code) and _is_roots(commands)):
        reasons.append("users other than root may change it, and engines run it as root")
    if reasons:
        yield _comment(f"{code} cannot be used: {', and '.join(reasons)}.")
        yield "# As root: python3 -m venv /opt/tidegate && /opt/tidegate/bin/pip install tidegate"
        yield "exit 1"
        yield ""


def _is_roots(path: Path) -> bool:
    """Return whether only root may change or replace the file at a path."""
    for one in (path, *path.parents):
        status = one.stat()
        writable = status.st_mode & (stat.S_IWOTH | (stat.S_IWGRP if status.st_gid else 0))
        # In a sticky directory like /tmp, other users cannot replace root's files.
        if status.st_uid != 0 or (writable and not (one != path and status.st_mode & stat.S_ISVTX)):
            return False
    return True


def _comment(text: str) -> str:
    """Return a shell comment; line breaks in a path are replaced."""
    return "# " + "".join(c if c.isprintable() else "?" for c in text)


def _command(*words: object) -> str:
    return " ".join(shlex.quote(str(word)) for word in words)
