"""The tables of the SQLite store, version by version. It does not know what they mean.

`days.held` and `days.open` are the sums over `holds`, the other columns of `days` the sums over `ledger`; `gauges.open`
and `gauges.output_held` are sums over `holds` too. `accounts.sweep_us` is a time before which no hold of it expires.
"""

from typing import Final

from tenants.store.protocol import OTHER_TAGS, TAGGED_MAX

# The first version; what came after it is in MIGRATIONS.
SCHEMA: Final = """
CREATE TABLE accounts (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, created_at INTEGER NOT NULL,
    requests_per_minute INTEGER NOT NULL, micro_neurons_per_day INTEGER NOT NULL,
    concurrent_requests INTEGER NOT NULL, burst INTEGER,
    arrival_us INTEGER NOT NULL DEFAULT 0, sweep_us INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE TABLE tokens (
    id TEXT PRIMARY KEY, account_id TEXT NOT NULL, name TEXT NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER, revoked_at INTEGER, digest BLOB NOT NULL, pepper INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX tokens_of_account ON tokens (account_id);
CREATE TABLE days (
    account_id TEXT NOT NULL, day INTEGER NOT NULL, requests INTEGER NOT NULL, micro_neurons INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    held INTEGER NOT NULL, open INTEGER NOT NULL,
    PRIMARY KEY (account_id, day)
) STRICT, WITHOUT ROWID;
CREATE TABLE holds (
    account_id TEXT NOT NULL, request_id TEXT NOT NULL, day INTEGER NOT NULL, held INTEGER NOT NULL,
    expires_us INTEGER NOT NULL, micro_neurons INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, token_id TEXT NOT NULL, model TEXT NOT NULL,
    started_us INTEGER NOT NULL, total_ms REAL NOT NULL, first_token_ms REAL,
    PRIMARY KEY (account_id, request_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE ledger (
    account_id TEXT NOT NULL, request_id TEXT NOT NULL, day INTEGER NOT NULL, micro_neurons INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    outcome TEXT NOT NULL, token_id TEXT NOT NULL, model TEXT NOT NULL, started_us INTEGER NOT NULL,
    total_ms REAL NOT NULL, first_token_ms REAL,
    PRIMARY KEY (account_id, day, request_id)
) STRICT, WITHOUT ROWID;
"""

# A token's grant, and the seals of its secrets after the newest, as msgpack.
_GRANTS: Final = "ALTER TABLE tokens ADD COLUMN permitted BLOB; ALTER TABLE tokens ADD COLUMN rolled BLOB"

# Accounts are kept as a JSON document; what is counted is counted for subjects (tenants/limits/caps.py), "" for the
# account.
_SUBJECTS: Final = """
CREATE TABLE gauges (
    account_id TEXT NOT NULL, subject TEXT NOT NULL, requests_us INTEGER NOT NULL, input_us INTEGER NOT NULL,
    output_us INTEGER NOT NULL, output_held INTEGER NOT NULL, open INTEGER NOT NULL,
    PRIMARY KEY (account_id, subject)
) STRICT, WITHOUT ROWID;
INSERT INTO gauges SELECT id, '', arrival_us, 0, 0, 0,
    (SELECT count(*) FROM holds WHERE account_id = accounts.id) FROM accounts;
ALTER TABLE accounts RENAME TO old_accounts;
CREATE TABLE accounts (
    id TEXT PRIMARY KEY, created_at INTEGER NOT NULL, revision INTEGER NOT NULL, suspended_at INTEGER,
    plan TEXT NOT NULL, document TEXT NOT NULL, sweep_us INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO accounts SELECT id, created_at, 1, NULL, 'default', json_object('name', name, 'ceiling', json_object(
    'requests_per_minute', requests_per_minute, 'neurons_per_day', micro_neurons_per_day / 1e6,
    'concurrent_requests', concurrent_requests, 'burst', burst)), sweep_us FROM old_accounts;
DROP TABLE old_accounts;
ALTER TABLE days RENAME TO old_days;
CREATE TABLE days (
    account_id TEXT NOT NULL, subject TEXT NOT NULL, day INTEGER NOT NULL, requests INTEGER NOT NULL,
    micro_neurons INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, held INTEGER NOT NULL, open INTEGER NOT NULL,
    PRIMARY KEY (account_id, subject, day)
) STRICT, WITHOUT ROWID;
INSERT INTO days SELECT account_id, '', day, requests, micro_neurons, prompt_tokens, cached_tokens, completion_tokens,
    held, open FROM old_days;
DROP TABLE old_days;
ALTER TABLE tokens ADD COLUMN limits BLOB;
ALTER TABLE holds ADD COLUMN subjects TEXT NOT NULL DEFAULT '';
ALTER TABLE holds ADD COLUMN output INTEGER NOT NULL DEFAULT 0;
ALTER TABLE holds ADD COLUMN rates TEXT NOT NULL DEFAULT '';
ALTER TABLE ledger ADD COLUMN subjects TEXT NOT NULL DEFAULT '';
CREATE TABLE plans (name TEXT PRIMARY KEY, revision INTEGER NOT NULL, document TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE audit (
    account_id TEXT NOT NULL, seq INTEGER NOT NULL, at INTEGER NOT NULL, actor TEXT NOT NULL, action TEXT NOT NULL,
    target TEXT NOT NULL, detail TEXT NOT NULL, seal TEXT NOT NULL,
    PRIMARY KEY (account_id, seq)
) STRICT, WITHOUT ROWID;
CREATE TABLE claims (
    account_id TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, until_s INTEGER NOT NULL,
    PRIMARY KEY (account_id, key)
) STRICT, WITHOUT ROWID;
CREATE TABLE notices (
    id TEXT PRIMARY KEY, account_id TEXT NOT NULL, url TEXT NOT NULL, body BLOB NOT NULL, due_at REAL NOT NULL,
    tries INTEGER NOT NULL, closed_at INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX notices_due ON notices (due_at) WHERE closed_at IS NULL
"""

