"""Whatever a config, a model folder or a text holds: it is read, or refused in one clear line, soon and in little memory.

    pytest tests/fuzz --hypothesis-profile=full

Each case breaks the input of a recipe and makes the recipe, which reads and checks everything but weights.
"""

import contextlib
import copy
import importlib.util
import io
import itertools
import json
import os
import re
import resource
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tcal_components.assets import asset_path
from tcal_components.config import command_line, one_line_errors

ROOT = Path(__file__).resolve().parents[2]
SECONDS, BYTES = 20, 2 << 30  # what a case may take; memory above what the process has
# Words of Python in a message: it was not meant for the user.
NOT_CLEAR = re.compile(
    r"object has no attribute|not subscriptable|unexpected keyword|not iterable|NoneType|unhashable|unsupported operand"
    r"|not supported between|takes \d+ positional|codec can't|Errno|<class '|object at 0x"
)


def cases(share):
    """Settings of a test that has ``share`` percent of the cases."""
    count = settings.default.max_examples
    return settings(
        max_examples=max(1, count * share // 100),
        derandomize=count < 1000,
        database=None,
        deadline=None,  # the alarm interrupts a case, and counts what machines of other speeds do not
        suppress_health_check=list(HealthCheck),
    )


# ------------------------------------------------------------------------------------------------------------- strategies

NUMBERS = [0, -1, 1, 2, 3, 7, 63, 20_000, 2**30, 2**31, 2**40, 2**63 - 1, 2**63, 10**400, -(2**70)]
NUMBERS += [0.0, -0.0, 0.5, 1e-300, 1e300, 1.0000001, -1.5, float("nan"), float("inf"), -float("inf")]
WORDS = [
    "",
    " ",
    "nan",
    "inf",
    "1e999",
    "1e-3",
    "-1",
    "null",
    "true",
    "cpu",
    "cuda",
    "cuda:9",
    "fp16",
    "float8",
    "\0",
    "\ud800",
]
WORDS += [
    "a\nb",
    "x" * 5000,
    "é" * 300,
    "🦊",
    "../..",
    "/dev/zero",
    "/dev/stdin",
    "/dev/null",
    "/proc/self/mem",
    "~",
    ".",
]
WORDS += ["asset:", "asset:../..", "asset:quickstart", "asset:quickstart/eval.jsonl", "PIPE", "PIPE.txt", "PIPE.npy"]
WORDS += ["${output_dir}", "${nothing}", "${seed}", "${oc.env:HOME}", "???", "user/data", "file.txt", "naive", "layers"]
WORDS += ["torch.nn.Linear", "builtins.dict", "builtins.len", "torch", "torch.nn", "tcal_components.models.teacher"]
WORDS += ["tcal_components.data.packed_text", "torchtune.training.FullModelHFCheckpointer", "torch.optim.SGD"]


# What of several deep values within one another would be beyond this file's own recursion.
DEEPEST = 160


def nested(depth, kind):
    """A list or mapping so many levels deep."""
    value = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


nasty = st.one_of(
    st.sampled_from(
        [None, True, False, [], {}, [[]], [None], {"": 1}, [0, 0], [0] * 3000, ["a", 1], {"_component_": None}]
    ),
    st.sampled_from(NUMBERS),
    st.sampled_from(WORDS),
    st.text(st.characters(), max_size=8),
    st.integers(),
    st.floats(),
    st.lists(st.one_of(st.sampled_from(NUMBERS), st.sampled_from(WORDS)), max_size=4),
    st.dictionaries(st.sampled_from(WORDS), st.sampled_from(NUMBERS), max_size=3),
    st.builds(nested, st.sampled_from([3, 40, 150]), st.sampled_from([list, dict])),
)


def places(tree, path=()):
    """Paths of all nodes below the root of a tree of mappings and lists."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def parent_of(tree, path):
    for key in path[:-1]:
        tree = tree[key]
    return tree


@st.composite
def mutated(draw, tree, most=3):
    """A copy of a tree with one to ``most`` nodes broken: exchanged, removed, renamed, swapped with another, moved, repeated."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, most))):
        known = list(places(tree))
        assume(all(len(path) < DEEPEST for path in known))
        if not known:
            break
        path = draw(st.sampled_from(known))
        parent, key = parent_of(tree, path), path[-1]
        kind = draw(st.sampled_from(["value"] * 8 + ["remove", "rename", "add", "swap", "wrap", "parent"]))
        if kind == "value":
            parent[key] = copy.deepcopy(draw(nasty))  # which the next change may be made within
        elif kind == "remove":
            del parent[key]
        elif kind == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from([*WORDS, f"{key}s", str(key)[1:], str(key).upper()]))] = parent.pop(key)
        elif kind == "add" and isinstance(parent, dict):
            parent[draw(st.sampled_from(WORDS))] = copy.deepcopy(draw(nasty))
        elif kind == "swap":
            other = draw(st.sampled_from(known))
            with contextlib.suppress(KeyError, IndexError, TypeError):
                mine, theirs = copy.deepcopy(parent[key]), copy.deepcopy(parent_of(tree, other)[other[-1]])
                parent_of(tree, other)[other[-1]] = mine
                parent[key] = theirs
        elif kind == "wrap":
            parent[key] = (
                draw(st.sampled_from([list, tuple]))([parent[key]]) if draw(st.booleans()) else {"a": parent[key]}
            )
        elif kind == "parent":
            parent[key] = copy.deepcopy(parent)
    assume(all(len(path) < DEEPEST for path in places(tree)))
    return json_like(tree)


