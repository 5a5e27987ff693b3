"""Converts pods that use HAMi, gpu-manager or NVIDIA's device plugin to pods with a claim.

    resources.limits: nvidia.com/gpumem: 3000   ->   ResourceClaimTemplate + resources.claims

Each container that asks for a GPU gets its own claim, because the other systems' quotas also apply
per container. A setting that cannot be carried over gets a `ConversionNote` of level `lost`, and
one that is expressed in another way gets a note of level `changed`. Nothing is dropped without a
note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from kube import yamltext
from kube.convert_pod import (
    RESOURCES,
    ConversionNote,
    ConvertedPod,
    ConvertOptions,
    Notes,
    Taken,
    entries,
    mapping,
    name_of,
)
from kube.names import DRIVER

KINDS = frozenset(
    (
        *("Pod", "PodTemplate", "Deployment", "ReplicaSet", "ReplicationController"),
        *("StatefulSet", "DaemonSet", "Job", "CronJob"),
    )
)


@dataclass
class Result:
    """The manifests as text and as values, and the notes."""

    text: str = ""
    items: list[Any] = field(default_factory=list)
    notes: list[ConversionNote] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Number of notes about settings that were not carried over."""
        return sum(note.level == "lost" for note in self.notes)

    def json(self) -> str:
        """Return the manifests and notes as JSON; `manifests` can be given to kubectl."""
        manifests = {"apiVersion": "v1", "kind": "List", "items": _with_names(self.items)}
        document = {"manifests": manifests, "notes": [asdict(note) for note in self.notes]}
        # Dates and bytes from YAML become strings again, and so do NaN and infinities.
        return json.dumps(
            json.loads(json.dumps(document, default=str), parse_constant=str), indent=1
        )


def convert(text: str, options: ConvertOptions | None = None) -> Result:
    """Convert manifests to manifests with claims; raise UnreadableError if the text is not YAML."""
    result = Result()
    options = options or ConvertOptions()
    text = text.removeprefix("\ufeff")
    documents = yamltext.read(text)
    if not documents:  # nothing but comments
        result.text = text
    taken = Taken(name for document in documents for name in _templates(document.value))
    for document in documents:
        value = yamltext.unshared(document.value)
        notes: Notes = {}
        made = _convert_document(value, options, notes, taken)
        result.items += [*made, *([] if value is None else [value])]
        changed = not yamltext.same(value, document.value)
        if changed or any(name in document.text for name in RESOURCES):
            for key in document.twice:
                reason = "the key occurs more than once, and the last one counts"
                notes[ConversionNote(name_of(value), key, reason, "lost")] = None
        body, marked = document.text, document.marked
        if changed:
            body, kept = yamltext.rewrite(document, value)
            marked = marked or not kept
            if not kept and document.has_comments:
                name = name_of(value)
                notes[ConversionNote(name, "comments", "the document was rewritten", "form")] = None
        if not body.endswith("\n"):
            body += "\n"
        comments = "".join(f"# {_one_line(str(note))}\n" for note in notes)
        if made and not result.text and not marked:
            # Comments above everything, for example a licence, stay at the top.
            head, body = _split_head(body)
            result.text += head
        for one in made:
            result.text += f"---\n{comments}{yamltext.dump(one)}"
            comments = ""
        if body.startswith("---\n"):
            body = f"---\n{comments}{body[4:]}"
        elif marked or not result.text:
            body = comments + body
        else:
            body = f"---\n{comments}{body}"
        result.text += body
        result.notes += notes
    return result


def _split_head(text: str) -> tuple[str, str]:
    """Split a text into the comments at its top, if a blank line ends them, and the rest."""
    head = re.match(r"(?:#[^\n]*\n)+[ \t]*\n", text)
    return (head[0], text[head.end() :]) if head else ("", text)


def _with_names(value: Any) -> Any:
    """Return a value with keys that JSON allows: dates and bytes from YAML become strings."""
    if isinstance(value, dict):
        return {
            key if key is None or isinstance(key, str | int | float) else str(key): _with_names(one)
            for key, one in value.items()
        }
    return [_with_names(one) for one in value] if isinstance(value, list) else value


def _one_line(text: str) -> str:
    """Return a text that fits in one comment line, even if a name contains line breaks."""
    return "".join(c if c.isprintable() else " " for c in text)


def _templates(value: Any) -> Iterator[str]:
    """Yield the names of the claim templates that exist already."""
    document = mapping(value)
    for one in (document, *entries(document.get("items"))):
        if one.get("kind") == "ResourceClaimTemplate":
            yield str(mapping(one.get("metadata")).get("name"))


def _convert_document(
    document: Any, options: ConvertOptions, notes: Notes, taken: Taken
) -> list[dict[str, Any]]:
    """Change a document in place, and return the claim templates that it needs.

    `taken` are the names of all templates so far, in all namespaces.
    """
    if not isinstance(document, dict):
        return []
    if str(document.get("kind", "")).endswith("List") and isinstance(document.get("items"), list):
        made = []
        for item in document["items"]:
            made += _convert_document(item, options, notes, taken)
        return made
    made = []
    left: set[int] = set()
    for found in _pods(document):
        pod = ConvertedPod(document, found, options, notes)
        made += pod.convert(taken)
        left |= pod.left
    for path, key in _leftovers(document, left):
        reason = (
            f"it was left unchanged in {path}, which is not a container's limit in a known kind"
            " of workload"
        )
        if str(document.get("kind")) in {"ResourceQuota", "LimitRange"}:
            reason = (
                "claims are counted as <class>.deviceclass.resource.k8s.io/devices"
                f", e.g. gpu-strict.{DRIVER}.deviceclass.resource.k8s.io/devices"
            )
        notes[ConversionNote(name_of(document), key, reason, "lost")] = None
    return made


def _pods(document: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    """Yield the pods and pod templates (metadata with a spec) in a workload of any kind."""
    kind = document.get("kind")
    spec = mapping(document.get("spec"))
    if kind == "Pod":
        yield document
    elif kind == "PodTemplate":
        yield mapping(document.get("template"))
    elif kind == "CronJob":
        job = mapping(mapping(spec.get("jobTemplate")).get("spec"))
        yield mapping(job.get("template"))
    else:
        yield mapping(spec.get("template"))


def _leftovers(
    value: Any, left: set[int], path: str = "", above: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the path and the key of each GPU resource that was not converted.

    The parts whose identities are in `left` stay unchanged on purpose, and are not searched.
    """
    if isinstance(value, dict) and id(value) not in left:
        for key, inner in value.items():
            asks = isinstance(key, str) and re.sub(r"^(requests|limits)\.", "", key) in RESOURCES
            if asks and above not in {"annotations", "labels", "data", "nodeSelector"}:
                yield path or ".", str(key)
            yield from _leftovers(inner, left, f"{path}.{key}", str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leftovers(inner, left, f"{path}[{index}]", above)
