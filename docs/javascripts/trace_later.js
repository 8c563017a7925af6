// In a chapter, the trace player is loaded when the reader asks for it, so the page itself stays light.

function load(box) {
  box.className = "trace-player";
  const href = new URL("../stylesheets/trace.css", import.meta.url).href;
  document.head.append(Object.assign(document.createElement("link"), { rel: "stylesheet", href }));
  import("./trace.js");
}

document$.subscribe(() => {
  for (const box of document.querySelectorAll(".trace-player-later")) {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "md-button", textContent: "Show the recording" });
    button.addEventListener("click", () => load(box));
    box.replaceChildren(button);
  }
});
