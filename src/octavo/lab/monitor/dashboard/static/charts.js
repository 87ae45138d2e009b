// Charts by Plotly in the page's colours, each with a title, a description for screen readers, and its data.

import { h } from "octavo/dom.js";

let loaded = null;

// Load Plotly, unless the page contains it. It takes a while to start, so data is requested first.
export function load() {
  loaded ??= new Promise((resolve, reject) => {
    if (globalThis.Plotly) resolve(globalThis.Plotly);
    else {
      const failed = () => reject(new Error("Plotly's script could not be loaded"));
      document.head.append(h("script", { src: "/static/plotly.min.js", onload: () => resolve(globalThis.Plotly), onerror: failed }));
    }
  });
  return loaded;
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const LANES = { fp8: "fp8", bf16: "bf16" };
export const ROLES = { input: "role-input", weight: "role-weight", grad_output: "role-grad", grad_weight: "role-update" };
export const RUNS = ["run-0", "run-1", "run-2", "run-3", "run-4", "run-5", "run-6", "run-7"];
// The colour of a line, for a legend that several charts share.
export const swatch = (name) => h("span", { class: "swatch", style: `background:${colour(name)}`, "aria-hidden": "true" });
export const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const isCoarse = () => matchMedia("(pointer: coarse)").matches;
export const isNarrow = () => matchMedia("(max-width: 640px)").matches;

const CONFIG = {
  responsive: true,
  displaylogo: false,
  displayModeBar: isCoarse() ? false : "hover",
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], // only these: a default button sends data to a server
};

const axis = () => ({
  gridcolor: colour("line"), zerolinecolor: colour("line-strong"), linecolor: colour("line-strong"),
  tickcolor: colour("line-strong"), automargin: true, title: { font: { size: 12 }, standoff: 8 },
});

function themed(layout, height) {
  const { xaxis = {}, yaxis = {}, ...rest } = layout;
  return {
    height,
    margin: { l: 8, r: 8, t: 8, b: 8, pad: 2 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("text-quiet") },
    hoverlabel: { bgcolor: colour("surface"), bordercolor: colour("line-strong"), font: { color: colour("text") } },
    hovermode: "x unified",
    dragmode: isCoarse() ? false : "zoom",
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", xanchor: "left", bgcolor: "rgba(0,0,0,0)" },
    showlegend: true,
    uirevision: "kept",
    xaxis: { ...axis(), ...xaxis },
    yaxis: { ...axis(), ...yaxis },
    ...rest,
  };
}

// A figure, filled by draw(traces, layout, description for screen readers).
// `actions`: buttons beside the title, each [sign, name, function].
export function chart(title, { height = 260, note = "", wide = false, onclick = null, actions = [] } = {}) {
  const plot = h("div", { class: "plot", role: "img", "aria-label": `${title}: loading`, style: `min-height:${height}px` });
  const aside = h("small", {}, note);
  const save = h("button", { type: "button", class: "plain", title: `Data of “${title}” as CSV`, "aria-label": `Data of ${title} as CSV`,
    onclick: () => download(`${title}.csv`, asCsv(plot.data ?? [])) }, "CSV");
  let ends = [NaN, NaN]; // of the y axis, as asked for
  const end = (place, label) => h("input", { type: "number", step: "any", "aria-label": `${label} of the y axis of ${title}`, placeholder: label, onchange: (event) => {
    ends[place] = event.target.value === "" ? NaN : Number(event.target.value);
    if (plot.data?.length) globalThis.Plotly.relayout(plot, ranged(plot.layout.yaxis, ends));
  } });
  const range = h("span", { class: "range", hidden: true }, end(0, "from"), end(1, "to"));
  const toggle = h("button", { type: "button", class: "plain", title: `Range of the y axis of “${title}”`, "aria-label": `Range of the y axis of ${title}`,
    onclick: () => { range.hidden = !range.hidden; } }, "y");
  const others = actions.map(([sign, name, act]) => h("button", { type: "button", class: "plain", title: `${name}: ${title}`, "aria-label": `${name}: ${title}`, onclick: act }, sign));
  const element = h("figure", { class: wide ? "chart wide" : "chart" },
    h("figcaption", {}, h("span", { class: "title" }, title, " ", aside), h("span", { class: "tools" }, range, others, toggle, save)), plot);
  const made = {
    element,
    plot,
    whenMade: null, // called once, when there is a plot to attach events to
    async draw(traces, layout = {}, description = "", tall = height) {
      const Plotly = await load();
      if (!element.isConnected) return;
      element.classList.toggle("empty", !traces.length); // takes no room
      if (!traces.length) {
        Plotly.purge(plot);
        plot.style.minHeight = "0";
        plot.replaceChildren(h("p", { class: "quiet" }, description || "No measurements."));
        plot.setAttribute("aria-label", `${title}: ${description || "no measurements"}`);
        return;
      }
      plot.querySelector(":scope > p")?.remove();
      plot.setAttribute("aria-label", `${title}. ${description}`);
      plot.style.minHeight = `${tall}px`;
      const isNew = !plot.on; // Plotly adds it to a plot
      const found = themed(layout, tall);
      const level = levelOf(traces);
      if (level && found.yaxis.type !== "log" && !found.yaxis.range) Object.assign(found.yaxis, { range: [level - Math.abs(level) / 10, level + Math.abs(level) / 10], autorange: false });
      if (ends.some(Number.isFinite)) Object.assign(found.yaxis, ranged(found.yaxis, ends).yaxis);
      await Plotly.react(plot, traces, found, CONFIG);
      if (isNew && onclick) plot.on("plotly_click", onclick);
      if (isNew) made.whenMade?.();
    },
    say(text) { aside.textContent = text; },
  };
  return made;
}

