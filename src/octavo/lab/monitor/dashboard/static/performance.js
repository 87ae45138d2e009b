// Throughput, utilisation, power and memory.

import { card, h } from "octavo/dom.js";
import { chart, colour, DASHED, line, linked, smoothLines } from "octavo/charts.js";
import { gib, isNumber, number, percent, short } from "octavo/format.js";
import { ask, seriesOf } from "octavo/source.js";

export const performanceAsks = (run) => [["performance", [["run", run]]]];

export function performanceView() {
  const cards = h("dl", { class: "cards" });
  const note = h("p", { class: "quiet" });
  const charts = {
    throughput: chart("Throughput", { note: "tokens per second of each model" }),
    utilisation: chart("Utilisation", { note: "of the GPU's dense peak" }),
    time: chart("Step time", { note: "milliseconds" }),
    power: chart("Power", { note: "watts" }),
    memory: chart("Memory by kind", { note: "GiB" }),
    forecast: chart("Predicted peak by kind", { note: "GiB" }),
    machine: chart("Machine", { note: "percent busy, degrees Celsius" }),
    clock: chart("Clock", { note: "MHz" }),
  };
  linked(Object.values(charts).filter((each) => each !== charts.forecast));
  const element = h("div", {}, h("h1", { class: "hidden" }, "Performance"), cards, note, h("div", { class: "grid" }, Object.values(charts).map((each) => each.element)));

  async function refresh(run) {
    const answer = await ask("performance", [["run", run.id]]);
    const { facts } = answer.header;
    const of = (name) => seriesOf(answer, name);
    cards.replaceChildren(...told(facts, run));
    note.textContent = basis(facts, run);
    const lines = (pairs, weight = 0.9) => pairs.flatMap(([name, title, tone, more]) => (of(name)?.x.length ? smoothLines(title, of(name), tone, weight, more) : []));
    const xaxis = { title: { text: "step", font: { size: 12 }, standoff: 8 } };
    const perLane = lines([["tokens_per_second_fp8", "FP8", "fp8"], ["tokens_per_second_bf16", "BF16", "bf16", DASHED]]);
    const zero = { rangemode: "tozero" };
    await Promise.all([
      charts.throughput.draw(perLane.length ? perLane : lines([["tokens_per_second", "tokens per second", "fp8"]]), { xaxis, yaxis: zero }),
      charts.utilisation.draw(lines([["utilisation_fp8_of_bf16", "FP8 model, of the BF16 peak", "fp8"], ["utilisation_bf16_of_bf16", "BF16 model, of the BF16 peak", "bf16", DASHED],
        ["utilisation_fp8_of_fp8", "FP8 model, of the FP8 peak", "gap", { line: { dash: "dash" } }]]), { xaxis, yaxis: { ...zero, ticksuffix: " %" } }, noPeak(facts, run)),
      charts.time.draw(lines([["milliseconds_fp8", "FP8", "fp8"], ["milliseconds_bf16", "BF16", "bf16", DASHED]]), { xaxis, yaxis: zero }, "No step times."),
      charts.power.draw(lines([["gpu_power_watts", "GPU", "gap"]], 0), { xaxis, yaxis: zero, showlegend: false }, "No power readings: they need a GPU and the package nvidia-ml-py."),
      charts.memory.draw(stacked(of), { xaxis, yaxis: { ...zero, ticksuffix: " GiB" } }, "No memory readings."),
      charts.forecast.draw(bars(facts.predicted_gib), { showlegend: false, hovermode: "closest", xaxis: zero, yaxis: { automargin: true, autorange: "reversed" } }, "The forecast is written at the end of a run on a GPU; `octavo plan --memory` prints it beforehand."),
      charts.machine.draw([...times(of("gpu_utilisation"), 100, "GPU busy, %", "fp8"), ...times(of("gpu_temperature"), 1, "temperature, °C", "bf16"), ...times(of("load"), 1, "load, processes", "gap")], { xaxis, yaxis: zero }, "No system readings."),
      charts.clock.draw(lines([["gpu_clock_mhz", "clock", "fp8"]], 0), { xaxis, showlegend: false }, "No clock readings."),
    ]);
    for (const name of ["forecast", "clock"]) charts[name].element.hidden = !charts[name].plot.data?.length;
  }

  return { element, refresh };
}

