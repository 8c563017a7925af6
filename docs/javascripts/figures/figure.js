// What the interactive figures share: sliders, choices, a drawing, and a sentence that says what it shows.

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export function drawn(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export const range = (first, last, step = 1) => Array.from({ length: Math.floor((last - first) / step + 1.5) }, (_, i) => first + i * step);
export const number = (value, digits = 3) => value.toLocaleString("en-US", { maximumSignificantDigits: digits });

// A slider over `values`; `take` gets the chosen one. Its value is read aloud as it is shown.
export function slider({ label, values, start, show = (value) => value.toLocaleString("en-US") }, take) {
  const shown = element("b"); // not an output, which the label would name in place of the slider
  const input = element("input", { type: "range", min: 0, max: values.length - 1, value: values.indexOf(start) });
  const update = () => {
    const value = values[input.valueAsNumber];
    shown.textContent = show(value);
    input.setAttribute("aria-valuetext", shown.textContent);
    take(value);
  };
  input.addEventListener("input", update);
  update();
  return element("label", {}, element("span", {}, label, shown), input);
}

function choice(name, { label, options, start }, take) {
  const group = element("fieldset", {}, element("legend", { textContent: label }));
  for (const [value, text] of Object.entries(options)) {
    const input = element("input", { type: "radio", name, value, checked: value === start });
    input.addEventListener("change", () => take(value));
    group.append(element("label", {}, input, ` ${text}`));
  }
  take(start);
  return group;
}

let count = 0;

// Build a box: `draw` maps the values of sliders and choices to { width, height, shapes, label, says }.
function build(box, { title, sliders = {}, choices = {}, draw }) {
  box.classList.add("figure");
  const state = {};
  const picture = drawn("svg", { role: "img" });
  const says = element("p", { className: "figure-says" });
  says.setAttribute("aria-live", "polite");
  let built = false;
  const set = (name) => (value) => {
    state[name] = value;
    if (built) redraw();
  };
  const redraw = () => {
    const { width, height, shapes, label, says: text } = draw(state);
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.setAttribute("aria-label", label);
    picture.replaceChildren(...shapes);
    says.textContent = text;
  };
  const number = (count += 1);
  box.replaceChildren(
    element("p", { className: "figure-title", textContent: title }),
    element("div", { className: "figure-controls" }, ...Object.entries(sliders).map(([name, made]) => slider(made, set(name)))),
    ...Object.entries(choices).map(([name, made]) => choice(`figure-${number}-${name}`, made, set(name))),
    picture,
    says,
  );
  built = true;
  redraw();
}

// Build every box of a class; `describe` maps a box to what `build` needs.
export function figures(className, describe) {
  document$.subscribe(() => {
    for (const box of document.querySelectorAll(`.${className}:not([data-ready])`)) {
      box.dataset.ready = "true";
      build(box, describe(box));
    }
  });
}

// Build every box of a class in the same way.
export const figure = (className, described) => figures(className, () => described);
