import json
import subprocess
import sys
from pathlib import Path

import pytest

SAYS_TWICE = "from engine.log import log; log('one', text='a\\nb', where='\\udcff'); log('two'); print('alive')"


def test_an_event_is_one_line_of_json() -> None:
    done = subprocess.run([sys.executable, "-c", SAYS_TWICE], capture_output=True, text=True, check=True)
    one, two = [json.loads(line) for line in done.stderr.splitlines()]
    assert (one["event"], one["text"], two["event"]) == ("one", "a\nb", "two")
    assert one["time"] > 0


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "2> >(exit)"], ids=["full", "closed", "left"])
def test_a_line_that_cannot_be_written_is_lost(redirection: str) -> None:
    if "full" in redirection and not Path("/dev/full").exists():
        pytest.skip("only Linux has a disk that is always full")
    command = ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, SAYS_TWICE]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n")
