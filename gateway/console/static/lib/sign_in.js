// The way in: one field for a token. The form has no address of its own, so a token never gets into one.

import { showAway } from './away.js';
import { h, put } from './dom.js';
import { field, form } from './form.js';
import { flame } from './icons.js';

export function showSignIn({ session, connection, api, reason }) {
  document.title = 'Sign in · Hearth';
  const token = field({ name: 'token', label: 'Token', type: 'password', required: true, maxlength: 8192, placeholder: 'hearth_…' });
  const stay = field({
    name: 'stay', label: 'Stay signed in until this tab is closed', type: 'check',
    hint: 'Otherwise the token is forgotten when the page is loaded again.',
  });
  const entry = form({
    label: 'Sign in',
    fields: [token, stay],
    action: 'Sign in',
    submit: ({ token: text, stay: keep }) => session.signIn(api, text, keep),
  });
  put(
    document.body,
    h('div', { class: 'away-place' }),
    h(
      'main',
      { class: 'sign-in' },
      h('div', { class: 'sign-in-card' },
        h('div', { class: 'brand' }, flame(), h('h1', {}, 'Hearth')),
        reason ? h('p', { class: 'problem', role: 'alert' }, `You are signed out. ${reason}`) : null,
        h('p', { class: 'lead' }, 'Sign in with a token: one of your team, or the operator’s.'),
        entry,
        h('details', { class: 'help' },
          h('summary', {}, 'Where do I find a token?'),
          h('p', {}, 'The server’s first start made one. It is printed there, and kept in ', h('code', {}, '.hearth/credentials.json'), '.'),
          h('p', {}, 'Whoever looks after this server makes others: ', h('code', {}, 'hearth accounts create NAME'), ' or ', h('code', {}, 'hearth tokens mint ACCOUNT'), '.'),
          h('p', {}, 'The pages for operators open with one of ', h('code', {}, 'hearth tokens mint first --permissions operator'), '.'),
        ),
      ),
    ),
  );
  showAway(document.querySelector('.away-place'), connection);
  token.control.focus();
}
