// The address of the current view: #/view?run=...&more. A link to it restores the view.

export function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: path || "", parameters: new URLSearchParams(query) };
}

export function link(view, parameters = {}) {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") given.append(name, each);
    }
  }
  return `#/${view}${String(given) ? `?${given}` : ""}`;
}

export const get = (name, otherwise = "") => place().parameters.get(name) ?? otherwise;

// Change a part of the address in place, without a new history entry for a moved slider.
export function set(changes) {
  const { view, parameters } = place();
  for (const [name, value] of Object.entries(changes)) {
    parameters.delete(name);
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== "" && each !== undefined) parameters.append(name, each);
    }
  }
  history.replaceState(null, "", `#/${view}${String(parameters) ? `?${parameters}` : ""}`);
}
