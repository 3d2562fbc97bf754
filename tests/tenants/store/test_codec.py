import msgspec

from tenants.records.accounts import Plan
from tenants.store.codec import plan_document, read_plan


def test_a_plan_is_written_so_that_earlier_versions_read_it_unless_it_is_strict() -> None:
    """They refuse fields that they do not know."""
    assert "strict" not in msgspec.json.decode(plan_document(Plan("team", weight=2.0)))
    for plan in (Plan("team", weight=2.0), Plan("bank", strict=True)):
        assert read_plan(plan_document(plan)) == plan
