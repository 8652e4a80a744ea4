"""One rank of test_distributed.py: measures, initialises and aligns its part of each batch, plain and sharded by FSDP2.

Usage: python distributed_worker.py RANK WORLD_SIZE FOLDER
"""

import copy
import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tcal_components.align.aligner import Aligner
from tcal_components.align.config import AlignConfig, JointConfig
from tcal_components.align.joint import JointAligner, align_jointly
from tcal_components.align.loop import align
from tcal_components.align.optimizer import LearningRates
from tcal_components.align.refit import refit_outputs
from tcal_components.initialize.initialize import initialize_mixers
from tcal_components.measure.statistics import measure
from tcal_components.models._decoder import build_decoder
from tcal_components.modules.conversion import build_mixers, load_mixers
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec
from tcal_components.select.gates import GateConfig, train_gates

LAYERS = [0, 2]
CONFIG = AlignConfig(steps=4, batch_size=4, seq_len=32, lr=6e-3, projection_lr=2e-3, warmup_steps=1, eval_every=2)
JOINT = dataclasses.replace(CONFIG, joint=JointConfig(steps=3, batch_size=4, seq_len=32, warmup_steps=1))


def run(job, rank, world_size, *, sharded):
    """All three stages on this rank's rows of every batch."""

    def part(batch):
        return {key: value.chunk(world_size)[rank] for key, value in batch.items()}

    batches = [part(batch) for batch in job["batches"]]
    teacher = build_decoder(DecoderSpec(**job["spec"]))
    teacher.load_state_dict(job["teacher"])
    teacher.requires_grad_(False)
    mesh = init_device_mesh("cpu", (world_size,)) if sharded else None
    if sharded:
        for layer in teacher.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(teacher, mesh=mesh)
    sums = measure(teacher, LAYERS, batches)
    if world_size > 1:
        sums.all_reduce_()
    statistics, gdn = sums.finalise(), GatedDeltaNetSpec()
    starts = {
        name: initialize_mixers(
            name, teacher=teacher, layers=LAYERS, gdn_spec=gdn, statistics=statistics, batches=batches
        )
        for name in ("taylor", "taylor_published")
    }
    mixers = load_mixers(build_mixers(teacher.spec, gdn, LAYERS), starts["taylor"].weights)
    if sharded:
        for mixer in mixers.values():
            fully_shard(mixer.decay, mesh=mesh)
            fully_shard(mixer, mesh=mesh)
    saved = {}

    def save(aligner: Aligner) -> None:
        if aligner.step == 2:
            saved.update(copy.deepcopy(aligner.state_dict()))

    # Plain layers of two ranks are stacked, sharded ones cannot be, one process goes layer by layer: all the same numbers.
    arguments = {"config": dataclasses.replace(CONFIG, stack_layers=world_size > 1), "progress": False}
    aligned = align(teacher, mixers, batches, batches[:2], on_step=save, **arguments)
    resumed = align(teacher, mixers, batches[2:], batches[:2], resume=saved, **arguments)
    plain = load_mixers(build_mixers(teacher.spec, gdn, LAYERS), aligned.weights)
    joint = JointAligner(teacher=teacher, mixers=plain, config=JOINT, rates=LearningRates(1e-3, 3e-3, 3e-3))
    joint_weights = align_jointly(joint, batches, batches[:2])
    torch.manual_seed(0)
    every = build_mixers(teacher.spec, gdn, range(teacher.spec.num_layers)).requires_grad_(False)
    gates = train_gates(teacher, every, batches, 1, config=GateConfig(steps=3))
    return {
        "refitted": refit_outputs(teacher, plain, batches, batches[:2], config=CONFIG),
        "joint_curve": joint.curve,
        "joint_weights": joint_weights,
        "gates": gates,
        "statistics": {layer: vars(statistics.layers[layer]) for layer in LAYERS},
        "starts": {name: start.weights for name, start in starts.items()},
        "notes": {name: start.diagnostics for name, start in starts.items()},
        "curve": aligned.curve,
        "weights": aligned.weights,
        "resumed_curve": resumed.curve,
        "resumed_weights": resumed.weights,
        "tokens": aligned.tokens,
    }


def main():
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    job = torch.load(folder / "job.pt")
    result = {name: run(job, rank, world_size, sharded=name == "sharded") for name in ("plain", "sharded")}
    torch.save(result, folder / f"result{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
