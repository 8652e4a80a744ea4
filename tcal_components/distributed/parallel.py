"""Parallelism in one place and one order: compile, activation checkpointing, FSDP2."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torchtune import training
from torchtune.modules import TransformerSelfAttentionLayer

from tcal_components.distributed.watch import barrier, patient_group
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.modules.mixer_parts import DecayParameters

_COMPILED_SHAPES = 64

# Of :class:`~tcal_components.distributed.watch.Watch` and, a little later, of every collective but the barriers.
TIMEOUT = datetime.timedelta(minutes=10)
_LATER = datetime.timedelta(seconds=30)


def setup_process_group(device: torch.device | str, *, timeout: datetime.timedelta = TIMEOUT) -> torch.device:
    """Join the processes that ``tune run --nproc_per_node`` or ``torchrun`` started; a single process joins nothing.

    Args:
        device: "cuda" or "cpu"; with several processes each takes its own GPU.
        timeout: of a collective; the processes wait for one another much longer at a barrier.

    Returns:
        This process's device, with an index on CUDA. Calling again changes nothing.

    Raises:
        ValueError: if CUDA is asked for and not there.
    """
    device = torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device is cuda, but torch finds no CUDA device; set device=cpu or install a CUDA build")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        # gloo beside NCCL: checkpoints and CPU offload communicate tensors on the CPU.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout + _LATER)
        patient_group()  # made while no process waits for another
    return device


@dataclasses.dataclass(frozen=True)
class ParallelContext:
    """What a stage needs to know of its processes.

    Attributes:
        device: of this process.
        dtype: of the computation; weights may be stored wider.
        rank: of this process.
        world_size: number of processes; each works on its own part of a global batch.
        mesh: of the processes, [shard] or [replicate, shard]; None with one process.
        dp_replicate: groups of processes that each hold a full, sharded copy.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    rank: int = 0
    world_size: int = 1
    mesh: DeviceMesh | None = None
    dp_replicate: int = 1

    @classmethod
    def create(
        cls,
        device: torch.device | str,
        *,
        dtype: torch.dtype = torch.float32,
        dp_replicate: int = 1,
        timeout: datetime.timedelta = TIMEOUT,
    ) -> ParallelContext:
        """Set up the processes.

        Args:
            device: "cuda" or "cpu".
            dtype: of the computation.
            dp_replicate: groups of processes that each hold a full, sharded copy (HSDP); one per host keeps weight traffic
                inside hosts and costs memory.
            timeout: of a collective.

        Returns:
            The context, the same in all processes but for rank and device.

        Raises:
            ValueError: if ``dp_replicate`` does not divide the number of processes.
        """
        device = setup_process_group(device, timeout=timeout)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if dp_replicate < 1 or world_size % dp_replicate:
            raise ValueError(f"dp_replicate is {dp_replicate}, expected a divisor of the {world_size} processes")
        if world_size == 1:
            return cls(device=device, dtype=dtype)
        shape = (world_size,) if dp_replicate == 1 else (dp_replicate, world_size // dp_replicate)
        names = ("dp_shard",) if dp_replicate == 1 else ("dp_replicate", "dp_shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        for group in mesh.get_all_groups():
            # Groups of a part of the processes have torch's defaults. No public function changes that (2.13).
            dist.distributed_c10d._set_pg_timeout(timeout + _LATER, group)
        return cls(
            device=device,
            dtype=dtype,
            rank=dist.get_rank(),
            world_size=world_size,
            mesh=mesh,
            dp_replicate=dp_replicate,
        )

    @property
    def is_first(self) -> bool:
        """Whether this process reports and writes."""
        return self.rank == 0

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Type to compute in where weights may be wider; None where it is float32 anyway."""
        return None if self.dtype == torch.float32 else self.dtype

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Mixed precision of one process; sharded models have it from FSDP2's policy."""
        if self.mesh is None and self.dtype in (torch.bfloat16, torch.float16):
            return torch.autocast(self.device.type, dtype=self.dtype)
        return contextlib.nullcontext()

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Wait for all processes, for hours if one of them is at work."""
        if self.world_size > 1:
            barrier()


def to_storage_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Store weights in ``dtype``, but decay parameters in at least float32: in bf16 the decay is off by up to 2 %.

    Args:
        model: on any device, also meta.
        dtype: float32 master weights cost 4 bytes a parameter more than bfloat16 and as much again in gradients; bfloat16
            loses updates below 0.4 % of a weight.

    Returns:
        The model, changed in place.
    """
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, DecayParameters) and dtype.itemsize < 4:
            module.float()
    return model


def check_cpu_offload(ctx: ParallelContext) -> None:
    """Refuse CPU offload with one process: FSDP2 does it, and one process has none.

    Raises:
        ValueError: one line.
    """
    if ctx.mesh is None:
        raise ValueError(
            "cpu_offload needs several processes (`tune run --nproc_per_node 2 ...`); with one, use bfloat16 weights, "
            "activation checkpointing and an 8-bit optimizer"
        )


def parallelize(
    model: HybridDecoder,
    *,
    ctx: ParallelContext,
    activation_checkpointing: bool = False,
    compile: bool = False,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
) -> HybridDecoder:
    """Prepare a decoder for training or inference on ``ctx``'s processes; with one, it is not sharded.

    Build the model under ``torch.device("meta")``, call this, then ``load_full_state_dict``: no process ever holds the full
    model. Call ``model(...)`` or ``model.hidden(...)`` before single layers: the root has to run first.

    Args:
        model: teacher or hybrid; float8 layers are to be in place already.
        ctx: the processes.
        activation_checkpointing: recompute each layer in the backward pass: about a third more time, memory of one layer.
        compile: compile each layer; the recurrence stays as it is.
        cpu_offload: keep sharded weights, gradients and optimizer state on the CPU; slow, needs several processes.
        reshard_after_forward: free gathered layer weights between forward and backward; False saves one all-gather a layer
            and costs the memory of the whole model in ``ctx.dtype``.

    Returns:
        The model, changed in place.

    Raises:
        ValueError: for CPU offload with one process.
    """
    if ctx.device.type == "cuda":
        # Flex attention is compiled anew for every shape, with and without gradients. After the default of 8 torch runs it
        # unfused in silence, with all scores in memory.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _COMPILED_SHAPES)
    if compile:
        training.compile_model(model, verbose=False)
    if activation_checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    if ctx.mesh is None:
        if cpu_offload:
            check_cpu_offload(ctx)
        return model
    options: dict[str, Any] = {"mesh": ctx.mesh}
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=ctx.device.type == "cuda")
    policy = MixedPrecisionPolicy(param_dtype=ctx.dtype, reduce_dtype=torch.float32)
    # FSDP2 gives one group one dtype, so the decay is a group of its own; it is too small to be freed.
    decay_policy = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in model.modules():
        if isinstance(module, DecayParameters):
            fully_shard(module, mp_policy=decay_policy, reshard_after_forward=False, **options)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard_after_forward, **options)
    if not model.spec.tie_word_embeddings:
        fully_shard(model.tok_embeddings, mp_policy=policy, reshard_after_forward=reshard_after_forward, **options)
    # The head stays gathered after the forward pass, because the loss applies it outside; the backward pass frees it.
    fully_shard(model, mp_policy=policy, reshard_after_forward=False, **options)
    register_fsdp_forward_method(model, "hidden")
    return model


def reshard(model: nn.Module) -> None:
    """Free gathered weights, so that ``parameters()`` shows the sharded ones; nothing to do for an unsharded model."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def materialize(model: nn.Module, *, ctx: ParallelContext, cpu_offload: bool = False) -> None:
    """Give a model from the meta device its storage; weights hold whatever the memory held, tables are filled.

    Args:
        model: as ``parallelize`` returned it.
        ctx: the processes.
        cpu_offload: as given to ``parallelize``.
    """
    model.to_empty(device="cpu" if cpu_offload else ctx.device)
    with ctx.device:
        for module in model.modules():
            rope_init = getattr(module, "rope_init", None)
            if callable(rope_init):
                # FSDP2's offload moves parameters only: the table belongs where the computation is.
                module.to(ctx.device)
                rope_init()
