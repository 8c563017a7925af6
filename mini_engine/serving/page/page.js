// The page of the server: a chat, and beside it the engine that answers it.

const MAX_TOKENS = 512; // of one answer
const MAX_NEWS = 6;
const RETRY_MS = 2000;
const COLORS = ["#0072B2", "#C98500", "#009E73", "#CC79A7", "#3D9AD6", "#D55E00", "#A89200"]; // the book's
const TEXT_ON = ["white", "black", "black", "black", "black", "black", "black"];
const STATES = { ".": "free", c: "cached", h: "held", o: "owned", s: "shared" };
const PASSAGE =
  "Answer the question about this text in a few sentences. Text: A language model writes one token at a time. For " +
  "each token it reads the keys and values of all earlier tokens, which a server keeps in a KV cache, because it would " +
  "otherwise have to compute them again in every step. The cache is divided into pages of equal size. A request takes " +
  "a page when it has filled the previous one, and returns all of its pages when it ends, so that other requests can " +
  "have them. Requests that begin with the same text share the pages of that text: the keys and values of a token " +
  "depend only on the token itself and on those before it. Pages of earlier requests stay in the cache until their " +
  "space is needed, and a new request that begins with the same text need not compute it. A scheduler decides in " +
  "every step which requests are computed, and computes them together as one batch, because the weights of the model " +
  "then have to be read only once for all of them. When no page is free, the scheduler preempts the request that was " +
  "admitted last. That request loses its pages, waits, and is computed again later. Question: ";
const EXAMPLES = [
  "What is a KV cache?",
  "When does a request take a new page?",
  "What happens to the pages of a request that ends?",
  "Which requests share pages?",
  "What does the scheduler decide?",
  "Why are several requests computed together?",
  "How does a language model write text?",
  "What would happen without a cache?",
];

const find = (id) => document.getElementById(id);

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

const count = (number, noun) => `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

// --- requests to the server -------------------------------------------------------------------------------------------

let key = "";
let asking = null; // resolved once the reader has entered a key

function askForKey() {
  asking ??= new Promise((done) => {
    find("key-problem").textContent = key && "The server does not accept this key.";
    find("key").value = "";
    find("key-dialog").showModal();
    find("key-form").onsubmit = (event) => {
      event.preventDefault();
      key = find("key").value;
      asking = null;
      find("key-dialog").close();
      done();
    };
  });
  return asking;
}

async function send(path, options = {}) {
  const sent = key;
  const headers = { "Content-Type": "application/json", ...(sent && { Authorization: `Bearer ${sent}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) {
    if (sent === key) await askForKey(); // otherwise the reader has entered another key meanwhile
    return send(path, options);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `the server answers with status ${response.status}`);
}

// Yield the objects of a stream of server-sent events.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice("data: ".length));
    }
  }
}

// --- chat -------------------------------------------------------------------------------------------------------------

let conversation = [];
let current = null; // the answer to the reader's last message, while it is written
const unfinished = new Set(); // an AbortController for each request

