// Settings, environment, text and outcome of the run.

import { h, matcher, search, table } from "octavo/dom.js";
import { isNumber, moment, number } from "octavo/format.js";
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
    const sessions = run.sessions.map((each, index) => [index + 1, moment(each.started), each.ended ? moment(each.ended) : "–", each.outcome ?? "", number(each.first_step), each.text]);
    body.replaceChildren(...Object.entries(DOCUMENTS).map(([name, title]) => h("section", {}, h("h2", {}, title, name === "config" && run.env.changed && h("small", { class: "quiet" }, " bold: differs from its default")),
      table(title, [["key", "key"], ["value", ""]], changedFirst(name, flat(run[name])).filter(([key]) => matches(key)).map(([key, value]) => [key, isChanged(name, key) ? h("strong", {}, text(value)) : text(value)]), { empty: "Nothing recorded." }))),
    h("section", {}, h("h2", {}, "Sessions"), table("Sessions", [["", "number"], ["started", "when"], ["ended", "when"], ["outcome", ""], ["from step", "number"], ["reason", ""]], sessions)));
  }

  const isChanged = (name, key) => name === "config" && (run.env.changed ?? []).includes(key);

  // Settings that differ from their defaults come first.
  const changedFirst = (name, pairs) => [...pairs.filter(([key]) => isChanged(name, key)), ...pairs.filter(([key]) => !isChanged(name, key))];

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
