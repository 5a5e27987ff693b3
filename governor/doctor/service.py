"""Check the configuration and the running governor: its answers, GPUs, containers and database."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from governor import VERSION
from governor.client import ask
from governor.config import PATH, Config
from governor.doctor.finding import Finding, UnseenError, name_gpus, note, ok, warning, wrong
from governor.doctor.node import AS_ROOT, ExaminedNode
from governor.errors import GovernorError, RequestError, TidegateError
from governor.state import NAME

UNIT = "/usr/lib/systemd/system/tidegate-governor.service"
LATELY_S = 7 * 86400


def configuration(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether the governor would accept the configuration."""
    if node.config_error is not None:
        yield wrong(node.config_error.message, node.config_error.hint)
    elif not node.config_files:
        yield ok(f"{PATH} does not exist: the defaults are in force")
    else:
        what = "is accepted" if len(node.config_files) == 1 else "are accepted"
        yield ok(f"{', '.join(node.config_files)} {what}")
    directory = str(PATH.with_suffix(".d"))
    for name in node.names(directory):
        if name.endswith((".yml", ".json", ".conf")):
            yield warning(
                f"{directory}/{name} is not read: its name does not end in .yaml",
                f"mv {directory}/{name} {directory}/{name.rpartition('.')[0]}.yaml",
            )


def _ask(node: ExaminedNode, op: str) -> dict[str, Any]:
    """Send a request to the governor, and return the answer.

    Raise UnseenError if this process may not connect, and TidegateError for any other failure.
    """
    directory = node.host(node.config.runtime_dir)
    if directory is None:
        directory = node.root.rstrip("/") + node.config.runtime_dir
    config: Config = replace(node.config, runtime_dir=directory)
    try:
        return ask(config, op)
    except GovernorError as e:
        if isinstance(e.__cause__, PermissionError):
            raise UnseenError(e.message, remedy=AS_ROOT) from e
        raise


def process(node: ExaminedNode) -> int | None:
    """Return the governor's pid, or None if it does not answer."""
    try:
        return int(_ask(node, "ping")["pid"])
    except (TidegateError, UnseenError):
        return None


