"""Reading a config: every mistake is one line that names the key."""

import dataclasses
from typing import Annotated, Any, Literal

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tcal_components.config import (
    ConfigError,
    OneOf,
    Range,
    RunConfig,
    Settings,
    build,
    check_component,
    check_keys,
    check_top_level,
    one_line_errors,
    read,
    resolve_assets,
    section,
    takes,
)
from tcal_components.pipeline.config import PipelineKeys


@dataclasses.dataclass(frozen=True)
class Align(Settings):
    steps: Annotated[int, Range(1, 100)]
    lr: float = 1e-3
    clip: Annotated[float, Range(above=0)] | None = 1.0
    name: str | None = None
    kind: Literal["a", "b"] = "a"
    part: Annotated[str, OneOf(("gates", "decay"))] | None = None
    betas: tuple[Annotated[float, Range(0, below=1)], float] = (0.9, 0.95)
    pulls: Annotated[list[float], Range(1, 3)] = dataclasses.field(default_factory=lambda: [1.0])
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
    made = section(Align, given, "align")
    assert made.steps == 3 and made.lr == 1e-4 and made.layers == [0, 4] and made.kind == "a"
    assert made.betas == (0.8, 0.9), "a list where a tuple is wanted"
    assert section(Align, None, "align", steps=1).steps == 1
    assert section(Align, {"steps": 1, "lr": 2, "pulls": ["1e-3"]}, "align").pulls == [1e-3]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"step": 1},
            "unknown key 'step' in align (did you mean 'steps'?); allowed: betas, clip, kind, layers, lr, name, part",
        ),
        ({}, "align.steps is missing"),
        ({"steps": True}, "align.steps is True, expected int"),
        ({"steps": 1.5}, "align.steps is 1.5, expected int"),
        ({"steps": None}, "align.steps is None, expected int"),
        ({"steps": 1, "lr": "fast"}, "align.lr is 'fast', expected float"),
        ({"steps": 1, "name": 3}, "align.name is 3, expected str | None"),
        ({"steps": 0}, "align.steps is 0, expected at least 1 and at most 100"),
        ({"steps": 101}, "align.steps is 101, expected at least 1 and at most 100"),
        ({"steps": 10**5000}, "align.steps is a int too large to show, expected a number that fits into 64 bits"),
        ({"steps": 1, "lr": float("nan")}, "align.lr is nan, expected a finite number"),
        ({"steps": 1, "lr": "-inf"}, "align.lr is -inf, expected a finite number"),
        ({"steps": 1, "lr": 10**400}, "align.lr is 1000"),
        ({"steps": 1, "clip": 0}, "align.clip is 0, expected more than 0"),
        ({"steps": 1, "part": "gate"}, "align.part is 'gate' (did you mean 'gates'?); allowed: gates, decay"),
        ({"steps": 1, "kind": "c"}, "align.kind is 'c'; allowed: a, b"),
        ({"steps": 1, "pulls": []}, "align.pulls is [], expected at least 1 and at most 3 entries"),
        ({"steps": 1, "pulls": [1.0, float("inf")]}, "align.pulls[1] is inf, expected a finite number"),
        ({"steps": 1, "kind": "x" * 10000}, "align.kind is 'xxx"),
        ({"steps": 1, "betas": 0.9}, "align.betas is 0.9, expected tuple"),
        ({"steps": 1, "betas": [0.9, "x"]}, "align.betas[1] is 'x', expected float"),
        ({"steps": 1, "betas": [1.0, 0.9]}, "align.betas[0] is 1.0, expected at least 0 and less than 1"),
        ({"steps": 1, "betas": [0.9]}, "align.betas is [0.9], expected tuple[float, float]"),
        ({"steps": 1, "layers": "0"}, "align.layers is '0', expected list[int] | None"),
        ({"steps": 1, "layers": ["0"]}, "align.layers[0] is '0', expected int"),
        ({"steps": 1, "table": [1]}, "align.table is [1], expected keys and values"),
        ({"steps": 1, "switch": 1}, "align.switch is 1, expected bool"),
        ([1], "align is [1], expected keys and values"),
    ],
)
def test_section_refuses(given, said):
    with pytest.raises(ConfigError) as error:
        section(Align, given, "align")
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_a_key_that_the_recipe_supplies_is_not_the_users():
    with pytest.raises(ConfigError, match="unknown key 'steps' in distill"):
        section(Align, {"steps": 5}, "distill", steps=1)


