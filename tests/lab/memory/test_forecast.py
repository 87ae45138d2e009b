"""Forecasts against peaks measured on a GPU, in the committed result of `octavo bench step`."""

import copy
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._inductor import compile_fx
from torch._subclasses.fake_tensor import FakeTensor

import octavo
from octavo.errors import ConfigError
from octavo.kernels.runtime import dispatch
from octavo.lab.memory import Forecast, Program, forecast
from octavo.lab.memory.forecast import WORKSPACE_OF_CUBLAS, largest
from octavo.lab.memory.timeline import Kind
from octavo.lab.models.llama import Llama
from octavo_bench import results
from octavo_bench.implementations import implementations
from octavo_bench.workloads import WORKLOADS, build

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
STEPS = (row for result in results.newest("step", RESULTS) for row in result.rows)
ROWS = {(row["workload"], row["implementation"]): row for row in STEPS}


def test_a_small_forecast_is_shown_in_mib() -> None:
    kinds: dict[Kind, int] = {"weights": 3 * 2**18, "workspace": 2**26}
    small, large = (Forecast({kind: n * size for kind, size in kinds.items()}, 0, 1, gpus=2) for n in (1, 1000))
    assert str(small).splitlines() == [
        "weights           0.75 MiB",
        "workspace        64.00 MiB",
        "peak             64.75 MiB allocated on each of 2 GPUs",
    ]
    assert str(large).splitlines()[-1] == "peak             63.23 GiB allocated on each of 2 GPUs"


@pytest.mark.parametrize(
    ("workload", "implementation"),
    [
        ("llama-8b-stack", "octavo folded"),
        ("llama-1b", "bf16"),
    ],
)
def test_a_forecast_is_within_5_percent_of_what_was_measured(workload: str, implementation: str) -> None:
    chosen = WORKLOADS[workload]
    known = implementations(head=chosen.vocab > 0)[implementation]

    def made() -> Program:
        training = build(chosen, known, "cpu", compile=True)
        return Program(models=[training.model], forward_backward=training.forward_backward, update=training.update)

    predicted = forecast(made, steady=True).peak / 2**30
    row = ROWS.get((f"{workload}, later", implementation)) or ROWS[workload, implementation]
    assert predicted == pytest.approx(row["peak_gib"], rel=0.05)


DIM, TOKENS = 1024, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.gelu(F.silu(self.linear(x))))


def mlp(
    *,
    convert: bool = False,
    compile: bool = False,
    policy: octavo.Policy | None = None,
    **settings: object,
) -> Callable[[], Program]:
    def made() -> Program:
        blocks = nn.ModuleList(Block() for _ in range(4))
        model = nn.Sequential(blocks)
        model.bfloat16()
        if convert:
            octavo.convert(model, "folded", policy=policy)
        if compile:
            for block in blocks:
                block.compile(fullgraph=True)
        optimizer = octavo.optim.AdamW(model.named_parameters(), **{"states": "fp8", **settings})  # type: ignore[arg-type]
        x = torch.randn(TOKENS, DIM, dtype=torch.bfloat16)

        def forward_backward() -> None:
            y = x
            for block in blocks:
                y = block(y)
            y.sum().backward()

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return Program(models=[model], forward_backward=forward_backward, update=update)

    return made


