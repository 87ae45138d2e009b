"""FP8Tensor stores what `quantize` gave, moves as a tensor does, and never leaves FP8 silently."""

import copy
import io

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from octavo.errors import CheckpointError, UnsupportedError
from octavo.numerics import PER_ROW, dequantize, quantize
from octavo.tensor import FP8Tensor, fp8_tensor, implements

GRANULARITIES = ["tensor", "row", "1x128", "128x128"]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(40, 200)


def same(a: FP8Tensor, b: FP8Tensor) -> bool:
    return (
        torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
        and torch.equal(a.scale, b.scale)
        and a.granularity == b.granularity
        and a.dtype == b.dtype
    )


def test_values_are_those_of_quantize(x):
    stored = FP8Tensor.from_tensor(x)
    assert torch.equal(stored.dequantize(), dequantize(quantize(x, granularity=PER_ROW)))
    assert stored.shape == x.shape and stored.dtype == x.dtype


def test_takes_one_byte_an_element(x):
    stored = FP8Tensor.from_tensor(x)
    assert stored.codes.element_size() == 1
    assert stored.scale.numel() == x.shape[0]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_clone_detach_and_move_keep_codes_and_scales(x, granularity):
    stored = FP8Tensor.from_tensor(x, granularity=granularity)
    for other in (stored.clone(), stored.detach(), stored.to("cpu"), stored.t().t()):
        assert isinstance(other, FP8Tensor)
        assert same(other, stored)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_transpose_rounds_nothing(x, granularity):
    stored = FP8Tensor.from_tensor(x, granularity=granularity)
    assert torch.equal(stored.t().dequantize(), stored.dequantize().t())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_product_is_that_of_the_values(x, granularity):
    w = torch.randn(24, 200)
    a, b = (FP8Tensor.from_tensor(m, granularity=granularity) for m in (x, w))
    exact = a.dequantize().double() @ b.dequantize().double().t()
    # FP32 sums of 200 products: a few units in the last place of the largest partial sum
    assert torch.allclose((a @ b.t()).double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


def test_product_with_a_plain_tensor_is_refused(x):
    with pytest.raises(UnsupportedError, match="quantise the other operand"):
        FP8Tensor.from_tensor(x) @ torch.randn(200, 3)


def test_any_other_operation_is_refused_by_name(x):
    with pytest.raises(UnsupportedError, match=r"aten\.add.*dequantize"):
        FP8Tensor.from_tensor(x) + 1


def test_another_dtype_is_another_name_for_the_same_codes(x):
    stored = FP8Tensor.from_tensor(x)
    other = stored.to(torch.bfloat16)
    assert isinstance(other, FP8Tensor) and other.dtype == other.dequantize().dtype == torch.bfloat16
    assert torch.equal(other.codes.view(torch.uint8), stored.codes.view(torch.uint8))
    assert torch.equal(other.float().dequantize(), stored.dequantize())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_plain_tensors_round_trip(x, granularity):
    stored = FP8Tensor.from_tensor(x, granularity=granularity)
    assert same(FP8Tensor.from_tensors(stored.to_tensors(), granularity, x.dtype), stored)


def test_tensors_of_another_shape_are_refused(x):
    tensors = FP8Tensor.from_tensor(x).to_tensors()
    with pytest.raises(CheckpointError, match=r"scales of shape \(1, 1\), found \(40, 1\)"):
        FP8Tensor.from_tensors(tensors, "tensor", x.dtype)
    with pytest.raises(CheckpointError, match=r"found \['codes'\]"):
        FP8Tensor.from_tensors({"codes": tensors["codes"]}, "row", x.dtype)


def test_goes_through_compiled_code(x):
    w = torch.randn(24, 200)
    a, b = FP8Tensor.from_tensor(x), FP8Tensor.from_tensor(w)
    compiled = torch.compile(lambda left, right: left @ right.t(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), a @ b.t())


def test_repr_names_what_it_is(x):
    assert (
        repr(FP8Tensor.from_tensor(x)) == "FP8Tensor(40 x 200, torch.float8_e4m3fn, scale per row, from torch.float32)"
    )


# A parameter of a module.


@pytest.fixture
def layer(x) -> nn.Linear:
    made = nn.Linear(200, 40, bias=False).bfloat16()
    made.weight = nn.Parameter(FP8Tensor.from_tensor(x.bfloat16()))
    return made


def test_it_is_a_parameter(layer):
    assert isinstance(layer.weight, nn.Parameter) and isinstance(layer.weight, FP8Tensor)
    assert layer.weight.requires_grad and layer.weight.is_leaf
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert layer.weight.nbytes == 40 * 200 + 40 * 4


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_copy_of_a_module_has_codes_of_its_own(layer, requires_grad):
    layer.weight.requires_grad_(requires_grad)
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, nn.Parameter) and twin.weight.requires_grad == requires_grad
    assert same(twin.weight, layer.weight)
    assert twin.weight.codes.data_ptr() != layer.weight.codes.data_ptr()


