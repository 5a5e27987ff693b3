"""Drives headless Chromium over two pipes with the DevTools protocol, for tests and screenshots.

The browser is this machine's `chromium`, or the one that `tools/debian-programs chromium` unpacks.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tools.png import repack

ROOT = Path(__file__).resolve().parent.parent
SYSTEM = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ANSWER_S = 30.0


class BrowserError(Exception):
    """The browser is not available, has ended, or reports an error."""


def find_browser() -> tuple[str, dict[str, str]]:
    """Return the program and its environment variables; raise BrowserError if there is none."""
    for name in SYSTEM:
        # Ubuntu's chromium is a script that requires snap.
        if (program := shutil.which(name)) and not Path("/snap").exists():
            return program, {}
    done = subprocess.run(
        [ROOT / "tools/debian-programs", "chromium"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BrowserError(done.stderr.strip())
    root = Path(done.stdout.strip())
    libraries = sorted({path.parent for path in root.glob("**/lib/**/*.so*") if path.is_file()})
    fonts = root / "fonts.conf"
    fonts.write_text(
        f"<fontconfig><dir>{root}/usr/share/fonts</dir><cachedir>{root}/fonts</cachedir></fontconfig>"
    )
    return str(root / "usr/lib/chromium/chromium-headless-shell"), {
        "LD_LIBRARY_PATH": ":".join(str(path) for path in libraries),
        "FONTCONFIG_FILE": str(fonts),
    }


class Browser:
    """A browser that runs while its context is open; its pages share no state with each other."""

    def __init__(self, options: Sequence[str] = ()) -> None:
        self._stack = contextlib.ExitStack()
        self._options = options
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        program, environment = find_browser()
        # A test's TMPDIR is not used: its path may be too long for the sockets in the profile.
        profile = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-browser-"))
        inner_read, self._write = os.pipe()
        self._read, inner_write = os.pipe()
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-default-apps", "--disable-sync", "--disable-dev-shm-usage",
            "--no-proxy-server", "--disable-features=HttpsUpgrades",
            "--remote-debugging-pipe", f"--user-data-dir={profile}",
            *self._options, "about:blank",
        ]  # fmt: skip
        # The protocol uses descriptors 3 and 4, to which a shell duplicates the ends of the pipes.
        shell = f'exec "$@" 3<&{inner_read} 4>&{inner_write}'
        try:
            self._process = subprocess.Popen(
                ["/bin/bash", "-c", shell, "browser", *command],
                env={**os.environ, **environment, "HOME": profile},
                pass_fds=(inner_read, inner_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        finally:
            os.close(inner_read)
            os.close(inner_write)
        try:
            self.call("Browser.getVersion")
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        with contextlib.suppress(OSError):
            self._stack.close()

    def call(self, method: str, session: str | None = None, **parameters: object) -> Any:
        """Call a protocol method and return its answer; keep the events that arrive before it.

        Raise BrowserError if the method fails, or does not answer within ANSWER_S seconds.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            answer = self._next(deadline)
            if answer is None:
                raise BrowserError(f"no answer to {method} within {ANSWER_S:g} s")
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error']['message']}")
            else:
                return answer["result"]

    def _next(self, deadline: float) -> dict[str, Any] | None:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                return None
            data = os.read(self._read, 1 << 20)
            if not data:
                raise BrowserError("the browser has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    @contextlib.contextmanager
    def page(self) -> Iterator[BrowserPage]:
        """Open a page in its own profile."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = BrowserPage(self, session["sessionId"])
        try:
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)


class BrowserPage:
    """A page of the browser, and its errors and warnings."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility", "Audits"):
            self.call(f"{domain}.enable")
        # Keys go to the page that has the focus; without a window, no page has it.
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def call(self, method: str, **parameters: object) -> Any:
        """Call a protocol method for this page and return its answer."""
        return self._browser.call(method, self._session, **parameters)

    def events(self, *methods: str) -> list[dict[str, Any]]:
        """Return the parameters of the page's events so far that have one of these methods."""
        self.evaluate("0")  # pending events arrive before its answer
        return [
            event["params"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] in methods
        ]

    def complaints(self) -> list[str]:
        """Return the errors and warnings on the page's console, and the issues that audits found.

        Such an issue is, for example, a violation of the content security policy.
        """
        messages = [
            f"{one['type']}: {' '.join(str(arg.get('value', arg)) for arg in one['args'])}"
            for one in self.events("Runtime.consoleAPICalled")
            if one["type"] in ("error", "warning", "assert")
        ]
        messages += [
            str(one["exceptionDetails"].get("exception", {}).get("description"))
            for one in self.events("Runtime.exceptionThrown")
        ]
        messages += [
            f"{one['entry']['level']}: {one['entry']['text']}"
            for one in self.events("Log.entryAdded")
        ]
        return messages + [one["issue"]["code"] for one in self.events("Audits.issueAdded")]

    def open(self, url: str) -> None:
        """Go to an address, and wait until the page is loaded."""
        answer = self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise BrowserError(f"{url}: {answer['errorText']}")
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page, after waiting for promises."""
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
            allowUnsafeEvalBlockedByCSP=False,  # the page's own policy applies to tests as well
        )
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"]
            raise BrowserError(str(thrown.get("exception", {}).get("description", thrown["text"])))
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 20.0) -> Any:
        """Return the value of an expression once it is true; raise BrowserError after `seconds`."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            if time.monotonic() > deadline:
                raise BrowserError(f"not true within {seconds:g} s: {expression}")
            time.sleep(0.05)
        return value

    def press(self, key: str, *, times: int = 1) -> None:
        """Press a key, named as in the DOM."""
        codes = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                text = {"text": key} if key == " " and kind == "keyDown" else {}
                self.call(
                    "Input.dispatchKeyEvent", type=kind, key=key,
                    windowsVirtualKeyCode=codes[key], **text,
                )  # fmt: skip

    def size(self, width: int, height: int, scale: float = 1) -> None:
        """Show the page in a window of this size, in CSS pixels; `scale` is the pixel ratio."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=False,
        )  # fmt: skip

    def prefer(self, **features: str) -> None:
        """Set the user's preferences, such as `color_scheme="dark"`."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": f"prefers-{name}".replace("_", "-"), "value": value}
                for name, value in features.items()
            ],
        )

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a PNG screenshot of the whole page, or of its visible part."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(repack(base64.b64decode(answer["data"])))
