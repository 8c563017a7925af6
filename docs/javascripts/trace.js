// The trace player: replays a trace that the engine wrote (mini_engine/observe/trace.py), step by step.

const LARGEST_FILE = 100e6;
const RECORD_ONE = "Record one with: mini-engine trace --out run.json";
const HUES = [200, 28, 135, 315, 50, 235, 0, 168, 275, 90];
const ICONS = {
  first: "M5 4h3v16H5zM20 4v16L9 12z",
  back: "M17 4v16L6 12z",
  play: "M7 3v18l13-9z",
  pause: "M6 4h4v16H6zM14 4h4v16h-4z",
  next: "M7 4v16l11-8z",
};

// --- reading a trace --------------------------------------------------------------------------------------------------

function expect(holds, what) {
  if (!holds) throw new Error(what);
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isCount = (value) => Number.isInteger(value) && value >= 0;
const areNames = (value) => Array.isArray(value) && value.every((name) => typeof name === "string");

// The steps with everything that they show, so that any of them can be drawn without those before it.
export function readTrace(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("it is not JSON");
  }
  const other = isObject(data) && isObject(data.otherData) ? data.otherData : {};
  expect(other.format === "mini-engine trace", "it was not written by this engine");
  expect(other.version === 2, `its version is ${other.version}, and the player reads version 2`);
  expect(isCount(other.num_pages) && isCount(other.page_size) && other.page_size > 0, "its pool of pages is missing");
  expect(other.num_pages <= 100_000, "its pool has more than 100,000 pages, too many to draw");
  expect(Array.isArray(data.traceEvents), "it has no events");

  const requests = new Map(); // name -> { name, index, prompt, pieces: [step, text], preemptions: [step], end }
  const request = (name) => {
    if (!requests.has(name)) requests.set(name, { name, index: requests.size, prompt: 0, pieces: [], preemptions: [], end: null });
    return requests.get(name);
  };
  const steps = [];
  let pages = new Map();
  let computed = new Map();
  for (const event of data.traceEvents.filter((event) => isObject(event) && event.cat === "step")) {
    const index = steps.length;
    const { args } = event;
    checkStep(event, other.num_pages, index);
    for (const [name, why] of Object.entries(args.left)) request(name).end = { step: index - 1, why };
    // One that has ended may have had the name before.
    for (const [name, prompt] of Object.entries(args.arrived)) Object.assign(request(name), { prompt, end: null });
    pages = new Map(pages);
    computed = new Map(computed);
    for (const [name, own] of Object.entries(args.pages)) own.length ? pages.set(name, own) : pages.delete(name);
    for (const name of computed.keys()) if (!pages.has(name)) computed.delete(name);
    for (const name of args.preempted) {
      request(name).preemptions.push(index);
      computed.delete(name);
    }
    const batch = new Map(args.batch.map((work) => [work.request_id, work]));
    for (const work of args.batch) computed.set(work.request_id, work.num_computed);
    for (const output of args.outputs) request(output.request_id).pieces.push([index, output.text]);
    for (const [name, why] of Object.entries(args.ended)) request(name).end = { step: index, why };
    for (const name of [...pages.keys(), ...args.waiting]) request(name);
    const used = new Set([...pages.values()].flat()).size;
    steps.push({ ...args, seconds: event.dur / 1e6, pages, computed, batch, used });
  }
  expect(steps.length > 0, "it holds no steps");
  return { numPages: other.num_pages, pageSize: other.page_size, requests: [...requests.values()], steps };
}

