"""What the recipes share: parts of the text, the teacher, and the teacher with mixers in it."""

import json

import pytest
import torch
from omegaconf import OmegaConf

from tcal_components.align.config import AlignConfig
from tcal_components.assets import asset_path
from tcal_components.checkpoint.teacher import load_teacher_state_dict
from tcal_components.config import ConfigError
from tcal_components.data import HFTokenizer, packed_text
from tcal_components.setup import COMMON_KEYS, Workbench
from tcal_components.setup.checks import alignments, check_lengths


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """One file of many documents, for parts that lie behind one another."""
    path = tmp_path_factory.mktemp("texts") / "all.jsonl"
    text = json.loads((asset_path("quickstart") / "eval.jsonl").read_text().splitlines()[0])["text"]
    rows = [json.dumps({"text": text[i * 600 : (i + 1) * 600]}) for i in range(40)]
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def make(texts, tmp_path):
    def build(**changes):
        folder = str(asset_path("quickstart"))
        part = {
            "_component_": "tcal_components.data.packed_text",
            "source": str(texts),
            "seq_len": 32,
            "max_tokens": 512,
        }
        cfg = {
            "output_dir": str(tmp_path / "out"),
            "teacher_checkpointer": {
                "_component_": "tcal_components.checkpoint.teacher.HFTeacherCheckpointer",
                "checkpoint_dir": folder,
            },
            "teacher_model": {"_component_": "tcal_components.models.teacher", "checkpoint_dir": folder},
            "model": {"_component_": "tcal_components.models.hybrid", "checkpoint_dir": folder},
            "tokenizer": {"_component_": "tcal_components.data.hf_tokenizer", "path": folder},
            "retain": {"layers": [0, 3]},
            "calibration_dataset": part,
            "dataset": {**part, "skip_tokens": 2048},
            "validation_dataset": {**part, "skip_tokens": 4096},
            "align": {"seq_len": 32, "batch_size": 4, "heldout_batches": 2},
            **changes,
        }
        assert set(cfg) <= set(COMMON_KEYS)
        return Workbench(OmegaConf.create(cfg))

    return build


def test_parts_of_one_source_are_disjoint(make):
    bench = make()
    assert bench.retained == (0, 3) and bench.converted == (1, 2, 4, 5) and bench.gdn.key_head_dim == 64
    where = {role: {document.where for document in data.documents} for role, data in bench.data.items()}
    assert set(where) == {"calibration", "heldout", "training", "evaluation"}
    assert sum(map(len, where.values())) == len(set.union(*where.values()))
    assert len(bench.data["heldout"]) == 8 and bench.data["heldout"].seq_len == 32
    rows = bench.provenance()
    assert rows["heldout"]["tokens"] == 256 and len({row["sha256"] for row in rows.values()}) == 4


def test_held_out_text_begins_behind_the_calibration_text(make):
    """Which itself begins behind its ``skip_tokens``, because whole documents are skipped."""
    for skip in (0, 1, 300):
        bench = make()
        bench = make(calibration_dataset={**OmegaConf.to_container(bench.cfg.calibration_dataset), "skip_tokens": skip})
        calibration, heldout = bench.data["calibration"], bench.data["heldout"]
        lines = [[int(d.where.rsplit(" ", 1)[1]) for d in part.documents] for part in (calibration, heldout)]
        assert lines[0][-1] + 1 == lines[1][0], "no document in both, none lost"
        assert skip == 0 or calibration.sources["skipped_tokens"] > skip


def test_training_text_of_another_length_is_the_same_text(make):
    bench = make()
    whole, longer = bench.data["training"], bench.training_data(64, None)
    assert longer.seq_len == 64 and (longer.tokens[:512] == whole.tokens[:512]).all()
    assert bench.training_data(64, 128).num_tokens == 128
    assert bench.training_data(64, 10**9).num_tokens == 512, "never beyond the part's own end"
    assert bench.training_data(32, 1).num_tokens == 32, "at least one sequence"
    assert bench.training_data(512, None).num_tokens == 512
    with pytest.raises(ConfigError, match="dataset.max_tokens 512 is less than one sequence of align.seq_len 513"):
        bench.training_data(513, None)
    with pytest.raises(ValueError, match="the same document is in training"):
        make(dataset={**OmegaConf.to_container(bench.cfg.dataset), "max_tokens": 4096})


