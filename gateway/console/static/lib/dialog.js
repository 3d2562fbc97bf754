// Dialogs over the page, short notices beside it, and buttons that copy. They know no API.

import { button, freshId, h, put } from './dom.js';
import { icon } from './icons.js';

/** Opens a dialog and returns what closes it; `onClose` runs however it is closed. */
export function openDialog({ title, body, actions = [], onClose = () => {}, wide = false }) {
  const id = freshId('dialog');
  const dialog = h('dialog', { class: wide ? 'dialog wide' : 'dialog', 'aria-labelledby': id });
  const close = () => dialog.close();
  const cross = button(icon('close'), close, { kind: 'icon-button', 'aria-label': 'Close' });
  const footer = actions.length ? h('footer', { class: 'dialog-actions' }, actions) : null;
  dialog.append(
    h('header', { class: 'dialog-head' }, h('h2', { id }, title), cross),
    h('div', { class: 'dialog-body' }, body),
  );
  if (footer) dialog.append(footer);
  dialog.addEventListener('close', () => {
    dialog.remove();
    onClose();
  });
  document.body.append(dialog);
  dialog.showModal();
  return close;
}

/** Asks before something is done that cannot be undone. Whether the answer was yes. */
export function confirmed({ title, text, action, kind = 'danger' }) {
  return new Promise((resolve) => {
    let answer = false;
    const yes = button(action, () => {
      answer = true;
      close();
    }, { kind });
    const no = button('Keep it as it is', () => close());
    const close = openDialog({ title, body: h('p', {}, text), actions: [no, yes], onClose: () => resolve(answer) });
  });
}

const NOTICE_MS = 6000;

/** Says something in passing, aloud too. */
export function notify(text) {
  let place = document.querySelector('.notices');
  if (!place) {
    place = h('div', { class: 'notices', role: 'status', 'aria-live': 'polite' });
    document.body.append(place);
  }
  const notice = h('p', { class: 'notice' }, text);
  place.append(notice);
  setTimeout(() => notice.remove(), NOTICE_MS);
}

/** A button that copies what `text` returns at that moment. */
export function copyButton(text, label = 'Copy') {
  const word = h('span', {}, label);
  const picture = h('span', { class: 'icon-place' }, icon('copy'));
  return button([picture, word], async () => {
    const copied = await copy(text());
    put(word, copied ? 'Copied' : 'Select it by hand');
    put(picture, icon(copied ? 'done' : 'copy'));
    setTimeout(() => {
      put(word, label);
      put(picture, icon('copy'));
    }, 2000);
  }, { kind: 'quiet small' });
}

async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // not permitted: as without it
    }
  }
  // Over plain HTTP from another machine browsers have no clipboard for pages, but still copy what is selected.
  const area = h('textarea', { class: 'off-screen', 'aria-hidden': 'true', value: text });
  (document.querySelector('dialog[open]') ?? document.body).append(area);
  area.select();
  const copied = document.execCommand('copy');
  area.remove();
  return copied;
}

/** A block of code with a button that copies it. `copied` is what is copied where that is not what is shown. */
export function codeBlock(code, { label = 'Code', copied = () => code } = {}) {
  return h(
    'div',
    { class: 'code-block' },
    h('pre', { tabindex: '0', role: 'region', 'aria-label': label }, h('code', {}, code)),
    copyButton(copied),
  );
}
