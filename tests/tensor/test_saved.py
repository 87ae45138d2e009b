"""FP8 weights in a state dict, as each writer of files takes them."""

import copy
import io

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import octavo
from octavo.errors import UnsupportedError
from octavo.tensor import FP8Tensor, SavedFP8Tensor


def build(seed=0, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64, bias=False)).to(dtype)
    octavo.convert(model, policy=octavo.Policy(weights="fp8", min_gain=0.0), tokens=64)
    assert sum(isinstance(p, FP8Tensor) for p in model.parameters()) == 2
    return model


def values(model):
    return {n: p.detach().dequantize() if isinstance(p, FP8Tensor) else p.detach() for n, p in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )


def same_codes(one, other):
    pairs = [(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True) if isinstance(p, FP8Tensor)]
    return all(torch.equal(p.codes.float(), q.codes.float()) and torch.equal(p.scale, q.scale) for p, q in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("write", ["save_file", "save_model", "bytes"])
def test_safetensors_hold_values(write, dtype, tmp_path):
    model = build(dtype=dtype)
    if write == "bytes":
        (tmp_path / "x").write_bytes(safetensors.torch.save(model.state_dict()))
    else:
        target = model if write == "save_model" else model.state_dict()
        getattr(safetensors.torch, write)(target, str(tmp_path / "x"))
    loaded = safetensors.torch.load_file(tmp_path / "x")
    assert same(loaded, values(model))
    other = build(1, dtype)
    safetensors.torch.load_model(other, str(tmp_path / "x"))
    assert same(values(other), values(model))


def test_pytorchs_checkpoints_hold_codes(tmp_path):
    model, other = build(), build(1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    assert same_codes(model, other), "it is read into the weights themselves"
    other.load_state_dict(state["model"])
    assert same_codes(model, other) and same(values(model), values(other))
    plain = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64, bias=False)).bfloat16()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    assert same(state["model"], values(model))


def test_pytorchs_files_and_copies_hold_codes():
    model, other = build(), build(1)
    state = model.state_dict()
    assert state["0.weight"].data_ptr()  # as after a file of safetensors
    with io.BytesIO() as file:
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
    assert type(loaded["0.weight"]) is FP8Tensor
    for given in (loaded, copy.deepcopy(state), state):
        other = build(1)
        other.load_state_dict(given)
        assert same_codes(model, other)
        other.load_state_dict(given, assign=True)
        assert {type(p.data) for p in (other[0].weight, other[2].weight)} == {FP8Tensor} and same_codes(model, other)


def test_each_has_memory_of_its_own_which_is_that_of_its_values():
    model = build()
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, SavedFP8Tensor)}
    assert len({tensor.data_ptr() for tensor in state.values()} - {0}) == 2
    for name, tensor in state.items():
        storage = tensor.untyped_storage()
        assert storage.data_ptr() == tensor.data_ptr() and storage.nbytes() == tensor.numel() * tensor.element_size()
        read = torch.empty(0, dtype=tensor.dtype).set_(storage).view(tensor.shape)
        assert torch.equal(read, values(model)[name]) and not tensor.is_pinned()


def test_distinct_weights_are_not_taken_as_tied():
    """As safetensors, accelerate and transformers ask. Parameters themselves have no address that could be compared:
    a kernel that was given that of the codes would read them as values."""
    model = build()
    state = model.state_dict()
    assert safetensors.torch._find_shared_tensors(state) == [{name} for name in state]
    modeling = pytest.importorskip("accelerate.utils.modeling", reason="needs accelerate")
    assert modeling.find_tied_parameters(model) == []
    assert len({modeling.id_tensor_storage(tensor) for tensor in state.values()}) == len(state)
    parameters = dict(model.named_parameters())
    assert parameters["0.weight"].data_ptr() == parameters["2.weight"].data_ptr() == 0
    for question in (modeling.id_tensor_storage, lambda x: safetensors.torch._find_shared_tensors({"x": x})):
        with pytest.raises(UnsupportedError, match=r"pass the state_dict\(\) of a converted model"):
            question(parameters["0.weight"])


def test_what_is_written_later_is_in_the_file():
    """A state dict shares memory with the weights, in both directions."""
    model = build()
    state = model.state_dict()
    safetensors.torch.save(state)
    with torch.no_grad():
        model[0].weight.copy_(torch.full((32, 64), 3.0))
        state["2.weight"].copy_(torch.full((64, 32), 5.0))
    loaded = safetensors.torch.load(safetensors.torch.save(state))
    assert (loaded["0.weight"] == 3).all() and (loaded["2.weight"] == 5).all()
    assert same(loaded, values(model))


def test_parameters_themselves_are_refused_with_the_way():
    with pytest.raises(UnsupportedError, match=r"state_dict\(\).*dequantize\(\).*to_tensors\(\)"):
        safetensors.torch.save(dict(build().named_parameters()))
    assert isinstance(build().state_dict(keep_vars=True)["0.weight"], nn.Parameter)
