"""Parses the annotations under tidegate.gpu/ without jsonschema, which takes 100 ms to import.

annotations.schema.json describes the same format for other programs, and a test runs one corpus
through both.
"""

from __future__ import annotations

from oci_hook.errors import AnnotationError, show
from oci_hook.light_re import HEX, consists_of, is_number
from oci_hook.quick import PREFIX

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from oci_hook.light_typing import NamedTuple

UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
CAPABILITIES = ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")
CLASSES = ("throughput", "latency")
STRATEGIES = ("auto", "timeslice", "mps", "passthrough")
ALL_CAPABILITIES = "all"
DEFAULT_CAPABILITIES = ("compute", "utility")
ANNOTATIONS_LIMIT = 32 << 10  # bytes; half of the longest line in the governor's protocol

MEMORY_DIGITS = {"": 15, "Ki": 12, "Mi": 9, "Gi": 6, "Ti": 3}  # every quantity is below 2^50 bytes
GPUS = 64
UUID = [8, 4, 4, 4, 12]  # number of digits in each group


class Request(NamedTuple):
    """What a container asks for. None means that the governor decides."""

    memory: int | None = None
    compute: int | None = None
    compute_limit: int | None = None
    gpus: int | None = None  # not `count`, which is a method of tuples
    devices: tuple[str, ...] = ()
    strategy: str = "auto"
    capabilities: tuple[str, ...] = DEFAULT_CAPABILITIES
    optional: bool = False
    work_class: str = "throughput"
    parking: str = "allowed"


def _refuse(name: str, value: str, accepted: str, hint: str) -> AnnotationError:
    return AnnotationError(
        f"annotation {PREFIX}{name} is '{show(value)}', but must be {accepted}", hint=hint
    )


def _parse_memory(name: str, value: str) -> int:
    digits = value.rstrip("KMGTi")
    unit = value[len(digits) :]
    if not (unit in MEMORY_DIGITS and is_number(digits, 10 ** MEMORY_DIGITS[unit] - 1)):
        raise _refuse(
            name,
            value,
            "a whole number of bytes, or of Ki, Mi, Gi or Ti, from 1 to 999Ti",
            "write it like 8Gi or 512Mi",
        )
    return int(digits) * UNITS[unit]


def _parse_percent(name: str, value: str) -> int:
    if not is_number(value, 100):
        raise _refuse(
            name,
            value,
            "a whole number from 1 to 100",
            "write a percentage without the % sign, for example 25",
        )
    return int(value)


def _parse_count(name: str, value: str) -> int:
    if not is_number(value, GPUS):
        raise _refuse(
            name, value, "a whole number from 1 to 64", "write the number of GPUs, for example 2"
        )
    return int(value)


def _parse_list(name: str, value: str, accepted: str, hint: str) -> tuple[str, ...]:
    items = tuple(value.split(","))
    if len(set(items)) != len(items):
        raise _refuse(name, value, f"{accepted}, each once", hint)
    return items


def _is_uuid(text: str) -> bool:
    kind, *parts = text.split("-")
    return (
        kind == "GPU"
        and [len(part) for part in parts] == UUID
        and all(consists_of(part, HEX) for part in parts)
    )


def _parse_devices(name: str, value: str) -> tuple[str, ...]:
    accepted = "a comma-separated list of GPU indices from 0 to 63 and UUIDs (GPU-...)"
    hint = "nvidia-smi -L on the node lists them"
    items = _parse_list(name, value, accepted, hint)
    for item in items:
        if not (item == "0" or is_number(item, GPUS - 1) or _is_uuid(item)):
            raise _refuse(name, value, accepted, hint)
    return items


def _parse_capabilities(name: str, value: str) -> tuple[str, ...]:
    if value == ALL_CAPABILITIES:
        return (ALL_CAPABILITIES,)
    accepted = f"all, or a comma-separated list of {', '.join(CAPABILITIES)}"
    hint = "leave it out for compute,utility"
    items = _parse_list(name, value, accepted, hint)
    for item in items:
        if item not in CAPABILITIES:
            raise _refuse(name, value, accepted, hint)
    return tuple(sorted(items))


