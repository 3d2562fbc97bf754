"""The `hearth` command: parses the command line and calls one module of gateway/commands. It does nothing itself."""

import argparse
import sys
from collections.abc import Sequence

from gateway.commands import (
    accounts,
    audit,
    backup,
    bench,
    doctor,
    gateway,
    machine,
    models,
    plans,
    pull,
    restore,
    serve,
    tokens,
    top,
    usage,
)
from gateway.config import SettingsError

_DESCRIPTION = """\
Hearth: an open, self-hosted Workers AI. Many tenants, one fire.

  hearth serve                       the gateway, one machine and its replicas; prints your first call
  hearth accounts create NAME        a tenant and its first token
  hearth pull Qwen/Qwen3-0.6B        a model from the Hugging Face hub
  hearth top                         machines, GPUs and models, live
  hearth doctor                      what is here, and what is wrong
"""
_EPILOG = (
    "Settings are read from hearth.toml in the current folder, or from --config. `hearth doctor --settings` lists them."
)


def parser() -> argparse.ArgumentParser:
    """The whole command line; compose.yaml and the README are tested against it."""
    whole = argparse.ArgumentParser(
        prog="hearth", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", required=True)
    tenants = (accounts, tokens, plans, usage, audit)
    for command in (serve, gateway, machine, *tenants, backup, restore, models, pull, top, bench, doctor):
        command.add(commands)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 done, 1 it could not be done (said on stderr), 2 wrong usage."""
    options = parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except SettingsError as error:
        print(f"hearth: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left, e.g. `| head`
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
