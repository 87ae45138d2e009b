"""Names in state dicts: of moments, which PyTorch's optimizers must not misread, and of parameters, in any order."""

import copy
import io
import json

import pytest
import torch
from network import backward, model
from torch import nn

from octavo.errors import CheckpointError
from octavo.optim import TIERS, AdamW, Lion, Muon, convert, flatten, keep_none, unflatten


def fp8(values):
    return torch.tensor(values, dtype=torch.uint8).view(torch.float8_e4m3fn)


def of_version_1():
    """A state dict as octavo 0.x wrote it, whose codes have the names of moments."""
    codes = {
        "step": torch.tensor(2.0),
        "remainder": torch.tensor([[57, -47, 55], [-45, 48, -3]], dtype=torch.int8),
        "exp_avg": fp8([[105, 113, 249], [81, 121, 217]]),
        "exp_avg_scale": torch.tensor([[119], [120]], dtype=torch.uint8),
        "exp_avg_sq": torch.tensor([[210, 226, 242], [162, 242, 178]], dtype=torch.uint8),
        "exp_avg_sq_scale": torch.tensor([[117], [118]], dtype=torch.uint8),
    }
    moments = {
        "step": torch.tensor(2.0),
        "exp_avg": torch.tensor([0.28999999165534973, -0.8700000047683716]),
        "exp_avg_sq": torch.tensor([0.004999000113457441, 0.04499100148677826]),
    }
    group = {
        "keeps": True, "param_names": ["w", "b"], "lr": 0.125, "betas": (0.9, 0.999), "eps": 1e-08,
        "weight_decay": 0.01, "maximize": False, "clip": None, "states": "fp8", "gradients": "wide", "params": [0, 1],
    }  # fmt: skip
    settings = {"seed": 0, "rounding": "nearest", "rule": "adamw"}
    return {"state": {0: codes, 1: moments}, "param_groups": [group], **settings}


def parameters_of_version_1():
    w = torch.tensor([[0.251953125, -0.49609375, 1.2421875], [1.75, -0.12158203125, -1.25]], dtype=torch.bfloat16)
    return nn.Parameter(w), nn.Parameter(torch.tensor([0.7520100474357605, -1.749511480331421]))


def optimizer_of(named, **settings):
    return AdamW(named, states="fp8", keep=lambda n, _: None if n == "w" else "fp32", rounding="nearest", **settings)


@pytest.mark.parametrize("names", ["wb", "bw"])
@pytest.mark.parametrize("through", ["as it is", "flattened"])
def test_states_of_the_first_version_continue(names, through):
    w, b = parameters_of_version_1()
    optimizer = optimizer_of([(name, {"w": w, "b": b}[name]) for name in names])
    saved = of_version_1()
    if through == "flattened":
        tensors, rest = flatten(saved)
        saved = unflatten(tensors, json.loads(json.dumps(rest)))
    optimizer.load_state_dict(saved)
    w.grad = torch.tensor([[1.0, 2.0, -4.0], [0.25, 8.0, -0.5]], dtype=torch.bfloat16)
    b.grad = torch.tensor([1.0, -3.0])
    optimizer.step()
    assert w.tolist() == [[0.13671875, -0.609375, 1.359375], [1.6328125, -0.2373046875, -1.1328125]]
    assert b.tolist() == [0.6333276033401489, -1.629582166671753]
    masters = dict(zip(names, optimizer.master_weights(), strict=True))
    assert masters["w"][0].tolist() == [0.13636398315429688, -0.6108245849609375, 1.3580322265625]


