// Who is signed in. The token is kept in memory, or, if its user asks for that, in this tab's session storage, which
// ends with the tab or with signing out. It is in no URL, and in no storage that stays.

const KEY = 'hearth.token';

/** Tells of `change`, with the reason in its detail where a session has ended by itself. */
export class Session extends EventTarget {
  identity = null; // what the API says of the token
  #token = '';

  get token() {
    return this.#token;
  }

  /** Whether the token has one of these permissions; all have none. */
  may(...permissions) {
    return permissions.length === 0 || permissions.some((each) => this.identity?.permissions.includes(each));
  }

  get accountPath() {
    return `/client/v4/accounts/${this.identity.account_id}`;
  }

  /** Signs in with a token. Raises what the API refuses it with. */
  async signIn(api, token, stay) {
    await this.#open(api, token);
    if (stay) sessionStorage.setItem(KEY, token);
    this.dispatchEvent(new Event('change'));
  }

  /** Whether a token waits in this tab for a gateway that can say whether it is in force. */
  get waits() {
    return !this.identity && sessionStorage.getItem(KEY) !== null;
  }

  /** Goes on with the session of this tab, if its user asked for that and the token is still in force. */
  async resume(api) {
    const token = sessionStorage.getItem(KEY);
    if (!token) return;
    try {
      await this.#open(api, token);
    } catch (problem) {
      if (problem.status === 401 || problem.status === 403) this.#forget();
    }
  }

  /** Ends the session: nothing of the token is kept. */
  end(reason = '') {
    if (!this.identity) return;
    this.#forget();
    this.dispatchEvent(new CustomEvent('change', { detail: { reason } }));
  }

  async #open(api, token) {
    this.#token = token;
    try {
      this.identity = await api.get('/client/v4/user/tokens/verify', { signingIn: true });
    } catch (problem) {
      this.#token = '';
      throw problem;
    }
  }

  #forget() {
    this.identity = null;
    this.#token = '';
    sessionStorage.removeItem(KEY);
  }
}
