// Tabs: one of several panels at a time, moved between with the arrow keys.

import { freshId, h, put } from './dom.js';

/** Tabs of `{title, panel()}`, each made when it is first shown. `onShow` gets the title. */
export function tabs({ label, tabs: entries, chosen = 0, onShow = () => {} }) {
  const id = freshId('tabs');
  const panel = h('div', { class: 'tab-panel', role: 'tabpanel', id: `${id}-panel`, tabindex: '0' });
  const heads = entries.map(({ title }, i) =>
    h('button', { type: 'button', role: 'tab', id: `${id}-${i}`, 'aria-controls': `${id}-panel`, on: { click: () => show(i) } }, title),
  );
  const list = h('div', { class: 'tabs', role: 'tablist', 'aria-label': label, on: { keydown: move } }, heads);

  function move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = (heads.indexOf(document.activeElement) + step + heads.length) % heads.length;
    show(next);
    heads[next].focus();
  }

  function show(chosenNow) {
    heads.forEach((head, i) => {
      head.setAttribute('aria-selected', String(i === chosenNow));
      head.tabIndex = i === chosenNow ? 0 : -1;
    });
    panel.setAttribute('aria-labelledby', heads[chosenNow].id);
    put(panel, entries[chosenNow].panel());
    onShow(entries[chosenNow].title);
  }

  show(chosen);
  return h('div', { class: 'tab-block' }, list, panel);
}
