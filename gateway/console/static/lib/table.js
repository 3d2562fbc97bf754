// Tables that are sorted by their headings, filtered by words, and long ones shown in parts.

import { button, freshId, h, put } from './dom.js';
import { emptyBox } from './page.js';

const PART = 100;
const SAME_MS = 60_000; // then times such as `3 min ago` are told anew

/**
 * A table of `rows`. A column is `{title, cell(row), sort(row), numeric, header, hidden, kind}`: `cell` gives a
 * text or nodes, `sort` what rows are ordered by (left out: the column is not sorted by), `kind` a class; a `header`
 * names its row, a `hidden` title is for screen readers, over buttons. `order` is a column's title, with a minus before it for
 * the greatest first. `search(row)` gives the text that a filter looks in. Returns `{element, update(rows)}`.
 */
export function table({ caption, columns, rows, order = '', search = null, empty = 'Nothing yet.', captionShown = false }) {
  const id = freshId('table');
  let sorted = { title: order.replace(/^-/, ''), down: order.startsWith('-') };
  let shown = PART;
  let words = '';
  let drawn = { text: JSON.stringify(rows), at: Date.now() };
  const body = h('tbody', { role: 'rowgroup' });
  const more = h('div', { class: 'table-more' });
  const heads = columns.map((column) => head(column));
  const place = h(
    'div',
    { class: 'table-wrap', tabindex: '0', role: 'region', 'aria-labelledby': id },
    h('table', { role: 'table' }, h('caption', { id, class: captionShown ? '' : 'visually-hidden' }, caption), h('thead', { role: 'rowgroup' }, h('tr', { role: 'row' }, heads)), body),
  );
  const filter = search ? filterBox(caption, (text) => {
    words = text;
    shown = PART;
    draw();
  }) : null;
  const element = h('div', { class: 'table-block' }, filter, place, more);

  function head(column) {
    const props = { scope: 'col', role: 'columnheader', class: column.numeric ? 'numeric' : '' };
    if (!column.sort) return h('th', props, column.hidden ? h('span', { class: 'visually-hidden' }, column.title) : column.title);
    return h('th', props, h('button', { type: 'button', class: 'sort', on: { click: () => sortBy(column) } }, column.title));
  }

  function sortBy(column) {
    sorted = { title: column.title, down: sorted.title === column.title ? !sorted.down : Boolean(column.numeric) };
    draw();
  }

  function visible() {
    const wanted = words.toLowerCase();
    const found = wanted ? rows.filter((row) => search(row).toLowerCase().includes(wanted)) : [...rows];
    const by = columns.find((column) => column.title === sorted.title)?.sort;
    if (by) found.sort((one, other) => compare(by(one), by(other)) * (sorted.down ? -1 : 1));
    return found;
  }

  function draw() {
    columns.forEach((column, i) => {
      if (!column.sort) return;
      heads[i].setAttribute('aria-sort', column.title === sorted.title ? (sorted.down ? 'descending' : 'ascending') : 'none');
    });
    const found = visible();
    put(body, found.slice(0, shown).map((row) => h('tr', { role: 'row' }, columns.map((column) => cell(column, row)))));
    if (!found.length) {
      const nothing = words ? emptyBox('No row has these words.') : typeof empty === 'string' ? emptyBox(empty) : empty;
      put(body, h('tr', { role: 'row' }, h('td', { role: 'cell', colspan: columns.length }, nothing)));
    }
    put(more, found.length > shown ? button(`Show ${Math.min(PART, found.length - shown)} more of ${found.length}`, () => {
      shown += PART;
      draw();
    }, { kind: 'quiet' }) : null);
  }

  draw();
  return {
    element,
    /** Shows other rows. A control that has the focus keeps it, and rows that are the same stay as they are for a while. */
    update(now) {
      const text = JSON.stringify(now);
      if (text === drawn.text && Date.now() - drawn.at < SAME_MS) return;
      drawn = { text, at: Date.now() };
      rows = now;
      const label = body.contains(document.activeElement) ? document.activeElement.getAttribute('aria-label') : null;
      draw();
      if (label) [...body.querySelectorAll('[aria-label]')].find((each) => each.getAttribute('aria-label') === label)?.focus();
    },
  };
}

/** A cell; on a phone, where rows are cards, its column's title stands before it, and roles say what it still is. */
function cell(column, row) {
  if (column.header) return h('th', { scope: 'row', role: 'rowheader' }, column.cell(row));
  const kind = [column.numeric && 'numeric', column.hidden && 'controls', column.kind].filter(Boolean).join(' ');
  return h('td', { role: 'cell', class: kind || null, 'data-title': column.hidden ? null : column.title }, column.cell(row));
}

function compare(one, other) {
  if (typeof one === 'string' || typeof other === 'string') return String(one ?? '').localeCompare(String(other ?? ''));
  return (one ?? -Infinity) - (other ?? -Infinity);
}

function filterBox(caption, onWords) {
  const input = h('input', {
    type: 'search', class: 'filter', placeholder: 'Filter', 'aria-label': `Filter: ${caption}`, autocomplete: 'off', spellcheck: 'false',
    on: { input: (event) => onWords(event.target.value.trim()) },
  });
  return h('div', { class: 'table-tools' }, input);
}
