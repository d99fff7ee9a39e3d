// Charts as SVG: time series with a cursor, histograms and bars by day. Every chart has its figures as text too.

import { duration, number, percent } from "./format.js";
import { html, useRef, useState } from "./ui.js";

const WIDTH = 480, HEIGHT = 130, LEFT = 46, BOTTOM = 20, TOP = 8;
const time = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hour12: false });

/** The smallest of 1, 2, 5 × 10ⁿ that is not below the value: where an axis ends. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

/** `lines`: [{name, values}] over the same `times` (Unix seconds); null is a gap. */
export function TimeSeries({ title, times, lines, format = number, max }) {
  const svg = useRef();
  const [at, setAt] = useState(null);
  const top = max ?? ceiling(Math.max(0, ...lines.flatMap((line) => line.values.map((value) => value ?? 0))));
  const begin = times[0], end = times.at(-1);
  const x = (t) => LEFT + ((WIDTH - LEFT - 6) * (t - begin)) / Math.max(1, end - begin);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(1, value / top));
  const follow = (event) => {
    const box = svg.current.getBoundingClientRect();
    const t = begin + ((((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - 6)) * (end - begin);
    setAt(times.reduce((best, value, i) => (Math.abs(value - t) < Math.abs(times[best] - t) ? i : best), 0));
  };
  const shown = at === null || at >= times.length ? times.length - 1 : at;
  const legend = lines.map((line, i) => html`<span class=${`key c${i}`}><i></i>${line.name} <b>${format(line.values[shown])}</b></span>`);
  return html`<figure class="chart">
    <figcaption><b>${title}</b><span class="legend">${legend}</span></figcaption>
    ${times.length < 2 ? html`<p class="soft empty">Figures appear here within half a minute.</p>` : html`
    <svg ref=${svg} viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`${title}, the last hour: ${lines.map((line) => `${line.name} now ${format(line.values.at(-1))}`).join(", ")}`}
      onPointerMove=${follow} onPointerLeave=${() => setAt(null)}>
      ${[0, 0.5, 1].map((part) => html`<line class="grid" x1=${LEFT} x2=${WIDTH - 6} y1=${y(top * part)} y2=${y(top * part)} />
        <text x=${LEFT - 6} y=${y(top * part) + 4} text-anchor="end">${format(top * part)}</text>`)}
      <text x=${LEFT} y=${HEIGHT - 5}>${time.format(begin * 1000)}</text>
      <text x=${WIDTH - 6} y=${HEIGHT - 5} text-anchor="end">${time.format(times[shown] * 1000)}</text>
      ${lines.map((line, i) => html`<path class=${`line c${i}`} d=${path(times, line.values, x, y)} />`)}
      ${at !== null && html`<line class="cursor" x1=${x(times[shown])} x2=${x(times[shown])} y1=${TOP} y2=${HEIGHT - BOTTOM} />`}
    </svg>`}
  </figure>`;
}

function path(times, values, x, y) {
  let drawn = "", open = false;
  values.forEach((value, i) => {
    if (value != null) drawn += `${open ? "L" : "M"}${x(times[i]).toFixed(1)} ${y(value).toFixed(1)}`;
    // A point between two gaps is a dot: a line of no length with round ends.
    if (value != null && !open && values[i + 1] == null) drawn += "h.01";
    open = value != null;
  });
  return drawn;
}

/** How often values fall into logarithmic bins, four to a factor of ten. */
export function Histogram({ title, values, format = duration }) {
  const bin = (value) => Math.floor(4 * Math.log10(Math.max(value, 0.1)));
  const bins = new Map();
  for (const value of values) bins.set(bin(value), (bins.get(bin(value)) ?? 0) + 1);
  const first = Math.min(...bins.keys()), last = Math.max(...bins.keys());
  const bars = values.length ? Array.from({ length: last - first + 1 }, (_, i) => ({ name: format(10 ** ((first + i) / 4)), parts: [bins.get(first + i) ?? 0] })) : [];
  return html`<${Bars} title=${title} bars=${bars} names=${["requests"]} format=${number} />`;
}

/** `bars`: [{name, parts}], parts stacked in the order of `names`. */
export function Bars({ title, bars, names, format = number }) {
  const top = ceiling(Math.max(0, ...bars.map((bar) => bar.parts.reduce((sum, part) => sum + part, 0))));
  const step = Math.min(56, (WIDTH - LEFT - 6) / Math.max(1, bars.length));
  const scale = (HEIGHT - TOP - BOTTOM) / top;
  const every = Math.ceil((bars.length * 46) / (WIDTH - LEFT));
  return html`<figure class="chart">
    <figcaption><b>${title}</b>${names.length > 1 && html`<span class="legend">${names.map((name, i) => html`<span class=${`key c${i}`}><i></i>${name}</span>`)}</span>`}</figcaption>
    ${!bars.length ? html`<p class="soft empty">Nothing yet.</p>` : html`
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`${title}: ${bars.map((bar) => `${bar.name} ${bar.parts.map(format).join(" + ")}`).join(", ")}`}>
      ${[0, 0.5, 1].map((part) => html`<line class="grid" x1=${LEFT} x2=${WIDTH - 6} y1=${HEIGHT - BOTTOM - top * part * scale} y2=${HEIGHT - BOTTOM - top * part * scale} />
        <text x=${LEFT - 6} y=${HEIGHT - BOTTOM - top * part * scale + 4} text-anchor="end">${format(top * part)}</text>`)}
      ${bars.map((bar, i) => {
        let base = HEIGHT - BOTTOM;
        return html`<g><title>${`${bar.name}: ${bar.parts.map((part, n) => `${format(part)} ${names[n]}`).join(", ")}`}</title>
          ${bar.parts.map((part, n) => html`<rect class=${`bar c${n}`} x=${LEFT + i * step + 1} width=${Math.max(1, step - 2)} y=${(base -= part * scale)} height=${part * scale} />`)}
          ${i % every === 0 && html`<text x=${LEFT + i * step + step / 2} y=${HEIGHT - 5} text-anchor="middle">${bar.name}</text>`}</g>`;
      })}
    </svg>`}
  </figure>`;
}

/** A share between 0 and 1 as a small bar with its figure. */
export function Meter({ share, text }) {
  if (share == null) return html`<span class="soft">–</span>`;
  return html`<span class="meter"><progress max="1" value=${Math.min(1, share)} class=${share > 0.9 ? "high" : ""}></progress><span>${text ?? percent(share)}</span></span>`;
}
