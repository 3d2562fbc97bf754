"""Lines of children: all of them on one output in one form, and in their files as they were."""

import io
import json
import os
import signal
import sys
import time
import tracemalloc
from pathlib import Path

from engine.process.rotated_file import RotatedFile
from gateway.commands.access.child_process import ChildLines, ChildProcess, LineOutput
from tests.support.waiting import wait_for

SPEAKS = """
import sys, warnings
print('{"time": 1.0, "event": "one", "text": "a"}', flush=True)
print("plain", file=sys.stderr)
warnings.warn("a library's warning")
raise RuntimeError("the end")
"""


def run(program: str, folder: Path, output: LineOutput) -> ChildProcess:
    lines = ChildLines("child", RotatedFile(folder / "child.log", 1 << 20, 1), output)
    child = ChildProcess("child", [sys.executable, "-c", program], lines, signal.SIGKILL, {})
    child.start(time.monotonic())
    return child


def test_every_line_of_a_child_is_one_of_json_that_names_it(tmp_path: Path) -> None:
    written = io.StringIO()
    output = LineOutput(written, text=False)
    child = run(SPEAKS, tmp_path, output)
    wait_for(lambda: child.poll(time.monotonic()) == 1)
    assert child.lines.last().endswith("RuntimeError: the end")
    output.tell("that was all")
    output.close()
    events = [json.loads(line) for line in written.getvalue().splitlines()]
    assert {event["process"] for event in events} == {"child", "serve"}
    texts = [event.get("text", "") for event in events]
    assert (events[0]["event"], texts[0]) == ("one", "a") or "plain" in texts
    assert any("a library's warning" in text for text in texts)
    assert events[-1]["event"] == "that was all"
    assert "plain\n" in (tmp_path / "child.log").read_text()


def test_people_get_text(tmp_path: Path) -> None:
    written = io.StringIO()
    output = LineOutput(written, text=True)
    child = run(SPEAKS, tmp_path, output)
    wait_for(lambda: child.poll(time.monotonic()) == 1)
    child.lines.last()
    output.close()
    lines = written.getvalue().splitlines()
    assert all(line.startswith("[child] ") for line in lines)
    assert any(line.endswith(" one text=a") for line in lines)


def test_a_child_goes_on_where_nobody_reads_its_parents_output(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    output = LineOutput(open(writing, "w"), text=True)  # noqa: SIM115 its end breaks
    child = run("for n in range(40_000): print(n, 'x' * 100)", tmp_path, output)
    wait_for(lambda: child.poll(time.monotonic()) == 0, 30)
    assert child.lines.last(30).splitlines()[-1].startswith("39999 ")
    os.close(reading)
    output.close()


def test_lines_are_read_without_a_new_piece_of_memory_for_each(tmp_path: Path) -> None:
    """Pieces as long as the longest line, of which a short one stays, would leave the heap with holes."""
    written = io.StringIO()
    lines = ChildLines("child", RotatedFile(tmp_path / "log", 1 << 20, 1), LineOutput(written, text=True))
    pipe = lines.open()
    tracemalloc.start()
    try:
        for number in range(5):
            os.write(pipe, f"line {number}\n".encode())
            wait_for(lambda number=number: f"line {number}" in written.getvalue())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        os.close(pipe)
    assert lines.last().endswith("line 4")
    assert peak < 32 << 10
