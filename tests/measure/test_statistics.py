import math

import pytest
import torch

from tcal_components.checkpoint.artifact import Artifact
from tcal_components.measure.capture import capture_batch
from tcal_components.measure.statistics import Statistics, histogram_quantiles, measure
from tcal_components.models._decoder import build_decoder


def dense(teacher, batches, layer):
    """The same means from T x T attention in float64, one document at a time."""
    rows = {name: [] for name in ("distance", "entropy", "sink", "context", "y", "x")}
    mass, weighted = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    histogram = torch.zeros(4, 64, dtype=torch.float64)
    for batch in batches:
        seen = []
        capture_batch(teacher, [layer], batch, seen.append)
        capture, documents = seen[0], batch.get("document", torch.zeros_like(batch["tokens"]))
        for row in range(documents.shape[0]):
            for document in documents[row].unique():
                if document < 0:
                    continue
                at = documents[row] == document
                q, k = capture.q[row][:, at].double(), capture.k[row][:, at].double()
                length = q.shape[1]
                scores = (q @ k.transpose(1, 2)) / math.sqrt(q.shape[2])
                causal = torch.ones(length, length, dtype=torch.bool).tril()
                attention = scores.masked_fill(~causal, float("-inf")).softmax(-1)
                distance = (torch.arange(length)[:, None] - torch.arange(length)[None, :]).double()
                rows["distance"].append((attention * distance).sum(-1))
                entropy = -torch.special.xlogy(attention, attention).sum(-1)
                rows["entropy"].append(entropy[:, 1:] / torch.arange(1, length).add(1).double().log())
                rows["sink"].append(attention[:, 1:, 0])
                free = attention[:, :, 1:] * causal[:, 1:]
                mass += free.sum((1, 2))
                weighted += (free * distance[:, 1:]).sum((1, 2))
                for d in range(length - 1):
                    histogram[:, d] += (free * (distance[:, 1:] == d)).sum((1, 2))
                rows["context"].append(capture.context[row][:, at].double().square().mean(-1))
                rows["y"].append(capture.y[row][at].double().square().mean(-1)[None])
                rows["x"].append(capture.x[row][at].double().T)
    means = {name: torch.cat(parts, dim=1).mean(1) for name, parts in rows.items()}
    return {**means, "free": weighted / mass, "histogram": histogram, "all_x": torch.cat(rows["x"], dim=1).T}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_to_dense_attention(make_teacher, make_batch, dtype):
    teacher = make_teacher(qk_norm=True, qkv_bias=True).to(dtype)
    batches = [make_batch(0), make_batch(1, lengths=[1, 12, 19])]
    batches[1]["document"][:, -19:] = -1  # padding
    sums = measure(teacher, [0, 2], batches, block_size=10)
    result = sums.finalise()
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}
    assert result.tokens == 2 * 32 + 2 * 13
    for layer in (0, 2):
        expected, got = dense(teacher, batches, layer), result.layers[layer]
        for name, value in {
            "distance": expected["distance"],
            "distance_without_sink": expected["free"],
            "entropy": expected["entropy"],
            "sink": expected["sink"],
            "context_rms": expected["context"].sqrt(),
            "output_rms": expected["y"][0].sqrt(),
            "mean_x": expected["x"],
            "median_distance": histogram_quantiles(expected["histogram"], [0.5])[:, 0],
            "recent": expected["histogram"][:, :4] / expected["histogram"].sum(1, keepdim=True),
        }.items():
            torch.testing.assert_close(
                getattr(got, name), value.float(), **tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
        values = expected["all_x"].float() @ got.w_star
        assert float(values.mean()) == pytest.approx(1.0, abs=1e-4)
        assert float(values.std(unbiased=False)) == pytest.approx(float(got.w_star_std), rel=1e-3, abs=1e-4)


def test_block_size_does_not_matter(teacher, make_batch):
    batches = [make_batch(0), make_batch(1, lengths=[12, 20])]
    reference = measure(teacher.double(), [1], batches, block_size=64).layers[1]
    for block_size in (1, 7, 32):
        other = measure(teacher, [1], batches, block_size=block_size).layers[1]
        for name, value in vars(reference).items():
            torch.testing.assert_close(getattr(other, name), value, rtol=1e-10, atol=1e-10)


def test_packed_documents_equal_separate_ones(teacher, make_batch):
    teacher.double()
    packed = make_batch(3, rows=1, lengths=[12, 20])
    separate = [{"tokens": packed["tokens"][:, :12]}, {"tokens": packed["tokens"][:, 12:]}]
    got = measure(teacher, [2], [packed]).layers[2]
    parts = [measure(teacher, [2], [batch]).layers[2] for batch in separate]
    for name, value in vars(got).items():
        first, second = (getattr(part, name) for part in parts)
        if name == "histogram":
            value, first = value[:, :20], torch.nn.functional.pad(first, (0, 8))
        torch.testing.assert_close(first + second, value, rtol=1e-9, atol=1e-9)
    del packed["document"]  # positions alone say the same
    again = measure(teacher, [2], [packed]).layers[2]
    torch.testing.assert_close(again.histogram, got.histogram)


def test_first_token_takes_no_part_in_entropy_and_sink(teacher, make_batch):
    batch = make_batch(0, lengths=[1] * 32)
    with pytest.raises(ValueError, match="no document of at least two tokens"):
        measure(teacher, [0], [batch]).finalise()


def test_quantiles_of_a_histogram():
    histogram = torch.tensor([[0.0, 0, 1, 1, 0], [4, 0, 0, 0, 0], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]]).double()
    got = histogram_quantiles(histogram, [0.5, 0.25])
    torch.testing.assert_close(got, torch.tensor([[2.5, 2.0], [0, 0], [1.5, 0.5], [0, 0]]).double())


def test_file_round_trip(teacher, make_batch, tmp_path):
    result = measure(teacher, [0, 2], [make_batch(0)]).finalise()
    artifact = Artifact(tmp_path / "statistics.safetensors", {"teacher": "abc", "sources": [1, 2]})
    result.save(artifact)
    assert artifact.current() and not Artifact(artifact.path, {"teacher": "abd"}).current()
    loaded = Statistics.load(tmp_path / "statistics.safetensors")
    assert loaded.tokens == result.tokens == 64
    for layer in (0, 2):
        for name, value in vars(result.layers[layer]).items():
            assert torch.equal(getattr(loaded.layers[layer], name), value)
    size = (tmp_path / "statistics.safetensors").stat().st_size
    assert size < 2 * 4 * 32 * 32, "the file holds w*, not the Gram matrix"


def test_files_that_are_something_else(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(FileNotFoundError, match="no statistics file"):
        Statistics.load(tmp_path / "missing.safetensors")
    save_file({"layers.0.attn.q_proj.weight": torch.zeros(2)}, str(tmp_path / "other.safetensors"))
    with pytest.raises(ValueError, match="not a statistics file"):
        Statistics.load(tmp_path / "other.safetensors")


def test_no_batches(teacher):
    with pytest.raises(ValueError, match="no calibration batch"):
        measure(teacher, [0], [])


def test_a_hybrid_has_no_attention_to_measure(teacher, make_batch):
    hybrid = build_decoder(teacher.spec, retained_layers=[0])
    with pytest.raises(ValueError, match="not attention"):
        measure(hybrid, [1], [make_batch()])
