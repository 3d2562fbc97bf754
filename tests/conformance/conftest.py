from collections.abc import Iterator

import pytest

from tests.conformance.server import Target, target


@pytest.fixture(scope="session")
def hearth_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One server for all SDKs and examples."""
    with target(tmp_path_factory.mktemp("conformance")) as running:
        yield running
