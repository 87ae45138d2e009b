"""The page in a real browser: every view, a run that goes on, themes, a phone, a long run, a report from disk."""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import synthetic_run

from octavo.lab.monitor.dashboard.report import report
from octavo.lab.monitor.store import STATS, RunReader
from octavo.lab.monitor.store.writer import RunWriter

api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: {', '.join(BROWSERS)}")

MIDDLE = "layers.1.attention.wo"
VIEWS = {
    "overview?run=first": "21 of 22 layers in FP8",
    "layers?run=first&stat=saturated": "beyond the largest code",
    f"layer?run=first&layer={MIDDLE}": "a quarter of grad_output saturated",
    "plan?run=first": "1 in BF16: a head",
    "performance?run=first": "speed-up",
    "events?run=first": "scale window raised",
    "settings?run=first": "optimizer.lr",
    "samples?run=first": "FP8 def f(self): BF16 def f(<b>x",
    "console?run=first": "step 60: loss spike",
    "compare?run=first&run=sweep/tensorwise": "run.recipe",
    "runs": "sweep/tensorwise",
}
"""A link to each view, and a text on it."""
NAMELESS = """[...document.querySelectorAll("button, select, input, a, .plot, [role=region]")]
    .filter(each => !(each.innerText?.trim() || each.ariaLabel || each.labels?.length)).map(each => each.outerHTML)"""