def json_like(value):
    """The same without tuples, which neither YAML nor JSON has."""
    if isinstance(value, dict):
        return {key: json_like(entry) for key, entry in value.items()}
    return [json_like(entry) for entry in value] if isinstance(value, (list, tuple)) else value


@st.composite
def broken(draw, content: bytes):
    """Bytes of a file, damaged: cut, overwritten, doubled, or something else altogether."""
    kind = draw(st.sampled_from(["cut", "insert", "replace", "double", "other", "deep", "huge", "bom"]))
    at = draw(st.integers(0, len(content)))
    some = draw(
        st.one_of(st.binary(max_size=8), st.sampled_from([b"{", b"]", b'"', b"\\ud800", b"NaN", b"1e999", b"\0", b","]))
    )
    if kind == "cut":
        return content[:at]
    if kind == "insert":
        return content[:at] + some + content[at:]
    if kind == "replace":
        return content[:at] + some + content[at + len(some) :]
    if kind == "double":
        return content + content
    if kind == "deep":
        return draw(st.sampled_from([b"[", b'{"a":', b"- "])) * draw(st.sampled_from([100, 2000, 100_000]))
    if kind == "huge":
        return b'{"a": ' + b"9" * 5000 + b"}"
    if kind == "bom":
        return draw(st.sampled_from([b"\xef\xbb\xbf", b"\xff\xfe"])) + content
    return draw(st.sampled_from([b"", b"null", b"[]", b"3", b'"text"', b"{}", b"\xff" * 100, b"\0" * 10_000]))


def json_file(tree, most=3):
    """Bytes of a JSON file with a broken tree, or broken bytes of a whole one."""
    trees = mutated(tree, most).map(lambda found: json.dumps(found).encode())
    return st.one_of(trees, trees, trees, broken(json.dumps(tree).encode()))


# ----------------------------------------------------------------------------------------------------------------- a case


@contextlib.contextmanager
def limits():
    """An alarm for what does not end, and no address space for what does not fit."""

    def ring(*_):
        raise AssertionError(f"no end after {SECONDS} seconds")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_read_or_refused(make, what):
    """Makes a recipe; the one line that it is refused with, or None.

    Raises:
        AssertionError: another end, a message that says nothing, more time or memory than a case may take.
    """
    said = io.StringIO()
    try:
        with limits(), contextlib.redirect_stderr(said), one_line_errors():
            make()
    except SystemExit as end:
        lines = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
        assert end.code == 2 and len(lines) == 1, (what, said.getvalue())
        assert len(lines[0]) < 1500 and not NOT_CLEAR.search(lines[0]), (what, lines[0])
        assert "Traceback" not in said.getvalue()
        return lines[0]
    return None


