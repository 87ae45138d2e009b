// All runs of the folder.

import { h, matcher, search, table } from "octavo/dom.js";
import { ago, number, percent, short } from "octavo/format.js";
import { get, link, place, set } from "octavo/place.js";

const SIGNS = { healthy: "✓", watch: "!", unhealthy: "✕", unknown: "?" };

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
    const row = (run) => (run.error ? ["", run.name, run.error, "", "", "", "", "", ""] : [
      pick(run.id), h("a", { href: link("overview", { run: run.id }), class: "strong" }, run.name),
      h("span", { class: `tag ${run.level}`, title: run.verdict }, SIGNS[run.level], " ", { healthy: "healthy", watch: "check", unhealthy: "unhealthy", unknown: "unknown" }[run.level]),
      h("span", { class: `state ${run.state}` }, run.state), `${number(run.step)}${run.steps ? ` / ${number(run.steps)}` : ""}`, number(run.loss), percent(run.gap_percent), short(run.tokens_per_second), run.recipe ?? "–", ago(run.heartbeat)]);
    body.replaceChildren(
      table("Runs, newest first", [["", ""], ["run", ""], ["verdict", ""], ["state", ""], ["step", "number"], ["loss", "number"], ["gap", "number"], ["tokens/s", "number"], ["recipe", ""], ["last write", "when"]], chosen.map(row),
        { empty: list.runs.length ? "No matching runs." : "No runs in this folder yet. `octavo train` creates one." }),
      h("p", {}, h("a", { class: picked.size > 1 ? "button" : "button off", href: picked.size > 1 ? link("compare", { run: [...picked] }) : null }, `Compare ${picked.size || ""} side by side`)));
  }

  return { element, refresh };
}
