// The page's frame: the current view, live updates, theme, keys.

import { h } from "octavo/dom.js";
import { load, release } from "octavo/charts.js";
import { ago, number } from "octavo/format.js";
import { get, link, place } from "octavo/place.js";
import { ask, askAhead, isReport, open } from "octavo/source.js";
import { compareView } from "octavo/compare.js";
import { consoleView } from "octavo/console.js";
import { eventsView } from "octavo/events.js";
import { layerAsks, layerView } from "octavo/layer.js";
import { layersAsks, layersView } from "octavo/layers.js";
import { overviewAsks, overviewView } from "octavo/overview.js";
import { performanceAsks, performanceView } from "octavo/performance.js";
import { planView } from "octavo/plan.js";
import { runsView } from "octavo/runs.js";
import { samplesView } from "octavo/samples.js";
import { settingsView } from "octavo/settings.js";

const VIEWS = {
  overview: ["Overview", overviewView, overviewAsks],
  layers: ["Heat maps", layersView, layersAsks],
  layer: ["Layer", layerView, layerAsks],
  plan: ["Plan", planView],
  performance: ["Performance", performanceView, performanceAsks],
  events: ["Events", eventsView],
  samples: ["Samples", samplesView],
  console: ["Console", consoleView],
  settings: ["Settings", settingsView],
};
const ACROSS = { runs: ["Runs", runsView], compare: ["Compare", compareView] };
const EVERY = 2000; // milliseconds between two updates of a run that trains
const SHARE = 5; // updating takes at most one part in SHARE of the time

const main = document.getElementById("main");
let shown = null; // {view, run, refresh(data)}
let list = { runs: [] };
let data = null; // of the run shown
let version = null;

async function show() {
  const { view, parameters } = place();
  const run = parameters.get("run");
  if (!view || !(view in VIEWS || view in ACROSS)) return redirect();
  if (view in VIEWS && !run) return redirect();
  const isSame = shown && shown.view === view && (view in ACROSS || shown.run === run);
  try {
    if (!isSame) await mount(view, run);
    else await shown.refresh(data);
  } catch (error) {
    fail(error);
  }
  frame();
}

function redirect() {
  const only = list.runs.length === 1 && !list.runs[0].error ? list.runs[0].id : null;
  location.replace(only ? link("overview", { run: only }) : link("runs"));
}

async function mount(view, run) {
  main.setAttribute("aria-busy", "true");
  if (view in VIEWS && data?.id !== run) {
    data = await ask("run", [["run", run]]);
    version = null;
  }
  const [title, make] = VIEWS[view] ?? ACROSS[view];
  const made = make();
  release(main);
  main.replaceChildren(made.element);
  shown = { view, run, refresh: made.refresh };
  const named = view in VIEWS ? `${view === "layer" ? get("layer") || title : title} · ${data.name}` : title;
  document.title = `${named} · Octavo`;
  await made.refresh(view in VIEWS ? data : list);
  main.setAttribute("aria-busy", "false");
  main.dataset.view = view;
}

function fail(error) {
  release(main);
  main.replaceChildren(h("div", { class: "verdict unknown", role: "alert" }, h("p", {}, `Cannot be shown: ${error.message}.`),
    h("p", {}, h("a", { href: link("runs") }, "All runs"))));
  main.setAttribute("aria-busy", "false");
  shown = null;
}

function frame() {
  const { view } = place();
  const run = data && view in VIEWS ? data.id : null;
  const tab = ([name, [title]], index) => h("a", {
    href: link(name, { run, layer: name === "layer" ? get("layer") : null }), "aria-current": name === view ? "page" : null,
    "data-key": index + 1, "aria-keyshortcuts": index + 1,
  }, title);
  const across = Object.entries(ACROSS).map(([name, [title]]) => h("a", {
    href: name === "compare" && run ? link("compare", { run }) : link(name), "aria-current": name === view ? "page" : null }, title));
  const chooser = list.runs.length > 1 && run ? h("select", { "aria-label": "Run", onchange: (event) => {
    location.hash = link(view, { run: event.target.value });
  } }, list.runs.map((each) => h("option", { value: each.id, selected: each.id === run }, each.name))) : run && h("strong", {}, data.name);
  document.getElementById("top").replaceChildren(
    h("div", { class: "bar" },
      h("a", { class: "brand", href: link("runs") }, "Octavo"), chooser || h("span", { class: "quiet" }, list.folder ?? ""),
      run && state(data), h("span", { class: "grow" }), h("nav", { "aria-label": "All runs" }, across),
      h("button", { type: "button", class: "plain", onclick: turn, "aria-label": "Light or dark theme", title: "Light or dark theme (t)" }, "◐"),
      h("button", { type: "button", class: "plain", onclick: help, "aria-label": "Keys", title: "Keys (?)" }, "?")),
    ...[run && h("nav", { class: "tabs", "aria-label": "Views of this run" }, Object.entries(VIEWS).map(tab))].filter(Boolean),
  );
}

