"""Two processes with a model sharded by FSDP2 measure what one process measures."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from tcal_components.evaluation import evaluation_batches, perplexity
from tcal_components.evaluation.agreement import agreement

# Run by each process; the shape of the model and the data come from the test as JSON and a saved file.
_WORKER = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from tcal_components.evaluation import evaluation_batches, perplexity
from tcal_components.evaluation.agreement import agreement
from tcal_components.models import DecoderSpec, build_decoder

shape, saved, out = sys.argv[1:]
dist.init_process_group("gloo")
data = torch.load(saved, weights_only=True)
models = []
for name, options in (("teacher", {}), ("hybrid", {"retained_layers": [1], "gdn": {"conv_size": 4}})):
    model = build_decoder(DecoderSpec(**json.loads(shape)), **options)
    model.load_state_dict(data[name])
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=True)  # the tied head's weight is sharded again after every forward
    models.append(model)
teacher, hybrid = models
rows = data["rows"]

class Rows:
    def __len__(self):
        return len(rows)
    def __getitem__(self, index):
        return rows[index]

result = perplexity(hybrid, Rows(), batch_size=2)
agreed = agreement(teacher, hybrid, evaluation_batches(Rows(), batch_size=2, rank=dist.get_rank(), world_size=2))
if dist.get_rank() == 0:
    json.dump({"perplexity": result.as_dict(), "agreement": agreed.as_dict()}, open(out, "w"))
dist.destroy_process_group()
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_ranks_equal_one_process(teacher, hybrid, spec, rows, tmp_path):
    saved, out = tmp_path / "data.pt", tmp_path / "out.json"
    items = [rows[index] for index in range(len(rows))]  # five sequences: the second rank's last share is empty
    torch.save({"teacher": teacher.state_dict(), "hybrid": hybrid.state_dict(), "rows": items}, saved)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _WORKER, json.dumps(vars(spec)), str(saved), str(out)]
    processes = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    found = json.loads(out.read_text())
    one = perplexity(hybrid, rows, batch_size=2)
    assert found["perplexity"]["tokens"] == one.tokens
    assert found["perplexity"]["nll_sum"] == pytest.approx(one.nll_sum, rel=1e-6)
    assert [row["tokens"] for row in found["perplexity"]["by_position"]] == [row["tokens"] for row in one.by_position]
    agreed = agreement(teacher, hybrid, evaluation_batches(rows, batch_size=2))
    assert found["agreement"]["tokens"] == agreed.tokens and found["agreement"]["top1"] == pytest.approx(agreed.top1)
    assert found["agreement"]["kl"] == pytest.approx(agreed.kl, rel=1e-5)
    for layer, error in agreed.layers.items():
        assert found["agreement"]["layers"][str(layer)] == pytest.approx(error, rel=1e-5)
