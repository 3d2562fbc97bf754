// Plans: what many accounts may use, changed by one operator at a time.

import { savedOrTold } from '../../lib/conflict.js';
import { confirmed, notify, openDialog } from '../../lib/dialog.js';
import { button, h } from '../../lib/dom.js';
import { field, form } from '../../lib/form.js';
import { decimal, number } from '../../lib/format.js';
import { icon } from '../../lib/icons.js';
import { LIMITS, limitFields, limitName, limitsOf } from '../../lib/limits.js';
import { table } from '../../lib/table.js';

const PLANS = '/client/v4/operator/plans';
const SCHEDULING = {
  weight: ['Weight', 'Its share of the machines where several accounts want them; 1 is usual.', { min: 0.01, max: 100, step: 'any' }],
  sequences: ['Sequences at once', 'Of one account in one replica.', { min: 1, step: 1 }],
  kv_blocks: ['KV blocks', 'Of one account in one replica.', { min: 1, step: 1 }],
  floor_blocks: ['Cached blocks that others leave it', '', { min: 0, step: 1 }],
  cap_blocks: ['Cached blocks at most', 'That nothing uses.', { min: 0, step: 1 }],
  wait_s: ['Seconds that a call waits', 'Before it is refused; empty: as long as it lives.', { min: 0.1, max: 3600, step: 'any' }],
};
const NAMES = {
  ...Object.fromEntries(Object.keys(LIMITS).map((key) => [key, limitName(key)])),
  ...Object.fromEntries(Object.entries(SCHEDULING).map(([key, [label]]) => [key, label])),
  strict: 'Strict',
};
const STRICT = 'With several Redis servers: what it grants, all of them have first, so that no failover passes a limit. While one of them is away, calls of its accounts get 503.';

export function show(page) {
  const place = h('section', { class: 'card flush' });
  page.main.querySelector('.page-head').append(button([icon('add'), 'New plan'], () => edit(page, null, () => reload()), { kind: 'primary' }));
  page.append(h('p', { class: 'lead' }, 'What accounts are sold. A change is in force for all accounts of the plan within a second.'), place);
  const reload = page.load(place, async (signal) => list(page, await page.api.get(PLANS, { signal }), () => reload()).element);
}

function list(page, plans, reload) {
  return table({
    caption: 'Plans', rows: plans,
    columns: [
      { title: 'Plan', header: true, sort: (plan) => plan.name, cell: (plan) => plan.name },
      { title: 'Limits of each account', cell: limits },
      { title: 'Scheduling and cache', cell: (plan) => lines(Object.entries(SCHEDULING).filter(([key]) => key !== 'weight' && plan[key] !== null).map(([key, [label]]) => `${label}: ${decimal(plan[key])}`)) },
      { title: 'Strict', cell: (plan) => (plan.strict ? 'yes' : 'no') },
      { title: 'Weight', numeric: true, sort: (plan) => plan.weight, cell: (plan) => decimal(plan.weight) },
      { title: 'Actions', hidden: true, cell: (plan) => [
        button('Change', () => edit(page, plan.name, reload), { kind: 'small quiet', 'aria-label': `Change ${plan.name}` }),
        removal(page, plan, reload),
      ] },
    ],
  });
}

const lines = (words) => (words.length ? words.map((each) => h('div', {}, each)) : '–');

function limits(plan) {
  const own = Object.keys(LIMITS).filter((key) => typeof plan.limits[key] === 'number').map((key) => `${limitName(key)}: ${number(plan.limits[key])}`);
  const classes = Object.keys(plan.limits.classes ?? {});
  return lines([...own, ...(classes.length ? [`and of the classes ${classes.join(', ')}`] : [])]);
}

const flatOf = (plan) => ({ ...plan.limits, strict: plan.strict, ...Object.fromEntries(Object.keys(SCHEDULING).map((key) => [key, plan[key]])) });

async function read(page, name) {
  const { result, headers } = await page.api.call('GET', `${PLANS}/${name}`);
  return { flat: flatOf(result), etag: headers.get('etag'), limits: result.limits };
}

/** A dialog for a plan as it is now, which is read anew; who saves second is told what the first one changed. */
async function edit(page, name, reload) {
  let current = { flat: { strict: false }, etag: null, limits: {} };
  try {
    if (name) current = await read(page, name);
  } catch (problem) {
    return notify(problem.message);
  }
  const title = field({ name: 'name', label: 'Name', value: '', required: true, pattern: '[a-z0-9][a-z0-9._\\-]{0,31}', maxlength: 32, hint: 'Small letters, digits and . _ -' });
  const allowed = limitFields(current.limits);
  const scheduling = Object.entries(SCHEDULING).map(([key, [label, hint, bounds]]) =>
    field({ name: key, label, hint, type: 'number', value: current.flat[key] ?? (key === 'weight' ? 1 : ''), ...bounds }));
  const strict = field({ name: 'strict', label: 'Strict: no failover passes its limits', type: 'check', value: current.flat.strict, hint: STRICT });
  const conflict = h('div');
  const entry = form({
    label: name ? 'Change a plan' : 'New plan',
    fields: [...(name ? [] : [title]), ...allowed, strict, ...scheduling],
    parts: [
      name ? null : title.element, h('div', { class: 'form-grid' }, allowed.map((each) => each.element)),
      strict.element,
      h('details', { class: 'help' }, h('summary', {}, 'Scheduling and cache'), h('div', { class: 'form-grid' }, scheduling.map((each) => each.element))),
      conflict,
    ],
    action: name ? 'Save' : 'Make the plan',
    cancel: () => close(),
    submit: async (values) => {
      const of = name ?? values.name;
      const body = { limits: limitsOf(values, current.limits), strict: values.strict };
      for (const key of Object.keys(SCHEDULING)) if (values[key] !== null) body[key] = values[key];
      const saved = await savedOrTold({
        place: conflict, state: current, names: NAMES,
        save: (etag) => page.api.call('PUT', `${PLANS}/${of}`, { body, headers: etag && etag !== '"0"' ? { 'if-match': etag } : { 'if-none-match': '*' } }),
        read: () => read(page, of),
        take: (flat) => [...allowed, strict, ...scheduling].forEach((each) => each.set(flat[each.name] ?? '')),
      });
      if (!saved) return;
      close();
      notify(`The plan ${of} is in force within a second.`);
      reload();
    },
  });
  const close = openDialog({ title: name ? `Change the plan ${name}` : 'New plan', body: entry, wide: true });
}

function removal(page, plan, reload) {
  const word = plan.name === 'default' ? 'Reset' : 'Remove';
  return button(word, () => remove(page, plan, reload), { kind: 'small danger', 'aria-label': `${word} ${plan.name}` });
}

async function remove(page, plan, reload) {
  const reset = plan.name === 'default';
  const text = reset ? 'The default plan gets the limits that it had at first.' : 'A plan that accounts have is not removed: give them another one first.';
  if (!await confirmed({ title: reset ? 'Reset the default plan?' : `Remove the plan ${plan.name}?`, text, action: reset ? 'Reset it' : 'Remove it' })) return;
  try {
    await page.api.call('DELETE', `${PLANS}/${plan.name}`);
    notify(reset ? 'The default plan is as it was at first.' : `The plan ${plan.name} is removed.`);
  } catch (problem) {
    notify(problem.message);
  }
  reload();
}
