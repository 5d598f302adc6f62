// Tables that can be sorted, narrowed down to some ranks or hosts, and saved.
const IN_BASE = { ns: 1e-6, us: 1e-3, ms: 1, s: 1e3, B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, "%": 1, "": 1 };
const BASES = { ns: "ms", us: "ms", ms: "ms", s: "ms", B: "bytes", kB: "bytes", MB: "bytes", GB: "bytes", TB: "bytes" };
const QUANTITY = /^±?([+-]?\d[\d.]*(?:e[+-]?\d+)?)\s*(ns|us|ms|s|B|kB|MB|GB|TB|%|)(?: to .*)?$/;
const FORMULA = /^[=+\-@\t\r]/;
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const NONE = new Set(["", "?", "\u2013", "-"]);
const words = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

// Returns the number that a cell shows, in the base unit of what it is; null if it shows none.
function amount(text) {
  const found = QUANTITY.exec(text);
  return found ? Number(found[1]) * IN_BASE[found[2]] : null;
}

// What a cell says, without the buttons in it.
function textOf(cell) {
  return [...cell.childNodes].map((node) => (node.nodeName === "BUTTON" ? "" : node.textContent)).join("").trim();
}

function compare(left, right) {
  if (NONE.has(left) && NONE.has(right)) return 0;
  const [a, b] = [amount(left), amount(right)];
  return a !== null && b !== null ? a - b : words.compare(left, right);
}

function sort(table, column) {
  const heads = [...table.tHead.rows[0].cells];
  const isDown = heads[column].ariaSort === "ascending";
  heads.forEach((head, place) => { head.ariaSort = place !== column ? "none" : isDown ? "descending" : "ascending"; });
  const rows = [...table.tBodies[0].rows].map((row) => [textOf(row.cells[column]), row]);
  // What is not known comes last either way.
  rows.sort(([a], [b]) => NONE.has(a) - NONE.has(b) || (isDown ? -1 : 1) * compare(a, b));
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

function makeSortable(table) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.ariaSort = "none";
    head.append(button("", `Sort by ${head.textContent}`, () => sort(table, column)));
    head.lastChild.className = "sort";
    head.addEventListener("click", (event) => {
      if (!event.target.closest("a, button")) sort(table, column);
    });
  });
}

// Returns the rows of a table as CSV. A column of one kind of quantity has its unit in the head and numbers below.
function csvOf(table) {
  const heads = [...table.tHead.rows[0].cells].map(textOf);
  const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map(textOf));
  heads.forEach((head, column) => {
    const cells = rows.map((row) => row[column]).filter((cell) => !NONE.has(cell));
    const units = new Set(cells.map((cell) => (cell.includes(" to ") ? null : QUANTITY.exec(cell)?.[2] ?? null)));
    const bases = new Set([...units].map((unit) => (unit === null ? null : BASES[unit] ?? unit)));
    const [base] = bases;
    for (const row of rows) if (NONE.has(row[column])) row[column] = "";
    if (bases.size !== 1 || !base) return;
    heads[column] = `${head} (${base})`;
    for (const row of rows) if (row[column]) row[column] = String(Number(amount(row[column]).toPrecision(6)));
  });
  return [heads, ...rows].map((row) => `${row.map(csvCell).join(",")}\n`).join("");
}

// A cell that a spreadsheet could take for a formula has a ' in front, as in the tables of the scripts.
function csvCell(text) {
  const cell = FORMULA.test(text) && !NUMBER.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell;
}

function narrow(isShown) {
  for (const row of document.querySelectorAll("tr[data-ranks], tr[data-hosts]")) {
    row.hidden = isShown !== null && !isShown([row.dataset.ranks ?? "", row.dataset.hosts ?? ""]);
  }
}

for (const table of document.querySelectorAll("table")) {
  if (table.tBodies[0].rows.length > 2) makeSortable(table);
  const name = table.caption.textContent.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 50).replace(/^-|-$/g, "");
  table.caption.append(" ", button("CSV", `Save as CSV: ${table.caption.textContent}`, () =>
    save(`hpcpace-${name}.csv`, csvOf(table), "text/csv")));
}
document.addEventListener("hpcpace-choice", ({ detail }) => narrow(detail));
