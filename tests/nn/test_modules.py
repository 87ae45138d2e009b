from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo.nn.modules import blocks_of, full_name, has_hooks, hooked, input_of, unwrapped_name


def test_names_are_those_of_named_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert [full_name("0", "weight"), full_name("0", "bias")] == [name for name, _ in model.named_parameters()]
    assert full_name("", "weight") == next(name for name, _ in model[0].named_parameters())


def test_blocks_are_the_children_of_the_largest_list() -> None:
    experts = [nn.ModuleList(nn.Linear(8, 8) for _ in range(3)) for _ in range(2)]
    model = nn.ModuleDict({"few": nn.ModuleList([nn.Linear(2, 2)]), "layers": nn.ModuleList(experts)})
    assert blocks_of(model) == ["layers.0", "layers.1"] and blocks_of(nn.Linear(2, 2)) == []
    assert blocks_of(model["few"]) == ["0"]


def test_names_of_wrappers_are_left_out() -> None:
    assert unwrapped_name("_orig_mod.layers.0._checkpoint_wrapped_module.up") == "layers.0.up"


def test_the_input_of_a_call_is_its_first_argument() -> None:
    found, layer = [], nn.Linear(2, 2)
    with hooked([layer.register_forward_hook(lambda _, *given: found.append(input_of(*given[:2])), with_kwargs=True)]):
        layer(x := torch.ones(1, 2))
        layer(input=x)
    assert found[0] is x and found[1] is x and input_of((), {}) is None


def test_hooks_end_with_the_block_however_it_ends() -> None:
    model, calls = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []
    stays = model[1].register_forward_hook(lambda *_: calls.append("stays"))
    with pytest.raises(RuntimeError), hooked(m.register_forward_hook(lambda *_: calls.append("goes")) for m in model):
        assert all(map(has_hooks, model))
        model(torch.ones(1, 2))
        raise RuntimeError
    assert [has_hooks(module) for module in model] == [False, True]
    model(torch.ones(1, 2))
    assert calls == ["goes", "stays", "goes", "stays"]
    stays.remove()
