// Draws the plots described in the page when they come into the window, and ahead of it once the reader scrolls. Colours
// come from the style sheet, so that light, dark and print agree.
const PAPER_WIDTH = 660; // of A4 and of Letter within their margins, at 96 pixels an inch
const AHEAD = "600px";

const NOTHING = {
  text: "None of the chosen ranks is in this plot.", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5,
};

const places = [...document.querySelectorAll(".plot")];
const drawn = new Set();
const waiting = []; // to be drawn next
const widths = new Map(); // of the places, when they were drawn
const whenIdle = window.requestIdleCallback ?? setTimeout;
let descriptions = null;
let isShown = null; // which ranks and hosts, where the reader has chosen some

const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

const scales = {
  "@diverging": () => [[0, color("early")], [0.5, color("middle")], [1, color("late")]],
  "@amount": () => [[0, color("middle")], [1, color("busy")]],
  "@rate": () => [[0, color("late")], [0.7, color("late-soft")], [1, color("busy-1")]],
};

// Only values of keys that name a colour are looked up: a host may be called @wait.
function themed(value, isColor = false) {
  if (typeof value === "string") {
    if (!isColor || value[0] !== "@") return value;
    return scales[value] ? scales[value]() : color(value.slice(1));
  }
  if (Array.isArray(value)) {
    return typeof value[0] === "object" || isColor ? value.map((item) => themed(item, isColor)) : value;
  }
  if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item, /color/.test(key))]));
}

// One byte a value: the signed root of its share of the largest magnitude; -128 is no value.
function unpacked({ bytes, columns, scale }) {
  const codes = Int8Array.from(atob(bytes), (letter) => letter.charCodeAt(0));
  const values = Array.from(codes, (code) =>
    code === -128 ? null : Math.sign(code) * (code / 127) ** 2 * scale);
  const rows = [];
  for (let at = 0; at < values.length; at += columns) rows.push(values.slice(at, at + columns));
  return rows;
}

function axis(given) {
  const grid = { gridcolor: color("rule"), linecolor: color("rule"), tickcolor: color("rule") };
  const base = { zeroline: false, automargin: true, fixedrange: false, ticks: "", ...grid, zerolinecolor: color("muted") };
  const title = given.title ? { ...given.title, font: { size: 12, color: color("muted") }, standoff: 8 } : undefined;
  return { ...base, ...given, title };
}

function figure(plot, width) {
  const layout = {
    autosize: true,
    width: "print" in root.dataset ? PAPER_WIDTH : undefined,
    height: plot.height,
    font: { family: getComputedStyle(document.body).fontFamily, size: width < 500 ? 11 : 12, color: color("ink") },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    showlegend: false,
    hovermode: "closest",
    hoverlabel: { bgcolor: color("paper"), bordercolor: color("muted"), font: { color: color("ink") } },
    // A finger that drags over a plot scrolls the page.
    dragmode: isTouched ? false : "zoom",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("muted"), activecolor: color("ink") },
    ...themed(plot.layout),
  };
  layout.margin = { l: 8, r: 12, t: 12, b: 8, ...plot.layout.margin };
  layout.xaxis = axis(layout.xaxis || {});
  layout.yaxis = axis(layout.yaxis || {});
  return [plot.traces.map(({ z, ...trace }) => ({ ...themed(trace), ...(z ? { z } : {}) })), layout];
}

// Returns the description of a plot, unpacked once, without the rows that the reader does not look for.
function described(name) {
  descriptions ??= JSON.parse(document.getElementById("plot-data").textContent);
  const plot = descriptions[name];
  plot.traces = plot.traces.map(({ packed, ...trace }) => (packed ? { ...trace, z: unpacked(packed) } : trace));
  return isShown && plot.rows ? chosen(plot) : plot;
}

function chosen(plot) {
  const names = plot.rows.filter(([, ...about]) => isShown(about)).map(([name]) => name);
  const known = new Set(names);
  const traces = plot.traces.map((trace) => {
    const num = trace.y.length;
    const at = trace.y.flatMap((name, place) => (known.has(name) ? [place] : []));
    const of = (values) => (Array.isArray(values) && values.length === num ? at.map((place) => values[place]) : values);
    const keys = (trace.z ? ["y", "z"] : ["x", "y", "base", "customdata"]).filter((key) => key in trace);
    return { ...trace, ...Object.fromEntries(keys.map((key) => [key, of(trace[key])])) };
  });
  const yaxis = { ...plot.layout.yaxis, range: [names.length - 0.5, -0.5] };
  return { ...plot, traces, layout: { ...plot.layout, yaxis, ...(names.length ? {} : { annotations: [NOTHING] }) } };
}

function needLibrary() {
  if (window.Plotly) return;
  const script = document.createElement("script");
  script.textContent = unpack("plot-library"); // the policy of the page allows it by its hash
  document.head.append(script);
}

const config = {
  displaylogo: false,
  displayModeBar: isTouched ? false : "hover",
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
};

function draw(place) {
  needLibrary();
  const [traces, layout] = figure(described(place.id), place.clientWidth);
  Plotly.react(place, traces, layout, config);
  drawn.add(place);
  widths.set(place, place.clientWidth);
  resized.observe(place);
  root.dataset.drawn = String(drawn.size);
}

// In the frame in which a width changes: plotly.js itself follows some time after the window.
const resized = new ResizeObserver((entries) => {
  if ("print" in root.dataset) return; // on paper widths are given
  for (const { target } of entries) if (target.clientWidth !== widths.get(target)) draw(target);
});

// What the reader does comes before the next plot.
function drawNext() {
  const place = waiting.shift();
  if (place && !drawn.has(place)) draw(place);
  if (waiting.length) whenIdle(drawNext);
}

function redraw(isMeant = () => true) {
  for (const place of drawn) if (isMeant(descriptions[place.id])) draw(place);
}

// Draws what comes within a margin of the window.
function watch(margin) {
  const observer = new IntersectionObserver((entries) => {
    const near = entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target);
    near.forEach((place) => observer.unobserve(place));
    waiting.push(...near);
    if (near.length && waiting.length === near.length) whenIdle(drawNext);
  }, { rootMargin: `${margin} 0px` });
  for (const place of places) if (!drawn.has(place)) observer.observe(place);
}

// What the window shows at once is drawn before the page counts as loaded: a picture of it has its plots.
function startPlots() {
  root.dataset.drawn = "0";
  for (const place of places) if (place.getBoundingClientRect().top < innerHeight) draw(place);
  watch("0px");
  // Whoever scrolls reads on: from then on plots are drawn ahead.
  addEventListener("scroll", () => watch(AHEAD), { once: true, passive: true });
}

document.addEventListener("hpcpace-theme", () => redraw());
document.addEventListener("hpcpace-choice", ({ detail }) => {
  isShown = detail;
  redraw((plot) => plot.rows);
});
startPlots();
