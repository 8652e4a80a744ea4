"""What test_nccl.py runs in one process and in each of two: measure, align, distil and continue, in float32.

Usage, with the environment of torchrun: python nccl_worker.py DEVICE FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tcal_components.align.config import AlignConfig
from tcal_components.align.loop import align
from tcal_components.benchmark.synthetic import SyntheticPacks
from tcal_components.checkpoint.run_state import RunState
from tcal_components.data import BatchStream, prepare_batch
from tcal_components.distill import DistillConfig, Distiller, LinearKL, train
from tcal_components.distributed import ParallelContext, gather_full_state_dict, load_full_state_dict, parallelize
from tcal_components.measure.statistics import measure
from tcal_components.models._decoder import build_decoder
from tcal_components.modules.conversion import build_mixers
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec

SPEC = DecoderSpec(
    family="qwen3",
    vocab_size=97,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    embed_dim=64,
    intermediate_dim=96,
    head_dim=128,
    max_seq_len=128,
    norm_eps=1e-6,
    rope_base=10000.0,
    rope_scaling=None,
    qkv_bias=False,
    qk_norm=True,
    tie_word_embeddings=True,
)
RETAINED, CONVERTED = (1,), (0, 2)
BATCH, LENGTH, STEPS = 4, 96, 4


def build(ctx, weights, *, student):
    """From the meta device, as large models are."""
    with torch.device("meta"):
        model = build_decoder(SPEC, retained_layers=RETAINED if student else None)
    parallelize(model, ctx=ctx, activation_checkpointing=student)
    load_full_state_dict(model, weights if ctx.is_first else {}, ctx=ctx)
    return model if student else model.eval().requires_grad_(False)


def run(ctx, folder):
    """All stages on this process's rows of every batch."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    weights = {student: build_decoder(SPEC, retained_layers=RETAINED if student else None) for student in (True, False)}
    with torch.no_grad():
        for model in weights.values():
            model.tok_embeddings.weight.mul_(0.3)
    weights = {student: model.state_dict() for student, model in weights.items()}
    mixers = build_mixers(SPEC, GatedDeltaNetSpec(), CONVERTED).to(ctx.device)

    def stream(documents):
        packs = SyntheticPacks(rows=4 * BATCH, seq_len=LENGTH, vocab_size=SPEC.vocab_size, documents=documents)
        return BatchStream(packs, batch_size=BATCH, seed=0, rank=ctx.rank, world_size=ctx.world_size)

    # Bool masks: flex attention would have to be compiled.
    packed = [prepare_batch(stream(2).batch(step), ctx.device, force_bool=True) for step in range(STEPS)]
    teacher = build(ctx, weights[False], student=False)
    sums = measure(teacher, range(SPEC.num_layers), packed)
    if ctx.world_size > 1:
        sums.all_reduce_()
    statistics = {layer: vars(values) for layer, values in sums.finalise().layers.items()}

    config = AlignConfig(steps=STEPS, batch_size=BATCH, seq_len=LENGTH, warmup_steps=1, eval_every=2)
    aligned = align(teacher, mixers, packed, packed[:2], config=config, progress=False)

    config = DistillConfig(
        tokens=STEPS * BATCH * LENGTH, batch_size=BATCH, seq_len=LENGTH, micro_batch_size=1, warmup_steps=1, lr=1e-3,
        base_lr=3e-4, save_every_steps=2,
    )  # fmt: skip

    def distiller(**arguments):
        student = build(ctx, weights[True], student=True)
        loss = LinearKL(chunk_tokens=64, kd_ratio=0.7)
        return Distiller(student, teacher, stream(1), config=config, ctx=ctx, loss=loss, progress=False, **arguments)

    whole = distiller()
    curve = train(whole).curve
    state = RunState(folder / f"state{ctx.world_size}")
    half = distiller(run_state=state)
    train(half, should_stop=lambda: half.step >= 2)
    continued = distiller(run_state=state, resume=True)
    return {
        "statistics": statistics,
        "align": [point["error"] for point in aligned.curve],
        "mixers": aligned.weights,
        "distill": curve,
        "continued": train(continued).curve,
        "weights": gather_full_state_dict(whole.student, ctx=ctx),
        "continued_weights": gather_full_state_dict(continued.student, ctx=ctx),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    context = ParallelContext.create(sys.argv[1])
    result = run(context, Path(sys.argv[2]))
    torch.save(result, Path(sys.argv[2]) / f"result{context.rank}.pt")
    dist.destroy_process_group()
