"""`ringcomm bench`: command.py runs it; runner.py measures, pattern.py knows the right answers.

docs/benchmarks.md says how to read it. What compares with other libraries stands in ci/bench.
"""
