// What is left of each limit now, of the account or of one of its tokens, and where the limits come from.

import { h } from '../lib/dom.js';
import { field } from '../lib/form.js';
import { decimal, duration, number, time } from '../lib/format.js';
import { limitName } from '../lib/limits.js';
import { emptyBox } from '../lib/page.js';
import { meter } from '../lib/plot.js';
import { table } from '../lib/table.js';

const REFRESH_S = 10;

export function show(page) {
  const left = h('section', { class: 'card flush' });
  const admin = page.session.may('account:admin');
  const tools = h('div', { class: 'toolbar' });
  page.append(h('p', { class: 'lead' }, 'All of these hold at once; a call needs room in each. Days and months end at 00:00 UTC.'), tools, left);
  let chosen = '';
  const reload = page.load(left, async (signal) => {
    const items = await page.api.get(page.api.account('/limits/left'), { query: { token: chosen }, signal });
    return items.length ? list(items).element : emptyBox('No limits.', 'Neither the account nor this token has any: calls are bounded by what the machines can do.');
  });
  page.every(REFRESH_S, () => reload({ quietly: true }));
  if (!admin) return;
  chooseToken(page, tools, (id) => {
    chosen = id;
    reload();
  });
  const origin = h('section', { class: 'card flush' });
  page.append(origin);
  page.load(origin, async (signal) => where(await page.api.get(page.api.account('/limits'), { signal })).element);
}

async function chooseToken(page, place, onChoice) {
  let tokens;
  try {
    tokens = await page.api.all(page.api.account('/tokens'), { perPage: 50, signal: page.signal });
  } catch {
    return; // the list beside it says what is wrong
  }
  const options = [['', 'signed in with'], ...tokens.filter(({ id }) => id !== page.session.identity.id).map(({ id, name }) => [id, name])];
  const choice = field({ name: 'token', label: 'Of the account, and of the token', type: 'select', options });
  choice.control.addEventListener('change', () => onChoice(choice.control.value));
  place.append(choice.element);
}

function list(items) {
  return table({
    caption: 'What is left', rows: items, captionShown: true,
    columns: [
      { title: 'Limit', header: true, cell: (item) => [limitName(item.limit), h('small', { class: 'under' }, owner(item))] },
      { title: 'Left', cell: (item) => bar(item) },
      { title: 'Now', numeric: true, cell: (item) => decimal(item.left) },
      { title: 'Of', numeric: true, cell: (item) => number(item.allowed) },
      { title: 'Full again', cell: (item) => whole(item) },
    ],
  });
}

function owner(item) {
  const whose = item.token ? `of token ${item.token}` : 'of the account';
  return item.model_class ? `${whose}, models of class ${item.model_class}` : whose;
}

function bar(item) {
  const part = item.allowed > 0 ? item.left / item.allowed : 0;
  const level = part <= 0.1 ? 'bad' : part <= 0.3 ? 'warn' : 'good';
  return meter({ value: item.left, most: item.allowed, level, label: `${limitName(item.limit)}: ${decimal(item.left)} of ${number(item.allowed)} left` });
}

function whole(item) {
  if (item.left >= item.allowed) return 'now';
  if (item.limit === 'concurrent_requests') return 'as calls end';
  const at = new Date(Date.now() + 1000 * item.reset_s);
  return h('span', { title: `${time(at)} on your clock` }, `in ${duration(item.reset_s)}`);
}

function where({ most, own, in_force: force }) {
  const names = Object.keys({ ...most, ...own, ...force }).filter((name) => name !== 'classes');
  const cell = (limits, name) => (limits[name] === undefined || limits[name] === null ? '–' : number(limits[name]));
  return table({
    caption: 'Where they come from', captionShown: true, rows: names, empty: 'The account has no limits.',
    columns: [
      { title: 'Limit', header: true, cell: (name) => limitName(name) },
      { title: 'Ceiling, by plan and operator', numeric: true, cell: (name) => cell(most, name) },
      { title: 'Lowered by the team', numeric: true, cell: (name) => cell(own, name) },
      { title: 'In force', numeric: true, cell: (name) => h('strong', {}, cell(force, name)) },
    ],
  });
}