def test_a_value_that_does_not_fit_is_shown_short():
    with pytest.raises(ConfigError) as error:
        section(Align, {"steps": ["x" * 10_000] * 1000}, "align")
    assert len(str(error.value)) < 300


def test_whoever_makes_settings_has_them_checked():
    with pytest.raises(ConfigError, match="^steps is 0, expected at least 1"):
        Align(steps=0)
    with pytest.raises(ConfigError, match="^lr is nan"):
        dataclasses.replace(Align(steps=1), lr=float("nan"))


def test_top_level_keys():
    cfg = OmegaConf.create({"seed": 3, "output_dir": "out", "device": None, "tune_kernels": False, "other": 1})
    assert read(RunConfig, cfg) == RunConfig(output_dir="out", seed=3)
    for change, said in (
        ({"seed": "x"}, "^seed is 'x', expected int"),
        ({"seed": -1}, "^seed is -1, expected at least 0"),
        ({"seed": 2**32}, "^seed is 4294967296, expected at least 0 and at most 4294967295"),
        ({"tune_kernels": 3}, "^tune_kernels is 3, expected bool"),
        ({"output_dir": None}, "^output_dir is missing"),
        ({"output_dir": ""}, "^output_dir is empty"),
        ({"device": "cuda:x"}, "^device is 'cuda:x'; allowed: cpu, cuda, cuda:N"),
        ({"device": "cuda:" + "9" * 30}, "^device is 'cuda:9"),
        ({"dtype": "fp16"}, "^dtype is 'fp16'"),
    ):
        with pytest.raises(ConfigError, match=said):
            read(RunConfig, OmegaConf.merge(cfg, change))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": {"b": [1, float("nan")]}}, "^a.b\\[1\\] is nan, expected a finite number"),
        ({"a": -float("inf")}, "^a is -inf, expected a finite number"),
        ({"a": {"b": 2**63}}, "^a.b is 9223372036854775808, expected a number that fits into 64 bits"),
        ({"a": "x\0y"}, "^a is 'x\\\\x00y', expected text without null characters"),
        ({"a": {"\ud800": 1}}, "^a key of a is '\\\\ud800', expected text"),
        ({"a": "${a}"}, "Recursive interpolation"),
        ({"b": 1}, "unknown key 'b' in the config"),
    ],
)
def test_what_no_key_can_hold(given, said):
    with pytest.raises((ConfigError, OmegaConfBaseException), match=said):
        check_top_level(OmegaConf.create(given), ["a"])


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
    assert read(PipelineKeys, OmegaConf.create({"stages": ["export", "measure"]})).stages == ["measure", "export"]
    for wrong in (None, [], "measure", ["measure", "train"], {"measure": 1}, 5):
        with pytest.raises(ConfigError, match="^stages"):
            read(PipelineKeys, OmegaConf.create({"stages": wrong}))


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


def test_a_long_word_is_shown_short(capsys):
    with pytest.raises(SystemExit), one_line_errors():
        raise ConfigError(f"unknown key {'x' * 5000} in align; allowed: steps")
    line = capsys.readouterr().err
    assert len(line) < 400 and line.endswith("x in align; allowed: steps\n") and "x...x" in line


def test_keys_that_others_refer_to_may_stand_beside_the_known_ones():
    cfg = OmegaConf.create(
        {"folder": "/tmp/a", "output_dir": "${folder}/b", "seed": "${numbers.seed}", "numbers": {"seed": 3}}
    )
    check_top_level(cfg, ["output_dir", "seed"])
    with pytest.raises(ConfigError, match="unknown key 'fold'"):
        check_top_level(OmegaConf.create({"fold": 1, "output_dir": "${folder}", "folder": "a"}), ["output_dir"])
    with pytest.raises(ConfigError, match="leaves folder open; give it on the command line: folder=..."):
        check_top_level(OmegaConf.create({"folder": "???", "output_dir": "${folder}"}), ["output_dir"])
