// Markdown of a model's answer as DOM nodes: headings, lists, quotes, tables, code, emphasis and links.
// HTML is not interpreted: all text becomes text nodes. A link must be http or https. An image becomes a link.
// Every scan is linear in the text, since an answer is rendered again while it grows. So a regular expression has nothing
// behind a repetition that could fail and make it try shorter ones.
import { copyButton, make } from "./dom.js";

const MAX_DEPTH = 6; // of lists and quotes in each other, and of emphasis
const MAX_COLUMNS = 40; // of a table
const PUNCTUATION = "\\`*_{}[]()#+-.!|~<>\"'&$%,/:;=?@^";
const FENCE = /^( {0,3})(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?![^ \t])/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +(?=\S)|$)/;
const URL_HERE = /https?:\/\/[^\s<>"'`\])}*]+/y;
const URL_END = ".,;:!?"; // not part of an address at its end

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

const safeUrl = (text) => {
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
};

const link = (url, children) =>
  make("a", { href: url, rel: "noopener noreferrer nofollow", target: "_blank", title: url }, children);

// Finds closing marks, and remembers which have none: a text of openers must not be searched to its end for each.
class Inline {
  constructor(text, depth, hasLinks) {
    const searches = { missing: new Set(), ticks: null, bracket: -1, opener: -1, noUrl: 0 };
    Object.assign(this, { text, depth, hasLinks, at: 0, plain: "", nodes: [], ...searches });
  }

  flush() {
    if (this.plain) this.nodes.push(this.plain);
    this.plain = "";
  }

  add(node, end) {
    this.flush();
    this.nodes.push(node);
    this.at = end;
    return true;
  }

  inner(start, end, hasLinks = this.hasLinks) {
    return new Inline(this.text.slice(start, end), this.depth + 1, hasLinks).parse();
  }

  runLength(at) {
    let end = at;
    while (this.text[end] === this.text[at]) end += 1;
    return end - at;
  }

  // Where runs of so many backticks start, the last first. The text is read once, not for each length.
  ticksOf(size) {
    if (!this.ticks) {
      this.ticks = new Map();
      for (let at = this.text.lastIndexOf("`"); at >= 0; at = at ? this.text.lastIndexOf("`", at - 1) : -1) {
        const end = at + 1;
        while (this.text[at - 1] === "`") at -= 1;
        if (!this.ticks.has(end - at)) this.ticks.set(end - at, []);
        this.ticks.get(end - at).push(at);
      }
    }
    return this.ticks.get(size) || [];
  }

  code() {
    const size = this.runLength(this.at), start = this.at + size, ticks = this.ticksOf(size);
    while (ticks.length && ticks[ticks.length - 1] < start) ticks.pop();
    if (ticks.length) {
      const end = ticks.pop(), inside = this.text.slice(start, end);
      const isPadded = inside.startsWith(" ") && inside.endsWith(" ") && !isBlank(inside);
      return this.add(make("code", {}, isPadded ? inside.slice(1, -1) : inside), end + size);
    }
    this.plain += this.text.slice(this.at, start);
    this.at = start;
    return true;
  }

  // A mark opens before text and closes behind it; an underscore inside a word is a letter.
  emphasis() {
    const { text, at } = this, letter = text[at], size = Math.min(this.runLength(at), 3);
    const mark = letter.repeat(size), start = at + size;
    const tags = letter === "~" ? { 2: ["del"] } : { 1: ["em"], 2: ["strong"], 3: ["strong", "em"] };
    const opens = tags[size] && /\S/.test(text[start] || " ") && !(letter === "_" && /\w/.test(text[at - 1] || " "));
    if (opens && this.depth < MAX_DEPTH && !this.missing.has(mark)) {
      for (let end = text.indexOf(mark, start); end >= 0; end = text.indexOf(mark, end)) {
        const found = this.runLength(end);
        const closes = found === size && /\S/.test(text[end - 1]) && !(letter === "_" && /\w/.test(text[end + size] || " "));
        if (closes && end > start) {
          const node = tags[size].reduceRight((children, tag) => [make(tag, {}, children)], this.inner(start, end))[0];
          return this.add(node, end + size);
        }
        end += found;
      }
      this.missing.add(mark);
    }
    const length = this.runLength(at);
    this.plain += text.slice(at, at + length);
    this.at = at + length;
    return true;
  }

  // [text](address "title"), and ![text](address), which loads nothing.
  bracketed() {
    const { text } = this, open = text[this.at] === "!" ? this.at + 1 : this.at;
    if (this.bracket !== Infinity && this.bracket < open) {
      const found = text.indexOf("](", open);
      this.bracket = found < 0 ? Infinity : found;
      this.opener = found < 0 ? -1 : text.lastIndexOf("[", found);
    }
    const middle = this.bracket;
    if (middle === Infinity || this.opener !== open || !this.hasLinks) return false;
    const address = /[^\s()]*(?:\([^\s()]*\)[^\s()]*)*/y;
    address.lastIndex = middle + 2;
    const url = address.exec(text)[0];
    const rest = /(?:[ \t]+"[^"\n]*")?\)/y;
    rest.lastIndex = middle + 2 + url.length;
    const safe = rest.test(text) ? safeUrl(url) : null;
    if (!safe) return false;
    const children = this.inner(open + 1, middle, false);
    return this.add(link(safe, children.length ? children : [safe]), rest.lastIndex);
  }

  bareUrl() {
    if (!this.hasLinks || this.at < this.noUrl || /\w/.test(this.text[this.at - 1] || " ")) return false;
    URL_HERE.lastIndex = this.at;
    const found = URL_HERE.exec(this.text);
    if (!found) return false;
    let size = found[0].length;
    while (URL_END.includes(found[0][size - 1])) size -= 1;
    const url = found[0].slice(0, size), safe = safeUrl(url);
    this.noUrl = this.at + found[0].length; // what follows in these characters is part of the address, good or bad
    return Boolean(safe) && this.add(link(safe, [url]), this.at + size);
  }

  special(letter) {
    if (letter === "\\" && this.text[this.at + 1] && PUNCTUATION.includes(this.text[this.at + 1])) {
      this.plain += this.text[this.at + 1];
      this.at += 2;
      return true;
    }
    if (letter === "`") return this.code();
    if (letter === "*" || letter === "_" || letter === "~") return this.emphasis();
    if (letter === "[" || (letter === "!" && this.text[this.at + 1] === "[")) return this.bracketed();
    return letter === "h" && this.bareUrl();
  }

  parse() {
    while (this.at < this.text.length) {
      const letter = this.text[this.at];
      if (this.special(letter)) continue;
      this.plain += letter;
      this.at += 1;
    }
    this.flush();
    return this.nodes;
  }
}

const inline = (text) => new Inline(text, 0, true).parse();

const codeBlock = (text, language) => {
  const head = make("div", { class: "code-head" }, make("span", {}, language || "text"), copyButton("Copy code", () => text));
  return make("div", { class: "code" }, head, make("pre", { tabindex: "0" }, make("code", {}, text)));
};

const splitRow = (line) => {
  const cells = [""];
  const text = line.trim().replace(/^\|/, "").replace(/([^\\])\|$/, "$1");
  for (let i = 0; i < text.length; i += 1) {
    if (text[i] === "\\" && text[i + 1] === "|") {
      cells[cells.length - 1] += "|";
      i += 1;
    } else if (text[i] === "|") cells.push("");
    else cells[cells.length - 1] += text[i];
  }
  return cells.map((cell) => cell.trim());
};

// Indent, mark and language of the line that begins a block of code, or null.
const fenceOf = (line) => {
  const found = FENCE.exec(line), info = found && line.slice(found[0].length);
  return found && !info.includes("`") ? [found[1], found[2], info] : null;
};

const columnsOf = (lines, at) => {
  if (!lines[at].includes("|") || at + 1 >= lines.length) return 0;
  const marks = splitRow(lines[at + 1]);
  const isTable = marks.every((mark) => /^:?-+:?$/.test(mark)) && marks.length === splitRow(lines[at]).length;
  return isTable && marks.length <= MAX_COLUMNS ? marks.length : 0;
};

const startsBlock = (lines, at) => {
  const line = lines[at];
  return fenceOf(line) !== null || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || columnsOf(lines, at) > 0;
};

// Each takes the lines and where its block begins, and returns the node and the line behind the block.
const fence = (lines, at, [indent, mark, info]) => {
  let end = at + 1;
  const isEnd = (line) => indentOf(line) < 4 && line.trim().length >= mark.length && line.trim() === mark[0].repeat(line.trim().length);
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const body = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indentOf(line), indent.length)));
  return [codeBlock(body.join("\n"), info.trim().split(/\s/)[0].slice(0, 30)), end + 1];
};

