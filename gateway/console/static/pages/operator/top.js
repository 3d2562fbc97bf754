// The tenants that use the most of this gateway now, as bars and numbers.

import { h, put } from '../../lib/dom.js';
import { field } from '../../lib/form.js';
import { compact, decimal, number, percent } from '../../lib/format.js';
import { emptyBox } from '../../lib/page.js';
import { meter } from '../../lib/plot.js';
import { table } from '../../lib/table.js';

const TOP = '/client/v4/operator/top';
const SPANS = [['10', '10 seconds'], ['60', 'minute'], ['300', '5 minutes']];
const MEASURES = {
  tokens: ['Tokens', (one) => one.prompt_tokens + one.completion_tokens], requests: ['Requests', (one) => one.requests], neurons: ['Neurons', (one) => one.neurons],
  refused: ['Refused over a limit', (one) => one.refused], running: ['Running now', (one) => one.running],
};
const EVERY_S = 2;

export function show(page) {
  const asked = { seconds: '60', by: 'tokens', ...Object.fromEntries(page.query) };
  if (!SPANS.some(([key]) => key === asked.seconds)) asked.seconds = '60';
  if (!(asked.by in MEASURES)) asked.by = 'tokens';
  const place = h('section', { class: 'card flush' });
  const told = h('p', { class: 'muted' });
  const control = (name, label, options) => {
    const each = field({ name, label, type: 'select', options, value: asked[name] });
    each.control.addEventListener('change', () => {
      asked[name] = each.control.value;
      page.remember({ seconds: asked.seconds, by: asked.by });
      list = null;
      reload();
    });
    return each.element;
  };
  let list = null;
  page.append(
    h('p', { class: 'lead' }, `What ended lately at this gateway, and what runs; looked at every ${EVERY_S} seconds. The ledger has all gateways together: `, h('a', { href: '#/all-usage' }, 'Usage of all'), '.'),
    h('div', { class: 'toolbar' }, control('seconds', 'The last', SPANS), control('by', 'Most', Object.entries(MEASURES).map(([key, [title]]) => [key, title]))),
    place, told,
  );
  const reload = page.load(place, async (signal) => {
    const { accounts, active } = await page.api.get(TOP, { query: { seconds: asked.seconds, by: asked.by, limit: 50 }, signal });
    put(told, active > accounts.length ? `${number(accounts.length)} of ${number(active)} that were active are shown.` : `${number(active)} active.`);
    if (list) return void list.update(ranked(accounts));
    list = topTable(ranked(accounts), asked);
    return list.element;
  });
  page.every(EVERY_S, () => reload({ quietly: true }));

  const ranked = (accounts) => {
    const most = Math.max(...accounts.map((one) => MEASURES[asked.by][1](one)), 0);
    return accounts.map((one, i) => ({ ...one, place: i + 1, most, value: MEASURES[asked.by][1](one) }));
  };
}

function topTable(rows, asked) {
  const rate = (value) => decimal(Number((value / Number(asked.seconds)).toPrecision(3)));
  return table({
    caption: 'Accounts', rows, empty: emptyBox('Nobody called in this time.', 'Calls are here once they end, or while they run.'),
    columns: [
      { title: 'Account', header: true, cell: (one) => [one.name ?? (one.account ? 'an account that is gone' : 'all others'), one.account ? h('small', { class: 'under mono' }, one.account) : null] },
      { title: 'Plan', cell: (one) => one.plan ?? '–' },
      { title: MEASURES[asked.by][0], cell: (one) => [h('span', {}, compact(one.value)), meter({ value: one.value, most: one.most, label: `${MEASURES[asked.by][0]} of ${one.name ?? 'all others'}` })] },
      { title: 'Tokens/s', numeric: true, cell: (one) => rate(one.prompt_tokens + one.completion_tokens) },
      { title: 'Requests', numeric: true, cell: (one) => number(one.requests) },
      { title: 'Cached', numeric: true, cell: (one) => (one.prompt_tokens ? percent(one.cached_tokens / one.prompt_tokens) : '–') },
      { title: 'Neurons', numeric: true, cell: (one) => decimal(one.neurons) },
      { title: 'Refused', numeric: true, cell: (one) => number(one.refused) },
      { title: 'Running', numeric: true, cell: (one) => number(one.running) },
    ],
  });
}
