"""`ringcomm bench`: command.py runs it, runner.py measures, exact_inputs.py has the right results.

docs/benchmarks.md explains the output. Comparisons with other libraries are in ci/bench.
"""
