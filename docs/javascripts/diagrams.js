// Diagrams: mermaid, in the colours of the page, drawn again when those change.

import { vendor } from "./vendor.js";

const COLOURS = {
  default: { ink: "#1f2933", line: "#52606d", fill: "#eef4f5", edge: "#2b6f77", group: "#f7f5f0", note: "#fdf3dc" },
  slate: { ink: "#e4e7eb", line: "#9aa5b1", fill: "#20343a", edge: "#6fb7bf", group: "#1d2127", note: "#3a3322" },
};

let drawn = 0;

async function draw(box) {
  const scheme = document.body.dataset.mdColorScheme === "slate" ? "slate" : "default";
  if (box.dataset.scheme === scheme) return;
  box.dataset.scheme = scheme;
  const colour = COLOURS[scheme];
  mermaid.initialize({
    startOnLoad: false,
    suppressErrorRendering: true,
    theme: "base",
    fontFamily: getComputedStyle(document.body).fontFamily,
    flowchart: { useMaxWidth: true, curve: "basis", padding: 12 },
    themeVariables: {
      darkMode: scheme === "slate",
      fontSize: "15px",
      primaryColor: colour.fill,
      primaryTextColor: colour.ink,
      primaryBorderColor: colour.edge,
      lineColor: colour.line,
      textColor: colour.ink,
      clusterBkg: colour.group,
      clusterBorder: colour.line,
      edgeLabelBackground: colour.group,
      noteBkgColor: colour.note,
      noteTextColor: colour.ink,
      noteBorderColor: colour.line,
      actorBkg: colour.fill,
      actorBorder: colour.edge,
      actorTextColor: colour.ink,
      signalColor: colour.line,
      signalTextColor: colour.ink,
      labelBoxBkgColor: colour.group,
      labelTextColor: colour.ink,
      loopTextColor: colour.ink,
    },
  });
  const { svg } = await mermaid.render(`diagram-${(drawn += 1)}`, box.dataset.source);
  box.innerHTML = svg;
  const picture = box.firstElementChild;
  const width = picture.viewBox.baseVal.width;
  picture.style.minWidth = `${Math.round(Math.min(width, Math.max(0.7 * width, 320)))}px`; // small screens scroll, not squint
  picture.setAttribute("role", "img");
}

function boxFor(pre) {
  const box = Object.assign(document.createElement("div"), { className: "diagram", tabIndex: 0 });
  box.dataset.source = pre.textContent;
  pre.replaceWith(box);
}

async function drawAll() {
  if (!document.querySelector(".diagram")) return;
  await vendor("mermaid/dist/mermaid.min.js"); // until it is here, the page shows the diagram's text
  await document.fonts.ready; // mermaid measures its labels
  document.querySelectorAll("pre.diagram").forEach(boxFor);
  for (const box of document.querySelectorAll("div.diagram")) {
    await draw(box).catch((error) => {
      box.replaceChildren(Object.assign(document.createElement("pre"), { textContent: box.dataset.source }));
      console.error(`diagram: ${error.message}`);
    });
  }
}

let queue = Promise.resolve(); // one drawing at a time: mermaid's settings are global
const schedule = () => (queue = queue.then(drawAll));

document$.subscribe(schedule);
new MutationObserver(schedule).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
