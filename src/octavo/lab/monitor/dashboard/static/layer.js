// One layer: histograms with the range of the format, statistics over time, and decisions.

import { h, table } from "octavo/dom.js";
import { chart, colour, line, linked, logAxis, ROLES, swatch } from "octavo/charts.js";
import { isOf, moment, number, share, shown as valueOf, STATS, statOf, words } from "octavo/format.js";
import { get, link } from "octavo/place.js";
import { ask, seriesOf } from "octavo/source.js";
import { kernels, precision } from "octavo/plan.js";

const asked = (run, layer, stat) => ["series", [["run", run], ["layer", layer], ["stat", stat], ["points", 600]]];
export const layerAsks = (run) => (get("layer") ? [["histograms", [["run", run], ["layer", get("layer")]]], ["events", [["run", run]]],
  ...Object.keys(STATS).map((stat) => asked(run, get("layer"), stat))] : []);

export function layerView() {
  const top = h("div", {});
  const histograms = h("div", { class: "grid four" });
  const untaken = h("p", { class: "quiet", hidden: true }, "This layer has no histograms.");
  const decisions = h("section", {});
  const series = h("div", { class: "grid three" });
  const legend = h("h2", { class: "legend" });
  const element = h("div", {}, top, histograms, untaken, decisions, legend, series);
  const made = new Map();
  let run = null;
  let layer = "";

  async function refresh(now) {
    run = now;
    const names = layersOf(run);
    const before = layer;
    layer = get("layer") || names[0];
    if (!names.includes(layer)) throw new Error(`this run has no layer “${layer}”`);
    if (before !== layer) top.replaceChildren(head(names));
    document.title = `${layer} · ${run.name} · Octavo`;
    await Promise.all([drawHistograms(), drawSeries(), drawDecisions()]);
  }

  function head(names) {
    const at = names.indexOf(layer);
    const step = (text, name, mark) => (name ? h("a", { href: link("layer", { run: run.id, layer: name }), [mark]: true, title: name, class: "button" }, text)
      : h("span", { class: "button off", "aria-hidden": "true" }, text));
    const choose = h("input", { list: "all-layers", value: layer, "aria-label": "Layer", "data-search": true, spellcheck: "false",
      onfocus: (event) => event.target.select(),
      onchange: (event) => { if (names.includes(event.target.value)) location.hash = link("layer", { run: run.id, layer: event.target.value }); } });
    const plan = planOf();
    const measured = run.layers.find(({ name }) => name === layer);
    return h("div", {},
      h("h1", { class: "hidden" }, layer),
      h("div", { class: "controls layer" }, step("‹ previous", names[at - 1], "data-before"), choose, step("next ›", names[at + 1], "data-next"),
        h("datalist", { id: "all-layers" }, names.map((name) => h("option", { value: name })))),
      h("dl", { class: "facts" }, [
        ["kind", plan && `${plan.kind} ${plan.shape.join(" × ")}`],
        ["recipe", plan?.recipe],
        ["fprop / dgrad / wgrad", plan && precision(plan.precision)],
        ["kernels", plan && kernels(plan.kernels)],
        ["predicted gain", plan?.gain && `${number(plan.gain, 3)} times BF16`],
        ["reason", plan?.reason],
        ...Object.entries(measured?.roles ?? {}).map(([role, { operand }]) => [words(role), operand]),
      ].filter(([, value]) => value).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
  }

  const planOf = () => (run.plan.layers ?? []).find(({ name }) => name === layer);
  const isMeasured = () => run.layers.some(({ name }) => name === layer);

  function chartOf(key, parent, title, options) {
    if (!made.has(key)) {
      made.set(key, chart(title, options));
      parent.append(made.get(key).element);
    }
    return made.get(key);
  }

  async function drawHistograms() {
    histograms.hidden = !isMeasured();
    if (!isMeasured()) return;
    const found = await ask("histograms", [["run", run.id], ["layer", layer]]);
    const isAny = Object.values(found).some((held) => held);
    histograms.hidden = !isAny;
    untaken.hidden = isAny;
    if (!isAny) return;
    for (const role of Object.keys(found)) chartOf(`histogram ${role}`, histograms, `${words(role)}: exponents`, { height: 230 });
    await Promise.all(Object.entries(found).map(([role, held]) => drawHistogram(role, held)));
  }

  async function drawHistogram(role, held) {
    const target = made.get(`histogram ${role}`);
    if (!held) {
      target.say("");
      await target.draw([], {}, "No histogram.");
      return;
    }
    const total = held.counts.reduce((sum, count) => sum + count, 0) || 1;
    const x = held.counts.map((_, index) => held.low + index + 0.5);
    const y = held.counts.map((count) => (100 * count) / total);
    const told = held.window ? `${held.window.format}: ${share(held.below)} below its range, ${share(held.above)} above` : role === "grad_weight" ? "value (not quantised)" : "format of unknown range";
    target.say(`step ${number(held.step)}${held.sqnr === null ? "" : `, SQNR ${valueOf("sqnr", held.sqnr)}`}`);
    const edges = held.window ? [held.window.lowest - 1, held.window.highest + 1] : [];
    const used = x.filter((_, index) => y[index] > 0);
    await target.draw([{ type: "bar", name: words(role), x, y, width: 0.92, marker: { color: colour(ROLES[role]) }, customdata: held.counts,
      hovertemplate: "2<sup>%{x:.0f}</sup>: %{customdata} elements, %{y:.3g} %<extra></extra>" }], {
      showlegend: false, hovermode: "closest", bargap: 0,
      xaxis: { title: { text: held.window ? `value / scale<br>${held.window.format}: ${share(held.below)} below, ${share(held.above)} above` : told, font: { size: 12 }, standoff: 6 }, tickprefix: "2<sup>", ticksuffix: "</sup>", dtick: 8, zeroline: false,
        range: [Math.min(...used, ...edges) - 1, Math.max(...used, ...edges) + 1] },
      yaxis: { ticksuffix: " %", rangemode: "tozero" },
      shapes: held.window ? shades(held.window) : [],
    }, told);
  }

  async function drawSeries() {
    series.hidden = legend.hidden = !isMeasured();
    if (!isMeasured()) return;
    const wanted = layer;
    legend.replaceChildren("Over time", ...run.roles.map((role) => h("small", {}, swatch(ROLES[role]), words(role))));
    const charts = run.stats.map((stat) => chartOf(stat, series, words(stat), { height: 200, note: statOf(stat).unit === "dB" ? "dB" : "" }));
    if (!series.isLinked) linked(charts);
    series.isLinked = true;
    await Promise.all(run.stats.map(async (stat) => {
      const answer = await ask(...asked(run.id, wanted, stat));
      if (wanted !== layer) return;
      const target = made.get(stat);
      target.element.title = statOf(stat).about;
      const isShare = statOf(stat).unit === "share";
      const known = run.roles.filter((role) => isOf(stat, role)).map((role) => [role, measured(seriesOf(answer, role), statOf(stat).isSparse)]);
      const roles = known.filter(([, found]) => found?.x.length);
      const traces = roles.map(([role, found]) => line(words(role), isShare ? { x: found.x, y: Array.from(found.y, (value) => 100 * value) } : found, ROLES[role], { line: { width: 1.4 } }));
      const some = roles.some(([, found]) => found.y.some((value) => value > 0));
      const asLog = statOf(stat).log && some && !isShare;
      await target.draw(isShare && !some ? [] : traces, { showlegend: false, yaxis: { ...(asLog ? logAxis(traces) : { type: "linear", nticks: 6 }), ticksuffix: isShare ? " %" : "", exponentformat: "power" } },
      isShare && !some && roles.length ? "Always 0." : roles.map(([role, found]) => `${words(role)} ${valueOf(stat, found.y.at(-1))}`).join(", "));
    }));
  }

  async function drawDecisions() {
    const { events } = await ask("events", [["run", run.id]]);
    const plan = planOf();
    const first = plan ? [[number(0), "", "plan", `${plan.recipe}, ${plan.precision}${plan.reason ? `: ${plan.reason}` : ""}`, ""]] : [];
    const mine = events.filter((event) => event.layer === layer).map((event) => [number(event.step), moment(event.t), event.rule,
      [event.role ? `${words(event.role)}: ` : "", event.text], event.action ?? ""]);
    decisions.replaceChildren(h("h2", {}, "Decisions"), table("Decisions about this layer", [["step", "number"], ["time", "when"], ["by", ""], ["decision", ""], ["action", ""]], [...first, ...mine],
      { empty: "No decisions about this layer." }));
  }

  return { element, refresh };
}

// The measured steps of a sparse statistic, so that its line has no gaps.
const measured = (found, isSparse) => (!found || !isSparse ? found
  : { x: found.x.filter((_, index) => Number.isFinite(found.y[index])), y: found.y.filter(Number.isFinite) });

const layersOf = (run) => [...new Set([...run.layers.map(({ name }) => name), ...(run.plan.layers ?? []).map(({ name }) => name)])];

// The range of the format: shaded for full mantissas, lighter for subnormal codes.
function shades({ lowest, normal, highest }) {
  const band = (x0, x1, opacity) => ({ type: "rect", x0, x1, yref: "paper", y0: 0, y1: 1, layer: "below", line: { width: 0 }, fillcolor: colour("good"), opacity });
  const edge = (x) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: colour("good"), width: 1.5 } });
  return [band(normal, highest, 0.16), band(lowest, normal, 0.07), edge(lowest), edge(highest)];
}
