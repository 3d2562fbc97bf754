"""The `hearth` command line: finds the command, gives it its settings or the store, and returns its exit status. It
imports a command only when that is called, so that `hearth --help` is quick.
"""

import contextlib
import errno
import functools
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

from cyclopts import App, CycloptsError, Parameter

from engine.process.allocator import keep_one_arena
from gateway import __version__
from gateway.commands.terminal.options import SettingsSource
from gateway.commands.terminal.output import wide_console
from gateway.settings.config import SettingsError

_DESCRIPTION: Final = "Hearth: an open, self-hosted Workers AI. Many tenants, one fire."
_TEACHING: Final = """\
examples:
  hearth serve                       the gateway, one machine and its replicas; prints your first call
  hearth accounts create NAME        a tenant and its first token
  hearth log REQUEST_ID              what became of one request
  hearth pull Qwen/Qwen3-0.6B        a model from the Hugging Face hub
  hearth chat Qwen/Qwen3-0.6B        talk to it
  hearth top                         machines, GPUs and models, live
  hearth doctor                      what is here, and what is wrong

Settings are read from hearth.toml in the current folder, or from --config; `hearth doctor --settings` lists them.
"""
COMMANDS: Final = {
    "serve": "start everything on this host",
    "credentials": "the first account's URL, id and token, for a shell",
    "gateway": "serve HTTP; replicas are on machines",
    "machine": "run this host's replicas",
    "cluster": "hosts that serve together: found, join, list, remove",
    "accounts": "accounts: their limits, plans, settings; export and import",
    "tokens": "mint, list, change, roll and revoke an account's tokens",
    "apply": "plans, accounts, limits and tokens as a file declares them",
    "plans": "what accounts may have: limits, weight, shares of memory",
    "usage": "what accounts have used; check counters against records",
    "audit": "who did what, and whether the log of it is whole",
    "log": "what became of one request",
    "backup": "copy the store and the secret into a folder, also while serving",
    "restore": "bring a backup back, where no server runs",
    "models": "list, show, add, import, remove, warm and compress models",
    "pull": "download a model from the Hugging Face hub",
    "chat": "talk to a model of a running server",
    "machines": "list machines, drain one before it is stopped",
    "top": "watch machines, GPUs and models live",
    "bench": "measure a server, or the engine",
    "doctor": "say what is here and what is wrong",
    "systemd": "print a systemd unit for this host",
    "kubernetes": "print manifests for Kubernetes, or write a Helm chart",
}
_DEPLOYMENT: Final = ("machines", "systemd", "kubernetes")  # commands that are in the folder deployment
_HELP_WIDTH: Final = 120  # where no terminal says how wide it is
_QUIET: Final[dict[str, Any]] = {"print_error": False, "exit_on_error": False}


class UsageError(Exception):
    """A command line that means nothing; `command` is as much of it as names one."""

    def __init__(self, message: str, command: Sequence[str]) -> None:
        super().__init__(message)
        self.command = " ".join(("hearth", *command))


class Invocation(NamedTuple):
    """A command with its arguments; `injected` names what it takes from the session: `source`, or `access` to the store
    that there is, or `new_access` to one that is made where there is none."""

    call: functools.partial[Any]
    injected: frozenset[str]
    source: SettingsSource


def _build() -> App:
    app = App(
        name="hearth",
        help=_DESCRIPTION,
        help_epilogue=_TEACHING,
        help_format="plaintext",
        version=lambda: f"hearth {__version__}",
        default_parameter=Parameter(negative=(), show_default=False, allow_repeating=True),
        suppress_keyboard_interrupt=False,
    )
    for position, (name, summary) in enumerate(COMMANDS.items()):
        folder = "deployment." if name in _DEPLOYMENT else ""
        app.command(f"gateway.commands.{folder}{name}:app", name=name, help=summary, sort_key=position)
    app["--help"].sort_key = app["--version"].sort_key = len(COMMANDS)
    app.meta.default(_session)
    return app


