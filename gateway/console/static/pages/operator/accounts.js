// All accounts: found by name among thousands, made, changed, suspended, and given their first token.

import { idempotencyKeys } from '../../lib/api.js';
import { savedOrTold } from '../../lib/conflict.js';
import { codeBlock, confirmed, notify, openDialog } from '../../lib/dialog.js';
import { button, h } from '../../lib/dom.js';
import { field, form } from '../../lib/form.js';
import { date, number, time } from '../../lib/format.js';
import { icon } from '../../lib/icons.js';
import { LIMITS, limitFields, limitName, limitsOf } from '../../lib/limits.js';
import { emptyBox } from '../../lib/page.js';
import { pager } from '../../lib/pager.js';
import { table } from '../../lib/table.js';

export const ACCOUNTS = '/client/v4/operator/accounts';
const PLANS = '/client/v4/operator/plans';
const PER_PAGE = 50;
const PAUSE_MS = 200;
const NAMES = { name: 'Name', plan: 'Plan', ...Object.fromEntries(Object.keys(LIMITS).map((key) => [key, limitName(key)])) };

export function show(page) {
  const asked = { name: '', plan: '', suspended: '', order: 'name', page: 1 };
  const place = h('section', { class: 'card flush' });
  const turns = pager((to) => ask({ page: to }));
  const create = button([icon('add'), 'New account'], () => edit(page, null, () => reload()), { kind: 'primary' });
  page.main.querySelector('.page-head').append(create);
  page.append(h('p', { class: 'lead' }, 'Every team is an account: its plan says what it may use, its tokens open it.'), tools(page, asked, ask), place, turns.element);

  const reload = page.load(place, async (signal) => {
    const { result, info } = await page.api.call('GET', ACCOUNTS, { query: { ...asked, per_page: PER_PAGE }, signal });
    turns.show(info);
    return list(page, result, () => reload()).element;
  });

  function ask(change) {
    Object.assign(asked, { page: 1, ...change });
    reload();
  }
}

/** What narrows the list. What is typed goes to the gateway once the typing pauses. */
export function tools(page, asked, ask) {
  const search = field({ name: 'search', label: 'Name or id', type: 'search', maxlength: 100, placeholder: 'Part of a name' });
  let pause = 0;
  search.control.addEventListener('input', () => {
    clearTimeout(pause);
    pause = setTimeout(() => ask({ name: search.control.value.trim() }), PAUSE_MS);
  });
  const plan = field({ name: 'plan', label: 'Plan', type: 'select', options: [['', 'Any']] });
  const state = field({ name: 'state', label: 'State', type: 'select', options: [['', 'Any'], ['false', 'In force'], ['true', 'Suspended']] });
  const order = field({ name: 'order', label: 'Order', type: 'select', options: [['name', 'By name'], ['created', 'Oldest first']], value: asked.order });
  plan.control.addEventListener('change', () => ask({ plan: plan.control.value }));
  state.control.addEventListener('change', () => ask({ suspended: state.control.value }));
  order.control.addEventListener('change', () => ask({ order: order.control.value }));
  page.api.get(PLANS, { signal: page.signal }).then(
    (plans) => plan.control.append(...plans.map(({ name }) => h('option', { value: name }, name))),
    () => {}, // the list says that the gateway is away
  );
  return h('div', { class: 'toolbar' }, search.element, plan.element, state.element, order.element);
}

function list(page, accounts, reload) {
  return table({
    caption: 'Accounts', rows: accounts, empty: emptyBox('No account is like that.', 'Look for less of its name, or in another plan.'),
    columns: [
      { title: 'Account', header: true, cell: (account) => [
        h('button', { type: 'button', class: 'link', on: { click: () => details(page, account, reload) } }, account.name),
        h('small', { class: 'under mono' }, account.id),
      ] },
      { title: 'Plan', cell: (account) => account.plan },
      { title: 'State', cell: state },
      { title: 'Requests a minute', numeric: true, cell: (account) => amount(account.limits.in_force, 'requests_per_minute') },
      { title: 'Neurons a day', numeric: true, cell: (account) => amount(account.limits.in_force, 'neurons_per_day') },
      { title: 'Made', cell: (account) => h('span', { class: 'nowrap', title: time(account.created_on) }, date(account.created_on)) },
      { title: 'Actions', hidden: true, cell: (account) => actions(page, account, reload) },
    ],
  });
}

const amount = (limits, name) => (limits[name] === null || limits[name] === undefined ? '–' : number(limits[name]));

function state(account) {
  if (account.deletion) return h('span', { class: 'chip bad' }, 'to be deleted');
  return account.suspended_on ? h('span', { class: 'chip bad', title: time(account.suspended_on) }, 'suspended') : h('span', { class: 'chip good' }, 'in force');
}

function actions(page, account, reload) {
  return [
    button('Change', () => edit(page, account, reload), { kind: 'small quiet', 'aria-label': `Change ${account.name}` }),
    account.suspended_on
      ? button('Resume', () => resume(page, account, reload), { kind: 'small', 'aria-label': `Resume ${account.name}` })
      : button('Suspend', () => suspend(page, account, reload), { kind: 'small danger', 'aria-label': `Suspend ${account.name}` }),
  ];
}

async function suspend(page, account, reload) {
  const text = `Calls of ${account.name} are refused within a second, and those that run end within five. Nothing is deleted; you can resume it.`;
  if (!await confirmed({ title: `Suspend ${account.name}?`, text, action: 'Suspend it' })) return;
  await attempt(page, `${ACCOUNTS}/${account.id}/suspend`, `${account.name} is suspended.`, reload);
}

