// Two people change the same thing: what the other one changed, in words, and a form's submit that tells of it. It knows
// neither plans nor accounts.

import { button, h, put } from './dom.js';
import { notify } from './dialog.js';

function said(value) {
  if (value === null || value === undefined || value === '') return 'nothing';
  if (typeof value === 'boolean') return value ? 'yes' : 'no';
  return typeof value === 'number' ? value.toLocaleString('en') : String(value);
}

/** What differs between two flat objects, a sentence for each name that `names` (name → words) has. */
export function differences(before, now, names) {
  return Object.entries(names)
    .filter(([name]) => JSON.stringify(before[name] ?? null) !== JSON.stringify(now[name] ?? null))
    .map(([name, words]) => `${words}: ${said(before[name])} → ${said(now[name])}`);
}

/**
 * Runs `save(etag)`. Where others changed the thing meanwhile, `read()` gives `{flat, etag}` of now, and the place says
 * what they changed; the next try is based on that. `state` holds `{flat, etag}` that the form began with; `take(flat)`
 * puts the values of now into the form. Returns whether it was saved.
 */
export async function savedOrTold({ place, state, names, save, read, take }) {
  try {
    await save(state.etag);
    return true;
  } catch (problem) {
    if (problem.status !== 412) throw problem;
  }
  const now = await read();
  const changed = differences(state.flat, now.flat, names);
  Object.assign(state, now);
  put(place, h('div', { class: 'note', role: 'alert' },
    h('p', {}, h('strong', {}, 'Somebody else changed this while you were editing. Nothing of yours was saved.')),
    changed.length ? h('ul', { class: 'bullets' }, changed.map((each) => h('li', {}, each))) : h('p', {}, 'It is the same as before by now.'),
    h('p', {}, 'Your values are still in the form. Save again to put them in place of theirs, or begin anew from theirs.'),
    button('Take theirs', () => {
      take(now.flat);
      put(place);
      notify('The form has what is in force now.');
    }, { kind: 'small' }),
  ));
  return false;
}
