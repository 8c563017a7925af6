// Temperature and filters on two distributions of chapter 04: SmolLM2-135M-Instruct, float32, after two prompts.

import { drawn, figure } from "./figure.js";

// The ten largest logits, and the 49,142 others in bins: [log of the mean exponential, tokens].
const ROWS = {
  capital: {
    prompt: "The capital of France is",
    tokens: [["Paris", 17.34], ["the", 14.86], ["London", 13.2], ["Le", 13.0], ["New", 12.92], ["La", 12.89], ["␣", 12.75], ["not", 12.69], ["Mon", 12.59], ["capital", 12.09]],
    tail: [[11.99, 2], [11.51, 10], [10.94, 5], [10.45, 11], [10.0, 17], [9.51, 29], [8.96, 36], [8.5, 59], [8.0, 65], [7.51, 97], [6.98, 144], [6.5, 184], [6.0, 253], [5.48, 307], [5.0, 381], [4.48, 531], [4.01, 652], [3.51, 876], [3.0, 982], [2.5, 1255], [2.0, 1491], [1.51, 1651], [1.01, 2020], [0.51, 2176], [0.01, 2467], [-0.49, 2591], [-0.99, 2791], [-1.49, 2829], [-1.99, 2820], [-2.49, 2686], [-2.99, 2673], [-3.49, 2543], [-3.98, 2404], [-4.49, 2062], [-4.98, 1865], [-5.48, 1668], [-5.98, 1358], [-6.48, 1156], [-6.98, 887], [-7.49, 715], [-7.98, 604], [-8.48, 463], [-8.98, 371], [-9.47, 243], [-9.99, 195], [-10.49, 133], [-10.95, 131], [-11.5, 66], [-12.0, 56], [-12.52, 33], [-12.98, 22], [-13.49, 24], [-13.93, 14], [-14.38, 11], [-14.97, 5], [-15.46, 4], [-15.92, 3], [-16.77, 4], [-17.45, 4], [-18.1, 2], [-18.59, 2], [-19.16, 2], [-19.78, 1]],
  },
  animal: {
    prompt: "My favorite animal is the",
    tokens: [["cat", 9.33], ["elephant", 8.68], ["one", 8.02], ["Mon", 7.4], ["dog", 7.39], ["polar", 6.83], ["lion", 6.76], ["parrot", 6.59], ["unic", 6.49], ["rabbit", 6.47]],
    tail: [[6.37, 2], [5.92, 15], [5.55, 20], [4.98, 22], [4.5, 44], [3.97, 60], [3.51, 72], [2.98, 94], [2.52, 157], [1.99, 192], [1.5, 289], [0.98, 349], [0.5, 462], [-0.01, 568], [-0.5, 669], [-1.01, 860], [-1.5, 1085], [-2.0, 1276], [-2.5, 1355], [-2.99, 1621], [-3.49, 1842], [-3.99, 2065], [-4.49, 2226], [-4.99, 2321], [-5.49, 2371], [-6.0, 2568], [-6.49, 2502], [-6.99, 2518], [-7.49, 2454], [-7.99, 2389], [-8.49, 2221], [-8.99, 2135], [-9.49, 1938], [-9.99, 1726], [-10.48, 1560], [-10.98, 1340], [-11.48, 1133], [-11.98, 971], [-12.49, 770], [-12.99, 657], [-13.47, 494], [-13.99, 380], [-14.49, 316], [-14.97, 309], [-15.49, 193], [-15.99, 131], [-16.49, 121], [-16.98, 74], [-17.46, 59], [-17.92, 42], [-18.46, 33], [-18.99, 16], [-19.52, 8], [-19.95, 12], [-20.43, 9], [-20.99, 7], [-21.47, 5], [-22.2, 1], [-22.51, 4], [-22.9, 3], [-23.28, 1], [-23.98, 2], [-24.32, 1], [-25.56, 1], [-26.35, 1]],
  },
};

// The probability of each bin after the filters, in the order top-k, top-p, min-p, and how many of its tokens are left.
export function filtered(row, { temperature, topK, topP, minP }) {
  const bins = [...row.tokens.map(([name, logit]) => ({ name, logit, count: 1 })), ...row.tail.map(([logit, count]) => ({ name: "", logit, count }))];
  const largest = bins[0].logit;
  for (const bin of bins) bin.weight = Math.exp((bin.logit - largest) / temperature);
  let rank = 0;
  for (const bin of bins) {
    bin.kept = topK === 0 ? bin.count : Math.max(0, Math.min(bin.count, topK - rank));
    rank += bin.count;
  }
  const total = bins.reduce((sum, bin) => sum + bin.weight * bin.kept, 0);
  let before = 0;
  for (const bin of bins) {
    const mass = bin.weight * bin.kept;
    if (topP < 1) bin.kept = Math.max(0, Math.min(bin.kept, Math.ceil((topP * total - before) / bin.weight - 1e-9)));
    before += mass;
    if (bin.weight < minP) bin.kept = 0;
  }
  const left = bins.reduce((sum, bin) => sum + bin.weight * bin.kept, 0);
  for (const bin of bins) bin.p = (bin.weight * bin.kept) / left;
  return bins;
}

function draw({ prompt, ...filters }) {
  const row = ROWS[prompt];
  const bins = filtered(row, filters);
  const others = bins.slice(row.tokens.length);
  const bars = bins.slice(0, row.tokens.length).map(({ name, p, kept }) => [name, p, kept > 0]);
  const rest = others.reduce((sum, { p }) => sum + p, 0);
  bars.push(["all others", rest, rest > 0]);
  const shapes = bars.flatMap(([name, p, kept], i) => [
    drawn("text", { x: 116, y: i * 28 + 16, "text-anchor": "end", class: kept ? "" : "muted" }, name),
    drawn("rect", { x: 126, y: i * 28 + 2, width: 430, height: 18, class: "empty" }),
    drawn("rect", { x: 126, y: i * 28 + 2, width: 430 * p, height: 18, class: i === bars.length - 1 ? "b" : "a" }),
    drawn("text", { x: 566, y: i * 28 + 16, class: kept ? "" : "muted" }, kept ? `${(100 * p).toFixed(1)}%` : "cut"),
  ]);
  const kept = bins.reduce((sum, bin) => sum + bin.kept, 0);
  return {
    width: 640,
    height: bars.length * 28,
    shapes,
    label: `${kept} tokens are left; the most likely has ${(100 * bins[0].p).toFixed(1)}%`,
    says: `${kept.toLocaleString("en-US")} of 49,152 tokens can be drawn. "${bins[0].name}" has ${(100 * bins[0].p).toFixed(1)}%, and all but the ten most likely together ${(100 * rest).toFixed(1)}%.`,
  };
}

const off = (value) => (value === 0 ? "off" : String(value));

figure("sampling-figure", {
  title: "The next token's probabilities after temperature, top-k, top-p, and min-p.",
  sliders: {
    temperature: { label: "Temperature", values: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 1.7, 2], start: 1 },
    topK: { label: "top-k", values: [0, 1, 2, 3, 5, 10, 20, 50, 100, 500], start: 0, show: off },
    topP: { label: "top-p", values: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1], start: 1, show: (value) => (value === 1 ? "off" : String(value)) },
    minP: { label: "min-p", values: [0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5], start: 0, show: off },
  },
  choices: { prompt: { label: "Prompt", options: Object.fromEntries(Object.entries(ROWS).map(([name, row]) => [name, row.prompt])), start: "animal" } },
  draw,
});
