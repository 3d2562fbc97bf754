// What a page's module works with: its place in the document, the API, loading with problems said, and polling, all of
// which end when the page is left.

import { ApiProblem } from './api.js';
import { button, h, put } from './dom.js';
import { describe } from './form.js';

export class Page {
  #connection;
  #leaving = new AbortController();

  constructor({ main, shell, title, query }) {
    this.main = main; // empty but for the heading
    this.api = shell.api;
    this.session = shell.session;
    this.title = title;
    this.query = query; // URLSearchParams behind the page's path
    this.#connection = shell.connection;
  }

  /** Aborted when the page is left. */
  get signal() {
    return this.#leaving.signal;
  }

  leave() {
    this.#leaving.abort();
  }

  /** Appends to the page. */
  append(...nodes) {
    this.main.append(...nodes);
  }

  /** Keeps choices in the address, for a reload or a bookmark. They are words of ours, never what somebody typed. */
  remember(choices) {
    for (const [name, value] of Object.entries(choices)) this.query.set(name, value);
    const [path] = location.hash.split('?');
    history.replaceState(null, '', `${path}?${this.query}`);
  }

  /**
   * Fills a place with what `make(signal)` returns, and says in it what goes wrong; goes on by itself once a gateway
   * that went away is back. Returns a function that fills it anew; an earlier filling is given up.
   */
  load(place, make) {
    let current = null;
    let failed = false;
    const run = async ({ quietly = false } = {}) => {
      current?.abort();
      const mine = (current = new AbortController());
      place.setAttribute('aria-busy', 'true');
      if (!place.childNodes.length) put(place, h('p', { class: 'loading' }, 'Loading …'));
      try {
        const made = await make(mine.signal);
        if (mine.signal.aborted) return;
        failed = false;
        if (made !== undefined) put(place, made);
      } catch (error) {
        if (mine.signal.aborted) return;
        if (!(error instanceof ApiProblem)) console.error(error);
        failed = true;
        if (!quietly) put(place, problemBox(error, () => run()));
      } finally {
        if (!mine.signal.aborted) place.removeAttribute('aria-busy');
      }
    };
    this.listen(this.#connection, 'change', () => {
      if (failed && !this.#connection.away) run();
    });
    this.signal.addEventListener('abort', () => current.abort(), { once: true });
    run();
    return run;
  }

  /** Runs `work` every so many seconds, while the page is seen and the gateway answers. */
  every(seconds, work) {
    const timer = setInterval(() => {
      if (!document.hidden && !this.#connection.away) work();
    }, 1000 * seconds);
    this.signal.addEventListener('abort', () => clearInterval(timer), { once: true });
  }

  /** Listens for as long as the page is there. */
  listen(target, event, listener) {
    target.addEventListener(event, listener, { signal: this.signal });
  }
}

/** A problem in words, with a button that tries again. */
export function problemBox(error, retry = null) {
  return h(
    'div',
    { class: 'problem', role: 'alert' },
    h('p', {}, describe(error)),
    retry ? button('Try again', retry, { kind: 'small' }) : null,
  );
}

/** One number, what it counts, and a word about it. */
export function statCard(label, value, note) {
  return h('div', { class: 'card stat' },
    h('span', { class: 'stat-label' }, label), h('span', { class: 'stat-value' }, value), h('span', { class: 'stat-note' }, note));
}

/** What is shown where there is nothing yet: why, and what to do about it. */
export function emptyBox(title, ...words) {
  return h('div', { class: 'empty' }, h('p', { class: 'empty-title' }, title), h('p', {}, words));
}
