// In a chapter, the trace player is loaded when the reader comes near it, so the page itself stays light.

const near = new IntersectionObserver(
  (seen) => {
    const boxes = seen.filter(({ isIntersecting }) => isIntersecting).map(({ target }) => target);
    for (const box of boxes) {
      near.unobserve(box);
      box.className = "trace-player";
    }
    if (boxes.length === 0) return;
    const href = new URL("../stylesheets/trace.css", import.meta.url).href;
    document.head.append(Object.assign(document.createElement("link"), { rel: "stylesheet", href }));
    import("./trace.js");
  },
  { rootMargin: "1000px" },
);

document$.subscribe(() => document.querySelectorAll(".trace-player-later").forEach((box) => near.observe(box)));
