// Formatting of numbers and times.

const NONE = "–";
const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function number(value, digits = 4) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-GB");
  if (size < 1e-3 || size >= 1e7) return value.toExponential(digits - 2).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

export function short(value, unit = "") {
  if (!isNumber(value)) return NONE;
  const found = PREFIXES.find(([size]) => Math.abs(value) >= size);
  const [text, prefix] = found ? [Number((value / found[0]).toPrecision(3)), found[1]] : [Number(value.toPrecision(3)), ""];
  return `${text}${unit || prefix ? " " : ""}${prefix}${unit}`;
}

// A value that would round to zero keeps one digit.
export function percent(value, digits = 2) {
  if (!isNumber(value)) return NONE;
  const rounded = Number(value.toFixed(digits));
  return `${rounded || Number(value.toPrecision(1))} %`;
}

export const signed = (value) => `${value > 0 ? "+" : ""}${percent(value)}`;

export function share(value) {
  if (!isNumber(value)) return NONE;
  return value === 0 ? "0 %" : `${Number((100 * value).toPrecision(3))} %`;
}

export const gib = (bytes) => (isNumber(bytes) ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : NONE);

export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor((whole % 86400) / 3600), Math.floor((whole % 3600) / 60)];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

export function ago(time, now = Date.now() / 1000) {
  return isNumber(time) && time ? `${duration(Math.max(now - time, 0))} ago` : NONE;
}

export const moment = (time) => (isNumber(time) && time
  ? new Date(time * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }) : NONE);
export const clockTime = (time) => (isNumber(time) && time
  ? new Date(time * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : NONE);

const TITLES = {
  loss_fp8: "loss, FP8", loss_bf16: "loss, BF16", gap_percent: "gap to BF16, %", tokens_per_second: "tokens per second", lr: "learning rate",
  gradient_norm_fp8: "gradient norm, FP8", gradient_norm_bf16: "gradient norm, BF16", milliseconds_fp8: "step time, FP8, ms",
  milliseconds_bf16: "step time, BF16, ms", heldout_loss_fp8: "held-out loss, FP8", heldout_loss_bf16: "held-out loss, BF16",
  fp8_flops: "share of FLOPs in FP8", fp8_time: "share of time in FP8", batch_divergence: "divergence of the batch",
  batch_document_tokens: "length of documents", loss_scale: "loss scale", shadow_gap_percent: "gap of the shadow, %",
};
const UNITS = [[/(_percent|_pct)$/, " %"], [/(_ms|_milliseconds)$|^milliseconds/, " ms"], [/(_seconds|_s)$/, " s"], [/_gib$/, " GiB"], [/_db$/, " dB"], [/_watts$/, " W"], [/_per_second$/, " /s"]];
// The unit that a metric's name ends with.
export const unitOf = (name) => UNITS.find(([ending]) => ending.test(name))?.[1] ?? "";

export const words = (name) => TITLES[name] ?? name.replaceAll("_", " ");

export const STATS = {
  amax: { unit: "", log: 2, about: "largest magnitude of the tensor" },
  scale: { unit: "", log: 2, ofCodes: true, about: "factor from codes to values" },
  flushed: { unit: "share", log: 10, ofCodes: true, about: "nonzero elements with a zero code" },
  subnormal: { unit: "share", log: 10, ofCodes: true, about: "elements with a subnormal code, of reduced mantissa" },
  saturated: { unit: "share", log: 10, ofCodes: true, about: "elements beyond the largest code" },
  nonfinite: { unit: "share", log: 10, about: "NaN or infinite elements" },
  mean: { unit: "", log: 0, about: "mean of the elements" },
  variance: { unit: "", log: 10, about: "variance of the elements" },
  kurtosis: { unit: "", log: 10, about: "fourth moment over squared variance: 3 for a normal distribution, large with outliers" },
  sqnr: { unit: "dB", log: 0, ofCodes: true, isSparse: true, isGoodHigh: true, about: "signal-to-quantisation-noise ratio, in steps with histograms: 6 dB per bit of mantissa" },
};

export const statOf = (name) => STATS[name] ?? { unit: "", log: 0, about: "" };
export const shown = (name, value) => (statOf(name).unit === "share" ? share(value) : `${number(value)}${statOf(name).unit && isNumber(value) ? ` ${statOf(name).unit}` : ""}`);
// The gradient read by the optimizer is not quantised and has no statistics of codes.
export const isOf = (name, role) => role !== "grad_weight" || !statOf(name).ofCodes;
