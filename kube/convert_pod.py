"""Converts one pod or pod template from another GPU-sharing system to a Tidegate claim.

A setting that the claim cannot express becomes a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kube.names import DRIVER, PARAMETERS_KIND, PARAMETERS_VERSION

API = "resource.k8s.io/v1"

BLOCK_MIB = 256
"""Size of one unit of tencent.com/vcuda-memory, in MiB."""

MAX_MIB = 1 << 24
"""Limit of nvidia.com/gpumem in MiB. No GPU has 16 TiB. A manifest with 8Gi for this resource is a
mistake, because the resource is counted in MiB."""

SHARE = 10
"""Guarantee, in percent, for a pod without gpucores. By default, HAMi lets ten containers share a
GPU."""

HAMI = ("gpumem", "gpumem-percentage", "gpucores", "priority")
HAMI_RESOURCES = tuple(f"nvidia.com/{name}" for name in HAMI)
GPU = "nvidia.com/gpu"
CORE, BLOCKS = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
RESOURCES = (GPU, *HAMI_RESOURCES, CORE, BLOCKS)

WRITTEN = (
    *("hami.io/vgpu-", "hami.io/bind-", "hami.io/mutex"),
    *("tencent.com/predicate-", "tencent.com/gpu-assigned", "tencent.com/vcuda-device"),
)
"""Prefixes of annotations that a scheduler writes to a pod when it places the pod."""

NO_COUNTERPART = {
    "hami.io/node-scheduler-policy": "the cluster's own scheduler chooses the node",
    "hami.io/gpu-scheduler-policy": "the cluster's own scheduler chooses the GPU",
    "hami.io/device-scoring-weights": "the cluster's own scheduler chooses the GPU",
}
"""Annotations that have no counterpart, with the reason."""

ENVIRONMENT = {
    "CUDA_DISABLE_CONTROL": "a container cannot turn its quota off",
    "ACTIVE_OOM_KILLER": "an allocation beyond the quota fails; no process is killed",
    "CUDA_OVERSUBSCRIBE": "the node's configuration decides (memory.overbook)",
    "GPU_CORE_UTILIZATION_POLICY": "",
    "NVIDIA_VISIBLE_DEVICES": "the claim names the GPUs",
}
"""Environment variables that are removed, with the reason that the note gives; it is empty for
the variable that `take_environment` treats separately."""


@dataclass(frozen=True)
class ConversionNote:
    """A setting that the claim cannot express, or expresses in another way, and the reason."""

    object: str
    what: str
    reason: str
    level: str
    """`lost`, `changed`, or `form` for lost comments."""

    def __str__(self) -> str:
        return f"{self.object}: {self.level}: {self.what}: {self.reason}"


Notes = dict[ConversionNote, None]
"""Notes without duplicates, in order."""


@dataclass(frozen=True)
class ConvertOptions:
    """Facts that the manifests lack and the cluster's operator supplies."""

    gpu_mib: int = 0
    """Memory of a GPU in MiB, to which gpumem-percentage refers; 0 if unknown."""
    share: int = SHARE


@dataclass
class Ask:
    """What one container asks for, in the terms of a claim."""

    memory_mib: int | None = None
    compute: int | None = None
    count: int = 1
    device_class: str = "gpu-strict"
    parameters: dict[str, Any] = field(default_factory=dict)
    selectors: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()

    def spec(self) -> dict[str, Any]:
        """Return the ResourceClaim's spec."""
        capacity = {}
        if self.memory_mib is not None:
            capacity["memory"] = f"{self.memory_mib}Mi"
        if self.compute is not None:
            capacity["compute"] = str(self.compute)
        exactly: dict[str, Any] = {"deviceClassName": f"{self.device_class}.{DRIVER}"}
        if self.count > 1:
            exactly["count"] = self.count
        if self.selectors:
            exactly["selectors"] = [{"cel": {"expression": one}} for one in self.selectors]
        if capacity:
            exactly["capacity"] = {"requests": capacity}
        devices: dict[str, Any] = {"requests": [{"name": "gpu", "exactly": exactly}]}
        # The scheduler never gives a request the same device twice; this only documents it.
        constraints = [{"distinctAttribute": f"{DRIVER}/uuid"}] if self.count > 1 else []
        constraints += [{"matchAttribute": name} for name in self.constraints if self.count > 1]
        if constraints:
            devices["constraints"] = [{"requests": ["gpu"], **one} for one in constraints]
        if self.parameters:
            parameters = {
                "apiVersion": PARAMETERS_VERSION,
                "kind": PARAMETERS_KIND,
                **self.parameters,
            }
            opaque = {"driver": DRIVER, "parameters": parameters}
            devices["config"] = [{"requests": ["gpu"], "opaque": opaque}]
        return {"devices": devices}


