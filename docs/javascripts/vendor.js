// Load a library that the site carries with it, once, and only on pages that need it.

const loading = new Map();

export function vendor(path) {
  if (!loading.has(path)) {
    const url = new URL(`../assets/vendor/${path}`, import.meta.url).href;
    loading.set(path, path.endsWith(".css") ? style(url) : script(url));
  }
  return loading.get(path);
}

function script(url) {
  return new Promise((resolve, reject) => {
    const element = Object.assign(document.createElement("script"), { src: url, onload: resolve, onerror: reject });
    document.head.append(element);
  });
}

function style(url) {
  return new Promise((resolve, reject) => {
    const element = Object.assign(document.createElement("link"), {
      rel: "stylesheet",
      href: url,
      onload: resolve,
      onerror: reject,
    });
    document.head.append(element);
  });
}
