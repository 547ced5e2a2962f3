// Renders texts with the page's markdown.js in a document that only counts, and prints the work of each as JSON.
// Usage: node markdown.mjs MODULE, with a JSON list of texts on standard input.
// A step is a character that a string method looks at or copies. A regular expression counts as many characters as its
// match is long, and a failed one as many as the text has behind its start: its backtracking is not seen.
import { readFileSync } from "node:fs";

let steps = 0;
const original = {};
const count = (name, cost) => {
  const method = (original[name] = String.prototype[name]);
  String.prototype[name] = function (...values) {
    const found = method.apply(this, values);
    steps += cost(this, found, values);
    return found;
  };
};
count("indexOf", (text, found, [, from]) => (found < 0 ? text.length : found) - Math.min(from || 0, text.length) + 1);
count("lastIndexOf", (text, found, [, from]) => Math.min(from ?? text.length, text.length) - Math.max(found, 0) + 1);
for (const name of ["slice", "repeat", "replaceAll"]) count(name, (_text, found) => found.length + 1);
for (const name of ["trim", "trimStart", "replace", "split", "includes"]) count(name, (text) => text.length + 1);
const exec = RegExp.prototype.exec;
RegExp.prototype.exec = function (text) {
  const start = this.sticky ? this.lastIndex : 0, found = exec.call(this, text);
  steps += found ? found.index + found[0].length - start + 1 : this.sticky ? 1 : text.length + 1;
  return found;
};

class Node {
  constructor(tag) {
    Object.assign(this, { tagName: tag.toUpperCase(), childNodes: [] });
    steps += 1;
  }
  setAttribute() {}
  addEventListener() {}
  append(...children) {
    steps += children.length;
    for (const child of children) this.childNodes.push(child);
  }
  get words() {
    return this.childNodes.map((child) => (child instanceof Node ? child.words : child)).join("");
  }
}
globalThis.document = { createElement: (tag) => new Node(tag) };

const shown = (node) => (node instanceof Node ? [node.tagName.toLowerCase(), ...node.childNodes.map(shown)] : node);
const { renderMarkdown } = await import(process.argv[2]);
const answers = JSON.parse(readFileSync(0, "utf8")).map((text) => {
  steps = 0;
  const began = performance.now(), nodes = renderMarkdown(text), num = steps, ms = performance.now() - began;
  return { steps: num, ms, nodes: text.length < 2000 ? nodes.map(shown) : [] };
});
console.log(JSON.stringify(answers));
