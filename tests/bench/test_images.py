"""The ResNet workload: its operations, its step in every implementation, and what it refuses."""

from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.nn import Conv2d
from octavo_bench import step
from octavo_bench.workloads import IMAGE_WORKLOADS, build


def bench(workload: Any, names: tuple[str, ...] = ()) -> list[step.Row]:
    return [*step.bench_step(step.Session(workload=workload, device="cpu", steps=2, warm_up_s=0.0), names)]


def test_operations_of_resnet_50():
    # 4.09e9 multiply-adds an image forward with the stride in the 3x3 convolution, three times that with backward.
    workload = IMAGE_WORKLOADS["resnet50"]
    assert workload.flops == pytest.approx(3 * 256 * 2 * 4.09e9, rel=2e-3)
    assert workload.tokens == 256 and workload.pixels == 256 * 14 * 14


def test_every_implementation_computes_the_same_gradients_but_for_its_precision():
    rows = bench(IMAGE_WORKLOADS["tiny-resnet"], ("octavo folded", "octavo tensorwise"))[:-1]
    assert [sum(row["fp8_gemms"].values()) > 0 for row in rows] == [False, True, True]
    norms = [row["gradient_norm"] for row in rows]
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=0.1)
    assert "2 images of 32 x 32 pixels" in step._shape(rows[0])


def test_batch_norms_stay_in_fp32_and_images_channels_last():
    workload = IMAGE_WORKLOADS["tiny-resnet"]
    training = build(workload, workload.implementations()["octavo folded"], "cpu", compile=False)
    layers = [module for module in training.model.modules() if isinstance(module, Conv2d)]
    assert len(layers) == 2 * 3 + 2
    assert {module.weight.dtype for module in layers} == {torch.bfloat16}
    norms = [module for module in training.model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert {module.weight.dtype for module in norms} == {torch.float32}
    before = layers[0].weight.clone()
    training.step()
    assert not before.equal(layers[0].weight)
    assert layers[1].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_resnet_is_timed_by_the_recipes_of_convolutions_alone():
    names = {*IMAGE_WORKLOADS["resnet50"].implementations()}
    assert {"bf16", "octavo folded", "octavo tensorwise", "octavo block"} <= names
    assert not [name for name in names if "(" in name or "+" in name or "torchao" in name]
    assert not names & {"octavo delayed", "octavo just_in_time", "octavo static"}


def test_a_batch_given_by_hand():
    workload = IMAGE_WORKLOADS["resnet50"]
    assert workload.but(batch=None) is workload and workload.but(batch=8).name == "custom"
    with pytest.raises(ConfigError, match="--kv-heads: resnet50 has no such field"):
        workload.but(kv_heads=3)
    with pytest.raises(ConfigError, match="--batch must be positive"):
        workload.but(batch=0)
