// Layers over time: one heat map of a statistic per role.

import { check, h, matcher, search, select, table } from "octavo/dom.js";
import { chart, colour, isNarrow, plain, ROLES } from "octavo/charts.js";
import { isNumber, isOf, shown as valueOf, statOf, words } from "octavo/format.js";
import { get, link, set } from "octavo/place.js";
import { ask } from "octavo/source.js";

const WORST = 12;

const asked = (run, role) => ["heatmap", [["run", run], ["stat", get("stat", "flushed")], ["role", role], ["pool", get("pool", "max")], ["buckets", isNarrow() ? 120 : 240]]];
const isWanted = (role) => ["all", role].includes(get("role", "all")) && isOf(get("stat", "flushed"), role);
export const layersAsks = (run) => Object.keys(ROLES).filter(isWanted).map((role) => asked(run, role));

export function layersView() {
  const controls = h("div", { class: "controls" });
  const about = h("p", { class: "quiet" });
  const maps = h("div", { class: "maps" });
  const worst = h("section", {});
  const element = h("div", {}, h("h1", { class: "hidden" }, "Heat maps"), controls, about, maps, worst);
  const charts = new Map();
  let run = null;
  let turn = 0;

  async function refresh(now) {
    run = now;
    if (!run.layers.length) {
      about.textContent = "This run has no tensor telemetry: it has no FP8 layers, or telemetry was off.";
      return;
    }
    controls.replaceChildren(...(controls.children.length ? controls.children : knobs()));
    await draw();
  }

  const change = (name) => (value) => { set({ [name]: value }); draw(); };
  const knobs = () => [
    select("statistic", get("stat", "flushed"), run.stats, change("stat")),
    select("role", get("role", "all"), [["all", "all roles"], ...run.roles.map((role) => [role, words(role)])], change("role")),
    select("per bucket of steps", get("pool", "max"), [["max", "maximum"], ["min", "minimum"]], change("pool")),
    select("order", get("order", "model"), [["model", "model order"], ["kind", "by kind of layer"]], change("order")),
    search("layers", get("filter"), change("filter")),
    check("logarithmic", get("log", "1") === "1", (value) => change("log")(value ? null : "0")),
  ];

  async function draw() {
    const mine = (turn += 1);
    const stat = get("stat", "flushed");
    const roles = run.roles.filter(isWanted);
    const answers = await Promise.all(roles.map((role) => ask(...asked(run.id, role))));
    if (mine !== turn) return; // superseded by another choice
    about.replaceChildren(h("b", {}, words(stat)), `: ${statOf(stat).about}. Choose a row to open its layer.`);
    const found = roles.map((role, index) => rowsOf(role, answers[index]));
    const scale = scaleOf(stat, found, get("log", "1") === "1");
    const drawn = roles.map((role) => chartOf(role));
    const have = drawn.map((each) => each.element);
    if (have.length !== maps.children.length || have.some((each, index) => maps.children[index] !== each)) maps.replaceChildren(...have);
    await Promise.all(found.map((rows, index) => one(drawn[index], rows, stat, scale, found.length)));
    const most = statOf(stat).isGoodHigh ? "lowest" : "highest";
    worst.replaceChildren(h("h2", {}, `${most[0].toUpperCase()}${most.slice(1)} ${words(stat)} in the last tenth of the run`), table(`Tensors with the ${most} ${words(stat)}`,
      [["layer", ""], ["role", ""], [words(stat), "number"]], newestOf(found, statOf(stat).isGoodHigh).map(([layer, role, value]) =>
        [h("a", { href: link("layer", { run: run.id, layer }) }, layer), words(role), valueOf(stat, value)]),
      { empty: found.some(({ rows }) => rows.length) ? "All are zero." : "No measurements." }));
  }

  function chartOf(role) {
    if (!charts.has(role)) {
      const onclick = (event) => { location.hash = link("layer", { run: run.id, layer: event.points[0].y }); };
      charts.set(role, chart(words(role), { wide: true, height: 220, onclick }));
    }
    return charts.get(role);
  }

  return { element, refresh };
}

// The rows shown: names and values.
function rowsOf(role, answer) {
  const matches = matcher(get("filter"));
  const layers = answer.header.layers.map((name, index) => ({ name, index })).filter(({ name }) => matches(name));
  const kind = (name) => name.slice(name.lastIndexOf(".") + 1);
  if (get("order", "model") === "kind") {
    const kinds = [...new Set(layers.map(({ name }) => kind(name)))];
    layers.sort((a, b) => kinds.indexOf(kind(a.name)) - kinds.indexOf(kind(b.name)) || a.index - b.index);
  }
  const [values, first, last, late] = ["values", "first", "last", "newest"].map((name) => answer.get(name));
  const rows = layers.map(({ index }) => values.subarray(index * first.length, (index + 1) * first.length));
  const names = layers.map(({ name }) => name);
  const newest = layers.map(({ index }) => late?.[index]);
  if (!statOf(get("stat", "flushed")).isSparse) return { role, names, rows, first, last, newest };
  const kept = (list) => list.filter((_, column) => rows.some((row) => Number.isFinite(row[column])));
  return { role, names, rows: rows.map(kept), first: kept(first), last: kept(last), newest };
}

