// Wakes and other moves of models as a timeline: a row for each model, a bar for each move, and the same as a table.

import { gatewayNow } from '../../lib/clock.js';
import { h, put, svg } from '../../lib/dom.js';
import { field } from '../../lib/form.js';
import { decimal, duration, number } from '../../lib/format.js';
import { emptyBox, statCard } from '../../lib/page.js';
import { table } from '../../lib/table.js';

const MOVES = '/client/v4/operator/moves';
const SPANS = [['300', '5 minutes'], ['1800', '30 minutes'], ['7200', '2 hours'], ['86400', 'a day']];
const KINDS = { wake: ['Wakes', 'from memory', 1], start: ['Starts', 'from disk', 2], sleep: ['Sleeps', 'to memory', 3], end: ['Ends', 'to disk', 7] };
const EVERY_S = 3;
const LIMIT = 500;
const ROW = 30;
const TOP = 24;
const ROWS_MAX = 40;

export function show(page) {
  const asked = { span: SPANS.some(([key]) => key === page.query.get('span')) ? page.query.get('span') : '1800', kind: '' };
  const totals = h('div', { class: 'grid' });
  const picture = h('section', { class: 'card' });
  const rows = h('section', { class: 'card flush' });
  const span = field({ name: 'span', label: 'The last', type: 'select', options: SPANS, value: asked.span });
  const kind = field({ name: 'kind', label: 'Moves', type: 'select', options: [['', 'All'], ...Object.entries(KINDS).map(([key, [title, way]]) => [key, `${title} (${way})`])] });
  span.control.addEventListener('change', () => { asked.span = span.control.value; page.remember({ span: asked.span }); reload(); });
  kind.control.addEventListener('change', () => { asked.kind = kind.control.value; reload(); });
  page.append(
    h('p', { class: 'lead' }, 'When models came and went between disk, memory and devices, as this gateway saw it since it started.'),
    h('div', { class: 'toolbar' }, span.element, kind.element), totals, picture, rows,
  );
  let list = null;
  let latest = { moves: [], now: gatewayNow() };
  const reload = page.load(rows, async (signal) => {
    const now = gatewayNow();
    const since = new Date(now - 1000 * Number(asked.span)).toISOString();
    const moves = await page.api.get(MOVES, { query: { since, limit: LIMIT, kind: asked.kind }, signal });
    latest = { moves, now };
    put(totals, cards(moves));
    draw();
    if (list) return void list.update(moves);
    list = moveTable(moves);
    return list.element;
  });
  const draw = () => drawTimeline(picture, latest.moves, latest.now, Number(asked.span));
  page.every(EVERY_S, () => reload({ quietly: true }));
  const observer = new ResizeObserver(() => draw());
  observer.observe(picture);
  page.signal.addEventListener('abort', () => observer.disconnect(), { once: true });
}

function cards(moves) {
  const waking = moves.filter(({ kind, seconds, problem }) => (kind === 'wake' || kind === 'start') && seconds !== null && !problem).map(({ seconds }) => seconds).sort((a, b) => a - b);
  const failed = moves.filter(({ problem }) => problem).length;
  return [
    statCard('Moves', moves.length >= LIMIT ? `${number(LIMIT)} and more` : number(moves.length), moves.length >= LIMIT ? 'the newest are shown' : 'in this time'),
    statCard('Typical wake', waking.length ? `${decimal(waking[Math.floor(waking.length / 2)])} s` : '–', 'the median'),
    statCard('Longest wake', waking.length ? `${decimal(waking.at(-1))} s` : '–', 'to a device'),
    statCard('Did not arrive', number(failed), failed ? 'the table says why' : 'none'),
  ];
}

