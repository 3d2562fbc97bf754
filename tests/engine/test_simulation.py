"""Random lives of a replica over the stamp engine; see tests/engine/simulation.py for what is checked.

And the proof that they can fail: builds that are broken on purpose are found out.
"""

import importlib
import sys
import types
from collections import Counter
from pathlib import Path

import pytest

from engine import scheduler, waiting
from tests.engine import simulation as simulated
from tests.engine.simulation import Chaos


@pytest.mark.parametrize("first", range(0, 1200, 150))
def test_every_life_ends_with_the_texts_of_solo_runs(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 150):
        try:
            simulation = Chaos(seed).run()
        except BaseException:
            print(f"seed {seed}")
            raise
        seen += Counter(simulation.scheduler.load(draining=False).counters)
        seen["kept_to_rules"] += simulation.kept_to_rules
        seen += simulation.moves
    # What the lives went through, so that a simulation that lost its bite does not pass.
    for what in (
        "preemptions",
        "hit_tokens",
        "finished_stop",
        "finished_length",
        "finished_cancelled",
        "finished_error",
        "not_finite",
        "steps_out_of_memory",
        "spared_keys",
        "erased_blocks",
        "evicted_age_blocks",
        "kept_to_rules",
        "background_rows",
        "preemptions_background",
        "short_of_blocks",
        "failed_sleeps",
        "failed_wakes",
        "kept_blocks",
        "grown_extents",
        "shrunk_extents",
    ):
        assert seen[what] > 10, f"{what}: {seen[what]}"


