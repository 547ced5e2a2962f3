// DOM helpers. Text from the server or a model only ever becomes a text node; attributes are constants of this page.
export const byId = (id) => document.getElementById(id);

// A child may be an array of nodes: a call with a hundred thousand arguments fails.
export const make = (tag, attributes, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  for (const child of children.flat()) node.append(child);
  return node;
};

export const button = (text, attributes, onClick) => {
  const node = make("button", { type: "button", ...attributes }, text);
  node.addEventListener("click", onClick);
  return node;
};

export const svg = (tag, attributes) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};

// Changes only what differs: a screen reader repeats text that is set again, and a selection would be lost.
export const setText = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

export const setChildren = (node, children) => {
  const same = children.length === node.children.length && children.every((child, i) => node.children[i] === child);
  if (!same) node.replaceChildren(...children);
};

// A bar that is filled to a share of 0 to 1.
export const meter = (share, label) => {
  const node = make("div", { class: "share", role: "img", "aria-label": label }, make("i", {}));
  setShare(node, share);
  return node;
};

export const setShare = (node, share) => {
  node.firstChild.style.width = (100 * Math.max(0, Math.min(1, share || 0))).toFixed(1) + "%";
};

// navigator.clipboard exists on https and localhost only, and this page is also opened over a LAN.
const copyByCommand = (text) => {
  const area = make("textarea", { class: "hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied;
};

export const copyButton = (label, getText) => {
  const node = button("Copy", { class: "small", "aria-label": label }, async () => {
    let isCopied = false;
    try {
      await navigator.clipboard.writeText(getText());
      isCopied = true;
    } catch {
      isCopied = copyByCommand(getText());
    }
    setText(node, isCopied ? "Copied" : "Not copied");
    setTimeout(() => setText(node, "Copy"), 1500);
  });
  return node;
};

export const num = (value) => Math.round(value).toLocaleString("en");

export const short = (value) => {
  if (value >= 10000) return Math.round(value / 1000) + "k";
  if (value >= 100 || value === 0) return String(Math.round(value));
  return value >= 10 ? value.toFixed(1) : value.toFixed(2).replace(/\.?0+$/, "");
};

export const percent = (part, whole) => (whole ? Math.floor((100 * part) / whole) : 0) + " %";

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
