// The team's tokens: minted with a grant, shown once, changed, rolled and revoked.

import { idempotencyKeys } from '../lib/api.js';
import { gatewayNow } from '../lib/clock.js';
import { codeBlock, confirmed, notify, openDialog } from '../lib/dialog.js';
import { button, h } from '../lib/dom.js';
import { field, form } from '../lib/form.js';
import { date, relative, time } from '../lib/format.js';
import { icon } from '../lib/icons.js';
import { limitFields, limitName, limitsOf } from '../lib/limits.js';
import { emptyBox } from '../lib/page.js';
import { table } from '../lib/table.js';

const PERMISSIONS = [
  ['inference', 'Call models', 'inference: calls of models, their list, batches'],
  ['usage:read', 'Read usage', 'usage:read: what the team used, and what is left of its limits'],
  ['account:admin', 'Administer the team', 'account:admin: tokens, limits and settings, and usage'],
];
const ENDS = [['', 'Never'], ['7', 'In a week'], ['30', 'In 30 days'], ['90', 'In 90 days'], ['365', 'In a year']];
const GRACES = [['0', 'At once'], ['3600', 'In an hour'], ['86400', 'In a day'], ['604800', 'In a week']];

export function show(page) {
  const place = h('section', { class: 'card flush' });
  const create = button([icon('add'), 'New token'], () => edit(page, null, reload), { kind: 'primary' });
  page.main.querySelector('.page-head').append(create);
  page.append(
    h('p', { class: 'lead' }, 'What opens the team’s account. A token’s text is shown once, when it is made; nobody can read it again.'),
    place,
  );
  const reload = page.load(place, async (signal) => {
    const tokens = await page.api.all(page.api.account('/tokens'), { query: { direction: 'desc' }, perPage: 50, signal });
    return list(page, tokens, () => reload()).element;
  });
}

function list(page, tokens, reload) {
  return table({
    caption: 'Tokens', rows: tokens, search: tokens.length > 8 ? (token) => `${token.name} ${token.id}` : null,
    empty: emptyBox('No tokens.', 'A signed-in JSON Web Token is none of the team’s tokens.'),
    columns: [
      { title: 'Token', header: true, sort: (token) => token.name, cell: (token) => [token.name, h('small', { class: 'under mono' }, token.id), mine(page, token)] },
      { title: 'Permissions', cell: (token) => permissions(token).map((each) => h('span', { class: 'chip' }, each)) },
      { title: 'Scope', cell: (token) => restrictions(token) },
      { title: 'Made', kind: 'nowrap', sort: (token) => token.issued_on, cell: (token) => h('span', { title: time(token.issued_on) }, date(token.issued_on)) },
      { title: 'Ends', kind: 'nowrap', sort: (token) => token.expires_on ?? '9', cell: (token) => ends(token) },
      { title: 'Actions', hidden: true, cell: (token) => actions(page, token, reload) },
    ],
  });
}

const permissions = (token) => token.policies.flatMap((policy) => policy.permission_groups.map(({ id }) => id));
const mine = (page, token) => (token.id === page.session.identity.id ? h('span', { class: 'chip good' }, 'signed in') : null);

function ends(token) {
  if (!token.expires_on) return 'never';
  return token.status === 'expired' ? h('span', { class: 'chip bad' }, 'expired') : h('span', { title: time(token.expires_on) }, relative(token.expires_on));
}

function restrictions(token) {
  const limits = Object.entries(token.limits).filter(([, value]) => typeof value === 'number');
  const lines = [
    token.models.join(' ') === '*' ? 'all models' : token.models.join(', '),
    token.condition.request_ip.in.length ? `from ${token.condition.request_ip.in.join(', ')}` : null,
    ...limits.map(([name, value]) => `${limitName(name)}: ${value.toLocaleString('en')}`),
  ].filter(Boolean);
  return lines.map((line, i) => (i ? h('small', { class: 'under' }, line) : h('span', {}, line)));
}

function actions(page, token, reload) {
  if (permissions(token).includes('operator') && !page.session.may('operator')) return h('small', {}, 'an operator’s');
  const offered = permissions(token).every((id) => PERMISSIONS.some(([each]) => each === id)); // others are given on the server alone
  return [
    offered ? button('Change', () => edit(page, token, reload), { kind: 'small quiet', 'aria-label': `Change ${token.name}` }) : null,
    button('Roll', () => roll(page, token, reload), { kind: 'small quiet', 'aria-label': `Roll ${token.name}` }),
    button('Revoke', () => revoke(page, token, reload), { kind: 'small danger', 'aria-label': `Revoke ${token.name}` }),
  ];
}

