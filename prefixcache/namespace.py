"""What separates cached prefixes and what bounds them: values that callers make. It does not know the callers."""

from typing import NamedTuple

ScopeKey = tuple[int, bytes]


class Namespace(NamedTuple):
    """All that must be equal before KV may be shared. A scope is (scope_kind, scope_id), over all its namespaces.

    `behind`: the number of the public block that its tokens begin after; 0: no public block comes before them.
    """

    model_revision: str
    adapter_revision: str
    tokenizer: str
    kv_layout: str
    block_tokens: int
    scope_kind: int
    scope_id: bytes
    epoch: int
    behind: int = 0

    @property
    def scope(self) -> ScopeKey:
        return self.scope_kind, self.scope_id


class CacheShare(NamedTuple):
    """Cached blocks of one account, over all its scopes. Below `floor` it loses none while another account is above its
    own floor; above `cap` it keeps only what is in use."""

    floor: int = 0
    cap: int | None = None


class RetentionPolicy(NamedTuple):
    """How the blocks of a lookup are kept: for which account, how many of them, and for how many seconds after their
    last use they are found; None: until they are evicted."""

    account: bytes
    share: CacheShare = CacheShare()
    keep_s: float | None = None
