"""A picture of a run: time over size, and how much faster each engine is than MPI's own."""

COLORS = {  # the same in every panel, whoever is left out
    "ringcomm reg": "C0",
    "ringcomm": "C9",
    "native": "C1",
    "gloo": "C2",
    "torch": "C3",
    "memcpy": "C7",
}


def draw(found, path):
    """Write the picture to `path`; each collective, dtype and operator is a row of two panels."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    series = by_title(found["rows"])
    n = max(len(series), 1)
    figure = Figure(figsize=(12.0, 4.5 * n), layout="tight")
    panels = figure.subplots(n, 2, squeeze=False)
    for (title, lines), (left, right) in zip(series.items(), panels, strict=False):
        base = dict(lines.get("native", lines.get("memcpy", ())))
        name = "MPI's" if "native" in lines else "memcpy's"
        for label, points in lines.items():
            style = {"marker": ".", "label": label, "color": COLORS.get(label)}
            left.loglog(*zip(*points, strict=True), **style)
            speedups = [(x, base[x] / y) for x, y in points if x in base]
            if speedups:
                right.loglog(*zip(*speedups, strict=True), **style)
        dress(left, f"{title}, {found['size']} ranks", "time (us), lower is better")
        dress(right, found["mpi"], f"{name} time / time, higher is better")
    figure.savefig(path)


def by_title(rows):
    """Return title -> label -> [(nbytes, us)], in place where the engine has that form."""
    found = {}
    for row in sorted(rows, key=lambda row: row["in_place"]):
        if row["time_us"] is not None and row["nbytes"]:
            title = " ".join(filter(None, (row["collective"], row["dtype"], row["op"])))
            label = row["engine"] + " reg" * (row["buffers"] == "registered")
            found.setdefault(title, {}).setdefault(label, {})[row["nbytes"]] = row["time_us"]
    return {
        title: {label: sorted(points.items()) for label, points in of_title.items()}
        for title, of_title in found.items()
    }


def dress(panel, title, what):
    panel.set(title=title, xlabel="size (bytes)", ylabel=what)
    panel.grid(True, which="major", alpha=0.4)
    panel.legend()
