"""Keys of torchtune's knowledge-distillation and full-finetune configs: what becomes of each here.

The page ``docs/torchtune_keys.md`` is made from this table (``python -m tcal_components.config.torchtune_keys``), and a test
tries every key of torchtune's installed configs against it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Outcome = Literal["same", "taken", "some", "line"]


@dataclasses.dataclass(frozen=True)
class TorchtuneKey:
    """What becomes of one of torchtune's keys.

    Attributes:
        outcome: ``same``, a key here too, with the same meaning; ``taken``, read into the keys that ``text`` names;
            ``some``, the values in ``accepts`` are what happens anyway, others are refused; ``line``, refused.
        text: for a person; what a refusal says.
        accepts: values that ask for nothing else than what happens.
    """

    outcome: Outcome
    text: str
    accepts: tuple[Any, ...] = ()


def _same(text: str = "") -> TorchtuneKey:
    return TorchtuneKey("same", text)


def _taken(text: str) -> TorchtuneKey:
    return TorchtuneKey("taken", text)


def _some(accepts: tuple[Any, ...], text: str) -> TorchtuneKey:
    return TorchtuneKey("some", text, accepts)


def _line(text: str) -> TorchtuneKey:
    return TorchtuneKey("line", text)


_ONE_BATCH = (
    "distill.micro_batch_size counts the sequences of one forward pass of a process, distill.batch_size those of one "
    "optimizer step over all of them"
)
_ALL_TRAINED = (
    "the student is trained whole, there is no LoRA; distill.base_lr sets the rate of what the teacher had before"
)
_NOT_SAVED_THERE = "a teacher is only read; what a run writes goes below the top-level output_dir"
_TOKENIZER_FOLDER = "tcal_components.data.hf_tokenizer reads the whole tokenizer from the folder that path names"
_TEXT_ONLY = "teachers read text only, there are no images"
_NO_TENSOR_PARALLEL = "there is no tensor parallelism; weights are sharded (FSDP2), see the section parallel"
_LENGTH = "distill.tokens says how long a run is; without it epochs do, at most max_steps_per_epoch steps each"
_STUDENT = "the student is made from the teacher, so there is only teacher_checkpointer"
_SCHEDULE = "as torch.profiler.schedule counts optimizer steps of the distillation"

# Top-level keys by their name, others as section.key.
TORCHTUNE_KEYS: dict[str, TorchtuneKey] = {
    "ac_mode": _some((None,), "enable_activation_checkpointing checkpoints every layer, there is no choice among them"),
    "ac_option": _some(
        (None,), "enable_activation_checkpointing checkpoints every layer, there is no choice among them"
    ),
    "batch_size": _taken(f"{_ONE_BATCH}; alignment has align.batch_size"),
    "checkpointer": _taken(f"{_STUDENT}; a config without that one may call it checkpointer"),
    "clip_grad_norm": _taken("it is called distill.clip_grad_norm; alignment has align.max_grad_norm"),
    "collate_fn": _line("batches are packed already, nothing is left to collate"),
    "compile": _same("each layer is compiled; the loss needs no compiler"),
    "cudnn_deterministic_mode": _line("no layer uses cuDNN; on a GPU, sums of kernels may differ in their last bits"),
    "custom_sharded_layers": _some(
        (None, ["tok_embeddings"], ["output"], ["tok_embeddings", "output"]),
        "embedding and head are sharded anyway; see the section parallel",
    ),
    "dataset": _same(
        "text, or any of torchtune's instruct, chat and text completion datasets; so are the other two texts"
    ),
    "device": _same("cpu, cuda or cuda:N"),
    "dtype": _same("bf16 or fp32"),
    "enable_activation_checkpointing": _same(),
    "enable_activation_offloading": _same("on a GPU"),
    "enable_async_checkpointing": _some(
        (False,), "checkpoints are written while the run waits; see distill.save_every_steps"
    ),
    "epochs": _taken(_LENGTH),
    "fsdp_cpu_offload": _taken("it is called parallel.cpu_offload"),
    "fsdp_reshard_after_forward": _taken("it is called parallel.reshard_after_forward"),
    "gradient_accumulation_steps": _taken(f"it needs batch_size beside it; {_ONE_BATCH}, and the rest is accumulated"),
    "kd_loss": _same(
        "tcal_components.distill.LinearKL; torchtune's losses are read as that one, which needs less memory"
    ),
    "kd_ratio": _taken("it is called kd_loss.kd_ratio"),
    "log_every_n_steps": _taken("it is called distill.log_every_steps"),
    "log_peak_memory_stats": _some((True,), "the report always has the peak memory of each stage"),
    "loss": _taken("the loss is kd_loss; cross-entropy has the share 1 - kd_ratio in it, so give kd_ratio"),
    "low_cpu_ram": _some((False,), "models are built without memory and one process reads the weights anyway"),
    "lr_scheduler": _same("of the distillation; any that gives a LambdaLR, as torchtune's do"),
    "max_steps_per_epoch": _taken(f"it needs epochs beside it; {_LENGTH}"),
    "metric_logger": _same("any of torchtune's; a package that is missing is said before anything is read"),
    "model": _same("tcal_components.models.hybrid or a builder with sizes; torchtune's have no Gated DeltaNet layers"),
    "optimizer": _same("of the distillation"),
    "optimizer_in_bwd": _some(
        (False,), "the optimizer steps after the backward pass, because the gradient is clipped as a whole"
    ),
    "output_dir": _same("of all stages"),
    "profiler": _same("of the distillation"),
    "resume_from_checkpoint": _same("in the middle of a stage too"),
    "save_adapter_weights_only": _some((False,), _ALL_TRAINED),
    "seed": _same("null is 0, so that a run can be repeated"),
    "shuffle": _some(
        (True,),
        "sequences are always drawn in random order, which follows from seed; documents by dataset.shuffle_documents",
    ),
    "teacher_checkpointer": _same("torchtune's FullModelHFCheckpointer, or ours"),
    "teacher_model": _same("tcal_components.models.teacher or a builder with sizes"),
    "tensor_parallel_dim": _some((1,), _NO_TENSOR_PARALLEL),
    "tensor_parallel_plan": _some((None,), _NO_TENSOR_PARALLEL),
    "tokenizer": _same("tcal_components.data.hf_tokenizer"),
    "dataset.packed": _some((True,), "text is always packed; documents do not see each other"),
    "dataset.split_across_pack": _some(
        (False,), "a sample is not cut in two; tcal_components.data.packed_text cuts documents where a sequence ends"
    ),
    "dataset.subset": _same("of a Hugging Face dataset"),
    "kd_loss.num_output_chunks": _line("kd_loss.chunk_tokens says how many tokens go through the head at once"),
    "kd_loss.sym_kd_ratio": _some((0.5,), "kd_loss.direction: symmetric is the mean of both directions"),
    "lr_scheduler.num_warmup_steps": _same(),
    "metric_logger.log_dir": _same(),
    "model.apply_lora_to_mlp": _line(_ALL_TRAINED),
    "model.apply_lora_to_output": _line(_ALL_TRAINED),
    "model.decoder_trainable": _line(_TEXT_ONLY),
    "model.encoder_trainable": _line(_TEXT_ONLY),
    "model.fusion_trainable": _line(_TEXT_ONLY),
    "model.image_size": _line(_TEXT_ONLY),
    "model.lora_alpha": _line(_ALL_TRAINED),
    "model.lora_attn_modules": _line(_ALL_TRAINED),
    "model.lora_dropout": _line(_ALL_TRAINED),
    "model.lora_rank": _line(_ALL_TRAINED),
    "optimizer.fused": _same("on CUDA it is the default"),
    "optimizer.lr": _taken(
        "distill.lr is the rate of the converted layers and distill.base_lr that of what the teacher had before; this one is both"
    ),
    "optimizer.weight_decay": _line("it is called distill.weight_decay, and only matrices have it"),
    "tokenizer.image_size": _line(_TEXT_ONLY),
    "tokenizer.max_seq_len": _same("cuts chat samples, and is the seq_len of torchtune's datasets that have none"),
    "tokenizer.merges_file": _line(_TOKENIZER_FOLDER),
    "tokenizer.merges_path": _line(_TOKENIZER_FOLDER),
    "tokenizer.path": _same("the folder, or its tokenizer.json"),
    "tokenizer.prompt_template": _line("the chat template of the folder is used"),
    "tokenizer.vocab_path": _line(_TOKENIZER_FOLDER),
    # Components: what torchtune's own ones become.
    "checkpointer._component_": _some(
        (), "allowed are torchtune.training.FullModelHFCheckpointer and ours, both for safetensors"
    ),
    "dataset._component_": _some(
        (), "it is not of samples to learn from; torchtune's instruct, chat and text completion datasets are"
    ),
    "kd_loss._component_": _some(
        (), "it is no divergence from a teacher; torchtune's six are, and tcal_components.distill.LinearKL"
    ),
    "loss._component_": _some(
        (), "the loss is kd_loss, in which cross-entropy has the share 1 - kd_ratio; no other loss can be added"
    ),
    "lr_scheduler._component_": _same(),
    "metric_logger._component_": _same("DiskLogger, StdoutLogger, TensorBoardLogger, WandBLogger, CometLogger"),
    "model._component_": _line(
        "it has no Gated DeltaNet layers; tcal_components.models.hybrid builds any student from checkpoint_dir"
    ),
    "optimizer._component_": _same(
        "of torch, torchao or another package; one that is missing is said before anything is read"
    ),
    "profiler._component_": _same(),
    "teacher_checkpointer._component_": _some(
        (), "allowed are torchtune.training.FullModelHFCheckpointer and ours, both for safetensors"
    ),
    "teacher_model._component_": _line("tcal_components.models.teacher builds any teacher from checkpoint_dir"),
    "tensor_parallel_plan._component_": _line(_NO_TENSOR_PARALLEL),
    "tokenizer._component_": _line(f"{_TOKENIZER_FOLDER}, chat template and all"),
}

# torchtune's FullModelHFCheckpointer, under either of its names.
_CHECKPOINTER = {
    "checkpoint_dir": _same("a Hugging Face folder"),
    "checkpoint_files": _some((), "all safetensors of the folder are read, so it can only name just these"),
    "checkpoint_files.filename_format": _some(
        (), "all safetensors of the folder are read, so it can only name just these"
    ),
    "checkpoint_files.max_filename": _some(
        (), "all safetensors of the folder are read, so it can only name just these"
    ),
    "model_type": _some((), "it is read from the folder's config.json, so it can only say the same"),
    "output_dir": _some((), _NOT_SAVED_THERE),
    "adapter_checkpoint": _some((None,), _ALL_TRAINED),
    "recipe_checkpoint": _some((None,), f"{_NOT_SAVED_THERE}; resume_from_checkpoint=true goes on from there"),
    "resume_from_checkpoint": _some(
        (False,), "the top-level resume_from_checkpoint=true goes on where a run was broken"
    ),
    "safe_serialization": _some((True,), "safetensors are all that is written"),
    "should_load_recipe_state": _some(
        (False,), "the top-level resume_from_checkpoint=true goes on where a run was broken"
    ),
}
_PROFILER = {
    "enabled": _same(),
    "output_dir": _same("profiling_outputs below the top-level output_dir where it is not given"),
    **dict.fromkeys(("cpu", "cuda", "profile_memory", "record_shapes", "with_flops", "with_stack"), _same()),
    **dict.fromkeys(("wait_steps", "warmup_steps", "active_steps", "num_cycles"), _same(_SCHEDULE)),
}
TORCHTUNE_KEYS |= {
    f"{where}.{key}": row for where in ("checkpointer", "teacher_checkpointer") for key, row in _CHECKPOINTER.items()
}
TORCHTUNE_KEYS |= {f"profiler.{key}": row for key, row in _PROFILER.items()}


def taken_top_level() -> tuple[str, ...]:
    """Torchtune's top-level keys that are no key here and yet may stand in a config of ``taylor_calibrate_kd``."""
    return tuple(k for k, row in TORCHTUNE_KEYS.items() if "." not in k and row.outcome in ("taken", "some"))


