"""What stays in BF16 whatever the recipe, each with its reason."""

import dataclasses
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from octavo.conversion import Policy, make_plan
from octavo.errors import ConfigError
from octavo.nn import Linear

HEAD = "output head: its error goes straight into the loss"
ROUTER = "router: a small error sends a token to another expert"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lm_head", HEAD),
        ("model.lm_head", HEAD),
        ("output", HEAD),
        ("head", HEAD),  # timm, and Octavo's ResNet
        ("fc", HEAD),  # torchvision
        ("classifier", HEAD),  # torchvision, transformers
        ("embed", None),  # an embedding is looked up: this one is multiplied
        ("model.embed_tokens_extend.image_embed.encoder.layers.0.fc1", None),  # Phi-4-multimodal
        ("layers.3.mlp.router", ROUTER),
        ("layers.3.attention.gate", None),  # routers of other names: tests/conversion/test_roles.py
        ("layers.0.mlp.router.classifier", ROUTER),  # Switch Transformers
        ("layers.0.block_sparse_moe.router.layer", ROUTER),  # Granite, DBRX, JetMoE
        ("model.layers.0.block_sparse_moe.experts.3.w1", None),
        ("model.layers.0.mlp.shared_expert.gate_proj", None),
        ("layers.3.mlp.gate_proj", None),
        ("layers.3.attention.output", None),
        ("layers.3.mlp.fc", None),
        ("layers.0.attention.q", None),
        ("", None),
    ],
)
def test_reasons_by_name(name, reason):
    assert Policy().reason_to_keep(name, nn.Linear(64, 64)) == reason


@pytest.mark.parametrize(
    ("shape", "kept"), [((31, 64), True), ((64, 31), True), ((32, 32), False), ((1, 1), True)], ids=str
)
def test_small_layers(shape, kept):
    reason = Policy().reason_to_keep("layer", nn.Linear(*shape))
    assert reason == ("fewer than 32 features" if kept else None)
    assert Policy(min_features=0).reason_to_keep("layer", nn.Linear(*shape)) is None


def test_a_layer_that_is_fp8_already_is_judged_like_any_other():
    assert Policy().reason_to_keep("layer", Linear(64, 64)) is None
    assert Policy().reason_to_keep("lm_head", Linear(64, 64)) == HEAD


def test_a_filter_sees_name_and_layer_and_has_the_last_word():
    seen = []
    policy = Policy(filter=lambda name, layer: seen.append((name, layer.out_features)) or name != "b")
    assert policy.reason_to_keep("a", nn.Linear(64, 48)) is None
    assert policy.reason_to_keep("b", nn.Linear(64, 48)) == "left out by the policy's filter"
    assert policy.reason_to_keep("lm_head", nn.Linear(64, 48)) == HEAD
    assert seen == [("a", 48), ("b", 48)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"activation_inputs": "fp16"}, "activation_inputs = 'fp16': it is 'bf16' or 'fp8'"),
        ({"activation_inputs": "fp8", "fuse": False}, "fuse = False leaves all of those alone"),
    ],
)
def test_what_is_kept_for_backward_is_checked(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Policy(**wrong)


def test_a_policy_of_ones_own():
    policy = dataclasses.replace(Policy(), keep={"first*": "because"})
    assert policy.reason_to_keep("first.layer", nn.Linear(64, 64)) == "because"
    assert policy.reason_to_keep("lm_head", nn.Linear(64, 64)) == HEAD, "it adds to the defaults"
    alone = dataclasses.replace(policy, keep_defaults=False)
    assert alone.reason_to_keep("first.layer", nn.Linear(64, 64)) == "because"
    assert alone.reason_to_keep("lm_head", nn.Linear(64, 64)) is None


def test_patterns_need_no_reasons():
    policy = Policy(keep=["first*", "*.last"])
    assert policy.reason_to_keep("a.last", nn.Linear(64, 64)) == "kept by the policy"
    with pytest.raises(ConfigError, match=r"keep = 'first\*': it is a list of patterns, \['first\*'\]"):
        Policy(keep="first*")


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"])
def test_names_of_wrappers_hide_nothing(wrapper):
    assert Policy().reason_to_keep(f"{wrapper}.output", nn.Linear(64, 64)) == HEAD
    policy = Policy(keep={"layers.0.up": "mine"})
    assert policy.reason_to_keep(f"layers.0.{wrapper}.up", nn.Linear(64, 64)) == "mine"


def test_a_pattern_that_matches_nothing_is_refused_with_a_suggestion():
    model = nn.Sequential(OrderedDict(first=nn.Linear(64, 64), last=nn.Linear(64, 64)))
    octavo.plan(model, policy=Policy(keep=["last"]))
    with pytest.raises(ConfigError, match=r"the pattern 'lats' matches no module of the model\. Did you mean 'last'"):
        octavo.plan(model, policy=Policy(keep=["lats"]))


# --- first and last blocks ------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A model whose blocks hold longer lists than that of the blocks."""

    def __init__(self, blocks: int = 4, experts: int = 9) -> None:
        super().__init__()
        self.stem = nn.ModuleList([nn.LayerNorm(4)] * 20)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(64, 64) for _ in range(experts))}) for _ in range(blocks)
        )
        self.extra = nn.Linear(64, 64)


