"""A recipe that no kernel could run, or that would compute something else than it says, cannot be made."""

import dataclasses
import pickle

import pytest

from octavo.errors import ConfigError
from octavo.recipes import Dgrad, Fprop, History, Operand, Recipe, Wgrad, load, mx, reused_from

ROW, COLUMN, E5M2 = Operand(), Operand(granularity="column"), Operand(format="e5m2")


def refused(message: str, **gemms):
    with pytest.raises(ConfigError, match=message):
        Recipe(name="mine", **gemms)


def test_e5m2_by_e5m2():
    refused("recipe 'mine': fprop: no hardware multiplies E5M2 by E5M2", fprop=Fprop(input=E5M2, weight=E5M2))
    refused("recipe 'mine': wgrad: no hardware", wgrad=Wgrad(grad_output=E5M2, input=E5M2))


def test_e5m2_by_e4m3_either_way():
    Recipe(name="mine", fprop=Fprop(input=E5M2), dgrad=Dgrad(weight=E5M2), wgrad=Wgrad(grad_output=E5M2))


@pytest.mark.parametrize(
    "gemms",
    [
        {"fprop": Fprop(input=COLUMN)},
        {"dgrad": Dgrad(grad_output=COLUMN)},
        {"wgrad": Wgrad(grad_output=COLUMN)},
    ],
    ids=lambda gemms: next(iter(gemms)),
)
def test_left_operands_cannot_be_folded(gemms):
    refused(f"recipe 'mine': {next(iter(gemms))}: its left operand cannot be 'column'", **gemms)


def test_fprop_weight_cannot_be_folded():
    refused(
        r"fprop\.weight cannot be 'column' \(folded\): fprop is where the codes are made", fprop=Fprop(weight=COLUMN)
    )


@pytest.mark.parametrize(
    "source",
    [
        Operand(granularity="tensor"),
        Operand(granularity="128x128"),
        Operand(format="e5m2"),
        Operand(scaling="float32"),
        Operand(rounding="stochastic"),
    ],
    ids=str,
)
def test_folded_operands_need_the_codes_of_fprop(source):
    refused("dgrad.weight is 'column'.*those of fprop.weight", fprop=Fprop(weight=source), dgrad=Dgrad(weight=COLUMN))
    refused("wgrad.input is 'column'.*those of fprop.input", fprop=Fprop(input=source), wgrad=Wgrad(input=COLUMN))


def test_folded_operands_need_fprop_in_fp8():
    bf16 = Fprop(precision="bf16")
    refused("dgrad.weight is 'column'.*must be in FP8", fprop=bf16, dgrad=Dgrad(weight=COLUMN))
    refused("wgrad.input is 'column'.*must be in FP8", fprop=bf16, wgrad=Wgrad(input=COLUMN))


def test_folded_stochastic_rounding_is_refused_since_its_codes_are_never_rounded_again():
    stochastic = Operand(granularity="column", rounding="stochastic")
    refused("nearest rounding", fprop=Fprop(weight=Operand(rounding="stochastic")), dgrad=Dgrad(weight=stochastic))


def test_folded_with_fp32_scales_is_allowed():
    row, column = Operand(scaling="float32"), Operand(granularity="column", scaling="float32")
    Recipe(name="mine", fprop=Fprop(input=row, weight=row), dgrad=Dgrad(weight=column), wgrad=Wgrad(input=column))


def test_a_gemm_in_bf16_is_not_checked_for_what_it_does_not_use():
    Recipe(name="mine", dgrad=Dgrad(precision="bf16", weight=COLUMN), fprop=Fprop(weight=Operand(granularity="tensor")))


def test_fast_accumulation_that_would_be_ignored_is_refused():
    tile = Operand(granularity="1x128")
    block = Operand(granularity="128x128")
    refused(
        "fprop.accumulate = 'fast' does nothing with 1x128 and 128x128",
        fprop=Fprop(input=tile, weight=block, accumulate="fast"),
    )


def test_unknown_granularity_says_where():
    refused(
        r"recipe 'mine'.*fprop.*unknown granularity 'rwo'\. Did you mean 'row'\?",
        fprop=Fprop(input=Operand(granularity="rwo")),
    )


def test_rule_5_fast_accumulation_never_for_wgrad():
    refused(r"recipe 'mine': wgrad\.accumulate = 'fast' is refused.*Use 'slow'", wgrad=Wgrad(accumulate="fast"))
    Recipe(name="mine", fprop=Fprop(accumulate="fast"), dgrad=Dgrad(accumulate="fast"))


def test_gemms_in_bf16_are_left_out():
    recipe = Recipe(name="mine", dgrad=Dgrad(precision="bf16"))
    assert [name for name, _, _ in recipe.gemms()] == ["fprop", "wgrad"]
    assert recipe.is_fp8 and not recipe.gemm("dgrad").is_fp8


