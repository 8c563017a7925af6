// RoPE on one pair of numbers: query and key are rotated by their positions, and the score sees only the distance.

import { drawn, figure, range } from "./figure.js";

const HEAD_DIM = 8;
const BASE = 10000;
const QUERY = 0.4; // the angle of the pair before it is rotated
const KEY = 1.0;
const RADIUS = 90;

export const frequency = (pair) => BASE ** ((-2 * pair) / HEAD_DIM);
export const score = (query, key, pair) => Math.cos(QUERY - KEY + (query - key) * frequency(pair));

function arrow(x, y, angle, className, name) {
  const [dx, dy] = [RADIUS * Math.cos(angle), -RADIUS * Math.sin(angle)];
  return [
    drawn("line", { x1: x, y1: y, x2: x + dx, y2: y + dy, class: className }),
    drawn("circle", { cx: x + dx, cy: y + dy, r: 6, class: className }),
    drawn("text", { x: x + dx * 1.2, y: y + dy * 1.2 + 5, "text-anchor": "middle" }, name),
  ];
}

function draw({ query, distance, pair }) {
  const i = Number(pair);
  const key = query - distance;
  const turn = frequency(i);
  const [x, y] = [125, 130];
  const shapes = [drawn("circle", { cx: x, cy: y, r: RADIUS, class: "outline" })];
  shapes.push(...arrow(x, y, QUERY + query * turn, "a", "q"), ...arrow(x, y, KEY + key * turn, "b", "k"));
  // The score over all distances, with the chosen one marked.
  const [left, width, middle, height] = [300, 320, 130, 80];
  const at = (d) => [left + (d / 64) * width, middle - height * score(d, 0, i)];
  const line = range(0, 64, 0.25).map((d) => at(d).join(",")).join(" ");
  const [cx, cy] = at(distance);
  shapes.push(
    drawn("line", { x1: left, y1: middle, x2: left + width, y2: middle, class: "outline" }),
    drawn("polyline", { points: line, class: "curve" }),
    drawn("circle", { cx, cy, r: 6, class: "ink" }),
    drawn("text", { x: left, y: 20, class: "head" }, "score of this pair"),
    drawn("text", { x: left + width, y: 250, class: "head", "text-anchor": "end" }, "distance 0 to 64"),
  );
  const value = score(query, key, i).toFixed(3);
  return {
    width: 640,
    height: 262,
    shapes,
    label: `query at ${query}, key at ${key}: score ${value}`,
    says: `Query at position ${query}, key at ${key}: the score is ${value}. This pair rotates by ${Number(turn.toPrecision(3))} rad per position. Move the query: both arrows turn, and the score stays.`,
  };
}

figure("rope-figure", {
  title: "RoPE on one pair of a head of 8 numbers, base 10,000. The key stays at the chosen distance behind the query.",
  sliders: {
    query: { label: "Position of the query", values: range(64, 256), start: 64 },
    distance: { label: "Distance of the key", values: range(0, 64), start: 3 },
  },
  choices: { pair: { label: "Pair", options: { 0: "0", 1: "1", 2: "2", 3: "3" }, start: "0" } },
  draw,
});