const quote = (lines, at, depth) => {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [make("blockquote", {}, blocks(inside, depth + 1)), end];
};

const table = (lines, at, numColumns) => {
  const row = (line, tag) => {
    const cells = splitRow(line).slice(0, numColumns);
    return make("tr", {}, cells.map((cell) => make(tag, {}, inline(cell))));
  };
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  const node = make("table", {}, make("thead", {}, row(lines[at], "th")), make("tbody", {}, body));
  return [make("div", { class: "table", tabindex: "0" }, node), end];
};

// An item goes on while lines are indented by two or more than its mark; deeper lists are lines of the item.
const list = (lines, at, depth) => {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isNumbered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    const isMine = found && Math.abs(found[1].length - indent.length) < 2 && /\d/.test(found[2]) === isNumbered && !RULE.test(lines[end]);
    if (!isMine) break;
    const inside = [lines[end].slice(found[0].length)];
    const deep = found[1].length + 2;
    end += 1;
    while (end < lines.length && (indentOf(lines[end]) >= deep || (isBlank(lines[end]) && end + 1 < lines.length && indentOf(lines[end + 1]) >= deep))) {
      inside.push(lines[end].slice(Math.min(indentOf(lines[end]), Math.max(deep, found[0].length))));
      end += 1;
    }
    const [first, ...others] = blocks(inside, depth + 1);
    const head = first && first.tagName === "P" ? [...first.childNodes] : first ? [first] : [];
    items.push(make("li", {}, head, others));
    if (end + 1 < lines.length && isBlank(lines[end]) && ITEM.test(lines[end + 1])) end += 1;
  }
  return [make(isNumbered ? "ol" : "ul", isNumbered ? { start: String(parseInt(mark, 10)) } : {}, items), end];
};

const paragraph = (lines, at) => {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !startsBlock(lines, end)) end += 1;
  return [make("p", {}, inline(lines.slice(at, end).map((line) => line.trim()).join("\n"))), end];
};

const block = (lines, at, depth) => {
  const line = lines[at];
  const fenced = fenceOf(line);
  if (fenced) return fence(lines, at, fenced);
  const heading = HEADING.exec(line);
  if (heading) return [make("h" + Math.min(6, heading[1].length + 2), {}, inline(line.slice(heading[0].length).trim())), at + 1];
  if (RULE.test(line)) return [make("hr", {}), at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  const numColumns = columnsOf(lines, at);
  return numColumns ? table(lines, at, numColumns) : paragraph(lines, at);
};

const blocks = (lines, depth) => {
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [node, end] = block(lines, at, depth);
    nodes.push(node);
    at = end;
  }
  return nodes;
};

export const renderMarkdown = (text) => blocks(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0);
