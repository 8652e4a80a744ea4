"""Makes ``tune ls``, ``cp``, ``validate`` and ``run`` see this project's recipes and configs.

torchtune 0.6.1 has a closed list of recipes, and its own top-level package ``recipes`` raises on import, so a recipe that
lies in a folder of that name can never be started by ``tune run`` with one process. A ``.pth`` file of the wheel calls
:func:`install` at interpreter start; it registers a finder that waits for three of torchtune's modules, and for torch where
one of the project's recipes is run, and does nothing else. This module is loaded by every interpreter of the environment:
standard library only, and quick.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_RECIPES = "recipes"
_CONFIGS = "configs"


def packaged(folder: str) -> Path:
    """Folder of the recipes or configs that belong to the installed package.

    Args:
        folder: ``"recipes"`` or ``"configs"``.

    Returns:
        Absolute path: ``tcal_components/_recipes`` in a wheel, the repository's own folder in an editable install.
    """
    package = Path(__file__).resolve().parent.parent
    inside = package / f"_{folder}"
    return inside if inside.is_dir() else package.parent / folder


def _files(folder: str, suffix: str) -> dict[str, Path]:
    """Recipes or configs by name (``recipes/NAME`` / ``configs/NAME.yaml``); a file of the user's own folder wins."""
    found: dict[str, Path] = {}
    for base in (packaged(folder), Path.cwd() / folder):
        for path in sorted(base.glob(f"*{suffix}")):
            name = path.stem if suffix == ".py" else path.name
            found[f"{folder}/{name}"] = path.absolute()
    return found


def register(registry: ModuleType) -> None:
    """Append the recipes to torchtune's registry.

    An absolute ``file_path`` survives ``ROOT / "recipes" / file_path``, which is how every command resolves it.

    Args:
        registry: the freshly imported module ``torchtune._recipe_registry``.
    """
    configs = [registry.Config(name=name, file_path=str(path)) for name, path in _files(_CONFIGS, ".yaml").items()]
    own = {path.stem for path in packaged(_RECIPES).glob("*.py")}
    for name, path in _files(_RECIPES, ".py").items():
        listed = configs if Path(name).name in own else []
        registry._ALL_RECIPES.append(
            registry.Recipe(name=name, file_path=str(path), configs=listed, supports_distributed=True)
        )
        # `tune run recipes/NAME.py` is what tab completion writes.
        registry._ALL_RECIPES.append(
            registry.Recipe(name=f"{name}.py", file_path=str(path), configs=[], supports_distributed=True)
        )


def accept_names(validate: ModuleType) -> None:
    """Let ``tune validate`` take the names that ``tune ls`` prints; 0.6.1 takes paths alone.

    Args:
        validate: the freshly imported module ``torchtune._cli.validate``.
    """
    original = validate.Validate._validate_cmd

    def _validate_cmd(self: Any, args: Any) -> None:
        if not os.path.exists(args.config):
            args.config = _files(_CONFIGS, ".yaml").get(str(args.config), args.config)
        original(self, args)

    validate.Validate._validate_cmd = _validate_cmd


def accept_lm_eval(run: ModuleType) -> None:
    """Let ``tune run eleuther_eval`` start with lm-eval 0.4.13, which 0.6.1 takes for older than 0.4.5: it compares text.

    Args:
        run: the freshly imported module ``torchtune._cli.run``; the recipe asks ``importlib.metadata`` in its process.
    """
    from importlib import metadata

    original = metadata.version

    class Version(str):
        def __lt__(self, other: str) -> bool:
            mine, theirs = ([int(part) for part in re.findall(r"\d+", text)] for text in (self, other))
            return mine < theirs

    metadata.version = lambda name: Version(original(name)) if name == "lm-eval" else original(name)  # type: ignore[assignment]


_HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "torchtune._recipe_registry": register,
    "torchtune._cli.run": accept_lm_eval,
    "torchtune._cli.validate": accept_names,
}


def spin_briefly(arguments: Sequence[str]) -> None:
    """Shorten the busy waiting of OpenMP's threads where one of the project's recipes is run; what the user set stays.

    libgomp, which torch brings, reads this once, when it is loaded. By default a thread that is done spins for
    milliseconds before it sleeps. Next to another busy process that takes the core from the very thread it waits for:
    on two cores with one other busy process, alignment steps took several times as long as with this. On idle cores both
    are equally fast; never spinning at all (``OMP_WAIT_POLICY=passive``) is slower there.

    Args:
        arguments: the command line, ``sys.argv``.
    """
    own = {path.stem for path in packaged(_RECIPES).glob("*.py")}
    named = any(Path(argument).parent.name == _RECIPES and Path(argument).stem in own for argument in arguments)
    if named and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "1000"


def _no_word_of_kernels(record: Any) -> bool:
    return "Skipping import of cpp extensions" not in record.getMessage()


def quiet_torchao(arguments: Sequence[str]) -> None:
    """Keep one line of torchao's off the console of ``tune`` and of scripts that use this project.

    torchao 0.13 to 0.15, which torchtune 0.6.1 needs, says at import that its kernels are of an older torch. Nothing here
    uses them.

    Args:
        arguments: the command line, ``sys.argv``.
    """
    command = Path(arguments[0]) if arguments and arguments[0] else Path("-")
    try:
        ours = command.stem == "tune" or (command.suffix == ".py" and b"tcal_components" in command.read_bytes())
    except OSError:
        return
    if ours:
        import logging  # not at the start of every interpreter

        logging.getLogger("torchao").addFilter(_no_word_of_kernels)


class _Finder:
    """Meta-path finder that runs a hook after one of the awaited modules was executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name == "torch":
            spin_briefly(getattr(sys, "argv", ()))
            quiet_torchao(getattr(sys, "argv", ()))
        hook = _HOOKS.get(name)
        if hook is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                hook(module)
            except Exception as error:  # noqa: BLE001 - whatever changed in torchtune, its command line must survive
                print(f"tcal: {name} could not be extended: {error!r}", file=sys.stderr)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Put the finder in front, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
