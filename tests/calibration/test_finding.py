"""`octavo.calibrate` sees what layers read, writes what convert loads, and leaves no trace in the model."""

import copy
import hashlib
import json
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.calibration import ScalePolicy
from octavo.calibration.finding import HEADER
from octavo.errors import ConfigError, NonFiniteError
from octavo.lab.models import ModelConfig, build
from octavo.nn import calibration_file

EXACT = ScalePolicy(margin=0)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 48), nn.GELU(), nn.Linear(48, 32))


def batches(count: int = 3) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(16, 40) * (i + 1) for i in range(count)]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_scales_are_those_of_the_largest_inputs_and_gradients():
    plain, amax = model(), {}
    for x in batches():
        hidden = plain[1](first := plain[0](x))
        last = plain[2](hidden)
        grads = torch.autograd.grad(last.square().mean(), [first, last])
        for name, tensor in {
            "0.input": x,
            "2.input": hidden,
            "0.grad_output": grads[0],
            "2.grad_output": grads[1],
        }.items():
            amax[name] = max(amax.get(name, 0.0), float(tensor.detach().abs().max()))
    found = octavo.calibrate(plain, batches(), loss=loss, scale_policy=EXACT)
    assert {name: scale.amax for name, scale in found.scales.items()} == amax
    for name, scale in found.scales.items():
        largest = 57344.0 if name.endswith("grad_output") else 448.0
        assert scale.scale == float(np.float32(amax[name] / largest))


def test_it_agrees_with_delayed_scaling_of_the_same_batches():
    layer = nn.Sequential(nn.Linear(40, 48, bias=False))
    found = octavo.calibrate(layer, batches(), loss=lambda m, x: m(x).sum(), scale_policy=EXACT)
    octavo.convert(layer, "delayed")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for x in batches():
        layer(x.requires_grad_()).sum().backward()
        optimizer.step()
    stored = octavo.scales(layer).scale_and_amax[:, 0].tolist()
    assert [found.scales[f"0.{role}"].scale for role in ("input", "grad_output")] == stored


def test_the_file_is_what_static_and_delayed_load(tmp_path):
    plain, path = model(), tmp_path / "a.json"
    found = octavo.calibrate(plain, batches(), loss=loss)
    found.save(path)
    for recipe in ("static", "delayed", "just_in_time"):
        octavo.convert(plain, recipe, scales=path)
        state = octavo.scales(plain).state_dict()
        assert {name: cell[0].item() for name, cell in state.items()} == {n: s.scale for n, s in found.scales.items()}
    octavo.convert(plain, "static", scales=path)
    assert torch.isfinite(loss(plain, batches()[0]))


def test_no_trace_is_left():
    plain = model()
    plain[0].weight.grad = torch.ones_like(plain[0].weight)
    for recipe in (None, "delayed", "folded"):
        if recipe:
            octavo.convert(plain, recipe)
        before, state = loss(plain, batches()[0]).item(), copy.deepcopy(plain.state_dict())
        stored = octavo.scales(plain).state_dict() if recipe == "delayed" else {}
        octavo.calibrate(plain, batches(), loss=loss)
        assert loss(plain, batches()[0]).item() == before
        assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())
        assert (plain[0].weight.grad == 1).all() and plain[2].weight.grad is None
        if recipe == "delayed":
            after = octavo.scales(plain).state_dict()
            assert all(torch.equal(stored[name][0], after[name][0]) for name in stored)
        assert not any(module._forward_hooks for module in plain.modules())
        assert all(getattr(module, "enabled", True) for module in plain.modules())


def test_a_converted_model_is_seen_in_its_own_precision():
    """Layers that are computed together too: three that share an input, an MLP, norms that hand codes on."""
    config = ModelConfig(dim=32, layers=1, heads=2, vocab=64, sequence=16)
    ids = [torch.randint(64, (2, 17)) for _ in range(2)]
    pairs = [(part[:, :-1], part[:, 1:]) for part in ids]
    llama = build(config, 0)
    plain = octavo.calibrate(llama, pairs)
    plan = octavo.convert(llama, "folded", policy=octavo.Policy(min_gain=0))
    assert plan.structures
    assert octavo.calibrate(llama, pairs, recipe="static").scales.keys() == plain.scales.keys()
    again = octavo.calibrate(llama, pairs, recipe="static").scales
    for name, scale in plain.scales.items():
        assert (again[name].scale, again[name].statistics) == (scale.scale, scale.statistics), name


