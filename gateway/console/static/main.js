// Starts the console: who is signed in decides whether the pages or the sign-in are shown. It draws nothing itself.

import { Api } from './lib/api.js';
import { Connection } from './lib/connection.js';
import { Session } from './lib/session.js';
import { Shell } from './lib/shell.js';
import { showSignIn } from './lib/sign_in.js';
import { applyTheme } from './lib/theme.js';

applyTheme();

const session = new Session();
const connection = new Connection();
const api = new Api(session, connection);
let shell = null;

/** Shows what belongs to the session as it is now; `reason` is why the one before has ended. */
function show(reason = '') {
  shell?.close();
  shell = null;
  if (session.identity) {
    shell = new Shell({ session, connection, api });
  } else {
    showSignIn({ session, connection, api, reason });
  }
}

session.addEventListener('change', (event) => show(event.detail?.reason));
connection.addEventListener('change', async () => {
  if (connection.away || !session.waits) return;
  await session.resume(api);
  show();
});
await session.resume(api);
show();
