from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reporters import Listener
from safetensors.torch import load_file, save_file
from states import write_state
from torch._dynamo.testing import CompileCounter

from octavo import kernels
from octavo._util.checksums import file_entry
from octavo.conversion import enable
from octavo.errors import CheckpointError, ConfigError, DataError, DivergedError, NonFiniteError, RunError
from octavo.lab.monitor.store.reader import RunReader
from octavo.lab.train import checkpoint, train
from octavo.lab.train.config import RunConfig
from octavo.lab.train.events import Finished, Logged, Saved, Started, Switched
from octavo.lab.train.files import MetricsFile, read_metrics
from octavo.lab.train.opening import open_run
from octavo.lab.train.setup import set_up
from octavo.lab.train.train_state import TrainState

Configure = Callable[..., RunConfig]
EVERY_STEP = {"steps": 6, "log_every": 1, "checkpoint_every": 1, "keep": 10, "baseline": False}


def stopped_after(step: int, config: RunConfig) -> Path:
    """Run until the checkpoint of `step` is written, then interrupt. Return the checkpoint."""
    with pytest.raises(KeyboardInterrupt):
        train(config, reporters=[Listener(Saved, step=step)])
    path = checkpoint.latest(config.run.out / "checkpoints")
    assert path is not None
    return path


def measured(out: Path) -> list[dict[str, Any]]:
    """Return the metrics but what depends on the clock."""
    timed = ("tokens_per_second", "milliseconds_fp8", "milliseconds_bf16")
    return [{k: v for k, v in line.items() if k not in timed} for line in read_metrics(out / "metrics.jsonl")]


LARGE_ENOUGH = {"dim": 64, "ffn": 128, "layers": 1}
"""For matrices that `keep_small` leaves to the tier."""
MOMENT = {"fp8": torch.float8_e4m3fn, "exact": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize(
    ("run", "optimizer"),
    [
        ({"recipe": "delayed", "baseline": True}, {}),
        ({"recipe": "bf16"}, {}),
        *(({}, {"states": states}) for states in ("fp8", "exact")),
        ({"baseline": True}, {"states": "fp8", "name": "muon", "gradients": "fp8"}),
        ({"weights": "bf16"}, {"states": "fp32"}),
        ({"weights": "fp8"}, {"states": "fp8"}),
    ],
    ids=str,
)
def test_resuming_continues_bit_for_bit(
    configure: Configure, tmp_path: Path, run: dict[str, Any], optimizer: dict[str, str]
) -> None:
    straight, broken = (
        configure(
            model=LARGE_ENOUGH if optimizer else {},
            optimizer=optimizer,
            run={**EVERY_STEP, "steps": 4, **run, "out": str(tmp_path / name)},
        )
        for name in ("straight", "broken")
    )
    summary = train(straight)
    stopped_after(2, broken)
    torch.manual_seed(99)  # a new process would start from other random numbers
    resumed = train(broken, resume=True)

    assert measured(broken.run.out) == measured(straight.run.out)
    assert len(measured(broken.run.out)) == 4 + 1
    same = "heldout_loss_fp8 heldout_loss_bf16 fp8_gemms tokens optimizer_bytes_per_parameter"
    for key in same.split():
        assert resumed[key] == summary[key], key
    lanes = ["bf16"] if run.get("recipe") == "bf16" else ["fp8", "bf16"] if "baseline" in run else ["fp8"]
    for name in [*lanes, "random"]:
        a, b = (load_file(c.run.out / "checkpoints/step-000004" / f"{name}.safetensors") for c in (straight, broken))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key].reshape(-1).view(torch.uint8), b[key].reshape(-1).view(torch.uint8)) for key in a)
        moment = a.get("optimizer.layers.0.attention.wq.weight.exp_avg")
        assert moment is None or moment.dtype == MOMENT[optimizer.get("states", "fp32")]
        assert ("model.layers.0.feed_forward.w1.weight.codes" in a) == (name == "fp8" and run.get("weights") == "fp8")