const resume = (page, account, reload) => attempt(page, `${ACCOUNTS}/${account.id}/resume`, `${account.name} is served again.`, reload);

async function attempt(page, path, done, reload) {
  try {
    await page.api.call('POST', path);
    notify(done);
  } catch (problem) {
    notify(problem.message);
  }
  reload();
}

function details(page, account, reload) {
  const numeric = (title, limits) => ({ title, numeric: true, cell: (name) => amount(limits, name) });
  const { in_force: force, most, ceiling, own } = account.limits;
  const limits = table({
    caption: 'Limits', captionShown: true, rows: Object.keys(LIMITS),
    columns: [
      { title: 'Limit', header: true, cell: limitName }, numeric('In force', force), numeric('Plan and ceiling', most),
      numeric('Ceiling', ceiling), numeric('Lowered by its administrators', own),
    ],
  });
  const body = [
    h('dl', { class: 'facts' }, [
      ['Id', h('code', {}, account.id)], ['Plan', account.plan], ['State', state(account)], ['Made', time(account.created_on)],
      ['Zero retention', account.settings.zero_retention ? 'yes' : 'no'], ['Regions', account.settings.regions?.join(', ') || 'all'],
    ].map(([name, value]) => [h('dt', {}, name), h('dd', {}, value)])),
    limits.element,
    h('p', { class: 'row' },
      button('Change', () => { close(); edit(page, account, reload); }, {}),
      button('New token for its administrator', () => { close(); mint(page, account); }, {}),
      h('a', { class: 'button', href: `#/audit?account=${account.id}`, on: { click: () => close() } }, 'Audit log')),
  ];
  const close = openDialog({ title: account.name, body, wide: true });
}

const flatOf = (account) => ({ name: account.name, plan: account.plan, ...account.limits.ceiling });

/** A dialog for a new account, or for one that is changed; who comes second is told what the first one changed. */
async function edit(page, account, reload) {
  let plans;
  try {
    plans = await page.api.get(PLANS, { signal: page.signal });
  } catch (problem) {
    return notify(problem.message);
  }
  const name = field({ name: 'name', label: 'Name', value: account?.name ?? '', required: true, maxlength: 100, hint: 'Its own among all accounts.' });
  const plan = field({ name: 'plan', label: 'Plan', type: 'select', options: plans.map((each) => [each.name, each.name]), value: account?.plan ?? 'default' });
  const limits = limitFields(account?.limits.ceiling);
  const more = h('details', { class: 'help' }, h('summary', {}, 'A ceiling of its own, in place of the plan’s'), h('div', { class: 'form-grid' }, limits.map((each) => each.element)));
  more.open = Boolean(account && Object.values(account.limits.ceiling).some((value) => typeof value === 'number'));
  const conflict = h('div');
  const keyed = idempotencyKeys();
  const current = account && { flat: flatOf(account), etag: `"${account.revision}"`, ceiling: account.limits.ceiling };
  const entry = form({
    label: account ? 'Change an account' : 'New account',
    fields: [name, plan, ...limits],
    parts: [name.element, plan.element, more, conflict],
    action: account ? 'Save' : 'Make the account',
    cancel: () => close(),
    submit: async (values) => {
      const body = { name: values.name, plan: values.plan, ceiling: limitsOf(values, current?.ceiling) };
      if (!account) {
        const { result } = await page.api.call('POST', ACCOUNTS, { body, headers: keyed(body) });
        close();
        notify(`${result.name} is there.`);
        reload();
        return mint(page, result);
      }
      const path = `${ACCOUNTS}/${account.id}`;
      const saved = await savedOrTold({
        place: conflict, state: current, names: NAMES,
        save: (etag) => page.api.call('PATCH', path, { body, headers: { 'if-match': etag } }),
        read: async () => {
          const { result, headers } = await page.api.call('GET', path);
          return { flat: flatOf(result), etag: headers.get('etag'), ceiling: result.limits.ceiling };
        },
        take: (flat) => [name, plan, ...limits].forEach((each) => each.set(flat[each.name] ?? '')),
      });
      if (!saved) return;
      close();
      notify(`${body.name} is changed, in force within a second.`);
      reload();
    },
  });
  const close = openDialog({ title: account ? `Change ${account.name}` : 'New account', body: entry });
}

/** The token by which an account's administrator begins. */
function mint(page, account) {
  const keyed = idempotencyKeys();
  const entry = form({
    label: 'New token', action: 'Make the token', cancel: () => close(),
    fields: [
      field({ name: 'name', label: 'Name of the token', value: 'administrator', required: true, maxlength: 100, hint: 'For people: who has it.' }),
      field({ name: 'may', label: 'It may', type: 'checks', value: ['account:admin', 'inference'], options: [
        ['account:admin', 'Administer the account', 'tokens, limits and settings, and usage'], ['inference', 'Call models'], ['usage:read', 'Read usage'],
      ] }),
    ],
    submit: async (values) => {
      const body = { name: values.name, policies: [{ permission_groups: values.may.map((id) => ({ id })) }] };
      const { result } = await page.api.call('POST', `${ACCOUNTS}/${account.id}/tokens`, { body, headers: keyed(body) });
      close();
      openDialog({ title: `The token of ${account.name}`, body: [h('p', {}, 'Hand it over now: it is shown this once, and kept nowhere.'), codeBlock(result.value, { label: 'The token' })] });
    },
  });
  const close = openDialog({ title: `A token of ${account.name}`, body: entry });
}
