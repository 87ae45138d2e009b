// Events, with their causes and actions.

import { h, matcher, search, select, table } from "octavo/dom.js";
import { clockTime, isNumber, number, words } from "octavo/format.js";
import { get, link, set } from "octavo/place.js";
import { ask } from "octavo/source.js";

const LEVELS = [["", "all levels"], ["error", "errors"], ["warning", "warnings and errors"]];
const AT_ONCE = 500;

export function eventsView() {
  const controls = h("div", { class: "controls" });
  const count = h("p", { class: "quiet", "aria-live": "polite" });
  const body = h("div", {});
  const element = h("div", {}, h("h1", { class: "hidden" }, "Events"), controls, count, body);
  let answer = null;
  let run = null;

  async function refresh(now) {
    run = now;
    answer = await ask("events", [["run", run.id]]);
    const rules = [...new Set(answer.events.map((event) => event.rule))].sort();
    const change = (name) => (value) => { set({ [name]: value }); draw(); };
    if (!controls.children.length) controls.append(select("level", get("level"), LEVELS, change("level")),
      select("rule", get("rule"), [["", "all rules"], ...rules.map((rule) => [rule, rule])], change("rule")), search("text or layer", get("filter"), change("filter")));
    draw();
  }

  function draw() {
    const matches = matcher(get("filter"));
    const levels = { error: ["error"], warning: ["warning", "error"] }[get("level")];
    const chosen = answer.events.filter((event) => (!levels || levels.includes(event.level)) && (!get("rule") || event.rule === get("rule"))
      && matches(`${event.layer ?? ""} ${event.text} ${event.action ?? ""}`)).reverse();
    count.textContent = `${number(chosen.length)} of ${number(answer.count)} events, newest first${chosen.length > AT_ONCE ? `; showing the newest ${AT_ONCE}` : ""}.`;
    const [rows, hasFigures] = [chosen.slice(0, AT_ONCE), chosen.some((event) => figure(event, event.value))];
    const figures = (...cells) => (hasFigures ? cells : []);
    body.replaceChildren(table("Events", [["step", "number"], ["time", "when"], ["level", ""], ["rule", "when"], ["event", ""], ...figures(["measured", "number"], ["limit", "number"]), ["action", ""]],
      rows.map((event) => [number(event.step), clockTime(event.t), h("span", { class: `tag ${event.level}` }, event.level), event.rule,
        told(event), ...figures(figure(event, event.value), figure(event, event.limit)), event.action ?? ""]), { empty: "No matching events." }));
  }

  // The text, in which the layer is a link; after it where the text does not name the layer.
  function told({ text, layer, role }) {
    if (!layer) return text;
    const to = (name) => h("a", { href: link("layer", { run: run.id, layer }) }, name);
    const at = text.indexOf(layer);
    return h("span", {}, ...(at < 0 ? [text, " ", to(`${layer}${role ? ` · ${words(role)}` : ""}`)] : [text.slice(0, at), to(layer), text.slice(at + layer.length)]));
  }

  return { element, refresh };
}

// A measured value or its limit, unless the text has both.
const figure = ({ text }, value) => (isNumber(value) && !/limit/.test(text) ? number(value) : "");
