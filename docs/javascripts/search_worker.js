// Goes in front of the theme's search worker (docs/search_index.py puts it there). The theme fetches its index with every
// page, so that index is empty, and this fetches the sections to search when the first query comes.

const [SETUP, QUERY] = [0, 2]; // types of the theme's messages
let setup, ready;

addEventListener("message", async (event) => {
  const message = event.data;
  if (!event.isTrusted) return; // sent from here
  if (message.type === SETUP) setup = message.data;
  if (message.type !== QUERY || message.data === "") return;
  event.stopImmediatePropagation();
  await (ready ??= fetchSections());
  dispatchEvent(new MessageEvent("message", { data: message }));
});

async function fetchSections() {
  const docs = await (await fetch("../../../search/sections.json")).json();
  dispatchEvent(new MessageEvent("message", { data: { type: SETUP, data: { ...setup, docs } } }));
  await new Promise((done) => setTimeout(done)); // the theme sets its index up before the next timer
}

