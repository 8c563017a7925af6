// Formulas: \( \) and \[ \] from Markdown pages, $ and $$ from notebooks, set by KaTeX.

import { vendor } from "./vendor.js";

const DELIMITERS = [
  { left: "$$", right: "$$", display: true },
  { left: "\\[", right: "\\]", display: true },
  { left: "\\begin{equation}", right: "\\end{equation}", display: true },
  { left: "\\begin{align}", right: "\\end{align}", display: true },
  { left: "$", right: "$", display: false },
  { left: "\\(", right: "\\)", display: false },
];
const SHORT = 24; // characters of TeX

document$.subscribe(async () => {
  const places = [...document.querySelectorAll(".arithmatex, .nb-text, .prediction")].filter((place) =>
    /\$|\\[([]|\\begin/.test(place.textContent),
  );
  if (places.length === 0) return;
  vendor("katex/dist/katex.min.css");
  await vendor("katex/dist/katex.min.js");
  await vendor("katex/dist/contrib/auto-render.min.js");
  for (const place of places) renderMathInElement(place, { delimiters: DELIMITERS, throwOnError: false });
  for (const formula of document.querySelectorAll("p .katex, li .katex")) {
    const text = formula.querySelector("annotation")?.textContent ?? "";
    formula.classList.toggle("whole", text.length <= SHORT); // one line, if it is short enough for a phone
  }
  document.body.dataset.math = "done";
});