# A caller's own words for a request.
_TAGS: Final = """
ALTER TABLE holds ADD COLUMN tags TEXT NOT NULL DEFAULT '';
ALTER TABLE holds ADD COLUMN metadata TEXT NOT NULL DEFAULT '';
ALTER TABLE ledger ADD COLUMN tags TEXT NOT NULL DEFAULT '';
ALTER TABLE ledger ADD COLUMN metadata TEXT NOT NULL DEFAULT ''
"""

# What tenants/store/sqlite/batches.py keeps. Items are claimed in the order of their numbers; `until` is the end of a
# lease.
_BATCHES: Final = """
CREATE TABLE batches (
    id TEXT PRIMARY KEY, account_id TEXT NOT NULL, token_id TEXT NOT NULL, model TEXT NOT NULL, items INTEGER NOT NULL,
    keep_s INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, status TEXT NOT NULL,
    ended_at INTEGER, succeeded INTEGER NOT NULL, failed INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX batches_of_account ON batches (account_id, created_at);
CREATE INDEX batches_expiring ON batches (expires_at);
CREATE INDEX batches_open ON batches (model) WHERE ended_at IS NULL;
CREATE TABLE batch_items (
    number INTEGER PRIMARY KEY, batch_id TEXT NOT NULL, place INTEGER NOT NULL, account_id TEXT NOT NULL,
    model TEXT NOT NULL, body BLOB NOT NULL, state INTEGER NOT NULL, until REAL NOT NULL, tries INTEGER NOT NULL,
    result BLOB
) STRICT;
CREATE UNIQUE INDEX batch_items_of_batch ON batch_items (batch_id, place);
CREATE INDEX batch_items_waiting ON batch_items (model, account_id) WHERE state = 0;
CREATE INDEX batch_items_leased ON batch_items (until) WHERE state = 1;
CREATE TABLE batch_lines (
    model TEXT NOT NULL, account_id TEXT NOT NULL, turn REAL NOT NULL, PRIMARY KEY (model, account_id)
) STRICT, WITHOUT ROWID
"""

# Bodies apart from what changes: whatever changes a row writes all of it again, a megabyte of body with it.
_BODIES: Final = """
CREATE TABLE batch_bodies (number INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;
INSERT INTO batch_bodies SELECT number, body FROM batch_items WHERE length(body) > 0;
ALTER TABLE batch_items DROP COLUMN body;
CREATE TRIGGER batch_items_deleted AFTER DELETE ON batch_items BEGIN
    DELETE FROM batch_bodies WHERE number = OLD.number;
END
"""

# `name_key` is of the name in the document, by the function of tenants/records/accounts.py; `delete_at` is when the
# account is to be removed.
_NAMES: Final = """
ALTER TABLE accounts ADD COLUMN name_key TEXT NOT NULL DEFAULT '';
ALTER TABLE accounts ADD COLUMN delete_at INTEGER;
UPDATE accounts SET name_key = name_key(json_extract(document, '$.name'));
CREATE INDEX accounts_named ON accounts (name_key);
CREATE INDEX accounts_deleted ON accounts (delete_at) WHERE delete_at IS NOT NULL
"""

# From version i + 1 to i + 2. A new file goes through all of them as well: there is one way to every version.
MIGRATIONS: Final = (_GRANTS, _SUBJECTS, _TAGS, _BATCHES, _BODIES, _NAMES)
SCHEMA_VERSION: Final = 1 + len(MIGRATIONS)

NEVER_US: Final = 1 << 62  # `accounts.sweep_us` of an account without holds

