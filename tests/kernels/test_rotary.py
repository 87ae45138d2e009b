"""The rotary contract: tables of every kind, what is refused, eager mode and compiled code."""

import pytest
import torch

from octavo.errors import ConfigError
from octavo.kernels import rotary
from octavo.kernels.rotary import rotate
from octavo.kernels.rotary.reference import rotate as reference


def operands(batches: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    angles = torch.randn(batches, 5, 6)
    return torch.randn(2, 5, 3, 12).bfloat16(), angles.cos(), angles.sin()


def hugging_face(x_BHTE: torch.Tensor, cos_BTE: torch.Tensor, sin_BTE: torch.Tensor) -> torch.Tensor:
    """`apply_rotary_pos_emb` of Hugging Face, for one tensor."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_BTE.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin_BTE.unsqueeze(1)


@pytest.mark.parametrize("batches", [1, 2])
def test_tables_of_half_and_of_full_width_and_of_each_sequence(batches):
    x, cos, sin = operands(batches)
    want = reference(x, cos, sin, False)
    full_cos, full_sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    assert torch.equal(rotate(x, cos, sin), want)
    assert torch.equal(rotate(x, full_cos, full_sin), want)
    if batches == 1:
        assert torch.equal(rotate(x, cos[0], sin[0]), want)
    theirs = hugging_face(x.float().transpose(1, 2), full_cos, full_sin)
    torch.testing.assert_close(rotate(x.float(), cos, sin).transpose(1, 2), theirs)


@pytest.mark.parametrize("batches", [1, 2])
def test_tables_of_full_width_need_not_repeat(batches):
    x, cos, sin = torch.randn(2, 5, 3, 12).double(), torch.randn(batches, 5, 12), torch.randn(batches, 5, 12)
    leaf, dy = x.clone().requires_grad_(), torch.randn_like(x)
    want = hugging_face(leaf.transpose(1, 2), cos.double(), sin.double()).transpose(1, 2)
    want.backward(dy)
    torch.testing.assert_close(rotate(x.float(), cos, sin), want.detach().float())
    torch.testing.assert_close(rotate(dy.float(), cos, sin, conjugate=True), leaf.grad.float())


def test_turning_back_undoes_it():
    x, cos, sin = operands()
    there = rotate(x.float(), cos, sin)
    torch.testing.assert_close(rotate(there, cos, sin, conjugate=True), x.float())


def test_the_result_lies_token_by_token():
    x, cos, sin = operands()
    y = rotate(x.transpose(1, 2).contiguous().transpose(1, 2), cos, sin)
    assert y.is_contiguous() and torch.equal(y, rotate(x, cos, sin))
    assert rotate(x[:0], cos, sin).shape == (0, 5, 3, 12)
    assert rotate(x[:, :0], cos[:, :0], sin[:, :0]).shape == (2, 0, 3, 12)


def test_shapes_that_do_not_fit():
    x, cos, sin = operands()
    with pytest.raises(ConfigError, match=r"takes \(B, T, H, E\) with E even, got shape \(2, 5, 36\)"):
        rotate(x.flatten(2), cos, sin)
    with pytest.raises(ConfigError, match="with E even"):
        rotate(x[..., :11], cos, sin)
    with pytest.raises(ConfigError, match=r"cos has shape \(1, 4, 6\), but x \(2, 5, 3, 12\) wants \(5, 6\)"):
        rotate(x, cos[:, :4], sin)
    with pytest.raises(ConfigError, match="cos has shape"):
        rotate(x, cos.expand(3, 5, 6), sin)
    with pytest.raises(ConfigError, match="sin has 4 columns for 12 channels: 6 or 12 are read"):
        rotate(x, cos, sin[..., :4])


def test_the_operator_is_well_formed():
    x, cos, sin = operands()
    torch.library.opcheck(
        torch.ops.octavo.rotate, rotary._rotate.encode(x, cos, sin, True), test_utils="test_faketensor"
    )


@pytest.mark.gpu
def test_a_gpu_gives_the_reference_bit_for_bit():
    x, cos, sin = (t.cuda() for t in operands(2))
    assert torch.equal(rotate(x, cos, sin).cpu(), rotate(x.cpu(), cos.cpu(), sin.cpu()))
