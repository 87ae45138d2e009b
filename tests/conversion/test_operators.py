"""The lists: what is on them, how they are edited, what is refused."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from octavo.conversion import Operators
from octavo.conversion.matmul_ops import PARSERS
from octavo.conversion.operators import functions_named
from octavo.errors import ConfigError


def test_what_is_where():
    lists = Operators()
    assert set(lists.white) == set(PARSERS)
    assert {"linear", "matmul", "bmm", "conv1d", "conv2d"} <= set(lists.white)
    assert {"layer_norm", "rms_norm", "softmax", "embedding", "cross_entropy", "topk"} <= set(lists.black)
    assert all((*lists.white.values(), *lists.black.values()))


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("linear", [F.linear]),
        ("matmul", [torch.matmul, torch.Tensor.matmul]),
        ("bmm", [torch.bmm, torch.Tensor.bmm]),
        ("softmax", [F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax]),
        ("conv2d", [F.conv2d, torch.conv2d]),
        ("einsum", [torch.einsum]),
        ("multi_dot", [torch.linalg.multi_dot]),
    ],
)
def test_a_name_stands_for_every_way_to_call_it(name, functions):
    assert set(functions) <= set(functions_named(name))


def test_lists_are_edited_by_making_new_ones():
    lists = Operators()
    edited = lists.to_black("bmm", "mine").without("softmax").to_black("relu")
    assert "bmm" not in edited.white and edited.black["bmm"] == "mine"
    assert "softmax" not in edited.black and edited.black["relu"] == "set by the user"
    assert lists == Operators()
    assert edited.to_white("bmm", "again").white["bmm"] == "again"
    assert "bmm" not in edited.to_white("bmm", "again").black
    assert dataclasses.replace(lists, white={"linear": "only this"}).white == {"linear": "only this"}


def test_a_name_that_pytorch_does_not_know():
    with pytest.raises(ConfigError, match=r"no operator 'layer_nrom' .* Did you mean 'layer_norm'\?"):
        Operators().to_black("layer_nrom")
    with pytest.raises(ConfigError, match=r"Did you mean 'matmul'\?"):
        Operators(white={"matmull": ""})
    with pytest.raises(ConfigError, match=r"'nobody::product' is registered\. Import the library"):
        Operators().with_own("nobody::product", lambda a, b: ("matmul", a, b))
    with pytest.raises(ConfigError, match="no operator 'float32'"):  # an attribute of torch, and no operator
        Operators().without("float32")


def test_white_needs_an_fp8_form_and_one_list():
    with pytest.raises(ConfigError, match="'softmax' cannot be white: there is no FP8 form of it"):
        Operators().to_white("softmax")
    with pytest.raises(ConfigError, match="'bmm' is on the white list and on the black list"):
        Operators(black={"bmm": "mine"})


def test_prints_a_line_an_operator():
    lists = Operators()
    lines = str(lists).splitlines()
    assert len(lines) == 1 + len(lists.white) + len(lists.black)
    assert lines[0].split() == ["list", "operator", "why"]
    assert next(line for line in lines if " bmm " in line).split()[:2] == ["white", "bmm"]
    assert next(line for line in lines if line.endswith(lists.black["topk"])).split()[:2] == ["black", "topk"]