class Sharing(nn.Module):
    """Two layers that read the same input, and whose gradients differ a hundredfold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.loud, self.soft = nn.Linear(40, 48), nn.Linear(40, 48)

    def forward(self, x: Tensor) -> Tensor:
        return (self.loud(x) * 100 + self.soft(x)).square().mean()


@pytest.mark.parametrize("recipe", [None, "delayed", "folded"])
def test_layers_that_share_an_input_have_one_scale_together(recipe):
    sharing = Sharing()
    if recipe:
        octavo.convert(sharing, recipe)
    found = octavo.calibrate(
        sharing, batches(), recipe=None if recipe == "delayed" else "static", scale_policy=EXACT
    ).scales
    assert found["loud.input"].scale == found["soft.input"].scale
    loud, soft = found["loud.grad_output"], found["soft.grad_output"]
    assert loud.amax == pytest.approx(100 * soft.amax)
    assert loud.scale == soft.scale == float(np.float32(loud.amax / 57344))
    # Each line is of the layer's own tensor.
    assert soft.statistics.highest == pytest.approx(loud.statistics.highest / 100, rel=0.02)
    alone = octavo.calibrate(sharing, batches(), recipe="static", scale_policy=EXACT, layers="soft").scales
    assert alone["soft.grad_output"].scale == float(np.float32(soft.amax / 57344))


def test_a_model_that_keeps_scales_is_calibrated_for_its_own_recipe():
    plain = model()
    octavo.convert(plain, {"base": "delayed", "name": "mine", "fprop": {"input": {"scaling": "power_of_two"}},
                           "wgrad": {"input": {"scaling": "power_of_two"}}})  # fmt: skip
    found = octavo.calibrate(plain, batches(), loss=loss)
    assert found.origin.recipe == "mine"
    assert found.scales["0.input"].scaling == "power_of_two"
    octavo.scales(plain).start_from(found.scales)


def test_inputs_alone_need_no_loss():
    found = octavo.calibrate(model(), batches(), backward=False)
    assert list(found.scales) == ["0.input", "2.input"]


@pytest.mark.parametrize(
    ("layers", "names"),
    [("0", ["0.input", "0.grad_output"]), ("*.input", ["0.input", "2.input"]), (["2.input"], ["2.input"])],
)
def test_some_layers_alone(layers, names):
    assert list(octavo.calibrate(model(), batches(), loss=loss, layers=layers).scales) == names


class Wrapped(nn.Module):
    """Takes batches and gives losses as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: Tensor, scale: float = 1.0, as_mapping: bool = False) -> object:
        value = scale * self.inner(x).square().mean()
        return {"loss": value, "logits": x} if as_mapping else value


def test_batches_of_every_kind():
    (x,) = batches(1)
    expected = octavo.calibrate(Wrapped(), [x]).scales
    kinds = [(x,), [x, 1.0], {"x": x}, {"x": x, "as_mapping": True}]
    for batch in kinds:
        scales = octavo.calibrate(Wrapped(), [batch]).scales
        assert [s.scale for s in scales.values()] == [s.scale for s in expected.values()]


def test_where_a_scale_comes_from_is_said():
    found = octavo.calibrate(model(), batches(2), loss=loss).described("a test")
    expected = hashlib.sha256()
    for x in batches(2):
        expected.update(b"torch.float32 (16, 40)" + x.numpy().tobytes())
    for scale in found.scales.values():
        assert scale.origin.data == f"sha256:{expected.hexdigest()}"
        assert (scale.origin.recipe, scale.origin.how, scale.origin.source) == ("static", "max, margin 1", "a test")
        assert scale.origin.date.endswith("+00:00")


