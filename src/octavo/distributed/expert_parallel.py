"""Expert parallelism: each rank of a mesh has some of the experts, and computes them for the tokens of all ranks.

    octavo.convert(model)
    expert_parallel(model, mesh)       # each module of experts keeps E / ranks of them here, as DTensors
    ...

Tokens travel as their codes, with their scale and routing weight: a byte per element and eight bytes per row; or two
bytes and twelve, if backward reads a second set of codes (recipe `rotated`). A token is quantised before it is sent,
once for all of its experts. No token is dropped and none is padded: ranks first tell each other how many rows each
expert gets, which the host waits for. Results and gradients travel in the layer's dtype: how a gradient is quantised
depends on the scales of the expert that it goes to. Computed is what one rank with all experts would, and experts'
gradients are those of the mean over ranks of their losses.

T: tokens here. S: experts per token. R = T S: rows that are sent. A: rows that arrive. E: experts of all ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from octavo._util.autograd import first_order, tracked
from octavo.distributed.sharding.embedding import all_to_all_rows
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.experts import Routing, combine, route
from octavo.nn.experts import (
    ExpertOptions,
    Experts,
    Rows,
    SavedRows,
    backward_rows,
    collect,
    dispatch,
    forward_rows,
    quantize_rows,
)
from octavo.nn.telemetry_ops import stats_buffer_of
from octavo.numerics import PER_ROW, Quantized
from octavo.recipes import Recipe
from octavo.tensor import is_distributed


def expert_parallel(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Keep on each rank its part of the experts of a converted model, in place; return the names of their modules.

    Call it before creating the optimizer: it replaces the parameters of experts by DTensors sharded by expert.

    Args:
        model: converted; every rank has the same values.
        mesh: of one dimension.

    Raises:
        ConfigError: no experts compute in FP8, their number cannot be divided evenly, or the mesh has more dimensions.
        UnsupportedError: experts are called with sorted rows: the module around them routes tokens.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    ranks = mesh.size()
    if mesh.ndim != 1:
        raise ConfigError(f"expert_parallel: the mesh has {mesh.ndim} dimensions; take one of them: mesh['experts'].")
    if not modules:
        raise ConfigError(
            "expert_parallel: the model has no experts in FP8. Call octavo.convert first and see its plan."
        )
    for name, module in modules.items():
        count = module.products[0].parts[0].shape[0]
        if module.expert_roles.is_sorted:
            raise UnsupportedError(
                f"expert_parallel: '{name}' is called with the rows of each expert. The module that sorts them must"
                " also send them to other ranks: share the experts by its own means."
            )
        if count % ranks:
            raise ConfigError(f"expert_parallel: the {count} experts of '{name}' do not divide by {ranks} ranks.")
        if any(is_distributed(parameter) for parameter in module.parameters()):
            raise ConfigError(f"expert_parallel: '{name}' is sharded already. Call it before octavo.distributed.shard.")
    for module in modules.values():
        for name, parameter in list(module.named_parameters()):
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        module.exchange = Exchange(mesh.get_group())
    return list(modules)


def rank_loads(model: nn.Module) -> dict[str, float]:
    """Return the rows of the busiest rank over the mean of all, of the last forward of each module of experts.

    1 is even. All ranks of the mesh must call it; it waits for the device.
    """
    loads = {}
    for name, module in model.named_modules():
        exchange = getattr(module, "exchange", None)
        if isinstance(exchange, Exchange):
            rows = torch.zeros(exchange.ranks, device=next(module.parameters()).device)
            rows[exchange.rank] = exchange.arrived
            dist.all_reduce(rows, group=exchange.group)
            loads[name] = float(rows.max() / rows.mean().clamp(min=1e-9))
    return loads


class Sizes(NamedTuple):
    """Rows that this rank sends to each rank, and those that arrive from each."""

    sent: list[int]
    arriving: list[int]

    @property
    def back(self) -> Sizes:
        """The way back."""
        return Sizes(self.arriving, self.sent)


class Exchange:
    """The ranks that share the experts of a module. Called in place of its own computation."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.arrived = 0
        """Rows that arrived here in the last forward."""

    def __call__(self, module: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return y (T, D) for tokens x (T, D), their experts (T, S) of all ranks, and routing weights (T, S)."""
        first, second = module.products
        routing = route(ids, first.parts[0].shape[0])
        sizes, local = self._agree(routing)
        options = module.options(x)
        if options is not None:
            stats = stats_buffer_of([first]), stats_buffer_of([second])
            journey = Journey(self, sizes, routing, local)
            tensors = tracked(x, weights, first.weight, second.weight)
            y: Tensor = _ParallelExperts.apply(*tensors, journey, options, stats)  # type: ignore[no-untyped-call]
            return y
        rows, sorted_ = dispatch(x, weights, routing)
        arrived: Tensor = _Travel.apply(rows, self, sizes)  # type: ignore[no-untyped-call]
        arrived_weights: Tensor = _Travel.apply(sorted_[:, None], self, sizes)  # type: ignore[no-untyped-call]
        y = module.by_products(arrived, local, arrived_weights, 1 / self.ranks)
        back: Tensor = _Travel.apply(y, self, sizes.back)  # type: ignore[no-untyped-call]
        return collect(back, routing)

    def send(self, rows: Tensor, sizes: Sizes) -> Tensor:
        """Send rows, ordered by rank, and return those that arrive, ordered by the rank that they come from."""
        return all_to_all_rows(rows, sizes.sent, sizes.arriving, self.group)

    def _agree(self, routing: Routing) -> tuple[Sizes, Routing]:
        """Return how many rows travel, and where arriving rows go among the experts here. Waits for the device."""
        counts = routing.ends.diff(prepend=routing.ends.new_zeros(1)).view(self.ranks, -1)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent_rows, arriving_rows = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        own = counts.shape[1]
        expert = torch.arange(own, device=counts.device).repeat(self.ranks)
        self.arrived = sum(arriving_rows)
        ids = expert.repeat_interleave(arriving.flatten(), output_size=self.arrived)
        return Sizes(sent_rows, arriving_rows), route(ids[:, None], own)


class _Travel(torch.autograd.Function):
    """Rows to the ranks of their experts, or back; gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange, sizes: Sizes) -> Tensor:
        ctx.exchange, ctx.sizes = exchange, sizes
        return exchange.send(rows, sizes)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.send(dy, ctx.sizes.back), None, None


