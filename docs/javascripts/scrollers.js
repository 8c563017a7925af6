// Whatever is wider than its box can be scrolled by keyboard. The theme's button on each piece of code is no landmark.

const SCROLLERS = ".nb-out, .nb-scroll, .diagram, .step, .comparison, .katex-display, .md-typeset__scrollwrap, .highlight > pre";

const mark = () => {
  for (const box of document.querySelectorAll(SCROLLERS)) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
};

const unmark = () => {
  for (const buttons of document.querySelectorAll(".md-code__nav")) buttons.setAttribute("role", "none");
};

document$.subscribe(() => {
  mark();
  unmark();
  new MutationObserver(unmark).observe(document.body, { childList: true, subtree: true });
  new ResizeObserver(mark).observe(document.body);
});
