"""Every mistake of a user ends in one line that says what is wrong, before anything is trained."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tcal_components.assets import asset_path
from tcal_components.checkpoint.run_state import RunState
from tcal_components.data import hf_tokenizer
from tcal_components.distributed import environment


@pytest.fixture
def refused(run_main, quick_args, tmp_path, capsys):
    """Runs the recipe in this process and gives the one line of its error."""

    def run(*changes, output=tmp_path / "out", trained=()):
        with pytest.raises(SystemExit) as end:
            run_main(quick_args(output, *changes))
        return one_line(end.value.code, capsys.readouterr().err)

    return run


def one_line(code, stderr):
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(lines) == 1, stderr
    assert "Traceback" not in stderr and "step/s" not in stderr, stderr
    return lines[0].removeprefix("error: ")


@pytest.fixture
def teacher(tmp_path):
    """A copy of the embedded teacher to break, and the argument that uses it."""
    folder = shutil.copytree(asset_path("quickstart"), tmp_path / "teacher")
    return folder, f"teacher_checkpointer.checkpoint_dir={folder}"


def test_the_config_itself_is_right(run_main, quick_args, tmp_path):
    """What the other tests change is what they are refused for."""
    run_main(quick_args(tmp_path, "stages=[measure]"))
    assert json.loads((tmp_path / "report.json").read_text())["stages"] == {"measure": "finished"}


def _computed(folder):
    """What a run left; text that has been tokenised is of use to the next one."""
    return [path for path in folder.glob("out/*/*") if path.parent.name != "tokens"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # names and structure
        ("align.step=3", "unknown key 'step' in align (did you mean 'steps'?); allowed: batch_size, "),
        ("seeed=3", "unknown key 'seeed' in the config (did you mean 'seed'?); allowed: align, calibration_dataset, "),
        ("dataset.seq_length=3", "unknown key 'seq_length' in dataset (did you mean 'seq_len'?)"),
        ("optimizer.beta=3", "unknown key 'beta' in optimizer (did you mean 'betas'?)"),
        ("model.gdn.conv=3", "unknown key 'conv' in model.gdn (did you mean 'conv_size'?); allowed: conv_size"),
        ("parallel.replicas=3", "unknown key 'replicas' in parallel"),
        ("stages=[measure,calibrate]", "stages[1] is 'calibrate'; allowed: measure, initialize"),
        ("stages=[]", "stages is [], expected at least 1 entries"),
        ("stages=measure", "stages is 'measure', expected list[str]"),
        ("initialize.strategy=magic", "initialize.strategy is 'magic'; allowed: naive, "),
        ("retain={policy: best}", "retain.policy is 'best'; allowed: uniform, file, or null"),
        ("kd_loss=tcal_components.distill.KL", "kd_loss._component_ 'tcal_components.distill.KL' cannot be"),
        ("tokenizer=tcal_components.data.no_tokenizer", "tokenizer._component_ "),
        ("teacher_model=null", "teacher_model._component_ is None, expected the name of a class or function"),
        ("distill=5", "distill is 5, expected keys and values"),
        # values
        ("align.steps=many", "align.steps is 'many', expected int"),
        ("align.steps=2.5", "align.steps is 2.5, expected int"),
        ("align.betas=[0.9,b]", "align.betas[1] is 'b', expected float"),
        ("align.lr=-1", "align.lr is -1, expected at least 0 and at most 100, or null"),
        ("align.batch_size=0", "align.batch_size is 0, expected at least 1"),
        ("distill.batch_size=0", "distill.batch_size is 0, expected at least 1"),
        ("distill.tokens=100", "distill.tokens is 100, expected at least one step"),
        ("measure.batch_size=0", "measure.batch_size is 0"),
        ("dataset.seq_len=long", "dataset.seq_len is 'long', expected int"),
        ("dataset.seq_len=1", "dataset.seq_len is 1, expected at least 2"),
        ("seed=one", "seed is 'one', expected int"),
        ("seed=-1", "seed is -1, expected at least 0"),
        ("resume_from_checkpoint=perhaps", "resume_from_checkpoint is 'perhaps', expected bool"),
        ("save_every=0", "save_every is 0, expected at least 1"),
        ("keep_last_checkpoints=0", "keep_last_checkpoints is 0, expected at least 1"),
        ("dtype=fp8", "dtype is 'fp8'; allowed: fp32, bf16"),
        ("export.dtype=int4", "export.dtype is 'int4'; allowed: fp32, bf16"),
        ("export.format=gguf", "export.format is 'gguf'; allowed: qwen3_5_text, hf_custom"),
        ("export.max_shard_size=big", "max_shard_size is 'big'; allowed are"),
        ("export.check=[transformers,vllm]", "export.check[1] is 'vllm'; allowed: transformers, llama_cpp"),
        ("export.check=[llama_cpp]", "export.check is ['llama_cpp'], expected transformers among them"),
        ("export.check=[transformers,llama_cpp]", "export.check names llama_cpp: no llama.cpp checkout is named"),
        ("export.verify_tokens=4", "export.verify_tokens is 4, expected at least 8"),
        ("precision.student=int8", "precision.student is 'int8'; allowed: float8, or null"),
        ("kd_loss.temperature=0", "kd_loss.temperature is 0, expected a number above 0"),
        ("optimizer.betas=[0.9,2.0]", "optimizer: Invalid beta parameter"),
        ("optimizer.eps=tiny", "optimizer.eps is 'tiny', expected float"),
        (
            "optimizer.lr=1.0e-3",
            "optimizer.lr gives distill.lr 0.001, but distill.lr is 0.0003; leave one of them out",
        ),
        (
            "optimizer.weight_decay=0.1",
            "torchtune's key 'weight_decay' in optimizer: it is called distill.weight_decay",
        ),
        (
            "lr_scheduler={_component_: torchtune.training.get_lr}",
            "lr_scheduler._component_ 'torchtune.training.get_lr'",
        ),
        (
            "lr_scheduler={_component_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: 5}",
            "lr_scheduler._component_ 'torch.optim.lr_scheduler.CosineAnnealingLR' does not fit: it takes no",
        ),
        (
            "enable_activation_offloading=true",
            "enable_activation_offloading is true and device is cpu; it moves activations from a GPU to the host",
        ),
        # layers
        ("retain.layers=[0,6]", "retain: retained_layers contains 6; the teacher has 6 layers, so 0 to 5 is allowed"),
        ("retain.layers=[0,-1]", "retain: retained_layers contains -1; the teacher has 6 layers"),
        ("retain.layers=[0,3,3]", "retain: retained_layers contains layer 3 more than once"),
        ("retain.layers=[0,x]", "retain.layers[1] is 'x', expected int"),
        ("retain={policy: uniform, num_layers: 7}", "retain.num_layers is 7, but the teacher has 6 layers"),
        ("retain={policy: file, path: /none.json}", "retain.path: no file /none.json"),
        ("retain.layers=[0,1,2,3,4,5]", "retain keeps attention in all 6 layers of the teacher, expected at most 5"),
        (
            "model.gdn.key_head_dim=96",
            "model.gdn.key_head_dim is 96; the teacher's projections fill 64 (its head size)",
        ),
        ("model.max_seq_len=48", "align.seq_len is 64, but model.max_seq_len is 48"),
        # machine
        ("device=tpu", "device is 'tpu'; allowed: cpu, cuda, cuda:N"),
        ("parallel.dp_replicate=2", "dp_replicate is 2, expected a divisor of the 1 processes"),
        ("parallel.cpu_offload=true", "parallel.cpu_offload needs several processes"),
        # text and models
        ("dataset.source=/no/text.jsonl", "dataset: no such file or folder: /no/text.jsonl"),
        (
            "teacher_checkpointer.checkpoint_dir=/no/teacher",
            "teacher_checkpointer: checkpoint_dir /no/teacher does not",
        ),
        ("tokenizer.path=/no/tokenizer", "tokenizer: no tokenizer: expected a folder with tokenizer.json"),
        ("calibration_dataset.max_tokens=100000", "calibration_dataset leaves no text to judge layers by: 512 tokens"),
        ("validation_dataset.max_tokens=8", "validation_dataset: max_tokens 8 is less than one sequence of seq_len 64"),
    ],
)
def test_refused(refused, tmp_path, change, said):
    # The command line merges mappings, so `retain` as a whole replaces the layers of the file.
    changes = [change, "retain.layers=null"] if change.startswith("retain={") else [change]
    assert said in refused(*changes)
    assert not _computed(tmp_path)


def test_no_output_dir(refused):
    assert "output_dir is missing" in refused(output="null")


def test_output_dir_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("")
    line = refused(output=tmp_path / "file" / "out")
    assert line == f"output_dir {tmp_path}/file/out cannot be written: Not a directory"


def test_output_dir_with_another_model_in_it(refused, tmp_path):
    (tmp_path / "out" / "export").mkdir(parents=True)
    (tmp_path / "out" / "export" / "thesis.txt").write_text("years of work")
    assert "exists and is not an earlier export" in refused()


@pytest.mark.parametrize("stage", ["align", "distill"])
def test_resuming_with_other_settings_loses_nothing(refused, tmp_path, stage):
    state = RunState(tmp_path / "out" / stage / "state")
    state.begin({"seed": "what the run was begun with"})
    state.save(3, {"weight": torch.zeros(2)})
    assert f"{state.directory} holds step 3 of a run with other settings or text" in refused(
        "resume_from_checkpoint=true"
    )
    assert state.steps() == [3]


def test_a_machine_too_small_and_what_the_line_advises(refused, monkeypatch, quick_args, load_recipe, tmp_path):
    from omegaconf import OmegaConf

    monkeypatch.setattr(environment, "free_bytes", lambda device: 55 << 20)  # 64 and 45 MiB are needed
    line = refused()
    assert line.startswith("about 0.1 GiB are needed a process before activations and 0.1 GiB are free; ")
    (advice,) = re.findall(r"`(optimizer\.\S+)`", line)
    _, config, *changes = quick_args(tmp_path / "out", advice)
    cfg = OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_dotlist(changes))
    load_recipe("taylor_calibrate_kd").TaylorCalibrateKD(cfg)


def test_a_stage_without_its_input(refused):
    assert "stages has align, but the output of initialize is not in" in refused("stages=[align]")
    assert "stages has initialize, but the output of measure is not in" in refused("stages=[initialize,align]")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_cuda_on_a_machine_without_it(refused):
    assert refused("device=cuda").startswith("device is cuda, but torch finds no CUDA device; set device=cpu")


@pytest.mark.parametrize(
    ("builder", "said"),
    [
        ("teacher_model=tcal_components.models.qwen3_0_6b", "has vocab_size 151936, but the checkpoint"),
        ("teacher_model=tcal_components.models.smollm2_135m", "has family llama3_2, but the checkpoint"),
        ("teacher_model=torchtune.models.qwen2.qwen2_0_5b", "tcal_components.models.teacher builds any teacher"),
        ("teacher_model=torch.nn.Identity", "expected a HybridDecoder"),
        ("model=tcal_components.models.qwen3_0_6b_hybrid", "has vocab_size 151936, but the checkpoint"),
        ("model=tcal_components.models.qwen3_0_6b", "does not fit: it takes no retained_layers"),
    ],
)
def test_a_builder_of_another_model(refused, quick_args, builder, said, tmp_path, run_main, capsys):
    from omegaconf import OmegaConf

    key, component = builder.split("=")
    _, config, *changes = quick_args(tmp_path / "out")
    cfg = OmegaConf.load(config)
    cfg[key] = {"_component_": component}  # the builder of a fixed model takes no folder
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    with pytest.raises(SystemExit) as end:
        run_main(["--config", str(tmp_path / "config.yaml"), *changes])
    line = one_line(end.value.code, capsys.readouterr().err)
    assert line.startswith((f"{key} ", f"{key}._component_ "))
    assert said in line


def test_an_unsupported_checkpoint(refused, teacher):
    folder, change = teacher
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba2"}))
    assert "mamba2" in refused(change)
    (folder / "config.json").unlink()
    assert "config.json" in refused(change)


def test_text_longer_than_the_model_can_place(refused, teacher):
    folder, change = teacher
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    line = refused(change, "dataset.seq_len=256")
    assert line == "dataset.seq_len is 256, but teacher_model.max_seq_len is 128"


def test_nan_in_the_weights(refused, teacher, tmp_path):
    folder, change = teacher
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "tensor model.layers.2.mlp.up_proj.weight in" in (line := refused(change)) and "NaN" in line
    assert json.loads((tmp_path / "out" / "report.json").read_text())["stages"] == {}


def test_a_damaged_checkpoint(refused, teacher):
    folder, change = teacher
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert "is truncated or not a safetensors file" in refused(change)
    path.unlink()
    assert "has no weights; model.safetensors" in refused(change)


def test_a_tokenizer_of_another_vocabulary(refused, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(asset_path("quickstart") / name, folder / name)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 2048, "content": "<|more|>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    line = refused(f"tokenizer.path={folder}")
    said = "the tokenizer uses token ids up to {}, the teacher's embedding has rows for the ids 0 to 2047"
    assert line == said.format(2048)
    # The largest id counts and not the number of tokens, of which there are 2048: a gap lies before it.
    del content["added_tokens"][-1]
    content["model"]["vocab"]["Ġvalue"] = 3000
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert hf_tokenizer(folder).tokenizer.get_vocab_size() == 2048
    assert refused(f"tokenizer.path={folder}") == said.format(3000)


def test_special_tokens_beyond_the_embedding(refused, teacher, tmp_path):
    """Named by the model's files alone; they would come up in a generation, long after the training."""
    folder, change = teacher
    for name, key, value in (
        ("generation_config.json", "eos_token_id", [0, 2048]),
        ("generation_config.json", "pad_token_id", 5000),
        ("config.json", "bos_token_id", 2048),
    ):
        before = (folder / name).read_text()
        (folder / name).write_text(json.dumps(json.loads(before) | {key: value}))
        line = refused(change)
        assert line.endswith(f"{folder / name}: {key} is {value}; the embedding has rows for the ids 0 to 2047")
        (folder / name).write_text(before)
    # A tokenizer's folder of its own is asked where the teacher's names nothing.
    other = tmp_path / "tokenizer"
    other.mkdir()
    shutil.copy(folder / "tokenizer.json", other)
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": 2048}))
    assert "the tokenizer uses token ids up to 2048" in refused(f"tokenizer.path={other}")


