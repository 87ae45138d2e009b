"""Workloads have the shapes they say, and every implementation starts from the same weights and data."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import ConfigError
from octavo.lab.models.flops import flops_per_token
from octavo_bench import step
from octavo_bench.implementations import Implementation
from octavo_bench.workloads import ENCODER_WORKLOADS, WORKLOADS, build


@pytest.mark.parametrize("name", ["tiny", "tiny-model", "tiny-packed"])
def test_a_step_leaves_gradients_and_then_drops_them(name: str) -> None:
    training = build(WORKLOADS[name], Implementation(name="bf16"), "cpu", compile=False)
    assert {parameter.dtype for parameter in training.model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in training.model.buffers()} == {torch.float32}
    training.forward_backward()
    assert all(parameter.grad is not None for parameter in training.model.parameters())
    training.update()
    assert all(parameter.grad is None for parameter in training.model.parameters())


def test_a_whole_model_learns_and_a_stack_stays() -> None:
    moved = []
    for name in ("tiny", "tiny-model"):
        training = build(WORKLOADS[name], Implementation(name="bf16"), "cpu", compile=False)
        before = [parameter.clone() for parameter in training.model.parameters()]
        training.step()
        moved.append(any(not a.equal(b) for a, b in zip(before, training.model.parameters(), strict=True)))
    assert moved == [False, True]


@pytest.mark.parametrize("name", ["tiny", "tiny-model"])
def test_builds_are_alike(name: str) -> None:
    made = [build(WORKLOADS[name], Implementation(name="x"), "cpu", compile=False) for _ in range(2)]
    for training in made:
        training.forward_backward()
    one, other = (list(training.model.parameters()) for training in made)
    assert all(a.equal(b) and a.grad.equal(b.grad) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", WORKLOADS)
def test_counts_agree_with_the_model(name: str) -> None:
    workload = WORKLOADS[name]
    blocks = workload.layers * sum(n * k for n, k in workload.block_gemms)
    assert workload.weights == blocks + workload.vocab * workload.dim
    if workload.vocab:
        length = min(2 * workload.document or workload.sequence, workload.sequence)
        assert workload.flops == workload.tokens * flops_per_token(workload.config, length)


def test_a_field_given_by_hand_makes_it_custom() -> None:
    workload = WORKLOADS["tiny"]
    assert workload.but(dim=None, layers=None) is workload
    custom = workload.but(layers=3, vocab=64)
    assert (custom.name, custom.layers, custom.vocab, custom.dim) == ("custom", 3, 64, workload.dim)


@pytest.mark.parametrize(
    ("field", "message"),
    [({"heads": 3}, "3 heads do not divide dim 128"), ({"batch": 0}, "--batch must be positive"), ({"dim": 0}, "dim")],
)
def test_impossible_shapes_are_refused(field: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WORKLOADS["tiny"].but(**field)


def test_packed_documents_have_the_length_that_they_say() -> None:
    workload = WORKLOADS["llama-1b-packed"].but(dim=64, ffn=64, heads=4, kv_heads=2, layers=1, vocab=64)
    model = build(workload, Implementation(name="bf16"), "cpu", compile=False).model
    assert model.config.documents == "separate" and workload.document == 512


def test_encoder_layers_have_attention_in_fp8() -> None:
    workload = ENCODER_WORKLOADS["tiny-encoder-eager"]
    session = step.Session(workload=workload, device="cpu", steps=1, warm_up_s=0.0)
    bf16, ours, _ = step.bench_step(session, ("octavo folded",))
    assert ours["fp8_gemms"] and sum(ours["fp8_gemms"].values()) == 4 * 3 * workload.layers and not ours["fallbacks"]
    assert ours["gradient_norm"] == pytest.approx(bf16["gradient_norm"], rel=0.05)
    assert step._shape(ours).endswith("dim 64, ffn 128, 4 heads, 2 x 16 tokens, all in eager mode")


def test_operations_of_encoder_layers() -> None:
    workload = ENCODER_WORKLOADS["vit-l-stack"]
    weights = 8 * (4 * 1024**2 + 2 * 1024 * 4096)
    assert workload.flops == 3 * workload.tokens * (2 * weights + 8 * 4 * 197 * 1024)
    names = {*workload.implementations()}
    assert {"bf16", "octavo rotated"} <= names and not any("delayed" in name or "engine" in name for name in names)
    with pytest.raises(ConfigError, match="--kv-heads: vit-l-stack has no such field"):
        workload.but(kv_heads=2)
    assert workload.but(layers=2, dim=64).make().layers[1].self_attn.embed_dim == 64