/** A dialog for a new token, or for one that is said anew. */
function edit(page, token, reload) {
  const fields = grantFields(token);
  const limits = limitFields(token?.limits);
  const grid = h('div', { class: 'form-grid' }, limits.map((each) => each.element));
  const more = h('details', { class: 'help' }, h('summary', {}, 'Limits of its own'), h('p', {}, 'They hold beside the account’s. An empty field sets none.'), grid);
  more.open = Boolean(token && Object.keys(token.limits).length);
  const keyed = idempotencyKeys();
  const entry = form({
    label: token ? 'Change a token' : 'New token',
    fields: [...fields, ...limits],
    parts: [...fields.map((each) => each.element), more],
    action: token ? 'Save' : 'Make the token',
    cancel: () => close(),
    submit: async (values) => {
      const body = bodyOf(values, token);
      const path = page.api.account('/tokens');
      if (token) {
        await page.api.call('PUT', `${path}/${token.id}`, { body });
        close();
        notify(`${body.name} is changed, in force within a second.`);
      } else {
        const { result } = await page.api.call('POST', path, { body, headers: keyed(body) });
        close();
        secret(`${result.name}: its text`, result.value);
      }
      reload();
    },
  });
  const close = openDialog({ title: token ? `Change ${token.name}` : 'New token', body: entry });
}

function grantFields(token) {
  const ends = token?.expires_on ? [['keep', `As it is: ${time(token.expires_on)}`], ...ENDS] : ENDS;
  return [
    field({ name: 'name', label: 'Name', value: token?.name ?? '', required: true, maxlength: 100, hint: 'For people: where it is used, such as a program or a colleague.' }),
    field({ name: 'permissions', label: 'It may', type: 'checks', required: true, options: PERMISSIONS, value: token ? permissions(token) : ['inference'] }),
    field({ name: 'models', label: 'Models', value: (token?.models ?? ['*']).join(', '), required: true, hint: 'Names or patterns with * and ?, commas between them. * is all models.' }),
    field({ name: 'networks', label: 'Networks', value: (token?.condition.request_ip.in ?? []).join(', '), hint: 'It opens from these alone, such as 10.0.0.0/8. Empty: from everywhere.' }),
    field({ name: 'ends', label: 'It ends', type: 'select', options: ends, value: token?.expires_on ? 'keep' : '' }),
  ];
}

const words = (text) => text.split(/[,\s]+/).filter(Boolean);

function bodyOf(values, token) {
  const days = Number(values.ends);
  return {
    name: values.name.trim(),
    policies: [{ permission_groups: values.permissions.map((id) => ({ id })) }],
    models: words(values.models),
    condition: { request_ip: { in: words(values.networks) } },
    expires_on: values.ends === 'keep' ? token.expires_on : days ? new Date(gatewayNow() + days * 86_400_000).toISOString() : null,
    limits: limitsOf(values, token?.limits),
  };
}

function roll(page, token, reload) {
  const entry = form({
    label: `Roll ${token.name}`,
    fields: [field({ name: 'grace', label: 'The text of before ends', type: 'select', options: GRACES, value: '0', hint: 'What still uses it has so long to take the new one.' })],
    action: 'Make a new text',
    cancel: () => close(),
    submit: async ({ grace }) => {
      const { result } = await page.api.call('PUT', `${page.api.account('/tokens')}/${token.id}/value`, { body: { grace_seconds: Number(grace) } });
      close();
      secret(`${token.name}: its new text`, result, token.id === page.session.identity.id ? 'You are signed in with the text of before. Sign in again with this one.' : '');
      reload();
    },
  });
  const close = openDialog({ title: `Roll ${token.name}`, body: [h('p', { class: 'muted' }, 'The token gets a new secret. Its grant and its usage stay.'), entry] });
}

async function revoke(page, token, reload) {
  const own = token.id === page.session.identity.id ? ' You are signed in with it: this signs you out.' : '';
  const text = `${token.name} opens nothing any more within a second, for good, and what runs with it ends within five.${own}`;
  if (!(await confirmed({ title: `Revoke ${token.name}?`, text, action: 'Revoke it' }))) return;
  try {
    await page.api.call('DELETE', `${page.api.account('/tokens')}/${token.id}`);
    notify(`${token.name} is revoked.`);
  } catch (problem) {
    notify(problem.message);
  }
  reload();
}

/** Shows a token's text, once. Nothing keeps it when the dialog is closed. */
function secret(title, text, note = '') {
  openDialog({
    title,
    body: [
      h('p', {}, 'Copy it now, to where it is used. It is not shown again, and nobody can look it up.'),
      codeBlock(text, { label: 'The token’s text' }),
      note ? h('p', { class: 'note' }, note) : null,
    ],
  });
}
