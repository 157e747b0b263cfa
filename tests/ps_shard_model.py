"""What a partition of a hash table does, said in plain Python: the oracle of test_ps_shard.py."""

import math

import numpy as np

from ringcomm import _core

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
STATELESS = (0, 1)


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def stream_bits(seed, table, key, dim):
    start = mix((mix((mix((seed + GOLDEN) & MASK) + table) & MASK) + key) & MASK)
    return np.array([mix((start + (j + 1) * GOLDEN) & MASK) for j in range(dim)], np.uint64)


MIDDLE = (
    [2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4,
     4.5921953931549871457e4, 1.3731693765509461125e4, 1.9715909503065514427e3,
     1.3314166789178437745e2, 3.3871328727963666080e0],
    [5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4,
     2.1213794301586595867e4, 5.3941960214247511077e3, 6.8718700749205790830e2,
     4.2313330701600911252e1, 1.0],
)  # fmt: skip
TAIL = (
    [7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1,
     1.27045825245236838258e0, 3.64784832476320460504e0, 5.76949722146069140550e0,
     4.63033784615654529590e0, 1.42343711074968357734e0],
    [1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2,
     1.48103976427480074590e-1, 6.89767334985100004550e-1, 1.67638483018380384940e0,
     2.05319162663775882187e0, 1.0],
)  # fmt: skip
FAR = (
    [2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3,
     2.65321895265761230930e-2, 2.96560571828504891230e-1, 1.78482653991729133580e0,
     5.46378491116411436990e0, 6.65790464350110377720e0],
    [2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5,
     7.86869131145613259100e-4, 1.48753612908506148525e-2, 1.36929880922735805310e-1,
     5.99832206555887937690e-1, 1.0],
)  # fmt: skip


def ratio(coefficients, r):
    num, den = (np.full_like(r, c[0]) for c in coefficients)
    for n, d in zip(coefficients[0][1:], coefficients[1][1:], strict=True):
        num, den = num * r + n, den * r + d
    return num / den


def log(x):
    m, exponent = np.frexp(x)
    is_low = m < 0.70710678118654752
    m, exponent = np.where(is_low, m * 2, m), exponent - is_low
    s = (m - 1) / (m + 1)
    z, total = s * s, np.zeros_like(x)
    for k in range(23, 2, -2):
        total = (total + 1.0 / k) * z
    return exponent * 0.69314718055994531 + 2 * (s + s * total)


def normal_points(p):
    """The inverse of the standard normal distribution function (AS 241)."""
    q = p - 0.5
    r = np.sqrt(-log(np.where(q <= 0, p, 1 - p)))
    tail = np.where(r <= 5, ratio(TAIL, r - 1.6), ratio(FAR, r - 5))
    middle = ratio(MIDDLE, 0.180625 - q * q) * q
    return np.where(np.abs(q) <= 0.425, middle, np.where(q < 0, -tail, tail))


def initial(init, table, key, dim):
    """A new row in float64."""
    if init.code == 0:
        return np.full(dim, init.parameters[0])
    bits = stream_bits(init.seed, table, key, dim)
    if init.code == 1:
        low, high = init.parameters
        return low + (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 * (high - low)
    u = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    if init.code == 2:
        mean, std = init.parameters
        return mean + std * normal_points(u)
    mean, std, least, most, low, high = init.parameters
    return np.clip(mean + std * normal_points(low + u * (high - low)), least, most)


class Row:
    def __init__(self, values, slots):
        self.values, self.slots = values, slots
        self.count = self.steps = 0
        self.time = 0.0

    @property
    def packed_slots(self):
        return np.concatenate([*self.slots, np.zeros(0, self.values.dtype)])


class Model:
    """A dict of rows."""

    def __init__(
        self,
        dim,
        updater,
        init,
        *,
        table=0,
        dtype=np.float32,
        min_count=1,
        ttl_s=math.inf,
        max_rows=1 << 32,
        is_lfu=False,
    ):
        self.dim, self.updater, self.init, self.table = dim, updater, init, table
        self.dtype, self.min_count = dtype, min_count
        self.ttl_s, self.max_rows, self.is_lfu = ttl_s, max_rows, is_lfu
        self.rows, self.seen = {}, {}

    def new_values(self, key):
        return initial(self.init, self.table, key, self.dim).astype(self.dtype)

    def gather(self, keys, missing):
        new = self.new_values if missing == "init" else lambda key: np.zeros(self.dim, self.dtype)
        return [self.rows[k].values if k in self.rows else new(k) for k in keys]

    def add(self, key):
        slots = self.updater.new_slots((1, self.dim), self.dtype)
        self.rows[key] = Row(self.new_values(key), slots)
        self.seen.pop(key, None)

    def push(self, keys, grads, updater, now):
        applied = rejected = admitted = 0
        for key in dict.fromkeys(keys):
            if key not in self.rows:
                self.seen[key] = self.seen.get(key, 0) + 1
                if self.seen[key] < self.min_count:
                    rejected += 1
                    continue
                self.add(key)
                admitted += 1
            applied += 1
            self.update(self.rows[key], [g for k, g in zip(keys, grads, strict=True) if k == key],
                        updater, now)  # fmt: skip
        return applied, rejected, admitted

    def update(self, row, grads, updater, now):
        total = np.zeros(self.dim)
        for grad in grads:
            total = total + grad.astype(np.float64)
        is_step = updater.code not in STATELESS or updater.code == self.updater.code
        row.count, row.steps, row.time = row.count + 1, row.steps + is_step, now
        grad = grads[0].astype(self.dtype) if len(grads) == 1 else total.astype(self.dtype)
        args = (updater.code, updater.hyper, max(row.steps, 1), row.values, row.values)
        _core.apply_update(*args, row.slots, grad)

    def erase(self, keys):
        n = 0
        for key in keys:
            self.seen.pop(key, None)
            n += self.rows.pop(key, None) is not None
        return n

    def evict(self, now):
        victims = [k for k, row in self.rows.items() if now - row.time >= self.ttl_s]
        left = [k for k in self.rows if k not in set(victims)]
        rows = self.rows
        left.sort(key=lambda k: (rows[k].count if self.is_lfu else 0, rows[k].time, k))
        victims += left[: max(0, len(left) - self.max_rows)]
        for key in victims:
            del self.rows[key]
        return victims