def test_a_module_moves_and_changes_its_dtype_and_keeps_the_parameter(layer):
    weight, before = layer.weight, layer.weight.detach().clone()
    layer.weight.grad = torch.ones(40, 200, dtype=torch.bfloat16)
    layer.to("cpu", torch.float32)
    assert layer.weight is weight and isinstance(weight, FP8Tensor)
    assert weight.dtype == weight.grad.dtype == torch.float32
    assert torch.equal(weight.dequantize(), before.dequantize(torch.float32))
    layer.to("meta")
    assert weight.codes.is_meta and weight.scale.is_meta
    layer.to_empty(device="cpu")
    assert weight.codes.device.type == "cpu" and weight.shape == (40, 200)


def test_a_parameter_with_a_hook_on_its_gradient_moves_too(layer):
    seen = []
    layer.weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad))
    layer.weight.dequantize().sum().backward()
    layer.to(torch.float32)
    assert len(seen) == 1 and layer.weight.dtype == layer.weight.grad.dtype == torch.float32


def test_a_view_of_another_shape_is_refused(x):
    with pytest.raises(UnsupportedError, match=r"view.* to the shape \(200, 40\) is not defined"):
        FP8Tensor.from_tensor(x).view(200, 40)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_copying_from_one_of_its_kind_copies_codes(x, granularity):
    a = nn.Parameter(FP8Tensor.from_tensor(x, granularity=granularity))
    b = FP8Tensor.from_tensor(torch.randn_like(x), granularity=granularity)
    version, codes = a._version, a.codes
    with torch.no_grad():
        a.copy_(b)
    assert same(a, b) and a.codes is codes and a._version > version


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scaling", ["power_of_two", "float32"])
def test_copying_plain_values_quantises_them(x, granularity, scaling):
    a = FP8Tensor.from_tensor(torch.randn_like(x), "e5m2", granularity, scaling)
    a.copy_(x)
    assert same(a, FP8Tensor.from_tensor(x, "e5m2", granularity, scaling))


def test_copying_from_another_kind_rounds_its_values(x):
    a, b = FP8Tensor.from_tensor(torch.randn_like(x)), FP8Tensor.from_tensor(x, "e5m2", "tensor")
    a.copy_(b)
    assert same(a, FP8Tensor.from_tensor(b.dequantize()))


def test_copying_into_a_plain_tensor_gives_values(x):
    stored, plain = FP8Tensor.from_tensor(x), torch.empty(40, 200, dtype=torch.bfloat16)
    plain.copy_(stored)
    assert torch.equal(plain, stored.dequantize(torch.bfloat16))


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_an_empty_one(shape):
    stored = nn.Parameter(FP8Tensor.from_tensor(torch.zeros(shape)))
    assert stored.dequantize().shape == shape
    assert copy.deepcopy(stored).shape == shape
    with torch.no_grad():
        stored.copy_(torch.zeros(shape))


@pytest.mark.parametrize("there", ["fp8", "plain"])
@pytest.mark.parametrize("here", ["fp8", "plain"])
def test_state_dicts_load_into_modules_of_either_kind(layer, there, here):
    saved, other = copy.deepcopy(layer), copy.deepcopy(layer)
    with torch.no_grad():
        saved.weight.copy_(torch.randn(40, 200))
    values = saved.weight.detach().dequantize()
    if there == "plain":
        saved.weight = nn.Parameter(values)
    if here == "plain":
        other.weight = nn.Parameter(torch.zeros_like(values))
    kind = type(other.weight)
    other.load_state_dict(saved.state_dict())
    found = other.weight.detach()
    assert type(other.weight) is kind
    assert torch.equal(found.dequantize() if here == "fp8" else found, values)


