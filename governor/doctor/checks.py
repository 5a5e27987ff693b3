"""List and run all checks of `tidegate doctor`, in the order in which findings are shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from governor.doctor import (
    cdi,
    crio,
    driver,
    engines,
    forkserver,
    hooks,
    mirror,
    nvidia,
    programs,
    service,
    system,
)
from governor.doctor.finding import Finding, Severity, UnseenError, note, unseen, wrong
from governor.doctor.node import BrokenError, ExaminedNode

Check = Callable[[ExaminedNode], Iterator[Finding]]

CHECKS: dict[str, Check] = {
    "kernel.calls": system.calls,
    "kernel.processor": system.processor,
    "cgroup.version": system.cgroups,
    "cgroup.freezer": system.throttling,
    "security.modules": system.security,
    "driver.module": driver.module,
    "driver.libraries": driver.libraries,
    "driver.nodes": driver.nodes,
    "driver.links": driver.links,
    "driver.mig": driver.mig,
    "driver.compute-mode": driver.compute_mode,
    "driver.persistence": driver.persistence,
    "driver.mps": driver.mps,
    "mirror.in-force": mirror.in_force,
    "mirror.content": mirror.content,
    "mirror.room": mirror.room,
    "governor.configuration": service.configuration,
    "governor.answers": service.answers,
    "governor.in-force": service.in_force,
    "governor.gpus": service.gpus,
    "governor.scheduling": service.scheduling,
    "governor.membership": service.membership,
    "governor.database": service.database,
    "forkserver.serves": forkserver.serves,
    "files.programs": programs.programs,
    "files.python": programs.python,
    "files.runtime": programs.low_level,
    "files.control": programs.control,
    "files.owners": programs.owners,
    "engine.any": engines.any_engine,
    "docker.version": engines.docker_version,
    "docker.runtime": engines.docker_runtime,
    "docker.labels": engines.docker_labels,
    "podman.version": engines.podman_version,
    "podman.hooks": hooks.podman,
    "podman.service": hooks.podman_service,
    "containerd.version": engines.containerd_version,
    "containerd.handler": engines.containerd_handler,
    "crio.version": engines.crio_version,
    "crio.configuration": crio.starts,
    "crio.handler": crio.handler,
    "nerdctl.version": engines.nerdctl,
    "runc.version": engines.runc,
    "crun.version": engines.crun,
    "hooks.in-force": hooks.in_force,
    "hooks.stages": hooks.stages,
    "hooks.doubled": hooks.doubled,
    "cdi.fresh": cdi.fresh,
    "nvidia.default-runtime": nvidia.default_runtime,
    "nvidia.hook": nvidia.hook,
    "nvidia.cdi": nvidia.cdi,
    "nvidia.operator": nvidia.operator,
}
"""The checks by id; ids are stable across releases."""

OF_NODE = (
    *("engine.", "docker.", "podman.", "containerd.", "crio.", "nerdctl.", "runc.", "crun."),
    *("hooks.", "cdi.", "nvidia.", "files.python", "files.runtime"),
)
"""Prefixes of the ids of checks that are skipped in a pod's container, because they examine its
node."""


@dataclass(frozen=True)
class Examined:
    """A finding, with the id of its check."""

    id: str
    finding: Finding


SYSTEMD_COMMANDS = (
    (r"systemctl enable --now ", "start "),
    (r"systemctl disable --now ", "stop "),
    (r"systemctl (start|restart|reload) ", r"\1 "),
    (r"journalctl -u \S+", "read what it prints"),
)
"""systemd commands in remedies, and the words that replace them where systemd is not running."""


def _without_systemd(finding: Finding) -> Finding:
    remedy = finding.remedy
    for command, words in SYSTEMD_COMMANDS:
        remedy = remedy and re.sub(command, words, remedy)
    return replace(finding, remedy=remedy)


def examine(node: ExaminedNode, ids: Iterable[str] = CHECKS) -> Iterator[Examined]:
    """Yield the findings of each check; an error that ends a check becomes a finding."""
    for name in ids:
        if node.in_pod and name.startswith(OF_NODE):
            if name == "engine.any":
                yield Examined(
                    name,
                    note(
                        "this is a pod's container: engines, hooks and CDI belong to the node, and"
                        " are examined with --root /proc/1/root if the pod has hostPID"
                    ),
                )
            continue
        try:
            for finding in CHECKS[name](node):
                yield Examined(name, finding if node.has_systemd else _without_systemd(finding))
        except UnseenError as e:
            yield Examined(name, unseen(e.message, e.remedy))
        except BrokenError as e:
            yield Examined(name, wrong(str(e), "correct the file: the programs that read it fail"))
        except Exception as e:  # noqa: BLE001 - a failed check does not stop the others
            # A bug, or a node with an unexpected configuration.
            text = " ".join(str(e).split())[:200]
            yield Examined(
                name,
                unseen(
                    f"the check failed: {type(e).__name__}: {text}",
                    "report a bug, and include this line",
                ),
            )


def status_of(states: Iterable[Severity], *, strict: bool) -> int:
    """Return the exit status: 1 if something is wrong or, if `strict`, not perfect."""
    bad = {Severity.WRONG, Severity.WARNING, Severity.UNSEEN} if strict else {Severity.WRONG}
    return int(any(state in bad for state in states))