"""Elements without a name for screen readers."""
LIGHT, DARK = "rgb(244, 246, 249)", "rgb(14, 18, 23)"

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def home(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that `address` serves. Tests write runs of their own into it."""
    return Path(shutil.copytree(folder, tmp_path_factory.mktemp("home"), dirs_exist_ok=True))


@pytest.fixture(scope="module")
def address(home: Path, serve: Any) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.lab.monitor.dashboard.runs.RESCAN_SECONDS", 0.0)  # a run is seen as soon as it is written
        yield str(serve(home))


@pytest.fixture
def complaints(told: list[str]) -> Iterator[list[str]]:
    """Fail a test in which a page has script errors or asks another host."""
    told.clear()
    yield told
    assert told == []


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def new_window(browser: Any, told: list[str]) -> Open:
    def opened(link: str, width: int = 1280, **options: Any) -> Any:
        page = browser.new_context(viewport={"width": width, "height": 860}, **options).new_page()
        page.on("console", lambda message: message.type == "error" and told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("request", lambda request: own(request.url) or told.append(f"asked {request.url}"))
        page.goto(link)
        drawn(page)
        return page

    return opened


@pytest.fixture
def open_window(new_window: Open, complaints: list[str]) -> Iterator[Open]:
    """Return a function that opens an address in a new window and waits for all charts."""
    with ExitStack() as windows:

        def opened(link: str, **options: Any) -> Any:
            page = new_window(link, **options)
            windows.callback(page.context.close)
            return page

        yield opened


@pytest.fixture(scope="module")
def window(new_window: Open, address: str) -> Any:
    return new_window(f"{address}/#/runs")


@pytest.fixture
def visit(window: Any, address: str, complaints: list[str]) -> Open:
    """Return a function that follows a link in the window of all tests: an eighth of the time of a new one."""

    def visit(link: str) -> Any:
        follow(window, f"{address}/#/{'settings' if link.startswith('runs') else 'runs'}?run=first")
        follow(window, f"{address}/#/{link}")
        if link.startswith(("runs", "compare")):
            again(window)  # with the present list of runs
        return window

    return visit


def record(path: Path, *steps: dict[str, float], **documents: dict[str, Any]) -> None:
    """Write a run that has ended."""
    with RunWriter(path) as run, run.batch():
        for name, document in documents.items():
            run.write_document(name, document)
        for step, values in enumerate(steps, 1):
            run.write_step(step, values)


def own(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "data:", "blob:", "file:"))


def drawn(page: Any, view: str = "") -> None:
    page.wait_for_selector(f"main[aria-busy=false]{f'[data-view={view}]' * bool(view)}", timeout=30_000)


def follow(page: Any, link: str) -> None:
    """Follow a link within the page, and wait until all is drawn."""
    page.goto(link)
    drawn(page, link.split("#/")[1].split("?")[0])


def again(page: Any) -> None:
    """Open the page's address anew. Its scripts are compiled already."""
    page.reload()
    drawn(page)


def holds(page: Any, condition: str) -> None:
    """Wait until a condition holds, by polling: the page's policy forbids evaluating text."""
    end = time.monotonic() + 20
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


def text(page: Any) -> str:
    return " ".join(page.inner_text("main").split())


def marks(page: Any) -> int:
    """Return the number of lines, bars and maps that are on the page."""
    return int(page.locator(".plot .scatterlayer .trace, .plot .barlayer .trace, .plot .heatmaplayer image").count())


@pytest.mark.parametrize(("theme", "links"), [("light", list(VIEWS)), ("dark", list(VIEWS)[:2])])
def test_every_view(visit: Open, window: Any, theme: str, links: list[str]) -> None:
    window.emulate_media(color_scheme=theme)
    for link in links:
        page = visit(link)
        assert VIEWS[link] in text(page)
        is_charted = link.split("?")[0] in ("overview", "layers", "layer", "performance", "compare")
        assert (marks(page) > 2) == is_charted
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (LIGHT if theme == "light" else DARK)
        assert page.evaluate(NAMELESS) == []
    window.emulate_media(color_scheme="light")


def test_charts_show_what_was_stored(visit: Open) -> None:
    page = visit("layers?run=first&stat=saturated&role=grad_output")
    trace = page.evaluate("""(({x, y, customdata}) => ({x, y, all: customdata.map(row => Array.from(row))}))
        (document.querySelector(".plot").data[0])""")
    row = trace["all"][trace["y"].index(MIDDLE)]
    assert max(row) == 0.25 and row[trace["x"].index(160)] == 0.25
    assert sum(value > 0 for each in trace["all"] for value in each) == 1


def test_the_address_holds_what_is_shown(visit: Open) -> None:
    page = visit("layers?run=first")
    page.get_by_label("statistic").select_option("kurtosis")
    page.get_by_label("role", exact=True).select_option("weight")
    page.get_by_label("layers", exact=True).fill("mlp")
    holds(page, "location.hash.includes('filter=mlp')")
    again(page)
    assert page.get_by_label("statistic").input_value() == "kurtosis"
    assert page.locator("figure").count() == 1
    names = page.evaluate("document.querySelector('.plot').data[0].y")
    assert len(names) == 9 and all("mlp" in name for name in names)


def test_keys_lead_everywhere(address: str, visit: Open) -> None:
    page = visit("overview?run=first")
    page.keyboard.press("2")
    page.wait_for_selector("main[data-view=layers]")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.type("2")  # text, no longer a key
    page.keyboard.press("Escape")
    follow(page, f"{address}/#/layer?run=first&layer={MIDDLE}")
    page.keyboard.press("]")
    holds(page, "location.hash.includes('layers.1.mlp.w1') && document.querySelector('h1').innerText.includes('w1')")
    page.keyboard.press("[")
    holds(page, f"location.hash.includes('{MIDDLE}')")
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == DARK
    again(page)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == DARK
    page.keyboard.press("t")
    page.keyboard.press("r")
    page.wait_for_selector("main[data-view=runs]")


def test_a_phone_shows_all_of_it(address: str, open_window: Open) -> None:
    page = open_window(f"{address}/#/runs", width=360, has_touch=True, is_mobile=True)
    for link in VIEWS:
        follow(page, f"{address}/#/{link}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert (
            page.evaluate(
                "Math.max(0, ...[...document.querySelectorAll('.plot')].map(e => e.getBoundingClientRect().right))"
            )
            <= 360
        )


def test_a_row_of_the_map_opens_its_layer(visit: Open) -> None:
    page = visit("layers?run=first&role=input")
    box = page.locator(".plot .plot-container .nsewdrag").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] * 10.5 / 21)
    page.wait_for_selector("main[data-view=layer]")
    assert MIDDLE in page.url


def test_a_layer_shows_its_histograms_against_the_window_of_the_format(visit: Open) -> None:
    page = visit(f"layer?run=first&layer={MIDDLE}")
    drawn = page.evaluate("""[...document.querySelectorAll(".plot")].filter(each => each.data?.[0]?.type === "bar")
        .map(each => [each.data[0].name, each.layout.shapes?.length ?? 0, each.layout.xaxis.title.text])""")
    assert [name for name, _, _ in drawn] == ["input", "weight", "grad output", "grad weight"]
    assert [shapes for _, shapes, _ in drawn] == [4, 4, 4, 0]  # two bands and two edges each
    assert drawn[0][2].startswith("value / scale<br>e4m3: ")
    assert "SQNR" in page.inner_text("figure")


