"""Write small files of every kind, with what they must give when they are read: `python write_files.py ARCHIVE`.

Run it with the code of the commit that the folder of the archive is named after, in PYTHONPATH; `test_written_files.py`
reads the archive with today's. Commits before `octavo.lab` need this file as it was then. Files of `rotated`, which
is younger: `--recipes rotated`.

    runs/<name>           directories of `octavo train`, with the checkpoint of step 4; `pair` is of two ranks, sharded
    runs/<name>.json      digests of the weights after step 8
    exports/<format>      of `octavo export`
    shards                of `octavo.distributed.save` by two ranks
    models/<name>.pt      torch.save of a converted model; .expected.pt: a batch, its loss and its gradients
    optimizers/<name>.pt  an optimizer of octavo.optim after two steps, and its state dicts; .expected.pt: the weights
                          after two further ones; greedy.*.pt: state dicts of GreedyZeRO, of each rank and of all
    pickles.pt            recipes and a policy
    scales.json, map.toml, recipe.toml     a calibration, a map of `octavo localize`, a recipe
    plain.pt              results of PyTorch alone: where they differ, so may the last bits of all others
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Llama
from octavo.optim import TIERS, AdamW, Lion, Muon, flatten, keep_none

RUN = """
[model]
dim = 32
layers = 1
heads = 2
ffn = 128
tie_embeddings = true
[data]
source = "corpus"
cache = "cache"
sequence = 16
[run]
steps = 8
batch = 2
log_every = 1
eval_every = 4
eval_tokens = 64
checkpoint_every = 4
histograms_every = 4
baseline = false
device = "cpu"
compile = "off"
graph = "off"
"""
BF16, ACT, NARROW = ["--run.weights", "bf16"], ["--guard.mode", "act"], ["--ffn", "32"]
RUNS = {
    "folded": ["--recipe", "folded", "--optimizer.states", "fp8"],
    "delayed": [
        "--recipe",
        "delayed",
        "--optimizer.name",
        "muon",
        "--optimizer.states",
        "fp8-lm",
        *BF16,
        *ACT,
        *NARROW,
    ],
    "stored": [
        "--recipe",
        "folded",
        "--optimizer.name",
        "lion",
        "--optimizer.states",
        "fp8-min",
        "--run.weights",
        "fp8",
    ],
    "lora": ["--recipe", "rowwise", "--lora.rank", "2", *BF16, *NARROW],
}
PAIR = ["--recipe", "folded", "--optimizer.states", "fp8", "--parallel.shard", "2", *BF16]
RECIPES = ["folded", "rowwise", "tensorwise", "delayed", "static", "block", "mxfp8"]
OF_LATER = {"rotated": ["--recipe", "rotated", "--optimizer.states", "fp8", *BF16]}


def main(recipes: list[str]) -> None:
    """Write all files into the current directory; for recipes of `OF_LATER` those alone that they change."""
    torch.set_num_threads(1)
    later = [recipe for recipe in recipes if recipe in OF_LATER]
    write_corpus(Path("corpus"))
    Path("run.toml").write_text(RUN)
    runs = {recipe: OF_LATER[recipe] for recipe in later} or RUNS
    for name, flags in runs.items():
        write_run(name, flags)
    torch.save([digest(x) for x in plain()], "plain.pt")
    Path("models").mkdir()
    for name, make in models(recipes):
        write_model(Path("models", f"{name}.pt"), *make())
    if later:
        return
    write_run("pair", PAIR, ranks=2)
    for run, format in {"folded": "compressed-tensors", "lora": "plain"}.items():
        octavo_command("export", f"runs/{run}", "--format", format, "--out", f"exports/{format}")
    octavo.export(llama("block", fuse=False)[0], "exports/fp8", "fp8")
    flags = ["--tokens", "64", "--device", "cpu", "-o", "map.toml"]
    octavo_command("localize", "runs/folded", "--budget", "0.05%", *flags)
    Path("recipe.toml").write_text('base = "folded"\nname = "mine"\n[modules]\n"layers.0.attention.*" = "tensorwise"\n')
    Path("optimizers").mkdir()
    for name, optimizer in optimizers():
        write_optimizer(Path("optimizers", f"{name}.pt"), *optimizer)
    pickled = {"recipes": [octavo.recipes.load(name) for name in RECIPES], "policy": octavo.Policy(weights="fp8")}
    torch.save(pickled, "pickles.pt")
    with tempfile.TemporaryDirectory() as store:
        mp.spawn(write_shards, (store,), nprocs=2)


def octavo_command(*arguments: str, ranks: int = 1) -> None:
    launcher = ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    subprocess.run([sys.executable, "-m", *launcher, "octavo", *arguments], check=True)


def write_run(name: str, flags: list[str], ranks: int = 1) -> None:
    """Train for eight steps; keep the checkpoint after four, and digests of the weights after eight."""
    octavo_command("train", "run.toml", *flags, "--out", f"runs/{name}", ranks=ranks)
    tensors = weights_of(Path("runs", name, "checkpoints", "step-000008"))
    Path("runs", f"{name}.json").write_text(json.dumps({key: digest(x) for key, x in tensors.items()}, indent=1))
    shutil.rmtree(Path("runs", name, "checkpoints", "step-000008"))


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """Return the tensors of the model in a checkpoint, as octavo loads it."""
    from octavo.lab.train import checkpoint as checkpoints

    tensors = checkpoints.load(checkpoint).tensors["fp8"]
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


def write_corpus(folder: Path) -> None:
    folder.mkdir()
    for i in range(4):
        lines = [f"line {j} of document {i} holds {i * j % 97} apples and {(i + j) ** 2 % 89} pears" for j in range(30)]
        (folder / f"{i}.txt").write_text("\n".join(lines))


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def digest(x: Tensor) -> str:
    """Return the SHA-256 of the bytes of a tensor."""
    return hashlib.sha256(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def plain() -> list[Tensor]:
    """Return results of PyTorch alone, as a layer, its gradients, a softmax and an optimizer compute them."""
    x, w, g = (draw(32, n, seed=n).requires_grad_() for n in (32, 64, 96))
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        y = x.to(dtype) @ w.to(dtype)
        loss = (
            F.cross_entropy(F.silu(y).float(), torch.arange(32)) + (F.rms_norm(y, (64,)) ** 2).mean() + g.tanh().sum()
        )
        results += [y.detach(), loss.detach(), *torch.autograd.grad(loss, (x, w, g))]
    heads = x.view(1, 2, 16, 32).bfloat16()
    return [*results, F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).detach()]


# --- models -----------------------------------------------------------------------------------------------------------

Made = tuple[nn.Module, list[tuple[Tensor, ...]]]


def models(recipes: list[str]) -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield names and makers of converted models."""
    for recipe in recipes:
        yield recipe, lambda recipe=recipe: llama(recipe)
    if "delayed" in recipes:
        yield "fp8-weights", lambda: llama("folded", weights="fp8")
        yield "experts", lambda: llama("folded", architecture="moe", experts=2, experts_per_token=1)
        yield "low-memory", lambda: llama("folded", memory="low")
        yield "layers", layers
        yield "transformer", transformer


