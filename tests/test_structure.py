"""The house itself: imports run downwards only, no file is long, no folder is full."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tcal_components

PACKAGE = Path(tcal_components.__file__).parent
RECIPES = PACKAGE.parent / "recipes"
# From the ground up: each imports only what stands before it.
ORDER = (
    *("assets", "config", "ops", "precision"),
    *("modules", "models", "distributed", "checkpoint", "data"),
    *("measure", "initialize", "align", "distill"),
    *("export", "evaluation", "setup", "reporting"),
    *("serving", "select", "ablation", "benchmark", "pipeline", "plugin"),
)
LINES, FILES = 300, 14


def sources():
    return [path for path in PACKAGE.rglob("*.py") if "_recipes" not in path.parts]


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path, modules):
    """Modules of the package that a file imports, inside functions too, but not for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


@pytest.fixture(scope="module")
def graph():
    modules = {module_of(path) for path in sources()}
    return {module_of(path): imports_of(path, modules) - {module_of(path)} for path in sources()}


def floor_of(module):
    return module.split(".")[1] if "." in module else None


def test_imports_run_downwards(graph):
    upwards = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if None not in (floor_of(module), floor_of(other))
        and ORDER.index(floor_of(module)) < ORDER.index(floor_of(other))
    ]
    assert not upwards


def test_no_file_imports_itself_by_a_detour(graph):
    # A package's __init__ gathers what its files have; they do not import it.
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_file_is_long():
    if not RECIPES.is_dir():
        pytest.skip("the recipes are not beside an installed package")
    long = {
        str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in [*sources(), *RECIPES.glob("*.py")]
    }
    assert not {path: lines for path, lines in long.items() if lines > LINES}


def test_no_folder_is_full():
    files: dict[str, int] = {}
    for path in sources():
        files[str(path.parent)] = files.get(str(path.parent), 0) + 1
    assert not {folder: count for folder, count in files.items() if count > FILES}
