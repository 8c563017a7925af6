// Prediction boxes: the reader commits to a number; ours, and the reason for it, are shown only then.
// The number stays in the reader's browser.

const MAGNITUDE = { k: 1e3, M: 1e6, G: 1e9, T: 1e12 };

const storageKey = (name) => `prediction/${name}`; // a name is unique in the book: chapter, slash, question

// "1200", "1,200", "1.2e3", "1.2k" and "3/4" are numbers; anything else is NaN.
export function parseNumber(text) {
  const compact = text.trim().replace(/[\s_]/g, "");
  const plain = /^-?\d{1,3}(,\d{3})+(\.\d+)?$/.test(compact) ? compact.replaceAll(",", "") : compact;
  const fraction = plain.match(/^([^/]+)\/([^/]+)$/);
  if (fraction) return parseNumber(fraction[1]) / parseNumber(fraction[2]);
  const suffix = plain.match(/^(.*\d)([kMGT])$/);
  if (suffix) return Number(suffix[1]) * MAGNITUDE[suffix[2]];
  return plain === "" ? NaN : Number(plain);
}

export function formatNumber(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e9 || size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  return value.toLocaleString("en-US", { maximumSignificantDigits: size >= 1e4 ? 6 : 4 });
}

const singular = (unit) => (/^[a-z]{3,}s$/i.test(unit) ? unit.slice(0, -1) : unit);
const withUnit = (value, unit) => formatNumber(value) + (unit === "%" ? "%" : ` ${value === 1 ? singular(unit) : unit}`);

function verdict(guess, answer, tolerance) {
  if (guess === answer) return "Exactly our number.";
  if (guess === 0 || answer === 0 || guess > 0 !== answer > 0) return "";
  const ratio = guess / answer;
  const factor = ratio > 1 ? ratio : 1 / ratio;
  const near = tolerance > 1 ? (factor <= tolerance ? "Close enough: within" : "Further off than") + ` a factor of ${tolerance}.` : "";
  const size = factor < 1.005 ? "Within 1% of ours." : `${ratio > 1 ? "Yours is" : "Ours is"} ${formatNumber(Number(factor.toPrecision(3)))} × ${ratio > 1 ? "ours" : "yours"}.`;
  return `${size} ${near}`;
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// The form of a question, in its box and in its comparison, as long as no number is given.
function form(box) {
  const { name, unit = "" } = box.dataset;
  const id = `${box.className.split(" ")[0]}-${name.replace("/", "-")}`;
  const input = element("input", { id, type: "text", inputMode: "decimal", autocomplete: "off", size: 12 });
  const refusal = element("p", { className: "prediction-refusal" });
  refusal.setAttribute("role", "alert");
  const made = element(
    "form",
    { className: "prediction-form" },
    element("label", { htmlFor: id, textContent: "Your prediction" }),
    element("span", { className: "prediction-field" }, input, element("span", { className: "prediction-unit", textContent: unit })),
    element("button", { type: "submit", className: "md-button md-button--primary", textContent: "Commit" }),
    refusal,
  );
  made.addEventListener("submit", (event) => {
    event.preventDefault();
    const isNumber = Number.isFinite(parseNumber(input.value));
    input.setAttribute("aria-invalid", String(!isNumber));
    refusal.textContent = isNumber ? "" : "Give a number, such as 1200, 1.2e3 or 1.2k.";
    if (!isNumber) return;
    localStorage.setItem(storageKey(name), input.value);
    showAll();
  });
  return made;
}

function withdraw(name) {
  localStorage.removeItem(storageKey(name));
  showAll();
}

// The box that asks. The first number stays: another takes its place only after it has been withdrawn.
function showPrediction(box, guess) {
  const { name, unit = "", why = "" } = box.dataset;
  const answer = Number(box.dataset.answer);
  const rows = element(
    "dl",
    {},
    element("dt", { textContent: "Yours" }),
    element("dd", { textContent: withUnit(guess, unit) }),
    element("dt", { textContent: "Ours" }),
    element("dd", { textContent: withUnit(answer, unit) }),
  );
  const text = verdict(guess, answer, Number(box.dataset.tolerance));
  box.result.replaceChildren(
    rows,
    element("p", { className: "prediction-verdict", textContent: text }),
    element("p", { textContent: why }),
    element("button", { type: "button", className: "prediction-withdraw", textContent: "Withdraw your prediction", onclick: () => withdraw(name) }),
  );
}

// The table further down, closed until a number is given: the number takes the row of the reader.
function showComparison(box, guess) {
  box.querySelector("details").open = true;
  const cells = box.querySelectorAll(".comparison-yours td");
  cells[1].textContent = withUnit(guess, box.dataset.unit);
  const measured = Number(box.dataset.measured);
  const ratio = Number((guess / measured).toPrecision(3));
  const text = guess === measured ? "equal to the measurement" : `× ${formatNumber(ratio)} of the measurement`;
  if (cells[2] && measured > 0) cells[2].textContent = text;
}

function showAll() {
  for (const box of document.querySelectorAll(".prediction, .comparison[data-name]")) {
    const isQuestion = box.classList.contains("prediction");
    const kind = isQuestion ? "prediction" : "comparison";
    if (!box.classList.contains(`${kind}-ready`)) {
      box.classList.add(`${kind}-ready`);
      box.form = form(box);
      box.result = element("div", { className: "prediction-result" });
      box.result.setAttribute("aria-live", "polite");
      if (isQuestion) box.append(box.form, box.result);
      else box.querySelector("details").before(box.form);
    }
    const kept = localStorage.getItem(storageKey(box.dataset.name));
    box.classList.toggle(`${kind}-given`, kept !== null);
    box.form.hidden = kept !== null;
    if (isQuestion) for (const fold of document.querySelectorAll(`.nb-fold[data-name="${box.dataset.name}"]`)) fold.open = kept !== null;
    if (kept === null) {
      box.result.replaceChildren();
      if (!isQuestion) box.querySelector("details").open = false;
    } else if (isQuestion) showPrediction(box, parseNumber(kept));
    else showComparison(box, parseNumber(kept));
  }
}

document$.subscribe(showAll);