// The value of curves that are constant but for rounding, which an axis of their own range would magnify; else null.
function levelOf(traces) {
  let [low, high] = [Infinity, -Infinity];
  for (const trace of traces) {
    if (trace.type !== "scatter") return null;
    for (const value of trace.y) if (Number.isFinite(value)) [low, high] = [Math.min(low, value), Math.max(high, value)];
  }
  return high - low <= 1e-9 * Math.abs(high) ? high : null;
}

// The y axis between the ends that are given; without any, as Plotly chooses.
function ranged(axis, ends) {
  const value = (end) => (Number.isFinite(end) ? (axis.type === "log" ? Math.log10(end) : end) : null);
  const range = ends.map(value);
  return { yaxis: range.some((end) => end !== null) ? { ...axis, range, autorange: false } : { ...axis, range: undefined, autorange: true } };
}

// Runs that differ in their seed alone, as a mean and the band between the lowest and the highest.
export function band(name, all, colourName, more = {}) {
  const until = Math.min(...all.map((series) => series.x[series.x.length - 1]));
  const x = Array.from(all[0].x).filter((step) => step <= until);
  const values = all.map((series) => Array.from(mapped({ x, y: [] }, series).x));
  const at = (reduced) => x.map((_, index) => reduced(...values.map((each) => each[index])));
  const edge = (y, fill) => line(name, { x, y }, colourName, { ...fill, showlegend: false, hoverinfo: "skip", line: { width: 0 } });
  return [edge(at(Math.min), {}), edge(at(Math.max), { fill: "tonexty", fillcolor: `${colour(colourName)}33` }),
    line(name, { x, y: at((...each) => each.reduce((sum, value) => sum + value, 0) / each.length) }, colourName, more)];
}

// The style of the baseline: dashed and drawn last, so that of two equal curves both are seen.
export const DASHED = { line: { dash: "6px,5px", width: 2 } };

// Free Plotly's resources of an element.
export const release = (element) => element.querySelectorAll(".js-plotly-plot").forEach((plot) => globalThis.Plotly?.purge(plot));

export function line(name, series, colourName, more = {}) {
  return {
    type: "scatter", mode: "lines", name: plain(name), x: series.x, y: series.y, connectgaps: false,
    line: { color: colour(colourName), width: 1.8, ...more.line }, ...without(more, "line"),
  };
}

// A line and its smoothed version; the raw line stays faintly, so that spikes remain visible.
export function smoothLines(name, series, colourName, weight, more = {}) {
  if (!weight || series.x.length < 8) return [line(name, series, colourName, more)];
  const faint = line(name, series, colourName, { ...more, opacity: 0.28, showlegend: false, hoverinfo: "skip", line: { width: 1 } });
  return [faint, line(name, { x: series.x, y: smoothed(series.y, weight) }, colourName, more)];
}

// A running median, which keeps jumps and drops spikes, then a running mean. `weight` 0 to 1 sets the window as a share of
// the points. Windows are centred. They shrink toward the first point, so that a steep start does not lag, and lose only
// what is not there yet at the last, so that a curve does not end on the noise of one batch. Non-finite values are skipped.
export function smoothed(values, weight) {
  const list = Array.from(values);
  const reach = Math.min(Math.round(weight * 0.06 * list.length), 60);
  const half = Math.ceil(reach / 2);
  return running(running(list, reach, median), half, (near) => near.reduce((sum, value) => sum + value, 0) / near.length);
}

