"""One of two processes: distils in all the ways that the test compares with one process, and writes what came out."""

import sys
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tcal_components.checkpoint.optimizer_state import initialize_optimizer, optimizer_state, restore_optimizer
from tcal_components.checkpoint.run_state import RunState
from tcal_components.distill.optimizer import build_optimizer
from tcal_components.distributed import ParallelContext, gather_full_state_dict, load_full_state_dict, parallelize
from tcal_components.models._decoder import build_decoder


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ctx = ParallelContext.create("cpu")
    out = {}

    def record(name, distiller, stop=None):
        result = tiny.train_until(distiller, stop)
        weights = gather_full_state_dict(distiller.student, ctx=ctx)
        out[name] = {"curve": result.curve, "finished": result.finished, "weights": weights}
        out[name] |= {"best_step": result.best_step, "heldout_loss": result.heldout_loss}
        return distiller

    record("tied", tiny.make_distiller(ctx))
    record("untied", tiny.make_distiller(ctx, tied=False, config=tiny.make_config(micro_batch_size=1)))
    for name, rates in (("judged", {}), ("judged harmful", {"lr": 3.0, "base_lr": 3.0})):
        options = {"heldout": lambda: tiny.heldout_batches(ctx), "run_state": RunState(folder / name)}
        record(name, tiny.make_distiller(ctx, config=tiny.make_config(eval_every_steps=2, **rates), **options))
    # The first steps show the rest.
    record("float8", tiny.make_distiller(ctx, float8=True), stop=3)
    record("offload", tiny.make_distiller(ctx, cpu_offload=True), stop=3)
    # Stops after 3 of 6 steps: one process continues it.
    record("stopped", tiny.make_distiller(ctx, run_state=RunState(folder / "by_two")), stop=3)
    # Continues what two processes, and what one process, left after 3 steps.
    for name in ("by_two", "by_one"):
        run = RunState(folder / name)
        run.save = lambda *args: None  # the test continues from the same checkpoint
        record(f"resumed {name}", tiny.make_distiller(ctx, run_state=run, resume=True))

    hybrid = ParallelContext.create("cpu", dp_replicate=2)
    record("hsdp", tiny.make_distiller(hybrid), stop=3)
    low = ParallelContext.create("cpu", dtype=torch.bfloat16)
    distiller = record("bf16", tiny.make_distiller(low), stop=3)
    decays = [module for name, module in distiller.student.named_modules() if name.endswith("decay")]
    assert decays
    for decay in decays:
        seen = []
        handle = decay.register_forward_hook(lambda m, a, o, seen=seen: seen.append((m.A_log.dtype, o.dtype)))
        distiller.student(torch.zeros(1, 4, dtype=torch.long))
        handle.remove()
        assert seen == [(torch.float32, torch.float32)], seen
    casts(low)
    eight_bit(ctx, folder)
    if ctx.is_first:
        torch.save(out, folder / "two.pt")
    dist.destroy_process_group()


def casts(ctx):
    """Stored dtypes survive loading from another dtype, and weights loaded after an evaluation are the ones used."""
    full = {k: v.bfloat16() for k, v in tiny.make_pair()[0].state_dict().items()}
    with torch.device("meta"):
        model = build_decoder(tiny.make_spec(), retained_layers=[1])
    parallelize(model, ctx=ctx)
    load_full_state_dict(model, {k: torch.zeros_like(v) for k, v in full.items()}, ctx=ctx)
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        assert model(tokens).abs().max() == 0
    load_full_state_dict(model, full if ctx.is_first else {}, ctx=ctx)
    with torch.no_grad():
        assert model(tokens).abs().max() > 0
    got = gather_full_state_dict(model, ctx=ctx)
    assert got.keys() == (full.keys() if ctx.is_first else set())
    for name, tensor in got.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, full[name].float()), name


def eight_bit(ctx, folder):
    """torchao's 8-bit AdamW under FSDP2, saved in the middle: continuing equals not stopping."""
    torch.compiler.set_stance("force_eager")  # torchao compiles its step; the compiler is not tested here

    def build():
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(256, 64), mesh=ctx.mesh)
        groups = [{"params": list(model.parameters()), "lr": 1e-2, "weight_decay": 0.01}]
        return model, build_optimizer(groups, {"_component_": "torchao.optim.AdamW8bit"})

    def train(model, optimizer, steps):
        for step in steps:
            x = torch.randn(16, 256, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build()
    train(model, optimizer, range(3))
    assert type(optimizer.state[model.weight]["exp_avg"].to_local()).__name__ == "OptimState8bit"
    run = RunState(folder / "eight_bit")
    run.save(3, {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)})
    train(model, optimizer, range(3, 6))
    again, fresh = build()
    initialize_optimizer(fresh)
    moments = optimizer_state(again, fresh)
    run.load({"model": again.state_dict(), "optimizer": moments})
    restore_optimizer(again, fresh, moments)
    train(again, fresh, range(3, 6))
    got, want = again.weight.full_tensor(), model.weight.full_tensor()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
