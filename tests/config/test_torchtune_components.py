"""Torchtune's datasets and checkpointer in a config."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from tcal_components.assets import asset_path
from tcal_components.config import ConfigError
from tcal_components.config.torchtune_components import read_torchtune_components
from tcal_components.config.torchtune_keys import line

TEACHER = str(asset_path("quickstart"))
HF = "torchtune.training.FullModelHFCheckpointer"
DATASETS = "torchtune.datasets"


@pytest.mark.parametrize(
    "node",
    [
        {"_component_": f"{DATASETS}.instruct_dataset", "data_files": "instruct.jsonl",
         "column_map": {"input": "instruction", "output": "output"}},
        {"_component_": f"{DATASETS}.alpaca_dataset", "data_files": "instruct.jsonl", "train_on_input": False},
        {"_component_": f"{DATASETS}.chat_dataset", "data_files": "chat.jsonl", "conversation_column": "messages",
         "conversation_style": "openai"},
        {"_component_": f"{DATASETS}.text_completion_dataset", "data_files": "all.jsonl", "split_across_pack": False},
    ],
    ids=lambda node: node["_component_"].rpartition(".")[2],
)  # fmt: skip
def test_torchtunes_datasets_are_texts(config, checked, folder, node):
    """Each of the three texts; ``packed`` says what happens anyway."""
    length = 128 if "alpaca" in node["_component_"] else 64  # its prompts are long
    node = {**node, "source": "json", "data_files": str(folder / node["data_files"]), "packed": True, "seq_len": length}
    text = "text_completion" in node["_component_"]
    if text:  # long documents, of which a sequence has the beginning
        parts = {"dataset": {**node, "max_sequences": 8, "skip_tokens": 2600}}
    else:
        parts = {
            "calibration_dataset": {**node, "split": "train", "max_sequences": 4},
            "dataset": {**node, "split": "train", "max_sequences": 8, "skip_tokens": 25 * length},
            "validation_dataset": {**node, "split": "train", "max_sequences": 4, "skip_tokens": 40 * length},
        }
    align = {"seq_len": length if not text else 32, "batch_size": 4, "heldout_batches": 1}
    _, bench = checked(config(**parts, align=align, distill={"tokens": 4 * length, "batch_size": 4}))
    roles = {"calibration_dataset": "calibration", "dataset": "training", "validation_dataset": "evaluation"}
    for key, part in parts.items():
        data = bench.data[roles[key]]
        assert data.seq_len == length and 0 < len(data) <= part["max_sequences"]
        assert (data[0]["labels"] >= 0).any() and data.documents[0].where.startswith("sample")
    if not text:
        assert bench.data["heldout"].seq_len == length
        assert (bench.data["training"][0]["labels"] == -100).sum() > 4, "prompts are not learned"


def test_several_datasets_are_one(config, checked, folder):
    node = {"_component_": f"{DATASETS}.alpaca_dataset", "source": "json", "data_files": str(folder / "instruct.jsonl")}
    chat = {
        "_component_": f"{DATASETS}.chat_dataset",
        "source": "json",
        "split": "train",
        "data_files": str(folder / "chat.jsonl"),
        "conversation_column": "messages",
        "conversation_style": "openai",
    }
    tokenizer = {
        "_component_": "tcal_components.data.hf_tokenizer",
        "path": str(folder / "tokenizer"),
        "max_seq_len": 96,
    }
    _, bench = checked(config(dataset=[node, chat], tokenizer=tokenizer, distill={"tokens": 1024, "batch_size": 4}))
    assert len(bench.data["training"].documents) == 160
    assert bench.data["training"].seq_len == 96, "tokenizer.max_seq_len, as in torchtune"
    with pytest.raises(ConfigError, match="^dataset is a list, in which only torchtune's datasets can stand"):
        checked(config(dataset=[node, {"_component_": "tcal_components.data.packed_text"}]))
    with pytest.raises(
        ConfigError, match="^dataset.seq_len is missing: tokens a sequence; without it tokenizer.max_seq"
    ):
        checked(config(dataset=node))


@pytest.mark.parametrize("where", ["dataset", "validation_dataset"])
def test_datasets_that_are_not_of_samples(config, checked, where):
    for name in ("multimodal.the_cauldron_dataset", "preference_dataset", "PackedDataset"):
        with pytest.raises(ConfigError, match=f"^{where}._component_ does not fit: it is not of samples"):
            checked(config(**{where: {"_component_": f"{DATASETS}.{name}", "seq_len": 64}}))


def test_switches_of_packing_beside_text(config, checked):
    text = OmegaConf.to_container(config().dataset)
    checked(config(dataset={**text, "packed": True, "split_across_pack": False}))
    for key, value in (("packed", False), ("split_across_pack", True)):
        with pytest.raises(ConfigError) as error:
            checked(config(dataset={**text, key: value}))
        assert str(error.value) == line(f"dataset.{key}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder that torchtune's checkpointer could be of: its files and model_type are looked at, no weight is."""
    root = tmp_path_factory.mktemp("llama")
    (root / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for number in (1, 2):
        (root / f"model-{number:05d}-of-00002.safetensors").touch()
    return root


@pytest.mark.parametrize("where", ["checkpointer", "teacher_checkpointer"])
def test_the_checkpointer_of_torchtune_names_the_folder(config, llama, where):
    node = {
        "_component_": HF,
        "checkpoint_dir": str(llama),
        "model_type": "LLAMA3_2",
        "output_dir": "${output_dir}",
        "recipe_checkpoint": None,
        "safe_serialization": True,
    }
    files = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for named in (files, {"filename_format": "model-{}-of-{}.safetensors", "max_filename": "00002"}):
        cfg = config(teacher_checkpointer=None)
        cfg[where] = {**node, "checkpoint_files": named}
        cfg.again = f"${{{where}.checkpoint_dir}}"
        read_torchtune_components(cfg, ())
        assert cfg.teacher_checkpointer == {
            "_component_": "tcal_components.checkpoint.teacher.HFTeacherCheckpointer",
            "checkpoint_dir": str(llama),
        }
        assert cfg.again == str(llama)
    for key, value in (
        ("checkpoint_files", files[:1]),
        ("model_type", "QWEN2"),
        ("output_dir", "/elsewhere"),
        ("recipe_checkpoint", "recipe_state.pt"),
        ("adapter_checkpoint", "adapter.pt"),
        ("safe_serialization", False),
        ("should_load_recipe_state", True),
    ):
        cfg = config(teacher_checkpointer=None)
        cfg[where] = {**node, key: value}
        with pytest.raises(ConfigError) as error:
            read_torchtune_components(cfg, ())
        assert str(error.value) == line(f"{where}.{key}")


def test_there_is_one_checkpointer(config, checked, tmp_path):
    teacher = {"_component_": HF, "checkpoint_dir": TEACHER}
    checked(config(checkpointer=teacher))
    with pytest.raises(ConfigError) as error:
        checked(config(checkpointer={**teacher, "checkpoint_dir": str(tmp_path)}))
    assert str(error.value) == line("checkpointer")
    for where, given in (("model", "llama3_2.llama3_2_1b"), ("teacher_model", "qwen2.qwen2_1_5b")):
        with pytest.raises(ConfigError) as error:
            checked(config(**{where: {"_component_": f"torchtune.models.{given}"}}))
        assert str(error.value) == line(f"{where}._component_")
