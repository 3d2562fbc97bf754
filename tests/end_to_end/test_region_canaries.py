"""Nothing of a bound account's calls is found outside its region, and others' calls are."""

from pathlib import Path

import pytest

from benchmarks.gateway.region_canaries import complaints, look_for_canaries
from tests.support import network

pytestmark = pytest.mark.skipif(not network.possible(), reason="it takes root on Linux to make network namespaces")

LIMIT_S = 300.0


def test_a_bound_account_s_texts_stay_inside_with_a_gateway_and_a_machine_set_wrongly(tmp_path: Path) -> None:
    findings = look_for_canaries(tmp_path, 150, 100, LIMIT_S)
    assert complaints(findings) == []
    assert findings.bound.total() == 0, findings.bound
