"""Checkpoints of sharded runs: a different number of ranks continues, in every tier; the same number bit for bit."""

import json
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import ranks
import torch
from sharded import FP32, full_state, llama, step_sharded
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from octavo.conversion import Policy
from octavo.distributed import load, save, save_async, shard
from octavo.errors import CheckpointError, NonFiniteError
from octavo.lab.memory.fake_kernels import clear_caches
from octavo.nn.scaling_state import scales
from octavo.optim import AdamW, convert
from octavo.tensor import local

WIDE = {"ffn": 170, "layers": 1}
"""Rows that four ranks do not share alike."""
CASES = {
    "fp8 float32": ("fp8", torch.float32, "unchanged"),
    "exact bfloat16": ("exact", torch.bfloat16, "unchanged"),
    "fp8-lm bfloat16": ("fp8-lm", torch.bfloat16, "unchanged"),
    "fp8-min fp8": ("fp8-min", torch.bfloat16, "fp8"),
}
"""The tier, the dtype of the weights, and what the weights of FP8 layers are stored in."""
SHARED = [name for name in CASES if not name.startswith("fp8-lm")]


def build(case):
    tier, dtype, weights = CASES[case]
    model = llama(dtype=dtype, policy=Policy(weights=weights), **WIDE)
    shard(model, mp_policy=FP32)
    return model, AdamW(model.named_parameters(), lr=1e-2, states=tier, clip=1.0)


def everything(model, optimizer):
    """Return all that a run consists of, whole tensors."""
    state = {f"{e.number}.{k}": v for e in optimizer.entries() for k, v in _packed(optimizer).get(e.number, {}).items()}
    return {**full_state(model), **{k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}}


def _packed(optimizer):
    return optimizer.state_dict()["state"]


def same(a, b):
    return sorted(name for name in {*a, *b} if name not in a or name not in b or not torch.equal(a[name], b[name]))


def write(rank, count, folder):
    """Save each case after two steps, and return what was saved and the losses of two more steps."""
    found = {}
    for case in CASES:
        model, optimizer = build(case)
        for step in range(2):
            step_sharded(model, optimizer, step, rank, 2)
        save(Path(folder) / case, model, optimizer, step=2)
        found[case] = {"saved": everything(model, optimizer)}
        found[case]["losses"] = [step_sharded(model, optimizer, step, rank, 2) for step in (2, 3)]
        found[case]["end"] = everything(model, optimizer)
    found["again"] = {case: go_on(case, folder, rank) for case in CASES}
    found["background"] = in_background(folder, rank)
    found["pytorchs"] = pytorchs(rank)
    found["names"] = names(folder, rank)
    found["stored"] = stored_scales(folder, rank)
    found["refused"] = refusals(folder)
    found["not finite"] = not_finite(folder)
    return found


def go_on(case, folder, rank):
    model, optimizer = build(case)
    step_sharded(model, optimizer, 9, rank, 2)  # it has been somewhere else
    extra = load(Path(folder) / case, model, optimizer)
    losses = [step_sharded(model, optimizer, step, rank, 2) for step in (2, 3)]
    return {"extra": extra, "losses": losses, "end": everything(model, optimizer)}


def in_background(folder, rank):
    """Return whether a checkpoint that is written while training goes on is of the moment when it was asked for."""
    model, optimizer = build("fp8 float32")
    step_sharded(model, optimizer, 0, rank, 2)
    before = everything(model, optimizer)
    save_async(Path(folder) / "background", model).result()
    if rank == 0:
        clear_caches()  # as a forecast of memory does
    done = save_async(Path(folder) / "background", model, optimizer, step=1)
    step_sharded(model, optimizer, 1, rank, 2)
    done.result()
    load(Path(folder) / "background", model, optimizer)
    return same(before, everything(model, optimizer))


def names(folder, rank):
    """Return what differs in a run over parameters in another order, of a checkpoint as it is and as once written."""
    model, optimizer = build("fp8 float32")
    step_sharded(model, optimizer, 0, rank, 2)
    differ = []
    for version, kinds in {"now": {}, "first": {kind: kind for kind in convert.MOMENTS}}.items():
        with patch.dict(convert._CODES, kinds):
            save(Path(folder) / version, model, optimizer)
        other, _ = build("fp8 float32")
        steps = AdamW(reversed(list(other.named_parameters())), lr=1e-2, states="fp8", clip=1.0)
        load(Path(folder) / version, other, steps)
        differ.append(same(by_name(model, optimizer), by_name(other, steps)))
    return differ


def by_name(model, optimizer):
    entries = {str(entry.number): entry.name for entry in optimizer.entries()}
    parts = ((name.partition("."), tensor) for name, tensor in everything(model, optimizer).items())
    return {f"{entries.get(first, first)}.{rest}": tensor for (first, _, rest), tensor in parts}


def pytorchs(rank):
    """Return what differs after PyTorch's own functions have carried a run over, as whole tensors on rank 0."""
    model, optimizer = build("fp8 float32")
    step_sharded(model, optimizer, 0, rank, 2)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)
    plain = all(type(v) is torch.Tensor for v in states[0].values())
    other, steps = build("fp8 float32")
    set_model_state_dict(other, states[0], options=options)
    set_optimizer_state_dict(other, steps, states[1], options=options)
    return plain, same(everything(model, optimizer), everything(other, steps))


def stored_scales(folder, rank):
    """Return the scales and losses of a run that was saved, and of one that went on from there."""

    def built():
        model = llama("delayed", **WIDE)
        shard(model, mp_policy=FP32)
        return model, AdamW(model.named_parameters(), lr=1e-2)

    model, optimizer = built()
    for step in range(2):
        step_sharded(model, optimizer, step, rank, 2)
    save(Path(folder) / "delayed", model, optimizer)
    again, steps = built()
    load(Path(folder) / "delayed", again, steps)
    found = []
    for one, by in ((model, optimizer), (again, steps)):
        kept = scales(one).state_dict()
        found.append({"scales": kept, "losses": [step_sharded(one, by, step, rank, 2) for step in (2, 3)]})
    return found


