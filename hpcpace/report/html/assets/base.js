// What the other scripts share: unpacking, files to save, and what the reader has chosen.
const root = document.documentElement;
const isTouched = matchMedia("(pointer: coarse)").matches;

// Returns the text of a compressed part of the page, at once: printing cannot wait.
function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  return new TextDecoder().decode(fflate.gunzipSync(bytes));
}

function save(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function button(text, label, onClick) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", onClick);
  return made;
}

// Some browsers keep nothing for pages that are files.
const kept = {
  get(name) {
    try { return localStorage.getItem(`hpcpace-${name}`); } catch { return null; }
  },
  set(name, value) {
    try { localStorage.setItem(`hpcpace-${name}`, value); } catch { /* it holds until the page is closed */ }
  },
};

// What the reader looks for: `3`, `8-15` and `n3` are a rank, a range of ranks and a host; any of them will do.
function matcher(text, hosts) {
  const tests = text.toLowerCase().split(/[\s,]+/).filter(Boolean).map((word) => {
    const range = /^(\d+)(?:-(\d+))?$/.exec(word);
    const [low, high] = range ? [Number(range[1]), Number(range[2] ?? range[1])] : [Infinity, -Infinity];
    const isWhole = hosts.has(word);
    return ([ranks, host]) => {
      const [first, last] = ranks.split("-").map(Number);
      if (ranks && first <= high && (last ?? first) >= low) return true;
      return host.toLowerCase().split(" ").some((name) => (isWhole ? name === word : !range && name.includes(word)));
    };
  });
  return tests.length ? (about) => tests.some((test) => test(about)) : null;
}
