"""What the config of ``taylor_calibrate_kd`` says: its sections, what is wrong with them, and what each stage depends on."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated, Any

import torch
from omegaconf import DictConfig

from tcal_components.align.config import AlignConfig
from tcal_components.config import STAGES, ConfigError, Count, OneOf, Range, Settings, keys_of, read, section
from tcal_components.config.torchtune_keys import taken_top_level
from tcal_components.config.torchtune_values import read_torchtune_length, read_torchtune_training
from tcal_components.distill import DistillConfig, LinearKL
from tcal_components.distill.loss import build_loss
from tcal_components.distill.optimizer import build_optimizer, build_schedule
from tcal_components.distributed.environment import startup_report
from tcal_components.evaluation.generation import GenerationConfig, choose_prompts
from tcal_components.export.config_json import FORMATS, export_layout
from tcal_components.export.engines import llama_cpp_refusal
from tcal_components.export.folder import check_replaceable, parse_size
from tcal_components.initialize.initialize import StartConfig
from tcal_components.models.memory import estimate_memory
from tcal_components.precision.dtypes import parse_dtype
from tcal_components.reporting.metric_logger import check_metric_logger
from tcal_components.serving.llama_cpp_check import EngineMissing, find_engine
from tcal_components.setup import Workbench


@dataclasses.dataclass(frozen=True)
class PipelineKeys(Settings):
    """Top-level keys that hold a single value; ``stages`` is put into the order of the pipeline."""

    stages: Annotated[list[Annotated[str, OneOf(STAGES)]], Range(1)]
    resume_from_checkpoint: bool = False
    keep_last_checkpoints: Count = 2
    enable_activation_checkpointing: bool = False
    enable_activation_offloading: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "stages", [name for name in STAGES if name in self.stages])


# Top-level keys besides those of every recipe, and the components among them.
_SECTIONS = ("measure", "initialize", "distill", "export", "precision", "generation")
KEYS = (*keys_of(PipelineKeys), *_SECTIONS, *taken_top_level())
COMPONENTS = ("optimizer", "lr_scheduler", "kd_loss", "metric_logger", "profiler")


@dataclasses.dataclass(frozen=True)
class MeasureConfig(Settings):
    """Section ``measure``: sequences a batch over all processes, and queries a block (memory: heads x block x length)."""

    batch_size: Count = 8
    query_block: Count = 128


@dataclasses.dataclass(frozen=True)
class ExportConfig(Settings):
    """Section ``export``: format, type of the weights, size of a shard, and tokens compared when it is reloaded.

    ``base_model`` is the teacher's name on the Hugging Face hub, for the metadata of the model card. ``check`` lists the
    engines that have to compute what the student computes; transformers is always one of them. For llama_cpp,
    ``llama_cpp_source`` is a checkout of it and ``llama_cpp_python`` a Python with its bindings (None: the run's own), see
    ``docs/serving.md``; a run without them is refused before it starts.
    """

    format: Annotated[str, OneOf(FORMATS)] = "qwen3_5_text"
    dtype: Annotated[str, OneOf(("fp32", "bf16"))] = "bf16"
    max_shard_size: str = "5GB"
    verify_tokens: Annotated[int, Range(8, 2**16)] = 256
    base_model: str | None = None
    check: tuple[Annotated[str, OneOf(("transformers", "llama_cpp"))], ...] = ("transformers",)
    llama_cpp_source: str | None = None
    llama_cpp_python: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if "transformers" not in self.check:
            raise ConfigError(f"check is {list(self.check)}, expected transformers among them: it is the reference")

    def settings(self) -> dict[str, Any]:
        """What the folder and its numbers depend on."""
        where = ("llama_cpp_source", "llama_cpp_python")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in where}


@dataclasses.dataclass(frozen=True)
class PrecisionConfig(Settings):
    """Section ``precision``: type of the student's trained weights, and float8 for linear layers of student and teacher."""

    master: Annotated[str, OneOf(("fp32", "bf16"))] = "fp32"
    student: Annotated[str, OneOf(("float8",))] | None = None
    teacher: Annotated[str, OneOf(("float8",))] | None = None


class PipelineConfig:
    """The sections of a config, checked in two steps: first what needs no text, which takes a while to read.

    Args:
        cfg: of the recipe.

    Attributes:
        distill: section ``distill``, None where no stage needs it and it is not there; set by :meth:`complete`.
        loss: of the distillation; set by :meth:`complete`.
        generation: section ``generation``, None where it is null.
        prompts: which the student continues; set by :meth:`complete`.

    Raises:
        ConfigError: a mistake, in one line.
    """

    distill: DistillConfig | None
    loss: LinearKL
    prompts: list[list[int]]

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        read_torchtune_training(cfg)
        check_metric_logger(cfg.get("metric_logger"))
        self.run = read(PipelineKeys, cfg)
        self.stages = self.run.stages
        self.measure = section(MeasureConfig, cfg.get("measure"), "measure")
        self.start = section(StartConfig, cfg.get("initialize"), "initialize")
        self.align = section(AlignConfig, cfg.get("align"), "align")
        self.precision = section(PrecisionConfig, cfg.get("precision"), "precision")
        self.export = section(ExportConfig, cfg.get("export"), "export")
        switched_off = "generation" in cfg and cfg.generation is None
        self.generation = None if switched_off else section(GenerationConfig, cfg.get("generation"), "generation")
        self.export_dtype = parse_dtype(self.export.dtype, "export.dtype")
        self.master_dtype = parse_dtype(self.precision.master, "precision.master")
        parse_size(self.export.max_shard_size)

    def complete(self, bench: Workbench) -> None:
        """Reads what depends on text and processes, and finds what stages would refuse hours later.

        Args:
            bench: of the same config.

        Raises:
            ConfigError: a mistake, in one line.
        """
        self.distill = None
        training = bench.data["training"]
        read_torchtune_length(self._cfg, rows=len(training), seq_len=training.seq_len)
        if "distill" in self.stages or self._cfg.get("distill") is not None:
            self.distill = section(
                DistillConfig,
                self._cfg.get("distill"),
                "distill",
                seq_len=training.seq_len,
                optimizer=self._cfg.get("optimizer"),
                lr_scheduler=self._cfg.get("lr_scheduler"),
                activation_offloading=self.run.enable_activation_offloading,
                seed=bench.seed,
            )
        self.loss = build_loss(self._cfg.get("kd_loss"))
        if "align" in self.stages:
            bench.check_batch_size(self.align.batch_size, "align.batch_size")
            bench.check_batch_size(self.align.joint.batch_size, "align.joint.batch_size")
        if "distill" in self.stages:
            self._check_distill(bench)
        if "export" in self.stages:
            self._check_export(bench)
        self._check_generation(bench)

    def _check_generation(self, bench: Workbench) -> None:
        settings, self.prompts = self.generation, []
        if settings is None:
            return
        if settings.length > bench.longest:
            raise ConfigError(
                f"generation.prompt_tokens and new_tokens are {settings.length} tokens, but the models' max_seq_len is "
                f"{bench.longest}; generation=null leaves it out"
            )
        self.prompts = choose_prompts(bench.data["evaluation"], count=settings.prompts, tokens=settings.prompt_tokens)
        if not self.prompts:
            raise ConfigError(
                "generation: validation_dataset has no document of two tokens to continue; generation=null leaves it out"
            )

    def _check_distill(self, bench: Workbench) -> None:
        assert self.distill is not None
        bench.check_batch_size(self.distill.batch_size, "distill.batch_size")
        group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.0, "weight_decay": 0.0}
        try:
            optimizer = build_optimizer([group], self.distill.optimizer)
        except (ValueError, TypeError, IndexError) as error:  # optimizers check little themselves
            raise ConfigError(f"optimizer: {error}") from error
        build_schedule(optimizer, self.distill)
        if self.run.enable_activation_offloading and bench.ctx.device.type != "cuda":
            raise ConfigError(
                f"enable_activation_offloading is true and device is {bench.ctx.device.type}; it moves activations from a "
                "GPU to the host"
            )

    def _check_export(self, bench: Workbench) -> None:
        check_replaceable(bench.output_dir / "export")
        compared = min(self.export.verify_tokens, bench.data["evaluation"].seq_len)
        if compared < 8:
            raise ConfigError(
                f"export.verify_tokens with validation_dataset.seq_len gives {compared} tokens, expected at least 8"
            )
        layout = export_layout(
            bench.spec,
            gdn=bench.gdn,
            retained_layers=bench.retained,
            format=self.export.format,
            dtype=self.export_dtype,
            pad_values=True,
        )
        if "llama_cpp" in self.export.check and (refused := llama_cpp_refusal(layout, self.export.format)):
            raise ConfigError(f"export.check names llama_cpp: {refused}")

    def check_machine(self, bench: Workbench) -> None:
        """Finds what would fail or mislead hours later: versions, kernels, memory; logs what there is.

        Raises:
            ValueError: what is wrong, with the command that mends it.
        """
        estimate = estimate_memory(
            bench.spec,
            retained_layers=bench.retained,
            gdn=bench.gdn,
            teacher_dtype=bench.ctx.dtype,
            student_dtype=self.master_dtype,
            optimizer=self._cfg.get("optimizer"),
            float8_teacher=self.precision.teacher == "float8",
        )
        bench.log(estimate.summary())

        def needed(processes: int) -> float:
            return estimate.of_process(self.stages, processes=processes, dp_replicate=bench.ctx.dp_replicate)

        if "export" in self.stages and "llama_cpp" in self.export.check and bench.ctx.is_first:  # which checks
            try:
                version = find_engine(self.export.llama_cpp_source, self.export.llama_cpp_python or sys.executable)
            except EngineMissing as error:
                raise ConfigError(
                    f"export.check names llama_cpp: {error} (export.llama_cpp_source, export.llama_cpp_python)"
                ) from error
            bench.log(f"llama.cpp {version} will check the export, on the CPU")
        float8 = "float8" in (self.precision.student, self.precision.teacher)
        if float8 and not self.run.compile:  # docs/results/benchmark_qwen3_8b
            bench.log(
                "float8: compile=true would help; Qwen3-8B took 4.2 s a step without, 2.0 with, 2.8 in bf16 (H200)"
            )
        found = startup_report(
            bench.ctx,
            # With CPU offload the weights are in host memory, so a GPU's free memory is no measure.
            needed_bytes=None if bench.parallel.cpu_offload else needed,
            float8=float8,
        )
        for fact in found.facts:
            bench.log(fact)
        found.raise_for_problems()

    def inputs(self, bench: Workbench) -> dict[str, dict[str, Any]]:
        """What each stage's output is made from besides what the stage before left.

        Args:
            bench: of the same config.

        Returns:
            dict: by stage, values by the config's keys; texts and the teacher by their fingerprints. Without ``distill`` where
            the config has no such section.
        """
        trained_on = bench.data_fingerprint("training")
        found: dict[str, dict[str, Any]] = {
            "measure": {
                "teacher_checkpointer": bench.teacher_fingerprint,
                "calibration_dataset": bench.data_fingerprint("calibration"),
                "dtype": str(bench.ctx.dtype),
                "precision.teacher": self.precision.teacher,
            },
            "initialize": {
                "retain.converted": bench.converted,
                "model.gdn": dataclasses.asdict(bench.gdn),
                "initialize": dataclasses.asdict(self.start),
                "heldout": bench.data_fingerprint("heldout"),
                "seed": bench.seed,
            },
            "align": {"align": dataclasses.asdict(self.align), "dataset": trained_on},
        }
        if self.distill is not None:
            settings = dataclasses.asdict(self.distill)
            # With `keep_best` the evaluations are where the best weights may come from.
            watching = ["save_every_steps", "log_every_steps", *(["eval_every_steps"] * (not self.distill.keep_best))]
            for name in (*watching, "optimizer", "lr_scheduler"):
                del settings[name]
            components = {key: dict(self._cfg.get(key) or {}) for key in ("optimizer", "lr_scheduler", "kd_loss")}
            precision = dataclasses.asdict(self.precision)
            found["distill"] = {"distill": settings, **components, "precision": precision, "dataset": trained_on}
        return found
