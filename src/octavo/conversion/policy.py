"""The policy: layers that stay in BF16 whatever the recipe, and why. A user reads it, edits it and passes it on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Literal, NamedTuple, cast, get_args

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from octavo._util import config_reader
from octavo._util.terminal import quantity
from octavo.conversion.blocks import unwrapped_class
from octavo.conversion.layer_plan import Weights
from octavo.conversion.roles import HEAD, HEAD_NAMES, ROUTER, ROUTER_NAMES
from octavo.errors import ConfigError, did_you_mean
from octavo.nn.adopted import is_taken
from octavo.nn.conv import Convolution, unsupported_reason
from octavo.nn.linear import LinearLayer, is_transposed
from octavo.nn.modules import blocks_of, unwrapped_name
from octavo.nn.multihead import projection_weights, widths_of
from octavo.nn.operands import REAL
from octavo.recipes import Precision, Recipe
from octavo.tensor import local

TOO_SMALL, NO_FP8 = "too small to gain", "the recipe says bf16"
"""Starts of the reasons of layers that another recipe might convert."""
_FILTERED = "left out by the policy's filter"
_FILTER = "(name, module), the full name first, and returns whether to convert the layer"
_GROUPED = 16
"""Grouped FP8 GEMMs take features that are multiples of this."""


DEFAULTS = MappingProxyType(dict.fromkeys(HEAD_NAMES, HEAD) | dict.fromkeys(ROUTER_NAMES, ROUTER))
"""Name patterns of layers that stay in BF16 unless a policy says otherwise, and why."""


class SavedFormats(NamedTuple):
    """Formats of the tensors that are saved for backward, by the options of the policy that choose them."""

    activation_inputs: Precision = "bf16"
    norm_inputs: Precision = "bf16"
    attention_output: Precision = "bf16"


SAVED = SavedFormats._fields
"""Options that choose the format of a tensor saved for backward."""
Fusions = bool | Literal["all"]
"""`Policy.fuse`."""
_TYPES = {"keep_defaults": bool, "min_features": int, "min_gain": float, "convolutions": bool}
"""Options that are a number or a boolean."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Layers that `plan` and `convert` leave in BF16, and what converted ones store and save for backward.

    Norms, softmax, embeddings and losses have no GEMM and are never computed in FP8, whatever the policy.
    """

    keep: Mapping[str, str] | Sequence[str] = field(default_factory=dict)
    """Layers that stay in BF16 in addition to the defaults: name pattern -> reason, or patterns alone. `*` matches
    anything, dots included. Each must match a module of the model."""
    keep_defaults: bool = True
    """Whether heads and routers stay in BF16 (`octavo.conversion.policy.DEFAULTS`)."""
    min_features: int = 32
    """A layer with fewer input or output features stays in BF16."""
    min_gain: float = 1.0
    """On a GPU, a layer whose predicted gain is below this stays in BF16. 0 converts all."""
    convolutions: bool = True
    """Whether `nn.Conv1d` and `nn.Conv2d` are converted, 1x1 and larger ones."""
    fuse: Fusions = True
    """Whether layers that share an input, MLPs and norms are computed together if they are recognised. `all`: also what
    no layer in FP8 reads or contains, in a model in BF16 too: other norms, residual sums, the rotary embedding of q
    and k, and the activation of MLPs in BF16. These gain in eager mode on a GPU, and have no second derivative there;
    compiled code computes as without."""
    memory: Literal["exact", "low"] = "exact"
    """Tensors that layers save for backward. `exact`: none twice, and FP8 codes where they change no gradient. `low`:
    FP8 wherever possible, as with the next three options at `fp8` (`saved`)."""
    activation_inputs: Precision = "bf16"
    """Format in which fused MLPs save the inputs of their activation, the outputs of gate and up, for backward. They
    are about half of a Llama's saved activations: `fp8` halves those, and backward reads fewer bytes. The forward pass
    is unchanged; the gradients of the MLP and of everything before it are rounded once more, to E4M3 (power-of-two
    scales of 1x128)."""
    norm_inputs: Precision = "bf16"
    """Format in which norms save their input for backward: the residual stream, which no other operation saves. `fp8`
    halves it. The forward pass is unchanged; the gradient of a norm's weight is that of an input rounded to E4M3
    (power-of-two scales of 1x128), and that of its input hardly changes."""
    attention_output: Precision = "bf16"
    """Format in which attention saves its output: `fp8` saves the codes of the output projection instead of the output.
    The forward pass and the projection's gradients are unchanged; those of q, k and v see the rounded output. For
    modules that compute attention by `octavo.nn.ScaledDotProduct`, as Octavo's models do."""
    weights: Weights = "unchanged"
    """Storage of the weights of converted linear layers: `fp8` makes each an `FP8Tensor`, one byte per element, whose
    codes the GEMMs read directly. The optimizer then has to keep the master weight: create one of `octavo.optim` after
    the conversion. Needs a recipe that rounds a weight once: `folded`, which is then the default, or `folded_fast`."""
    requantise: tuple[str, ...] = ()
    """Name patterns of linear layers that save their input itself for backward, and quantise it again there, instead of
    saving its codes. This saves a byte per element if another operation saves the same tensor anyway, as attention
    saves its output, and costs a byte otherwise. Of layers that share an input, all must be named. Results are bitwise
    the same."""
    bf16_blocks: tuple[int, int] = (0, 0)
    """Numbers of blocks at the start and at the end of the model that stay in BF16. Blocks are the children of its
    `nn.ModuleList` with the most parameters."""
    filter: Callable[[str, nn.Module], bool] | None = None
    """A further test, (name, layer) -> whether to convert it."""

    def __post_init__(self) -> None:
        for name, kind in _TYPES.items():
            config_reader.check(kind, getattr(self, name), f"policy: {name}")
        for name in ("keep", "requantise"):
            if isinstance(given := getattr(self, name), str):
                also = ", or a mapping" if name == "keep" else ""
                raise ConfigError(f"policy: {name} = {given!r}: it is a list of patterns, [{given!r}]{also}.")
        if not isinstance(self.fuse, bool) and self.fuse != "all":
            raise ConfigError(f"fuse = {self.fuse!r}: it is True, False or 'all'.")
        if self.memory not in ("exact", "low"):
            raise ConfigError(f"memory = {self.memory!r}: it is 'exact' or 'low'.")
        for name in SAVED:
            if (given := getattr(self, name)) not in (known := get_args(Precision)):
                raise ConfigError(f"{name} = {given!r}: it is {' or '.join(map(repr, sorted(known)))}.")
        for name, precision in self.saved._asdict().items():
            if precision != "bf16" and not self.fuse:
                raise ConfigError(
                    f"{name} = {precision!r} changes what MLPs, norms or attention keep, and fuse = False leaves all "
                    "of those alone. Leave one of the two out."
                )
        if self.weights not in get_args(Weights):
            near = did_you_mean(str(self.weights), get_args(Weights))
            raise ConfigError(f"weights = {self.weights!r}: it is 'unchanged' or 'fp8'.{near}")
        _check_blocks(self.bf16_blocks)
        _check_filter(self.filter)

    @property
    def saved(self) -> SavedFormats:
        """Formats of the tensors saved for backward: with `memory="low"` all are `fp8`."""
        if self.memory == "low":
            return SavedFormats("fp8", "fp8", "fp8")
        return SavedFormats(self.activation_inputs, self.norm_inputs, self.attention_output)

    def blocks_to_keep(self, model: nn.Module) -> dict[str, str]:
        """Return the blocks that stay in BF16, full name -> reason, if `bf16_blocks` asks for any.

        Raises:
            ConfigError: the model has no list of blocks, or fewer than are to stay.
        """
        first, last = self.bf16_blocks
        if not first + last:
            return {}
        blocks = blocks_of(model)
        if len(blocks) < first + last:
            raise ConfigError(
                f"bf16_blocks = {self.bf16_blocks}: the model has {quantity(len(blocks), 'block')} in an nn.ModuleList."
                " Keep layers by their names instead: Policy(keep={'encoder.0.*': 'the first block'})."
            )
        kept = dict.fromkeys(blocks[:first], _among("first", first))
        return kept | dict.fromkeys(blocks[len(blocks) - last :], _among("last", last))

    @property
    def patterns(self) -> dict[str, str]:
        """Return name pattern -> reason of layers that stay in BF16, the user's first."""
        given = self.keep if isinstance(self.keep, Mapping) else dict.fromkeys(self.keep, "kept by the policy")
        return {**given, **{p: reason for p, reason in DEFAULTS.items() if self.keep_defaults and p not in given}}

    def check_patterns(self, model: nn.Module) -> None:
        """Check that each pattern of `keep` matches a module.

        Raises:
            ConfigError: one does not.
        """
        names = [name for name, _ in model.named_modules()]
        for pattern in self.keep:
            if not any(_matches(name, pattern) for name in names):
                near = did_you_mean(pattern, names)
                raise ConfigError(
                    f"policy: keep: the pattern '{pattern}' matches no module of the model.{near} "
                    "`*` matches anything, dots included: '*.up' is the layer 'up' of every block."
                )

    def reason_to_keep(self, name: str, layer: nn.Module, role: str = "", unfit: str = "") -> str | None:
        """Return why this layer stays in BF16, or None.

        Args:
            role: what the layer is in its model, if that keeps it there by default (`octavo.conversion.roles`).
            unfit: why its parent or its own `forward` rules FP8 out (`octavo.conversion.unfit`).
        """
        if (reason := self._pattern_reason(name)) is not None:
            return reason
        if role and self.keep_defaults:
            return role
        if isinstance(layer, LinearLayer | Convolution) and not is_taken(layer):
            ours = layer.parent.__name__
            return f"{type(layer).__name__} is a subclass of octavo.nn.{ours}: it computes as its author wrote it"
        if "forward" in vars(layer) and not is_taken(layer):  # set before the conversion: it calls the plain forward
            return "its instance has a forward of its own, as hooks of other libraries set one"
        if isinstance(layer, nn.Linear) or is_transposed(layer):
            reason = self._linear(layer)
        else:
            reason = self._convolution(layer)
        if reason or unfit:
            return reason or unfit
        if is_parametrized(layer):  # removing a parametrization changes the class, and takes Octavo's for its own
            return "one of its parameters is computed by a parametrization"
        if (kind := _foreign_class(weight := cast(Tensor, layer.weight))) is not None:
            return f"its weight is an {kind}, a tensor of another library: quantised already, for example"
        if weight.dtype not in REAL:
            return f"its weight is {weight.dtype}, no real floating-point number"
        return None if self._takes(name, layer) else _FILTERED

    def reason_to_keep_experts(self, name: str, module: nn.Module, sizes: Collection[int]) -> str | None:
        """Return why a module of experts stays in BF16, or None. sizes: features of its GEMMs, in and out."""
        if (reason := self._pattern_reason(name)) is not None:
            return reason
        if min(sizes) < self.min_features:
            return f"fewer than {self.min_features} features"
        if any(size % _GROUPED for size in sizes):
            return f"{(*sizes,)} features: grouped FP8 GEMMs take multiples of {_GROUPED}"
        if (kind := next(filter(None, map(_foreign_class, module.parameters())), None)) is not None:
            return f"one of its weights is an {kind}, a tensor of another library: quantised already, for example"
        dtypes = {parameter.dtype for parameter in module.parameters()}
        if not dtypes <= set(REAL):
            return f"its weights are {dtypes}, no real floating-point numbers"
        return None if self._takes(name, module) else _FILTERED

    def reason_to_keep_attention(self, name: str, module: nn.MultiheadAttention) -> str | None:
        """Return why the projections of an `nn.MultiheadAttention` stay in BF16, or None."""
        if (reason := self._pattern_reason(name)) is not None:
            return reason
        if "forward" in vars(module):
            return "its instance has a forward of its own, as hooks of other libraries set one"
        if is_parametrized(module) or is_parametrized(module.out_proj):
            return "one of its parameters is computed by a parametrization"
        weights = projection_weights(module)
        if min(widths_of(module)) < self.min_features:
            return f"fewer than {self.min_features} features"
        if (kind := next(filter(None, map(_foreign_class, weights)), None)) is not None:
            return f"its weight is an {kind}, a tensor of another library: quantised already, for example"
        if (dtype := next((weight.dtype for weight in weights if weight.dtype not in REAL), None)) is not None:
            return f"its weight is {dtype}, no real floating-point number"
        return None if self._takes(name, module) else _FILTERED

    def _takes(self, name: str, module: nn.Module) -> bool:
        """Return whether the filter takes a layer."""
        try:
            return self.filter is None or bool(self.filter(name, module))
        except (AttributeError, TypeError) as error:
            raise ConfigError(
                f"policy: filter failed for '{name}' ({type(error).__name__}: {error}). It takes {_FILTER}."
            ) from error

    def _pattern_reason(self, name: str) -> str | None:
        return next((reason for pattern, reason in self.patterns.items() if _matches(name, pattern)), None)

    def keeps_input(self, name: str, recipe: Recipe) -> bool:
        """Return whether a linear layer quantises its input again in backward.

        Raises:
            ConfigError: its recipe would not give the same codes again.
        """
        if not recipe.wgrad.is_fp8 or not any(fnmatchcase(name, pattern) for pattern in self.requantise):
            return False
        operand = recipe.wgrad.input
        if not operand.is_repeatable:
            raise ConfigError(
                f"requantise: '{name}' runs by recipe '{recipe.name}', whose input ({operand}) has other codes when it "
                "is quantised again. Leave the layer out of `requantise`, or round to nearest with current scales."
            )
        return True

    def _linear(self, layer: nn.Linear) -> str | None:
        if "weight" not in layer._parameters:
            return "its weight is computed, by a parametrization for example"
        sizes = layer.weight.shape if is_transposed(layer) else (layer.in_features, layer.out_features)
        if min(sizes) < self.min_features:
            return f"fewer than {self.min_features} features"
        return None

    def _convolution(self, layer: nn.Module) -> str | None:
        if not self.convolutions:
            return "the policy leaves convolutions alone"
        if (reason := unsupported_reason(layer)) is not None:
            return reason
        assert isinstance(layer, nn.Conv1d | nn.Conv2d)
        parent = nn.Conv1d if isinstance(layer, nn.Conv1d) else nn.Conv2d
        kind = cast(type[nn.Conv2d], unwrapped_class(layer))
        if kind.forward not in (parent.forward, Convolution.forward) or kind._conv_forward is not parent._conv_forward:
            return f"{kind.__name__} is a subclass of a convolution with a forward of its own"
        if min(layer.in_channels, layer.out_channels) < self.min_features:
            return f"fewer than {self.min_features} channels"
        return None


