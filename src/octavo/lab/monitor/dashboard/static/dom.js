// Elements made from values. Text is inserted as text: no data of a run is parsed as HTML.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function svg(tag, properties, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function select(label, value, choices, change) {
  const pairs = choices.map((choice) => (Array.isArray(choice) ? choice : [choice, choice]));
  const options = pairs.map(([key, text]) => h("option", { value: key, selected: key === value }, text));
  return h("label", { class: "control" }, h("span", {}, label),
    h("select", { "aria-label": label, onchange: (event) => change(event.target.value) }, options));
}

export function check(label, checked, change) {
  return h("label", { class: "control check" },
    h("input", { type: "checkbox", checked, onchange: (event) => change(event.target.checked) }), h("span", {}, label));
}

export function search(label, value, change, placeholder = "part of a name") {
  let timer;
  const changed = (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => change(event.target.value.trim()), 200);
  };
  return h("label", { class: "control" }, h("span", {}, label),
    h("input", { type: "search", "aria-label": label, value, oninput: changed, placeholder, "data-search": true }));
}

export function card(label, value, note = "", title = "") {
  return h("div", { class: "card", title }, h("dt", {}, label), h("dd", {}, value, note && h("small", {}, note)));
}

export function table(caption, columns, rows, options = {}) {
  const head = h("tr", {}, columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title)));
  const line = (cells) => h("tr", {}, cells.map((cell, index) => h("td", { class: columns[index][1] }, cell)));
  return h("div", { class: `scroll ${options.class ?? ""}`, tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: options.visible ? "" : "hidden" }, caption), h("thead", {}, head),
      h("tbody", {}, rows.length ? rows.map(line)
        : h("tr", {}, h("td", { colspan: columns.length, class: "quiet" }, options.empty ?? "Nothing to show.")))));
}

// Match a search: a regular expression if valid, otherwise a substring.
export function matcher(pattern) {
  if (!pattern) return () => true;
  try {
    const expression = new RegExp(pattern, "i");
    return (name) => expression.test(name);
  } catch {
    return (name) => name.toLowerCase().includes(pattern.toLowerCase());
  }
}