class Taken:
    """The names in use. The time to find a free one does not grow with the number of names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)
        self._numbers: dict[str, int] = {}

    def take(self, name: str) -> str:
        """Return the name, with a number appended if it is taken."""
        number, free = self._numbers.get(name, 1), name
        while free in self._names:
            number += 1
            free = f"{name}-{number}"
        self._numbers[name] = number
        self._names.add(free)
        return free


def mapping(value: Any) -> dict[Any, Any]:
    """Return the value if it is a mapping, otherwise a new, empty one."""
    return value if isinstance(value, dict) else {}


def name_of(value: Any) -> str:
    """Return the name that notes use for a document."""
    document = mapping(value)
    metadata = mapping(document.get("metadata"))
    name = metadata.get("name") or metadata.get("generateName") or "?"
    return f"{document.get('kind', '?')} {name}"


def entries(value: Any) -> list[dict[Any, Any]]:
    """Return the mappings in a value that should be a list of them."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


_NUMBER = re.compile(r"([0-9]{1,15})(\.0*)?(k|M|G|Ki|Mi|Gi)?")
_FACTORS = {"k": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def _whole_number(value: Any) -> int | None:
    """Return the count of an extended resource, or None if it is not a whole number."""
    if isinstance(value, bool):
        return None
    found = _NUMBER.fullmatch(str(value))
    return int(found[1]) * _FACTORS.get(found[3] or "", 1) if found else None


class ConvertedPod:
    """A pod, or a pod template, during its conversion."""

    def __init__(
        self, document: dict[Any, Any], pod: dict[Any, Any], options: ConvertOptions, notes: Notes
    ) -> None:
        self.document, self.pod, self.options, self.notes = document, pod, options, notes
        self.left: set[int] = set()
        """Identities of the parts that stay unchanged and have a note already."""
        self.spec = mapping(pod.get("spec"))
        self.metadata = mapping(pod.get("metadata"))
        held = self.metadata.get("annotations")
        self.annotations: dict[Any, Any] = held if isinstance(held, dict) else {}
        self.name = name_of(document)

    def note(self, what: str, reason: str, level: str = "lost") -> None:
        """Add a note about what happened to `what`, without duplicates."""
        self.notes[ConversionNote(self.name, what, reason, level)] = None

    def convert(self, taken: Taken) -> list[dict[str, Any]]:
        """Change the pod in place, and return its claim templates, if it asks for a GPU."""
        asking = []
        first = entries(self.spec.get("initContainers"))
        for container in (*first, *entries(self.spec.get("containers"))):
            asked = self.take(container)
            if asked:
                asking.append((container, asked))
        if not asking:
            return []
        common = self.take_annotations(max(a.get(GPU, 1) for _, a in asking))
        asks = []
        for container, asked in asking:
            ask = self.ask(container, asked)
            common(ask)
            asks.append(ask)
        self.take_surroundings()
        return self.attach([c for c, _ in asking], asks, first, taken)

    def take(self, container: dict[Any, Any]) -> dict[str, int]:
        """Remove and return a container's GPU resources; change nothing if one is invalid."""
        resources = mapping(container.get("resources"))
        parts = [(part, mapping(resources.get(part))) for part in ("requests", "limits")]
        found: dict[str, int] = {}
        for _, asked in parts:  # the limits come last, and take precedence
            for key in RESOURCES:
                if key in asked:
                    number = _whole_number(asked[key])
                    wrong = "" if number is not None else "is not a whole number"
                    if number and key == "nvidia.com/gpumem" and number > MAX_MIB:
                        wrong = (
                            f"is {number} MiB, which no GPU has: this resource is counted in MiB"
                        )
                    if number is None or wrong:
                        self.note(key, f"{asked[key]!r} {wrong}; the container was left unchanged")
                        self.left |= {id(part) for _, part in parts}
                        return {}
                    found[key] = number
        for part, asked in parts:
            for key in list(asked):
                if key in RESOURCES:
                    del asked[key]
                elif isinstance(key, str) and key.startswith("nvidia.com/"):
                    self.note(key, "it has no counterpart and stays unchanged")
            if part in resources and not asked and isinstance(resources[part], dict):
                del resources[part]
        if "resources" in container and not resources:
            del container["resources"]
        if found and not any(found.get(key) for key in (GPU, *HAMI_RESOURCES[:3], CORE, BLOCKS)):
            self.note(", ".join(found), "it asks for nothing and was removed", "changed")
            return {}
        return found

    def ask(self, container: dict[Any, Any], asked: dict[str, int]) -> Ask:
        """Return what a container asked for, in the terms of a claim."""
        is_gpu_manager = CORE in asked or BLOCKS in asked
        ask = self.from_gpu_manager(asked) if is_gpu_manager else self.from_nvidia(asked)
        self.take_environment(container, ask)
        return ask

    def from_nvidia(self, asked: dict[str, int]) -> Ask:
        """Read nvidia.com/gpu alone, or with what HAMi adds to it."""
        count = max(asked.get(GPU, 1), 1)
        if "nvidia.com/priority" in asked:
            self.note(
                "nvidia.com/priority", "it has no counterpart: guarantees determine the order"
            )
        if not any(asked.get(key) for key in HAMI_RESOURCES[:3]):
            return Ask(None, 100, count, device_class="gpu-whole")
        ask = Ask(count=count)
        percent = asked.get("nvidia.com/gpumem-percentage", 0)
        if asked.get("nvidia.com/gpumem"):
            ask.memory_mib = asked["nvidia.com/gpumem"]
            if percent:
                self.note(
                    "nvidia.com/gpumem-percentage", "nvidia.com/gpumem takes precedence", "changed"
                )
        elif percent >= 100:
            pass  # a claim without memory gets all of it, which is less than the GPU's nominal size
        elif percent and self.options.gpu_mib:
            ask.memory_mib = self.options.gpu_mib * percent // 100
        elif percent:
            self.note(
                "nvidia.com/gpumem-percentage",
                f"the claim asks for all of the memory: pass --gpu-memory to have {percent} %"
                " converted",
            )
        else:
            self.note(
                "no nvidia.com/gpumem",
                "the claim gets all the memory, as with HAMi if its scheduler has no other default",
                "changed",
            )
        cores = asked.get("nvidia.com/gpucores", 0)
        if cores:
            ask.compute = min(cores, 100)
            if cores > 100:
                self.note("nvidia.com/gpucores", f"{cores} is reduced to 100", "changed")
        else:
            ask.compute, ask.device_class = self.options.share, "gpu-elastic"
            self.note(
                "no nvidia.com/gpucores",
                f"{ask.compute} % is guaranteed, and the rest may be borrowed",
                "changed",
            )
        return ask

    def from_gpu_manager(self, asked: dict[str, int]) -> Ask:
        """Read tencent.com/vcuda-core and vcuda-memory."""
        cores, blocks = asked.get(CORE, 0), asked.get(BLOCKS, 0)
        count = max(cores // 100, 1)
        if cores >= 100:
            if cores % 100:
                self.note(CORE, f"{cores} is not a whole number of GPUs; the claim has {count}")
            if blocks:
                self.note(
                    BLOCKS, "vcuda-core asks for whole GPUs, with all their memory", "changed"
                )
            return Ask(None, 100, count, device_class="gpu-whole")
        if not blocks:
            self.note(
                f"no {BLOCKS}", "a claim that requests no memory gets all of the GPU's memory"
            )
        return Ask(blocks * BLOCK_MIB or None, max(cores, 1))

    def take_environment(self, container: dict[Any, Any], ask: Ask) -> None:
        """Remove from a container the variables that a claim replaces, and note each."""
        kept = []
        variables = container.get("env")
        if not isinstance(variables, list):
            return
        for variable in variables:
            name = mapping(variable).get("name")
            is_hami = isinstance(name, str) and (
                name in ENVIRONMENT or re.match(r"CUDA_DEVICE_(MEMORY|SM)_LIMIT", name)
            )
            if not is_hami:
                kept.append(variable)
            elif name == "GPU_CORE_UTILIZATION_POLICY":
                value = variable.get("value")
                if value == "disable" and ask.device_class == "gpu-strict":
                    ask.device_class = "gpu-elastic"
                self.note(name, "the claim's class expresses it", "changed")
            elif name in ENVIRONMENT:
                value = str(variable.get("value"))
                harmless = name == "NVIDIA_VISIBLE_DEVICES" and value in {"all", "void"}
                self.note(str(name), ENVIRONMENT[str(name)], "changed" if harmless else "lost")
            else:
                self.note(str(name), "the claim expresses it", "changed")
        if len(kept) != len(variables):
            container["env"] = kept
            if not kept:
                del container["env"]

    def take_annotations(self, count: int) -> Callable[[Ask], None]:
        """Remove the other systems' annotations; return a function that applies them to a claim."""
        held, selectors, constraints = self.annotations, [], []
        limit = mps = None
        for key in [key for key in held if isinstance(key, str)]:
            value = held[key]
            text = str(value)
            words = [word.strip() for word in text.split(",") if word.strip()]
            if key.startswith(WRITTEN):
                self.note(key, "a scheduler wrote it when it placed the pod", "changed")
            elif key in NO_COUNTERPART:
                self.note(f"{key}: {text}", NO_COUNTERPART[key])
            elif key in {"nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid"} and words:
                one = f'device.attributes["{DRIVER}"].uuid in {json.dumps(words)}'
                selectors.append(one if "/use" in key else f"!({one})")
            elif key in {"nvidia.com/use-gputype", "nvidia.com/nouse-gputype"} and words:
                model = f'device.attributes["{DRIVER}"].model.lowerAscii()'
                one = " || ".join(f"{model}.contains({json.dumps(w.lower())})" for w in words)
                selectors.append(one if "/use" in key else f"!({one})")
            elif key == "nvidia.com/numa-bind":
                if text.lower() == "true":
                    constraints.append(f"{DRIVER}/numaNode")
                    if count == 1:
                        self.note(key, "one GPU is always on one NUMA node", "changed")
            elif key == "nvidia.com/vgpu-mode":
                mps = text == "mps"
                if text not in {"mps", "hami-core"}:
                    self.note(f"{key}: {text}", "Tidegate shares only whole GPUs")
            elif key == "tencent.com/vcuda-core-limit":
                limit = _whole_number(value)
                if limit is None or not 0 < limit <= 100:
                    self.note(f"{key}: {text}", "it is not a percentage")
                    limit = None
            elif key.startswith("tencent.com/vcuda"):
                self.note(f"{key}: {text}", "it has no counterpart")
            elif key.startswith(("hami.io/", "nvidia.com/", "tencent.com/")):
                self.note(f"{key}: {text}", "it is unknown and stays unchanged")
                continue
            else:
                continue
            del held[key]
        if not held and isinstance(self.metadata.get("annotations"), dict):
            del self.metadata["annotations"]

        def add(ask: Ask) -> None:
            ask.selectors, ask.constraints = tuple(selectors), tuple(constraints)
            if mps and ask.count == 1:
                ask.parameters["strategy"] = "mps"
            elif mps:
                self.note(
                    "nvidia.com/vgpu-mode: mps",
                    f"a client of MPS can have only one GPU, not {ask.count};"
                    " the node's strategy applies",
                )
            if limit is not None and ask.device_class == "gpu-strict":
                ask.device_class = "gpu-elastic"
                ask.parameters["computeLimit"] = max(limit, ask.compute or 1)

        return add

    def take_surroundings(self) -> None:
        """Remove the fields that select the other systems' schedulers and runtimes."""
        if self.spec.get("schedulerName") == "hami-scheduler":
            del self.spec["schedulerName"]
            self.note("schedulerName", "the cluster's own scheduler places claims", "changed")
        if self.spec.get("runtimeClassName") == "nvidia":
            del self.spec["runtimeClassName"]
            self.note("runtimeClassName", "NVIDIA's runtime would mount a second driver", "changed")

        for label in self.node_labels():
            if label.startswith("nvidia.com/"):
                self.note(
                    label,
                    "it stays in the pod, but only NVIDIA's feature discovery sets it on nodes;"
                    " use a claim's selectors (model, driverVersion and more) instead",
                )

    def node_labels(self) -> list[str]:
        """Return the labels by which the pod selects its node, each once."""
        labels = [key for key in mapping(self.spec.get("nodeSelector")) if isinstance(key, str)]
        affinity = mapping(mapping(self.spec.get("affinity")).get("nodeAffinity"))
        required = mapping(affinity.get("requiredDuringSchedulingIgnoredDuringExecution"))
        for term in entries(required.get("nodeSelectorTerms")):
            labels += [str(one.get("key")) for one in entries(term.get("matchExpressions"))]
        return list(dict.fromkeys(labels))

    def attach(
        self,
        containers: list[dict[Any, Any]],
        asks: list[Ask],
        first: list[dict[Any, Any]],
        names: Taken,
    ) -> list[dict[str, Any]]:
        """Give each container its claim; return the templates, one for each different spec."""
        workload = _label(self.document) or _label(self.pod) or "pod"
        templates: dict[str, dict[str, Any]] = {}
        claims: list[dict[str, str]] = []
        held = self.spec.get("resourceClaims")
        taken = Taken(
            str(mapping(one).get("name")) for one in (held if isinstance(held, list) else ())
        )
        several = len({json.dumps(ask.spec()) for ask in asks}) > 1
        shared: dict[str, str] = {}
        early_ones = {id(one) for one in first}
        for container, ask in zip(containers, asks, strict=True):
            spec = ask.spec()
            form = json.dumps(spec)
            name = _dns(str(container.get("name") or "container"))
            if form not in templates:
                own = names.take(f"{workload}-{name}-gpu" if several else f"{workload}-gpu")
                templates[form] = self.template(own, spec)
            # An init container has ended when the others start, so it can share a claim with one of
            # them. An init container that always restarts is a sidecar and runs alongside them.
            early = id(container) in early_ones
            brief = early and container.get("restartPolicy") != "Always"
            if brief and form in shared:
                claim = shared[form]
            elif not early and form in shared:
                claim = shared.pop(form)
            else:
                claim = taken.take("gpu" if len(asks) == 1 else f"gpu-{name}")
                template = templates[form]["metadata"]["name"]
                claims.append({"name": claim, "resourceClaimTemplateName": template})
                if brief:
                    shared[form] = claim
            _append(container, "resources", claim)
        if shared:
            self.note("initContainers", "their claims are held as long as the pod lives", "changed")
        self.spec["resourceClaims"] = [*(held if isinstance(held, list) else []), *claims]
        return list(templates.values())

    def template(self, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Return a claim template in the workload's namespace."""
        metadata: dict[str, Any] = {"name": name}
        namespace = mapping(self.document.get("metadata")).get("namespace")
        if isinstance(namespace, str) and namespace:
            metadata["namespace"] = namespace
        return {
            "apiVersion": API,
            "kind": "ResourceClaimTemplate",
            "metadata": metadata,
            "spec": {"spec": spec},
        }


def _append(container: dict[Any, Any], key: str, claim: str) -> None:
    """Add a claim to a container's resources."""
    resources = container.get(key)
    if not isinstance(resources, dict):
        resources = container[key] = {}
    held = resources.get("claims")
    resources["claims"] = [*(held if isinstance(held, list) else []), {"name": claim}]


def _label(document: dict[Any, Any]) -> str:
    """Return a workload's name as a DNS label for use in another name; "" if it has none."""
    metadata = mapping(document.get("metadata"))
    name = metadata.get("name") or metadata.get("generateName")
    return _dns(name) if isinstance(name, str) else ""


def _dns(name: str) -> str:
    """Return a name as a DNS label: lower case, digits and dashes, with room for a suffix."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:50].strip("-") or "x"