def _check_blocks(blocks: tuple[int, int]) -> None:
    is_pair = isinstance(blocks, Sequence) and len(blocks) == 2 and all(type(count) is int for count in blocks)
    if not is_pair or min(blocks) < 0:
        raise ConfigError(
            f"bf16_blocks = {blocks!r}: it is two counts, of blocks at the start and at the end of the model, such as "
            "(1, 1)."
        )


def _check_filter(test: object) -> None:
    """Check that a filter takes a name and a layer; torchao's take a layer and a name.

    Raises:
        ConfigError: it does not, as its signature shows.
    """
    if test is None:
        return
    if not callable(test):
        raise ConfigError(f"policy: filter = {config_reader.shown(test)}: it is a function of {_FILTER}.")
    try:
        signature = inspect.signature(test)
    except ValueError:  # a function in C may have none
        return
    words = [name.strip("_") for name in signature.parameters]
    if (words[:1] and words[0] in ("module", "mod", "layer", "m")) or (
        words[1:2] and words[1] in ("name", "fqn", "path")
    ):
        raise ConfigError(f"policy: filter takes ({', '.join(signature.parameters)}): it is called with {_FILTER}.")
    try:
        signature.bind("", None)
    except TypeError as error:
        raise ConfigError(f"policy: filter cannot be called with {_FILTER}: {error}.") from error


def _foreign_class(weight: Tensor) -> str | None:
    """Return the class of a weight that computes its operations in another library's way, or None.

    Such a class has a `__torch_dispatch__`: the weight has no values in memory that a GEMM could read. Those of PyTorch
    are distributed or fake tensors.
    """
    kind = type(local(weight))
    if kind.__module__.partition(".")[0] in ("torch", "octavo"):
        return None
    return None if kind.__torch_dispatch__ is Tensor.__torch_dispatch__ else kind.__name__


def _among(which: str, count: int) -> str:
    return f"in the {which} block" if count == 1 else f"in one of the {which} {count} blocks"


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a module's name, with or without the names of wrappers."""
    return fnmatchcase(name, pattern) or fnmatchcase(unwrapped_name(name), pattern)
