// Moving through a list that the gateway gives in pages. It knows no list.

import { button, h, put } from './dom.js';
import { number } from './format.js';

/** Buttons for the page before and after. `turn(page)` is asked for another one. `show(info)` says where one is. */
export function pager(turn) {
  const element = h('nav', { class: 'pager', 'aria-label': 'Parts of the list' });
  return {
    element,
    show({ page, per_page: size, total_count: total, count }) {
      const first = (page - 1) * size;
      if (total <= size && page === 1) return put(element, h('span', { class: 'muted' }, `${number(total)} in all`));
      return put(element,
        button('Previous', () => turn(page - 1), { kind: 'small', disabled: page <= 1 }),
        h('span', { class: 'muted', role: 'status' }, `${number(count ? first + 1 : first)}–${number(first + count)} of ${number(total)}`),
        button('Next', () => turn(page + 1), { kind: 'small', disabled: first + count >= total }),
      );
    },
  };
}