def answers(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether the governor answers, and has this command's version."""
    try:
        answer = _ask(node, "ping")
    except TidegateError as e:
        unit = node.stat(UNIT) is not None
        start = "systemctl start tidegate-governor, then journalctl -u tidegate-governor"
        yield wrong(e.message, start if unit else "start tidegate-governor as root")
        return
    ours, found = VERSION, str(answer.get("version"))
    if found == ours:
        yield ok(f"version {found}, process {answer.get('pid')}")
    else:
        yield warning(
            f"the governor has version {found}, but this command has version {ours}",
            "install the same version of both, then systemctl restart tidegate-governor",
        )


def in_force(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether the governor is using the current content of its files."""
    try:
        answer = _ask(node, "config")
    except RequestError:
        yield note("the governor cannot report its configuration: it is a different version")
        return
    except TidegateError:
        yield note("the governor does not answer, so the configuration in force is not known")
        return
    if answer["error"] is not None:
        refused = answer["refused"]
        when = f" (a newer one was refused at {_clock(refused['at'])})" if refused else ""
        yield warning(
            f"{answer['error']['message']}: the governor continues with the configuration from"
            f" {_clock(answer['since'])}{when}, and a restart would fail",
            f"correct it ({answer['error']['hint']}), then tidegate reload",
        )
        return
    for effects, remedy in (
        (("now", "next"), "tidegate reload"),
        (("restart",), "systemctl restart tidegate-governor"),
    ):
        options = [one["option"] for one in answer["changes"] if one["effect"] in effects]
        if options:
            yield warning(
                f"the governor is not using the values of {', '.join(options)} in its files",
                remedy,
            )
    if not answer["changes"]:
        files = ", ".join(answer["files"])
        yield ok(
            f"the governor is using the configuration in its files: {files}"
            if files
            else "the defaults are in force"
        )


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def gpus(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether GPUs are lost, closed, or not shared."""
    try:
        answer = _ask(node, "gpus")
    except TidegateError:
        yield note("the governor does not answer, so its GPUs are not known")
        return
    shared, open_ = answer["gpus"], []
    for gpu in shared:
        if gpu["lost"] is not None:
            yield warning(
                f"GPU {gpu['index']} is lost: {gpu['lost']}",
                "journalctl -k --grep NVRM, then reboot",
            )
        elif gpu["closed"] is not None:
            yield warning(
                f"GPU {gpu['index']} accepts no containers at present: {gpu['closed']}",
                "tidegate events --all shows what its MPS server did",
            )
        else:
            open_.append(gpu["index"])
    for gpu in answer["left_out"]:
        yield warning(
            f"GPU {gpu['index']} is not shared: {gpu['reason']}",
            "fix the cause, then systemctl restart tidegate-governor",
        )
    if open_:
        yield ok(f"{name_gpus(open_)} {'is' if len(open_) == 1 else 'are'} shared")
    else:
        yield wrong(
            "no GPU accepts containers", "see the lines above; nvidia-smi -L lists the GPUs"
        )


def scheduling(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether GPUs are scheduled as configured, and whether a class has no effect."""
    try:
        gpus = _ask(node, "gpus")["gpus"]
        containers = _ask(node, "list")["containers"]
    except TidegateError:
        yield note("the governor does not answer, so its scheduling is not known")
        return
    by_grants = {gpu["uuid"]: gpu for gpu in gpus if gpu.get("scheduling") != "hardware"}
    # The governor may be running with a setting that differs from the one now in the files.
    missed = [gpu for gpu in by_grants.values() if gpu.get("not_steered")]
    if node.config.scheduling == "gate":
        missed = []
    for gpu in missed:
        if node.config.scheduling == "auto":
            yield note(f"GPU {gpu['index']} is shared by grants: {gpu['not_steered']}")
        else:
            yield warning(
                f"GPU {gpu['index']} is shared by grants although scheduling is hardware: "
                f"{gpu['not_steered']}",
                "provide what is missing (docs/troubleshooting.md): steering is tried again within "
                "an hour; to try at once, systemctl restart tidegate-governor; or set "
                "scheduling: gate",
            )
    at_once = [
        one
        for one in containers
        if one.get("class") == "latency" and any(d["uuid"] in by_grants for d in one["devices"])
    ]
    if at_once:
        yield note(
            f"class latency has no effect for {len(at_once)} container(s)"
            f" ({str(at_once[0]['id'])[:64]}), because grants divide the GPU's time",
            "set scheduling: auto, then systemctl restart tidegate-governor"
            if node.config.scheduling == "gate"
            else None,
        )
    steered = [str(gpu["index"]) for gpu in gpus if gpu["uuid"] not in by_grants]
    if steered:
        yield ok(f"the hardware scheduler divides the time of {name_gpus(steered)}")
    elif not at_once and not missed:
        yield ok("grants divide the GPUs' time")


def membership(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether the governor can identify each container's processes."""
    try:
        containers = _ask(node, "list")["containers"]
    except TidegateError:
        yield note("the governor does not answer, so its containers are not known")
        return
    unknown = [str(one["id"]) for one in containers if not one.get("control_group", True)]
    if unknown:
        yield warning(
            f"the governor cannot see the control groups of {len(unknown)} of {len(containers)} "
            f"containers ({unknown[0][:64]}): every process that reaches their sockets is "
            "registered",
            "run the governor in the host's control group namespace, and start containers with "
            "separate control groups",
        )
    else:
        yield ok(f"each of {len(containers)} containers has a control group that the governor sees")


def database(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether a governor set a bad database aside in the last seven days."""
    directory = node.config.state_dir
    aside = [
        name
        for name in node.names(directory)
        if name.startswith((f"{NAME}.damaged-", f"{NAME}.newer-"))
        and not name.endswith(("-wal", "-shm"))
    ]
    late = 0
    for name in aside:
        status = node.stat(f"{directory}/{name}")
        age = time.time() - status.st_ctime if status else 0
        if age < LATELY_S:
            late += 1
            what = "damaged" if ".damaged-" in name else "from a newer version"
            yield warning(
                f"{directory}/{name}: {age / 3600:.0f} hours ago the governor found that its "
                f"database was {what}",
                f"check the disk, then rm {directory}/{name}*",
            )
    if not late:
        old = f", {len(aside)} before that" if aside else ""
        yield ok(f"no database was set aside in the last {LATELY_S // 86400} days{old}")
