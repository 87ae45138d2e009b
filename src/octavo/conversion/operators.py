"""White and black lists: the operators of PyTorch that run in FP8, those that are reported and unchanged, and why.

The counterpart of `Policy`, which is about layers. A user reads the lists, edits them and passes them to
`octavo.autocast`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from octavo.conversion.matmul_ops import PARSERS
from octavo.errors import ConfigError, did_you_mean

Reader = Callable[..., tuple[Any, ...]]
"""Maps the arguments of an operator to the name of a white operator and its arguments."""
_NORM = "norm: it divides by a mean of squares, which FP8 cannot hold"
_SOFTMAX = "softmax: an exponential turns small errors into large ones"
_LOSS = "loss: its error goes straight into every gradient"
_INSIDE = "its products run inside one call: write them as linear and matmul to have them in FP8"
_NO_KERNEL = "no FP8 kernel"


def _white() -> dict[str, str]:
    products = "a matrix product: most of the time of a model, and its sums even out rounding"
    return {
        "linear": "a layer's product: projections of attention, MLPs",
        **dict.fromkeys(("matmul", "mm", "addmm"), products),
        "mv": "a layer's product for one token; on a GPU `min_gain` excludes most",
        **dict.fromkeys(("bmm", "baddbmm"), "products of two activations, as attention's"),
        "einsum": "of two operands: one of the products above",
        **dict.fromkeys(("conv1d", "conv2d"), "a product of the matrix of patches and the weight"),
    }


def _black() -> dict[str, str]:
    norms = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "local_response_norm")
    losses = (
        "cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "mse_loss",
        "l1_loss", "smooth_l1_loss", "huber_loss", "ctc_loss", "cosine_embedding_loss", "triplet_margin_loss",
    )  # fmt: skip
    inside = ("multi_head_attention_forward", "bilinear", "tensordot", "chain_matmul", "multi_dot", "lstm", "gru")
    convolutions = ("conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    return {
        **dict.fromkeys(norms, _NORM),
        **dict.fromkeys(("softmax", "log_softmax", "softmin"), _SOFTMAX),
        "scaled_dot_product_attention": "a softmax between its two products, all in one kernel",
        **dict.fromkeys(("embedding", "embedding_bag"), "embedding: it reads rows and multiplies nothing"),
        **dict.fromkeys(losses, _LOSS),
        **dict.fromkeys(("topk", "gumbel_softmax"), "router: a small error sends a token to another expert"),
        **dict.fromkeys(inside, _INSIDE),
        **dict.fromkeys((*convolutions, "addbmm"), _NO_KERNEL),
    }


@dataclass(frozen=True, kw_only=True)
class Operators:
    """White and black list. An operator on neither runs unchanged and is not reported. `print` shows them as a table.

    Names are PyTorch's and stand for every form of call: `matmul` for `a @ b` too, `softmax` for `F.softmax`,
    `torch.softmax` and `x.softmax`.

    Raises:
        ConfigError: PyTorch has no such operator, it is on both lists, or a white one has no FP8 form.
    """

    white: dict[str, str] = field(default_factory=_white)
    """Runs in FP8: operator -> reason."""
    black: dict[str, str] = field(default_factory=_black)
    """Runs unchanged, in the dtype of its operands, and is reported: operator -> reason."""
    own: dict[str, Reader] = field(default_factory=dict)
    """Operators of other libraries by `namespace::name`, as `torch.library` registers them -> the equivalent call of a
    white operator. A call that cannot run in FP8 uses the library's operator."""
    min_features: int = 32
    """A product with fewer columns, or with fewer terms per sum, does not run in FP8."""
    multiple: int = 16
    """A batch of products runs in FP8 only if M, N and K are multiples of this."""
    min_gain: float = 1.0
    """On a GPU, a product whose predicted gain is below this does not run in FP8. 0: all do."""
    max_loop: int = 8
    """On a GPU without a batched FP8 kernel for the recipe, larger batches of products do not run in FP8."""

    def __post_init__(self) -> None:
        for name in (*self.white, *self.black, *self.own):
            functions_named(name)
        for name in self.white:
            if name in self.black:
                raise ConfigError(f"operator '{name}' is on the white list and on the black list. Take it off one.")
            if name not in PARSERS:
                raise ConfigError(
                    f"operator '{name}' cannot be white: there is no FP8 form of it. These have one: "
                    f"{', '.join(PARSERS)}."
                )

    def to_white(self, name: str, reason: str = "set by the user") -> Operators:
        """Return lists in which this operator is white."""
        return replace(self.without(name), white={**self.without(name).white, name: reason})

    def to_black(self, name: str, reason: str = "set by the user") -> Operators:
        """Return lists in which this operator is black."""
        return replace(self.without(name), black={**self.without(name).black, name: reason})

    def with_own(self, name: str, reader: Reader) -> Operators:
        """Return lists with an operator of another library that is computed as a white one: `own`."""
        return replace(self, own={**self.own, name: reader})

    def without(self, name: str) -> Operators:
        """Return lists that have this operator on neither."""
        functions_named(name)
        white, black = ({key: why for key, why in names.items() if key != name} for names in (self.white, self.black))
        return replace(self, white=white, black=black)

    def watched(self) -> dict[Callable[..., Any], str]:
        """Return function of PyTorch -> operator name, for all operators on a list."""
        names = (*self.white, *self.black, *self.own)
        return {function: name for name in names for function in functions_named(name)}

    def __str__(self) -> str:
        rows = [("list", "operator", "why")]
        rows += [("white", name, why) for name, why in self.white.items()]
        rows += [("black", name, why) for name, why in self.black.items()]
        width = max(len(name) for _, name, _ in rows)
        return "\n".join(f"{which:5}  {name:{width}}  {why}" for which, name, why in rows)


@cache
def functions_named(name: str) -> tuple[Callable[..., Any], ...]:
    """Return the functions of PyTorch behind an operator's name, as a function mode sees them.

    Raises:
        ConfigError: there are none.
    """
    if "::" in name:
        return _registered(*name.split("::", 1))
    owners = (F, torch, torch.Tensor, torch.special, torch.linalg)
    found = dict.fromkeys(getattr(owner, name, None) for owner in owners)
    functions = tuple(function for function in found if function in _seen_by_modes())
    if not functions:
        known = {function.__name__ for function in _seen_by_modes()}
        raise ConfigError(f"PyTorch has no operator '{name}' that can be listed.{did_you_mean(name, known)}")
    return functions


def _registered(namespace: str, name: str) -> tuple[Callable[..., Any], ...]:
    """Return an operator registered with `torch.library`, and its overloads."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        raise ConfigError(f"no operator '{namespace}::{name}' is registered. Import the library that defines it first.")
    return packet, *(getattr(packet, overload) for overload in packet.overloads())


@cache
def _seen_by_modes() -> frozenset[Callable[..., Any]]:
    return frozenset(torch.overrides.get_testing_overrides())