def test_stochastic_rounding_follows_the_seed_of_the_run(configure: Configure) -> None:
    sections = {"model": LARGE_ENOUGH, "optimizer": {"states": "fp8"}}
    seeds = [lane.optimizer.seed for lane in set_up(configure(**sections, run={"seed": 7})).states]  # type: ignore[attr-defined]
    assert seeds == [7, 7]


def test_fp8_states_learn_as_fp32_ones_do(configure: Configure, tmp_path: Path) -> None:
    run = {"steps": 30, "batch": 8, "baseline": False, "telemetry_every": 0}
    summaries = {
        states: train(
            configure(
                model=LARGE_ENOUGH,
                optimizer={"states": states, "lr": 3e-3},
                run={**run, "out": str(tmp_path / states)},
            )
        )
        for states in ("fp32", "exact", "fp8")
    }
    loss = {states: summary["heldout_loss_fp8"] for states, summary in summaries.items()}
    taken = {states: summary["optimizer_bytes_per_parameter"] for states, summary in summaries.items()}
    assert loss["fp32"] < 3.0
    # 0.06 % and 0.02 % here; a second moment that is stuck, or a scale a factor of two off, gives several.
    assert loss["exact"] == pytest.approx(loss["fp32"], rel=1e-2)
    assert loss["fp8"] == pytest.approx(loss["fp32"], rel=1e-2)
    assert 8.0 == taken["fp32"] > taken["exact"] > taken["fp8"] > 2.0


def test_both_lanes_start_from_the_same_bits_and_see_the_same_batches(configure: Configure) -> None:
    # With learning rate 0 the weights never move, so the models differ by the precision of the GEMMs alone.
    config = configure(run={"steps": 1, "log_every": 1}, optimizer={"lr": 1e-30, "weight_decay": 0.0})
    train(config)
    path = checkpoint.latest(config.run.out / "checkpoints")
    assert path is not None
    fp8, bf16 = (load_file(path / f"{lane}.safetensors") for lane in ("fp8", "bf16"))
    names = [name for name in bf16 if name.startswith("model.")]
    assert names
    assert fp8.keys() == bf16.keys()
    assert all(torch.equal(fp8[name], bf16[name]) for name in names)
    [line, _] = measured(config.run.out)
    assert line["loss_fp8"] != line["loss_bf16"]
    assert line["loss_fp8"] == pytest.approx(line["loss_bf16"], rel=1e-3)


def test_fp8_learns_as_bf16_does(configure: Configure) -> None:
    summary = train(configure(run={"steps": 30, "batch": 8}, optimizer={"lr": 5e-3}))
    losses = [
        line["loss_fp8"] for line in read_metrics(Path(configure().run.out) / "metrics.jsonl") if "loss_fp8" in line
    ]
    assert losses[0] > 5.5  # ln 272 = 5.6
    assert summary["heldout_loss_fp8"] < 3.3
    # Seeds give 0.00 to 0.03 %; stale quantised weights or a wrong scale give several percent.
    assert abs(summary["gap_percent"]) < 0.3


def test_the_summary_and_the_files_of_a_run(configure: Configure) -> None:
    listener = Listener()
    config = configure(run={"steps": 4, "eval_every": 2, "accumulate": 2, "eval_tokens": 2048})
    summary = train(config, reporters=[listener])
    out = config.run.out
    assert {p.name for p in out.iterdir()} == {
        "checkpoints",
        "config.json",
        "heldout.json",
        "metrics.jsonl",
        "plan.json",
        "run.sqlite",
        "summary.json",
    }
    assert json.loads((out / "summary.json").read_text(encoding="utf-8")) == summary
    sequences = json.loads((out / "heldout.json").read_text(encoding="utf-8"))
    for lane in ("fp8", "bf16"):
        assert len(sequences[lane]) == 48  # all the held-out text there is
        assert sum(sequences[lane]) / len(sequences[lane]) == pytest.approx(summary[f"heldout_loss_{lane}"])
    assert summary["tokens"] == 4 * 4 * 32
    assert summary["steps"] == 4
    assert summary["gap_percent"] == pytest.approx(
        100 * (summary["heldout_loss_fp8"] / summary["heldout_loss_bf16"] - 1), abs=1e-9
    )
    assert summary["fp8_gemms_total"] == sum(summary["fp8_gemms"].values()) > 4 * 14 * 3
    assert summary["fallbacks"] == []
    assert 0 < summary["unigram_entropy"] < 5.6
    kinds = [type(event) for event in listener.events]
    assert kinds.index(Started) < kinds.index(Logged) < kinds.index(Saved) < kinds.index(Finished)
    assert [line["step"] for line in measured(out) if "heldout_loss_fp8" in line] == [2, 4]
    assert listener.closed == 1


