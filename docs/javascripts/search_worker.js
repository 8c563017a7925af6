// The site's search worker until the first query: the theme fetches its worker and its index with every page, so that
// index is empty (docs/search_index.py), and this fetches the theme's worker and the sections to search when they are
// needed.

const [SETUP, READY, RESULT] = [0, 1, 3]; // types of the theme's messages
let setup, loaded;

addEventListener("message", async (event) => {
  const message = event.data;
  if (!event.isTrusted) return; // sent from here, to the theme's worker
  event.stopImmediatePropagation();
  if (message.type === SETUP) {
    setup = message.data;
    postMessage({ type: READY });
  } else if (message.data === "" && !loaded) {
    postMessage({ type: RESULT, data: { items: [] } });
  } else {
    await (loaded ??= load());
    dispatchEvent(new MessageEvent("message", { data: message }));
  }
});

async function load() {
  importScripts("../../../search/worker.js");
  const docs = await (await fetch("../../../search/sections.json")).json();
  dispatchEvent(new MessageEvent("message", { data: { type: SETUP, data: { ...setup, docs } } }));
  await new Promise((done) => setTimeout(done)); // the theme sets its index up before the next timer
}