@pytest.mark.parametrize("states", TIERS)
def test_pytorch_takes_values_and_never_codes(states):
    net = model(torch.bfloat16)
    optimizer = AdamW(net.named_parameters(), states=states, keep=keep_none)
    backward(net, 0)
    optimizer.step()
    saved, other = optimizer.state_dict(), torch.optim.AdamW(net.parameters())
    with io.BytesIO() as file:
        torch.save(saved, file)
        file.seek(0)
        other.load_state_dict(torch.load(file))
    if states in ("fp32", "exact"):
        exported = optimizer.export_state_dict()["state"]
        for number, state in other.state_dict()["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(state[name].float(), exported[number][name], rtol=2**-8, atol=0)
    else:
        assert all(not {"exp_avg", "exp_avg_sq"} & state.keys() for state in saved["state"].values())
        with pytest.raises(KeyError, match="exp_avg"):
            other.step()
    again = AdamW(net.named_parameters(), states=states, keep=keep_none)
    again.load_state_dict(saved)
    assert flatten(again.state_dict())[0].keys() == flatten(saved)[0].keys()


@pytest.mark.parametrize("version", [1, 2])
def test_codes_are_not_imported_as_values(version):
    saved, optimizer = of_version_1(), optimizer_of(zip("wb", parameters_of_version_1(), strict=True))
    if version == 2:
        optimizer.load_state_dict(saved)
        saved = optimizer.state_dict()
    with pytest.raises(CheckpointError, match=r"parameter 'w'.*exp_avg_.*are of codes.*load_state_dict"):
        optimizer.import_state_dict(saved)


# --- names of parameters ----------------------------------------------------------------------------------------------


def pair(make, prefix="", regrouped=False):
    """Return an optimizer that has stepped, and one over equal parameters in reverse order."""
    net, twin = model(), model()
    named = list(net.named_parameters())
    reverse = [(prefix + name, parameter) for name, parameter in reversed(list(twin.named_parameters()))]
    groups = [{"params": named[:2]}, {"params": named[2:], "lr": 0.5}]
    turned = [{"params": reverse[:-2], "lr": 0.5}, {"params": reverse[-2:]}] if regrouped else reverse
    one, other = make(groups if regrouped else named), make(turned)
    backward(net, 0)
    one.step()
    return one, other


def moments(optimizer):
    """Return the FP32 values of all states by the name of the parameter, without those of wrappers."""
    states = {}
    for entry in optimizer.entries():
        values = convert.values(optimizer, entry)
        states |= {f"{entry.name.removeprefix('module.')}.{k}": v for k, v in values.items() if k != "master"}
    return states


def same(one, other, but=()):
    a, b = ({name: v for name, v in moments(x).items() if name.rpartition(".")[2] not in but} for x in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("regrouped", [False, True])
@pytest.mark.parametrize("rule", [AdamW, Lion])
def test_states_follow_the_names_of_parameters(rule, regrouped, prefix):
    one, other = pair(lambda p: rule(p, lr=1e-3, states="fp8"), prefix, regrouped)
    other.load_state_dict(one.state_dict())
    assert same(one, other)
    if regrouped:
        assert [group["lr"] for group in other.param_groups] == [0.5, 1e-3]
        assert other.param_groups[1]["param_names"] == [f"{prefix}0.bias", f"{prefix}0.weight"]


def test_imported_states_follow_the_names_of_parameters():
    one, _ = pair(lambda p: torch.optim.AdamW(p, lr=1e-3))
    _, other = pair(lambda p: AdamW(p, lr=1e-3, states="fp32"))
    other.import_state_dict(one.state_dict())
    held = {name: one.state[p] for group in one.param_groups for name, p in zip(group["param_names"], group["params"])}  # noqa: B905
    for entry in other.entries():
        assert torch.equal(other.state[entry.parameter]["exp_avg"], held[entry.name]["exp_avg"])


def test_states_of_muon_follow_the_names_of_parameters():
    one, other = pair(lambda p: Muon(p, lr=1e-3, states="fp32"))
    other.import_state_dict(one.export_state_dict())
    assert same(one, other, but=["step"])  # PyTorch's Muon counts none
    one, other = pair(lambda p: Muon(p, lr=1e-3, states="fp8"))
    other.load_state_dict(one.state_dict())
    assert same(one, other)


@pytest.mark.parametrize("load", ["load_state_dict", "import_state_dict"])
def test_other_names_are_refused_and_their_absence_is_not(load):
    net = model()
    one = AdamW(net.named_parameters(), states="fp32")
    backward(net, 0)
    one.step()
    saved = one.state_dict()
    other = AdamW([(name.replace("0.", "first."), p) for name, p in net.named_parameters()], states="fp32")
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(
        CheckpointError, match=r"only there \['0\.bias', '0\.weight'\], only here \['first\.bias'.*remove"
    ):
        getattr(other, load)(saved)
    assert other.state_dict() == before
    for group in saved["param_groups"]:
        del group["param_names"]
    getattr(other, load)(saved)
    assert len(other.state) == len(one.state)
