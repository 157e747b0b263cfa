"""`ringcomm bench`: how fast the collectives are, beside what else could be used.

command.py reads the command line and runs; runner.py times, engines.py says what; pattern.py knows
the right answers; report.py keeps the rows, table.py, plot.py and compare.py show them.
docs/benchmarks.md explains how to read it.
"""
