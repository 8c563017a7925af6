// Online softmax over the four keys of chapter 02: the running maximum, sum, and output after each key.

import { drawn, figure, number } from "./figure.js";

const SCORES = [1, 3, 2, 6].map(Math.log);
const VALUES = [12, 4, 6, 2];
const LARGEST_FLOAT16 = 65504;

// The state after `read` keys: relative to the running maximum, as the algorithm keeps it.
export function online(scores, values, read) {
  const state = { max: -Infinity, sum: 0, weighted: 0, rescale: 1 };
  for (let i = 0; i < read; i += 1) {
    const max = Math.max(state.max, scores[i]);
    state.rescale = Math.exp(state.max - max);
    const weight = Math.exp(scores[i] - max);
    state.sum = state.sum * state.rescale + weight;
    state.weighted = state.weighted * state.rescale + weight * values[i];
    state.max = max;
  }
  return { ...state, output: state.weighted / state.sum };
}

function draw({ read, shift }) {
  const scores = SCORES.map((score) => score + shift);
  const { max, sum, output, rescale } = online(scores, VALUES, read);
  const shapes = [];
  const row = (i) => 34 + i * 34;
  shapes.push(drawn("text", { x: 0, y: 16, class: "head" }, "score"), drawn("text", { x: 90, y: 16, class: "head" }, "exp(score − maximum so far)"), drawn("text", { x: 560, y: 16, class: "head" }, "value"));
  scores.forEach((score, i) => {
    const isRead = i < read;
    const weight = Math.exp(score - max);
    shapes.push(drawn("text", { x: 0, y: row(i) + 17, class: isRead ? "" : "muted" }, score.toFixed(2)));
    shapes.push(drawn("rect", { x: 90, y: row(i), width: 400, height: 24, class: "empty" }));
    if (isRead) shapes.push(drawn("rect", { x: 90, y: row(i), width: Math.max(1, 400 * weight), height: 24, class: score === max ? "b" : "a" }));
    shapes.push(drawn("text", { x: 500, y: row(i) + 17, class: isRead ? "" : "muted" }, isRead ? weight.toFixed(3) : "–"));
    shapes.push(drawn("text", { x: 570, y: row(i) + 17, class: isRead ? "" : "muted" }, String(VALUES[i])));
  });
  const naive = scores.slice(0, read).reduce((total, score) => total + Math.exp(score), 0);
  const step =
    read === 1
      ? "The first key sets the maximum."
      : rescale < 1
        ? `Key ${read} raises the maximum, so sum and output are multiplied by ${number(rescale)} before it is added.`
        : `Key ${read} leaves the maximum as it is: nothing is rescaled.`;
  const overflow = naive > LARGEST_FLOAT16 ? "which overflows in float16" : "which float16 can still hold";
  return {
    width: 640,
    height: 172,
    shapes,
    label: `${read} of 4 keys read: maximum ${max.toFixed(2)}, sum ${number(sum)}, output ${number(output)}`,
    says: `${step} Maximum ${max.toFixed(2)}, sum ${number(sum)}, output ${number(output)}. Without the maximum, the sum would be ${number(naive)}, ${overflow}.`,
  };
}

figure("softmax-figure", {
  title: "Online softmax: one pass over the keys. Bars are relative to the maximum of the keys read so far.",
  sliders: {
    read: { label: "Keys read", values: [1, 2, 3, 4], start: 1 },
    shift: { label: "Added to every score", values: Array.from({ length: 21 }, (_, i) => i), start: 0 },
  },
  draw,
});