def test_a_run_without_its_baseline(configure: Configure) -> None:
    summary = train(configure(run={"steps": 2, "baseline": False}))
    assert summary["heldout_loss_fp8"] > 0
    assert summary["heldout_loss_bf16"] is None
    assert summary["gap_percent"] is None


def test_a_run_in_bf16_runs_no_fp8_gemm(configure: Configure) -> None:
    config = configure(run={"steps": 2, "recipe": "bf16"})
    summary = train(config)
    assert (summary["heldout_loss_fp8"], summary["fp8_gemms_total"]) == (None, 0)
    assert summary["heldout_loss_bf16"] > 0
    assert not (config.run.out / "plan.json").exists()


def test_a_finished_run_resumed_only_evaluates(configure: Configure) -> None:
    config = configure(run={"steps": 2})
    first = train(config)
    assert train(config, resume=True)["heldout_loss_fp8"] == first["heldout_loss_fp8"]


def test_nobodys_run_is_overwritten_unasked(configure: Configure) -> None:
    config = configure(run={"steps": 2})
    first = train(config)
    with pytest.raises(ConfigError, match=r"already contains a run \(step-000002\).*--resume.*--overwrite"):
        train(config)
    assert json.loads((config.run.out / "summary.json").read_text(encoding="utf-8")) == first
    train(configure(run={"steps": 1}), overwrite=True)
    assert [p.name for p in checkpoint.find(config.run.out / "checkpoints")] == ["step-000001"]


OTHERS: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"model": {"ffn": 96}}, "of another model: model.ffn is 64 there and 96 here"),
    ({"run": {"recipe": "block"}}, "of another recipe: run.recipe is 'folded' there and 'block' here"),
    ({"run": {"seed": 5}}, "of another run: run.seed"),
    ({"run": {"steps": 1}}, "past the end of this run of 1 steps"),
    ({"data": {"sequence": 16}}, "of another model: model.sequence"),
    ({"run": {"weights": "bf16"}}, "run.weights is 'fp32' there and 'bf16' here"),
    ({"optimizer": {"states": "exact"}}, r"optimizer\.states is 'fp32' there and 'exact' here"),
]


def test_a_checkpoint_of_another_run_is_refused(configure: Configure) -> None:
    run = {"steps": 2, "baseline": False, "recipe": "folded"}
    train(configure(run=run))
    for change, message in OTHERS:
        with pytest.raises(CheckpointError, match=message):
            train(configure(**{**change, "run": {**run, **change.get("run", {})}}), resume=True)
    path = checkpoint.latest(configure().run.out / "checkpoints")
    assert path is not None
    assert checkpoint.load(path).step == 2


