"""Fused parts in a plan, and carried out; options of a policy that do nothing somewhere."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from user_modules import Attention

from octavo.conversion import Policy, convert, disabled, fusion_patterns, make_plan, mlps, revert
from octavo.conversion.fusion_patterns import FusionPattern
from octavo.conversion.mlps import find_mlp
from octavo.conversion.recomputation import recompute
from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Llama
from octavo.nn import Linear
from octavo.nn import norm as norms
from octavo.nn.fused import FusedMLP, MLPRoles
from octavo.nn.fused_activation import FusedActivation
from octavo.nn.norm import Norm, adopts
from octavo.recipes import load

WIDTH, HIDDEN = 64, 96


class Gated(nn.Module):
    """An MLP whose source does not show that gate and up share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down, self.activation = nn.Linear(HIDDEN, WIDTH, bias=False), F.silu
        self.start()

    def start(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in ("gate", "up", "down"))
        return down(self.activation(gate(x)) * up(x))


# --- in a plan, and carried out -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Gated()
        self.norm, self.other_norm = nn.RMSNorm(WIDTH), nn.LayerNorm(8)
        self.unused = nn.RMSNorm(WIDTH + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


def of(plan, name: str) -> FusionPattern | None:
    return next((structure for structure in plan.structures if structure.name == name), None)


def model() -> nn.Module:
    return nn.Sequential(Block(), Block())


@pytest.mark.parametrize("recipe", ["folded", "rotated"])
def test_a_plan_says_what_is_computed_together(recipe):
    plan = make_plan(model(), recipe)
    assert plan.structures[:4] == (
        FusionPattern(name="0.attention", kind="shared", layers=("q", "k", "v")),
        FusionPattern(name="0.attention.norm", kind="norm", form="layer"),
        FusionPattern(name="0.mlp", kind="mlp", layers=("gate", "up", "down"), activation="silu"),
        FusionPattern(name="0.norm", kind="norm"),
    )
    assert str(plan).splitlines()[-4:] == [
        "*.attention (2): fused: q + k + v, their input quantised once",
        "*.attention.norm (2): fused: norm + quantise",
        "*.mlp (2): fused: gate + up + silu + down",
        "*.norm (2): fused: norm + quantise",
    ]
    assert str(make_plan(Gated())).splitlines()[-1].startswith("the model itself: fused: gate + up + silu")


def test_the_inputs_of_an_activation_may_be_kept_in_fp8_and_the_plan_says_so():
    policy, converted, other = Policy(activation_inputs="fp8"), model(), model()
    other.load_state_dict(converted.state_dict())
    plan = convert(converted, policy=policy)
    line = "*.mlp (2): fused: gate + up + silu + down; gate and up kept in FP8"
    assert line in str(plan).splitlines() and '"saved": "fp8"' in plan.to_json()
    assert converted[1].mlp.mlp_activation_inputs == "fp8"
    convert(other)
    x = torch.randn(5, WIDTH)
    losses = [each(x).square().mean() for each in (converted, other)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    pairs = list(zip(converted.parameters(), other.parameters(), strict=True))
    differ = [a.grad is not None and not torch.equal(a.grad, b.grad) for a, b in pairs]
    assert any(differ)
    assert make_plan(converted).structures == make_plan(other).structures  # the next conversion is by its own policy


def test_a_norm_that_no_fp8_layer_can_read_is_left_alone():
    plan = make_plan(model())
    assert of(plan, "0.other_norm") is of(plan, "0.unused") is None
    converted = model()
    convert(converted)
    assert isinstance(converted[0].norm, Norm) and type(converted[0].unused) is nn.RMSNorm


def test_converting_makes_it_so_and_reverting_undoes_it():
    block = model()
    before = {name: (type(m), dict(vars(m))) for name, m in block.named_modules()}
    names = list(block.state_dict())
    convert(block)
    attention, mlp = block[0].attention, block[0].mlp
    assert attention.q.shared is attention.k.shared is attention.v.shared is not None
    assert attention.q.shared is not block[1].attention.q.shared and attention.o.shared is None
    assert isinstance(mlp, FusedMLP) and mlp.mlp_roles == MLPRoles("silu", ("gate", "up"), "down")
    assert mlp.gate.shared is None
    assert list(block.state_dict()) == names
    revert(block)
    assert {name: (type(m), dict(vars(m))) for name, m in block.named_modules()} == before


def test_a_policy_switches_it_off():
    block = model()
    plan = convert(block, policy=Policy(fuse=False))
    assert plan.structures == () and plan.fp8_layers == 14
    assert str(plan).splitlines()[-1].startswith("14 of 14 linear layers in FP8")
    assert not any(isinstance(m, FusedMLP | Norm) or getattr(m, "shared", None) for m in block.modules())
    convert(block)
    assert isinstance(block[0].mlp, FusedMLP)
    convert(block, policy=Policy(fuse=False))
    assert not any(isinstance(m, FusedMLP | Norm) or getattr(m, "shared", None) for m in block.modules())


def test_without_fp8_nothing_is_touched():
    block = model()
    assert convert(block, "bf16").structures == ()
    assert not any(isinstance(m, FusedMLP | Norm | Linear) for m in block.modules())


def test_all_fusions_take_the_activation_of_an_mlp_whose_layers_are_not_all_in_fp8():
    block = model()
    plan = convert(block, "folded", policy=Policy(fuse="all", keep=["0.mlp.down"]))
    layers = ("gate", "up", "down")
    assert of(plan, "0.mlp") == FusionPattern(name="0.mlp", kind="activation", layers=layers, activation="silu")
    assert of(plan, "1.mlp").kind == "mlp" and "0.mlp: fused: silu of gate, times up" in str(plan).splitlines()
    assert isinstance(block[0].mlp, FusedActivation) and isinstance(block[0].mlp.gate, Linear)
    again = convert(block, "folded", policy=Policy(fuse="all"))
    assert of(again, "0.mlp").kind == "mlp" and type(block[0].mlp).__bases__ == (FusedMLP, Gated)
    assert (
        make_plan(block, "bf16", policy=Policy(fuse="all")).structures
        == convert(block, "bf16", policy=Policy(fuse="all")).structures
    )
    with disabled(block):
        assert not block[0].mlp.enabled and not block[0].norm.enabled
    revert(block)
    assert type(block[0].mlp) is Gated


@pytest.mark.parametrize("recipe", ["bf16", "folded"])
def test_all_fusions_take_norms_that_no_fp8_layer_reads(recipe):
    block, is_fp8 = model(), recipe != "bf16"
    plan = convert(block, recipe, policy=Policy(fuse="all"))
    assert of(plan, "0.unused") == FusionPattern(name="0.unused", kind="norm", makes_codes=False, has_reader=False)
    assert of(plan, "0.norm") == FusionPattern(name="0.norm", kind="norm", makes_codes=is_fp8, has_reader=is_fp8)
    assert "*.unused (2): fused: norm" in str(plan).splitlines()
    assert isinstance(block[0].unused, Norm) and block[0].unused.target is None
    assert (block[0].norm.target is not None) == isinstance(block[0].mlp, FusedMLP) == is_fp8
    revert(block)
    assert not any(isinstance(m, FusedMLP | Norm | Linear) for m in block.modules())


def test_all_fusions_take_residual_sums_of_blocks(monkeypatch):
    model = Llama(ModelConfig(dim=WIDTH, layers=3, heads=2, sequence=8, vocab=32))
    before, tried = {name: type(module) for name, module in model.named_modules()}, []
    find = fusion_patterns.norms_of_stream
    monkeypatch.setattr(fusion_patterns, "norms_of_stream", lambda *each: (tried.append(each), find(*each))[1])
    assert not any(each.kind == "residual" for each in convert(model, "bf16").structures) and not tried
    plan = convert(model, "bf16", policy=Policy(fuse="all"))
    norms = "attention_norm", "ffn_norm"
    want = [FusionPattern(name=f"layers.{i}", kind="residual", layers=norms) for i in range(3)]
    assert [each for each in plan.structures if each.kind == "residual"] == want and len(tried) == 1
    assert "layers.* (3): fused: residual sums and their gradients, with attention_norm and ffn_norm" in str(plan)
    assert make_plan(model, "bf16", policy=Policy(fuse="all")).structures == plan.structures
    with disabled(model):
        assert not any(block.enabled for block in model.layers)
    assert all(block.enabled for block in model.layers)
    revert(model)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_a_block_that_is_recomputed_keeps_its_sums():
    model = Llama(ModelConfig(dim=WIDTH, layers=2, heads=2, sequence=8, vocab=32))
    recomputed = recompute(model)
    plan = make_plan(model, "bf16", policy=Policy(fuse="all"))
    assert not any(each.kind == "residual" for each in plan.structures)
    recomputed.remove()


def test_the_input_of_a_norm_that_no_fp8_layer_reads_is_not_kept_in_fp8():
    plan = make_plan(model(), policy=Policy(fuse="all", norm_inputs="fp8"))
    assert (of(plan, "0.norm").saved, of(plan, "0.unused").saved) == ("fp8", "bf16")


def test_the_gate_of_an_mlp_is_no_router():
    assert make_plan(model()).fp8_layers == 14
    kept = make_plan(model(), policy=Policy(keep={"*.gate": "mine"}))
    assert {layer.name for layer in kept.layers if not layer.is_fp8} == {"0.mlp.gate", "1.mlp.gate"}
    assert of(kept, "0.mlp") is None


@pytest.mark.parametrize(
    ("modules", "shared", "fused"),
    [
        ({"*.q": "block"}, ("k", "v"), True),
        ({"*.k": "bf16", "*.o": "bf16"}, ("q", "v"), True),
        ({"*.k": "bf16", "*.q": "block"}, None, True),
        ({"*.down": "block"}, ("q", "k", "v"), True),
        ({"*.up": "block"}, ("q", "k", "v"), False),
        ({"*.down": "bf16"}, ("q", "k", "v"), False),
    ],
    ids=str,
)
def test_layers_of_different_recipes_are_not_computed_together(modules, shared, fused):
    plan = make_plan(model(), load({"modules": modules}))
    attention = of(plan, "0.attention")
    assert (attention and attention.layers) == shared
    assert (of(plan, "0.mlp") is not None) == fused


def test_gate_and_up_share_where_the_mlp_cannot_be_one():
    class Written(Gated):
        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    plan = make_plan(Written(), load({"wgrad": {"precision": "bf16"}}))
    assert plan.structures == (FusionPattern(name="", kind="shared", layers=("gate", "up")),)


def test_a_module_in_two_places_is_one():
    mlp = Gated()
    twice = nn.Sequential(mlp, nn.Identity(), mlp)
    plan = convert(twice)
    assert [structure.name for structure in plan.structures] == ["0"]
    assert isinstance(twice[2], FusedMLP)


def test_layers_in_two_modules_belong_to_the_first():
    first, second = Gated(), Gated()
    second.gate = first.gate
    holder = nn.ModuleList([first, second])
    plan = convert(holder)
    assert [structure.name for structure in plan.structures if structure.kind == "mlp"] == ["0"]
    assert isinstance(first, FusedMLP) and type(second) is Gated


def test_the_result_is_near_what_separate_layers_give():
    torch.manual_seed(1)
    block, x = model(), torch.randn(2, 7, WIDTH)
    exact = block(x)
    convert(block, policy=Policy(fuse=False))
    separate = block(x)
    convert(block)
    fused = block(x)
    assert (fused - separate).norm() < 0.02 * exact.norm()
    assert (fused - exact).norm() < 0.05 * exact.norm()


def test_disabled_computes_as_the_user_wrote_it():
    block, x = model(), torch.randn(2, 7, WIDTH)
    expected = block(x)
    convert(block)
    with disabled(block):
        assert torch.equal(block(x), expected)
    assert not torch.equal(block(x), expected)


def test_a_converted_model_compiles_as_a_whole_and_computes_the_same():
    block = model()
    convert(block)
    outcomes = []
    for run in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        x = torch.linspace(-1, 1, 14 * WIDTH).reshape(2, 7, WIDTH).requires_grad_()
        block.zero_grad()
        run(x).square().sum().backward()
        outcomes.append([x.grad, *(p.grad.clone() for p in block.parameters() if p.grad is not None)])
    assert len(outcomes[0]) == 1 + 2 * (8 + 2 + 3 + 1)
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    torch._dynamo.reset()


# --- options of a policy that do nothing somewhere: the plan says so, and strict refuses ----------------------------

CONFIG = ModelConfig(vocab=64, dim=64, heads=4, layers=2, sequence=16, ffn=128)
OPTIONS = ("activation_inputs", "norm_inputs", "attention_output")
every_option = pytest.mark.parametrize("option", OPTIONS)


@every_option
def test_where_it_is_applied_nothing_is_said(option):
    plan = convert(Llama(CONFIG), policy=Policy(**{option: "fp8"}), strict=True)
    assert plan.unapplied == ()
    assert sum("kept in FP8" in structure.what for structure in plan.structures) == (
        5 if option == "norm_inputs" else 2
    )


@every_option
def test_a_model_without_such_a_module(option):
    model, policy = nn.Sequential(nn.Linear(64, 64)), Policy(**{option: "fp8"})
    plan = make_plan(model, policy=policy)
    assert len(plan.unapplied) == 1 and f"{option} = 'fp8' does nothing" in plan.unapplied[0]
    assert plan.unapplied[0] in str(plan) and json.loads(plan.to_json())["unapplied"] == list(plan.unapplied)
    with pytest.raises(UnsupportedError, match=f"{option} = 'fp8' does nothing"):
        convert(model, policy=policy, strict=True)
    convert(model, policy=policy)  # without strict it goes on


@pytest.mark.parametrize(
    ("recipe", "keep", "why"),
    [
        ("delayed", {}, "keeps scales from step to step"),
        ("rowwise_bf16_wgrad", {}, "leaves a GEMM in BF16"),
        ("folded", {"*w2": "for a test"}, "one of its layers stays in BF16"),
        ({"base": "folded", "modules": {"*w3": {"base": "block"}}}, {}, "its layers differ in their recipes"),
    ],
)
def test_an_mlp_that_is_not_computed_as_one(recipe, keep, why):
    policy = Policy(activation_inputs="fp8", keep=keep)
    plan = make_plan(Llama(CONFIG), recipe, policy=policy)
    assert [line.split(": ")[0].split()[-3] for line in plan.unapplied] == [
        "layers.0.feed_forward,",
        "layers.1.feed_forward,",
    ]
    assert all(why in line for line in plan.unapplied)


def test_low_memory_is_every_option_where_the_model_has_what_it_is_for():
    low = Policy(memory="low")
    assert low.saved == Policy(**dict.fromkeys(OPTIONS, "fp8")).saved
    assert str(make_plan(Llama(CONFIG), policy=low)) == str(
        make_plan(Llama(CONFIG), policy=Policy(**dict.fromkeys(OPTIONS, "fp8")))
    )
    plan = convert(nn.Sequential(nn.Linear(64, 64)), policy=low, strict=True)  # asks for what there is
    assert len(plan.unapplied) == 3
    with pytest.raises(ConfigError, match="memory = 'lowest': it is 'exact' or 'low'"):
        Policy(memory="lowest")


def test_what_low_memory_implies_goes_with_it():
    low = Policy(memory="low")
    assert replace(low, memory="exact") == Policy() and replace(low, memory="exact", fuse=False).saved == Policy().saved
    assert replace(Policy(norm_inputs="fp8", memory="low"), memory="exact") == Policy(norm_inputs="fp8")
    with pytest.raises(ConfigError, match=r"activation_inputs = 'fp8' changes .* fuse = False"):
        replace(low, fuse=False)


def test_nothing_is_said_without_the_options():
    assert make_plan(nn.Sequential(nn.Linear(64, 64))).unapplied == ()


@every_option
def test_values_and_contradictions_are_refused(option):
    with pytest.raises(ConfigError, match=f"{option} = 'fp16'"):
        Policy(**{option: "fp16"})
    with pytest.raises(ConfigError, match="fuse = False"):
        Policy(**{option: "fp8"}, fuse=False)


def test_a_module_with_a_tensor_of_its_own_is_not_fused():
    """A write to it in place could not be noticed, and the fused formula has no such factor."""

    class Scaled(Gated):
        def start(self):
            self.factor = torch.ones(())

        def forward(self, x):
            return super().forward(x) * self.factor

    assert find_mlp(Gated()) is not None and find_mlp(Scaled()) is None

    class ScaledNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps, self.factor = nn.Parameter(torch.rand(64)), 1e-6, torch.ones(())

        def forward(self, x):
            return F.rms_norm(x, (64,), self.weight, self.eps) * self.factor

    norm = ScaledNorm()
    assert not adopts(norm)
    del norm.factor
    norm.factor = 1.0
    assert adopts(norm)


def test_each_kind_of_module_is_probed_once_and_a_different_one_by_itself(monkeypatch):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps, self.factor = nn.Parameter(torch.rand(64)), 1e-6, 1.0

        def forward(self, x):
            return F.rms_norm(x, (64,), self.weight, self.eps) * self.factor

    probes, computes = [], mlps.computes
    for module in (mlps, norms):
        monkeypatch.setattr(module, "computes", lambda *args: probes.append(args) or computes(*args))
    model = nn.ModuleList(make() for _ in range(4) for make in (Gated, Norm))
    assert [pattern.name for pattern in make_plan(model).structures] == [str(number) for number in range(8)]
    assert len(probes) == 3 + 2
    model[5].factor, model[2].activation = 2.0, F.logsigmoid
    patterns = make_plan(model).structures
    assert {pattern.name: pattern.kind for pattern in patterns if pattern.kind != "shared"} == {
        **dict.fromkeys("046", "mlp"), **dict.fromkeys("137", "norm")
    }  # fmt: skip


@pytest.mark.parametrize("recipe", ["folded", "rotated", "tensorwise", "bf16"])
def test_norms_make_the_codes_that_fprop_and_wgrad_of_the_recipe_read(recipe):
    blocks, plan = model(), load(recipe).plan
    convert(blocks, recipe)
    targets = (plan.x, plan.x_second) if recipe in ("folded", "rotated") else (None, None)
    found = [module for module in blocks.modules() if isinstance(module, Norm)]
    assert [(norm.target, norm.second) for norm in found] == [targets] * len(found)
    assert bool(found) == (recipe != "bf16")