@pytest.mark.parametrize(
    ("counts", "kept"),
    [
        ((0, 0), {}),
        ((1, 0), {0: "in the first block"}),
        ((1, 2), {0: "in the first block"} | dict.fromkeys((2, 3), "in one of the last 2 blocks")),
    ],
)
def test_first_and_last_blocks(counts, kept):
    found = Policy(bf16_blocks=counts).blocks_to_keep(Experts())
    assert found == {f"layers.{number}": why for number, why in kept.items()}


def test_the_plan_keeps_every_layer_of_such_a_block_and_says_why():
    rows = make_plan(Experts(12), policy=Policy(bf16_blocks=(1, 1))).layers
    kept = {row.name: row.reason for row in rows if not row.is_fp8 and row.name.startswith("layers.")}
    assert {name.split(".")[1] for name in kept} == {"0", "11"} and len(kept) == 2 * 9
    assert kept["layers.0.experts.3"] == "in the first block"
    assert kept["layers.11.experts.3"] == "in the last block"


def test_a_block_may_be_a_layer_itself():
    rows = make_plan(
        nn.Sequential(nn.ModuleList(nn.Linear(64, 64) for _ in range(12))), policy=Policy(bf16_blocks=(2, 0))
    )
    assert [row.name for row in rows.layers if not row.is_fp8] == ["0.0", "0.1"]


@pytest.mark.parametrize("counts", [(-1, 0), (1,), (1, 2, 3)])
def test_counts_that_are_none(counts):
    with pytest.raises(ConfigError, match="two counts, of blocks at the start and at the end"):
        Policy(bf16_blocks=counts)


def test_a_model_with_too_few_blocks():
    for model in (nn.Linear(4, 4), Experts(2)):
        with pytest.raises(ConfigError, match=r"blocks in an nn\.ModuleList\. Keep layers by their names"):
            make_plan(model, policy=Policy(bf16_blocks=(2, 1)))


def test_what_norms_keep_is_checked() -> None:
    with pytest.raises(ConfigError, match="norm_inputs = 'shared': it is 'bf16' or 'fp8'"):
        Policy(norm_inputs="shared")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="norm_inputs = 'fp8' changes what"):
        Policy(norm_inputs="fp8", fuse=False)


class Int8Tensor(Tensor):
    """A quantised weight of another library, such as torchao's: it says that it is in FP32, and holds codes."""

    @staticmethod
    def __new__(cls, codes):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes):
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(function)


