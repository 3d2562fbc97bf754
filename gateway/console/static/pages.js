// Every page of the console: one line each, and one module. A page is shown to tokens that have one of the permissions
// it needs. Its module exports `show(page)`, which gets a Page of lib/page.js.

let tries = 0;

/** Imports a module. A browser may remember that a script could not be fetched, so that another try has another address. */
const load = (path) => import(path).catch(() => import(`${path}?try=${++tries}`));

export const PAGES = [
  { path: 'start', title: 'First call', group: 'Build', icon: 'start', needs: ['inference'], module: () => load('./pages/first_call.js') },
  { path: 'playground', title: 'Playground', group: 'Build', icon: 'playground', needs: ['inference'], module: () => load('./pages/playground.js') },
  { path: 'models', title: 'Models', group: 'Build', icon: 'models', needs: ['inference'], module: () => load('./pages/models.js') },
  { path: 'batches', title: 'Batches', group: 'Build', icon: 'batches', needs: ['inference'], module: () => load('./pages/batches.js') },
  { path: 'usage', title: 'Usage', group: 'Team', icon: 'usage', needs: ['usage:read', 'account:admin'], module: () => load('./pages/usage.js') },
  { path: 'limits', title: 'What is left', group: 'Team', icon: 'limits', needs: ['usage:read', 'account:admin'], module: () => load('./pages/limits.js') },
  { path: 'tokens', title: 'Tokens', group: 'Team', icon: 'tokens', needs: ['account:admin'], module: () => load('./pages/tokens.js') },
  { path: 'live', title: 'Machines and models', group: 'Operate', icon: 'machines', needs: ['operator'], module: () => load('./pages/operator/live.js') },
  { path: 'wakes', title: 'Wakes', group: 'Operate', icon: 'live', needs: ['operator'], module: () => load('./pages/operator/wakes.js') },
  { path: 'top', title: 'Busiest now', group: 'Operate', icon: 'limits', needs: ['operator'], module: () => load('./pages/operator/top.js') },
  { path: 'health', title: 'Alerts and store', group: 'Operate', icon: 'alerts', needs: ['operator'], module: () => load('./pages/operator/health.js') },
  { path: 'accounts', title: 'Accounts', group: 'Operate', icon: 'accounts', needs: ['operator'], module: () => load('./pages/operator/accounts.js') },
  { path: 'plans', title: 'Plans', group: 'Operate', icon: 'plans', needs: ['operator'], module: () => load('./pages/operator/plans.js') },
  { path: 'all-usage', title: 'Usage of all', group: 'Operate', icon: 'usage', needs: ['operator'], module: () => load('./pages/operator/all_usage.js') },
  { path: 'audit', title: 'Audit log', group: 'Operate', icon: 'audit', needs: ['operator'], module: () => load('./pages/operator/audit.js') },
];