function follow() {
  const log = find("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

// Stream the outputs of one request, each into its own place. Whatever the model writes stays text.
async function stream(path, body, places) {
  const own = new AbortController();
  const parts = places.map((place) => {
    const [reasoning, content, problem] = ["reasoning", "content", "problem"].map((name) => make("p", name));
    place.append(reasoning, content, problem);
    place.classList.add("writing");
    return { reasoning, content, problem };
  });
  unfinished.add(own);
  find("stop").disabled = false;
  try {
    const whole = { ...(await body), stream: true, max_tokens: MAX_TOKENS };
    const response = await send(path, { method: "POST", body: JSON.stringify(whole), signal: own.signal });
    for await (const { choices, error } of eventsOf(response)) {
      if (error) throw new Error(error.message);
      for (const { index, text, delta, finish_reason } of choices) {
        parts[index].reasoning.append(delta?.reasoning_content ?? "");
        parts[index].content.append(text ?? delta?.content ?? "");
        if (finish_reason) places[index].classList.remove("writing");
      }
      follow();
    }
  } catch (error) {
    const problem = own.signal.aborted ? "Stopped." : error.message;
    places.forEach((place, index) => {
      if (place.classList.contains("writing")) parts[index].problem.textContent = problem;
    });
  }
  for (const place of places) place.classList.remove("writing");
  unfinished.delete(own);
  find("stop").disabled = unfinished.size === 0;
  follow();
}

async function ask(text) {
  const place = make("article", "answer");
  find("log").append(make("article", "question", text), place);
  find("log").scrollTop = find("log").scrollHeight;
  const messages = conversation;
  messages.push({ role: "user", content: text });
  current = place;
  find("send").disabled = true;
  await stream("v1/chat/completions", { messages }, [place]);
  const content = place.querySelector(".content").textContent;
  if (content) messages.push({ role: "assistant", content });
  else messages.pop();
  if (current === place) {
    current = null;
    find("send").disabled = false;
  }
}

// A browser opens only six connections to a server, so the eight examples are the prompts of one request.
async function examples() {
  const tokensOf = async (question) => {
    const messages = [{ role: "user", content: PASSAGE + question }];
    return (await (await send("tokenize", { method: "POST", body: JSON.stringify({ messages }) })).json()).tokens;
  };
  return { prompt: await Promise.all(EXAMPLES.map(tokensOf)) };
}

function sendExamples() {
  const group = make("article", "examples");
  group.append(make("p", "hint", "Eight requests that begin with the same text:"));
  const places = EXAMPLES.map((question) => {
    const place = make("div", "answer");
    group.append(make("p", "asked", question), place);
    return place;
  });
  find("log").append(group);
  find("log").scrollTop = find("log").scrollHeight;
  stream("v1/completions", examples(), places);
}

function stop() {
  for (const own of unfinished) own.abort();
}

find("composer").onsubmit = (event) => {
  event.preventDefault();
  const text = find("question").value.trim();
  if (!text || current) return;
  find("question").value = "";
  ask(text);
};
find("question").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  find("composer").requestSubmit();
};
find("stop").onclick = stop;
find("examples").onclick = sendExamples;
find("clear").onclick = () => {
  stop();
  conversation = [];
  current = null;
  find("send").disabled = false;
  find("log").replaceChildren();
  find("question").focus();
};

// --- engine -----------------------------------------------------------------------------------------------------------

let shown = null; // the last snapshot
let owners = []; // of each cell, the numbers of the requests that own its pages
let hovered = null; // number of the request under the pointer
const drawn = []; // what each cell shows

function color(element, number) {
  element.style.setProperty("--color", COLORS[number % COLORS.length]);
  element.style.setProperty("--on-color", TEXT_ON[number % COLORS.length]);
  return element;
}

function chip(number) {
  return color(make("span", "chip", number), number);
}

function draw(snapshot, before) {
  owners = Array.from(snapshot.cells, () => []);
  for (const { number, cells } of snapshot.running) for (const cell of cells) owners[cell].push(number);
  if (before) addNews(before, snapshot);
  shown = snapshot;
  drawTotals();
  drawPages();
  drawBatch();
  drawQueue();
}

function drawTotals() {
  const used = shown.num_pages - shown.num_free - shown.num_cached;
  const totals = {
    "tokens/s": Math.round(shown.tokens_per_second),
    running: shown.running.length,
    waiting: shown.num_waiting,
    "pages in use": used,
    "prompt tokens from the cache": `${Math.round(100 * shown.hit_rate)}%`,
    preemptions: shown.preemptions,
  };
  const items = Object.entries(totals).map(([name, value]) => {
    const item = make("div");
    item.append(make("dt", "", name), make("dd", "", value.toLocaleString("en-US")));
    return item;
  });
  find("totals").replaceChildren(...items);
}

function drawPages() {
  const { cells, filled, num_pages, page_size, pages_per_cell } = shown;
  const grid = find("pages");
  const pool = `${count(num_pages, "page")} of ${count(page_size, "token")}`;
  find("pool").textContent = pages_per_cell === 1 ? pool : `${pool}; a square is ${pages_per_cell} pages`;
  find("legend").querySelector(".held").parentElement.hidden = !cells.includes("h");
  grid.dataset.size = cells.length <= 300 ? "large" : cells.length <= 1200 ? "medium" : "small";
  while (grid.children.length > cells.length) grid.lastChild.remove();
  while (grid.children.length < cells.length) grid.append(make("i"));
  drawn.length = cells.length;
  for (let cell = 0; cell < cells.length; cell++) {
    const [owner] = owners[cell];
    const share = (filled[cell] ?? page_size) / page_size;
    const marked = owners[cell].includes(hovered);
    const what = `${cells[cell]} ${owner} ${share} ${marked}`;
    if (drawn[cell] === what) continue;
    drawn[cell] = what;
    const element = grid.children[cell];
    element.className = `page ${STATES[cells[cell]]}${marked ? " marked" : ""}`;
    if (owner !== undefined) color(element, owner).style.setProperty("--filled", `${100 * share}%`);
  }
}

function drawBatch() {
  const longest = Math.max(...shown.running.map((own) => own.prompt + own.output), 1);
  const rows = shown.running.map(({ number, prompt, output, computed, num_pages }) => {
    const row = color(make("li"), number);
    const bar = make("span", "bar");
    const phase = computed < prompt ? `prefill, ${computed} of ${prompt}` : "decode";
    for (const [name, tokens] of [["of-prompt", prompt], ["of-output", output]]) {
      const part = make("span", name);
      part.style.width = `${(100 * tokens) / longest}%`;
      bar.append(part);
    }
    row.dataset.number = number;
    const numbers = `prompt ${prompt} · output ${output} · ${count(num_pages, "page")}`;
    row.append(chip(number), bar, make("span", "phase", phase), make("span", "numbers", numbers));
    return row;
  });
  find("batch").replaceChildren(...(rows.length ? rows : [make("li", "none", "No request is running.")]));
}

function drawQueue() {
  const { waiting, num_waiting } = shown;
  const rows = waiting.map(({ number, prompt, output }) => {
    const row = make("li");
    row.append(chip(number), count(prompt + output, "token"));
    return row;
  });
  find("queued").textContent = num_waiting > waiting.length ? `the first ${waiting.length} of ${num_waiting}` : "next first";
  find("queue").replaceChildren(...(rows.length ? rows : [make("li", "none", "No request is waiting.")]));
}

// Say what happened to requests between two snapshots.
function addNews(before, after) {
  const numbers = (requests) => new Set(requests.map((own) => own.number));
  const [ran, runs, waits] = [numbers(before.running), numbers(after.running), numbers(after.waiting)];
  const tell = (number, what) => {
    const row = make("li");
    row.append(chip(number), what);
    find("news").prepend(row);
  };
  for (const { number, num_pages } of before.running) {
    if (waits.has(number)) tell(number, "is preempted: it loses its pages and is computed again later");
    else if (!runs.has(number)) tell(number, `has ended and returned ${count(num_pages, "page")}`);
  }
  for (const { number, cells } of after.running) {
    if (ran.has(number)) continue;
    const shared = cells.filter((cell) => after.cells[cell] === "s").length;
    tell(number, "is admitted" + (shared ? ` and shares ${count(shared, "page")}` : ""));
  }
  while (find("news").children.length > MAX_NEWS) find("news").lastChild.remove();
}

find("batch").onpointerover = (event) => mark(Number(event.target.closest("li")?.dataset.number));
find("batch").onpointerleave = () => mark(null);
find("pages").onpointerover = ({ target }) => {
  const cell = [...find("pages").children].indexOf(target);
  if (cell < 0) return;
  const by = owners[cell].length ? `: ${owners[cell].map((number) => `#${number}`).join(", ")}` : "";
  target.title = `page ${cell * shown.pages_per_cell}, ${STATES[shown.cells[cell]]}${by}`;
};

function mark(number) {
  hovered = number;
  if (shown) drawPages();
}

async function nameModel() {
  const models = await (await send("v1/models")).json();
  find("model").textContent = models.data[0].id;
}

let watching = null; // an AbortController; null while the page is hidden, because it then needs no snapshots

async function watch() {
  const own = (watching = new AbortController());
  while (!own.signal.aborted) {
    try {
      const response = await send("events", { signal: own.signal });
      find("connection").textContent = "live";
      await nameModel();
      let before = null; // what was shown before may be of an earlier server
      for await (const snapshot of eventsOf(response)) {
        draw(snapshot, before);
        before = snapshot;
      }
    } catch (error) {
      if (own.signal.aborted) return;
      console.info(`no snapshots: ${error.message}`);
    }
    find("connection").textContent = "not connected, trying again";
    await pause(RETRY_MS);
  }
}

document.onvisibilitychange = () => {
  watching?.abort();
  watching = null;
  if (!document.hidden) watch();
};

watch();
