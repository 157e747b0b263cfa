"""Jobs of thousands of ranks: one of them is real, see ci/bench/scale.py."""

from bench import scale


def test_an_operation_costs_python_as_much_among_thousands_as_among_few():
    def least_s(size):
        costs = scale.costs(size, summary=min)
        return [costs[what][2] for what in ("unnamed operation", "named operation")]

    for few, many in zip(least_s(64), least_s(16384), strict=True):
        assert many < 4 * few  # 10 to 14 times where each operation went through all of its group
