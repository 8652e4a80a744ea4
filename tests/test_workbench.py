"""What the recipes share: parts of the text, the teacher, and the teacher with mixers in it."""

import json

import pytest
import torch
from omegaconf import OmegaConf

from tcal_components.assets import asset_path
from tcal_components.checkpoint.hf_folder import load_teacher_state_dict
from tcal_components.workbench import COMMON_KEYS, Workbench


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
                "_component_": "tcal_components.checkpoint.hf_folder.HFTeacherCheckpointer",
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


def test_training_text_of_another_length_is_the_same_text(make):
    bench = make()
    whole, longer = bench.data["training"], bench.training_data(64, None)
    assert longer.seq_len == 64 and (longer.tokens[:512] == whole.tokens[:512]).all()
    assert bench.training_data(64, 128).num_tokens == 128
    assert bench.training_data(64, 10**9).num_tokens == 512, "never beyond the part's own end"
    assert bench.training_data(32, 1).num_tokens == 32, "at least one sequence"
    with pytest.raises(ValueError, match="the same document is in training"):
        make(dataset={**OmegaConf.to_container(bench.cfg.dataset), "max_tokens": 4096})


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


def test_chat_data_cannot_calibrate(make):
    chat = {"_component_": "tcal_components.data.packed_chat", "seq_len": 32, "dataset": {"_component_": "x"}}
    with pytest.raises(
        ValueError, match="calibration_dataset._component_ 'tcal.*' does not fit: it takes no skip_tokens"
    ):
        make(calibration_dataset=chat)