class Journey(NamedTuple):
    """Route of rows to the ranks of their experts, and back."""

    exchange: Exchange
    sizes: Sizes
    sent: Routing
    """Routing of local tokens to the experts of all ranks."""
    arrived: Routing
    """Routing of received rows to the local experts."""


class _ParallelExperts(torch.autograd.Function):
    """Experts of several ranks, as `octavo.nn.experts` computes those of one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        first: Tensor,
        second: Tensor,
        journey: Journey,
        options: ExpertOptions,
        stats: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        exchange, sizes, sent, (to_token, to_row, ends) = journey
        trains = any(ctx.needs_input_grad[:4])
        tokens, here, sorted_ = _arrive(x, weights, journey, options.recipe, trains)
        codes = here.codes.view(torch.uint8)[to_token].view(here.codes.dtype)
        rows = Quantized(codes, here.scale[to_token], PER_ROW)
        sorted_ = sorted_[to_token]
        y, saved = forward_rows(
            (rows, sorted_), (first, second), ends, options, (here.codes, to_token), (trains,) * 3, stats
        )
        ctx.save_for_backward(*tokens[:2], sorted_, *sent[:2], to_token, to_row, ends, *saved.tensors)
        ctx.options, ctx.stats, ctx.exchange, ctx.sizes = options, stats, exchange, sizes
        ctx.dtypes = [each.dtype for each in (x, weights, first, second)]
        return combine(exchange.send(y[to_row[:, 0]], sizes.back), sent.place)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale, sorted_, source, place, to_token, to_row, ends, *saved = ctx.saved_tensors
        options, exchange, back = ctx.options, ctx.exchange, ctx.sizes.back
        dy = exchange.send(dy.to(options.dtype)[source], ctx.sizes)
        needs_x, _, *needs_stacks = ctx.needs_input_grad[:4]
        needs = needs_x, *needs_stacks
        rows = Rows(Quantized(codes, scale, PER_ROW), to_token, sorted_)
        dx, d_weights, *dws = backward_rows(dy, rows, ends, SavedRows.of(saved), options, needs, ctx.stats)
        d_weights = exchange.send(d_weights[to_row], back)[:, 0][place]
        dx = None if dx is None else combine(exchange.send(dx[to_row[:, 0]], back), place)
        found = dx, d_weights, *(None if dw is None else dw / exchange.ranks for dw in dws)
        return *(None if d is None else d.to(t) for d, t in zip(found, ctx.dtypes, strict=True)), *(None,) * 3


def _arrive(
    x: Tensor, weights: Tensor, journey: Journey, recipe: Recipe, trains: bool
) -> tuple[Quantized, Quantized, Tensor]:
    """Return the rows (A, D) that arrive, as wgrad and as fprop read them, and their routing weights (A,).

    One message per rank, with the codes of fprop, those of a second set if there is one, their scales and the weights.
    """
    tokens, rows, sorted_ = quantize_rows(x, weights, journey.sent.place, recipe, trains)
    sets = [rows]
    if trains and recipe.second("input") is not None:
        codes = tokens.codes.view(torch.uint8)[journey.sent.source].view(tokens.codes.dtype)
        sets.append(Quantized(codes, tokens.scale[journey.sent.source], PER_ROW))
    beside = torch.stack([*(each.scale[:, 0] for each in sets), sorted_], dim=1).view(torch.uint8)
    message = torch.cat([*(each.codes.view(torch.uint8) for each in sets), beside], dim=1)
    *parts, numbers = journey.exchange.send(message, journey.sizes).split(
        [*[x.shape[1]] * len(sets), beside.shape[1]], dim=1
    )
    *scales, received = numbers.contiguous().view(torch.float32).split(1, dim=1)
    arrived = [
        Quantized(codes.contiguous().view(each.codes.dtype), scale.contiguous(), PER_ROW)
        for each, codes, scale in zip(sets, parts, scales, strict=True)
    ]
    return arrived[-1], arrived[0], received[:, 0].contiguous()