def test_recipes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("folded").name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Operand(granularity="tensor"), Operand(granularity="tensor"), True),
        (Operand(granularity="128x128"), Operand(granularity="128x128"), True),
        (COLUMN, ROW, True),
        (Operand(granularity="128x1"), Operand(granularity="1x128"), True),
        (ROW, ROW, False),
        (Operand(granularity="1x128"), Operand(granularity="1x128"), False),
        (Operand(granularity="tensor", format="e5m2"), Operand(granularity="tensor"), False),
        (Operand(granularity="tensor", scaling="float32"), Operand(granularity="tensor"), False),
        (
            Operand(granularity="tensor", rounding="stochastic"),
            Operand(granularity="tensor", rounding="stochastic"),
            False,
        ),
    ],
    ids=lambda value: str(value),
)
def test_is_transpose_of(one, other, expected):
    assert one.is_transpose_of(other) is expected


def test_gradients_are_quantised_anew_where_a_scale_was_folded_into_them():
    # wgrad's gradient has X's scales in it, dgrad's has W's: neither is the transpose of the other, tensor scales or
    # not.
    tensor = Operand(granularity="tensor")
    plain = Recipe(name="mine", dgrad=Dgrad(grad_output=tensor), wgrad=Wgrad(grad_output=tensor))
    assert reused_from(plain, "wgrad", "grad_output") == "dgrad"
    for folds in (
        {"dgrad": Dgrad(grad_output=tensor, weight=COLUMN)},
        {"wgrad": Wgrad(grad_output=tensor, input=COLUMN)},
    ):
        assert reused_from(dataclasses.replace(plain, **folds), "wgrad", "grad_output") is None
    without_dgrad = dataclasses.replace(plain, dgrad=Dgrad(grad_output=tensor, precision="bf16"))
    assert reused_from(without_dgrad, "wgrad", "grad_output") is None


# --- scales that are kept from step to step -------------------------------------------------------------------------

DELAYED = Operand(granularity="tensor", scale_from="delayed")


@pytest.mark.parametrize("source", ["delayed", "just_in_time", "static"])
def test_only_a_whole_tensor_has_a_scale_from_elsewhere(source):
    refused(
        f"fprop.input.scale_from = '{source}' is one scale per tensor, and this operand is 'row'",
        fprop=Fprop(input=Operand(scale_from=source)),
    )


def test_weights_are_scaled_by_their_own_maximum():
    for gemms in ({"fprop": Fprop(weight=DELAYED)}, {"dgrad": Dgrad(weight=DELAYED)}):
        refused("weight.scale_from = 'delayed' is refused: a weight is scaled by its own maximum", **gemms)


def test_kept_scales_round_to_nearest():
    stochastic = dataclasses.replace(DELAYED, rounding="stochastic")
    refused("rounds to nearest only, not 'stochastic'", fprop=Fprop(input=stochastic), wgrad=Wgrad(precision="bf16"))


def test_both_gemms_that_read_a_tensor_read_one_quantisation():
    refused(
        r"fprop\.input \(E4M3 tensor delayed\) and wgrad\.input \(E4M3 row\) must be alike",
        fprop=Fprop(input=DELAYED),
    )
    for other in (
        {"scale_from": "just_in_time"},
        {"scale_from": "current"},
        {"format": "e5m2"},
        {"scaling": "float32"},
    ):
        refused(
            "dgrad.grad_output .* and wgrad.grad_output .* must be alike",
            dgrad=Dgrad(grad_output=DELAYED),
            wgrad=Wgrad(grad_output=dataclasses.replace(DELAYED, **other)),
        )
    Recipe(name="mine", fprop=Fprop(input=DELAYED), wgrad=Wgrad(precision="bf16"))
    Recipe(name="mine", fprop=Fprop(precision="bf16"), wgrad=Wgrad(input=DELAYED))


def test_a_folded_partner_would_change_the_maximum():
    refused(
        "does not go with a folded partner",
        dgrad=Dgrad(grad_output=DELAYED, weight=COLUMN),
        wgrad=Wgrad(grad_output=DELAYED),
    )


def test_codes_with_another_source_of_scales_are_others():
    tensor = Operand(granularity="tensor")
    assert DELAYED.is_transpose_of(DELAYED) and not DELAYED.is_transpose_of(tensor)


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ({"length": 0}, "history.length = 0: keep the maxima of 1 step at least"),
        ({"margin": -1}, "history.margin = -1: it is the bits of headroom"),
        ({"margin": 9}, "0 to 8"),
    ],
)
def test_a_history_that_is_none(history, message):
    with pytest.raises(ConfigError, match=message):
        History(**history)


def test_mxfp8_has_scales_of_a_power_of_two():
    tile = Operand(granularity="1x32", scaling="float32")
    refused("1x32 scales are E8M0, powers of two", fprop=Fprop(input=tile))


