"""What a config section may hold: types and ranges stand beside the field and are checked in one place.

A section is a dataclass that inherits :class:`Settings`; its annotations are all that is checked::

    steps: Annotated[int, Range(0, 10**9)] = 300
    fold: Annotated[str, OneOf(FOLDS)] = "auto"

A number without a range of its own still has to be finite and an integer still has to fit into 64 bits.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from tcal_components.config.torchtune_keys import TORCHTUNE_KEYS, line, taken_top_level

T = TypeVar("T")


class ConfigError(ValueError):
    """A mistake in the config that the user can mend; its text is one line."""


class _Unfit(ConfigError):
    """A value that does not fit; ``near`` where its type does and only the number, the name or an entry is wrong."""

    def __init__(self, path: str, value: Any, said: str, *, near: bool = True) -> None:
        super().__init__(f"{path} is {shown(value)}{said}")
        self.near = near


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number, both of them allowed; of a list or mapping, the number of its entries.

    Args:
        least: the smallest.
        most: the largest.
        above: what it has to be larger than, in place of ``least``.
        below: what it has to be smaller than, in place of ``most``.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def check(self, value: Any, path: str) -> None:
        """Raises a ConfigError for a value out of range."""
        number, of = (value, "") if isinstance(value, (int, float)) else (len(value), " entries")
        if (
            (self.least is not None and number < self.least)
            or (self.most is not None and number > self.most)
            or (self.above is not None and number <= self.above)
            or (self.below is not None and number >= self.below)
        ):
            words = {"least": "at least", "above": "more than", "most": "at most", "below": "less than"}
            bounds = [f"{text} {getattr(self, key)}" for key, text in words.items() if getattr(self, key) is not None]
            raise _Unfit(path, value, f", expected {' and '.join(bounds)}{of}")


@dataclasses.dataclass(frozen=True)
class OneOf:
    """The names that a field may hold.

    Args:
        names: all of them.
    """

    names: Collection[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))  # unions of annotations are cached, so marks are hashed

    def check(self, value: Any, path: str) -> None:
        """Raises a ConfigError for another name."""
        if value not in self.names:
            raise _Unfit(path, value, f"{suggest(str(value), self.names)}; allowed: {', '.join(map(str, self.names))}")


class Settings:
    """Base of the dataclasses that are config sections: checks every field against its annotation when it is made.

    Raises:
        ConfigError: in one line, beginning with the field's name.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, hint in _hints(kind).items():
            object.__setattr__(self, name, fit(getattr(self, name), hint, name))


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def shown(value: Any) -> str:
    """A value as messages show it: one short line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; a mapping thousands deep
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def suggest(given: str, allowed: Collection[str]) -> str:
    """The allowed name that was perhaps meant, in brackets; empty where none is near."""
    close = difflib.get_close_matches(given[:100], [str(name) for name in allowed], n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def fit(value: Any, hint: Any, path: str) -> Any:
    """A plain YAML value as an annotation wants it.

    Args:
        value: number, text, switch, null, list or mapping.
        hint: the annotation: scalars, containers, unions, ``Literal`` and ``Annotated`` with marks that have a ``check``.
        path: the key, for messages.

    Returns:
        The value; text that is a number where a number is wanted (YAML 1.1 reads 1e-3 as text), lists and their entries of
        the wanted type.

    Raises:
        ConfigError: it does not fit.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    base = origin or hint
    if hint is Any:
        return value
    if base is Annotated:
        value = fit(value, arguments[0], path)
        for mark in arguments[1:]:
            if isinstance(mark, (Range, OneOf)):
                mark.check(value, path)
        return value
    if base in (typing.Union, types.UnionType):
        return _fit_union(value, hint, path)
    if isinstance(base, type) and issubclass(base, Settings):
        return value if isinstance(value, base) else section(base, value, path)
    if base is typing.Literal:
        OneOf(arguments).check(value, path)
        return value
    if hint is None or hint is type(None):
        fits = value is None
    elif base is float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise _Unfit(path, value, ", expected float", near=False) from None
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        if fits:
            check_number(value, path)
    elif base is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
        if fits:
            check_number(value, path)
    elif base in (tuple, list):
        fits = isinstance(value, (tuple, list))
        if fits and arguments:
            fixed = base is tuple and Ellipsis not in arguments
            hints = arguments if fixed else arguments[:1] * len(value)
            fits = len(value) == len(hints)
            if fits:
                value = base(_fit_entry(item, part, f"{path}[{i}]") for i, (item, part) in enumerate(zip(value, hints)))
    elif base in (dict, Mapping):
        fits = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        if fits and arguments and arguments[1] is not Any:
            value = {key: _fit_entry(item, arguments[1], f"{path}.{key}") for key, item in value.items()}
    else:  # what others annotate with is not always a type
        fits = isinstance(value, base) if isinstance(base, type) else True
    if not fits:
        raise _Unfit(path, value, f", expected {kind_name(hint)}", near=False)
    return value


