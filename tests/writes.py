"""Ways to write a weight, and whether the next forward sees it."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from alone import join_alone
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import octavo
from octavo import Policy
from octavo.nn import Linear
from octavo.numerics import sqnr_db
from octavo.tensor import FP8Tensor


class Net(nn.Module):
    """Two layers that share an input, and a separate layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(32, 48), nn.Linear(32, 16, bias=False), nn.Linear(48, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for x (..., 32)."""
        q = self.q(x)
        y: Tensor = self.out(q * self.k(x).mean(-1, keepdim=True))
        return y


Way = Callable[[nn.Module], Iterator[Any]]
"""Writes all weights of a model, and yields after each write."""


def net(recipe: str, values: nn.Module | None = None) -> nn.Module:
    """Return a new converted model with these values, or random ones."""
    torch.manual_seed(7)
    model = Net()
    if values is not None:
        for p, value in zip(model.parameters(), values.parameters(), strict=True):
            p.data = value.detach().clone()
    octavo.convert(model, recipe, policy=Policy(min_gain=0.0, min_features=16))
    assert all(type(layer) is Linear for layer in model.children())
    return model


def results(model: Any, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the output and all gradients of one step."""
    for p in model.parameters():
        p.grad = None
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def _with_gradients(model: Any) -> list[Any]:
    for p in model.parameters():
        p.grad = torch.randn_like(p) / 8
    return list(model.parameters())


def _by_optimizer(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Way:
    def way(model: Any) -> Iterator[Any]:
        optimizer = make(model.parameters(), lr=0.1, **options)
        for _ in range(2):
            _with_gradients(model)
            yield optimizer.step()

    return way


def _by_fused_function(model: Any) -> Iterator[Any]:
    ps = [p.detach() for p in _with_gradients(model)]
    grads, (ms, vs) = [p.grad for p in model.parameters()], ([torch.zeros_like(p) for p in ps] for _ in range(2))
    steps = [torch.ones(()) for _ in ps]
    moments = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "amsgrad": False, "maximize": False} | moments
    yield torch._fused_adamw_(ps, grads, ms, vs, [], steps, **options)


@torch.no_grad()
def _copied(model: Any) -> Iterator[Any]:
    yield [p.copy_(torch.randn_like(p)) for p in model.parameters()]


@torch.no_grad()
def _one_element(model: Any) -> Iterator[Any]:
    for p in model.parameters():
        p[(3,) * p.dim()] = 100.0
    yield


def _data_assigned(model: Any) -> Iterator[Any]:
    for p in model.parameters():
        p.data = torch.randn_like(p)
    yield


def _data_multiplied(model: Any) -> Iterator[Any]:
    yield [p.data.mul_(3.0) for p in model.parameters()]


def _data_stepped(model: Any) -> Iterator[Any]:
    for p in _with_gradients(model):
        p.data -= 0.5 * p.grad
    yield


def _data_swapped_in_and_out(model: Any) -> Iterator[Any]:
    others = [torch.randn_like(p) for p in model.parameters()]
    for _ in range(2):
        for i, p in enumerate(model.parameters()):
            p.data, others[i] = others[i], p.data
        yield


def _averages_swapped_in_and_out(model: Any) -> Iterator[Any]:
    averages, kept = copy.deepcopy(model), [p.detach().clone() for p in model.parameters()]
    for average in averages.parameters():
        average.data.mul_(0.9)
    for p, average in zip(model.parameters(), averages.parameters(), strict=True):
        p.data.copy_(average.data)
    yield
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data.copy_(value)
    yield


def _loaded(assign: bool) -> Way:
    def way(model: Any) -> Iterator[Any]:
        for _ in range(2):
            state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
            yield model.load_state_dict(state, assign=assign)

    return way


def _numpy_alias(model: Any) -> Iterator[Any]:
    arrays = [p.detach().numpy() for p in model.parameters()]
    for _ in range(2):
        for array in arrays:
            array *= 3
        yield


def _shared_memory(model: Any) -> Iterator[Any]:
    model.share_memory()
    yield
    for p in model.parameters():  # as in another process
        handle, size = p.untyped_storage()._share_fd_cpu_()
        with mmap.mmap(handle, size) as memory:
            values = torch.frombuffer(memory, dtype=torch.float32)
            values.mul_(3.0)
            del values
    yield


def _clamped_after_a_step(model: Any) -> Iterator[Any]:
    optimizer = torch.optim.SGD(_with_gradients(model), lr=0.1)
    optimizer.step()
    for p in model.parameters():
        p.data.clamp_(-0.05, 0.05)
    yield


def _one_vector_twice(model: Any) -> Iterator[Any]:
    vector = parameters_to_vector(model.parameters()).detach()
    for _ in range(2):
        vector.mul_(3.0)
        vector_to_parameters(vector, model.parameters())
        yield
    yield vector.mul_(3.0)  # the parameters are views of it


def _two_parameters_on_one_data(model: Any) -> Iterator[Any]:
    twins = [nn.Parameter(p.data) for p in model.parameters()]
    for twin in twins:
        twin.grad = torch.randn_like(twin)
    yield torch.optim.AdamW(twins, lr=0.1, fused=True).step()


def _unfrozen_stepped_and_frozen(model: Any) -> Iterator[Any]:
    model.requires_grad_(False)
    yield
    model.requires_grad_(True)
    _with_gradients(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.requires_grad_(False)
    yield


def _moved_to_another_dtype_and_back(model: Any) -> Iterator[Any]:
    yield model.bfloat16().float()


def _other_parameters(model: Any) -> Iterator[Any]:
    for layer in model.children():
        layer.weight = nn.Parameter(torch.randn_like(layer.weight))
    yield


def _adapters_merged(model: Any) -> Iterator[Any]:
    """Merge adapters, as LoRA does for an evaluation, and remove them again."""
    layers = list(model.children())
    deltas = [torch.randn(w.shape[0], 4) @ torch.randn(4, w.shape[1]) for w in (layer.weight for layer in layers)]
    for sign in (1, -1):
        for layer, delta in zip(layers, deltas, strict=True):
            layer.weight.data += sign * delta
        yield


@torch.no_grad()
def _target_network(model: Any) -> Iterator[Any]:
    online = copy.deepcopy(model)
    for _ in range(2):
        for p, q in zip(model.parameters(), online.parameters(), strict=True):
            q.mul_(3.0)
            p.data.mul_(0.9).add_(q.data, alpha=0.1)
        yield
    yield [p.data.lerp_(q.data, 0.5) for p, q in zip(model.parameters(), online.parameters(), strict=True)]


class _PlainOptimizer:
    """Not a subclass of PyTorch's optimizer: no hook sees its steps."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def step(self) -> Any:
        for p in self.parameters:
            p.data.add_(p.grad.data, alpha=-0.1)


def _plain_optimizer(model: Any) -> Iterator[Any]:
    optimizer = _PlainOptimizer(_with_gradients(model))
    for _ in range(2):
        yield optimizer.step()


def _averaged_over_ranks(model: Any) -> Iterator[Any]:
    join_alone(4)  # all_reduce multiplies by 4
    try:
        for p in model.parameters():
            dist.all_reduce(p.data)
        yield
    finally:
        dist.destroy_process_group()


def _flat_view(model: Any) -> Iterator[Any]:
    yield [p.data.view(-1).copy_(torch.randn(p.numel())) for p in model.parameters()]


def _by_foreach(model: Any) -> Iterator[Any]:
    yield torch._foreach_mul_([p.data for p in model.parameters()], 3.0)
    values = [torch.randn_like(p) for p in model.parameters()]
    torch._foreach_copy_([p.data for p in model.parameters()], values)
    yield


def _tensors_swapped(model: Any) -> Iterator[Any]:
    for name, p in list(model.named_parameters()):
        torch.utils.swap_tensors(p, nn.Parameter(torch.randn_like(p)))
        assert model.get_parameter(name) is p
    yield


def _storage_written(model: Any) -> Iterator[Any]:
    for p in model.parameters():
        p.untyped_storage().copy_(torch.randn_like(p).untyped_storage())
    yield


def _storage_exchanged(model: Any) -> Iterator[Any]:
    for p in model.parameters():
        with torch.no_grad():
            p.set_(torch.randn_like(p))
    yield


def _dlpack_alias(model: Any) -> Iterator[Any]:
    aliases = [torch.utils.dlpack.from_dlpack(p.detach()) for p in model.parameters()]
    for _ in range(2):
        yield [alias.mul_(3.0) for alias in aliases]


def _written_in_inference_mode(model: Any) -> Iterator[Any]:
    with torch.inference_mode():
        for p in model.parameters():
            p.data.mul_(3.0)
    yield


def _reset(model: Any) -> Iterator[Any]:
    yield [layer.reset_parameters() for layer in model.children()]
    yield [nn.init.orthogonal_(layer.weight) for layer in model.children()]
    yield [nn.init.constant_(layer.weight.data, 0.1) for layer in model.children()]


def _pruned(model: Any) -> Iterator[Any]:
    for p in model.parameters():
        p.data[p.abs() < p.abs().median()] = 0
        p.data.masked_fill_(torch.rand_like(p) < 0.1, 1.0)
    yield


def _normalised(model: Any) -> Iterator[Any]:
    for layer in model.children():
        layer.weight.data = nn.functional.normalize(layer.weight.data, dim=1)
        yield layer.weight.data.div_(layer.weight.data.norm())


def _one_row_of_a_view(model: Any) -> Iterator[Any]:
    for layer in model.children():
        layer.weight.data[0].t()[:3].fill_(50.0)
    yield


def _weights_averaged(model: Any) -> Iterator[Any]:
    average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model))
    for p in average.parameters():
        p.data.mul_(2.0)
    yield model.load_state_dict(average.module.state_dict())


def _from_a_buffer(model: Any) -> Iterator[Any]:
    """Parameters are views of one buffer, as in flat optimizers."""
    buffer, start = parameters_to_vector(model.parameters()).detach().clone(), 0
    for p in model.parameters():
        p.data = buffer[start : start + p.numel()].view_as(p)
        start += p.numel()
    for _ in range(2):
        yield buffer.mul_(3.0)
    yield buffer.copy_(torch.randn_like(buffer))


def _in_a_hook_of_the_gradient(model: Any) -> Iterator[Any]:
    def stepped(p: Any) -> None:
        p.data.add_(p.grad, alpha=-0.1)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(stepped)
    model(torch.ones(5, 32)).square().sum().backward()
    for p in model.parameters():
        p._post_accumulate_grad_hooks.clear()
    yield


WAYS: dict[str, Way] = {
    "SGD": _by_optimizer(torch.optim.SGD, foreach=False),
    "SGD foreach": _by_optimizer(torch.optim.SGD, foreach=True),
    "SGD fused": _by_optimizer(torch.optim.SGD, fused=True),
    "AdamW": _by_optimizer(torch.optim.AdamW, foreach=False),
    "AdamW foreach": _by_optimizer(torch.optim.AdamW, foreach=True),
    "AdamW fused": _by_optimizer(torch.optim.AdamW, fused=True),
    "Octavo's AdamW": _by_optimizer(octavo.optim.AdamW),
    "_fused_adamw_": _by_fused_function,
    "copy_": _copied,
    "one element": _one_element,
    "data =": _data_assigned,
    "data.mul_": _data_multiplied,
    "data -=": _data_stepped,
    "data swapped": _data_swapped_in_and_out,
    "EMA swapped": _averages_swapped_in_and_out,
    "load_state_dict": _loaded(assign=False),
    "load_state_dict, assign": _loaded(assign=True),
    "numpy alias": _numpy_alias,
    "shared memory": _shared_memory,
    "clamp after step": _clamped_after_a_step,
    "vector_to_parameters": _one_vector_twice,
    "two parameters": _two_parameters_on_one_data,
    "unfreeze, step, freeze": _unfrozen_stepped_and_frozen,
    "dtypes": _moved_to_another_dtype_and_back,
    "other parameters": _other_parameters,
}
EAGER_WAYS: dict[str, Way] = {
    "LoRA merged": _adapters_merged,
    "target network": _target_network,
    "plain optimizer": _plain_optimizer,
    "all_reduce(data)": _averaged_over_ranks,
    "flat view": _flat_view,
    "foreach on data": _by_foreach,
    "swap_tensors": _tensors_swapped,
    "storage": _storage_written,
    "set_": _storage_exchanged,
    "DLPack alias": _dlpack_alias,
    "inference mode": _written_in_inference_mode,
    "init": _reset,
    "pruned": _pruned,
    "normalised": _normalised,
    "a view": _one_row_of_a_view,
    "SWA": _weights_averaged,
    "flat buffer": _from_a_buffer,
    "step in backward": _in_a_hook_of_the_gradient,
    "Adam": _by_optimizer(torch.optim.Adam, fused=True),
    "Adagrad": _by_optimizer(torch.optim.Adagrad, fused=True),
    "RMSprop": _by_optimizer(torch.optim.RMSprop, foreach=True),
    "NAdam": _by_optimizer(torch.optim.NAdam),
    "AdamW, amsgrad": _by_optimizer(torch.optim.AdamW, foreach=True, maximize=True, amsgrad=True),
    "Octavo's Adam": _by_optimizer(octavo.optim.Adam),
    "Octavo's Lion": _by_optimizer(octavo.optim.Lion),
    "Octavo's AdamW, one byte": _by_optimizer(octavo.optim.AdamW, states="fp8"),
}
"""Eager only. To a graph a weight is an input like any other: `WAYS` show that compiled code reads it."""


def fp8_net() -> nn.Module:
    """Return a new converted model with FP8 weights."""
    torch.manual_seed(7)
    model = Net()
    octavo.convert(model, "folded", policy=Policy(min_gain=0.0, min_features=16, weights="fp8"))
    assert all(isinstance(layer.weight, FP8Tensor) for layer in model.children())
    return model


def _other_codes(p: Any) -> FP8Tensor:
    return FP8Tensor.from_tensor(torch.randn(p.shape), "e4m3", "row", "power_of_two")


FP8_WAYS: dict[str, Callable[[Any], Any]] = {
    "codes": lambda p: p.codes.copy_(_other_codes(p).codes),
    "codes, a view": lambda p: p.codes.view(torch.uint8)[0].fill_(0x38),
    "scale": lambda p: p.scale.mul_(4.0),
    "codes by NumPy": lambda p: p.codes.view(torch.uint8).numpy().__ixor__(0x80),
    "copy_": lambda p: p.copy_(torch.randn(p.shape)),
    "copy_ of codes": lambda p: p.copy_(_other_codes(p)),
    "data.copy_": lambda p: p.data.copy_(torch.randn(p.shape)),
    "data =": lambda p: setattr(p, "data", _other_codes(p)),
    "swap_tensors": lambda p: torch.utils.swap_tensors(p, nn.Parameter(_other_codes(p))),
}


@torch.no_grad()
def _fp8_way(name: str, model: Any) -> None:
    if name == "Octavo's AdamW":
        optimizer = octavo.optim.AdamW(model.parameters(), lr=0.1)
        for p in model.parameters():
            p.grad = torch.randn(p.shape)
        optimizer.step()
    elif name == "load_state_dict":
        model.load_state_dict({key: torch.randn(value.shape) for key, value in model.state_dict().items()})
    else:
        for layer in model.children():
            FP8_WAYS[name](layer.weight)


ALL_FP8_WAYS = (*FP8_WAYS, "Octavo's AdamW", "load_state_dict")


def fault_of(way: str, recipe: str) -> str:
    """Return the fault of a step after a write, compared with a new model of the same values; empty if none."""
    model = net(recipe)
    return fault_in(way, recipe, model, model)


def fault_in(way: str, recipe: str, model: nn.Module, call: Callable[[Tensor], Tensor]) -> str:
    """As `fault_of`, for an existing model: `call` computes with it, for example compiled."""
    before, changed = results(model, call)[0], False
    for _ in (WAYS | EAGER_WAYS)[way](model):
        found = results(model, call)
        fresh = net(recipe, values=model)
        for p, twin in zip(model.parameters(), fresh.parameters(), strict=True):
            twin.requires_grad_(p.requires_grad)
        if not all(torch.equal(a, b) for a, b in zip(found, results(fresh, fresh), strict=True)):
            return "computes with old codes"
        changed = changed or not torch.equal(found[0], before)
    return "" if changed else "nothing was written"


def fault_of_fp8(way: str) -> str:
    """As `fault_of`, for a model with FP8 weights."""
    model = fp8_net()
    return fault_in_fp8(way, model, model)


def fault_in_fp8(way: str, model: nn.Module, call: Callable[[Tensor], Tensor]) -> str:
    """As `fault_in`, for a model with FP8 weights."""
    before = results(model, call)[0]
    _fp8_way(way, model)
    found, fresh = results(model, call), copy.deepcopy(model)
    if torch.equal(found[0], before):
        return "nothing was written"
    if not all(torch.equal(a, b) for a, b in zip(found, results(fresh, fresh), strict=True)):
        return "computes with old codes"
    octavo.revert(plain := copy.deepcopy(model))
    of_new_values = sqnr_db(results(plain, plain)[0], found[0]) > 20
    return "" if of_new_values else "computes with old values"
