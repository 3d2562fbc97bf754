"""A home cell's answers to gateways of other cells: whose credential that is, what has changed, what is lent. The
certificate says who asks."""

from collections.abc import Sequence

from gateway.cells.messages import CellAnswer, CellQuestion, Lend, LookUp, Refresh, Settle
from gateway.identity.host_identity import HostIdentity
from tenants.auth.accounts import AccountService
from tenants.auth.copies import AccountCopy, KnownCopy, stamp
from tenants.auth.errors import AccountSuspended, Unauthenticated
from tenants.limits.lending import LeaseRefused, QuotaLender
from tenants.records.accounts import Account
from tenants.records.holds import Granted
from tenants.records.tokens import TokenDigest
from tenants.store.protocol import Clock, Store, StoreUnavailable


class CellService:
    """Answers from this cell's store."""

    def __init__(self, store: Store, accounts: AccountService, lender: QuotaLender, clock: Clock) -> None:
        self._store = store
        self._accounts = accounts
        self._lender = lender
        self._clock = clock

    async def answer(self, question: CellQuestion, peer: HostIdentity) -> CellAnswer:
        """What to say to a gateway of another cell."""
        try:
            match question:
                case LookUp():
                    return await self._look_up(question.credential, peer.region)
                case Refresh():
                    return await self._refresh(question.known, peer.region)
                case Lend():
                    account = await self._store.accounts.get(question.request.account_id)
                    if account is not None and not _may_be_served(account, peer.region):
                        return CellAnswer(refused="the account may not be served in the region of that gateway")
                    decision = await self._lender.lend(peer.cluster, question.request)
                    if isinstance(decision, Granted):
                        return CellAnswer(granted=decision)
                    return CellAnswer(denied=decision)
                case Settle():
                    await self._lender.settle(peer.cluster, question.returned)
                    return CellAnswer()
        except LeaseRefused as refusal:
            return CellAnswer(refused=str(refusal))
        except StoreUnavailable as outage:
            return CellAnswer(away=str(outage))

    async def _look_up(self, credential: str, region: str) -> CellAnswer:
        """The copy of what a credential opens, which leaves for a region that its account allows alone."""
        try:
            caller = await self._accounts.verify(credential)
        except AccountSuspended:
            return CellAnswer(suspended=True)
        except Unauthenticated as refusal:
            return CellAnswer(unknown=str(refusal))
        if not _may_be_served(caller.account, region):
            return CellAnswer(region=region, regions=list(caller.account.settings.regions))
        proof = self._accounts.digest(credential).digest
        copy = await self._copy(caller.token_id, proof)
        return CellAnswer(unknown="it was revoked") if copy is None else CellAnswer(copies=[copy])

    async def _refresh(self, known: Sequence[KnownCopy], region: str) -> CellAnswer:
        copies: list[AccountCopy | None] = []
        gone = []
        for place, each in enumerate(known):
            copy = await self._copy(each.token_id, each.proof)
            if copy is not None and not _may_be_served(copy.account, region):
                copy = None  # the next look-up says why
            if copy is None:
                gone.append(place)
            copies.append(None if copy is None or stamp(copy) == each.seen else copy)
        return CellAnswer(copies=copies, gone=gone)

    async def _copy(self, token_id: str, proof: bytes) -> AccountCopy | None:
        """The account and the token, where this secret opens it now; suspension is for the borrower to see."""
        row = await self._store.accounts.token(token_id)
        if row is None or row[2].home:
            return None
        token, digests, account = row
        opens = any(digest.digest == proof and _holds(digest, self._clock()) for digest in digests)
        return AccountCopy(account, token, proof) if opens and token.revoked_at is None else None


def _may_be_served(account: Account, region: str) -> bool:
    return not account.settings.regions or region in account.settings.regions


def _holds(digest: TokenDigest, now_s: float) -> bool:
    return digest.until is None or now_s < digest.until