def llama(
    recipe: str, architecture: str = "llama", experts: int = 0, experts_per_token: int = 0, **policy: Any
) -> Made:
    torch.manual_seed(0)
    moe = {"experts": experts, "experts_per_token": experts_per_token} if experts else {}
    shape: dict[str, Any] = {"vocab": 16, "dim": 32, "layers": 1, "heads": 2, "ffn": 32, "sequence": 16, **moe}
    model = Llama(ModelConfig(architecture=architecture, **shape)).bfloat16()
    tokens = [torch.randint(0, 16, (2, 17), generator=torch.Generator().manual_seed(n)) for n in range(3)]
    batches = [(each[:, :-1], each[:, 1:]) for each in tokens]
    if recipe == "static":
        calibration = octavo.calibrate(model, batches, loss=lambda model, batch: model(*batch))
        calibration.save("scales.json")
    scales = "scales.json" if recipe == "static" else None
    octavo.convert(model, recipe, policy=octavo.Policy(min_gain=0, **policy), scales=scales)
    return model, batches


def layers() -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(2), nn.Linear(64, 64), nn.LayerNorm(64),
        nn.GELU(), nn.Linear(64, 32, bias=False),
    )  # fmt: skip
    octavo.convert(model.bfloat16(), "folded", policy=octavo.Policy(min_gain=0, keep_defaults=False))
    return model, [(draw(1, 16, 8, 8, seed=n).bfloat16(),) for n in range(3)]


def transformer() -> Made:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    octavo.convert(model, "tensorwise", policy=octavo.Policy(min_gain=0, keep_defaults=False))
    return model, [(draw(2, 16, 32, seed=n),) for n in range(3)]


