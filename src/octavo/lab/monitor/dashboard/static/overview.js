// The verdict and the losses.

import { card, check, h, select } from "octavo/dom.js";
import { chart, clipped, colour, DASHED, lastOf, line, LANES, linked, mapped, smoothLines } from "octavo/charts.js";
import { duration, isNumber, number, percent, short, unitOf, words } from "octavo/format.js";
import { get, link, set } from "octavo/place.js";
import { ask, isReport, seriesIn, seriesOf } from "octavo/source.js";

const SIGNS = { healthy: "✓", watch: "!", unhealthy: "✕", unknown: "?" };
const AXES = [["step", "step"], ["hours", "hours"], ["tokens", "tokens"]];
const KEYS = ["loss_fp8", "loss_bf16", "loss", "heldout_loss_fp8", "heldout_loss_bf16", "gap_percent", "gradient_norm_fp8",
  "gradient_norm_bf16", "gradient_norm", "lr", "time", "tokens", "tokens_per_second"];
const ELSEWHERE = /^(milliseconds|overflows|heldout_gap)/; // shown elsewhere

const NOTES = {
  batch_divergence: "between the tokens of a batch and those of the text", batch_document_tokens: "mean, in tokens",
  fp8_flops: "of the GEMMs",
};

const SOLID = { line: { width: 2.6 } };

const titled = (text) => text[0].toUpperCase() + text.slice(1);
const asked = (run, keys) => [["run", run], ...keys.map((key) => ["key", key])];
export const overviewAsks = (run) => [["scalars", asked(run, KEYS)], ["events", [["run", run]]]];

export function verdictOf(run) {
  const { level, text, findings } = run.verdict;
  const more = findings.map((finding) => h("li", { class: finding.level },
    h("span", { class: "sign", "aria-hidden": "true" }, finding.level === "healthy" ? "·" : SIGNS[finding.level]), " ",
    finding.view ? h("a", { href: link(finding.layer ? "layer" : finding.view, { run: run.id, layer: finding.layer || null }) }, finding.text) : finding.text));
  return h("section", { class: `verdict ${level}`, "aria-label": "Verdict" },
    h("p", { class: "main", id: "verdict", "aria-live": "polite" }, h("span", { class: "sign", "aria-hidden": "true" }, SIGNS[level]), h("span", {}, text)),
    more.length > 0 && h("ul", {}, more));
}

