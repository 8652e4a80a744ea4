"""A tiny hybrid, its teacher and packed documents; for the tests here and for the processes that they start."""

import torch
from torch.utils.data import Dataset

from tcal_components.data import BatchStream, prepare_batch
from tcal_components.distill import DistillConfig, Distiller, LinearKL
from tcal_components.distill.loop import train
from tcal_components.distributed import load_full_state_dict, parallelize
from tcal_components.models._decoder import build_decoder
from tcal_components.modules.spec import DecoderSpec
from tcal_components.precision import apply_float8


def make_spec(tied=True):
    return DecoderSpec(
        family="qwen3",
        vocab_size=61,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        embed_dim=32,
        intermediate_dim=40,
        head_dim=16,
        max_seq_len=64,
        norm_eps=1e-6,
        rope_base=10000.0,
        rope_scaling=None,
        qkv_bias=False,
        qk_norm=True,
        tie_word_embeddings=tied,
    )


class Packs(Dataset):
    """Random tokens; each row holds two documents, the last token of each has no label."""

    def __init__(self, rows=11, length=20, vocab=61):
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(vocab, (rows, length + 1), generator=generator)
        self.length = length

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        cut = 5 + index % 9
        position = torch.arange(self.length)
        document = (position >= cut).long()
        labels = self.tokens[index, 1:].clone()
        labels[cut - 1] = -100
        if index % 3 == 0:
            labels[-4:] = -100  # rows differ in counted tokens
        return {
            "tokens": self.tokens[index, :-1],
            "labels": labels,
            "input_pos": torch.where(position >= cut, position - cut, position),
            "document": document,
        }


def heldout_batches(ctx):
    """Rows that are not trained on, this process's part."""
    packs = Packs(rows=15)
    items = [packs[row] for row in list(range(11, 15))[ctx.rank :: ctx.world_size]]
    return [prepare_batch({name: torch.stack([item[name] for item in items]) for name in items[0]}, "cpu")]


def make_pair(tied=True):
    """Student and teacher with random weights, the same each time."""
    torch.manual_seed(3)
    spec = make_spec(tied)
    teacher = build_decoder(spec)
    student = build_decoder(spec, retained_layers=[1])
    # Far from each other and from one-hot: a divergence near 0 would hide mistakes.
    with torch.no_grad():
        for model in (student, teacher):
            model.tok_embeddings.weight.mul_(0.3)
    return student, teacher


def make_config(**changes):
    settings = {"tokens": 6 * 4 * 20, "batch_size": 4, "seq_len": 20, "warmup_steps": 1, "lr": 1e-2, "base_lr": 3e-3}
    return DistillConfig(**{**settings, "weight_decay": 0.1, "save_every_steps": 3, **changes})


def quantise(models):
    for model, frozen in zip(models, (False, True), strict=True):
        layers = apply_float8(model, device="cpu", frozen=frozen, sharded=True, emulate=True)
        assert "layers.1.attn.q_proj" in layers.converted and "layers.1.mlp.w1" in layers.kept


def train_until(distiller, stop=None, **callbacks):
    """All steps, or those before ``stop``."""
    asked = None if stop is None else lambda: distiller.step >= stop and distiller.ctx.is_first
    return train(distiller, should_stop=asked, **callbacks)


def make_distiller(ctx, *, tied=True, config=None, cpu_offload=False, float8=False, **arguments):
    """A distiller on ``ctx``; with several processes from the meta device, as a large model would be built."""
    config = config or make_config()
    models = make_pair(tied)
    if ctx.mesh is not None:
        weights = [{k: v.clone() for k, v in model.state_dict().items()} for model in models]
        with torch.device("meta"):
            models = build_decoder(make_spec(tied), retained_layers=[1]), build_decoder(make_spec(tied))
        if float8:
            quantise(models)
        for model, checkpointing, full in zip(models, (True, False), weights, strict=True):
            parallelize(model, ctx=ctx, activation_checkpointing=checkpointing, cpu_offload=cpu_offload)
            load_full_state_dict(model, full if ctx.is_first else {}, ctx=ctx, cpu_offload=cpu_offload)
    elif float8:
        quantise(models)
    stream = BatchStream(Packs(), batch_size=config.batch_size, seed=0, rank=ctx.rank, world_size=ctx.world_size)
    return Distiller(
        *models,
        stream,
        config=config,
        ctx=ctx,
        loss=LinearKL(chunk_tokens=16, kd_ratio=0.7),
        progress=False,
        **arguments,
    )
