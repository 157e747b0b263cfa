"""`ringcomm bench`: command.py runs it; runner.py measures, pattern.py knows the right answers.

docs/benchmarks.md says how to read it. Comparisons with other libraries are in ci/bench.
"""
