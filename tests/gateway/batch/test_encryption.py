"""gateway/batch/encryption.py: what is sealed opens for its own batch, place and purpose, under its own secret."""

import json

import pytest
from cryptography.exceptions import InvalidTag

from gateway.batch.encryption import BatchEncryption, StoredRequest, join_responses

KEPT = StoredRequest(b'{"prompt":"quokka"}', "reference", ("tag",), "{}")


def test_a_request_and_a_result_come_back_and_are_not_to_be_read_meanwhile() -> None:
    safe = BatchEncryption(b"s" * 32).cipher("ann", "one")
    sealed = safe.seal_request(3, KEPT)
    assert safe.open_request(3, sealed) == KEPT
    assert b"quokka" not in sealed
    assert b"reference" not in sealed
    assert safe.open_result(3, safe.seal_result(3, b"quokka")) == b"quokka"
    assert safe.seal_request(3, KEPT) != sealed, "a nonce is used twice"


@pytest.mark.parametrize(
    ("secret", "account", "batch"), [(b"t", "ann", "one"), (b"s", "bob", "one"), (b"s", "ann", "two")]
)
def test_it_opens_for_no_other_secret_account_or_batch(secret: bytes, account: str, batch: str) -> None:
    sealed = BatchEncryption(b"s" * 32).cipher("ann", "one").seal_request(3, KEPT)
    with pytest.raises(InvalidTag):
        BatchEncryption(secret * 32).cipher(account, batch).open_request(3, sealed)


def test_it_opens_at_no_other_place_and_for_no_other_purpose() -> None:
    safe = BatchEncryption(b"s" * 32).cipher("ann", "one")
    sealed = safe.seal_request(3, KEPT)
    with pytest.raises(InvalidTag):
        safe.open_request(4, sealed)
    with pytest.raises(InvalidTag):
        safe.open_result(3, sealed)


def test_results_are_listed_with_their_places() -> None:
    listed = json.loads(join_responses([(0, b'{"success":true}'), (7, b'{"success":false}')]))
    assert listed == [{"id": 0, "success": True}, {"id": 7, "success": False}]
    assert json.loads(join_responses([])) == []
