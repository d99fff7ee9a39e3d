// Tables that stay readable on a phone: below 700 px each row becomes a card, with the column's name beside each value.

import { html } from "./ui.js";

export function Table({ title, caption, head, rows, empty = "Nothing here now.", children }) {
  return html`<section class="table" aria-label=${title}>
    <h2>${title}${caption && html` <span class="soft">${caption}</span>`}</h2>
    ${children}
    ${!rows.length ? html`<p class="soft">${empty}</p>` : html`<table>
      <thead><tr>${head.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr>${row.map((cell, i) => html`<td data-name=${head[i]}>${cell}</td>`)}</tr>`)}</tbody>
    </table>`}
  </section>`;
}

/** Two lines in one cell: what matters, and what explains it. */
export function Cells({ first, second }) {
  return html`<span class="cells"><span>${first}</span>${second && html`<span class="soft">${second}</span>`}</span>`;
}
