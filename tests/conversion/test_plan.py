"""A plan says what each layer will do and why, and changes nothing."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from octavo.conversion import LayerPlan, Policy, convert, make_plan, planner
from octavo.conversion import layer_planner as module
from octavo.conversion.refusals import refuse_reference
from octavo.errors import ConfigError, OctavoError, UnsupportedError
from octavo.kernels.gemm import choose
from octavo.kernels.gemm.vendor import cpu_unsupported_reason
from octavo.kernels.runtime import dispatch
from octavo.kernels.runtime import ledger as module_ledger
from octavo.kernels.runtime.devices import GPUS, H200, architecture_of
from octavo.lab.models import ModelConfig, build
from octavo.recipes import load
from octavo.tensor import FP8Tensor

ROUTER = "router: a small error sends a token to another expert"
HEAD = "output head: its error goes straight into the loss"
KERNEL = "reference" if cpu_unsupported_reason() else "scaled_mm.row"
TABLE = f"""
layer                N x K     recipe  fprop / dgrad / wgrad  why
layers.*.up (2)      128 x 64  folded  3 x {KERNEL}
layers.*.down (2)    64 x 128  folded  3 x {KERNEL}
layers.*.router (2)  256 x 64  bf16    bf16                   {ROUTER}
layers.*.tiny (2)    8 x 64    bf16    bf16                   fewer than 32 features
lm_head              96 x 64   bf16    bf16                   {HEAD}

