"""Hard inputs: what every recipe must stand, what the finer scales must save, and where a NaN goes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import octavo
from octavo import recipes
from octavo.lab.models import ModelConfig, build
from octavo.numerics import sqnr_db
from octavo_bench import stress

FP8 = [name for name in recipes.names() if recipes.load(name).is_fp8]
FINE = [
    name for name in FP8 if "tensor" not in {o.granularity for _, a, b in recipes.load(name).gemms() for o in (a, b)}
]
"""No scale is that of a whole tensor."""
FEATURES = ("y", "dx", "dw")


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["case"], row["recipe"]): row for row in stress.bench_stress()}


def test_every_case_by_every_recipe_is_finite(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert len(rows) == len(stress.CASES) * len(recipes.names())
    assert [row for row in rows.values() if row.get("error") or row["nonfinite"]] == []
    table = stress.KIND.markdown([*rows.values()])
    assert table.count("| folded |") == len(stress.CASES) and "failed" not in table and "not finite" not in table


@pytest.mark.parametrize("recipe", FINE)
def test_fine_scales_keep_the_worst_row(rows: dict[tuple[str, str], dict[str, Any]], recipe: str) -> None:
    for case in ("outlier tokens", "SwiGLU spikes of 2000", "gradients at 1e-9", "packing with odd lengths"):
        row = rows[case, recipe]
        assert min(row[f"{name}_worst_db"] for name in FEATURES) > 20, case
        assert min(row[f"{name}_median_db"] for name in FEATURES) > 27, case


def test_a_scale_for_all_tokens_loses_the_small_ones(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    case = "packing with odd lengths"
    assert rows[case, "tensorwise"]["y_worst_db"] < rows[case, "folded"]["y_worst_db"] - 5


def test_a_scale_from_before_saturates_where_a_spike_is_sudden(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    case = "SwiGLU spikes of 2000"
    for recipe in ("delayed", "static"):
        assert rows[case, recipe]["y_worst_db"] < 3
    assert rows[case, "just_in_time"]["y_worst_db"] > 20


@pytest.mark.parametrize("recipe", FP8)
def test_the_size_of_a_gradient_does_not_matter(recipe: str, rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    plain = stress.measure(stress.Case("plain", lambda inputs, _: inputs, is_sudden=False), recipe)
    for name in ("dx_median_db", "dw_median_db"):  # 1e-9 is no power of two: other codes, the same precision
        assert rows["gradients at 1e-9", recipe][name] == pytest.approx(plain[name], abs=0.3)


def test_figures_against_their_definition() -> None:
    reference = torch.tensor([[1.0, 0.0], [0.0, 0.0], [3.0, 4.0], [1.0, 1.0]], dtype=torch.float64)
    computed = reference + torch.tensor([[0.1, 0.0], [9.0, 0.0], [0.0, 0.0], [0.0, 0.01]])
    found = stress._figures("y", reference, computed)
    assert found["y_worst_db"] == pytest.approx(sqnr_db(reference[0], computed[0])) == pytest.approx(20)
    assert found["y_median_db"] == pytest.approx(10 * math.log10(2 / 1e-4))


def test_what_cannot_run_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(stress, "measure", fails)
    rows = [*stress.bench_stress(["folded"])]
    assert {row["error"] for row in rows} == {"ValueError: broken"}
    assert "failed: ValueError: broken" in stress.KIND.markdown(rows)


# Where a NaN goes. It stays in its row because it decides no scale: for every recipe, whatever shares a scale.


def layer(recipe: str) -> torch.nn.Sequential:
    """Return a layer that has made a plain step, so that kept scales are known."""
    torch.manual_seed(1)
    steps = [stress._plain(stress.M, torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    return stress._converted(recipe, steps, "cpu")


def products(model: torch.nn.Sequential, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    return stress._step(model, stress.Inputs(x, model[0].weight.detach().clone(), dy))


@pytest.mark.covering(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("recipe", FP8)
def test_a_nonfinite_token_poisons_its_own_row_only(recipe: str, value: float) -> None:
    plain = stress._plain(stress.M, torch.Generator().manual_seed(7))
    x, dy = plain.x_MK, plain.dy_MN
    clean = products(layer(recipe), x.clone(), dy)
    poisoned = x.clone()
    poisoned[5, 3] = value
    found = products(layer(recipe), poisoned, dy)
    others = torch.arange(stress.M) != 5
    assert not found["y"][5].isfinite().any()  # it never disappears
    columns = torch.arange(stress.K) != 3
    assert not found["dw"][:, 3].isfinite().any()
    for a, b in ((found["y"][others], clean["y"][others]), (found["dx"], clean["dx"])):
        assert torch.equal(a, b)
    assert found["dw"][:, columns].isfinite().all()


@pytest.mark.covering(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", FP8)
def test_a_nonfinite_gradient_poisons_its_own_row_only(recipe: str, value: float) -> None:
    plain = stress._plain(stress.M, torch.Generator().manual_seed(7))
    clean = products(layer(recipe), plain.x_MK.clone(), plain.dy_MN)
    dy = plain.dy_MN.clone()
    dy[5, 3] = value
    found = products(layer(recipe), plain.x_MK.clone(), dy)
    others, rows = torch.arange(stress.M) != 5, torch.arange(stress.N) != 3
    assert not found["dx"][5].isfinite().any()
    assert not found["dw"][3].isfinite().any()
    assert torch.equal(found["dx"][others], clean["dx"][others])
    assert found["dw"][rows].isfinite().all()


@pytest.mark.covering(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", FP8)
def test_in_a_model_it_goes_where_it_goes_in_bf16(recipe: str, value: float) -> None:
    """Attention takes it to other tokens of its sequence; the products in FP8 take it nowhere else."""
    found = {name: logits(name, value) for name in (recipe, "bf16")}
    clean = logits(recipe, None)
    assert torch.equal(found[recipe].isfinite(), found["bf16"].isfinite())
    assert not found[recipe][0, 5].isfinite().any() and found[recipe][1].isfinite().all()
    if recipe in FINE:
        assert torch.equal(found[recipe][1], clean[1])
    else:  # the scale of what is left of the tensor may be another one
        assert sqnr_db(clean[1], found[recipe][1]) > 15


def logits(recipe: str, value: float | None) -> torch.Tensor:
    """Return the logits of two sequences of a small Llama, with `value` in the embedding of token 5 of the first."""
    model = build(ModelConfig(vocab=32, dim=32, layers=2, heads=2, ffn=64, sequence=8), seed=0)
    start = "delayed" if recipe == "static" else recipe  # its codes, without a calibration
    octavo.convert(model, start, policy=octavo.Policy(min_gain=0))
    tokens = torch.arange(16).view(2, 8)

    def poison(_module: torch.nn.Module, _inputs: object, y: torch.Tensor) -> torch.Tensor:
        at = tuple(torch.tensor(i) for i in (0, 5, 2))
        return y if value is None else y.index_put(at, torch.tensor(value))

    model.get_submodule("tok_embeddings").register_forward_hook(poison)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        made: torch.Tensor = model(tokens)
    return made
