"""Run a server with the real arbiter and an idle GPU of 16 GiB.

Containers are sleeping processes. The tests check what clients receive from the server's sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from governor import web
from governor.admissions import Pending
from governor.allocations import AllocationTable
from governor.arbiter import Runner, load_library
from governor.config import Config, Metrics, Web
from governor.container import Container
from governor.history import STEP_NS, History, Use
from governor.quota import Device
from governor.server import Server

GIB = 1 << 30
UUID = "GPU-00000000-0000-0000-0000-000000000001"
ADMIT = {"v": 1, "op": "admit", "bundle": "/bundle", "identity": {}}
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: tidegate\r\n"

REGISTER = """
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
s.connect(sys.argv[1])
s.send(b"r")
socket.recv_fds(s, 4, 1)
print("there", flush=True)
sys.stdin.read()
"""

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def spawn(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class MetricsWorld:
    """A server with the real arbiter, which serves its metrics at a socket."""

    def __init__(self, directory: Path, library: Path) -> None:
        self.config = Config(
            runtime_dir=str(directory),
            library_dir=str(library),
            metrics=Metrics("unix"),
            web=Web("unix"),
        )
        self.runner = Runner(load_library(library), self.config)
        devices = [Device(0, UUID, 'a "GPU" \\ of ours', 16 * GIB)]
        self.server = Server(
            self.config, AllocationTable(devices, self.config), {UUID: self.runner}
        )
        self.path = directory / "metrics.sock"
        self.children: list[subprocess.Popen[str]] = []

    async def admit(
        self, name: str, memory: str = "4Gi", compute: str = "40", **annotations: str
    ) -> Container:
        child = spawn("sleep", "60")
        self.children.append(child)
        request = {
            **ADMIT,
            "id": name,
            "pid": child.pid,
            "annotations": {
                f"tidegate.gpu/{key.replace('_', '-')}": value
                for key, value in {"memory": memory, "compute": compute, **annotations}.items()
            },
        }
        pending: list[Pending] = []
        line = json.dumps(request).encode()
        answer = await self.server._answer(line, [os.pidfd_open(child.pid)], pending)
        if not answer["ok"]:
            raise LookupError(answer["error"]["code"])
        return pending[0][0]

    async def join(self, container: Container) -> subprocess.Popen[str]:
        child = spawn(sys.executable, "-c", REGISTER, str(container.directory / "governor.sock"))
        self.children.append(child)
        assert child.stdout
        assert await asyncio.to_thread(child.stdout.readline) == "there\n"
        return child

    async def raw(self, data: bytes, *, path: Path | None = None) -> bytes:
        """Send `data` and return all that is received until the connection ends."""
        reader, writer = await asyncio.open_unix_connection(str(path or self.path))
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def scrape(self) -> Samples:
        head, _, body = (await self.raw(SCRAPE + b"\r\n")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }

    def close(self) -> None:
        for container in list(self.server.containers.values()):
            self.server.admissions.end(container, "test")
        for child in self.children:
            child.kill()
            child.communicate()
        self.runner.close()


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


Result = TypeVar("Result")


class Served:
    """A world with its page at a loopback port, run on a thread for a test that waits for a browser.

    The test sets the page's history, whose time advances only with `step`.
    """

    def __init__(self, directory: Path, library: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._where = directory, library
        self.port = 0
        self.history = History(0)
        self._steps = 0
        self._had: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        self.world = self.run(self._make())
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.stop()
            self.run(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _make(self) -> MetricsWorld:
        return MetricsWorld(*self._where)

    async def _close(self) -> None:
        self.world.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self, *, anew: bool = False) -> None:
        """Serve the page at the same port as before; with `anew`, do so as a restarted governor
        would.
        """
        if anew:
            self.history, self._steps, self._had = History(0), 0, {}
        listener = socket.create_server(("127.0.0.1", self.port))
        listener.setblocking(False)
        self.port = listener.getsockname()[1]

        async def begin() -> asyncio.Task[None]:
            endpoint = web.PageEndpoint(self.world.server, self.history)
            return asyncio.create_task(endpoint.serve(listener))

        self._serving = self.run(begin())

    def stop(self) -> None:
        async def end() -> None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

        self.run(end())

    def step(
        self,
        *had: tuple[Container, float],
        times: int = 1,
        refused: int = 0,
        parked: Mapping[str, int] | None = None,
    ) -> None:
        """Advance by `times` steps, in each of which each container uses the given percentage of
        the GPU. `parked` is how much of its memory is parked, by key.
        """

        async def look() -> None:
            for _ in range(times):
                self._steps += 1
                uses = []
                for container, used in had:
                    key, quota = container.key, container.quota
                    sums = self._had.get(key, (0, 0))
                    more = int(used * STEP_NS / 100), refused
                    charged_ns, count = (a + b for a, b in zip(sums, more, strict=True))
                    self._had[key] = charged_ns, count
                    use = Use(
                        key, web._text(container.identifier), web._name(container), UUID,
                        charged_ns, quota.compute, quota.compute_limit,
                        quota.memory * 3 // 4, quota.memory * 7 // 8, quota.memory, count,
                        (parked or {}).get(key, 0),
                    )  # fmt: skip
                    uses.append((key, use))
                self.history.record(self._steps * STEP_NS, uses)

        self.run(look())
