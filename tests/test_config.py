"""Reading a config: every mistake is one line that names the key."""

import dataclasses
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from tcal_components.config import (
    ConfigError,
    build,
    check_component,
    check_keys,
    check_stages,
    one_line_errors,
    resolve_assets,
    scalar,
    section,
    takes,
)


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int
    lr: float = 1e-3
    name: str | None = None
    kind: Literal["a", "b"] = "a"
    betas: tuple[float, float] = (0.9, 0.95)
    layers: list[int] | None = None
    table: dict[str, Any] | None = None
    switch: bool = False


def component(data, *, size: int, rate: float | None = None, source: str = "x") -> dict:
    """Stands for whatever a config names."""
    if size == 13:
        raise ValueError("13 is no size")
    if source == "missing":
        raise FileNotFoundError("no file missing")
    return {"data": data, "size": size, "rate": rate, "source": source}


def open_component(**anything):
    return anything


def node(**values):
    return OmegaConf.create({"_component_": f"{__name__}.component", **values})


def test_section_fills_in_defaults_and_checks_types():
    given = OmegaConf.create({"steps": 3, "lr": "1e-4", "betas": [0.8, 0.9], "layers": [0, 4], "switch": True})
    made = section(Settings, given, "align")
    assert made.steps == 3 and made.lr == 1e-4 and made.layers == [0, 4] and made.kind == "a"
    assert section(Settings, None, "align", steps=1).steps == 1
    assert section(Settings, {"steps": 1, "lr": 2}, "align").lr == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"step": 1}, "unknown key 'step' in align (did you mean 'steps'?); allowed: betas, kind, layers, lr, name"),
        ({}, "align.steps is missing"),
        ({"steps": True}, "align.steps is True, expected int"),
        ({"steps": 1.5}, "align.steps is 1.5, expected int"),
        ({"steps": None}, "align.steps is None, expected int"),
        ({"steps": 1, "lr": "fast"}, "align.lr is 'fast', expected float"),
        ({"steps": 1, "name": 3}, "align.name is 3, expected str | None"),
        ({"steps": 1, "kind": "c"}, "align.kind is 'c', expected typing.Literal"),
        ({"steps": 1, "betas": 0.9}, "align.betas is 0.9, expected tuple"),
        ({"steps": 1, "betas": [0.9, "x"]}, "align.betas is [0.9, 'x'], expected tuple"),
        ({"steps": 1, "layers": ["0"]}, "align.layers is ['0'], expected list[int] | None"),
        ({"steps": 1, "table": [1]}, "align.table is [1], expected dict"),
        ({"steps": 1, "switch": 1}, "align.switch is 1, expected bool"),
        ([1], "align is [1], expected keys and values"),
    ],
)
def test_section_refuses(given, said):
    with pytest.raises(ConfigError) as error:
        section(Settings, OmegaConf.create(given) if isinstance(given, dict) else given, "align")
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_a_key_that_the_recipe_supplies_is_not_the_users():
    with pytest.raises(ConfigError, match="unknown key 'steps' in distill"):
        section(Settings, {"steps": 5}, "distill", steps=1)


def test_scalar():
    cfg = OmegaConf.create({"seed": 3, "empty": None, "text": "x", "flag": False})
    assert scalar(cfg, "seed", int, 0, least=0) == 3 and scalar(cfg, "none", int, 7) == 7
    assert scalar(cfg, "empty", int, 7) == 7 and scalar(cfg, "flag", bool, True) is False
    for key, kind, least, said in (
        ("text", int, None, "text is 'x', expected int"),
        ("seed", bool, None, "seed is 3, expected bool"),
        ("seed", int, 4, "seed is 3, expected at least 4"),
    ):
        with pytest.raises(ConfigError, match=said):
            scalar(cfg, key, kind, kind(), least=least)


def test_component_is_checked_without_being_called():
    check_component(node(size=1, rate=0.5), "dataset", supplied=("data",))
    check_component(node(size=1, rate=None), "dataset", supplied=("data",))
    check_component(OmegaConf.create({"_component_": f"{__name__}.open_component", "what": 1}), "logger")
    check_component(
        OmegaConf.create({"_component_": "torch.optim.AdamW", "betas": [0.9, 0.95]}), "o", supplied=("params",)
    )


