// Runs side by side: one chart per number, the state of each run, and the configuration differences.

import { check, h, select, table } from "octavo/dom.js";
import { chart, DASHED, linked, mapped, RUNS, smoothLines, swatch } from "octavo/charts.js";
import { number, percent, short, words } from "octavo/format.js";
import { get, link, place, set } from "octavo/place.js";
import { ask, seriesOf } from "octavo/source.js";
import { clockOf } from "octavo/overview.js";
import { text } from "octavo/settings.js";

// Losses that stand for the run: of the FP8 model, of the only one, of the baseline. One chart has them all.
const LOSSES = ["loss_fp8", "loss", "loss_bf16"];
const FIRST = ["loss", "heldout_loss", "gap_percent", "tokens_per_second"];
const named = (key) => (key === "loss" || key === "heldout_loss" ? LOSSES.map((each) => each.replace("loss", key)) : [key]);
const MOST = 8;

export function compareView() {
  const chosen = h("fieldset", { class: "controls" });
  const controls = h("div", { class: "controls" });
  const charts = h("div", { class: "grid" });
  const tables = h("div", {});
  const element = h("div", {}, h("h1", {}, "Comparison"), chosen, controls, charts, tables);
  const made = new Map();
  let list = null;
  let drawing = 0;

  async function refresh(now) {
    list = now;
    const picked = pickedRuns();
    chosen.replaceChildren(h("legend", {}, "Runs"), ...list.runs.filter((run) => !run.error).map((run) => h("span", { class: "control check" }, check(run.name, picked.includes(run.id), (on) => {
      set({ run: on ? [...pickedRuns(), run.id].slice(-MOST) : pickedRuns().filter((id) => id !== run.id) });
      refresh(list);
    }), picked.includes(run.id) && swatch(RUNS[picked.indexOf(run.id) % RUNS.length])))); // the legend of all charts
    await draw();
  }

  const pickedRuns = () => {
    const asked = place().parameters.getAll("run");
    const all = list.runs.filter((run) => !run.error).map((run) => run.id);
    return asked.length ? asked.filter((id) => all.includes(id)) : all.slice(0, 2);
  };

  async function draw() {
    const turn = (drawing += 1);
    const ids = pickedRuns();
    const parameters = ids.map((id) => ["run", id]);
    const answer = ids.length ? await ask("compare", parameters) : { runs: [], differences: [], keys: [] };
    const third = get("key", answer.keys.find((key) => key.startsWith("gradient_norm")) ?? "");
    const keys = [...new Set([...FIRST.filter((key) => named(key).some((each) => answer.keys.includes(each))), ...(answer.keys.includes(third) ? [third] : [])])];
    const scalars = await Promise.all(ids.map((id) => ask("scalars", [["run", id], ...[...keys.flatMap(named), "time", "tokens"].map((key) => ["key", key])])));
    if (turn !== drawing) return;
    const runs = ids.map((id) => answer.runs.find((run) => run.id === id));
    controls.replaceChildren(...knobs(answer.keys, third));
    charts.replaceChildren(...keys.map((key) => chartOf(key).element));
    linked(keys.map(chartOf));
    await Promise.all(keys.map((key) => overlay(key, runs, scalars)));
    tables.replaceChildren(standing(runs), differences(answer));
  }

  const change = (name) => (value) => { set({ [name]: value }); draw(); };
  const knobs = (keys, third) => [
    select("x axis", get("x", "step"), [["step", "step"], ["hours", "hours"], ["tokens", "tokens"]], change("x")),
    select("additional chart", third, keys.map((key) => [key, words(key)]), change("key")),
    h("label", { class: "control" }, h("span", {}, "smoothing"), h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: get("smooth", "0.9"), onchange: (event) => change("smooth")(event.target.value) })),
  ];

  function chartOf(key) {
    if (!made.has(key)) made.set(key, chart(named(key).length > 1 ? words(key).replace("heldout", "held-out") : words(key), { height: 300 }));
    return made.get(key);
  }

  async function overlay(key, runs, scalars) {
    const traces = runs.flatMap((run, index) => {
      const name = named(key).find((each) => seriesOf(scalars[index], each)?.x.length);
      const found = name && seriesOf(scalars[index], name);
      const [, clock] = clockOf(scalars[index], get("x", "step"));
      return found?.x.length ? smoothLines(run.name, mapped(found, clock), RUNS[index % RUNS.length], key === "heldout_loss" ? 0 : Number(get("smooth", "0.9")), styleOf(key, name)) : [];
    });
    await chartOf(key).draw(traces, { xaxis: { title: { text: get("x", "step"), font: { size: 12 }, standoff: 8 } }, showlegend: false }, `${runs.length} runs`);
  }

  // A run in BF16 is dashed among those in FP8; held-out losses are few, and shown as points.
  const styleOf = (key, name) => ({ ...(key === "loss" && name === "loss_bf16" ? DASHED : {}), ...(key === "heldout_loss" ? { mode: "lines+markers" } : {}) });

  const standing = (runs) => h("section", {}, h("h2", {}, "Present state"), table("Present state of the runs",
    [["run", ""], ["verdict", ""], ["step", "number"], ["loss", "number"], ["held-out loss", "number"], ["gap", "number"], ["tokens/s", "number"]],
    runs.map((run) => (run.error ? [run.name, run.error, "", "", "", "", ""] : [h("a", { href: link("overview", { run: run.id }) }, run.name), run.verdict, number(run.step), number(run.loss), number(run.heldout_loss), percent(run.gap_percent), short(run.tokens_per_second)])),
    { empty: "Choose runs above." }));

  const differences = ({ runs, differences: found }) => h("section", {}, h("h2", {}, "Configuration differences"), table("Configuration differences",
    [["key", "key"], ...runs.map((run) => [run.name, ""])], found.map(({ key, values }) => [key, ...values.map(text)]),
    { empty: runs.length > 1 ? "No differences." : "Choose two runs." }));

  return { element, refresh };
}