def test_weights_outside_the_range_of_the_dtype(refused, teacher):
    folder, change = teacher
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    for kind, value, dtype, changes in (
        (torch.float64, 1e39, torch.float32, ()),
        (torch.float64, -1e300, torch.float32, ("teacher_checkpointer.dtype=fp64",)),
        (torch.float32, 3.4e38, torch.bfloat16, ("dtype=bf16",)),
    ):
        tensor = weights[name].to(kind)
        tensor[3, 4] = value
        save_file(weights | {name: tensor}, folder / "model.safetensors", metadata={"format": "pt"})
        assert f"overflows when converted to {dtype} (it is stored as {kind})" in refused(change, *changes)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", "", "no text in"),
        ("blank.jsonl", '{"text": "  "}\n\n', "no text in"),
        ("short.txt", "A few words.", "text shorter than one sequence"),
        ("broken.jsonl", '{"text": "fine"}\n{"text": \n', "line 2 is not valid JSON"),
        ("list.jsonl", "[1]\n", "line 1 must be a JSON object with the column 'text', got a list"),
        ("column.jsonl", '{"body": "words"}\n', "no text column 'text' in"),
        ("number.jsonl", '{"text": 5}\n', "line 1: column 'text' must hold text, got int"),
        ("binary.txt", b"\xff\xfe\x00", "is not UTF-8 text"),
        ("text.doc", "words", "text file must be one of .txt"),
        ("tokens.npy", "words", "is not a plain .npy array"),
    ],
)
@pytest.mark.parametrize("part", ["dataset"])
def test_text_that_cannot_be_used(refused, tmp_path, part, name, content, said):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in (line := refused(f"{part}.source={path}")) and str(path) in line


