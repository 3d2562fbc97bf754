// What the team used: by day, and by model, token or tag, as a plot, as a table and as CSV.

import { h, put } from '../lib/dom.js';
import { field } from '../lib/form.js';
import { compact, day, dayInFull, days, decimal, dollars, number, percent, shortModel, utcDay, utcNote } from '../lib/format.js';
import { models } from '../lib/models.js';
import { emptyBox, statCard } from '../lib/page.js';
import { greatest, plot } from '../lib/plot.js';
import { table } from '../lib/table.js';
import { COUNTS, countTitle, csvButton, seriesByDay } from '../lib/usage.js';

const SPANS = [['7', '7 days'], ['30', '30 days'], ['90', '90 days'], ['365', 'a year']];
const GROUPS = [['model', 'model'], ['token', 'token'], ['tag', 'tag']];

export function show(page) {
  const choices = { days: '30', by: 'model', count: 'neurons', ...Object.fromEntries(page.query) };
  const known = { days: SPANS.map(([key]) => key), by: GROUPS.map(([key]) => key), count: Object.keys(COUNTS) };
  for (const name of Object.keys(known)) if (!known[name].includes(choices[name])) choices[name] = known[name][0];
  const choose = (name, label, options) => {
    const each = field({ name, label, type: 'select', options, value: choices[name] });
    each.control.addEventListener('change', () => {
      choices[name] = each.control.value;
      page.remember({ days: choices.days, by: choices.by, count: choices.count });
      name === 'count' ? draw() : reload();
    });
    return each.element;
  };
  const totals = h('div', { class: 'grid' });
  const picture = h('section', { class: 'card' });
  const parts = h('section', { class: 'card flush' });
  const span = () => ({ from: utcDay(Number(choices.days) - 1), to: utcDay() });
  const csv = csvButton(page, page.api.account('/usage'), () => ({ name: `usage-by-${choices.by}`, query: { ...span(), by: `day,${choices.by}` } }));
  page.append(
    h('p', { class: 'lead' }, `What the team’s calls used, from the ledger. ${utcNote()}`),
    h('div', { class: 'toolbar' }, choose('days', 'The last', SPANS), choose('by', 'By', GROUPS), choose('count', 'Count', Object.entries(COUNTS)), csv),
    totals, picture, parts,
  );
  let data = null;
  const reload = page.load(picture, async (signal) => {
    data = await fetched(page, { ...span(), by: choices.by, signal });
    draw();
  });
  page.every(60, () => reload({ quietly: true }));

  function draw() {
    if (!data) return;
    put(totals, cards(data.total, data.neuronUsd));
    put(parts, partsTable(data, choices));
    put(picture, drawing(data, choices));
  }
}

/** Sums by day and by the group, and what all came to: a call with two tags is in two groups, and once in the total. */
async function fetched(page, { from, to, by, signal }) {
  const path = page.api.account('/usage');
  const [rows, total, names, known] = await Promise.all([
    page.api.all(path, { query: { from, to, by: `day,${by}` }, perPage: 1000, signal }),
    page.api.all(path, { query: { from, to, by: 'day' }, perPage: 1000, signal }),
    by === 'token' ? tokenNames(page, signal) : new Map(),
    page.session.may('inference') ? models(page, { signal }) : [],
  ]);
  const neuronUsd = known.find((model) => model.neuronUsd)?.neuronUsd ?? 0;
  return { days: days(from, to), rows, total: added(total), label: labels(by, names), neuronUsd, by };
}

async function tokenNames(page, signal) {
  if (!page.session.may('account:admin')) return new Map();
  const tokens = await page.api.all(page.api.account('/tokens'), { perPage: 50, signal });
  return new Map(tokens.map(({ id, name }) => [id, name]));
}

function labels(by, names) {
  if (by === 'model') return shortModel;
  if (by === 'token') return (id) => names.get(id) ?? id;
  return (tag) => ({ '': 'no tag', '*': 'too many tags' })[tag] ?? tag;
}

function added(rows) {
  const total = Object.fromEntries(Object.keys(COUNTS).map((name) => [name, 0]));
  for (const row of rows) for (const name of Object.keys(COUNTS)) total[name] += row[name];
  return total;
}

function cards(total, neuronUsd) {
  const input = total.prompt_tokens;
  return [
    statCard('Neurons', compact(total.neurons), neuronUsd ? dollars(total.neurons * neuronUsd) : 'the unit of price'),
    statCard('Requests', compact(total.requests), total.requests ? `${compact(total.neurons / total.requests)} neurons each` : 'none yet'),
    statCard('Input tokens', compact(input), input ? `${percent(total.cached_tokens / input)} from the cache` : 'none yet'),
    statCard('Output tokens', compact(total.completion_tokens), total.requests ? `${compact(total.completion_tokens / total.requests)} a request` : 'none yet'),
  ];
}

function drawing(data, { count, by }) {
  const title = `${countTitle(count)} by day and ${by}`;
  if (!data.rows.length) {
    return [h('h2', {}, title), emptyBox('No calls in these days.', 'What your calls use is here a moment after they end.')];
  }
  const series = seriesByDay(data.rows, { days: data.days, key: by, count, label: data.label });
  return [
    h('h2', {}, title),
    plot({ title, unit: COUNTS[count], labels: data.days, series: greatest(series), short: day, full: dayInFull }),
    by === 'tag' ? h('p', { class: 'muted' }, 'A call with several tags counts for each of them.') : null,
  ];
}

function partsTable(data, { by, count }) {
  const groups = new Map();
  for (const row of data.rows) groups.set(row[by], [...(groups.get(row[by]) ?? []), row]);
  const rows = [...groups].map(([key, each]) => ({ key, label: data.label(key), ...added(each) }));
  const numeric = (title, name) => ({ title, numeric: true, sort: (row) => row[name], cell: (row) => (name === 'neurons' ? decimal(row[name]) : number(row[name])) });
  const list = table({
    caption: `By ${by}`, captionShown: true, rows, order: `-${{ neurons: 'Neurons', requests: 'Requests', prompt_tokens: 'Input tokens', completion_tokens: 'Output tokens' }[count] ?? 'Neurons'}`,
    search: rows.length > 10 ? (row) => `${row.label} ${row.key}` : null, empty: 'No calls in these days.',
    columns: [
      { title: by[0].toUpperCase() + by.slice(1), header: true, sort: (row) => row.label, cell: (row) => [row.label, row.label === row.key || !row.key ? null : h('small', { class: 'under mono' }, row.key)] },
      numeric('Requests', 'requests'),
      numeric('Neurons', 'neurons'),
      numeric('Input tokens', 'prompt_tokens'),
      { title: 'Cached', numeric: true, sort: (row) => row.cached_tokens / (row.prompt_tokens || 1), cell: (row) => (row.prompt_tokens ? percent(row.cached_tokens / row.prompt_tokens) : '–') },
      numeric('Output tokens', 'completion_tokens'),
    ],
  });
  return list.element;
}
