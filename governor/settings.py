"""The configuration in force: reloaded on request, and kept if the files are invalid.

`effect` in config.schema.json defines when a new value of an option takes effect. Options that need
a restart keep the value with which the governor started, and are reported as long as they differ.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from governor.config import Config, LoadedConfig, describe, differences, effect_of
from governor.errors import ConfigError, TidegateError

log = structlog.get_logger()

KEPT = "the governor keeps its current configuration"


class SettingsInForce:
    """The configuration in force and its reload. It is used on the governor's event loop."""

    def __init__(self, load: Callable[[], LoadedConfig]) -> None:
        """Read the files; raise ConfigError if they are invalid."""
        self._load = load
        loaded = load()
        self.config = loaded.config
        self._files = loaded.files
        self._since = time.time()
        self._refused: dict[str, Any] | None = None
        self._lock = asyncio.Lock()
        self._listeners: list[Callable[[Config], None]] = []

    def tell(self, listener: Callable[[Config], None]) -> None:
        """Call `listener` with each new configuration."""
        self._listeners.append(listener)

    async def reload(self) -> dict[str, Any]:
        """Apply the current content of the files, and return the changes.

        If they are invalid, raise ConfigError, change nothing, and keep the error for `describe`.
        """
        async with self._lock:
            try:
                loaded = await self._read()
            except TidegateError as e:
                self._refused = {"message": e.message, "hint": e.hint, "at": round(time.time(), 3)}
                log.error("configuration-refused", code=e.code, message=e.message, hint=e.hint)
                raise ConfigError(f"{e.message}: {KEPT}", hint=e.hint) from e
            changes = _changes(self.config, loaded.config)
            # If `defaults.memory` has changed, all of `defaults` is replaced: its options have the
            # same `effect`.
            new = {one["option"].partition(".")[0] for one in changes if one["effect"] != "restart"}
            self.config = replace(
                self.config, **{name: getattr(loaded.config, name) for name in sorted(new)}
            )
            self._files, self._since, self._refused = loaded.files, time.time(), None
            for listener in self._listeners:
                try:
                    listener(self.config)
                except Exception as e:  # a bug in a listener must not stop the governor
                    log.exception("configuration-not-applied", error=repr(e))
            log.info(
                "configuration-loaded",
                files=list(loaded.files),
                **{effect: _named(changes, effect) for effect in ("now", "next", "restart")},
            )
            return {"files": list(loaded.files), "changes": changes}

    async def follow(self, hangups: asyncio.Event) -> None:
        """Reload whenever `hangups` is set, until cancelled. `reload` logs errors."""
        while True:
            await hangups.wait()
            hangups.clear()
            try:
                await self.reload()
            except ConfigError:
                continue

    async def describe(self) -> dict[str, Any]:
        """Return the configuration in force, and the effect that a reload would have.

        The effect is given as `changes`, from the files `found`, or as the `error` with which the
        reload would be refused. `refused` is the error of the last reload, None if it succeeded.
        """
        answer: dict[str, Any] = {
            "configuration": describe(self.config),
            "files": list(self._files),
            "since": round(self._since, 3),
            "refused": self._refused,
            "found": [],
            "changes": [],
            "error": None,
        }
        try:
            loaded = await self._read()
        except TidegateError as e:
            answer["error"] = {"message": e.message, "hint": e.hint}
        else:
            answer["found"] = list(loaded.files)
            answer["changes"] = _changes(self.config, loaded.config)
        return answer

    async def _read(self) -> LoadedConfig:
        try:
            # This runs in a thread, because reading and checking YAML takes tens of milliseconds.
            return await asyncio.to_thread(self._load)
        except TidegateError:
            raise
        except Exception as e:
            # A bug in the parsing of an operator's file must not stop the governor either.
            log.exception("configuration-unread", error=repr(e))
            raise ConfigError(
                f"the configuration cannot be read: {type(e).__name__}",
                hint="report this as a bug, and attach the file",
            ) from e


def _changes(old: Config, new: Config) -> list[dict[str, Any]]:
    return [
        {"option": option, "old": before, "new": after, "effect": effect_of(option)}
        for option, (before, after) in differences(old, new).items()
    ]


def _named(changes: list[dict[str, Any]], effect: str) -> list[str]:
    return [one["option"] for one in changes if one["effect"] == effect]
