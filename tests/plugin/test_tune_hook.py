"""The `tune` command sees the project's recipes: wheel and editable installs, any folder, one and two processes."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tcal_components.plugin import names
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
    """Each recipe stands once, beside the configs whose launch lines name it."""
    lines = tune(python, tmp_path, "ls").stdout.splitlines()
    for path in (REPOSITORY / "recipes").glob("*.py"):
        first = next(i for i, line in enumerate(lines) if line.startswith(f"recipes/{path.stem} "))
        end = next((i for i in range(first + 1, len(lines)) if not lines[i].startswith(" ")), len(lines))
        configs = {line[40:].strip() for line in lines[first:end]}
        launched = f"recipes/{path.stem} --config configs/"
        expected = {f for f in (REPOSITORY / "configs").glob("*.yaml") if f"{launched}{f.name}" in f.read_text()}
        assert configs == {f"configs/{f.name}" for f in expected} and configs
    assert sum(line.startswith("recipes/") for line in lines) == len(list((REPOSITORY / "recipes").glob("*.py")))
    for name in (CONFIG, "quickstart"):
        valid = tune(python, tmp_path, "validate", name)
        assert valid.returncode == 0 and "well-formed" in valid.stdout, valid.stderr


def test_short_names_run_and_are_copied(python: Path, tmp_path: Path) -> None:
    result = tune(python, tmp_path, "run", "taylor_calibrate_kd", "--config", "quickstart", "stages=[none]")
    assert started(result), result.stderr
    for name, target, source in (
        ("configs/quickstart", "x.yaml", CONFIG),
        ("select_layers", "y.yaml", "configs/select_layers.yaml"),
    ):
        assert tune(python, tmp_path, "cp", name, target).returncode == 0
        assert (tmp_path / target).read_text() == (REPOSITORY / source).read_text()


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["run", "taylor_calibrate", "--config", CONFIG], RECIPE),
        (["run", RECIPE, "--config", "configs/quikstart"], CONFIG),
        (["cp", "quikstart", "."], CONFIG),
    ],
)
def test_a_name_that_is_near_is_said_in_one_line(tmp_path: Path, arguments: list[str], meant: str) -> None:
    result = tune(Path(sys.executable), tmp_path, *arguments)
    assert result.returncode == 2 and f"did you mean '{meant}'?" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_what_a_name_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("quickstart", "quickstart.yaml", "configs/quickstart", CONFIG):
        assert names.meant(given, "configs") == CONFIG
    for given in ("taylor_calibrate_kd", "taylor_calibrate_kd.py", RECIPE, f"{RECIPE}.py", f"./{RECIPE}.py"):
        assert names.meant(given, "recipes") == RECIPE
    for given in ("quickstart.py", "other/quickstart", "/configs/quickstart", "nothing", "llama2/7B_full"):
        assert names.meant(given, "configs") is None
    (tmp_path / "quickstart.yaml").write_text("")
    assert names.meant("quickstart", "configs") is None, "a file of the working folder"
    assert names.meant("configs/quickstart", "configs") == CONFIG
    assert names.nearest("configs/quikstart.yaml", "configs") == CONFIG and names.nearest("xyz", "recipes") is None


def test_every_config_is_listed_with_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = [config for configs in names.pairs().values() for config in configs]
    assert sorted(listed) == sorted(names.files("configs")), "each once"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/own.yaml").write_text(f"#  tune run {RECIPE}.py --config configs/own.yaml a=1\n")
    assert "configs/own.yaml" in names.pairs()[RECIPE]


def test_a_bare_start_imports_nothing(python: Path, tmp_path: Path) -> None:
    """The .pth file is read by every interpreter of the environment; it may cost no more than a line of code."""
    code = "import sys; print(*sorted(sys.modules)); print(*[getattr(f, '__name__', f) for f in sys.meta_path])"
    hook = next(Path(python).parents[1].rglob("tcal_tune_hook.pth"))
    seen = [subprocess.check_output([python, "-c", code], text=True, cwd=tmp_path).splitlines()]
    off = hook.rename(hook.with_suffix(".off"))
    seen.append(subprocess.check_output([python, "-c", code], text=True, cwd=tmp_path).splitlines())
    off.rename(hook)
    assert seen[0][0] == seen[1][0], "no module more"
    assert seen[0][1].split() == ["TcalFinder", *seen[1][1].split()]


def test_an_environment_without_the_package_still_imports(python: Path, tmp_path: Path) -> None:
    """An editable install whose repository was removed leaves its .pth file."""
    hook = (REPOSITORY / "tcal_components/plugin/tcal_tune_hook.pth").read_text()
    (tmp_path / "torch.py").write_text("print('its own torch')\n")
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{hook}\nimport torch"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout == "its own torch\n" and not result.stderr


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
    for path in (f"{RECIPE}.py", "taylor_calibrate_kd.py"):
        (tmp_path / path).write_text("import sys; print('the local one', *sys.argv[1:])\n")
    (tmp_path / "quickstart.yaml").write_text("output_dir: here\n")
    result = tune(python, tmp_path, "run", RECIPE, "--config", CONFIG)
    assert "the local one" in result.stdout, result.stderr
    result = tune(python, tmp_path, "run", "taylor_calibrate_kd", "--config", "quickstart")
    assert result.stdout.strip().endswith("the local one --config quickstart.yaml"), result.stderr


@pytest.mark.parametrize(
    ("arguments", "given", "expected"),
    [
        (["tune", "run", RECIPE, "--config", CONFIG], {}, "1000"),
        ([f"/somewhere/{RECIPE}.py", "--config", CONFIG], {}, "1000"),
        (["tune", "run", "taylor_calibrate_kd", "--config", "quickstart"], {}, "1000"),
        (["other", "taylor_calibrate_kd"], {}, None),
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


def test_threads_of_a_copied_recipe_spin_briefly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By what it imports: `tune cp` gives it any name."""
    (tmp_path / "my.py").write_text((REPOSITORY / f"{RECIPE}.py").read_text())
    (tmp_path / "other.py").write_text("import torch  # no tcal_components\n")
    monkeypatch.chdir(tmp_path)
    for arguments, expected in (
        (["tune", "run", "my.py"], "1000"),
        ([str(tmp_path / "my.py"), "--config", CONFIG], "1000"),
        (["tune", "run", "other.py"], None),
        (["tune", "run", "missing.py"], None),
    ):
        environment = {"PATH": os.environ["PATH"]}
        monkeypatch.setattr(os, "environ", environment)
        spin_briefly(arguments)
        assert environment.get("GOMP_SPINCOUNT") == expected, arguments


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
