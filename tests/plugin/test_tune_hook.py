"""The `tune` command sees the project's recipes: wheel and editable installs, any folder, one and two processes."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tcal_components.plugin.tune_hook import spin_briefly

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = "recipes/taylor_calibrate_kd"
CONFIG = "configs/quickstart.yaml"


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment that has this project installed and borrows all else from the one that runs the tests."""
    root = tmp_path_factory.mktemp(request.param)
    venv.create(root, symlinks=True, with_pip=False)
    interpreter = root / "bin" / "python"
    site = Path(
        subprocess.check_output(
            [interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    # Paths that a .pth file adds are not searched for further .pth files, so the outer install stays unseen.
    (site / "zz_borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    flags = ["-e"] if request.param == "editable" else []
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", interpreter, "install", "-q", "--no-deps", "--no-build-isolation"]
        + [*flags, str(REPOSITORY)],
        check=True,
        capture_output=True,
    )
    return interpreter


def tune(python: Path, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH",)}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [python, "-c", "from torchtune._cli.tune import main; main()", *args],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def started(result: subprocess.CompletedProcess[str]) -> bool:
    """Whether the recipe itself ran: it alone knows its stages, and it refuses this one before any other work."""
    return result.returncode != 0 and "stages[0] is 'none'" in result.stderr


def test_ls_and_validate(python: Path, tmp_path: Path) -> None:
    listed = tune(python, tmp_path, "ls").stdout
    for path in (REPOSITORY / "recipes").glob("*.py"):
        assert f"recipes/{path.stem} " in listed
    assert CONFIG in listed
    valid = tune(python, tmp_path, "validate", CONFIG)
    assert valid.returncode == 0 and "well-formed" in valid.stdout, valid.stderr


def test_copies_run_from_anywhere(python: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for name, target in ((RECIPE, "own/recipe.py"), (CONFIG, "own/config.yaml")):
        assert tune(python, tmp_path, "cp", name, target).returncode == 0
    assert (tmp_path / "own/recipe.py").read_text() == (REPOSITORY / f"{RECIPE}.py").read_text()
    copied = tune(python, tmp_path, "run", "own/recipe.py", "--config", "own/config.yaml", "stages=[none]")
    assert started(copied), copied.stderr


@pytest.mark.parametrize("where", ["empty", "repository"])
def test_run_one_process(python: Path, tmp_path: Path, where: str) -> None:
    folder = REPOSITORY if where == "repository" else tmp_path
    result = tune(python, folder, "run", RECIPE, "--config", CONFIG, "stages=[none]")
    assert started(result), result.stderr


def test_run_two_processes(python: Path, tmp_path: Path) -> None:
    result = tune(python, tmp_path, "run", "--nproc_per_node", "2", RECIPE, "--config", CONFIG, "stages=[none]")
    assert started(result), result.stderr


def test_a_local_recipe_of_the_same_name_wins(python: Path, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / f"{RECIPE}.py").write_text("print('the local one')\n")
    result = tune(python, tmp_path, "run", RECIPE, "--config", CONFIG)
    assert result.stdout.strip().endswith("the local one"), result.stderr


@pytest.mark.parametrize(
    ("arguments", "given", "expected"),
    [
        (["tune", "run", RECIPE, "--config", CONFIG], {}, "1000"),
        ([f"/somewhere/{RECIPE}.py", "--config", CONFIG], {}, "1000"),
        (["tune", "run", RECIPE], {"GOMP_SPINCOUNT": "7"}, "7"),
        (["tune", "run", RECIPE], {"OMP_WAIT_POLICY": "active"}, None),
        (["tune", "run", "full_finetune_single_device"], {}, None),
        (["pytest"], {}, None),
    ],
)
def test_threads_spin_briefly(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], given: dict[str, str], expected: str | None
) -> None:
    environment = {"PATH": os.environ["PATH"], **given}
    monkeypatch.setattr(os, "environ", environment)
    spin_briefly(arguments)
    assert environment.get("GOMP_SPINCOUNT") == expected


def test_spin_is_set_before_torch_loads(python: Path, tmp_path: Path) -> None:
    """And other programs of the environment do not get it."""
    code = "import os, torch; print(os.environ.get('GOMP_SPINCOUNT'))"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    for argument, expected in ((f"{RECIPE}.py", "1000"), ("another.py", "None")):
        command = [python, "-c", code, argument]
        assert subprocess.check_output(command, text=True, cwd=tmp_path, env=environment).split()[-1] == expected


def test_one_line_of_torchao_is_kept_off_the_console(python: Path, tmp_path: Path) -> None:
    """Other programs of the environment keep it, and so does everything else that torchao says."""
    code = """
import logging, os
import torch
for text in ("Skipping import of cpp extensions due to ...", "another line"):
    logging.getLogger("torchao").warning(text)
"""
    for name, use, shown in (
        ("tune", "", False),
        ("mine.py", "import tcal_components\n", False),
        ("other.py", "", True),
    ):
        (tmp_path / name).write_text(use + code)
        said = subprocess.run([python, name], cwd=tmp_path, capture_output=True, text=True, check=True).stderr
        assert ("Skipping" in said) is shown and "another line" in said, name


def test_wheel_ships_no_top_level_recipes(python: Path) -> None:
    """torchtune's own package `recipes` would be overwritten."""
    code = "import importlib.metadata as m; print(*(str(f) for f in m.files('taylor-calibrate')), sep='\\n')"
    files = subprocess.check_output([python, "-c", code], text=True, cwd="/").split()
    assert files and not [f for f in files if f.startswith(("recipes", "configs", "tests"))]