def test_an_extreme_needs_batches_to_vary():
    policy = octavo.calibration.ScalePolicy(by="extreme", horizon=100, margin=0)
    with pytest.raises(ConfigError, match="by 'extreme' needs 4 batches"):
        octavo.calibrate(model(), batches(3), loss=loss, scale_policy=policy)
    found = octavo.calibrate(model(), batches(6), loss=loss, scale_policy=policy).scales
    exact = octavo.calibrate(model(), batches(6), loss=loss, scale_policy=EXACT).scales
    assert all(found[name].scale > exact[name].scale for name in exact), "batches() grow"


def test_the_table_and_its_json_say_the_same():
    found = octavo.calibrate(model(), batches(), loss=loss)
    lines, content = str(found).splitlines(), json.loads(found.to_json())
    assert " ".join(lines[0].split()) == " ".join(HEADER)
    assert [line.split()[:3] for line in lines[1:5]] == [
        [r["layer"], r["role"], r["format"]] for r in content["scales"]
    ]
    assert lines[6] == "4 of 4 scales fit their tensors" and found.fits
    assert content["origin"]["data"] == found.origin.data and content["not_found"] == []


def test_a_tensor_that_no_scale_holds_is_told():
    x = torch.exp2(-40 * torch.rand(64, 40))
    found = octavo.calibrate(model(), [x], backward=False, layers="0")
    (row,) = found.rows()
    assert not found.fits and not row.fits and row.spare_bits < 0
    assert "0.input: no scale fits it in e4m3; suggested: finer scales" in str(found)
    assert "none" in row.cells()


def test_what_never_ran_is_told(tmp_path):
    class Half(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x)

    found = octavo.calibrate(Half(*model()), batches(), loss=loss)
    assert found.not_found == ("2.input", "2.grad_output") and not found.fits
    assert "not found (never computed, or all zero): 2.input" in str(found)
    found.save(tmp_path / "a.json")
    with pytest.raises(ConfigError, match=r"the first that of '2\.input'"):
        octavo.convert(model(), "static", scales=tmp_path / "a.json")


def test_a_nan_is_an_error():
    broken = batches()
    broken[1][3, 4] = torch.nan
    with pytest.raises(NonFiniteError, match=r"1 of 1920 elements of the input of '0'"):
        octavo.calibrate(model(), broken, loss=loss)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batches": []}, "no batch was given"),
        ({"recipe": "folded"}, "no layer of the model would store scales by the recipe 'folded'"),
        ({"loss": None}, r"returned a tensor of shape \(16, 32\), which is no loss"),
        ({"loss": lambda m, x: m(x).detach().sum()}, "no loss with gradients"),
        ({"layers": "1"}, "no layer or scale matches '1'"),
    ],
    ids=["no batches", "no kept scales", "no loss", "loss without gradients", "unknown layer"],
)
def test_what_cannot_be_calibrated(arguments, message):
    given = {"batches": batches(), "loss": loss} | arguments
    with pytest.raises(ConfigError, match=message):
        octavo.calibrate(model(), given.pop("batches"), **given)


def test_hooks_are_taken_away_after_an_error():
    plain = model()
    with pytest.raises(RuntimeError):
        octavo.calibrate(plain, [torch.randn(2, 3)], loss=loss)
    assert not any(module._forward_hooks for module in plain.modules())


def test_a_second_file_of_the_same_layers_keeps_the_first(tmp_path):
    path = tmp_path / "a.json"
    first = octavo.calibrate(model(), batches(1), loss=loss)
    first.save(path)
    octavo.calibrate(model(), batches(3), loss=loss).save(path)
    entry = calibration_file.read(path)["0.input"]
    assert entry.previous[0].scale == first.scales["0.input"].scale != entry.scale
    assert entry.previous[0].statistics == first.scales["0.input"].statistics


def test_a_percentile_of_gradients_warns():
    by = ScalePolicy(by="percentile")
    with pytest.warns(UserWarning, match="a percentile lets the largest gradients saturate"):
        octavo.calibrate(model(), batches(1), loss=loss, scale_policy=by)
    with warnings.catch_warnings(action="error"):
        octavo.calibrate(model(), batches(1), scale_policy=by, backward=False)
        octavo.calibrate(model(), batches(1), loss=loss)
