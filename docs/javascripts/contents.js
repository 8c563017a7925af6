// The contents of a chapter on narrow screens: the bar names the section that is being read, and closes once one is chosen.

document$.subscribe(() => {
  const contents = document.querySelector(".chapter-contents");
  if (!contents) return;
  const summary = contents.querySelector("summary");
  const links = [...contents.querySelectorAll("a")];
  const headings = links.map((link) => document.getElementById(decodeURIComponent(link.hash.slice(1))));

  const name = () => {
    const reading = headings.findLastIndex((heading) => heading?.getBoundingClientRect().top < 140);
    summary.textContent = reading < 0 ? "In this chapter" : links[reading].textContent;
    links.forEach((link, i) => (i === reading ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  };
  contents.addEventListener("click", (event) => {
    if (event.target.closest("a")) contents.open = false;
  });
  contents.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    contents.open = false;
    summary.focus();
  });
  let waiting = false;
  addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      name();
    });
  }, { passive: true });
  name();
});
