// The figure of chapter 09: a tree of prefixes, its levels, and the bytes that a decode step reads.

import { drawn, element, range, slider } from "./figures/figure.js";

const BYTES_PER_TOKEN = 2 * 28 * 8 * 128 * 2; // keys and values of Qwen3-0.6B: layers, KV heads, head size, bfloat16
const WIDTH = 640;
const HEIGHT = 224;
const SLIDERS = {
  requests: { label: "Requests", values: [2, 4, 6, 8, 12, 16, 24, 32, 48, 64], start: 12 },
  documents: { label: "Documents", values: [1, 2, 3, 4, 6, 8], start: 3 },
  system: { label: "Tokens of the system prompt", values: range(0, 8192, 256), start: 2048 },
  document: { label: "Tokens of each document", values: range(0, 8192, 256), start: 4096 },
  own: { label: "Own tokens of each request", values: [16, 32, 64, 128, 256, 512, 1024, 2048], start: 256 },
};
const LEVELS = { system: "Level for the system prompt", document: "Level for the documents" };

// How often the tokens of each part are read: by all requests, by each group of a level inside, or once.
export function timesRead({ requests, documents }, levels) {
  const groups = Math.min(documents, requests);
  const document = levels.document ? groups : requests;
  return { system: levels.system ? 1 : document, document, own: requests };
}

export function tokensRead(tree, levels) {
  const times = timesRead(tree, levels);
  return Object.keys(times).reduce((sum, part) => sum + times[part] * tree[part], 0);
}

const size = (tokens) => {
  const bytes = tokens * BYTES_PER_TOKEN;
  return bytes >= 1e9 ? `${(bytes / 1e9).toPrecision(3)} GB` : `${(bytes / 1e6).toPrecision(3)} MB`;
};

class Figure {
  constructor(box) {
    this.tree = {};
    this.levels = { system: true, document: true };
    const controls = Object.entries(SLIDERS).map(([name, made]) => slider(made, (value) => this.set(name, value)));
    const switches = Object.entries(LEVELS).map(([name, label]) => {
      const input = element("input", { type: "checkbox", checked: true });
      input.addEventListener("change", () => {
        this.levels[name] = input.checked;
        this.draw();
      });
      return element("label", {}, input, ` ${label}`);
    });
    this.picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 32}`, role: "img" });
    this.bars = element("div", { className: "tree-bars" });
    this.says = element("p", { className: "tree-says" });
    this.says.setAttribute("aria-live", "polite");
    box.classList.add("figure");
    box.replaceChildren(
      element("div", { className: "figure-controls" }, ...controls),
      element("div", { className: "tree-switches" }, ...switches),
      element("p", { className: "tree-title", textContent: "Each box is read once. Its height is the number of requests that share the read." }),
      this.picture,
      this.bars,
      this.says,
    );
    this.draw();
  }

  set(name, value) {
    this.tree[name] = value;
    if (this.says) this.draw();
  }

  draw() {
    const times = timesRead(this.tree, this.levels);
    const total = this.tree.system + this.tree.document + this.tree.own;
    const boxes = [];
    let left = 0;
    for (const [part, label] of [["system", "system prompt"], ["document", "document"], ["own", "own"]]) {
      const width = (this.tree[part] / total) * WIDTH;
      // Groups are as equal as whole requests allow.
      const edge = (i) => (Math.round((i * this.tree.requests) / times[part]) / this.tree.requests) * HEIGHT;
      for (let i = 0; width > 0 && i < times[part]; i += 1) {
        const gap = HEIGHT / this.tree.requests > 6 ? 2 : 0.6;
        const height = Math.max(0.6, edge(i + 1) - edge(i) - gap);
        boxes.push(drawn("rect", { x: left, y: edge(i), width: Math.max(1, width - 2), height, rx: 2, class: `tree-${part}` }));
      }
      if (width > 60) boxes.push(drawn("text", { x: left + width / 2, y: HEIGHT + 24, "text-anchor": "middle" }, label));
      left += width;
    }
    this.picture.replaceChildren(...boxes);
    this.drawBytes(times);
  }

  drawBytes(times) {
    const flat = tokensRead(this.tree, { system: false, document: false });
    const read = tokensRead(this.tree, this.levels);
    const bars = [["flat", flat], ["in levels", read]].map(([label, tokens]) => {
      const bar = element("i");
      bar.style.width = `${(100 * tokens) / flat}%`;
      return element("div", {}, element("span", { textContent: label }), element("span", { className: "tree-bar" }, bar), element("b", { textContent: size(tokens) }));
    });
    this.bars.replaceChildren(...bars);
    const { system, document, own, requests } = this.tree;
    // Parts that are read for each request bound the ratio, however many requests there are.
    const perRequest = ["system", "document", "own"].filter((part) => times[part] === requests);
    const most = (system + document + own) / perRequest.reduce((sum, part) => sum + this.tree[part], 0);
    this.says.textContent = `${(flat / read).toFixed(1)} times fewer bytes. The system prompt is read ${count(times.system)}, each document ${count(times.document / Math.min(this.tree.documents, this.tree.requests))}. With ever more requests it approaches ${most.toFixed(1)}.`;
    this.picture.setAttribute("aria-label", `${size(flat)} flat, ${size(read)} in levels`);
  }
}

const count = (times) => (times === 1 ? "once" : `${Number.isInteger(times) ? times : times.toFixed(1)} times`);

document$.subscribe(() => {
  for (const box of document.querySelectorAll(".tree-figure:not([data-ready])")) {
    box.dataset.ready = "true";
    new Figure(box);
  }
});
