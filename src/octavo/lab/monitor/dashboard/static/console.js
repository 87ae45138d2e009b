// What the run printed.

import { h, matcher, search } from "octavo/dom.js";
import { number } from "octavo/format.js";
import { get, set } from "octavo/place.js";
import { ask } from "octavo/source.js";

const NEAR = 40; // pixels from the end at which the view follows new lines
const ALARM = /\bwarning\b|\berror\b|->/i;

export function consoleView() {
  const controls = h("div", { class: "controls" }, search("lines", get("filter"), (value) => { set({ filter: value }); draw(); }, "part of a line"));
  const count = h("p", { class: "quiet", "aria-live": "polite" });
  const body = h("pre", { class: "console", tabindex: "0", role: "region", "aria-label": "Console" });
  const element = h("div", {}, h("h1", { class: "hidden" }, "Console"), controls, count, body);
  let answer = null;

  async function refresh(run) {
    const found = await ask("console", [["run", run.id]]);
    if (answer && found.text === answer.text && found.before === answer.before) return;
    answer = found;
    draw();
  }

  function draw() {
    if (answer.text === null) {
      count.textContent = "This run kept no console.log. `octavo train` writes one in the run's directory.";
      body.hidden = true;
      return;
    }
    const matches = matcher(get("filter"));
    const lines = answer.text.split("\n");
    if (lines.at(-1) === "") lines.pop();
    const chosen = lines.filter((line) => matches(line));
    const isAtEnd = !body.childNodes.length || body.scrollHeight - body.scrollTop - body.clientHeight < NEAR;
    count.textContent = `${number(chosen.length)} of ${number(lines.length)} lines${answer.before ? `, the newest; console.log has ${number(answer.before)} bytes before them` : ""}.`;
    body.replaceChildren(...chosen.map((line) => h("span", { class: line.startsWith("--- ") ? "mark" : ALARM.test(line) ? "alarm" : null }, line, "\n")));
    body.hidden = false;
    if (isAtEnd) body.scrollTop = body.scrollHeight;
  }

  return { element, refresh };
}
