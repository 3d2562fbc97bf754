// Elements from plain values. Text is always text: nothing here takes markup, so what a tenant wrote never becomes any.

const SVG = 'http://www.w3.org/2000/svg';
const PROPERTIES = new Set(['checked', 'disabled', 'hidden', 'indeterminate', 'open', 'readOnly', 'selected', 'value']);

/** An HTML element. `on` holds listeners by event, `data` data attributes; null, undefined and false are left out. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** An SVG element, likewise. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'on') {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === 'data') {
      for (const [key, text] of Object.entries(value)) element.dataset[key] = text;
    } else if (PROPERTIES.has(name)) {
      element[name] = value;
    } else {
      element.setAttribute(name, value === true ? '' : String(value));
    }
  }
  add(element, children);
  return element;
}

/** Appends nodes and texts, lists of them too. */
export function add(element, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

/** Replaces all that is in an element. */
export function put(element, ...children) {
  element.replaceChildren();
  return add(element, children);
}

let lastId = 0;

/** An id that no other element has. */
export function freshId(word = 'id') {
  lastId += 1;
  return `${word}-${lastId}`;
}

/** A button; `kind` is `primary`, `danger`, `quiet` or nothing. */
export function button(text, onClick, { kind = '', ...props } = {}) {
  return h('button', { type: 'button', class: `button ${kind}`.trim(), on: { click: onClick }, ...props }, text);
}
