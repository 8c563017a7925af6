// The three requests of chapter 07 under three policies: A and B decode, C arrives with a long prompt.

import { drawn, figure, range } from "./figure.js";

const NO_LIMIT = 99;
const ROWS = ["A", "B", "C"];

// Each policy divides a step among requests: `pending` tokens of each, oldest first; 1 is a decode.
export const POLICIES = {
  separate: (pending) => pending.map((n) => (n > 1 === pending.some((other) => other > 1) ? n : 0)),
  mixed(pending, budget) {
    let left = budget - pending.filter((n) => n === 1).length;
    return pending.map((n) => {
      if (n === 1) return 1;
      const share = Math.max(0, Math.min(n, left));
      left -= share;
      return share;
    });
  },
};

// The tokens that each step computes of each request, as [name, tokens, is_prompt].
export function run(policy, budget, promptOfC) {
  const trio = { A: [0, 3, 5], B: [0, 2, 3], C: [2, promptOfC, 2] }; // arrival, prompt, output
  const pending = new Map();
  const left = Object.fromEntries(ROWS.map((name) => [name, trio[name][2]]));
  const inPrompt = new Set(ROWS);
  const steps = [];
  while (ROWS.some((name) => left[name] > 0)) {
    for (const name of ROWS) if (trio[name][0] === steps.length) pending.set(name, trio[name][1]);
    const names = [...pending.keys()];
    const shares = POLICIES[policy]([...pending.values()], budget);
    steps.push(names.map((name, i) => [name, shares[i], inPrompt.has(name)]).filter(([, n]) => n > 0));
    for (const [name, n] of steps.at(-1)) {
      pending.set(name, pending.get(name) - n);
      if (pending.get(name) > 0) continue;
      inPrompt.delete(name); // a token is sampled
      left[name] -= 1;
      if (left[name] > 0) pending.set(name, 1);
      else pending.delete(name);
    }
  }
  return steps;
}

export const cost = (step) => 3 + step.reduce((sum, [, n]) => sum + n, 0);

// A's longest wait between two tokens, C's for its first, and the end of all.
export function waits(steps) {
  let now = 0;
  let arrival = 0;
  let first = null;
  const ends = [];
  steps.forEach((step, i) => {
    if (i === 2) arrival = now;
    now += cost(step);
    if (step.some(([name]) => name === "A")) ends.push(now);
    const ofC = step.find(([name]) => name === "C");
    const stillPrompt = steps.slice(i + 1).some((later) => later.some(([name, , isPrompt]) => name === "C" && isPrompt));
    if (first === null && ofC && !stillPrompt) first = now;
  });
  return { pause: Math.max(...ends.slice(1).map((end, i) => end - ends[i])), first: first - arrival, end: now };
}

function draw({ policy, budget, prompt }) {
  const steps = run(policy, budget, prompt);
  const { pause, first, end } = waits(steps);
  const scale = 600 / Math.max(42, end);
  const shapes = ROWS.map((name, row) => drawn("text", { x: 0, y: row * 40 + 24 }, name));
  let now = 0;
  for (const step of steps) {
    const [x, width] = [30 + now * scale, cost(step) * scale];
    for (const [name, n, isPrompt] of step) {
      const row = ROWS.indexOf(name);
      shapes.push(drawn("rect", { x, y: row * 40 + 4, width: width - 2, height: 30, class: `${"abc"[row]}${isPrompt ? " pale" : ""}` }));
      shapes.push(drawn("text", { x: x + width / 2 - 1, y: row * 40 + 24, "text-anchor": "middle", class: isPrompt ? "" : "on" }, String(n)));
    }
    now += cost(step);
  }
  return {
    width: 640,
    height: 124,
    shapes,
    label: `${steps.length} steps; A's longest stall ${pause}, C's first token after ${first}, all done at ${end}`,
    says: `A's longest wait between two tokens is ${pause} units of time, C waits ${first} for its first token, and everything ends at ${end}.`,
  };
}

figure("trio-figure", {
  title: "Three requests; a step costs 3 units of time and 1 for each token. Pale bars are prompts; numbers are tokens.",
  sliders: {
    budget: { label: "Token budget of a step", values: [...range(4, 16), NO_LIMIT], start: NO_LIMIT, show: (value) => (value === NO_LIMIT ? "no limit" : String(value)) },
    prompt: { label: "Tokens of C's prompt", values: range(2, 30), start: 10 },
  },
  choices: { policy: { label: "Policy", options: { separate: "prefill or decode (no budget)", mixed: "mixed batches" }, start: "separate" } },
  draw,
});