@pytest.mark.parametrize("part", ["calibration_dataset", "dataset"])
def test_evaluation_text_that_was_seen(refused, texts, part):
    other = {"calibration_dataset": "calibration", "dataset": "training"}[part]
    line = refused(f"{part}.source={texts}/eval.jsonl", f"{part}.max_tokens=1024")
    assert line.startswith(f"the same document is in {other} (") and "and in evaluation (" in line


def test_training_text_ends_before_the_evaluation_text_of_the_same_source(load_recipe, quick_args, texts, tmp_path):
    """Alignment asks for more text than `dataset.max_tokens` allows: it must not run into the next part."""
    from omegaconf import OmegaConf

    _, config, *changes = quick_args(tmp_path)
    train = texts / "train.jsonl"
    changes += ["dataset.max_tokens=1024", f"validation_dataset.source={train}", "validation_dataset.skip_tokens=1024"]
    cfg = OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_dotlist(changes))
    bench = load_recipe("taylor_calibrate_kd").TaylorCalibrateKD(cfg).bench
    seen = {document.where for document in bench.training_data(64, 100_000).documents}
    assert seen and not seen & {document.where for document in bench.data["evaluation"].documents}


# ------------------------------------------------------------------------------------------------- as a user sees it


def test_tune_run_says_it_too(tune, quick_args, tmp_path):
    _, config, *changes = quick_args(tmp_path / "out", "align.lerning_rate=1")
    result = tune(tmp_path, "run", "recipes/taylor_calibrate_kd", "--config", config, *changes)
    assert "unknown key 'lerning_rate' in align" in one_line(result.returncode, result.stderr)


def test_two_processes_that_cannot_share_a_batch(tune, quick_args, tmp_path):
    _, config, *changes = quick_args(tmp_path / "out", "distill.batch_size=3")
    result = tune(tmp_path, "run", "--nproc_per_node", 2, "recipes/taylor_calibrate_kd", "--config", config, *changes)
    lines = [line for line in result.stderr.splitlines() if "error: " in line and "distill.batch_size is 3" in line]
    assert result.returncode != 0 and len(lines) == 1, result.stderr[-3000:]
    assert "expected a multiple of the 2 processes" in lines[0]
    assert not _computed(tmp_path)