# module, what its source says, what the broken build says instead
BREAKS = {
    "tenants share one prefix cache": ("sequence", "scope_id=scope.id", 'scope_id=b"x" * 16'),
    "kinds of scope are not told apart": ("sequence", "scope_kind=int(scope.kind)", "scope_kind=1"),
    "a raised epoch wipes nothing": ("sequence", "epoch=scope.epoch", "epoch=0"),
    "requests without a scope share": ("sequence", "scope.kind == ScopeKind.REQUEST or not scope.id", "False"),
    "choices have the same seed": ("sequence", "sampling.seed + choice", "sampling.seed"),
    "the prompt's last token is not computed": ("holdings", "self._block_tokens : -1]", "self._block_tokens :]"),
    "a block that is not full is shared": (
        "holdings",
        "sequence.computed // self._block_tokens\n        assert",
        "-(-sequence.computed // self._block_tokens)\n        assert",
    ),
    "a duplicate is freed and still read": (
        "holdings",
        "sequence.pages[sequence.public : full] = sequence.lease.blocks",
        "pass",
    ),
    "duplicates leak": ("holdings", "self.blocks.give(spare)", "pass"),
    "private blocks leak": ("holdings", "self.blocks.give(sequence.private())", "pass"),
    "a lease is never released": ("holdings", "self.blocks.give(self.tree.release(sequence.lease))", "pass"),
    "one token of the prefix is skipped": (
        "holdings",
        "sequence.launched = len(cached) * self._block_tokens",
        "sequence.launched = len(cached) * self._block_tokens + 1",
    ),
    "blocks are freed while they are read": ("scheduler", "if sequence.flying:", "if False:"),
    "preemption keeps its blocks": ("sequence", "self.shared = self.blocks = 0", "self.shared = 0"),
    "penalties miss the last token": (
        "plan",
        "(tokens, sequence.prompt_tokens)",
        "(tokens[:-1], sequence.prompt_tokens)",
    ),
    "a preempted sequence starts twice": (
        "scheduler",
        "if sequence.ticket < 0:\n            self._first",
        "if 1:\n            self._first",
    ),
    "a token that is coming is read from another row": ("plan", "(-1 - sequence.row,)", "(-1,)"),
    "the last token is computed as well": ("sequence", "self.launched + 1 < self.tokens_max", "True"),
    "a duplicate is free while a flight reads it": (
        "holdings",
        "if in_the_air:\n                self._spare",
        "if False:\n                self._spare",
    ),
    "spare blocks leak": ("holdings", "self.blocks.give(self._spare)", "pass"),
    "what is sampled for an ended sequence is told": (
        "scheduler",
        "if sequence.stage == Stage.ENDED:\n                continue",
        "",
    ),
    "a step that is taken back is not computed again": ("scheduler", "sequence.launched = sequence.computed", "pass"),
    "what is not finite is matched again": (
        "scheduler",
        "self._holdings.tree.forget(sequence.lease, max(0, self._proven(sequence) - sequence.public))",
        "pass",
    ),
    "a step without memory ends a sequence at once": ("scheduler", "if rows == 1 and", "if"),
    "a group reads blocks that only some of it have": ("grouping", "step * (same_N &", "step * (True &"),
    "groups outlive their sequences": ("grouping", "slices != self._slices", "len(slices) != len(self._slices)"),
    "a group's segment leaves a gap": ("grouping", "first, node.keys)", "node.keys // 2, node.keys)"),
    "prompts are in groups": ("scheduler", "sequence if chunk == 1 else None", "sequence"),
    "an account grows past its cap": ("scheduler", "standing.running > 1 and standing.blocks >= cap", "False"),
    "caps of running sequences are forgotten": ("fairness", "self.running < self.terms.sequences", "True"),
    "what an account holds is never let go": ("scheduler", "if sequence.blocks:", "if False:"),
    "a request that expired goes on": (
        "waiting",
        'self._reject(choices, "it waited for as long as it may; try again later")',
        'self._rejects.append((first, Reject(id, RejectReason.BUSY, "")))',
    ),
    "a prompt is charged again after a preemption": ("scheduler", "sequence.counted = upto", "pass"),
    "secrets are given on": ("blocks", "self._secret[taken] = True", "pass"),
    "erasing waits until blocks are used again": ("loop", "self.erase()\n            flight", "flight"),
    "nothing is erased between turns": ("loop", "sweep()\n        self.erase()", "sweep()"),
    "erasing is done for some of the blocks": ("blocks", "list(dict.fromkeys(blocks))", "blocks[1:]"),
    "what is swept is lost": ("holdings", "        self.blocks.give(swept)\n", ""),
    "what lies behind a published prefix is found without it": (
        "holdings",
        "behind=self.published.pages[public[-1]]",
        "behind=0",
    ),
    "published blocks are freed by their readers": (
        "sequence",
        "self.held()[self.shared :]",
        "self.held()[self.shared - self.public :]",
    ),
    "published blocks are not kept": ("holdings", "self._pins.append(lease)", "self.tree.release(lease)"),
    "others' blocks are put over published ones": ("holdings", "pages[sequence.public : full] =", "pages[:full] ="),
    "the background runs beside live ones": (
        "scheduler",
        "self._limits.costs is None and any(self._waiting.queue.running)",
        "False",
    ),
    "the background does not make way": ("scheduler", "if behind and not self._paused:", "if behind:"),
    "the background expires": ("sequence", "submit.deadline_ms and not submit.terms.background", "submit.deadline_ms"),
    "a text is not told to its matcher": ("scheduler", "else matcher.accept(token)", 'else ""'),
    "a sequence starts without its grammar": ("admission", "if each.compilation is None)", "if True)"),
    "a text goes on behind its grammar's end": ("scheduler", " or (matcher is not None and matcher.over)", ""),
    "masks are given to others' rows": ("loop", "for sequence in plan.masked]", "for sequence in plan.masked[::-1]]"),
    "masks are made of what was known at the launch": ("loop", "or len(self._flights) != 1:", "or False:"),
    "an ended row's mask is taken for another's": (
        "loop",
        "matchers = [None if sequence.stage == ended else sequence.matcher for sequence in plan.masked]",
        "matchers = [sequence.matcher for sequence in plan.masked if sequence.stage != ended]",
    ),
    "a grammar that does not compile is waited for": (
        "waiting",
        "self._reject(choices, refused.message, refused.reason)",
        "pass",
    ),
    "the budget is overrun": ("budget", "shares.append(min(count, left))", "shares.append(count)"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_build_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, wrong = BREAKS[name]
    install_broken(module, right, wrong, monkeypatch)
    for seed in range(600):
        try:
            Chaos(seed).run()
        except (AssertionError, ArithmeticError, LookupError, ValueError):
            return
    raise AssertionError(f"600 lives did not notice that {name}")


def install_broken(name: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the simulation use engine/<name>.py with one piece of its source replaced."""
    original = importlib.import_module(f"engine.{name}")
    source = Path(str(original.__file__)).read_text()
    assert source.count(right) == 1, f"the source no longer says {right!r} once"
    broken = types.ModuleType(f"broken_{name}")
    monkeypatch.setitem(sys.modules, broken.__name__, broken)
    exec(compile(source.replace(right, wrong), broken.__name__, "exec"), broken.__dict__)
    for kept in {"Refused", "Stage"} & original.__dict__.keys():  # what the unbroken modules raise and compare
        broken.__dict__[kept] = getattr(original, kept)
    for user, replaced in (
        (simulated, "Blocks"),
        (simulated, "Loop"),
        (simulated, "Scheduler"),
        (simulated, "Door"),
        (scheduler, "Budget"),
        (scheduler, "Groups"),
        (scheduler, "Holdings"),
        (scheduler, "Prompts"),
        (scheduler, "Waiting"),
        (scheduler, "plan_step"),
        (waiting, "FairQueue"),
    ):
        if replaced in broken.__dict__:
            monkeypatch.setattr(user, replaced, broken.__dict__[replaced])
