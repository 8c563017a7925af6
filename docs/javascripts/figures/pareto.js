// The tokens per second of a machine against those of each user, by batch size. Experiment 21 recorded them. The page
// has them as a table (docs/pareto.py), and the figure takes its place.

import { drawn, figures, number } from "./figure.js";

const [WIDTH, HEIGHT] = [640, 440];
const [LEFT, RIGHT, TOP, BOTTOM] = [84, WIDTH - 40, 40, HEIGHT - 70]; // of the plot
const MOST_TICKS = 7;

// The curves of a table: a body for each, and a row for each batch size.
export function curvesOf(box) {
  return [...box.querySelectorAll("tbody")].map((body) => ({
    name: body.dataset.curve,
    points: [...body.querySelectorAll("[data-batch-size]")].map(({ dataset }) => {
      const [size, machine] = [Number(dataset.batchSize), Number(dataset.rate)];
      return { size, machine, user: machine / size };
    }),
  }));
}

// A logarithmic axis around some values: its ends and its ticks, which are 1, 2, or 5 times a power of ten.
export function axis(values) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const marks = [];
  for (let power = Math.floor(Math.log10(least)) - 1; power <= Math.ceil(Math.log10(most)) + 1; power += 1) marks.push(...[1, 2, 5].map((digit) => Number(`${digit}e${power}`)));
  const [first, last] = [marks.findLast((mark) => mark < least), marks.find((mark) => mark > most)];
  const ticks = marks.filter((mark) => mark >= first && mark <= last);
  return { first, last, ticks: ticks.length > MOST_TICKS ? ticks.filter((mark) => Number.isInteger(Math.log10(mark))) : ticks };
}

export const share = ({ first, last }, value) => Math.log(value / first) / Math.log(last / first);

// What `figures` builds in a box that has a table.
export function describe(box) {
  const curves = curvesOf(box);
  const points = curves.flatMap((curve) => curve.points);
  const sizes = [...new Set(points.map((point) => point.size))].sort((a, b) => a - b);
  const [users, machines] = [axis(points.map(({ user }) => user)), axis(points.map(({ machine }) => machine))];
  const x = (user) => LEFT + share(users, user) * (RIGHT - LEFT);
  const y = (machine) => BOTTOM - share(machines, machine) * (BOTTOM - TOP);
  const letter = (i) => String.fromCharCode(65 + i);
  const color = (i) => "abc"[i % 3];

  const axes = [
    ...users.ticks.flatMap((tick) => [
      drawn("line", { x1: x(tick), x2: x(tick), y1: TOP, y2: BOTTOM, class: "grid" }),
      drawn("text", { x: x(tick), y: BOTTOM + 26, "text-anchor": "middle", class: "muted" }, number(tick)),
    ]),
    ...machines.ticks.flatMap((tick) => [
      drawn("line", { x1: LEFT, x2: RIGHT, y1: y(tick), y2: y(tick), class: "grid" }),
      drawn("text", { x: LEFT - 8, y: y(tick) + 6, "text-anchor": "end", class: "muted" }, number(tick)),
    ]),
    drawn("text", { x: 0, y: 18, class: "head" }, "tokens/s of the machine"),
    drawn("text", { x: RIGHT, y: HEIGHT - 8, "text-anchor": "end", class: "head" }, "tokens/s of each user"),
  ];

  function draw({ size }) {
    const shapes = [...axes];
    // All points of this batch size lie on a diagonal, because the machine's rate is that of all users together.
    const [from, to] = [Math.max(users.first, machines.first / size), Math.min(users.last, machines.last / size)];
    if (from < to) shapes.push(drawn("line", { x1: x(from), y1: y(from * size), x2: x(to), y2: y(to * size), class: "outline" }));
    const lines = curves.map(({ name, points: own }, i) => {
      shapes.push(drawn("polyline", { points: own.map((point) => `${x(point.user)},${y(point.machine)}`).join(" "), class: color(i) }));
      for (const point of own) shapes.push(drawn("circle", { cx: x(point.user), cy: y(point.machine), r: point.size === size ? 10 : 4, class: color(i) }));
      shapes.push(drawn("text", { x: x(own[0].user) + 14, y: y(own[0].machine) + 6 }, letter(i)));
      const found = own.find((point) => point.size === size);
      const rates = found ? `${number(found.machine)} tokens/s together, ${number(found.user)} tokens/s for each user, ${number(1000 / found.user)} ms between tokens` : "not measured";
      return `${letter(i)} (${name}): ${rates}.`;
    });
    const head = `With a batch size of ${size}, whose points lie on the gray line:`;
    return { width: WIDTH, height: HEIGHT, shapes, label: [head, ...lines].join(" "), says: [head, ...lines].join("\n") };
  }

  return {
    title: "Each dot is a batch size: farther right, each user is faster; farther up, the machine is. Both axes are logarithmic.",
    sliders: { size: { label: "Batch size (requests at once)", values: sizes, start: sizes[Math.floor(sizes.length / 2)] } },
    draw,
  };
}

figures("pareto-figure", describe);