_USAGE_KEY: Final = "account_id = NEW.account_id AND day = NEW.day AND token_id = NEW.token_id AND model = NEW.model"
# Sums of the ledger, which triggers keep, also for a Hearth that does not know them: what it writes is summed as well,
# and it opens the file. So they are no version of their own. A row stays once it is there, at zero if need be: then all
# records of a set of tags are in one row, whatever came between. `usage_rows` counts a day's rows.
USAGE: Final = f"""
CREATE TABLE usage (
    account_id TEXT NOT NULL, day INTEGER NOT NULL, token_id TEXT NOT NULL, model TEXT NOT NULL, tags TEXT NOT NULL,
    requests INTEGER NOT NULL, micro_neurons INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    PRIMARY KEY (account_id, day, token_id, model, tags)
) STRICT, WITHOUT ROWID;
CREATE TABLE usage_rows (
    account_id TEXT NOT NULL, day INTEGER NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (account_id, day)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER usage_counted AFTER INSERT ON usage BEGIN
    INSERT INTO usage_rows VALUES (NEW.account_id, NEW.day, 1) ON CONFLICT DO UPDATE SET count = count + 1;
END;
CREATE TRIGGER usage_grows AFTER INSERT ON ledger BEGIN
    INSERT INTO usage VALUES (NEW.account_id, NEW.day, NEW.token_id, NEW.model, CASE
        WHEN NEW.tags = '' OR EXISTS (SELECT 1 FROM usage WHERE {_USAGE_KEY} AND tags = NEW.tags) THEN NEW.tags
        WHEN (SELECT count FROM usage_rows WHERE account_id = NEW.account_id AND day = NEW.day) >= {TAGGED_MAX}
            THEN '{OTHER_TAGS}' ELSE NEW.tags END,
        1, NEW.micro_neurons, NEW.prompt_tokens, NEW.cached_tokens, NEW.completion_tokens)
    ON CONFLICT DO UPDATE SET requests = requests + 1, micro_neurons = micro_neurons + excluded.micro_neurons,
        prompt_tokens = prompt_tokens + excluded.prompt_tokens, cached_tokens = cached_tokens + excluded.cached_tokens,
        completion_tokens = completion_tokens + excluded.completion_tokens;
END;
CREATE TRIGGER usage_shrinks AFTER DELETE ON ledger BEGIN
    UPDATE usage SET requests = requests - 1, micro_neurons = micro_neurons - OLD.micro_neurons,
        prompt_tokens = prompt_tokens - OLD.prompt_tokens, cached_tokens = cached_tokens - OLD.cached_tokens,
        completion_tokens = completion_tokens - OLD.completion_tokens
    WHERE {_USAGE_KEY.replace("NEW", "OLD")} AND tags = CASE
        WHEN EXISTS (SELECT 1 FROM usage WHERE {_USAGE_KEY.replace("NEW", "OLD")} AND tags = OLD.tags) THEN OLD.tags
        ELSE '{OTHER_TAGS}' END;
END;
WITH kinds AS (
    SELECT account_id, day, token_id, model, tags, count(*) AS requests, sum(micro_neurons) AS micro_neurons,
        sum(prompt_tokens) AS prompt_tokens, sum(cached_tokens) AS cached_tokens,
        sum(completion_tokens) AS completion_tokens, row_number() OVER (
            PARTITION BY account_id, day ORDER BY min(started_us), token_id, model, tags) AS place
    FROM ledger GROUP BY account_id, day, token_id, model, tags
)
INSERT INTO usage SELECT account_id, day, token_id, model,
    CASE WHEN tags = '' OR place <= {TAGGED_MAX} THEN tags ELSE '{OTHER_TAGS}' END AS shown, sum(requests),
    sum(micro_neurons), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens)
FROM kinds GROUP BY account_id, day, token_id, model, shown
"""

# Slices of budgets that other cells lent this one, a column for each field of QuotaLease; no version of its own either.
LEASES: Final = """
CREATE TABLE IF NOT EXISTS leases (
    account_id TEXT NOT NULL, id TEXT NOT NULL, home TEXT NOT NULL, token_id TEXT NOT NULL, subjects TEXT NOT NULL,
    state INTEGER NOT NULL, amount INTEGER NOT NULL, day INTEGER NOT NULL, begun_us INTEGER NOT NULL,
    until_us INTEGER NOT NULL, used INTEGER NOT NULL, open INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, returned INTEGER NOT NULL,
    PRIMARY KEY (account_id, id)
) STRICT, WITHOUT ROWID
"""

# The hosts that share this store; no version of its own, as a Hearth that does not know them opens the file as well.
CLUSTER: Final = """
CREATE TABLE IF NOT EXISTS cluster (
    kind TEXT NOT NULL, id TEXT NOT NULL, document BLOB NOT NULL, uses INTEGER NOT NULL, PRIMARY KEY (kind, id)
) STRICT, WITHOUT ROWID
"""
