// What the reader can do with the page: choose ranks, colours and what to save, copy commands, read what a term means.
const THEMES = { light: "not all", dark: "all" };
const dark = document.getElementById("dark");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  return dark.media === "all" || (dark.media !== "not all" && prefersDark.matches);
}

function setTheme(name) {
  dark.media = THEMES[name] ?? "(prefers-color-scheme: dark)";
  const shown = document.getElementById("theme");
  shown.textContent = isDark() ? "Light" : "Dark";
  shown.setAttribute("aria-label", `Use ${isDark() ? "light" : "dark"} colours`);
  document.dispatchEvent(new Event("hpcpace-theme"));
}

function choose(text) {
  const rows = [...document.querySelectorAll("tr[data-ranks], tr[data-hosts]")];
  const hosts = new Set(rows.flatMap((row) => (row.dataset.hosts ?? "").toLowerCase().split(" ")));
  const isShown = matcher(text, hosts);
  document.dispatchEvent(new CustomEvent("hpcpace-choice", { detail: isShown }));
  const ranks = new Set(rows.flatMap((row) => row.dataset.ranks ?? []));
  const found = new Set(rows.flatMap((row) => (row.hidden ? [] : row.dataset.ranks ?? [])));
  document.getElementById("chosen").textContent = isShown ? `${found.size} of ${ranks.size} ranks` : "";
}

// Pages that are files have no clipboard in some browsers.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}

// What of a line can be pasted: without its remark, and without the dots that stand for the rest of the user's own
// command. Nothing of a line that is no command.
function commandOf(line) {
  if (line.startsWith("#SBATCH ")) return line;
  const command = line.replace(/(^|\s+)# .*$/, "").replace(/\s+\.\.\.$/, "");
  return /\.\.\.|\bRUN\b/.test(command) ? "" : command;
}

function addCopyButtons() {
  for (const line of document.querySelectorAll("td.command, code")) {
    const text = commandOf(line.textContent);
    if (!text) continue;
    const made = button("Copy", `Copy ${text}`, async () => {
      made.textContent = (await copy(text)) ? "Copied" : "Not copied";
      made.focus();
      setTimeout(() => { made.textContent = "Copy"; }, 2000);
    });
    made.className = "copy";
    if (line.tagName === "TD") line.append(made);
    else if (!line.closest("td.command")) line.after(made);
  }
}

// Shows what a term means where the pointer or the keyboard is; its link leads to the same in the glossary.
function explainTerms() {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.role = "tooltip";
  tip.hidden = true;
  document.body.append(tip);
  const hide = () => { tip.hidden = true; };
  for (const term of document.querySelectorAll("a.term")) {
    const show = () => {
      tip.textContent = document.querySelector(`${term.getAttribute("href")} + dd`).textContent;
      tip.hidden = false;
      const at = term.getBoundingClientRect();
      const isBelow = at.bottom + tip.offsetHeight + 12 < innerHeight;
      tip.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${isBelow ? at.bottom + 6 : at.top - tip.offsetHeight - 6}px`;
    };
    term.setAttribute("aria-describedby", "tip");
    term.addEventListener("mouseenter", show);
    term.addEventListener("focus", show);
    term.addEventListener("mouseleave", hide);
    term.addEventListener("blur", hide);
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  addEventListener("scroll", hide, { passive: true });
}

function startControls() {
  const search = document.getElementById("choose");
  let timer = 0;
  search?.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => choose(search.value), 120);
  });
  document.getElementById("theme").addEventListener("click", () => {
    const name = isDark() ? "light" : "dark";
    kept.set("theme", name);
    setTheme(name);
  });
  document.getElementById("save-summary").addEventListener("click", (event) =>
    save(event.currentTarget.dataset.name, unpack("summary-json"), "application/json"));
  prefersDark.addEventListener("change", () => setTheme(kept.get("theme")));
  setTheme(kept.get("theme"));
  for (const tools of document.querySelectorAll(".tools")) tools.hidden = false;
  addCopyButtons();
  explainTerms();
}

const MOST_ROWS_ON_PAPER = 200; // of a table that the reader left closed

const closed = new Set();
addEventListener("beforeprint", () => {
  root.dataset.print = "";
  for (const details of document.querySelectorAll("details:not([open])")) {
    if (details.querySelectorAll("tr").length > MOST_ROWS_ON_PAPER) continue;
    closed.add(details);
    details.open = true;
  }
  places.forEach(draw);
});
addEventListener("afterprint", () => {
  delete root.dataset.print;
  for (const details of closed) details.open = false;
  closed.clear();
  redraw();
});
startControls();