def _session(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[
        str | None, Parameter(metavar="FILE", help="settings (default: hearth.toml if it exists)")
    ] = None,
    state: Annotated[str | None, Parameter(metavar="FOLDER", help="state folder (default: .hearth)")] = None,
) -> tuple[tuple[str, ...], SettingsSource]:
    """Takes the options that every command has, wherever they are written."""
    return words, SettingsSource(config, state)


def parse(words: Sequence[str]) -> Invocation:
    """The command that these words call. Raises UsageError. compose.yaml and the README are tested against it."""
    app = _build()
    try:
        session, bound, _ = app.meta.parse_args([*words], **_QUIET)
        if session is not _session:  # --help or --version
            if _prints_help(session):
                _teach_of_action(app, [word for word in words if not word.startswith("-")])
                bound.arguments["console"] = wide_console(_HELP_WIDTH)
            return Invocation(functools.partial(session, *bound.args, **bound.kwargs), frozenset(), SettingsSource())
        rest, source = session(*bound.args, **bound.kwargs)
        command, bound, injected = app.parse_args(rest, **_QUIET)
    except CycloptsError as error:
        raise UsageError(str(error), error.command_chain or ()) from error
    if _prints_help(command):  # it has actions, and none was named
        names = [name for name in app.parse_commands(rest)[1][-1] if not name.startswith("-")]
        raise UsageError(f"say what to do: {', '.join(names)}", rest)
    return Invocation(functools.partial(command, *bound.args, **bound.kwargs), frozenset(injected), source)


def _teach_of_action(app: App, names: Sequence[str]) -> None:
    """Leaves of what the help teaches the examples of the action alone that these names call, where it has some: those
    of its whole command would be many."""
    chain, apps, _ = app.parse_commands(names)
    if len(chain) < 2 or apps[-1].help_epilogue:
        return
    lines = str(apps[-2].help_epilogue or "").splitlines(keepends=True)
    start = f"  hearth {' '.join(chain)} "
    if own := [line for line in lines if f"{line.rstrip()} ".startswith(start)]:
        rest = [line for line in lines if not line.startswith("  hearth ")]
        apps[-1].help_epilogue = "".join([*rest[:1], *own, *rest[1:]])


def _prints_help(command: object) -> bool:
    return getattr(command, "__func__", None) is App.help_print


def _run(invocation: Invocation) -> int | None:
    if name := next(iter(invocation.injected & {"access", "new_access"}), None):
        from gateway.commands.access.store_access import with_store_access  # only here: it imports the stores

        config, makes = invocation.source.load(), name == "new_access"
        return with_store_access(config, lambda access: invocation.call(**{name: access}), makes=makes)
    injected = {"source": invocation.source} if "source" in invocation.injected else {}
    status: int | None = invocation.call(**injected)
    return status


def _fail_by_system(error: OSError) -> int:
    """Says what no command knew to say better: a full disk, or files of another user."""
    if error.errno == errno.ENOSPC and error.filename is None:  # of standard output, and again at Python's end
        with contextlib.suppress(OSError):
            sys.stdout.close()
    where = f"{error.filename}: " if error.filename else ""
    owner = "; run it as the user that it belongs to, or name others by --config and --state"
    advice = owner if isinstance(error, PermissionError) else ""
    print(f"hearth: {where}{error.strerror or error}{advice}", file=sys.stderr)
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 done, 1 it could not be done (said on stderr), 2 wrong usage."""
    keep_one_arena()
    if argv is None:  # SIGTERM unwinds, so that nothing half written stays; what serves drains on it instead
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        status = _run(parse(sys.argv[1:] if argv is None else argv)) or 0
        sys.stdout.flush()  # where it finds no room, that is said here: as Python ends nobody could
        return status
    except UsageError as error:
        print(f"{error.command}: {error}\nusage: `{error.command} --help` shows options and examples", file=sys.stderr)
        return 2
    except SettingsError as error:
        print(f"hearth: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left, e.g. `| head`
        return 1
    except OSError as error:
        return _fail_by_system(error)


if __name__ == "__main__":
    sys.exit(main())