function running(list, reach, reduced) {
  return list.map((value, index) => {
    if (!Number.isFinite(value)) return null;
    const own = Math.min(reach, index); // slice ends at the last point
    return reduced(list.slice(index - own, index + own + 1).filter(Number.isFinite));
  });
}

function median(near) {
  const sorted = near.sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// Charts of one x axis: zooming one zooms all, and the cursor is shown in all.
export function linked(charts) {
  let busy = false; // an event that this function caused is not passed on
  const others = (own) => charts.filter((each) => each !== own && each.plot.on && each.plot.data?.length);
  const pass = async (own, action) => {
    if (busy) return;
    busy = true;
    try {
      await Promise.all(others(own).map((each) => action(each.plot)));
    } finally {
      busy = false;
    }
  };
  for (const own of charts) {
    own.whenMade = () => {
      own.plot.on("plotly_relayout", (change) => {
        const isReset = change["xaxis.autorange"];
        const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
        if (isReset || range.every(Number.isFinite)) pass(own, (plot) => globalThis.Plotly.relayout(plot, isReset ? { "xaxis.autorange": true } : { "xaxis.range": range }));
      });
      own.plot.on("plotly_hover", ({ xvals }) => pass(own, (plot) => globalThis.Plotly.Fx.hover(plot, { xval: xvals[0], yval: 0 }, "xy")));
      own.plot.on("plotly_unhover", () => pass(own, (plot) => globalThis.Plotly.Fx.unhover(plot)));
    };
  }
}

// The range of most points, and the number of points beyond it, so that a spike does not flatten the rest.
export function clipped(traces) {
  const values = traces.flatMap((trace) => Array.from(trace.y).filter(Number.isFinite)).sort((a, b) => a - b);
  if (values.length < 50) return { range: null, beyond: 0 };
  const at = (part) => values[Math.min(Math.floor(part * values.length), values.length - 1)];
  const [low, high] = [at(0.005), at(0.995)];
  const room = 0.25 * (high - low);
  if (values[0] >= low - room && values.at(-1) <= high + room) return { range: null, beyond: 0 };
  const range = [Math.max(low - room, values[0]), Math.min(high + room, values.at(-1))];
  const drawn = traces.filter((trace) => !(trace.showlegend !== false && traces.some((other) => other.name === trace.name && other !== trace)));
  const beyond = drawn.reduce((sum, trace) => sum + Array.from(trace.y).filter((value) => value < range[0] || value > range[1]).length, 0);
  return { range: range[0] < range[1] ? range : null, beyond };
}

// A logarithmic axis with one tick per decade, or fewer.
export function logAxis(traces) {
  const logs = traces.flatMap((trace) => Array.from(trace.y).filter((value) => value > 0)).map(Math.log10);
  const [low, high] = logs.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  return high - low > 2.5 ? { type: "log", dtick: Math.ceil((high - low) / 5) } : { type: "log", nticks: 5 };
}

// Map steps to another axis: the value of `clock` (a series over steps) at each step.
export function mapped(series, clock) {
  if (!clock || !clock.x.length) return series;
  let at = 0;
  const x = Array.from(series.x, (step) => {
    while (at < clock.x.length - 2 && clock.x[at + 1] < step) at += 1;
    const next = Math.min(at + 1, clock.x.length - 1);
    const width = clock.x[next] - clock.x[at];
    return clock.y[at] + (width ? ((step - clock.x[at]) / width) * (clock.y[next] - clock.y[at]) : 0);
  });
  return { x, y: series.y };
}

export const lastOf = (series) => {
  for (let index = (series?.y.length ?? 0) - 1; index >= 0; index -= 1) if (Number.isFinite(series.y[index])) return series.y[index];
  return NaN;
};

function asCsv(traces) {
  const quoted = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : value ?? "");
  const rows = [];
  for (const trace of traces) {
    if (trace.opacity !== undefined && trace.showlegend === false) continue;
    if (trace.type === "heatmap") {
      trace.y.forEach((name, row) => trace.x.forEach((x, column) => rows.push([name, x, trace.customdata[row][column]])));
    } else {
      for (let index = 0; index < trace.x.length; index += 1) rows.push([trace.name, trace.x[index], trace.y[index]]);
    }
  }
  return ["series,x,y", ...rows.map((row) => row.map(quoted).join(","))].join("\n");
}

function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  h("a", { href: address, download: name.replaceAll(/[^\w.-]+/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

const without = (object, name) => Object.fromEntries(Object.entries(object).filter(([key]) => key !== name));
