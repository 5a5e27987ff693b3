"""The part of ctypes that `oci_hook.kernel` uses; importing ctypes itself takes 2 ms.

Most of that time is spent on the definitions of other types. Everything comes from ctypes' own C
module, under the same names. The sizes are those of 64-bit Linux.
"""

# mypy: disable-error-code="type-arg,arg-type"

from __future__ import annotations

from _ctypes import (
    FUNCFLAG_CDECL,
    FUNCFLAG_USE_ERRNO,
    RTLD_LOCAL,
    CFuncPtr,
    Structure,
    _SimpleCData,
    byref,
    dlopen,
    get_errno,
    sizeof,
)

__all__ = ("CDLL", "Structure", "byref", "get_errno", "sizeof")


class c_int(_SimpleCData):  # noqa: N801
    _type_ = "i"


class c_uint(_SimpleCData):  # noqa: N801
    _type_ = "I"


class c_long(_SimpleCData):  # noqa: N801
    _type_ = "l"


class c_ulong(_SimpleCData):  # noqa: N801
    _type_ = "L"


class c_uint8(_SimpleCData):  # noqa: N801
    _type_ = "B"


class c_char_p(_SimpleCData):  # noqa: N801
    _type_ = "z"


c_uint32, c_uint64, c_size_t = c_uint, c_ulong, c_ulong


class _Function(CFuncPtr):
    _flags_ = FUNCFLAG_CDECL | FUNCFLAG_USE_ERRNO
    _restype_ = c_int


class CDLL:
    """A library's functions; ctypes.CDLL with `use_errno`."""

    def __init__(self, name: str | None, *, use_errno: bool) -> None:
        assert use_errno  # noqa: S101 - every function here has the flag
        self._handle = dlopen(name, RTLD_LOCAL)

    def __getattr__(self, name: str) -> _Function:
        """Find a function, and keep it as an attribute."""
        function = _Function((name, self))
        setattr(self, name, function)
        return function