function drawTimeline(place, moves, now, spanS) {
  const models = [...new Set(moves.map(({ model }) => model))].sort().slice(0, ROWS_MAX);
  if (!models.length) return put(place, h('h2', {}, 'Timeline'), emptyBox('Nothing moved in this time.', 'Models move when more are asked for than the devices hold.'));
  const width = Math.max(260, Math.floor(place.clientWidth) - 32);
  const left = width < 560 ? 0 : Math.min(260, Math.max(...models.map((model) => model.length)) * 7 + 12);
  const name = left ? 0 : 14; // on a phone a model's name stands above its row
  const row = ROW + name;
  const height = TOP + models.length * row + 4;
  const begin = now - 1000 * spanS;
  const x = (at) => left + (width - left) * Math.max(0, Math.min(1, (at - begin) / (now - begin)));
  const ticks = Array.from({ length: width < 560 ? 3 : 6 }, (_, i, all) => begin + ((now - begin) * i) / (width < 560 ? 2 : 5));
  const bars = moves.filter(({ model }) => models.includes(model)).map((move) => bar(move, models.indexOf(move.model), { x, now, row, name }));
  put(place, h('h2', {}, 'Timeline'), legend(),
    svg('svg', { class: 'timeline', viewBox: `0 0 ${width} ${height}`, width, height, role: 'img', 'aria-label': `${moves.length} moves of ${models.length} models in the last ${duration(spanS)}; the table below has each.` },
      ticks.map((at, i) => [
        svg('line', { class: 'plot-grid', x1: x(at), x2: x(at), y1: TOP - 4, y2: height }),
        svg('text', { class: 'plot-label', x: x(at), y: 13, 'text-anchor': i === 0 ? 'start' : i === ticks.length - 1 ? 'end' : 'middle' }, clock(at, spanS)),
      ]),
      models.map((model, i) => svg('text', { class: 'plot-label', x: 0, y: TOP + i * row + (name ? 11 : ROW / 2 + 4) }, model)),
      bars));
}

function bar(move, at, { x, now, row, name }) {
  const from = Date.parse(move.began);
  const to = move.seconds === null ? now : from + 1000 * move.seconds;
  const words = `${move.kind} of ${move.model}, ${clock(from, 0)}: ${length(move)}${move.problem ? `; ${move.problem}` : ''}`;
  return svg('rect', {
    class: `series-${KINDS[move.kind][2]}${move.problem ? ' failed' : ''}${move.seconds === null ? ' under-way' : ''}`,
    x: x(from), y: TOP + at * row + name + 6, width: Math.max(3, x(to) - x(from)), height: ROW - 12, rx: 2,
  }, svg('title', {}, words));
}

const legend = () => h('ul', { class: 'plot-legend' }, Object.values(KINDS).map(([title, way, colour]) => h('li', {}, h('i', { class: `swatch series-${colour}` }), `${title} ${way}`)));
const clock = (at, spanS) => new Date(at).toLocaleTimeString('en-GB', spanS > 3600 ? { hour: '2-digit', minute: '2-digit' } : {});
const length = ({ seconds }) => (seconds === null ? 'under way' : `${decimal(seconds)} s`);

function moveTable(moves) {
  return table({
    caption: 'Moves', rows: moves, order: '', search: (move) => `${move.model} ${move.machine} ${move.kind} ${move.problem}`, empty: emptyBox('Nothing moved in this time.'),
    columns: [
      { title: 'Began', sort: (move) => move.began, cell: (move) => h('span', { title: move.began }, new Date(move.began).toLocaleTimeString('en-GB')) },
      { title: 'Model', header: true, sort: (move) => move.model, cell: (move) => h('span', { class: 'mono' }, move.model) },
      { title: 'Move', sort: (move) => move.kind, cell: (move) => `${move.kind}: ${move.from.toLowerCase()} → ${move.to.toLowerCase()}` },
      { title: 'Took', numeric: true, sort: (move) => move.seconds ?? Infinity, cell: length },
      { title: 'Machine', cell: (move) => [h('span', { class: 'mono' }, move.machine), move.device === null ? null : ` device ${move.device}`] },
      { title: 'Problem', cell: (move) => (move.problem ? h('span', { class: 'bad-text' }, move.problem) : '') },
    ],
  });
}