def test_a_truncated_checkpoint_leaves_the_one_before_to_go_on_from(configure: Configure) -> None:
    config = configure(run=EVERY_STEP)
    path = stopped_after(2, config)
    (path / "fp8.safetensors").write_bytes((path / "fp8.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"truncated.*Remove .*step-000002 to resume from step-000001"):
        train(config, resume=True)
    shutil.rmtree(path)
    assert train(config, resume=True)["steps"] == 6


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(configure: Configure) -> None:
    config = configure(run=EVERY_STEP, optimizer={"lr": 1e30, "warmup": 0.0})
    with pytest.raises(
        DivergedError, match=r"FP8 model is no longer finite at step 2\. The last good checkpoint is .*step-0"
    ):
        train(config)
    path = checkpoint.latest(config.run.out / "checkpoints")
    assert path is not None
    assert path.name == "step-000001"


def test_no_space_left_keeps_the_last_good_checkpoint(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(run=EVERY_STEP)
    stopped_after(2, config)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("octavo.lab.train.checkpoint.flush", full)
        with pytest.raises(CheckpointError, match=r"step-000003: cannot be written \(No space left on device\)"):
            train(config, resume=True)
    assert [p.name for p in sorted((config.run.out / "checkpoints").iterdir())] == [
        "step-000001",
        "step-000002",
    ]
    assert train(config, resume=True)["steps"] == 6


def test_the_first_error_of_a_full_disk_is_the_one_that_is_raised(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was buffered fails again when the file is closed; other reporters are closed all the same."""

    def full(*_: Any) -> None:
        raise RunError("no space left for the first time")

    def full_again(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricsFile, "close", full_again)
    listener = Listener(Logged, full, step=2)
    with pytest.raises(RunError, match="no space left for the first time"):
        train(configure(run=EVERY_STEP), reporters=[listener])
    assert listener.closed == 1


@pytest.mark.parametrize("files", [{}, {"empty.txt": ""}, {"short.txt": "too short"}])
def test_too_little_text_leaves_no_directory(configure: Configure, tmp_path: Path, files: dict[str, str]) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    config = configure(data={"source": str(folder)})
    with pytest.raises(DataError, match=rf"^{re.escape(str(folder))}: "):  # the text, not a file of the cache
        train(config)
    assert not config.run.out.exists()


def test_unknown_recipe_and_device(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"'foldd'. Did you mean 'folded'"):
        train(configure(run={"recipe": "foldd"}))
    with pytest.raises(ConfigError, match=r"run.device: 'tpu' is none of"):
        train(configure(run={"device": "tpu"}))
    assert not configure().run.out.exists()


def test_vocabulary_too_small(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"model.vocab: 256 is too small .* needs 272"):
        train(configure(model={"vocab": 256}))


def rewrite(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace a file of a checkpoint and its entry in the index: a checkpoint put together by hand."""
    save_file(tensors, file)
    state = json.loads((file.parent / "state.json").read_text(encoding="utf-8"))
    state["files"][file.name] = file_entry(file)
    write_state(file.parent, state)


LAST = "rowwise_bf16_fprop"
PRODUCTS = 7 + 4 + 4
"""A step's in FP8, of one block: in backward q, k and v are one, and so are gate and up."""


def scheduled(out: Path, recipe: str = "folded") -> list[str]:
    """Return the recipe that the FP8 model computed each logged step by, as the schedule's events tell it."""
    steps = []
    for line in measured(out):
        recipe = line.get("recipe_fp8", recipe)
        steps += [recipe] if "loss_fp8" in line else []
    return steps


def test_the_first_steps_in_bf16_and_the_last_share_by_another_recipe(configure: Configure) -> None:
    schedule = {"recipe": "folded", "bf16_first_steps": 2, "last_share": 0.25, "baseline": True}
    config = configure(run={**EVERY_STEP, "steps": 8, **schedule})
    listener = Listener()
    with kernels.record() as ledger:
        train(config, reporters=[listener])
    switched = [(event.step, event.recipe) for event in listener.events if isinstance(event, Switched)]
    assert switched == [(1, "bf16"), (3, "folded"), (7, LAST)]
    assert scheduled(config.run.out) == 2 * ["bf16"] + 4 * ["folded"] + 2 * [LAST]
    in_backward = ledger.gemms.total() - 4 * PRODUCTS  # of two steps; the evaluation at the end has none
    assert 0 < in_backward < 2 * PRODUCTS
    lines = [line for line in measured(config.run.out) if "loss_fp8" in line]
    shares = [line["fp8_flops"] for line in lines]
    assert shares[:2] == [0, 0] and shares[2] > shares[6] > 0 and shares[2:6] == 4 * [shares[2]]
    same = [line["loss_fp8"] == line["loss_bf16"] for line in lines]
    assert same[:2] == [True, True] and not any(same[2:])  # until FP8 begins, the two are one model
    plan = RunReader(config.run.out).document("plan")
    assert {layer["precision"] for layer in plan["layers"]} == {"bf16 / fp8 / fp8", "bf16 / bf16 / bf16"}


@pytest.mark.parametrize("last", ["bf16", "rowwise_bf16_fprop", "block"])
def test_a_run_whose_whole_schedule_is_the_last_share_is_one_of_that_recipe(
    configure: Configure, tmp_path: Path, last: str
) -> None:
    own = configure(run={**EVERY_STEP, "recipe": last, "out": str(tmp_path / "own")})
    ending = configure(run={**EVERY_STEP, "last_share": 1.0, "last_recipe": last, "out": str(tmp_path / "ending")})
    kind = "bf16" if last == "bf16" else "fp8"
    train(own)
    train(ending)
    losses = [
        [line[f"loss_{model}"] for line in measured(config.run.out) if f"loss_{model}" in line]
        for model, config in ((kind, own), ("fp8", ending))
    ]
    assert losses[0] == losses[1] and len(losses[0]) > 5


def test_a_run_may_be_given_another_end_when_it_resumes(configure: Configure, tmp_path: Path) -> None:
    run = EVERY_STEP
    straight = configure(run={**run, "last_share": 0.5, "out": str(tmp_path / "straight")})
    train(straight)
    broken = configure(run={**run, "out": str(tmp_path / "broken")})
    stopped_after(2, broken)
    train(configure(run={**run, "last_share": 0.5, "out": str(tmp_path / "broken")}), resume=True)
    assert measured(broken.run.out) == measured(straight.run.out)


def test_a_run_that_goes_on_after_its_end_has_its_own_recipe_again(configure: Configure) -> None:
    run = {**EVERY_STEP, "recipe": "delayed", "last_share": 0.3}
    train(configure(run=run))
    longer = configure(run={**run, "steps": 12})
    summary = train(longer, resume=True)
    assert scheduled(longer.run.out, "delayed") == 4 * ["delayed"] + 2 * [LAST] + 2 * ["delayed"] + 4 * [LAST]
    assert summary["heldout_loss_fp8"] < 6


def test_a_last_recipe_is_that_of_its_file_when_the_run_begins(configure: Configure, tmp_path: Path) -> None:
    file = tmp_path / "last.toml"
    file.write_text('base = "bf16"\n', encoding="utf-8")

    listener = Listener(Logged, file.unlink)
    run = {"baseline": False, "steps": 2, "last_share": 0.5, "last_recipe": str(file)}
    train(configure(run=run), reporters=[listener])
    assert [event.recipe for event in listener.events if isinstance(event, Switched)] == [str(file)]


def test_a_schedule_of_fp8_says_that_it_does_nothing_in_bf16(configure: Configure) -> None:
    config = configure(run={"recipe": "bf16", "steps": 2, "last_share": 0.5})
    train(config)
    told = [event for event in RunReader(config.run.out).events() if event.rule == "schedule"]
    assert [event.step for event in told] == [0] and "do nothing" in told[0].text


def test_a_last_recipe_that_is_the_first_changes_nothing(configure: Configure, tmp_path: Path) -> None:
    run = {**EVERY_STEP, "recipe": "delayed"}
    plain, same = (configure(run={**run, "out": str(tmp_path / name)}) for name in ("plain", "same"))
    train(plain)
    train(configure(run={**run, "last_share": 0.5, "last_recipe": "delayed", "out": str(tmp_path / "same")}))
    assert measured(plain.run.out) == measured(same.run.out)


def test_a_last_recipe_that_cannot_run_is_refused_before_the_first_step(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"run\.last_recipe 'rowwise_bf16_frop'\. Did you mean 'rowwise_bf16_fprop'"):
        train(configure(run={"last_share": 0.2, "last_recipe": "rowwise_bf16_frop"}))
    with pytest.raises(ConfigError, match="scales"):
        train(configure(run={"last_share": 0.2, "last_recipe": "static"}))


def test_a_schedule_resumes_bit_for_bit_wherever_it_stops(configure: Configure, tmp_path: Path) -> None:
    run = {**EVERY_STEP, "steps": 7, "bf16_first_steps": 2, "last_share": 0.28, "recipe": "delayed"}
    straight = configure(run={**run, "out": str(tmp_path / "straight")})
    train(straight)
    for stop in (1, 2, 5, 6, 7):  # within BF16, where FP8 begins, where the last recipe does, within, at the end
        broken = configure(run={**run, "out": str(tmp_path / f"broken {stop}")})
        shutil.copytree(straight.run.out, broken.run.out)
        for path in checkpoint.find(broken.run.out / "checkpoints")[stop:]:
            shutil.rmtree(path)
        for later in ("scales.json", "summary.json", "heldout.json"):
            (broken.run.out / later).unlink(missing_ok=True)
        train(broken, resume=True)
        assert measured(broken.run.out) == measured(straight.run.out), stop


def test_on_a_plateau_the_rate_falls_and_a_resumed_run_knows_it(configure: Configure, tmp_path: Path) -> None:
    flat = {"lr_schedule": "plateau", "patience": 1, "lr": 1e-9, "warmup": 0.0, "min_lr": 0.1}
    run = {**EVERY_STEP, "eval_every": 1}
    whole, parts = (configure(optimizer=flat, run={**run, "out": str(tmp_path / name)}) for name in ("whole", "parts"))
    train(whole)
    stopped_after(3, parts)
    train(parts, resume=True)
    rates = [[line["lr"] for line in measured(config.run.out) if "lr" in line] for config in (whole, parts)]
    assert rates[0] == rates[1] == pytest.approx([1e-9, 1e-9, 5e-10, 2.5e-10, 1.25e-10, 1e-10])
    events = RunReader(whole.run.out).events()
    halved = [event for event in events if event.rule == "schedule"]
    assert [event.step for event in halved] == [2, 3, 4, 5] and "stopped falling" in halved[0].text
    assert [event.step for event in events if event.rule == "warm-up"] == [0]


def test_a_checkpoint_from_before_a_setting_existed_resumes(configure: Configure) -> None:
    path = stopped_after(2, configure(run=EVERY_STEP))
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    for key in ("loss_scale", "clip_per_group", "lr_factors"):
        del state["config"]["optimizer"][key]
    del state["config"]["run"]["bf16_first_steps"]
    write_state(path, state)
    with pytest.raises(CheckpointError, match=r"optimizer\.loss_scale is 'none' there and 'dynamic' here"):
        train(configure(run=EVERY_STEP, optimizer={"loss_scale": "dynamic"}), resume=True)
    train(configure(run=EVERY_STEP), resume=True)


def test_a_schedule_works_in_compiled_blocks(configure: Configure) -> None:
    setup = set_up(configure(run={"steps": 3, "baseline": False}))
    lane = setup.states[0]
    compiled = CompileCounter()
    for block in lane.model.get_submodule("layers").children():
        block.compile(fullgraph=True, backend=compiled)
    inputs, targets = next(setup.loader)
    counts, gemms = [], []
    for enabled in (False, True, True, False):
        enable(lane.model, enabled)
        with kernels.record() as ledger:
            lane.step(inputs, targets, step=1, lr=1e-3)
        counts.append(compiled.frame_count)
        gemms.append(ledger.gemms.total())
    assert gemms == [0, PRODUCTS, PRODUCTS, 0]
    assert counts[1] > counts[0] and counts[1] == counts[2] == counts[3]  # once for each precision


WQ = "layers.0.attention.wq.weight"


def _without_optimizer(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("optimizer.")]:
        del tensors[name]


CHANGES: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
    (_without_optimizer, r"is incomplete: the optimizer's state of '.*' lacks exp_avg, exp_avg_sq, step"),
    (lambda t: t.pop(f"optimizer.{WQ}.exp_avg_sq"), rf"state of '{re.escape(WQ)}' lacks exp_avg_sq"),
    (lambda t: t[f"optimizer.{WQ}.exp_avg"].fill_(torch.nan), rf"values of 'optimizer.{re.escape(WQ)}.exp_avg'"),
    (lambda t: t[f"model.{WQ}"][3, 4].fill_(torch.nan), rf"1 of \d+ values of 'model.{re.escape(WQ)}'"),
    (lambda t: t.update({f"model.{WQ}": t[f"model.{WQ}"].bfloat16()}), r"is torch.bfloat16 there and torch.float32"),
    (lambda t: t.update({"model.norm.weight": torch.ones(31)}), r"'norm.weight' has the shape \[31\] there and \[32\]"),
    (lambda t: t.pop("model.norm.weight"), r"only the model has the parameter 'norm.weight'"),
]


def test_a_checkpoint_that_is_not_complete_is_refused(configure: Configure) -> None:
    config = configure(run=EVERY_STEP)
    file = stopped_after(1, config) / "fp8.safetensors"
    written = file.read_bytes()
    for change, message in CHANGES:  # put together by hand, checksums included
        file.write_bytes(written)
        tensors = load_file(file)
        change(tensors)
        rewrite(file, tensors)
        with pytest.raises((CheckpointError, NonFiniteError), match=message):
            train(config, resume=True)


def test_a_flipped_bit_is_noticed_by_all_who_read(configure: Configure) -> None:
    config = configure(run=EVERY_STEP)
    file = stopped_after(1, config) / "fp8.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    for read in (lambda: train(config, resume=True), lambda: open_run(config.run.out)):
        with pytest.raises(CheckpointError, match=r"fp8.safetensors: damaged: its SHA-256"):
            read()


@pytest.mark.parametrize("state", [{}, {"cpu": torch.zeros(3, dtype=torch.uint8)}])
def test_states_of_generators_that_are_none_are_refused(configure: Configure, state: dict[str, torch.Tensor]) -> None:
    config = configure(run=EVERY_STEP)
    rewrite(stopped_after(1, config) / "random.safetensors", state)
    with pytest.raises(CheckpointError, match=r"step-000001: the state of the random generator 'cpu' is"):
        train(config, resume=True)


def test_a_checkpoint_of_format_1_goes_on(configure: Configure) -> None:
    config = configure(run=EVERY_STEP)
    state = stopped_after(1, config) / "state.json"
    content = json.loads(state.read_text(encoding="utf-8"))
    del content["sha256"]
    content |= {"format": 1, "files": {name: entry["bytes"] for name, entry in content["files"].items()}}
    state.write_text(json.dumps(content), encoding="utf-8")
    assert train(config, resume=True)["steps"] == 6


def break_after(monkeypatch: pytest.MonkeyPatch, step: int, change: Callable[[TrainState], object]) -> None:
    """Change a model after one of its steps, whose loss and gradients were finite."""
    whole = TrainState.step

    def stepped(self: TrainState, *args: Any, **settings: Any) -> Any:
        metrics = whole(self, *args, **settings)
        if settings["step"] == step:
            change(self)
        return metrics

    monkeypatch.setattr(TrainState, "step", stepped)


def test_weights_and_moments_that_are_not_finite_never_become_a_checkpoint(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(run={**EVERY_STEP, "keep": 1, "steps": 4})
    for step, change, message in (
        (3, lambda state: state.parameters[WQ].data[0, 0].fill_(torch.nan), rf"1 of \d+ values of 'model.{WQ}'"),
        (3, lambda state: state.optimizer.state[state.parameters[WQ]]["exp_avg"].fill_(torch.inf), "exp_avg' are NaN"),
    ):
        with monkeypatch.context() as patched:
            break_after(patched, step, change)
            with pytest.raises(DivergedError, match=rf"after step 3, in the FP8 model .*{message}.*step-000002"):
                train(config, overwrite=True)
        assert [path.name for path in checkpoint.find(config.run.out / "checkpoints")] == ["step-000002"]
        assert not (config.run.out / "summary.json").exists()
    assert train(config, resume=True)["steps"] == 4


def test_a_heldout_loss_that_is_not_finite_is_no_summary(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    def heldout(state: TrainState, batches: Any) -> torch.Tensor:
        return torch.tensor([1.0, torch.nan])

    monkeypatch.setattr("octavo.lab.train.parts.heldout_losses", heldout)
    config = configure(run={**EVERY_STEP, "steps": 2})
    with pytest.raises(DivergedError, match=r"held-out loss of the FP8 model is nan after step 2.*step-000002"):
        train(config)
    assert not (config.run.out / "summary.json").exists()
    assert "NaN" not in (config.run.out / "metrics.jsonl").read_text(encoding="utf-8")
