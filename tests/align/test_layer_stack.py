"""Mixers computed at once equal the mixers one by one, in float64."""

import pytest
import torch
from torch import nn

from tcal_components.align.stack import LayerStack
from tcal_components.modules.gated_delta_net import GatedDeltaNet

SIZES = {"embed_dim": 12, "num_heads": 3, "key_head_dim": 8, "value_head_dim": 4}


def make(count=3, **changes):
    torch.manual_seed(0)
    mixers = [GatedDeltaNet(**{**SIZES, **changes}).double() for _ in range(count)]
    for mixer in mixers:
        for parameter in mixer.parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return mixers


@pytest.mark.parametrize("conv_size", [0, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients(conv_size, packed):
    mixers, others = make(conv_size=conv_size), make(conv_size=conv_size)
    stack = LayerStack(others)
    x = torch.randn(3, 2, 20, 12, dtype=torch.float64)
    input_pos = torch.cat([torch.arange(7), torch.arange(13)]).expand(2, -1).clone() if packed else None
    want = torch.stack([mixer(row, input_pos=input_pos) for mixer, row in zip(mixers, x)])
    got = stack(x, input_pos=input_pos)
    torch.testing.assert_close(got, want)
    target = torch.randn_like(want)
    for output in (got, want):
        (output * target).sum().backward()
    names = [name for name, _ in mixers[0].named_parameters()]
    assert [name for name, _ in stack.named_parameters()] == names
    for name in names:
        expected = torch.stack([mixer.get_parameter(name).grad for mixer in mixers])
        torch.testing.assert_close(stack.get_parameter(name).grad, expected, msg=lambda m, n=name: f"{n}: {m}")


def test_the_mixers_are_views_of_the_stack():
    mixers = make()
    before = {name: value.clone() for name, value in mixers[1].named_parameters()}
    stack = LayerStack(mixers)
    assert all(torch.equal(value, before[name]) for name, value in mixers[1].named_parameters())
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(value, before[name] + 1.0) for name, value in mixers[1].named_parameters())
    with torch.no_grad():
        mixers[2].q_proj.weight.zero_()
    assert not stack.get_parameter("q_proj.weight")[2].any() and stack.get_parameter("q_proj.weight")[1].any()


def test_what_does_not_stack_is_refused():
    for mixers in (make(1) + make(1, key_head_dim=6), [nn.Linear(3, 3)], [make(1)[0], make(1)[0].float()]):
        assert not LayerStack.fits(mixers)
        with pytest.raises(ValueError, match="of one shape stack"):
            LayerStack(mixers)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu():
    sizes = {"embed_dim": 64, "num_heads": 2, "key_head_dim": 64, "value_head_dim": 64}
    mixers, others = ([mixer.float().cuda() for mixer in make(**sizes)] for _ in range(2))
    stack = LayerStack(others)
    x = torch.randn(3, 2, 192, 64, device="cuda")
    input_pos = torch.cat([torch.arange(70), torch.arange(122)]).expand(2, -1).clone().cuda()
    want = torch.stack([mixer(row, input_pos=input_pos) for mixer, row in zip(mixers, x)])
    got = stack(x, input_pos=input_pos)
    assert (got - want).norm() < 1e-2 * want.norm()
    for output in (got, want):
        output.square().sum().backward()
    for name, parameter in stack.named_parameters():
        expected = torch.stack([mixer.get_parameter(name).grad for mixer in mixers])
        assert (parameter.grad - expected).norm() < 2e-2 * expected.norm(), name
