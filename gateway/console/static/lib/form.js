// Forms: labelled fields, their values, and what is wrong with them in words. A token pasted into any field but a
// secret one is refused before anything is sent.

import { ApiProblem } from './api.js';
import { button, freshId, h, put } from './dom.js';
import { SECRET_ADVICE, holdsSecret } from './secrets.js';

/** What stops a form before it is sent: a field, and what is wrong with it. */
export class FieldProblem extends Error {}

/**
 * One field: `{name, element, value(), set(value), fail(words)}`. Types are those of inputs, and `textarea`, `select`
 * (with `options` of `[value, text]`), `checks` (likewise; its value is a list), `check` and `number` (null if empty).
 */
export function field({ name, label, type = 'text', hint = '', value = '', options = [], ...props }) {
  const id = freshId(name);
  const control = controlOf({ id, name, type, value, options, props });
  const problem = h('p', { class: 'field-problem', id: `${id}-problem`, role: 'alert', hidden: true });
  const note = hint ? h('p', { class: 'field-hint', id: `${id}-hint` }, hint) : null;
  const described = [`${id}-problem`, hint ? `${id}-hint` : ''].join(' ').trim();
  control.described.setAttribute('aria-describedby', described);
  const fail = (words) => {
    put(problem, words);
    problem.hidden = !words;
    control.described.setAttribute('aria-invalid', words ? 'true' : 'false');
    if (!words) return;
    control.focused.closest('details')?.setAttribute('open', '');
    control.focused.focus();
  };
  return {
    name,
    element: wrapped({ id, type, label, control, note, problem }),
    control: control.focused,
    fail,
    set: control.set,
    value() {
      fail('');
      const now = control.value();
      if (type !== 'password' && holdsSecret(String(now))) throw refused(SECRET_ADVICE, fail);
      if (type === 'checks' && props.required && !now.length) throw refused('Choose one at least.', fail);
      if (!control.focused.checkValidity?.()) throw refused(control.focused.validationMessage, fail);
      return now;
    },
  };
}

function refused(words, fail) {
  fail(words);
  return new FieldProblem(words);
}

function wrapped({ id, type, label, control, note, problem }) {
  if (type === 'checks') {
    return h('fieldset', { class: 'field' }, h('legend', {}, label), control.element, note, problem);
  }
  if (type === 'check') {
    return h('div', { class: 'field field-check' }, control.element, h('label', { for: id }, label), note, problem);
  }
  return h('div', { class: 'field' }, h('label', { for: id }, label), control.element, note, problem);
}

function controlOf({ id, name, type, value, options, props }) {
  if (type === 'checks') return checksOf(id, name, value, options);
  const common = { id, name, spellcheck: 'false', autocomplete: 'off', autocapitalize: 'off', ...props };
  let element;
  if (type === 'select') {
    element = h('select', common, options.map(([key, text]) => h('option', { value: key }, text)));
    element.value = value;
  } else if (type === 'textarea') {
    element = h('textarea', { rows: 3, ...common, value });
  } else if (type === 'check') {
    element = h('input', { ...common, type: 'checkbox', checked: Boolean(value) });
  } else {
    element = h('input', { ...common, type, value: value ?? '', step: type === 'number' ? (props.step ?? 'any') : null });
  }
  const read = {
    check: () => element.checked,
    number: () => (element.value === '' ? null : Number(element.value)),
    password: () => element.value.trim(),
  };
  const set = (now) => (type === 'check' ? (element.checked = now) : (element.value = now ?? ''));
  return { element, focused: element, described: element, value: read[type] ?? (() => element.value), set };
}

function checksOf(id, name, value, options) {
  const boxes = options.map(([key, text, note]) => {
    const box = h('input', { type: 'checkbox', id: `${id}-${key}`, name, value: key, checked: value.includes(key) });
    return { box, row: h('div', { class: 'check' }, box, h('label', { for: box.id }, text, note ? h('small', {}, note) : null)) };
  });
  const element = h('div', { class: 'checks', role: 'group' }, boxes.map(({ row }) => row));
  return {
    element,
    focused: boxes[0].box,
    described: element,
    value: () => boxes.filter(({ box }) => box.checked).map(({ box }) => box.value),
    set: (now) => boxes.forEach(({ box }) => (box.checked = now.includes(box.value))),
  };
}

/**
 * A form around fields. `submit(values)` gets what they hold by name; what it raises is said above the button. `parts`
 * are the elements in it, where they are more than the fields one after the other.
 */
export function form({ fields, parts = fields.map((each) => each.element), action, submit, kind = 'primary', cancel = null, label = null }) {
  const problem = h('p', { class: 'problem', role: 'alert', hidden: true });
  const send = button(action, null, { kind, type: 'submit' });
  const actions = h('div', { class: 'form-actions' }, cancel ? button('Cancel', cancel) : null, send);
  const element = h('form', { class: 'form', method: 'post', novalidate: true, 'aria-label': label }, parts, problem, actions);
  element.addEventListener('submit', async (event) => {
    event.preventDefault();
    problem.hidden = true;
    send.disabled = true;
    try {
      await submit(Object.fromEntries(fields.map((each) => [each.name, each.value()])));
    } catch (error) {
      if (error instanceof FieldProblem) return;
      if (error.name === 'AbortError') return;
      put(problem, describe(error));
      problem.hidden = false;
      if (!(error instanceof ApiProblem)) console.error(error);
    } finally {
      send.disabled = false;
    }
  });
  return element;
}

/** A problem in words, with when to come back and the id by which an operator finds it in the log. */
export function describe(error) {
  if (!(error instanceof ApiProblem)) return `The console failed: ${error.message}`;
  const again = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : '';
  const id = error.requestId ? h('small', { class: 'request-id' }, `Request ${error.requestId}`) : null;
  const stop = /[.!?]$/.test(error.message) ? '' : '.';
  return [`${error.message}${stop}${again}`, id];
}
