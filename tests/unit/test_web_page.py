"""Test the page in a real browser: what it shows, which sources it trusts, and that it is accessible."""

from __future__ import annotations

import base64
import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from governor.config import MemoryOptions
from governor.container import Container
from governor.quota import Device
from governor.violations import Episode
from tests.conftest import lack
from tests.unit.governor_world import GIB, UUID, Served
from tools import png
from tools.browser import Browser, BrowserError, BrowserPage, find_browser

ROWS = "document.querySelectorAll('.gpu tbody tr')"
TEXT = "document.body.innerText"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests. As with DNS rebinding, the names of foreign sites resolve to this machine."""
    try:
        find_browser()
    except BrowserError as e:
        lack(f"needs a browser: {e}")
    rules = "--host-resolver-rules=MAP *.example 127.0.0.1"
    with Browser([rules]) as browser:
        yield browser


def test_a_browser_that_does_not_start_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.browser.find_browser", lambda: ("/bin/false", {}))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    with pytest.raises((BrowserError, BrokenPipeError)), Browser():
        pass
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def page(browser: Browser) -> Iterator[BrowserPage]:
    with browser.page() as page:
        page.size(1200, 900)
        yield page


@pytest.fixture
def served(tmp_path: Path, build_dir: Path) -> Iterator[Served]:
    with Served(tmp_path, build_dir / "libcontrol") as served:
        yield served


def admit(served: Served, name: str, **quota: str) -> Container:
    return served.run(served.world.admit(name, **quota))


def open_page(page: BrowserPage, served: Served, rows: int) -> None:
    page.open(served.url)
    page.wait(f"{ROWS}.length === {rows}")


def words(page: BrowserPage, selector: str) -> str:
    """Return the visible text of an element, with white space normalised."""
    text = str(page.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))
    return " ".join(text.split())


def row(page: BrowserPage, i: int) -> str:
    return words(page, f".gpu tbody tr:nth-child({i})")


def part(page: BrowserPage, selector: str) -> float:
    """Return the width of an element, in percent of its bar."""
    return float(
        page.evaluate(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            " const bar = node.closest('.bar').getBoundingClientRect();"
            " return 100 * node.getBoundingClientRect().width / bar.width; })()"
        )
    )


def test_the_page_shows_what_containers_have(served: Served, page: BrowserPage) -> None:
    one = admit(served, "one", compute="40", compute_limit="100")
    two = admit(served, "two", compute="30", memory="2Gi")
    served.step((one, 60.0), (two, 20.0), times=6)
    served.step((one, 40.0), (two, 30.0), times=6, refused=1)
    open_page(page, served, 2)
    assert 'GPU 0: a "GPU" \\ of ours' in words(page, ".gpu h2")
    said = "GPU time in the last 1 min: 75.0 % used (65.0 % of their own, 10.0 % lent); guaranteed 70 %"
    assert said in words(page, ".gpu")
    assert "Memory now: 4.5 GiB in use; granted 6.0 GiB of 15.5 GiB" in words(page, ".gpu")
    assert "used 50.0 % (40.0 % of its own, 10.0 % lent)" in row(page, 1)
    assert "guaranteed 40 %, limit 100 %" in row(page, 1)
    assert "3.0 GiB of 4.0 GiB (75 %) in use peak 3.5 GiB since its start" in row(page, 1)
    assert "6 allocations refused: the quota is 4.0 GiB" in row(page, 1)
    assert "used 25.0 % (25.0 % of its own, 0.0 % lent) guaranteed 30 %, limit 30 %" in row(page, 2)
    # The bars agree with the text.
    assert part(page, "tr:nth-child(1) .bar.time .own") == pytest.approx(40, abs=1)
    assert part(page, "tr:nth-child(1) .bar.time .lent") == pytest.approx(10, abs=1)
    assert part(page, ".total .slot:nth-child(1)") == pytest.approx(50, abs=1)
    assert part(page, ".total .slot:nth-child(2)") == pytest.approx(25, abs=1)
    assert part(page, ".total.memory .slot:nth-child(1)") == pytest.approx(400 / 15.5, abs=1)
    assert part(page, ".total.memory .slot:nth-child(1) .own") == pytest.approx(300 / 15.5, abs=1)
    assert page.complaints() == []
    asked = {one["request"]["url"] for one in page.events("Network.requestWillBeSent")}
    addresses = {url.partition("?")[0] for url in asked if not url.startswith(("about:", "data:"))}
    assert addresses == {served.url + path for path in ("", "api/v1/state", "api/v1/history")}
    assert page.evaluate("document.cookie") == ""
    assert page.call("Network.getAllCookies")["cookies"] == []


def test_the_page_stays_up_to_date_and_starts_afresh_with_a_new_governor(
    served: Served, page: BrowserPage
) -> None:
    one = admit(served, "one")
    served.step((one, 40.0), times=3)
    open_page(page, served, 1)
    assert "used 40.0 %" in row(page, 1)
    served.step((one, 10.0), times=3)
    page.evaluate("refresh()")
    page.wait(f"{ROWS}[0].innerText.includes('used 25.0')")
    served.stop()
    page.evaluate("refresh()")
    page.wait("document.getElementById('status').className === 'bad'")
    said = words(page, "#status")
    assert "No answer from the governor since " in said
    assert "used 25.0 %" in row(page, 1)  # the values stay, and the page says how old they are
    served.start(anew=True)
    served.step((one, 5.0))
    page.evaluate("refresh()")
    page.wait(f"{ROWS}[0].innerText.includes('used 5.0')")
    assert words(page, "#status") == "Up to date; refreshed every 5 seconds"
    # There are as many steps as the page knows, but they are from another governor.
    served.stop()
    served.start(anew=True)
    two = admit(served, "two", memory="2Gi")
    served.step((two, 7.0))
    page.evaluate("refresh()")
    page.wait(f"{ROWS}.length === 1 && {ROWS}[0].innerText.includes('two')")


def test_a_container_that_ended_is_shown_while_it_is_within_the_chosen_period(
    served: Served, page: BrowserPage
) -> None:
    one, two = admit(served, "one"), admit(served, "two", memory="2Gi")
    served.step((one, 40.0), (two, 10.0), times=2)
    served.step((one, 40.0), times=13)
    open_page(page, served, 2)
    assert "ended " in row(page, 2)
    assert "in the 10 s during which it ran" in row(page, 2)
    assert "used 10.0 %" in row(page, 2)
    page.evaluate("document.querySelector('input[value=\"60\"]').click()")
    page.wait(f"{ROWS}.length === 1")


def heights(page: BrowserPage, chart: str, kind: str = "own") -> list[float]:
    """Return the height of each band in a chart at each step, in percent of the chart."""
    return list(
        page.evaluate(
            f"[...document.querySelectorAll({json.dumps(chart + ' path.' + kind)})].map((path) => {{"
            " const numbers = (path.getAttribute('d').match(/[0-9.]+/g) ?? []).map(Number);"
            " const points = Array.from({length: numbers.length / 2}, (_, i) => numbers.slice(2 * i, 2 * i + 2));"
            " return points.slice(points.length / 2).reverse()"
            "   .map(([, y], i) => y - points[i][1]).filter((_, i) => i % 2 === 0); })"
        )
    )


def test_a_shorter_period_takes_nothing_from_the_charts(served: Served, page: BrowserPage) -> None:
    one, two = admit(served, "one"), admit(served, "two", memory="2Gi")
    served.step((two, 10.0), times=2)
    served.step((one, 40.0), (two, 10.0), times=2)
    served.step((one, 40.0), times=13)
    open_page(page, served, 2)
    both = ".sums > div:nth-child(1) svg"
    charts = [heights(page, both), heights(page, ".sums > div:nth-child(2) svg")]
    assert charts[0] == [[pytest.approx(40)] * 15, [pytest.approx(10)] * 4]
    outside = f"document.querySelectorAll('{both} .outside').length"
    assert page.evaluate(outside) == 0
    numbers = "[...document.querySelectorAll('.gpu .number')].map((node) => node.innerText)"
    assert page.evaluate(numbers) == ["2", "1"]  # a container that has ended is shown last
    page.evaluate("document.querySelector('input[value=\"60\"]').click()")
    page.wait(f"{ROWS}.length === 1")
    assert charts == [heights(page, both), heights(page, ".sums > div:nth-child(2) svg")]
    # The time outside the chosen period is marked, and a container keeps its number.
    assert page.evaluate(outside) == 1
    assert "1 container that ran only at other times: see the charts above." in words(page, ".gpu")
    assert page.evaluate(numbers) == ["2"]


def test_a_container_that_ended_keeps_its_memory_if_another_has_the_same_name(
    served: Served, page: BrowserPage
) -> None:
    one = admit(served, "one")
    served.step((one, 40.0), times=3)
    served.step()
    one.set_quota(replace(one.quota, memory=2 * GIB))
    served.step((one, 10.0), times=3)
    open_page(page, served, 2)
    assert "1.5 GiB of 2.0 GiB (75 %) in use peak 1.8 GiB since its start" in row(page, 1)
    assert "peak 3.5 GiB of 4.0 GiB" in row(page, 2)
    assert "process" not in row(page, 2)
    assert part(page, "tr:nth-child(2) .bar.memory .own") == pytest.approx(87.5, abs=1.5)


def test_charts_have_axes_with_units_and_memory_is_drawn_like_time(
    served: Served, page: BrowserPage
) -> None:
    one, two = admit(served, "one"), admit(served, "two", memory="2Gi", compute="15")
    served.step((one, 20.0), (two, 15.0), times=2)
    served.step((one, 40.0), (two, 15.0), times=2)
    open_page(page, served, 2)
    ends = [" ".join(text.split()) for text in page.evaluate(
        "[...document.querySelectorAll('.plot')].map((node) => [...node.querySelectorAll("
        "'.amounts span, .times span')].map((one) => one.innerText).join(' '))"
    )]  # fmt: skip
    times = "\u221215 min \u221210 \u22125 now"
    assert ends == [
        f"100 % 50 % 0 % {times}",
        f"15.5 GiB 7.8 GiB 0 {times}",
        # Containers of one GPU share a scale: the smallest one that all of them fit.
        f"50 % 25 % 0 % {times}",
        f"4.0 GiB 2.0 GiB 0 {times}",
        f"50 % 25 % 0 % {times}",
        f"2.0 GiB 1.0 GiB 0 {times}",
    ]
    own = "tbody tr:nth-child(1) td:nth-child({}) svg"
    assert heights(page, own.format(3)) == [[40, 40, 80, 80]]
    assert heights(page, own.format(5)) == [[75, 75, 75, 75]]
    memory = heights(page, ".sums > div:nth-child(2) svg")
    assert memory == [[pytest.approx(part_of / 15.5, abs=0.02)] * 4 for part_of in (300, 150)]
    # The dashed line shows what both are guaranteed, from their first step on.
    promised = page.evaluate("document.querySelector('.sums svg .promised').getAttribute('d')")
    assert promised == "".join(
        f"{'M' if x == 176 else 'L'}{x} 45.00 {x + 1} 45.00" for x in range(176, 180)
    )


def test_a_container_has_one_colour_wherever_it_is_drawn(served: Served, page: BrowserPage) -> None:
    many = [
        admit(served, f"c{i}", memory="520Mi", compute="5", compute_limit="9") for i in range(4)
    ]
    served.step(*((one, 7.0) for one in many), times=3)
    open_page(page, served, 4)
    style = "((node, name) => getComputedStyle(node)[name])"
    colours = page.evaluate(
        "[0, 1, 2, 3].map((i) => { const at = (selector) => document.querySelectorAll(selector);"
        f" const style = {style}; return ["
        "  style(at('.gpu .number')[i], 'borderLeftColor'),"
        "  ...['.total:not(.memory) .slot > .own', '.total.memory .slot > .own', 'tbody .bar.time .own',"
        "      'tbody .bar.memory .own'].map((one) => style(at(one)[i], 'backgroundColor')),"
        "  ...['.sums > div:nth-child(1) .own', '.sums > div:nth-child(2) .own', 'td:nth-child(3) path.own',"
        "      'td:nth-child(5) path.own'].map((one) => style(at('svg.chart')[0] && "
        "       [...at('.gpu ' + one)].filter((node) => node.tagName === 'path')[i], 'fill')),"
        "  style(at('#hatch-' + i + ' path')[0], 'stroke')]; })"
    )
    assert [len(set(of_one)) for of_one in colours] == [1] * 4, colours
    assert len({of_one[0] for of_one in colours}) == 4
    hatches = "[...document.querySelectorAll('.sums svg path.lent')].map((node) => node.getAttribute('fill'))"
    assert page.evaluate(hatches) == [f"url(#hatch-{i})" for i in range(4)]
    # The end of a container changes no other container's number or colour.
    served.step(*((one, 7.0) for one in many[1:]), times=1)
    page.evaluate("refresh()")
    page.wait("document.querySelectorAll('tr.ended').length === 1")
    numbers = page.evaluate(
        "[...document.querySelectorAll('.gpu .number')].map((one) => one.innerText)"
    )
    assert numbers == ["2", "3", "4", "1"]


def test_refusals_and_violations_are_shown_with_their_reasons(
    served: Served, page: BrowserPage
) -> None:
    one = admit(served, "one")
    with pytest.raises(LookupError):
        admit(served, "too-large", memory="100Gi")
    tally = served.world.server.tally
    tally.violate("one", Episode("memory", UUID, 4711, 5 * GIB, 4 * GIB, time.time() - 60))
    over = Episode("compute", UUID, 4712, 87, 0, time.time() - 600, time.time() - 590)
    tally.violate("one", over)
    one.findings.frozen = True
    served.world.server.allocations.set_lost(UUID, "GPU is lost")
    served.step((one, 0.0))
    open_page(page, served, 1)
    events = words(page, "#events")
    assert "start refused too-large GPU 0 has " in events
    assert "102400 MiB was requested" in events
    assert (
        "violation, ongoing one memory, GPU 0: its processes hold 5120 MiB of GPU memory, but 4096 MiB is"
        " allowed (process 4711); policy: report"
    ) in events
    assert "violation, 10 s one compute, GPU 0: it worked on the GPU without a grant" in events
    assert events.index("too-large") < events.index("5120 MiB") < events.index("87 %")
    assert "violation: memory, since " in row(page, 1)
    assert "violation: compute, " in row(page, 1)
    assert "frozen because of a violation" in row(page, 1)
    assert "It does not answer, and no part of it is granted: GPU is lost" in words(page, ".gpu")


def test_a_process_on_a_gpu_that_is_not_its_container_s_is_named(
    served: Served, page: BrowserPage
) -> None:
    one = admit(served, "one")
    one.findings.note_elsewhere(Device(1, "GPU-1", "another", GIB), {4711: GIB // 2})
    served.step((one, 40.0))
    open_page(page, served, 1)
    said = "uses GPU 1, which is not its own: process 4711, 512 MiB"
    assert said in row(page, 1)
    page.press("Tab", times=3)
    page.press("ArrowLeft")
    assert said not in row(page, 1)  # known only for the present


HOSTILE = [
    "<img src=x onerror=window.pwned=1>",
    '"><script>window.pwned=1</script>',
    "</script><script>window.pwned=1</script>",
    "<svg onload=window.pwned=1>",
    "javascript:window.pwned=1",
    "{{constructor.constructor('window.pwned=1')()}}",
    "${window.pwned=1}",
    "'-window.pwned=1-'",
    "__proto__",
    "constructor",
    "&lt;b&gt; &amp; &#60;",
    "\u202egnp.exe",
    "a\u200bb\u2028c\u2066d\nnext line\x1b[31mred\x00",
    "\u0636" * 40,
    "Z\u0351\u036b\u0343" * 100,
    "w" * 1024,
    "\U0001f600" * 200,
    "style=display:none;",
    "none: guaranteed 100 %",
]


def test_names_of_containers_are_text_and_nothing_else(served: Served, page: BrowserPage) -> None:
    """A user who starts a container chooses its name, and other users see that name on the page."""
    containers = [admit(served, name, memory="520Mi", compute="1") for name in HOSTILE]
    tally = served.world.server.tally
    for name in HOSTILE:
        tally.refuse(time.time(), name, "refused", name, name)
        tally.violate(name, Episode("unregistered", UUID, 1, 1, 0, time.time()))
    served.world.server.allocations.set_lost(UUID, HOSTILE[0])
    served.step(*((container, 1.0) for container in containers), times=3)
    open_page(page, served, len(HOSTILE))
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("document.querySelectorAll('img, script, iframe, object, a').length") == 4
    assert page.evaluate("document.querySelectorAll('main script, main img, b b').length") == 0
    assert page.complaints() == []
    shown = page.evaluate(f"[...{ROWS}].map((row) => row.querySelector('bdi').textContent)")
    for name, text in zip(HOSTILE, shown, strict=True):
        if name.isascii() and name.isprintable() and len(name) < 64:
            assert text == name
    assert "\\u{202e}gnp.exe" in shown
    assert "a\\u{200b}b\\u{2028}c\\u{2066}d\\u{a}next line\\u{1b}[31mred\\u{0}" in shown
    assert max(map(len, shown)) <= 130
    # No row takes room from others or overlaps them.
    heights = page.evaluate(f"[...{ROWS}].map((row) => row.getBoundingClientRect().height)")
    assert max(heights) < 500
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    page.size(360, 740)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    # A name is isolated as a whole: the text after it does not move.
    assert page.evaluate("getComputedStyle(document.querySelector('bdi')).unicodeBidi") == "isolate"


def test_the_browser_runs_only_the_pages_own_code(served: Served, page: BrowserPage) -> None:
    one = admit(served, "one")
    served.step((one, 1.0))
    open_page(page, served, 1)
    for text in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
        "document.createElement('script').text = 'window.pwned = 1'",
        "document.write('x')",
    ):
        with pytest.raises(BrowserError, match=r"TrustedHTML|TrustedScript"):
            page.evaluate(text)
    # Strings are not executed as code either. The protocol's own evaluate is exempt from that
    # policy.
    page.evaluate("document.body.setAttribute('data-x', '1')")
    assert (
        page.evaluate("(() => { try { return eval('1 + 1') } catch (e) { return e.name } })()")
        == "EvalError"
    )
    with pytest.raises(BrowserError, match="Failed to fetch"):
        page.evaluate("fetch('http://127.0.0.1:1/').then(() => 1)")
    page.evaluate("document.body.append(Object.assign(new Image(), {src: '/api/v1/state'}))")
    assert page.evaluate("window.pwned") is None


def test_a_foreign_name_that_resolves_to_this_machine_is_refused(
    served: Served, page: BrowserPage
) -> None:
    """A site can make its own name resolve to this machine (DNS rebinding), so that its page could
    request anything from here.
    """
    page.open(f"http://rebound.example:{served.port}/")
    assert page.evaluate(TEXT).startswith("421 Misdirected Request")
    answer = page.evaluate("fetch('/api/v1/state').then((answer) => answer.status)")
    assert answer == 421


@pytest.fixture
def stranger() -> Iterator[str]:
    """A page of another origin on this machine."""

    class PageHandler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>stranger</title>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), PageHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def test_a_page_of_another_origin_reads_nothing(
    served: Served, page: BrowserPage, stranger: str
) -> None:
    one = admit(served, "secret-name")
    served.step((one, 1.0))
    page.open(stranger)
    for target in ("", "api/v1/state", "api/v1/history"):
        for mode in ("cors", "no-cors"):
            read = page.evaluate(
                f"fetch('{served.url}{target}', {{mode: '{mode}'}}).then((one) => one.text(), () => '')"
            )
            assert read == "", (target, mode)
    page.evaluate(
        "new Promise((done) => { const frame = document.createElement('iframe');"
        f" frame.src = '{served.url}'; frame.onload = done; document.body.append(frame); }})"
    )
    frames = page.call("Page.getFrameTree")["frameTree"]["childFrames"]
    assert [one["frame"]["url"] for one in frames] == ["chrome-error://chromewebdata/"]
    loaded = page.evaluate(
        "new Promise((done) => { const script = document.createElement('script');"
        f" script.src = '{served.url}api/v1/state'; script.onload = () => done('loaded');"
        " script.onerror = () => done('refused'); document.body.append(script); })"
    )
    assert loaded == "refused"


def test_every_control_can_be_reached_by_keyboard(served: Served, page: BrowserPage) -> None:
    one = admit(served, "one")
    served.step((one, 40.0), times=3)
    served.step((one, 10.0), times=1)
    open_page(page, served, 1)
    assert "used 32.5 %" in row(page, 1)
    reached = []
    for _ in range(3):
        page.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.value"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", reached
    assert reached == ["pause", "900", "moment"]
    page.press("ArrowLeft")
    assert "GPU time in the 5 s before " in words(page, ".gpu")
    assert "used 10.0 %" in row(page, 1)
    assert page.evaluate("document.querySelectorAll('svg.chart').length") == 4
    assert page.evaluate("document.querySelectorAll('svg.chart line.cursor').length") == 4
    assert page.evaluate(
        "document.getElementById('moment').getAttribute('aria-valuetext')"
    ).startswith("at ")
    page.press("ArrowLeft")
    assert "used 40.0 %" in row(page, 1)
    page.evaluate("refresh()")  # keeps the focus
    page.wait("!asking")
    assert page.evaluate("document.activeElement.id") == "moment"
    page.press("End")
    assert "used 32.5 %" in row(page, 1)
    page.evaluate("document.getElementById('pause').focus()")
    page.press(" ")
    assert words(page, "#status").startswith("Paused at ")
    served.step((one, 0.0), times=4)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    assert "used 32.5 %" in row(page, 1)
    page.press(" ")
    page.wait(f"{ROWS}[0].innerText.includes('used 16.3')")


def test_a_click_into_a_chart_selects_that_moment(served: Served, page: BrowserPage) -> None:
    one = admit(served, "one")
    served.step((one, 40.0), times=100)
    served.step((one, 10.0), times=80)
    open_page(page, served, 1)
    page.evaluate("document.querySelector('.gpu tbody svg.chart').scrollIntoView()")
    left, top, width, height = page.evaluate(
        "(({left, top, width, height}) => [left, top, width, height])"
        "(document.querySelector('.gpu tbody svg.chart').getBoundingClientRect())"
    )
    for at, used in ((0.3, "40.0"), (0.9, "10.0"), (0.999, "10.0"), (0.001, "40.0")):
        for kind in ("mousePressed", "mouseReleased"):
            page.call(
                "Input.dispatchMouseEvent", type=kind, x=left + at * width, y=top + height / 2,
                button="left", clickCount=1,
            )  # fmt: skip
        assert "GPU time in the 5 s before " in words(page, ".gpu")
        assert f"used {used} %" in row(page, 1)
        x = page.evaluate(
            "Number(document.querySelector('svg.chart line.cursor').getAttribute('x1'))"
        )
        assert x == pytest.approx(180 * at, abs=0.6)


def test_memory_beyond_the_quota_is_drawn_as_such(served: Served, page: BrowserPage) -> None:
    one = admit(served, "one")
    served.step((one, 40.0), times=2)
    open_page(page, served, 1)
    assert page.evaluate("document.querySelectorAll('.memory .over').length") == 0
    page.evaluate("clearTimeout(timer); [...series.values()][0].memory.fill(2 ** 33); render()")
    assert "8.0 GiB of 4.0 GiB (200 %)" in row(page, 1)
    assert part(page, "tbody .memory .own") == pytest.approx(50, abs=1)
    assert part(page, "tbody .memory .over") == pytest.approx(50, abs=1)
    # In the GPU's bar, the container takes no room from its neighbours.
    assert part(page, ".total.memory .slot") == pytest.approx(400 / 15.5, abs=1)


def test_parked_memory_is_drawn_as_such_and_not_as_memory_on_the_gpu(
    served: Served, page: BrowserPage
) -> None:
    server = served.world.server
    memory = MemoryOptions(overbook=2.0, host=100 * GIB)
    server.configure(replace(server.config, memory=memory))
    one = admit(served, "one", memory="12Gi")
    two = admit(served, "two", memory="8Gi", compute="10")
    one.residency, one.times_parked, two.residency = "parked", 3, "resident"
    served.step((one, 0.0), (two, 10.0), times=2, parked={one.key: 8 * GIB})
    open_page(page, served, 2)
    said = "Memory now: 7.0 GiB in use, 8.0 GiB parked in host memory; granted 20.0 GiB of 15.5 GiB"
    assert said in words(page, ".gpu")
    said = "0 MiB of host memory taken for parked memory, 100.0 GiB at most"
    assert said in words(page, "#about")
    assert "memory is parked" in row(page, 1)
    said = "9.0 GiB of 12.0 GiB (75 %) in use 8.0 GiB of it parked in host memory"
    assert said in row(page, 1)
    assert "parked 3 times, calls waited 0.0 s for it" in row(page, 1)
    assert "parked" not in row(page, 2)
    assert part(page, "tr:nth-child(1) .bar.memory .own") == pytest.approx(100 / 12, abs=1)
    assert part(page, "tr:nth-child(1) .bar.memory .parked") == pytest.approx(800 / 12, abs=1)
    # In the GPU's bar there is room for all that is granted, and a mark where its memory ends.
    assert part(page, ".total.memory .slot:nth-child(1)") == pytest.approx(60, abs=1)
    assert part(page, ".total.memory .slot:nth-child(1) .parked") == pytest.approx(40, abs=1)
    assert part(page, ".total.memory .slot:nth-child(2)") == pytest.approx(40, abs=1)
    assert page.evaluate("document.querySelector('.total.memory .mark').style.left") == "77.5%"
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    # The GPU's chart shows the memory on the GPU, a container's what counts against its quota.
    on_gpu = heights(page, ".sums > div:nth-child(2) svg")
    assert on_gpu == [[pytest.approx(part_of / 15.5, abs=0.02)] * 2 for part_of in (100, 600)]
    assert heights(page, ".sums > div:nth-child(2) svg", "parked") == []
    own = "tbody tr:nth-child(1) td:nth-child(5) svg"
    assert heights(page, own) == [[pytest.approx(100 / 12, abs=0.02)] * 2]
    assert heights(page, own, "parked") == [[pytest.approx(800 / 12, abs=0.02)] * 2]
    assert page.complaints() == []
    page.press("Tab", times=3)
    page.press("ArrowLeft")
    assert "Memory then: 7.0 GiB in use, 8.0 GiB parked in host memory" in words(page, ".gpu")
    assert "8.0 GiB of it parked in host memory" in row(page, 1)
    assert "memory is parked" not in row(page, 1)  # known only for the present


def test_a_repacked_screenshot_has_the_same_pixels(served: Served, page: BrowserPage) -> None:
    one = admit(served, "one")
    served.step((one, 40.0), times=2)
    page.size(360, 200)
    open_page(page, served, 1)
    plain = base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"])
    packed = png.repack(plain)
    width, height, kind, rows = png.read(packed)
    assert (width, height, {len(row) for row in rows}) == (360, 200, {360 * png.BYTES[kind]})
    assert len({row[i : i + 3] for row in rows for i in range(0, len(row), 3)}) > 20
    # A browser reads the same pixels from the repacked image as from the original.
    read = [
        page.evaluate(
            "(async () => {"
            f" const data = Uint8Array.from(atob('{base64.b64encode(picture).decode()}'), c => c.charCodeAt(0));"
            " const drawn = await createImageBitmap(new Blob([data], {type: 'image/png'}));"
            " const canvas = new OffscreenCanvas(drawn.width, drawn.height).getContext('2d');"
            " canvas.drawImage(drawn, 0, 0);"
            " const all = canvas.getImageData(0, 0, drawn.width, drawn.height).data;"
            " return all.reduce((sum, one) => (sum * 31 + one) % 2147483647, 7); })()"
        )
        for picture in (packed, plain)
    ]
    assert read[0] == read[1]


def hear(page: BrowserPage) -> list[tuple[str, str]]:
    """Return roles and names in the order in which they are read out."""
    nodes = {one["nodeId"]: one for one in page.call("Accessibility.getFullAXTree")["nodes"]}
    heard = []
    left = [one for one in nodes.values() if "parentId" not in one]
    while left:
        node = left.pop()
        if not node.get("ignored"):
            heard.append((node["role"]["value"], node.get("name", {}).get("value", "")))
        left += [nodes[child] for child in reversed(node["childIds"]) if child in nodes]
    return heard


def test_a_screen_reader_reads_a_table_with_all_numbers(served: Served, page: BrowserPage) -> None:
    one = admit(served, "one", compute="40", compute_limit="60")
    served.step((one, 50.0), times=3)
    open_page(page, served, 1)
    for width in (1200, 360):
        page.size(width, 800)
        heard = hear(page)
        roles = [role for role, _ in heard]
        assert roles.count("table") == 1, width
        assert [name for role, name in heard if role == "columnheader"] == [
            "Container", "GPU time", "GPU time, last 15 minutes", "Memory", "Memory, last 15 minutes",
        ]  # fmt: skip
        assert any(role == "rowheader" and "one" in name for role, name in heard)
        (cell,) = [name for role, name in heard if role in ("cell", "gridcell") and "used" in name]
        assert " ".join(cell.split()).startswith(
            "used 50.0 % (40.0 % of its own, 10.0 % lent) guaranteed 40 %, limit 60 %"
        )
        assert ("slider", "or at one moment") in heard
        assert ("status", "") in heard or "status" in roles
        assert "image" not in roles  # bars and charts repeat the text next to them
        assert [name for role, name in heard if role == "heading"] == [
            "Tidegate",
            'GPU 0: a "GPU" \\ of ours',
            "Refusals and violations",
        ]


CONTRAST = """
(() => {
  const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = (color) => {
    const [red, green, blue] = color.match(/[\\d.]+/g).map(Number);
    return 0.2126 * channel(red) + 0.7152 * channel(green) + 0.0722 * channel(blue);
  };
  const back = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)") return color;
    }
  };
  const low = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || node.closest("script, style, noscript, [hidden]")) continue;
    const pair = [light(getComputedStyle(node).color), light(back(node))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) low.push(`${ratio.toFixed(1)}: ${walk.currentNode.textContent}`);
  }
  return low;
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_the_page_is_legible_in_light_and_dark_wide_and_narrow(
    served: Served, page: BrowserPage, scheme: str, width: int
) -> None:
    one = admit(served, "one", compute="40", compute_limit="60")
    two = admit(served, "0123456789abcdef" * 4, compute="10")
    served.world.server.tally.violate("one", Episode("memory", UUID, 1, GIB, 0, time.time()))
    with pytest.raises(LookupError):
        admit(served, "too-large", memory="100Gi")
    served.step((one, 50.0), (two, 10.0), times=3, refused=1)
    page.prefer(color_scheme=scheme)
    page.size(width, 740)
    open_page(page, served, 2)
    assert page.evaluate(CONTRAST) == []
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 29)"}[scheme]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    least = page.evaluate(
        "Math.min(...[...document.querySelectorAll('.gpu .bar, svg.chart')]"
        ".map((node) => node.getBoundingClientRect().width))"
    )
    assert least >= {1200: 120, 360: 240}[width]
    # Colour is never the only sign: lent time is hatched, and trouble has a symbol and words.
    assert "repeating-linear-gradient" in page.evaluate(
        "getComputedStyle(document.querySelector('.bar .lent')).backgroundImage"
    )
    assert page.evaluate("getComputedStyle(document.querySelector('svg .lent')).fill").startswith(
        "url("
    )
    assert "\u26a0" in row(page, 1)


def test_sixty_four_containers_are_shown_at_once(served: Served, page: BrowserPage) -> None:
    many = [admit(served, f"worker-{i}", memory="520Mi", compute="1") for i in range(2)]
    served.step(*((one, 1.0) for one in many), times=3)
    open_page(page, served, 2)
    drawn = page.evaluate(
        "(() => { const one = [...series.values()][0];"
        " for (let i = 10; i < 72; i++) series.set(i, {...one, series: i, id: `many-${i}`});"
        " const begin = performance.now(); render(); return performance.now() - begin; })()"
    )
    assert page.evaluate(f"{ROWS}.length") == 64
    assert drawn < 5000
