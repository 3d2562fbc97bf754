"""`hearth credentials`: where the first account of this host is and what opens it, for a shell. It makes none."""

import shlex

import msgspec

from gateway.commands.terminal.options import Json, Source, command_app
from gateway.commands.terminal.output import fail
from gateway.state_dir import read_credentials

_TEACHING = """\
examples:
  eval "$(hearth credentials)"        sets HEARTH, ACCOUNT and TOKEN in this shell, as the pages' examples want them
  hearth credentials --json

They are those that the first `hearth serve` in this folder made and keeps in .hearth/credentials.json. What is printed
holds a secret: anyone who has it calls models as that account.
"""

app = command_app("credentials", "the first account's URL, id and token, for a shell", _TEACHING)


@app.default
def credentials(*, json: Json = False, source: Source) -> int:
    """Print the first account's URL, id and token, for a shell."""
    config = source.load()
    known = read_credentials(config)
    if known is None:
        return fail(f"there are none in {config.credentials_path}: the first `hearth serve` makes them")
    if json:
        print(msgspec.json.encode(known).decode())
    else:
        named = {"HEARTH": known.base_url, "ACCOUNT": known.account_id, "TOKEN": known.token}
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in named.items()))
    return 0