@pytest.mark.parametrize(
    ("given", "supplied", "said"),
    [
        (None, (), "dataset needs a _component_ key"),
        ({"size": 1}, (), "dataset needs a _component_ key"),
        ({"_component_": None}, (), "dataset._component_ is None, expected the name"),
        ({"_component_": "no.such.thing"}, (), "dataset._component_ 'no.such.thing' cannot be imported"),
        ({"sise": 1}, ("data",), "unknown key 'sise' in dataset (did you mean 'size'?); allowed: rate, size, source"),
        ({"size": 1, "data": 2}, ("data",), "unknown key 'data' in dataset"),
        ({"size": 1}, ("data", "rows"), "dataset._component_ '__name__.component' does not fit: it takes no rows"),
        ({"rate": 1.0}, ("data",), "dataset.size is missing"),
        ({"size": 1}, (), "dataset.data is missing"),
        ({"size": "big"}, ("data",), "dataset.size is 'big', expected int"),
        ({"size": 1, "source": None}, ("data",), "dataset.source is None, expected str"),
    ],
)
def test_component_refused(given, supplied, said):
    if given is not None and given.keys() != {"_component_"} and not said.startswith("dataset needs"):
        given = {"_component_": f"{__name__}.component", **given}
    with pytest.raises(ConfigError) as error:
        check_component(None if given is None else OmegaConf.create(given), "dataset", supplied=supplied)
    assert str(error.value).startswith(said.replace("__name__", __name__))


def test_build_says_where():
    assert build(node(size=2), "dataset", "text", rate=0.5) == {"data": "text", "size": 2, "rate": 0.5, "source": "x"}
    with pytest.raises(ConfigError, match="^dataset: 13 is no size$"):
        build(node(size=13), "dataset", "text")
    with pytest.raises(FileNotFoundError, match="^dataset: no file missing$"):
        build(node(size=1, source="missing"), "dataset", "text")


def test_takes():
    assert takes(node(), "rate") and not takes(node(), "rows")
    assert takes(OmegaConf.create({"_component_": f"{__name__}.open_component"}), "anything")


def test_check_keys_suggests():
    check_keys({"a": 1}, ["a", "b"], "here")
    with pytest.raises(ConfigError) as error:
        check_keys({"output_dirr": 1}, ["seed", "output_dir", "seed"], "here")
    said = "unknown key 'output_dirr' in here (did you mean 'output_dir'?); allowed: output_dir, seed"
    assert str(error.value) == said


def test_stages_are_ordered():
    assert check_stages(OmegaConf.create(["export", "measure"])) == ["measure", "export"]
    for wrong in (None, [], "measure", ["measure", "train"], {"measure": 1}):
        with pytest.raises(ConfigError, match="allowed|expected a list out of"):
            check_stages(wrong)


def test_assets_are_resolved_where_they_stand():
    cfg = OmegaConf.create({"a": "asset:quickstart", "b": {"c": ["asset:quickstart/eval.jsonl", 1]}, "d": "${a}"})
    resolve_assets(cfg)
    assert cfg.a.endswith("quickstart") and cfg.b.c[0].endswith("eval.jsonl") and cfg.d == cfg.a
    with pytest.raises((ValueError, FileNotFoundError)):
        resolve_assets(OmegaConf.create({"a": "asset:nothing/here"}))


@pytest.mark.parametrize(
    "error",
    [ConfigError("two\n  lines"), FileNotFoundError("two lines"), PermissionError("two lines")],
)
def test_one_line_and_status(error, capsys):
    with pytest.raises(SystemExit) as end, one_line_errors():
        raise error
    assert end.value.code == 2 and capsys.readouterr().err == "error: two lines\n"


def test_other_errors_keep_their_traceback(capsys):
    with pytest.raises(RuntimeError), one_line_errors():
        raise RuntimeError("ours")
    assert capsys.readouterr().err == ""


def test_interpolation_of_nothing_is_the_users_too(capsys):
    with pytest.raises(SystemExit), one_line_errors():
        OmegaConf.to_container(OmegaConf.create({"a": "${b}"}), resolve=True)
    assert capsys.readouterr().err.startswith("error: ")
