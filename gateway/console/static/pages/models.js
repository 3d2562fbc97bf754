// The models that this token may call: prices, limits, what they can do, and calls to paste.

import { codeBlock, openDialog } from '../lib/dialog.js';
import { button, h } from '../lib/dom.js';
import { compact, decimal, number } from '../lib/format.js';
import { TEXT, models } from '../lib/models.js';
import { emptyBox } from '../lib/page.js';
import { snippets } from '../lib/snippets.js';
import { table } from '../lib/table.js';
import { tabs } from '../lib/tabs.js';

export function show(page) {
  const place = h('section', { class: 'card flush' });
  page.append(
    h('p', { class: 'lead' }, 'What this token may call. Prices are neurons for a million tokens; a neuron is the unit of price and quota.'),
    place,
  );
  page.load(place, async (signal) => {
    const found = await models(page, { anew: true, signal });
    const list = table({
      caption: 'Models', rows: found, search: (model) => `${model.name} ${model.description} ${model.task}`, columns: columns(page),
      empty: emptyBox('No model may be called with this token.', 'Its models are ', page.session.identity.models.join(', '), '.'),
    });
    return list.element;
  });
}

function columns(page) {
  const price = (title, key) => ({
    title, numeric: true, sort: (model) => model.prices[key], cell: (model) => (model.prices[key] === null ? '–' : compact(model.prices[key])),
  });
  return [
    { title: 'Model', header: true, sort: (model) => model.name, cell: (model) => nameCell(page, model) },
    { title: 'Does', sort: (model) => model.task, cell: (model) => [h('span', { class: 'nowrap' }, model.task), features(model)] },
    { title: 'Context', numeric: true, sort: (model) => model.inputMax || model.context, cell: (model) => number(model.inputMax || model.context) },
    price('Input', 'input'),
    price('Cached', 'cached'),
    price('Output', 'output'),
    { title: 'Actions', hidden: true, cell: (model) => button('How to call it', () => details(page, model), { kind: 'small', 'aria-label': `How to call it: ${model.name}` }) },
  ];
}

function nameCell(page, model) {
  const name = h('button', { type: 'button', class: 'link mono', on: { click: () => details(page, model) } }, model.name);
  return [name, model.description ? h('small', { class: 'under' }, model.description) : null];
}

function features(model) {
  const words = [
    model.tools && 'tools', model.reasoning && 'reasoning', model.beta && 'beta', model.dimensions && `${model.dimensions} dimensions`,
    model.ends && `ends ${model.ends}`,
  ].filter(Boolean);
  return words.length ? h('div', {}, words.map((word) => h('span', { class: 'chip' }, word))) : null;
}

function details(page, model) {
  const base = location.origin;
  const examples = tabs({
    label: 'Languages',
    tabs: snippets({ base, model: model.name, task: model.task }).map(([title, code]) => ({ title, panel: () => codeBlock(code, { label: title }) })),
  });
  const schema = h('div');
  const body = [
    model.description ? h('p', {}, model.description) : null,
    h('dl', { class: 'facts' }, facts(model).map(([name, value]) => [h('dt', {}, name), h('dd', {}, value)])),
    model.task === TEXT ? h('p', {}, h('a', { href: `#/playground?model=${encodeURIComponent(model.name)}`, on: { click: () => close() } }, 'Try it in the playground')) : null,
    h('h3', {}, 'Call it'),
    examples,
    h('details', { class: 'help', on: { toggle: (event) => event.target.open && !schema.childNodes.length && schemas(page, model, schema) } },
      h('summary', {}, 'Every field: its JSON Schemas at /ai/run'), schema),
  ];
  const close = openDialog({ title: model.name, body, wide: true });
}

function facts(model) {
  const price = (value) => (value === null ? '–' : [decimal(value), ' neurons', model.neuronUsd ? h('small', {}, ` ≈ $${decimal(value * model.neuronUsd)}`) : null]);
  return [
    ['Task', model.task],
    ['Tokens at most', number(model.inputMax || model.context)],
    ['A million input tokens', price(model.prices.input)],
    ['read from the cache', price(model.prices.cached)],
    ...(model.prices.output === null ? [] : [['A million output tokens', price(model.prices.output)]]),
    ...(model.terms ? [['Terms', model.terms]] : []),
    ...(model.info ? [['Info', model.info]] : []),
  ];
}

function schemas(page, model, place) {
  page.load(place, async (signal) => {
    const { input, output } = await page.api.get('/ai/models/schema', { query: { model: model.name }, signal });
    return [
      h('h4', {}, 'Input'), codeBlock(JSON.stringify(input, null, 2), { label: 'Input' }),
      h('h4', {}, 'Output'), codeBlock(JSON.stringify(output, null, 2), { label: 'Output' }),
    ];
  });
}