def int8(*shape):
    return nn.Parameter(Int8Tensor(torch.zeros(shape, dtype=torch.int8)), requires_grad=False)


@pytest.mark.parametrize("make", [lambda: nn.Linear(64, 64), lambda: nn.Conv1d(64, 64, 1)])
def test_a_weight_that_another_library_has_quantised_stays(make):
    model = nn.Sequential(make(), make())
    model[0].weight = int8(*model[0].weight.shape)
    plan = octavo.convert(model)
    reason = "its weight is an Int8Tensor, a tensor of another library: quantised already, for example"
    assert (plan.layers[0].is_fp8, plan.layers[0].reason) == (False, reason)
    assert plan.layers[1].is_fp8 and type(model[0]) is type(make())


def test_a_plain_subclass_of_parameter_is_converted():
    class Named(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(64, 64))
    model[0].weight = Named(model[0].weight.detach())
    assert octavo.convert(model).fp8_layers == 1
    model(torch.randn(4, 64)).sum().backward()


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 48, 32)), nn.Parameter(torch.randn(4, 32, 48))

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(4):
            t, k = torch.where(ids == e)
            y = y.index_add(0, t, F.silu(x[t] @ self.up[e].T) @ self.down[e].T * weights[t, k, None])
        return y


def test_experts_that_another_library_has_quantised_stay():
    model = nn.Sequential(Mixture())
    assert octavo.plan(model).fp8_layers == 2
    model[0].up = int8(4, 48, 32)
    plan = octavo.convert(model)
    assert plan.fp8_layers == 0 and "one of its weights is an Int8Tensor" in plan.layers[0].reason


@pytest.mark.parametrize("call", [octavo.plan, octavo.convert])
def test_a_lazy_layer_has_to_run_first(call):
    model = nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 64))
    with pytest.raises(ConfigError, match=r"0\.weight has no shape yet.*LazyLinear.*one batch first"):
        call(model)
    model(torch.randn(2, 64))
    assert call(model).fp8_layers == 2


WRONG = {
    "keep_defaults": ("no", "keep_defaults: expected bool, got 'no'"),
    "min_gain": ("x", "min_gain: expected float, got 'x'"),
    "min_features": (1.5, "min_features: expected int, got 1.5"),
    "convolutions": (1, "convolutions: expected bool, got 1"),
    "fuse": ("al", "fuse = 'al': it is True, False or 'all'"),
    "keep": ("*.up", r"keep = '\*.up': it is a list"),
    "requantise": ("*.wo", r"requantise = '\*.wo': it is a list of patterns, \['\*.wo'\]\."),
    "bf16_blocks": ((1, "x"), "bf16_blocks = .*two counts"),
    "filter": ("*.up", "filter = .*a function of"),
    "weights": ("fp9", "Did you mean 'fp8'"),
}


@pytest.mark.parametrize("option", WRONG)
def test_values_of_another_type_are_refused(option):
    value, message = WRONG[option]
    with pytest.raises(ConfigError, match=message):
        Policy(**{option: value})


@pytest.mark.parametrize(
    "test", [lambda module, name: True, lambda m, fqn: True, lambda layer: True, lambda: True, lambda a, b, c: True]
)
def test_a_filter_with_other_arguments_is_refused(test):
    with pytest.raises(ConfigError, match=r"filter .*full name first"):
        Policy(filter=test)


@pytest.mark.parametrize("test", [lambda name, module: True, lambda *_: True, lambda n, m, more=1: True, max])
def test_a_filter_of_a_name_and_a_layer_is_taken(test):
    assert Policy(filter=test).filter is test


def test_a_filter_that_fails_is_named():
    policy = Policy(filter=lambda a, b: a.in_features > 32)
    with pytest.raises(ConfigError, match=r"filter failed for '0' .*'str' object has no attribute.*full name first"):
        make_plan(nn.Sequential(nn.Linear(64, 64)), policy=policy)
