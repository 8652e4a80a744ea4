"""What the config of ``taylor_calibrate_kd`` says: its sections, what is wrong with them, and what each stage depends on."""

from __future__ import annotations

import dataclasses

import torch
from omegaconf import DictConfig

from tcal_components.calibration.initialize import STRATEGIES, StartConfig
from tcal_components.calibration.layer_optimizer import AlignConfig
from tcal_components.checkpoint.export import check_replaceable, parse_size
from tcal_components.checkpoint.export_config import export_layout
from tcal_components.checkpoint.fingerprint import fingerprint
from tcal_components.config import ConfigError, check_stages, scalar, section
from tcal_components.distillation import DistillConfig, LinearKL
from tcal_components.distillation.linear_kl import build_loss
from tcal_components.distillation.optimizer import build_optimizer, build_schedule
from tcal_components.distributed.environment import startup_report
from tcal_components.models.memory import estimate_memory
from tcal_components.precision.dtypes import parse_dtype
from tcal_components.workbench import Workbench

# Top-level keys besides those of every recipe, and the components among them.
KEYS = (
    *("stages", "measure", "initialize", "distill", "export", "precision"),
    *("resume_from_checkpoint", "save_every", "keep_last_checkpoints"),
    *("enable_activation_checkpointing", "enable_activation_offloading", "compile"),
)
COMPONENTS = ("optimizer", "lr_scheduler", "kd_loss", "metric_logger")


@dataclasses.dataclass(frozen=True)
class MeasureConfig:
    """Section ``measure``: sequences a batch over all processes, and queries a block (memory: heads x block x length)."""

    batch_size: int = 8
    query_block: int = 128


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Section ``export``: format, type of the weights, size of a shard, and tokens compared when it is reloaded.

    ``base_model`` is the teacher's name on the Hugging Face hub, for the metadata of the model card.
    """

    format: str = "qwen3_5_text"
    dtype: str = "bf16"
    max_shard_size: str = "5GB"
    verify_tokens: int = 256
    base_model: str | None = None


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """Section ``precision``: type of the student's trained weights, and float8 for linear layers of student and teacher."""

    master: str = "fp32"
    student: str | None = None
    teacher: str | None = None


