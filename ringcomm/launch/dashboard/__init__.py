"""`ringcomm dashboard`: a page about live jobs or a run. static/ has a copy of uPlot (MIT)."""
