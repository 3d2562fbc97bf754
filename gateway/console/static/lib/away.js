// What is said while the gateway is away, on every page and on the sign-in.

import { button, h, put } from './dom.js';

/** Says in a place of the document that the gateway is away, and when it is asked next. */
export function showAway(place, connection, signal) {
  place.setAttribute('role', 'status');
  let timer = 0;
  const draw = () => {
    clearInterval(timer);
    if (!connection.away) return put(place);
    const when = h('span', { 'aria-hidden': 'true' });
    const tick = () => put(when, ` Trying again in ${Math.max(0, Math.ceil((connection.retryAt - Date.now()) / 1000))} s.`);
    put(place, h('p', { class: 'away' }, h('span', {}, 'The gateway does not answer.', when), button('Try now', () => connection.retry(), { kind: 'small' })));
    tick();
    timer = setInterval(tick, 1000);
  };
  connection.addEventListener('change', draw, { signal });
  signal?.addEventListener('abort', () => clearInterval(timer), { once: true });
  draw();
}
