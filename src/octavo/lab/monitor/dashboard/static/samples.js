// What the models wrote on from the prompt, the newest first.

import { h, matcher, search } from "octavo/dom.js";
import { number, words } from "octavo/format.js";
import { get, set } from "octavo/place.js";
import { ask } from "octavo/source.js";

const TITLES = { fp8: "FP8", bf16: "BF16" };

export function samplesView() {
  const controls = h("div", { class: "controls" }, search("text", get("filter"), (value) => { set({ filter: value }); draw(); }, "part of a text"));
  const count = h("p", { class: "quiet", "aria-live": "polite" });
  const body = h("div", {});
  const element = h("div", {}, h("h1", { class: "hidden" }, "Samples"), controls, count, body);
  let answer = null;

  async function refresh(run) {
    const found = await ask("samples", [["run", run.id]]);
    if (answer && found.samples.length === answer.samples.length && found.samples.at(-1)?.step === answer.samples.at(-1)?.step) return;
    answer = found;
    draw();
  }

  function draw() {
    const matches = matcher(get("filter"));
    const chosen = answer.samples.filter(({ text }) => Object.values(text).some((each) => matches(each))).reverse();
    controls.hidden = !answer.samples.length;
    count.textContent = answer.samples.length ? `${number(chosen.length)} of ${answer.more ? "the newest " : ""}${number(answer.samples.length)} samples, newest first.`
      : answer.more ? "The newest sample is too long for this page; samples.jsonl in the run's directory has it."
      : "This run wrote no text: octavo train --sample.every 100 lets its models continue a prompt.";
    if (answer.damaged) count.textContent += ` Damaged lines of samples.jsonl, left out: ${number(answer.damaged)}.`;
    body.replaceChildren(...chosen.map(card));
  }

  const card = ({ step, prompt, text }) => h("section", { class: "panel spaced" },
    h("p", { class: "lead" }, `step ${number(step)}`),
    h("div", { class: "grid samples" }, Object.entries(text).map(([model, written]) => h("figure", {}, h("figcaption", {}, TITLES[model] ?? words(model)),
      h("p", { class: "text" }, h("span", { class: "quiet" }, prompt), h("mark", {}, written))))));

  return { element, refresh };
}