class PipelineConfig:
    """The sections of a config, checked in two steps: first what needs no text, which takes a while to read.

    Args:
        cfg: of the recipe.

    Attributes:
        distill: section ``distill``, None where no stage needs it and it is not there; set by :meth:`complete`.
        loss: of the distillation; set by :meth:`complete`.

    Raises:
        ConfigError: a mistake, in one line.
    """

    distill: DistillConfig | None
    loss: LinearKL

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self.stages = check_stages(cfg.get("stages"))
        self.measure = section(MeasureConfig, cfg.get("measure"), "measure")
        self.start = section(StartConfig, cfg.get("initialize"), "initialize")
        self.align = section(AlignConfig, cfg.get("align"), "align")
        self.precision = section(PrecisionConfig, cfg.get("precision"), "precision")
        self.export = section(ExportConfig, cfg.get("export"), "export")
        self.export_dtype = parse_dtype(self.export.dtype, "export.dtype")
        self.master_dtype = parse_dtype(self.precision.master, "precision.master")
        self.resume = scalar(cfg, "resume_from_checkpoint", bool, False)
        self.keep_last = scalar(cfg, "keep_last_checkpoints", int, 2, least=1)
        self.save_every = scalar(cfg, "save_every", int, 100, least=1)
        self.checkpointing = scalar(cfg, "enable_activation_checkpointing", bool, False)
        self.offloading = scalar(cfg, "enable_activation_offloading", bool, False)
        self.compile = scalar(cfg, "compile", bool, False)
        if self.start.strategy not in STRATEGIES:
            raise ConfigError(f"initialize.strategy is '{self.start.strategy}'; allowed: {', '.join(STRATEGIES)}")

    def complete(self, bench: Workbench) -> None:
        """Reads what depends on text and processes, and finds what stages would refuse hours later.

        Args:
            bench: of the same config.

        Raises:
            ConfigError: a mistake, in one line.
        """
        self.distill = None
        if "distill" in self.stages or self._cfg.get("distill") is not None:
            self.distill = section(
                DistillConfig,
                self._cfg.get("distill"),
                "distill",
                seq_len=bench.data["training"].seq_len,
                optimizer=self._cfg.get("optimizer"),
                lr_scheduler=self._cfg.get("lr_scheduler"),
                activation_offloading=self.offloading,
                seed=bench.seed,
            )
        self.loss = build_loss(self._cfg.get("kd_loss"))
        if self.measure.batch_size < 1 or self.measure.query_block < 1:
            raise ConfigError(
                f"measure.batch_size is {self.measure.batch_size} and measure.query_block "
                f"{self.measure.query_block}, expected at least 1"
            )
        if "align" in self.stages:
            bench.check_batch_size(self.align.batch_size, "align.batch_size")
        if "distill" in self.stages:
            self._check_distill(bench)
        for name in ("student", "teacher"):
            if getattr(self.precision, name) not in (None, "float8"):
                raise ConfigError(f"precision.{name} is '{getattr(self.precision, name)}'; allowed: float8, null")
        if "export" in self.stages:
            self._check_export(bench)

    def _check_distill(self, bench: Workbench) -> None:
        assert self.distill is not None
        bench.check_batch_size(self.distill.batch_size, "distill.batch_size")
        group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.0, "weight_decay": 0.0}
        try:
            optimizer = build_optimizer([group], self.distill.optimizer)
        except (ValueError, TypeError, IndexError) as error:  # optimizers check little themselves
            raise ConfigError(f"optimizer: {error}") from error
        build_schedule(optimizer, self.distill)
        if self.offloading and bench.ctx.device.type != "cuda":
            raise ConfigError(
                f"enable_activation_offloading is true and device is {bench.ctx.device.type}; it moves activations from a "
                "GPU to the host"
            )

    def _check_export(self, bench: Workbench) -> None:
        parse_size(self.export.max_shard_size)
        check_replaceable(bench.output_dir / "export")
        compared = min(self.export.verify_tokens, bench.data["evaluation"].seq_len)
        if compared < 8:
            raise ConfigError(
                f"export.verify_tokens with validation_dataset.seq_len gives {compared} tokens, expected at least 8"
            )
        export_layout(
            bench.spec,
            gdn=bench.gdn,
            retained_layers=bench.retained,
            format=self.export.format,
            dtype=self.export_dtype,
        )

    def check_machine(self, bench: Workbench) -> None:
        """Finds what would fail or mislead hours later: versions, kernels, memory; logs what there is.

        Args:
            bench: of the same config.

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

        float8 = "float8" in (self.precision.student, self.precision.teacher)
        if float8 and not self.compile:  # docs/results/benchmark_qwen3_8b
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

    def fingerprints(self, bench: Workbench, *, uses_alignment: bool) -> dict[str, str]:
        """What each stage's output is made from; a change anywhere upstream changes all that follows.

        Args:
            bench: of the same config.
            uses_alignment: whether the distillation starts from the aligned mixers.

        Returns:
            dict: by stage.
        """
        measured = fingerprint(
            bench.teacher_fingerprint,
            bench.data_fingerprint("calibration"),
            str(bench.ctx.dtype),
            self.precision.teacher,
        )
        start = fingerprint(
            measured,
            bench.converted,
            dataclasses.asdict(bench.gdn),
            dataclasses.asdict(self.start),
            bench.data_fingerprint("heldout"),
            bench.seed,
        )
        aligned = fingerprint(start, dataclasses.asdict(self.align), bench.data_fingerprint("training"))
        prints = {"measure": measured, "initialize": start, "align": aligned}
        if self.distill is None:
            return {**prints, "distill": ""}  # which no output has
        plain = {key: dict(self._cfg.get(key) or {}) for key in ("optimizer", "lr_scheduler", "kd_loss")}
        training = {**dataclasses.asdict(self.distill), **plain}
        for watching in ("eval_every_steps", "save_every_steps", "log_every_steps"):
            del training[watching]
        ready, text = aligned if uses_alignment else start, bench.data_fingerprint("training")
        return {**prints, "distill": fingerprint(ready, training, dataclasses.asdict(self.precision), text)}