4 of 9 linear layers in FP8 (45% of their weights, 45% of all parameters) on cpu
norm: fused: norm""".lstrip()


def of(plan, name: str) -> LayerPlan:
    return next(layer for layer in plan.layers if layer.name == name)


def test_table_of_a_small_model(model):
    assert str(make_plan(model, "folded")) == TABLE


def test_a_plan_changes_nothing(model):
    before = {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()}
    make_plan(model, "block")
    assert {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()} == before


def test_shared_layers_are_planned_once_by_their_first_name(model):
    assert [layer.name for layer in make_plan(model).layers].count("layers.0.up") == 1
    assert "again" not in [layer.name for layer in make_plan(model).layers]


def test_what_a_row_says(model):
    row = of(make_plan(model, {"base": "block", "dgrad": {"precision": "bf16"}}), "layers.0.up")
    assert row == LayerPlan(
        name="layers.0.up",
        shape=(128, 64),
        recipe="block, changed",
        precision="fp8 / bf16 / fp8",
        kernels="reference / - / reference",
        gain=None,
        reason="",
    )
    assert row.is_fp8


def test_the_plan_of_bf16_keeps_everything_and_says_so(model):
    plan = make_plan(model, "bf16")
    assert plan.fp8_layers == 0 and plan.recipes == {}
    assert of(plan, "layers.0.up").reason == "the recipe says bf16"
    assert of(plan, "layers.0.router").reason.startswith("router")
    assert str(plan).endswith("0 of 9 linear layers in FP8 (0% of their weights, 0% of all parameters) on cpu")


def test_recipes_by_pattern_the_last_match_wins(model):
    recipe = load({"modules": {"layers.*": "block", "layers.1.*": "bf16", "*.down": "tensorwise"}})
    plan = make_plan(model, recipe)
    assert {
        name: of(plan, name).recipe for name in ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")
    } == {
        "layers.0.up": "block",
        "layers.0.down": "tensorwise",
        "layers.1.up": "bf16",
        "layers.1.down": "tensorwise",
    }
    assert set(plan.recipes) == {"layers.0.up", "layers.0.down", "layers.1.down"}


def test_a_pattern_does_not_overrule_the_policy(model):
    plan = make_plan(model, load({"modules": {"lm_head": "folded"}}))
    assert not of(plan, "lm_head").is_fp8


def test_unknown_pattern_says_what_was_meant(model):
    message = (
        r"modules: the pattern 'layers\.0\.upp' matches no linear layer or convolution\. Did you mean 'layers\.0\.up'\?"
    )
    with pytest.raises(ConfigError, match=message):
        make_plan(model, load({"modules": {"layers.0.upp": "bf16"}}))


def test_unknown_recipe(model):
    with pytest.raises(ConfigError, match=r"Did you mean 'block'\?"):
        make_plan(model, "blokc")


def test_an_unknown_device_says_what_was_meant(model):
    with pytest.raises(ConfigError, match=r"device = 'h20': .*Did you mean 'h200'\?.* GPUs: a100, "):
        make_plan(model, device="h20")


def test_an_argument_that_cannot_be_meant_is_named(model):
    with pytest.raises(ConfigError, match=r"expected a torch\.nn\.Module, got OrderedDict"):
        make_plan(model.state_dict())
    with pytest.raises(ConfigError, match=r"expected an octavo\.Policy, such as .*, got \{'weights': 'fp8'\}"):
        make_plan(model, policy={"weights": "fp8"})
    with pytest.raises(ConfigError, match=r"tokens = 0: .*at least 1"):
        make_plan(model, tokens=0)


def test_a_policy_of_ones_own(model):
    policy = Policy(keep_defaults=False, min_features=0, filter=lambda name, _: not name.endswith("up"))
    plan = make_plan(model, policy=policy)
    assert {layer.name for layer in plan.layers if not layer.is_fp8} == {"layers.0.up", "layers.1.up"}
    assert of(plan, "layers.0.up").reason == "left out by the policy's filter"


def test_root_module_that_is_a_linear_layer():
    plan = make_plan(nn.Linear(64, 64))
    assert [layer.name for layer in plan.layers] == [""]
    assert plan.fp8_layers == 1


def test_models_without_linear_layers():
    for empty in (nn.MaxPool2d(3), nn.Sequential(), nn.Identity()):
        assert "\n0 of 0 linear layers in FP8 (0% of their weights, 0% of all parameters) on cpu\n" in str(
            make_plan(empty)
        )


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    plan = make_plan(model)
    assert [layer.is_fp8 for layer in plan.layers] == [True, False]


def test_json_says_what_the_plan_says(model):
    plan = make_plan(model, "block", tokens=123)
    body = json.loads(plan.to_json())
    assert {key: body[key] for key in ("recipe", "device", "tokens")} == {
        "recipe": "block",
        "device": "cpu",
        "tokens": 123,
    }
    layers = [LayerPlan(**{**layer, "shape": tuple(layer["shape"])}) for layer in body["layers"]]
    assert tuple(layers) == plan.layers


def test_a_converted_model_is_planned_as_it_was_before(model):
    before = make_plan(model)
    convert(model)
    assert str(make_plan(model)) == str(before)


def test_the_policy_holds_for_a_converted_model_too(model):
    convert(model, policy=Policy(keep_defaults=False, min_features=0))
    assert str(make_plan(model, "folded")) == TABLE


# --- a GPU that is not here -----------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch):
    """Answer for a Hopper GPU: tensor and row scales have a kernel, E5M2 by row does not, blocks do."""

    def gemm_kernel(device, a, b):
        if a[1] in ("1x128", "128x128"):
            return "scaled_mm.block", {}
        if "e5m2" in (a[0], b[0]) and "row" in (a[1], b[1]):
            return "reference", {"scaled_mm.row": "row scales take E4M3 operands only"}
        return ("scaled_mm.tensor" if a[1] == b[1] == "tensor" else "scaled_mm.row"), {}

    monkeypatch.setattr(module, "gemm_kernel", gemm_kernel)
    monkeypatch.setattr(dispatch, "_own_architecture", lambda device: architecture_of("cuda", (9, 0)))
    monkeypatch.setitem(choose.__globals__, "_choices", {})
    for each in (module, planner):
        monkeypatch.setattr(each, "rates", lambda device: H200 if device.type == "cuda" else None)
    dispatch._triton_unsupported_reason.cache_clear()
    yield
    dispatch._triton_unsupported_reason.cache_clear()


def test_kernels_are_asked_for_once_per_kind_of_operands(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "gemm_kernel", lambda *operands: asked.append(operands) or ("scaled_mm.row", {}))
    plan = make_plan(nn.Sequential(*(nn.Linear(64, 64) for _ in range(9))), "rowwise")
    assert plan.fp8_layers == 9 and len(asked) == len(set(asked)) <= 3
    assert {row.kernels for row in plan.layers} == {" / ".join(["scaled_mm.row"] * 3)}


E5M2 = {"base": "rowwise", "name": "mine", "dgrad": {"grad_output": {"format": "e5m2"}}}


@pytest.mark.usefixtures("hopper")
def test_on_a_gpu_a_layer_too_small_to_gain_stays_in_bf16():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(4096, 4096))
    plan = make_plan(model, device="cuda")
    small, large = plan.layers
    assert not small.is_fp8 and small.gain is None
    assert small.reason.startswith("too small to gain: predicted 0.") and small.reason.endswith(
        "times BF16 at 8192 tokens"
    )
    assert large.is_fp8 and large.gain is not None and large.gain > 1
    assert all(layer.is_fp8 for layer in make_plan(model, device="cuda", policy=Policy(min_gain=0)).layers)


@pytest.mark.usefixtures("hopper")
def test_gain_is_shown_in_the_table():
    plan = make_plan(nn.Sequential(nn.Linear(4096, 4096)), device="cuda")
    assert f"  {plan.layers[0].gain:.2f}" in str(plan).splitlines()[1]
    assert str(plan).splitlines()[-3].endswith("on cuda")
    assert "gain: predicted speed relative to BF16, with 8,192 tokens per forward" in str(plan)


@pytest.mark.usefixtures("hopper")
def test_rule_7_the_plan_says_what_falls_back_and_converting_refuses_it():
    plan = make_plan(nn.Sequential(nn.Linear(4096, 4096)), E5M2, device="cuda")
    row = plan.layers[0]
    assert row.kernels == "scaled_mm.row / reference / scaled_mm.row"
    assert row.reason == "dgrad falls back: scaled_mm.row: row scales take E4M3 operands only"
    with pytest.raises(
        UnsupportedError,
        match=r"0: recipe 'mine' has no fast kernel on cuda.*row scales take E4M3.*allow_reference=True",
    ):
        refuse_reference(plan)


@pytest.mark.usefixtures("hopper")
def test_rule_7_without_fallbacks_nothing_is_refused(model):
    for name in ("folded", "rowwise", "tensorwise", "block", "bf16"):
        plan = make_plan(nn.Linear(4096, 4096), name, device="cuda")
        refuse_reference(plan)
        assert plan.fp8_layers == (name != "bf16") and "reference" not in plan.layers[0].kernels
    plan = make_plan(model, "block")
    refuse_reference(plan)  # a CPU has nothing faster
    assert plan.device == "cpu" and plan.fp8_layers == 4


def test_a_plan_for_a_gpu_that_is_not_here():
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(64, 64, dtype=torch.bfloat16))
    plan = make_plan(model, "block", device="h100")
    large, small = plan.layers
    assert plan.device == "h100" and large.kernels == " / ".join(["scaled_mm.block"] * 3)
    assert large.gain is not None and large.gain > 1.1
    assert small.gain is None and small.reason.startswith("too small to gain")
    assert "gain" in str(plan).splitlines()[0] and "gain" not in str(make_plan(model)).splitlines()[0]
    assert make_plan(model, "block").layers[1].is_fp8  # nothing of it remains


HOPPER = {"folded": "row", "tensorwise": "tensor", "block": "block"}
HOPPER = {recipe: f"scaled_mm.{mode}" for recipe, mode in HOPPER.items()} | {"mxfp8": "emulated.1x32"}
DEVICES = {
    "a100": ("no FP8 tensor cores", {}),
    "l40s": (None, {"folded": "scaled_mm.row", "tensorwise": "scaled_mm.tensor", "mxfp8": "emulated.1x32"}),
    "h100": (None, HOPPER),
    "h200": (None, HOPPER),
    "b200": (None, {"folded": "scaled_mm.row", "tensorwise": "scaled_mm.tensor", "mxfp8": "scaled_mm.mx"}),
    "rtx5090": (None, {"folded": "scaled_mm.row", "tensorwise": "scaled_mm.tensor", "mxfp8": "scaled_mm.mx"}),
    "mi300x": ("FNUZ", {}),
    "mi355x": ("Triton kernels contain PTX", {"folded": "scaled_mm.row", "tensorwise": "scaled_mm.tensor"}),
    "max1550": ("no FP8 kernels for XPU", {}),
}
"""Why each GPU refuses every recipe, or None; and the kernels of those that it has products for."""


def test_every_gpu_that_can_be_planned_for_is_tested():
    assert {*DEVICES} == {*GPUS}


@pytest.mark.parametrize("gpu", DEVICES)
@pytest.mark.parametrize("recipe", ["folded", "tensorwise", "block", "mxfp8"])
def test_what_each_gpu_runs_emulates_and_refuses(gpu, recipe):
    refused, runs = DEVICES[gpu]
    plan = make_plan(nn.Sequential(nn.Linear(8192, 8192, device="meta")), recipe, device=gpu, policy=Policy(min_gain=0))
    assert plan.layers[0].kernels == " / ".join(
        [runs.get(recipe) or {"mxfp8": "emulated.1x32"}.get(recipe, "reference")] * 3
    )
    assert ("by the slow reference" in str(plan)) == ("reference" in plan.layers[0].kernels)
    if refused or (recipe not in runs):
        reason = refused or "Hopper .compute capability 9.0. only"
        with pytest.raises(UnsupportedError, match=f"{reason}.*allow_reference=True"):
            refuse_reference(plan)
    else:
        refuse_reference(plan)
    assert (refused is not None) == bool(plan.refused) and (refused or "") in plan.refused
    if refused is not None:
        assert str(plan).startswith(plan.refused) and len(plan.layers[0].reason) < 60, "it is not said in each row"


@pytest.mark.parametrize("gpu", DEVICES)
def test_a_gain_is_predicted_from_the_gpus_own_rates_or_not_at_all(gpu):
    plan = make_plan(nn.Sequential(nn.Linear(8192, 8192, device="meta"), nn.Linear(64, 64)), device=gpu)
    gain, small = plan.layers[0].gain, plan.layers[1]
    if gpu not in ("h100", "h200"):
        assert gain is None and small.is_fp8
        assert DEVICES[gpu][0] or plan.notes[0].startswith("No gain is predicted")
        return
    other = make_plan(nn.Sequential(nn.Linear(8192, 8192, device="meta")), device="h200").layers[0].gain
    assert 1 < gain <= other and (gain == other) == (gpu == "h200") and not small.is_fp8
    assert ("3.35 of 4.8" in "".join(plan.notes)) == (gpu == "h100")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_plan_for_a_gpu_that_is_not_here_is_an_error_of_ours():
    for recipe in (None, "folded", "rotated"):
        with pytest.raises(OctavoError, match="h100"):
            make_plan(nn.Linear(4096, 4096), recipe, device="cuda")


@pytest.mark.gpu
def test_no_preset_falls_back_on_hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not Hopper")
    layer = nn.Linear(4096, 4096, device="cuda")
    for name in ("folded", "rowwise", "tensorwise", "block"):
        plan = make_plan(layer, name)
        assert plan.fp8_layers == 1 and "reference" not in plan.layers[0].kernels
        refuse_reference(plan)


@pytest.mark.parametrize("recipe", ["delayed", "just_in_time", "tensorwise", "mxfp8"])
def test_the_plan_claims_nothing_that_a_recipe_cannot_do(recipe):
    model = build(ModelConfig(vocab=64, dim=64, layers=2, heads=2, ffn=128, sequence=32), seed=0)
    text = str(make_plan(model, recipe))
    assert "norm + quantise" not in text
    assert ("fused: w1 + w3 + silu + w2" in text) == (recipe == "tensorwise")
    assert ("emulated: no faster than BF16" in text) == (recipe == "mxfp8")


def test_the_share_of_products_in_fp8_is_that_of_their_operations_and_of_their_time():
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 8192, bias=False))
    half = {"modules": {"1": {"wgrad": {"precision": "bf16"}}}}
    assert make_plan(model, half).fp8_shares == {"fp8_flops": pytest.approx((1 + 2 * 2 / 3) / 3)}
    plan = make_plan(model, {"modules": {"1": "bf16"}}, device="h200")
    gain = plan.layers[0].gain
    assert plan.fp8_shares == {
        "fp8_flops": pytest.approx(1 / 3),
        "fp8_time": pytest.approx(1 / gain / (1 / gain + 2)),
    }
    assert make_plan(nn.Sequential(nn.ReLU())).fp8_shares == {}


def test_evidence_of_a_precision_map_is_in_the_plan(model):
    evidence = {"reason": "over the loss budget", "loss_change": 2e-4, "turned": {"fprop": 1e-3}}
    modules = {"layers.0.up": "bf16", "layers.1.*": "folded", "layers.1.down": "folded"}
    plan = make_plan(model, {"modules": modules, "evidence": {"layers.0.up": evidence, "layers.1.down": evidence}})
    kept, decided, other = (of(plan, name) for name in ("layers.0.up", "layers.1.down", "layers.1.up"))
    assert not kept.is_fp8 and kept.reason == "over the loss budget" and kept.evidence.loss_change == 2e-4
    assert decided.is_fp8 and decided.reason == "over the loss budget" and other.evidence is None
    shown = {layer["name"]: layer["evidence"] for layer in json.loads(plan.to_json())["layers"]}
    assert shown["layers.0.up"]["turned"] == {"fprop": 1e-3} and shown["layers.1.up"] is None


@pytest.mark.usefixtures("hopper")
def test_what_was_measured_is_not_overruled_by_a_prediction(model):
    """These layers are predicted to gain nothing on a GPU."""
    found = {"reason": "within the loss budget", "loss_change": 0.0, "ms_saved": 0.1}
    plan = make_plan(model, {"modules": {"layers.0.up": "folded"}, "evidence": {"layers.0.up": found}}, device="cuda")
    assert [layer.name for layer in plan.layers if layer.is_fp8] == ["layers.0.up"]


# --- what a user may not expect ---------------------------------------------------------------------------------------


def two_layers(width=64, dtype=None):
    return nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.Linear(width, width, dtype=dtype))


def logged(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "octavo"]


def test_nothing_in_fp8_is_said_in_the_plan_and_once_at_conversion(caplog):
    module_ledger._warned.clear()
    policy = Policy(min_features=128)
    note = "Nothing will run in FP8: fewer than 128 features (2 of 2 layers)"
    plan = make_plan(two_layers(), policy=policy)
    assert plan.notes == (note,) and str(plan).endswith(note) and json.loads(plan.to_json())["notes"] == [note]
    assert not logged(caplog)
    for _ in range(2):
        convert(two_layers(), policy=policy)
    assert logged(caplog) == [f"octavo.convert: {note}"]
    assert "no linear layer" in make_plan(nn.ReLU()).notes[0]
    assert make_plan(two_layers(), "bf16").notes == make_plan(two_layers(), policy=Policy(min_features=16)).notes == ()


def test_weights_in_fp16_are_said_in_the_plan():
    policy = Policy(min_features=16)
    assert make_plan(two_layers(dtype=torch.float16), policy=policy, device="meta").notes == ()  # it has no autocast
    notes = make_plan(two_layers(dtype=torch.float16), policy=policy).notes
    assert len(notes) == 1 and "torch.float16" in notes[0] and "scale the loss" in notes[0]
    in_bf16 = two_layers(dtype=torch.bfloat16)
    assert make_plan(in_bf16, policy=policy).notes == (planner.ROUNDS,) and 'states="exact"' in planner.ROUNDS
    with torch.autocast("cpu", torch.bfloat16):
        assert make_plan(in_bf16, policy=policy).notes == (planner.ROUNDS,)
    assert make_plan(in_bf16, policy=replace(policy, weights="fp8")).notes == ()
    assert make_plan(in_bf16.requires_grad_(False), policy=policy).notes == ()
    assert make_plan(two_layers(dtype=torch.bfloat16).to("meta"), policy=policy, device="cpu").notes == ()


def test_the_fast_path_of_pytorchs_encoder_is_said_in_the_plan_and_at_conversion(caplog):
    """In an evaluation PyTorch reads the weights of linear1 and linear2 and never calls them."""
    module_ledger._warned.clear()
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    assert make_plan(encoder).notes == (planner.FAST_PATH,)
    convert(encoder)
    assert logged(caplog) == [f"octavo.convert: {planner.FAST_PATH}"]
    x = torch.randn(2, 8, 64)
    encoder.eval()
    trained = encoder(x)
    with torch.no_grad():
        assert not torch.equal(encoder(x), trained)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert torch.equal(encoder(x), trained) and make_plan(encoder).notes == ()
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    for other in (nn.TransformerEncoderLayer(64, 4, 128), nn.TransformerDecoderLayer(64, 4, 128, batch_first=True)):
        assert planner.FAST_PATH not in make_plan(other).notes


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fast_path_of_pytorchs_encoder_reads_the_values_of_fp8_weights(norm_first):
    make = partial(nn.TransformerEncoderLayer, 64, 4, 128, batch_first=True, norm_first=norm_first)
    encoder, plain, x = make().eval(), make().eval(), torch.randn(2, 8, 64)
    convert(encoder, policy=Policy(weights="fp8"))
    values = {name: w.dequantize() if isinstance(w, FP8Tensor) else w for name, w in encoder.state_dict().items()}
    plain.load_state_dict(values)
    with torch.no_grad():
        assert isinstance(encoder.linear1.weight, FP8Tensor) and torch.equal(encoder(x), plain(x))


class OwnAttention(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(64, 4, 128, batch_first=True)
        self.self_attn = nn.Linear(64, 64)

    def forward(self, x):
        return self.linear2(self.activation(self.linear1(self.self_attn(x))))


class OwnForward(nn.TransformerEncoderLayer):
    def forward(self, x):
        return self.linear2(self.activation(self.linear1(x)))


@pytest.mark.parametrize("make", [OwnAttention, lambda: OwnForward(64, 4, 128, batch_first=True)])
def test_encoder_layers_of_a_users_own_have_no_fast_path(make):
    plan = make_plan(make(), policy=Policy(min_features=16))
    assert plan.fp8_layers and planner.FAST_PATH not in plan.notes


@pytest.mark.usefixtures("hopper")
def test_weights_in_fp32_on_a_gpu_are_said_in_the_plan(monkeypatch):
    monkeypatch.setattr(module, "gemm_kernel", lambda *_: ("scaled_mm.row", {}))
    policy = Policy(min_features=16, min_gain=0.0)
    notes = make_plan(two_layers(), policy=policy, device="cuda").notes
    assert len(notes) == 1 and notes[0].startswith("Weights are torch.float32. Without autocast FP8 layers return FP32")
    assert make_plan(two_layers(), policy=policy, device="cpu").notes == ()


@pytest.mark.parametrize("tokens", ["8k", True, 0.5, 0, None])
def test_tokens_are_a_number_of_tokens(tokens):
    with pytest.raises(ConfigError, match=f"tokens = {tokens!r}: expected the number of tokens"):
        make_plan(nn.Linear(64, 64), tokens=tokens)


def test_a_name_is_no_model():
    with pytest.raises(ConfigError, match=r"got 'meta-llama/Llama-3'.*from_pretrained.*`octavo plan config.json`"):
        convert("meta-llama/Llama-3")


def test_a_bare_layer_is_the_model_itself():
    plan = make_plan(nn.Linear(64, 64))
    assert str(plan).splitlines()[1].startswith("the model itself  64 x 64") and plan.layers[0].name == ""


def test_sylvesters_blocks_are_the_largest_power_of_two_that_fits():
    operand = {"rotation": 256, "hadamard": "sylvester"}
    model = nn.Sequential(nn.Linear(384, 512), nn.Linear(512, 384))
    made = make_plan(
        model, {"base": "rotated", "fprop": {"input": operand, "weight": operand}}, policy=Policy(min_gain=0)
    )
    assert made.layers[0].reason == "rotated by blocks of 128, the largest power of 2 that divides 384"
    assert "blocks" not in made.layers[1].reason


def test_layers_that_cannot_rotate_compute_fprop_in_fp8():
    model = nn.Sequential(nn.Linear(256, 384), nn.Linear(384, 100), nn.Linear(100, 64), nn.Conv2d(64, 64, 3))
    made = make_plan(model, "rotated", policy=Policy(min_gain=0))
    rows = {row.name: row for row in made.layers}
    assert [rows[name].recipe for name in "0123"] == ["rotated", "rotated", *["rotated, fprop in FP8"] * 2]
    assert rows["0"].reason == "" and rows["0"].kernels.startswith("int8 / ")
    assert rows["1"].reason == "rotated by blocks of 64, the largest power of 4 that divides 384"
    assert rows["2"].reason == "fprop in FP8: no rotation by 16 or more divides 100 features"
    assert rows["3"].reason == "fprop in FP8: only linear layers, attention and experts rotate their inputs"
    assert made.recipes["2"] is made.recipes["3"]  # layers of one recipe are computed together
    convert(model, "rotated", policy=Policy(min_gain=0))
    twin = nn.Sequential(*(nn.Linear(100, 64) for _ in range(1)))
    twin.load_state_dict({"0.weight": model[2].weight.detach(), "0.bias": model[2].bias.detach()})
    convert(twin, "folded", policy=Policy(min_gain=0))
    x = torch.randn(7, 100)
    assert torch.equal(model[2](x), twin[0](x))


@pytest.mark.parametrize(
    ("gpu", "kernel"), [("h200", "int8"), ("h100", "int8"), ("l40s", "int8"), ("b200", "scaled_mm.row")]
)
def test_devices_without_the_integer_gemm_compute_fprop_in_fp8(gpu, kernel):
    plan = make_plan(nn.Linear(256, 256), "rotated", policy=Policy(min_gain=0), device=gpu)
    row = plan.layers[0]
    assert row.kernels.startswith(kernel)
    assert ("INT8 GEMM does not run on this GPU" in row.reason) == (kernel != "int8")
    assert ("INT8 GEMM compiles for Ada, but was not run there" in "".join(plan.notes)) == (gpu == "l40s")