function checkStep({ ts, dur, args }, numPages, index) {
  const damaged = `its step ${index} is damaged`;
  expect(Number.isFinite(ts) && Number.isFinite(dur) && isObject(args), damaged);
  for (const list of ["waiting", "admitted", "preempted"]) expect(areNames(args[list]), damaged);
  expect(isObject(args.arrived) && Object.values(args.arrived).every(isCount), damaged);
  for (const reasons of ["left", "ended"]) expect(isObject(args[reasons]) && areNames(Object.values(args[reasons])), damaged);
  const isPage = (page) => isCount(page) && page < numPages;
  expect(isObject(args.pages) && Object.values(args.pages).every((own) => Array.isArray(own) && own.every(isPage)), damaged);
  const isWork = (work) => isObject(work) && typeof work.request_id === "string" && ["prefill", "chunk", "decode"].includes(work.kind);
  expect(Array.isArray(args.batch) && args.batch.every((w) => isWork(w) && isCount(w.num_new) && isCount(w.num_computed)), damaged);
  const isOutput = (output) => isObject(output) && typeof output.request_id === "string" && typeof output.text === "string";
  expect(Array.isArray(args.outputs) && args.outputs.every(isOutput), damaged);
}

// --- words ------------------------------------------------------------------------------------------------------------

