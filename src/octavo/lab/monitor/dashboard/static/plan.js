// The precision of each layer, and the reason.

import { check, h, matcher, search, table } from "octavo/dom.js";
import { gib, number } from "octavo/format.js";
import { get, link, set } from "octavo/place.js";

export function precision(text) {
  return h("span", { class: "precision" }, text.split(" / ").map((each) => h("span", { class: `tag ${each}` }, each)));
}

// One name if the three GEMMs have the same kernel.
export function kernels(text) {
  const names = [...new Set(text.split(" / "))];
  return names.length > 1 ? text : names[0].replace(/^-$/, "–");
}

// A precision map's measurements of a layer: for fprop alone, for all GEMMs, chosen and available.
function found(evidence) {
  if (!evidence) return ["–", "–", "–"];
  const turned = Object.values(evidence.turned).reduce((sum, each) => sum + each, 0);
  const error = evidence.loss_error ? ` ± ${small(evidence.loss_error)}` : ""; // of a single sequence there is none
  return [`${small(evidence.loss_change)}${error}`, small(turned), `${small(evidence.ms_saved)} of ${small(evidence.ms_offered)}`];
}

const small = (value) => (value === 0 ? "0" : Math.abs(value) < 1e-3 ? value.toExponential(1) : number(value, 3));

export function planView() {
  const summary = h("section", {});
  const controls = h("div", { class: "controls" });
  const body = h("div", {});
  const element = h("div", {}, h("h1", { class: "hidden" }, "Plan"), summary, controls, body);
  let plan = null;
  let run = null;

  function refresh(now) {
    run = now;
    plan = run.plan;
    if (!plan.layers) {
      summary.replaceChildren(h("p", { class: "quiet" }, "This run has no plan: no model was converted, or the plan was not passed on."));
      return;
    }
    summary.replaceChildren(told());
    if (!controls.children.length) controls.append(
      search("layers", get("filter"), (value) => { set({ filter: value }); rows(); }),
      check("only layers in BF16", get("kept") === "1", (value) => { set({ kept: value ? "1" : null }); rows(); }));
    rows();
  }

  const isFp8 = (layer) => layer.precision.includes("fp8");

  function told() {
    const fp8 = plan.layers.filter(isFp8).length;
    const reasons = new Map();
    for (const layer of plan.layers) if (!isFp8(layer)) reasons.set(layer.reason || "no reason given", (reasons.get(layer.reason || "no reason given") ?? 0) + 1);
    const saved = plan.layers.reduce((sum, layer) => sum + (layer.saves ?? 0), 0);
    const lines = [...reasons].map(([reason, count]) => h("li", {}, `${count} in BF16: ${reason}`));
    const together = (plan.structures ?? []).map((each) => h("li", {}, each.name ? `${each.kind ?? ""} ${each.name}`.trim() : JSON.stringify(each)));
    return h("div", { class: "panel spaced" },
      h("p", { class: "lead" }, `${fp8} of ${plan.layers.length} layers in FP8, recipe ${plan.recipe}, on ${plan.device}, ${number(plan.tokens)} tokens per forward pass.`,
        saved > 0 && ` Weights in FP8 save ${gib(saved)}.`),
      lines.length > 0 && h("ul", {}, lines),
      (plan.unapplied ?? []).length > 0 && h("div", {}, h("p", {}, "Requested, but not applied:"), h("ul", {}, plan.unapplied.map((line) => h("li", {}, line)))),
      together.length > 0 && h("details", {}, h("summary", {}, `${together.length} fused groups`), h("ul", {}, together)));
  }

  function rows() {
    const matches = matcher(get("filter"));
    const chosen = plan.layers.filter((layer) => (matches(layer.name) || matches(layer.reason ?? "")) && !(get("kept") === "1" && isFp8(layer)));
    const localised = plan.layers.some((layer) => layer.evidence);
    body.replaceChildren(table("Layers of the plan", [["layer", ""], ["kind", ""], ["shape", "number"], ["recipe", ""], ["fprop / dgrad / wgrad", ""], ["kernels", ""], ["gain", "number"], ["weight", ""], ["reason", ""],
      ...(localised ? [["loss change", "number"], ["1 − cosine", "number"], ["ms saved", "number"]] : [])],
      chosen.map((layer) => [h("a", { href: link("layer", { run: run.id, layer: layer.name }) }, layer.name), layer.kind, layer.shape.join(" × "), layer.recipe, precision(layer.precision),
        kernels(layer.kernels), layer.gain ? number(layer.gain, 3) : "–", layer.weight === "fp8" ? "FP8" : "unchanged", layer.reason || "", ...(localised ? found(layer.evidence) : [])]), { empty: "No matching layers." }));
  }

  return { element, refresh };
}