def test_narrow_formats_are_those_of_mx():
    refused("e2m1 is a format of MX. Give that operand granularity", fprop=Fprop(input=Operand(format="e2m1")))
    recipe = mx("e2m3", "e3m2")
    assert recipe.is_emulated and recipe.name == "mx_e2m3_e3m2"
    assert str(recipe.dgrad.grad_output) == "E3M2 1x32" and str(recipe.wgrad.input) == "E2M3 1x32"
    assert load({"base": "mxfp8", "fprop": {"weight": {"format": "e2m1"}}}).fprop.weight.format == "e2m1"


def test_the_kept_scale_of_each_role():
    recipe = load("delayed")
    assert recipe.stored_scale("input") == recipe.fprop.input and recipe.stored_scale("input").has_stored_scale
    assert recipe.stored_scale("grad_output") == recipe.wgrad.grad_output
    assert load("tensorwise").stored_scale("input") is None
    assert (
        load({"base": "delayed", "wgrad": {"precision": "bf16"}, "dgrad": {"precision": "bf16"}}).stored_scale(
            "grad_output"
        )
        is None
    )


INTEGER = Operand(format="int8", rotation=256, scaling="float32")


@pytest.mark.parametrize(
    ("fprop", "message"),
    [
        ({"input": INTEGER}, "no hardware multiplies INT8 by FP8. Give both operands format = 'int8'"),
        ({"input": INTEGER, "weight": dataclasses.replace(INTEGER, rotation=64)}, "rotated by 256 and 64"),
        ({"input": dataclasses.replace(INTEGER, rotation=128)} | {"weight": dataclasses.replace(INTEGER, rotation=128)},
         r"rotation = 128: it is one of \(4, 16, 64, 256, 1024\)"),
        (dict.fromkeys(("input", "weight"), dataclasses.replace(INTEGER, rotation=96, hadamard="sylvester")),
         r"'sylvester' with rotation = 96"),
        (dict.fromkeys(("input", "weight"), Operand(hadamard="sylvester")), "'sylvester' with rotation = 0"),
        ({"input": INTEGER, "weight": dataclasses.replace(INTEGER, hadamard="sylvester")},
         "rotated by 256 and Sylvester 256"),
        (dict.fromkeys(("input", "weight"), Operand(granularity="1x128", rotation=64)), "a rotated operand has one"),
        (dict.fromkeys(("input", "weight"), Operand(format="int8", granularity="1x128")), "INT8 has one scale per"),
        (dict.fromkeys(("input", "weight"), Operand(format="int8", granularity="tensor", scale_from="delayed")),
         "INT8 has the scale of its own maximum"),
    ],
    ids=["mixed", "two rotations", "no size", "no size of Sylvester's", "no rotation", "two matrices", "tiles rotated",
         "tiles of INT8", "stored"],
)  # fmt: skip
def test_integer_and_rotated_operands(fprop, message):
    refused(message, fprop=Fprop(**fprop))


def test_a_second_set_of_codes_for_backward():
    recipe = load("rotated")
    assert recipe.second("input") == recipe.second("weight") == recipe.folded_rows("input") == ROW
    assert recipe.folds("wgrad.input") and recipe.folds("dgrad.weight") and not recipe.reuses("wgrad.input")
    folded = load("folded")
    assert folded.second("input") is None and folded.folded_rows("input") == ROW
    in_fp8 = recipe.with_fprop_in_fp8()
    assert dataclasses.replace(in_fp8, name="folded") == folded and folded.with_fprop_in_fp8() is None
    assert recipe.has_integer_fprop and not folded.has_integer_fprop


def test_rotated_codes_are_never_those_of_a_transpose():
    rotated = Operand(rotation=64)
    recipe = Recipe(
        name="mine", fprop=Fprop(input=rotated, weight=rotated), wgrad=Wgrad(grad_output=rotated, input=rotated)
    )
    assert not recipe.reuses("wgrad.input")
    with pytest.raises(ConfigError, match="is 'column'"):
        Recipe(name="mine", fprop=Fprop(input=rotated, weight=Operand(rotation=64, rounding="stochastic")),
               dgrad=Dgrad(weight=COLUMN))  # fmt: skip


def test_recipes_pickled_before_operands_had_a_rotation():
    """As written at the commit 45e0ae86: five values per operand, and what is derived without a second set."""
    operand = object.__new__(Operand)
    operand.__setstate__(["e5m2", "tensor", "float32", "nearest", "delayed"])
    assert operand == Operand(format="e5m2", granularity="tensor", scaling="float32", scale_from="delayed")
    assert pickle.loads(pickle.dumps(INTEGER)) == INTEGER
    for name in ("folded", "rotated", "delayed"):
        recipe = load(name)
        state = {key: value for key, value in vars(recipe).items() if key != "_second"}
        older = object.__new__(Recipe)
        older.__setstate__(state)
        assert older == recipe and older.second("input") == recipe.second("input")
