"""Random lives of a replica over the stamp engine; see tests/engine/scheduling/simulation/replica.py for what is
checked.

And the proof that they can fail: builds that are broken on purpose are found out.
"""

import importlib
import sys
import types
from collections import Counter
from pathlib import Path

import pytest

from engine.kv_blocks import kv_manager
from engine.scheduling import intake, running, scheduler, step_loop, token_budget, waiting
from engine.sequences import validation
from tests.engine.scheduling.simulation import replica as simulated
from tests.engine.scheduling.simulation.replica import Chaos


@pytest.mark.parametrize("first", range(0, 600, 150))
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
        "forced_tokens",
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
        "bounded_rows",
    ):
        assert seen[what] > 10, f"{what}: {seen[what]}"


# module, what its source says, what the broken build says instead
BREAKS = {
    "tenants share one prefix cache": ("sequences.validation", "scope_id=scope.id", 'scope_id=b"x" * 16'),
    "kinds of scope are not told apart": ("sequences.validation", "scope_kind=int(scope.kind)", "scope_kind=1"),
    "a raised epoch wipes nothing": ("sequences.validation", "epoch=scope.epoch", "epoch=0"),
    "requests without a scope share": (
        "sequences.validation",
        "scope.kind == ScopeKind.REQUEST or not scope.id",
        "False",
    ),
    "choices have the same seed": ("sequences.validation", "sampling.seed + choice", "sampling.seed"),
    "the prompt's last token is not computed": (
        "kv_blocks.kv_manager",
        "self.block_tokens : -1]",
        "self.block_tokens :]",
    ),
    "a block that is not full is shared": (
        "kv_blocks.kv_manager",
        "sequence.computed // self.block_tokens\n        assert",
        "-(-sequence.computed // self.block_tokens)\n        assert",
    ),
    "a duplicate is freed and still read": (
        "kv_blocks.kv_manager",
        "sequence.pages[sequence.public_blocks : full] = sequence.lease.blocks",
        "pass",
    ),
    "duplicates leak": ("kv_blocks.kv_manager", "self.pool.free(spare)", "pass"),
    "private blocks leak": ("kv_blocks.kv_manager", "self.pool.free(sequence.private_pages())", "pass"),
    "a lease is never released": (
        "kv_blocks.kv_manager",
        "self._free_of_tree(self.tree.release(sequence.lease))",
        "pass",
    ),
    "one token of the prefix is skipped": (
        "kv_blocks.kv_manager",
        "sequence.launched = len(pages) * self.block_tokens",
        "sequence.launched = len(pages) * self.block_tokens + 1",
    ),
    "blocks are freed while they are read": ("scheduling.running", "if sequence.inflight_steps:", "if False:"),
    "preemption keeps its blocks": (
        "sequences.sequence",
        "self.shared_blocks = self.block_count = 0",
        "self.shared_blocks = 0",
    ),
    "penalties miss the last token": (
        "scheduling.step_plan",
        "(sequence.token_ids, sequence.prompt_tokens)",
        "(sequence.token_ids[:-1], sequence.prompt_tokens)",
    ),
    "a preempted sequence starts twice": (
        "scheduling.scheduler",
        "if sequence.start_order < 0:\n            self._first",
        "if 1:\n            self._first",
    ),
    "a token that is coming is read from another row": (
        "scheduling.step_plan",
        "awaited_token(sequence.sampled_row)",
        "awaited_token(0)",
    ),
    "the last token is computed as well": ("sequences.sequence", "self.launched + 1 < self.max_total_tokens", "True"),
    "a duplicate is free while a flight reads it": (
        "kv_blocks.kv_manager",
        "if in_flight:\n                self._deferred",
        "if False:\n                self._deferred",
    ),
    "spare blocks leak": ("kv_blocks.kv_manager", "self.pool.free(self._deferred)", "pass"),
    "what is sampled for an ended sequence is told": (
        "scheduling.scheduler",
        "if sequence.state == SequenceState.ENDED:\n                continue",
        "",
    ),
    "a step that is taken back is not computed again": (
        "scheduling.scheduler",
        "sequence.launched = sequence.computed",
        "pass",
    ),
    "what is not finite is matched again": (
        "kv_blocks.kv_manager",
        "self.tree.forget(suspect.lease, first)",
        "pass",
    ),
    "a step without memory ends a sequence at once": ("scheduling.scheduler", "if rows == 1 or smallest:", "if True:"),
    "a group reads blocks that only some of it have": (
        "scheduling.prefix_groups",
        "step * (same_N &",
        "step * (True &",
    ),
    "groups outlive their sequences": (
        "scheduling.prefix_groups",
        "slices != self._slices",
        "len(slices) != len(self._slices)",
    ),
    "a group's segment leaves a gap": (
        "scheduling.prefix_groups",
        "first, node.keys, group)",
        "node.keys // 2, node.keys, group)",
    ),
    "prompts are in groups": ("scheduling.scheduler", "sequence if chunk == 1 else None", "sequence"),
    "an account grows past its cap": (
        "scheduling.running",
        "account.running > 1 and account.blocks >= cap",
        "False",
    ),
    "caps of running sequences are forgotten": ("sequences.fair_queue", "self.running < self.terms.sequences", "True"),
    "what an account holds is never let go": ("scheduling.running", "if sequence.block_count:", "if False:"),
    "a request that expired goes on": (
        "scheduling.waiting",
        'self._reject(choices, "it waited for as long as it may; try again later")',
        'self._rejects.append((first, Reject(id, RejectReason.BUSY, "")))',
    ),
    "a prompt is charged again after a preemption": (
        "sequences.sequence",
        "self.charged_tokens += tokens",
        "pass",
    ),
    "secrets are given on": ("kv_blocks.block_pool", "self._secret[blocks] = True", "pass"),
    "erasing waits until blocks are used again": (
        "scheduling.step_loop",
        "self.zero_freed()\n            step",
        "step",
    ),
    "nothing is erased between turns": ("scheduling.step_loop", "sweep()\n        self.zero_freed()", "sweep()"),
    "erasing is done for some of the blocks": ("kv_blocks.block_pool", "list(dict.fromkeys(blocks))", "blocks[1:]"),
    "what is swept is lost": ("kv_blocks.expired_blocks", "self._pool.free(pages)\n        return", "return"),
    "what lies behind a published prefix is found without it": (
        "kv_blocks.kv_manager",
        "behind=self.public_prefixes.pages[public[-1]]",
        "behind=0",
    ),
    "published blocks are freed by their readers": (
        "sequences.sequence",
        "self.held_pages()[self.shared_blocks :]",
        "self.held_pages()[self.shared_blocks - self.public_blocks :]",
    ),
    "published blocks are not kept": (
        "kv_blocks.kv_manager",
        "self._public_leases.append(lease)",
        "self.tree.release(lease)",
    ),
    "others' blocks are put over published ones": (
        "kv_blocks.kv_manager",
        "pages[sequence.public_blocks : full] =",
        "pages[:full] =",
    ),
    "the background runs beside live ones": (
        "scheduling.scheduler",
        "self._config.costs is None and any(live.running_accounts)",
        "False",
    ),
    "the background does not make way": (
        "scheduling.scheduler",
        "if best_effort and not self._best_effort_paused:",
        "if best_effort:",
    ),
    "the background expires": (
        "sequences.validation",
        "submit.deadline_ms and not terms.background",
        "submit.deadline_ms",
    ),
    "a text is not told to its matcher": (
        "sequences.sequence",
        "problem := matcher.accept(token)",
        'problem := ""',
    ),
    "a sequence starts without its grammar": ("scheduling.admission", "if not sequence.awaited:", "if True:"),
    "a text goes on behind its grammar's end": (
        "sequences.sequence",
        " or matcher.finished",
        "",
    ),
    "masks are given to others' rows": (
        "scheduling.step_loop",
        "plan.matchers)",
        "plan.matchers[::-1])",
    ),
    "masks are made of what was known at the launch": (
        "scheduling.step_loop",
        "or len(self._inflight) != 1:",
        "or False:",
    ),
    "an ended row's mask is taken for another's": (
        "scheduling.step_loop",
        "plan.matchers)",
        "[each for each in plan.matchers if each])",
    ),
    "what a step samples is taken behind what was forced": (
        "scheduling.scheduler",
        " and not (unwanted and sequence in unwanted)",
        "",
    ),
    "what was forced is computed beyond the blocks": (
        "scheduling.running",
        " or len(sequence.tokens) > room",
        "",
    ),
    "what was forced is not told to its owner": ("scheduling.intake", "counts[index] += forced", "pass"),
    "a grammar that does not compile is waited for": (
        "scheduling.waiting",
        "self._reject(choices, refused.message, refused.reason)",
        "pass",
    ),
    "the budget is overrun": ("scheduling.token_budget", "shares.append(min(count, left))", "shares.append(count)"),
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
    shared = {
        "SubmitRejected",
        "SequenceState",
    } & original.__dict__.keys()  # the unbroken modules raise and compare them
    broken.__dict__.update({name: getattr(original, name) for name in shared})
    for user, replaced in (
        (simulated, "BlockPool"),
        (simulated, "StepLoop"),
        (simulated, "Scheduler"),
        (simulated, "RequestValidator"),
        (scheduler, "TokenBudget"),
        (token_budget, "StepTime"),
        (scheduler, "PrefixGroups"),
        (simulated, "KVManager"),
        (simulated, "HostBlocks"),
        (simulated, "DiskBlocks"),
        (running, "DiskReads"),
        (simulated, "WindowedGroup"),
        (kv_manager, "ExpiredBlocks"),
        (kv_manager, "usable_behind"),
        (step_loop, "KVExtents"),
        (scheduler, "PrefillAdmission"),
        (intake, "WaitingQueue"),
        (intake, "PendingOutputs"),
        (scheduler, "RunningSequences"),
        (scheduler, "plan_step"),
        (scheduler, "victim_for_turn"),
        (waiting, "FairQueue"),
        (validation, "Sequence"),
    ):
        if replaced in broken.__dict__:
            monkeypatch.setattr(user, replaced, broken.__dict__[replaced])
