"""recipes/evaluate_hybrid.py from its config to the report, with a teacher, a training checkpoint and an export."""

import importlib.util
import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from tcal_components.config import ConfigError
from tcal_components.evaluation import config as evaluation_config
from tcal_components.evaluation import harness
from tcal_components.evaluation.load import ModelSource, load_model
from tcal_components.evaluation.recall.tasks import make_examples
from tcal_components.export.folder import export_hybrid
from tcal_components.export.import_hybrid import import_hybrid
from tcal_components.models import build_decoder, read_spec

ROOT = Path(__file__).parents[2]
WORDS = [
    "the",
    "of",
    "and",
    "a",
    "tree",
    "house",
    "river",
    "stone",
    "runs",
    "falls",
    "under",
    "over",
    "green",
    "grey",
    "slowly",
    "often",
    "seven",
    "eight",
]


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("evaluate_hybrid_recipe", ROOT / "recipes" / "evaluate_hybrid.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _tokenizer(folder: Path) -> int:
    """A byte-level tokenizer trained on the spot; returns its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A teacher written by transformers, mixers as a stage leaves them, their export, and text."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("evaluate")
    (root / "teacher").mkdir()
    vocabulary = _tokenizer(root / "teacher")
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            eos_token_id=0,
            bos_token_id=None,
        )
    ).save_pretrained(root / "teacher")
    spec = read_spec(root / "teacher")
    hybrid = build_decoder(spec, retained_layers=[0], gdn={"conv_size": 4})
    teacher = load_model(
        ModelSource(checkpoint_dir=str(root / "teacher")), device=torch.device("cpu"), dtype=torch.float32
    )
    shared = {k: v for k, v in teacher.state_dict().items() if not k.startswith("layers.1.attn.")}
    hybrid.load_state_dict(shared, strict=False)
    mixers = {k: v.contiguous() for k, v in hybrid.state_dict().items() if k.startswith("layers.1.attn.")}
    save_file(mixers, root / "mixers.safetensors")
    export_hybrid(
        hybrid.state_dict(),
        spec=spec,
        gdn=hybrid.gdn,
        retained_layers=[0],
        teacher_dir=root / "teacher",
        output_dir=root / "export",
        dtype=torch.float32,
    )
    rng = random.Random(0)
    rows = [{"text": " ".join(rng.choice(WORDS) for _ in range(60))} for _ in range(12)]
    (root / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture
def config(run_folder, tmp_path):
    teacher = str(run_folder / "teacher")
    return {
        "output_dir": str(tmp_path / "out"),
        "seed": 1,
        "device": "cpu",
        "dtype": "fp32",
        "evaluate": ["perplexity", "retrieval", "agreement", "generation", "speed"],
        "teacher": {"checkpoint_dir": teacher},
        "students": {
            "aligned": {"checkpoint_dir": teacher, "weights": str(run_folder / "mixers.safetensors")},
            "exported": {"folder": str(run_folder / "export")},
        },
        "tokenizer": {"_component_": "tcal_components.data.hf_tokenizer", "path": teacher},
        "validation_dataset": {
            "_component_": "tcal_components.data.packed_text",
            "source": str(run_folder / "text.jsonl"),
            "seq_len": 64,
            "max_tokens": 512,
        },
        "perplexity": {"batch_size": 4, "context_lengths": [16, 64], "scored": 8},
        "retrieval": {"tasks": ["copy", "needle"], "distances": [160], "examples": 2},
        "agreement": {"max_sequences": 4},
        "generation": {"prompts": 5, "prompt_tokens": 12, "new_tokens": 8, "distances": [210, 230], "examples": 2},
        "speed": {"contexts": [32, 300], "decode_tokens": 5, "repeats": 1},
    }


def _run(recipe, config, tmp_path, monkeypatch) -> int | None:
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    monkeypatch.setattr(sys, "argv", ["evaluate_hybrid.py", "--config", str(path)])
    with pytest.raises(SystemExit) as stop:  # torchtune's config.parse ends in sys.exit
        recipe.recipe_main()
    return stop.value.code


def test_teacher_checkpoint_and_export_side_by_side(recipe, config, tmp_path, monkeypatch):
    assert not _run(recipe, config, tmp_path, monkeypatch)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    evaluation = report["evaluation"]
    assert list(evaluation["models"]) == ["teacher", "aligned", "exported"]
    values = {name: row["perplexity"] for name, row in evaluation["perplexity"].items()}
    assert values["exported"] == pytest.approx(values["aligned"], rel=1e-4)  # the same student, two programs
    assert values["teacher"] == report["teacher"]["perplexity"] != pytest.approx(values["aligned"], rel=1e-4)
    by_context = evaluation["perplexity_by_context"]
    assert by_context["exported"].keys() == {"16", "64"}
    assert by_context["exported"]["64"] == pytest.approx(by_context["aligned"]["64"], rel=1e-4)
    assert len(evaluation["retrieval"]) == 3 * 2
    pairs = {(row["model"], row["task"]): row["accuracy"] for row in evaluation["retrieval"]}
    assert pairs["aligned", "needle"] == pairs["exported", "needle"]
    agreed = evaluation["agreement"]
    assert agreed.keys() == {"aligned", "exported"}
    assert agreed["aligned"]["kl"] == pytest.approx(agreed["exported"]["kl"], rel=1e-3)
    assert agreed["aligned"]["layers"]["0"] < 1e-9 < agreed["aligned"]["layers"]["1"]  # layer 0 is the teacher's
    written, rows = report["continuations"]["models"], report["generation"]
    assert list(rows) == ["continuation", "extraction", "needle", "copy"]
    assert all(row.keys() == {"teacher", "aligned", "exported", "win_or_tie"} for row in rows.values())
    assert written["teacher"]["agreement_tokens"] == 8
    assert written["exported"]["teacher_nll"] == pytest.approx(written["aligned"]["teacher_nll"], rel=1e-3)
    assert len(evaluation["answers"]) == 3 * 3 * 2 and evaluation["answers"][0]["distance"] == 210
    assert [(row["model"], row["context"]) for row in evaluation["speed"]] == [
        (name, context) for name in ("teacher", "aligned", "exported") for context in (32, 300)
    ]
    for row in evaluation["speed"]:
        assert row["cache_bytes"] > 0 and row["decode_tokens_per_second"] > 0
        if row["model"] != "exported":
            assert row["cache_bytes"] == row["cache_bytes_theory"]
    assert report["student"]["retained_layers"] == [0] and report["student"]["converted_layers"] == [1]
    assert report["data"]["evaluation"]["tokens"] == 512
    assert all(report["stages"][f"evaluate {name}"] == "finished" for name in evaluation["models"])
    text = (tmp_path / "out" / "report.md").read_text()
    for heading in (
        "Perplexity side by side",
        "Recall: retrieval by distance",
        "Agreement with the teacher",
        "Continuations of held-out text",
        "Generated answers",
        "Speed and cache",
    ):
        assert f"## {heading}" in text
    assert (tmp_path / "out" / "speed.png").is_file() and (tmp_path / "out" / "context.png").is_file()


def test_random_weights_for_speed_alone(recipe, config, tmp_path, monkeypatch, run_folder):
    config.update(
        evaluate=["speed"],
        teacher={"_component_": "tcal_components.models.teacher", "checkpoint_dir": str(run_folder / "teacher")},
        students={
            "hybrid": {
                "_component_": "tcal_components.models.hybrid",
                "checkpoint_dir": str(run_folder / "teacher"),
                "retained_layers": [1],
            }
        },
        speed={"contexts": [64], "decode_tokens": 5, "repeats": 1},
        dtype="bf16",
    )
    assert not _run(recipe, config, tmp_path, monkeypatch)
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["evaluation"]["speed"]
    assert [row["model"] for row in rows] == ["teacher", "hybrid"]
    assert all(row["dtype"] == "bfloat16" and row["cache_bytes"] == row["cache_bytes_theory"] for row in rows)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"evaluate": ["perplexities"]}, "evaluate[0] is 'perplexities' (did you mean 'perplexity'?)"),
        ({"evaluate": []}, "evaluate is [], expected at least 1"),
        ({"perplexty": {}}, "unknown key 'perplexty'"),
        ({"retrieval": {"distance": [5]}}, "unknown key 'distance' in retrieval"),
        ({"retrieval": {"tasks": ["needles"]}}, "retrieval.tasks[0] is 'needles' (did you mean 'needle'?)"),
        ({"speed": {"contexts": [16], "decode_tokens": 16}}, "speed.decode_tokens is 16"),
        ({"speed": {"contexts": [16], "decode_tokens": 2}}, "speed.decode_tokens is 2, expected at least 4"),
        (
            {"perplexity": {"context_lengths": [16, 4096], "scored": 8}},
            "perplexity.context_lengths: context length 4096",
        ),
        ({"perplexity": {"context_lengths": [16], "scored": 32}}, "expected at least the 32 scored tokens"),
        ({"perplexity": {"scored": 0}}, "perplexity.scored is 0, expected at least 1"),
        (
            {"retrieval": {"distances": [300, 16]}},
            "retrieval.distances: retrieval task needle: distance 16 is too short",
        ),
        ({"retrieval": {"tasks": []}}, "retrieval.tasks is [], expected at least 1"),
        ({"lm_eval": {"batch_size": 0}}, "lm_eval.batch_size is 0, expected at least 1"),
        ({"device": "tpu"}, "device is 'tpu'; allowed: cpu, cuda, cuda:N"),
        ({"seed": -1}, "seed is -1, expected at least 0"),
        ({"output_dir": None}, "output_dir is missing"),
        ({"teacher": None}, "the key teacher is missing"),
        ({"teacher": {"checkpoint_dir": "no/such/folder"}}, "teacher.checkpoint_dir: no/such/folder does not exist"),
        ({"students": {"x": {"weights": "w"}}}, "students.x: give either checkpoint_dir"),
        ({"students": {"x": {"_component_": "tcal_components.models.qwen3_8b"}}}, "x has random weights"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_loaded(
    recipe, config, tmp_path, monkeypatch, capsys, change, message
):
    config.update(change)
    assert _run(recipe, config, tmp_path, monkeypatch) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_cuda_on_a_machine_without_it(recipe, config):
    with pytest.raises(ValueError, match="^device is cuda, but torch finds no CUDA device; set device=cpu"):
        recipe.check_config(OmegaConf.create({**config, "device": "cuda"}))


def test_torchtunes_datasets_are_text_here_too(recipe, config, run_folder):
    data = {"source": "json", "data_files": str(run_folder / "text.jsonl"), "split": "train", "seq_len": 64}
    config["validation_dataset"] = {"_component_": "torchtune.datasets.text_completion_dataset", **data}
    run = recipe.check_config(OmegaConf.create(config))
    assert run.dataset.seq_len == 64 and run.dataset.documents[0].where == "sample 0"


def test_models_that_are_too_short(recipe, config, run_folder):
    config["students"]["aligned"]["max_seq_len"] = 64
    with pytest.raises(
        ConfigError, match="^students.aligned.max_seq_len is 64, expected at least (160|300), what evaluate"
    ):
        recipe.check_config(OmegaConf.create(config))
    builder = {"_component_": "tcal_components.models.teacher", "checkpoint_dir": str(run_folder / "teacher")}
    config.update(evaluate=["speed"], teacher=builder, students={})
    with pytest.raises(ConfigError, match="^teacher.max_seq_len is 128, expected at least (160|300), what evaluate"):
        recipe.check_config(OmegaConf.create(config))


def test_models_are_as_long_as_the_longest_question(recipe, config):
    config.update(evaluate=["retrieval"], retrieval={"tasks": ["needle"], "distances": [160, 200], "examples": 3})
    run = recipe.check_config(OmegaConf.create(config))
    questions = make_examples("needle", run.tokenizer, distance=200, count=3, seed=run.seed)
    assert run.longest == max(len(question.tokens) for question in questions)


# ---------------------------------------------------------------------------------------- folders with their own code


@pytest.fixture
def custom(run_folder, tmp_path, monkeypatch):
    """The student's export in format hf_custom."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    state_dict, spec, gdn, kept = import_hybrid(run_folder / "export")
    options = {"teacher_dir": run_folder / "teacher", "dtype": torch.float32, "format": "hf_custom"}
    export_hybrid(state_dict, spec=spec, gdn=gdn, retained_layers=kept, output_dir=tmp_path / "custom", **options)
    return str(tmp_path / "custom")


@pytest.fixture
def kernels_of_a_gpu(monkeypatch):
    """As where triton is installed: what transformers chose at import cannot compute on the CPU."""
    module = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    names = [
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        "causal_conv1d_fn",
        "causal_conv1d_update",
    ]
    for name in names:
        plain = getattr(module, name)

        def fail(*args, **options):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

        fail.__wrapped__ = getattr(plain, "__wrapped__", plain)
        monkeypatch.setattr(module, name, fail)


def test_a_folder_with_its_own_code_has_to_be_trusted(recipe, config, custom):
    config["students"] = {"exported": {"folder": custom}}
    with pytest.raises(ConfigError, match="exported.folder: .* is loaded by a modeling file of its own") as error:
        recipe.check_config(OmegaConf.create(config))
    assert "students.exported.trust_remote_code=true allows it to run" in str(error.value)
    assert "\n" not in str(error.value)
    config["students"] = {"exported": {"folder": custom, "trust_remote_code": True}}
    assert recipe.check_config(OmegaConf.create(config)).sources["exported"].trust_remote_code


def test_a_folder_needs_a_config(recipe, config, tmp_path):
    (tmp_path / "empty").mkdir()
    config["students"] = {"exported": {"folder": str(tmp_path / "empty")}}
    with pytest.raises(FileNotFoundError, match="^students.exported.folder: .*empty is no model folder"):
        recipe.check_config(OmegaConf.create(config))


def test_exports_of_both_formats_on_a_cpu(recipe, config, custom, tmp_path, monkeypatch, kernels_of_a_gpu):
    config["students"]["custom"] = {"folder": custom, "trust_remote_code": True}
    config.update(
        evaluate=["perplexity", "agreement", "speed"], speed={"contexts": [32], "decode_tokens": 5, "repeats": 1}
    )
    assert not _run(recipe, config, tmp_path, monkeypatch)
    evaluation = json.loads((tmp_path / "out" / "report.json").read_text())["evaluation"]
    values = {name: row["perplexity"] for name, row in evaluation["perplexity"].items()}
    assert values["custom"] == pytest.approx(values["exported"], rel=1e-4)
    assert values["exported"] == pytest.approx(values["aligned"], rel=1e-4)
    assert evaluation["agreement"].keys() == {"aligned", "exported", "custom"} and len(evaluation["speed"]) == 4


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval")
def test_lm_eval_of_a_folder_with_its_own_code(recipe, config, custom, tmp_path, monkeypatch, kernels_of_a_gpu):
    monkeypatch.setattr(evaluation_config, "check_tasks", lambda *_, **__: None)  # reads all tasks that there are
    monkeypatch.setattr(harness, "check_tasks", lambda *_, **__: None)
    original, trusted = recipe.lm_eval_results, {}

    def scores(folder, *, trust_remote_code, **options):
        trusted[Path(folder).name] = trust_remote_code
        if not trust_remote_code:
            return harness.LmEvalResult({}, {})
        return original(folder, trust_remote_code=trust_remote_code, **options)

    monkeypatch.setattr(recipe, "lm_eval_results", scores)
    config.update(evaluate=["lm_eval"], lm_eval={"limit": 2})
    config["students"] = {"custom": {"folder": custom, "trust_remote_code": True}}
    assert not _run(recipe, config, tmp_path, monkeypatch)
    assert trusted == {"teacher": False, "custom": True}
    found = json.loads((tmp_path / "out" / "report.json").read_text())["evaluation"]["lm_eval"]
    assert 0 <= found["custom"]["tcal_local"]["acc"] <= 1
    config["students"] = {"custom": {"folder": custom}}
    config["lm_eval"] = {"trust_remote_code": True}  # of all folders
    assert recipe.check_config(OmegaConf.create(config)).sources["custom"].trust_remote_code


def test_low_precision_leaves_the_decay_exact(run_folder):
    source = ModelSource(checkpoint_dir=str(run_folder / "teacher"), weights=str(run_folder / "mixers.safetensors"))
    exact, low = (
        load_model(source, device=torch.device("cpu"), dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert low.layers[1].attn.q_proj.weight.dtype == torch.bfloat16 and not low.training
    assert torch.equal(low.layers[1].attn.decay.A_log, exact.layers[1].attn.decay.A_log)
    assert low.retained_layers == (0,) and low.gdn.conv_size == 4


def test_weights_that_do_not_fit_are_one_line(run_folder, tmp_path):
    def load(weights):
        source = ModelSource(checkpoint_dir=str(run_folder / "teacher"), weights=str(weights))
        return load_model(source, device=torch.device("cpu"), dtype=torch.float32)

    save_file({"layers.0.sa_norm.scale": torch.ones(24)}, tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="has no Gated DeltaNet layer"):
        load(tmp_path / "none.safetensors")
    from safetensors.torch import load_file

    mixers = load_file(run_folder / "mixers.safetensors")
    del mixers["layers.1.attn.a_proj.weight"]
    save_file(mixers, tmp_path / "part.safetensors")
    with pytest.raises(ValueError, match="1 missing or of another shape, 0 unknown, first layers.1.attn.a_proj.weight"):
        load(tmp_path / "part.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="expected a .safetensors file or a folder of them"):
        load(tmp_path / "empty")
    whole = load_file(run_folder / "mixers.safetensors")
    (tmp_path / "twice").mkdir()
    save_file(whole, tmp_path / "twice" / "a.safetensors")
    save_file({"layers.1.attn.a_proj.weight": torch.ones(2, 24)}, tmp_path / "twice" / "b.safetensors")
    with pytest.raises(ValueError, match=r"layers.1.attn.a_proj.weight is in .*b.safetensors and in another file"):
        load(tmp_path / "twice")
    large = whole["layers.1.attn.a_proj.weight"].double()
    large[0, 0] = 1e39
    save_file(whole | {"layers.1.attn.a_proj.weight": large}, tmp_path / "large.safetensors")
    with pytest.raises(ValueError, match="layers.1.attn.a_proj.weight of .* overflows when converted to torch.float32"):
        load(tmp_path / "large.safetensors")


@pytest.mark.parametrize("kind", ["teacher", "exported"])
def test_a_tokenizer_beyond_the_embedding(recipe, config, run_folder, tmp_path, kind):
    """The largest id counts: this tokenizer has no more tokens than the models have rows."""
    folder = shutil.copytree(run_folder / "teacher", tmp_path / "other")
    content = json.loads((folder / "tokenizer.json").read_text())
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].get)
    rows, content["model"]["vocab"][last] = content["model"]["vocab"][last] + 1, 900
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config["tokenizer"]["path"] = str(folder)
    if kind == "exported":
        config.update(teacher={"folder": str(run_folder / "export")}, students={})
    with pytest.raises(ConfigError, match=f"uses token ids up to 900, the embedding of teacher .* 0 to {rows - 1}$"):
        recipe.check_config(OmegaConf.create(config))
