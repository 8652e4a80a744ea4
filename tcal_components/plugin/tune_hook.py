"""Makes ``tune ls``, ``cp``, ``validate`` and ``run`` see this project's recipes and configs.

torchtune 0.6.1 has a closed list of recipes, and its own top-level package ``recipes`` raises on import, so a recipe that
lies in a folder of that name can never be started by ``tune run`` with one process.

``tcal_tune_hook.pth`` is read by every interpreter of the environment when it starts. It has to cost next to nothing, so it
imports nothing: it puts a finder in front that waits for torch and torchtune's command line, and loads this module then.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tcal_components.plugin.names import CONFIGS, RECIPES, files, meant, nearest, packaged, pairs


def register(registry: ModuleType) -> None:
    """Append the recipes to torchtune's registry, each with the configs that are for it.

    An absolute ``file_path`` survives ``ROOT / "recipes" / file_path``, which is how every command resolves it.

    Args:
        registry: the freshly imported module ``torchtune._recipe_registry``.
    """
    configs, configs_of = files(CONFIGS), pairs()
    for name, path in files(RECIPES).items():
        listed = [registry.Config(name=config, file_path=str(configs[config])) for config in configs_of.get(name, [])]
        registry._ALL_RECIPES.append(
            registry.Recipe(name=name, file_path=str(path), configs=listed, supports_distributed=True)
        )


def accept_names_in_run(run: ModuleType) -> None:
    """Let ``tune run`` take recipe and config with or without folder and suffix, and say the name that was perhaps meant.

    Args:
        run: the freshly imported module ``torchtune._cli.run``.
    """
    original = run.Run._run_cmd

    def _run_cmd(self: Any, args: Any) -> None:
        if self._get_recipe(args.recipe) is None:
            known = meant(args.recipe, RECIPES)
            if known is None and not _importable(self._convert_to_dotpath(args.recipe)):
                _suggest(self, "recipe", args.recipe, RECIPES)
            args.recipe = known or args.recipe
        place = args.recipe_args.index("--config") + 1 if "--config" in args.recipe_args else 0
        if 0 < place < len(args.recipe_args):
            given = args.recipe_args[place]
            if self._get_config(given, None) is None:
                args.recipe_args[place] = _config_path(self, given)
        original(self, args)

    run.Run._run_cmd = _run_cmd
    _accept_lm_eval()


def _config_path(command: Any, given: str) -> str:
    """The file that a person means by a config's name; one of the working folder comes first."""
    for path in (given, f"{given}.yaml"):
        if os.path.isfile(path):
            return path
    known = meant(given, CONFIGS)
    if known is not None:
        return str(files(CONFIGS)[known])
    _suggest(command, "config", given, CONFIGS)
    return given


def _importable(module: str) -> bool:
    """Whether ``tune run`` would find a recipe of the user's own, which it looks for in the working folder last."""
    if Path(*module.split(".")).with_suffix(".py").is_file():
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _suggest(command: Any, kind: str, given: str, *folders: str) -> None:
    """Ends with one line where a name of ours is near; what is far from all of them stays torchtune's matter."""
    near = next(filter(None, (nearest(given, folder) for folder in folders)), None)
    if near is not None:
        command._parser.error(f"there is no {kind} '{given}'; did you mean '{near}'? `tune ls` has all names")


def accept_names_in_cp(cp: ModuleType) -> None:
    """Let ``tune cp`` take the same names; where a recipe and a config share one, the destination's suffix decides.

    Args:
        cp: the freshly imported module ``torchtune._cli.cp``.
    """
    original = cp.Copy._cp_cmd

    def _cp_cmd(self: Any, args: Any) -> None:
        recipes = cp.get_all_recipes()
        if args.file not in {entry.name for recipe in recipes for entry in (recipe, *recipe.configs)}:
            order = [CONFIGS, RECIPES] if args.destination.suffix == ".yaml" else [RECIPES, CONFIGS]
            found = [name for folder in order if (name := _name_to_copy(args.file, folder)) is not None]
            if not found:
                _suggest(self, "recipe or config", args.file, *order)
            args.file = found[0] if found else args.file
        original(self, args)

    cp.Copy._cp_cmd = _cp_cmd