def _fit_entry(value: Any, hint: Any, path: str) -> Any:
    try:
        return fit(value, hint, path)
    except _Unfit as error:
        error.near = True
        raise


def _fit_union(value: Any, hint: Any, path: str) -> Any:
    near: _Unfit | None = None
    for part in typing.get_args(hint):
        try:
            return fit(value, part, path)
        except _Unfit as error:
            near = near or (error if error.near else None)
    if near is None:
        raise _Unfit(path, value, f", expected {kind_name(hint)}", near=False)
    if type(None) in typing.get_args(hint) and str(near).startswith(f"{path} is "):
        near.args = (f"{near}, or null",)
    raise near


def check_number(value: float, path: str) -> None:
    """Refuses NaN, infinity and integers that do not fit into 64 bits.

    Raises:
        ConfigError: for one of them.
    """
    if isinstance(value, int) and abs(value) >= 2**63:
        raise _Unfit(path, value, ", expected a number that fits into 64 bits")
    if not math.isfinite(value):
        raise _Unfit(path, value, ", expected a finite number")


def kind_name(hint: Any) -> str:
    """An annotation as a person says it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return kind_name(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(kind_name(part) for part in arguments)
    if hint in (None, type(None), Ellipsis):
        return "..." if hint is Ellipsis else "None"
    if (origin or hint) in (dict, Mapping):
        return "keys and values"
    name = getattr(origin or hint, "__name__", str(hint))
    return f"{name}[{', '.join(kind_name(part) for part in arguments)}]" if isinstance(origin, type) else name


def check_keys(given: Collection[Any], allowed: Collection[str], where: str) -> None:
    """Refuse keys that nothing reads.

    Args:
        given: the keys as configured.
        allowed: the keys that exist.
        where: the config section, for the message.

    Raises:
        ConfigError: for the first key that is not allowed.
    """
    for key in given:
        if key not in allowed:
            name = str(key) if where == "the config" else f"{where}.{key}"
            if name in TORCHTUNE_KEYS and TORCHTUNE_KEYS[name].outcome != "same":
                raise ConfigError(line(name))
            own = set(allowed) - set(taken_top_level() if where == "the config" else ())
            raise ConfigError(
                f"unknown key {_quoted(key)} in {where}{suggest(str(key), allowed)}; allowed: {', '.join(sorted(own))}"
            )


def _quoted(key: Any) -> str:
    return f"'{key}'" if len(str(key)) <= 100 else shown(str(key))


def section(kind: type[T], given: Mapping[str, Any] | DictConfig | None, where: str, **extra: Any) -> T:
    """Build a settings dataclass from a config section.

    Args:
        kind: a dataclass that inherits :class:`Settings`; its fields are the allowed keys and their defaults.
        given: the section as configured; None means all defaults.
        where: the section's name, for messages; empty for top-level keys.
        **extra: fields that the recipe supplies itself.

    Returns:
        The dataclass instance.

    Raises:
        ConfigError: an unknown key, a missing required key, or a value of the wrong type or out of range.
    """
    if given is not None and not isinstance(given, (Mapping, DictConfig)):
        raise ConfigError(f"{where} is {shown(given)}, expected keys and values")
    plain: Any = OmegaConf.to_container(given, resolve=True) if isinstance(given, DictConfig) else given
    values: dict[str, Any] = dict(plain or {})
    assert dataclasses.is_dataclass(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    check_keys(values, [field.name for field in fields if field.name not in extra], where)
    prefix = f"{where}." if where else ""
    for field in fields:
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and field.name not in values and field.name not in extra:
            raise ConfigError(f"{prefix}{field.name} is missing")
    try:
        return kind(**values, **extra)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from error
