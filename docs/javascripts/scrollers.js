// Whatever is wider than its box can be scrolled by keyboard.

const SCROLLERS = ".nb-out, .nb-scroll, .diagram, .step, .comparison, .katex-display, .md-typeset__scrollwrap";

const mark = () => {
  for (const box of document.querySelectorAll(SCROLLERS)) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
};

document$.subscribe(() => {
  mark();
  new ResizeObserver(mark).observe(document.body);
});
