"""Reads and checks a recipe's config before anything is loaded.

torchtune instantiates whatever a config names and finds a misspelt key, if at all, hours later. Here every key is checked
against what exists, and a mistake is one line that says what was given, what is allowed and where.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from torchtune.config import instantiate
from torchtune.config._utils import _get_component_from_path

from tcal_components.assets import PREFIX, resolve
from tcal_components.config.numbers import Seed
from tcal_components.config.schema import (
    ConfigError,
    OneOf,
    Settings,
    check_keys,
    check_number,
    fit,
    section,
    shown,
)

STAGES = ("measure", "initialize", "align", "distill", "export")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RunConfig(Settings):
    """Top-level keys that every recipe has.

    Args:
        output_dir: where everything is written.
        seed: of everything random.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: of the computation.
        tune_kernels: let kernels try several launch shapes for each size of input.
    """

    output_dir: str
    seed: Seed = 0
    device: str = "cpu"
    dtype: Annotated[str, OneOf(("fp32", "bf16"))] = "fp32"
    tune_kernels: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, _, index = self.device.partition(":")
        if kind not in ("cpu", "cuda") or not (self.device == kind or (index.isdecimal() and len(index) < 4)):
            raise ConfigError(f"device is {shown(self.device)}; allowed: cpu, cuda, cuda:N")
        if not self.output_dir:
            raise ConfigError("output_dir is empty, expected a folder")


def read(kind: type[T], cfg: DictConfig) -> T:
    """The top-level keys of a config that a dataclass of settings has; a null takes the default.

    Args:
        kind: a dataclass that inherits :class:`Settings`.
        cfg: of the recipe; it may have other keys, which :func:`check_top_level` looks at.

    Returns:
        The dataclass instance.

    Raises:
        ConfigError: a value of the wrong type or out of range, or a required key that is missing.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    return section(kind, {key: plain[key] for key in keys_of(kind) if plain.get(key) is not None}, "")


def keys_of(kind: Any) -> list[str]:
    """Names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(kind)]


def check_top_level(cfg: DictConfig, allowed: Sequence[str]) -> None:
    """Looks at a whole config: known top-level keys, and nowhere a number or a text that nothing could use.

    Args:
        cfg: of the recipe.
        allowed: its top-level keys; others may be there for values to refer to, as ``${key}``.

    Raises:
        ConfigError: an unknown key, a key left open as ``???``, NaN, infinity, an integer beyond 64 bits, text with a null character or half a character,
            or nesting thousands deep.
    """
    try:
        text = repr(OmegaConf.to_container(cfg, resolve=False))
    except RecursionError:
        raise ConfigError("the config is nested too deeply, or refers to itself") from None
    check_keys([key for key in cfg if not re.search(rf"\$\{{{re.escape(str(key))}[}}.]", text)], allowed, "the config")
    for key in map(str, cfg):
        if OmegaConf.is_missing(cfg, key):
            raise ConfigError(f"the config leaves {key} open; give it on the command line: {key}=...")
    try:
        _check_values(OmegaConf.to_container(cfg, resolve=True), "")
    except RecursionError:
        raise ConfigError("the config is nested too deeply, or refers to itself") from None


def _check_values(value: Any, path: str) -> None:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            _check_values(str(key), f"a key of {path or 'the config'}")
            _check_values(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _check_values(entry, f"{path}[{index}]")
    elif isinstance(value, str):
        if re.search("[\0\ud800-\udfff]", value):
            raise ConfigError(
                f"{path} is {shown(value)}, expected text without null characters or halves of characters"
            )
    elif isinstance(value, (int, float)):
        check_number(value, path)


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
        raise ConfigError(f"{where}._component_ is {shown(path)}, expected the name of a class or function")
    try:
        component = _get_component_from_path(path)
        parameters = inspect.signature(component).parameters
    except Exception as error:
        package = path.partition(".")[0]
        reason = " ".join(str(error).split())
        if isinstance(error.__cause__ or error, ImportError) and not _installed(package):
            reason = f"the package {package} is not installed"
        raise ConfigError(f"{where}._component_ {shown(path)} cannot be imported: {reason}") from error
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        for name in supplied:
            if name not in parameters:
                raise ConfigError(f"{where}._component_ {path!r} does not fit: it takes no {name}")
        allowed = [name for name in parameters if name not in supplied]
        check_keys([key for key in node if key != "_component_"], allowed, where)
    for name, parameter in parameters.items():
        required = parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD
        if required and parameter.kind is not inspect.Parameter.VAR_POSITIONAL and name not in (*node, *supplied):
            raise ConfigError(f"{where}.{name} is missing")
    try:
        annotated = component.__init__ if inspect.isclass(component) else component
        hints = typing.get_type_hints(annotated, include_extras=True)
    except (NameError, TypeError):  # annotations of others need not be importable
        hints = {}
    given: dict[str, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
    for key, value in given.items():
        if value is None and key in parameters and parameters[key].default is None:
            continue
        fitted = fit(value, hints.get(key, Any), f"{where}.{key}")
        if isinstance(value, str) and isinstance(fitted, float):
            node[key] = fitted


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


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


def build(node: DictConfig, where: str, *args: Any, makes: type = object, **kwargs: Any) -> Any:
    """Instantiate a ``_component_`` section; what it refuses is said with its place in the config.

    Args:
        node: the config section.
        where: its key, for messages.
        *args: passed on before its own arguments.
        makes: what the recipe needs it to make.
        **kwargs: passed on in place of its own.

    Returns:
        What the component makes.

    Raises:
        ConfigError: the component raised a ValueError, or makes something else.
        FileNotFoundError: it found no file.
    """
    try:
        made = instantiate(node, *args, **kwargs)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(made, makes):
        name = node["_component_"]
        raise ConfigError(f"{where}._component_ {name} makes a {type(made).__name__}, expected a {makes.__name__}")
    return made


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
