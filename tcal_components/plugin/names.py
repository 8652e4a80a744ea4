"""The project's recipes and configs, and the ways in which a person may write their names."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

RECIPES, CONFIGS = "recipes", "configs"
_SUFFIX = {RECIPES: ".py", CONFIGS: ".yaml"}


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


def files(folder: str) -> dict[str, Path]:
    """Recipes or configs by the name that ``tune ls`` prints; a file of the user's own folder wins.

    Args:
        folder: ``"recipes"`` or ``"configs"``.

    Returns:
        Absolute paths by ``recipes/NAME`` or ``configs/NAME.yaml``.
    """
    found: dict[str, Path] = {}
    for base in (packaged(folder), Path.cwd() / folder):
        for path in sorted(base.glob(f"*{_SUFFIX[folder]}")):
            found[_listed(folder, path.stem)] = path.absolute()
    return found


def pairs() -> dict[str, list[str]]:
    """Which config belongs to which recipe: the one that the launch lines at its top name.

    Returns:
        Names of configs by name of recipe, without recipes that no config is for.
    """
    found: dict[str, list[str]] = {}
    for name, path in files(CONFIGS).items():
        launches = re.findall(rf"^#.*\b({RECIPES}/\w+)(?:\.py)? --config {re.escape(name)}", _text(path), re.MULTILINE)
        for recipe in dict.fromkeys(launches):
            found.setdefault(recipe, []).append(name)
    return found


def meant(given: str, folder: str) -> str | None:
    """The name that ``tune ls`` prints for what a person wrote.

    Args:
        given: with or without folder and suffix: ``quickstart``, ``configs/quickstart``, ``configs/quickstart.yaml``.
        folder: ``"recipes"`` or ``"configs"``.

    Returns:
        The name; None where there is no such recipe or config, or a bare name is that of a file in the working folder.
    """
    path, suffix = Path(given), _SUFFIX[folder]
    if path.suffix not in ("", suffix) or str(path.parent) not in (".", folder):
        return None
    if str(path.parent) == "." and (path.is_file() or path.with_suffix(suffix).is_file()):
        return None
    name = _listed(folder, path.stem)
    return name if name in files(folder) else None


def nearest(given: str, folder: str) -> str | None:
    """The name of a recipe or config that was perhaps meant; None where none is near."""
    stems = {Path(name).stem: name for name in files(folder)}
    close = difflib.get_close_matches(Path(given).stem, list(stems), n=1)
    return stems[close[0]] if close else None


def _listed(folder: str, stem: str) -> str:
    return f"{folder}/{stem}{'' if folder == RECIPES else _SUFFIX[folder]}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # of the user's own folder
        return ""
