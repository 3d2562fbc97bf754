// What all accounts used: by day as a plot, and each account of a page with its days as a small one.

import { h, put, svg } from '../../lib/dom.js';
import { compact, day, dayInFull, decimal, number, percent, shortModel, utcDay, utcNote } from '../../lib/format.js';
import { field } from '../../lib/form.js';
import { emptyBox } from '../../lib/page.js';
import { pager } from '../../lib/pager.js';
import { greatest, plot } from '../../lib/plot.js';
import { table } from '../../lib/table.js';
import { COUNTS, countTitle, csvButton, seriesByDay } from '../../lib/usage.js';
import { tools } from './accounts.js';

const OPERATOR = '/client/v4/operator';
const PER_PAGE = 200;
const SPANS = [['7', '7 days'], ['30', '30 days'], ['90', '90 days']];
const SPARK = { width: 120, height: 28 };

export function show(page) {
  const asked = { name: '', plan: '', suspended: '', order: 'name', page: 1 };
  const choices = { days: '30', count: 'neurons', by: 'account', ...Object.fromEntries(page.query) };
  const selects = { days: ['The last', SPANS], count: ['Count', Object.entries(COUNTS)], by: ['Plot by', [['account', 'account of this page'], ['model', 'model, all accounts']]] };
  for (const [name, [, options]] of Object.entries(selects)) if (!options.some(([key]) => key === choices[name])) choices[name] = options[0][0];
  const picture = h('section', { class: 'card' });
  const rows = h('section', { class: 'card flush' });
  const turns = pager((to) => ask({ page: to }));
  const chosen = Object.entries(selects).map(([name, [label, options]]) => {
    const each = field({ name, label, type: 'select', options, value: choices[name] });
    each.control.addEventListener('change', () => {
      choices[name] = each.control.value;
      page.remember(choices);
      name === 'count' ? draw() : reload();
    });
    return each.element;
  });
  const span = () => ({ from: utcDay(Number(choices.days) - 1), to: utcDay() });
  const csv = csvButton(page, `${OPERATOR}/usage`, () => ({ name: 'usage-of-all', query: { ...span(), by: 'day,account,model' } }));
  page.append(
    h('p', { class: 'lead' }, `From the ledger, of all gateways. ${utcNote()}`),
    h('div', { class: 'toolbar' }, chosen, csv),
    picture, tools(page, asked, ask), rows, turns.element,
  );
  let data = null;
  const reload = page.load(rows, async (signal) => {
    const [{ result, info }, models] = await Promise.all([
      page.api.call('GET', `${OPERATOR}/usage/accounts`, { query: { ...asked, ...span(), per_page: PER_PAGE }, signal }),
      choices.by === 'model' ? page.api.all(`${OPERATOR}/usage`, { query: { ...span(), by: 'day,model' }, perPage: 1000, signal }) : null,
    ]);
    data = { ...result, models };
    turns.show(info);
    draw();
  });

  function ask(change) {
    Object.assign(asked, { page: 1, ...change });
    reload();
  }

  function draw() {
    if (!data) return;
    put(picture, drawing(data, choices));
    put(rows, accountTable(data, choices.count).element);
  }
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

function drawing(data, { count, by }) {
  const title = by === 'account' ? `${countTitle(count)} by day and account` : `${countTitle(count)} of all accounts by day and model`;
  const series = by === 'account' ? data.accounts.map((account) => ({ name: account.name, values: account[count] })) : seriesByDay(data.models ?? [], { days: data.days, key: 'model', count, label: shortModel });
  if (!series.some(({ values }) => values.some(Boolean))) return [h('h2', {}, title), emptyBox('No calls in these days.', 'Usage is here a moment after a call ends.')];
  return [h('h2', {}, title), plot({ title, unit: COUNTS[count], labels: data.days, series: greatest(series.filter(({ values }) => values.some(Boolean))), short: day, full: dayInFull })];
}

function accountTable({ days, accounts }, count) {
  const numeric = (title, key) => ({ title, numeric: true, sort: (one) => sum(one[key]), cell: (one) => (key === 'neurons' ? decimal(sum(one[key])) : compact(sum(one[key]))) });
  const top = Math.max(...accounts.flatMap((one) => one[count]), 0);
  const list = table({
    caption: 'Accounts of this part of the list', rows: accounts, empty: emptyBox('No account is like that.'),
    columns: [
      { title: 'Account', header: true, sort: (one) => one.name, cell: (one) => [one.name, one.suspended ? h('span', { class: 'chip bad' }, 'suspended') : null, h('small', { class: 'under mono' }, one.id)] },
      { title: 'Plan', sort: (one) => one.plan, cell: (one) => one.plan },
      { title: `${countTitle(count)} by day`, cell: (one) => spark(one[count], days, top, `${one.name}: ${COUNTS[count]} by day`) },
      numeric('Requests', 'requests'), numeric('Neurons', 'neurons'),
      { title: 'Input tokens', numeric: true, sort: (one) => sum(one.prompt_tokens), cell: (one) => [compact(sum(one.prompt_tokens)), sum(one.prompt_tokens) ? h('small', { class: 'under' }, `${percent(sum(one.cached_tokens) / sum(one.prompt_tokens))} cached`) : null] },
      numeric('Output tokens', 'completion_tokens'),
    ],
  });
  return list;
}

/** The days of one account as one path: two hundred of them are on a page. All have the same scale. */
function spark(values, days, top, label) {
  const total = sum(values);
  if (!total) return h('span', { class: 'muted' }, 'none');
  const step = SPARK.width / values.length;
  const path = values.map((value, i) => {
    const high = value ? Math.max(1, (SPARK.height * value) / top) : 0;
    return high ? `M${(i * step).toFixed(1)} ${SPARK.height}v${-high.toFixed(1)}h${(step * 0.8).toFixed(1)}V${SPARK.height}z` : '';
  });
  const best = values.indexOf(Math.max(...values));
  const words = `${label}; ${number(Math.round(total))} in all, the most on ${day(days[best])}`;
  return svg('svg', { class: 'spark', viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, width: SPARK.width, height: SPARK.height, role: 'img', 'aria-label': words }, svg('path', { d: path.join('') }));
}
