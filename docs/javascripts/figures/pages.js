// Page size against waste: eight requests of chapter 06's workload, halfway through their outputs, in pages.

import { drawn, figure, number } from "./figure.js";

const KEYS = [379, 267, 518, 302, 166, 426, 961, 723]; // prompt and half of the output of the first eight requests
const LONGEST = 2048;
const WIDTH = 640;

export function paged(keys, pageSize) {
  const pages = keys.map((count) => Math.ceil(count / pageSize));
  const held = pages.reduce((sum, count) => sum + count, 0) * pageSize;
  const filled = keys.reduce((sum, count) => sum + count, 0);
  return { pages, held, filled, empty: held - filled, entries: pages.reduce((sum, count) => sum + count, 0) };
}

function draw({ pageSize }) {
  const { pages, held, filled, empty, entries } = paged(KEYS, pageSize);
  const scale = WIDTH / LONGEST;
  const shapes = [];
  KEYS.forEach((keys, i) => {
    const y = i * 24;
    shapes.push(drawn("rect", { x: 0, y, width: pages[i] * pageSize * scale, height: 18, class: "waste" }));
    shapes.push(drawn("rect", { x: 0, y, width: keys * scale, height: 18, class: "a" }));
    if (pageSize * scale >= 4) {
      for (let page = 1; page < pages[i]; page += 1) shapes.push(drawn("line", { x1: page * pageSize * scale, y1: y, x2: page * pageSize * scale, y2: y + 18, class: "cut" }));
    }
  });
  return {
    width: WIDTH,
    height: 192,
    shapes,
    label: `pages of ${pageSize}: ${empty} of ${held} slots are empty`,
    says: `${number(empty, 4)} of ${number(held, 5)} slots that the requests hold are empty, ${((100 * empty) / held).toFixed(1)}%. The page tables have ${number(entries, 5)} entries for ${number(filled, 5)} keys. ${pageSize === LONGEST ? "One page for each request is a contiguous reservation." : "Halve the page, and the waste about halves while the tables double."}`,
  };
}

figure("pages-figure", {
  title: "Eight requests in pages. Dark slots hold keys; pale slots are reserved and empty.",
  sliders: { pageSize: { label: "Tokens per page", values: [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048], start: 128 } },
  draw,
});