def test_a_file_of_torch_holds_it_without_pickle(layer):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert isinstance(loaded, FP8Tensor) and same(loaded, layer.weight)
    layer.load_state_dict({"weight": loaded}, assign=True)
    assert isinstance(layer.weight, nn.Parameter)


def test_safetensors_hold_its_parts(layer):
    loaded = load(save(layer.weight.detach().to_tensors()))
    assert same(FP8Tensor.from_tensors(loaded, "row", torch.bfloat16), layer.weight)


def test_the_gradient_of_its_values_is_a_plain_one_of_its_own(layer):
    layer.weight.dequantize(torch.float64).square().sum().backward()
    expected = 2 * layer.weight.detach().dequantize(torch.float64)
    assert type(layer.weight.grad) is torch.Tensor
    assert torch.equal(layer.weight.grad, expected.bfloat16())


def test_gradients_add_up_and_can_be_clipped(layer):
    for _ in range(2):
        layer.weight.dequantize(torch.float32).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((40, 200), 2.0, dtype=torch.bfloat16))
    nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    assert float(layer.weight.grad.float().norm()) == pytest.approx(1.0, rel=1e-2)  # BF16 gradients


def test_pytorch_s_own_layer_and_optimizer_refuse_it_by_name(layer):
    with pytest.raises(UnsupportedError, match=r"quantise the other operand|aten\.\w+"):
        layer(torch.randn(3, 200).bfloat16())
    layer.weight.grad = torch.ones(40, 200, dtype=torch.bfloat16)
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        with pytest.raises(UnsupportedError, match=r"aten\.\w+.*dequantize.*octavo\.optim can"):
            optimizer(layer.parameters(), lr=0.1).step()


def test_the_values_are_there_in_compiled_code(x):
    stored = FP8Tensor.from_tensor(x)
    compiled = torch.compile(lambda w: w.dequantize(torch.bfloat16) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(stored), stored.dequantize(torch.bfloat16) * 2)


def test_an_operator_says_how_it_reads_one(x):
    with pytest.raises(UnsupportedError, match=r"aten\.neg"):
        -FP8Tensor.from_tensor(x)
    implements(torch.ops.aten.neg.default)(lambda w: -w.dequantize())
    try:
        assert torch.equal(-FP8Tensor.from_tensor(x), -FP8Tensor.from_tensor(x).dequantize())
    finally:
        fp8_tensor._OPERATIONS.pop(torch.ops.aten.neg.default)


def test_data_is_what_was_assigned():
    one, other = (FP8Tensor.from_tensor(torch.randn(4, 32)) for _ in range(2))
    weight = nn.Parameter(one)
    weight.data = other
    assert (
        torch.equal(weight.dequantize(), other.dequantize()) and weight.data.codes.data_ptr() == other.codes.data_ptr()
    )
    assert not weight.data.requires_grad and weight.requires_grad and weight.is_leaf
    for value in (torch.randn(4, 32), FP8Tensor.from_tensor(torch.randn(8, 32))):
        with pytest.raises(UnsupportedError, match=r"Use \.copy_"):
            weight.data = value
    for value in (other.to(torch.bfloat16), other.to("meta")):
        with pytest.raises(UnsupportedError, match=r"on cpu, got .* on .*\. .* module\.to\(dtype\)"):
            weight.data = value
    assert torch.equal(weight.dequantize(), other.dequantize())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.complex64])
def test_it_represents_real_numbers_only(x, dtype):
    with pytest.raises(UnsupportedError, match=rf"cannot represent {dtype}.*dequantize\(\)\.to\({dtype}\)"):
        FP8Tensor.from_tensor(x).to(dtype)


def test_processes_share_codes_and_scales(layer):
    assert not layer.weight.is_shared()
    before = layer.weight.detach().clone()
    weight = layer.share_memory().weight
    assert weight is layer.weight and weight.is_shared() and same(weight, before)
    assert weight.codes.is_shared() and weight.scale.is_shared()
