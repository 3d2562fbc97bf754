// Calls of the public API: envelopes opened, errors in words, streams read. It knows no page.

import { hearClock } from './clock.js';
import { SECRET_ADVICE, holdsSecret } from './secrets.js';

const PAGES_MAX = 200;

/** Why a call has no result. `status` is 0 where the gateway did not answer at all. */
export class ApiProblem extends Error {
  constructor(message, { status = 0, code = 0, requestId = '', retryAfterS = null } = {}) {
    super(message);
    Object.assign(this, { status, code, requestId, retryAfterS });
  }
}

const GONE = 'The gateway did not answer. Perhaps it is being restarted, or the network is down.';
const GONE_WRITING = `${GONE} Nobody knows whether this took effect: look before you try again.`;
const STATUS_WORDS = {
  502: 'A proxy before the gateway got no answer from it.',
  503: 'The gateway cannot serve this now.',
  504: 'A proxy before the gateway waited too long for its answer.',
};

export class Api {
  #session;
  #connection;

  constructor(session, connection) {
    this.#session = session;
    this.#connection = connection;
  }

  /** The path of an account's resource, of the session's own account. */
  account(path = '') {
    return this.#session.accountPath + path;
  }

  /** The result of a GET. */
  async get(path, options = {}) {
    return (await this.call('GET', path, options)).result;
  }

  /** All items of a list that comes in pages. */
  async all(path, { query = {}, perPage = 100, ...options } = {}) {
    const items = [];
    for (let page = 1; page <= PAGES_MAX; page += 1) {
      const part = await this.call('GET', path, { ...options, query: { ...query, page, per_page: perPage } });
      items.push(...part.result);
      if (items.length >= (part.info?.total_count ?? 0) || part.result.length === 0) break;
    }
    return items;
  }

  /** One call: `{result, info, headers}` of an envelope, `{text, headers}` of what is no JSON. Raises ApiProblem. */
  async call(method, path, { query, body, headers, signal, signingIn = false } = {}) {
    const answer = await this.#fetch(method, path, { query, body, headers, signal, signingIn });
    if (!answer.headers.get('content-type')?.startsWith('application/json')) {
      return { text: await this.#whole(answer.text()), headers: answer.headers };
    }
    const content = await this.#whole(answer.json());
    const enveloped = content !== null && typeof content === 'object' && 'success' in content && 'result' in content;
    return { result: enveloped ? content.result : content, info: content?.result_info, headers: answer.headers };
  }

  /** The documents of an event stream, one by one; an error in it is raised as an ApiProblem. */
  async *stream(path, { query, body, headers, signal }) {
    const answer = await this.#fetch('POST', path, { query, body, headers, signal });
    const requestId = answer.headers.get('x-request-id') ?? '';
    let pending = '';
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await this.#whole(reader.read());
      if (done) throw new ApiProblem('The answer broke off before its end.', { requestId });
      const events = (pending + value).split('\n\n');
      pending = events.pop();
      for (const event of events) {
        if (!event.startsWith('data: ')) continue; // a comment, which only breaks the silence
        if (event === 'data: [DONE]') return;
        const document = JSON.parse(event.slice(6));
        if (document.errors?.length || document.error) throw problemOf(document, { status: 200, requestId });
        yield document;
      }
    }
  }

  async #fetch(method, path, { query = {}, body, headers = {}, signal, signingIn }) {
    const url = withQuery(path, query);
    const content = body === undefined ? undefined : JSON.stringify(body);
    if (holdsSecret(decodeURIComponent(url)) || holdsSecret(content ?? '')) throw new ApiProblem(SECRET_ADVICE);
    const sent = { authorization: `Bearer ${this.#session.token}`, accept: 'application/json', ...headers };
    if (content !== undefined) sent['content-type'] = 'application/json';
    let answer;
    try {
      answer = await fetch(url, {
        method, body: content, headers: sent, signal, credentials: 'omit', cache: 'no-store', redirect: 'error',
      });
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      this.#connection.lost();
      throw new ApiProblem(method === 'GET' ? GONE : GONE_WRITING);
    }
    this.#connection.answered();
    hearClock(answer.headers.get('date'));
    if (answer.ok) return answer;
    const problem = await this.#problem(answer);
    if (answer.status === 401 && !signingIn) this.#session.end(problem.message);
    throw problem;
  }

  /** What is still on its way of an answer. */
  async #whole(rest) {
    try {
      return await rest;
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      this.#connection.lost();
      throw new ApiProblem('The gateway went away in the middle of its answer.');
    }
  }

  async #problem(answer) {
    const about = {
      status: answer.status,
      requestId: answer.headers.get('x-request-id') ?? '',
      retryAfterS: Number(answer.headers.get('retry-after')) || null,
    };
    try {
      return problemOf(await answer.json(), about);
    } catch {
      const words = STATUS_WORDS[answer.status] ?? `The answer has status ${answer.status} and says no more.`;
      return new ApiProblem(words, about);
    }
  }
}

/** Gives each body a key of its own: the same one, sent again after the gateway went away, does nothing twice. */
export function idempotencyKeys() {
  const keys = new Map();
  return (body) => {
    const text = JSON.stringify(body);
    if (!keys.has(text)) keys.set(text, crypto.getRandomValues(new Uint32Array(4)).join('-'));
    return { 'idempotency-key': keys.get(text) };
  };
}

/** The problem that an error's body describes, without the request's id, which is told beside it. */
function problemOf(body, about) {
  const first = body.errors?.[0] ?? body.error ?? {};
  let message = String(first.message ?? `The answer has status ${about.status} and says no more.`);
  if (about.requestId) message = message.replace(` (${about.requestId})`, '');
  message = message.replace(/^(AiError: )+/, '').replace(/^Bad input: Error: /, '');
  return new ApiProblem(message[0].toUpperCase() + message.slice(1), { ...about, code: first.code ?? 0 });
}

/** A path with a query of the values that are given. */
export function withQuery(path, query) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== '');
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}
