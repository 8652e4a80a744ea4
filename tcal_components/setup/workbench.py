"""What every recipe sets up in the same way: the checked config, the processes, the text and the teacher.

Everything that can be wrong with a config is found in the constructor, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torchtune import config as torchtune_config
from torchtune import training

from tcal_components.align.config import AlignConfig
from tcal_components.checkpoint.fingerprint import folder_fingerprint
from tcal_components.checkpoint.folder_lock import lock_folder
from tcal_components.checkpoint.teacher import HFTeacherCheckpointer, locate_tensors
from tcal_components.config import (
    ConfigError,
    build,
    check_component,
    check_output_dir,
    check_top_level,
    read,
    resolve_assets,
    section,
)
from tcal_components.config.torchtune_components import read_torchtune_components
from tcal_components.data import BatchStream, PackedTextDataset, prepare_batch
from tcal_components.data.roles import build_roles, check_cut, provenance, recut
from tcal_components.data.token_files import TokenFiles
from tcal_components.distributed import (
    load_full_state_dict,
    parallelize,
    to_storage_dtype,
)
from tcal_components.distributed.watch import patient_group
from tcal_components.evaluation.perplexity import evaluation_batches, perplexity
from tcal_components.initialize.projections import check_head_sizes
from tcal_components.modules.conversion import build_mixers, converted, load_mixers
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec
from tcal_components.ops.kernels import tune_kernels
from tcal_components.precision.float8 import apply_float8
from tcal_components.setup.checks import alignments, check_family, check_lengths, check_vocabulary, retained_layers
from tcal_components.setup.processes import Processes
from tcal_components.setup.sections import COMMON_KEYS, COMPONENTS, ROLES, SUPPLIED, TEXTS, BenchConfig, ParallelConfig


class Workbench(Processes):
    """Config, processes, text and teacher of a run.

    Args:
        cfg: the recipe's config; ``asset:`` paths are resolved in place.
        extra_keys: top-level keys that the recipe reads besides ``COMMON_KEYS``.
        extra_components: those of them that are ``_component_`` sections.
        resumes: what continues an interrupted run, in words.

    Attributes:
        cfg: the config.
        ctx: processes, device and compute dtype.
        spec: shape of the teacher.
        gdn: shape of the mixers, sizes filled in.
        retained, converted: layer indices.
        token_files: where the texts are kept, so that they are tokenised once.
        longest: tokens of the longest sequence for which teacher and student are built.
        data: packed datasets by role: ``calibration``, ``heldout``, ``training``, ``evaluation``.

    Raises:
        ValueError: a mistake in the config, in one line.
        FileNotFoundError: a file or folder that is not there.
    """

    def __init__(
        self,
        cfg: DictConfig,
        *,
        extra_keys: Sequence[str] = (),
        extra_components: Sequence[str] = (),
        resumes: str = "the same command",
    ) -> None:
        read_torchtune_components(cfg, TEXTS)
        check_top_level(cfg, [*COMMON_KEYS, *extra_keys, *extra_components])
        for key in COMPONENTS:
            if cfg.get(key) is None:
                raise ConfigError(f"the config has no {key}")
        for key in (*COMPONENTS, *extra_components):
            if cfg.get(key) is not None:
                check_component(cfg[key], key, supplied=SUPPLIED.get(key, ()))
        self.run = read(BenchConfig, cfg)
        self.cfg = resolve_assets(cfg)
        self.seed, self.output_dir = self.run.seed, Path(self.run.output_dir)
        tune_kernels(self.run.tune_kernels)
        parallel = section(ParallelConfig, cfg.get("parallel"), "parallel")

        checkpointer = build(cfg.teacher_checkpointer, "teacher_checkpointer", makes=HFTeacherCheckpointer)
        locate_tensors(checkpointer.checkpoint_dir)
        self.teacher_checkpointer = checkpointer
        self.spec: DecoderSpec = checkpointer.spec
        longest = {"teacher_model": check_family(cfg, "teacher_model", checkpointer).max_seq_len}
        self.retained = retained_layers(cfg, self.spec.num_layers)
        self.converted = tuple(i for i in range(self.spec.num_layers) if i not in self.retained)
        self.gdn = GatedDeltaNetSpec.from_config(cfg.model.get("gdn")).resolve(self.spec)
        longest["model"] = check_family(cfg, "model", checkpointer, retained_layers=list(self.retained)).max_seq_len
        try:
            check_head_sizes(self.spec, self.gdn)
        except ValueError as error:
            raise ConfigError(f"model.{error}") from error
        self.longest = min(longest.values())

        super().__init__(self.run.device, self.run.dtype, parallel, resumes=resumes)
        training.set_seed(seed=self.seed)
        self.tokenizer = build(cfg.tokenizer, "tokenizer")
        check_vocabulary(self.tokenizer, cfg.tokenizer["_component_"], self.spec)
        align = section(AlignConfig, cfg.get("align"), "align")
        aligns = alignments(cfg, align)
        for where, given in aligns.items():
            limits = {"max_tokens": given.text_tokens, "fixed_sequences": given.fixed_sequences}
            check_cut(cfg.dataset, where, seq_len=given.seq_len, **limits)
        # What the numbers alone can say, before text is read.
        lengths = {where: given.seq_len for where, given in {"align": align, **aligns}.items()}
        lengths |= {f"{where}.joint": given.joint.seq_len for where, given in aligns.items() if given.joint.steps}
        lengths |= {key: cfg[key].seq_len for key in TEXTS if isinstance(cfg[key].get("seq_len"), int)}
        check_lengths(longest, lengths)
        check_output_dir(self.output_dir, inputs=[checkpointer.checkpoint_dir])
        self._lock = lock_folder(self.output_dir) if self.ctx.is_first else None
        made_of: Any = OmegaConf.to_container(cfg.tokenizer, resolve=True)
        self.token_files = TokenFiles(self.output_dir / "tokens", self.tokenizer, made_of)
        self.data = build_roles(
            self.cfg,
            self.token_files,
            heldout_seq_len=align.seq_len,
            heldout_tokens=align.heldout_batches * align.batch_size * align.seq_len,
            max_seq_len=self.spec.max_seq_len,
        )
        check_lengths(longest, {key: self.data[role].seq_len for role, key in ROLES.items()})
        self.teacher_fingerprint = self._teacher_fingerprint()

    def _teacher_fingerprint(self) -> str:
        """Read by one process for all: of a large teacher on a slow disk it takes minutes."""
        found = [folder_fingerprint(self.teacher_checkpointer.checkpoint_dir) if self.ctx.is_first else ""]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(found, src=0, group=patient_group())
        return found[0]

    def provenance(self) -> dict[str, dict[str, Any]]:
        """The report's section ``data``: where each part of the text came from."""
        return provenance(self.data)

    def data_fingerprint(self, role: str) -> list[Any]:
        """What identifies a part of the text: its tokens and how they are cut."""
        return [self.data[role].sources["sha256"], self.data[role].seq_len]

    def prepare(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """A batch of a stream on this process's device, with its mask."""
        return prepare_batch(dict(batch), self.ctx.device)

    def load_teacher(self, *, float8: bool = False) -> HybridDecoder:
        """The teacher: read once, spread over the processes, frozen, in evaluation mode.

        Args:
            float8: its linear layers compute in float8.

        Returns:
            HybridDecoder: in the compute dtype on this process's device.
        """
        weights = self.teacher_checkpointer.load_checkpoint()[training.MODEL_KEY] if self.ctx.is_first else {}
        with torch.device("meta"):
            teacher = torchtune_config.instantiate(self.cfg.teacher_model)
        to_storage_dtype(teacher, self.ctx.dtype)
        sharded = self.ctx.world_size > 1
        if float8 and sharded:
            self.log(apply_float8(teacher, device=self.ctx.device, frozen=True, sharded=True).summary())
        teacher = self.spread(teacher, weights)
        if float8 and not sharded:
            self.log(apply_float8(teacher, device=self.ctx.device, frozen=True).summary())
        return teacher.eval().requires_grad_(False)

    def student_on_meta(self, dtype: torch.dtype) -> HybridDecoder:
        """The hybrid without weights, for :meth:`spread`: random ones of billions of parameters would take minutes.

        Args:
            dtype: of its parameters.

        Returns:
            HybridDecoder: on the meta device.
        """
        with torch.device("meta"):
            student: HybridDecoder = torchtune_config.instantiate(self.cfg.model, retained_layers=list(self.retained))
        to_storage_dtype(student, dtype)
        return student

    def spread(self, model: HybridDecoder, weights: Mapping[str, Tensor], **options: bool) -> HybridDecoder:
        """A model of the meta device over the processes as section ``parallel`` says, with its weights.

        Args:
            model: on the meta device.
            weights: read by the first process; others may give none.
            **options: ``activation_checkpointing`` and ``compile`` of :func:`~tcal_components.distributed.parallelize`.

        Returns:
            HybridDecoder: on this process's device.
        """
        offload = self.parallel.cpu_offload
        model = parallelize(
            model,
            ctx=self.ctx,
            cpu_offload=offload,
            reshard_after_forward=self.parallel.reshard_after_forward,
            **options,
        )
        load_full_state_dict(model, weights, ctx=self.ctx, cpu_offload=offload)
        return model

    def mixers(self, weights: Mapping[str, Tensor] | None = None) -> nn.ModuleDict:
        """Mixers of the converted layers on this device, float32.

        Args:
            weights: ``layers.{i}.attn.{name}``; None leaves library defaults.

        Returns:
            ModuleDict by layer index.
        """
        mixers = build_mixers(self.spec, self.gdn, self.converted, device=self.ctx.device)
        return mixers if weights is None else load_mixers(mixers, weights)

    def calibration_batches(self, batch_size: int, role: str = "calibration") -> Iterator[dict[str, Any]]:
        """Prepared batches over all of a dataset, in order, this process's part.

        Args:
            batch_size: sequences a batch over all processes.
            role: which part of the text.

        Yields:
            Arguments of the model's forward, and labels.
        """
        batches = evaluation_batches(
            self.data[role], batch_size=batch_size, rank=self.ctx.rank, world_size=self.ctx.world_size
        )
        for batch in batches:
            yield self.prepare(batch)

    def stream(self, dataset: PackedTextDataset, batch_size: int, *, seed: int) -> BatchStream:
        """Endless shuffled batches, this process's part, on the CPU."""
        return BatchStream(
            dataset, batch_size=batch_size, seed=seed, rank=self.ctx.rank, world_size=self.ctx.world_size
        )

    def joint_stream(self, config: AlignConfig, *, seed: int) -> BatchStream | None:
        """Training text for the joint part of an alignment; None where it has none."""
        joint = config.joint
        if not joint.steps:
            return None
        text = self.training_data(joint.seq_len, config.text_tokens + joint.text_tokens)
        return self.stream(text, joint.batch_size, seed=seed)

    def training_data(self, seq_len: int, max_tokens: int | None, role: str = "training") -> PackedTextDataset:
        """Training text cut to another sequence length.

        Args:
            seq_len: tokens a sequence.
            max_tokens: read no more than this; never more than the config's own ``max_tokens``, behind which other
                parts of the same source may lie.
            role: the part of the text to train on.

        Returns:
            PackedTextDataset: its beginning.
        """
        return recut(self.token_files, role, self.cfg[ROLES[role]], seq_len=seq_len, max_tokens=max_tokens)

    def perplexity(self, model: nn.Module, weights: Mapping[str, Tensor] | None = None, label: str = "") -> float:
        """Perplexity on the evaluation text.

        Args:
            model: teacher or student.
            weights: measure the teacher with these mixers in its converted layers.
            label: for the progress bar.

        Returns:
            float: all processes together.
        """
        size = self.run.validation_batch_size
        autocast = self.ctx.autocast_dtype
        options: dict[str, Any] = {"batch_size": size, "autocast_dtype": autocast, "device": self.ctx.device}
        options["progress"] = f"perplexity {label}".strip()
        if weights is None:
            return perplexity(model, self.data["evaluation"], **options).perplexity
        with converted(model, self.mixers(weights).requires_grad_(False)) as student:
            return perplexity(student, self.data["evaluation"], **options).perplexity

    def container(self) -> dict[str, Any]:
        """The resolved config as plain containers."""
        return OmegaConf.to_container(self.cfg, resolve=True)  # type: ignore[return-value]
