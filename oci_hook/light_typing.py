"""Replaces the parts of typing and contextlib that the hook uses, so that the hook starts faster.

Without the fork server, each start of a container runs a new interpreter. typing takes 3 ms to
import, and would take 0.3 ms for each of the hook's thirty classes that derive from NamedTuple. The
type checker sees typing's own classes. contextlib imports collections and functools, which take
another 2 ms.
"""

from __future__ import annotations

from _operator import itemgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, NoReturn, Self


class NamedTuple(tuple):  # type: ignore[type-arg]  # subscripting takes longer
    """A tuple with the class's annotations as fields and its attributes as their defaults."""

    __slots__ = ()
    _fields: tuple[str, ...] = ()
    _defaults: dict[str, Any] = {}  # noqa: RUF012 - each class has its own

    def __init_subclass__(cls) -> None:
        """Create a property for each field."""
        cls._fields = tuple(cls.__annotations__)
        cls._defaults = {name: cls.__dict__[name] for name in cls._fields if name in cls.__dict__}
        for i, name in enumerate(cls._fields):
            setattr(cls, name, property(itemgetter(i)))

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Create an instance from its fields, in order or by name."""
        remaining = cls._fields[len(values) :]
        given = cls._defaults | named if remaining else named
        if len(values) > len(cls._fields) or not named.keys() <= set(remaining) <= given.keys():
            raise TypeError(f"{cls.__name__} has the fields {', '.join(cls._fields)}")
        return tuple.__new__(cls, values + tuple([given[name] for name in remaining]))

    @classmethod
    def _make(cls, values: Iterable[Any]) -> Self:
        """Create an instance from the values of all its fields, unchecked."""
        return tuple.__new__(cls, values)

    def _replace(self, **named: Any) -> Self:
        """Return a copy with other values in some fields."""
        return type(self)(**dict(zip(self._fields, self, strict=True)) | named)

    def __repr__(self) -> str:
        """Return the class and the fields with their names."""
        fields = (f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
        return f"{type(self).__name__}({', '.join(fields)})"


class suppress:  # noqa: N801 - contextlib's name
    """Context manager that suppresses these errors, like contextlib.suppress."""

    __slots__ = ("errors",)

    def __init__(self, *errors: type[Exception]) -> None:
        self.errors = errors

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Return whether the error is one of `errors`."""
        return kind is not None and issubclass(kind, self.errors)


def assert_never(value: object) -> NoReturn:
    """Fail for a value of a type that should not occur, like typing.assert_never."""
    raise AssertionError(f"{value!r} is of an unexpected type")