const plural = (count, noun) => `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;

function list(names) {
  if (names.length > 8) return `${names.length} requests`;
  return names.length < 2 ? names.join() : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}

function sentences(trace, index) {
  const step = trace.steps[index];
  const before = trace.steps[index - 1];
  const names = (works) => works.map((work) => work.request_id);
  const works = [...step.batch.values()];
  const said = [];
  const arrived = Object.keys(step.arrived);
  if (arrived.length) said.push(`${list(arrived)} ${arrived.length > 1 ? "arrive" : "arrives"}.`);
  for (const [name, why] of Object.entries(step.left)) said.push(`${name} has ended (${why}).`);
  for (const name of step.preempted) {
    const count = before?.pages.get(name)?.length ?? 0;
    said.push(`No page is free: ${name} is preempted, gives back its ${plural(count, "page")}, and waits.`);
  }
  const again = step.admitted.filter((name) => trace.requests.find((r) => r.name === name).preemptions.some((i) => i < index));
  const first = step.admitted.filter((name) => !again.includes(name));
  if (first.length) said.push(`${list(first)} ${first.length > 1 ? "get" : "gets"} pages.`);
  if (again.length) said.push(`${list(again)} ${again.length > 1 ? "return" : "returns"} and ${again.length > 1 ? "are" : "is"} computed again.`);
  const decodes = works.filter((work) => work.kind === "decode");
  if (decodes.length) said.push(`${list(names(decodes))} ${decodes.length > 1 ? "decode" : "decodes"}.`);
  const prompts = works.filter((work) => work.kind !== "decode");
  if (prompts.length > 4) said.push(`${prompts.length} prompts are computed, whole or in part.`);
  else
    for (const work of prompts) {
      said.push(`${work.request_id} computes ${work.kind === "chunk" ? "a chunk of" : "all of its"} ${plural(work.num_new, "token")}.`);
    }
  for (const [name, why] of Object.entries(step.ended)) {
    said.push(`${name} ends (${why}): its ${plural(step.pages.get(name)?.length ?? 0, "page")} are free from the next step on.`);
  }
  return said.join(" ");
}

// --- the player -------------------------------------------------------------------------------------------------------

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

function button(label, picture, onclick) {
  const made = element("button", { type: "button", title: label, onclick }, icon(picture));
  made.setAttribute("aria-label", label);
  return made;
}

const isDark = () => document.body.dataset.mdColorScheme === "slate";

function colors(request) {
  const hue = HUES[request.index % HUES.length];
  return isDark()
    ? { fill: `hsl(${hue} 42% 38%)`, rest: `hsl(${hue} 30% 20%)`, line: `hsl(${hue} 50% 58%)` }
    : { fill: `hsl(${hue} 62% 74%)`, rest: `hsl(${hue} 60% 92%)`, line: `hsl(${hue} 55% 48%)` };
}

const label = (request) => (request.name.length <= 2 ? request.name : String(request.index + 1));

class Player {
  constructor(box) {
    this.box = box;
    this.trace = null;
    this.index = 0;
    this.timer = null;
    this.build();
    const changed = new MutationObserver(() => this.draw());
    changed.observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
    new ResizeObserver(() => this.trace && this.drawTimeline()).observe(this.timeline);
    this.openExample();
  }

  build() {
    this.first = button("First step", "first", () => this.go(0));
    this.back = button("Back one step", "back", () => this.go(this.index - 1));
    this.playing = button("Play", "play", () => this.toggle());
    this.playing.classList.add("trace-play");
    this.next = button("Forward one step", "next", () => this.go(this.index + 1));
    this.speed = element("select", {}, ...[[2, "slow"], [6, "normal"], [20, "fast"]].map(([value, name]) => new Option(name, value)));
    this.speed.value = "6";
    this.where = element("output");
    const controls = [this.first, this.back, this.playing, this.next, element("label", {}, "Speed", this.speed), this.where];
    this.slider = element("input", { type: "range", min: 0, step: 1, className: "trace-slider" });
    this.slider.setAttribute("aria-label", "Step");
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    this.says = element("p", { className: "trace-says" });

    this.gridTitle = element("span");
    this.grid = element("div", { className: "trace-grid" });
    this.grid.setAttribute("role", "img");
    this.running = element("div");
    this.waiting = element("div");
    const queues = element("div", { className: "trace-queues" }, element("span", {}, "Running"), this.running, element("span", {}, "Waiting"), this.waiting);
    this.rows = element("div", { className: "trace-requests" });
    this.timeline = element("canvas", { className: "trace-timeline" });
    this.timeline.setAttribute("role", "img");
    const key = (...entries) => {
      const entry = ([kind, name]) => element("span", {}, element("i", { className: `trace-key-${kind}`, textContent: kind === "cross" ? "×" : "" }), name);
      return element("div", { className: "trace-key" }, ...entries.map(entry));
    };

    this.input = element("input", { type: "file", accept: ".json,application/json" });
    this.input.addEventListener("change", () => this.input.files[0] && this.openFile(this.input.files[0]));
    this.example = element("button", { type: "button", className: "md-button", textContent: "Back to the example", hidden: true });
    this.example.addEventListener("click", () => this.openExample());
    this.fileName = element("span", { textContent: "or drop a file on this page" });
    this.error = element("p", { className: "trace-error" });
    this.error.setAttribute("role", "alert");
    const choose = element("label", { className: "md-button" }, "Open your own trace", this.input);

    this.stage = element(
      "div",
      { className: "trace-stage", tabIndex: 0 },
      this.says,
      element("section", {}, element("h3", {}, "Pages ", this.gridTitle), this.grid, key(["new", "new in this step"], ["freed", "given back"])),
      element("section", {}, element("h3", {}, "Requests"), queues, this.rows),
    );
    this.stage.setAttribute("role", "group");
    this.stage.setAttribute("aria-label", "The step. Left and right arrow keys step, space plays.");
    this.box.replaceChildren(
      element("div", { className: "trace-controls" }, ...controls),
      this.slider,
      this.stage,
      element(
        "section",
        {},
        element("h3", {}, "Timeline ", element("span", {}, "a column per step; below, pages in use")),
        element("div", { className: "trace-scroll" }, this.timeline),
        key(["prompt", "prompt"], ["decode", "decode"], ["waiting", "waits"], ["cross", "preempted"]),
      ),
      element("section", { className: "trace-file" }, choose, this.fileName, this.example),
      this.error,
    );

    document.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("dragleave", () => this.box.classList.remove("trace-drop"));
    document.addEventListener("dragover", (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      this.box.classList.add("trace-drop");
    });
    document.addEventListener("drop", (event) => {
      this.box.classList.remove("trace-drop");
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      this.openFile(event.dataTransfer.files[0]);
    });
    const seek = (event) => {
      const { left } = this.timeline.getBoundingClientRect();
      this.go(Math.floor((event.clientX - left - this.gutter) / this.column));
    };
    this.timeline.addEventListener("pointerdown", (event) => {
      this.timeline.setPointerCapture(event.pointerId);
      seek(event);
    });
    this.timeline.addEventListener("pointermove", (event) => event.buttons && seek(event));
    let touched = null; // a swipe over the pages is a step
    this.stage.addEventListener("pointerdown", (event) => (touched = event.pointerType === "touch" ? event.clientX : null));
    this.stage.addEventListener("pointerup", (event) => {
      const moved = touched === null ? 0 : event.clientX - touched;
      if (Math.abs(moved) > 30) this.go(this.index - Math.sign(moved));
    });
  }

  // --- files ---

  async openExample() {
    const url = new URL(`../traces/${this.box.dataset.trace}`, import.meta.url);
    try {
      const answer = await fetch(url);
      expect(answer.ok, `the server answered ${answer.status}`);
      this.open(await answer.text());
      this.example.hidden = true;
      this.fileName.textContent = "or drop a file on this page";
    } catch (error) {
      this.error.textContent = `The example cannot be shown: ${error.message}. You can still open a trace of your own.`;
    }
  }

  async openFile(file) {
    this.input.value = ""; // so that the same file can be chosen again
    try {
      expect(file.size <= LARGEST_FILE, `it has ${Math.round(file.size / 1e6)} MB, and the player takes ${LARGEST_FILE / 1e6}`);
      this.open(await file.text());
      this.example.hidden = false;
      this.fileName.textContent = file.name;
    } catch (error) {
      this.error.textContent = `${file.name} cannot be played: ${error.message}. ${RECORD_ONE}`;
    }
  }

  open(text) {
    this.trace = readTrace(text);
    this.picture = null;
    this.error.textContent = "";
    this.pause();
    const { numPages, steps } = this.trace;
    this.slider.max = steps.length - 1;
    this.cells = Array.from({ length: numPages }, () => element("div", { className: "trace-page" }));
    this.grid.replaceChildren(...this.cells);
    this.dense = numPages > 320;
    this.grid.classList.toggle("trace-dense", this.dense);
    this.grid.style.setProperty("--cell", this.dense ? "0.5rem" : numPages > 80 ? "1.25rem" : "1.6rem");
    this.go(0);
  }

  // --- moving ---

  go(index) {
    if (!this.trace) return;
    this.index = Math.max(0, Math.min(this.trace.steps.length - 1, index));
    if (this.index === this.trace.steps.length - 1) this.pause();
    this.draw();
  }

  toggle() {
    if (this.timer) return this.pause();
    if (!this.trace) return;
    if (this.index === this.trace.steps.length - 1) this.go(0);
    const tick = () => {
      this.timer = setTimeout(tick, 1000 / Number(this.speed.value));
      this.go(this.index + 1);
    };
    this.timer = setTimeout(tick, 1000 / Number(this.speed.value));
    this.showPlaying("Pause", "pause", "off"); // a screen reader should not be told ten steps a second
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.showPlaying("Play", "play", "polite");
  }

  showPlaying(name, picture, live) {
    this.playing.replaceChildren(icon(picture));
    this.playing.title = name;
    this.playing.setAttribute("aria-label", name);
    this.says.setAttribute("aria-live", live);
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
    const { target } = event;
    const inside = this.box.contains(target);
    if (!inside && target !== document.body) return;
    if (target.matches("select, .trace-slider") && event.key !== " ") return; // they move by themselves
    const last = this.trace ? this.trace.steps.length - 1 : 0;
    const moves = { ArrowLeft: this.index - 1, ArrowRight: this.index + 1, ...(inside ? { Home: 0, End: last } : {}) };
    if (event.key in moves) this.go(moves[event.key]);
    else if (event.key === " " && inside && !target.matches("button, select, label, input[type=file]")) this.toggle();
    else return;
    event.preventDefault();
  }

  // --- drawing ---

  draw() {
    if (!this.trace) return;
    const { steps } = this.trace;
    const step = steps[this.index];
    this.slider.value = this.index;
    const tokens = [...step.batch.values()].reduce((sum, work) => sum + work.num_new, 0);
    this.slider.setAttribute("aria-valuetext", `step ${this.index} of ${steps.length - 1}`);
    this.where.textContent = `step ${this.index} of ${steps.length - 1} · ${plural(tokens, "token")} · ${(step.seconds * 1e3).toPrecision(2) * 1} ms`;
    this.says.textContent = sentences(this.trace, this.index);
    this.first.disabled = this.back.disabled = this.index === 0;
    this.next.disabled = this.index === steps.length - 1;
    this.drawGrid(step, steps[this.index - 1]);
    this.drawRequests(step);
    this.drawTimeline();
  }

  drawGrid(step, before) {
    const { requests, numPages, pageSize } = this.trace;
    const owners = new Map(); // page -> [request, share of it that is filled]
    const counts = [];
    for (const request of requests.filter((request) => step.pages.has(request.name))) {
      const own = step.pages.get(request.name);
      const computed = step.computed.get(request.name) ?? 0;
      counts.push(`${request.name} ${own.length}`);
      own.forEach((page, i) => {
        const filled = Math.max(0, Math.min(1, computed / pageSize - i));
        owners.set(page, [...(owners.get(page) ?? []), { request, filled }]);
      });
    }
    const had = new Set([...(before?.pages.values() ?? [])].flat());
    this.cells.forEach((cell, page) => {
      const own = owners.get(page) ?? [];
      cell.className = `trace-page${own.length && !had.has(page) ? " trace-new" : ""}${!own.length && had.has(page) ? " trace-freed" : ""}`;
      cell.textContent = this.dense ? "" : own.map(({ request }) => label(request)).join("");
      cell.title = own.length
        ? `page ${page}: ${own.map(({ request, filled }) => `request ${request.name}, ${plural(Math.round(filled * pageSize), "token")}`).join("; ")}`
        : `page ${page}: free`;
      // A shared page has a stripe for each owner.
      const stripes = own.map(({ request, filled }, i) => {
        const { fill, rest } = colors(request);
        const part = `${(100 * i) / Math.max(1, own.length - 1)}% 0 / ${100 / own.length}% 100% no-repeat`;
        return `linear-gradient(to top, ${fill} ${filled * 100}%, ${rest} ${filled * 100}%) ${part}`;
      });
      cell.style.background = stripes.join(", ");
    });
    this.gridTitle.textContent = `${step.used} of ${numPages} in use, ${plural(pageSize, "token")} each`;
    this.grid.setAttribute("aria-label", `${step.used} of ${numPages} pages in use: ${counts.join(", ") || "none"}`);
  }

  chip(request) {
    const made = element("span", { className: "trace-chip", textContent: label(request), title: `request ${request.name}` });
    made.style.background = colors(request).fill;
    return made;
  }

  drawRequests(step) {
    const { requests } = this.trace;
    const byName = new Map(requests.map((request) => [request.name, request]));
    const none = () => element("span", { textContent: "none" });
    const chips = (names) => (names.length ? names.map((name) => this.chip(byName.get(name))) : [none()]);
    this.running.replaceChildren(...chips([...step.pages.keys()]));
    this.waiting.replaceChildren(...chips(step.waiting));
    // A row each, always the same ones, so that nothing jumps; of many requests, those that run or wait.
    const many = requests.length > 16;
    this.rows.classList.toggle("trace-many", many);
    const shown = !many ? requests : requests.filter(({ name }) => step.pages.has(name) || step.waiting.includes(name));
    this.rows.replaceChildren(
      ...shown.map((request) => {
        const state = this.state(request, step);
        const text = request.pieces.filter(([when]) => when <= this.index).map(([, piece]) => piece).join("");
        return element(
          "div",
          { className: `trace-request${step.pages.has(request.name) ? "" : " trace-idle"}` },
          this.chip(request),
          element("span", { textContent: state }),
          element("span", { className: "trace-text" }, element("bdi", { textContent: text.slice(-300).replace(/\s+/g, " ") })),
        );
      }),
    );
  }

  state(request, step) {
    const { name, end } = request;
    const place = step.waiting.indexOf(name);
    if (place >= 0) return `waits${step.preempted.includes(name) ? ", preempted" : place ? "" : ", is next"}`;
    const pages = step.pages.get(name);
    if (!pages) return end && this.index > end.step ? `ended: ${end.why}` : "not here yet";
    const work = step.batch.get(name);
    const doing = !work ? "idle" : work.kind === "decode" ? "decode" : `${work.kind} of ${work.num_new}`;
    return `${doing} · ${plural(pages.length, "page")}`;
  }

  // The picture changes with the trace, the width and the colors; a step only moves the cursor over it.
  drawTimeline() {
    const { steps } = this.trace;
    const width = this.timeline.clientWidth;
    if (width === 0) return; // not laid out yet
    const key = [width, window.devicePixelRatio, isDark()].join();
    if (this.picture?.key !== key) this.picture = { key, ...this.paintTimeline(width) };
    const { canvas, height } = this.picture;
    this.timeline.width = canvas.width;
    this.timeline.height = canvas.height;
    this.timeline.style.height = `${height}px`;
    const pen = this.timeline.getContext("2d");
    pen.drawImage(canvas, 0, 0);
    pen.scale(canvas.width / width, canvas.width / width);
    pen.fillStyle = getComputedStyle(document.body).getPropertyValue("--step-ink");
    pen.fillRect(this.gutter + (this.index + 0.5) * this.column - 0.75, 0, 1.5, height);
    this.timeline.setAttribute("aria-label", `Timeline, at step ${this.index} of ${steps.length - 1}. The slider above moves through it.`);
  }

  paintTimeline(width) {
    const { requests, steps, numPages } = this.trace;
    const ratio = window.devicePixelRatio || 1;
    const row = Math.max(1, Math.min(16, 320 / requests.length));
    const chart = 40;
    const height = requests.length * row + chart + 8;
    this.gutter = row >= 10 ? 22 : 4;
    this.column = (width - this.gutter) / steps.length;
    const canvas = element("canvas", { width: width * ratio, height: height * ratio });
    const style = getComputedStyle(document.body);
    const [muted, accent, ink] = ["--book-muted", "--md-accent-fg-color", "--step-ink"].map((name) => style.getPropertyValue(name));
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.textBaseline = "middle";
    pen.font = `600 11px ${style.fontFamily}`;
    const x = (index) => this.gutter + index * this.column;
    const wide = Math.max(1, this.column - (this.column > 4 ? 1 : 0));
    const bar = (index, middle, thick, color, width = wide) => {
      pen.fillStyle = color;
      pen.fillRect(x(index), middle - thick / 2, width, thick);
    };

    const middles = new Map(requests.map((request, i) => [request.name, (i + 0.5) * row]));
    const lines = new Map(requests.map((request) => [request.name, colors(request).line]));
    steps.forEach((step, index) => {
      for (const name of step.waiting) bar(index, middles.get(name), 1.5, muted, Math.max(1, wide / 2));
      for (const name of step.pages.keys()) {
        const work = step.batch.get(name);
        const thick = !work ? 1 : work.kind === "decode" ? Math.max(Math.min(1.5, row / 2), row * 0.28) : row * 0.8;
        bar(index, middles.get(name), thick, lines.get(name));
      }
    });
    pen.strokeStyle = accent;
    pen.lineWidth = 2;
    for (const request of requests) {
      const middle = middles.get(request.name);
      pen.fillStyle = ink;
      if (row >= 10) pen.fillText(label(request), 4, middle);
      const arm = Math.max(2, Math.min(4.5, row / 2));
      for (const index of request.preemptions) {
        const at = x(index) + wide / 2;
        pen.beginPath();
        for (const side of [1, -1]) {
          pen.moveTo(at - arm, middle - side * arm);
          pen.lineTo(at + arm, middle + side * arm);
        }
        pen.stroke();
      }
    }
    pen.globalAlpha = 0.55;
    steps.forEach(({ used }, index) => bar(index, height - 1 - (chart * used) / numPages / 2, (chart * used) / numPages, muted));
    pen.globalAlpha = 1;
    pen.fillRect(this.gutter, height - 1.5 - chart, width - this.gutter, 0.5); // all pages
    return { canvas, height };
  }
}

document$.subscribe(() => {
  for (const box of document.querySelectorAll(".trace-player:not([data-ready])")) {
    box.dataset.ready = "true";
    new Player(box);
  }
});