function state(run) {
  const text = { running: "training", finished: "finished", failed: "failed", interrupted: "interrupted", silent: "silent" }[run.state];
  const heard = run.state === "running" || isReport() ? "" : `, ${ago(run.heartbeat)}`;
  return h("span", { class: `state ${run.state}`, title: "State of the run, and time of its last write", id: "state" },
    text, " · step ", number(run.step), h("span", { class: "heard" }, heard));
}

// Following

async function follow() {
  let pause = EVERY;
  try {
    const was = shown;
    const isStill = () => shown === was && main.getAttribute("aria-busy") === "false"; // the view has not changed
    if (!document.hidden && was && isStill()) {
      const began = performance.now();
      if (was.view in VIEWS) {
        const found = (await hasChanged()) ? await ask("run", [["run", was.run]]) : null;
        if (found && isStill()) {
          data = found;
          await was.refresh(data);
          frame();
        }
      } else {
        const found = await ask("runs");
        list = found;
        if (isStill()) await was.refresh(list);
      }
      pause = Math.max(EVERY, SHARE * (performance.now() - began));
    }
    document.body.classList.remove("lost");
  } catch {
    document.body.classList.add("lost"); // the server or the run has gone: keep the present view
  }
  setTimeout(follow, pause);
}

async function hasChanged() {
  if (!data) return false;
  const now = await ask("live", [["run", data.id]]);
  const before = version;
  version = `${now.version}/${now.step}/${now.state}`;
  return before === null ? now.step !== data.step || now.state !== data.state : before !== version;
}

// Theme

const wanted = () => document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

function remember(theme) {
  try {
    if (theme) localStorage.setItem("octavo-theme", theme);
    return localStorage.getItem("octavo-theme");
  } catch {
    return null; // a page from disk may have no storage
  }
}

function turn() {
  document.documentElement.dataset.theme = remember(wanted() === "dark" ? "light" : "dark") ?? (wanted() === "dark" ? "light" : "dark");
  shown?.refresh(shown.view in VIEWS ? data : list);
}

// Keys

const KEYS = [
  [`1 … ${Object.keys(VIEWS).length}`, "the views of a run, in order"], ["r", "all runs"], ["c", "compare"], ["[  ]", "previous layer, next layer"],
  ["/", "search"], ["t", "light or dark theme"], ["?", "these keys"], ["Esc", "close, or leave a field"],
];

function help() {
  const dialog = document.getElementById("help");
  dialog.replaceChildren(h("h2", { id: "help-title" }, "Keys"),
    h("dl", { class: "keys" }, KEYS.map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])),
    h("form", { method: "dialog" }, h("button", {}, "Close")));
  dialog.showModal();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.matches("input, select, textarea");
  if (event.key === "Escape" && isTyping) event.target.blur();
  if (isTyping || document.getElementById("help").open) return;
  const tab = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  const field = document.querySelector("[data-search]");
  const step = { "[": "[data-before]", "]": "[data-next]" }[event.key];
  if (tab) tab.click();
  else if (step) document.querySelector(step)?.click();
  else if (event.key === "/" && field) field.focus();
  else if (event.key === "r") location.hash = link("runs");
  else if (event.key === "c") location.hash = link("compare", { run: data?.id });
  else if (event.key === "t") turn();
  else if (event.key === "?") help();
  else return;
  event.preventDefault();
}

async function start() {
  const theme = remember();
  if (theme) document.documentElement.dataset.theme = theme;
  document.querySelector("[data-skip]").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
  document.addEventListener("keydown", pressed);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown?.refresh(shown.view in VIEWS ? data : list));
  window.addEventListener("hashchange", show);
  try {
    await open();
    const { view, parameters } = place();
    const run = parameters.get("run");
    if (view in VIEWS && run) { // a link to a run does not wait for the list
      askAhead("run", [["run", run]]);
      for (const asked of VIEWS[view][2]?.(run) ?? []) askAhead(...asked);
    } else list = await ask("runs");
    load().catch(() => {}); // drawing reports the error
    await show();
    list = await ask("runs");
    frame();
  } catch (error) {
    fail(error);
    frame();
  }
  if (!isReport()) setTimeout(follow, EVERY);
}

start();
