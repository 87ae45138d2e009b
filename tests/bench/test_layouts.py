"""The estimate of a step against closed forms, against what must hold whatever the rates, and its search."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.lab.models.flops import flops_per_token
from octavo_bench.assumptions import MODELS, SCHEMES, Assumptions, Group
from octavo_bench.layouts import (
    GIB,
    Case,
    Layout,
    best,
    compute_seconds,
    data_groups,
    data_parallel,
    embedding_rows,
    estimate,
    fits,
    layouts,
    memory_bytes,
    micro_batches,
    state_bytes,
    tensor_parallel,
)

RATES = {"gemm_tflops": 700.0, "attention_tflops": 400.0, "elementwise_ps": 2.0, "optimizer_ps": 8.0}
BF16 = replace(SCHEMES["bf16"], **RATES, activation_bytes=1.7)
FP8 = replace(SCHEMES["fp8"], **{**RATES, "gemm_tflops": 1250.0}, activation_bytes=1.5)
FP8_BLOCK = replace(FP8, gradient_wire=SCHEMES["fp8, fp8-block"].gradient_wire, embedding_by_rows=True)


def case(model="8B", scheme=BF16, gpus=64, tokens=2**22, **assumptions) -> Case:
    return Case(
        model=MODELS[model],
        scheme=scheme,
        head_tflops=700.0,
        assumptions=Assumptions(**assumptions),
        gpus=gpus,
        batch_tokens=tokens,
    )


def some_layouts(model="8B", gpus=64, tokens=2**22) -> list[Layout]:
    return list(layouts(case(model, gpus=gpus, tokens=tokens)))


any_layout = st.sampled_from(some_layouts("70B", 512) + some_layouts("70B", 64))
any_scheme = st.sampled_from([BF16, FP8, FP8_BLOCK])


def gpus_of(layout: Layout) -> int:
    return layout.tensor * layout.stages * layout.shard * layout.replicas


# --- time ------------------------------------------------------------------------------------------------------------


def test_products_are_those_of_the_models_flops():
    """With one rate for all and nothing beside products, the time is the FLOPs of the step by it."""
    one = replace(BF16, gemm_tflops=500.0, attention_tflops=500.0, elementwise_ps=0.0)
    found = replace(case(scheme=one), head_tflops=500.0)
    seconds, _ = compute_seconds(found, Layout(1, 1, 64, 1, 1))
    expected = flops_per_token(MODELS["8B"], 8192) * 2**22 / 64 / 500e12
    assert seconds == pytest.approx(expected)


@given(any_layout)
def test_work_is_split_over_all_gpus(layout):
    found = case("70B", gpus=gpus_of(layout))
    alone, _ = compute_seconds(found, Layout(1, 1, 1, 1, 1, recomputes=layout.recomputes))
    assert compute_seconds(found, layout)[0] == pytest.approx(alone / gpus_of(layout))


def test_the_bubble_is_that_of_1f1b_and_of_interleaved_chunks():
    layout = Layout(1, 4, 16, 1, 1, gathers_once=True)
    found = estimate(case(), layout)
    micro = 2**22 // (16 * 8192)
    work, _ = compute_seconds(case(), layout)
    assert found.bubble == pytest.approx(3 / micro * work)
    assert estimate(case(pipeline_chunks=2), layout).bubble == pytest.approx(found.bubble / 2)


@given(any_layout, any_scheme, st.floats(0, 1), st.floats(0, 1))
def test_hiding_more_never_takes_longer_and_never_hides_all_work(layout, scheme, one, other):
    shares = [{"overlap": share, "tensor_overlap": share} for share in sorted((one, other))]
    less, more = (estimate(case("70B", scheme, gpus_of(layout), **share), layout) for share in shares)
    assert more.seconds <= less.seconds * (1 + 1e-12)
    assert 0 <= more.exposed <= more.communication * (1 + 1e-12)
    assert more.seconds >= more.compute


# --- communication ---------------------------------------------------------------------------------------------------


def test_bytes_of_fsdp_are_the_closed_form():
    """Blocks gathered twice and reduced once in each micro-batch; embedding and head gathered once, in BF16."""
    layout = Layout(1, 1, 64, 1, 2)
    found = data_parallel(case(), layout).sent
    micro, away = micro_batches(case(), layout), 63 / 64
    embedding = 128256 * 4096
    blocks = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    assert micro == 4
    assert found["weights"] == pytest.approx(micro * away * (2 * 2 * blocks + 2 * 2 * embedding))
    assert found["gradients"] == pytest.approx(micro * away * 4 * (blocks + 2 * embedding))
    once = data_parallel(case(), layout._replace(gathers_once=True)).sent
    assert once["weights"] == pytest.approx(away * 2 * (blocks + 2 * embedding))
    assert once["gradients"] == pytest.approx(away * 4 * (blocks + 2 * embedding))


def test_an_embedding_by_rows_costs_its_tokens():
    """On 4 GPUs with a sequence each: 8192 rows of 4096 BF16 values there and back, and nothing else of 128256."""
    layout, away = Layout(1, 1, 4, 1, 1), 3 / 4
    four = {"gpus": 4, "tokens": 4 * 8192}
    embedding, rows = 128256 * 4096, 2 * 8192 * 4096
    whole, by_rows = (
        data_parallel(case(scheme=one, **four), layout)
        for one in (replace(FP8_BLOCK, embedding_by_rows=False), FP8_BLOCK)
    )
    assert whole.sent["weights"] - by_rows.sent["weights"] == pytest.approx(away * (2 * embedding - rows))
    assert whole.sent["gradients"] - by_rows.sent["gradients"] == pytest.approx(
        away * ((1 + 1 / 128) * embedding - rows)
    )
    assert by_rows.seconds < whole.seconds
    many = case(scheme=FP8_BLOCK, gpus=4, tokens=2**20)  # gathered once for 32 micro-batches: more tokens than rows
    assert embedding_rows(many, layout._replace(gathers_once=True)) == 0 < embedding_rows(many, layout)
    assert embedding_rows(many, layout._replace(tensor=2)) == embedding_rows(many, layout._replace(stages=2)) == 0


def test_on_four_gpus_63_percent_less_is_sent():
    sent = [
        sum(data_parallel(case(scheme=one, gpus=4, tokens=4 * 8192), Layout(1, 1, 4, 1, 1)).sent.values())
        for one in (BF16, FP8_BLOCK)
    ]
    assert 1 - sent[1] / sent[0] >= 0.63


def test_replicas_add_an_all_reduce_of_a_shard():
    flat, hybrid = Layout(1, 1, 64, 1, 8, True), Layout(1, 1, 8, 8, 8, True)
    one, other = data_parallel(case(), flat).sent, data_parallel(case(), hybrid).sent
    parameters = sum(other.values()) / (7 / 8 * (2 + 4) + 2 * 7 / 8 * 4 / 8)
    assert parameters == pytest.approx(8.03e9, rel=1e-2)
    assert other["weights"] == pytest.approx(one["weights"] * (7 / 8) / (63 / 64))


def test_without_latency_time_is_bytes_by_rate():
    free = {"nvlink_latency_us": 0.0, "network_latency_us": 0.0}
    found = data_parallel(case(**free), Layout(1, 1, 64, 1, 8))
    rate = min(8 * 50e9 * 0.85, 450e9 * 0.7)
    assert found.seconds == pytest.approx(sum(found.sent.values()) / rate)


@given(any_layout)
def test_fp8_never_sends_or_waits_more_than_bf16(layout):
    sent = [estimate(case("70B", scheme, gpus_of(layout)), layout) for scheme in (BF16, FP8, FP8_BLOCK)]
    for more, less in itertools.pairwise(sent):
        assert all(less.sent[kind] <= more.sent[kind] for kind in more.sent)
        assert less.communication <= more.communication and less.exposed <= more.exposed * (1 + 1e-12)


@given(any_layout, any_scheme)
def test_no_gpu_beats_the_bandwidth_bound(layout, scheme):
    found = case("70B", scheme, gpus_of(layout))
    links = found.assumptions.links
    for traffic, rate in (
        (data_parallel(found, layout), links.inside),
        (tensor_parallel(found, layout), links.inside),
    ):
        assert traffic.seconds >= sum(traffic.sent.values()) / rate * (1 - 1e-9)


def test_tensor_parallel_saves_three_tenths():
    """BF16: 6 gathers and 4 reduce-scatters of 2 bytes; FP8: the gathers of 1, and a scale per token."""
    layout = Layout(8, 1, 8, 1, 1)
    one, other = (tensor_parallel(case(scheme=s), layout).sent["tensor parallel"] for s in (BF16, FP8))
    assert other / one == pytest.approx((6 * (1 + 4 / 4096) + 4 * 2) / 20)
    layers_tokens = 32 * 2**22 / 8
    assert one == pytest.approx(7 / 8 * 20 * 4096 * layers_tokens)


@pytest.mark.parametrize(
    ("layout", "shard", "replicas"),
    [
        (Layout(1, 1, 64, 1, 1), Group(8, 8), Group(1, 1)),
        (Layout(1, 1, 8, 8, 1), Group(1, 8), Group(8, 1)),
        (Layout(1, 1, 4, 16, 1), Group(1, 4), Group(8, 2)),
        (Layout(4, 1, 16, 2, 1), Group(8, 2), Group(2, 1)),
        (Layout(8, 2, 4, 1, 1), Group(4, 1), Group(1, 1)),
        (Layout(1, 1, 4, 1, 1), Group(1, 4), Group(1, 1)),
    ],
)
def test_ranks_fill_a_host_before_the_next(layout, shard, replicas):
    assert data_groups(case(), layout) == (shard, replicas)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_states_are_counted_by_the_optimizer():
    assert state_bytes(BF16) == {"weight": 4, "gradient": 4, "first": 4, "second": 4, "total": 16}
    assert state_bytes(FP8)["total"] == pytest.approx(7, abs=0.02)


def test_memory_is_that_of_the_shard_and_of_what_is_at_work():
    found = memory_bytes(case(), Layout(1, 1, 64, 1, 1))
    parameters = 8.03e9
    assert found["states"] + found["weights"] == pytest.approx(12 * parameters / 64, rel=1e-2)
    values = 6 * 4096 + 2 * 1024 + 3 * 14336
    assert found["activations"] == pytest.approx(32 * 8192 * values * 1.7)
    two_blocks, ends = 2 * 218.1e6, 2 * 128256 * 4096
    assert found["gathered"] == pytest.approx(2 * two_blocks + 2 * ends, rel=1e-3)
    assert found["gradients"] == pytest.approx(4 * (parameters / 64 + two_blocks + ends), rel=1e-2)


@given(any_layout, any_scheme)
def test_what_saves_memory_saves_memory(layout, scheme):
    def total(changed: Layout) -> float:
        return sum(memory_bytes(case("70B", scheme, gpus_of(changed)), changed).values())

    assert total(layout._replace(recomputes=True)) <= total(layout._replace(recomputes=False))
    assert total(layout._replace(gathers_once=False)) <= total(layout._replace(gathers_once=True))
    doubled = layout._replace(shard=layout.shard * 2)
    if layout.shard > 1 and micro_batches(case("70B", gpus=gpus_of(doubled)), doubled):
        assert total(doubled) <= total(layout)


# --- the search ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "gpus"), [("8B", 64), ("70B", 512), ("175B", 64)])
def test_layouts_use_every_gpu_and_token_once(model, gpus):
    found = some_layouts(model, gpus)
    assert len(set(found)) == len(found) > 50
    for layout in found:
        assert gpus_of(layout) == gpus and layout.tensor <= 8
        tokens = layout.shard * layout.replicas * layout.sequences * MODELS[model].sequence
        assert tokens * micro_batches(case(model, gpus=gpus), layout) == 2**22
        assert MODELS[model].layers % layout.stages == 0


@pytest.mark.parametrize("scheme", [BF16, FP8])
def test_the_best_fits_and_none_that_fits_is_faster(scheme):
    whole = case("70B", scheme)
    found = best(whole)
    assert found is not None and fits(whole, found.layout)
    assert sum(found.memory.values()) <= (139 - 8) * GIB
    fitting = [layout for layout in layouts(whole) if fits(whole, layout)]
    assert 0 < len(fitting) < len(list(layouts(whole)))
    assert min(estimate(whole, layout).seconds for layout in fitting) == found.seconds


def test_what_fits_nowhere_has_no_best():
    assert best(case("175B", gpus=8)) is None
    assert best(case("175B", gpus=64)) is not None


def test_a_layout_is_written_out():
    assert str(Layout(2, 4, 8, 16, 1, True, True)) == "TP 2, PP 4, FSDP 8 x 16, 1 seq., gathered once, recomputed"
    assert str(Layout(1, 1, 4, 1, 2)) == "FSDP 4, 2 seq."
