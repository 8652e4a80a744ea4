"""Files that travel inside the package: the embedded teacher, its tokenizer and its text.

A path in a config that begins with ``asset:`` names one of them, so that a config works from any directory and from
an installed wheel: ``asset:quickstart`` is the teacher's folder, ``asset:quickstart/train.jsonl`` its training text.
"""

from pathlib import Path

PREFIX = "asset:"

__all__ = ["PREFIX", "asset_path", "resolve"]


def asset_path(name: str) -> Path:
    """Absolute path of an asset.

    Args:
        name (str): path below the assets folder, for example ``quickstart/eval.jsonl``.

    Raises:
        FileNotFoundError: if there is no such asset; the message lists the folders there are.
        ValueError: if ``name`` leads out of the assets folder.
    """
    root = Path(__file__).resolve().parent
    path = (root / name).resolve()
    if root not in (path, *path.parents):
        raise ValueError(f"an asset is a path below the package's assets folder, got {PREFIX}{name}")
    if not path.exists():
        known = ", ".join(sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("__")))
        raise FileNotFoundError(f"no asset {PREFIX}{name}; the package has: {known or 'none'}")
    return path


def resolve(path: str | Path) -> Path:
    """Path of a file or folder given in a config: ``asset:NAME``, ``~/...`` or an ordinary path."""
    text = str(path)
    return asset_path(text[len(PREFIX) :]) if text.startswith(PREFIX) else Path(text).expanduser()
