"""The ResNet is ResNet-50: its parameters, its shapes, and a step that learns."""

import torch
import torch.nn.functional as F

from octavo_bench.resnet import ResNet


def test_parameters_and_convolutions_of_resnet_50():
    with torch.device("meta"):
        model = ResNet()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) == 53
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


def test_a_small_one_learns():
    model = ResNet(depths=(1, 1), width=8, classes=4).to(memory_format=torch.channels_last)
    images, classes = torch.randn(8, 3, 32, 32).to(memory_format=torch.channels_last), torch.arange(8) % 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.2 < 1.0 < losses[0]
