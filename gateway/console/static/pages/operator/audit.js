// The audit log: who did what, the newest first, of the system or of one account, narrowed and in parts.

import { button, h, put } from '../../lib/dom.js';
import { field } from '../../lib/form.js';
import { number, time } from '../../lib/format.js';
import { leaves } from '../../lib/leaves.js';
import { emptyBox, problemBox } from '../../lib/page.js';
import { table } from '../../lib/table.js';
import { ACCOUNTS } from './accounts.js';

const PER_PAGE = 50;
const AUDIT = '/client/v4/operator/audit';
const ACTIONS = [
  'account.apply', 'account.change', 'account.create', 'account.delete', 'account.import', 'account.own_limits', 'account.purge_cache',
  'account.remove', 'account.restore', 'account.resume', 'account.settings', 'account.suspend', 'plan.change', 'plan.remove',
  'store.restore', 'token.change', 'token.create', 'token.revoke', 'token.roll',
];

export function show(page) {
  const asked = { account: page.query.get('account') ?? '', action: '', actor: '', since: '' };
  const place = h('section', { class: 'card flush' });
  const more = h('div', { class: 'table-more' });
  const verdict = h('div');
  let entries = [];
  let view = null;
  const control = (props) => {
    const each = field(props);
    each.control.addEventListener('change', () => {
      asked[props.name] = each.control.value.trim();
      put(verdict);
      reload();
    });
    return each;
  };
  const account = control({ name: 'account', label: 'Account', value: asked.account, placeholder: 'name or id', hint: 'Empty: the system.', maxlength: 100 });
  const action = control({ name: 'action', label: 'Action', type: 'select', options: [['', 'Any'], ...ACTIONS.map((each) => [each, each])] });
  const actor = control({ name: 'actor', label: 'By', placeholder: 'token’s id', maxlength: 200 });
  const since = control({ name: 'since', label: 'Since', type: 'date' });
  page.append(
    h('p', { class: 'lead' }, 'Every change, before it was acknowledged, in a chain that nobody can alter unseen: one chain for each account, one for what concerns no one account.'),
    h('div', { class: 'toolbar' }, account.element, action.element, actor.element, since.element, button('Check the chain', () => check(), { kind: 'end' })),
    verdict, place, more,
  );
  const path = () => (asked.account ? `${ACCOUNTS}/${encodeURIComponent(asked.account)}/audit` : AUDIT);
  const query = (cursor) => {
    const since = asked.since && new Date(`${asked.since}T00:00:00`).toISOString();
    return { action: asked.action, actor: asked.actor, since, cursor, per_page: PER_PAGE };
  };
  const reload = page.load(place, async (signal) => {
    put(more);
    let answer;
    try {
      answer = await page.api.call('GET', path(), { query: query(), signal });
    } catch (problem) {
      if (problem.status !== 404) throw problem;
      return emptyBox('No account has this name or id.', 'The page of accounts finds one by a part of its name.');
    }
    const { result, info } = answer;
    entries = result;
    view = list(entries);
    tell(info);
    return view.element;
  });

  function tell(info) {
    put(more, info.cursor ? button('Show older entries', () => older(info.cursor), { kind: 'quiet' }) : null);
  }

  async function older(cursor) {
    put(more, h('p', { class: 'loading' }, 'Loading …'));
    try {
      const { result, info } = await page.api.call('GET', path(), { query: query(cursor), signal: page.signal });
      entries = [...entries, ...result];
      view.update(entries);
      tell(info);
    } catch (error) {
      if (error.name !== 'AbortError') put(more, problemBox(error, () => older(cursor)));
    }
  }

  async function check() {
    put(verdict, h('p', { class: 'loading' }, 'Walking the chain …'));
    try {
      const { intact, entries: count, seq, problem, head } = await page.api.get(`${AUDIT}/verify`, { query: { account: asked.account }, signal: page.signal });
      put(verdict, intact
        ? h('p', { class: 'note good', role: 'status' }, `The chain is whole: ${number(count)} entries. Its head: `, h('code', {}, head))
        : h('p', { class: 'problem', role: 'alert' }, `The chain is broken at entry ${number(seq)}: ${problem}.`));
    } catch (error) {
      if (error.name !== 'AbortError') put(verdict, problemBox(error));
    }
  }
}

/** What has a name is called by it; its id stands below. */
const named = (name, id) => (name ? [name, h('small', { class: 'under mono' }, id)] : h('code', {}, id));

/** What an entry says of its change, folded to the names of that. */
function details(detail) {
  const lines = leaves(detail).map(([name, value]) => [h('dt', {}, name), h('dd', {}, value)]);
  const names = Object.keys(detail).map((name) => name.replaceAll('_', ' '));
  return h('details', { class: 'inline' }, h('summary', {}, names.join(', ')), h('dl', { class: 'facts' }, lines));
}

function list(entries) {
  return table({
    caption: 'Entries', rows: entries, empty: emptyBox('No entry is like that.', 'A long log is searched in parts: older entries may be further down.'),
    columns: [
      { title: 'When', cell: (entry) => h('span', { title: entry.at }, time(entry.at)) },
      { title: 'Action', header: true, cell: (entry) => entry.action },
      { title: 'By', cell: (entry) => named(entry.actor_name, entry.actor) },
      { title: 'Of', cell: (entry) => named(entry.target_name, entry.target) },
      { title: 'Details', cell: (entry) => (Object.keys(entry.detail).length ? details(entry.detail) : '–') },
      { title: 'Entry', numeric: true, cell: (entry) => number(entry.seq) },
    ],
  });
}
