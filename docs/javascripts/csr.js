// The CSR figure of chapter 08: pages are clicked onto requests, and the arrays that FlashInfer reads follow.

import { element } from "./figures/figure.js";

const PAGE_SIZE = 4;
const NUM_PAGES = 12;
const HUES = { A: 200, B: 35, C: 150 };
const EXAMPLE = { A: { pages: [2, 0, 3], keys: 10 }, B: { pages: [1], keys: 3 }, C: { pages: [5, 4], keys: 8 } };

const lastPageLen = ({ pages, keys }) => (pages.length ? keys - (pages.length - 1) * PAGE_SIZE : 0);

// The three arrays, for requests in order.
export function csr(requests) {
  const indptr = [0];
  for (const { pages } of requests) indptr.push(indptr.at(-1) + pages.length);
  return { kv_indptr: indptr, kv_indices: requests.flatMap(({ pages }) => pages), kv_last_page_len: requests.map(lastPageLen) };
}

class Figure {
  constructor(box) {
    this.choose = Object.keys(EXAMPLE).map((name) => {
      const button = element("button", { type: "button", onclick: () => this.activate(name) }, `Request ${name}`);
      button.style.setProperty("--hue", HUES[name]);
      return button;
    });
    this.add = element("button", { type: "button", textContent: "Store a key", onclick: () => this.store() });
    const reset = element("button", { type: "button", textContent: "Start over", onclick: () => this.reset() });
    this.cells = Array.from({ length: NUM_PAGES }, (_, page) => {
      const bar = element("span", { className: "csr-slots" }, ...Array.from({ length: PAGE_SIZE }, () => element("i")));
      return element("button", { type: "button", className: "csr-page", onclick: () => this.click(page) }, String(page), bar);
    });
    this.grid = element("div", { className: "csr-pool" }, ...this.cells);
    this.grid.addEventListener("keydown", (event) => this.move(event));
    this.arrays = element("div", { className: "csr-arrays" });
    this.says = element("p", { className: "csr-says" });
    this.says.setAttribute("aria-live", "polite");
    const group = (label, className, ...children) => {
      const made = element("div", { className, ariaLabel: label }, ...children);
      made.setAttribute("role", "group");
      return made;
    };
    box.replaceChildren(
      group("Request that gets pages and keys", "csr-controls", ...this.choose, this.add, reset),
      element("p", { className: "csr-title", textContent: `The pool: ${NUM_PAGES} pages of ${PAGE_SIZE} slots` }),
      group("Pages of the pool", "csr-box", this.grid),
      this.says,
      this.arrays,
    );
    this.reset();
  }

  get requests() {
    return Object.values(this.state);
  }

  owner(page) {
    return Object.keys(this.state).find((name) => this.state[name].pages.includes(page));
  }

  reset() {
    this.state = structuredClone(EXAMPLE);
    this.active = "A";
    this.before = null;
    this.draw("Choose a request, then click a free page to give it to the request. Click its last page to take the page back.");
  }

  activate(name) {
    this.active = name;
    this.draw(`Request ${name} has ${this.count(name)}. The next free page that you click is its next page.`);
  }

  count(name) {
    const { pages, keys } = this.state[name];
    return `${keys} key${keys === 1 ? "" : "s"} in ${pages.length} page${pages.length === 1 ? "" : "s"}`;
  }

  // A free page joins the active request and stores its next key. Pages before the last one are full.
  click(page) {
    const name = this.owner(page);
    if (name === undefined) {
      const request = this.state[this.active];
      request.pages.push(page);
      request.keys = (request.pages.length - 1) * PAGE_SIZE + 1;
      this.draw(`Page ${page} is now ${this.active}'s last page and holds one key; the pages before it are full. Later entries of kv_indptr grow by 1.`);
    } else if (this.state[name].pages.at(-1) === page) {
      const request = this.state[name];
      request.pages.pop();
      request.keys = request.pages.length * PAGE_SIZE;
      this.draw(`Page ${page} is free again. ${name} has ${this.count(name)}${request.pages.length ? ", and its last page is full: 4, not 0" : ""}.`);
    } else {
      this.draw(`Page ${page} holds keys in the middle of ${name}. Only the last page of a request can be taken back here.`);
    }
  }

  store() {
    const request = this.state[this.active];
    if (request.pages.length === 0 || lastPageLen(request) === PAGE_SIZE) {
      this.draw(`${this.active} has no free slot: click a free page for its next key.`);
      return;
    }
    const slot = request.pages.at(-1) * PAGE_SIZE + lastPageLen(request);
    request.keys += 1;
    this.draw(`The key at position ${request.keys - 1} of ${this.active} goes to slot ${slot}. Only kv_last_page_len changes.`);
  }

  // Arrow keys move through the pool; Enter and Space click, as in every button.
  move(event) {
    const at = this.cells.indexOf(document.activeElement);
    const columns = getComputedStyle(this.grid).gridTemplateColumns.split(" ").length;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (step === undefined || !this.cells[at + step]) return;
    event.preventDefault();
    this.cells[at + step].focus();
  }

  draw(sentence) {
    this.says.textContent = sentence;
    Object.keys(this.state).forEach((name, i) => this.choose[i].setAttribute("aria-pressed", String(name === this.active)));
    this.cells.forEach((cell, page) => {
      const name = this.owner(page);
      const index = name ? this.state[name].pages.indexOf(page) : -1;
      const filled = name ? Math.min(PAGE_SIZE, this.state[name].keys - index * PAGE_SIZE) : 0;
      cell.classList.toggle("csr-owned", name !== undefined);
      if (name) cell.style.setProperty("--hue", HUES[name]);
      cell.querySelectorAll("i").forEach((slot, i) => slot.classList.toggle("csr-filled", i < filled));
      cell.ariaLabel = name ? `Page ${page}, ${name}'s page ${index + 1}, ${filled} of ${PAGE_SIZE} slots filled` : `Page ${page}, free`;
    });
    this.drawArrays();
  }

  drawArrays() {
    const arrays = csr(this.requests);
    const owners = Object.entries(this.state).flatMap(([name, { pages }]) => pages.map(() => name));
    const names = { kv_indptr: [], kv_indices: owners, kv_last_page_len: Object.keys(this.state) };
    const rows = Object.entries(arrays).map(([label, values]) => {
      const cells = values.map((value, i) => {
        const cell = element("span", { className: "csr-value", textContent: value });
        if (names[label][i]) cell.style.setProperty("--hue", HUES[names[label][i]]);
        cell.classList.toggle("csr-owned", names[label][i] !== undefined);
        cell.classList.toggle("csr-changed", this.before !== null && this.before[label][i] !== value);
        return cell;
      });
      return element("div", { className: "csr-row" }, element("code", { textContent: label }), element("span", { className: "csr-values" }, ...cells));
    });
    this.arrays.replaceChildren(...rows);
    this.before = arrays;
  }
}

document$.subscribe(() => {
  for (const box of document.querySelectorAll(".csr-figure:not([data-ready])")) {
    box.dataset.ready = "true";
    new Figure(box);
  }
});
