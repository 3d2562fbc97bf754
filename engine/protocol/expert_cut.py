"""How the experts of a mixture are cut for several ranks: one rule, for what loads them and for what tells of it. It
knows neither tensors nor formats.
"""

import enum


class ExpertCut(enum.StrEnum):
    """What a rank has of the experts: a part of each one's inner size, or some of them whole."""

    INSIDE = "a part of each expert"
    EXPERTS = "whole experts"

    @property
    def text(self) -> str:
        return f"each with {self}"


def expert_cut(ranks: int, experts: int, inner: int, keeps_format: bool = True) -> ExpertCut | None:
    """How so many experts of this inner size are cut; None where neither divides. `keeps_format`: a part of each lies
    in memory in as few bits as the whole.

    Inside is better where both do, since a step of few rows then reads no more on one rank than on another. Where a
    part would need more memory, whole experts are."""
    if inner % ranks == 0 and keeps_format:
        return ExpertCut.INSIDE
    if experts % ranks == 0:
        return ExpertCut.EXPERTS
    return ExpertCut.INSIDE if inner % ranks == 0 else None
