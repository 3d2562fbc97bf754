// Alerts that fire at this gateway, and the health of the store.

import { h } from '../../lib/dom.js';
import { decimal, duration, number, relative, time } from '../../lib/format.js';
import { emptyBox } from '../../lib/page.js';
import { bytes } from './live.js';

const OPERATOR = '/client/v4/operator';
const EVERY_S = 10;
const LEVELS = { critical: 'bad', warning: 'warn', info: '' };

export function show(page) {
  const alerts = h('section', { class: 'stack', 'aria-label': 'Alerts' });
  const store = h('section', { class: 'card' });
  page.append(h('p', { class: 'lead' }, 'The alerts that Hearth ships for Prometheus, evaluated by this gateway over its own metrics each 15 seconds.'), alerts, store);
  const reloadAlerts = page.load(alerts, async (signal) => drawAlerts(await page.api.get(`${OPERATOR}/alerts`, { signal })));
  const reloadStore = page.load(store, async (signal) => drawStore(await page.api.get(`${OPERATOR}/store`, { signal })));
  page.every(EVERY_S, () => {
    if (!alerts.contains(document.activeElement)) reloadAlerts({ quietly: true });
    reloadStore({ quietly: true });
  });
}

function drawAlerts({ alerts, rules, unseen }) {
  const firing = alerts.filter(({ state }) => state === 'firing');
  const pending = alerts.filter(({ state }) => state === 'pending');
  return [
    firing.length ? null : h('div', { class: 'card' }, emptyBox('No alert fires.', pending.length ? `${number(pending.length)} would, if what they see lasts.` : `${number(rules)} rules are looked at.`)),
    [...firing, ...pending].map(alertCard),
    h('details', { class: 'help' }, h('summary', {}, `${number(unseen.length)} rules that no gateway can evaluate by itself`),
      h('dl', { class: 'facts' }, unseen.map(({ name, why }) => [h('dt', {}, name), h('dd', {}, why)]))),
  ];
}

function alertCard(alert) {
  const level = alert.state === 'firing' ? LEVELS[alert.severity] : '';
  const labels = Object.entries(alert.labels).map(([name, value]) => `${name} ${value}`).join(', ');
  const lasts = alert.state === 'firing' ? `since ${time(alert.since)}, ${relative(alert.since)}` : `seen ${relative(alert.since)}; it fires after ${duration(alert.for_seconds)}`;
  return h('article', { class: `card alert ${level}` },
    h('div', { class: 'row spread' }, h('h2', {}, alert.summary), h('span', {}, h('span', { class: `chip ${level}` }, alert.severity), h('span', { class: 'chip' }, alert.state))),
    h('p', {}, alert.description.split('`').map((words, i) => (i % 2 ? h('code', {}, words) : words))),
    h('p', { class: 'muted' }, h('small', {}, `${alert.name}; ${lasts}; ${labels}`)),
  );
}

function drawStore(store) {
  const facts = [
    ['Kind', store.kind === 'sqlite' ? 'SQLite, for one gateway' : 'Redis'],
    ['Answers', store.answers ? [h('span', { class: 'chip good' }, 'yes'), ` in ${decimal(Number(store.answer_ms.toPrecision(2)))} ms`] : [h('span', { class: 'chip bad' }, 'no'), ` ${store.problem}`]],
    ['This gateway', store.away ? h('span', { class: 'chip bad' }, 'waits for it') : 'writes to it'],
    ['Outages since its start', number(store.outages)],
    ['Reservations open', number(store.open_reservations)],
    ['Settlements in memory', number(store.unsettled)],
    ['Settlements in the outbox', store.outbox_bytes ? `${bytes(store.outbox_bytes)} on this host’s disk` : 'none'],
    ['Damaged outbox files', store.outbox_damaged_files ? h('span', { class: 'chip bad' }, number(store.outbox_damaged_files)) : 'none'],
    ['Days whose counters differ', store.different_days ? h('span', { class: 'chip bad' }, number(store.different_days)) : 'none'],
  ];
  return [
    h('h2', {}, 'The store'),
    h('dl', { class: 'facts' }, facts.map(([name, value]) => [h('dt', {}, name), h('dd', {}, value)])),
    store.advice.length ? h('div', { class: 'note' }, h('p', {}, h('strong', {}, 'It could be set up better:')), h('ul', { class: 'bullets' }, store.advice.map((each) => h('li', {}, each)))) : null,
  ];
}