def _name_to_copy(given: str, folder: str) -> str | None:
    """As :func:`meant`; a file of the working folder is no hindrance, ``tune cp`` copies by name alone."""
    return meant(given, folder) or (meant(f"{folder}/{given}", folder) if Path(given).parent == Path() else None)


def accept_names_in_validate(validate: ModuleType) -> None:
    """Let ``tune validate`` take the same names; 0.6.1 takes paths alone.

    Args:
        validate: the freshly imported module ``torchtune._cli.validate``.
    """
    original = validate.Validate._validate_cmd

    def _validate_cmd(self: Any, args: Any) -> None:
        args.config = Path(_config_path(self, str(args.config)))
        original(self, args)

    validate.Validate._validate_cmd = _validate_cmd


def _accept_lm_eval() -> None:
    """Let ``tune run eleuther_eval`` start with lm-eval 0.4.13, which 0.6.1 takes for older than 0.4.5: it compares text.

    The recipe asks ``importlib.metadata`` in the process of ``tune run``.
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
    "torchtune._cli.cp": accept_names_in_cp,
    "torchtune._cli.run": accept_names_in_run,
    "torchtune._cli.validate": accept_names_in_validate,
}


def spin_briefly(arguments: Sequence[str]) -> None:
    """Shorten the busy waiting of OpenMP's threads where one of the project's recipes is run, or a copy of one.

    What the user set stays.

    libgomp, which torch brings, reads this once, when it is loaded. By default a thread that is done spins for
    milliseconds before it sleeps. Next to another busy process that takes the core from the very thread it waits for:
    on two cores with two other busy processes, 40 alignment steps of the quickstart took 221 s instead of 15. On idle cores
    both are equally fast; never spinning at all (``OMP_WAIT_POLICY=passive``) is slower there.

    Args:
        arguments: the command line, ``sys.argv``.
    """
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        return
    own = {path.stem for path in packaged(RECIPES).glob("*.py")}
    named = any(
        Path(argument).stem in own and (Path(argument).parent.name == RECIPES or "run" in arguments[:place])
        for place, argument in enumerate(arguments)
    )
    if named or any(_uses_components(argument) for argument in arguments):
        os.environ["GOMP_SPINCOUNT"] = "1000"


def _uses_components(argument: str) -> bool:
    """Whether an argument is a script that imports this project's components, as a copied recipe does."""
    if not argument.endswith(".py"):
        return False
    try:
        text = Path(argument).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(r"^(from|import) tcal_components\b", text, re.MULTILINE) is not None


def _no_word_of_kernels(record: logging.LogRecord) -> bool:
    return "Skipping import of cpp extensions" not in record.getMessage()


def quiet_torchao(arguments: Sequence[str]) -> None:
    """Keep one line of torchao's off the console of ``tune`` and of scripts that use this project.

    torchao 0.13 to 0.15, which torchtune 0.6.1 needs, says at import that its kernels are of an older torch. Nothing here
    uses them.

    Args:
        arguments: the command line, ``sys.argv``.
    """
    command = arguments[0] if arguments else ""
    if Path(command).stem == "tune" or _uses_components(command):
        logging.getLogger("torchao").addFilter(_no_word_of_kernels)


def hooked_spec(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    """The spec of an awaited module; after the module was executed, our hook for it runs.

    Args:
        name: of the module.
        path: where the import system looks for it.

    Returns:
        None where no hook is needed or the module is not there.
    """
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
    """What the ``.pth`` file of an earlier editable install calls, which stays where it is when the code is newer."""
    finder = type(
        "TcalFinder", (), {"find_spec": staticmethod(lambda name, path=None, target=None: hooked_spec(name, path))}
    )
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
