// Settings, environment, text and outcome of the run.

import { h, matcher, search, table } from "octavo/dom.js";
import { duration, isNumber, moment, number } from "octavo/format.js";
import { get, set } from "octavo/place.js";

const DOCUMENTS = { config: "Configuration", env: "Environment", corpus: "Text", summary: "Summary" };

export function settingsView() {
  const body = h("div", {});
  const controls = h("div", { class: "controls" });
  const element = h("div", {}, h("h1", { class: "hidden" }, "Settings"), controls, body);
  let run = null;

  function refresh(now) {
    run = now;
    if (!controls.children.length) controls.append(search("keys", get("filter"), (value) => { set({ filter: value }); draw(); }));
    draw();
  }

  function draw() {
    const matches = matcher(get("filter"));
    const rowOf = (name) => ([key, value]) => [key, isChanged(name, key) ? h("strong", {}, text(value)) : text(value)];
    const section = (name, title) => {
      const pairs = flat(run[name]).filter(([key]) => matches(key) && !isElsewhere(name, key));
      const changed = pairs.filter(([key]) => isChanged(name, key));
      const rest = pairs.filter(([key]) => !isChanged(name, key)).map(rowOf(name));
      const columns = [["key", "key"], ["value", ""]];
      if (!changed.length) return h("section", {}, h("h2", {}, title), table(title, columns, rest, { empty: "Nothing recorded." }));
      return h("section", {}, h("h2", {}, title, h("small", { class: "quiet" }, " values that differ from the defaults")), table(title, columns, changed.map(rowOf(name))),
        h("details", { open: Boolean(get("filter")) || get("all") === "1", ontoggle: (event) => set({ all: event.target.open ? "1" : null }) },
          h("summary", {}, `settings at their defaults: ${rest.length}`), table(`${title}, defaults`, columns, rest)));
    };
    body.replaceChildren(origin(), ...Object.entries(DOCUMENTS).map(([name, title]) => section(name, title)));
  }

  // How the run was started, and each time that it was.
  function origin() {
    const { command, commit } = run.env;
    const facts = [["command", command && h("code", {}, command)], ["commit", commit && h("code", {}, commit)]].filter(([, value]) => value);
    const sessions = run.sessions.map((each, index) => [index + 1, moment(each.started), each.ended ? moment(each.ended) : "–",
      each.ended ? duration(each.ended - each.started) : "–", each.outcome ?? "", number(each.first_step), each.text]);
    return h("section", {}, facts.length > 0 && h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      h("h2", {}, "Sessions"), table("Sessions", [["", "number"], ["started", "when"], ["ended", "when"], ["duration", "when"], ["outcome", ""], ["from step", "number"], ["reason", ""]], sessions));
  }

  const isChanged = (name, key) => name === "config" && (run.env.changed ?? []).includes(key);

  // Shown above, or in a section of its own.
  const isElsewhere = (name, key) => (name === "env" && ["changed", "command", "commit"].includes(key)) || (name === "summary" && /^(corpus|versions)\./.test(key));

  return { element, refresh };
}

function flat(value, prefix = "") {
  return Object.entries(value ?? {}).flatMap(([key, each]) => (each !== null && typeof each === "object" && !Array.isArray(each)
    ? flat(each, `${prefix}${key}.`) : [[prefix + key, each]]));
}

export function text(value) {
  if (value === null || value === undefined) return "–";
  if (isNumber(value)) return number(value, 6);
  return typeof value === "string" ? value : JSON.stringify(value);
}
