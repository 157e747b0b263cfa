"""A hash table as a dict."""

import numpy as np

DIM = 3


class Model:
    """A table as a dict: SGD(1) on integers, so that every sum is exact."""

    def __init__(self, min_count, ttl):
        self.min_count, self.ttl = min_count, ttl
        self.rows, self.times, self.pushes, self.seen = {}, {}, {}, {}

    def push(self, keys, grads, now):
        rejected = 0
        for key in dict.fromkeys(keys):
            if key not in self.rows:
                self.seen[key] = self.seen.get(key, 0) + 1
                if self.seen[key] < self.min_count:
                    rejected += 1
                    continue
                del self.seen[key]
                self.rows[key], self.pushes[key] = np.full(DIM, 5.0), 0
            self.times[key] = now
            self.pushes[key] += 1
            self.rows[key] -= sum(g for k, g in zip(keys, grads, strict=True) if k == key)
        return rejected

    def pull(self, keys, missing):
        new = np.full(DIM, 5.0 if missing == "init" else 0.0)
        return np.array([self.rows.get(key, new) for key in keys]).reshape(-1, DIM)

    def erase(self, keys):
        erased = {key for key in keys if key in self.rows}
        for key in keys:
            self.seen.pop(key, None)
        for key in erased:
            del self.rows[key], self.times[key], self.pushes[key]
        return len(erased)

    def evict(self, now):
        return self.erase_rows([k for k, t in self.times.items() if now - t >= self.ttl])

    def erase_rows(self, keys):
        for key in keys:
            del self.rows[key], self.times[key], self.pushes[key]
        return len(keys)
