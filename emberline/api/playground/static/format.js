// Figures as people read them.

const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 1, notation: "compact" });

export const number = (value) => (value == null ? "–" : NUMBER.format(value));

export const percent = (share) => (share == null ? "–" : `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`);

export function bytes(n) {
  if (n == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; n >= 1024 && at < units.length - 1; at++) n /= 1024;
  return `${n.toFixed(at && n < 100 ? 1 : 0)} ${units[at]}`;
}

export function duration(ms) {
  if (ms == null) return "–";
  if (ms < 1000) return `${ms.toFixed(ms > 0 && ms < 10 ? 1 : 0)} ms`;
  return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
}

export function age(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86_400)} days`;
}