// Colour scale of the values, the same for all roles.
function scaleOf(stat, found, isLog) {
  const base = isLog ? statOf(stat).log : 0;
  let [low, high, positive] = [Infinity, -Infinity, Infinity];
  for (const { rows } of found) {
    for (const row of rows) {
      for (const value of row) {
        if (!Number.isFinite(value)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
        if (value > 0 && value < positive) positive = value;
      }
    }
  }
  if (low > high) return null;
  if (base && positive < Infinity) {
    const log = base === 2 ? Math.log2 : Math.log10;
    const hasZero = low <= 0;
    const [from, to] = [log(positive) - (hasZero ? 0.5 : 0), Math.max(log(high), log(positive) + 0.1)];
    const whole = Array.from({ length: Math.max(Math.floor(to) - Math.ceil(log(positive)) + 1, 0) }, (_, index) => Math.ceil(log(positive)) + index);
    const every = Math.max(Math.ceil(whole.length / 6), 1);
    const ticks = [...(hasZero ? [from] : []), ...(whole.length > 1 ? whole.filter((_, index) => index % every === 0) : [log(positive), to])];
    const name = (tick) => (hasZero && tick === from ? "0" : base === 2 && Number.isInteger(tick) ? `2<sup>${tick}</sup>` : valueOf(stat, base ** tick));
    return { of: (value) => (value > 0 ? log(value) : value === 0 ? from : NaN), from, to, tickvals: ticks, ticktext: ticks.map(name), colours: "Viridis" };
  }
  const reach = Math.max(Math.abs(low), Math.abs(high));
  if (low < 0) return { of: (value) => value, from: -reach, to: reach, colours: "RdBu" };
  return { of: (value) => value, from: statOf(stat).isGoodHigh ? low : Math.min(low, 0), to: high || 1, colours: "Viridis" };
}

async function one(target, { role, names, rows, first, last }, stat, scale, count) {
  if (!names.length || !first.length || !scale) {
    target.say("");
    await target.draw([], {}, names.length ? "No measurements." : "No matching layers.", 80);
    return;
  }
  const z = rows.map((row) => Array.from(row, scale.of));
  const isShare = statOf(stat).unit === "share";
  const height = Math.min(Math.max(names.length * 14 + 70, 170), count > 1 ? 420 : 720);
  const largest = rows.map((row) => row.reduce((most, value) => (value > most ? value : most), -Infinity));
  const top = largest.indexOf(largest.reduce((a, b) => Math.max(a, b), -Infinity));
  const counted = names.length === 1 ? "1 layer" : `${names.length} layers`;
  const saying = `highest ${valueOf(stat, largest[top])} in ${names[top] ?? "none"}`;
  target.say(`${counted}, ${saying}`);
  await target.draw([{
    type: "heatmap", name: role, x: Array.from(last), y: names, z, customdata: rows, zmin: scale.from, zmax: scale.to, colorscale: scale.colours, zsmooth: false,
    hovertemplate: `%{y}<br>step %{x}<br>${words(stat)} <b>%{customdata:${isShare ? ".3~%" : ".4~g"}}</b><extra></extra>`, hoverongaps: false,
    colorbar: { thickness: 10, outlinewidth: 0, tickvals: scale.tickvals, ticktext: scale.ticktext, len: 1, tickfont: { size: 11 }, xpad: 6 },
  }], {
    hovermode: "closest", showlegend: false,
    xaxis: { title: { text: "step", font: { size: 12 }, standoff: 6 }, showgrid: false, zeroline: false },
    yaxis: { autorange: "reversed", type: "category", showgrid: false, showticklabels: !isNarrow(), tickfont: { size: 10, color: colour("text-quiet") }, nticks: Math.floor(height / 16) },
  }, `${counted} from step ${first[0]} to ${last[last.length - 1]}, ${plain(saying)}`, height);
}

function newestOf(found, isGoodHigh) {
  // A sparse statistic may have no value so late: then that of its last step.
  const valueAt = ({ rows, newest }, index) => (isNumber(newest[index]) ? newest[index] : rows[index].at(-1));
  const all = found.flatMap((each) => each.names.map((name, index) => [name, each.role, valueAt(each, index)]));
  return all.filter(([, , value]) => isNumber(value) && value !== 0).sort((a, b) => (isGoodHigh ? a[2] - b[2] : b[2] - a[2])).slice(0, WORST);
}
