// Whether the gateway answers. Once a request got no answer at all it is asked again and again, ever more slowly.

const FIRST_PAUSE_S = 1;
const LONGEST_PAUSE_S = 15;

/** Tells of `change`; `away` says whether the gateway is away, `retryAt` when it is asked next (ms since 1970). */
export class Connection extends EventTarget {
  away = false;
  retryAt = 0;
  #pauseS = FIRST_PAUSE_S;
  #timer = 0;

  /** Says that a request got no answer. */
  lost() {
    if (this.away) return;
    this.away = true;
    this.#pauseS = FIRST_PAUSE_S;
    this.#wait();
  }

  /** Says that a request was answered, with whatever status. */
  answered() {
    if (!this.away) return;
    this.away = false;
    clearTimeout(this.#timer);
    this.dispatchEvent(new Event('change'));
  }

  /** Asks now, where the gateway is away. */
  async retry() {
    clearTimeout(this.#timer);
    if (await this.check()) return;
    this.#pauseS = Math.min(2 * this.#pauseS, LONGEST_PAUSE_S);
    this.#wait();
  }

  /** Whether the gateway answers; says so to all who listen. */
  async check() {
    try {
      await fetch('/healthz', { cache: 'no-store', credentials: 'omit', signal: AbortSignal.timeout(10_000) });
      this.answered();
    } catch {
      this.lost();
    }
    return !this.away;
  }

  #wait() {
    this.retryAt = Date.now() + 1000 * this.#pauseS;
    this.#timer = setTimeout(() => this.retry(), 1000 * this.#pauseS);
    this.dispatchEvent(new Event('change'));
  }
}