export function overviewView() {
  const top = h("div", {});
  const cards = h("dl", { class: "cards" });
  const controls = h("div", { class: "controls" });
  const loss = chart("Loss", { height: 340, wide: true, note: "nats per token" });
  const gap = chart("Gap", { note: "FP8 loss above BF16 in percent" });
  const norm = chart("Gradient norm", { note: "before clipping" });
  const rate = chart("Learning rate");
  const row = h("div", { class: "grid three" }, gap.element, norm.element, rate.element);
  const below = h("div", { class: "grid three" });
  const extra = new Map();
  const element = h("div", {}, h("h1", { class: "hidden" }, "Overview"), top, cards, controls, loss.element, row, below);
  linked([loss, gap, norm, rate]);
  let answer = null;
  let others = null;
  let run = null;

  async function refresh(now) {
    run = now;
    const more = run.keys.filter((key) => !KEYS.includes(key) && !ELSEWHERE.test(key));
    answer = run.keys.length ? await ask("scalars", asked(run.id, KEYS)) : null;
    others = more.length ? await ask("scalars", asked(run.id, more)) : null;
    top.replaceChildren(verdictOf(run));
    cards.replaceChildren(...facts());
    if (!controls.children.length) controls.append(...knobs());
    await draw();
  }

  function knobs() {
    const smoothing = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: get("smooth", "0.9"), "aria-label": "Smoothing",
      oninput: (event) => { set({ smooth: event.target.value }); draw(); } });
    return [
      select("x axis", get("x", "step"), AXES, (value) => { set({ x: value }); draw(); }),
      h("label", { class: "control" }, h("span", {}, "smoothing"), smoothing),
      check("clip spikes", get("clip", "1") === "1", (value) => { set({ clip: value ? null : "0" }); draw(); }),
      check("logarithmic", get("log") === "1", (value) => { set({ log: value ? "1" : null }); draw(); }),
      h("span", { class: "quiet", id: "marks" }, "marks: dotted – warnings and errors; solid – interrupted and resumed; short – checkpoints"),
    ];
  }

  function facts() {
    const last = (key) => run.newest[key] ?? (answer ? lastOf(seriesOf(answer, key)) : NaN);
    const lane = run.keys.includes("loss_fp8") ? "loss_fp8" : run.keys.includes("loss") ? "loss" : "loss_bf16";
    const steps = run.config.run?.steps;
    const left = run.state === "running" && steps ? remaining(run, steps) : "";
    const heldOf = (name) => run.summary[`heldout_loss_${name}`] ?? last(`heldout_loss_${name}`);
    const held = isNumber(heldOf("fp8")) ? heldOf("fp8") : heldOf("bf16");
    const models = ["loss_fp8", "loss_bf16"].filter((key) => run.keys.includes(key)).length;
    return [
      card("step", number(run.step), steps ? `of ${number(steps)}${left}` : ""),
      card(lane === "loss_fp8" ? "loss, FP8" : "loss", number(last(lane)), isNumber(last("loss_bf16")) && lane !== "loss_bf16" ? `BF16 ${number(last("loss_bf16"))}` : ""),
      isNumber(held) ? card("held-out loss", number(held), isNumber(run.summary.gap_percent) ? `${percent(Math.abs(run.summary.gap_percent), Math.abs(run.summary.gap_percent) < 0.1 ? 4 : 2)} ${run.summary.gap_percent < 0 ? "below" : "above"} BF16` : "") : null,
      card("tokens per second", short(last("tokens_per_second")), models > 1 ? "both models, alternating" : ""),
      card("tokens", short(last("tokens"))),
      card("recipe", run.plan.recipe ?? run.config.run?.recipe ?? "–", run.env.device ?? ""),
      ...Object.entries(run.summary.tasks ?? {}).map(([task, found]) => {
        const [lane, other] = Object.keys(found).filter((key) => `${key}_error` in found && key !== "difference");
        const shown = (key) => `${percent(100 * found[key])}${found.samples > 1 ? ` ± ${percent(100 * found[`${key}_error`])}` : " (one sample)"}`;
        return card(task, shown(lane), other ? `${other.replace("_", " ").toUpperCase()} ${shown(other)}` : "");
      }),
    ].filter(Boolean);
  }

  async function draw() {
    if (!answer) {
      await loss.draw([], {}, "No steps yet.");
      return;
    }
    const [axis, clock] = clockOf(answer, get("x", "step"), run.pauses);
    const weight = Number(get("smooth", "0.9"));
    const xaxis = { title: { text: axis, font: { size: 12 }, standoff: 8 }, rangemode: "normal" };
    const scale = get("log") === "1" ? "log" : "linear";
    const lines = (key, name, tone, more) => {
      const found = seriesOf(answer, key);
      return found?.x.length ? smoothLines(name, mapped(found, clock), tone, weight, more) : [];
    };
    const held = (lane, name) => {
      const found = seriesOf(answer, `heldout_loss_${lane}`);
      return found?.x.length ? [line(`${name}, held out`, mapped(found, clock), LANES[lane], { mode: "lines+markers", line: { dash: "dot", width: 1.5 }, marker: { size: 7, symbol: "diamond" } })] : [];
    };
    const flags = await marks(clock);
    const bound = run.keys.includes("gap_percent") ? run.gap_limit : null;
    const drawn = (target, note, traces, layout, description) => {
      const { range, beyond } = get("clip", "1") === "1" && scale === "linear" ? clipped(traces) : { range: null, beyond: 0 };
      target.say(beyond ? `${note}; ${beyond} point${beyond > 1 ? "s" : ""} beyond the axis` : note);
      return target.draw(traces, { xaxis, shapes: flags, ...layout, yaxis: { ...layout.yaxis, ...(range ? { range, autorange: false } : { autorange: true }) } }, description);
    };
    await Promise.all([
      drawn(loss, "nats per token", [...lines("loss_fp8", "FP8", "fp8", SOLID), ...lines("loss", "loss", "fp8"), ...lines("loss_bf16", "BF16", "bf16", DASHED), ...held("bf16", "BF16"), ...held("fp8", "FP8")],
        { yaxis: { type: scale } }, `At step ${run.step}: ${["loss_fp8", "loss_bf16", "loss"].filter((key) => key in run.newest).map((key) => `${words(key)} ${number(run.newest[key])}`).join("; ")}`),
      drawn(gap, bound ? `FP8 loss above BF16; dotted: limit, ${percent(bound)}` : "FP8 loss above BF16", lines("gap_percent", "gap", "gap"),
        { yaxis: { ticksuffix: " %", zeroline: true }, showlegend: false, shapes: [...flags, ...levels(bound)] }, run.keys.includes("gap_percent") ? `Now ${percent(run.newest.gap_percent)}` : "No BF16 baseline to compare with."),
      drawn(norm, "before clipping", [...lines("gradient_norm_fp8", "FP8", "fp8", SOLID), ...lines("gradient_norm", "gradient norm", "fp8"), ...lines("gradient_norm_bf16", "BF16", "bf16", DASHED)], { yaxis: { type: scale }, showlegend: false }, "Colours as above."),
      rate.draw(seriesOf(answer, "lr")?.x.length ? [line("learning rate", mapped(seriesOf(answer, "lr"), clock), "gap")] : [], { xaxis, shapes: flags, showlegend: false, yaxis: { exponentformat: "power", rangemode: "tozero", nticks: 5 } }, ""),
      ...(others ? seriesIn(others) : []).map((key) => chartOf(key).draw(
        smoothLines(key, mapped(seriesOf(others, key), clock), "fp8", weight), { xaxis, showlegend: false, yaxis: { ticksuffix: unitOf(key) } }, "")),
    ]);
  }

  // The limit of the gap, on the side that is a loss.
  const levels = (bound) => (bound ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: bound, y1: bound, layer: "below", line: { color: colour("warn"), width: 1.5, dash: "dot" } }] : []);

  // Further scalars recorded by a custom training loop.
  function chartOf(key) {
    if (!extra.has(key)) {
      extra.set(key, chart(titled(words(key)), { note: NOTES[key] }));
      below.append(extra.get(key).element);
    }
    return extra.get(key);
  }

  async function marks(clock) {
    const { events } = await ask("events", [["run", run.id]]);
    const worth = events.filter((event) => event.level !== "info").slice(-40);
    const upright = (steps, y1, tone, dash) => Array.from(mapped({ x: steps, y: [] }, clock).x, (x) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1, layer: "below",
      line: { color: colour(tone), width: 1.5, dash } }));
    const stepsOf = (chosen) => chosen.map((event) => event.step);
    return [
      ...upright(stepsOf(worth.filter((event) => event.level !== "error")), 1, "warn", "dot"),
      ...upright(stepsOf(worth.filter((event) => event.level === "error")), 1, "bad", "dot"),
      ...upright(run.sessions.map((each) => each.first_step).filter((step) => step > 0), 1, "accent", "solid"), // resumed
      ...upright(stepsOf(events.filter((event) => event.rule === "checkpoint")).slice(-40), 0.04, "text-quiet", "solid"),
    ];
  }

  return { element, refresh };
}

function remaining(run, steps) {
  const began = run.sessions.at(-1);
  const made = run.step - began.first_step;
  const seconds = made > 0 ? ((run.heartbeat - began.started) / made) * (steps - run.step) : NaN;
  return isNumber(seconds) && seconds > 0 && !isReport() ? `, ${duration(seconds)} left` : "";
}

// The requested axis: its title, and the series that maps steps to it (null for steps). Hours are without the pauses
// between the processes that trained.
export function clockOf(answer, wanted, pauses = []) {
  const time = seriesOf(answer, "time");
  if (wanted === "tokens" && seriesOf(answer, "tokens")?.x.length) return ["tokens", seriesOf(answer, "tokens")];
  if (wanted === "hours" && time?.x.length) {
    const paused = (t) => pauses.reduce((sum, [since, to]) => sum + (time.y[0] < to && to <= t ? to - Math.max(since, time.y[0]) : 0), 0);
    return ["hours", { x: time.x, y: Array.from(time.y, (t) => (t - time.y[0] - paused(t)) / 3600) }];
  }
  return ["step", null];
}
