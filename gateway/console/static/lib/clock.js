// The gateway's clock, as its answers tell it. Where the reader's own is wrong, the page still asks for the right days, and
// a token ends when it is to. It knows no calls.

const MINDED_MS = 60_000; // less is what an answer may take, and the header says whole seconds alone
let aheadMs = 0;

/** Takes in an answer's Date header. */
export function hearClock(header) {
  const differs = Date.now() - Date.parse(header ?? '');
  if (!Number.isNaN(differs)) aheadMs = Math.abs(differs) > MINDED_MS ? differs : 0;
}

/** Milliseconds since 1970 by the gateway's clock. */
export const gatewayNow = () => Date.now() - aheadMs;

/** By how many milliseconds the reader's clock is ahead of the gateway's; 0 where nobody minds. */
export const clockAheadMs = () => aheadMs;