function told(facts, run) {
  const shown = [];
  const add = (value, label, text, about = "", title = "") => { if (isNumber(value)) shown.push(card(label, text(value), about, title)); };
  add(facts.tokens_per_second_fp8 ?? facts.tokens_per_second, "tokens per second", short, facts.tokens_per_second_fp8 ? "FP8 model" : "", "median, without the first tenth of the steps");
  add(facts.speedup, "speed-up", (value) => `${number(value, 3)} ×`, "BF16 step time over FP8 step time");
  add(facts.tflops_fp8, "achieved", (value) => short(1e12 * value, "FLOP/s"), "FP8 model");
  add(facts.utilisation_fp8_of_bf16, "of the BF16 peak", (value) => percent(value, 1), isNumber(facts.utilisation_bf16_of_bf16) ? `BF16 model ${percent(facts.utilisation_bf16_of_bf16, 1)}` : "");
  add(facts.utilisation_fp8_of_fp8, "of the FP8 peak", (value) => percent(value, 1), "FP8 model");
  add(facts.joules_per_token, "energy per token", (value) => `${short(value * 1000)} mJ`, run.config.run?.baseline ? "both models" : "");
  add(facts.joules_per_step, "energy per step", (value) => `${short(value)} J`);
  add(facts.tokens_per_kwh, "tokens per kWh", short);
  add(facts.kwh, "energy of the run", (value) => `${number(value, 3)} kWh`, run.config.run?.baseline ? "both models" : "");
  add(facts.cost, "cost of that energy", (value) => number(value, 3), "run.price_per_kwh");
  for (const [kind, bytes] of Object.entries(facts.memory_bytes ?? {})) if (bytes) add(bytes, `memory: ${kind}`, gib, "newest");
  if (isNumber(run.summary.peak_gib)) add(run.summary.peak_gib, "peak memory", (value) => `${number(value, 3)} GiB`, isNumber(run.summary.predicted_peak_gib) ? `predicted ${number(run.summary.predicted_peak_gib, 3)} GiB` : "");
  return shown;
}

function basis(facts, run) {
  const { bf16, fp8 } = facts.peak_tflops;
  const peaks = bf16 ? `Dense peaks from the data sheet: BF16 ${number(bf16)} and FP8 ${number(fp8)} TFLOP/s.` : `The peak of “${run.env.device ?? "this device"}” is unknown, so there is no utilisation.`;
  const counted = facts.flops_per_token ? `A token costs ${short(facts.flops_per_token)}FLOP: ${facts.operations}.` : `Operations are not counted: ${facts.operations}.`;
  const slow = run.env.device_type === "cpu" ? " CPUs emulate FP8: slower than BF16 here, with the same numerics as on a GPU." : "";
  return `${counted} ${peaks}${slow}`;
}

const noPeak = (facts, run) => (facts.peak_tflops.bf16 ? "" : `The peak of “${run.env.device ?? "this device"}” is unknown.`);

const times = (series, factor, name, tone) => (series?.x.length ? [line(name, { x: series.x, y: Array.from(series.y, (value) => factor * value) }, tone)] : []);

// Stacked kinds of memory; all series have the same times.
function stacked(of) {
  const [tensors, held, all, process] = ["torch_allocated_bytes", "torch_reserved_bytes", "gpu_memory_bytes", "process_memory_bytes"].map(of);
  const scaled = (series, less) => ({ x: series.x, y: Array.from(series.y, (value, index) => Math.max(value - (less?.y[index] ?? 0), 0) / 2 ** 30) });
  const layer = (name, series, tone) => line(name, series, tone, { stackgroup: "gpu", fillcolor: `${colour(tone)}55`, line: { width: 1 } });
  const found = [];
  if (tensors?.x.length) found.push(layer("tensors", scaled(tensors), "fp8"));
  if (held?.x.length) found.push(layer("reserved by PyTorch, free", scaled(held, tensors), "gap"));
  if (all?.x.length) found.push(layer("other on the GPU", scaled(all, held ?? tensors), "bf16"));
  if (process?.x.length) found.push(line("host memory of the process", scaled(process), "text-quiet", { line: { dash: "dot", width: 1.5 } }));
  return found;
}

const bars = (kinds) => {
  const entries = Object.entries(kinds ?? {});
  return entries.length ? [{ type: "bar", orientation: "h", y: entries.map(([kind]) => kind), x: entries.map(([, size]) => size), marker: { color: colour("fp8") }, hovertemplate: "%{y}: %{x} GiB<extra></extra>" }] : [];
};
