"""The errors of the hook, one class for each kind of failure that an operator has to distinguish.

Each class has a code and an exit status that stay the same across releases;
docs/reference/errors.md has a row for each. The message states what was found, and the hint states
what to do. Both may contain text that the image or the user wrote: `show()` makes that text safe
for a terminal and a log.
"""

from __future__ import annotations

LINE_LIMIT = 900
VALUE_LIMIT = 80


def show(value: object, limit: int = VALUE_LIMIT) -> str:
    """Return an untrusted value as printable ASCII of bounded length."""
    text = ascii(str(value)[: limit + 1])[1:-1]
    return text if len(text) <= limit else text[: limit - 3] + "..."


class HookError(Exception):
    """The container cannot start, or has to start without a GPU."""

    code = "internal"
    status = 70

    def __init__(self, message: str, *, hint: str) -> None:
        """Store message and hint separately, because the log has a field for each."""
        super().__init__(message)
        self.message = message
        self.hint = hint

    def line(self) -> str:
        """Return the one line that the runtime shows."""
        text = f"tidegate: {self.message}; {self.hint}"
        text = "".join(c if " " <= c <= "~" else "?" for c in text)
        return text if len(text) <= LINE_LIMIT else text[: LINE_LIMIT - 3] + "..."


class OciStateError(HookError):
    """The text that the runtime wrote to stdin is not an OCI state."""

    code = "state"
    status = 65


class BundleError(HookError):
    """The bundle's config.json cannot be read or lacks what the hook needs."""

    code = "bundle"
    status = 66


class AnnotationError(HookError):
    """An annotation under tidegate.gpu/ is unknown or has a value that is not accepted."""

    code = "annotation"
    status = 64


class NoMirrorError(HookError):
    """There is no mirror of a driver for this container."""

    code = "driver"
    status = 69


class MirrorMismatchError(HookError):
    """The mirror is damaged, or does not match the host's driver."""

    code = "mirror"
    status = 72


class UnreachableError(HookError):
    """The governor does not answer, or its answer does not follow the protocol."""

    code = "governor"
    status = 75


class AdmissionRefusedError(HookError):
    """The governor refused the container; the message is the governor's."""

    code = "refused"
    status = 77


class ImageError(HookError):
    """The driver cannot be mounted in the image."""

    code = "image"
    status = 76


class DeviceError(HookError):
    """A device node that the container needs is missing."""

    code = "device"
    status = 73


class UnservedImageError(ImageError):
    """The image cannot use any driver; `tidegate.gpu/driver: optional` starts it without one."""


class MountError(HookError):
    """The kernel refused an operation while the container was being prepared."""

    code = "mount"
    status = 71


class InternalError(HookError):
    """A bug in the hook."""