def test_a_live_run_is_followed(home: Path, visit: Open) -> None:
    run = synthetic_run(home / "live", layers=7, steps=60, spike_at=0, finished=False, start=time.time() - 6)
    page = visit("overview?run=live")
    assert "training · step 60" in page.inner_text("#state")
    snapshot = np.zeros((28, len(STATS)), dtype=np.float32)
    snapshot[6, STATS.index("nonfinite")] = 0.5
    with run.batch():
        for step in range(61, 91):
            run.write_step(step, {"loss_fp8": 1.0, "loss_bf16": 1.0, "gap_percent": 0.0}, snapshot)
    holds(page, "document.querySelector('#state').innerText.includes('step 90')")
    assert "not finite" in page.inner_text("#verdict")
    assert page.evaluate("document.querySelector('.plot').data[0].x.at(-1)") == 90
    run.close()
    holds(page, "document.querySelector('#state').innerText.includes('finished')")


def test_a_run_of_200_layers_and_20000_steps_opens_in_two_seconds(
    home: Path, address: str, visit: Open, open_window: Open
) -> None:
    synthetic_run(home / "small", layers=7, steps=60)
    synthetic_run(home / "large", layers=200, steps=20_000)
    try:
        for view in ("overview", "layers"):
            page = visit(f"{view}?run=large")
            start = time.perf_counter()
            again(page)
            is_quick = time.perf_counter() - start < 2.0
            assert marks(page) > 2
            visit("runs")  # polls the large run no longer
            assert is_quick or any(opens_like_a_small_one(f"{address}/#/{view}", open_window) for _ in range(4))
    finally:
        shutil.rmtree(home / "large")


def opens_like_a_small_one(link: str, open_window: Open) -> bool:
    """Return whether a new window takes little more time for it: where others use the machine too."""
    seconds = {}
    for run in ("small", "large"):
        start = time.perf_counter()
        page = open_window(f"{link}?run={run}")
        seconds[run] = time.perf_counter() - start
        page.context.close()
    return seconds["large"] < 1.6 * seconds["small"]


def test_what_a_run_says_is_never_read_as_html(home: Path, visit: Open) -> None:
    run = synthetic_run(home / "bad", layers=7, steps=60, spike_at=0, finished=False)
    nasty = "<img src=x onerror=document.title='taken'>"
    run.write_event(60, nasty, nasty, level="error", layer="layers.0.mlp.w2", action=nasty)
    run.write_document("config", {"run": {"recipe": nasty, "steps": 60}, nasty: nasty})
    run.write_step(61, {nasty: 1.0})
    run.close("failed", nasty)
    for view in ("overview", "events", "settings", "runs"):
        page = visit(f"{view}?run=bad")
        assert nasty in text(page) or view == "runs"
        assert page.locator("img").count() == 0
        assert page.title() != "taken"


def test_a_wrong_link_says_what_is_wrong(address: str, window: Any, visit: Open, complaints: list[str]) -> None:
    visit("events?run=first")
    window.goto(f"{address}/#/overview?run=frist")
    window.wait_for_selector("[role=alert]")
    assert "Did you mean 'first'?" in text(window)
    assert len(complaints) == 1 and "404" in complaints.pop()
    window.goto(f"{address}/#/nowhere")
    drawn(window, "runs")


def test_a_report_opens_from_disk(folder: Path, tmp_path: Path, open_window: Open) -> None:
    path = report([folder / "first", folder / "sweep" / "tensorwise"], tmp_path / "report.html")
    page = open_window(path.as_uri())
    for link, told in VIEWS.items():
        link = link.replace("sweep/", "")
        follow(page, f"{path.as_uri()}#/{link}")
        assert told.replace("sweep/", "") in text(page)
    follow(page, f"{path.as_uri()}#/layer?run=first&layer={MIDDLE}")
    saturated = page.locator("figure", has_text=re.compile("^saturated")).locator(".plot")
    assert max(saturated.evaluate("e => e.data.find(trace => trace.name === 'grad output').y")) == 25.0


def test_the_plan_shows_what_a_precision_map_found(visit: Open) -> None:
    shown = visit("plan?run=first").inner_text("main")
    assert "2.0e-5 ± 3.0e-6" in shown and "1.5e-4" in shown and "0.03 of 0.05" in shown


