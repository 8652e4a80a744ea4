"""Reads and checks a recipe's config before anything is loaded.

torchtune instantiates whatever a config names and finds a misspelt key, if at all, hours later. Here every key is checked
against what exists, and a mistake is one line that says what was given, what is allowed and where.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tcal_components.assets import PREFIX, resolve

STAGES = ("measure", "initialize", "align", "distill", "export")

T = TypeVar("T")


class ConfigError(ValueError):
    """A mistake in the config that the user can mend; its text is one line."""


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a user's mistake into one line on stderr and exit status 2; anything else keeps its traceback.

    Only for the part of a recipe that checks its input: there a ValueError is the user's, later it is ours.
    """
    try:
        yield
    except (ValueError, FileNotFoundError, NotADirectoryError, OmegaConfBaseException) as error:
        text = " ".join(str(error).split())
        print(f"error: {text}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error


def _suggest(key: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(key, allowed, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def check_keys(given: Mapping[str, Any], allowed: list[str], where: str) -> None:
    """Refuse keys that nothing reads.

    Args:
        given: the mapping as configured.
        allowed: the keys that exist.
        where: the config section, for the message.

    Raises:
        ConfigError: for the first key that is not allowed.
    """
    for key in given:
        if key not in allowed:
            raise ConfigError(
                f"unknown key '{key}' in {where}{_suggest(str(key), allowed)}; allowed: {', '.join(sorted(allowed))}"
            )


def _accepts(value: Any, hint: Any) -> bool:
    """Whether a plain YAML value fits a dataclass field's annotation (unions, containers and scalars are enough)."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_accepts(value, part) for part in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if hint is type(None) or hint is None:
        return value is None
    base = origin or hint
    if base is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if base is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if base in (tuple, list):
        return isinstance(value, (tuple, list))
    if base in (dict, Mapping):
        return isinstance(value, Mapping)
    return isinstance(value, base) if isinstance(base, type) else True


def section(kind: type[T], given: Mapping[str, Any] | DictConfig | None, where: str, **extra: Any) -> T:
    """Build a settings dataclass from a config section.

    Args:
        kind: a dataclass; its fields are the allowed keys and their defaults.
        given: the section as configured; None means all defaults.
        where: the section's name, for messages.
        **extra: fields that the recipe supplies itself.

    Returns:
        The dataclass instance.

    Raises:
        ConfigError: an unknown key, a missing required key, or a value of the wrong type.
    """
    values = OmegaConf.to_container(given, resolve=True) if isinstance(given, DictConfig) else dict(given or {})
    assert isinstance(values, dict) and dataclasses.is_dataclass(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    check_keys(values, [name for name in fields if name not in extra], where)
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        if isinstance(value, str) and float in (hints[name], *typing.get_args(hints[name])):
            with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-3 as text
                values[name] = value = float(value)
        if not _accepts(value, hints[name]):
            kind_name = getattr(hints[name], "__name__", str(hints[name]))
            raise ConfigError(f"{where}.{name} is {value!r}, expected {kind_name}")
    required = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    for name in required:
        if name not in values and name not in extra:
            raise ConfigError(f"{where}.{name} is missing")
    return kind(**values, **extra)


def check_component(node: Any, where: str) -> None:
    """Check that a ``_component_`` section names something that exists and passes only arguments that it takes.

    Args:
        node: the config section.
        where: its key, for messages.

    Raises:
        ConfigError: no such component, or an argument that it does not take.
    """
    from torchtune.config._utils import _get_component_from_path

    if not isinstance(node, DictConfig) or "_component_" not in node:
        raise ConfigError(f"{where} needs a _component_ key that names a class or function")
    path = node["_component_"]
    try:
        component = _get_component_from_path(path)
    except Exception as error:
        raise ConfigError(f"{where}._component_ {path!r} cannot be imported: {error}") from error
    parameters = inspect.signature(component).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        check_keys({k: None for k in node if k != "_component_"}, list(parameters), where)


def resolve_assets(node: Any) -> Any:
    """Replace every string ``asset:NAME`` by the path of the embedded asset, in place.

    Args:
        node: a config, or a part of one.

    Returns:
        The same object.
    """
    if isinstance(node, DictConfig):
        keys: list[Any] = [k for k in node if not OmegaConf.is_interpolation(node, k)]
    elif isinstance(node, ListConfig):
        keys = [i for i in range(len(node)) if not OmegaConf.is_interpolation(node, i)]
    else:
        return node
    for key in keys:
        value = node[key]
        if isinstance(value, str) and value.startswith(PREFIX):
            node[key] = str(resolve(value))
        else:
            resolve_assets(value)
    return node


def check_stages(stages: Any) -> list[str]:
    """The stages of the pipeline that a run makes, in their order.

    Args:
        stages: the config's list.

    Returns:
        The same names, ordered as the pipeline runs them.

    Raises:
        ConfigError: not a list, empty, or a name that is no stage.
    """
    if not isinstance(stages, (list, tuple, ListConfig)) or not stages:
        raise ConfigError(f"stages is {stages!r}, expected a list out of {', '.join(STAGES)}")
    for name in stages:
        if name not in STAGES:
            raise ConfigError(f"unknown stage '{name}' in stages; allowed: {', '.join(STAGES)}")
    return [name for name in STAGES if name in stages]
