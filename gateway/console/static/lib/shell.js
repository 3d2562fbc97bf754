// The frame around the pages: navigation by what the token may do, the page that the address names, and what is said
// when the gateway is away. It knows no single page.

import { PAGES } from '../pages.js';
import { ApiProblem } from './api.js';
import { showAway } from './away.js';
import { button, h, put } from './dom.js';
import { relative } from './format.js';
import { flame, icon } from './icons.js';
import { Page, emptyBox, problemBox } from './page.js';
import { THEMES, applyTheme, theme } from './theme.js';

const RENEWED = 'The console was renewed while it was open. Load it again, and sign in.';
const UNFETCHED = 'This page was not fetched yet. It opens when the gateway answers.';
const FETCH_AFTER_MS = 1000; // what is looked at first comes first

export class Shell {
  #page = null;
  #links = new Map();
  #closing = new AbortController();

  constructor({ session, connection, api }) {
    Object.assign(this, { session, connection, api });
    this.pages = PAGES.filter((page) => session.may(...page.needs));
    this.main = h('main', { id: 'main', tabindex: '-1' });
    const nav = h('nav', { class: 'nav', id: 'nav', 'aria-label': 'Pages' }, this.#groups());
    const menu = button(icon('menu'), () => this.#toggleMenu(), {
      kind: 'icon-button menu', 'aria-label': 'Menu', 'aria-expanded': 'false', 'aria-controls': 'side',
    });
    const side = h('div', { class: 'side', id: 'side' }, nav, this.#foot());
    const brand = h('a', { class: 'brand', href: `#/${this.pages[0]?.path ?? ''}` }, flame(), h('span', {}, 'Hearth'));
    const away = h('div', { class: 'away-place' });
    put(
      document.body,
      h('a', { class: 'skip', href: '#main', on: { click: (event) => this.#skip(event) } }, 'Skip to the page'),
      away,
      h('div', { class: 'frame' }, h('header', { class: 'top' }, brand, menu), side, this.main),
    );
    this.menu = menu;
    showAway(away, connection, this.#closing.signal);
    window.addEventListener('hashchange', () => this.#open(true), { signal: this.#closing.signal });
    document.addEventListener('keydown', (event) => event.key === 'Escape' && this.#toggleMenu(false), { signal: this.#closing.signal });
    this.#open(false);
    this.#fetchPages();
  }

  close() {
    this.#closing.abort();
    this.#page?.leave();
    for (const dialog of document.querySelectorAll('dialog')) dialog.close();
    history.replaceState(null, '', location.pathname);
  }

  #groups() {
    const names = [...new Set(this.pages.map((page) => page.group))];
    const links = (name) => this.pages.filter((page) => page.group === name).map((page) => this.#link(page));
    const help = h('a', { href: '/docs' }, icon('audit'), h('span', {}, 'The API'));
    const groups = [...names.map((name) => [name, links(name)]), ['Help', [help]]];
    return groups.map(([name, each]) => h('section', {}, h('h2', {}, name), h('ul', {}, each.map((link) => h('li', {}, link)))));
  }

  #link(page) {
    const link = h('a', { href: `#/${page.path}` }, icon(page.icon), h('span', {}, page.title));
    this.#links.set(page.path, link);
    return link;
  }

  #foot() {
    const { account_name: name, id, expires_on: expires } = this.session.identity;
    const themes = h(
      'select',
      { 'aria-label': 'Colours', on: { change: (event) => applyTheme(event.target.value) } },
      THEMES.map((each) => h('option', { value: each, selected: each === theme() }, { auto: 'System', light: 'Light', dark: 'Dark' }[each])),
    );
    return h(
      'section',
      { class: 'side-foot', 'aria-label': 'Signed in' },
      h('p', { class: 'who' }, h('strong', {}, name), h('small', { title: id }, expires ? `token ends ${relative(expires)}` : `token ${id}`)),
      h('div', { class: 'row' }, themes, button([icon('leave'), 'Sign out'], () => this.session.end(), { kind: 'quiet small' })),
    );
  }

  #toggleMenu(open = this.menu.getAttribute('aria-expanded') !== 'true') {
    this.menu.setAttribute('aria-expanded', String(open));
    document.body.classList.toggle('menu-open', open);
  }

  #skip(event) {
    event.preventDefault();
    this.main.focus();
  }

  /** Opens the page that the address names; one that is none, or not for this token, is forgotten. */
  async #open(moved) {
    const [path, query = ''] = location.hash.replace(/^#\/?/, '').split('?');
    const entry = this.pages.find((page) => page.path === path) ?? this.pages[0];
    if (entry && entry.path !== path) history.replaceState(null, '', `#/${entry.path}`);
    this.#page?.leave();
    this.#toggleMenu(false);
    if (!entry) {
      put(this.main, h('h1', {}, 'Nothing here'), emptyBox('This token opens no page of the console.', 'Ask whoever gave it to you for more permissions.'));
      return;
    }
    for (const [each, link] of this.#links) each === entry.path ? link.setAttribute('aria-current', 'page') : link.removeAttribute('aria-current');
    const heading = h('h1', { tabindex: '-1' }, entry.title);
    document.title = `${entry.title} · Hearth`;
    put(this.main, h('div', { class: 'page-head' }, heading));
    const page = (this.#page = new Page({ main: this.main, shell: this, title: entry.title, query: new URLSearchParams(query) }));
    if (moved) {
      heading.focus({ preventScroll: true });
      window.scrollTo(0, 0);
    }
    try {
      const { show } = await entry.module();
      if (!page.signal.aborted) await show(page);
    } catch (error) {
      if (page.signal.aborted) return;
      await this.#failed(page, error);
    }
  }

  /** Says why a page did not open. One whose script could not be fetched is opened once the gateway is back. */
  async #failed(page, error) {
    const missing = error instanceof TypeError && /import|module/i.test(error.message);
    if (!missing) {
      console.error(error);
      page.append(problemBox(error));
    } else if (await this.connection.check()) {
      page.append(problemBox(new ApiProblem(RENEWED), () => location.reload()));
    } else {
      page.append(problemBox(new ApiProblem(UNFETCHED)));
      page.listen(this.connection, 'change', () => this.#open(false));
    }
  }

  /** Fetches the pages' scripts while there is nothing else to do, so that they open even without a gateway. */
  #fetchPages() {
    const timer = setTimeout(() => this.pages.forEach((page) => page.module().catch(() => {})), FETCH_AFTER_MS);
    this.#closing.signal.addEventListener('abort', () => clearTimeout(timer), { once: true });
  }
}
