"""The presets are what the design says: each GEMM's operands, and which codes backward takes from forward."""

import pytest

from octavo.recipes import GEMMS, Recipe, load, names, reused_from
from octavo.recipes.presets import PRESETS

OPERANDS = {
    "folded": {
        "fprop": ("E4M3 row", "E4M3 row"),
        "dgrad": ("E4M3 row", "E4M3 column"),
        "wgrad": ("E4M3 row", "E4M3 column"),
    },
    "rowwise": dict.fromkeys(GEMMS, ("E4M3 row", "E4M3 row")),
    "tensorwise": {
        "fprop": ("E4M3 tensor FP32 scales", "E4M3 tensor FP32 scales"),
        "dgrad": ("E5M2 tensor FP32 scales", "E4M3 tensor FP32 scales"),
        "wgrad": ("E5M2 tensor FP32 scales", "E4M3 tensor FP32 scales"),
    },
    "block": {
        "fprop": ("E4M3 1x128", "E4M3 128x128"),
        "dgrad": ("E4M3 1x128", "E4M3 128x128"),
        "wgrad": ("E4M3 1x128", "E4M3 1x128"),
    },
    "served": {
        "fprop": ("E4M3 row engine scales", "E4M3 row engine scales"),
        "dgrad": ("E4M3 row", "E4M3 column engine scales"),
        "wgrad": ("E4M3 row", "E4M3 column engine scales"),
    },
    "served_block": {
        "fprop": ("E4M3 1x128 FP32 scales", "E4M3 128x128 FP32 scales"),
        "dgrad": ("E4M3 1x128", "E4M3 128x128 FP32 scales"),
        "wgrad": ("E4M3 1x128", "E4M3 1x128"),
    },
    "bf16": {},
}
# (dgrad.grad_output, dgrad.weight, wgrad.grad_output, wgrad.input): whose codes, transposed, each of them is
REUSED = {
    "folded": (None, "fprop", None, "fprop"),
    "rowwise": (None, None, None, None),
    "tensorwise": (None, "fprop", "dgrad", "fprop"),
    "block": (None, "fprop", None, None),
    "bf16": (None, None, None, None),
}
OPERANDS["rotated"] = OPERANDS["folded"] | {"fprop": ("INT8 row FP32 scales rotated by 256",) * 2}
REUSED["rotated"] = REUSED["rowwise"]
OPERANDS["rotated_fast"], REUSED["rotated_fast"] = OPERANDS["rotated"], REUSED["rotated"]
OPERANDS["folded_fast"], REUSED["folded_fast"] = OPERANDS["folded"], REUSED["folded"]
REUSED["served"], REUSED["served_block"] = REUSED["folded"], REUSED["block"]
OPERANDS["rowwise_bf16_fprop"] = {gemm: OPERANDS["rowwise"][gemm] for gemm in ("dgrad", "wgrad")}
OPERANDS["rowwise_bf16_wgrad"] = {gemm: OPERANDS["rowwise"][gemm] for gemm in ("fprop", "dgrad")}
OPERANDS["tensorwise_e4m3"] = dict.fromkeys(GEMMS, OPERANDS["tensorwise"]["fprop"])
OPERANDS["mxfp8"] = dict.fromkeys(GEMMS, ("E4M3 1x32", "E4M3 1x32"))
for source in ("delayed", "just_in_time", "static"):
    of_weight, said = "E4M3 tensor FP32 scales", source.replace("_", " ")
    of_input, of_gradient = (f"{format} tensor FP32 scales {said}" for format in ("E4M3", "E5M2"))
    OPERANDS[source] = {
        "fprop": (of_input, of_weight),
        "dgrad": (of_gradient, of_weight),
        "wgrad": (of_gradient, of_input),
    }
REUSED |= dict.fromkeys(("rowwise_bf16_fprop", "rowwise_bf16_wgrad", "mxfp8"), REUSED["rowwise"])
REUSED |= dict.fromkeys(("tensorwise_e4m3", "delayed", "just_in_time", "static"), REUSED["tensorwise"])
FAST = {
    "folded_fast": ["fast", "fast", "slow"],
    "rotated_fast": ["slow", "fast", "slow"],
}  # wgrad sums over all tokens: never fast
every_preset = pytest.mark.parametrize("name", PRESETS)


def test_names_in_the_order_they_are_shown():
    assert names() == (
        *("folded", "rotated", "rotated_fast", "folded_fast", "rowwise", "rowwise_bf16_fprop", "rowwise_bf16_wgrad"),
        *(
            "tensorwise",
            "tensorwise_e4m3",
            "delayed",
            "just_in_time",
            "static",
            "block",
            "served",
            "served_block",
            "mxfp8",
            "bf16",
        ),
    )


@every_preset
def test_operands(name):
    assert {gemm: (str(a), str(b)) for gemm, a, b in load(name).gemms()} == OPERANDS[name]


@every_preset
def test_each_carries_its_own_name_and_overrides_no_module(name):
    recipe = load(name)
    assert isinstance(recipe, Recipe)
    assert recipe.name == name
    assert recipe.modules == {}


@every_preset
def test_which_codes_are_used_again(name):
    roles = [("dgrad", "grad_output"), ("dgrad", "weight"), ("wgrad", "grad_output"), ("wgrad", "input")]
    assert tuple(reused_from(load(name), gemm, role) for gemm, role in roles) == REUSED[name]
    assert reused_from(load(name), "fprop", "input") is reused_from(load(name), "fprop", "weight") is None


@every_preset
def test_rule_5_accumulation_is_slow_unless_the_name_says_fast(name):
    assert [load(name).gemm(gemm).accumulate for gemm in GEMMS] == FAST.get(name, ["slow"] * 3)


@every_preset
def test_rounding_is_to_nearest(name):
    assert {operand.rounding for _, a, b in load(name).gemms() for operand in (a, b)} <= {"nearest"}


def test_which_keep_scales_need_a_file_and_are_emulated():
    assert [name for name in names() if load(name).has_stored_scales] == ["delayed", "just_in_time", "static"]
    assert [name for name in names() if load(name).needs_calibration] == ["static"]
    assert [name for name in names() if load(name).is_emulated] == ["mxfp8"]


def test_only_bf16_runs_no_gemm_in_fp8():
    assert [name for name in names() if not load(name).is_fp8] == ["bf16"]