@pytest.fixture
def samples(tmp_path):
    """Config of 24 samples packed as chat is, with padding; the quickstart's tokenizer has no chat template."""
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(json.dumps({"text": f"Sample {i} is short. " * (1 + i % 3)}) + "\n" for i in range(24)))
    return {
        "_component_": "tcal_components.data.packed_chat",
        "seq_len": 64,
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset",
            "source": "json",
            "data_files": str(file),
            "split": "train",
        },
    }


def test_fixed_sequences_of_chat(make, samples):
    align = {"seq_len": 64, "batch_size": 2, "heldout_batches": 1, "fixed_sequences": 2}
    bench = make(dataset=samples, align=align)
    tokens = AlignConfig(**align).text_tokens
    assert len(bench.data["training"]) > 3
    assert len(bench.training_data(64, tokens)) == 2 and len(bench.training_data(128, 2 * tokens)) == 2
    assert len(bench.training_data(64, None)) == len(bench.data["training"])
    bench = make(dataset={**samples, "max_sequences": 3}, align=align)
    assert [len(bench.training_data(length, None)) for length in (32, 64, 128)] == [6, 3, 1], "its own end, in tokens"
    with pytest.raises(
        ConfigError, match="max_sequences 3 x seq_len 64 is less than one sequence of align.seq_len 256"
    ):
        make(dataset={**samples, "max_sequences": 3}, align={**align, "seq_len": 256})


def endless(tokenizer, *, source, seq_len):
    """A component of the user's own, which cannot be told to end."""
    return packed_text(tokenizer, source=source, seq_len=seq_len, max_tokens=512)


def test_alignment_that_the_training_text_cannot_give_is_refused(make, texts):
    own = {"_component_": f"{__name__}.endless", "source": str(texts), "seq_len": 32}
    align = {"seq_len": 32, "batch_size": 4, "heldout_batches": 2}
    with pytest.raises(
        ConfigError, match="^align.fixed_sequences is 4, but dataset._component_ .*endless' takes neither"
    ):
        make(dataset=own, align={**align, "fixed_sequences": 4})
    with pytest.raises(ConfigError, match="^dataset.max_tokens 512 is less than one sequence of align.seq_len 513"):
        make(align={**align, "seq_len": 513})
    with pytest.raises(ValueError, match="same document"):  # which comes later: fresh text needs no such end
        make(dataset=own, align=align)


def test_the_teacher_is_the_checkpoint_and_frozen(make):
    teacher = make().load_teacher()
    weights = load_teacher_state_dict(asset_path("quickstart"), dtype=torch.float32)
    assert all(torch.equal(value, weights[name]) for name, value in teacher.state_dict().items())
    assert not teacher.training and not any(parameter.requires_grad for parameter in teacher.parameters())


def test_perplexity_with_mixers_leaves_the_teacher_as_it_was(make):
    bench = make()
    teacher = bench.load_teacher()
    alone = bench.perplexity(teacher)
    torch.manual_seed(0)
    mixers = bench.mixers()
    weights = {f"layers.{i}.attn.{name}": p.detach() for i, m in mixers.items() for name, p in m.named_parameters()}
    assert bench.perplexity(teacher, weights) > 1.2 * alone
    assert bench.perplexity(teacher) == alone
    assert all(
        torch.equal(p, weights[f"layers.{i}.attn.{name}"])
        for i, m in bench.mixers(weights).items()
        for name, p in m.named_parameters()
    )


def test_batches_cover_a_part_once_in_order(make):
    bench = make()
    batches = list(bench.calibration_batches(6))
    tokens = torch.cat([batch["tokens"] for batch in batches])
    assert [len(batch["tokens"]) for batch in batches] == [6, 6, 4]
    assert torch.equal(tokens, torch.stack([bench.data["calibration"][i]["tokens"] for i in range(16)]))


def test_batch_sizes_are_of_all_processes(make):
    import dataclasses

    bench = make()
    bench.check_batch_size(3, "align.batch_size")
    bench.ctx = dataclasses.replace(bench.ctx, world_size=2)
    with pytest.raises(ValueError, match="align.batch_size is 3, expected a multiple of the 2 processes"):
        bench.check_batch_size(3, "align.batch_size")


