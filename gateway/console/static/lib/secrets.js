// What looks like a credential, so that one pasted into the wrong field goes nowhere. It knows no session.

const API_TOKEN = /hearth_[0-9A-Za-z]{11}_[0-9A-Za-z]{20,}/;
const JSON_WEB_TOKEN = /\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}/;

/** Whether the text has a token in it. */
export function holdsSecret(text) {
  return API_TOKEN.test(text) || JSON_WEB_TOKEN.test(text);
}

export const SECRET_ADVICE =
  'This looks like a token. It was not sent: tokens belong into the sign-in alone. If others could see it, roll it.';
