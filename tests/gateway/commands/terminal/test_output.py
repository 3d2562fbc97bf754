import io
import sys

import pytest

from gateway.commands.terminal.output import format_amount, format_bytes, print_either, print_table

ID = "0" * 32
LONG = "requests " * 30


def test_a_table_in_a_pipe_has_a_line_for_each_row_whatever_its_length(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("ACCOUNT", "LIMITS"), [(ID, LONG), (ID, "[bold]-[/]")])
    heads, first, second = capsys.readouterr().out.splitlines()
    assert heads.split() == ["ACCOUNT", "LIMITS"]
    assert first.split() == [ID, *LONG.split()]
    assert second.split() == [ID, "[bold]-[/]"], "cells are no markup"
    assert heads.index("LIMITS") == first.index("requests")


def test_a_narrow_terminal_folds_long_cells_and_never_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    print_table(("ACCOUNT", "LIMITS"), [(ID, LONG)])
    lines = terminal.getvalue().splitlines()
    assert ID in lines[1]
    assert len(lines) > 5
    assert sum(line.count("requests") for line in lines) > 20


def test_json_is_for_scripts_and_text_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    print_either(True, {"a": "ä"}, lambda: print("text"))
    assert capsys.readouterr().out == '{\n  "a": "ä"\n}\n'
    print_either(False, {"a": 1}, lambda: print("text"))
    assert capsys.readouterr().out == "text\n"


def test_amounts_and_bytes_are_short() -> None:
    assert [format_bytes(count) for count in (0, 1536, 3 << 20, 5 << 40)] == ["0 B", "1.5 KiB", "3.0 MiB", "5120.0 GiB"]
    assert [format_amount(number) for number in (None, 5, 0.5, 1234567.0)] == ["-", "5", "0.5", "1,234,567"]
