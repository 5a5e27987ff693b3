"""Send requests to the governor from the command line."""

from __future__ import annotations

import json
import socket
from typing import Any

from governor.config import Config, read_config
from governor.errors import (
    ConfigError,
    GovernorError,
    OccupiedError,
    RefusedError,
    RequestError,
    TidegateError,
)

_KINDS: dict[str, type[TidegateError]] = {
    kind.code: kind for kind in (ConfigError, OccupiedError, RefusedError, RequestError)
}


def node_config(file: str | None, runtime_dir: str | None) -> Config:
    """Return the configuration for requests, which need only the governor's socket path.

    The node's own files may be wrong. The governor then keeps its configuration, so the defaults
    are used to reach it.
    """
    if runtime_dir is not None:
        return Config(runtime_dir=runtime_dir)
    try:
        return read_config(file)
    except ConfigError:
        if file is not None:
            raise
        return Config()


def ask(config: Config, op: str, timeout: float = 5.0, **fields: object) -> dict[str, Any]:
    """Send one request and return the answer if it is `ok`.

    Raise GovernorError if there is no answer; each step may take `timeout` seconds. Raise
    RefusedError or RequestError if the governor refuses.
    """
    path = f"{config.runtime_dir}/governor.sock"
    hint = "start tidegate-governor, or name its directory with --runtime-dir"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(path)
            connection.sendall(json.dumps({"v": 1, "op": op, **fields}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline()
    except OSError as e:
        reason = e.strerror or str(e)
        if isinstance(e, PermissionError):
            hint = "run it as root"
        raise GovernorError(f"the governor does not answer at {path}: {reason}", hint=hint) from e
    try:
        answer: dict[str, Any] = json.loads(line)
    except ValueError as e:
        raise GovernorError(f"the governor at {path} closed the connection", hint=hint) from e
    if not answer.get("ok"):
        error = answer.get("error", {})
        kind = _KINDS.get(error.get("code"), GovernorError)
        raise kind(
            str(error.get("message", "the governor refused")), hint=str(error.get("hint", ""))
        )
    return answer