def line(name: str, *, section: str | None = None) -> str:
    """What a refusal of one of torchtune's keys says.

    Args:
        name: as in the table.
        section: of the config, where it is another one than the table's, as ``validation_dataset`` is to ``dataset``.

    Returns:
        One line.
    """
    where, _, key = name.rpartition(".")
    where = section or where
    text = TORCHTUNE_KEYS[name].text
    return (
        f"{where}._component_ does not fit: {text}"
        if key == "_component_"
        else f"torchtune's key '{key}' in {where or 'the config'}: {text}"
    )


def page() -> str:
    """The table as Markdown, ``docs/torchtune_keys.md``."""
    words = {"same": "works", "taken": "works, read as ours", "some": "some values", "line": "refused"}
    rows = ["| torchtune's key | here | what becomes of it |", "|---|---|---|"]
    top = sorted(key for key in TORCHTUNE_KEYS if "." not in key)
    for key in top:
        inner = sorted(name for name in TORCHTUNE_KEYS if name.startswith(f"{key}."))
        for name in (key, *inner):
            row = TORCHTUNE_KEYS[name]
            accepts = " or ".join(f"`{_yaml(value)}`" for value in row.accepts)
            what = f"only {accepts}" if accepts else words[row.outcome]
            if name.endswith("._component_") and row.outcome == "line":
                what = "torchtune's are refused"
            rows.append(f"| `{name}` | {what} | {row.text} |")
    return _HEAD + "\n".join(rows) + "\n"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value).replace("'", "")


_HEAD = """# Torchtune's keys

Configs here follow torchtune's. For every key of torchtune 0.6.1's knowledge-distillation and full-finetune configs this
page says what becomes of it in a config of `taylor_calibrate_kd`:

- *works*: a key here too, with the same meaning;
- *works, read as ours*: written to the key that the last column names; if that one is there too and says something else, the
  run ends with a line that names both;
- *only ...*, *some values*: these ask for what happens anyway; others are refused;
- *refused*: the run ends before text or weights are read, with `error: torchtune's key ... :` and the last column.

Torchtune's datasets stand where any text does, with `seq_len` (or `tokenizer.max_seq_len`) beside their own arguments; a
list of them is one dataset. `max_sequences` ends one, `skip_tokens` leaves out what another part has read:

```yaml
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  seq_len: 2048
kd_ratio: 0.5
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
batch_size: 2
gradient_accumulation_steps: 8
epochs: 1            # and no distill.tokens
```

This page is written by `python -m tcal_components.config.torchtune_keys`.

"""


if __name__ == "__main__":
    print(page(), end="")