def test_every_byte_of_a_small_program_is_accounted_for() -> None:
    found = forecast(mlp(states="fp32", keep=octavo.optim.keep_none))
    values, vector = DIM * DIM, 512 * -(-DIM * 2 // 512)
    assert 0 <= found.by_kind["weights"] - 4 * (2 * values + vector) < 2**14  # besides: counters, small tables
    assert 4 * 10 * values <= found.by_kind["states"] < 4 * 10.1 * values  # at most a kilobyte beside each matrix
    # x; of each block the inputs of SiLU and GELU, and the output of Tanh, which the next layer reads.
    assert found.by_kind["activations"] == pytest.approx(2 * TOKENS * DIM * (1 + 4 * 3), rel=0.01)
    assert found.by_kind["workspace"] >= WORKSPACE_OF_CUBLAS


def peaks(*programs: Callable[[], Program]) -> list[int]:
    return [forecast(program).peak for program in programs]


def test_what_an_option_saves_is_seen() -> None:
    compiled, eager = peaks(mlp(compile=True), mlp())
    assert compiled <= eager - 4 * 2 * TOKENS * DIM  # GELU's inputs are recomputed
    fp8 = octavo.Policy(weights="fp8")
    stored, plain = (forecast(mlp(convert=True, policy=policy)).by_kind for policy in (fp8, None))
    assert stored["weights"] == pytest.approx(4 * DIM * DIM, rel=0.02)  # the codes alone, and one scale per row
    assert plain["weights"] == pytest.approx(4 * 2 * DIM * DIM, rel=0.02)  # BF16 alone
    assert plain["activations"] == pytest.approx(stored["activations"], rel=0.01)  # neither keeps codes of weights
    tier = [forecast(mlp(states=states)).by_kind["states"] for states in ("fp32", "exact", "fp8", "fp8-min")]
    assert tier == sorted(tier, reverse=True)


def test_a_sharded_run_has_a_share_of_what_belongs_to_parameters() -> None:
    def shares(gpus: int) -> Forecast:
        return forecast(mlp(states="fp32"), gpus=gpus)

    one, four = shares(1), shares(4)
    for kind in ("weights", "states"):
        assert four.by_kind[kind] == pytest.approx(one.by_kind[kind] / 4, rel=0.01)  # type: ignore[index]
    assert four.by_kind["activations"] == one.by_kind["activations"]
    whole = 2 * 2 * DIM * DIM  # two blocks, and the gradients of two
    assert four.by_kind["workspace"] >= one.by_kind["workspace"] + 2 * whole
    with pytest.raises(ConfigError, match="1 GPU or more"):
        shares(0)


@pytest.mark.parametrize(("convert", "size"), [(False, 2), (True, 1)])
def test_a_sharded_run_may_keep_what_it_has_gathered(convert: bool, size: int) -> None:
    twice, once = (forecast(mlp(convert=convert), gpus=4, reshard=reshard).by_kind for reshard in (True, False))
    more = {kind: once[kind] - twice[kind] for kind in once}
    assert more.pop("workspace") == pytest.approx(2 * 2 * size * DIM * DIM / 2, rel=0.02)  # the other two blocks
    assert not any(more.values())


def test_a_sharded_run_keeps_no_codes_of_weights_that_it_gathers_in_fp8() -> None:
    bf16, fp8 = (forecast(mlp(convert=convert), gpus=4) for convert in (False, True))
    assert fp8.by_kind["weights"] == pytest.approx(bf16.by_kind["weights"], rel=0.01)


def test_nothing_outside_is_changed() -> None:
    attention, state = F.scaled_dot_product_attention, torch.get_rng_state()
    forecast(mlp(convert=True))
    assert F.scaled_dot_product_attention is attention
    assert torch.equal(torch.get_rng_state(), state)
    norm, x = nn.RMSNorm(64), torch.full((1, 64), 1e-4)
    expected = norm(x)
    octavo.nn.norm.adopt(norm, None)
    faked: list[nn.Module] = []

    def made() -> Program:
        faked.append(nn.RMSNorm(64))
        octavo.nn.norm.adopt(faked[0], None)
        return Program(models=faked, forward_backward=lambda: faked[0](torch.ones(1, 64)).sum().backward())

    forecast(made)
    with dispatch.fake_mode():  # its own kernel, with the eps that PyTorch takes
        torch.testing.assert_close(norm(x), expected)


def test_pytorch_is_not_patched_during_a_forecast() -> None:
    def internals() -> list[object]:
        return [
            compile_fx.compile_fx,
            nn.RMSNorm.forward,
            FakeTensor.data_ptr,
            FakeTensor.__deepcopy__,
            weakref.getweakrefs,
        ]

    inside: list[object] = []

    def made() -> Program:
        inside.extend(internals())
        model = nn.Linear(8, 8).bfloat16()  # which swaps parameters, and refuses those with weak references
        twin = copy.deepcopy(model)
        assert twin.weight.fake_mode is model.weight.fake_mode  # type: ignore[attr-defined]
        return Program(models=[model, twin], forward_backward=lambda: None)

    forecast(made)
    assert inside == internals()


class SumOfLinears(nn.Module):
    """Has the layers of an MLP, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, 2 * DIM, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.w1(x) + self.w3(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("build", "kinds"),
    [(lambda: Llama(WORKLOADS["tiny"].config), {"mlp", "shared", "norm"}), (SumOfLinears, {"shared"})],
    ids=["Llama", "no MLP"],
)
def test_what_is_computed_together_is_found_among_fakes_as_among_true_tensors(
    build: Callable[[], nn.Module], kinds: set[str]
) -> None:
    """The probe compares values, and reading fakes gives True."""
    policy = octavo.Policy(min_gain=0.0)
    plans = [octavo.plan(build(), "folded", policy=policy)]

    def made() -> Program:
        plans.append(octavo.plan(build(), "folded", policy=policy))
        return Program(models=[], forward_backward=lambda: None)

    forecast(made)
    assert plans[1].structures == plans[0].structures
    assert {structure.kind for structure in plans[1].structures} == kinds


def test_an_error_of_the_program_is_its_own() -> None:
    def broken() -> Program:
        raise KeyError("broken")

    attention = F.scaled_dot_product_attention
    with pytest.raises(KeyError, match="broken"):
        forecast(broken)
    assert F.scaled_dot_product_attention is attention


@given(
    a=st.integers(0, 50), b=st.integers(1, 1000), c=st.integers(0, 10**6),
    budget=st.integers(1, 10**8), start=st.integers(1, 200),
)  # fmt: skip
def test_the_largest_that_fits_is_found_and_no_size_is_asked_for_twice(
    a: int, b: int, c: int, budget: int, start: int
) -> None:
    asked: list[int] = []

    def peak_of(size: int) -> int:
        asked.append(size)
        return a * size**3 + b * size + c

    found = largest(peak_of, budget, start=start)
    assert found == 0 or a * found**3 + b * found + c <= budget
    assert a * (found + 1) ** 3 + b * (found + 1) + c > budget
    assert len(asked) == len(set(asked))


def test_few_sizes_are_tried() -> None:
    asked: list[int] = []

    def peak_of(size: int) -> int:
        asked.append(size)
        return 16 * size**3 * 4096 + 10**9

    assert largest(peak_of, 139 * 2**30) == 131
    assert len(asked) <= 6
