// Everything from the server goes into the page as text: strings become text nodes, attributes are our own words.
export const byId = (id) => document.getElementById(id);

export const make = (tag, attributes, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

export const svg = (tag, attributes) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};

// Only what changed: screen readers repeat what is set again, and selections are lost.
export const setText = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

export const num = (value) => Math.round(value).toLocaleString("en");

export const short = (value) => {
  if (value >= 10000) return Math.round(value / 1000) + "k";
  if (value >= 100 || value === 0) return String(Math.round(value));
  return value >= 10 ? value.toFixed(1) : value.toFixed(2).replace(/\.?0+$/, "");
};

export const seconds = (value) => {
  if (value === null || value === undefined) return "–";
  if (value < 1) return Math.round(value * 1000) + " ms";
  return value < 100 ? value.toFixed(1) + " s" : Math.round(value) + " s";
};

export const bytes = (value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return (value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)) + " " + units[unit];
};

export const plural = (count, word) => num(count) + " " + word + (count === 1 ? "" : "s");