def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    y = model(*batch)
    return y if y.dim() == 0 else (y.float() ** 2).mean()


def write_model(path: Path, model: nn.Module, batches: list[tuple[Tensor, ...]]) -> None:
    """Train for two steps, write the model, and beside it what a third gives."""
    optimizer = AdamW(model.named_parameters(), lr=1e-2, states="fp8", keep=keep_none)
    for batch in batches[:2]:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model} | ({"optimizer": optimizer} if path.stem == "delayed" else {}), path)
    loss = loss_of(model, batches[2])
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norms = {name: gradient.float().norm() for name, gradient in gradients.items()}
    digests = {name: digest(gradient) for name, gradient in gradients.items()}
    kept = {"batch": batches[2], "loss": loss.detach(), "norms": norms, "digests": digests}
    torch.save(kept, path.with_suffix(".expected.pt"))


# --- optimizers -------------------------------------------------------------------------------------------------------


def parameters() -> list[tuple[str, nn.Parameter]]:
    matrix, vector = draw(4, 144, seed=1), draw(32, seed=2)
    return [
        ("w", nn.Parameter(matrix.bfloat16())),
        ("full", nn.Parameter(matrix.T.contiguous())),
        ("b", nn.Parameter(vector)),
    ]


def optimizers() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for tier in TIERS:
        for kind in (AdamW, Lion, Muon) if tier in ("fp32", "fp8") else (AdamW,):
            named = parameters()
            optimizer = kind(named, lr=0.125, states=tier, keep=keep_none, seed=3, clip=1.0)
            yield f"{kind.__name__.lower()}-{tier}", (optimizer, named)


def set_gradients(named: list[tuple[str, nn.Parameter]], step: int) -> None:
    for number, (_, parameter) in enumerate(named):
        parameter.grad = draw(*parameter.shape, seed=10 * step + number).to(parameter.dtype)


def write_optimizer(path: Path, optimizer: Any, named: list[tuple[str, nn.Parameter]]) -> None:
    for step in (0, 1):
        set_gradients(named, step)
        optimizer.step()
    tensors, rest = flatten(optimizer.state_dict())
    weights = {name: parameter.detach().clone() for name, parameter in named}
    kept = {
        "class": type(optimizer).__name__, "weights": weights, "state_dict": optimizer.state_dict(), "tensors": tensors,
        "rest": rest, "exported": optimizer.export_state_dict(),
    }  # fmt: skip
    torch.save({**kept, "pickled": {"optimizer": optimizer, "parameters": dict(named)}}, path)
    for step in (2, 3):
        set_gradients(named, step)
        optimizer.step()
    torch.save({name: parameter.detach() for name, parameter in named}, path.with_suffix(".expected.pt"))


# --- several ranks ----------------------------------------------------------------------------------------------------


def keep_vectors(name: str, parameter: Tensor) -> str | None:
    """Return the tier of vectors, a shard of which may be less than a group with one scale."""
    return "fp32" if parameter.dim() < 2 else None


def write_shards(rank: int, store: str) -> None:
    """Write the checkpoint of a model that two ranks share, and the wrapped optimizer of one that they do not."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{store}/file", 2), rank=rank, world_size=2)
    model, batches = llama("folded", weights="fp8")
    octavo.distributed.shard(model)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, states="fp8", keep=keep_vectors)
    named = parameters()
    greedy = octavo.distributed.GreedyZeRO(AdamW(named, lr=1e-2, states="fp8", keep=keep_none))
    for step, batch in enumerate(batches[:2]):
        loss_of(model, tuple(part[rank : rank + 1] for part in batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        set_gradients(named, step)
        greedy.step()
    octavo.distributed.save("shards", model, optimizer, steps=2)
    torch.save({"weights": dict(named), "state_dict": greedy.state_dict()}, f"optimizers/greedy.rank-{rank}.pt")
    whole_state = greedy.full_state_dict()
    if rank == 0:
        torch.save({"weights": dict(named), "state_dict": whole_state}, "optimizers/greedy.full.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("archive", type=Path)
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    flags = parser.parse_args()
    archive = flags.archive.absolute()
    with tempfile.TemporaryDirectory() as folder, chdir(folder), tarfile.open(archive, "w:xz") as file:
        main(flags.recipes)
        for path in sorted(Path().rglob("*")):
            file.add(path, recursive=False)
