"""Parallel set-up in one process; several are tested by the stages that use them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tcal_components.distributed import (
    ParallelContext,
    check_cpu_offload,
    gather_full_state_dict,
    load_full_state_dict,
    parallelize,
    setup_process_group,
    to_storage_dtype,
)
from tcal_components.models._decoder import build_decoder
from tcal_components.modules.spec import DecoderSpec

ROOT = Path(__file__).parents[2]
SPEC = DecoderSpec(
    family="llama3_2",
    vocab_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    embed_dim=16,
    intermediate_dim=24,
    head_dim=8,
    max_seq_len=16,
    norm_eps=1e-5,
    rope_base=10000.0,
    rope_scaling=None,
    qkv_bias=False,
    qk_norm=False,
    tie_word_embeddings=True,
)


def test_one_process_needs_no_group_and_is_not_sharded():
    ctx = ParallelContext.create("cpu", dtype=torch.bfloat16)
    assert (ctx.rank, ctx.world_size, ctx.mesh, ctx.is_first) == (0, 1, None, True)
    assert not torch.distributed.is_initialized()
    model = build_decoder(SPEC, retained_layers=[0])
    assert type(parallelize(model, ctx=ctx)) is type(model)
    assert ctx.all_sum(torch.ones(2)).tolist() == [1, 1]
    with ctx.autocast():
        assert model.layers[0].mlp.w1(torch.zeros(1, 16)).dtype == torch.bfloat16
    with ParallelContext.create("cpu").autocast():
        assert model.layers[0].mlp.w1(torch.zeros(1, 16)).dtype == torch.float32


def test_from_meta_through_checkpointing_and_back():
    ctx = ParallelContext.create("cpu")
    torch.manual_seed(0)
    source = build_decoder(SPEC, retained_layers=[1])
    with torch.device("meta"):
        model = build_decoder(SPEC, retained_layers=[1])
    parallelize(model, ctx=ctx, activation_checkpointing=True)
    load_full_state_dict(model, source.state_dict(), ctx=ctx)
    tokens = torch.arange(10)[None]
    torch.testing.assert_close(model(tokens), source(tokens), rtol=0, atol=0)
    weights = gather_full_state_dict(model, ctx=ctx)
    assert weights.keys() == source.state_dict().keys()
    with torch.no_grad():
        model.norm.scale.fill_(9.0)
    assert weights["norm.scale"].eq(1.0).all()  # copies
    weights.pop("norm.scale")
    with pytest.raises(RuntimeError, match="norm.scale"):
        load_full_state_dict(model, weights, ctx=ctx)


def test_decay_parameters_stay_wide():
    model = to_storage_dtype(build_decoder(SPEC, retained_layers=[1]), torch.bfloat16)
    kinds = {name: tensor.dtype for name, tensor in model.named_parameters()}
    assert kinds.pop("layers.0.attn.decay.A_log") == kinds.pop("layers.0.attn.decay.dt_bias") == torch.float32
    assert set(kinds.values()) == {torch.bfloat16}
    assert to_storage_dtype(model, torch.float64).layers[0].attn.decay.A_log.dtype == torch.float64


def test_mistakes_are_one_line():
    with pytest.raises(ValueError, match="dp_replicate is 2"):
        ParallelContext.create("cpu", dp_replicate=2)
    ctx = ParallelContext.create("cpu")
    with pytest.raises(ValueError, match="cpu_offload needs several processes"):
        parallelize(build_decoder(SPEC), ctx=ctx, cpu_offload=True)
    with pytest.raises(ValueError, match="cpu_offload needs several processes"):
        check_cpu_offload(ctx)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            setup_process_group("cuda")


def test_groups_of_replicas():
    """Two processes that each hold a copy: what they know of it, and how long which group waits.

    The first process exports and verifies alone while the others are at a barrier; torch's defaults are 10 and 30 minutes.
    """
    code = """
import datetime, torch.distributed as dist
from tcal_components.distributed import ParallelContext
from tcal_components.distributed.watch import patient_group
ctx = ParallelContext.create("cpu", dp_replicate=2, timeout=datetime.timedelta(minutes=3))
assert (ctx.world_size, ctx.dp_replicate, ctx.mesh.shape) == (2, 2, (2, 1)), ctx
def wait(group):
    return group._get_backend(ctx.device).options._timeout.total_seconds()
assert wait(dist.group.WORLD) == 3 * 60 + 30, "a little more than the watch needs, which knows who it was"
assert {wait(group) for group in ctx.mesh.get_all_groups()} == {3 * 60 + 30}
assert wait(patient_group()) == 4 * 3600
ctx.barrier()
dist.destroy_process_group()
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env={**environment, "RANK": rank}, stderr=subprocess.PIPE)
        for rank in ("0", "1")
    ]
    errors = [process.communicate(timeout=120)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)


def test_weights_outside_the_range_are_refused():
    """Copied into a narrower type they would be infinities."""
    ctx = ParallelContext.create("cpu")
    model = to_storage_dtype(build_decoder(SPEC, retained_layers=[1]), torch.bfloat16)
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    load_full_state_dict(model, weights, ctx=ctx)
    weights["layers.1.mlp.w1.weight"][0, 0] = 1e39
    with pytest.raises(ValueError, match=r"layers.1.mlp.w1.weight overflows when converted to torch.bfloat16"):
        load_full_state_dict(model, weights, ctx=ctx)
    weights["layers.1.mlp.w1.weight"][0, 0] = 0.0
    weights["layers.0.attn.decay.A_log"][0] = 3.4e38  # kept in float32, which holds it
    load_full_state_dict(model, weights, ctx=ctx)
