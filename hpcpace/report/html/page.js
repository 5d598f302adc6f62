"use strict";
// Draws the plots described in the page. Colours come from the style sheet, so that light, dark and print agree.
(() => {
  const root = document.documentElement;
  const plots = JSON.parse(document.getElementById("plot-data").textContent);
  const drawn = new Map();

  const PAPER_WIDTH = 660; // of A4 and of Letter within their margins, at 96 pixels an inch

  const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  const scales = {
    "@diverging": () => [[0, color("early")], [0.5, color("middle")], [1, color("late")]],
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
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("muted"), activecolor: color("ink") },
      ...themed(plot.layout),
    };
    layout.margin = { l: 8, r: 12, t: 12, b: 8, ...plot.layout.margin };
    layout.xaxis = axis(layout.xaxis || {});
    layout.yaxis = axis(layout.yaxis || {});
    const traces = plot.traces.map(({ packed, ...trace }) => ({ ...themed(trace), ...(packed ? { z: packed } : {}) }));
    return [traces, layout];
  }

  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: matchMedia("(pointer: coarse)").matches ? false : "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };

  async function draw(element) {
    const [traces, layout] = figure(drawn.get(element), element.clientWidth);
    await Plotly.react(element, traces, layout, config);
  }

  async function drawAll() {
    for (const element of drawn.keys()) await draw(element);
  }

  async function start() {
    for (const element of document.querySelectorAll(".plot")) {
      const plot = plots[element.id];
      for (const trace of plot.traces) if (trace.packed) trace.packed = unpacked(trace.packed);
      drawn.set(element, plot);
      await draw(element);
      // The verdict stays usable while the plots below it are drawn.
      await new Promise((resume) => setTimeout(resume, 0));
    }
    root.dataset.drawn = String(drawn.size);
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("beforeprint", () => {
    root.dataset.print = "";
    for (const details of document.querySelectorAll("details")) details.open = true;
    drawAll();
  });
  addEventListener("afterprint", () => {
    delete root.dataset.print;
    drawAll();
  });
  start();
})();
