"use strict";
// The switch of light and dark: as the system has it, or one of them. A page opened from a file may
// be refused a place to keep the choice in.
const themes = ["", "light", "dark"];
const store = {
  get() { try { return localStorage.getItem("flagscale-theme") || "" } catch { return "" } },
  set(value) { try { localStorage.setItem("flagscale-theme", value) } catch { /* for now, then */ } },
};
const button = document.getElementById("theme");
function wear(theme) {
  document.documentElement.dataset.theme = theme;
  button.textContent = `theme: ${theme || "as the system"}`;
}
button.hidden = false;
wear(themes.includes(store.get()) ? store.get() : "");
button.addEventListener("click", () => {
  const next = themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length];
  wear(next);
  store.set(next);
});

// Values under the pointer, or under the place that the arrow keys have gone to.
function share(value, [low, high, log]) {
  return log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
}
function at(part, [low, high, log]) {
  return log ? low * Math.pow(high / low, part) : low + part * (high - low);
}
function nearest(xs, value) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - value) <= Math.abs(xs[high] - value) ? low : high;
}
function told(value) {
  return typeof value === "string" ? value
    : Math.abs(value) >= 1000 && Math.abs(value) < 1e12
      ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : Number(value.toPrecision(5)).toString();
}
function row(text, colour) {
  const made = document.createElement("div");
  made.className = colour === undefined ? "where" : `c${colour}`;
  made.textContent = text;
  return made;
}

class Plot {
  constructor(figure) {
    this.data = JSON.parse(figure.querySelector("script").textContent);
    this.field = figure.querySelector(".field");
    this.cross = figure.querySelector(".cross");
    this.tip = figure.querySelector(".tip");
    this.group = figure.dataset.group;
    this.places = [...new Set(this.data.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    this.x = null;
    const area = figure.querySelector(".area");
    for (const kind of ["pointermove", "pointerdown"]) this.field.addEventListener(kind, (event) => {
      const box = this.field.getBoundingClientRect();
      const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      this.look(at(part, this.data.x));
    });
    this.field.addEventListener("pointerleave", () => this.look(null));
    area.addEventListener("blur", () => this.look(null));
    area.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const last = this.places.length - 1;
    const now = this.x === null ? -1 : nearest(this.places, this.x);
    const far = Math.max(1, Math.round(last / 20));
    const to = {
      ArrowRight: now + 1, ArrowLeft: now < 0 ? last : now - 1, PageDown: now + far,
      PageUp: now - far, Home: 0, End: last,
    }[event.key];
    if (event.key === "Escape") this.look(null);
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.look(this.places[Math.min(last, Math.max(0, to))]);
  }

  // Shows the values at a place here, and where that is on the plots beside it.
  look(x) {
    for (const other of plots) if (other === this || (this.group && other.group === this.group)) other.point(x);
    this.tip.hidden = x === null || !this.places.length;
    if (this.tip.hidden) return;
    this.tip.style.left = "0";
    const found = new Map();
    for (const line of this.data.lines) {
      const ends = [line.x[0], line.x[line.x.length - 1]];
      if (line.faint && (x < ends[0] || x > ends[1])) continue;
      const i = nearest(line.x, x), off = Math.abs(line.x[i] - x);
      const best = found.get(line.label);
      if (!best || off <= best.off) found.set(line.label, { off, x: line.x[i], y: line.y[i], colour: line.colour });
    }
    this.tip.hidden = !found.size;
    if (this.tip.hidden) return;
    const here = [...found.values()].reduce((one, other) => other.off < one.off ? other : one).x;
    this.tip.replaceChildren(row(`${this.data.axis} ${told(here)}`), ...[...found].map(([label, one]) =>
      row(`${label} ${told(one.y)}${one.x === here ? "" : ` at ${told(one.x)}`}`, one.colour)));
    // Beside the place, and within the plot.
    const wide = this.field.clientWidth, own = this.tip.offsetWidth, left = wide * share(x, this.data.x);
    const beside = left > wide / 2 ? left - own - 8 : left + 8;
    this.tip.style.left = `${Math.max(0, Math.min(wide - own, beside))}px`;
  }

  point(x) {
    this.x = x;
    this.tip.hidden = true;
    this.cross.hidden = x === null;
    if (x !== null) this.cross.style.left = `${100 * share(x, this.data.x)}%`;
  }
}
const plots = [...document.querySelectorAll("figure.plot")].map((figure) => new Plot(figure));
