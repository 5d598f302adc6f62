// What the bench of pages measures in a page, whose tasks of more than 50 ms are noted from its begin on.
window.bench = {
  tasks: [],

  // Whether the page has loaded, and no long task has come for so many milliseconds.
  isQuiet(quiet_ms) {
    const [{ loadEventEnd }] = performance.getEntriesByType("navigation");
    const ends = this.tasks.map(([at, ms]) => at + ms);
    return loadEventEnd > 0 && performance.now() > quiet_ms + Math.max(loadEventEnd, ...ends);
  },

  figures() {
    return JSON.stringify({
      paint: performance.getEntriesByName("first-contentful-paint")[0].startTime,
      loaded: performance.getEntriesByType("navigation")[0].loadEventEnd,
      nodes: document.querySelectorAll("*").length,
      tasks: this.tasks,
    });
  },

  // Milliseconds until the page is read to its end, which draws all plots.
  async read() {
    const begin = performance.now();
    for (const plot of document.querySelectorAll(".plot")) {
      plot.scrollIntoView({ behavior: "instant" });
      await new Promise((resume) => requestAnimationFrame(() => requestAnimationFrame(resume)));
    }
    const num = String(document.querySelectorAll(".plot").length);
    while (document.documentElement.dataset.drawn !== num) await new Promise((resume) => setTimeout(resume, 5));
    return performance.now() - begin;
  },

  // Milliseconds to sort the longest table.
  sort() {
    const tables = [...document.querySelectorAll("table")].filter((table) => table.querySelector(".sort"));
    const [longest] = tables.sort((a, b) => b.rows.length - a.rows.length);
    if (!longest) return 0;
    longest.closest("details")?.setAttribute("open", "");
    document.body.offsetHeight;
    const begin = performance.now();
    longest.querySelector("th:last-child .sort").click();
    document.body.offsetHeight;
    return performance.now() - begin;
  },

  // Milliseconds until the rank that was chosen is shown.
  async choose() {
    const begin = performance.now();
    const input = document.getElementById("choose");
    input.value = "1";
    input.dispatchEvent(new Event("input"));
    while (!document.getElementById("chosen").textContent) await new Promise((resume) => setTimeout(resume, 1));
    return performance.now() - begin;
  },
};
new PerformanceObserver((list) => {
  bench.tasks.push(...list.getEntries().map((task) => [task.startTime, task.duration]));
}).observe({ type: "longtask", buffered: true });
