// All runs of the folder.

import { h, matcher, search, svg, table } from "octavo/dom.js";
import { ago, duration, moment, number, short, signed } from "octavo/format.js";
import { get, link, place, set } from "octavo/place.js";

const SIGNS = { healthy: "✓", watch: "!", unhealthy: "✕", unknown: "?" };

// Title, class, and the value to sort by.
const COLUMNS = [
  ["", ""], ["run", "", (run) => run.name], ["verdict", "", (run) => LEVELS.indexOf(run.level)], ["state", "", (run) => run.state], ["model", "", (run) => run.parameters],
  ["recipe", "", (run) => run.recipe], ["losses", ""], ["step", "number", (run) => run.step], ["loss", "number", (run) => run.loss], ["held-out loss", "number", (run) => run.heldout_loss],
  ["gap", "number", (run) => run.gap_percent], ["tokens/s", "number", (run) => run.tokens_per_second], ["started", "when", (run) => run.started],
  ["duration", "when", (run) => run.duration], ["last write", "when", (run) => run.heartbeat],
];
const LEVELS = ["healthy", "unknown", "watch", "unhealthy"];

// Values in ascending order, what is missing last.
function order(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined || Number.isNaN(a)) return 1;
  if (b === null || b === undefined || Number.isNaN(b)) return -1;
  return a < b ? -1 : 1;
}

const SPARK = { width: 80, height: 18 };

// A small curve of a few values.
function sparkline(values = []) {
  const finite = values.filter(Number.isFinite);
  if (finite.length < 2) return "";
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  const points = values.map((value, index) => [index, value]).filter(([, value]) => Number.isFinite(value)).map(([index, value]) => [
    (1 + (SPARK.width - 2) * (index / (values.length - 1))).toFixed(1), (1 + (SPARK.height - 2) * ((high - value) / (high - low || 1))).toFixed(1)]);
  const name = `losses from ${number(finite[0])} to ${number(finite.at(-1))}`;
  return svg("svg", { class: "spark", role: "img", "aria-label": name, viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, ...SPARK },
    svg("polyline", { points: points.map((point) => point.join(",")).join(" ") }));
}

export function runsView() {
  const controls = h("div", { class: "controls" });
  const body = h("div", {});
  const element = h("div", {}, h("h1", {}, "Runs"), controls, body);
  let list = null;

  function refresh(now) {
    list = now;
    if (!controls.children.length) controls.append(search("runs", get("filter"), (value) => { set({ filter: value }); draw(); }));
    draw();
  }

  function draw() {
    const matches = matcher(get("filter"));
    const chosen = list.runs.filter((run) => matches(`${run.name} ${run.recipe ?? ""}`));
    const picked = new Set(place().parameters.getAll("run"));
    const pick = (id) => h("input", { type: "checkbox", checked: picked.has(id), "aria-label": `Compare ${id}`, onchange: (event) => {
      if (event.target.checked) picked.add(id); else picked.delete(id);
      set({ run: [...picked] });
      draw();
    } });
    const row = (run) => (run.error ? ["", run.name, run.error, ...COLUMNS.slice(3).map(() => "")] : [
      pick(run.id), h("a", { href: link("overview", { run: run.id }), class: "strong" }, run.name, run.note && h("small", { class: "note", title: run.note }, run.note)),
      h("span", { class: `tag ${run.level}`, title: run.verdict }, SIGNS[run.level], " ", { healthy: "healthy", watch: "check", unhealthy: "unhealthy", unknown: "unknown" }[run.level]),
      h("span", { class: `state ${run.state}` }, run.state), run.model ? h("span", { class: "when" }, run.model) : "–", run.recipe ?? "–", sparkline(run.losses), `${number(run.step)}${run.steps ? ` / ${number(run.steps)}` : ""}`, number(run.loss), number(run.heldout_loss),
      signed(run.gap_percent), short(run.tokens_per_second), moment(run.started), duration(run.duration), ago(run.heartbeat)]);
    const [sorted, isDown] = [get("sort"), get("down") === "1"];
    const by = COLUMNS.find(([title]) => title === sorted)?.[2];
    if (by) chosen.sort((a, b) => order(by(a), by(b)) * (isDown ? -1 : 1));
    const head = ([title, kind, key]) => [key ? h("button", { type: "button", class: "plain sort", "aria-pressed": title === sorted ? "true" : "false",
      onclick: () => { set({ sort: title, down: title === sorted && !isDown ? "1" : null }); draw(); } }, title, title === sorted ? (isDown ? " ↓" : " ↑") : "") : title, kind];
    body.replaceChildren(
      table(sorted ? `Runs by ${sorted}` : "Runs, newest first", COLUMNS.map(head), chosen.map(row),
        { class: "tight", empty: list.runs.length ? "No matching runs." : "No runs in this folder yet. `octavo train` creates one." }),
      h("p", {}, h("a", { class: picked.size > 1 ? "button" : "button off", href: picked.size > 1 ? link("compare", { run: [...picked] }) : null }, `Compare ${picked.size || ""} side by side`)));
  }

  return { element, refresh };
}
