// The figure of chapter 10: chunks are dragged into an order, and each says how far queries are rotated to meet its keys.

const CHUNKS = {
  A: { length: 40, after: "", hue: 200 },
  B: { length: 24, after: "A", hue: 35 },
  C: { length: 48, after: "AB", hue: 150 },
  D: { length: 32, after: "", hue: 320 },
};
const START = ["A", "D", "B"];
const TOTAL = Object.values(CHUNKS).reduce((sum, { length }) => sum + length, 0);
const WIDTH = 640;
const ROW = 46;

const tokens = (names) => [...names].reduce((sum, name) => sum + CHUNKS[name].length, 0);

// Where each chunk stands, where it was computed, and what follows from both.
export function place(names) {
  return names.map((name, i) => {
    const position = tokens(names.slice(0, i));
    const computed = tokens(CHUNKS[name].after);
    return { name, position, computed, offset: computed - position, exact: names.slice(0, i).join("") === CHUNKS[name].after };
  });
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const signed = (number) => (number < 0 ? `−${-number}` : `${number > 0 ? "+" : ""}${number}`);

class Figure {
  constructor(box) {
    this.order = [...START];
    this.blocks = Object.fromEntries(Object.keys(CHUNKS).map((name) => [name, this.block(name)]));
    this.switches = Object.fromEntries(
      Object.entries(CHUNKS).map(([name, { after }]) => {
        const input = element("input", { type: "checkbox" });
        input.addEventListener("change", () => this.include(name, input.checked));
        const how = after ? `computed after ${[...after].join(" ")}` : "computed on its own";
        return [name, { input, label: element("label", {}, input, ` ${name}, ${how}`) }];
      }),
    );
    const controls = element("div", { className: "chunks-controls" }, ...Object.values(this.switches).map(({ label }) => label));
    this.track = element("div", { className: "chunks-track" });
    this.track.setAttribute("role", "group");
    this.track.ariaLabel = "Chunks of the request, in order";
    this.picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${ROW}`, role: "img" });
    this.table = element("tbody");
    const head = element("tr", {}, ...["chunk", "position", "computed at", "query offset", ""].map((text) => element(text ? "th" : "td", { textContent: text })));
    this.says = element("p", { className: "chunks-says" });
    this.says.setAttribute("aria-live", "polite");
    box.replaceChildren(
      controls,
      element("p", { className: "chunks-title", textContent: "The request. Drag a chunk, or focus it and press the arrow keys." }),
      this.track,
      this.picture,
      element("table", { className: "chunks-table" }, element("thead", {}, head), this.table),
      this.says,
    );
    this.draw();
  }

  block(name) {
    const made = element("button", { type: "button", className: "chunks-block", textContent: name });
    made.style.setProperty("--hue", CHUNKS[name].hue);
    made.addEventListener("keydown", (event) => this.key(event, name));
    made.addEventListener("pointerdown", (event) => this.drag(event, name));
    return made;
  }

  include(name, included) {
    this.order = this.order.filter((other) => other !== name);
    if (included) this.order.push(name);
    this.draw();
  }

  move(name, index) {
    const others = this.order.filter((other) => other !== name);
    others.splice(Math.max(0, Math.min(index, others.length)), 0, name);
    if (others.join() === this.order.join()) return;
    this.order = others;
    this.draw();
  }

  key(event, name) {
    const at = this.order.indexOf(name);
    const index = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.order.length - 1 }[event.key];
    if (index === undefined) return;
    event.preventDefault();
    this.move(name, index);
    this.blocks[name].focus();
  }

  // The chunk follows the pointer, and takes the place of another once it has passed the other's middle.
  drag(event, name) {
    if (event.button !== 0) return;
    const block = this.blocks[name];
    const grabbed = event.clientX - block.getBoundingClientRect().left;
    const follow = ({ clientX }) => {
      const { left, width } = this.track.getBoundingClientRect();
      const start = ((clientX - grabbed - left) / width) * TOTAL;
      const middle = start + CHUNKS[name].length / 2;
      const others = this.order.filter((other) => other !== name);
      this.move(name, others.filter((other, i) => tokens(others.slice(0, i)) + CHUNKS[other].length / 2 < middle).length);
      block.style.left = `${(100 * Math.max(0, Math.min(start, TOTAL - CHUNKS[name].length))) / TOTAL}%`;
    };
    const drop = () => {
      block.removeEventListener("pointermove", follow);
      block.classList.remove("chunks-dragged");
      this.draw();
    };
    block.setPointerCapture(event.pointerId);
    block.classList.add("chunks-dragged");
    block.addEventListener("pointermove", follow);
    block.addEventListener("lostpointercapture", drop, { once: true });
  }

  draw() {
    const placed = place(this.order);
    for (const [name, block] of Object.entries(this.blocks)) {
      const chunk = placed.find((other) => other.name === name);
      this.switches[name].input.checked = chunk !== undefined;
      if (chunk === undefined) {
        block.remove();
        continue;
      }
      if (block.parentNode !== this.track) this.track.append(block);
      block.style.left = `${(100 * chunk.position) / TOTAL}%`;
      block.style.width = `${(100 * CHUNKS[name].length) / TOTAL}%`;
      block.ariaLabel = `Chunk ${name}, ${placed.indexOf(chunk) + 1} of ${placed.length}, position ${chunk.position}, query offset ${signed(chunk.offset)}, ${chunk.exact ? "exact" : "composed"}`;
    }
    this.drawArrows(placed);
    const cells = ({ name, position, computed, offset, exact }) => [name, position, computed, signed(offset), exact ? "exact" : "composed"];
    const row = (chunk) => element("tr", {}, ...cells(chunk).map((text) => element("td", { textContent: text })));
    this.table.replaceChildren(...placed.map(row));
    this.says.textContent = this.sentence(placed);
  }

  // A row for each chunk: where it was computed (dashed), and where the request has it.
  drawArrows(placed) {
    const scale = (WIDTH - 2) / TOTAL;
    const parts = placed.flatMap(({ name, position, computed, offset }, i) => {
      const [y, width, hue] = [i * ROW + 4, CHUNKS[name].length * scale, CHUNKS[name].hue];
      const [from, to] = [computed * scale + width / 2, position * scale + width / 2];
      const shapes = [
        drawn("rect", { x: 1 + position * scale, y, width, height: 22, rx: 2, fill: `hsl(${hue} 55% 60%)` }),
        drawn("rect", { x: 1 + computed * scale, y, width, height: 22, rx: 2, class: "chunks-computed" }),
        drawn("text", { x: 1 + to, y: y + 17, "text-anchor": "middle", class: "chunks-name" }, name),
      ];
      if (offset) {
        const tip = `M${from} ${y + 34}H${to}m${from < to ? -6 : 6} -5L${to} ${y + 34}l${from < to ? -6 : 6} 5`;
        shapes.push(drawn("path", { d: tip, class: "chunks-arrow" }));
      }
      return shapes;
    });
    this.picture.setAttribute("viewBox", `0 0 ${WIDTH} ${Math.max(1, placed.length) * ROW}`);
    this.picture.replaceChildren(...parts);
    this.picture.setAttribute("aria-label", "Where each chunk was computed (dashed) and where the request has it");
  }

  sentence(placed) {
    if (placed.length === 0) return "Without chunks the request is a plain prompt.";
    const composed = placed.filter(({ exact }) => !exact);
    if (composed.length === 0) return "Every chunk is exact: the output is that of the plain prompt.";
    const moved = composed.filter(({ offset }) => offset !== 0).map(({ name, offset }) => `by ${Math.abs(offset)} positions for ${name}`);
    const still = composed.filter(({ offset }) => offset === 0).map(({ name }) => name);
    const parts = [];
    if (moved.length) parts.push(`queries are rotated ${moved.join(", ")}`);
    if (still.length) parts.push(`other tokens are in front of ${still.join(", ")}, at an unchanged position`);
    return `The output is an approximation: ${parts.join("; ")}.`;
  }
}

document$.subscribe(() => {
  for (const box of document.querySelectorAll(".chunks-figure:not([data-ready])")) {
    box.dataset.ready = "true";
    new Figure(box);
  }
});
