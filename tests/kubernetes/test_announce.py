"""Events on claims: each is one line, whatever a refusal contains, and their number is limited to
spare the API server.
"""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kube.announce import AGAIN_S, MAX_PODS, MAX_QUEUED, MESSAGE, Announcer
from kube.claims import Reference
from kube.errors import ClaimError, ClusterError
from tests.conftest import examples
from tests.kubernetes.apiserver import validate
from tests.kubernetes.documents import claim, config, reference, result
from tests.kubernetes.test_dra_claims import read

SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


class CollectedEvents:
    """Collects the events that are written, or refuses them with the HTTP status `http`."""

    def __init__(self, http: int = 0) -> None:
        self.http = http
        self.written: list[dict[str, Any]] = []
        self.asked = 0

    def create_event(self, _namespace: str, body: dict[str, Any]) -> None:
        self.asked += 1
        if self.http:
            raise ClusterError("no", hint="no", http=self.http)
        validate(body)
        self.written.append(body)


def announce(events: CollectedEvents, *refusals: tuple[Reference, Any, ClaimError]) -> None:
    announcer = Announcer(events, "node-1")
    for one in refusals:
        announcer.refused(*one)
    end(announcer)


def end(announcer: Announcer) -> None:
    thread = threading.Thread(target=announcer.run)
    thread.start()
    announcer.stop()
    thread.join(20)
    assert not thread.is_alive()


@settings(max_examples=examples(50))
@given(st.text() | st.just("a\nb\x1b[2J\r\u2028\u202e\ud800"))
def test_an_event_is_one_line_of_printable_text(words: str) -> None:
    """A refusal quotes field names of the claim's parameters, which come from a tenant."""
    events = CollectedEvents()
    announce(events, (Reference("ns", "c", "u-1"), None, ClaimError(words * 50, hint="x")))
    (event,) = events.written
    assert event["message"].isprintable()
    assert len(event["message"]) <= MESSAGE


def test_event_names_are_valid_for_any_claim_name() -> None:
    events = CollectedEvents()
    for name in ("a" * 253, "a" * 229 + "." + "b" * 23, "a" * 228 + "--" + "b" * 23):
        document = claim(name, "ns")
        announce(events, (Reference(*reference(document)), document, ClaimError("no", hint="x")))
    assert len(events.written) == 6
    for event in events.written:
        name = event["metadata"]["name"]
        assert SUBDOMAIN.fullmatch(name), name
        assert len(name) <= 253


def test_the_number_of_events_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same message is sent once in five minutes, for a few pods of each claim, and the total
    number is limited.
    """
    now = [0.0]
    monkeypatch.setattr("kube.announce.time.monotonic", lambda: now[0])
    document = claim("c", "ns")
    document["status"]["reservedFor"] *= 100
    about = Reference(*reference(document))
    events = CollectedEvents()
    announcer = Announcer(events, "node-1")
    for _ in range(1000):
        announcer.refused(about, document, ClaimError("no", hint="x"))
    end(announcer)
    assert len(events.written) == 1 + MAX_PODS
    for number in range(10 * MAX_QUEUED):
        announcer.refused(about, document, ClaimError(f"no {number}", hint="x"))
    assert len(announcer._said) == MAX_QUEUED
    assert announcer._queue.qsize() <= MAX_QUEUED
    # After AGAIN_S the messages that were sent are forgotten.
    now[0] += AGAIN_S + 1
    announcer.refused(about, document, ClaimError("no", hint="x"))
    assert len(announcer._said) == 1


def test_an_announcer_whose_queue_is_full_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest event makes room for the marker at which the thread ends."""
    monkeypatch.setattr("kube.announce.MAX_QUEUED", 4)
    events = CollectedEvents()
    announcer = Announcer(events, "node-1")
    for number in range(4):
        announcer.refused(Reference("ns", "c", "u"), None, ClaimError(f"no {number}", hint="x"))
    assert announcer._queue.full()
    announcer.stop()
    thread = threading.Thread(target=announcer.run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    messages = [event["message"] for event in events.written]
    assert messages == [f"no {number}; x" for number in range(1, 4)]


def test_without_the_right_to_write_events_only_one_request_is_made() -> None:
    events = CollectedEvents(http=403)
    announcer = Announcer(events, "node-1")
    document = claim("c", "ns")  # it has a pod, so there are two events
    announcer.refused(Reference(*reference(document)), document, ClaimError("a", hint="x"))
    end(announcer)
    for number in range(9):
        announcer.refused(Reference("ns", "c", "u"), None, ClaimError(str(number), hint="x"))
    end(announcer)
    assert events.asked == 1


@pytest.mark.parametrize(
    "document",
    [{"status": "x"}, {"status": {"reservedFor": "pods"}}, {"status": {"reservedFor": [1, None]}}],
)
def test_an_invalid_claim_still_gets_an_event(document: Any) -> None:
    events = CollectedEvents()
    announce(events, (Reference("ns", "c", "u"), document, ClaimError("no", hint="x")))
    assert [event["involvedObject"]["kind"] for event in events.written] == ["ResourceClaim"]


def test_a_field_with_control_characters_is_refused_in_one_line() -> None:
    """An API server keeps parameters as their author wrote them, including lone surrogates."""
    for name in ("\x1b]0;x\x07", "\ud800", "\u202eabc", "a\nb", "x" * 9000):
        configs = (config("FromClaim", **{name: 1}),)
        with pytest.raises(ClaimError) as caught:
            read(claim("c", "ns", result(), configs=configs))
        assert str(caught.value).isprintable()
        assert str(caught.value).startswith("claim ns/c, request gpu, parameters of the claim: ")
        assert len(str(caught.value)) < 500