def test_samples_can_calibrate(make, samples):
    """The text that layers are judged by follows in the same samples, whatever the padding; none is in both, none is lost."""
    bench = make(calibration_dataset={**samples, "max_sequences": 3})
    calibration, heldout = bench.data["calibration"], bench.data["heldout"]
    numbers = [[int(d.where.split()[-1]) for d in part.documents] for part in (calibration, heldout)]
    assert numbers[0] + numbers[1] == list(range(len(numbers[0]) + len(numbers[1]))) and min(map(len, numbers)) > 1
    assert len(calibration) == 3 and len(heldout) == 8 and heldout.seq_len == 32
    with pytest.raises(
        ConfigError, match="leaves no text to judge layers by: .* lower its max_sequences or give more text"
    ):
        make(calibration_dataset=samples)


def test_text_that_cannot_be_skipped_cannot_calibrate(make, texts):
    own = {"_component_": f"{__name__}.endless", "source": str(texts), "seq_len": 32}
    with pytest.raises(
        ValueError, match="calibration_dataset._component_ '.*endless' does not fit: it takes no skip_tokens"
    ):
        make(calibration_dataset=own)


@pytest.mark.parametrize(
    "retain",
    [{"layers": [0, 1, 2, 3, 4, 5]}, {"policy": "uniform", "num_layers": 6}, {"policy": "uniform", "every": 1}],
)
def test_there_is_a_layer_to_convert(make, retain):
    with pytest.raises(ConfigError, match="retain keeps attention in all 6 layers of the teacher, expected at most 5"):
        make(retain=retain)


@pytest.mark.parametrize("name", ["key_head_dim", "value_head_dim"])
def test_head_sizes_are_those_that_a_start_fills(make, name):
    model = {"_component_": "tcal_components.models.hybrid", "checkpoint_dir": str(asset_path("quickstart"))}
    with pytest.raises(ConfigError, match=f"^model.gdn.{name} is 96; the teacher's projections fill 64 "):
        make(model={**model, "gdn": {name: 96}})
    assert getattr(make(model={**model, "gdn": {name: 128}}).gdn, name) == 128


@pytest.mark.parametrize("where", ["teacher_model", "model"])
def test_text_fits_the_models_as_they_are_built(make, where):
    builder = {"teacher_model": "teacher", "model": "hybrid"}[where]
    short = {
        "_component_": f"tcal_components.models.{builder}",
        "checkpoint_dir": str(asset_path("quickstart")),
        "max_seq_len": 40,
    }
    bench = make(**{where: short})
    assert bench.spec.max_seq_len > 64, "the checkpoint can place more"
    for key in ("align", "calibration_dataset", "dataset", "validation_dataset"):
        given = OmegaConf.to_container(bench.cfg[key])
        with pytest.raises(ConfigError, match=f"^{key}.seq_len is 64, but {where}.max_seq_len is 40$"):
            make(**{where: short, key: {**given, "seq_len": 64}})


def test_offload_needs_several_processes(make):
    with pytest.raises(ConfigError, match="^parallel.cpu_offload needs several processes"):
        make(parallel={"cpu_offload": True})


def test_alignments_of_an_ablation_fit_too(make):
    bench = make()
    bench.cfg.alignments = {"none": None, "short": {"seq_len": 32}, "long": {"seq_len": 64}}
    lengths = {where: given.seq_len for where, given in alignments(bench.cfg, AlignConfig(seq_len=32)).items()}
    check_lengths({"teacher_model": 64, "model": 64}, lengths)
    with pytest.raises(ConfigError, match="^alignments.long.seq_len is 64, but model.max_seq_len is 40$"):
        check_lengths({"teacher_model": 64, "model": 40}, lengths)


def test_a_second_start_does_not_call_the_tokenizer(make, monkeypatch):
    def length_and_text(bench):
        return bench.training_data(16, 256).tokens.tolist(), bench.provenance()

    first = length_and_text(make())
    for name in ("encode", "encode_batch", "encode_pieces", "tokenize_messages", "decode"):
        monkeypatch.setattr(HFTokenizer, name, lambda *args, name=name, **kwargs: pytest.fail(f"{name} was called"))
    assert length_and_text(make()) == first