def refusals(folder):
    model, optimizer = build("fp8 float32")
    narrow, deep, shallow = llama(ffn=160), llama(layers=2), llama(layers=1)
    for other in (narrow, deep, shallow):
        shard(other, mp_policy=FP32)
    save(Path(folder) / "deep", deep)
    attempts = [
        lambda: load(Path(folder) / "nowhere", model),
        lambda: load(Path(folder) / "exact bfloat16", model, optimizer),
        lambda: load(Path(folder) / "fp8 float32", narrow),
        lambda: load(Path(folder) / "deep", shallow),
        lambda: save(Path(folder) / "deep" / "octavo.json", shallow),
        lambda: save_async(Path(folder) / "deep" / "octavo.json", shallow).result(),
        lambda: save(Path(folder) / "plain", shallow, step=torch.ones(1)),
    ]
    return [ranks.refusal((CheckpointError, TypeError), attempt) for attempt in attempts]


def not_finite(folder):
    """Return what is said of checkpoints with a NaN or of other groups, and what they change."""
    found = []
    for part in ("model", "optimizer", "groups"):
        model, optimizer = build("fp8 float32")
        step_sharded(model, optimizer, 0, 0, 2)
        last = list(model.parameters())[-1]
        if part != "groups":
            local(last if part == "model" else optimizer.state[last]["step"]).view(-1)[-1:].detach().fill_(torch.nan)
        save(Path(folder) / f"broken {part}", model, optimizer)
        model, optimizer = build("fp8 float32")
        if part == "groups":
            optimizer = AdamW([*model.named_parameters()][:-1], lr=1e-2)
        step_sharded(model, optimizer, 1, 0, 2)
        before = {name: tensor.clone() for name, tensor in everything(model, optimizer).items()}
        attempt = partial(load, Path(folder) / f"broken {part}", model, optimizer)
        said = ranks.refusal((NonFiniteError, CheckpointError), attempt)
        found.append((said, same(before, everything(model, optimizer))))
    load(Path(folder) / "broken optimizer", model)  # what is not asked for may be broken
    return found


def read(rank, count, folder):
    """Read what two ranks wrote, and go on as they did: rank 0 and 1 with their sequences, the others with the same."""
    found = {}
    for case in CASES:
        model, optimizer = build(case)
        try:
            extra = load(Path(folder) / case, model, optimizer)
        except CheckpointError as error:
            found[case] = {"error": str(error)}
            continue
        found[case] = {"extra": extra, "read": everything(model, optimizer)}
        found[case]["losses"] = [step_sharded(model, optimizer, step, rank % 2, 2) for step in (2, 3)]
    return found


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield name


@pytest.fixture(scope="module")
def written(folder):
    return ranks.run(write, 2, folder)


@pytest.fixture(scope="module")
def on_four(written, folder):
    return ranks.run(read, 4, folder)


@pytest.mark.parametrize("case", CASES)
def test_the_same_ranks_go_on_to_the_bit(written, case):
    again, first = written[0]["again"][case], written[0][case]
    assert again["extra"] == {"step": 2} and again["losses"] == first["losses"]
    assert not same(again["end"], first["end"])


@pytest.mark.parametrize("case", SHARED)
def test_other_ranks_read_the_same_bits(written, on_four, case):
    assert on_four[0][case]["extra"] == {"step": 2}
    assert not same(on_four[0][case]["read"], written[0][case]["saved"])
    for four, two in zip(on_four[0][case]["losses"], written[0][case]["losses"], strict=True):
        assert [loss / 2 for loss in four] == pytest.approx(two, rel=1e-2)  # they round by other random bits
    # Each sequence is on two ranks.
    assert [loss / 2 for loss in on_four[0][case]["losses"][0]] == written[0][case]["losses"][0]


def test_one_scale_a_tensor_keeps_its_ranks(on_four):
    assert "sharded over" in on_four[0]["fp8-lm bfloat16"]["error"]


def test_stored_scales_go_on(written):
    for first, again in (rank["stored"] for rank in written):
        assert len(first["scales"]) > 0 and not same(first["scales"], again["scales"])
        assert first["losses"] == again["losses"]


def test_it_is_written_in_the_background(written):
    assert not written[0]["background"]


def test_pytorchs_functions_carry_a_run_over(written):
    plain, unlike = written[0]["pytorchs"]
    assert plain and not unlike


def test_states_follow_the_names_of_parameters_in_files_of_every_version(written):
    assert written[0]["names"] == [[], []]


def test_what_does_not_fit_is_refused(written):
    words = ["not a complete checkpoint", "states are ['exact']", "does not fit this model", "such as 'layers.1."]
    words += ["octavo.json: ", "octavo.json: ", "not JSON serializable"]
    for result in written:
        assert all(word in said for word, said in zip(words, result["refused"], strict=True))


@pytest.mark.parametrize(("case", "words"), [(0, "of 'model."), (1, "of 'optimizer."), (2, "numbers of parameters")])
def test_a_checkpoint_that_is_refused_changes_nothing(written, case, words):
    for result in written:
        said, changed = result["not finite"][case]
        assert words in said and not changed


def test_settings_are_readable(written, folder):
    settings = json.loads((Path(folder) / "fp8 float32" / "octavo.json").read_text())
    assert settings["extra"] == {"step": 2} and settings["optimizer"]["rule"] == "adamw"
