/* Markdown to nodes. What a model writes becomes text nodes and nothing else, so none of it can become markup. */

const MAX_DEPTH = 8; // of quotes, lists and emphasis inside each other
const MAX_SPAN = 2000; // characters between the marks of emphasis
const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)[ \t#]*$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}>[ ]?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const DELIMITERS = /^[ ]*\|?[ ]*:?-+:?[ ]*(?:\|[ ]*:?-+:?[ ]*)*\|?[ ]*$/;
const BARE_CODE = /^(?:async def|def|class) \w+.*:|^(?:import \w[\w.]*|from [\w.]+ import .*)$|^@[\w.]+(?:\(.*\))?$/;

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/* Shows a growing text: only the blocks that have changed are made anew. */
class MarkdownView {
  constructor(node) {
    this.node = node;
    this.sources = [];
  }

  update(text) {
    const blocks = isBareCode(text) ? [codeBlock(text.trim(), "python", text)] : parseBlocks(text);
    let same = 0;
    while (same < blocks.length && this.sources[same] === blocks[same].source) same++;
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    for (const block of blocks.slice(same)) this.node.append(block.make());
    this.sources = blocks.map((block) => block.source);
  }
}

/* Some models answer with a program, and no fence around it. */
function isBareCode(text) {
  return BARE_CODE.test(text.trimStart().split("\n", 1)[0]) && !/^ {0,3}(```|~~~)/m.test(text);
}

// ---- blocks: each rule looks at lines[i], and returns {end, make} or null

function parseBlocks(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].trim()) {
      i++;
      continue;
    }
    const block = parseBlock(lines, i, depth);
    blocks.push({ source: lines.slice(i, block.end).join("\n"), make: block.make });
    i = block.end;
  }
  return blocks;
}

function parseBlock(lines, i, depth) {
  const rules = [parseFence, parseHeading, parseRule, parseTable, ...(depth < MAX_DEPTH ? [parseQuote, parseList] : [])];
  for (const rule of rules) {
    const block = rule(lines, i, depth);
    if (block) return block;
  }
  return parseParagraph(lines, i);
}

function renderBlocks(text, depth) {
  return parseBlocks(text, depth).map((block) => block.make());
}

function startsBlock(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

function parseParagraph(lines, start) {
  let end = start + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines[end])) end++;
  const text = lines.slice(start, end).join("\n");
  return { end, make: () => el("p", {}, ...inline(text)) };
}

function parseFence(lines, start) {
  const match = lines[start].match(FENCE);
  if (!match) return null;
  const [, indent, mark, language] = match;
  const closing = new RegExp(`^ {0,3}\\${mark[0]}{${mark.length},}\\s*$`);
  let end = start + 1;
  while (end < lines.length && !closing.test(lines[end])) end++;
  const body = lines.slice(start + 1, end).map((line) => line.slice(Math.min(indent.length, line.search(/\S|$/))));
  return { end: Math.min(end + 1, lines.length), make: codeBlock(body.join("\n"), language).make };
}

function codeBlock(code, language, source = code) {
  const copy = el("button", { type: "button", class: "quiet", onclick: (event) => copyText(code, event.currentTarget) });
  copy.append("Copy");
  const make = () =>
    el("div", { class: "code" },
      el("div", { class: "code-head" }, el("span", {}, language || "text"), copy),
      el("pre", { tabindex: "0" }, el("code", {}, ...highlight(code, language))));
  return { source, make };
}

function parseHeading(lines, start) {
  const match = lines[start].match(HEADING);
  // The page has headings of its own above these.
  return match && { end: start + 1, make: () => el(`h${Math.min(6, match[1].length + 2)}`, {}, ...inline(match[2])) };
}

function parseRule(lines, start) {
  return RULE.test(lines[start]) ? { end: start + 1, make: () => el("hr") } : null;
}

function parseQuote(lines, start, depth) {
  if (!QUOTE.test(lines[start])) return null;
  let end = start + 1;
  while (end < lines.length && (QUOTE.test(lines[end]) || (lines[end].trim() && !startsBlock(lines[end])))) end++;
  const text = lines.slice(start, end).map((line) => line.replace(QUOTE, "")).join("\n");
  return { end, make: () => el("blockquote", {}, ...renderBlocks(text, depth + 1)) };
}

function parseList(lines, start, depth) {
  const first = lines[start].match(ITEM);
  if (!first) return null;
  const base = first[1].length, isOrdered = /\d/.test(first[2]), items = [];
  let end = start, width = 0;
  for (; end < lines.length; end++) {
    const line = lines[end], match = line.match(ITEM), indent = line.search(/\S/);
    if (match && match[1].length < base + 2 && match[1].length >= base && !RULE.test(line)) {
      if (/\d/.test(match[2]) !== isOrdered) break;
      width = Math.min(match[0].length, base + 5);
      items.push([line.slice(match[0].length)]);
    } else if (indent < 0) {
      const next = lines.slice(end).find((later) => later.trim());
      if (next === undefined || (next.search(/\S/) <= base && !ITEM.test(next))) break;
      items.at(-1).push("");
    } else if (indent > base) items.at(-1).push(line.slice(Math.min(indent, width)));
    else if (lines[end - 1].trim() && !startsBlock(line)) items.at(-1).push(line);
    else break;
  }
  const number = isOrdered ? parseInt(first[2], 10) : null;
  const make = () => el(isOrdered ? "ol" : "ul", { start: number === 1 ? null : number },
    ...items.map((item) => el("li", {}, ...itemNodes(item.join("\n"), depth + 1))));
  return { end, make };
}

function itemNodes(text, depth) {
  const nodes = renderBlocks(text, depth);
  // A line of a list is no paragraph.
  return nodes.flatMap((node, i) => (node.tagName === "P" && (i === 0 || nodes.length === 1) ? [...node.childNodes] : [node]));
}

function parseTable(lines, start) {
  const [head, delimiters] = [lines[start], lines[start + 1]];
  if (!head.includes("|") || !delimiters || !delimiters.includes("-") || delimiters.length > 500) return null;
  if (!DELIMITERS.test(delimiters) || cells(head).length !== cells(delimiters).length) return null;
  let end = start + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const sides = cells(delimiters).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null);
  const row = (tag, line) => el("tr", {}, ...sides.map((side, i) => el(tag, { class: side }, ...inline(cells(line)[i] ?? ""))));
  const make = () => el("div", { class: "table" }, el("table", {},
    el("thead", {}, row("th", head)), el("tbody", {}, ...lines.slice(start + 2, end).map((line) => row("td", line)))));
  return { end, make };
}

function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));
}

// ---- what is in a line

const TOKEN = /\\[!-/:-@[-`{-~]|`+|!?\[|\*{1,3}|_{1,3}|~~|<https?:\/\/[^\s<>]+>|https?:\/\/[^\s<>"'`*]+/g;
const LINK = /!?\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\([ ]*<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:[ ]+"[^"]*")?[ ]*\)/y;

function inline(text, depth = 0) {
  const nodes = [], tokens = new RegExp(TOKEN);
  let from = 0;
  const put = (start, end, ...made) => {
    if (start > from) nodes.push(text.slice(from, start));
    nodes.push(...made);
    from = tokens.lastIndex = end;
  };
  for (let match; (match = tokens.exec(text)); ) {
    const start = match.index, token = match[0], next = start + token.length;
    if (token[0] === "\\") put(start, next, token[1]);
    else if (token[0] === "`") {
      const end = closingTicks(text, next, token);
      if (end >= 0) put(start, end + token.length, el("code", {}, text.slice(next, end).replace(/^ (.+) $/s, "$1")));
    } else if (token.endsWith("[")) {
      LINK.lastIndex = start;
      const link = LINK.exec(text);
      if (link) put(start, LINK.lastIndex, ...linkNodes(link[2], link[1] || link[2], depth));
    } else if (token[0] === "<") put(start, next, ...linkNodes(token.slice(1, -1), null, depth));
    else if (token[0] === "h") {
      const url = token.replace(/[.,;:!?)\]}]+$/, "");
      put(start, start + url.length, ...linkNodes(url, null, depth));
    } else {
      const end = depth < MAX_DEPTH ? closingMark(text, start, token) : -1;
      if (end >= 0) put(start, end + token.length, emphasis(token, inline(text.slice(next, end), depth + 1)));
    }
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

function closingTicks(text, from, ticks) {
  for (let at = text.indexOf(ticks, from); at >= 0; at = text.indexOf(ticks, at)) {
    let end = at;
    while (text[end] === "`") end++;
    if (end - at === ticks.length) return at;
    at = end;
  }
  return -1;
}

function closingMark(text, start, mark) {
  const next = start + mark.length, isWord = mark[0] === "_";
  if (!/\S/.test(text[next] ?? "") || (isWord && /\w/.test(text[start - 1] ?? ""))) return -1;
  const last = Math.min(text.length, next + MAX_SPAN);
  for (let at = next; at < last; ) {
    if (text[at] === "\\") at += 2;
    else if (text[at] !== mark[0]) at++;
    else {
      let end = at;
      while (text[end] === mark[0]) end++;
      const fits = end - at === mark.length && at > next && /\S/.test(text[at - 1]);
      if (fits && !(isWord && /\w/.test(text[end] ?? ""))) return at;
      at = end;
    }
  }
  return -1;
}

function emphasis(mark, nodes) {
  if (mark === "~~") return el("del", {}, ...nodes);
  if (mark.length === 1) return el("em", {}, ...nodes);
  return mark.length === 2 ? el("strong", {}, ...nodes) : el("strong", {}, el("em", {}, ...nodes));
}

/* A link to a page or an address, and only its words if it is anything else. Pictures are links: nothing is loaded. */
function linkNodes(address, words, depth) {
  const nodes = words === null ? [address] : depth < MAX_DEPTH ? inline(words, MAX_DEPTH) : [words];
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return nodes;
  const flat = nodes.flatMap((node) => (node.tagName === "A" ? [...node.childNodes] : [node]));
  return [el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, ...flat)];
}