CURVES = """Object.fromEntries([...document.querySelectorAll("figure")]
    .map(figure => [figure.querySelector(".title").innerText.trim(), figure.querySelector(".plot").data])
    .filter(([, data]) => data?.length)
    .map(([title, data]) => [title, data.map(({name, x, y, line, opacity}) =>
        ({name, x: Array.from(x), y: Array.from(y), dash: line?.dash ?? "", faint: opacity !== undefined}))]))"""
"""The lines of each chart, by its title."""


def chart(curves: dict[str, Any], title: str) -> list[Any]:
    return next(lines for name, lines in curves.items() if name.startswith(title))


def test_the_learning_rate_is_drawn_as_it_was(folder: Path, visit: Open) -> None:
    page = visit("overview?run=first&smooth=0.99")
    [line] = chart(page.evaluate(CURVES), "Learning")
    steps, values = RunReader(folder / "first").scalar("lr").points()
    assert line["x"] == [int(step) for step in steps] and line["y"] == pytest.approx([float(v) for v in values])


def test_smoothing_keeps_the_first_value_and_the_range_and_does_not_end_on_one_batch(visit: Open) -> None:
    page = visit("overview?run=first&smooth=0.99&clip=0")  # the widest window
    lines = [line for line in chart(page.evaluate(CURVES), "Loss") if line["name"] == "FP8"]
    raw, smooth = (next(line["y"] for line in lines if line["faint"] is faint) for faint in (True, False))
    last = raw[-max(len(raw) // 8, 2) :]
    assert smooth[0] == pytest.approx(raw[0]) and smooth[-1] != raw[-1] and min(last) <= smooth[-1] <= max(last)
    assert min(raw) <= min(smooth) and max(smooth) <= max(raw)
    roughness = [sum(abs(b - a) for a, b in itertools.pairwise(y)) for y in (smooth, raw)]
    assert roughness[0] < roughness[1]


def test_the_window_of_smoothing_fits_a_short_run(home: Path, visit: Open) -> None:
    record(home / "short", *({"loss_fp8": loss, "loss_bf16": loss} for loss in 2 + 4 * 0.8 ** np.arange(1, 34)))
    page = visit("overview?run=short")
    smooth = next(line for line in chart(page.evaluate(CURVES), "Loss") if line["name"] == "FP8" and not line["faint"])
    assert smooth["y"] == pytest.approx([2 + 4 * 0.8**step for step in smooth["x"]], rel=0.05)


def test_of_two_equal_curves_both_are_seen(visit: Open) -> None:
    lines = [line for line in chart(visit("overview?run=first").evaluate(CURVES), "Loss") if not line["faint"]]
    drawn = [(line["name"], line["dash"]) for line in lines if "held" not in line["name"]]
    assert drawn == [("FP8", ""), ("BF16", "6px,5px")]


def test_zooming_one_chart_zooms_all(visit: Open) -> None:
    page = visit("overview?run=first")
    page.evaluate("Plotly.relayout(document.querySelector('.plot'), {'xaxis.range[0]': 50, 'xaxis.range[1]': 90})")
    shown = (
        "[...document.querySelectorAll('.plot')].filter(each => each.data?.length).map(each => each.layout.xaxis.range)"
    )
    holds(page, f"{shown}.length === 4 && {shown}.every(range => range && range[0] === 50 && range[1] === 90)")


def test_resumes_and_checkpoints_are_marked(home: Path, visit: Open) -> None:
    with RunWriter(home / "resumed") as run:
        for step in range(1, 41):
            run.write_step(step, {"loss_fp8": 1.0 + 1 / step})
        run.write_event(20, "checkpoint", "checkpoint step-000020")
    with RunWriter(home / "resumed", keep_until=20) as run:
        for step in range(21, 61):
            run.write_step(step, {"loss_fp8": 1.0 + 1 / step})
    page = visit("overview?run=resumed")
    marked = page.evaluate("document.querySelector('.plot').layout.shapes.map(({x0, y1}) => [x0, y1])")
    assert marked == [[20, 1], [20, 0.04]]


def test_the_list_of_runs_sorts_by_its_columns(home: Path, visit: Open) -> None:
    for name, loss, count in (("a", 2.0, 10**6), ("b", 1.0, 3 * 10**9), ("c", 3.0, 2 * 10**6)):
        steps = [{"loss_fp8": loss + 1 / step} for step in range(1, 9)]
        config = {"model": {"architecture": "llama"}}
        record(home / "sorted" / name, *steps, env={"parameters": count}, config=config)
    (home / "sorted" / "b" / "notes.md").write_text("# larger batch\n\nmore\n")
    page = visit("runs?filter=sorted/")
    names = "[...document.querySelectorAll('tbody tr a.strong')].map(each => each.firstChild.textContent.at(-1))"
    page.get_by_role("button", name="loss", exact=True).click()
    assert page.evaluate(names) == ["b", "a", "c"]
    page.get_by_role("button", name="loss ↑").click()
    assert page.evaluate(names) == ["c", "a", "b"]
    page.get_by_role("button", name="model", exact=True).click()
    assert page.evaluate(names) == ["a", "c", "b"]
    assert "llama 3.0 B" in text(page) and "larger batch" in text(page)
    assert page.locator("svg.spark polyline").count() == 3
    again(page)
    assert page.evaluate(names) == ["a", "c", "b"]


def test_a_run_in_bf16_is_compared_with_one_in_fp8(home: Path, visit: Open) -> None:
    for name, key in (("fp8", "loss_fp8"), ("bf16", "loss_bf16")):
        steps = [{key: 1.0 + 1 / step} for step in range(1, 9)]
        record(home / "pair" / name, *steps, config={"run": {"recipe": name}}, summary={f"heldout_{key}": 1.25})
    page = visit("compare?run=pair/fp8&run=pair/bf16")
    drawn = {line["name"]: line for line in chart(page.evaluate(CURVES), "loss") if not line["faint"]}
    assert drawn["pair/fp8"]["y"] == drawn["pair/bf16"]["y"] == [pytest.approx(1.0 + 1 / step) for step in range(1, 9)]
    assert (drawn["pair/fp8"]["dash"], drawn["pair/bf16"]["dash"]) == ("", "6px,5px")
    assert page.locator("fieldset .swatch").count() == 2  # one legend for all charts
    page = visit("runs?filter=pair/")
    cells = "[...document.querySelectorAll('tbody tr')].map(row => [row.cells[5].innerText, row.cells[9].innerText])"
    assert sorted(page.evaluate(cells)) == [["bf16", "1.25"], ["fp8", "1.25"]]


def test_runs_of_several_seeds_are_a_mean_and_a_band(home: Path, visit: Open) -> None:
    for seed, loss, recipe in ((0, 1.0, "folded"), (1, 2.0, "folded"), (2, 6.0, "folded"), (0, 9.0, "block")):
        steps = [{"loss": loss + step} for step in range(1, 6 + seed)]
        record(
            home / f"{recipe}{seed}", *steps, config={"run": {"recipe": recipe, "seed": seed, "out": f"{recipe}{seed}"}}
        )
    page = visit("compare?run=folded0&run=folded1&run=folded2&run=block0")
    page.get_by_label("seeds as a band").check()
    holds(page, "document.querySelector('.plot').data[1].fill === 'tonexty'")
    low, high, mean, other = chart(page.evaluate(CURVES), "loss")
    assert low["x"] == [1, 2, 3, 4, 5], "as far as the shortest"
    assert (low["y"], high["y"], mean["y"]) == ([2, 3, 4, 5, 6], [7, 8, 9, 10, 11], [4, 5, 6, 7, 8])
    assert mean["name"] == "folded0, folded1, folded2" and other["name"] == "block0"


def test_charts_of_a_comparison_are_chosen_and_arranged(home: Path, visit: Open) -> None:
    record(home / "scored", *8 * [{"loss": 1.0, "tokens_per_second": 5.0, "score": 2.0}])
    page = visit("compare?run=scored")
    titles = "[...document.querySelectorAll('figure .title')].map(each => each.innerText.trim())"
    assert page.evaluate(titles) == ["loss", "tokens per second"]
    page.get_by_label("add a chart").select_option("score")
    holds(page, f"{titles}.length === 3")
    page.get_by_role("button", name="Move forward: score").click()
    holds(page, f"{titles}[1] === 'score'")
    page.get_by_role("button", name="Remove: tokens per second").click()
    holds(page, f"{titles}.join() === 'loss,score'")
    again(page)
    assert page.evaluate(titles) == ["loss", "score"], "the address holds the choice"


def test_an_axis_takes_a_range_and_a_constant_is_not_magnified(home: Path, visit: Open) -> None:
    record(home / "flat", *({"loss": 1.0 / step, "fp8_flops": 0.7 + 1e-16 * (step % 3)} for step in range(1, 99)))
    page = visit("overview?run=flat")
    axis = "[...document.querySelectorAll('figure')].find(each => each.innerText.startsWith('{}'))"
    axis += ".querySelector('.plot').layout.yaxis"
    assert page.evaluate(axis.format("Share of FLOPs in FP8"))["range"] == pytest.approx([0.63, 0.77])
    page.get_by_role("button", name="Range of the y axis of Loss").click()
    page.get_by_label("from of the y axis of Loss").fill("0.25")
    page.get_by_label("to of the y axis of Loss").fill("0.5")
    page.get_by_label("to of the y axis of Loss").press("Tab")
    holds(page, f"{axis.format('Loss')}.range.join() === '0.25,0.5'")
    page.get_by_label("clip spikes").uncheck()  # draws again
    holds(page, f"location.hash.includes('clip=0') && {axis.format('Loss')}.range.join() === '0.25,0.5'")
    page.get_by_label("from of the y axis of Loss").fill("")
    page.get_by_label("to of the y axis of Loss").fill("")
    page.get_by_label("to of the y axis of Loss").press("Tab")
    holds(page, f"{axis.format('Loss')}.range[1] > 0.9")


def test_the_gap_has_its_limit(home: Path, visit: Open) -> None:
    record(home / "close", *19 * [{"loss_fp8": 1.0, "loss_bf16": 1.0, "gap_percent": 0.1}])
    page = visit("overview?run=close")
    shapes = "[...document.querySelectorAll('.plot')].flatMap(each => each.layout?.shapes ?? [])"
    assert [shape["y0"] for shape in page.evaluate(shapes) if shape.get("xref") == "paper"] == [1]
    assert "dotted: limit, 1 %" in text(page).replace("1.00", "1")


def test_statistics_of_a_layer_share_a_legend_and_zoom(visit: Open) -> None:
    page = visit(f"layer?run=first&layer={MIDDLE}")
    assert page.locator(".legend .swatch").count() == 4
    assert page.locator("figure", has_text=re.compile("^nonfinite")).inner_text().endswith("Always 0.")
    shown = "[...document.querySelectorAll('.legend ~ .grid .plot')].filter(each => each.data?.length)"
    page.evaluate(f"Plotly.relayout({shown}[0], {{'xaxis.range[0]': 50, 'xaxis.range[1]': 90}})")
    holds(page, f"{shown}.length > 4 && {shown}.every(each => each.layout.xaxis.range?.[0] === 50)")


def test_changed_settings_come_first(home: Path, visit: Open) -> None:
    env = {"changed": ["run.steps"], "command": "octavo train", "commit": "abc+"}
    record(home / "changed", {"loss": 1.0}, config={"run": {"batch": 8, "steps": 9}}, env=env)
    page = visit("settings?run=changed")
    shown = text(page)
    assert "command octavo train" in shown and "abc+" in shown and "run.steps" in shown
    assert "run.batch" not in shown and "settings at their defaults: 1" in shown
    page.locator("summary").click()
    assert text(page).index("run.steps") < text(page).index("run.batch")
    assert page.locator("strong", has_text="9").count() == 1
    page.get_by_role("searchbox").fill("batch")  # a search opens the fold
    holds(page, "location.hash.includes('filter=batch')")
    assert "run.batch" in text(page)


def test_units_of_metrics_of_ones_own(home: Path, visit: Open) -> None:
    record(home / "units", *({"loss": 1.0, "accuracy_percent": 50.0 + step, "score": 2.0} for step in range(1, 9)))
    page = visit("overview?run=units")
    units = page.evaluate("""Object.fromEntries([...document.querySelectorAll(".plot")]
        .filter(each => each.data?.length).map(each => [each.data[0].name, each.layout.yaxis.ticksuffix ?? ""]))""")
    assert units["accuracy_percent"] == " %" and units["score"] == ""
    heights = (
        """[...document.querySelectorAll('.plot')].filter(each => !each.data?.length).map(each => each.clientHeight)"""
    )
    assert max(page.evaluate(heights)) < 130  # a chart with lines has 260
