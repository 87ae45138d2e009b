import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

import octavo
from octavo.errors import ConfigError
from octavo_bench import hf


def test_the_trainer_trains_each_implementation_on_the_same_tokens() -> None:
    rows = [*hf.bench_hf(hf.MODELS["tiny"], ["octavo folded"], ["eager"], device="cpu", steps=2)]
    assert [row["implementation"] for row in rows] == ["bf16", "octavo folded"]
    assert rows[0]["ratio_to_bf16"] == 1.0
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=0.01) and rows[1]["loss"] != rows[0]["loss"]
    assert "| tiny | eager | octavo folded |" in hf.KIND.markdown(rows)


def test_weights_in_bf16_and_blocks_compiled_the_same_way_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    seen: list[tuple[set[torch.dtype], list[str]]] = []

    def compile_blocks(model: torch.nn.Module) -> None:
        report = octavo.conversion.compile_blocks(model, backend="eager")
        seen.append(({p.dtype for p in model.parameters()}, [*report.blocks]))

    monkeypatch.setattr(octavo, "compile", compile_blocks, raising=False)
    rows = [*hf.bench_hf(hf.MODELS["tiny-bf16"], ["octavo folded"], ["eager", "blocks"], device="cpu", steps=2)]
    assert [(row["mode"], row["implementation"]) for row in rows] == [
        (mode, name) for mode in ("eager", "blocks") for name in ("bf16", "octavo folded")
    ]
    assert seen == [({torch.bfloat16}, ["model.layers.0", "model.layers.1"])] * 2
    assert rows[2]["loss"] == pytest.approx(rows[0]["loss"], rel=0.01)


FUSED = ["bf16 + fusions + loss", "octavo folded + fusions", "octavo folded + fusions + loss"]


def test_fusions_train_bf16_and_fp8_alike() -> None:
    rows = [*hf.bench_hf(hf.MODELS["tiny-bf16"], FUSED, ["eager"], device="cpu", steps=1)]
    assert [row["implementation"] for row in rows] == ["bf16", *FUSED]
    for row in rows:
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=0.01)


def test_fusions_stand_beside_bf16_with_the_same_where_blocks_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((16.0, 8.0, 6.0, 4.0, 16.0))
    monkeypatch.setattr(hf, "_measure", lambda *_: {"ms": next(times), "tokens_per_s": 1.0, "peak_gib": 1.0})
    rows = [*hf.bench_hf(hf.MODELS["tiny"], FUSED, ["eager", "torch_compile"], device="cpu")]
    assert [row["implementation"] for row in rows] == ["bf16", *FUSED, "bf16"]
    assert [row["ratio_to_bf16"] for row in rows] == [1.0, 2.0, 2.667, 4.0, 1.0]
    # BF16 has no FP8, and BF16 with the fusions of the third was not measured.
    assert [row.get("ratio_to_bf16_alike") for row in rows] == [None, None, None, 2.0, None]
    assert "| times that of BF16 with the same fusions |" in hf.KIND.markdown(rows)


def test_attention_without_a_mask_is_the_same_attention() -> None:
    torch.manual_seed(0)
    model = hf._make(hf.MODELS["tiny"], "cpu")
    tokens = torch.randint(64, (2, 32))
    usual = model(input_ids=tokens, labels=tokens).loss
    hf.leave_out_mask(model)
    assert model.config._attn_implementation == hf.CAUSAL
    assert torch.equal(model(input_ids=tokens, labels=tokens).loss, usual)


def test_one_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: object) -> None:
        raise RuntimeError("no such kernel")

    found = hf.implementations(64) | {"octavo folded": broken}
    monkeypatch.setattr(hf, "implementations", lambda tokens: found)
    rows = [*hf.bench_hf(hf.MODELS["tiny"], ["octavo folded"], ["eager"], device="cpu", steps=1)]
    assert "tokens_per_s" in rows[0] and "no such kernel" in rows[1]["error"]
    with pytest.raises(ConfigError, match="there is no implementation 'octavo foldd'"):
        [*hf.bench_hf(hf.MODELS["tiny"], ["octavo foldd"], ["eager"], device="cpu")]
