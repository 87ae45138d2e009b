// Runs side by side: one chart per number, the state of each run, and the configuration differences.

import { check, h, select, table } from "octavo/dom.js";
import { band, chart, DASHED, linked, mapped, RUNS, smoothed, smoothLines, swatch } from "octavo/charts.js";
import { number, short, signed, words } from "octavo/format.js";
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
    const has = (key) => named(key).some((each) => answer.keys.includes(each));
    const keys = chosenCharts(answer.keys).filter(has);
    const scalars = await Promise.all(ids.map((id) => ask("scalars", [["run", id], ...[...keys.flatMap(named), "time", "tokens"].map((key) => ["key", key])])));
    if (turn !== drawing) return;
    const runs = ids.map((id) => answer.runs.find((run) => run.id === id));
    controls.replaceChildren(...knobs([...FIRST.filter(has), ...answer.keys.filter((key) => !FIRST.flatMap(named).includes(key))].filter((key) => !keys.includes(key)), keys));
    charts.replaceChildren(...keys.map((key) => chartOf(key).element));
    linked(keys.map(chartOf));
    const groups = get("group") === "1" ? grouped(answer) : runs.map((_, index) => [index]);
    await Promise.all(keys.map((key) => overlay(key, runs, scalars, groups)));
    tables.replaceChildren(standing(runs), differences(answer));
  }

  const change = (name) => (value) => { set({ [name]: value }); draw(); };
  // The charts of the address, in its order; without any, the usual ones and that of `key`.
  const chosenCharts = (keys) => {
    const asked = place().parameters.getAll("chart");
    return [...new Set(asked.length ? asked : [...FIRST, get("key", ["gradient_norm_fp8", "gradient_norm", "gradient_norm_bf16"].find((key) => keys.includes(key)) ?? "")])];
  };
  const shownCharts = () => [...charts.children].map((element) => [...made].find(([, each]) => each.element === element)[0]);
  const arrange = (keys) => { set({ chart: keys, key: null }); draw(); };
  const earlier = (key) => {
    const keys = shownCharts();
    const at = keys.indexOf(key);
    if (at > 0) arrange([...keys.slice(0, at - 1), key, keys[at - 1], ...keys.slice(at + 1)]);
  };

  const knobs = (more, keys) => [
    select("x axis", get("x", "step"), [["step", "step"], ["hours", "hours"], ["tokens", "tokens"]], change("x")),
    select("add a chart", "", [["", "–"], ...more.map((key) => [key, words(key)])], (key) => arrange([...keys, key])),
    check("seeds as a band", get("group") === "1", (on) => { set({ group: on ? "1" : null }); draw(); }),
    h("label", { class: "control" }, h("span", {}, "smoothing"), h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: get("smooth", "0.9"), onchange: (event) => change("smooth")(event.target.value) })),
  ];

  function chartOf(key) {
    if (!made.has(key)) made.set(key, chart(named(key).length > 1 ? words(key).replace("heldout", "held-out") : words(key), { height: 300,
      actions: [["←", "Move forward", () => earlier(key)], ["✕", "Remove", () => arrange(shownCharts().filter((each) => each !== key))]] }));
    return made.get(key);
  }

  async function overlay(key, runs, scalars, groups) {
    const weight = key === "heldout_loss" ? 0 : Number(get("smooth", "0.9"));
    const curveOf = (index) => {
      const name = named(key).find((each) => seriesOf(scalars[index], each)?.x.length);
      const [, clock] = clockOf(scalars[index], get("x", "step"), runs[index].pauses);
      return { name, series: name && mapped(seriesOf(scalars[index], name), clock) };
    };
    const traces = groups.flatMap((members) => {
      const curves = members.map(curveOf).filter(({ series }) => series?.x.length);
      if (!curves.length) return [];
      const [tone, style] = [RUNS[members[0] % RUNS.length], styleOf(key, curves[0].name)];
      if (curves.length === 1) return smoothLines(runs[members[0]].name, curves[0].series, tone, weight, style);
      const all = curves.map(({ series }) => ({ x: series.x, y: weight && series.x.length > 7 ? smoothed(series.y, weight) : series.y }));
      return band(members.map((index) => runs[index].name).join(", "), all, tone, style);
    });
    chartOf(key).say(groups.some((members) => members.length > 1) ? "mean of the seeds, lowest to highest" : "");
    await chartOf(key).draw(traces, { xaxis: { title: { text: get("x", "step"), font: { size: 12 }, standoff: 8 } }, showlegend: false }, `${runs.length} runs`);
  }

  // Places of the runs whose configurations differ in seed and name alone, together.
  function grouped({ runs, differences: found }) {
    const keys = found.filter(({ key }) => !/(^|\.)(seed|out|name|note|notes)$/.test(key));
    const groups = new Map();
    runs.forEach((run, index) => {
      const same = JSON.stringify([run.model, ...keys.map(({ values }) => values[index])]);
      groups.set(same, [...(groups.get(same) ?? []), index]);
    });
    return [...groups.values()];
  }

  // A run in BF16 is dashed among those in FP8; held-out losses are few, and shown as points.
  const styleOf = (key, name) => ({ ...(key === "loss" && name === "loss_bf16" ? DASHED : {}), ...(key === "heldout_loss" ? { mode: "lines+markers" } : {}) });

  const standing = (runs) => h("section", {}, h("h2", {}, "Present state"), table("Present state of the runs",
    [["run", ""], ["verdict", ""], ["step", "number"], ["loss", "number"], ["held-out loss", "number"], ["gap", "number"], ["tokens/s", "number"]],
    runs.map((run) => (run.error ? [run.name, run.error, "", "", "", "", ""] : [h("a", { href: link("overview", { run: run.id }) }, run.name), run.verdict, number(run.step), number(run.loss), number(run.heldout_loss), signed(run.gap_percent), short(run.tokens_per_second)])),
    { empty: "Choose runs above." }));

  const differences = ({ runs, differences: found }) => h("section", {}, h("h2", {}, "Configuration differences"), table("Configuration differences",
    [["key", "key"], ...runs.map((run) => [run.name, ""])], found.map(({ key, values }) => [key, ...values.map(text)]),
    { empty: runs.length > 1 ? "No differences." : "Choose two runs." }));

  return { element, refresh };
}