def _parse_strategy(name: str, value: str) -> str:
    if value not in STRATEGIES:
        raise _refuse(name, value, " or ".join(STRATEGIES), "leave it out for auto")
    return value


def _parse_class(name: str, value: str) -> str:
    if value not in CLASSES:
        raise _refuse(name, value, " or ".join(CLASSES), "leave it out for throughput")
    return value


def _parse_parking(name: str, value: str) -> str:
    if value not in ("allowed", "never"):
        raise _refuse(name, value, "allowed or never", "leave it out for allowed")
    return value


def _parse_driver(name: str, value: str) -> bool:
    if value not in ("required", "optional"):
        raise _refuse(name, value, "required or optional", "leave it out for required")
    return value == "optional"


PARSERS = {
    "memory": ("memory", _parse_memory),
    "compute": ("compute", _parse_percent),
    "compute-limit": ("compute_limit", _parse_percent),
    "class": ("work_class", _parse_class),
    "count": ("gpus", _parse_count),
    "devices": ("devices", _parse_devices),
    "strategy": ("strategy", _parse_strategy),
    "parking": ("parking", _parse_parking),
    "capabilities": ("capabilities", _parse_capabilities),
    "driver": ("optional", _parse_driver),
}


def _unknown(name: str) -> AnnotationError:
    import difflib  # takes 3 ms, and is needed only for a misspelt name

    near = difflib.get_close_matches(name[len(PREFIX) :], PARSERS, n=1)
    hint = f"did you mean {PREFIX}{near[0]}?" if near else "remove it"
    return AnnotationError(
        f"annotation {show(name)} is unknown: the names under {PREFIX} are {', '.join(PARSERS)}",
        hint=hint,
    )


def parse_annotations(annotations: dict[str, str]) -> Request:
    """Parse the annotations with the prefix into a request; unknown ones are refused."""
    fields: dict[str, object] = {}
    for name, value in annotations.items():
        known = PARSERS.get(name[len(PREFIX) :]) if name.startswith(PREFIX) else None
        if known is None:
            raise _unknown(name)
        field, parse = known
        fields[field] = parse(name[len(PREFIX) :], value)
    if "gpus" in fields and "devices" in fields:
        raise AnnotationError(
            f"annotations {PREFIX}count and {PREFIX}devices are both given",
            hint="give either the number of GPUs or their names, not both",
        )
    return Request(**fields)  # type: ignore[arg-type]


def check_request(request: Request, annotations: dict[str, str]) -> None:
    """Refuse valid annotations that are invalid together, which JSON Schema cannot express."""
    if request.compute and request.compute_limit and request.compute_limit < request.compute:
        raise AnnotationError(
            f"annotation {PREFIX}compute-limit is {request.compute_limit}, below {PREFIX}compute,"
            f" which is {request.compute}",
            hint="raise the limit or lower the guarantee",
        )
    size = sum(len(ascii(n)) + len(ascii(v)) + 4 for n, v in annotations.items())
    if size > ANNOTATIONS_LIMIT:
        raise AnnotationError(
            f"annotations under {PREFIX} take {size} bytes, more than {ANNOTATIONS_LIMIT}",
            hint="shorten them",
        )


BESIDE_CLAIM = ("capabilities", "driver")


def refuse_beside(annotations: dict[str, str], claims: str) -> None:
    """Refuse annotations for properties that a claim determines; `claims` names the claims."""
    for name in annotations:
        if name[len(PREFIX) :] not in BESIDE_CLAIM:
            raise AnnotationError(
                f"annotation {show(name)} conflicts with {show(claims, 200)}, which determines how"
                " much of which GPU the container has",
                hint="remove the annotation, or the claim",
            )
