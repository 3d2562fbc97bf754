"""How a router's logits become a choice of experts, as values that kernels take. It needs neither torch nor a GPU."""

import enum
from dataclasses import dataclass


class RouterScores(enum.StrEnum):
    """What a logit becomes: softmax over all experts, softmax over those chosen, or a sigmoid of its own."""

    SOFTMAX = "softmax"
    SOFTMAX_OF_CHOSEN = "softmax of the chosen"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """Each row takes the `chosen` best of `experts` experts.

    normed         the scores of those chosen are divided by their sum.
    scale          what scores are multiplied by at last.
    groups …       where experts lie in several groups of one size, only those of the best `chosen_groups` groups can be
                   chosen; a group is as good as its two best experts together.
    scales_inputs  a score multiplies what its expert takes; else what it gives.
    """

    experts: int
    chosen: int
    scores: RouterScores = RouterScores.SOFTMAX
    normed: bool = False
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    scales_inputs: bool = False