@pytest.fixture(scope="module")
def recipes():
    """What each recipe does before it reads weights."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"fuzzed_{name}", ROOT / "recipes" / f"{name}.py")
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return {
        "taylor_calibrate_kd": load("taylor_calibrate_kd").TaylorCalibrateKD,
        "select_layers": load("select_layers").SelectLayers,
        "ablate_initialization": load("ablate_initialization").AblateInitialization,
        "evaluate_hybrid": load("evaluate_hybrid").check_config,
        "benchmark_training": load("benchmark_training").Benchmark,
    }


class Case:
    """Input of recipes that is right, and a folder for one case with files in place of its own.

    Args:
        base: folder with a teacher in several files and text.
    """

    def __init__(self, base):
        self.base, self.count = base, itertools.count()
        self.configs = {
            name: self._config(name) for name in ("quickstart", "select_layers", "ablate_quickstart", "evaluate")
        }
        self.configs["benchmark"] = self._benchmark()

    @contextlib.contextmanager
    def folder(self, files=None, text=None):
        """A folder whose ``teacher`` and ``texts`` are links to right ones but for some files."""
        path = self.base / str(next(self.count))
        for name, changed in (("teacher", files or {}), ("texts", text or {})):
            (path / name).mkdir(parents=True)
            for file in (self.base / name).iterdir():
                if file.name not in changed:
                    (path / name / file.name).symlink_to(file)
            for key, content in changed.items():
                if content is not None:
                    (path / name / key).write_bytes(content)
        (path / "work").mkdir()
        os.mkfifo(path / "pipe")
        os.mkfifo(path / "pipe.txt")
        before = os.getcwd()
        os.chdir(path / "work")
        try:
            yield path
        finally:
            os.chdir(before)
            shutil.rmtree(path)

    def config(self, name, folder, tree=None):
        """A config of ``configs`` (or a broken copy) with the paths of a case."""

        def place(value):
            if isinstance(value, dict):
                return {place(key): place(entry) for key, entry in value.items()}
            if isinstance(value, list):
                return [place(entry) for entry in value]
            return (
                value.replace("CASE", str(folder)).replace("PIPE", f"{folder}/pipe")
                if isinstance(value, str)
                else value
            )

        found = place(self.configs[name] if tree is None else tree)
        output = found.get("output_dir") if isinstance(found, dict) else None
        if (
            isinstance(output, str)
            and output.startswith("/")
            and not output.startswith((str(folder), "/dev/", "/proc/"))
        ):
            found["output_dir"] = f"{folder}/out"  # nothing is written elsewhere
        return found

    def _config(self, name):
        cfg = OmegaConf.load(ROOT / "configs" / f"{name}.yaml")
        changes = ["output_dir=CASE/out"]
        if name == "evaluate":
            cfg = OmegaConf.merge(cfg, {"evaluate": ["perplexity", "retrieval", "agreement", "speed"]})
            cfg.students = {"aligned": {"checkpoint_dir": "CASE/teacher", "weights": "CASE/teacher/mixers.safetensors"}}
            cfg.teacher = {"checkpoint_dir": "CASE/teacher"}
            cfg.tokenizer.path = "CASE/teacher"
            changes += ["retrieval.distances=[128]", "retrieval.examples=2", "speed.contexts=[64,128]"]
            changes += ["perplexity.context_lengths=[32]", "perplexity.scored=16"]
        else:
            changes += ["teacher_checkpointer.checkpoint_dir=CASE/teacher"]
            changes += ["align.steps=40", "align.batch_size=2", "align.seq_len=64", "align.heldout_batches=2"]
        for part, source in (("calibration_dataset", "one"), ("dataset", "two"), ("validation_dataset", "three")):
            if part in cfg:
                changes += [f"{part}.source=CASE/texts/{source}.jsonl", f"{part}.seq_len=64", f"{part}.max_tokens=512"]
        if name == "quickstart":
            changes += ["distill.tokens=512", "distill.batch_size=2", "export.verify_tokens=32"]
        if name == "select_layers":
            changes += ["select.num_layers=1"]
        merged = OmegaConf.merge(cfg, OmegaConf.from_dotlist(changes))
        if name in ("quickstart", "ablate_quickstart"):
            merged.retain = {"layers": [0]}
        return OmegaConf.to_container(merged, resolve=False)

    def _benchmark(self):
        cfg = OmegaConf.load(ROOT / "configs" / "benchmark_qwen3_8b.yaml")
        small = {
            "output_dir": "CASE/out",
            "device": "cpu",
            "model": {"_component_": "tcal_components.models.qwen3_0_6b"},
        }
        small["spec"] = {"num_layers": 4, "embed_dim": 32, "vocab_size": 64, "max_seq_len": 256}
        cfg = OmegaConf.merge(cfg, small)
        cfg.retain = {"layers": [0]}
        cfg.defaults.seq_len, cfg.run, cfg.variants = (
            128,
            None,
            {"plain": {"batch_size": 2}, "fp32": {"weights": "fp32"}},
        )
        return OmegaConf.to_container(cfg, resolve=False)


RECIPE_OF = {
    "quickstart": "taylor_calibrate_kd",
    "select_layers": "select_layers",
    "ablate_quickstart": "ablate_initialization",
    "evaluate": "evaluate_hybrid",
    "benchmark": "benchmark_training",
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    base = tmp_path_factory.mktemp("fuzz")
    torch.manual_seed(0)
    numbers = {"vocab_size": 2048, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    numbers |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    model = Qwen3ForCausalLM(Qwen3Config(**numbers, tie_word_embeddings=True))
    model.save_pretrained(base / "teacher", max_shard_size="50KB")
    assert (base / "teacher" / "model.safetensors.index.json").is_file()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(asset_path("quickstart") / name, base / "teacher" / name)
    (base / "teacher" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2], "pad_token_id": 0}))
    (base / "teacher" / "mixers.safetensors").write_bytes(b"")  # only its path is looked at
    lines = (asset_path("quickstart") / "train.jsonl").read_text().splitlines()
    text = " ".join(json.loads(line)["text"] for line in lines[:3])
    (base / "texts").mkdir()
    for index, name in enumerate(("one", "two", "three")):
        pieces = [text[(index * 8 + i) * 700 :][:700] for i in range(8)]
        (base / "texts" / f"{name}.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return Case(base)


@pytest.fixture(scope="module", autouse=True)
def no_network():
    """A name of the hub ends as on a machine without a network, at once."""
    import datasets

    def load_dataset(name, *_, **__):
        raise ConnectionError(f"couldn't reach {name!r} on the hub")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", load_dataset)
        yield


# ------------------------------------------------------------------------------------------------------------------ tests


@pytest.mark.parametrize("name", RECIPE_OF)
def test_what_is_broken_was_right(recipes, case, name):
    with case.folder() as folder:
        cfg = OmegaConf.create(case.config(name, folder))
        assert is_read_or_refused(lambda: recipes[RECIPE_OF[name]](cfg), name) is None


@pytest.mark.parametrize("name", RECIPE_OF)
def test_config(recipes, case, name):
    @cases({"quickstart": 20}.get(name, 8))
    @given(mutated(case.configs[name]))
    def check(tree):
        with case.folder() as folder:
            try:
                given = OmegaConf.create(case.config(name, folder, tree))
            except RecursionError:  # which the command line refuses
                assume(False)
            is_read_or_refused(lambda: recipes[RECIPE_OF[name]](given), tree)

    check()


def test_config_file(recipes, case, monkeypatch):
    @cases(8)
    @given(broken(OmegaConf.to_yaml(OmegaConf.create(case.configs["quickstart"])).encode()))
    def check(content):
        with case.folder() as folder:
            (folder / "config.yaml").write_bytes(content.replace(b"CASE", str(folder).encode()))
            monkeypatch.setattr(sys, "argv", ["recipe", "--config", str(folder / "config.yaml")])

            @command_line
            def main(cfg):
                with one_line_errors():
                    recipes["taylor_calibrate_kd"](cfg)

            def run():
                try:
                    main()
                except SystemExit as end:
                    if end.code:
                        raise

            is_read_or_refused(run, content)

    check()


@pytest.mark.parametrize(
    ("file", "share"),
    [
        ("config.json", 16),
        ("model.safetensors.index.json", 8),
        ("tokenizer.json", 6),
        ("tokenizer_config.json", 5),
        ("generation_config.json", 3),
    ],
)
def test_model_folder(recipes, case, file, share):
    @cases(share)
    @given(st.one_of(json_file(json.loads((case.base / "teacher" / file).read_text())), st.none()))
    def check(content):
        with case.folder({file: content}) as folder:
            cfg = OmegaConf.create(case.config("quickstart", folder))
            is_read_or_refused(lambda: recipes["taylor_calibrate_kd"](cfg), content and content[:3000])

    check()


def test_weights_file(recipes, case):
    """Headers are read to find tensors."""
    name = min(file.name for file in (case.base / "teacher").glob("model-*.safetensors"))

    @cases(3)
    @given(broken((case.base / "teacher" / name).read_bytes()))
    def check(content):
        with case.folder({name: content}) as folder:
            cfg = OmegaConf.create(case.config("quickstart", folder))
            is_read_or_refused(lambda: recipes["taylor_calibrate_kd"](cfg), content[:1000])

    check()


def test_selection_file(recipes, case):
    right = {"ranking": [0, 1], "retained_layers": [0], "policy": "kl_guided", "scores": {"0": 1.5, "1": None}}

    @cases(4)
    @given(json_file(right))
    def check(content):
        with case.folder() as folder:
            (folder / "selection.json").write_bytes(content)
            tree = {**case.configs["quickstart"], "retain": {"policy": "file", "path": "CASE/selection.json"}}
            cfg = OmegaConf.create(case.config("quickstart", folder, tree))
            is_read_or_refused(lambda: recipes["taylor_calibrate_kd"](cfg), content)

    check()


def test_exported_folder(recipes, case):
    @cases(3)
    @given(
        json_file(json.loads((case.base / "teacher" / "config.json").read_text()) | {"auto_map": {"AutoModel": "a.B"}})
    )
    def check(content):
        with case.folder({"config.json": content}) as folder:
            tree = copy.deepcopy(case.configs["evaluate"])
            tree["students"] = {"exported": {"folder": "CASE/teacher"}}
            tree["teacher"] = {"checkpoint_dir": str(case.base / "teacher")}
            cfg = OmegaConf.create(case.config("evaluate", folder, tree))
            is_read_or_refused(lambda: recipes["evaluate_hybrid"](cfg), content)

    check()


def _array(value):
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def _parquet(texts):
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)
    return file.getvalue()


@pytest.mark.parametrize("suffix", ["jsonl", "txt", "npy", "parquet"])
def test_text(recipes, case, suffix):
    lines = (case.base / "texts" / "two.jsonl").read_bytes()
    texts = [json.loads(line)["text"] for line in lines.splitlines()]
    right = {
        "jsonl": lines,
        "txt": "\n".join(texts).encode(),
        "npy": _array(np.arange(2000, dtype=np.uint16)),
        "parquet": _parquet(texts),
    }[suffix]
    others = {
        "jsonl": st.lists(mutated({"text": texts[0]}), max_size=3).map(
            lambda rows: "".join(json.dumps(row) + "\n" for row in rows).encode() + lines
        ),
        "txt": st.text(st.characters(codec="utf-8")).map(lambda text: text.encode() + lines),
        "npy": st.sampled_from(
            [
                np.array(3),
                np.zeros((0,), int),
                np.zeros((2, 999), int),
                np.full(999, -1),
                np.full(999, 2**40),
                np.ones(999),
            ]
        ).map(_array),
        "parquet": st.lists(st.text(st.characters(codec="utf-8")) | st.none(), max_size=5).map(_parquet),
    }[suffix]

    @cases(3)
    @given(st.one_of(broken(right), others))
    def check(content):
        with case.folder(text={f"two.{suffix}": content}) as folder:
            tree = copy.deepcopy(case.configs["quickstart"])
            tree["dataset"]["source"] = f"CASE/texts/two.{suffix}"
            cfg = OmegaConf.create(case.config("quickstart", folder, tree))
            is_read_or_refused(lambda: recipes["taylor_calibrate_kd"](cfg), content[:1000])

    check()
