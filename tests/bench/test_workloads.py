"""Workloads have the shapes they say, and every implementation starts from the same weights and data."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import ConfigError
from octavo.lab.models.flops import flops_per_token
from octavo_bench.implementations import Implementation
from octavo_bench.workloads import WORKLOADS, build


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
