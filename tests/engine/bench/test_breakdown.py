from engine.bench.breakdown import kernel_times
from engine.bench.geometries import RooflineBound

BOUND = RooflineBound(weights_bytes=1000, head_bytes=100, kv_token_bytes=10, attention_flop=1)


def test_a_step_is_its_kernels_and_what_is_idle() -> None:
    ran = [("_multiply_skinny", 0.0, 6.0), ("_narrow_tiles", 7.0, 9.0), ("_multiply_skinny", 20.0, 26.0)]
    parts = {part.kind: part for part in kernel_times(ran, 2, BOUND, keys=5)}
    assert (parts["linear"].launches, parts["linear"].us) == (1, 6)
    assert parts["linear"].bytes_ == 1000
    assert parts["attention"].bytes_ == 50
    assert parts["idle"].us == (1 + 11) / 2
    assert sum(part.share for part in parts.values()) == 1


def test_kernels_that_overlap_are_not_idle_time() -> None:
    parts = {part.kind: part for part in kernel_times([("a", 1.0, 5.0), ("b", 2.0, 4.0), ("c", 5.0, 6.0)], 1, BOUND, 0)}
    assert parts["idle"].us == 0


def test_bandwidth_is_bytes_over_time() -> None:
    (linear, _) = kernel_times([("nvjet_x", 0.0, 2.0)], 1, BOUND, 0)
    assert linear.terabytes_per_s == 1000 / 2e-6 / 1e12
