/* Colours for the languages that are met most: comments, strings, numbers, words of the language. */

const HASH_LANGUAGES = ["python", "py", "bash", "sh", "shell", "ruby", "yaml", "toml", "r", "perl"];
const SLASH_LANGUAGES = [
  "javascript", "js", "typescript", "ts", "jsx", "tsx", "c", "cpp", "c++", "java", "go", "rust", "rs", "swift", "kotlin",
  "json", "css", "cs", "php", "scala",
];
const KEYWORDS = new Set(
  ("and as assert async await break case catch class const continue def default del do elif else enum except export " +
    "extends false False finally fn for from func function global if impl import in interface is lambda let match mut " +
    "namespace new nil None nonlocal not null or package pass pub public private protected raise return self static " +
    "struct super switch this throw True true try type typeof use var void while with yield fi then done echo").split(" "),
);
const STRING = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^])*'?`;
const REST = String.raw`|(?<number>\b\d[\w.]*)|(?<word>[A-Za-z_]\w*)`;
const HASH_TOKENS = new RegExp(`(?<comment>#[^\\n]*)|(?<string>${STRING})${REST}`, "g");
const SLASH_TOKENS = new RegExp(
  `(?<comment>//[^\\n]*|/\\*[^]*?(?:\\*/|$))|(?<string>${STRING}|\`(?:[^\`\\\\]|\\\\[^])*\`?)${REST}`, "g",
);
const MOST_COLOURED = 30000; // characters

function highlight(code, language) {
  const name = language.toLowerCase();
  const tokens = HASH_LANGUAGES.includes(name) ? HASH_TOKENS : SLASH_LANGUAGES.includes(name) ? SLASH_TOKENS : null;
  if (!tokens || code.length > MOST_COLOURED) return [code];
  const nodes = [];
  let from = 0;
  for (const match of code.matchAll(tokens)) {
    const { word } = match.groups;
    const kind = word === undefined ? Object.keys(match.groups).find((key) => match.groups[key] !== undefined)
      : KEYWORDS.has(word) ? "keyword" : code[match.index + word.length] === "(" ? "call" : null;
    if (!kind) continue;
    nodes.push(code.slice(from, match.index), el("span", { class: `c-${kind}` }, match[0]));
    from = match.index + match[0].length;
  }
  nodes.push(code.slice(from));
  return nodes;
}
