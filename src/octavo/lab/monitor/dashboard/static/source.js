// Source of the answers: the server or, in a report, the page itself.

import { isOf } from "octavo/format.js";

const TYPES = { f4: Float32Array, f8: Float64Array, i4: Int32Array };

let held = null; // of a report: address -> answer
export const isReport = () => held !== null;

export async function open() {
  const element = document.getElementById("held");
  if (!element) return;
  const packed = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  held = JSON.parse(await new Response(stream).text());
  element.remove();
}

// Prefetched answers, each used once.
const ahead = new Map();
const addressOf = (name, parameters) => `${name}?${new URLSearchParams(parameters)}`;

export function askAhead(name, parameters) {
  if (held) return;
  const coming = fromServer(name, parameters);
  coming.catch(() => {}); // ask() reports the error
  ahead.set(addressOf(name, parameters), coming);
}

// An answer: the parsed JSON, or {header, get(name) -> typed array or null, names}.
export async function ask(name, parameters = []) {
  if (held) return fromPage(name, parameters);
  const address = addressOf(name, parameters);
  const early = ahead.get(address);
  ahead.delete(address);
  return early ?? fromServer(name, parameters);
}

async function fromServer(name, parameters) {
  const response = await fetch(`/api/${addressOf(name, parameters)}`);
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error ?? `the server answered ${response.status}`);
  if (response.headers.get("content-type").startsWith("application/json")) return response.json();
  return unpacked(await response.arrayBuffer());
}

function fromPage(name, parameters) {
  if (name === "series") return layerFromMaps(Object.fromEntries(parameters));
  if (name === "compare") return held[Object.keys(held).find((key) => key.startsWith("compare"))].json;
  const kept = parameters.filter(([key]) => !["points", "buckets", "key"].includes(key));
  const found = held[`${name}?${new URLSearchParams(kept)}`];
  if (!found) throw new Error("this report does not contain it");
  if (found.json !== undefined) return structuredClone(found.json);
  const bytes = Uint8Array.from(atob(found.arrays), (letter) => letter.charCodeAt(0));
  return unpacked(bytes.buffer);
}

// A layer's series from the heat maps: minimum and maximum of each bucket.
function layerFromMaps({ run, layer, stat }) {
  const arrays = new Map();
  for (const role of fromPage("run", [["run", run]]).roles.filter((each) => isOf(stat, each))) {
    const map = (pool) => fromPage("heatmap", [["run", run], ["stat", stat], ["role", role], ["pool", pool]]);
    const [low, high] = [map("min"), map("max")];
    const row = low.header.layers.indexOf(layer);
    if (row < 0) continue;
    const [first, last, count] = [low.get("first"), low.get("last"), low.get("first").length];
    const [x, y] = [[], []];
    for (let bucket = 0; bucket < count; bucket += 1) {
      x.push(first[bucket]);
      y.push(low.get("values")[row * count + bucket]);
      if (last[bucket] === first[bucket]) continue;
      x.push(last[bucket]);
      y.push(high.get("values")[row * count + bucket]);
    }
    arrays.set(`${role}/x`, x).set(`${role}/y`, y);
  }
  return { header: {}, get: (name) => arrays.get(name) ?? null, names: [...arrays.keys()] };
}

// The layout of octavo.monitor.dashboard.packing.
function unpacked(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const body = Math.ceil((4 + size) / 8) * 8;
  const get = (name) => {
    const place = header.arrays[name];
    if (!place) return null;
    const [type, offset, shape] = place;
    return new TYPES[type](buffer, body + offset, shape.reduce((product, length) => product * length, 1));
  };
  return { header, get, names: Object.keys(header.arrays) };
}

// The names of series in an answer: `name/x` and `name/y`.
export const seriesIn = (answer) => answer.names.filter((name) => name.endsWith("/x")).map((name) => name.slice(0, -2));
export const seriesOf = (answer, name) => (answer.get(`${name}/x`) ? { x: answer.get(`${name}/x`), y: answer.get(`${name}/y`) } : null);
