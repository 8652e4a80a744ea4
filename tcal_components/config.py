"""Reads and checks a recipe's config before anything is loaded.

torchtune instantiates whatever a config names and finds a misspelt key, if at all, hours later. Here every key is checked
against what exists, and a mistake is one line that says what was given, what is allowed and where.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import os
import sys
import time
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune.config import instantiate
from torchtune.config._utils import _get_component_from_path

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
    except (ValueError, OSError, OmegaConfBaseException) as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(3)  # a mistake that the first process made too ends this one meanwhile: it is said once
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
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
                f"unknown key '{key}' in {where}{_suggest(str(key), allowed)}; allowed: {', '.join(sorted(set(allowed)))}"
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
        if not isinstance(value, (tuple, list)):
            return False
        parts = [part for part in typing.get_args(hint) if part is not Ellipsis]
        return all(_accepts(item, part) for item, part in zip(value, parts if len(parts) > 1 else parts * len(value)))
    if base in (dict, Mapping):
        return isinstance(value, Mapping)
    return isinstance(value, base) if isinstance(base, type) else True


def _kind(hint: Any) -> str:
    """An annotation as a person says it."""
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def scalar(cfg: Mapping[str, Any] | DictConfig, key: str, kind: type[T], default: T, *, least: int | None = None) -> T:
    """A single number, text or switch of the config.

    Args:
        cfg: the config.
        key: its name.
        kind: ``int``, ``float``, ``str`` or ``bool``.
        default: where the config has no such key, or null.
        least: the smallest number allowed.

    Returns:
        The value.

    Raises:
        ConfigError: a value of another type, or too small.
    """
    value = cfg.get(key)
    if value is None:
        return default
    if not _accepts(value, kind):
        raise ConfigError(f"{key} is {value!r}, expected {_kind(kind)}")
    if least is not None and value < least:
        raise ConfigError(f"{key} is {value}, expected at least {least}")
    return value


def device_name(cfg: Mapping[str, Any] | DictConfig) -> str:
    """The key ``device``: ``cpu`` (the default), ``cuda`` or ``cuda:N``.

    Raises:
        ConfigError: something else.
    """
    device = scalar(cfg, "device", str, "cpu")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or not (index.isdigit() or device == kind):
        raise ConfigError(f"device is '{device}'; allowed: cpu, cuda, cuda:N")
    return device


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
    if given is not None and not isinstance(given, (Mapping, DictConfig)):
        raise ConfigError(f"{where} is {given!r}, expected keys and values")
    plain: Any = OmegaConf.to_container(given, resolve=True) if isinstance(given, DictConfig) else given
    values: dict[str, Any] = dict(plain or {})
    assert dataclasses.is_dataclass(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    check_keys(values, [name for name in fields if name not in extra], where)
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        if isinstance(value, str) and float in (hints[name], *typing.get_args(hints[name])):
            with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-3 as text
                values[name] = value = float(value)
        if not _accepts(value, hints[name]):
            raise ConfigError(f"{where}.{name} is {value!r}, expected {_kind(hints[name])}")
    required = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    for name in required:
        if name not in values and name not in extra:
            raise ConfigError(f"{where}.{name} is missing")
    return kind(**values, **extra)


def check_component(node: Any, where: str, *, supplied: Sequence[str] = ()) -> None:
    """Check that a ``_component_`` section names something that exists and passes only arguments that it takes.

    Args:
        node: the config section.
        where: its key, for messages.
        supplied: arguments that the recipe passes itself.

    Raises:
        ConfigError: no such component, an argument that it does not take or of the wrong type, or one that it lacks.
    """
    if not isinstance(node, DictConfig) or "_component_" not in node:
        raise ConfigError(f"{where} needs a _component_ key that names a class or function")
    path = node["_component_"]
    if not isinstance(path, str):
        raise ConfigError(f"{where}._component_ is {path!r}, expected the name of a class or function")
    try:
        component = _get_component_from_path(path)
        parameters = inspect.signature(component).parameters
    except Exception as error:
        raise ConfigError(f"{where}._component_ {path!r} cannot be imported: {error}") from error
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        for name in supplied:
            if name not in parameters:
                raise ConfigError(f"{where}._component_ {path!r} does not fit: it takes no {name}")
        allowed = [name for name in parameters if name not in supplied]
        check_keys({str(k): None for k in node if k != "_component_"}, allowed, where)
    for name, parameter in parameters.items():
        required = parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD
        if required and parameter.kind is not inspect.Parameter.VAR_POSITIONAL and name not in (*node, *supplied):
            raise ConfigError(f"{where}.{name} is missing")
    try:
        hints = typing.get_type_hints(component.__init__ if inspect.isclass(component) else component)
    except (NameError, TypeError):  # annotations of others need not be importable
        hints = {}
    given: dict[str, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
    for key, value in given.items():
        hint = hints.get(key, Any)
        null = value is None and key in parameters and parameters[key].default is None
        if not null and not _accepts(value, hint):
            raise ConfigError(f"{where}.{key} is {value!r}, expected {_kind(hint)}")


def takes(node: DictConfig, name: str) -> bool:
    """Whether a checked ``_component_`` section has an argument of that name.

    Args:
        node: the config section.
        name: of the argument.

    Returns:
        bool: it may be passed.
    """
    parameters = inspect.signature(_get_component_from_path(node["_component_"])).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def build(node: DictConfig, where: str, *args: Any, **kwargs: Any) -> Any:
    """Instantiate a ``_component_`` section; what it refuses is said with its place in the config.

    Args:
        node: the config section.
        where: its key, for messages.
        *args: passed on before its own arguments.
        **kwargs: passed on in place of its own.

    Returns:
        What the component makes.

    Raises:
        ConfigError: the component raised a ValueError.
        FileNotFoundError: it found no file.
    """
    try:
        return instantiate(node, *args, **kwargs)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def resolve_assets(node: Any) -> Any:
    """Replace every string ``asset:NAME`` by the path of the embedded asset, in place.

    Args:
        node: a config, or a part of one.

    Returns:
        The same object.
    """
    if isinstance(node, DictConfig):
        keys: list[Any] = [k for k in node if not OmegaConf.is_interpolation(node, str(k))]
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
