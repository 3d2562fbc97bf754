// Plots of a few series over days or moments, as columns on each other or as lines: drawn in SVG, walked through with
// the arrow keys, and with the same numbers as a table behind. They know no API.

import { freshId, h, put, svg } from './dom.js';
import { compact } from './format.js';

const HEIGHT = 220;
const MARGIN = { top: 10, right: 8, bottom: 24, left: 52 };
const COLOURS = 8;
const LABEL_PX = 64;

/**
 * A figure. `labels` name the places on the x axis, `short(label)` and `full(label)` say them; a series is
 * `{name, values}` with a number or null for each label. `kind` is `columns` or `lines`; `format` writes a value, `unit`
 * what it counts.
 */
export function plot({ title, labels, series, unit, kind = 'columns', short = String, full = short, format = compact }) {
  const stacked = kind === 'columns';
  const totals = labels.map((_, i) => sum(series.map(({ values }) => values[i] ?? 0)));
  const top = Math.max(...(stacked ? totals : series.flatMap(({ values }) => values.map((value) => value ?? 0))), 0);
  const tip = h('div', { class: 'plot-tip', role: 'status' });
  const hint = freshId('plot');
  const area = h('div', { class: 'plot-area', tabindex: '0', role: 'img', 'aria-label': summary(), 'aria-describedby': hint });
  let pointed = -1;
  let width = 0;

  function summary() {
    if (!labels.length || top === 0) return `${title}: nothing.`;
    const highest = totals.indexOf(Math.max(...totals));
    return `${title}, from ${full(labels[0])} to ${full(labels.at(-1))}. The most is ${format(totals[highest])} ${unit} on ${full(labels[highest])}.`;
  }

  function draw() {
    if (!width) return;
    const inner = { width: Math.max(40, width - MARGIN.left - MARGIN.right), height: HEIGHT - MARGIN.top - MARGIN.bottom };
    const ticks = niceTicks(top);
    const y = (value) => MARGIN.top + inner.height * (1 - value / ticks.at(-1));
    const step = inner.width / Math.max(1, labels.length);
    const x = (i) => MARGIN.left + step * (i + 0.5);
    put(area, svg('svg', { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, 'aria-hidden': 'true', focusable: 'false' },
      ticks.map((tick) => [
        svg('line', { class: 'plot-grid', x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
        svg('text', { class: 'plot-label', x: MARGIN.left - 8, y: y(tick) + 4, 'text-anchor': 'end' }, format(tick)),
      ]),
      labelled(labels.length, Math.max(1, Math.ceil(LABEL_PX / step))).map((i) =>
        svg('text', { class: 'plot-label', x: x(i) > width - LABEL_PX / 2 ? width : x(i), y: HEIGHT - 6, 'text-anchor': x(i) > width - LABEL_PX / 2 ? 'end' : 'middle' }, short(labels[i]))),
      pointed < 0 ? null : svg('rect', { class: 'plot-pointed', x: x(pointed) - step / 2, y: MARGIN.top, width: step, height: inner.height }),
      stacked ? columns(x, y, step) : lines(x, y),
    ));
  }

  function columns(x, y, step) {
    const wide = Math.max(1, Math.min(step * 0.76, 44));
    return labels.flatMap((_, i) => {
      let below = 0;
      return series.map(({ values }, s) => {
        const value = values[i] ?? 0;
        if (!value) return null;
        const rect = svg('rect', {
          class: colour(s), x: x(i) - wide / 2, width: wide, y: y(below + value), height: Math.max(0.5, y(below) - y(below + value)), rx: 1,
        });
        below += value;
        return rect;
      });
    });
  }

  function lines(x, y) {
    return series.map(({ values }, s) => {
      let path = '';
      values.forEach((value, i) => {
        if (value === null || value === undefined) return;
        const before = values[i - 1];
        path += `${before === null || before === undefined ? 'M' : 'L'}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
      });
      const at = pointed >= 0 ? values[pointed] : null;
      return [
        svg('path', { class: `plot-line ${colour(s)}`, d: path }),
        at === null || at === undefined ? null : svg('circle', { class: colour(s), cx: x(pointed), cy: y(at), r: 4 }),
      ];
    });
  }

  function point(i) {
    const now = labels.length ? Math.max(-1, Math.min(labels.length - 1, i)) : -1;
    if (now === pointed) return;
    pointed = now;
    draw();
    if (pointed < 0) return put(tip);
    const rows = series.map((each, s) => ({ ...each, s, value: each.values[pointed] ?? 0 })).filter(({ value }) => value).sort((a, b) => b.value - a.value);
    put(tip,
      h('p', { class: 'plot-tip-head' }, h('strong', {}, full(labels[pointed])), h('span', {}, stacked ? ` ${format(totals[pointed])} ${unit}` : '')),
      rows.length ? h('ul', {}, rows.map(({ name, value, s }) => h('li', {}, swatch(s), h('span', {}, name), h('b', {}, format(value))))) : h('p', {}, 'Nothing'),
    );
    const share = (pointed + 0.5) / labels.length;
    tip.classList.toggle('left', share > 0.55);
    tip.style.setProperty('--at', `${MARGIN.left + (width - MARGIN.left - MARGIN.right) * share}px`);
  }

  area.addEventListener('pointermove', (event) => {
    const inside = event.clientX - area.getBoundingClientRect().left - MARGIN.left;
    point(inside < 0 ? -1 : Math.floor((inside / (width - MARGIN.left - MARGIN.right)) * labels.length));
  });
  area.addEventListener('pointerleave', () => point(-1));
  area.addEventListener('blur', () => point(-1));
  area.addEventListener('keydown', (event) => {
    const to = { ArrowRight: pointed + 1, ArrowLeft: Math.max(0, pointed < 0 ? labels.length - 1 : pointed - 1), Home: 0, End: labels.length - 1, Escape: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    point(to);
  });
  new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now === width) return;
    width = now;
    draw();
  }).observe(area);

  return h('figure', { class: 'plot', 'aria-label': title },
    series.length > 1 ? legend(series) : null,
    h('div', { class: 'plot-place' }, area, tip),
    h('p', { class: 'visually-hidden', id: hint }, 'The arrow keys go from one to the next.'),
    behind({ title, labels, series, full, format, totals: stacked && series.length > 1 ? totals : null }),
  );
}

/** The greatest series, and what all the others come to as one. `values` are added up for that. */
export function greatest(series, most = COLOURS - 1) {
  const sorted = [...series].sort((one, other) => sum(other.values) - sum(one.values));
  if (sorted.length <= most + 1) return sorted;
  const rest = sorted.slice(most);
  const values = rest[0].values.map((_, i) => sum(rest.map((each) => each.values[i] ?? 0)));
  return [...sorted.slice(0, most), { name: `${rest.length} others`, values }];
}

function legend(series) {
  return h('ul', { class: 'plot-legend' }, series.map(({ name }, s) => h('li', {}, swatch(s), name)));
}

function behind({ title, labels, series, full, format, totals }) {
  const place = h('div');
  const fill = () => put(place, h('div', { class: 'table-wrap', tabindex: '0', role: 'region', 'aria-label': `${title}, as a table` }, h('table', {},
    h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, ''), series.map(({ name }) => h('th', { scope: 'col', class: 'numeric' }, name)), totals ? h('th', { scope: 'col', class: 'numeric' }, 'Together') : null)),
    h('tbody', {}, labels.map((label, i) => h('tr', {}, h('th', { scope: 'row' }, full(label)),
      series.map(({ values }) => h('td', { class: 'numeric' }, format(values[i] ?? 0))), totals ? h('td', { class: 'numeric' }, format(totals[i])) : null))),
  )));
  return h('details', { class: 'help', on: { toggle: (event) => event.target.open && !place.childNodes.length && fill() } }, h('summary', {}, 'As a table'), place);
}

/** A bar that shows how much of something is there. `level` is `good`, `warn` or `bad`. */
export function meter({ value, most, label, level = 'good' }) {
  const part = most > 0 ? Math.max(0, Math.min(1, value / most)) : 0;
  const bar = h('div', { class: `meter-bar ${level}` });
  bar.style.setProperty('width', `${100 * part}%`);
  return h('div', { class: 'meter', role: 'meter', 'aria-label': label, 'aria-valuemin': '0', 'aria-valuemax': '100', 'aria-valuenow': Math.round(100 * part) }, bar);
}

const colour = (s) => `series-${Math.min(s, COLOURS - 1) + 1}`;
const swatch = (s) => h('i', { class: `swatch ${colour(s)}` });
const sum = (values) => values.reduce((total, value) => total + value, 0);

/** The places that get a label, so far apart, the last one among them. */
function labelled(count, apart) {
  const places = [];
  for (let i = count - 1; i >= 0; i -= apart) places.push(i);
  return places;
}

/** Round numbers from 0 to at least `top`. */
function niceTicks(top) {
  if (top <= 0) return [0, 1];
  const rough = top / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((each) => each * power >= rough) * power;
  return Array.from({ length: Math.ceil(top / step) + 1 }, (_, i) => i * step);
}
