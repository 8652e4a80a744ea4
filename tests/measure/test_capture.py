import pytest
import torch

from tcal_components.measure.capture import capture_attention, capture_batch, run_hidden, student_precision
from tcal_components.models._decoder import build_decoder


def test_captured_tensors_are_those_of_the_layer(teacher, make_batch):
    batch = make_batch(lengths=[12, 20])
    seen = {}
    capture_batch(teacher, [2, 0], batch, lambda capture: seen.__setitem__(capture.layer, capture))
    assert list(seen) == [0, 2]
    attention, capture = teacher.layers[2].attn, seen[2]
    assert capture.q.shape == capture.k.shape == capture.context.shape == (2, 4, 32, 8)
    expected = attention(capture.x, capture.x, mask=batch["mask"], input_pos=batch["input_pos"])
    torch.testing.assert_close(capture.y, expected)
    torch.testing.assert_close(attention.output_proj(capture.context.transpose(1, 2).flatten(2)), capture.y)
    rotated = attention.pos_embeddings(attention.k_proj(capture.x).view(2, 32, 2, 8), input_pos=batch["input_pos"])
    torch.testing.assert_close(capture.k, rotated.repeat_interleave(2, dim=2).transpose(1, 2))
    assert capture.input_pos is batch["input_pos"] and capture.mask is batch["mask"]


def test_everything_is_restored_also_after_an_exception(teacher, make_batch):
    originals = [layer.attn._attention_call for layer in teacher.layers]
    teacher.train()

    def fail(capture):
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        capture_batch(teacher, [0, 1], make_batch(), fail)
    assert [layer.attn._attention_call for layer in teacher.layers] == originals
    assert not any(layer.attn._forward_hooks for layer in teacher.layers)
    assert teacher.training


def test_without_qkv_any_mixer_is_captured(teacher, make_batch):
    hybrid = build_decoder(teacher.spec, retained_layers=[0])
    seen = []
    capture_batch(hybrid, [0, 1], make_batch(), seen.append, with_qkv=False)
    assert [capture.layer for capture in seen] == [0, 1]
    assert all(capture.q is None and capture.context is None for capture in seen)
    with pytest.raises(ValueError, match="layer 1 holds GatedDeltaNet"):
        capture_batch(hybrid, [0, 1], make_batch(), seen.append)
    assert not hybrid.layers[0].attn._forward_hooks


def test_layer_out_of_range(teacher):
    with pytest.raises(ValueError, match="layer 3 .* 0 to 2"), capture_attention(teacher, [3], print):
        pass


def test_run_hidden_equals_the_forward_up_to_the_head(teacher, make_batch):
    batch = make_batch(lengths=[12, 20])
    hidden = run_hidden(teacher, {**batch, "labels": batch["tokens"]})
    logits = teacher(batch["tokens"], mask=batch["mask"], input_pos=batch["input_pos"])
    torch.testing.assert_close(teacher.output(hidden), logits)


def test_callback_runs_outside_of_autocast(teacher, make_batch):
    def check(capture):
        assert capture.y.dtype == torch.bfloat16 and not torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        with student_precision(capture.y):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16

    capture_batch(teacher, [0, 2], make_batch(), check, autocast_dtype=torch.bfloat16)
